//! Pod templates: YAML with the expressions of Jinja. Each value is written as JSON, so none can change the structure.

use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, UndefinedBehavior, Value};
use serde::Serialize;

use super::yaml;
use journeyman_domain::limits::{POD_TEMPLATE_FUEL, POD_TEMPLATE_RECURSION_MAX};

const NAME: &str = "pod template";

pub struct PodTemplate(Environment<'static>);

impl PodTemplate {
    pub fn new(text: String) -> Result<Self, String> {
        let mut environment = Environment::new();
        environment.set_auto_escape_callback(|_| AutoEscape::Json);
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        environment.set_fuel(Some(POD_TEMPLATE_FUEL));
        environment.set_recursion_limit(POD_TEMPLATE_RECURSION_MAX);
        environment.add_template_owned(NAME, text).map_err(|error| error.to_string())?;
        Ok(Self(environment))
    }

    /// The pod with these values filled in. An error does not quote them.
    pub fn render(&self, values: impl Serialize) -> Result<serde_json::Value, String> {
        let template = self.0.get_template(NAME).map_err(|error| error.to_string())?;
        let text = template.render(Value::from(Serde(values))).map_err(|error| error.to_string())?;
        yaml::from_str(&text).map_err(|error| format!("it makes no pod: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rendered(text: &str, values: serde_json::Value) -> Result<serde_json::Value, String> {
        PodTemplate::new(text.to_owned())?.render(values)
    }

    #[test]
    fn no_value_changes_the_structure_of_a_pod() {
        let text = "spec:\n  image: {{ image }}\n  name: {{ 'x-' ~ image }}\n  args: {{ args }}\n";
        for image in ["a:1", "a\nspec: b", "\"}, {\"", "{{ 7 }}", "é'", "- yes", "null", "1"] {
            let pod = rendered(text, json!({ "image": image, "args": [1, "no", null] })).unwrap();
            let name = format!("x-{image}");
            assert_eq!(pod, json!({ "spec": { "image": image, "name": name, "args": [1, "no", null] } }));
        }
    }

    #[test]
    fn a_template_that_does_not_fit_is_refused_without_the_values() {
        for (text, words) in [
            ("a: {{ b.c }}", "undefined value"),
            ("a: {{ b", "syntax error"),
            ("a: [{{ secret }}", "it makes no pod"),
            ("{% for i in range(100000) %}{{ secret }}{% endfor %}", "fuel"),
        ] {
            let error = rendered(text, json!({ "secret": "canary", "b": {} })).unwrap_err();
            assert!(error.contains(words) && !error.contains("canary"), "{error}");
        }
    }
}
