//! Tasks that do nothing: throughput, latency, many leases; and workers without a task.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use crate::machine::{Row, Spans, flushes, micros_each, now};
use crate::no_op_worker::{From, Payload};
use crate::programs::{Program, Queue, Role, TIMEOUT};
use crate::{Lab, Outcome};

/// Fails unless the workers together have claimed and completed so many tasks, and nothing else happened.
pub(crate) fn nothing_else(counts: &[Value], tasks: usize) -> Outcome<()> {
    let number = |name: &str| counts.iter().map(|counts| counts[name].as_u64().unwrap_or(1 << 32)).sum::<u64>();
    let never = [
        "claims_refused",
        "failed",
        "worker-shutdown",
        "malformed-payload",
        "resource-unavailable",
        "internal-error",
        "intermittent-task",
        "canceled",
        "deadline-exceeded",
        "superseded",
        "lost",
        "overlaps_possible",
    ];
    let done = [number("claims"), number("completed")];
    if never.iter().all(|name| number(name) == 0) && done == [tasks as u64; 2] {
        return Ok(());
    }
    Err(format!("of {tasks} tasks the workers counted {counts:?}").into())
}

/// Tasks before the first that is measured.
pub(crate) const WARM_UP: u64 = 10;

/// How long tasks take from just before createTask is sent until the handler of an idle worker runs.
pub(crate) async fn starts(queue: &Queue, worker: &mut Role, count: u64) -> Outcome<Spans> {
    let mut spans = Vec::new();
    for number in 0..WARM_UP + count {
        // The worker is idle again, and no two samples meet its timers at the same place.
        sleep(Duration::from_micros(8_000 + number * 7_919 % 12_000)).await;
        let sent_at = now();
        let task = queue.create_one(&json!({})).await?;
        let line = worker.line("started").await?;
        let (at, name) = line.split_once(' ').ok_or("a start without a task")?;
        if name != task.as_str() {
            return Err(format!("{task} was created, {name} was started").into());
        }
        if number >= WARM_UP {
            spans.push(Duration::from_nanos(at.parse()?) - sent_at);
        }
    }
    Ok(Spans::new(spans))
}

impl Lab {
    fn task_worker(&self, queue: &Queue, capacity: usize, payload: Payload, expected: usize) -> Outcome<Role> {
        let from = From::Taskcluster { root_url: queue.root_url.clone() };
        self.no_op_worker(from, u32::try_from(capacity)?, payload, expected)
    }

    /// Tasks that wait in the queue when the worker starts, until the last is reported.
    pub(crate) async fn tasks(&self) -> Outcome<Vec<Row>> {
        let mut rows = Vec::new();
        for capacity in [32, 256] {
            let count = self.pick(20_000, 300);
            let disk = flushes(self.path(), self.pick(Duration::from_secs(1), Duration::from_millis(50))).await?;
            let queue = Queue::start(self, "20m").await?;
            let tasks = queue.create(count, &json!({})).await?;
            let before = queue.program.usage()?;
            let mut worker = self.task_worker(&queue, capacity, Payload::Nothing, count)?;
            let (elapsed, cpu, counted) = worker.done().await?;
            let after = queue.program.usage()?;
            nothing_else(&[worker.counts().await?], count)?;
            worker.stop().await?;
            queue.completed_once(&tasks).await?;
            rows.push(Row {
                figure: format!("no-op tasks, capacity {capacity}, durable; 0 of {count} lost"),
                reached: format!("{:.0} tasks/s", counted as f64 / elapsed.as_secs_f64()),
                aim: "≥ 3000 tasks/s",
                limit: format!("{:.0} fdatasync/s", disk.per_second()),
            });
            rows.push(Row {
                figure: format!("… CPU a task, capacity {capacity}"),
                reached: format!("{:.0} µs worker", micros_each(cpu, counted)),
                aim: "≤ 150 µs",
                limit: format!("{:.0} µs queue", micros_each(after.cpu - before.cpu, count)),
            });
        }
        Ok(rows)
    }

