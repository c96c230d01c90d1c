//! What a service manager hears of a worker: that it is up, what it does in the words of `journeyman status`, that its loop
//! still answers, and that it is on its way out.
//!
//! It looks at the worker once a second, only where a manager wants to hear, and decides nothing about it.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::steer::status;
use crate::host::systemd::{Teller, Word};
use crate::limits::{
    MANAGER_EXTEND_BY, MANAGER_EXTEND_EVERY, MANAGER_LOOK_EVERY, MANAGER_LOOK_WAIT, MANAGER_STATUS_EVERY,
};
use crate::worker::view::{State, View};

/// Tells the manager for as long as it is polled. `look` answers with how the worker looks, `None` once it has exited.
///
/// The service is ready when the loop has answered for the first time, not when a source has: a queue that is down when the
/// host boots is told in the status, and is no reason to kill the worker that waits for it.
///
/// # Cancel safety
///
/// Cancel safe.
pub(super) async fn tell<L, A>(teller: Teller, watchdog: Option<Duration>, look: L) -> Infallible
where
    L: Fn() -> A,
    A: Future<Output = Option<View>>,
{
    // A worker that is to be found dead in time is looked at in time.
    let every = watchdog.map_or(MANAGER_LOOK_EVERY, |span| MANAGER_LOOK_EVERY.min(span / 4));
    let wait = watchdog.map_or(MANAGER_LOOK_WAIT, |span| MANAGER_LOOK_WAIT.min(span / 4));
    let mut told = Told { teller, watchdog, every, ready: false, status: None, alive_at: None, extended_at: None };
    loop {
        match timeout(wait, look()).await {
            Ok(Some(view)) => told.looks(&view, Instant::now()),
            Ok(None) => return std::future::pending().await,
            Err(_) => tracing::error!(
                "the worker's loop has not answered for {} s; a watchdog of the service manager will restart it",
                wait.as_secs_f64()
            ),
        }
        tokio::time::sleep(every).await;
    }
}

struct Told {
    teller: Teller,
    watchdog: Option<Duration>,
    /// How long it is to the next look.
    every: Duration,
    ready: bool,
    status: Option<Last>,
    alive_at: Option<Instant>,
    extended_at: Option<Instant>,
}

impl Told {
    fn looks(&mut self, view: &View, now: Instant) {
        let mut words = Vec::new();
        if !self.ready {
            self.ready = true;
            words.push(Word::Ready);
        }
        if is_leaving(view.state) {
            if self.extended_at.is_none() {
                words.push(Word::Stopping);
            }
            if is_due(self.extended_at, MANAGER_EXTEND_EVERY, now) {
                self.extended_at = Some(now);
                words.push(Word::Extend(MANAGER_EXTEND_BY));
            }
        }
        words.extend(self.status(view, now).map(Word::Status));
        if self.watchdog.is_some_and(|span| is_due(self.alive_at, span / 2 - self.every, now)) {
            self.alive_at = Some(now);
            words.push(Word::Alive);
        }
        if !words.is_empty() {
            self.teller.tell(words);
        }
    }

    /// What to say of the state: at once where something has happened, now and then where only a span runs down.
    fn status(&mut self, view: &View, now: Instant) -> Option<String> {
        let text = status::one_line(view);
        // Of numbers only these tell of more than time.
        let words: String = text.chars().filter(|char| !char.is_ascii_digit()).collect();
        let happened = Happened { tasks: view.tasks.len(), capacity: view.capacity, words };
        let is_new = self.status.as_ref().is_none_or(|last| {
            last.text != text && (last.happened != happened || is_due(Some(last.at), MANAGER_STATUS_EVERY, now))
        });
        is_new.then(|| {
            self.status = Some(Last { text: text.clone(), happened, at: now });
            text
        })
    }
}

/// What was said last.
struct Last {
    text: String,
    happened: Happened,
    at: Instant,
}

#[derive(PartialEq, Eq)]
struct Happened {
    tasks: usize,
    capacity: u32,
    words: String,
}

fn is_due(last: Option<Instant>, every: Duration, now: Instant) -> bool {
    last.is_none_or(|last| now.duration_since(last) >= every)
}

