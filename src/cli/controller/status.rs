//! `journeyman controller status`: prints the status of a controller.

use crate::cli::control::{StatusArgs, print_repeatedly};
use crate::cli::exit::ExitResult;
use crate::cli::output::Format;
use crate::console::{controller, text};
use journeyman_platform::settings::Environment;

pub(super) async fn run(StatusArgs { how, watch }: StatusArgs, environment: &Environment) -> ExitResult {
    let client = how.target.controller_client(environment)?;
    print_repeatedly(watch.as_ref(), async || {
        let status = client.controller_status().await?;
        Ok(match how.output {
            Format::Json => format!("{:#}\n", serde_json::json!(status)),
            Format::Table => text::report(&controller::report(&status)),
        })
    })
    .await
}
