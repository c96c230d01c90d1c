//! Work that runs elsewhere and holds no request meanwhile: delayed messages of a real broker have it looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use journeyman::handler::staged::{Staged, StagedHandler, Work};
use journeyman::handler::{Request, erase};
use journeyman::source::amqp::{AmqpSource, AmqpSourceConfig as Queue, DeferralConfig};
use journeyman::task::Reply;
use journeyman::worker::WorkerConfig;
use journeyman_domain::staged::{Progress, StagedAnswer, StagedPolicy, StagedRecord, Stamp};
use journeyman_platform::amqp;
use journeyman_platform::amqp::delay::DelayQueues;
use journeyman_platform::amqp::lapin::BasicProperties;
use journeyman_platform::amqp::lapin::message::Delivery;
use journeyman_platform::amqp::lapin::options::QueueDeleteOptions;
use journeyman_platform::amqp::lapin::types::AMQPValue;
use journeyman_platform::host::crash_points::DEFERRAL_CRASH_POINTS;
use parking_lot::Mutex;
use rustix::process::Signal;

use crate::amqp::support::{Client, Kind, Running, broker, queue, shared_uri, until, within};
use crate::amqp::worker_kills::repeats;
use crate::support::process::{Process, config};

/// Work in memory that goes on until the test says otherwise, and replies with its request then.
#[derive(Default)]
struct Elsewhere {
    launched: Mutex<Vec<String>>,
    looks: Mutex<Vec<(Request, StagedRecord)>>,
    is_over: AtomicBool,
    removed: AtomicUsize,
}

struct Launcher(Arc<Elsewhere>);

impl Launcher {
    fn progress() -> Progress {
        let check_in = Some(Duration::from_secs(1));
        Progress { phase: "running".into(), since: Some(Stamp(0)), observed_at: Stamp(0), check_in }
    }

    fn started(key: &str) -> StagedAnswer {
        StagedAnswer::Started { handle: key.into(), progress: Self::progress() }
    }
}

impl StagedHandler for Launcher {
    type Payload = Request;

    fn policy(&self, _: &Request) -> StagedPolicy {
        StagedPolicy {
            phases: BTreeMap::new(),
            infrastructure_retries: 1,
            capacity_retries: 1,
            check_interval: Duration::from_secs(1),
        }
    }

    async fn adopt(&self, work: Work<'_, Request>) -> StagedAnswer {
        let key = work.key();
        if self.0.launched.lock().contains(&key) { Self::started(&key) } else { StagedAnswer::Absent }
    }

    async fn start(&self, work: Work<'_, Request>) -> StagedAnswer {
        let key = work.key();
        self.0.launched.lock().push(key.clone());
        self.0.looks.lock().push((work.payload.clone(), work.record.clone()));
        Self::started(&key)
    }

    async fn verify(&self, work: Work<'_, Request>) -> StagedAnswer {
        self.0.looks.lock().push((work.payload.clone(), work.record.clone()));
        if !self.0.is_over.load(Ordering::Relaxed) {
            return StagedAnswer::Progress(Self::progress());
        }
        work.context.set_reply(Reply::ok(work.payload.body.to_vec())).expect("it fits");
        StagedAnswer::Done
    }

    async fn cancel(&self, _: Work<'_, Request>) -> StagedAnswer {
        self.0.removed.fetch_add(1, Ordering::Relaxed);
        StagedAnswer::Canceled
    }
}

/// A request queue, a queue of replies, and the work.
struct Scene {
    uri: String,
    client: Client,
    answers: String,
    work: Arc<Elsewhere>,
}

impl Scene {
    async fn new(kind: Kind) -> Option<Self> {
        let uri = shared_uri()?;
        let client = Client::new(&broker(&uri), kind).await;
        let answers = format!("{}-answers", client.queue);
        client.declare(Kind::Durable, &answers).await;
        Some(Self { uri, client, answers, work: Arc::default() })
    }

    fn properties(&self, id: &str) -> BasicProperties {
        Client::properties(id, "/work").with_reply_to(self.answers.as_str().into())
    }

