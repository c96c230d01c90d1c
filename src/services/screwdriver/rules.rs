//! When a build is looked at again, when it has failed, and the texts for its users: the tables of Screwdriver's own worker.
//!
//! Times are the API server's, and each phase has a budget of its own: the looks at a pod that waits for a node do not count
//! once it has one.

use std::time::Duration;

use crate::screwdriver::config::BuildLimits;
use journeyman_domain::staged::Stamp;
use journeyman_platform::kubernetes::{FailureCause, PULLING, PodVerdict, UNSCHEDULED};

pub(crate) const WAITING_FOR_RESOURCES: &str = "Waiting for resources to be available.";
const SCHEDULING_TIMEOUT: &str = "Pod scheduling timeout exceeded";
const STILL_INITIALIZING: &str = "Build failed to start. Pod is still initializing.";
const INVALID_IMAGE: &str = "Build failed to start. Please check if your image is valid.";
const CONTAINER_ERROR: &str = "Build failed to start. Please reach out to your cluster admin for help.";
const POD_FAILED: &str = "Failed to create pod. Pod status is: failed";
const POD_UNKNOWN: &str = "Failed to create pod. Pod status is: unknown";
const NOT_CREATED: &str = "Failed to create pod.";

/// The existing worker's `waiting` and `initializing`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waiting {
    ForNode,
    ForImages,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// It runs, or has run.
    Started,
    CheckAgain {
        after: Duration,
        /// The counter of the next check, for the existing worker.
        retry_count: u32,
    },
    /// The text is for the build's users.
    Failed(String),
}

impl BuildLimits {
    /// Whether a message of the main queue whose start failed is tried again.
    pub(crate) fn may_reprocess(&self, retries: u32) -> bool {
        retries < self.reprocess
    }

    /// The text for a build whose check was counted too often to look at its pod once more.
    pub(crate) fn checks_spent(&self, retry_count: u32) -> Option<&'static str> {
        (retry_count >= self.checks).then_some(STILL_INITIALIZING)
    }

    /// How long to wait after a check that so many of the same phase were before.
    pub(crate) fn delay(&self, waiting: Waiting, checks: u32) -> Duration {
        match waiting {
            Waiting::ForNode => self.delay.0,
            Waiting::ForImages => self.delay.0.saturating_add(self.delay_step.0.saturating_mul(checks)),
        }
    }

    /// How many checks of a phase are due after this time: the same for a check that is repeated.
    fn checks_after(&self, waiting: Waiting, mut elapsed: Duration) -> u32 {
        let fits = |checks: &u32| {
            let left = elapsed.checked_sub(self.delay(waiting, *checks));
            elapsed = left.unwrap_or_default();
            left.is_some()
        };
        u32::try_from((0..self.checks).take_while(fits).count()).unwrap_or(u32::MAX)
    }

    /// What a look at the pod means. `published_at` counts where the API server does not tell since when a pod waits.
    pub(crate) fn decide(&self, verdict: &PodVerdict, published_at: Option<Stamp>, observed_at: Stamp) -> Decision {
        let (waiting, since) = match verdict {
            PodVerdict::Phase { name, since } if *name == UNSCHEDULED => (Waiting::ForNode, since.or(published_at)),
            PodVerdict::Phase { name, since } if *name == PULLING => (Waiting::ForImages, *since),
            PodVerdict::Phase { .. } | PodVerdict::Done => return Decision::Started,
            PodVerdict::Failed { cause, reason } => return Decision::Failed(failure_text(*cause, reason)),
            PodVerdict::Unknown => return Decision::Failed(POD_UNKNOWN.to_owned()),
        };
        let elapsed = since.map_or(Duration::ZERO, |since| observed_at.since(since));
        let checks = self.checks_after(waiting, elapsed);
        match waiting {
            Waiting::ForNode if elapsed >= self.scheduling_timeout.0 => Decision::Failed(SCHEDULING_TIMEOUT.to_owned()),
            Waiting::ForImages if checks >= self.checks => Decision::Failed(STILL_INITIALIZING.to_owned()),
            Waiting::ForNode | Waiting::ForImages => {
                Decision::CheckAgain { after: self.delay(waiting, checks), retry_count: checks.saturating_add(1) }
            }
        }
    }
}

