//! The figures: what the worker and the embedded queue reach on this machine, beside the aim and the machine's own
//! limit, in one run. `tests/bench` runs it; `tests/bench --smoke` only shows that it works.
//!
//! Nothing here is a test of speed: a figure short of its aim is printed, and is no failure. A task that was lost, run
//! twice or left behind is one. Queue and worker run in processes of their own, started from this very program.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program without an outside, which prints")]

mod contain;
mod controller;
mod ends;
mod fleet;
mod limits;
#[path = "../host/metadata.rs"]
#[allow(dead_code, unreachable_pub, clippy::expect_used, reason = "what the tests of the host use")]
mod metadata;
mod raw;
mod requests;
mod roles;
mod rows;
mod table;
mod watch;

use std::path::Path;
use std::process::ExitCode;

use table::Table;

/// What everything here comes to.
pub(crate) type Done<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// How much is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Size {
    /// Enough for figures.
    Full,
    /// Enough to see that it works.
    Smoke,
}

impl Size {
    /// One of two.
    pub(crate) fn pick<T>(self, full: T, smoke: T) -> T {
        match self {
            Self::Full => full,
            Self::Smoke => smoke,
        }
    }
}

fn main() -> ExitCode {
    journeyman::shim();
    // Some parts ask over HTTP before anything of the library has chosen; where one has, that stays.
    rustls::crypto::ring::default_provider().install_default().ok();
    match run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Done<()> {
    if let [flag, role] = arguments
        && flag == "--role"
    {
        let role: roles::Role = serde_json::from_str(role)?;
        return runtime(role.threads)?.block_on(roles::live(role));
    }
    if let [flag, part, folder] = arguments
        && flag == contain::ALONE
    {
        let rows = runtime(2)?.block_on(contain::here(serde_json::from_str(part)?, Path::new(folder)))?;
        println!("{}", serde_json::to_string(&rows)?);
        return Ok(());
    }
    // Cargo says `--bench`.
    let wanted: Vec<&str> = arguments.iter().map(String::as_str).filter(|argument| *argument != "--bench").collect();
    let (size, wanted) = match wanted.as_slice() {
        ["--smoke", wanted @ ..] => (Size::Smoke, wanted),
        wanted => (Size::Full, wanted),
    };
    // On the disk that is built on: a folder for temporary files is often in memory, where nothing is durable.
    let (place, only) = match wanted {
        ["--in", place, only @ ..] => (*place, only),
        only => (env!("CARGO_TARGET_TMPDIR"), only),
    };
    if only.iter().any(|name| !rows::NAMES.contains(name)) {
        return Err(format!("usage: tests/bench [--smoke] [--in FOLDER] [{}]…", rows::NAMES.join("|")).into());
    }
    let mut table = Table::default();
    let measured = runtime(2)?.block_on(rows::measure(size, Path::new(place), only, &mut table));
    if size == Size::Smoke {
        println!("A smoke run: it shows that the measuring works. These are no figures.");
    }
    println!("{table}");
    measured
}

fn runtime(threads: usize) -> Done<tokio::runtime::Runtime> {
    let mut builder = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    Ok(builder.worker_threads(threads).enable_all().build()?)
}