    /// The properties of a check.
    fn check(&self, id: &str, record: &StagedRecord, not_before: i64) -> BasicProperties {
        let record = serde_json::to_string(record).expect("it is written");
        self.properties(id).with_headers(amqp::header_table([
            ("jm-work", AMQPValue::LongString(record.into())),
            ("jm-task", AMQPValue::LongString(id.into())),
            ("jm-not-before", AMQPValue::LongLongInt(not_before)),
        ]))
    }

    async fn publish(&self, properties: BasicProperties) {
        assert!(self.client.publish(properties, b"1").await);
    }

    fn worker(&self, capacity: u32) -> Running {
        let deferral = Some(DeferralConfig::of_requests(&self.client.queue.as_str().into()));
        let source = AmqpSource::new(Queue { deferral, ..queue(&self.client) });
        let handler = erase(Staged(Launcher(Arc::clone(&self.work))));
        Running::serving(Arc::new(source), |config| WorkerConfig { capacity, ..config }, handler)
    }

    async fn launches(&self, count: usize) {
        until("all is launched", async || self.work.launched.lock().len() >= count).await;
    }

    async fn looks(&self, count: usize) {
        until("it is looked at", async || self.work.looks.lock().len() >= count).await;
    }

    /// Lets all work end, and waits for this many replies.
    async fn end(&self, count: usize) -> Vec<String> {
        self.work.is_over.store(true, Ordering::Relaxed);
        self.replies(count).await
    }

    async fn replies(&self, count: usize) -> Vec<String> {
        let mut ids = Vec::new();
        until("all is replied to", async || {
            ids.extend(self.client.get(&self.answers).await.map(|reply| id(&reply)));
            ids.len() >= count
        })
        .await;
        ids
    }

    /// Waits until copies that are still delayed were looked at and `drain` has ended the worker, and deletes the queues. No reply may
    /// be left.
    async fn close(self, drain: impl Future<Output = ()>) {
        until("no check is left", async || self.client.delayed().await == 0 && self.client.depth().await.0 == 0).await;
        drain.await;
        assert_eq!((self.client.depth().await.0, self.client.delayed().await), (0, 0));
        assert!(self.client.get(&self.answers).await.is_none(), "a reply came twice");
        self.client.delete_with_delays().await;
    }
}