/// The existing worker's sentence, by which users search, and what it does not say.
pub(crate) fn failure_text(cause: FailureCause, detail: &str) -> String {
    let sentence = match cause {
        FailureCause::Image => INVALID_IMAGE,
        FailureCause::Container => CONTAINER_ERROR,
        FailureCause::Exit | FailureCause::Disruption => POD_FAILED,
    };
    with_detail(sentence, detail)
}

/// The text for a pod that the API server refuses.
pub(crate) fn refusal_text(detail: &str) -> String {
    with_detail(NOT_CREATED, detail)
}

fn with_detail(sentence: &str, detail: &str) -> String {
    if detail.is_empty() { sentence.to_owned() } else { format!("{sentence} ({detail})") }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use journeyman_platform::kubernetes::{Pod, StartGraces, judge};

    const NOW: i64 = 1_767_225_600_000;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn at(seconds: i64) -> Stamp {
        Stamp(NOW + seconds * 1_000)
    }

    fn time(at: Stamp) -> String {
        jiff::Timestamp::from_millisecond(at.0).unwrap().to_string()
    }

    /// The decision about a pod that was created at 0 s, and has got a node at the second time, at the third.
    fn decided(status: &Value, node_at: Option<i64>, observed: i64) -> Decision {
        let mut status = status.clone();
        if let Some(node_at) = node_at {
            let scheduled =
                json!({ "type": "PodScheduled", "status": "True", "lastTransitionTime": time(at(node_at)) });
            status["conditions"] = json!([scheduled]);
        }
        let pod: Pod = serde_json::from_value(json!({
            "metadata": { "creationTimestamp": time(at(0)) },
            "spec": { "containers": [], "nodeName": node_at.map(|_| "node-a") },
            "status": status,
        }))
        .unwrap();
        let graces = StartGraces { pull: Duration::ZERO, create: Duration::ZERO };
        let verdict = judge(&pod, "1001", graces, at(observed));
        BuildLimits::default().decide(&verdict, None, at(observed))
    }

    fn waits(reason: &str, message: &str) -> Value {
        let state = json!({ "waiting": { "reason": reason, "message": message } });
        json!({ "phase": "Pending", "containerStatuses": [container(state)] })
    }

    fn container(state: Value) -> Value {
        json!({ "name": "1001", "image": "scn/a:1", "imageID": "", "ready": false, "restartCount": 0, "state": state })
    }

    fn again(after: u64, retry_count: u32) -> Decision {
        Decision::CheckAgain { after: seconds(after), retry_count }
    }

    #[test]
    fn the_tree_of_waiting_reasons_has_the_texts_of_the_existing_worker() {
        let image = "Build failed to start. Please check if your image is valid. (container 1001 (scn/a:1): ";
        let admin =
            "Build failed to start. Please reach out to your cluster admin for help. (container 1001 (scn/a:1): ";
        let pod = "Failed to create pod. Pod status is: failed (container 1001 (scn/a:1): ";
        for (reason, message, start) in [
            ("ErrImagePull", "manifest unknown", image),
            ("ImagePullBackOff", "repository does not exist", image),
            ("InvalidImageName", "x", image),
            ("CreateContainerError", "x", admin),
            ("CreateContainerConfigError", "secret \"x\" not found", admin),
            ("StartError", "x", admin),
            // A container that has run and exits: not what an admin can help with.
            ("CrashLoopBackOff", "back-off", pod),
        ] {
            let Decision::Failed(text) = decided(&waits(reason, message), Some(0), 10) else { panic!("{reason}") };
            assert_eq!(text, format!("{start}{reason}: {message})"));
        }
        for reason in ["ContainerCreating", "PodInitializing"] {
            assert_eq!(decided(&waits(reason, ""), Some(0), 10), again(30, 1), "{reason}");
        }
        assert_eq!(decided(&waits("ErrImagePull", "pull QPS exceeded"), Some(0), 10), again(30, 1), "it may pass");
    }

    #[test]
    fn the_tree_of_pod_phases_has_the_outcomes_of_the_existing_worker() {
        let running = json!({ "phase": "Running", "containerStatuses": [container(json!({ "running": {} }))] });
        assert_eq!(decided(&running, Some(0), 500), Decision::Started);
        assert_eq!(decided(&json!({ "phase": "Succeeded" }), Some(0), 500), Decision::Started);
        let killed = container(json!({ "terminated": { "exitCode": 137, "reason": "OOMKilled" } }));
        for (status, text) in [
            (json!({ "phase": "Failed" }), "failed (the pod has failed)"),
            (
                json!({ "phase": "Failed", "reason": "Evicted", "message": "low on memory" }),
                "failed (Evicted: low on memory)",
            ),
            (
                json!({ "phase": "Failed", "containerStatuses": [killed] }),
                "failed (container 1001: exit status 137, signal 9, out of memory)",
            ),
            (json!({ "phase": "Unknown" }), "unknown"),
        ] {
            let expected = format!("Failed to create pod. Pod status is: {text}");
            assert_eq!(decided(&status, Some(0), 10), Decision::Failed(expected));
        }
        assert_eq!(decided(&json!({ "phase": "Pending" }), None, 10), again(30, 1), "waiting");
        assert_eq!(decided(&json!({ "phase": "Pending" }), Some(5), 10), again(30, 1), "initializing");
        let lost = failure_text(FailureCause::Disruption, "the pod is gone");
        assert_eq!(lost, "Failed to create pod. Pod status is: failed (the pod is gone)");
        assert_eq!(refusal_text("403 exceeded quota"), "Failed to create pod. (403 exceeded quota)");
        assert_eq!(failure_text(FailureCause::Image, ""), INVALID_IMAGE);
    }

    #[test]
    fn a_pod_that_waits_for_a_node_is_checked_every_30_seconds_for_3_minutes() {
        let pending = json!({ "phase": "Pending" });
        for (observed, count) in [(0, 1), (29, 1), (30, 2), (90, 4), (179, 6)] {
            assert_eq!(decided(&pending, None, observed), again(30, count), "{observed}");
        }
        for observed in [180, 181, 9_999] {
            let timed_out = Decision::Failed("Pod scheduling timeout exceeded".to_owned());
            assert_eq!(decided(&pending, None, observed), timed_out);
        }
    }

    #[test]
    fn a_pod_that_pulls_is_checked_after_30_to_80_seconds_six_times() {
        let limits = BuildLimits::default();
        let delays: Vec<u64> = (0..6).map(|checks| limits.delay(Waiting::ForImages, checks).as_secs()).collect();
        assert_eq!(delays, [30, 40, 50, 60, 70, 80]);
        let pulls = waits("ContainerCreating", "");
        for (observed, after, count) in [(0, 30, 1), (30, 40, 2), (70, 50, 3), (120, 60, 4), (180, 70, 5), (329, 80, 6)]
        {
            assert_eq!(decided(&pulls, Some(0), observed), again(after, count), "{observed}");
        }
        let spent = Decision::Failed("Build failed to start. Pod is still initializing.".to_owned());
        assert_eq!(decided(&pulls, Some(0), 330), spent);
    }

    #[test]
    fn s13_the_time_of_scheduling_does_not_shorten_that_of_pulling() {
        assert_eq!(decided(&json!({ "phase": "Pending" }), None, 179), again(30, 6));
        let pulls = waits("ContainerCreating", "");
        assert_eq!(decided(&pulls, Some(179), 180), again(30, 1));
        assert_eq!(decided(&pulls, Some(179), 179 + 329), again(80, 6));
        assert!(matches!(decided(&pulls, Some(179), 179 + 330), Decision::Failed(_)));
    }

    #[test]
    fn s20_clocks_of_workers_decide_nothing_where_the_server_tells_the_time() {
        let limits = BuildLimits::default();
        let verdict = |since| PodVerdict::Phase { name: UNSCHEDULED, since };
        for skew in [-300, 0, 300] {
            assert_eq!(limits.decide(&verdict(Some(at(0))), Some(at(skew)), at(100)), again(30, 4), "{skew}");
        }
        // The start of the first check is the fallback.
        assert_eq!(limits.decide(&verdict(None), Some(at(0)), at(100)), again(30, 4));
        let timed_out = Decision::Failed(SCHEDULING_TIMEOUT.to_owned());
        assert_eq!(limits.decide(&verdict(None), Some(at(0)), at(180)), timed_out);
        assert_eq!(limits.decide(&verdict(None), None, at(180)), again(30, 1));
    }

    #[test]
    fn counters_of_messages_have_the_limits_of_the_existing_worker() {
        let limits = BuildLimits::default();
        for (retries, again) in [(0, true), (2, true), (3, false), (4, false), (u32::MAX, false)] {
            assert_eq!(limits.may_reprocess(retries), again, "{retries}");
        }
        for (count, spent) in [(0, false), (5, false), (6, true), (u32::MAX, true)] {
            assert_eq!(limits.checks_spent(count).is_some(), spent, "{count}");
        }
    }
}
