//! A console over many workers and tasks: how long its pages take, and what they cost the queue.

use std::time::Duration;

use axum::extract::Path;
use axum::routing::get;
use axum::{Json, Router};
use journeyman::worker::counters::WorkerCounts;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::interval;

use crate::machine::{Row, Spans, millis, now};
use crate::no_op_worker::{From, Payload};
use crate::programs::{Program, QUEUE, Queue, until};
use crate::support::http;
use crate::support::task_queue::{CLIENT_ID, TOKEN};
use crate::tasks::{WARM_UP, nothing_else, starts};
use crate::{Lab, Outcome};

const CAPACITY: u32 = 32;

/// The status of a simulated worker, which is half busy.
fn status(id: &str) -> Value {
    let claim = |number: u32| {
        json!({
            "task": format!("{number:022}"), "run": 0, "name": "simulated", "source": "ci", "state": "running", "progress": null,
            "held_seconds": 201.0, "lease_left_seconds": 900.0 + f64::from(number), "lease_seconds": 1200.0,
            "reclaimed_seconds_ago": null, "log_bytes": 2_345_678, "memory_bytes": 430 << 20,
        })
    };
    json!({
        "version": "0", "id": id, "group": "simulated", "pid": 1, "state": "running", "uptime_seconds": 11_520.0, "capacity": CAPACITY,
        "sources": [], "claims": (0..CAPACITY / 2).map(claim).collect::<Vec<_>>(), "last_hour": {}, "counts": WorkerCounts::default(),
        "containment": "group", "host": { "disk_free": 1, "disk_min": 0, "memory_free": 1, "memory_min": 0 }, "hints": [],
    })
}

/// Serves the pages of all simulated workers; returns their address.
async fn fleet(serving: &mut JoinSet<std::io::Result<()>>) -> Outcome<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("http://{}", listener.local_addr()?);
    let router = Router::new()
        .route("/{worker}/status.json", get(async |Path(worker): Path<String>| Json(status(&worker))))
        .route("/{worker}/history.json", get(async || Json(json!([]))));
    serving.spawn(async move { axum::serve(listener, router).await });
    Ok(address)
}

impl Lab {
    /// How soon tasks start, and how many a worker completes, while nothing reads, and while ten pages a second are read.
    pub(crate) async fn console(&self) -> Outcome<Vec<Row>> {
        let (history, count, workers) = self.pick((80_000, 20_000, 200), (100, 100, 10));
        let queue = Queue::start(self, "20m").await?;
        queue.create_in("bench/history", history).await?;
        let started = self.pick(400, 20);
        let complete = async || {
            let from = From::Taskcluster { root_url: queue.root_url.clone() };
            let mut idle = self.no_op_worker(from, 4, Payload::Stamp, usize::try_from(WARM_UP + started)?)?;
            idle.line("working").await?;
            let late = starts(&queue, &mut idle, started).await?;
            idle.done().await?;
            idle.stop().await?;
            let tasks = queue.create(count, &json!({})).await?;
            let from = From::Taskcluster { root_url: queue.root_url.clone() };
            let mut worker = self.no_op_worker(from, CAPACITY, Payload::Nothing, count)?;
            let (elapsed, _, counted) = worker.done().await?;
            nothing_else(&[worker.counts().await?], count)?;
            worker.stop().await?;
            queue.completed_once(&tasks).await?;
            Outcome::Ok((counted as f64 / elapsed.as_secs_f64(), late, tasks))
        };
        let (alone, without, tasks) = complete().await?;
        let mut serving = JoinSet::new();
        let fleet = fleet(&mut serving).await?;
        let urls: Vec<String> = (0..workers).map(|number| format!("\"{fleet}/w{number}\"")).collect();
        let config = format!(
            "[http]\nlisten = \"127.0.0.1:0\"\n[console.target.fleet]\nkind = \"worker\"\nurls = [{}]\n\
             [console.target.ci]\nkind = \"queue\"\nurls = [\"{}\"]\nclient_id = \"{CLIENT_ID}\"\ntoken_file = \"env:BENCH_TOKEN\"\n",
            urls.join(", "),
            queue.root_url
        );
        let console = Program::start(self, "console", &config, &[("BENCH_TOKEN", TOKEN)])?;
        let line = console.logged("http://127").await?;
        let address =
            line.split_once("http://").and_then(|(_, rest)| rest.split('/').next()).ok_or("no address")?.to_owned();
        let address = address.as_str();
        let all = format!("/workers/w{}", workers - 1);
        until("every worker", async || Ok(http::get(address, "/fleet").await.body.contains(&all))).await?;
        let pages = [
            "/".to_owned(),
            "/fleet".to_owned(),
            "/workers/w0".to_owned(),
            "/tasks/ci".to_owned(),
            "/tasks/ci?state=failed".to_owned(),
            format!("/queues/ci/{QUEUE}"),
            format!("/tasks/ci/{}", tasks[0]),
        ];
        let mut took: Vec<Vec<Duration>> = vec![Vec::new(); pages.len()];
        let reading = async {
            let mut ticks = interval(Duration::from_millis(100));
            for (page, spans) in pages.iter().cycle().zip(0..).map(|(page, number)| (page, number % pages.len())) {
                ticks.tick().await;
                let began = now();
                let answer = http::get(address, page).await;
                took[spans].push(now() - began);
                if answer.status != 200 {
                    return Err(format!("{page} answered {}", answer.status));
                }
            }
            Ok(())
        };
        let (before, began) = (console.usage()?, now());
        let (beside, with, _) = tokio::select! {
            done = complete() => done?,
            stopped = reading => return Err(stopped.err().unwrap_or_default().into()),
        };
        let cpu = (console.usage()?.cpu - before.cpu).as_secs_f64() / (now() - began).as_secs_f64() * 100.0;
        let slowest = |spans: &Vec<Duration>| spans.iter().max().copied().unwrap_or_default();
        let worst = pages.iter().zip(&took).max_by_key(|(_, spans)| slowest(spans)).map_or("", |(page, _)| page);
        let all = Spans::new(took.concat());
        Ok(vec![
            Row {
                figure: format!(
                    "{} pages of a console over {workers} workers and {} tasks: p50 and slowest",
                    all.len(),
                    history + 2 * count
                ),
                reached: format!(
                    "{} and {} ({})",
                    millis(all.percentile(50)),
                    millis(all.percentile(100)),
                    worst.split('/').nth(1).unwrap_or("")
                ),
                aim: "≤ 200 ms",
                limit: format!("the console takes {cpu:.0} % of a core, the {workers} workers included"),
            },
            Row {
                figure: format!("create to start beside ten such pages a second: p50 and p99 of {started}"),
                reached: with.pair(50, 99),
                aim: "",
                limit: format!("{} without pages", without.pair(50, 99)),
            },
            Row {
                figure: format!("no-op tasks beside ten such pages a second, capacity {CAPACITY}; 0 of {count} lost"),
                reached: format!("{beside:.0} tasks/s"),
                aim: "",
                limit: format!("{alone:.0} tasks/s without pages"),
            },
        ])
    }
}
