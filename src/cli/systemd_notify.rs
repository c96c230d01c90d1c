//! Reports a worker to systemd: ready, status, watchdog, stopping. It polls the worker's status once a second.

use std::convert::Infallible;
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::time::timeout;

use crate::console::text::strip_control_chars;
use crate::console::worker::headline;
use journeyman_domain::limits::{
    SYSTEMD_EXTEND_BY, SYSTEMD_SNAPSHOT_TIMEOUT, SYSTEMD_STATUS_CHARS_MAX, SYSTEMD_STATUS_CHECK_INTERVAL,
};
use journeyman_platform::host::service_manager::ServiceManager;
use journeyman_worker::engine::status::{LifecycleState, WorkerStatus};

/// Notifies the service manager for as long as it is polled. `snapshot` returns the worker's status, `None` once it has exited.
///
/// The service is ready when the worker's loop answers for the first time, not when a source is connected: a queue that is down
/// while the host boots must not fail the unit that waits for it.
///
/// # Cancel safety
///
/// Cancel safe.
pub(super) async fn report_status(
    manager: ServiceManager,
    snapshot: impl AsyncFn() -> Option<WorkerStatus>,
) -> Infallible {
    let within = |limit: Duration| manager.watchdog.map_or(limit, |interval| limit.min(interval / 4));
    let (poll_interval, wait) = (within(SYSTEMD_STATUS_CHECK_INTERVAL), within(SYSTEMD_SNAPSHOT_TIMEOUT));
    let (mut is_ready, mut is_stopping, mut last_status) = (false, false, String::new());
    loop {
        match timeout(wait, snapshot()).await {
            Ok(Some(view)) => {
                let mut states = Vec::new();
                if !is_ready {
                    states.push(NotifyState::Ready);
                }
                let stops = stops(view.state);
                if stops {
                    if !is_stopping {
                        states.push(NotifyState::Stopping);
                    }
                    states.push(extend_timeout());
                }
                let status = single_line(&headline(&view).text());
                if status != last_status {
                    states.push(NotifyState::Status(&status));
                }
                states.extend(manager.watchdog.map(|_| NotifyState::Watchdog));
                // Otherwise the next poll sends them again.
                if !states.is_empty() && manager.send(&states) {
                    (is_ready, last_status) = (true, status);
                    is_stopping |= stops;
                }
            }
            Ok(None) => return std::future::pending().await,
            Err(_) => tracing::error!(
                "the worker's loop has not answered for {} s; the service manager's watchdog will restart it",
                wait.as_secs_f64()
            ),
        }
        tokio::time::sleep(poll_interval).await;
    }
}

fn extend_timeout() -> NotifyState<'static> {
    NotifyState::ExtendTimeoutUsec(u32::try_from(SYSTEMD_EXTEND_BY.as_micros()).unwrap_or(u32::MAX))
}

/// A line break would begin another assignment.
fn single_line(text: &str) -> String {
    strip_control_chars(text).chars().take(SYSTEMD_STATUS_CHARS_MAX).collect()
}

const fn stops(state: LifecycleState) -> bool {
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
    use journeyman_worker::engine::{Worker, WorkerConfig};

    fn view() -> WorkerStatus {
        let text = r#"{"state":"running","uptime_seconds":1.0,"capacity":4,"sources":[],"claims":[],
            "last_hour":{},
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
    async fn the_watchdog_is_notified_while_the_loop_answers() {
        let (manager, received) = ServiceManager::pair(Some(Duration::from_secs(30))).unwrap();
        let reporting = report_status(manager, || async { Some(view()) });
        drop(timeout(Duration::from_secs(149), reporting).await);
        let sent = lines(&received);
        assert_eq!(sent[..3], ["READY=1", "STATUS=RUNNING  0/4 busy · claiming", "WATCHDOG=1"]);
        assert!(sent[3..].iter().all(|line| line == "WATCHDOG=1"), "{sent:?}");
        assert!(sent[2..].len() >= 5, "{}", sent.len());
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_is_sent_again_until_the_service_manager_reads() {
        let (manager, received) = ServiceManager::pair(None).unwrap();
        while manager.send(&[NotifyState::Watchdog]) {}
        let mut reporting = Box::pin(report_status(manager, || async { Some(view()) }));
        drop(timeout(Duration::from_secs(3), &mut reporting).await);
        assert!(lines(&received).iter().all(|line| line == "WATCHDOG=1"));
        drop(timeout(Duration::from_secs(3), &mut reporting).await);
        assert_eq!(lines(&received), ["READY=1", "STATUS=RUNNING  0/4 busy · claiming"]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_watchdog_is_not_notified_while_the_loop_hangs() {
        let (manager, received) = ServiceManager::pair(Some(Duration::from_secs(30))).unwrap();
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
        let (manager, received) = ServiceManager::pair(None).unwrap();
        let worker = Worker::new(WorkerConfig::default(), Vec::new());
        let control = worker.control();
        drop(timeout(Duration::from_secs(300), report_status(manager, || control.status())).await);
        assert_eq!(lines(&received), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_is_sent_once_and_extends_the_timeout_until_it_ends() {
        let (manager, received) = ServiceManager::pair(None).unwrap();
        let mut draining = view();
        draining.state = LifecycleState::Draining;
        draining.blocked_message = Some("2 tasks left, handed back in 56m00s".to_owned());
        let reporting = report_status(manager, || async { Some(draining.clone()) });
        drop(timeout(Duration::from_millis(3500), reporting).await);
        let sent = lines(&received);
        let extend = extend_timeout().to_string();
        let status = "STATUS=DRAINING  0/4 busy · not claiming: 2 tasks left, handed back in 56m00s";
        assert_eq!(sent[..4], ["READY=1", "STOPPING=1", &extend, status]);
        assert!(sent[4..].iter().all(|line| *line == extend), "{sent:?}");
        assert_eq!(sent[4..].len(), 3);
    }

    #[test]
    fn a_status_stays_one_assignment() {
        assert_eq!(single_line("a\nREADY=1\tb"), "a READY=1 b");
        assert_eq!(single_line(&"x".repeat(5000)).len(), SYSTEMD_STATUS_CHARS_MAX);
    }
}
