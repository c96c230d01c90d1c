//! `journeyman dev`: the demo, early signals, a second instance, and rejected flags.

use std::io::Read as _;
use std::net::TcpListener;

use rustix::process::Signal;

use crate::cli::host::Host;
use crate::cli::server::{Server, dev, fifo, get, left};

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

#[test]
fn a_demo_that_is_kept_leaves_its_page_and_its_logs_to_be_read() {
    let host = Host::new();
    let mut demo = Server::start(&mut host.journeyman(&["dev", "--demo", "--keep"]));
    let page = demo.prints("page  http://");
    let address = page.trim().strip_prefix("page  http://").expect("an address").trim_end_matches('/').to_owned();
    demo.prints("14 of 14 ended as expected");
    demo.prints("until Ctrl-C");
    assert!(get(&address, "/").contains("recent results"), "the page answers");
    let list = host.task(&["list", "--all", "--state", "failed", "-o", "json"]).out;
    let list: serde_json::Value = serde_json::from_str(&list).expect("JSON");
    let failed = list["tasks"][0]["status"]["taskId"].as_str().expect("one failed").to_owned();
    assert_eq!(host.task(&["log", &failed]).code, 0);
    demo.signal(Signal::INT);
    demo.ends_with(0);
    assert_eq!(left(host.path()), Vec::<String>::new());
}

#[test]
fn payloads_of_dev_see_the_variables_that_it_is_told() {
    let host = Host::new();
    let mut command = host.journeyman(&["dev", "--env", "SHOWN", "--env", "UNSET"]);
    let mut dev = Server::start(command.env("SHOWN", "seen").env("HIDDEN", "unseen"));
    dev.logs("`--env UNSET` has no effect");
    dev.prints("Ctrl-C");
    let task = host.create(&["--wait", "--", "/bin/sh", "-c", "echo $SHOWN$HIDDEN"]);
    assert!(host.task(&["log", &task]).out.contains("\nseen\n"), "only the one that was named");
    dev.quit();
}

#[test]
fn what_another_made_in_the_temporary_directory_is_not_touched() {
    let host = Host::new();
    let hour_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
    // With the mode of any directory, and with a lock that leads elsewhere.
    for (name, mode) in [("notes", 0o755), ("secret", 0o700)] {
        let work = host.join(&format!("journeyman-dev-{name}/work"));
        std::fs::create_dir_all(&work).expect("made");
        host.write(&format!("journeyman-dev-{name}/thesis"), "precious");
        if name == "secret" {
            std::os::unix::fs::symlink("../thesis", work.join("worker.lock")).expect("made");
        }
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(work.parent().expect("its parent"), mode).expect("ours");
        std::fs::File::open(&work).and_then(|work| work.set_modified(hour_ago)).expect("ours");
    }
    dev(host.path(), &[]).quit();
    for name in ["notes", "secret"] {
        assert_eq!(host.read(&format!("journeyman-dev-{name}/thesis")), "precious", "{name}");
    }
}

#[test]
fn the_page_of_a_real_worker_keeps_its_address() {
    let host = Host::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let listen = taken.local_addr().expect("its number");
    host.write("journeyman.toml", &format!("[http]\nlisten = \"{listen}\"\n"));
    dev(host.path(), &[]).quit();
    let said = host.run(&["dev", "--env", "A=B"]);
    assert!(said.code == 2 && said.err.contains("without a value"), "{}", said.err);
}

#[test]
fn the_directory_of_a_killed_dev_is_removed_by_the_next_and_that_of_another_is_not() {
    let host = Host::new();
    let other = |name: &str| {
        let mut command = host.journeyman(&["dev"]);
        let mut dev = Server::start(command.env("JOURNEYMAN_STATE_DIR", host.join(name)));
        dev.prints("Ctrl-C");
        dev
    };
    let killed = other("killed");
    let running = other("running");
    killed.signal(Signal::KILL);
    killed.ends();
    let dirs = || left(host.path()).into_iter().filter(|name| name.starts_with("journeyman-dev-")).count();
    assert_eq!(dirs(), 2);
    // Younger ones may be about to be locked.
    let hour_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
    for entry in std::fs::read_dir(host.path()).expect("the directory").flatten() {
        let work = std::fs::File::open(entry.path().join("work"));
        work.map_or(Ok(()), |work| work.set_modified(hour_ago)).expect("it is ours");
    }
    let next = other("next");
    assert_eq!(dirs(), 2);
    next.quit();
    assert_eq!(dirs(), 1);
    running.quit();
    assert_eq!(dirs(), 0);
}
