//! Runs the built binary, and kills it at a chosen line of its log.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};

use crate::crash::STEP_TIMEOUT;
use crate::support::task_queue::{CLIENT_ID, TOKEN};

/// A process whose log is read line by line. Killed when dropped.
pub struct Process {
    child: Child,
    incoming: mpsc::Receiver<String>,
    pub log: Vec<String>,
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Name and value.
pub type Variable<'a> = (&'a str, &'a str);

const PROGRAM: &str = env!("CARGO_BIN_EXE_journeyman");

/// Starts the program with a file size limit in blocks of 512 bytes, beyond which a write fails.
const NARROW: &str = r#"trap '' XFSZ; ulimit -f 400; exec "$0" "$@""#;

impl Process {
    fn start(folder: &Path, arguments: &[&str], variables: &[Variable<'_>]) -> Self {
        Self::spawn(Command::new(PROGRAM), folder, arguments, variables)
    }

    /// Starts as `start` does, with a file size limit.
    fn start_narrow(folder: &Path, arguments: &[&str], variables: &[Variable<'_>]) -> Self {
        let mut shell = Command::new("sh");
        shell.args(["-c", NARROW, PROGRAM]);
        Self::spawn(shell, folder, arguments, variables)
    }

    fn spawn(mut command: Command, folder: &Path, arguments: &[&str], variables: &[Variable<'_>]) -> Self {
        command.args(arguments).env_clear().current_dir(folder);
        command
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("JOURNEYMAN__HOST__METADATA_SERVICE", "off");
        command.envs(variables.iter().copied());
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts");
        let lines = BufReader::new(child.stderr.take().expect("stderr is piped")).lines();
        let (sender, incoming) = mpsc::channel();
        // A thread, so that the test can time out if the process logs nothing.
        std::thread::spawn(move || {
            for line in lines {
                if sender.send(line.expect("the log is UTF-8")).is_err() {
                    return;
                }
            }
        });
        Self { child, incoming, log: Vec::new() }
    }

    /// The queue on `listen`, with claims of 5 seconds.
    pub fn queue(folder: &Path, listen: &str) -> Self {
        Self::start(folder, &["queue", "--log-format", "json"], &queue_variables(listen))
    }

    /// The queue with a file size limit.
    pub fn narrow_queue(folder: &Path) -> Self {
        Self::start_narrow(folder, &["queue", "--log-format", "json"], &queue_variables("127.0.0.1:0"))
    }

    /// Queue and worker in one process with the demo's tasks and a file size limit.
    pub fn narrow_demo(folder: &Path) -> Self {
        let variables = [("JOURNEYMAN__LOG__LEVEL", "info")];
        Self::start_narrow(folder, &["dev", "--demo", "--db", "queue.db"], &variables)
    }

    /// A worker with the same id at every start.
    pub fn worker(folder: &Path, root_url: &str, protocol: &str) -> Self {
        Self::worker_with(folder, root_url, protocol, &[])
    }

    pub fn worker_with(folder: &Path, root_url: &str, protocol: &str, more: &[Variable<'_>]) -> Self {
        let variables = [
            ("JOURNEYMAN__HOST__METADATA_SERVICE", "off"),
            ("JOURNEYMAN__WORKER__ID", "crash"),
            ("JOURNEYMAN__WORKER__CAPACITY", "4"),
            ("JOURNEYMAN__WORKER__WORK_DIR", "work"),
            ("JOURNEYMAN__SOURCE__CI__KIND", "taskcluster"),
            ("JOURNEYMAN__SOURCE__CI__DIALECT", protocol),
            ("JOURNEYMAN__SOURCE__CI__ROOT_URL", root_url),
            ("JOURNEYMAN__SOURCE__CI__TASK_QUEUE", super::TASK_QUEUE),
            ("JOURNEYMAN__SOURCE__CI__CLIENT_ID", CLIENT_ID),
            ("JOURNEYMAN__SOURCE__CI__ACCESS_TOKEN_FILE", "env:TEST_TOKEN"),
            ("TEST_TOKEN", TOKEN),
        ];
        let variables: Vec<Variable<'_>> = variables.into_iter().chain(more.iter().copied()).collect();
        Self::start(folder, &["worker", "--log-format", "json", "--log-level", "info"], &variables)
    }

    /// Reads the log until a line contains `words`, and returns it; `None` if the process ended before.
    pub fn until(&mut self, words: &str) -> Option<String> {
        while let Some(line) = self.line() {
            if line.contains(words) {
                return Some(line);
            }
        }
        None
    }

    /// Reads the log until a claim has ended.
    pub fn until_a_claim_ends(&mut self) {
        let ends = [
            "\"reported",
            "claim lost",
            "was not accepted",
            "rejected the report",
            "was not answered",
            "; not reported",
        ];
        loop {
            let line = self.line().expect("the worker runs");
            if ends.iter().any(|end| line.contains(end)) {
                return;
            }
        }
    }

    /// Reads `count` lines of the log, or fewer if the process ends before.
    pub fn lines(&mut self, count: usize) {
        for _ in 0..count {
            if self.line().is_none() {
                return;
            }
        }
    }

    fn line(&mut self) -> Option<String> {
        let next = self.incoming.recv_timeout(STEP_TIMEOUT);
        assert_ne!(next, Err(RecvTimeoutError::Timeout), "it falls silent: {:#?}", self.log);
        let line = next.ok()?;
        self.log.push(line.clone());
        Some(line)
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("it is there");
    }

    /// Releases its claims and waits for its exit, which removes its control groups.
    pub fn leave(mut self) -> Vec<String> {
        self.signal(rustix::process::Signal::QUIT);
        self.end();
        std::mem::take(&mut self.log)
    }

    /// Reads the log to its end, and returns the signal that killed the process, if any.
    pub fn died_of(&mut self) -> Option<i32> {
        while self.line().is_some() {}
        std::os::unix::process::ExitStatusExt::signal(&self.child.wait().expect("it is gone"))
    }

    /// Reads the log to its end, and returns the exit code.
    pub fn end(&mut self) -> Option<i32> {
        while self.line().is_some() {}
        self.child.wait().expect("it is gone").code()
    }

    /// Sends SIGKILL and waits for the exit.
    pub fn kill(mut self) -> Vec<String> {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it is gone");
        std::mem::take(&mut self.log)
    }
}

fn queue_variables(listen: &str) -> [Variable<'_>; 5] {
    [
        ("JOURNEYMAN__QUEUE__CLIENTS__TESTER__ACCESS_TOKEN_FILE", "env:TEST_TOKEN"),
        ("TEST_TOKEN", TOKEN),
        ("JOURNEYMAN__QUEUE__CLAIM_TIMEOUT", "5s"),
        ("JOURNEYMAN__QUEUE__LISTEN", listen),
        ("JOURNEYMAN__QUEUE__DB", "queue.db"),
    ]
}
