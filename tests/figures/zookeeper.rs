//! Tasks and merges of a ZooKeeper that do nothing: workers, bare calls of the same layouts and Zuul's own merger, one after the
//! other on one server. Each measurement ends when no request is left, and fails unless each has ended exactly once.

use std::collections::BTreeSet;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use futures_util::{StreamExt as _, TryStreamExt as _, stream, try_join};
use journeyman::source::Source as _;
use journeyman::source::zookeeper::{Dialect, ZooKeeperQueue, ZooKeeperSource, ZooKeeperSourceConfig};
use journeyman::task::formats::new_task_id;
use journeyman_domain::id::PriorityQueue;
use journeyman_platform::zookeeper::job_queue::JobQueue;
use journeyman_platform::zookeeper::submit::Submission;
use journeyman_platform::zookeeper::{ConnectConfig, CreateMode, Session, Write};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::time::{sleep, timeout};

use crate::machine::{Row, cpu, millis, now};
use crate::no_op_worker::{From, Payload};
use crate::programs::{Ensemble, Program, Role, until};
use crate::requests::Rate;
use crate::tasks::nothing_else;
use crate::{Lab, Outcome};

/// The slots of each worker, and the requests that each bare session has in hand.
const CAPACITY: u32 = 16;
/// How many calls prepare and check a queue at a time.
const CALLS_MAX: usize = 256;
/// Waits until the workers have counted what has ended.
const COUNTED_MAX: Duration = Duration::from_secs(30);
/// How often bare calls and workers take turns.
const ROUNDS: usize = 3;

/// A queue in a chroot of its own, and what was submitted to it.
pub(crate) struct Backlog {
    pub(crate) connect: ConnectConfig,
    dialect: Dialect,
    session: Arc<Session>,
    pub(crate) queue: JobQueue,
    pub(crate) ids: Vec<String>,
}

impl Backlog {
    pub(crate) async fn of(ensemble: &Ensemble, dialect: Dialect, count: usize) -> Outcome<Self> {
        let connect = ConnectConfig {
            servers: ensemble.servers.clone(),
            chroot: Some(format!("/bench-{}", new_task_id().as_str().replace(['-', '_'], "x"))),
            tls: None,
            session_timeout: Duration::from_secs(30),
        };
        let session = Arc::new(Session::connect(&connect).await?);
        let queue = JobQueue::new(&dialect.usual_queue(None));
        queue.ensure(&session).await?;
        let mut backlog = Self { connect, dialect, session, queue, ids: Vec::new() };
        backlog.ids = backlog.add(count).await?;
        Ok(backlog)
    }

    /// Each waits for its result, which is how its end is counted.
    pub(crate) async fn add(&self, count: usize) -> Outcome<Vec<String>> {
        let submission = Submission {
            dialect: self.dialect,
            payload: json!({}),
            precedence: 200,
            fields: serde_json::Map::new(),
            waits: true,
        };
        let adds = stream::iter(0..count).map(|_| self.queue.add(&self.session, &submission));
        Ok(adds.buffer_unordered(CALLS_MAX).try_collect().await?)
    }

    fn source(&self) -> ZooKeeperSourceConfig {
        ZooKeeperSourceConfig {
            connect: self.connect.clone(),
            dialect: self.dialect,
            queues: vec![ZooKeeperQueue { path: self.queue.root().to_owned(), zone: None }],
            janitor: false,
            worker_id: "bench".to_owned(),
        }
    }

    /// Removes the remaining nodes, since the server keeps them in memory.
    pub(crate) async fn remove(self) -> Outcome<()> {
        let remove = async |id: &String| {
            for folder in ["requests", "params", "locks", "result-data", "results"] {
                self.session.delete_tree(&self.queue.path(folder, id)).await?;
            }
            Outcome::Ok(())
        };
        stream::iter(self.ids.iter().map(Ok)).try_for_each_concurrent(CALLS_MAX, remove).await
    }

