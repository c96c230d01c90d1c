//! Checks values that have to agree with each other.

use std::collections::BTreeMap;

use super::load::join;
use super::pool::{DemandConfig, PoolConfig, PoolDriver, QueueType};
use super::problem::{Problem, ProblemCode, ValueOrigin, suggest};
use super::schema::{Bridge, COMMAND, Config, Handler, HttpHandler, Source, TaskclusterSource};
use super::values::WORKER_NAME_CHARS_MAX_AZURE;
use crate::limits::{AMQP_NAME_BYTES_MAX, MESSAGE_TTL_MAX};
use crate::source::taskcluster::{ArtifactStorage, Dialect};

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
    for (name, handler) in &config.handler {
        rules.handler(&format!("handler.{name}"), handler);
    }
    for (name, pool) in &config.pool {
        rules.pool(&format!("pool.{name}"), pool);
    }
    rules.broker(config);
    rules.amqp_names(config);
    if let Some(listen) = config.http.listen
        && !config.http.allow_remote
        && !listen.0.ip().to_canonical().is_loopback()
    {
        let message = format!("other hosts can reach {}; set `http.allow_remote = true` to allow it", listen.0);
        rules.push(ProblemCode::Conflict, "http.listen", message, "use 127.0.0.1, or set `allow_remote`");
    }
    for (name, demand) in &config.demand {
        rules.demand(config, &format!("demand.{name}"), demand);
    }
}

