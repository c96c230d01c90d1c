//! The benchmark: what worker, embedded queue and controller reach on this machine, beside the aim and the machine's own
//! limit, in one run. `tests/bench` runs it.
//!
//! A figure short of its aim is printed and is no failure. A task or request that is lost, run twice or unanswered is one.
//! Queue, worker and controller are the `journeyman` binary, or a program around the library where the handler is in Rust.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints its results")]

mod commands;
mod console;
mod controller;
mod delays;
mod kills;
mod lapin_alone;
mod machine;
#[path = "../host/metadata_service.rs"]
#[allow(dead_code, unreachable_pub, clippy::expect_used, reason = "shared with the tests of the host")]
mod metadata;
mod no_op_worker;
mod notifier;
mod process_trees;
mod programs;
mod requests;
mod scale;
mod screwdriver;
mod staged;
#[path = "../support/mod.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "shared with tests"
)]
mod support;
mod tasks;
mod zookeeper;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use journeyman::task::formats::new_task_id;
use journeyman_platform::http::client::error_chain;
use machine::{Row, load, print};

/// That of the `journeyman` binary, for the workers in this program and for lapin alone.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The measurements, in the order in which they run.
const NAMES: [&str; 19] = [
    "tasks",
    "commands",
    "requests",
    "zookeeper",
    "controller",
    "latency",
    "notice",
    "cancel",
    "idle",
    "leases",
    "staged",
    "delays",
    "screwdriver",
    "notifier",
    "kills",
    "scale",
    "console",
    "trees",
    "start",
];

/// The machine and the size of what is measured.
pub(crate) struct Lab {
    folder: tempfile::TempDir,
    smoke: bool,
}

impl Lab {
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The first for figures, the second to see that the measurement works.
    pub(crate) fn pick<T>(&self, full: T, smoke: T) -> T {
        if self.smoke { smoke } else { full }
    }

    /// A new folder.
    pub(crate) fn fresh(&self, name: &str) -> Outcome<PathBuf> {
        let path = self.path().join(format!("{name}-{}", new_task_id()));
        std::fs::create_dir_all(&path)?;
        Ok(path)
    }

    async fn measure(&self, name: &str) -> Outcome<Vec<Row>> {
        match name {
            "tasks" => self.tasks().await,
            "commands" => self.commands().await,
            "requests" => self.requests().await,
            "zookeeper" => Box::pin(self.zookeeper()).await,
            "controller" => Box::pin(self.controller()).await,
            "latency" => self.latency().await,
            "notice" => self.notice().await,
            "cancel" => self.cancel().await,
            "idle" => self.idle().await,
            "leases" => self.leases().await,
            "staged" => Box::pin(self.staged()).await,
            "delays" => Box::pin(self.delays()).await,
            "screwdriver" => Box::pin(self.screwdriver()).await,
            "notifier" => Box::pin(self.notifier()).await,
            "kills" => Box::pin(self.kills()).await,
            "scale" => Box::pin(self.scale()).await,
            "console" => Box::pin(self.console()).await,
            "trees" => self.trees().await,
            _ => self.start().await,
        }
    }
}

fn main() -> ExitCode {
    journeyman::shim();
    rustls::crypto::ring::default_provider().install_default().ok();
    match run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Outcome<()> {
    match arguments {
        [flag, role] if flag == no_op_worker::FLAG => return runtime(1)?.block_on(no_op_worker::run(role)),
        [flag, role] if flag == lapin_alone::FLAG => return runtime(1)?.block_on(lapin_alone::run(role)),
        _ => {}
    }
    // Cargo passes `--bench`.
    let wanted: Vec<&str> = arguments.iter().map(String::as_str).filter(|argument| *argument != "--bench").collect();
    let (smoke, wanted) = match wanted.as_slice() {
        ["--smoke", rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    // A folder for temporary files is often in memory, where nothing is durable.
    let (place, wanted) = match wanted {
        ["--in", place, rest @ ..] => (*place, rest),
        rest => (env!("CARGO_TARGET_TMPDIR"), rest),
    };
    if wanted.iter().any(|name| !NAMES.contains(name)) {
        return Err(format!("usage: tests/bench [--smoke] [--in FOLDER] [{}]…", NAMES.join("|")).into());
    }
    std::fs::create_dir_all(place)?;
    let lab = Lab { folder: tempfile::tempdir_in(place)?, smoke };
    let names: Vec<&str> = NAMES.into_iter().filter(|name| wanted.is_empty() || wanted.contains(name)).collect();
    let mut rows = Vec::new();
    let measured = runtime(2)?.block_on(async {
        for (at, name) in names.iter().enumerate() {
            eprintln!("{} of {}: {name}", at + 1, names.len());
            let load = load();
            rows.extend(
                lab.measure(name)
                    .await
                    .map_err(|error| format!("{name}: {}", error_chain(&*error)))?
                    .into_iter()
                    .map(|row| (row, load)),
            );
        }
        Ok(())
    });
    if smoke {
        println!("A smoke run: it shows that the measuring works. These are no figures.");
    }
    let profile = Path::new(env!("CARGO_BIN_EXE_journeyman")).parent().and_then(Path::file_name);
    println!("The programs were built in the profile {}.\n", profile.unwrap_or_default().display());
    print(&rows);
    measured
}

fn runtime(threads: usize) -> Outcome<tokio::runtime::Runtime> {
    let mut builder = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    Ok(builder.worker_threads(threads).enable_all().build()?)
}
