//! The measurements, one function each.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::contain::{self, Part};
use crate::fleet::{Client, Process, Queue, RealWorker, Usage, WORKER_THREADS, fresh, nothing_else, numbers};
use crate::limits::{Spans, flushes, processes};
use crate::roles::{Payload, Role, WorkerRole, now};
use crate::table::{Row, Table, load};
use crate::{Done, Size};

/// The measurements by name.
pub(crate) const NAMES: [&str; 13] = [
    "tasks",
    "commands",
    "requests",
    "controller",
    "latency",
    "notice",
    "cancel",
    "idle",
    "leases",
    "trees",
    "starts",
    "start",
    "size",
];

pub(crate) const QUEUE: &str = "bench/tasks";
pub(crate) const CLAIM_TIMEOUT: Duration = Duration::from_secs(1200);

/// Where and how much is measured.
pub(crate) struct Lab {
    folder: tempfile::TempDir,
    pub(crate) size: Size,
}

/// Measures all, or those that are named, into the table; in a folder of their own in `place`.
pub(crate) async fn measure(size: Size, place: &Path, only: &[&str], table: &mut Table) -> Done<()> {
    std::fs::create_dir_all(place)?;
    let lab = Lab { folder: tempfile::tempdir_in(place)?, size };
    let wanted: Vec<&str> = NAMES.into_iter().filter(|name| only.is_empty() || only.contains(name)).collect();
    for (at, name) in wanted.iter().enumerate() {
        eprintln!("{} of {}: {name}", at + 1, wanted.len());
        let rows = match *name {
            "tasks" => lab.tasks().await,
            "commands" => lab.commands().await,
            "requests" => lab.requests().await,
            "controller" => Box::pin(lab.controller()).await,
            "latency" => lab.latency().await,
            "notice" => lab.notice().await,
            "cancel" => lab.cancel().await,
            "idle" => lab.idle().await,
            "leases" => lab.leases().await,
            "trees" => contain::alone(Part::Trees { count: lab.size.pick(300, 20) }, lab.path()).await,
            "starts" => contain::alone(Part::Starts { count: lab.size.pick(400, 24) }, lab.path()).await,
            "start" => lab.start().await,
            _ => size_of_binary(),
        };
        table.rows.extend(rows.map_err(|error| format!("{name}: {error}"))?);
    }
    Ok(())
}

pub(crate) fn millis(span: Duration) -> String {
    format!("{:.2} ms", span.as_secs_f64() * 1e3)
}

fn micros(span: Duration, tasks: usize) -> f64 {
    span.as_secs_f64() * 1e6 / tasks as f64
}

impl Lab {
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    fn worker(&self, client: &Client, capacity: u32, payload: Payload) -> Done<WorkerRole> {
        Ok(WorkerRole {
            root_url: client.root_url.clone(),
            requests: None,
            azure: false,
            queues: vec![QUEUE.to_owned()],
            capacity,
            work_dir: self.work_dir()?,
            payload,
            expected: 0,
        })
    }

    fn start_worker(&self, settings: WorkerRole) -> Done<Process> {
        let role = Role { worker: Some(settings), threads: WORKER_THREADS, ..Role::default() };
        Process::start(&role, &self.path().join("worker.log"))
    }

    pub(crate) fn work_dir(&self) -> Done<PathBuf> {
        fresh(self.path(), "work")
    }

    /// No-op tasks that wait in the queue when the worker starts, until the last one is reported.
    async fn tasks(&self) -> Done<Vec<Row>> {
        let mut rows = Vec::new();
        for capacity in [32, 256] {
            let count = self.size.pick(20_000, 300);
            let disk = flushes(self.path(), self.size.pick(Duration::from_secs(1), Duration::from_millis(50))).await?;
            let load = load();
            let ran = self.drain(capacity, count, Payload::Nothing, &json!({})).await?;
            rows.push(Row {
                what: format!("no-op tasks, capacity {capacity}, durable; 0 of {count} lost"),
                reached: format!("{:.0} tasks/s", ran.per_second),
                aim: "≥ 3000 tasks/s".to_owned(),
                limit: format!("{:.0} fdatasync/s", disk.per_second()),
                load,
            });
            rows.push(Row {
                what: format!("… CPU a task, capacity {capacity}"),
                reached: format!("{:.0} µs worker", ran.worker_us),
                aim: "≤ 150 µs".to_owned(),
                limit: format!("{:.0} µs queue beside it", ran.queue_us),
                load,
            });
        }
        Ok(rows)
    }

