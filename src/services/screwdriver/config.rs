//! The section of a source of Screwdriver.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use journeyman_domain::limits::AMQP_NAME_BYTES_MAX;
use journeyman_platform::settings::rules::Rules;
use journeyman_platform::settings::values::{File, OptionalSpan, Span, Url, built_in};

/// What an id and a suffix leave of the 63 that the name of a pod may have.
const PREFIX_BYTES_MAX: usize = 36;

/// Builds of a Screwdriver, from the queues of its worker for build clusters.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct ScrewdriverSource {
    /// Queue of the messages that start and stop builds and clear caches. The worker never declares it.
    pub main_queue: String,
    /// Queue of the messages that look at builds again. The worker never declares it.
    pub retry_queue: String,
    /// Queue whose messages expire into `retry_queue`, as the existing worker has it [built-in: none, which keeps short delays from waiting for longer ones].
    pub wait_queue: Option<String>,
    /// Exchange that these queues are bound to, each by its name.
    pub exchange: String,
    /// What the names of pods and the label `sdbuild` begin with, before the build's id.
    pub prefix: String,
    /// Namespace of the pods.
    pub namespace: String,
    /// Kubeconfig of the cluster [built-in: the cluster that the worker runs in].
    pub kubeconfig: Option<File>,
    /// File with a template of the pods, instead of the one that makes the existing worker's pods.
    pub template: Option<File>,
    /// URL of Screwdriver's API, for the worker and for builds [built-in: the one in each message].
    pub api: Option<Url>,
    /// URL of Screwdriver's user interface, for builds.
    pub ui: Option<Url>,
    /// URL of Screwdriver's store, for builds.
    pub store: Option<Url>,
    /// Image of the launcher, without its tag.
    pub launcher_image: String,
    /// Tag of the launcher's image.
    pub launcher_version: String,
    /// CPU of a class of builds, by the annotation `screwdriver.cd/cpu`, in thousandths of a core. `LOW` is for builds without a class, `MAX` also limits those that ask for a number of cores [built-in: `MICRO` 500, `LOW` 2000, `HIGH` 6000, `TURBO` and `MAX` 12000].
    #[serde(deserialize_with = "set_cpu_classes")]
    pub cpu: BTreeMap<String, u32>,
    /// Memory of a class of builds, by the annotation `screwdriver.cd/ram`, in GiB. `LOW` and `MAX` as for `cpu` [built-in: `MICRO` 1, `LOW` 2, `HIGH` 12, `TURBO` and `MAX` 16].
    #[serde(deserialize_with = "set_memory_classes")]
    pub memory: BTreeMap<String, u32>,
    /// How long a build may run that has no annotation `screwdriver.cd/timeout`.
    pub build_timeout: Span<60_000>,
    /// Maximum of that annotation.
    pub build_timeout_max: Span<60_000>,
    /// Minimum of the annotation `screwdriver.cd/terminationGracePeriodSeconds`.
    pub build_termination_grace: Span,
    /// Value of a label of the nodes that builds run on, which their pods tolerate as a taint too.
    pub node_selectors: BTreeMap<String, String>,
    /// Label of nodes that the annotation `screwdriver.cd/diskSpeed` selects [built-in: none].
    pub disk_speed_label: Option<String>,
    /// Directory of the build caches on every node and on this host [built-in: none, and caches are not cleared].
    pub cache_path: Option<File>,
    /// How long pods of builds are kept that have ended; `0s` is for ever.
    pub ended_pods_kept: OptionalSpan,
    /// How often a build is looked at, and for how long.
    pub limits: BuildLimits,
}

