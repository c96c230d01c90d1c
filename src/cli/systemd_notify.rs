//! What a service manager hears of a worker: that it is up, what it does in the words of `journeyman status`, that its loop
//! still answers, and that it is on its way out.
//!
//! It looks at the worker once a second, only where a manager wants to hear, and decides nothing about it.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::control::status;
use crate::host::service_manager::{NotifyMessage, NotifySender};
use crate::limits::{
    SYSTEMD_EXTEND_BY, SYSTEMD_EXTEND_INTERVAL, SYSTEMD_SNAPSHOT_TIMEOUT, SYSTEMD_STATUS_CHECK_INTERVAL,
    SYSTEMD_STATUS_INTERVAL,
};
use crate::worker::status::{LifecycleState, WorkerStatus};

/// Tells the manager for as long as it is polled. `look` answers with how the worker looks, `None` once it has exited.
///
/// The service is ready when the loop has answered for the first time, not when a source has: a queue that is down when the
/// host boots is told in the status, and is no reason to kill the worker that waits for it.
///
/// # Cancel safety
///
/// Cancel safe.
pub(super) async fn report_status<L, A>(teller: NotifySender, watchdog: Option<Duration>, look: L) -> Infallible
where
    L: Fn() -> A,
    A: Future<Output = Option<WorkerStatus>>,
{
    // A worker that is to be found dead in time is looked at in time.
    let every = watchdog.map_or(SYSTEMD_STATUS_CHECK_INTERVAL, |span| SYSTEMD_STATUS_CHECK_INTERVAL.min(span / 4));
    let wait = watchdog.map_or(SYSTEMD_SNAPSHOT_TIMEOUT, |span| SYSTEMD_SNAPSHOT_TIMEOUT.min(span / 4));
    let mut told = NotifyState {
        sender: teller,
        watchdog,
        poll_interval: every,
        ready: false,
        last_status: None,
        watchdog_sent_at: None,
        extended_at: None,
    };
    loop {
        match timeout(wait, look()).await {
            Ok(Some(view)) => told.on_snapshot(&view, Instant::now()),
            Ok(None) => return std::future::pending().await,
            Err(_) => tracing::error!(
                "the worker's loop has not answered for {} s; a watchdog of the service manager will restart it",
                wait.as_secs_f64()
            ),
        }
        tokio::time::sleep(every).await;
    }
}

struct NotifyState {
    sender: NotifySender,
    watchdog: Option<Duration>,
    /// How long it is to the next look.
    poll_interval: Duration,
    ready: bool,
    last_status: Option<LastStatus>,
    watchdog_sent_at: Option<Instant>,
    extended_at: Option<Instant>,
}

impl NotifyState {
    fn on_snapshot(&mut self, view: &WorkerStatus, now: Instant) {
        let mut words = Vec::new();
        if !self.ready {
            self.ready = true;
            words.push(NotifyMessage::Ready);
        }
        if is_stopping(view.state) {
            if self.extended_at.is_none() {
                words.push(NotifyMessage::Stopping);
            }
            if is_due(self.extended_at, SYSTEMD_EXTEND_INTERVAL, now) {
                self.extended_at = Some(now);
                words.push(NotifyMessage::ExtendTimeout(SYSTEMD_EXTEND_BY));
            }
        }
        words.extend(self.changed_status(view, now).map(NotifyMessage::Status));
        if self.watchdog.is_some_and(|span| is_due(self.watchdog_sent_at, span / 2 - self.poll_interval, now)) {
            self.watchdog_sent_at = Some(now);
            words.push(NotifyMessage::Watchdog);
        }
        if !words.is_empty() {
            self.sender.send(words);
        }
    }

    /// What to say of the state: at once where something has happened, now and then where only a span runs down.
    fn changed_status(&mut self, view: &WorkerStatus, now: Instant) -> Option<String> {
        let text = status::one_line(view);
        // Of numbers only these tell of more than time.
        let words: String = text.chars().filter(|char| !char.is_ascii_digit()).collect();
        let happened = StatusKey { tasks: view.tasks.len(), capacity: view.capacity, words };
        let is_new = self.last_status.as_ref().is_none_or(|last| {
            last.text != text && (last.key != happened || is_due(Some(last.sent_at), SYSTEMD_STATUS_INTERVAL, now))
        });
        is_new.then(|| {
            self.last_status = Some(LastStatus { text: text.clone(), key: happened, sent_at: now });
            text
        })
    }
}

/// What was said last.
struct LastStatus {
    text: String,
    key: StatusKey,
    sent_at: Instant,
}

#[derive(PartialEq, Eq)]
struct StatusKey {
    tasks: usize,
    capacity: u32,
    words: String,
}

fn is_due(last: Option<Instant>, every: Duration, now: Instant) -> bool {
    last.is_none_or(|last| now.duration_since(last) >= every)
}