    /// The worker against a loop that does nothing but start processes and wait for them.
    async fn commands(&self) -> Done<Vec<Row>> {
        let mut rows = Vec::new();
        for capacity in [8_u32, 32] {
            let (count, parallel) = (self.size.pick(2_000, 60), usize::try_from(capacity)?);
            let load = load();
            let before = processes(parallel, count).await?;
            let payload = json!({"command": [["/bin/true"]], "maxRunTime": 60});
            let ran = self.drain(capacity, count, Payload::Command, &payload).await?;
            let bare = f64::midpoint(before, processes(parallel, count).await?);
            rows.push(Row {
                what: format!("/bin/true tasks, capacity {capacity}; 0 of {count} lost"),
                reached: format!("{:.0} tasks/s, {:.0} %", ran.per_second, ran.per_second * 100.0 / bare),
                aim: "≥ 60 %".to_owned(),
                limit: format!("{bare:.0} /s spawned and waited for"),
                load,
            });
            rows.push(Row {
                what: format!("… CPU a task, capacity {capacity}"),
                reached: format!("{:.0} µs worker", ran.worker_us),
                aim: String::new(),
                limit: format!("{:.0} µs queue beside it", ran.queue_us),
                load,
            });
        }
        Ok(rows)
    }

    async fn drain(&self, capacity: u32, count: usize, payload: Payload, task: &serde_json::Value) -> Done<Ran> {
        let mut queue = Queue::start(self.path(), CLAIM_TIMEOUT).await?;
        let tasks = queue.client.create(QUEUE, count, task).await?;
        let before = queue.process.usage().await?;
        let worker = WorkerRole { expected: count as u64, ..self.worker(&queue.client, capacity, payload)? };
        let mut worker = self.start_worker(worker)?;
        let [elapsed, cpu] = numbers(&worker.hear("done").await?)?;
        let after = queue.process.usage().await?;
        nothing_else(&worker.counts().await?, count)?;
        worker.end().await?;
        none_lost(&queue.client, &tasks).await?;
        queue.process.end().await?;
        Ok(Ran {
            per_second: count as f64 / Duration::from_nanos(elapsed).as_secs_f64(),
            worker_us: micros(Duration::from_nanos(cpu), count),
            queue_us: micros(after.cpu - before.cpu, count),
        })
    }

    /// From just before createTask is sent until the handler runs, with a worker that has nothing to do.
    async fn latency(&self) -> Done<Vec<Row>> {
        let disk = flushes(self.path(), self.size.pick(Duration::from_secs(1), Duration::from_millis(50))).await?;
        let limit = format!("fdatasync {} and {}", millis(disk.percentile(50)), millis(disk.percentile(99)));
        let load = load();
        let queue = Queue::start(self.path(), CLAIM_TIMEOUT).await?;
        let mut worker = self.start_worker(self.worker(&queue.client, 4, Payload::Stamp)?)?;
        let long_poll = self.starts(&queue.client, &mut worker).await?;
        worker.end().await?;
        queue.process.end().await?;
        let settings = WorkerRole { azure: true, ..self.worker(&queue.client, 4, Payload::Stamp)? };
        let mut both = Queue::with_worker(self.path(), CLAIM_TIMEOUT, settings).await?;
        let in_process = self.starts(&both.client, &mut both.process).await?;
        both.process.end().await?;
        let row = |what: &str, spans: &Spans| Row {
            what: format!("create to start, {what}: p50 and p99 of {}", spans.len()),
            reached: format!("{} and {}", millis(spans.percentile(50)), millis(spans.percentile(99))),
            aim: "≤ 3 ms and ≤ 10 ms".to_owned(),
            limit: limit.clone(),
            load,
        };
        Ok(vec![
            row("long poll over loopback", &long_poll),
            row("woken in the same process (azure, last of 7 queues)", &in_process),
        ])
    }

