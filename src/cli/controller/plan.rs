//! `journeyman controller plan`: what a controller would start and stop, and why, without doing it.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::{control_socket, no_pools, pool_config};
use crate::cli::config_args::{ConfigArgs, NoFlags};
use crate::cli::control::status::{BOLD, RESET, align_columns, strip_control_chars};
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::output::{self, Format};
use crate::config::Environment;
use crate::control::client::ControlClient;
use crate::control::controller_api::ControllerStatusReply;
use crate::controller::plan::{self, GroupPlan, PoolOwner, PoolPlan};
use crate::controller::status::Role;
use crate::domain::group::{KEY_BYTES_MAX, Key};
use crate::domain::refusal::Refusal;

/// `journeyman controller plan`
#[derive(Debug, Args)]
pub(super) struct PlanArgs {
    /// Configuration file of the controller
    #[arg(long, short, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
    /// Only this pool
    #[arg(long, value_name = "POOL")]
    pool: Option<String>,
    /// As if somebody asked under this key
    #[arg(long = "key", value_name = "KEY", value_parser = parse_key)]
    keys: Vec<Key>,
    /// How to answer
    #[arg(long, short, value_enum, default_value_t = Format::Table)]
    output: Format,
}

fn parse_key(text: &str) -> Result<Key, String> {
    Key::new(text).ok_or_else(|| format!("a key has {KEY_BYTES_MAX} bytes at most"))
}

/// Looks at the broker and at this host, and at the controller where one answers.
///
/// # Errors
///
/// A configuration that cannot be used, and a broker that cannot be asked.
pub(super) async fn run(arguments: PlanArgs, environment: &Environment) -> ExitResult {
    let loaded = ConfigArgs::<NoFlags>::from_file(arguments.config).load(environment)?;
    let config = loaded.config;
    let Some(socket) = control_socket(&config) else { return Err(no_pools()) };
    if let Some(name) = arguments.pool.as_ref().filter(|name| !config.pool.contains_key(*name)) {
        return Err(Failure::new(Exit::Config, format!("there is no [pool.{name}]")));
    }
    let answers = match ControlClient::new(&socket.path) {
        Ok(client) => client.controller_status().await.ok(),
        Err(_) => None,
    };
    let mut plans = Vec::new();
    for (name, pool) in &config.pool {
        if arguments.pool.as_ref().is_some_and(|wanted| wanted != name) {
            continue;
        }
        let settings = pool_config(name, pool, &config, environment)?;
        let seen = controlled_pool(answers.as_ref(), name);
        let failed = |refused: crate::source::CallError| {
            let exit = if refused.refusal == Refusal::Denied { Exit::Denied } else { Exit::Unreachable };
            Failure::new(exit, format!("[pool.{name}]: {}", refused.message))
        };
        plans.push(plan::plan(&settings, seen, &arguments.keys).await.map_err(failed)?);
    }
    match arguments.output {
        Format::Json => output::json(&serde_json::to_value(&plans).unwrap_or_default())?,
        Format::Table => output::print(&plans.iter().map(render).collect::<Vec<_>>().join("\n"))?,
    }
    Ok(Exit::Success)
}

/// How the controller sees the pool that answers here, where it has it.
fn controlled_pool<'a>(
    answers: Option<&'a ControllerStatusReply>,
    name: &str,
) -> Option<&'a crate::controller::status::PoolStatus> {
    answers?.snapshot.pools.iter().find(|pool| pool.name == name && pool.role == Role::Active)
}

