//! `journeyman dev`: the demo, early signals, a second instance, and rejected flags.

use std::net::TcpListener;

use rustix::process::Signal;

use crate::server::{Server, dev, left, task};
use crate::support::{journeyman, run};

fn demo_ends_well(protocol: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join(".local/state/journeyman");
    std::fs::create_dir_all(&state).expect("it can be made");
    std::fs::write(state.join("dev.json"), "of another").expect("it can be written");
    let mut command = journeyman(folder.path());
    let said = run(command.env("TMPDIR", folder.path()).args(["dev", "--demo", "--dialect", protocol]), "");
    assert_eq!((said.code, said.err.as_str()), (0, ""), "{}", said.out);
    assert!(said.out.contains("14 of 14 ended as expected"), "{}", said.out);
    assert_eq!(left(folder.path()), Vec::<String>::new());
    assert_eq!(std::fs::read_to_string(state.join("dev.json")).expect("it is there"), "of another");
}

#[test]
fn the_demo_passes_and_leaves_nothing_behind() {
    demo_ends_well("claim-work");
}

#[test]
fn the_demo_passes_with_azure_style_queues() {
    demo_ends_well("azure");
}

/// A signal right after the first line of output arrives while everything is being started.
#[test]
fn an_early_signal_leaves_nothing_behind() {
    for (arguments, code) in [(&["--demo"][..], 1), (&[][..], 0)] {
        for signal in [Signal::INT, Signal::TERM] {
            let folder = tempfile::tempdir().expect("a folder");
            let mut command = journeyman(folder.path());
            let mut early = Server::start(command.env("TMPDIR", folder.path()).arg("dev").args(arguments));
            early.prints("queue");
            early.signal(signal);
            let said = early.ends();
            assert_eq!(said.code, code, "{arguments:?}: {}{}", said.out, said.err);
            assert_eq!(left(folder.path()), Vec::<String>::new());
            assert!(!folder.path().join(".local/state/journeyman/dev.json").exists());
        }
    }
}

#[test]
fn a_second_dev_is_refused_and_does_not_harm_the_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let first = dev(here, &[]);
    let said = run(journeyman(here).env("TMPDIR", here).arg("dev"), "");
    assert_eq!((said.code, said.out.as_str()), (21, ""), "{}", said.err);
    for words in ["another `journeyman dev` is running (process id ", "http://127.0.0.1:", "JOURNEYMAN_STATE_DIR"] {
        assert!(said.err.contains(words), "{}", said.err);
    }
    assert_eq!(task(here, &["list"]).code, 0);

    let mut elsewhere = journeyman(here);
    elsewhere.env("TMPDIR", here).env("JOURNEYMAN_STATE_DIR", here.join("state")).arg("dev");
    let mut second = Server::start(&mut elsewhere);
    second.prints("Ctrl-C");
    second.signal(Signal::TERM);
    assert_eq!(second.ends().code, 0);

    assert_eq!(task(here, &["list"]).code, 0);
    first.signal(Signal::TERM);
    assert_eq!(first.ends().code, 0);
    let third = dev(here, &[]);
    third.signal(Signal::TERM);
    assert_eq!(third.ends().code, 0);
}

#[test]
fn the_queue_of_the_configuration_file_is_left_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let listen = taken.local_addr().expect("its number");
    let text = format!("[queue]\ndb = \"real.db\"\nlisten = \"{listen}\"\nauth = \"open\"\n");
    std::fs::write(here.join("journeyman.toml"), text).expect("it can be written");
    let server = dev(here, &[]);
    assert!(!here.join("real.db").exists());
    server.signal(Signal::TERM);
    assert_eq!(server.ends().code, 0);

    let server = dev(here, &["--db", "own.db"]);
    assert!(here.join("own.db").exists() && !here.join("real.db").exists());
    server.signal(Signal::TERM);
    assert_eq!(server.ends().code, 0);
}

#[test]
fn unusable_handlers_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let dev =
        |arguments: &[&str]| run(journeyman(folder.path()).env("TMPDIR", folder.path()).arg("dev").args(arguments), "");
    let said = dev(&["--handler", "command=/bin/true"]);
    assert!(said.code == 2 && said.err.contains("`command` is built in"), "{}", said.err);
    let said = dev(&["--demo", "--handler", "a=/bin/true"]);
    assert!(said.code == 2 && said.err.contains("cannot be used with"), "{}", said.err);
}
