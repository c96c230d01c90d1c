//! `journeyman setup`: prepares this host for a worker.

use clap::{Args, Subcommand};
use tokio::process::Command;

use super::exit::{Exit, ExitResult, Failure};
use super::output;
use journeyman_platform::host::run_program;

#[derive(Debug, Subcommand)]
pub(super) enum SetupCommand {
    /// Create users that tasks run as, one for each slot, and print their key of the configuration
    Users(SetupUsersArgs),
}

#[derive(Debug, Args)]
pub(super) struct SetupUsersArgs {
    /// How many users there have to be
    #[arg(value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    count: u16,
    /// What their names begin with; a number follows
    #[arg(long, default_value = "journeyman-task-")]
    prefix: String,
}

/// The exit status of `useradd` for a user that is there.
const USER_EXISTS: i32 = 9;

pub(super) async fn run(command: SetupCommand) -> ExitResult {
    let SetupCommand::Users(SetupUsersArgs { count, prefix }) = command;
    let names: Vec<String> = (1..=count).map(|number| format!("{prefix}{number}")).collect();
    for name in &names {
        let mut command = Command::new("useradd");
        // Without a home and a password: their home is the directory of each task.
        command.args([
            "--system",
            "--user-group",
            "--no-create-home",
            "--home-dir",
            "/nonexistent",
            "--shell",
            "/bin/sh",
            name,
        ]);
        let created = run_program::run(command, b"").await;
        let output = created.map_err(|error| Failure::from_error(Exit::HostUnusable, &error))?;
        if output.status.code() == Some(USER_EXISTS) {
            continue;
        }
        if !output.status.success() {
            let text = format!("cannot create user {name}: {}; are you root?", output.first_error());
            return Err(Failure::new(Exit::HostUnusable, text));
        }
        output::print_stderr(&format!("created user {name}"));
    }
    let names: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
    output::print(&format!("[host]\ntask_users = [{}]\n", names.join(", ")))?;
    Ok(Exit::Success)
}
