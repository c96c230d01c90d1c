//! `journeyman controller` without a broker, and commands without a controller.

use crate::cli::host::Host;
use crate::cli::server::{Server, get};

/// No process listens there.
const NO_BROKER: &str = "amqp://me:secret-canary-5@127.0.0.1:1/";

#[test]
fn commands_without_a_controller_fail_with_a_hint() {
    let host = Host::new();
    let said = host.run(&["controller", "status"]);
    assert_eq!(said.code, 30, "{}", said.err);
    assert!(said.err.contains("no [pool.NAME] is configured") && said.err.contains("--socket PATH"), "{}", said.err);
    host.write("journeyman.toml", "[pool.core]\nstate_dir = \"pool\"\n");
    for [flag, value] in [["--config", "journeyman.toml"], ["--socket", "pool/controller.sock"]] {
        let said = host.run(&["controller", "status", flag, value]);
        assert_eq!(said.code, 32, "{}", said.err);
        assert!(said.err.contains("nothing is listening at pool/controller.sock"), "{}", said.err);
    }
}

#[test]
fn b13_a_controller_without_a_broker_reports_the_error_without_secrets_and_is_not_ready() {
    let host = Host::new();
    host.write("journeyman.toml", "[pool.core]\nstate_dir = \"pool\"\n[http]\nlisten = \"127.0.0.1:0\"\n");
    let mut controller = Server::start(host.journeyman(&["controller"]).env("WORKER_AMQP_URI", NO_BROKER));
    let line = controller.logs("health, metrics and state: http://");
    let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect("an address").to_owned();
    controller.logs("no connection to the broker");
    let table = host.succeed(&["controller", "status"]).out;
    for part in ["DISCONNECTED", "the broker cannot be reached, tried ", "127.0.0.1:1"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    let status = host.json(&["controller", "status"]);
    let pool = &status["pools"][0];
    assert_eq!((&pool["role"], &pool["groups"]), (&"disconnected".into(), &serde_json::json!([])));
    assert_eq!(pool["counters"]["broker_disconnects"], 0, "there was no connection: {status}");
    assert!(pool["broker"]["error"].as_str().is_some_and(|error| !error.is_empty()), "{status}");
    assert!(!status.to_string().contains("secret-canary-5") && !table.contains("secret-canary-5"), "{status}");
    let said = host.run(&["controller", "poison", "list"]);
    assert!(said.code == 1 && said.err.contains("127.0.0.1:1"), "{}", said.err);
    // It is no worker.
    let said = host.run(&["status", "--socket", "pool/controller.sock"]);
    assert!(said.err.contains("use `journeyman controller status`"), "{}", said.err);
    assert!(get(&address, "/livez").starts_with("HTTP/1.1 200"));
    let ready = get(&address, "/readyz");
    assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
    assert!(ready.contains("[-] pool core: the broker cannot be reached, tried "), "{ready}");
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
    assert!(page.starts_with("HTTP/1.1 200") && page.contains("no worker is started or stopped: the broker"), "{page}");
    assert!(!page.contains("secret-canary-5"), "{page}");
    let other = get(&address, "/other");
    assert!(other.starts_with("HTTP/1.1 404") && other.contains("/readyz"), "{other}");
    controller.drain();
    assert!(!host.join("pool/controller.sock").exists());
}