const fn is_leaving(state: State) -> bool {
    match state {
        State::Draining | State::HandingBack | State::Leaving | State::Exited => true,
        State::Running | State::Paused => false,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::host::systemd::Line;
    use crate::worker::{Settings, Worker};

    fn view() -> View {
        let text = r#"{"state":"running","uptime_seconds":1.0,"capacity":4,"asked":4,"sources":[],"tasks":[],
            "last_hour":{"completed":0,"failed":0,"exceptions":0,"handed_back":0,"lost":0},
            "counts":COUNTS,"host":{"disk_free":null,"disk_least":0,"memory_free":null,"memory_least":0},"hints":[]}"#;
        let counts = serde_json::to_string(&Worker::new(Settings::default(), Vec::new()).control().counts()).unwrap();
        serde_json::from_str(&text.replace("COUNTS", &counts)).unwrap()
    }

    fn words(line: &Line) -> Vec<Word> {
        line.heard.try_iter().flatten().collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_answers_is_alive_twice_in_every_watchdog_span() {
        let line = Teller::to_channel();
        let span = Duration::from_secs(30);
        let telling = tell(line.teller.clone(), Some(span), || async { Some(view()) });
        drop(timeout(Duration::from_secs(149), telling).await);
        let heard = words(&line);
        assert_eq!(heard[..3], [Word::Ready, Word::Status("RUNNING   0/4 busy".to_owned()), Word::Alive]);
        assert!(heard[3..].iter().all(|word| *word == Word::Alive), "{heard:?}");
        assert!((10..=12).contains(&heard[2..].len()), "{}", heard.len());
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_whose_loop_hangs_is_not_alive_though_its_process_is() {
        let line = Teller::to_channel();
        let hangs = AtomicBool::new(false);
        let look = || async { if hangs.load(Ordering::Relaxed) { std::future::pending().await } else { Some(view()) } };
        let mut telling = Box::pin(tell(line.teller.clone(), Some(Duration::from_secs(30)), look));
        drop(timeout(Duration::from_secs(20), &mut telling).await);
        assert!(words(&line).contains(&Word::Alive));
        hangs.store(true, Ordering::Relaxed);
        drop(timeout(Duration::from_secs(300), &mut telling).await);
        assert_eq!(words(&line), []);
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_was_never_started_is_never_said_to_be_ready() {
        let line = Teller::to_channel();
        let worker = Worker::new(Settings::default(), Vec::new());
        let control = worker.control();
        drop(timeout(Duration::from_secs(300), tell(line.teller.clone(), None, || control.look())).await);
        assert_eq!(words(&line), []);
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_is_said_at_once_and_a_span_that_runs_down_now_and_then() {
        let line = Teller::to_channel();
        let left = std::sync::atomic::AtomicU32::new(3600);
        let look = || async {
            let mut paused = view();
            let seconds = left.fetch_sub(1, Ordering::Relaxed);
            paused.state = if seconds > 3575 { State::Paused } else { State::Running };
            paused.not_claiming = (seconds > 3575).then(|| format!("paused for {seconds}s"));
            Some(paused)
        };
        drop(timeout(Duration::from_millis(29_500), tell(line.teller.clone(), None, look)).await);
        let said = ["PAUSED   0/4 busy   paused for 3600s", "PAUSED   0/4 busy   paused for 3590s"];
        let then = ["PAUSED   0/4 busy   paused for 3580s", "RUNNING   0/4 busy"];
        let said = said.iter().chain(&then).map(|text| Word::Status((*text).to_owned()));
        assert_eq!(words(&line), std::iter::once(Word::Ready).chain(said).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_is_said_once_and_asks_for_time_until_it_is_over() {
        let line = Teller::to_channel();
        let mut draining = view();
        draining.state = State::Draining;
        draining.not_claiming = Some("2 tasks left, handed back in 56m00s".to_owned());
        let telling = tell(line.teller.clone(), None, || async { Some(draining.clone()) });
        drop(timeout(MANAGER_EXTEND_EVERY * 3 + Duration::from_millis(2500), telling).await);
        let heard = words(&line);
        let status = "DRAINING   0/4 busy   2 tasks left, handed back in 56m00s".to_owned();
        assert_eq!(heard[..4], [Word::Ready, Word::Stopping, Word::Extend(MANAGER_EXTEND_BY), Word::Status(status)]);
        assert!(heard[4..].iter().all(|word| *word == Word::Extend(MANAGER_EXTEND_BY)), "{heard:?}");
        assert_eq!(heard[4..].len(), 3);
        const { assert!(MANAGER_EXTEND_BY.as_secs() > 2 * MANAGER_EXTEND_EVERY.as_secs()) };
    }
}
