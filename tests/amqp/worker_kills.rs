//! kill -9 of the worker at each step of a request: none is lost, each gets a reply, and only those get a second reply whose reply or
//! copy was being published.
//!
//! `JOURNEYMAN_CRASH_RUNS` is the number of kills at each step. Without it, rounds begin for 20 seconds.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use journeyman_platform::amqp::lapin::BasicProperties;
use journeyman_platform::amqp::lapin::types::AMQPValue;
use journeyman_platform::host::crash_points::REQUEST_CRASH_POINTS;
use rustix::process::Signal;

use crate::amqp::support::{Client, Kind, broker, shared_uri};
use crate::support::Repeats;
use crate::support::process::{Process, config};

/// The steps of a request, ordered so that there is always a request to be copied.
const STEPS: [&str; 10] = [
    "request-delivered",
    "request-copied",
    // Journaled, and not started.
    "prepared",
    "spawned",
    "request-copied",
    "exited",
    "before-report",
    "request-published",
    "request-confirmed",
    "request-acknowledged",
];

/// Replies at once.
const AT_ONCE: &str = "#!/bin/sh\necho '{\"type\":\"answer\",\"json\":1}' >&3\n";

/// A queue, and workers that die one after the other.
struct Scene {
    uri: String,
    client: Client,
    answers: String,
    folder: tempfile::TempDir,
    config: PathBuf,
    published: usize,
    deaths: BTreeMap<&'static str, usize>,
}

impl Scene {
    async fn new(uri: String, kind: Kind) -> Self {
        let client = Client::new(&broker(&uri), kind).await;
        let answers = format!("{}-answers", client.queue);
        client.declare(Kind::Durable, &answers).await;
        let folder = memory_dir();
        // Unlimited attempts: the worker dies, and not because of the request.
        let source = "[source.requests]\nkind = \"amqp\"\nhandler = \"echo\"\nmax_attempts = 100000\n";
        let config = config(folder.path(), AT_ONCE, source);
        Self { uri, client, answers, folder, config, published: 0, deaths: BTreeMap::new() }
    }

    async fn publish(&mut self, count: usize) {
        for _ in 0..count {
            let id = self.published.to_string();
            let properties = Client::properties(&id, "/work");
            let properties = properties.with_reply_to(self.answers.as_str().into()).with_delivery_mode(2);
            assert!(self.client.publish(properties, id.as_bytes()).await);
            self.published += 1;
        }
    }

    fn worker(&self, crash_at: Option<&str>) -> Process {
        let mut variables = vec![
            ("WORKER_REQUESTS_QUEUE", self.client.queue.as_str()),
            ("WORKER_KEY", "1"),
            ("WORKER_AMQP_URI", &self.uri),
            ("WORKER_ACTIVITY_EXCHANGE", ""),
            ("JOURNEYMAN__WORKER__CAPACITY", "1"),
            // A worker that does not reach its crash point exits nevertheless.
            ("JOURNEYMAN__WORKER__EXIT_WHEN_IDLE", "30s"),
        ];
        variables.extend(crash_at.map(|at| ("JOURNEYMAN_CRASH_POINT", at)));
        Process::start(self.folder.path(), &self.config, &variables)
    }

    /// Runs a worker that dies at the `times`th passing of a step.
    async fn dies_at(&mut self, step: &'static str, times: usize) {
        self.publish(times).await;
        let at = format!("{step}:{times}");
        let ended = self.worker(Some(&at)).ends().await;
        assert_eq!(ended.signal(), Some(Signal::KILL.as_raw()), "at {at}: {}", ended.log);
        *self.deaths.entry(step).or_default() += 1;
    }

    /// Processes the rest, and returns the number of replies to each request.
    async fn finish(&mut self) -> BTreeMap<String, usize> {
        loop {
            let last = self.worker(None);
            self.client.until_depth(0, 1).await;
            last.drained().await;
            if self.client.depth().await == (0, 0) {
                break;
            }
        }
        let mut answered = BTreeMap::new();
        while let Some(answer) = self.client.get(&self.answers).await {
            *answered.entry(id(&answer.properties)).or_default() += 1;
        }
        answered
    }

    fn died(&self, steps: &[&str]) -> usize {
        steps.iter().filter_map(|step| self.deaths.get(step)).sum()
    }

