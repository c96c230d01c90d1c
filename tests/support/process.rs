//! `journeyman worker` as a process, with a log that tests wait for.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::process::Signal;
use tokio::sync::watch;

use crate::support::within;

/// How a process ended, and its log.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) log: String,
}

impl Ended {
    pub(crate) fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// The signal that ended it.
    pub(crate) fn signal(&self) -> Option<i32> {
        std::os::unix::process::ExitStatusExt::signal(&self.status)
    }
}

/// A worker process, killed on drop.
pub(crate) struct Process {
    child: Child,
    log_text: Arc<Mutex<String>>,
    lines: watch::Receiver<usize>,
    reader: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts a worker in a directory, with only these variables.
    pub(crate) fn start(folder: &Path, config: &Path, variables: &[(&str, &str)]) -> Self {
        Self::of(command("worker", folder, config, variables))
    }

    /// Starts a command.
    pub(crate) fn of(mut command: Command) -> Self {
        let mut child = command.spawn().expect("it starts");
        let log_text = Arc::new(Mutex::new(String::new()));
        let lines = watch::Sender::new(0);
        let (seen, stderr) = (lines.subscribe(), child.stderr.take().expect("it is piped"));
        let into = Arc::clone(&log_text);
        let reader = std::thread::spawn(move || read(stderr, &into, &lines));
        Self { child, log_text, lines: seen, reader: Some(reader) }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("it runs");
    }

    /// The log so far.
    pub(crate) fn log(&self) -> String {
        self.log_text.lock().clone()
    }

    /// Waits until the log contains these words.
    pub(crate) async fn says(&mut self, words: &str) {
        assert!(self.says_or_ends(words).await, "it ended without these words: {}", self.log());
    }

    /// Returns whether the log contains these words.
    pub(crate) async fn says_or_ends(&mut self, words: &str) -> bool {
        self.line_or_end(words, 1).await.is_some()
    }

    /// Waits until so many lines of the log have these words, and returns the last of them.
    pub(crate) async fn line(&mut self, words: &str, count: usize) -> String {
        let line = self.line_or_end(words, count).await;
        line.unwrap_or_else(|| panic!("it ended without {count} lines with `{words}`: {}", self.log()))
    }

    async fn line_or_end(&mut self, words: &str, count: usize) -> Option<String> {
        let find = |log: &str| log.lines().filter(|line| line.contains(words)).nth(count - 1).map(str::to_owned);
        within(&format!("the worker says `{words}`"), async {
            loop {
                if let Some(line) = find(&self.log()) {
                    return Some(line);
                }
                if self.lines.changed().await.is_err() {
                    return find(&self.log());
                }
            }
        })
        .await
    }

    /// Drains it, and returns its log.
    pub(crate) async fn drained(self) -> String {
        self.signal(Signal::TERM);
        let ended = self.ends().await;
        assert_eq!(ended.code(), Some(0), "{}", ended.log);
        ended.log
    }

    /// Waits for its end.
    pub(crate) async fn ends(mut self) -> Ended {
        let ending = tokio::task::spawn_blocking(move || {
            drop(self.reader.take().map(JoinHandle::join));
            Ended { status: self.child.wait().expect("it ends"), log: self.log() }
        });
        within("the end of the worker", ending).await.expect("it was waited for")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn read(stderr: ChildStderr, into: &Mutex<String>, lines: &watch::Sender<usize>) {
    for line in BufReader::new(stderr).lines() {
        let Ok(line) = line else { return };
        let mut log_text = into.lock();
        log_text.push_str(&line);
        log_text.push('\n');
        drop(log_text);
        lines.send_modify(|lines| *lines += 1);
    }
}

/// `journeyman worker` or `journeyman bridge` with only these variables.
pub(crate) fn command(role: &str, folder: &Path, config: &Path, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
    command.args([role, "--config"]).arg(config).arg("--work-dir").arg(folder.join("work"));
    command.current_dir(folder).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("JOURNEYMAN__HOST__METADATA_SERVICE", "off").env("JOURNEYMAN__WORKER__CAPACITY", "2");
    command.env("JOURNEYMAN__LOG__LEVEL", "debug");
    command.envs(variables.iter().copied()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// A configuration file in this directory with a program as its handler, and more text.
pub(crate) fn config(folder: &Path, program: &str, more: &str) -> PathBuf {
    let path = folder.join("handler");
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o755).open(&path).expect("a file");
    file.write_all(program.as_bytes()).expect("it is written");
    drop(file);
    let config = folder.join("journeyman.toml");
    let text = format!("[handler.echo]\nkind = \"program\"\nexec = [\"{}\"]\n{more}", path.display());
    std::fs::write(&config, text).expect("it is written");
    config
}
