//! JSON Schemas that are committed beside the types they describe. The development profile derives them, because `cfg(test)`
//! does not reach the other crates; the release profile does not, because the derived code would be a large part of the program.

use serde_json::Value;

/// Parses a committed schema.
#[expect(clippy::expect_used, reason = "a test compares each file with its type")]
pub(crate) fn parse(file: &str) -> Value {
    serde_json::from_slice(file.as_bytes()).expect("a committed schema is JSON")
}

#[cfg(test)]
#[cfg(debug_assertions)]
mod tests {
    use schemars::generate::SchemaSettings;
    use schemars::{Schema, schema_for};

    use crate::config::Config;
    use crate::handler::command::CommandPayload;
    use crate::task::Request;

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
        compare("handler/command.schema.json", &schema_for!(CommandPayload));
        compare("task/request.schema.json", &schema_for!(Request));
        compare("handler/kubernetes/pod.schema.json", &schema_for!(crate::handler::kubernetes::PodPayload));
    }
}