    /// Asserts that none is lost, and that `must` steps caused a second reply each, `maybe` steps at most one.
    fn check_counts(&self, what: &str, answered: &BTreeMap<String, usize>, must: &[&str], maybe: &[&str]) {
        let all: usize = answered.values().sum();
        let repeated = all - answered.len();
        let lost = self.published - answered.len();
        let deaths: usize = self.deaths.values().sum();
        println!("{what}: {deaths} deaths, {} requests: lost {lost}, answered twice {repeated}", self.published);
        assert_eq!(lost, 0, "{:?}", (0..self.published).find(|id| !answered.contains_key(&id.to_string())));
        let (must, maybe) = (self.died(must), self.died(maybe));
        assert!(
            (must..=must + maybe).contains(&repeated),
            "{repeated} and not {must} to {}: {answered:?}",
            must + maybe
        );
    }
}

/// A directory in memory where there is one: the speed of the disk is not under test.
fn memory_dir() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a temporary directory")
}

fn id(properties: &BasicProperties) -> String {
    properties.correlation_id().as_ref().expect("an id").to_string()
}

pub(crate) fn repeats() -> Repeats {
    Repeats::new("JOURNEYMAN_CRASH_RUNS", Duration::from_secs(20))
}

async fn die_at_each_step(kind: Kind) {
    let Some(uri) = shared_uri() else { return };
    let mut scene = Scene::new(uri, kind).await;
    // A quorum queue counts deliveries itself; nothing is copied.
    let copied = |step: &&str| kind == Kind::Quorum && *step == "request-copied";
    let repeats = repeats();
    for run in (0..).take_while(|round| repeats.again(*round)) {
        for step in STEPS.into_iter().filter(|step| !copied(step)) {
            let times = if step == "request-copied" { 1 } else { 1 + run % 3 };
            scene.dies_at(step, times).await;
        }
    }
    let answered = scene.finish().await;
    // A broker may discard what it received last on a lost connection: a reply, or an acknowledgement.
    let maybe = ["exited", "request-published", "request-acknowledged"];
    scene.check_counts(&format!("{kind:?}"), &answered, &["request-confirmed", "request-copied"], &maybe);
}

#[tokio::test(flavor = "multi_thread")]
async fn i19_a_worker_that_dies_at_any_step_of_a_request_loses_none_and_answers_again_only_what_it_must() {
    assert!(REQUEST_CRASH_POINTS.iter().all(|point| STEPS.contains(point)));
    die_at_each_step(Kind::Durable).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_on_a_quorum_queue() {
    die_at_each_step(Kind::Quorum).await;
}

/// Kills its worker over a request that says "poison", sooner than the others are done.
const POISONED: &str = "#!/bin/sh\nif grep -q poison; then sleep 0.1; kill -9 $PPID; fi\nsleep 0.4\n";

#[tokio::test(flavor = "multi_thread")]
async fn a2_a_request_that_kills_its_worker_is_given_up_without_those_that_were_held_with_it() {
    let Some(uri) = shared_uri() else { return };
    for (kind, delivery_limit) in [(Kind::Quorum, None), (Kind::Quorum, Some(1)), (Kind::Durable, None)] {
        let client = Client::without_queue(&broker(&uri), &format!("jm-test-{}", uuid::Uuid::new_v4().simple())).await;
        let quorum = (kind == Kind::Quorum).then(|| ("x-queue-type", AMQPValue::LongString("quorum".into())));
        let limit = delivery_limit.map(|limit| ("x-delivery-limit", AMQPValue::LongInt(limit)));
        client.declare_with(kind, &client.queue, quorum.into_iter().chain(limit)).await;
        let folder = memory_dir();
        let source = "[source.requests]\nkind = \"amqp\"\nhandler = \"echo\"\nmax_attempts = 3\n";
        let config = config(folder.path(), POISONED, source);
        let innocents: Vec<String> = (0..30).map(|number| format!("i{number}")).collect();
        client.request(&["poison"]).await;
        client.request(&innocents.iter().map(String::as_str).collect::<Vec<_>>()).await;
        let worker = || {
            let variables = [
                ("WORKER_REQUESTS_QUEUE", client.queue.as_str()),
                ("WORKER_AMQP_URI", &uri),
                ("JOURNEYMAN__WORKER__CAPACITY", "8"),
                ("JOURNEYMAN__WORKER__EXIT_WHEN_IDLE", "5s"),
            ];
            Process::start(folder.path(), &config, &variables)
        };
        let mut deaths = 0;
        while worker().ends().await.signal() == Some(Signal::KILL.as_raw()) {
            deaths += 1;
        }
        assert_eq!((deaths, client.depth().await), (delivery_limit.map_or(3, |_| 2), (0, 0)), "{kind:?}");
        if delivery_limit.is_none() {
            let answer = client.answer("poison").await;
            assert_eq!(answer.json()["type"], "journeyman:attempts_exhausted");
        }
        for innocent in &innocents {
            let answer = client.answer(innocent).await;
            assert_eq!(answer.status(), "ok", "{kind:?} {innocent}: {}", answer.json());
        }
        client.delete_queue().await;
    }
}
