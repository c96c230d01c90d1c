//! Work that runs elsewhere: what it costs while its claim is held, and how soon its end is reported.

use std::time::Duration;

use jiff::Timestamp;
use journeyman_domain::id::TaskId;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::machine::{Row, Spans, Usage, millis, now};
use crate::no_op_worker::{From, Payload};
use crate::programs::{Program, QUEUE, Queue, until};
use crate::support::cluster::{Cluster, NAMESPACE, TOKEN};
use crate::tasks::nothing_else;
use crate::{Lab, Outcome};

/// The slots of the worker, beside which the work is held.
const CAPACITY: u32 = 32;

impl Lab {
    pub(crate) async fn staged(&self) -> Outcome<Vec<Row>> {
        let mut rows = vec![self.launched().await?];
        rows.extend(self.pods().await?);
        Ok(rows)
    }

    /// Usage before and after some seconds in which nothing happens.
    async fn rest(&self, usage: impl Fn() -> Outcome<Usage>) -> Outcome<(Usage, String)> {
        let (settle, lasting) = self.pick((5, 10), (1, 1));
        sleep(Duration::from_secs(settle)).await;
        let (began, before) = (now(), usage()?);
        sleep(Duration::from_secs(lasting)).await;
        let after = usage()?;
        let (cpu, elapsed) = (after.cpu - before.cpu, now() - began);
        Ok((after, format!("{:.2} s CPU in {:.0} s", cpu.as_secs_f64(), elapsed.as_secs_f64())))
    }

    /// Work whose handler is in Rust and keeps nothing itself.
    async fn launched(&self) -> Outcome<Row> {
        let count = self.pick(10_000, 100);
        let queue = Queue::start(self, "20m").await?;
        let from = From::Taskcluster { root_url: queue.root_url.clone() };
        let mut worker = self.no_op_worker(from, CAPACITY, Payload::Launched, count)?;
        worker.line("working").await?;
        let before = worker.usage()?;
        let tasks = queue.create(count, &json!({})).await?;
        worker.line("launched").await?;
        let (held, cpu) = self.rest(|| worker.usage()).await?;
        worker.send("release").await?;
        worker.done().await?;
        nothing_else(&[worker.counts().await?], count)?;
        worker.stop().await?;
        queue.completed_once(&tasks).await?;
        Ok(Row {
            figure: format!(
                "{count} works that run elsewhere, held by one worker: CPU, and memory each; 0 of {count} lost"
            ),
            reached: format!("{cpu}, {:.1} KiB", held.kib_above(before, count)),
            aim: "≤ 20 KiB",
            limit: format!("{:.1} MB before", before.megabytes()),
        })
    }

    /// Pods that run, and then end one by one.
    async fn pods(&self) -> Outcome<[Row; 2]> {
        let count = self.pick(500, 20);
        let (cluster, queue) = (Cluster::start().await, Queue::start(self, "20m").await?);
        let kubeconfig = cluster.kubeconfig(&self.fresh("cluster")?);
        // The handler that a source has without a word.
        let more = format!(
            "[host]\nmetadata_service = \"off\"\n[handler.command]\nkind = \"kubernetes\"\nnamespace = \"{NAMESPACE}\"\n\
             kubeconfig = \"{}\"\ncheck_interval = \"1h\"\n[worker]\ncapacity = {CAPACITY}\nlaunched_max = {count}",
            kubeconfig.display()
        );
        let worker = Program::worker(self, "claim-work", &queue.root_url, &[QUEUE.to_owned()], &more)?;
        worker.logged("source: ").await?;
        let client = worker.control().await?;
        let create = async |count: usize, all: usize| {
            let tasks = queue.create(count, &json!({ "image": "registry/tool:1" })).await?;
            let launched = async || Outcome::Ok(client.status().await?.snapshot.launched as usize);
            until("the start of every pod", async || Ok(launched().await? == all)).await?;
            Outcome::Ok(tasks)
        };
        // Without what the first ones need for all.
        let warm_up = count / 10;
        let mut tasks = create(warm_up, warm_up).await?;
        let before = worker.usage()?;
        tasks.extend(create(count - warm_up, count).await?);
        let pods = cluster.pods();
        let names = pods.iter().map(name).collect::<Outcome<Vec<_>>>()?;
        for pod in &names {
            cluster.schedule(pod, "node-1");
            cluster.running(pod);
        }
        until("the reading of every log", async || Ok(cluster.count_calls("get", "pods/log") >= count)).await?;
        let (held, cpu) = self.rest(|| worker.usage()).await?;
        let (http, url) = (reqwest::Client::new(), format!("{}/api/v1/namespaces/{NAMESPACE}/pods", cluster.url()));
        let mut looks = Vec::new();
        for pod in names.iter().take(20) {
            let began = now();
            http.get(format!("{url}/{pod}")).bearer_auth(TOKEN).send().await?.error_for_status()?.bytes().await?;
            looks.push(now() - began);
        }
        let mut ended = Vec::new();
        for (pod, number) in names.iter().zip(0_u64..) {
            // No two ends meet the timers of the worker at the same place.
            sleep(Duration::from_micros(20_000 + number * 7_919 % 10_000)).await;
            ended.push(Timestamp::now());
            cluster.terminate(pod, "task", 0, "Completed");
        }
        let mut spans = Vec::new();
        for (pod, ended) in pods.iter().zip(ended) {
            let task = task_of(pod, &tasks)?;
            let resolved = async || Outcome::Ok(queue.status(task).await?["runs"][0]["resolved"].clone());
            until("the end of a pod's task", async || Ok(resolved().await?.is_string())).await?;
            let resolved: Timestamp = resolved().await?.as_str().unwrap_or_default().parse()?;
            spans.push(Duration::try_from(resolved.duration_since(ended)).unwrap_or_default());
        }
        queue.completed_once(&tasks).await?;
        if !cluster.pods().is_empty() {
            return Err("pods were left behind".into());
        }
        let mut calls = Vec::new();
        for _ in 0..20 {
            calls.push(queue.round_trip(&tasks[0]).await?);
        }
        let [spans, calls, looks] = [spans, calls, looks].map(Spans::new);
        Ok([
            Row {
                figure: format!(
                    "{count} pods that run, held by one worker that follows their logs: CPU, and memory each"
                ),
                reached: format!("{cpu}, {:.1} KiB", held.kib_above(before, count - warm_up)),
                aim: "",
                limit: format!("{:.1} MB before", before.megabytes()),
            },
            Row {
                figure: format!("a pod's end to the report of its task: p50 and p99 of {}; 0 lost", spans.len()),
                reached: spans.pair(50, 99),
                aim: "p99 ≤ 50 ms",
                limit: format!(
                    "{} to read a pod, {} for a call of the queue",
                    millis(looks.percentile(50)),
                    millis(calls.percentile(50))
                ),
            },
        ])
    }
}

fn name(pod: &Value) -> Outcome<&str> {
    Ok(pod["metadata"]["name"].as_str().ok_or("a pod without a name")?)
}

fn task_of<'a>(pod: &Value, tasks: &'a [TaskId]) -> Outcome<&'a TaskId> {
    let env = pod["spec"]["containers"][0]["env"].as_array().ok_or("a pod without variables")?;
    let id = env.iter().find(|one| one["name"] == "TASK_ID").map_or(&Value::Null, |one| &one["value"]);
    Ok(tasks.iter().find(|task| id == task.as_str()).ok_or("a pod without a task")?)
}
