//! Every way to give a worker a secret, and that no output shows it.

use std::path::Path;
use std::process::Command;

use journeyman::config::{self, Document, Environment};
use rustix::process::Signal;

use crate::cli::host::{Host, TOKEN};
use crate::cli::server::Server;
use crate::cli::support::{Said, run};

struct SecretOrigin {
    token_file: &'static str,
    dialect: &'static str,
    environment: &'static [(&'static str, &'static str)],
}

const ORIGINS: [SecretOrigin; 3] = [
    SecretOrigin { token_file: "token", dialect: "claim-work", environment: &[] },
    SecretOrigin {
        token_file: "env:QUEUE_CREDENTIAL",
        dialect: "azure",
        environment: &[("QUEUE_CREDENTIAL", TOKEN), ("SOME_API_KEY", "env-canary-44")],
    },
    SecretOrigin {
        token_file: "systemd:tc-token",
        dialect: "claim-work",
        environment: &[("CREDENTIALS_DIRECTORY", "credentials")],
    },
];

fn configure(host: &Host, token_file: &str, dialect: &str) {
    let rest = format!(
        "access_token_file = \"{token_file}\"\ndialect = \"{dialect}\"\n[worker]\nwork_dir = \"work\"\n\
         [log]\nlevel = \"trace\"\n[host]\nmetadata_service = \"off\"\n\
         [handler.command]\nkind = \"command\"\nenv_allow = [\"PATH\", \"SOME_API_KEY\"]\n"
    );
    host.write("journeyman.toml", &(host.source() + &rest));
    host.write("token", TOKEN);
}

fn with_secret(host: &Host, origin: &SecretOrigin, arguments: &[&str]) -> Command {
    let mut command = host.journeyman(arguments);
    command.envs(origin.environment.iter().copied());
    command
}

fn assert_no_secret(said: &Said, origin: &SecretOrigin) {
    for (stream, text) in [("out", &said.out), ("err", &said.err)] {
        for canary in [TOKEN, "env-canary-44"] {
            assert!(!text.contains(canary), "{} is shown on std{stream}: {text}", origin.token_file);
        }
    }
}

#[test]
fn no_log_output_or_payload_shows_a_secret_from_any_origin() {
    for origin in &ORIGINS {
        let host = Host::with_queue();
        configure(&host, origin.token_file, origin.dialect);
        std::fs::create_dir(host.join("credentials")).expect("a directory");
        host.write("credentials/tc-token", TOKEN);
        for arguments in [["config", "show"].as_slice(), &["config", "show", "--origin"], &["config", "check"]] {
            let said = run(&mut with_secret(&host, origin, arguments), "");
            assert_eq!(said.code, 0, "{} {arguments:?}: {}", origin.token_file, said.err);
            assert_no_secret(&said, origin);
        }
        let mut worker = Server::start(&mut with_secret(&host, origin, &["worker", "--log-format", "json"]));
        let script = "env; ls -l /proc/self/fd; dd if=/proc/self/fd/3 iflag=nonblock count=1; \
                      tr '\\0' ' ' </proc/$PPID/cmdline; echo $SOME_API_KEY; echo payload-canary-7 >out.txt";
        let payload = serde_json::json!({
            "command": [["/bin/sh", "-c", script]], "maxRunTime": 60, "artifacts": [{ "type": "file", "path": "out.txt" }],
        });
        let id = host.create(&["--wait", "--payload", &payload.to_string()]);
        let log = host.task(&["log", &id]);
        assert!(log.out.contains("TASK_ID="), "{}: {}{}", origin.token_file, log.out, log.err);
        assert_no_secret(&log, origin);
        worker.logs("reported");
        worker.signal(Signal::TERM);
        worker.logs("draining");
        // The queue answers the long poll that the worker's drain waits for.
        host.queue().signal(Signal::TERM);
        let said = worker.ends();
        assert!(said.err.contains("TRACE"), "not a trace log: {}", said.err);
        assert_no_secret(&said, origin);
        for word in ["sig=", "popreceipt", "mac=", "Hawk ", "accessToken", "payload-canary-7"] {
            assert!(!said.err.contains(word), "{}: {word} is in {}", origin.dialect, said.err);
        }
    }
}

