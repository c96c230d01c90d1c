//! Commands that run until they are stopped. Tests wait for their output, never for a time.

use std::io::{BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::cli::support::{Said, journeyman};

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
        // Tests do not use the metadata service of the machine.
        command.env("JOURNEYMAN__HOST__METADATA_SERVICE", "off");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
        let out = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let err = BufReader::new(child.stderr.take().expect("stderr is piped"));
        Self { child, out, err, said: String::new() }
    }

    /// Reads standard output to the first line that holds `words`, and returns that line.
    pub(crate) fn prints(&mut self, words: &str) -> String {
        let read = until(&mut self.out, words);
        self.said.push_str(&read);
        read.lines().last().unwrap_or_default().to_owned()
    }

    /// Its standard input, where that is a pipe.
    pub(crate) fn input(&mut self) -> std::process::ChildStdin {
        self.child.stdin.take().expect("stdin is piped")
    }

    /// Reads the log to the first line that holds `words`, and returns that line.
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

    /// Releases claims and exits.
    pub(crate) fn quit(self) {
        self.signal(Signal::QUIT);
        self.ends_with(14);
    }

    /// Finishes tasks and exits.
    pub(crate) fn drain(self) -> Said {
        self.signal(Signal::TERM);
        self.ends_with(0)
    }

    pub(crate) fn ends_with(self, code: i32) -> Said {
        let said = self.ends();
        assert_eq!(said.code, code, "{}{}", said.out, said.err);
        said
    }

    pub(crate) fn ends(mut self) -> Said {
        let mut err = std::mem::take(&mut self.said);
        let mut out = String::new();
        self.err.read_to_string(&mut err).expect("the log is UTF-8");
        self.out.read_to_string(&mut out).expect("stdout is UTF-8");
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

pub(crate) fn left(folder: &Path) -> Vec<String> {
    let name =
        |entry: std::io::Result<std::fs::DirEntry>| entry.expect("a name").file_name().into_string().expect("UTF-8");
    let mut left: Vec<_> = std::fs::read_dir(folder).expect("the folder is there").map(name).collect();
    left.retain(|name| name != ".local");
    left
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

/// Sends a GET request and returns the whole response.
pub(crate) fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("a connection");
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("the request is sent");
    let mut response = String::new();
    stream.read_to_string(&mut response).expect("the response is UTF-8");
    response
}
