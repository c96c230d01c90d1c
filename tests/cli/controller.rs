//! `journeyman controller` without a broker, and commands without a controller.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use rustix::process::Signal;

use crate::server::Server;
use crate::support::{journeyman, run};

/// No process listens there.
const NO_BROKER: &str = "amqp://me:secret-canary-5@127.0.0.1:1/";

#[test]
fn commands_without_a_controller_fail_with_a_hint() {
    let folder = tempfile::tempdir().expect("a folder");
    let said = run(journeyman(folder.path()).args(["controller", "status"]), "");
    assert_eq!(said.code, 30, "{}", said.err);
    assert!(said.err.contains("no [pool.NAME] is configured") && said.err.contains("--socket PATH"), "{}", said.err);
    std::fs::write(folder.path().join("journeyman.toml"), "[pool.core]\nstate_dir = \"pool\"\n")
        .expect("it is written");
    for more in [["--config", "journeyman.toml"], ["--socket", "pool/controller.sock"]] {
        let said = run(journeyman(folder.path()).args(["controller", "status"]).args(more), "");
        assert_eq!(said.code, 32, "{}", said.err);
        assert!(said.err.contains("nothing is listening at pool/controller.sock"), "{}", said.err);
    }
}

/// What is answered to a path.
fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("a connection");
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("it is sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it is UTF-8");
    answer
}

#[test]
fn a_controller_without_a_broker_reports_the_error_without_secrets_and_is_not_ready() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let text = "[pool.core]\nstate_dir = \"pool\"\n[http]\nlisten = \"127.0.0.1:0\"\n";
    std::fs::write(here.join("journeyman.toml"), text).expect("the file can be written");
    let mut controller = Server::start(journeyman(here).arg("controller").env("WORKER_AMQP_URI", NO_BROKER));
    let line = controller.logs("health, metrics and state: http://");
    let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect("an address").to_owned();
    controller.logs("lost connection to the broker");
    let table = run(journeyman(here).args(["controller", "status"]), "");
    assert_eq!(table.code, 0, "{}", table.err);
    for part in [
        "pool core  DISCONNECTED",
        "no worker is started or stopped: the broker cannot be reached, tried ",
        "127.0.0.1:1",
    ] {
        assert!(table.out.contains(part), "{part}: {}", table.out);
    }
    let json = run(journeyman(here).args(["controller", "status", "-o", "json"]), "").out;
    let seen: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(
        (&seen["pools"][0]["role"], &seen["pools"][0]["groups"]),
        (&"disconnected".into(), &serde_json::json!([]))
    );
    assert!(seen["pools"][0]["broker"]["error"].as_str().is_some_and(|error| !error.is_empty()), "{json}");
    assert!(!json.contains("secret-canary-5") && !table.out.contains("secret-canary-5"), "{json}");
    let said = run(journeyman(here).args(["controller", "poison", "list"]), "");
    assert!(said.code == 1 && said.err.contains("127.0.0.1:1"), "{}", said.err);
    // It is no worker.
    let said = run(journeyman(here).args(["status", "--socket", "pool/controller.sock"]), "");
    assert!(said.err.contains("use `journeyman controller status`"), "{}", said.err);
    assert!(get(&address, "/livez").starts_with("HTTP/1.1 200"));
    let ready = get(&address, "/readyz");
    assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
    assert!(ready.contains("[-] pool core: the broker cannot be reached: "), "{ready}");
    let metrics = get(&address, "/metrics");
    for sample in [
        "journeyman_controller_role{pool=\"core\",role=\"disconnected\"} 1.0",
        "journeyman_controller_groups{pool=\"core\",phase=\"active\"} 0.0",
        "journeyman_controller_dead_letters_total{pool=\"core\"} 0.0",
    ] {
        assert!(metrics.contains(sample), "{sample}: {metrics}");
    }
    assert!(get(&address, "/status.json").contains("\"role\":\"disconnected\""));
    let page = get(&address, "/");
    assert!(page.starts_with("HTTP/1.1 200") && page.contains("No worker is started or stopped: the broker"), "{page}");
    assert!(!page.contains("secret-canary-5"), "{page}");
    let other = get(&address, "/other");
    assert!(other.starts_with("HTTP/1.1 404") && other.contains("/readyz?verbose"), "{other}");
    controller.signal(Signal::TERM);
    assert_eq!(controller.ends().code, 0);
    assert!(!here.join("pool/controller.sock").exists());
}