impl Rules<'_> {
    fn demand(&mut self, config: &Config, key: &str, demand: &DemandConfig) {
        self.reference(&join(key, "pool"), "pool", &demand.pool, config.pool.keys().map(String::as_str));
        let sources = config.source.iter().filter(|(_, source)| source.as_taskcluster().is_some());
        let name = &demand.source;
        if config.source.get(name).is_some_and(|source| source.as_taskcluster().is_none()) {
            let message = format!("[{key}] needs a source of kind `taskcluster`, but [source.{name}] has another");
            self.push(ProblemCode::Conflict, &join(key, "source"), message, "");
        } else {
            self.reference(&join(key, "source"), "source", name, sources.map(|(name, _)| name.as_str()));
        }
    }

    fn credentials(&mut self, key: &str, source: &TaskclusterSource) {
        let has_secret = source.access_token_file.is_some() || source.certificate_file.is_some();
        if source.client_id.is_none() && has_secret {
            self.push(ProblemCode::Missing, key, format!("[{key}] has credentials and no `client_id`"), "");
        }
        if source.client_id.is_some() && source.access_token_file.is_none() {
            let message = format!("[{key}] has a `client_id` and no `access_token_file`");
            self.push(ProblemCode::Missing, &join(key, "client_id"), message, "");
        }
    }

    fn source(&mut self, config: &Config, key: &str, source: &Source) {
        let handlers = config.handler.keys().map(String::as_str).chain([COMMAND]);
        self.reference(&join(key, "handler"), "handler", source.handler(), handlers);
        match source {
            Source::Taskcluster(source) => self.taskcluster(config, key, source),
            Source::Amqp(source) => {
                let amqp = &config.amqp;
                let is_assigned = amqp.assignment.requests_queue.is_some() || amqp.worker_key.is_some();
                if source.requests_queue.is_none() && !is_assigned {
                    let message = format!(
                        "[{key}] has no queue: set `requests_queue`, or `amqp.worker_key` (WORKER_KEY), which names the queue"
                    );
                    self.push(ProblemCode::Missing, key, message, "");
                }
            }
        }
    }

    fn taskcluster(&mut self, config: &Config, key: &str, source: &TaskclusterSource) {
        self.credentials(key, source);
        if source.dialect == Dialect::Azure {
            self.azure(config, key, source);
        }
    }

    fn azure(&mut self, config: &Config, key: &str, source: &TaskclusterSource) {
        if source.artifact_storage == ArtifactStorage::Object {
            let message = format!("[{key}] has `dialect = \"azure\"`, which has no object service");
            self.push(ProblemCode::Conflict, &join(key, "artifact_storage"), message, "did you mean \"s3\"?");
        }
        let chars_max = WORKER_NAME_CHARS_MAX_AZURE;
        let names = [
            ("worker.id", config.worker.id.fill("h", 1, chars_max)),
            ("worker.group", config.worker.group.fill("h", 1, chars_max)),
            (&join(key, "task_queue"), source.task_queue.provisioner().to_owned()),
            (&join(key, "task_queue"), source.task_queue.worker_type().to_owned()),
        ];
        for (named, text) in names.iter().filter(|(_, text)| text.len() > chars_max) {
            let message = format!(
                "\"{text}\" has {} characters, but [{key}] with `dialect = \"azure\"` allows at most {chars_max}",
                text.len()
            );
            self.push(ProblemCode::Value, named, message, "");
        }
    }

    fn broker(&mut self, config: &Config) {
        let amqp = &config.amqp;
        let (set, missing) = match (&amqp.certificate_file, &amqp.key_file) {
            (Some(_), None) => ("certificate_file", "key_file"),
            (None, Some(_)) => ("key_file", "certificate_file"),
            (Some(_), Some(_)) | (None, None) => return,
        };
        let message = format!("[amqp] has `{set}` but no `{missing}`; set both or neither");
        self.push(ProblemCode::Missing, &join("amqp", set), message, "");
    }

    fn pool(&mut self, key: &str, pool: &PoolConfig) {
        if pool.delivery_limit.is_some() && pool.queue_type == QueueType::Classic {
            let message = format!("[{key}] has a `delivery_limit`, which classic queues do not support");
            let hint = "did you mean queue_type = \"quorum\" as well?";
            self.push(ProblemCode::Conflict, &join(key, "delivery_limit"), message, hint);
        }
        if pool.min > pool.max.get() {
            let message = format!("[{key}] has `min` = {}, which is more than `max` = {}", pool.min, pool.max);
            let name = if self.origins.contains_key(&join(key, "min")) { "min" } else { "max" };
            self.push(ProblemCode::Conflict, &join(key, name), message, "`min` may be at most `max`");
        }
        if pool.message_ttl.0.is_some_and(|ttl| ttl > MESSAGE_TTL_MAX) {
            let message = format!("[{key}] has a `message_ttl` of more than 49 days, the maximum of RabbitMQ");
            self.push(ProblemCode::Value, &join(key, "message_ttl"), message, "\"0s\" is no limit");
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
                let hint = format!("did you mean driver = \"{table}\"?");
                self.push(ProblemCode::Conflict, &join(key, table), message, &hint);
            } else if !is_set && pool.driver == of_driver {
                let message = format!("[{key}] has `driver = \"{driver}\"` and no `{table}`");
                self.push(
                    ProblemCode::Missing,
                    &join(key, "driver"),
                    message,
                    &format!("`{table}` needs {required} at least"),
                );
            }
        }
        if let Some(docker) = &pool.docker
            && !["unix://", "http://", "tcp://"].iter().any(|scheme| docker.host.starts_with(scheme))
        {
            let message = format!("[{key}] has a `docker.host` that is neither a Unix socket nor plain HTTP");
            self.push(
                ProblemCode::Value,
                &join(key, "docker.host"),
                message,
                "such as \"unix:///var/run/docker.sock\"",
            );
        }
        let starts_command = match pool.driver {
            PoolDriver::Subprocess | PoolDriver::Docker | PoolDriver::Kubernetes => true,
            PoolDriver::Systemd | PoolDriver::Exec | PoolDriver::Noop => false,
        };
        if !pool.command.is_empty() && !starts_command {
            let message = format!("[{key}] has `driver = \"{driver}\"`, which does not use `command`");
            let hint = "did you mean driver = \"subprocess\"?";
            self.push(ProblemCode::Conflict, &join(key, "command"), message, hint);
        }
    }

    /// Names that AMQP limits, configured or made from others.
    fn amqp_names(&mut self, config: &Config) {
        let amqp = &config.amqp;
        let key = amqp.worker_key.as_deref().unwrap_or_default();
        let mut names = vec![
            ("amqp.worker_key".to_owned(), key.to_owned()),
            ("WORKER_REQUESTS_QUEUE".to_owned(), amqp.assignment.requests_queue.clone().unwrap_or_default()),
            ("WORKER_ACTIVITY_EXCHANGE".to_owned(), amqp.assignment.activity_exchange.clone().unwrap_or_default()),
            // The longest name that is made from it.
            ("amqp.pool".to_owned(), format!("{}-activity-xchg", amqp.pool)),
        ];
        for (name, source) in &config.source {
            let Some(source) = source.as_requests() else { continue };
            let place = |key| join(&format!("source.{name}"), key);
            names.push((place("requests_queue"), source.requests_queue.clone().unwrap_or_default()));
            names.push((place("poison_queue"), source.poison_queue.clone().unwrap_or_default()));
            let is_made = source.requests_queue.is_none() && amqp.assignment.requests_queue.is_none();
            if is_made && key.len() <= AMQP_NAME_BYTES_MAX {
                names.push(("amqp.worker_key".to_owned(), format!("{}-req-{key}", amqp.pool)));
            }
        }
        for (key, name) in names.iter().filter(|(_, name)| name.len() > AMQP_NAME_BYTES_MAX) {
            let message =
                format!("`{key}` makes a name of {} bytes; AMQP allows at most {AMQP_NAME_BYTES_MAX}", name.len());
            self.push(ProblemCode::Value, key, message, "");
        }
    }

    fn bridge(&mut self, config: &Config, name: &str, bridge: &Bridge) {
        let key = format!("bridge.{name}");
        for (side, named) in [("from", &bridge.from), ("to", &bridge.to)] {
            self.reference(&join(&key, side), "source", named, config.source.keys().map(String::as_str));
        }
        let is_taskcluster = |named: &String| config.source.get(named).map(|source| source.as_taskcluster().is_some());
        if let (Some(from), Some(to)) = (is_taskcluster(&bridge.from), is_taskcluster(&bridge.to))
            && from == to
        {
            let message =
                format!("[{key}] connects two sources of the same kind; one must be `taskcluster`, the other `amqp`");
            self.push(ProblemCode::Conflict, &join(&key, "to"), message, "");
        }
        let is_taken =
            config.bridge.iter().any(|(other, earlier)| other.as_str() < name && earlier.from == bridge.from);
        if is_taken {
            let message = format!("another bridge claims from [source.{}] already", bridge.from);
            self.push(ProblemCode::Conflict, &join(&key, "from"), message, "");
        }
    }

    fn handler(&mut self, key: &str, handler: &Handler) {
        let Handler::Http(HttpHandler { url, socket, health, .. }) = handler else { return };
        if url.is_some() == socket.is_some() {
            let message = format!("[{key}] is of kind `http` and needs either `url` or `socket`");
            self.push(ProblemCode::Missing, key, message, "such as `url = \"http://127.0.0.1:8080\"`");
        }
        if health.as_ref().is_some_and(|path| !path.starts_with('/')) {
            let message = format!("[{key}] has a `health` that does not start with `/`");
            self.push(ProblemCode::Value, &join(key, "health"), message, "such as \"/health\"");
        }
    }

    /// Checks that the section a value refers to exists.
    fn reference<'k>(
        &mut self,
        key: &str,
        section: &str,
        name: &str,
        mut known: impl Iterator<Item = &'k str> + Clone,
    ) {
        if known.clone().any(|known| known == name) {
            return;
        }
        let hint = suggest(name, &mut known).map_or_else(String::new, |near| format!("did you mean `{near}`?"));
        self.push(ProblemCode::Conflict, key, format!("there is no [{section}.{name}]"), &hint);
    }

    fn push(&mut self, code: ProblemCode, key: &str, message: String, hint: &str) {
        let origin = self.origins.get(key).cloned().unwrap_or(ValueOrigin::Default);
        let help = Some(hint.to_owned()).filter(|hint| !hint.is_empty());
        self.problems.push(Problem { code, message, origin, help });
    }
}
