//! Reports a worker to systemd: ready, status, watchdog, stopping. It polls the worker's status once a second.

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::time::{Instant, timeout};

use super::control::status;
use crate::host::service_manager::ServiceManager;
use crate::limits::{
    SYSTEMD_EXTEND_BY, SYSTEMD_EXTEND_INTERVAL, SYSTEMD_SNAPSHOT_TIMEOUT, SYSTEMD_STATUS_CHARS_MAX,
    SYSTEMD_STATUS_CHECK_INTERVAL,
};
use crate::worker::status::{LifecycleState, WorkerStatus};

/// Notifies the service manager for as long as it is polled. `snapshot` returns the worker's status, `None` once it has exited.
///
/// The service is ready when the worker's loop answers for the first time, not when a source is connected: a queue that is down
/// while the host boots must not fail the unit that waits for it.
///
/// # Cancel safety
///
/// Cancel safe.
pub(super) async fn report_status<L, A>(manager: ServiceManager, snapshot: L) -> Infallible
where
    L: Fn() -> A,
    A: Future<Output = Option<WorkerStatus>>,
{
    let watchdog = manager.watchdog;
    let poll_interval =
        watchdog.map_or(SYSTEMD_STATUS_CHECK_INTERVAL, |span| SYSTEMD_STATUS_CHECK_INTERVAL.min(span / 4));
    let wait = watchdog.map_or(SYSTEMD_SNAPSHOT_TIMEOUT, |span| SYSTEMD_SNAPSHOT_TIMEOUT.min(span / 4));
    let mut reporter = Reporter {
        manager,
        poll_interval,
        ready: false,
        last_status: String::new(),
        watchdog_sent_at: None,
        extended_at: None,
    };
    loop {
        match timeout(wait, snapshot()).await {
            Ok(Some(view)) => reporter.on_snapshot(&view, Instant::now()),
            Ok(None) => return std::future::pending().await,
            Err(_) => tracing::error!(
                "the worker's loop has not answered for {} s; the service manager's watchdog will restart it",
                wait.as_secs_f64()
            ),
        }
        tokio::time::sleep(poll_interval).await;
    }
}

struct Reporter {
    manager: ServiceManager,
    poll_interval: Duration,
    ready: bool,
    last_status: String,
    watchdog_sent_at: Option<Instant>,
    extended_at: Option<Instant>,
}

impl Reporter {
    fn on_snapshot(&mut self, view: &WorkerStatus, now: Instant) {
        let mut states = Vec::new();
        if !self.ready {
            self.ready = true;
            states.push(NotifyState::Ready);
        }
        if is_stopping(view.state) {
            if self.extended_at.is_none() {
                states.push(NotifyState::Stopping);
            }
            if is_due(self.extended_at, SYSTEMD_EXTEND_INTERVAL, now) {
                self.extended_at = Some(now);
                states.push(extend_timeout());
            }
        }
        let status = single_line(&status::one_line(view));
        if status != self.last_status {
            states.push(NotifyState::Status(&status));
            self.last_status.clone_from(&status);
        }
        if self.manager.watchdog.is_some_and(|span| is_due(self.watchdog_sent_at, span / 2 - self.poll_interval, now)) {
            self.watchdog_sent_at = Some(now);
            states.push(NotifyState::Watchdog);
        }
        if !states.is_empty() {
            self.manager.send(&states);
        }
    }
}

fn extend_timeout() -> NotifyState<'static> {
    NotifyState::ExtendTimeoutUsec(u32::try_from(SYSTEMD_EXTEND_BY.as_micros()).unwrap_or(u32::MAX))
}

/// A line break would begin another assignment.
fn single_line(text: &str) -> String {
    let plain = text.chars().map(|char| if char.is_control() { ' ' } else { char });
    plain.take(SYSTEMD_STATUS_CHARS_MAX).collect()
}

fn is_due(last: Option<Instant>, interval: Duration, now: Instant) -> bool {
    last.is_none_or(|last| now.duration_since(last) >= interval)
}