fn id(reply: &Delivery) -> String {
    reply.properties.correlation_id().as_ref().expect("an id").to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn deferred_work_holds_neither_a_slot_nor_a_delivery_and_each_reply_comes_once() {
    for kind in [Kind::Durable, Kind::Quorum] {
        let Some(scene) = Scene::new(kind).await else { return };
        let worker = scene.worker(1);
        let ids: BTreeSet<String> = (0..20).map(|number| number.to_string()).collect();
        for id in &ids {
            scene.publish(scene.properties(id)).await;
        }
        // One at a time is delivered: each was acknowledged before the next one came.
        scene.launches(20).await;
        let replied = scene.end(20).await;
        assert_eq!(replied.into_iter().collect::<BTreeSet<_>>(), ids, "{kind:?}");
        worker.completed(20).await;
        let counts = worker.control.counts().sources.outcomes;
        assert!(counts.deferred >= 20, "{counts:?}");
        assert_eq!((counts.completed, counts.failed, counts.exceptions(), counts.lost), (20, 0, 0, 0));
        let launched: BTreeSet<String> = scene.work.launched.lock().iter().cloned().collect();
        assert_eq!((launched.len(), scene.work.launched.lock().len()), (20, 20), "each has a key of its own");
        assert_eq!(scene.work.removed.load(Ordering::Relaxed), 0, "what has ended is left for a sweep");
        scene.close(worker.drained()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s6_a_check_looks_like_its_request_with_foreign_headers_and_does_not_expire() {
    let Some(scene) = Scene::new(Kind::Durable).await else { return };
    let worker = scene.worker(1);
    let foreign = amqp::header_table([
        ("x-retry-count", AMQPValue::LongInt(2)),
        ("x-first-death-queue", AMQPValue::LongString("elsewhere".into())),
        ("team", AMQPValue::LongString("render".into())),
    ]);
    let properties = scene.properties("1").with_headers(foreign).with_content_type("text/plain".into());
    scene.publish(properties.with_expiration("30000".into()).with_message_id("m".into()).with_priority(3)).await;
    scene.looks(4).await;
    let looks = scene.work.looks.lock().clone();
    let (first, _) = &looks[0];
    assert!(first.seconds_left.is_some());
    for (number, (request, record)) in looks.iter().enumerate().skip(1) {
        let mut headers = first.headers.clone();
        headers.remove("x-first-death-queue");
        let routing_key = scene.client.queue.clone();
        // The broker writes these anew with each delay.
        let mut seen = request.clone();
        seen.headers.retain(|name, _| !name.starts_with("x-first-death-") && !name.starts_with("x-last-death-"));
        seen.headers.remove("x-journeyman-attempts");
        seen.routing_key = routing_key.clone();
        assert_eq!(seen, Request { headers, seconds_left: None, routing_key, ..first.clone() });
        assert_eq!(record.seq, number as u64);
        assert_eq!(record.handle.as_deref(), scene.work.launched.lock().first().map(String::as_str));
    }
    assert_eq!(scene.end(1).await, ["1"]);
    scene.close(worker.drained()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_that_comes_twice_or_too_early_is_looked_at_once_and_in_time() {
    let Some(scene) = Scene::new(Kind::Durable).await else { return };
    scene.work.is_over.store(true, Ordering::Relaxed);
    let record = StagedRecord { handle: Some("w".into()), seq: 5, ..StagedRecord::default() };
    let worker = scene.worker(1);
    // A worker that has started is in time for the others.
    scene.publish(scene.properties("first")).await;
    assert_eq!(scene.end(1).await, ["first"]);
    let counts = || (scene.work.looks.lock().len(), scene.work.launched.lock().len());
    let (looks, launched) = counts();
    let now = jiff::Timestamp::now().as_millisecond();
    let began = Instant::now();
    // Moved out of its delay by hand.
    scene.publish(scene.check("early", &record, now + 2500)).await;
    for _ in 0..2 {
        scene.publish(scene.check("twice", &record, now)).await;
    }
    assert_eq!(scene.end(1).await, ["twice"]);
    assert_eq!(scene.end(1).await, ["early"]);
    assert!(began.elapsed() >= Duration::from_millis(2400), "{:?}", began.elapsed());
    assert_eq!(counts(), (looks + 2, launched));
    // A client that asks once more is no copy.
    for _ in 0..2 {
        scene.publish(scene.properties("again")).await;
        assert_eq!(scene.end(1).await, ["again"]);
    }
    scene.close(worker.drained()).await;
}

/// Launches work by making a file, whose end is another file.
const STAGED: &str = r#"#!/bin/sh
name=$0.work.$JOURNEYMAN_WORK-$JOURNEYMAN_LAUNCH
says() { printf '{"type":"work","handle":"%s","phase":"running","checkIn":1}\n' "$name" >&3; }
case $JOURNEYMAN_PHASE in
start) [ -e "$name" ] || echo "$JOURNEYMAN_WORK" >>"$0.launched"; : >"$name"; says ;;
verify) if [ -e "$0.over" ]; then echo '{"type":"answer","json":1}' >&3; else echo >>"$0.looks"; says; fi ;;
cancel) echo >>"$0.removed" ;;
esac
"#;

/// Workers as processes that run a staged program.
struct Processes {
    scene: Scene,
    folder: tempfile::TempDir,
    config: PathBuf,
}

impl Processes {
    async fn new() -> Option<Self> {
        let scene = Scene::new(Kind::Durable).await?;
        let folder = tempfile::tempdir().expect("a folder");
        let source = "[handler.echo.staged]\ncheck_interval = \"1s\"\n\n\
                      [source.requests]\nkind = \"amqp\"\nhandler = \"echo\"\ndeferred = true\n";
        let config = config(folder.path(), STAGED, source);
        Some(Self { scene, folder, config })
    }

    fn worker(&self, id: &str, crash_at: Option<&str>) -> Process {
        let folder = self.folder.path().join(id);
        std::fs::create_dir_all(&folder).expect("a folder");
        let mut variables = vec![
            ("WORKER_REQUESTS_QUEUE", self.scene.client.queue.as_str()),
            ("WORKER_KEY", "1"),
            ("WORKER_ID", id),
            ("WORKER_AMQP_URI", &self.scene.uri),
            ("WORKER_ACTIVITY_EXCHANGE", ""),
        ];
        variables.extend(crash_at.map(|at| ("JOURNEYMAN_CRASH_POINT", at)));
        Process::start(&folder, &self.config, &variables)
    }

    async fn publish(&self, id: &str) {
        self.scene.publish(self.scene.properties(id)).await;
    }

    fn lines(&self, of: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.folder.path().join(format!("handler.{of}"))).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    async fn looks(&self, count: usize) {
        until("it is looked at", async || self.lines("looks").len() >= count).await;
    }

    /// Lets all work end, and returns the ids of this many replies. No further one may come.
    async fn end(self, last: Process, count: usize) -> BTreeSet<String> {
        std::fs::write(self.folder.path().join("handler.over"), "").expect("it is written");
        let ids = self.scene.replies(count).await;
        self.scene.close(async move { drop(last.drained().await) }).await;
        ids.into_iter().collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s15_a_worker_dies_and_another_one_goes_on_with_its_work() {
    let Some(bench) = Processes::new().await else { return };
    let first = bench.worker("first", None);
    bench.publish("1").await;
    bench.looks(2).await;
    first.signal(Signal::KILL);
    within("the end", first.ends()).await;
    let seen = bench.lines("looks").len();
    let second = bench.worker("second", None);
    bench.looks(seen + 2).await;
    assert_eq!((bench.lines("launched").len(), bench.lines("removed").len()), (1, 0));
    assert_eq!(bench.end(second, 1).await, ["1".to_owned()].into());
}

#[tokio::test(flavor = "multi_thread")]
async fn s1_a_worker_that_dies_at_any_step_of_a_deferral_launches_once_and_replies_once() {
    let Some(bench) = Processes::new().await else { return };
    let mut published = Vec::new();
    for step in ["exited", "before-report", "request-acknowledged"].iter().chain(DEFERRAL_CRASH_POINTS) {
        for times in 1..=repeats().count.map_or(1, |count| count.div_ceil(2)) {
            published.push(format!("{step}-{times}"));
            bench.publish(published.last().expect("one")).await;
            let ended = bench.worker("mortal", Some(&format!("{step}:{times}"))).ends().await;
            assert_eq!(ended.signal(), Some(Signal::KILL.as_raw()), "at {step}: {}", ended.log);
        }
    }
    let last = bench.worker("last", None);
    let seen = bench.lines("looks").len();
    bench.looks(seen + 2 * published.len()).await;
    let launched = bench.lines("launched");
    assert_eq!(launched.iter().collect::<BTreeSet<_>>().len(), launched.len(), "launched twice: {launched:?}");
    assert_eq!(launched.len(), published.len());
    let count = published.len();
    assert_eq!(bench.end(last, count).await, published.into_iter().collect());
    println!("deferrals: {count} deaths, {} launches, {count} replies: lost 0, twice 0", launched.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_a_check_that_reaches_no_queue_is_an_error_and_its_request_is_kept() {
    let Some(bench) = Processes::new().await else { return };
    let mut worker = bench.worker("one", None);
    let client = &bench.scene.client;
    client.until_depth(0, 1).await;
    let missing = format!("{}.delay.l0", client.queue);
    client.channel.queue_delete(missing.into(), QueueDeleteOptions::default()).await.expect("it is deleted");
    bench.publish("1").await;
    worker.says("it reaches no queue").await;
    assert_eq!(bench.lines("looks").len(), 0);
    let connection = client.broker.connect("an operator").await.expect("the broker lets us in");
    DelayQueues::new(&client.queue, &[]).declare(&connection).await.expect("they are declared");
    bench.looks(1).await;
    assert_eq!(bench.lines("launched").len(), 1);
    assert_eq!(bench.end(worker, 1).await, ["1".to_owned()].into());
}