    async fn names(&self, folder: &str) -> Outcome<BTreeSet<String>> {
        let names = self.session.children(&format!("{}/{folder}", self.queue.root())).await?;
        Ok(names.unwrap_or_default().into_iter().collect())
    }

    /// Waits until at most so many requests are left, and returns how many are.
    pub(crate) async fn falls_to(&self, count: usize) -> Outcome<usize> {
        let path = format!("{}/requests", self.queue.root());
        let left = async || {
            let stat = self.session.stat(&path).await?;
            Outcome::Ok(usize::try_from(stat.map_or(0, |stat| stat.num_children))?)
        };
        until("the end of the requests", async || Ok(left().await? <= count)).await?;
        left().await
    }

    /// The rate at which `working` empties it, from a tenth on, so that no start is counted. `used` is CPU time so far.
    async fn drained(&self, used: impl Fn() -> Outcome<Duration>) -> Outcome<Rate> {
        let from = self.falls_to(self.ids.len() * 9 / 10).await?;
        let (began, cpu) = (now(), used()?);
        // Steps are used, since the slowest take longer than anything else here.
        for tenths in (0..9).rev() {
            self.falls_to(self.ids.len() * tenths / 10).await?;
        }
        let (elapsed, cpu) = (now() - began, used()? - cpu);
        let count = from as f64;
        Ok(Rate { per_second: count / elapsed.as_secs_f64(), cpu_us: cpu.as_secs_f64() * 1e6 / count })
    }

    /// Fails unless each request has a result, that of a request that was completed, and nothing else is left.
    async fn ended_once(&self) -> Outcome<()> {
        for folder in ["requests", "params", "locks"] {
            until("the removal of a request", async || Ok(self.names(folder).await?.is_empty())).await?;
        }
        let submitted: BTreeSet<String> = self.ids.iter().cloned().collect();
        let folder = if self.dialect == Dialect::Native { "results" } else { "result-data" };
        if self.names("results").await? != submitted || self.names(folder).await? != submitted {
            return Err(format!("of {} requests some have no result", submitted.len()).into());
        }
        if self.dialect != Dialect::Native {
            return Ok(());
        }
        let is_completed = async |id: &String| {
            let found = self.session.get(&self.queue.path("results", id)).await?;
            let result: Value = serde_json::from_slice(&found.map(|(data, _)| data).unwrap_or_default())?;
            if result["outcome"] == "completed" { Ok(()) } else { Err(format!("{id} ended as {result}").into()) }
        };
        stream::iter(self.ids.iter().map(Ok)).try_for_each_concurrent(CALLS_MAX, is_completed).await
    }

    /// Bare calls, each session with its own share of the requests.
    async fn bare(&self, sessions: usize) -> Outcome<Rate> {
        let sessions = try_join_all((0..sessions).map(|_| Session::connect(&self.connect))).await?;
        let shares = self.ids.chunks(self.ids.len().div_ceil(sessions.len()));
        let working = try_join_all(sessions.iter().zip(shares).map(|(session, share)| async move {
            let each = async |id: &String| match self.dialect {
                Dialect::Native => self.bare_task(session, id).await,
                Dialect::ZuulMerger | Dialect::ZuulExecutor => self.bare_merge(session, id).await,
            };
            stream::iter(share.iter().map(Ok)).try_for_each_concurrent(CAPACITY as usize, each).await
        }));
        let (rate, _) = try_join!(self.drained(|| Ok(cpu())), working)?;
        self.ended_once().await?;
        Ok(rate)
    }

    /// Claim and end: a transaction each.
    async fn bare_task(&self, session: &Session, id: &str) -> Outcome<()> {
        let [task, lock, result] = ["requests", "locks", "results"].map(|folder| self.queue.path(folder, id));
        let running = br#"{"attempts":1,"payload":{},"precedence":200,"waits":true}"#;
        let lock_it = Write::Create { path: &lock, data: b"{\"worker\":\"bench\"}", mode: CreateMode::Ephemeral };
        session.multi(&[lock_it, Write::Set { path: &task, data: running, version: Some(0) }]).await?;
        let end = br#"{"outcome":"completed","reason":null,"result":null}"#;
        session
            .multi(&[
                Write::Delete { path: &task, version: Some(1) },
                Write::Delete { path: &lock, version: None },
                Write::Create { path: &result, data: end, mode: CreateMode::Persistent },
            ])
            .await?;
        Ok(())
    }

