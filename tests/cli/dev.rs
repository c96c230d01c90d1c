//! `journeyman dev`: the demo, early signals, a second instance, and rejected flags.

use std::io::Read as _;
use std::net::TcpListener;

use rustix::process::Signal;

use crate::cli::host::Host;
use crate::cli::server::{Server, dev, fifo, left};

fn assert_demo_passes(dialect: &str) {
    let host = Host::new();
    std::fs::create_dir_all(host.join(".local/state/journeyman")).expect("a directory");
    host.write(".local/state/journeyman/dev.json", "of another");
    let said = host.run(&["dev", "--demo", "--dialect", dialect]);
    assert_eq!((said.code, said.err.as_str()), (0, ""), "{}", said.out);
    assert!(said.out.contains("14 of 14 ended as expected"), "{}", said.out);
    assert_eq!(left(host.path()), Vec::<String>::new());
    assert_eq!(host.read(".local/state/journeyman/dev.json"), "of another");
}

#[test]
fn the_demo_passes_and_leaves_nothing_behind() {
    assert_demo_passes("claim-work");
}

#[test]
fn the_demo_passes_with_azure_style_queues() {
    assert_demo_passes("azure");
}

/// A signal right after the first line of output arrives while everything is being started.
#[test]
fn an_early_signal_leaves_nothing_behind() {
    for (arguments, code) in [(&["dev", "--demo"][..], 1), (&["dev"][..], 0)] {
        for signal in [Signal::INT, Signal::TERM] {
            let host = Host::new();
            let mut early = Server::start(&mut host.journeyman(arguments));
            early.prints("queue");
            early.signal(signal);
            early.ends_with(code);
            assert_eq!(left(host.path()), Vec::<String>::new());
            assert!(!host.join(".local/state/journeyman/dev.json").exists());
        }
    }
}

#[test]
fn e1_the_end_of_its_terminal_ends_the_tasks_of_dev() {
    let (host, dev) = Host::with_dev(&[]);
    let alive = fifo(host.join("alive"));
    let script = format!("exec 9>{}; sleep 600", alive.display());
    assert_eq!(host.task(&["create", "--", "/bin/sh", "-c", &script]).code, 0);
    let mut alive = std::fs::File::open(alive).expect("the task opens it too");
    dev.signal(Signal::HUP);
    dev.ends();
    // Every process of the task is gone at its end.
    alive.read_to_end(&mut Vec::new()).expect("it is readable");
    assert_eq!(left(host.path()), ["alive"]);
}

#[test]
fn a_second_dev_is_refused_and_does_not_harm_the_first() {
    let (host, first) = Host::with_dev(&[]);
    let said = host.run(&["dev"]);
    assert_eq!((said.code, said.out.as_str()), (21, ""), "{}", said.err);
    for words in ["another `journeyman dev` is running (process id ", "http://127.0.0.1:", "JOURNEYMAN_STATE_DIR"] {
        assert!(said.err.contains(words), "{}", said.err);
    }
    assert_eq!(host.task(&["list"]).code, 0);

    let mut second = Server::start(host.journeyman(&["dev"]).env("JOURNEYMAN_STATE_DIR", host.join("state")));
    second.prints("Ctrl-C");
    second.drain();

    assert_eq!(host.task(&["list"]).code, 0);
    first.drain();
    dev(host.path(), &[]).drain();
}

#[test]
fn the_queue_of_the_configuration_file_is_left_alone() {
    let host = Host::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let listen = taken.local_addr().expect("its number");
    host.write("journeyman.toml", &format!("[queue]\ndb = \"real.db\"\nlisten = \"{listen}\"\nauth = \"open\"\n"));
    for arguments in [&[][..], &["--db", "own.db"]] {
        let server = dev(host.path(), arguments);
        assert_eq!(host.join("own.db").exists(), !arguments.is_empty());
        assert!(!host.join("real.db").exists());
        server.drain();
    }
}

#[test]
fn unusable_handlers_are_refused() {
    let host = Host::new();
    let said = host.run(&["dev", "--handler", "command=/bin/true"]);
    assert!(said.code == 2 && said.err.contains("`command` is built in"), "{}", said.err);
    let said = host.run(&["dev", "--demo", "--handler", "a=/bin/true"]);
    assert!(said.code == 2 && said.err.contains("cannot be used with"), "{}", said.err);
}
