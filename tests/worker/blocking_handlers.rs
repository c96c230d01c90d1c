//! Handlers that block the threads they run on.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::Duration;

use journeyman::source::taskcluster::Dialect;
use journeyman::worker::ExitReason;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::json;
use tokio::io::AsyncReadExt;

use crate::worker::scripted::Told;
use crate::worker::service::Service;

const LEASE: Duration = Duration::from_secs(20);

fn pipe(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("a named pipe");
    path
}

/// Lets the writers go. A pipe that is opened both ways needs no other end.
fn release(pipes: &[PathBuf]) -> Vec<File> {
    let open = |path: &PathBuf| OpenOptions::new().read(true).write(true).open(path).expect("the pipe opens");
    pipes.iter().map(open).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_extended_while_every_thread_of_the_handlers_is_blocked() {
    let service = Service::start(Dialect::ClaimWork, LEASE).await;
    let mut tasks = Vec::new();
    let pipes = ["one", "two", "three", "four"].map(|name| pipe(service.folder.path(), name));
    for path in &pipes {
        tasks.push(service.create(json!({"do": "block", "pipe": path})).await);
    }
    let (worker, _told) = service.worker(|settings| settings.handler_threads = 2);
    let control = worker.control();
    // Where leases were kept on blocked threads, nothing of this test would move: this ends it.
    let (done, ended) = std::sync::mpsc::channel::<()>();
    let pipes_too = pipes.clone();
    let watchdog = std::thread::spawn(move || ended.recv_timeout(LEASE * 4).is_err().then(|| release(&pipes_too)));
    let watch = async {
        // Each lease has been extended.
        let mut look = tokio::time::interval(Duration::from_millis(50));
        while control.counts().sources.reclaims < 4 && control.counts().sources.outcomes.lost == 0 {
            look.tick().await;
        }
        let files = release(&pipes);
        control.drain().await;
        files
    };
    let (exit, files) = tokio::join!(worker.run(), watch);
    done.send(()).ok();
    assert!(watchdog.join().expect("the watchdog ends").is_none(), "nothing moved for {:?}", LEASE * 4);
    assert_eq!(exit.expect("it ran"), ExitReason::Drained);
    for task in &tasks {
        assert_eq!(service.states(task).await, ["completed"]);
    }
    assert_eq!(control.counts().sources.outcomes.lost, 0, "{:?}", control.counts());
    drop(files);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a2_a_canceled_payload_is_killed_at_its_deadline_while_every_thread_of_the_handlers_is_blocked() {
    let service = Service::start(Dialect::ClaimWork, Duration::from_secs(600)).await;
    let [blocked, alive] = ["blocked", "alive"].map(|name| pipe(service.folder.path(), name));
    let mut process = tokio::net::unix::pipe::OpenOptions::new().open_receiver(&alive).expect("the pipe opens");
    let task = service.create(json!({"do": "block-with-process", "pipe": &blocked, "alive": &alive})).await;
    let (worker, mut told) = service.worker(|settings| {
        (settings.handler_threads, settings.termination_grace) = (1, Duration::from_secs(1));
        settings.status_poll_interval = Some(Duration::from_millis(50));
    });
    let control = worker.control();
    let watch = async {
        assert!(matches!(told.recv().await, Some(Told::Started(_))));
        // A read ends at once until a writer has it open.
        let mut byte = [0];
        while matches!(process.try_read(&mut byte), Ok(0)) {
            tokio::task::yield_now().await;
        }
        service.queue.api.cancel_task(&task).await.expect("canceled");
        // The process ends although its handler does not.
        let ended = process.read(&mut byte);
        let ended = tokio::time::timeout(Duration::from_secs(60), ended).await.map(|read| read.expect("it is read"));
        let files = release(&[blocked]);
        control.drain().await;
        assert_eq!(ended, Ok(0), "the payload outlived its grace");
        files
    };
    let (exit, files) = tokio::join!(worker.run(), watch);
    assert_eq!(exit.expect("it ran"), ExitReason::Drained);
    assert_eq!(service.states(&task).await, ["exception/canceled"]);
    assert_eq!(control.counts().sources.outcomes.canceled, 1, "{:?}", control.counts());
    drop(files);
}
