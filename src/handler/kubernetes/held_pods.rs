//! The pods that this worker holds: whether they have changed, and how much of their logs was read.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::sync::Notify;

use journeyman_platform::kubernetes::PodChange;

#[derive(Default)]
pub(super) struct HeldPod {
    pub(super) changed: Notify,
    /// The time of the last line that was read.
    pub(super) log_read_until: Mutex<Option<Timestamp>>,
    /// Its version when it was looked at.
    pub(super) version: Mutex<String>,
}

/// The pods by their names.
#[derive(Default)]
pub(super) struct HeldPods(Mutex<BTreeMap<Box<str>, Arc<HeldPod>>>);

impl HeldPods {
    pub(super) fn of(&self, name: &str) -> Arc<HeldPod> {
        Arc::clone(self.0.lock().entry(name.into()).or_default())
    }

    pub(super) fn forget(&self, name: &str) {
        self.0.lock().remove(name);
    }

    pub(super) fn on_change(&self, change: &PodChange) {
        let pods = self.0.lock();
        match change {
            PodChange::One(name) => {
                if let Some(pod) = pods.get(name.as_str()) {
                    pod.changed.notify_one();
                }
            }
            PodChange::Listed(versions) => {
                let versions: &HashMap<String, String> = versions;
                for (name, pod) in &*pods {
                    if versions.get(&**name) != Some(&*pod.version.lock()) {
                        pod.changed.notify_one();
                    }
                }
            }
            // A list follows.
            PodChange::Interrupted => {}
        }
    }
}
