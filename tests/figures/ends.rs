//! Payloads that are ended from outside: at the notice that the host goes, and by a cancellation.

use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::json;
use tokio::time::{sleep, timeout};

use crate::Done;
use crate::fleet::{Queue, RealWorker, fresh};
use crate::limits::Spans;
use crate::metadata::{Cloud, Metadata};
use crate::roles::now;
use crate::rows::{CLAIM_TIMEOUT, Lab, QUEUE, millis};
use crate::table::{Row, load};

impl Lab {
    /// From the moment at which a metadata service says that the host goes until the queue has the last report.
    pub(crate) async fn notice(&self) -> Done<Vec<Row>> {
        let count = 32;
        let grace = Duration::from_secs(2);
        let mut rows = Vec::new();
        for (script, obey, grace) in [
            ("exec sleep 600", "payloads that obey", Duration::ZERO),
            ("trap '' TERM; while :; do sleep 1; done", "payloads that do not, killed after 2 s", grace),
        ] {
            let load = load();
            let (mut spans, mut calls) = (Vec::new(), Vec::new());
            for _ in 0..self.size.pick(10, 1) {
                let queue = Queue::start(self.path(), CLAIM_TIMEOUT).await?;
                spans.push(self.noticed(&queue, count, script).await?);
                let task = queue.client.create_one(QUEUE, &json!({})).await?;
                for _ in 0..10 {
                    calls.push(queue.client.round_trip(task.as_str()).await?);
                }
                queue.process.end().await?;
            }
            let (spans, calls) = (Spans::new(spans), Spans::new(calls));
            rows.push(Row {
                what: format!("spot notice to the last of {count} reports, {obey}: p50 and slowest of {}", spans.len()),
                reached: format!("{} and {}", millis(spans.percentile(50)), millis(spans.percentile(100))),
                aim: format!("≤ {} ms + a round trip", (grace + Duration::from_millis(150)).as_millis()),
                limit: format!("a round trip {}", millis(calls.percentile(50))),
                load,
            });
        }
        Ok(rows)
    }

    /// A worker that is busy with this payload is told that its host goes.
    async fn noticed(&self, queue: &Queue, count: usize, script: &str) -> Done<Duration> {
        let service = Metadata::start(Cloud::Google).await;
        let settings = format!(
            "[host]\nmetadata_service = \"gcp\"\non_termination_notice = \"release\"\nmetadata_endpoint = \"{}\"\n\
             [handler.command]\nkind = \"command\"\ntermination_grace = \"2s\"\n[worker]\ncapacity = {count}\n",
            service.url()
        );
        let root_url = &queue.client.root_url;
        let mut worker = RealWorker::configured(self.path(), false, root_url, &[QUEUE.to_owned()], &settings)?;
        service.was_asked("preempted?wait_for_change", 1).await;
        let started = fresh(self.path(), "started")?;
        let script = format!("echo > {}/$TASK_ID; {script}", started.display());
        let payload = json!({"command": [["/bin/sh", "-c", script]], "maxRunTime": 900});
        let tasks = queue.client.create(QUEUE, count, &payload).await?;
        have_started(&started, count).await?;
        let told = Timestamp::now();
        service.change(|state| state.preempted = "TRUE");
        match worker.ended().await? {
            Some(12) => {}
            code => return Err(format!("the worker ended with {code:?}").into()),
        }
        let last = queue.client.all_handed_back(&tasks).await?;
        Ok(Duration::try_from(last.duration_since(told)).unwrap_or_default())
    }

    /// From just before a task is canceled until the next one runs in its slot.
    pub(crate) async fn cancel(&self) -> Done<Vec<Row>> {
        const ASKED_EVERY: Duration = Duration::from_millis(200);
        let load = load();
        let queue = Queue::start(self.path(), CLAIM_TIMEOUT).await?;
        let settings = format!(
            "[host]\nmetadata_service = \"off\"\n[worker]\ncapacity = 1\nstatus_poll_interval = \"{}ms\"\n",
            ASKED_EVERY.as_millis()
        );
        let root_url = &queue.client.root_url;
        let worker = RealWorker::configured(self.path(), false, root_url, &[QUEUE.to_owned()], &settings)?;
        let started = fresh(self.path(), "started")?;
        let script = format!("echo > {}/$TASK_ID; exec sleep 600", started.display());
        let payload = json!({"command": [["/bin/sh", "-c", script]], "maxRunTime": 900});
        let count = self.size.pick(40, 3);
        let mut spans = Vec::new();
        let mut task = queue.client.create_one(QUEUE, &payload).await?;
        have_started(&started, 1).await?;
        for number in 0..count {
            let next = queue.client.create_one(QUEUE, &payload).await?;
            // No two cancellations meet the asking in the same place.
            sleep(Duration::from_micros(number * 37_129 % 200_000)).await;
            let began = now();
            queue.client.cancel(&task).await?;
            let path = started.join(next.as_str());
            let runs = async {
                while !path.exists() {
                    sleep(Duration::from_millis(1)).await;
                }
            };
            timeout(PATIENCE, runs).await.map_err(|_| "a canceled task did not leave its slot")?;
            spans.push(now() - began);
            if !queue.client.was_canceled(&task).await? {
                return Err(format!("{task} was not canceled in its first run").into());
            }
            task = next;
        }
        drop(worker);
        queue.process.end().await?;
        let spans = Spans::new(spans);
        Ok(vec![Row {
            what: format!("cancel to the next task's start in the slot: p50 and slowest of {}; 0 lost", spans.len()),
            reached: format!("{} and {}", millis(spans.percentile(50)), millis(spans.percentile(100))),
            aim: String::new(),
            limit: format!("the queue is asked every {} ms", ASKED_EVERY.as_millis()),
            load,
        }])
    }
}

const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until so many payloads have left a file there.
async fn have_started(folder: &Path, count: usize) -> Done<()> {
    let all = async {
        while std::fs::read_dir(folder)?.count() < count {
            sleep(Duration::from_millis(5)).await;
        }
        Done::Ok(())
    };
    timeout(PATIENCE, all).await.map_err(|_| "not all payloads were started")?
}
