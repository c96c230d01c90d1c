//! Tasks that run a process: throughput, and how fast they end at a termination notice and a cancellation.

use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use journeyman_domain::id::TaskId;
use serde_json::json;
use tokio::process::Command;
use tokio::time::sleep;

use crate::machine::{Row, Spans, micros_each, millis, now, spawns_per_second};
use crate::metadata::{Cloud, Metadata};
use crate::programs::{Program, QUEUE, Queue, until};
use crate::{Lab, Outcome};

impl Lab {
    fn command_worker(&self, queue: &Queue, more: &str) -> Outcome<Program> {
        Program::worker(self, "claim-work", &queue.root_url, &[QUEUE.to_owned()], more)
    }

    /// `journeyman worker` beside a loop that only starts processes and waits for them.
    pub(crate) async fn commands(&self) -> Outcome<Vec<Row>> {
        let mut rows = Vec::new();
        for capacity in [8, 32] {
            let count = self.pick(2_000, 60);
            let before = spawns_per_second(capacity, count).await?;
            let queue = Queue::start(self, "20m").await?;
            let tasks = queue.create(count, &json!({"command": [["/bin/true"]], "maxRunTime": 60})).await?;
            let queue_before = queue.program.usage()?;
            let more = format!("[host]\nmetadata_service = \"off\"\n[worker]\ncapacity = {capacity}");
            let worker = self.command_worker(&queue, &more)?;
            let client = worker.control().await?;
            let completed = async || Outcome::Ok(client.status().await?.snapshot.counts.sources.outcomes.completed);
            until("the first task", async || Ok(completed().await? > 0)).await?;
            let (began, from, cpu) = (now(), completed().await?, worker.usage()?.cpu);
            until("the last task", async || {
                // The status reads the memory of each task that runs, so a measurement asks for it as seldom as a person does.
                sleep(Duration::from_millis(50)).await;
                Ok(completed().await? >= count as u64)
            })
            .await?;
            let (elapsed, cpu) = (now() - began, worker.usage()?.cpu - cpu);
            let counted = count - usize::try_from(from)?;
            let queue_cpu = queue.program.usage()?.cpu - queue_before.cpu;
            queue.completed_once(&tasks).await?;
            let bare = f64::midpoint(before, spawns_per_second(capacity, count).await?);
            let per_second = counted as f64 / elapsed.as_secs_f64();
            rows.push(Row {
                figure: format!("/bin/true tasks, capacity {capacity}; 0 of {count} lost"),
                reached: format!("{per_second:.0} tasks/s, {:.0} %", per_second * 100.0 / bare),
                aim: "≥ 60 %",
                limit: format!("{bare:.0} /s spawned and waited for"),
            });
            rows.push(Row {
                figure: format!("… CPU a task, capacity {capacity}"),
                reached: format!("{:.0} µs worker", micros_each(cpu, counted)),
                aim: "",
                limit: format!("{:.0} µs queue", micros_each(queue_cpu, count)),
            });
        }
        Ok(rows)
    }

    /// The time from the start of the process until a waiting task has started.
    pub(crate) async fn start(&self) -> Outcome<Vec<Row>> {
        let queue = Queue::start(self, "20m").await?;
        let (mut spans, mut bare) = (Vec::new(), Vec::new());
        for _ in 0..self.pick(30, 3) {
            let started = self.fresh("started")?;
            let task = queue.create_one(&command(&started, "true")).await?;
            let began = now();
            let more = "[host]\nmetadata_service = \"off\"\n[worker]\ncapacity = 1\nmax_tasks = 1";
            let mut worker = self.command_worker(&queue, more)?;
            until("the start of a task", async || Ok(started.join(task.as_str()).exists())).await?;
            spans.push(now() - began);
            worker.exit_code().await?;
            queue.completed_once(&[task]).await?;
            let began = now();
            let version = Command::new(env!("CARGO_BIN_EXE_journeyman")).arg("--version").output().await?;
            bare.push(now() - began);
            if !version.status.success() {
                return Err("journeyman --version failed".into());
            }
        }
        let (spans, bare) = (Spans::new(spans), Spans::new(bare));
        let bytes = std::fs::metadata(env!("CARGO_BIN_EXE_journeyman"))?.len();
        Ok(vec![
            Row {
                figure: "start of `journeyman worker` to the start of a waiting task: p50 and slowest".to_owned(),
                reached: spans.pair(50, 100),
                aim: "",
                limit: format!("{} for `journeyman --version`", millis(bare.percentile(50))),
            },
            Row {
                figure: "the binary, stripped".to_owned(),
                reached: format!("{:.1} MB", bytes as f64 / 1e6),
                aim: "",
                limit: String::new(),
            },
        ])
    }

