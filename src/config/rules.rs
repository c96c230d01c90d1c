//! What a configuration must hold beyond the shape of each value: values that have to go together.

use std::collections::BTreeMap;

use super::check::join;
use super::demand::DemandConfig;
use super::pool::{PoolConfig, PoolDriver, QueueType};
use super::problem::{Problem, ProblemCode, ValueOrigin, suggest};
use super::schema::{Bridge, COMMAND, Config, Handler, HandlerKind, Source, SourceKind};
use super::values::WORKER_NAME_CHARS_MAX_AZURE;
use crate::limits::{AMQP_NAME_BYTES_MAX, MESSAGE_TTL_MAX};
use crate::source::taskcluster::{ArtifactStorage, Dialect};

struct Rules<'a> {
    origins: &'a BTreeMap<String, ValueOrigin>,
    tables: &'a BTreeMap<String, ValueOrigin>,
    problems: &'a mut Vec<Problem>,
}

/// Checks what has to go together.
pub(super) fn check(
    config: &Config,
    origins: &BTreeMap<String, ValueOrigin>,
    tables: &BTreeMap<String, ValueOrigin>,
    problems: &mut Vec<Problem>,
) {
    let mut rules = Rules { origins, tables, problems };
    for (name, source) in &config.source {
        rules.source(config, name, source);
    }
    for (name, bridge) in &config.bridge {
        rules.bridge(config, name, bridge);
    }
    for (name, handler) in &config.handler {
        rules.handler(name, handler);
    }
    for (name, pool) in &config.pool {
        rules.pool(&format!("pool.{name}"), pool);
    }
    rules.broker(config);
    rules.names(config);
    if let Some(listen) = config.http.listen
        && !config.http.allow_remote
        && !listen.0.ip().to_canonical().is_loopback()
    {
        let what = format!(
            "others could reach {}; `http.allow_remote = true` says that this is meant, as behind a firewall for Prometheus",
            listen.0
        );
        rules.push(ProblemCode::Conflict, "http.listen", what, "use 127.0.0.1, or set `allow_remote`");
    }
    for (name, demand) in &config.demand {
        rules.demand(config, name, demand);
    }
    for (id, client) in &config.queue.clients {
        let key = format!("queue.clients.{id}");
        rules.one_of(&key, "access_token", client.access_token.is_some(), client.access_token_file.is_some());
        if client.access_token.is_none() && client.access_token_file.is_none() {
            rules.push(ProblemCode::Missing, &key, format!("[{key}] needs `access_token_file`"), "");
        }
    }
}

