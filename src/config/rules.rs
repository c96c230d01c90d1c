//! Checks each section, and what one section says of another.

use std::collections::BTreeMap;

use super::schema::{Config, ConsoleTarget, Source, TargetKind};
use journeyman_platform::settings::key::join;
use journeyman_platform::settings::problem::{Problem, ValueOrigin};
use journeyman_platform::settings::rules::Rules;
use journeyman_services::bridge::config::Bridge;
use journeyman_services::controller::config::DemandConfig;
use journeyman_worker::source::taskcluster::config::TaskclusterSource;
use journeyman_worker::task::COMMAND;

/// Checks a configuration whose values are valid by themselves.
pub(super) fn check(config: &Config, origins: &BTreeMap<String, ValueOrigin>, problems: &mut Vec<Problem>) {
    let mut rules = Rules { origins, problems };
    for (name, source) in &config.source {
        check_source(config, &join("source", name), source, &mut rules);
    }
    for (name, handler) in &config.handler {
        if let Err(why) = handler.mounts() {
            rules.error(&join("handler", name), "", format!("[handler.{name}]: {why}"), "");
        }
    }
    for (name, bridge) in &config.bridge {
        check_bridge(config, &join("bridge", name), bridge, &mut rules);
    }
    for (name, pool) in &config.pool {
        pool.check(&join("pool", name), &mut rules);
    }
    for (name, demand) in &config.demand {
        check_demand(config, &join("demand", name), demand, &mut rules);
    }
    for (name, target) in &config.console.target {
        check_console_target(&join("console.target", name), name, target, &mut rules);
    }
    config.notifier.check(&mut rules);
    config.notify.check(&mut rules);
    config.amqp.check(&mut rules);
    config.worker.check(&mut rules);
    check_task_users(config, &mut rules);
    config.http.check(&mut rules);
}

fn check_source(config: &Config, key: &str, source: &Source, rules: &mut Rules<'_>) {
    let handlers = config.handler.keys().map(String::as_str).chain([COMMAND]);
    if let Some(name) = source.handler() {
        rules.reference(key, "handler", "handler", name, handlers);
    }
    match source {
        Source::Taskcluster(source) => {
            check_is_only_one(config, key, source, rules);
            source.check(key, &[("id", &config.worker.id), ("group", &config.worker.group)], rules);
        }
        Source::Zookeeper(source) => source.check(key, rules),
        Source::Screwdriver(source) => source.check(key, rules),
        Source::Amqp(source) => source.check(key, &config.amqp, rules),
    }
}

fn check_console_target(key: &str, name: &str, target: &ConsoleTarget, rules: &mut Rules<'_>) {
    if name.contains('/') {
        rules.error(
            key,
            "kind",
            format!("[console.target]: the name {name:?} has a slash"),
            "choose a name without one",
        );
    }
    if target.kind == TargetKind::Queue && target.client_id.is_some() != target.token_file.is_some() {
        let message = format!("[{key}] has `client_id` or `token_file`, and not both");
        rules.error(key, "kind", message, "set both, or none for a queue that checks no caller");
    }
}

fn check_task_users(config: &Config, rules: &mut Rules<'_>) {
    let (users, capacity) = (&config.host.task_users, usize::from(config.worker.capacity));
    if !users.is_empty() && users.len() < capacity {
        let message = format!("[host] has {} `task_users` for {capacity} slots of `worker.capacity`", users.len());
        rules.error("host", "task_users", message, "name a user for each slot");
    }
    if let Some(twice) = users.iter().enumerate().find_map(|(at, name)| users[..at].contains(name).then_some(name)) {
        let message = format!("[host] names \"{twice}\" twice in `task_users`");
        rules.error("host", "task_users", message, "tasks that share a user can read each other's files");
    }
}

fn check_is_only_one(config: &Config, key: &str, source: &TaskclusterSource, rules: &mut Rules<'_>) {
    let mut earlier = config.source.iter().take_while(|(name, _)| join("source", name) != key);
    let is_same =
        |other: &TaskclusterSource| other.root_url == source.root_url && other.task_queue == source.task_queue;
    if let Some((name, _)) = earlier.find(|(_, other)| other.as_taskcluster().is_some_and(is_same)) {
        let message = format!("[{key}] and [source.{name}] claim from the same task queue with the same worker id");
        rules.error(key, "task_queue", message, "the queue cannot tell them apart: remove one of them");
    }
}

fn check_demand(config: &Config, key: &str, demand: &DemandConfig, rules: &mut Rules<'_>) {
    rules.reference(key, "pool", "pool", &demand.pool, config.pool.keys().map(String::as_str));
    let is_amqp = |source: &Source| matches!(source, Source::Amqp(_) | Source::Screwdriver(_));
    let sources = config.source.iter().filter(|(_, source)| !is_amqp(source));
    let name = &demand.source;
    if config.source.get(name).is_some_and(is_amqp) {
        let message = format!(
            "[{key}] needs a source of kind `taskcluster` or `zookeeper`, but [source.{name}] has queues of a broker"
        );
        rules.error(key, "source", message, "");
    } else {
        rules.reference(key, "source", "source", name, sources.map(|(name, _)| name.as_str()));
    }
}

fn check_bridge(config: &Config, key: &str, bridge: &Bridge, rules: &mut Rules<'_>) {
    for (side, source) in [("from", &bridge.from), ("to", &bridge.to)] {
        rules.reference(key, side, "source", source, config.source.keys().map(String::as_str));
    }
    let is_taskcluster = |name: &String| config.source.get(name).map(|source| source.as_taskcluster().is_some());
    if let (Some(from), Some(to)) = (is_taskcluster(&bridge.from), is_taskcluster(&bridge.to))
        && from == to
    {
        let message =
            format!("[{key}] connects two sources of the same kind; one must be `taskcluster`, the other `amqp`");
        rules.error(key, "to", message, "");
    }
}
