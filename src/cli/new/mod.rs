//! `journeyman new`: makes a folder with a handler that runs at once.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use super::exit::{Exit, ExitResult, Failure};
use super::output;
use crate::config::handler_kinds::BUILT_IN;

const UNIT: &str = include_str!("../../../examples/systemd/journeyman.service");
const PROGRAM: &str = include_str!("../../../examples/greet.rs");

/// `journeyman new`
#[derive(Debug, Args)]
pub(super) struct NewArgs {
    /// What the handler is written in
    #[arg(value_enum)]
    language: Language,
    /// Name of the handler and of its folder, which must not exist
    #[arg(value_name = "NAME", value_parser = parse_name)]
    name: String,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Language {
    Rust,
    Python,
    Shell,
}

/// Names that the folder has, or that cargo and the program in it have for something else.
const NO_CRATES: [&str; 9] = ["journeyman", "test", "build", "core", "std", "serde", "self", "crate", "fn"];

/// A name of a crate, of a handler and of a unit.
fn parse_name(text: &str) -> Result<String, String> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    let is_name = is_plain && text.len() <= 32 && text.starts_with(|first: char| first.is_ascii_lowercase());
    let is_taken = BUILT_IN.contains(&text) || NO_CRATES.contains(&text);
    if is_name && !is_taken {
        Ok(text.to_owned())
    } else {
        Err("expected at most 32 lower-case letters, digits and `-`, such as `thumbs`, and no name of journeyman's own"
            .to_owned())
    }
}

/// The crate that this binary was built of, as long as it is there, since a version may not be published.
fn dependency() -> String {
    let source = env!("CARGO_MANIFEST_DIR");
    if Path::new(source).join("Cargo.toml").exists() {
        format!("{{ path = {source:?} }}")
    } else {
        format!("{:?}", env!("CARGO_PKG_VERSION"))
    }
}

pub(super) fn run(NewArgs { language, name }: &NewArgs) -> ExitResult {
    let folder = PathBuf::from(name);
    let fill = |text: &str| text.replace("NAME", name);
    let program = |handler: &str| {
        vec![
            (name.clone(), handler.to_owned(), 0o755),
            ("schema.json".to_owned(), include_str!("schema.json").to_owned(), 0o644),
            ("test".to_owned(), fill(include_str!("test")), 0o755),
            ("journeyman.toml".to_owned(), fill(include_str!("program.toml")), 0o644),
            (format!("{name}.service"), unit(name, "/usr/bin/journeyman"), 0o644),
        ]
    };
    let (files, next) = match language {
        Language::Shell => (program(include_str!("handler.sh")), ["./test", "journeyman dev", "journeyman"]),
        Language::Python => (program(include_str!("handler.py")), ["./test", "journeyman dev", "journeyman"]),
        Language::Rust => {
            let manifest = fill(include_str!("Cargo.toml.template")).replace("JOURNEYMAN", &dependency());
            let files = vec![
                ("Cargo.toml".to_owned(), manifest, 0o644),
                ("src/main.rs".to_owned(), PROGRAM.replace("\"greet\"", &format!("{name:?}")), 0o644),
                (format!("{name}.service"), unit(name, &format!("/usr/local/bin/{name}")), 0o644),
            ];
            (files, ["cargo test", "cargo run -- dev", "cargo run --"])
        }
    };
    let failed = |error: io::Error| {
        let text = format!("cannot make {name}: {error}");
        Failure::new(Exit::HostUnusable, text)
    };
    fs::create_dir(&folder).map_err(failed)?;
    for (path, text, mode) in files {
        write(&folder.join(path), &text, mode).map_err(failed)?;
    }
    let [test, serve, program] = next;
    output::print(&format!(
        "made {name}\n\n  cd {name}\n  {test}\n  {serve}\n\nand in another terminal, in the same folder:\n\n  \
         {program} task create --wait --queue dev/{name} --payload '{{\"name\":\"world\"}}'\n  {program} task log TASK\n"
    ))?;
    Ok(Exit::Success)
}

fn write(path: &Path, text: &str, mode: u32) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    fs::write(path, text)?;
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// The unit of a worker with this handler. Its configuration and token are in `/etc/NAME`.
fn unit(name: &str, program: &str) -> String {
    UNIT.replace("/usr/bin/journeyman", program)
        .replace("/etc/journeyman/journeyman.toml", &format!("/etc/{name}/journeyman.toml"))
        .replace("/etc/journeyman/access-token", &format!("/etc/{name}/access-token"))
        .replace("Directory=journeyman", &format!("Directory={name}"))
        .replace("/var/lib/journeyman", &format!("/var/lib/{name}"))
        .replace("systemctl edit journeyman", &format!("systemctl edit {name}"))
        .replace("Worker for a task queue", &format!("Worker for {name}"))
}