    pub(crate) async fn latency(&self) -> Outcome<Vec<Row>> {
        let disk = flushes(self.path(), self.pick(Duration::from_secs(1), Duration::from_millis(50))).await?;
        let queue = Queue::start(self, "20m").await?;
        let mut worker = self.task_worker(&queue, 4, Payload::Stamp, 0)?;
        worker.line("working").await?;
        let spans = starts(&queue, &mut worker, self.pick(400, 20)).await?;
        worker.stop().await?;
        Ok(vec![Row {
            figure: format!("create to start, long poll: p50 and p99 of {}", spans.len()),
            reached: spans.pair(50, 99),
            aim: "≤ 3 ms and ≤ 10 ms",
            limit: format!("fdatasync {}", disk.pair(50, 99)),
        }])
    }

    /// Workers without a task, all at the same time.
    pub(crate) async fn idle(&self) -> Outcome<Vec<Row>> {
        let queue = Queue::start(self, "20m").await?;
        let (settle, lasting) = self.pick((3, 20), (1, 1));
        let mut workers = Vec::new();
        for dialect in ["claim-work", "azure"] {
            for queues in [1, 100] {
                let names: Vec<String> = (0..queues).map(|n| format!("bench-{dialect}/queue-{queues}-{n}")).collect();
                let more = format!("[host]\nmetadata_service = \"off\"\n[worker]\ncapacity = {queues}");
                let worker = Program::worker(self, dialect, &queue.root_url, &names, &more)?;
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
            rows.push(Row {
                figure: format!("idle `journeyman worker`, {queues} queues, {dialect}, over {lasting} s"),
                reached: format!("{share:.3} % CPU, {:.1} MB", after.megabytes()),
                aim: if *queues == 1 { "≤ 0.1 %, ≤ 15 MB" } else { "" },
                limit: format!("{:.1} MB of them pages of the program", after.program_kib as f64 * 1024.0 / 1e6),
            });
        }
        Ok(rows)
    }

    /// Many claims held and reclaimed by one worker.
    pub(crate) async fn leases(&self) -> Outcome<Vec<Row>> {
        let (count, claim_timeout, each) = self.pick((10_000, "30s", 2), (100, "20s", 1));
        let queue = Queue::start(self, claim_timeout).await?;
        let mut worker = self.task_worker(&queue, count, Payload::Wait, count)?;
        worker.line("working").await?;
        let before = worker.usage()?;
        let tasks = queue.create(count, &json!({})).await?;
        let mut reached = async |counter: &str, wanted: u64| loop {
            let counts = worker.counts().await?;
            if counts[counter].as_u64() >= Some(wanted) {
                return Outcome::Ok((worker.usage()?, counts));
            }
            sleep(Duration::from_millis(20)).await;
        };
        let (held, _) = timeout(TIMEOUT, reached("claims", count as u64)).await??;
        let (after, counts) = timeout(TIMEOUT, reached("reclaims", count as u64 * each)).await??;
        worker.send("release").await?;
        worker.done().await?;
        nothing_else(&[worker.counts().await?], count)?;
        worker.stop().await?;
        queue.completed_once(&tasks).await?;
        let reclaims = counts["reclaims"].as_u64().unwrap_or_default();
        Ok(vec![Row {
            figure: format!("{count} leases of {claim_timeout} held by one worker: memory each; 0 of {count} lost"),
            reached: format!(
                "{:.1} KiB, {:.1} KiB after reclaims",
                held.kib_above(before, count),
                after.kib_above(before, count)
            ),
            aim: "0 refused",
            limit: format!(
                "{reclaims} reclaims, {} refused, {:.0} µs CPU each",
                counts["reclaims_failed"],
                micros_each(after.cpu - held.cpu, usize::try_from(reclaims.max(1))?)
            ),
        }])
    }
}
