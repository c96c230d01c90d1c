//! `journeyman dev --rabbitmq`: everything on one machine, and nothing left of it.

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;

use super::Pool;
use crate::process::Process;
use crate::support::{PATIENCE, within};

fn dev(pool: &Pool, folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
    command.args(["dev", "--rabbitmq", &pool.uri]).env_clear().env("TMPDIR", folder);
    command.env("PATH", std::env::var_os("PATH").unwrap_or_default()).stdin(Stdio::null());
    command
}

/// What is left of its pool, which it has named.
async fn left(pool: &Pool, out: &str) -> Vec<String> {
    let name = out.split("pool ").nth(1).and_then(|rest| rest.split(':').next()).expect("a pool").to_owned();
    let name = name.replace('-', "%2D");
    let mut left = Vec::new();
    for queue in ["orphan", "deadletter", "poison", "controller", "req-42", "req-busy", "req-infra%3D7%20%C3%BC"] {
        let queue = format!("{name}-{queue}");
        if pool.depth(&queue).await.is_some() {
            left.push(queue);
        }
    }
    left
}

fn files(folder: &Path) -> usize {
    std::fs::read_dir(folder).expect("a folder").count()
}

#[tokio::test(flavor = "multi_thread")]
async fn dev_with_a_broker_answers_every_call_and_leaves_nothing_behind() {
    let Some(pool) = Pool::new().await else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = dev(&pool, folder.path());
    let said = tokio::task::spawn_blocking(move || command.output().expect("it runs"));
    // As long as it takes itself, and its leaving.
    let said = tokio::time::timeout(3 * PATIENCE, said).await.expect("the demo ends").expect("it ends");
    let (out, err) = (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    assert_eq!((said.status.code(), &*err), (Some(0), ""), "{out}");
    for part in ["10 of 10 calls answered", "groups: 42 active", "gone in ", "groups: none"] {
        assert!(out.contains(part), "{part}: {out}");
    }
    assert!(!out.contains("guest:"), "{out}");
    assert_eq!(left(&pool, &out).await, Vec::<String>::new(), "{out}");
    assert_eq!(files(folder.path()), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn dev_with_a_broker_that_is_ended_early_leaves_nothing_behind() {
    let Some(pool) = Pool::new().await else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = dev(&pool, folder.path());
    // What it prints is read as its log, so that its first words can be waited for.
    command
        .stderr(Stdio::piped())
        .stdout(Stdio::from(std::fs::File::create(folder.path().join("out")).expect("a file")));
    let early = Process::of(command);
    let out = folder.path().join("out");
    within("a group is there", async {
        while !tokio::fs::read_to_string(&out).await.unwrap_or_default().contains("groups: 42") {}
    })
    .await;
    early.signal(Signal::INT);
    let ended = early.ends().await;
    assert_eq!(ended.code(), Some(1), "{}", ended.log);
    assert!(ended.log.contains("ended before every call was answered"), "{}", ended.log);
    let said = std::fs::read_to_string(&out).expect("it was written");
    assert_eq!(left(&pool, &said).await, Vec::<String>::new(), "{said}");
    assert_eq!(files(folder.path()), 1, "its output alone");
}