    /// From a termination notice of the metadata service until the queue has the last report.
    pub(crate) async fn notice(&self) -> Outcome<Vec<Row>> {
        let mut rows = Vec::new();
        for (script, payloads, aim) in [
            ("exec sleep 600", "payloads that exit on TERM", "≤ 150 ms + a round trip"),
            (
                "trap '' TERM; while :; do sleep 1; done",
                "payloads that ignore TERM, killed after 2 s",
                "≤ 2150 ms + a round trip",
            ),
        ] {
            let (count, mut spans, mut calls) = (32, Vec::new(), Vec::new());
            for _ in 0..self.pick(10, 1) {
                let queue = Queue::start(self, "20m").await?;
                spans.push(self.terminated(&queue, count, script).await?);
                let task = queue.create_one(&json!({})).await?;
                for _ in 0..10 {
                    calls.push(queue.round_trip(&task).await?);
                }
            }
            let (spans, calls) = (Spans::new(spans), Spans::new(calls));
            rows.push(Row {
                figure: format!(
                    "termination notice to the last of {count} reports, {payloads}: p50 and slowest of {}",
                    spans.len()
                ),
                reached: spans.pair(50, 100),
                aim,
                limit: format!("a round trip {}", millis(calls.percentile(50))),
            });
        }
        Ok(rows)
    }

    async fn terminated(&self, queue: &Queue, count: usize, script: &str) -> Outcome<Duration> {
        let service = Metadata::start(Cloud::Google).await;
        let more = format!(
            "[host]\nmetadata_service = \"gcp\"\non_termination_notice = \"release\"\nmetadata_endpoint = \"{}\"\n\
             [worker]\ncapacity = {count}\ntermination_grace = \"2s\"",
            service.url()
        );
        let mut worker = self.command_worker(queue, &more)?;
        service.wait_until_requested("preempted?wait_for_change", 1).await;
        let started = self.fresh("started")?;
        let tasks = queue.create(count, &command(&started, script)).await?;
        until("the start of every payload", async || Ok(std::fs::read_dir(&started)?.count() >= count)).await?;
        let noticed_at = Timestamp::now();
        service.change(|state| state.preempted = "TRUE");
        match worker.exit_code().await? {
            Some(12) => {}
            code => return Err(format!("the worker exited with {code:?}").into()),
        }
        let mut last = Timestamp::MIN;
        for task in tasks {
            let status = queue.status(&task).await?;
            let (first, second) = (&status["runs"][0], &status["runs"][1]);
            if first["reasonResolved"] != "worker-shutdown" || second["state"] != "pending" {
                return Err(format!("{task} was not released: {status}").into());
            }
            last = last.max(first["resolved"].as_str().unwrap_or_default().parse()?);
        }
        Ok(Duration::try_from(last.duration_since(noticed_at)).unwrap_or_default())
    }

    /// From just before a task is canceled until the next one runs in its slot.
    pub(crate) async fn cancel(&self) -> Outcome<Vec<Row>> {
        let queue = Queue::start(self, "20m").await?;
        let more = "[host]\nmetadata_service = \"off\"\n[worker]\ncapacity = 1\nstatus_poll_interval = \"200ms\"";
        let _worker = self.command_worker(&queue, more)?;
        let started = self.fresh("started")?;
        let payload = command(&started, "exec sleep 600");
        let runs = async |task: &TaskId| {
            let path = started.join(task.as_str());
            until("the start of a task", async || Ok(path.exists())).await
        };
        let mut spans = Vec::new();
        let mut task = queue.create_one(&payload).await?;
        runs(&task).await?;
        for number in 0..self.pick(40, 3) {
            let next = queue.create_one(&payload).await?;
            // No two cancellations meet the status poll at the same setup.
            sleep(Duration::from_micros(number * 37_129 % 200_000)).await;
            let began = now();
            queue.cancel(&task).await?;
            runs(&next).await?;
            spans.push(now() - began);
            let status = queue.status(&task).await?;
            if status["runs"].as_array().map_or(0, Vec::len) != 1 || status["runs"][0]["reasonResolved"] != "canceled" {
                return Err(format!("{task} was not canceled in its first run: {status}").into());
            }
            task = next;
        }
        let spans = Spans::new(spans);
        Ok(vec![Row {
            figure: format!("cancel to the next task's start in the slot: p50 and slowest of {}; 0 lost", spans.len()),
            reached: spans.pair(50, 100),
            aim: "",
            limit: "the queue is asked every 200 ms".to_owned(),
        }])
    }
}

/// A payload that leaves a file named after its task and then runs `script`.
fn command(started: &Path, script: &str) -> serde_json::Value {
    let script = format!("echo > {}/$TASK_ID; {script}", started.display());
    json!({"command": [["/bin/sh", "-c", script]], "maxRunTime": 900})
}
