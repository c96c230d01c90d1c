use journeyman::handler::{Context, ExecuteError, PayloadHandler, PrepareError, erase};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;

use crate::handler::bench::Bench;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Greeting {
    name: String,
    #[serde(default)]
    #[schemars(range(max = 3))]
    times: u8,
}

struct Greet;

impl PayloadHandler for Greet {
    type Payload = Greeting;
    type Prepared = Greeting;

    fn payload_schema(&self) -> serde_json::Value {
        schemars::schema_for!(Greeting).into()
    }

    async fn prepare(&self, payload: Greeting, _: &Context) -> Result<Greeting, PrepareError> {
        Ok(payload)
    }

    async fn execute(&self, greeting: Greeting, context: &Context) -> Result<(), ExecuteError> {
        for _ in 0..=greeting.times {
            context.log().write_line(&format!("hello {}", greeting.name));
        }
        Ok(())
    }
}

#[tokio::test]
async fn a_valid_payload_is_prepared_and_executed() {
    let bench = Bench::new();
    bench.run(&*erase(Greet), json!({"name": "you", "times": 1})).await.completed();
    assert_eq!(bench.log(), "hello you\nhello you\n");
}

#[tokio::test]
async fn every_violation_is_listed_with_its_path_and_without_the_value() {
    let bench = Bench::new();
    let sentences =
        bench.run(&*erase(Greet), json!({"name": ["hunter2"], "times": 9, "nmae": "hunter2"})).await.malformed();
    let all = sentences.join("\n");
    assert_eq!(sentences.len(), 3, "{all}");
    assert!(sentences.iter().any(|line| line.starts_with("payload/name: ")), "{all}");
    assert!(sentences.iter().any(|line| line.starts_with("payload/times: ")), "{all}");
    assert!(all.contains("nmae"), "{all}");
    assert!(!all.contains("hunter2"), "{all}");
}

#[tokio::test]
async fn the_number_of_listed_violations_is_limited() {
    let handler = crate::handler::commands::handler();
    let payload = json!({"maxRunTime": 1, "command": vec![json!(1); 5000]});
    let sentences = Bench::new().run(&*handler, payload).await.malformed();
    assert_eq!(sentences.len(), 20);
    assert!(sentences.iter().all(|line| line.len() <= 500));
}
