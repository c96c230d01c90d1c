//! Checks values that have to agree with each other.

use std::collections::BTreeMap;

use super::load::join;
use super::pool::{DemandConfig, PoolConfig, PoolDriver, QueueType};
use super::problem::{Problem, ValueOrigin, suggest};
use super::schema::{Bridge, COMMAND, Config, ScrewdriverSource, Source, TaskclusterSource, ZooKeeperSource};
use super::values::WORKER_NAME_CHARS_MAX_AZURE;
use crate::source::taskcluster::{ArtifactStorage, Dialect};
use crate::source::zookeeper;
use journeyman_domain::limits::AMQP_NAME_BYTES_MAX;

/// What an id and a suffix leave of the 63 that the name of a pod may have.
const PREFIX_BYTES_MAX: usize = 36;

struct Rules<'a> {
    origins: &'a BTreeMap<String, ValueOrigin>,
    problems: &'a mut Vec<Problem>,
}

/// Checks a configuration whose values are valid by themselves.
pub(super) fn check(config: &Config, origins: &BTreeMap<String, ValueOrigin>, problems: &mut Vec<Problem>) {
    let mut rules = Rules { origins, problems };
    for (name, source) in &config.source {
        rules.source(config, &format!("source.{name}"), source);
    }
    for (name, bridge) in &config.bridge {
        rules.bridge(config, name, bridge);
    }
    for (name, pool) in &config.pool {
        rules.pool(&format!("pool.{name}"), pool);
    }
    for (name, demand) in &config.demand {
        rules.demand(config, &format!("demand.{name}"), demand);
    }
    for (name, endpoint) in &config.notifier.endpoint {
        if endpoint.url.is_some() == endpoint.url_file.is_some() {
            let key = format!("notifier.endpoint.{name}");
            rules.error(&key, "url", format!("[{key}] needs either `url` or `url_file`"), "");
        }
    }
    if config.notify.url.is_some() != config.notify.token_file.is_some() {
        let help = "`url` and `token_file` belong together";
        rules.error("notify", "url", "[notify] has one of `url` and `token_file`".to_owned(), help);
    }
    rules.broker(config);
    if let Some(listen) = config.worker.live_log
        && config.worker.live_log_url.is_none()
        && listen.0.ip().is_unspecified()
    {
        let message = format!("readers of logs cannot connect to {}", listen.0);
        rules.error(
            "worker",
            "live_log",
            message,
            "set `live_log_url` to the URL that they can connect to, or one address",
        );
    }
    if let Some(listen) = config.http.listen
        && !config.http.allow_remote
        && !listen.0.ip().to_canonical().is_loopback()
    {
        let message = format!("other hosts can reach {}; set `http.allow_remote = true` to allow it", listen.0);
        rules.error("http", "listen", message, "use 127.0.0.1, or set `allow_remote`");
    }
}

