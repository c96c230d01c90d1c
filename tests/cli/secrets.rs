//! Each way in which a worker is given a secret, and that nothing it says shows it.

use std::path::Path;
use std::process::Command;

use journeyman::config::{self, Document, Environment};
use rustix::process::Signal;

use crate::running::queue;
use crate::server::{Server, task_at as of_me};
use crate::support::{Said, journeyman, run};

/// The token that the queue of these tests knows.
const CANARY: &str = "a-token-for-tests";

/// What a worker is started with.
struct Way {
    name: &'static str,
    /// The line of the file that tells where the token is.
    line: &'static str,
    environment: &'static [(&'static str, &'static str)],
}

const WAYS: [Way; 4] = [
    Way { name: "file", line: "access_token_file = \"token\"", environment: &[] },
    Way { name: "descriptor", line: "access_token_file = \"fd:3\"", environment: &[] },
    Way {
        name: "environment",
        line: "access_token_file = \"env:QUEUE_CREDENTIAL\"",
        environment: &[("QUEUE_CREDENTIAL", CANARY), ("SOME_API_KEY", "env-canary-44")],
    },
    Way {
        name: "systemd",
        line: "access_token_file = \"systemd:tc-token\"",
        environment: &[("CREDENTIALS_DIRECTORY", "credentials")],
    },
];

fn configuration(root: &str, line: &str) -> String {
    format!(
        "[source.ci]\nkind = \"taskcluster\"\nroot_url = \"{root}\"\ntask_queue = \"build/linux\"\nclient_id = \"me\"\n\
         {line}\n[worker]\nwork_dir = \"work\"\n[log]\nlevel = \"trace\"\n[host]\nmetadata_service = \"off\"\n\
         [handler.command]\nkind = \"command\"\nenv_allow = [\"PATH\", \"SOME_API_KEY\"]\n"
    )
}

/// The binary with what a way gives it. A here-document is a pipe, and the shell is replaced, so signals arrive.
fn started(folder: &Path, way: &Way, arguments: &[&str]) -> Command {
    let mut binary = journeyman(folder);
    let mut command = Command::new("sh");
    let script = format!("exec \"$@\" 3<<END\n{CANARY}\nEND\n");
    if way.name == "descriptor" {
        command.args(["-c", &script, "sh"]).arg(binary.get_program()).args(arguments);
        command.env_clear().current_dir(folder).env("HOME", folder);
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
    } else {
        binary.args(arguments);
        command = binary;
    }
    command.envs(way.environment.iter().copied());
    command
}

fn shows_nothing(said: &Said, way: &Way) {
    for (what, text) in [("out", &said.out), ("err", &said.err)] {
        for canary in [CANARY, "env-canary-44"] {
            assert!(!text.contains(canary), "{} shows it on std{what}: {text}", way.name);
        }
    }
}

#[test]
fn no_log_output_or_payload_shows_a_secret_from_any_origin() {
    for way in &WAYS {
        let folder = tempfile::tempdir().expect("a folder");
        let here = folder.path();
        std::fs::write(here.join("token"), CANARY).expect("the file can be written");
        std::fs::create_dir(here.join("credentials")).expect("the folder can be made");
        std::fs::write(here.join("credentials/tc-token"), CANARY).expect("the file can be written");
        let (queue, root) = queue(here);
        std::fs::write(here.join("journeyman.toml"), configuration(&root, way.line)).expect("the file can be written");
        for arguments in [["config", "show"].as_slice(), &["config", "show", "--origin"], &["config", "check"]] {
            let said = run(&mut started(here, way, arguments), "");
            assert_eq!(said.code, 0, "{} {arguments:?}: {}", way.name, said.err);
            shows_nothing(&said, way);
        }
        let mut worker = Server::start(&mut started(here, way, &["worker", "--log-format", "json"]));
        let look = "env; ls -l /proc/self/fd; dd if=/proc/self/fd/3 iflag=nonblock count=1; tr '\\0' ' ' </proc/$PPID/cmdline; echo $SOME_API_KEY";
        let created = of_me(
            here,
            &root,
            &["create", "--wait", "--queue", "build/linux", "--", "/bin/sh", "-c", &format!("{look}; exit 0")],
        );
        assert_eq!(created.code, 0, "{}: {}{}", way.name, created.out, created.err);
        let is_id =
            |word: &&str| word.len() == 22 && word.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
        let task = created.out.split_whitespace().chain(created.err.split_whitespace()).find(is_id);
        let log = of_me(here, &root, &["log", task.expect("its id is told")]);
        assert!(log.out.contains("TASK_ID="), "{}: {}{}", way.name, log.out, log.err);
        shows_nothing(&log, way);
        worker.logs("reported");
        worker.signal(Signal::TERM);
        worker.logs("draining");
        // The queue answers the long poll that the worker's drain waits for.
        queue.signal(Signal::TERM);
        let said = worker.ends();
        assert!(
            said.err.contains("TRACE") || said.err.contains("DEBUG"),
            "the log is not a detailed one: {}",
            said.err
        );
        shows_nothing(&said, way);
    }
}

