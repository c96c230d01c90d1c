//! One suite for every database.

use jiff::Timestamp;
use serde_json::value::RawValue;

use super::*;
use journeyman_domain::lane::endpoint::DisableReason;
use journeyman_domain::lane::retry::{HeadVerdict, MessageOutcome};
use journeyman_domain::limits::{
    NOTIFIER_PARTITIONS, NOTIFIER_REPLAY_LANES, POSTGRES_INTAKE_CONNECTIONS, POSTGRES_PAGE_CONNECTIONS,
};
use journeyman_worker::notify::Event;

/// Makes a test of SQLite and one of PostgreSQL.
macro_rules! on_each_database {
    ($($(#[$attribute:meta])* async fn $name:ident($store:ident: Store) $body:block)*) => {
        $($(#[$attribute])* async fn $name($store: Store) $body)*

        mod on_sqlite {
            $(#[tokio::test]
            async fn $name() {
                let (store, _status) = super::Store::open(&super::Db::Memory).unwrap();
                store.keep_lease(Vec::new()).await.unwrap();
                super::$name(store).await;
            })*
        }

        mod on_postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let Some(url) = super::fresh_database().await else { return };
                let store = super::Store::of(super::Postgres::open(&url, super::ca().as_deref()).await.unwrap());
                store.keep_lease(Vec::new()).await.unwrap();
                super::$name(store).await;
            })*
        }
    };
}

/// The URL of an empty database; none without a server.
#[expect(clippy::disallowed_methods, reason = "tests/run says where the server is")]
async fn fresh_database() -> Option<String> {
    let server = std::env::var("JOURNEYMAN_TEST_POSTGRES").ok().filter(|url| !url.is_empty());
    let is_needed = std::env::var("CI").is_ok_and(|ci| ci == "true");
    assert!(server.is_some() || !is_needed, "JOURNEYMAN_TEST_POSTGRES names no server; tests/run starts one");
    let Some(server) = server else {
        eprintln!("NOT TESTED: JOURNEYMAN_TEST_POSTGRES names no server; tests/run starts one");
        return None;
    };
    let (client, connection) = tokio_postgres::connect(&server, tokio_postgres::NoTls).await.unwrap();
    let name = format!("test_{}", Uuid::new_v4().simple());
    let create = format!("CREATE DATABASE {name}");
    tokio::select! {
        created = client.batch_execute(&create) => created.unwrap(),
        ended = connection => panic!("the connection has ended: {ended:?}"),
    }
    let (base, _) = server.rsplit_once('/').unwrap();
    Some(format!("{base}/{name}"))
}

/// The certificate of the server.
fn ca() -> Option<std::path::PathBuf> {
    std::env::var_os("JOURNEYMAN_TEST_POSTGRES_CA").map(Into::into)
}

fn names(all: &[&str]) -> Vec<Arc<str>> {
    all.iter().map(|name| Arc::from(*name)).collect()
}

fn event(id: &str, key: &str, epoch: Option<u32>) -> Event {
    let data = RawValue::from_string("{ \"a\":  1}".to_owned()).unwrap();
    let (source, r#type) = ("test".to_owned(), "build.finished".to_owned());
    Event { source, id: id.to_owned(), r#type, key: key.to_owned(), epoch, time: None, last: false, data }
}

async fn add(store: &Store, event: Event, endpoints: &[&str], at: i64) -> Added {
    add_all(store, vec![(event, names(endpoints))], at).await[0]
}

async fn add_all(store: &Store, events: Vec<(Event, Vec<Arc<str>>)>, at: i64) -> Vec<Added> {
    let generation = store.endpoints().await.unwrap().generation;
    store.add(NewEvents { events: shared(events), generation }, Stamp(at)).await.unwrap().unwrap()
}

fn shared(events: Vec<(Event, Vec<Arc<str>>)>) -> Vec<(Arc<Event>, Vec<Arc<str>>)> {
    events.into_iter().map(|(event, endpoints)| (Arc::new(event), endpoints)).collect()
}

async fn found(store: &Store, endpoint: &str, at: i64) -> DueLanes {
    store.due(vec![(Arc::from(endpoint), 99)], Stamp(at)).await.unwrap().remove(0)
}

async fn due(store: &Store, endpoint: &str, at: i64) -> Vec<LaneId> {
    found(store, endpoint, at).await.lanes.into_iter().map(|lane| lane.id).collect()
}

async fn next_due(store: &Store, endpoint: &str, at: i64) -> Option<i64> {
    found(store, endpoint, at).await.next.map(|at| at.0)
}

async fn end(store: &Store, head: Head, verdict: HeadVerdict) -> Committed {
    let mut state = head.state;
    state.attempts += 1;
    state.first_attempt_at.get_or_insert(Stamp(1));
    let attempt =
        AttemptRecord { started_at: Stamp(1), took_ms: 1, status: Some(200), error: None, detail: Vec::new() };
    store.end_attempt(Arc::new(EndedAttempt { head, state, attempt, verdict, at: Stamp(7) })).await.unwrap().0
}

async fn counts(store: &Store, endpoint: &str) -> (Counts, Option<LastFailure>) {
    store.counts().await.unwrap().remove(endpoint).unwrap_or_default()
}

async fn change(store: &Store, lane: LaneId, change: LaneChange, note: &str) -> bool {
    store.change_lane(lane, change, Some(note.to_owned()), Stamp(8)).await.unwrap()
}

async fn head(store: &Store, lane: LaneId) -> Head {
    head_at(store, lane, i64::MAX).await.unwrap()
}

async fn head_at(store: &Store, lane: LaneId, at: i64) -> Option<Head> {
    store.head(lane, Stamp(at)).await.unwrap().map(|head| *head)
}

const DELIVERED: HeadVerdict = HeadVerdict::Ended(MessageOutcome::Delivered);

async fn deliver(store: &Store, lane: LaneId) -> Committed {
    end(store, head(store, lane).await, DELIVERED).await
}

fn filter(endpoint: &str) -> ReplayFilter {
    ReplayFilter { endpoint: endpoint.to_owned(), ..ReplayFilter::default() }
}

on_each_database! {
    async fn an_event_is_stored_once_and_in_the_lane_of_each_endpoint(store: Store) {
        assert_eq!(add(&store, event("1", "k", None), &["a", "b"], 5).await, Added::Stored { lanes: 2 });
        assert_eq!(add(&store, event("1", "k", None), &["a", "b"], 6).await, Added::Duplicate);
        let (a, b) = (due(&store, "a", 5).await, due(&store, "b", 5).await);
        assert_eq!((a.len(), b.len(), due(&store, "a", 4).await.len()), (1, 1, 0));
        let head = head(&store, a[0]).await;
        assert_eq!((head.key.as_str(), head.data.as_slice()), ("k", b"{ \"a\":  1}".as_slice()), "byte for byte");
        let (counts, _) = counts(&store, "a").await;
        assert_eq!(counts, Counts { lanes: 1, messages: 1, oldest: Some(Stamp(5)), next_due: Some(Stamp(5)), ..Counts::default() });
        let both = vec![(event("2", "z", None), names(&["a"])), (event("1", "a", None), names(&["a"]))];
        let added = add_all(&store, both, 9).await;
        assert_eq!(added, [Added::Stored { lanes: 1 }, Added::Duplicate], "in the order of the events");
    }

    async fn events_of_one_transaction_follow_each_other_in_their_lanes(store: Store) {
        let sent = [("1", "k", None), ("2", "k", None), ("3", "j", None), ("4", "k", Some(1)), ("5", "k", Some(1))];
        let more = [("1", "k", None), ("6", "k", None), ("7", "k", Some(0)), ("8", "k", Some(2))];
        let mut events = Vec::new();
        for (id, key, epoch) in sent.into_iter().chain(more) {
            let last = id == "5" || id == "7";
            events.push((Event { last, ..event(id, key, epoch) }, names(&["a", "b"])));
        }
        let new = store.add(NewEvents { events: shared(events), generation: 1 }, Stamp(5));
        // It waits for the first one, and for no answer.
        let next = store.add(NewEvents { events: shared(vec![(event("9", "k", None), names(&["a"]))]), generation: 1 }, Stamp(5));
        let stale = store.add(NewEvents { events: Vec::new(), generation: 7 }, Stamp(5));
        let (added, next, stale) = tokio::join!(new, next, stale);
        let duplicate = |index| index == 5;
        let expected: Vec<_> =
            (0..9).map(|index| if duplicate(index) { Added::Duplicate } else { Added::Stored { lanes: 2 } }).collect();
        assert_eq!((added.unwrap().unwrap(), next.unwrap()), (expected, Some(vec![Added::Stored { lanes: 1 }])));
        assert_eq!(stale.unwrap(), None);
        for (endpoint, count) in [("a", 9), ("b", 8)] {
            let mut seen = Vec::new();
            for lane in due(&store, endpoint, 5).await {
                while let Some(head) = head_at(&store, lane, i64::MAX).await {
                    seen.push((head.event_id.clone(), head.epoch, head.seq));
                    end(&store, head, DELIVERED).await;
                }
            }
            seen.sort();
            let all = [("1", 0, 1), ("2", 0, 2), ("3", 0, 1), ("4", 1, 1), ("5", 1, 2), ("6", 1, 3), ("7", 1, 4), ("8", 2, 1)];
            let all = all.into_iter().chain([("9", 2, 2)]).map(|(id, epoch, seq)| (id.to_owned(), epoch, seq));
            assert_eq!(seen, Vec::from_iter(all.take(count)), "{endpoint}");
        }
    }

    async fn p1_a_lane_goes_on_only_from_a_head_that_has_ended_and_counts_without_gaps(store: Store) {
        for (id, epoch) in [("1", None), ("2", None), ("3", Some(1)), ("4", Some(0)), ("5", Some(1))] {
            add(&store, event(id, "k", epoch), &["a"], 5).await;
        }
        let [lane] = due(&store, "a", 5).await[..] else { panic!("one lane") };
        let again = HeadVerdict::TryAgain { at: Stamp(99) };
        let first = head(&store, lane).await;
        assert_eq!(end(&store, first, again).await, Committed::Due(Some(Stamp(99))));
        assert_eq!(next_due(&store, "a", 5).await, Some(99));
        let failure = counts(&store, "a").await.1.unwrap();
        assert_eq!((failure.status, counts(&store, "b").await.1), (Some(200), None));
        let mut seen = Vec::new();
        loop {
            let head = head(&store, lane).await;
            seen.push((head.event_id.parse::<u32>().unwrap(), head.epoch, head.seq, head.state.attempts));
            if end(&store, head, DELIVERED).await == Committed::Due(None) {
                break;
            }
        }
        assert_eq!(seen, [(1, 0, 1, 1), (2, 0, 2, 0), (3, 1, 1, 0), (4, 1, 2, 0), (5, 1, 3, 0)]);
        assert_eq!((next_due(&store, "a", 5).await, counts(&store, "a").await.0.messages), (None, 0));
        add(&store, event("6", "k", None), &["a"], 50).await;
        assert_eq!(due(&store, "a", 50).await, [lane], "an empty lane begins again");
        let attempts = store.attempts(Some("a".to_owned()), None, None, 9).await.unwrap();
        assert_eq!((attempts.len(), attempts[0].status, attempts[0].key.as_str()), (6, Some(200), "k"));
        assert_eq!(counts(&store, "a").await.1, None, "no head was attempted");
    }

    async fn an_attempt_of_a_message_that_is_no_head_any_more_is_refused(store: Store) {
        for id in ["1", "2"] {
            add(&store, event(id, "k", None), &["a"], 5).await;
        }
        let lane = due(&store, "a", 5).await[0];
        let (one, same) = (head(&store, lane).await, head(&store, lane).await);
        assert_eq!(end(&store, one, DELIVERED).await, Committed::Due(Some(Stamp(7))));
        assert_eq!(end(&store, same, DELIVERED).await, Committed::Refused);
        assert_eq!(head(&store, lane).await.seq, 2);
        let second = head(&store, lane).await;
        assert!(!change(&store, lane, LaneChange::SkipHead { position: 1 }, "no head").await);
        assert!(change(&store, lane, LaneChange::SkipHead { position: 2 }, "poison").await);
        assert_eq!(end(&store, second, DELIVERED).await, Committed::Refused);
        assert_eq!(store.attempts(None, Some(lane.0), None, 9).await.unwrap().len(), 1, "nothing of a refused one is stored");
    }

    async fn a_lane_that_is_parked_or_paused_is_not_due_and_keeps_what_follows(store: Store) {
        add(&store, event("1", "k", None), &["a"], 5).await;
        let lane = due(&store, "a", 5).await[0];
        assert_eq!(end(&store, head(&store, lane).await, HeadVerdict::Park).await, Committed::Due(None));
        add(&store, event("2", "k", None), &["a"], 6).await;
        let (counts, _) = counts(&store, "a").await;
        assert_eq!((due(&store, "a", 99).await.len(), counts.messages, counts.parked), (0, 2, 1));
        assert!(store.change_lane(lane, LaneChange::Resume, None, Stamp(9)).await.unwrap());
        assert_eq!(due(&store, "a", 9).await, [lane]);
        assert!(change(&store, lane, LaneChange::Pause { until: Stamp(20) }, "maintenance").await);
        assert_eq!(store.end_pauses(Stamp(19)).await.unwrap(), Some(Stamp(20)), "f8: when the next one ends");
        let shown = &store.lanes(None, None, 9).await.unwrap()[0];
        assert_eq!((shown.state.as_str(), shown.note.as_deref(), shown.waiting), ("paused", Some("maintenance"), 2));
        assert_eq!(store.end_pauses(Stamp(20)).await.unwrap(), None);
        assert_eq!(due(&store, "a", 20).await, [lane]);
        assert!(!store.change_lane(LaneId(77), LaneChange::Resume, None, Stamp(9)).await.unwrap());
    }

    async fn what_is_replayed_goes_before_the_head_in_its_order(store: Store) {
        for id in ["1", "2", "3"] {
            add(&store, event(id, "k", None), &["a"], 5).await;
        }
        let lane = due(&store, "a", 5).await[0];
        deliver(&store, lane).await;
        deliver(&store, lane).await;
        assert_eq!(store.replay(ReplayFilter { dry_run: true, ..filter("a") }, Stamp(9)).await.unwrap(), 2);
        assert_eq!(store.replay(filter("a"), Stamp(9)).await.unwrap(), 2);
        assert_eq!(store.replay(filter("a"), Stamp(9)).await.unwrap(), 2, "f14: the answer of the first may be lost");
        let shown = &store.lanes(None, None, 9).await.unwrap()[0];
        assert_eq!((shown.head, shown.waiting, counts(&store, "a").await.0.messages), (1, 3, 3));
        assert!(!change(&store, lane, LaneChange::SkipHead { position: 3 }, "not the head").await);
        let first = head(&store, lane).await;
        assert_eq!((first.is_replay, first.seq), (true, 1));
        end(&store, first, HeadVerdict::TryAgain { at: Stamp(30) }).await;
        let mut seen = Vec::new();
        while let Some(head) = head_at(&store, lane, i64::MAX).await {
            seen.push((head.is_replay, head.seq, head.state.attempts));
            end(&store, head, DELIVERED).await;
        }
        assert_eq!(seen, [(true, 1, 1), (true, 2, 0), (false, 3, 0)]);
        let one = ReplayFilter { event_id: Some("3".to_owned()), ..filter("a") };
        assert_eq!(store.replay(one, Stamp(9)).await.unwrap(), 1);
        assert_eq!((due(&store, "a", 9).await, head(&store, lane).await.seq), (vec![lane], 3));
        assert_eq!(deliver(&store, lane).await, Committed::Due(None), "an empty lane is empty again");
        let none = ReplayFilter { since: Timestamp::from_millisecond(6).ok(), ..filter("a") };
        assert_eq!(store.replay(none, Stamp(9)).await.unwrap(), 0);
        assert_eq!(store.replay(filter("a"), Stamp(9)).await.unwrap(), 3);
        assert!(change(&store, lane, LaneChange::SkipHead { position: 1 }, "again").await);
        assert_eq!(head(&store, lane).await.seq, 2);
        for position in [2, 3] {
            for _ in 0..2 {
                let is_done = change(&store, lane, LaneChange::SkipHead { position }, "again").await;
                assert!(is_done, "f14: the answer of the first may be lost");
            }
        }
        assert!(!change(&store, lane, LaneChange::SkipHead { position: 2 }, "another reason").await);
        assert!(due(&store, "a", 99).await.is_empty());
    }

    async fn f1_a_replay_of_many_lanes_is_several_short_transactions(store: Store) {
        let ids: Vec<String> = (0..=NOTIFIER_REPLAY_LANES).map(|id| id.to_string()).collect();
        let events = ids.iter().map(|id| (event(id, id, None), names(&["a"]))).collect();
        add_all(&store, events, 5).await;
        let lanes = store.due(vec![(Arc::from("a"), ids.len())], Stamp(5)).await.unwrap().remove(0).lanes;
        for lane in &lanes {
            deliver(&store, lane.id).await;
        }
        let count = i64::try_from(ids.len()).unwrap();
        for (some, expected) in [
            (ReplayFilter { dry_run: true, ..filter("a") }, count),
            (ReplayFilter { key: Some("7".to_owned()), ..filter("a") }, 1),
            (ReplayFilter { event_id: Some("8".to_owned()), ..filter("a") }, 1),
        ] {
            assert_eq!(store.replay(some, Stamp(9)).await.unwrap(), expected);
        }
        assert_eq!(due(&store, "a", 9).await.len(), 2);
        assert_eq!(store.replay(filter("a"), Stamp(9)).await.unwrap(), count);
        let found = store.due(vec![(Arc::from("a"), ids.len())], Stamp(9)).await.unwrap().remove(0);
        assert_eq!(found.lanes.len(), ids.len());
    }

    async fn the_state_of_an_endpoint_is_kept(store: Store) {
        let a = Arc::from("a");
        let failing = EndpointHealth { failures: 3, failing_since: Some(Stamp(4)), ..EndpointHealth::default() };
        assert_eq!(store.endpoints().await.unwrap().states, BTreeMap::new());
        store.set_health(&a, failing).await.unwrap();
        let pause = EndpointChange::Pause { until: Some(Stamp(9)) };
        store.change_endpoint("a", pause, Some("upgrade".to_owned()), Stamp(7)).await.unwrap();
        store.change_endpoint("a", EndpointChange::Disable(DisableReason::Gone), None, Stamp(7)).await.unwrap();
        store.change_endpoint("a", EndpointChange::Disable(DisableReason::Failing), None, Stamp(7)).await.unwrap();
        store.set_settings("a", Some(vec![1])).await.unwrap();
        let state = EndpointState {
            health: failing,
            disabled: Some(DisableReason::Gone),
            paused_until: Some(Stamp(9)),
            note: Some("upgrade".to_owned()),
            settings: Some(vec![1]),
        };
        assert_eq!(store.endpoints().await.unwrap().states["a"], state);
        store.change_endpoint("a", EndpointChange::Pause { until: None }, None, Stamp(7)).await.unwrap();
        store.change_endpoint("a", EndpointChange::Enable, None, Stamp(7)).await.unwrap();
        store.set_settings("a", None).await.unwrap();
        assert_eq!(store.endpoints().await.unwrap().states["a"], EndpointState::default());
        add(&store, event("1", "k", None), &["a"], 5).await;
        let lane = due(&store, "a", 5).await[0];
        end(&store, head(&store, lane).await, HeadVerdict::TryAgain { at: Stamp(99) }).await;
        store.change_endpoint("a", EndpointChange::Disable(DisableReason::Gone), None, Stamp(7)).await.unwrap();
        store.change_endpoint("a", EndpointChange::Redeliver, None, Stamp(8)).await.unwrap();
        assert_eq!(due(&store, "a", 8).await, [lane]);
        assert_eq!(store.endpoints().await.unwrap().states["a"], EndpointState::default());
    }

    async fn what_ended_long_ago_is_removed_and_nothing_else(store: Store) {
        for (id, key, last) in [("1", "k", true), ("2", "k", true), ("3", "closed", true), ("4", "goes-on", false)] {
            add(&store, Event { last, ..event(id, key, None) }, &["a"], 5).await;
        }
        for lane in due(&store, "a", 5).await {
            deliver(&store, lane).await;
        }
        assert_eq!(store.clean_up(Stamp(5), "").await.unwrap(), 0);
        // Three messages with their attempts and events, and the lane that is empty and closed.
        assert_eq!(store.clean_up(Stamp(8), "").await.unwrap(), 10);
        assert_eq!(store.clean_up(Stamp(8), "").await.unwrap(), 0);
        let [lane] = due(&store, "a", 9).await[..] else { panic!("one lane") };
        assert_eq!(head(&store, lane).await.seq, 2);
        assert_eq!(add(&store, event("1", "k", None), &["a"], 9).await, Added::Stored { lanes: 1 });
        for (id, key, seq) in [("5", "closed", 1), ("6", "goes-on", 2)] {
            add(&store, event(id, key, None), &["a"], 9).await;
            assert_eq!(store.lanes(None, Some(key.to_owned()), 9).await.unwrap()[0].seq, seq, "{key}");
        }
    }

    async fn f2_one_search_finds_what_is_due_and_idle_endpoints_are_no_part_of_it(store: Store) {
        for (id, endpoint) in [("1", "a"), ("2", "b"), ("3", "b"), ("4", "c")] {
            add(&store, event(id, id, None), &[endpoint], 5).await;
        }
        let idle = due(&store, "c", 5).await[0];
        deliver(&store, idle).await;
        let late = due(&store, "a", 5).await[0];
        end(&store, head(&store, late).await, HeadVerdict::TryAgain { at: Stamp(99) }).await;
        let waiting = store.waiting().await.unwrap();
        assert_eq!(waiting, [("a".to_owned(), Stamp(99)), ("b".to_owned(), Stamp(5))]);
        let found = store.due(vec![(Arc::from("a"), 9), (Arc::from("b"), 1)], Stamp(9)).await.unwrap();
        assert_eq!(found.iter().map(|one| (one.lanes.len(), one.next)).collect::<Vec<_>>(), [(0, Some(Stamp(99))), (1, None)]);
        assert!(head_at(&store, late, 98).await.is_none(), "what has become due later since is not sent");
        assert!(head_at(&store, late, 99).await.is_some());
    }

    async fn f2_an_endpoint_that_was_made_for_its_lanes_goes_with_the_last_one(store: Store) {
        for name in ["m-a", "m-b", "m-c", "own"] {
            store.set_settings(name, Some(vec![1])).await.unwrap();
        }
        store.change_endpoint("m-b", EndpointChange::Disable(DisableReason::ByOperator), None, Stamp(5)).await.unwrap();
        add(&store, event("1", "k", None), &["m-c"], 5).await;
        let before = store.endpoints().await.unwrap().generation;
        assert_eq!(store.clean_up(Stamp(1), "m-_").await.unwrap(), 1);
        let after = store.endpoints().await.unwrap();
        assert_eq!(after.states.keys().collect::<Vec<_>>(), ["m-b", "m-c", "own"]);
        assert!(after.generation > before, "nothing is stored for it any more");
    }

    async fn f12_events_are_stored_only_for_the_endpoints_of_the_moment(store: Store) {
        let generation = store.endpoints().await.unwrap().generation;
        store.set_settings("new", Some(vec![1])).await.unwrap();
        let of = |generation| NewEvents { events: vec![(Arc::new(event("1", "k", None)), names(&["a"]))], generation };
        assert_eq!(store.add(of(generation), Stamp(5)).await.unwrap(), None, "the new one would lose it");
        assert!(due(&store, "a", 5).await.is_empty());
        let generation = store.endpoints().await.unwrap().generation;
        assert_eq!(store.add(of(generation), Stamp(5)).await.unwrap(), Some(vec![Added::Stored { lanes: 1 }]));
    }

    async fn f13_heads_that_wait_are_due_as_much_earlier_as_the_clock_was_set_back(store: Store) {
        for (id, at) in [("1", 5_000), ("2", 9_000), ("3", 90)] {
            add(&store, event(id, id, None), &["a"], 5).await;
            let lane = due(&store, "a", 5).await[0];
            end(&store, head(&store, lane).await, HeadVerdict::TryAgain { at: Stamp(at) }).await;
        }
        store.set_back(4_900, Stamp(100)).await.unwrap();
        assert_eq!((due(&store, "a", 99).await.len(), due(&store, "a", 100).await.len()), (1, 2));
        assert_eq!(next_due(&store, "a", 100).await, Some(4_100));
    }

    async fn f1_the_pages_of_a_history_have_every_attempt_once(store: Store) {
        for (id, key) in [("1", "k"), ("2", "k"), ("3", "l"), ("4", "l"), ("5", "k")] {
            add(&store, event(id, key, None), &["a", "b"], 5).await;
        }
        for endpoint in ["a", "b"] {
            for lane in due(&store, endpoint, 5).await {
                while deliver(&store, lane).await != Committed::Due(None) {}
            }
        }
        let lane = store.lanes(Some("a".to_owned()), Some("k".to_owned()), 9).await.unwrap()[0].id;
        for (endpoint, lane, count) in [(None, None, 10), (Some("a"), None, 5), (None, Some(lane), 3)] {
            let (mut before, mut seen) = (None, BTreeSet::new());
            loop {
                let page = store.attempts(endpoint.map(str::to_owned), lane, before, 2).await.unwrap();
                let Some(last) = page.last() else { break };
                before = Some([last.started_at.0, last.lane, last.position, last.number]);
                seen.extend(page.iter().map(|row| (row.endpoint.clone(), row.lane, row.position)));
                assert!(page.iter().all(|row| endpoint.is_none_or(|one| row.endpoint == one)));
            }
            assert_eq!(seen.len(), count, "{endpoint:?} {lane:?}");
        }
    }

    async fn a_lane_is_closed_unless_it_has_begun_anew(store: Store) {
        store.set_settings("m-a", Some(vec![1])).await.unwrap();
        for (id, key, epoch) in [("1", "ended", 1), ("2", "rerun", 2)] {
            add(&store, event(id, key, Some(epoch)), &["m-a"], 5).await;
            store.close_lanes("m-", key, 1).await.unwrap();
        }
        for lane in due(&store, "m-a", 5).await {
            deliver(&store, lane).await;
        }
        assert_eq!(store.clean_up(Stamp(99), "").await.unwrap(), 7);
        let ended = store.lanes(None, Some("ended".to_owned()), 9).await.unwrap();
        let rerun = store.lanes(None, Some("rerun".to_owned()), 9).await.unwrap();
        assert_eq!((ended.len(), rerun.len()), (0, 1));
    }

    async fn a_node_has_every_partition_until_it_lets_it_go(store: Store) {
        let (lease, _) = store.keep_lease(Vec::new()).await.unwrap();
        assert_eq!((lease.has.len(), lease.nodes), (usize::from(NOTIFIER_PARTITIONS), 1));
        add(&store, event("1", "k", None), &["a"], 5).await;
        let lane = due(&store, "a", 5).await[0];
        let under_way = head(&store, lane).await;
        store.end_lease().await.unwrap();
        assert!(due(&store, "a", 5).await.is_empty() && head_at(&store, lane, i64::MAX).await.is_none());
        assert_eq!(end(&store, under_way, DELIVERED).await, Committed::Refused);
    }
}

/// The index or the scan of each step of a statement.
fn plan(conn: &Connection, sql: &str) -> Vec<String> {
    let mut steps = conn.prepare(&format!("EXPLAIN QUERY PLAN {}", sql.replace('$', "?"))).unwrap();
    for index in 1..=steps.parameter_count() {
        steps.raw_bind_parameter(index, 1).unwrap();
    }
    let mut rows = steps.raw_query();
    std::iter::from_fn(|| rows.next().unwrap().map(|row| row.get(3).unwrap())).collect()
}

#[test]
fn f1_pages_read_no_more_of_a_long_history_than_they_show() {
    let conn = Connection::open_in_memory().unwrap();
    conn.execute_batch(sqlite::SCHEMA.sql).unwrap();
    use super::operators::*;
    let of_lanes = [LANES, LANES_OF_ENDPOINT, LANES_OF_KEY, COUNTS, LAST_FAILURES];
    for statement in [ATTEMPTS, ATTEMPTS_OF_ENDPOINT, ATTEMPTS_OF_LANE].into_iter().chain(of_lanes) {
        for step in plan(&conn, statement) {
            let of_table = ["SCAN lane", "SCAN message", "SCAN event"].contains(&step.as_str());
            assert!(!of_table && !step.contains("sqlite_autoindex_lane_1"), "{step}: {statement}");
        }
    }
    let by_index =
        [(ATTEMPTS, "attempt_started"), (ATTEMPTS_OF_ENDPOINT, "attempt_endpoint"), (ATTEMPTS_OF_LANE, "PRIMARY")];
    for (statement, index) in by_index {
        let steps = plan(&conn, statement);
        assert!(steps.iter().any(|step| step.starts_with("SEARCH attempt USING") && step.contains(index)), "{steps:?}");
        // The rows of a page are put in order again.
        assert!(steps.iter().filter(|step| step.contains("TEMP B-TREE")).count() <= 1, "{steps:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p3_nodes_share_the_lanes_and_what_a_former_owner_stores_is_refused() {
    let Some(url) = fresh_database().await else { return };
    let open = async || Store::of(Postgres::open(&url, ca().as_deref()).await.unwrap());
    let (one, two) = (open().await, open().await);
    let keys: Vec<String> = (0..40).map(|n| format!("key-{n}")).collect();
    for key in &keys {
        add(&one, event(key, key, None), &["a"], 5).await;
    }
    let lanes = async |store: &Store| found(store, "a", 9).await.lanes;
    assert!(lanes(&one).await.is_empty(), "a node without a lease delivers nothing");
    one.keep_lease(Vec::new()).await.unwrap();
    assert_eq!(lanes(&one).await.len(), keys.len());
    let stalled = {
        let lane = lanes(&one).await[0].id;
        head(&one, lane).await
    };
    let (lease, _) = two.keep_lease(Vec::new()).await.unwrap();
    assert_eq!((lease.has.len(), lease.nodes), (0, 2), "the other one has them");
    let (lease, _) = one.keep_lease(Vec::new()).await.unwrap();
    assert_eq!(lease.drain.len(), 32);
    one.keep_lease(lease.drain.into_iter().collect()).await.unwrap();
    two.keep_lease(Vec::new()).await.unwrap();
    let (of_one, of_two) = (lanes(&one).await, lanes(&two).await);
    assert!(!of_one.is_empty() && !of_two.is_empty() && of_one.len() + of_two.len() == keys.len());
    assert!(of_one.iter().all(|lane| !of_two.contains(lane)));

    // The first one is dead for the second one, which takes its lanes; then it wakes up.
    one.end_lease().await.unwrap();
    two.keep_lease(Vec::new()).await.unwrap();
    assert_eq!(lanes(&two).await.len(), keys.len());
    assert_eq!(end(&one, stalled, DELIVERED).await, Committed::Refused);
    two.end_lease().await.unwrap();
    one.keep_lease(Vec::new()).await.unwrap();
    let lane = lanes(&one).await[0].id;
    let old = head(&one, lane).await;
    one.end_lease().await.unwrap();
    two.keep_lease(Vec::new()).await.unwrap();
    two.end_lease().await.unwrap();
    one.keep_lease(Vec::new()).await.unwrap();
    assert_eq!(end(&one, old, DELIVERED).await, Committed::Refused, "its own lane, with an old token");
    assert_eq!(deliver(&one, lane).await, Committed::Due(None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f12_what_a_node_could_not_tell_the_others_it_tells_them_later() {
    let Some(url) = fresh_database().await else { return };
    let open = async || Store::of(Postgres::open(&url, ca().as_deref()).await.unwrap());
    let (one, two) = (open().await, open().await);
    add(&one, event("1", "k", None), &["a"], 5).await;
    // What the first one had to tell is gone with its connection.
    let Kind::Postgres(postgres) = &one.database else { panic!("PostgreSQL") };
    postgres.told.stored().await;
    let telling = async {
        assert_eq!(two.stored().await, None, "what it tells itself at first");
        tokio::select! {
            () = one.run_hints() => panic!("they have no end"),
            told = two.stored() => assert_eq!(told, None),
        }
    };
    tokio::select! {
        () = two.run_hints() => panic!("they have no end"),
        () = telling => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f3_a_database_that_was_read_only_is_written_to_again() {
    let Some(url) = fresh_database().await else { return };
    let open = async || Store::of(Postgres::open(&url, ca().as_deref()).await.unwrap());
    let generation = open().await.endpoints().await.unwrap().generation;
    let make_read_only = async |is_read_only: bool| {
        let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
        let (_, name) = url.rsplit_once('/').unwrap();
        let alter = format!("ALTER DATABASE {name} SET default_transaction_read_only = {is_read_only}");
        let altering = client.batch_execute(&alter);
        let writable = client.batch_execute("SET default_transaction_read_only = off");
        tokio::select! {
            altered = async { writable.await.and(altering.await) } => altered.unwrap(),
            ended = connection => panic!("the connection has ended: {ended:?}"),
        }
    };
    make_read_only(true).await;
    let store = open().await;
    let new = || NewEvents { events: vec![(Arc::new(event("1", "k", None)), names(&["a"]))], generation };
    assert!(matches!(store.add(new(), Stamp(5)).await, Err(StoreFailure::Unusable(_))));
    make_read_only(false).await;
    assert_eq!(store.add(new(), Stamp(5)).await.unwrap(), Some(vec![Added::Stored { lanes: 1 }]));
}

#[tokio::test]
async fn a_server_whose_ca_is_unknown_says_what_to_configure() {
    let Some(url) = fresh_database().await else { return };
    let refused = Postgres::open(&format!("{url}?sslmode=require"), None).await.err().expect("it is refused");
    assert!(refused.to_string().contains("UnknownIssuer; no CA that is trusted here"), "{refused}");
}

#[tokio::test]
async fn the_clean_up_keeps_a_lane_that_gets_a_message_meanwhile() {
    let Some(url) = fresh_database().await else { return };
    let store = Store::of(Postgres::open(&url, ca().as_deref()).await.unwrap());
    store.keep_lease(Vec::new()).await.unwrap();
    add(&store, Event { last: true, ..event("1", "k", None) }, &["a"], 5).await;
    let [lane] = due(&store, "a", 5).await[..] else { panic!("one lane") };
    deliver(&store, lane).await;
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    let beside = async {
        let append = "BEGIN; UPDATE journeyman_notifier.lane SET tail = tail + 1, due_at = 5000, last_at = 5000";
        client.batch_execute(append).await.unwrap();
        let committing = async {
            let waiting =
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
            while client.query_one(waiting, &[]).await.unwrap().get::<_, i64>(0) == 0 {}
            client.batch_execute("COMMIT").await.unwrap();
        };
        tokio::join!(store.clean_up(Stamp(1_000), "m-_"), committing).0.unwrap();
        client.query_one("SELECT count(*) FROM journeyman_notifier.lane", &[]).await.unwrap().get::<_, i64>(0)
    };
    let lanes = tokio::select! {
        lanes = beside => lanes,
        ended = connection => panic!("the connection has ended: {ended:?}"),
    };
    assert_eq!(lanes, 1);
}

#[tokio::test]
async fn a_call_that_cannot_be_stored_harms_no_other_one_of_its_transaction() {
    let Some(url) = fresh_database().await else { return };
    let store = Store::of(Postgres::open(&url, ca().as_deref()).await.unwrap());
    let calls = ["1", "2", "a\0b", "3", "4"].map(|id| {
        let new = NewEvents { events: shared(vec![(event(id, id, None), names(&["a"]))]), generation: 1 };
        store.add(new, Stamp(5))
    });
    let results = futures_util::future::join_all(calls).await;
    let is_stored = results.iter().map(|result| matches!(result, Ok(Some(_)))).collect::<Vec<_>>();
    assert_eq!(is_stored, [true, true, false, true, true]);
    assert!(matches!(results[2], Err(StoreFailure::Failed(_))), "{:?}", results[2]);
    assert_eq!(counts(&store, "a").await.0.messages, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f4_the_lease_and_the_heads_wait_for_no_intake_and_no_page() {
    let Some(url) = fresh_database().await else { return };
    let postgres = Postgres::open(&url, ca().as_deref()).await.unwrap();
    let store = Store::of(postgres.clone());
    let mut held = Vec::new();
    for (of, count) in [(Use::Intake, POSTGRES_INTAKE_CONNECTIONS), (Use::Pages, POSTGRES_PAGE_CONNECTIONS)] {
        for _ in 0..count {
            held.push(postgres.begin(of).await.unwrap());
        }
    }
    store.keep_lease(Vec::new()).await.unwrap();
    store.waiting().await.unwrap();
    assert_eq!(held.len(), POSTGRES_INTAKE_CONNECTIONS + POSTGRES_PAGE_CONNECTIONS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_of_many_callers_wait_for_each_other_and_never_in_a_circle() {
    let Some(url) = fresh_database().await else { return };
    let store = Store::of(Postgres::open(&url, ca().as_deref()).await.unwrap());
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..8_u32 {
        let store = store.clone();
        callers.spawn(async move {
            for call in 0..10_u32 {
                let mut keys: Vec<u32> = (0..8).collect();
                keys.rotate_left(usize::try_from(caller).unwrap());
                let batch = keys.iter().map(|key| {
                    (event(&format!("{caller}-{call}-{key}"), &format!("k{key}"), None), names(&["a", "b"]))
                });
                add_all(&store, batch.collect(), 5).await;
            }
        });
    }
    while let Some(done) = callers.join_next().await {
        done.unwrap();
    }
    for endpoint in ["a", "b"] {
        let lanes = store.lanes(Some(endpoint.to_owned()), None, 99).await.unwrap();
        assert_eq!(lanes.len(), 8);
        assert!(lanes.iter().all(|lane| (lane.seq, lane.waiting) == (80, 80)), "{lanes:?}");
    }
}