impl Rules<'_> {
    /// A queue of elsewhere leads to a pool that there is, as one that may count.
    fn demand(&mut self, config: &Config, name: &str, demand: &DemandConfig) {
        let key = format!("demand.{name}");
        if !config.pool.contains_key(&demand.pool) {
            let near = suggest(&demand.pool, config.pool.keys().map(String::as_str));
            let label = near.map_or_else(String::new, |near| format!("did you mean `{near}`?"));
            self.push(
                ProblemCode::Conflict,
                &join(&key, "pool"),
                format!("there is no [pool.{}]", demand.pool),
                &label,
            );
        }
        self.one_of(&key, "access_token", demand.access_token.is_some(), demand.access_token_file.is_some());
        self.one_of(&key, "certificate", demand.certificate.is_some(), demand.certificate_file.is_some());
        let token = demand.access_token.is_some() || demand.access_token_file.is_some();
        if demand.client_id.is_some() != token {
            let what = format!("[{key}] needs both `client_id` and `access_token_file`, or neither");
            self.push(ProblemCode::Missing, &key, what, "");
        }
    }

    fn source(&mut self, config: &Config, name: &str, source: &Source) {
        let key = format!("source.{name}");
        self.one_of(&key, "access_token", source.access_token.is_some(), source.access_token_file.is_some());
        self.one_of(&key, "certificate", source.certificate.is_some(), source.certificate_file.is_some());
        self.credentials(&key, source);
        if source.handler != COMMAND && !config.handler.contains_key(&source.handler) {
            let known = config.handler.keys().map(String::as_str).chain([COMMAND]);
            let label =
                suggest(&source.handler, known).map_or_else(String::new, |near| format!("did you mean `{near}`?"));
            let what = format!("there is no [handler.{}]", source.handler);
            self.push(ProblemCode::Conflict, &join(&key, "handler"), what, &label);
        }
        match source.kind {
            SourceKind::Taskcluster => self.taskcluster(config, &key, source),
            SourceKind::Amqp => self.amqp(config, &key, source),
        }
    }

    fn taskcluster(&mut self, config: &Config, key: &str, source: &Source) {
        for (name, there, example) in [
            ("root_url", source.root_url.is_some(), "\"https://tc.example.com\""),
            ("task_queue", source.task_queue.is_some(), "\"provisioner/worker-type\""),
        ] {
            if !there {
                self.missing(key, name, example);
            }
        }
        self.of_other_kind(
            key,
            "taskcluster",
            &[("requests_queue", source.requests_queue.is_some()), ("poison_queue", source.poison_queue.is_some())],
        );
        if source.dialect == Dialect::Azure {
            self.azure(config, key, source);
        }
    }

    fn amqp(&mut self, config: &Config, key: &str, source: &Source) {
        self.of_other_kind(
            key,
            "amqp",
            &[
                ("root_url", source.root_url.is_some()),
                ("queue_url", source.queue_url.is_some()),
                ("task_queue", source.task_queue.is_some()),
                ("client_id", source.client_id.is_some()),
            ],
        );
        if source.requests_queue.is_none() && config.amqp.requests_queue.is_none() && config.amqp.worker_key.is_none() {
            let what = format!(
                "[{key}] does not know its queue: set `requests_queue`, or `amqp.worker_key` (WORKER_KEY), of which it is made"
            );
            self.push(ProblemCode::Missing, key, what, "");
        }
    }

    /// How the broker is reached, where it is.
    fn broker(&mut self, config: &Config) {
        let of_requests = config.source.values().any(|source| source.kind == SourceKind::Amqp);
        if !of_requests && config.pool.is_empty() && config.activity.exchange.is_none() {
            return;
        }
        let amqp = &config.amqp;
        self.one_of("amqp", "uri", amqp.uri.is_some(), amqp.uri_file.is_some());
        let (there, lacks) = match (&amqp.certificate_file, &amqp.key_file) {
            (Some(_), None) => ("certificate_file", "key_file"),
            (None, Some(_)) => ("key_file", "certificate_file"),
            (Some(_), Some(_)) | (None, None) => return,
        };
        let what = format!("[amqp] has `{there}` and no `{lacks}`, and needs both or neither");
        self.push(ProblemCode::Missing, &join("amqp", there), what, "");
    }

    fn pool(&mut self, key: &str, pool: &PoolConfig) {
        if pool.delivery_limit.is_some() && pool.queue_type == QueueType::Classic {
            let what = format!("[{key}] has a `delivery_limit`, which queues in memory do not know");
            self.push(
                ProblemCode::Conflict,
                &join(key, "delivery_limit"),
                what,
                "did you mean queue_type = \"quorum\" as well?",
            );
        }
        if pool.min > pool.max {
            let what = format!("[{key}] has {} workers at least and {} at most", pool.min, pool.max);
            let odd = if self.origins.contains_key(&join(key, "min")) { "min" } else { "max" };
            self.push(ProblemCode::Conflict, &join(key, odd), what, "`min` may be as much as `max`");
        }
        if pool.message_ttl.0 > MESSAGE_TTL_MAX {
            let what = format!("[{key}] has a `message_ttl` that is longer than RabbitMQ can count, which is 49 days");
            self.push(ProblemCode::Value, &join(key, "message_ttl"), what, "\"0s\" is for ever");
        }
        self.driver(key, pool);
    }

    /// Each driver has what it needs, and nothing of another one.
    fn driver(&mut self, key: &str, pool: &PoolConfig) {
        let driver = pool.driver.as_str();
        for table in ["exec", "systemd", "docker", "kubernetes"] {
            if self.tables.contains_key(&join(key, table)) && table != driver {
                let what = format!("[{key}] has `driver = \"{driver}\"` and a table for `{table}`");
                let label = format!("did you mean driver = \"{table}\"?");
                self.push(ProblemCode::Conflict, &join(key, table), what, &label);
            }
        }
        let (needed, starts_command) = match pool.driver {
            PoolDriver::Subprocess => (Vec::new(), true),
            PoolDriver::Noop => (Vec::new(), false),
            PoolDriver::Exec => (
                vec![
                    ("list", pool.exec.list.is_empty(), "[\"/opt/workers\", \"list\"]"),
                    ("start", pool.exec.start.is_empty(), "[\"/opt/workers\", \"start\"]"),
                    ("stop", pool.exec.stop.is_empty(), "[\"/opt/workers\", \"stop\"]"),
                ],
                false,
            ),
            PoolDriver::Kubernetes => {
                (vec![("image", pool.kubernetes.image.as_ref().is_none_or(String::is_empty), "\"worker:1\"")], true)
            }
            PoolDriver::Docker => {
                (vec![("image", pool.docker.image.as_ref().is_none_or(String::is_empty), "\"worker:1\"")], true)
            }
            PoolDriver::Systemd => {
                (vec![("unit", pool.systemd.unit.as_ref().is_none_or(String::is_empty), "\"worker\"")], false)
            }
        };
        for (name, _, example) in needed.iter().filter(|(_, lacks, _)| *lacks) {
            self.missing(&join(key, driver), name, example);
        }
        let host = &pool.docker.host;
        if !["unix://", "http://", "tcp://"].iter().any(|scheme| host.starts_with(scheme)) {
            let what = format!("[{key}] has a `docker.host` that is neither a socket nor plain HTTP");
            self.push(ProblemCode::Value, &join(key, "docker.host"), what, "such as \"unix:///var/run/docker.sock\"");
        }
        if !pool.command.is_empty() && !starts_command {
            let what = format!("[{key}] has `driver = \"{driver}\"`, which starts no `command`");
            self.push(ProblemCode::Conflict, &join(key, "command"), what, "did you mean driver = \"subprocess\"?");
        }
    }

    /// Names on the wire of AMQP, given and made.
    fn names(&mut self, config: &Config) {
        let amqp = &config.amqp;
        let key = amqp.worker_key.as_deref().unwrap_or_default();
        let mut names = vec![
            ("amqp.worker_key".to_owned(), key.to_owned()),
            ("amqp.requests_queue".to_owned(), amqp.requests_queue.clone().unwrap_or_default()),
            ("activity.exchange".to_owned(), config.activity.exchange.clone().unwrap_or_default()),
            // The longest of what is made of it.
            ("amqp.pool".to_owned(), format!("{}-activity-xchg", amqp.pool)),
        ];
        for (name, source) in &config.source {
            let place = |key| join(&format!("source.{name}"), key);
            names.push((place("requests_queue"), source.requests_queue.clone().unwrap_or_default()));
            names.push((place("poison_queue"), source.poison_queue.clone().unwrap_or_default()));
            let is_made = source.kind == SourceKind::Amqp && source.requests_queue.is_none();
            if is_made && amqp.requests_queue.is_none() && key.len() <= AMQP_NAME_BYTES_MAX {
                names.push(("amqp.worker_key".to_owned(), format!("{}-req-{key}", amqp.pool)));
            }
        }
        for (key, name) in names.iter().filter(|(_, name)| name.len() > AMQP_NAME_BYTES_MAX) {
            let what = format!(
                "{key} is, or makes, a name of {} bytes, and AMQP has room for {AMQP_NAME_BYTES_MAX}",
                name.len()
            );
            self.push(ProblemCode::Value, key, what, "");
        }
        if amqp.max_message_size.0 == 0 {
            let what = "amqp.max_message_size is 0, with which no request could be taken".to_owned();
            self.push(ProblemCode::Value, "amqp.max_message_size", what, "such as \"128MiB\"");
        }
    }

    fn of_other_kind(&mut self, key: &str, kind: &str, keys: &[(&str, bool)]) {
        for (odd, _) in keys.iter().filter(|(_, set)| *set) {
            let what = format!("[{key}] is of kind `{kind}`, which has no `{odd}`");
            self.push(ProblemCode::Conflict, &join(key, odd), what, "");
        }
    }

    fn missing(&mut self, key: &str, name: &str, example: &str) {
        // A table that is not there either is missed in the one around it.
        let around = key.rsplit_once('.').map_or("", |(around, _)| around);
        let origin = self.tables.get(key).or_else(|| self.tables.get(around)).cloned().unwrap_or(ValueOrigin::Default);
        self.problems.push(Problem {
            code: ProblemCode::Missing,
            message: format!("[{key}] needs `{name}`"),
            origin,
            label: String::new(),
            help: Some(format!("add `{name} = {example}` or set {}", super::environment::variable(&join(key, name)))),
        });
    }

    fn credentials(&mut self, key: &str, source: &Source) {
        let token = source.access_token.is_some() || source.access_token_file.is_some();
        let certificate = source.certificate.is_some() || source.certificate_file.is_some();
        if source.client_id.is_none() && (token || certificate) {
            self.push(ProblemCode::Missing, key, format!("[{key}] has credentials and no `client_id`"), "");
        }
        if source.client_id.is_some() && !token {
            let what = format!(
                "[{key}] has a `client_id` and neither `access_token_file` nor {}",
                super::environment::variable(&join(key, "access_token"))
            );
            self.push(ProblemCode::Missing, &join(key, "client_id"), what, "");
        }
    }

    fn azure(&mut self, config: &Config, key: &str, source: &Source) {
        if source.artifact_storage == ArtifactStorage::Object {
            let what = format!("[{key}] with `dialect = \"azure\"` knows no object service");
            self.push(ProblemCode::Conflict, &join(key, "artifact_storage"), what, "did you mean \"s3\"?");
        }
        let most = WORKER_NAME_CHARS_MAX_AZURE;
        let Some(queue) = &source.task_queue else { return };
        let names = [
            ("worker.id", config.worker.id.fill("h", 1, most)),
            ("worker.group", config.worker.group.fill("h", 1, most)),
            (&join(key, "task_queue"), queue.provisioner().to_owned()),
            (&join(key, "task_queue"), queue.worker_type().to_owned()),
        ];
        for (named, text) in names.iter().filter(|(_, text)| text.len() > most) {
            let what = format!(
                "\"{text}\" has {} characters, and [{key}] with `dialect = \"azure\"` allows {most}",
                text.len()
            );
            self.push(ProblemCode::Value, named, what, "");
        }
    }

    fn bridge(&mut self, config: &Config, name: &str, bridge: &Bridge) {
        let key = format!("bridge.{name}");
        let mut kinds = Vec::new();
        for (side, named) in [("from", &bridge.from), ("to", &bridge.to)] {
            match config.source.get(named) {
                Some(source) => kinds.push(source.kind),
                None => {
                    let near = suggest(named, config.source.keys().map(String::as_str));
                    let label = near.map_or_else(String::new, |near| format!("did you mean `{near}`?"));
                    self.push(
                        ProblemCode::Conflict,
                        &join(&key, side),
                        format!("there is no [source.{named}]"),
                        &label,
                    );
                }
            }
        }
        if let [from, to] = kinds.as_slice()
            && from == to
        {
            let what = format!(
                "[{key}] leads from one source to another of the same kind; one is `taskcluster`, the other `amqp`"
            );
            self.push(ProblemCode::Conflict, &join(&key, "to"), what, "");
        }
        let twice = config.bridge.iter().any(|(other, bridge2)| other.as_str() < name && bridge2.from == bridge.from);
        if twice {
            let what = format!("[source.{}] is taken by another bridge already", bridge.from);
            self.push(ProblemCode::Conflict, &join(&key, "from"), what, "");
        }
    }

    fn handler(&mut self, name: &str, handler: &Handler) {
        let key = format!("handler.{name}");
        match handler.kind {
            HandlerKind::Program if handler.exec.is_empty() => {
                let what = format!("[{key}] is a program and needs `exec`, such as `exec = [\"/opt/handlers/build\"]`");
                self.push(ProblemCode::Missing, &key, what, "");
            }
            HandlerKind::Command => {
                let set = [
                    ("exec", !handler.exec.is_empty()),
                    ("check", !handler.check.is_empty()),
                    ("schema", handler.schema.is_some()),
                ];
                for (odd, _) in set.iter().filter(|(_, set)| *set) {
                    let what =
                        format!("[{key}] is of kind `command`, where the task brings what is run, and has `{odd}`");
                    self.push(ProblemCode::Conflict, &join(&key, odd), what, "did you mean kind = \"program\"?");
                }
                self.no_service(&key, handler, "command");
            }
            HandlerKind::Program if handler.default_run_time.is_some() => {
                let what = format!(
                    "[{key}] is of kind `program`, whose tasks do not say how long they run; use `max_run_time`"
                );
                self.push(ProblemCode::Conflict, &join(&key, "default_run_time"), what, "");
            }
            HandlerKind::Program => self.no_service(&key, handler, "program"),
            HandlerKind::Http => self.service(&key, handler),
        }
    }

    fn service(&mut self, key: &str, handler: &Handler) {
        if handler.url.is_some() == handler.socket.is_some() {
            let what = format!("[{key}] is of kind `http` and needs one of `url` and `socket`");
            self.push(ProblemCode::Missing, key, what, "such as `url = \"http://127.0.0.1:8080\"`");
        }
        if handler.health.as_ref().is_some_and(|path| !path.starts_with('/')) {
            let what = format!("[{key}] needs a `health` that begins with `/`");
            self.push(ProblemCode::Value, &join(key, "health"), what, "such as \"/health\"");
        }
        let set = [
            ("check", !handler.check.is_empty()),
            ("schema", handler.schema.is_some()),
            ("default_run_time", handler.default_run_time.is_some()),
        ];
        self.of_other_kind(key, "http", &set);
    }

    fn no_service(&mut self, key: &str, handler: &Handler, kind: &str) {
        let set = [
            ("url", handler.url.is_some()),
            ("socket", handler.socket.is_some()),
            ("health", handler.health.is_some()),
        ];
        self.of_other_kind(key, kind, &set);
    }

    fn one_of(&mut self, key: &str, name: &str, value: bool, file: bool) {
        if value && file {
            let elsewhere = |name: &str| match self.origins.get(&join(key, name)) {
                Some(ValueOrigin::Env(variable)) => format!(" (from {variable})"),
                Some(ValueOrigin::Flag(flag)) => format!(" (from {flag})"),
                Some(ValueOrigin::File(_) | ValueOrigin::Default) | None => String::new(),
            };
            let (by, by_file) = (elsewhere(name), elsewhere(&format!("{name}_file")));
            let what = format!("[{key}] has both `{name}`{by} and `{name}_file`{by_file}; keep one");
            self.push(ProblemCode::Conflict, &join(key, &format!("{name}_file")), what, "");
        }
    }

    fn push(&mut self, code: ProblemCode, key: &str, what: String, label: &str) {
        let origin = self.origins.get(key).or_else(|| self.tables.get(key)).cloned().unwrap_or(ValueOrigin::Default);
        let in_file = matches!(origin, ValueOrigin::File(_));
        self.problems.push(Problem {
            code,
            message: what,
            origin,
            label: if in_file { label.to_owned() } else { String::new() },
            help: Some(label.to_owned()).filter(|label| !in_file && !label.is_empty()),
        });
    }
}