fn render(plan: &PoolPlan) -> String {
    let who = match plan.controlled {
        PoolOwner::Here => "the controller that answers here has it",
        PoolOwner::Elsewhere => {
            "another controller has it: one that is started here stands by, and does this when that has gone"
        }
        PoolOwner::Nowhere => "no controller has it: one that is started now does this",
    };
    let mut out = format!(
        "pool {BOLD}{}{RESET}  {}\n  {who}\n",
        strip_control_chars(&plan.pool),
        strip_control_chars(&plan.broker)
    );
    let mut line = |text: &str| {
        // Writing to a String cannot fail.
        _ = writeln!(out, "  {text}");
    };
    match plan.orphans {
        Some(1) => line("1 orphan waits: a group for its key, where there is none"),
        Some(many @ 2..) => line(&format!("{many} orphans wait: a group for each of their keys, where there is none")),
        Some(0) => {}
        None => line("the pool's exchanges and queues would be made"),
    }
    if let Some(letters @ 1..) = plan.dead_letters {
        line(&format!("{letters} to be answered in a worker's place"));
    }
    if !plan.starts_workers {
        line("somebody else starts the workers");
    }
    let starts: u32 = plan.groups.iter().map(|group| group.start).sum();
    let stops: usize = plan.groups.iter().map(|group| group.stop.len()).sum();
    line(&match (starts, stops) {
        (0, 0) => "nobody would be started or told to go".to_owned(),
        (starts, 0) => format!("{} would be started", worker_count(u64::from(starts))),
        (0, stops) => format!("{} would be told to go", worker_count(stops as u64)),
        (starts, stops) => format!("{} would be started, {stops} told to go", worker_count(u64::from(starts))),
    });
    if !plan.groups.is_empty() {
        let head = ["KEY", "PHASE", "QUEUE", "WORKERS", "WANTED", "START", "STOP", "WHY"].map(str::to_owned).to_vec();
        out.push_str(&align_columns(std::iter::once(head).chain(plan.groups.iter().map(group_row)).collect()));
    }
    out
}

fn worker_count(count: u64) -> String {
    if count == 1 { "1 worker".to_owned() } else { format!("{count} workers") }
}

fn group_row(group: &GroupPlan) -> Vec<String> {
    let count = |many: usize| if many == 0 { "-".to_owned() } else { many.to_string() };
    vec![
        strip_control_chars(&group.key),
        group.phase.as_str().to_owned(),
        group
            .queue
            .map_or_else(|| "none".to_owned(), |queue| format!("{} wait, {} consume", queue.ready, queue.consumers)),
        group.workers.to_string(),
        group.wanted.to_string(),
        count(group.start as usize),
        if group.stop.is_empty() { "-".to_owned() } else { group.stop.join(" ") },
        group.reasons.join(", "),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::plan::QueueDepth;
    use crate::controller::status::GroupPhase;

    #[test]
    fn the_table_says_what_would_be_done_and_why() {
        let group = |key: &str, phase| GroupPlan {
            key: key.to_owned(),
            phase,
            queue: None,
            workers: 0,
            wanted: 0,
            start: 0,
            stop: Vec::new(),
            reasons: Vec::new(),
        };
        let mut cold = group("42", GroupPhase::Active);
        (cold.wanted, cold.start) = (1, 1);
        cold.reasons = vec!["the load needs 0".to_owned(), "raised to min = 1".to_owned()];
        let mut going = group("b\u{1b}[2J", GroupPhase::Deleting);
        (going.workers, going.stop) = (1, vec!["6f4dd4e7".to_owned()]);
        going.queue = Some(QueueDepth { ready: 0, consumers: 1 });
        going.reasons = vec!["the group is not needed".to_owned()];
        let mut plan = PoolPlan {
            pool: "core".to_owned(),
            broker: "amqp://mq:5672/%2f".to_owned(),
            controlled: PoolOwner::Nowhere,
            orphans: Some(2),
            dead_letters: Some(1),
            starts_workers: true,
            groups: vec![cold, going],
        };
        let text = render(&plan).replace(BOLD, "").replace(RESET, "");
        assert_eq!(text, include_str!("plan.txt"));
        (plan.groups, plan.orphans, plan.dead_letters) = (Vec::new(), None, None);
        let text = render(&plan);
        assert!(
            text.contains("exchanges and queues would be made") && text.contains("nobody would be started"),
            "{text}"
        );
    }
}
