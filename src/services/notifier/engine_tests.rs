//! Steps of the engine, one at a time: what it asks of the store, what it begins, and how long it waits.

use std::net::Ipv4Addr;

use axum::response::Response;
use journeyman_domain::lane::dispatcher::AttemptLimits;
use journeyman_domain::limits::NOTIFIER_STOP_TIMEOUT;
use journeyman_platform::http::BearerToken;
use journeyman_platform::sqlite::Db;
use journeyman_worker::notify::TypePattern;
use serde_json::value::RawValue;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;

use super::super::api::{Console, Shown, Tokens};
use super::super::delivery::SenderConfig;
use super::super::registry::EndpointSettings;
use super::super::seal::SealKeys;
use super::super::store::{LaneChange, NewEvents};
use super::super::{Database, Notifier, NotifierConfig};
use super::*;

const LIMITS: AttemptLimits = AttemptLimits { in_all: 9, per_endpoint: 9, per_origin: 9 };

fn event(id: &str) -> Event {
    let data = RawValue::from_string("1".to_owned()).unwrap();
    let (source, r#type) = ("test".to_owned(), "a.b".to_owned());
    Event { source, id: id.to_owned(), r#type, key: id.to_owned(), epoch: None, time: None, last: false, data }
}

/// An endpoint of a receiver that has a minute to answer.
fn endpoint(name: &str, receiver: &str) -> (Arc<str>, (Endpoint, Vec<TypePattern>)) {
    let url = format!("http://{receiver}/{name}");
    let settings = serde_json::json!({ "url": url, "events": ["*"], "timeout_seconds": 60 });
    (Arc::from(name), EndpointSettings::build(&serde_json::from_value(settings).unwrap()).unwrap())
}

/// An engine with these endpoints, at which nothing listens.
async fn engine(endpoints: &[&str]) -> Engine {
    rustls::crypto::ring::default_provider().install_default().ok();
    let (store, _status) = Store::open(&Db::Memory).unwrap();
    let configured = endpoints.iter().map(|name| endpoint(name, "127.0.0.1:9")).collect();
    let registry = Arc::new(Registry::new(configured, SealKeys(Vec::new())));
    let intake = Arc::new(Intake::new(store.clone(), Arc::clone(&registry)));
    let sender = Sender::new(SenderConfig::default()).unwrap();
    let mut engine = Engine::new(store, sender, registry, LIMITS, intake).await.unwrap();
    engine.follow_lease();
    engine.is_all_behind = false;
    engine
}

impl Engine {
    async fn store_event(&self, id: &str, endpoint: &str) {
        let events = vec![(Arc::new(event(id)), vec![Arc::from(endpoint)])];
        let generation = self.store.endpoints().await.unwrap().generation;
        self.store.add(NewEvents { events, generation }, stamp()).await.unwrap().unwrap();
    }

    /// The next step that a task has taken.
    async fn step(&mut self) -> Step {
        self.tasks.join_next().await.unwrap().unwrap()
    }

    /// Finds what is due. Returns the endpoints that the store was asked about.
    async fn find(&mut self) -> Vec<Arc<str>> {
        self.find_due_lanes();
        if self.tasks.is_empty() {
            return Vec::new();
        }
        let Step::Found { asked, found } = self.step().await else { panic!("a search") };
        let names = asked.iter().map(|(name, _)| Arc::clone(name)).collect();
        self.on_found(asked, found);
        names
    }

    fn waiting(&self) -> usize {
        self.endpoints.keys().map(|name| self.dispatcher.waiting(name)).sum()
    }
}

#[tokio::test]
async fn f2_only_the_endpoints_that_a_hint_names_are_asked_about() {
    let mut engine = engine(&["a", "b", "c"]).await;
    engine.store_event("1", "b").await;
    let told = engine.store.stored().await;
    assert_eq!(told, None, "what came before this engine is not known");
    engine.on_stored(Some([Arc::from("b")].into()));
    assert_eq!(engine.find().await, [Arc::from("b")]);
    assert_eq!((engine.waiting(), engine.find().await.len()), (1, 0), "nothing is asked without a hint");
    engine.store_event("2", "c").await;
    assert_eq!(engine.store.stored().await, Some([Arc::from("c")].into()));
    engine.on_stored(None);
    assert!(engine.find().await.is_empty());
    assert_eq!(
        engine.find().await,
        [Arc::from("b"), Arc::from("c")],
        "those that have due lanes, and not the idle one"
    );
    assert_eq!(engine.waiting(), 2);
}

#[tokio::test]
async fn f3_a_result_that_cannot_be_stored_is_kept_and_no_attempt_begins_until_one_is() {
    let mut engine = engine(&["a"]).await;
    for id in ["1", "2"] {
        engine.store_event(id, "a").await;
    }
    engine.on_stored(None);
    engine.find().await;
    engine.find().await;
    let next = engine.dispatcher.begin(engine.clock.now()).unwrap();
    engine.begin(next);
    let Step::Sent { next, sent: Ok(Some(sent)) } = engine.step().await else { panic!("an attempt") };
    engine.on_sent(next, *sent);
    let mut commit = None;
    while !engine.tasks.is_empty() {
        let step = engine.step().await;
        if let Step::Committed { commit: one, .. } = step {
            commit = Some(one);
        } else {
            engine.on_step(step);
        }
    }
    let commit = commit.unwrap();
    // The disk is full, rather than what the store has said.
    for (count, failure) in
        [StoreFailure::DiskFull, StoreFailure::Unusable("read-only".to_owned())].into_iter().enumerate()
    {
        engine.on_committed(commit.clone(), Err(failure));
        engine.begin_all();
        assert_eq!((engine.waiting(), engine.tasks.len()), (1, count + 1), "the commit, and no attempt");
    }
    assert!(engine.taken.contains_key(&commit.next.lane), "its lane does not begin again");
    engine.on_committed(commit, Ok((Committed::Due(None), None)));
    engine.dispatcher.rest("a", None);
    engine.begin_all();
    assert_eq!(engine.waiting(), 0);
}

#[tokio::test]
async fn f8_the_engine_looks_again_when_the_first_pause_ends() {
    let mut engine = engine(&["a"]).await;
    engine.store_event("1", "a").await;
    engine.on_stored(None);
    engine.find().await;
    engine.find().await;
    let lane = *engine.taken.keys().next().unwrap();
    let until = stamp().plus(Duration::from_secs(10));
    engine.store.change_lane(lane, LaneChange::Pause { until }, None, stamp()).await.unwrap();
    engine.changes = engine.changes.again();
    engine.read_changes();
    let step = engine.step().await;
    engine.on_step(step);
    assert_eq!(engine.pause_ends, Some(until));
    engine.look_at = engine.clock.now().plus(Duration::from_secs(3_600));
    engine.is_all_behind = false;
    assert!(engine.next_wait() <= Duration::from_secs(10));
    let paused = EndpointChange::Pause { until: Some(stamp().plus(Duration::from_secs(5))) };
    engine.store.change_endpoint("a", paused, None, stamp()).await.unwrap();
    engine.changes = engine.changes.again();
    engine.read_changes();
    let step = engine.step().await;
    engine.on_step(step);
    assert!(engine.next_wait() <= Duration::from_secs(5));
    engine.pause_ends = Some(stamp());
    engine.is_all_behind = false;
    engine.watch_clocks();
    assert!(engine.is_all_behind && engine.changes != Reading::No);
}

#[tokio::test]
async fn f14_a_stop_that_waits_no_longer_for_an_attempt_ends_it_and_gives_the_lanes_up() {
    rustls::crypto::ring::default_provider().install_default().ok();
    let receiver = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let sender = SenderConfig { allowed_networks: vec!["127.0.0.1/32".parse().unwrap()], ..SenderConfig::default() };
    let draw = |_: &Shown| Response::default();
    let config = NotifierConfig {
        database: Database::Sqlite(Db::Memory),
        listen: (Ipv4Addr::LOCALHOST, 0).into(),
        tokens: Tokens { write: BearerToken::new("token"), read: None, publish: None },
        console: Console { page: draw, metrics: draw },
        retention: Duration::from_secs(3_600),
        sender: Sender::new(sender).unwrap(),
        seal_keys: SealKeys(Vec::new()),
        amqp: None,
        mistral: None,
        outbox: None,
        endpoints: [endpoint("a", &receiver.local_addr().unwrap().to_string())].into(),
    };
    let notifier = Notifier::start(config).await.unwrap();
    notifier.engine.store_event("1", "a").await;
    let (store, stop) = (notifier.store.clone(), CancellationToken::new());
    let has_lane = async || !store.due(vec![(Arc::from("a"), 9)], Stamp(i64::MAX)).await.unwrap()[0].lanes.is_empty();
    let stopping = async {
        let (mut attempt, _) = receiver.accept().await.unwrap();
        attempt.readable().await.unwrap();
        assert!(has_lane().await);
        stop.cancel();
        // The notifier begins to wait.
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
        tokio::time::pause();
        tokio::time::advance(NOTIFIER_STOP_TIMEOUT).await;
        tokio::time::resume();
        attempt.read_to_end(&mut Vec::new()).await.unwrap();
    };
    let (ended, ()) = tokio::join!(notifier.run(stop.clone()), stopping);
    ended.unwrap();
    assert!(!has_lane().await, "another node may have it");
}

#[tokio::test]
async fn f13_what_waits_is_due_as_much_earlier_as_the_clock_was_set_back() {
    let mut engine = engine(&["a"]).await;
    let hour = 3_600_000;
    let later = stamp().plus(Duration::from_secs(3_600));
    engine.next_due.insert(Arc::from("a"), later);
    engine.endpoints.get_mut("a").unwrap().state.health.rests_until = Some(later);
    engine.wall_clock = WallClock::new(Stamp(stamp().0 + hour), engine.clock.now());
    engine.watch_clocks();
    let Step::SetBack { set: Ok(()), .. } = engine.step().await else { panic!("a correction") };
    let entry = &engine.endpoints["a"];
    assert!(engine.next_due["a"].0 - stamp().0 < 60_000 && entry.is_unsaved);
    assert!(entry.state.health.rests_until.unwrap().0 - stamp().0 < 60_000);
}