    async fn starts(&self, client: &Client, worker: &mut Process) -> Done<Spans> {
        worker.hear("working").await?;
        let (warm, count) = (10, self.size.pick(400, 20));
        let mut spans = Vec::new();
        for number in 0..warm + count {
            // The worker is back at rest, and no two samples meet its clock in the same place.
            sleep(Duration::from_micros(8_000 + number as u64 * 7_919 % 12_000)).await;
            let sent_at = now();
            let task = client.create_one(QUEUE, &json!({})).await?;
            let heard = worker.hear("started").await?;
            let (at, name) = heard.split_once(' ').ok_or("a start has a time")?;
            if name != task.as_str() {
                return Err(format!("{task} was created, {name} was started").into());
            }
            if number >= warm {
                spans.push(Duration::from_nanos(at.parse()?) - sent_at);
            }
        }
        let counts = worker.counts().await?;
        // The last one may not have been reported yet.
        if counts["claims"] != warm + count || counts["lost"] != 0 {
            return Err(format!("of {} tasks the worker counted {counts}", warm + count).into());
        }
        Ok(Spans::new(spans))
    }

    /// Workers that have nothing to do, each in its own process, all at the same time.
    async fn idle(&self) -> Done<Vec<Row>> {
        let load = load();
        let queue = Queue::start(self.path(), CLAIM_TIMEOUT).await?;
        let (settle, lasting) = self.size.pick((3, 20), (1, 1));
        let mut workers = Vec::new();
        for (dialect, azure) in [("claim-work", false), ("azure", true)] {
            for queues in [1_u32, 100] {
                let names = (0..queues).map(|number| format!("bench-{dialect}/queue-{queues}-{number}"));
                let names: Vec<_> = names.collect();
                let worker = RealWorker::start(self.path(), azure, &queue.client.root_url, &names)?;
                workers.push((dialect, queues, worker));
            }
        }
        sleep(Duration::from_secs(settle)).await;
        let mut before = Vec::new();
        for (_, _, worker) in &workers {
            before.push((now(), worker.usage()?));
        }
        sleep(Duration::from_secs(lasting)).await;
        let mut rows = Vec::new();
        for ((dialect, queues, worker), (at, before)) in workers.iter().zip(before) {
            let after = worker.usage()?;
            let share = (after.cpu - before.cpu).as_secs_f64() * 100.0 / (now() - at).as_secs_f64();
            let name = if *queues == 1 { "1 queue".to_owned() } else { format!("{queues} queues") };
            rows.push(Row {
                what: format!("idle `journeyman worker`, {name}, {dialect}, over {lasting} s"),
                reached: format!("{share:.3} % CPU, {:.1} MB", megabytes(after)),
                aim: if *queues == 1 { "≤ 0.1 %, ≤ 15 MB".to_owned() } else { String::new() },
                limit: String::new(),
                load,
            });
        }
        drop(workers);
        queue.process.end().await?;
        Ok(rows)
    }

    /// Many claims held at once, long enough for each to be extended.
    async fn leases(&self) -> Done<Vec<Row>> {
        let (count, claim_timeout, each) = self.size.pick((10_000_u32, 30, 2), (100, 20, 1));
        let load = load();
        let queue = Queue::start(self.path(), Duration::from_secs(claim_timeout)).await?;
        let settings = WorkerRole { expected: count.into(), ..self.worker(&queue.client, count, Payload::Wait)? };
        let mut worker = self.start_worker(settings)?;
        worker.hear("working").await?;
        sleep(Duration::from_secs(1)).await;
        let before = worker.usage().await?;
        let began = now();
        let tasks = queue.client.create(QUEUE, usize::try_from(count)?, &json!({})).await?;
        worker.until("claims", count.into()).await?;
        let held = worker.usage().await?;
        let claimed_in = now() - began;
        worker.until("reclaims", u64::from(count) * each).await?;
        let [answered, refused, late, worst] = worker.reclaims().await?;
        let after = worker.usage().await?;
        worker.tell("release").await?;
        worker.hear("done").await?;
        nothing_else(&worker.counts().await?, tasks.len())?;
        worker.end().await?;
        none_lost(&queue.client, &tasks).await?;
        queue.process.end().await?;
        let kib = |usage: Usage| usage.resident_kib.saturating_sub(before.resident_kib) as f64 / f64::from(count);
        let reclaim_us = micros((after.cpu - held.cpu).max(Duration::ZERO), usize::try_from(answered.max(1))?);
        Ok(vec![
            Row {
                what: format!("{count} leases held by one worker: memory a lease, once claimed and after reclaims"),
                reached: format!("{:.1} KiB and {:.1} KiB", kib(held), kib(after)),
                aim: String::new(),
                limit: format!("created and claimed in {:.1} s", claimed_in.as_secs_f64()),
                load,
            },
            Row {
                what: format!("… reclaims of leases of {claim_timeout} s on time; 0 of {count} lost"),
                reached: format!("{} of {answered}, {refused} refused", answered - late),
                aim: "all, 0 refused".to_owned(),
                limit: format!("latest answer at {:.0} % of a lease, {reclaim_us:.0} µs CPU each", worst as f64 / 10.0),
                load,
            },
        ])
    }