    /// As few round trips as Zuul's layout allows: lock and read, set to running, store and complete, remove.
    async fn bare_merge(&self, session: &Session, id: &str) -> Outcome<()> {
        let [request, locks, params, data, result] =
            ["requests", "locks", "params", "result-data", "results"].map(|folder| self.queue.path(folder, id));
        let [params_shard, data_shard] = [&params, &data].map(|path| format!("{path}/0000000000"));
        let lock = format!("{locks}/bench__lock__");
        let (_, lock, _, found, _, _) = try_join!(
            session.create(&locks, b"", CreateMode::Persistent),
            session.create(&lock, b"", CreateMode::EphemeralSequential),
            session.children(&locks),
            session.get(&request),
            session.children(&params),
            session.get(&params_shard),
        )?;
        let (text, _) = found.ok_or("a request is gone")?;
        let running = String::from_utf8(text)?.replace("requested", "running");
        session
            .multi(&[
                Write::Set { path: &request, data: running.as_bytes(), version: Some(0) },
                Write::Delete { path: &params_shard, version: None },
                Write::Delete { path: &params, version: None },
            ])
            .await?;
        let (pointer, mode) = (json!({ "result_data_path": data }).to_string(), CreateMode::Persistent);
        let completed = running.replace("running", "completed");
        session
            .multi(&[
                Write::Create { path: &data, data: b"", mode },
                Write::Create { path: &data_shard, data: b"compressed", mode },
                Write::Create { path: &result, data: pointer.as_bytes(), mode },
                Write::Set { path: &request, data: completed.as_bytes(), version: Some(1) },
            ])
            .await?;
        session
            .multi(&[
                Write::Delete { path: &lock, version: None },
                Write::Delete { path: &request, version: None },
                Write::Delete { path: &locks, version: None },
            ])
            .await?;
        Ok(())
    }