#[test]
fn log_artifacts_are_redacted_and_others_are_stored_unchanged() {
    let host = Host::with_queue();
    configure(&host, "token", "azure");
    let worker = Server::start(&mut host.journeyman(&["worker", "--log-format", "json"]));
    let script = "echo with $MY_TOKEN >build.log; echo with $MY_TOKEN >data.txt; echo without >other.log";
    let artifact = |path: &str| serde_json::json!({ "type": "file", "path": path, "contentEncoding": "identity" });
    let payload = serde_json::json!({
        "command": [["sh", "-c", script]], "maxRunTime": 60, "env": { "MY_TOKEN": "artifact-canary-61" },
        "artifacts": [artifact("build.log"), artifact("data.txt"), artifact("other.log")],
    });
    let id = host.create(&["--wait", "--payload", &payload.to_string()]);
    let log = host.task(&["log", &id]).out;
    assert!(log.contains("artifact build.log: a secret in it was replaced"), "{log}");
    assert!(!log.contains("artifact-canary-61") && !log.contains("artifact other.log"), "{log}");
    let mut stored = Vec::new();
    let mut folders = vec![host.join("queue.db-artifacts")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("the queue's artifacts") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                stored.push(String::from_utf8_lossy(&std::fs::read(path).expect("a file")).into_owned());
            }
        }
    }
    for text in ["with [redacted]\n", "with artifact-canary-61\n", "without\n"] {
        assert_eq!(stored.iter().filter(|stored| *stored == text).count(), 1, "{text:?} in {stored:?}");
    }
    worker.quit();
}

#[test]
fn variables_of_a_pool_are_never_shown() {
    let host = Host::new();
    // A pool's name is in its log, also if it is a secret.
    let text = "[pool.pool-canary-19.env]\nMY_TOKEN = \"pool-canary-19\"\nPLACE = \"http://a:env-canary-44@b\"\n";
    host.write("journeyman.toml", text);
    for arguments in [["config", "show"].as_slice(), &["config", "show", "--origin"], &["config", "show", "-o", "json"]]
    {
        let said = host.succeed(arguments);
        let line = said.out.lines().find(|line| line.contains("MY_TOKEN") && line.contains("********"));
        assert!(line.is_some_and(|line| !line.contains("pool-canary-19\"")), "{}", said.out);
        assert!(!said.out.contains("env-canary-44"), "{}", said.out);
    }
    let loaded = config::load(Some(Document::new(Path::new("x.toml"), text)), &Environment::default(), &[]);
    let shown = format!("{:?}", loaded.expect("it is valid").config.pool.values());
    assert!(!shown.contains("canary"), "{shown}");
    let mut command = host.journeyman(&["controller"]);
    let mut controller = Server::start(command.env("WORKER_AMQP_URI", "amqp://me:uri-canary-7@127.0.0.1:1/"));
    controller.logs("no connection to the broker");
    let log = controller.drain().err;
    assert!(log.contains("[redacted]") && !log.contains("canary"), "{log}");
}

#[test]
fn a_missing_credential_is_an_error_with_a_hint() {
    let host = Host::with_queue();
    configure(&host, "systemd:tc", "azure");
    let said = host.run(&["worker"]);
    assert!(said.code == 30 && said.err.contains("is LoadCredential= in the unit"), "{} {}", said.code, said.err);
}

#[test]
fn b12_an_address_in_place_of_its_file_is_refused_and_not_shown() {
    let host = Host::new();
    let source = "[source.q]\nkind = \"amqp\"\nrequests_queue = \"x\"\n";
    for (section, key, value) in [
        ("amqp", "uri_file", "amqp://user:canary-7@host:5672/v"),
        ("notifier.postgres", "url_file", "postgres://user:canary-7@host/db"),
        ("notifier.endpoint.a", "url_file", "https://host/canary-7"),
        ("notifier", "seal_key_files", "whsec_canary-7"),
    ] {
        let text = if key.ends_with("files") { format!("[\"{value}\"]") } else { format!("\"{value}\"") };
        host.write("journeyman.toml", &format!("{source}[{section}]\n{key} = {text}\n"));
        let set = format!("{section}.{key}={value}");
        for arguments in [
            &["config", "check"][..],
            &["config", "check", "-o", "json"],
            &["config", "show"],
            &["config", "show", "--origin"],
            &["config", "show", "-o", "json"],
            &["config", "show", "--set", &set],
            &["worker"],
        ] {
            let said = host.run(arguments);
            assert_eq!(said.code, 30, "{arguments:?}: {} {}", said.out, said.err);
            assert!(!said.out.contains("canary") && !said.err.contains("canary"), "{} {}", said.out, said.err);
            assert!(format!("{}{}", said.out, said.err).contains("path of a file"), "{} {}", said.out, said.err);
        }
    }
}
