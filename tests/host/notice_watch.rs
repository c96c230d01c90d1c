//! A watch under test, with short intervals.

use std::path::PathBuf;
use std::time::Duration;

use journeyman_domain::backoff;
use journeyman_domain::termination_notice::{PollSchedule, Termination};
use journeyman_platform::host::clock::Clock;
use journeyman_platform::host::termination_notice::{
    MetadataProvider, NO_ANSWER_YET, Notice, NoticeConfig, NoticeOrigin, NoticeWatch, WatchStatus,
};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::host::metadata_service::{Cloud, Metadata};
use crate::support::within;

pub struct Watched {
    notices: mpsc::Receiver<Notice>,
    clock: Clock,
    statuses: watch::Receiver<Vec<WatchStatus>>,
    _tasks: JoinSet<()>,
}

impl Watched {
    pub fn cloud(cloud: MetadataProvider, endpoint: String) -> Self {
        Self::of(cloud, Some(endpoint), None)
    }

    pub fn file(path: PathBuf) -> Self {
        Self::of(MetadataProvider::Off, None, Some(path))
    }

    fn of(cloud: MetadataProvider, endpoint: Option<String>, file: Option<PathBuf>) -> Self {
        let clock = Clock::boot();
        let retry = backoff::Policy { first: Duration::from_millis(10), max: Duration::from_millis(50) };
        let schedule = PollSchedule { interval: Duration::from_millis(20), retry };
        let config = NoticeConfig { cloud, endpoint, file, schedule: Some(schedule), clock };
        let watch = NoticeWatch::new(config).expect("a watch");
        let statuses = watch.subscribe_statuses();
        let (sender, notices) = mpsc::channel(16);
        let mut tasks = JoinSet::new();
        tasks.spawn(watch.run(sender));
        Self { notices, clock, statuses, _tasks: tasks }
    }

    pub async fn next(&mut self) -> Notice {
        within("a notice", self.notices.recv()).await.expect("the watch runs")
    }

    /// The seconds until termination in the next notice.
    pub async fn next_in_seconds(&mut self) -> f64 {
        let notice = self.next().await;
        let Termination::At(at) = notice.termination else { panic!("{notice:?} names no time") };
        at.since(self.clock.now()).as_secs_f64()
    }

    /// Waits until a status matches.
    pub async fn wait_for_status(&mut self, wanted: impl Fn(&WatchStatus) -> bool) -> WatchStatus {
        let seen = self.statuses.wait_for(|statuses| statuses.iter().any(&wanted));
        let seen = within("a status", seen).await.expect("the watch runs");
        seen.iter().find(|status| wanted(status)).expect("it is seen").clone()
    }

    pub fn assert_no_more_notices(&mut self) {
        if let Ok(notice) = self.notices.try_recv() {
            panic!("unexpected notice: {notice:?}");
        }
    }
}

pub fn is_failing(status: &WatchStatus) -> bool {
    status.error.as_ref().is_some_and(|error| error != NO_ANSWER_YET)
}

/// Allows for clock rounding and a loaded machine.
pub fn assert_about(found: f64, expected: f64) {
    assert!(found <= expected + 0.5 && found >= expected - 9.0, "{found} s is not about {expected} s");
}

#[tokio::test]
async fn the_provider_is_detected() {
    for (cloud, origin) in
        [(Cloud::Ec2, NoticeOrigin::Aws), (Cloud::Google, NoticeOrigin::Gcp), (Cloud::Azure, NoticeOrigin::Azure)]
    {
        let service = Metadata::start(cloud).await;
        service.change(|state| {
            state.instance_action = Some(r#"{"action": "stop"}"#.to_owned());
            state.preempted = "TRUE";
            state.events = r#"[{"EventType": "Reboot", "Resources": ["vmss_7"]}]"#.to_owned();
        });
        let notice = Watched::cloud(MetadataProvider::Auto, service.url()).next().await;
        assert_eq!(notice, Notice { origin, termination: Termination::Soon });
    }
}