    /// From before the process is started until its request for work has arrived.
    async fn start(&self) -> Done<Vec<Row>> {
        let load = load();
        let mut spans = Vec::new();
        for _ in 0..self.size.pick(30, 3) {
            let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
            let root_url = format!("http://{}", listener.local_addr()?);
            let began = now();
            let worker = RealWorker::start(self.path(), false, &root_url, &[QUEUE.to_owned()])?;
            timeout(Duration::from_secs(30), first_poll(&listener)).await.map_err(|_| "no poll came")??;
            spans.push(now() - began);
            drop(worker);
        }
        let bare = bare_start().await?;
        let spans = Spans::new(spans);
        Ok(vec![Row {
            what: "start of `journeyman worker` to first poll: p50 and slowest".to_owned(),
            reached: format!("{} and {}", millis(spans.percentile(50)), millis(spans.percentile(100))),
            aim: "≤ 50 ms".to_owned(),
            limit: format!("{} for `journeyman --version`", millis(bare.percentile(50))),
            load,
        }])
    }
}

/// What a queue was worked off with.
struct Ran {
    per_second: f64,
    worker_us: f64,
    queue_us: f64,
}

async fn none_lost(client: &Client, tasks: &HashSet<String>) -> Done<()> {
    match client.not_completed_once(tasks).await? {
        0 => Ok(()),
        lost => Err(format!("{lost} of {} tasks were not completed by exactly one run", tasks.len()).into()),
    }
}

fn megabytes(usage: Usage) -> f64 {
    usage.resident_kib as f64 * 1024.0 / 1e6
}

/// Answers that nothing is claimed until work is asked for.
async fn first_poll(listener: &TcpListener) -> Done<()> {
    let mut calls = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let stream = accepted?.0;
                calls.spawn(until_poll(stream));
            }
            Some(polled) = calls.join_next() => return polled?,
        }
    }
}

async fn until_poll(stream: TcpStream) -> Done<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut first = String::new();
        stream.read_line(&mut first).await?;
        if first.contains("/claim-work/") {
            return Ok(());
        }
        let mut line = first;
        while !line.trim().is_empty() {
            line.clear();
            stream.read_line(&mut line).await?;
        }
        let body = r#"{"tasks":[]}"#;
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        stream.write_all(answer.as_bytes()).await?;
    }
}

async fn bare_start() -> Done<Spans> {
    let mut spans = Vec::new();
    for _ in 0..20 {
        let began = now();
        let output = Command::new(env!("CARGO_BIN_EXE_journeyman")).arg("--version").output().await?;
        spans.push(now() - began);
        if !output.status.success() {
            return Err("journeyman --version failed".into());
        }
    }
    Ok(Spans::new(spans))
}

fn size_of_binary() -> Done<Vec<Row>> {
    let bytes = std::fs::metadata(env!("CARGO_BIN_EXE_journeyman"))?.len();
    Ok(vec![Row {
        what: "the binary, release and stripped".to_owned(),
        reached: format!("{:.1} MB", bytes as f64 / 1e6),
        aim: String::new(),
        limit: String::new(),
        load: load(),
    }])
}
