//! A temporary directory in which the binary runs, with a queue or `journeyman dev` if a test needs one.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::cli::server::{Server, dev};
use crate::cli::support::{Said, journeyman, run};

/// The token of every client of the queue.
pub(crate) const TOKEN: &str = "a-token-for-tests";

pub(crate) struct Host {
    queue: Option<Server>,
    root: String,
    folder: tempfile::TempDir,
}

impl Host {
    pub(crate) fn new() -> Self {
        Self { queue: None, root: String::new(), folder: tempfile::tempdir().expect("a directory") }
    }

    /// The worker's queue is one that the test serves.
    pub(crate) fn with_root(root: &str) -> Self {
        Self { root: root.to_owned(), ..Self::new() }
    }

    /// With a queue for the clients `me` with all scopes, and `claim_work` and `azure` with those of one dialect.
    pub(crate) fn with_queue() -> Self {
        let mut host = Self::new();
        let mut command = host.journeyman(&["queue", "--db", "queue.db", "--listen", "127.0.0.1:0"]);
        for (name, scopes) in [
            ("ME", "*"),
            ("CLAIM_WORK", "queue:claim-work:build/linux,queue:worker-id:g/w"),
            ("AZURE", "queue:poll-task-urls:build/linux,queue:claim-task:build/linux,queue:worker-id:g/w"),
        ] {
            let client = format!("JOURNEYMAN__QUEUE__CLIENTS__{name}");
            command
                .env(format!("{client}__ACCESS_TOKEN_FILE"), "env:TEST_TOKEN")
                .env(format!("{client}__SCOPES"), scopes);
        }
        let mut queue = Server::start(command.env("TEST_TOKEN", TOKEN));
        let line: Value = serde_json::from_str(&queue.logs("root_url")).expect("a log without a terminal is JSON");
        line["root_url"].as_str().expect("the root").clone_into(&mut host.root);
        Self { queue: Some(queue), ..host }
    }

    pub(crate) fn with_dev(arguments: &[&str]) -> (Self, Server) {
        let host = Self::new();
        let server = dev(host.path(), arguments);
        (host, server)
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn root(&self) -> &str {
        &self.root
    }

    pub(crate) fn queue(&self) -> &Server {
        self.queue.as_ref().expect("a queue was started")
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        std::fs::write(self.join(name), text).expect("the file is written");
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.join(name)).expect("the file exists")
    }

    pub(crate) fn journeyman(&self, arguments: &[&str]) -> Command {
        let mut command = journeyman(self.path());
        command.args(arguments).env("USER", "ana").env("TMPDIR", self.path());
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Said {
        run(&mut self.journeyman(arguments), "")
    }

    /// Runs a command that succeeds.
    pub(crate) fn succeed(&self, arguments: &[&str]) -> Said {
        let said = self.run(arguments);
        assert_eq!(said.code, 0, "{arguments:?}: {}{}", said.out, said.err);
        said
    }

    /// Runs a command that succeeds with `-o json`.
    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.succeed(&[arguments, &["-o", "json"]].concat()).out).expect("JSON")
    }

    pub(crate) fn status(&self) -> Value {
        self.json(&["status"])
    }

    /// The control socket of `journeyman dev` in this directory.
    pub(crate) fn dev_socket(&self) -> String {
        let entries = std::fs::read_dir(self.path()).expect("the directory is there");
        let mut paths = entries.map(|entry| entry.expect("an entry").path().join("work/control.sock"));
        paths.find(|path| path.exists()).expect("a socket").display().to_string()
    }

    /// A `task` command of the client `me`, or for `journeyman dev`.
    pub(crate) fn task(&self, arguments: &[&str]) -> Said {
        let mut command = self.journeyman(&["task"]);
        if !self.root.is_empty() {
            command.env("TASKCLUSTER_ROOT_URL", &self.root);
            command.env("TASKCLUSTER_CLIENT_ID", "me").env("TASKCLUSTER_ACCESS_TOKEN", TOKEN);
        }
        run(command.args(arguments), "")
    }

    /// Creates a task with these arguments and returns its id.
    pub(crate) fn create(&self, arguments: &[&str]) -> String {
        let queue: &[&str] = if self.root.is_empty() { &[] } else { &["--queue", "build/linux"] };
        let created = self.task(&[&["create"], queue, arguments].concat());
        assert_eq!(created.code, 0, "{}{}", created.out, created.err);
        created.out.split_whitespace().next().expect("the id").to_owned()
    }

    /// Creates a task that runs this script, and returns its id.
    pub(crate) fn create_script(&self, script: &str) -> String {
        self.create(&["--", "/bin/sh", "-c", script])
    }

    /// The section of the queue in a worker's configuration, without the token.
    pub(crate) fn source(&self) -> String {
        format!(
            "[source.ci]\nkind = \"taskcluster\"\nroot_url = \"{}\"\ntask_queue = \"build/linux\"\nclient_id = \"me\"\n",
            self.root
        )
    }

    /// A worker that is configured by `journeyman.toml`.
    pub(crate) fn worker(&self) -> Command {
        let source = self.source();
        let rest = "access_token_file = \"token\"\n[worker]\nwork_dir = \"work\"\n[host]\nmetadata_service = \"off\"\n";
        self.write("journeyman.toml", &(source + rest));
        self.write("token", TOKEN);
        self.journeyman(&["worker"])
    }
}
