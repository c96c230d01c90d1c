// A program with a handler of its own: `cargo run -- dev` serves it, and `cargo test` tests it.

use journeyman::handler::{Context, ExecuteError, PayloadHandler, PrepareError};
use schemars::JsonSchema;
use serde::Deserialize;

/// The payload of a task.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Greeting {
    /// Whom to greet.
    name: String,
}

struct Greet;

impl PayloadHandler for Greet {
    type Payload = Greeting;
    type Prepared = Greeting;

    fn payload_schema(&self) -> serde_json::Value {
        schemars::schema_for!(Greeting).into()
    }

    async fn prepare(&self, greeting: Greeting, _: &Context) -> Result<Greeting, PrepareError> {
        Ok(greeting)
    }

    async fn execute(&self, greeting: Greeting, context: &Context) -> Result<(), ExecuteError> {
        context.log().write_line(&format!("hello {}", greeting.name));
        Ok(())
    }
}

fn main() -> std::process::ExitCode {
    journeyman::main().handler("greet", Greet).run()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_greets() {
        let ended = journeyman::testing::run_one(Greet, serde_json::json!({"name": "world"})).await.unwrap();
        assert!(ended.is_completed(), "{ended:?}");
        assert!(ended.log.contains("hello world"), "{}", ended.log);
    }
}