const fn is_stopping(state: LifecycleState) -> bool {
    match state {
        LifecycleState::Draining | LifecycleState::HandingBack | LifecycleState::Leaving | LifecycleState::Exited => {
            true
        }
        LifecycleState::Running | LifecycleState::Paused => false,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::host::service_manager::NotifyChannel;
    use crate::worker::{Worker, WorkerConfig};

    fn view() -> WorkerStatus {
        let text = r#"{"state":"running","uptime_seconds":1.0,"capacity":4,"asked":4,"sources":[],"tasks":[],
            "last_hour":{"completed":0,"failed":0,"exceptions":0,"handed_back":0,"lost":0},
            "counts":COUNTS,"host":{"disk_free":null,"disk_least":0,"memory_free":null,"memory_least":0},"hints":[]}"#;
        let counts =
            serde_json::to_string(&Worker::new(WorkerConfig::default(), Vec::new()).control().counts()).unwrap();
        serde_json::from_str(&text.replace("COUNTS", &counts)).unwrap()
    }

    fn words(line: &NotifyChannel) -> Vec<NotifyMessage> {
        line.receiver.try_iter().flatten().collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_answers_is_alive_twice_in_every_watchdog_span() {
        let line = NotifySender::channel();
        let span = Duration::from_secs(30);
        let telling = report_status(line.sender.clone(), Some(span), || async { Some(view()) });
        drop(timeout(Duration::from_secs(149), telling).await);
        let heard = words(&line);
        assert_eq!(
            heard[..3],
            [NotifyMessage::Ready, NotifyMessage::Status("RUNNING   0/4 busy".to_owned()), NotifyMessage::Watchdog]
        );
        assert!(heard[3..].iter().all(|word| *word == NotifyMessage::Watchdog), "{heard:?}");
        assert!((10..=12).contains(&heard[2..].len()), "{}", heard.len());
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_whose_loop_hangs_is_not_alive_though_its_process_is() {
        let line = NotifySender::channel();
        let hangs = AtomicBool::new(false);
        let look = || async { if hangs.load(Ordering::Relaxed) { std::future::pending().await } else { Some(view()) } };
        let mut telling = Box::pin(report_status(line.sender.clone(), Some(Duration::from_secs(30)), look));
        drop(timeout(Duration::from_secs(20), &mut telling).await);
        assert!(words(&line).contains(&NotifyMessage::Watchdog));
        hangs.store(true, Ordering::Relaxed);
        drop(timeout(Duration::from_secs(300), &mut telling).await);
        assert_eq!(words(&line), []);
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_was_never_started_is_never_said_to_be_ready() {
        let line = NotifySender::channel();
        let worker = Worker::new(WorkerConfig::default(), Vec::new());
        let control = worker.control();
        drop(timeout(Duration::from_secs(300), report_status(line.sender.clone(), None, || control.status())).await);
        assert_eq!(words(&line), []);
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_is_said_at_once_and_a_span_that_runs_down_now_and_then() {
        let line = NotifySender::channel();
        let left = std::sync::atomic::AtomicU32::new(3600);
        let look = || async {
            let mut paused = view();
            let seconds = left.fetch_sub(1, Ordering::Relaxed);
            paused.state = if seconds > 3575 { LifecycleState::Paused } else { LifecycleState::Running };
            paused.not_claiming = (seconds > 3575).then(|| format!("paused for {seconds}s"));
            Some(paused)
        };
        drop(timeout(Duration::from_millis(29_500), report_status(line.sender.clone(), None, look)).await);
        let said = ["PAUSED   0/4 busy   paused for 3600s", "PAUSED   0/4 busy   paused for 3590s"];
        let then = ["PAUSED   0/4 busy   paused for 3580s", "RUNNING   0/4 busy"];
        let said = said.iter().chain(&then).map(|text| NotifyMessage::Status((*text).to_owned()));
        assert_eq!(words(&line), std::iter::once(NotifyMessage::Ready).chain(said).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_is_said_once_and_asks_for_time_until_it_is_over() {
        let line = NotifySender::channel();
        let mut draining = view();
        draining.state = LifecycleState::Draining;
        draining.not_claiming = Some("2 tasks left, handed back in 56m00s".to_owned());
        let telling = report_status(line.sender.clone(), None, || async { Some(draining.clone()) });
        drop(timeout(SYSTEMD_EXTEND_INTERVAL * 3 + Duration::from_millis(2500), telling).await);
        let heard = words(&line);
        let status = "DRAINING   0/4 busy   2 tasks left, handed back in 56m00s".to_owned();
        assert_eq!(
            heard[..4],
            [
                NotifyMessage::Ready,
                NotifyMessage::Stopping,
                NotifyMessage::ExtendTimeout(SYSTEMD_EXTEND_BY),
                NotifyMessage::Status(status)
            ]
        );
        assert!(heard[4..].iter().all(|word| *word == NotifyMessage::ExtendTimeout(SYSTEMD_EXTEND_BY)), "{heard:?}");
        assert_eq!(heard[4..].len(), 3);
        const { assert!(SYSTEMD_EXTEND_BY.as_secs() > 2 * SYSTEMD_EXTEND_INTERVAL.as_secs()) };
    }
}
