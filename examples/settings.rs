// A kind of handlers with settings: `[handler.NAME] kind = "shout"` in the configuration of `cargo run --example settings -- worker`.

use journeyman::handler::{Context, ExecuteError, PayloadHandler, PrepareError};
use serde::Deserialize;

/// The section of a handler.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    /// What each line ends with.
    ending: String,
    #[serde(default)]
    times: u16,
}

struct Shout(Settings);

impl PayloadHandler for Shout {
    type Payload = String;
    type Prepared = String;

    fn payload_schema(&self) -> serde_json::Value {
        serde_json::json!({"type": "string"})
    }

    async fn prepare(&self, text: String, _: &Context) -> Result<String, PrepareError> {
        Ok(text.to_uppercase())
    }

    async fn execute(&self, text: String, context: &Context) -> Result<(), ExecuteError> {
        for _ in 0..self.0.times {
            context.log().write_line(&format!("{text}{}", self.0.ending));
        }
        Ok(())
    }
}

fn main() -> std::process::ExitCode {
    let make = |settings: Settings| {
        if settings.times > 100 { Err("`times` is at most 100") } else { Ok(Shout(settings)) }
    };
    journeyman::main().handler_with("shout", make).run()
}
