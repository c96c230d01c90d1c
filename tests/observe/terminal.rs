//! `journeyman top` on a real terminal, which tmux is.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::cli::server::{Server, dev};
use crate::cli::support::journeyman;
use crate::observe::task;

/// How long a screen may take to show something, on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A tmux server of this test's own, gone with it.
struct Tmux {
    socket: std::path::PathBuf,
}

impl Tmux {
    fn tell(&self, arguments: &[&str]) -> Output {
        Command::new("tmux").arg("-S").arg(&self.socket).args(arguments).output().expect("tmux runs")
    }

    fn screen(&self) -> String {
        String::from_utf8_lossy(&self.tell(&["capture-pane", "-p"]).stdout).into_owned()
    }

    /// Looks until the screen shows it; `top` itself looks once a second.
    fn shows(&self, words: &str) -> String {
        let until = Instant::now() + TIMEOUT;
        loop {
            let screen = self.screen();
            if screen.contains(words) {
                return screen;
            }
            assert!(Instant::now() < until, "{words:?} never came:\n{screen}");
            std::thread::yield_now();
        }
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        self.tell(&["kill-server"]);
    }
}

fn there(program: &str) -> bool {
    let there = Command::new(program).arg("-V").output().is_ok();
    assert!(there || std::env::var("CI").as_deref() != Ok("true"), "CI=true, and there is no {program}");
    if !there {
        eprintln!("NOT TESTED: there is no {program}");
    }
    there
}

fn top(here: &Path) -> Tmux {
    let tmux = Tmux { socket: here.join("tmux") };
    let command = format!("env HOME={} {} top", here.display(), env!("CARGO_BIN_EXE_journeyman"));
    // Its end is seen as well as its screen.
    let script = format!("{command}; echo it ended with $?; read line");
    let started = tmux.tell(&["-f", "/dev/null", "new-session", "-d", "-x", "110", "-y", "30", &script]);
    assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    tmux
}

#[test]
fn top_shows_a_running_task_and_pauses_after_a_yes() {
    if !there("tmux") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let _dev = dev(here, &[]);
    let created = task(here, &["create", "--", "/bin/sh", "-c", "exec sleep 600"]).out;
    let id = created.split_whitespace().next().expect("the id").to_owned();
    let tmux = top(here);
    tmux.shows(&id);
    // What is drawn last: a screen may be seen half drawn.
    let screen = tmux.shows("q quit");
    assert!(screen.contains("RUNNING") && screen.contains("LEASE LEFT") && screen.contains("q quit"), "{screen}");
    tmux.tell(&["send-keys", "p"]);
    tmux.shows("Pause: claim nothing");
    tmux.tell(&["send-keys", "y"]);
    tmux.shows("PAUSED");
    tmux.tell(&["send-keys", "q"]);
    tmux.shows("it ended with 0");
}

#[test]
fn top_without_a_terminal_prints_the_status_repeatedly() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let _dev = dev(here, &[]);
    let mut top = Server::start(journeyman(here).arg("top"));
    for _ in 0..2 {
        top.prints("RUNNING");
        top.prints("last hour");
    }
}