    /// This many workers, each a process with a session of its own.
    async fn worked_off(&self, lab: &Lab, workers: usize) -> Outcome<Rate> {
        let from = || From::Zookeeper {
            servers: self.connect.servers.clone(),
            chroot: self.connect.chroot.clone().unwrap_or_default(),
            dialect: self.dialect,
            queue: self.queue.root().to_owned(),
        };
        let start = |_| lab.no_op_worker(from(), CAPACITY, Payload::Nothing, 0);
        let mut workers: Vec<Role> = (0..workers).map(start).collect::<Outcome<_>>()?;
        let used = || workers.iter().map(|worker| Ok(worker.usage()?.cpu)).sum();
        let rate = self.drained(used).await?;
        self.ended_once().await?;
        // A worker counts a task once the server has answered.
        let counting = async {
            loop {
                let mut counts = Vec::new();
                for worker in &mut workers {
                    counts.push(worker.counts().await?);
                }
                let completed: u64 = counts.iter().filter_map(|counts| counts["completed"].as_u64()).sum();
                if completed >= self.ids.len() as u64 {
                    return nothing_else(&counts, self.ids.len());
                }
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(COUNTED_MAX, counting).await.map_err(|_| "the workers have not counted all tasks")??;
        for worker in workers {
            worker.stop().await?;
        }
        Ok(rate)
    }

    /// Zuul's own merger; `None` without Zuul.
    async fn merged_by_zuul(&self) -> Outcome<Option<Rate>> {
        let python = std::env::vars().find(|(name, value)| name == "JOURNEYMAN_TEST_ZUUL_PYTHON" && !value.is_empty());
        let Some((_, python)) = python else {
            eprintln!("NOT MEASURED: JOURNEYMAN_TEST_ZUUL_PYTHON names no Python with Zuul; `tests/run` provides one");
            return Ok(None);
        };
        let mut merger = Command::new(python);
        merger.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/zookeeper/zuul_worker.py"));
        merger.args(["--hosts", &self.connect.servers, "--chroot"]).args(&self.connect.chroot).arg("merger");
        merger.args(["--timeout", "600"]).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
        let mut merger = merger.spawn()?;
        let rate = self.drained(|| Ok(Duration::ZERO)).await?;
        self.ended_once().await?;
        merger.kill().await?;
        Ok(Some(rate))
    }
}

impl Lab {
    pub(crate) async fn zookeeper(&self) -> Outcome<Vec<Row>> {
        let Some(ensemble) = Ensemble::start(self)? else { return Ok(Vec::new()) };
        let mut rows = Vec::new();
        for workers in [1, self.pick(16, 2)] {
            rows.extend(self.zookeeper_tasks(&ensemble, workers).await?);
        }
        let backlog = Backlog::of(&ensemble, Dialect::ZuulMerger, self.pick(500, 20)).await?;
        let zuul = backlog.merged_by_zuul().await?;
        backlog.remove().await?;
        for workers in [1, self.pick(16, 2)] {
            rows.extend(self.zookeeper_merges(&ensemble, workers, zuul.as_ref()).await?);
        }
        rows.push(self.paused_beside_tasks(&ensemble).await?);
        rows.push(self.first_polls(&ensemble).await?);
        Ok(rows)
    }

    async fn beside_bare_calls(
        &self,
        ensemble: &Ensemble,
        dialect: Dialect,
        count: usize,
        workers: usize,
    ) -> Outcome<[Rate; 2]> {
        let (mut bare, mut worked) = (Vec::new(), Vec::new());
        for _ in 0..self.pick(ROUNDS, 1) {
            let backlog = Backlog::of(ensemble, dialect, count).await?;
            bare.push(backlog.bare(workers).await?);
            backlog.remove().await?;
            let backlog = Backlog::of(ensemble, dialect, count).await?;
            worked.push(backlog.worked_off(self, workers).await?);
            backlog.remove().await?;
        }
        Ok([Rate::median(&bare), Rate::median(&worked)])
    }

    async fn zookeeper_tasks(&self, ensemble: &Ensemble, workers: usize) -> Outcome<[Row; 2]> {
        let count = self.pick(10_000, 200);
        let [bare, worked] = self.beside_bare_calls(ensemble, Dialect::Native, count, workers).await?;
        Ok([
            Row {
                figure: format!("no-op tasks of a ZooKeeper, `native`, workers {workers}; 0 of {count} lost"),
                reached: format!("{:.0} /s, {:.0} %", worked.per_second, worked.per_second * 100.0 / bare.per_second),
                aim: "≥ 80 %",
                limit: format!("{:.0} /s by bare transactions, sessions {workers}", bare.per_second),
            },
            Row {
                figure: format!("… CPU a task, `native`, workers {workers}"),
                reached: format!("{:.0} µs, all workers together", worked.cpu_us),
                aim: "",
                limit: format!("{:.0} µs by bare transactions", bare.cpu_us),
            },
        ])
    }

    async fn zookeeper_merges(&self, ensemble: &Ensemble, workers: usize, zuul: Option<&Rate>) -> Outcome<[Row; 2]> {
        let count = self.pick(10_000, 100);
        let [bare, worked] = self.beside_bare_calls(ensemble, Dialect::ZuulMerger, count, workers).await?;
        let times =
            zuul.map_or_else(String::new, |zuul| format!(", {:.1} × Zuul's", worked.per_second / zuul.per_second));
        let own = zuul.map_or_else(String::new, |zuul| format!(", {:.0} /s by Zuul's own merger", zuul.per_second));
        Ok([
            Row {
                figure: format!("no-op merges of a Zuul, workers {workers}; 0 of {count} lost"),
                reached: format!("{:.0} /s{times}", worked.per_second),
                aim: "≥ 10 × Zuul's",
                limit: format!("{:.0} /s by bare calls, sessions {workers}{own}", bare.per_second),
            },
            Row {
                figure: format!("… CPU a merge, workers {workers}"),
                reached: format!("{:.0} µs, all workers together", worked.cpu_us),
                aim: "",
                limit: format!("{:.0} µs by bare calls", bare.cpu_us),
            },
        ])
    }

    /// A paused `journeyman worker` that knows of many tasks.
    async fn paused_beside_tasks(&self, ensemble: &Ensemble) -> Outcome<Row> {
        let (count, settle, lasting) = self.pick((10_000, 3, 10), (200, 1, 1));
        let mut backlog = Backlog::of(ensemble, Dialect::Native, 0).await?;
        let config = format!(
            "[host]\nmetadata_service = \"off\"\n[worker]\nid = \"worker\"\nwork_dir = \"@HOME@/work\"\n[source.tasks]\n\
             kind = \"zookeeper\"\ndialect = \"native\"\nconnect = \"{}\"\nchroot = \"{}\"\nqueue = \"{}\"\n",
            backlog.connect.servers,
            backlog.connect.chroot.as_deref().unwrap_or_default(),
            backlog.queue.root()
        );
        let worker = Program::start(self, "worker", &config, &[])?;
        let control = worker.control().await?;
        // The first task is claimed by a poll, so that the worker has walked the queue before it is paused.
        let first = backlog.add(1).await?;
        until("the first task", async || Ok(backlog.names("results").await?.len() == first.len())).await?;
        let pause = json!({ "command": { "pause": { "seconds": null } }, "note": { "by": "bench" } });
        control.send_command(&pause).await?;
        backlog.ids = backlog.add(count).await?;
        sleep(Duration::from_secs(settle)).await;
        let before = worker.usage()?;
        sleep(Duration::from_secs(lasting)).await;
        let after = worker.usage()?;
        let left = backlog.names("requests").await?.len();
        if left != count {
            return Err(format!("of {count} tasks a paused worker left {left}").into());
        }
        backlog.remove().await?;
        Ok(Row {
            figure: format!("paused `journeyman worker` beside {count} tasks, over {lasting} s"),
            reached: format!("{:.3} s CPU, {:.1} MB", (after.cpu - before.cpu).as_secs_f64(), after.megabytes()),
            aim: "",
            limit: format!("{:.2} s CPU to learn of them", before.cpu.as_secs_f64()),
        })
    }

    /// The first poll of a source connects, walks the queue and claims a request.
    async fn first_polls(&self, ensemble: &Ensemble) -> Outcome<Row> {
        let count = self.pick(10_000, 200);
        let (mut polls, mut counts) = (Vec::new(), Vec::new());
        for dialect in [Dialect::Native, Dialect::ZuulMerger] {
            let backlog = Backlog::of(ensemble, dialect, count).await?;
            let source = ZooKeeperSource::new(backlog.source());
            let began = now();
            let polled = source.poll(PriorityQueue(0), 1).await?;
            polls.push(now() - began);
            if polled.grants.len() != 1 {
                return Err("a first poll claimed nothing".into());
            }
            let began = now();
            let counted = backlog.queue.count(&backlog.session, dialect).await?;
            counts.push(now() - began);
            if counted.pending + counted.claimed != count || counted.claimed != 1 {
                return Err(format!("of {count} requests there were {counted:?}").into());
            }
            drop(polled);
            source.close().await;
            backlog.remove().await?;
        }
        let pair = |spans: &[Duration]| spans.iter().map(|span| millis(*span)).collect::<Vec<_>>().join(" and ");
        Ok(Row {
            figure: format!("first poll with {count} requests, `native` and `zuul-merger`: connect, walk, a claim"),
            reached: pair(&polls),
            aim: "≤ 1 s",
            limit: format!("{} for a controller to count them", pair(&counts)),
        })
    }
}