const fn is_stopping(state: LifecycleState) -> bool {
    match state {
        LifecycleState::Draining | LifecycleState::Releasing | LifecycleState::Exiting | LifecycleState::Exited => true,
        LifecycleState::Running | LifecycleState::Paused => false,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::worker::{Worker, WorkerConfig};

    fn view() -> WorkerStatus {
        let text = r#"{"state":"running","uptime_seconds":1.0,"capacity":4,"slots_polling":4,"sources":[],"claims":[],
            "last_hour":{"completed":0,"failed":0,"exceptions":0,"released":0,"lost":0},
            "counts":COUNTS,"host":{"disk_free":null,"disk_min":0,"memory_free":null,"memory_min":0},"hints":[]}"#;
        let counts =
            serde_json::to_string(&Worker::new(WorkerConfig::default(), Vec::new()).control().counts()).unwrap();
        serde_json::from_str(&text.replace("COUNTS", &counts)).unwrap()
    }

    fn lines(received: &UnixDatagram) -> Vec<String> {
        let (mut buffer, mut lines) = ([0; 4096], Vec::new());
        while let Ok(count) = received.recv(&mut buffer) {
            lines.extend(str::from_utf8(&buffer[..count]).unwrap().lines().map(ToOwned::to_owned));
        }
        lines
    }

    #[tokio::test(start_paused = true)]
    async fn the_watchdog_is_notified_twice_in_every_interval() {
        let (manager, received) = ServiceManager::pair(Some(Duration::from_secs(30)));
        let reporting = report_status(manager, || async { Some(view()) });
        drop(timeout(Duration::from_secs(149), reporting).await);
        let sent = lines(&received);
        assert_eq!(sent[..3], ["READY=1", "STATUS=RUNNING   0/4 busy", "WATCHDOG=1"]);
        assert!(sent[3..].iter().all(|line| line == "WATCHDOG=1"), "{sent:?}");
        assert!((10..=12).contains(&sent[2..].len()), "{}", sent.len());
    }

    #[tokio::test(start_paused = true)]
    async fn the_watchdog_is_not_notified_while_the_loop_hangs() {
        let (manager, received) = ServiceManager::pair(Some(Duration::from_secs(30)));
        let hangs = AtomicBool::new(false);
        let snapshot =
            || async { if hangs.load(Ordering::Relaxed) { std::future::pending().await } else { Some(view()) } };
        let mut reporting = Box::pin(report_status(manager, snapshot));
        drop(timeout(Duration::from_secs(20), &mut reporting).await);
        assert!(lines(&received).contains(&"WATCHDOG=1".to_owned()));
        hangs.store(true, Ordering::Relaxed);
        drop(timeout(Duration::from_secs(300), &mut reporting).await);
        assert_eq!(lines(&received), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_loop_that_was_never_started_is_not_ready() {
        let (manager, received) = ServiceManager::pair(None);
        let worker = Worker::new(WorkerConfig::default(), Vec::new());
        let control = worker.control();
        drop(timeout(Duration::from_secs(300), report_status(manager, || control.status())).await);
        assert_eq!(lines(&received), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_is_sent_once_and_extends_the_timeout_until_it_ends() {
        let (manager, received) = ServiceManager::pair(None);
        let mut draining = view();
        draining.state = LifecycleState::Draining;
        draining.blocked_message = Some("2 tasks left, handed back in 56m00s".to_owned());
        let reporting = report_status(manager, || async { Some(draining.clone()) });
        drop(timeout(SYSTEMD_EXTEND_INTERVAL * 3 + Duration::from_millis(2500), reporting).await);
        let sent = lines(&received);
        let extend = extend_timeout().to_string();
        let status = "STATUS=DRAINING   0/4 busy   2 tasks left, handed back in 56m00s";
        assert_eq!(sent[..4], ["READY=1", "STOPPING=1", &extend, status]);
        assert!(sent[4..].iter().all(|line| *line == extend), "{sent:?}");
        assert_eq!(sent[4..].len(), 3);
        const { assert!(SYSTEMD_EXTEND_BY.as_secs() > 2 * SYSTEMD_EXTEND_INTERVAL.as_secs()) };
    }

    #[test]
    fn a_status_stays_one_assignment() {
        assert_eq!(single_line("a\nREADY=1\tb"), "a READY=1 b");
        assert_eq!(single_line(&"x".repeat(5000)).len(), SYSTEMD_STATUS_CHARS_MAX);
    }
}
