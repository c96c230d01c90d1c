//! `journeyman new`: its folders hold handlers that run at once.

use std::path::PathBuf;
use std::process::Command;

use crate::cli::host::Host;
use crate::cli::server::Server;
use crate::cli::support::{journeyman, run};

fn path_with_journeyman() -> std::ffi::OsString {
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_journeyman"));
    let own = binary.parent().expect("a folder").to_owned();
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths([own].into_iter().chain(std::env::split_paths(&path))).expect("a path")
}

#[test]
fn a_new_handler_passes_its_test_and_runs_at_once() {
    for language in ["shell", "python"] {
        let (host, folder) = (Host::new(), "greet");
        let made = host.run(&["new", language, folder]);
        assert_eq!(made.code, 0, "{}", made.err);
        let inside = host.join(folder);
        let mut test = Command::new("./test");
        let tested = run(test.env("PATH", path_with_journeyman()).env("HOME", host.path()).current_dir(&inside), "");
        assert_eq!(tested.code, 0, "{}{}", tested.out, tested.err);
        assert!(tested.out.contains("pass     rejects a bad payload"), "{}", tested.out);
        let mut dev = journeyman(&inside);
        let mut dev = Server::start(dev.env("HOME", host.path()).arg("dev"));
        dev.prints("Ctrl-C");
        let created =
            host.run(&["task", "create", "--wait", "--queue", "dev/greet", "--payload", r#"{"name":"world"}"#]);
        assert_eq!(created.code, 0, "{}{}", created.out, created.err);
        let task = created.out.split_whitespace().next().expect("an id");
        assert!(host.run(&["task", "log", task]).out.contains("hello world\n"));
        dev.quit();
        let again = host.run(&["new", language, folder]);
        assert!(again.code == 21 && again.err.contains("cannot make greet: File exists"), "{}", again.err);
    }
    let unit = include_str!("../../examples/systemd/journeyman.service");
    assert!(unit.contains("/usr/bin/journeyman worker --config /etc/journeyman/journeyman.toml"), "`new` replaces it");
}

#[test]
fn a_new_handler_in_rust_is_the_example_under_its_name() {
    let host = Host::new();
    assert_eq!(host.run(&["new", "rust", "thumbs"]).code, 0);
    let program = include_str!("../../examples/greet.rs").replace("\"greet\"", "\"thumbs\"");
    assert_eq!(host.read("thumbs/src/main.rs"), program);
    let manifest: toml::Table = toml::from_str(&host.read("thumbs/Cargo.toml")).expect("a manifest");
    assert_eq!(manifest["package"]["name"].as_str(), Some("thumbs"));
    assert_eq!(manifest["dependencies"]["journeyman"]["path"].as_str(), Some(env!("CARGO_MANIFEST_DIR")));
    assert!(host.read("thumbs/thumbs.service").contains("ExecStart=/usr/local/bin/thumbs worker"));
    for name in ["Thumbs", "command", "a/b", "1st", ""] {
        let refused = host.run(&["new", "rust", name]);
        assert!(refused.code == 2 && refused.err.contains("lower-case letters"), "{name}: {}", refused.err);
    }
}