impl Default for ScrewdriverSource {
    fn default() -> Self {
        Self {
            main_queue: "sdQueue".to_owned(),
            retry_queue: "sdRetryQueue".to_owned(),
            wait_queue: None,
            exchange: "build".to_owned(),
            prefix: String::new(),
            namespace: "default".to_owned(),
            kubeconfig: None,
            template: None,
            api: None,
            ui: None,
            store: None,
            launcher_image: "screwdrivercd/launcher".to_owned(),
            launcher_version: "stable".to_owned(),
            cpu: cpu_classes(),
            memory: memory_classes(),
            build_timeout: built_in("90m"),
            build_timeout_max: built_in("120m"),
            build_termination_grace: built_in("60s"),
            node_selectors: BTreeMap::new(),
            disk_speed_label: None,
            cache_path: None,
            ended_pods_kept: built_in("24h"),
            limits: BuildLimits::default(),
        }
    }
}

impl ScrewdriverSource {
    pub fn check(&self, key: &str, rules: &mut Rules<'_>) {
        if self.template.is_none() && (self.ui.is_none() || self.store.is_none()) {
            let message = format!("[{key}] needs `ui` and `store`, which builds are started with");
            rules.error(key, "", message, "set both, or a `template` without them");
        }
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if !self.prefix.bytes().all(plain) || self.prefix.starts_with('-') || self.prefix.len() > PREFIX_BYTES_MAX {
            let message = format!("\"{}\" cannot begin the name of a pod", self.prefix);
            rules.error(key, "prefix", message, "use at most 36 small letters, digits and dashes, none in front");
        }
        let mut queues = vec![("main_queue", &self.main_queue), ("retry_queue", &self.retry_queue)];
        queues.extend(self.wait_queue.as_ref().map(|wait| ("wait_queue", wait)));
        for (index, (name, queue)) in queues.iter().enumerate() {
            if queue.is_empty() || queue.len() > AMQP_NAME_BYTES_MAX {
                let message =
                    format!("the name of the queue has {} bytes; AMQP allows 1 to {AMQP_NAME_BYTES_MAX}", queue.len());
                rules.error(key, name, message, "");
            }
            if let Some((other, _)) = queues[..index].iter().find(|(_, other)| other == queue) {
                let message = format!("[{key}] has this queue as `{other}` too");
                rules.error(key, name, message, "each is a queue of its own");
            }
        }
    }
}

fn cpu_classes() -> BTreeMap<String, u32> {
    classes([("MICRO", 500), ("LOW", 2_000), ("HIGH", 6_000), ("TURBO", 12_000), ("MAX", 12_000)])
}

fn memory_classes() -> BTreeMap<String, u32> {
    classes([("MICRO", 1), ("LOW", 2), ("HIGH", 12), ("TURBO", 16), ("MAX", 16)])
}

fn classes(values: [(&str, u32); 5]) -> BTreeMap<String, u32> {
    values.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Classes that are not set keep their built-in values.
fn set_cpu_classes<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, u32>, D::Error> {
    Ok(cpu_classes().into_iter().chain(BTreeMap::deserialize(from)?).collect())
}

fn set_memory_classes<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, u32>, D::Error> {
    Ok(memory_classes().into_iter().chain(BTreeMap::deserialize(from)?).collect())
}

/// How often builds are tried and looked at. The built-in values are the existing worker's.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct BuildLimits {
    /// How often the start of a build is tried again after an error of the cluster.
    pub reprocess: u32,
    /// How often it is tried again for want of quota.
    pub quota_retries: u32,
    /// How often a pod is looked at while it pulls its images.
    pub checks: u32,
    /// How long a pod may wait for a node.
    pub scheduling_timeout: Span,
    /// How long after its start a build is looked at.
    pub delay: Span<1000>,
    /// By how much each delay is longer than the one before while a pod pulls its images.
    pub delay_step: Span,
    /// How long the registry may say that there is no such image, or no right to it, before the build fails.
    pub pull_grace: Span,
    /// How long a container may fail to be created.
    pub create_grace: Span,
}

impl Default for BuildLimits {
    fn default() -> Self {
        Self {
            reprocess: 3,
            quota_retries: 60,
            checks: 6,
            scheduling_timeout: built_in("3m"),
            delay: built_in("30s"),
            delay_step: built_in("10s"),
            pull_grace: built_in("90s"),
            create_grace: built_in("30s"),
        }
    }
}