#[test]
fn the_trace_log_has_no_signature_credential_or_payload() {
    for protocol in ["azure", "claim-work"] {
        let folder = tempfile::tempdir().expect("a folder");
        let here = folder.path();
        std::fs::write(here.join("token"), CANARY).expect("the file can be written");
        let (queue, root) = queue(here);
        let lines = format!("access_token_file = \"token\"\ndialect = \"{protocol}\"");
        std::fs::write(here.join("journeyman.toml"), configuration(&root, &lines)).expect("the file can be written");
        let mut worker = Server::start(journeyman(here).args(["worker", "--log-format", "json"]));
        let payload = "{\"command\": [[\"sh\", \"-c\", \"echo payload-canary-7 >out.txt\"]], \"maxRunTime\": 60, \
                       \"artifacts\": [{\"type\": \"file\", \"path\": \"out.txt\"}]}";
        let created = of_me(here, &root, &["create", "--wait", "--queue", "build/linux", "--payload", payload]);
        assert_eq!(created.code, 0, "{}{}", created.out, created.err);
        worker.logs("reported");
        worker.signal(Signal::TERM);
        worker.logs("draining");
        // The queue answers the long poll that the worker's drain waits for.
        queue.signal(Signal::TERM);
        let said = worker.ends().err;
        assert!(said.contains("TRACE"), "the log is not a detailed one: {said}");
        for word in ["sig=", "popreceipt", "mac=", "Hawk ", "accessToken", "payload-canary-7"] {
            assert!(!said.contains(word), "{protocol}: {word} is in {said}");
        }
    }
}

#[test]
fn log_artifacts_are_redacted_and_others_are_stored_unchanged() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    std::fs::write(here.join("token"), CANARY).expect("the file can be written");
    let (_queue, root) = queue(here);
    let lines = "access_token_file = \"token\"\ndialect = \"azure\"";
    std::fs::write(here.join("journeyman.toml"), configuration(&root, lines)).expect("the file can be written");
    let worker = Server::start(journeyman(here).args(["worker", "--log-format", "json"]));
    let script = "echo with $MY_TOKEN >build.log; echo with $MY_TOKEN >data.txt; echo without >other.log";
    let artifact = |path: &str| serde_json::json!({ "type": "file", "path": path });
    let payload = serde_json::json!({
        "command": [["sh", "-c", script]], "maxRunTime": 60, "env": { "MY_TOKEN": "artifact-canary-61" },
        "artifacts": [artifact("build.log"), artifact("data.txt"), artifact("other.log")],
    });
    let created =
        of_me(here, &root, &["create", "--wait", "--queue", "build/linux", "--payload", &payload.to_string()]);
    assert_eq!(created.code, 0, "{}{}", created.out, created.err);
    let id = created.out.split_whitespace().next().expect("the id");
    let log = of_me(here, &root, &["log", id]).out;
    assert!(log.contains("artifact build.log: a secret in it was replaced"), "{log}");
    assert!(!log.contains("artifact-canary-61") && !log.contains("artifact other.log"), "{log}");
    let mut stored = Vec::new();
    let mut left = vec![here.join("queue.db-artifacts")];
    while let Some(folder) = left.pop() {
        for entry in std::fs::read_dir(folder).expect("the queue's artifacts") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                left.push(path);
            } else {
                stored.push(String::from_utf8_lossy(&std::fs::read(path).expect("a file")).into_owned());
            }
        }
    }
    for text in ["with [redacted]\n", "with artifact-canary-61\n", "without\n"] {
        assert_eq!(stored.iter().filter(|stored| *stored == text).count(), 1, "{text:?} in {stored:?}");
    }
    worker.signal(Signal::QUIT);
    worker.ends();
}

#[test]
fn variables_of_a_pool_are_never_shown() {
    let folder = tempfile::tempdir().expect("a folder");
    // A pool's name is in its log, whatever is hidden.
    let text = "[pool.pool-canary-19.env]\nMY_TOKEN = \"pool-canary-19\"\nPLACE = \"http://a:env-canary-44@b\"\n";
    std::fs::write(folder.path().join("journeyman.toml"), text).expect("the file can be written");
    for arguments in [["show"].as_slice(), &["show", "--origin"], &["show", "-o", "json"]] {
        let said = run(journeyman(folder.path()).arg("config").args(arguments), "");
        assert_eq!(said.code, 0, "{}", said.err);
        let line = said.out.lines().find(|line| line.contains("MY_TOKEN") && line.contains("********"));
        assert!(line.is_some_and(|line| !line.contains("pool-canary-19\"")), "{}", said.out);
        assert!(!said.out.contains("env-canary-44"), "{}", said.out);
    }
    let loaded = config::load(Some(Document::new(Path::new("x.toml"), text)), &Environment::default(), &[]);
    let shown = format!("{:?}", loaded.expect("it is good").config.pool.values());
    assert!(!shown.contains("canary"), "{shown}");
    let mut command = journeyman(folder.path());
    command.arg("controller").env("WORKER_AMQP_URI", "amqp://me:uri-canary-7@127.0.0.1:1/");
    let mut controller = Server::start(&mut command);
    controller.logs("lost connection to the broker");
    controller.signal(Signal::TERM);
    let said = controller.ends();
    assert!(said.code == 0 && said.err.contains("[redacted]"), "{}", said.err);
    assert!(!said.err.contains("canary"), "{}", said.err);
}

#[test]
fn a_missing_descriptor_or_credential_is_an_error_with_a_hint() {
    let folder = tempfile::tempdir().expect("a folder");
    for (line, said_so) in [
        ("access_token_file = \"fd:9\"", "did not inherit it"),
        ("access_token_file = \"systemd:tc\"", "is LoadCredential= in the unit"),
    ] {
        let file = configuration("http://127.0.0.1:9", line);
        std::fs::write(folder.path().join("journeyman.toml"), file).expect("the file can be written");
        let said = run(journeyman(folder.path()).arg("worker"), "");
        assert_eq!(said.code, 30, "{}", said.err);
        assert!(said.err.contains(said_so), "{}", said.err);
    }
}
