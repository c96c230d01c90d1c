//! Collects what does not agree in values that are valid by themselves.

use std::collections::BTreeMap;

use super::key::join;
use super::problem::{Code, Problem, ValueOrigin, suggest};

pub struct Rules<'a> {
    pub origins: &'a BTreeMap<String, ValueOrigin>,
    pub problems: &'a mut Vec<Problem>,
}

impl Rules<'_> {
    /// True if a key has another value than the built-in one.
    pub fn is_set(&self, section: &str, name: &str) -> bool {
        self.origins.contains_key(&join(section, name))
    }

    /// Checks that the section exists to which the value of a key refers.
    pub fn reference<'k>(
        &mut self,
        key: &str,
        name: &str,
        section: &str,
        value: &str,
        mut known: impl Iterator<Item = &'k str> + Clone,
    ) {
        if known.clone().any(|known| known == value) {
            return;
        }
        let help = suggest(value, &mut known).map_or_else(String::new, |near| format!("did you mean `{near}`?"));
        self.error(key, name, format!("there is no [{section}.{value}]"), &help);
    }

    /// Adds a problem of a key, or of the section if `name` is empty.
    pub fn error(&mut self, section: &str, name: &str, message: String, help: &str) {
        let help = Some(help.to_owned()).filter(|help| !help.is_empty());
        self.problems.push(Problem { help, ..Problem::error(Code::Conflict, message, self.origin(section, name)) });
    }

    pub fn warning(&mut self, section: &str, name: &str, message: String, help: &str) {
        self.problems.push(Problem::warning(Code::Conflict, message, self.origin(section, name), help.to_owned()));
    }

    fn origin(&self, section: &str, name: &str) -> ValueOrigin {
        self.origins.get(&join(section, name)).cloned().unwrap_or(ValueOrigin::Default)
    }
}
