//! Compares each committed schema with its type.

use schemars::generate::SchemaSettings;
use schemars::{Schema, schema_for};

use super::Config;
use journeyman_worker::handler::command::CommandPayload;
use journeyman_worker::task::Request;

fn compare(file: &str, derived: &Schema) {
    let path = format!("{}/src/{file}", env!("CARGO_MANIFEST_DIR"));
    let derived = format!("{}\n", serde_json::to_string_pretty(derived).unwrap());
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &derived).unwrap();
    }
    assert!(std::fs::read_to_string(&path).unwrap() == derived, "{file} differs; UPDATE_GOLDEN=1 writes it anew");
}

#[test]
fn the_schema_of_the_configuration_is_that_of_its_type() {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    compare("config/config.schema.json", &settings.into_generator().into_root_schema_for::<Config>());
}

#[test]
fn the_schemas_of_payloads_are_those_of_their_types() {
    compare("worker/handler/command.schema.json", &schema_for!(CommandPayload));
    compare(
        "worker/handler/containers/container.schema.json",
        &schema_for!(journeyman_worker::handler::containers::payload::ContainerPayload),
    );
    compare("worker/task/request.schema.json", &schema_for!(Request));
    compare(
        "worker/handler/kubernetes/pod.schema.json",
        &schema_for!(journeyman_worker::handler::kubernetes::PodPayload),
    );
}
