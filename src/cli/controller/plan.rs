//! `journeyman controller plan`: prints what another configuration would start and stop.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::{controller_socket, no_pools};
use crate::cli::config_args::{ConfigArgs, NoFlags};
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::output::{self, Format};
use crate::cli::table::{BOLD, RESET, strip_control_chars, table};
use crate::config::Environment;
use crate::control::client::ControlClient;
use crate::controller::plan::{self, GroupPlan, PoolPlan};
use crate::controller::status::Role;
use crate::host::clock::Clock;

/// `journeyman controller plan`
#[derive(Debug, Args)]
pub(super) struct PlanArgs {
    /// Configuration file of the controller
    #[arg(long, short, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
    /// Output format
    #[arg(long, short, value_enum, default_value_t = Format::Table)]
    output: Format,
}

pub(super) async fn run(arguments: PlanArgs, environment: &Environment) -> ExitResult {
    let config = ConfigArgs::<NoFlags>::from_file(arguments.config).load(environment)?.config;
    let Some(socket) = controller_socket(&config) else { return Err(no_pools()) };
    let client = ControlClient::new(&socket)?;
    let status = client.controller_status().await?;
    let now = Clock::boot().now();
    let mut plans = Vec::new();
    for (name, pool) in &config.pool {
        let Some(seen) = status.pools.iter().find(|pool| pool.name == *name) else {
            return Err(Failure::new(Exit::Failed, format!("[pool.{name}]: the running controller has no such pool")));
        };
        if seen.role != Role::Active {
            let role = seen.role.as_str();
            return Err(Failure::new(
                Exit::Failed,
                format!("[pool.{name}]: the running controller is {role}, not active"),
            ));
        }
        plans.push(plan::plan(seen, pool, now));
    }
    output::show(&plans, arguments.output, |plans| plans.iter().map(render).collect::<Vec<_>>().join("\n"))?;
    Ok(Exit::Success)
}

fn render(plan: &PoolPlan) -> String {
    let mut out = format!("pool {BOLD}{}{RESET}\n", strip_control_chars(&plan.pool));
    let mut line = |text: &str| {
        // Writing to a String cannot fail.
        _ = writeln!(out, "  {text}");
    };
    if plan.orphans_held > 0 {
        line(&format!("orphans held, not included: {}", plan.orphans_held));
    }
    if !plan.starts_workers {
        line("workers are not started by this controller");
    }
    let starts: u32 = plan.groups.iter().map(|group| group.start).sum();
    let stops: usize = plan.groups.iter().map(|group| group.stop.len()).sum();
    line(&format!("workers to start: {starts}, to stop: {stops}"));
    if !plan.groups.is_empty() {
        let head = ["KEY", "WORKERS", "WANTED", "START", "STOP", "WHY"];
        out.push_str(&table(head, plan.groups.iter().map(group_row)));
    }
    out
}

fn group_row(group: &GroupPlan) -> Vec<String> {
    let or_dash = |text: String| if text.is_empty() || text == "0" { "-".to_owned() } else { text };
    vec![
        strip_control_chars(&group.key),
        group.workers.to_string(),
        group.wanted.to_string(),
        or_dash(group.start.to_string()),
        or_dash(group.stop.join(" ")),
        group.reasons.join(", "),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_the_workers_to_start_and_to_stop() {
        let group = |key: &str| GroupPlan {
            key: key.to_owned(),
            workers: 0,
            wanted: 0,
            start: 0,
            stop: Vec::new(),
            reasons: Vec::new(),
        };
        let mut cold = group("42");
        (cold.wanted, cold.start) = (1, 1);
        cold.reasons = vec!["the load needs 0".to_owned(), "raised to min = 1".to_owned()];
        let mut deleting = group("b\u{1b}[2J");
        (deleting.workers, deleting.stop) = (1, vec!["6f4dd4e7".to_owned()]);
        deleting.reasons = vec!["the group is not needed".to_owned()];
        let groups = vec![cold, deleting];
        let plan = PoolPlan { pool: "core".to_owned(), orphans_held: 2, starts_workers: true, groups };
        let text = render(&plan).replace(BOLD, "").replace(RESET, "");
        assert_eq!(text, include_str!("plan.txt"));
    }
}
