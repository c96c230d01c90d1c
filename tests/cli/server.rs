//! Commands that run for a while, as processes. Nothing here waits for a time; it waits for what a process says.

use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Said, journeyman, run};

/// A process that is killed when the test is over.
pub(crate) struct Server {
    child: Child,
    out: BufReader<ChildStdout>,
    err: BufReader<ChildStderr>,
    said: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Server {
    pub(crate) fn start(command: &mut Command) -> Self {
        // No test asks whatever metadata service the machine may have.
        command.env("JOURNEYMAN__HOST__METADATA_SERVICE", "off");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
        let out = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let err = BufReader::new(child.stderr.take().expect("stderr is piped"));
        Self { child, out, err, said: String::new() }
    }

    /// Reads standard output to the first line that holds `words`.
    pub(crate) fn prints(&mut self, words: &str) {
        self.said.push_str(&until(&mut self.out, words));
    }

    /// As [`Server::prints`], and answers with that line.
    pub(crate) fn says(&mut self, words: &str) -> String {
        let read = until(&mut self.out, words);
        self.said.push_str(&read);
        read.lines().last().unwrap_or_default().to_owned()
    }

    /// Its standard input, where that is a pipe.
    pub(crate) fn input(&mut self) -> std::process::ChildStdin {
        self.child.stdin.take().expect("stdin is piped")
    }

    /// Reads the log to the first line that holds `words`, and answers with that line.
    pub(crate) fn logs(&mut self, words: &str) -> String {
        let read = until(&mut self.err, words);
        self.said.push_str(&read);
        read.lines().last().unwrap_or_default().to_owned()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("the process is there");
    }

    pub(crate) fn ends(mut self) -> Said {
        let mut err = std::mem::take(&mut self.said);
        let mut out = String::new();
        std::io::Read::read_to_string(&mut self.err, &mut err).expect("the log is UTF-8");
        std::io::Read::read_to_string(&mut self.out, &mut out).expect("stdout is UTF-8");
        let code = self.child.wait().expect("it ends").code().unwrap_or(-1);
        Said { code, out, err }
    }
}

fn until(from: &mut impl std::io::BufRead, words: &str) -> String {
    let mut read = String::new();
    loop {
        let at = read.len();
        let more = from.read_line(&mut read).expect("it is UTF-8");
        assert!(more > 0, "it ended without saying {words:?}:\n{read}");
        if read[at..].contains(words) {
            return read;
        }
    }
}

pub(crate) fn dev(folder: &Path, arguments: &[&str]) -> Server {
    let mut command = journeyman(folder);
    command.env("TMPDIR", folder).env("NO_COLOR", "1").arg("dev").args(arguments);
    let mut server = Server::start(&mut command);
    server.prints("Ctrl-C");
    server
}

pub(crate) fn task(folder: &Path, arguments: &[&str]) -> Said {
    run(journeyman(folder).arg("task").args(arguments), "")
}

pub(crate) fn left(folder: &Path) -> Vec<String> {
    let name =
        |entry: std::io::Result<std::fs::DirEntry>| entry.expect("a name").file_name().into_string().expect("UTF-8");
    let mut left: Vec<_> = std::fs::read_dir(folder).expect("the folder is there").map(name).collect();
    left.retain(|name| name != ".local");
    left
}

/// A `task` command of the client `me` to the queue at `root`.
pub(crate) fn task_at(folder: &Path, root: &str, arguments: &[&str]) -> Said {
    let mut command = journeyman(folder);
    command.arg("task").args(arguments).env("TASKCLUSTER_ROOT_URL", root);
    run(command.env("TASKCLUSTER_CLIENT_ID", "me").env("TASKCLUSTER_ACCESS_TOKEN", "a-token-for-tests"), "")
}

/// Creates a task for `build/linux` at `root` that runs this script.
pub(crate) fn create_at(folder: &Path, root: &str, script: &str) {
    let created = task_at(folder, root, &["create", "--queue", "build/linux", "--", "/bin/sh", "-c", script]);
    assert_eq!(created.code, 0, "{}", created.err);
}

pub(crate) fn fifo(path: PathBuf) -> PathBuf {
    assert!(Command::new("mkfifo").arg(&path).status().expect("mkfifo").success());
    path
}

/// Serves until the tests end; returns the address.
pub(crate) fn serve(router: axum::Router) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("it can be");
    let address = format!("http://{}", listener.local_addr().expect("bound"));
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async { axum::serve(tokio::net::TcpListener::from_std(listener)?, router).await })
    });
    address
}