impl Rules<'_> {
    fn source(&mut self, config: &Config, key: &str, source: &Source) {
        let handlers = config.handler.keys().map(String::as_str).chain([COMMAND]);
        if let Some(name) = source.handler() {
            self.reference(key, "handler", "handler", name, handlers);
        }
        match source {
            Source::Taskcluster(source) => self.taskcluster(config, key, source),
            Source::Zookeeper(source) => self.zookeeper(key, source),
            Source::Screwdriver(source) => self.screwdriver(key, source),
            Source::Amqp(source) => {
                let amqp = &config.amqp;
                let is_assigned = amqp.assignment.requests_queue.is_some() || amqp.worker_key.is_some();
                if source.requests_queue.is_none() && !is_assigned {
                    let help = "set `requests_queue`, or `amqp.worker_key` (WORKER_KEY), which names the queue";
                    self.error(key, "", format!("[{key}] has no queue"), help);
                }
                let queue_key =
                    if source.requests_queue.is_some() { (key, "requests_queue") } else { ("amqp", "worker_key") };
                let names = [
                    (("amqp", "worker_key"), "key", amqp.worker_key.clone()),
                    (queue_key, "request queue", Some(config.requests_queue(source))),
                    ((key, "poison_queue"), "poison queue", source.poison_queue.clone()),
                    (("amqp", "pool"), "activity exchange", config.activity_exchange()),
                ];
                let is_long =
                    |name: &Option<String>| name.as_ref().is_some_and(|name| name.len() > AMQP_NAME_BYTES_MAX);
                if let Some(((section, key), what, Some(name))) = names.into_iter().find(|(_, _, name)| is_long(name)) {
                    let message =
                        format!("the name of the {what} has {} bytes; AMQP allows {AMQP_NAME_BYTES_MAX}", name.len());
                    self.error(section, key, message, "");
                }
            }
        }
    }

    fn taskcluster(&mut self, config: &Config, key: &str, source: &TaskclusterSource) {
        let earlier = config.source.iter().take_while(|(name, _)| join("source", name) != key);
        let is_same =
            |other: &TaskclusterSource| other.root_url == source.root_url && other.task_queue == source.task_queue;
        if let Some((name, _)) = earlier.into_iter().find(|(_, other)| other.as_taskcluster().is_some_and(is_same)) {
            let message = format!("[{key}] and [source.{name}] claim from the same task queue with the same worker id");
            self.error(key, "task_queue", message, "the queue cannot tell them apart: remove one of them");
        }
        let has_secret = source.access_token_file.is_some() || source.certificate_file.is_some();
        if source.client_id.is_none() && has_secret {
            self.error(key, "", format!("[{key}] has credentials and no `client_id`"), "");
        }
        if source.client_id.is_some() && source.access_token_file.is_none() {
            self.error(key, "client_id", format!("[{key}] has a `client_id` and no `access_token_file`"), "");
        }
        match source.dialect {
            Dialect::Azure => self.azure(config, key, source),
            Dialect::ClaimWork => self.worker_type(key, source.task_queue.worker_type()),
        }
    }

    fn zookeeper(&mut self, key: &str, source: &ZooKeeperSource) {
        let has_zones = !source.zones.is_empty();
        if has_zones && (source.queue.is_some() || source.dialect != zookeeper::Dialect::ZuulExecutor) {
            let message = format!("[{key}] has `zones`, and a `queue` or another dialect than `zuul-executor`");
            self.error(key, "zones", message, "zones choose among the queues of a Zuul's builds");
        }
        if let Some(zone) = source.zones.iter().find(|zone| zone.is_empty() || zone.contains('/')) {
            self.error(key, "zones", format!("\"{zone}\" is no zone"), "it is the name of a node");
        }
        if source.allow_unzoned == Some(false) && !has_zones {
            self.error(key, "allow_unzoned", format!("[{key}] would claim nothing"), "name the `zones` to claim for");
        }
        let paths = [("queue", &source.queue), ("chroot", &source.chroot)];
        for (name, path) in paths.into_iter().filter_map(|(name, path)| Some((name, path.as_ref()?))) {
            let parts = || path.split('/').skip(1);
            if !path.starts_with('/') || parts().any(|part| part.is_empty() || part == "." || part == "..") {
                self.error(
                    key,
                    name,
                    format!("\"{path}\" is no path of a node"),
                    "it begins with a slash and does not end with one",
                );
            }
        }
        let files = [&source.ca_file, &source.certificate_file, &source.key_file];
        if files.iter().any(|file| file.is_some()) && files.iter().any(|file| file.is_none()) {
            let message = format!("[{key}] has only some of `ca_file`, `certificate_file` and `key_file`");
            self.error(key, "ca_file", message, "TLS with ZooKeeper needs all three");
        }
    }

    fn screwdriver(&mut self, key: &str, source: &ScrewdriverSource) {
        if source.template.is_none() && (source.ui.is_none() || source.store.is_none()) {
            let message = format!("[{key}] needs `ui` and `store`, which builds are started with");
            self.error(key, "", message, "set both, or a `template` without them");
        }
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if !source.prefix.bytes().all(plain) || source.prefix.starts_with('-') || source.prefix.len() > PREFIX_BYTES_MAX
        {
            let message = format!("\"{}\" cannot begin the name of a pod", source.prefix);
            self.error(key, "prefix", message, "use at most 36 small letters, digits and dashes, none in front");
        }
        let mut queues = vec![("main_queue", &source.main_queue), ("retry_queue", &source.retry_queue)];
        queues.extend(source.wait_queue.as_ref().map(|wait| ("wait_queue", wait)));
        for (index, (name, queue)) in queues.iter().enumerate() {
            if queue.is_empty() || queue.len() > AMQP_NAME_BYTES_MAX {
                let message =
                    format!("the name of the queue has {} bytes; AMQP allows 1 to {AMQP_NAME_BYTES_MAX}", queue.len());
                self.error(key, name, message, "");
            }
            if let Some((other, _)) = queues[..index].iter().find(|(_, other)| other == queue) {
                self.error(key, name, format!("[{key}] has this queue as `{other}` too"), "each is a queue of its own");
            }
        }
    }

    /// Taskcluster's pattern is `^[a-z]([-a-z0-9]{0,36}[a-z0-9])?$`; the embedded queue accepts more.
    fn worker_type(&mut self, key: &str, text: &str) {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if text.bytes().all(plain) && text.starts_with(|first: char| first.is_ascii_lowercase()) && !text.ends_with('-')
        {
            return;
        }
        let message = format!("[{key}]: a Taskcluster refuses the worker type \"{text}\"");
        let help = "it has small letters, digits and dashes, begins with a letter and does not end with a dash";
        let origin = self.origins.get(&join(key, "task_queue")).cloned().unwrap_or(ValueOrigin::Default);
        self.problems.push(Problem::warning(message, origin, help.to_owned()));
    }

    fn azure(&mut self, config: &Config, key: &str, source: &TaskclusterSource) {
        if source.artifact_storage == ArtifactStorage::Object {
            let message = format!("[{key}] has `dialect = \"azure\"`, which has no object service");
            self.error(key, "artifact_storage", message, "did you mean \"s3\"?");
        }
        let chars_max = WORKER_NAME_CHARS_MAX_AZURE;
        let names = [
            ("worker", "id", config.worker.id.fill("h", 1, chars_max)),
            ("worker", "group", config.worker.group.fill("h", 1, chars_max)),
            (key, "task_queue", source.task_queue.provisioner().to_owned()),
            (key, "task_queue", source.task_queue.worker_type().to_owned()),
        ];
        for (section, name, text) in names.iter().filter(|(_, _, text)| text.len() > chars_max) {
            let message = format!(
                "\"{text}\" has {} characters, but [{key}] with `dialect = \"azure\"` allows at most {chars_max}",
                text.len()
            );
            self.error(section, name, message, "");
        }
    }

    fn broker(&mut self, config: &Config) {
        let amqp = &config.amqp;
        let (set, missing) = match (&amqp.certificate_file, &amqp.key_file) {
            (Some(_), None) => ("certificate_file", "key_file"),
            (None, Some(_)) => ("key_file", "certificate_file"),
            (Some(_), Some(_)) | (None, None) => return,
        };
        self.error("amqp", set, format!("[amqp] has `{set}` but no `{missing}`; set both or neither"), "");
    }

    fn pool(&mut self, key: &str, pool: &PoolConfig) {
        if pool.delivery_limit.is_some() && pool.queue_type == QueueType::Classic {
            let message = format!("[{key}] has a `delivery_limit`, which classic queues do not support");
            self.error(key, "delivery_limit", message, "did you mean queue_type = \"quorum\" as well?");
        }
        if pool.min > pool.max.get() {
            let message = format!("[{key}] has `min` = {}, which is more than `max` = {}", pool.min, pool.max);
            let name = if self.origins.contains_key(&join(key, "min")) { "min" } else { "max" };
            self.error(key, name, message, "`min` may be at most `max`");
        }
        let driver = pool.driver.as_str();
        let tables = [
            ("exec", PoolDriver::Exec, !pool.exec.is_empty(), "a program"),
            ("systemd", PoolDriver::Systemd, pool.systemd.is_some(), "`unit`"),
            ("docker", PoolDriver::Docker, pool.docker.is_some(), "`image`"),
            ("kubernetes", PoolDriver::Kubernetes, pool.kubernetes.is_some(), "`image`"),
        ];
        for (table, of_driver, is_set, required) in tables {
            if is_set && pool.driver != of_driver {
                let message = format!("[{key}] has `driver = \"{driver}\"` and `{table}`");
                self.error(key, table, message, &format!("did you mean driver = \"{table}\"?"));
            } else if !is_set && pool.driver == of_driver {
                let message = format!("[{key}] has `driver = \"{driver}\"` and no `{table}`");
                self.error(key, "driver", message, &format!("`{table}` needs {required} at least"));
            }
        }
        let starts_command = match pool.driver {
            PoolDriver::Subprocess | PoolDriver::Docker | PoolDriver::Kubernetes => true,
            PoolDriver::Systemd | PoolDriver::Exec | PoolDriver::Noop => false,
        };
        if !pool.command.is_empty() && !starts_command {
            let message = format!("[{key}] has `driver = \"{driver}\"`, which does not use `command`");
            self.error(key, "command", message, "did you mean driver = \"subprocess\"?");
        }
    }

    fn demand(&mut self, config: &Config, key: &str, demand: &DemandConfig) {
        self.reference(key, "pool", "pool", &demand.pool, config.pool.keys().map(String::as_str));
        let is_amqp = |source: &Source| matches!(source, Source::Amqp(_) | Source::Screwdriver(_));
        let sources = config.source.iter().filter(|(_, source)| !is_amqp(source));
        let name = &demand.source;
        if config.source.get(name).is_some_and(is_amqp) {
            let message = format!(
                "[{key}] needs a source of kind `taskcluster` or `zookeeper`, but [source.{name}] has queues of a broker"
            );
            self.error(key, "source", message, "");
        } else {
            self.reference(key, "source", "source", name, sources.map(|(name, _)| name.as_str()));
        }
    }

    fn bridge(&mut self, config: &Config, name: &str, bridge: &Bridge) {
        let key = format!("bridge.{name}");
        for (side, source) in [("from", &bridge.from), ("to", &bridge.to)] {
            self.reference(&key, side, "source", source, config.source.keys().map(String::as_str));
        }
        let is_taskcluster = |name: &String| config.source.get(name).map(|source| source.as_taskcluster().is_some());
        if let (Some(from), Some(to)) = (is_taskcluster(&bridge.from), is_taskcluster(&bridge.to))
            && from == to
        {
            let message =
                format!("[{key}] connects two sources of the same kind; one must be `taskcluster`, the other `amqp`");
            self.error(&key, "to", message, "");
        }
    }

    /// Checks that the section exists to which the value of a key refers.
    fn reference<'k>(
        &mut self,
        key: &str,
        name: &str,
        section: &str,
        value: &str,
        mut known: impl Iterator<Item = &'k str> + Clone,
    ) {
        if known.clone().any(|known| known == value) {
            return;
        }
        let help = suggest(value, &mut known).map_or_else(String::new, |near| format!("did you mean `{near}`?"));
        self.error(key, name, format!("there is no [{section}.{value}]"), &help);
    }

    /// Adds a problem of a key, or of the section if `name` is empty.
    fn error(&mut self, section: &str, name: &str, message: String, help: &str) {
        let origin = self.origins.get(&join(section, name)).cloned().unwrap_or(ValueOrigin::Default);
        let help = Some(help.to_owned()).filter(|help| !help.is_empty());
        self.problems.push(Problem { help, ..Problem::error(message, origin) });
    }
}
