//! Runs a helper program of a driver to its end.

use tokio::process::Command;

use super::DriverError;
use super::subprocess::inherited_variables;
use journeyman_platform::host::run_program;
pub(super) use journeyman_platform::host::run_program::ProgramOutput;

pub(super) async fn run(argv: &[String], input: &[u8]) -> Result<ProgramOutput, DriverError> {
    let Some((program, arguments)) = argv.split_first() else {
        return Err(DriverError("no command is configured".to_owned()));
    };
    let mut command = Command::new(program);
    command.args(arguments).env_clear().envs(inherited_variables());
    Ok(run_program::run(command, input).await?)
}

pub(super) async fn run_checked(
    argv: &[String],
    input: &[u8],
    error: fn(&ProgramOutput) -> String,
) -> Result<String, DriverError> {
    let ran = run(argv, input).await?;
    if ran.status.success() { Ok(ran.stdout) } else { Err(DriverError(error(&ran))) }
}
