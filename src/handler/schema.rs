//! Checks payloads against a JSON Schema that is compiled once, and words what does not fit for a task's author.
//!
//! References to other documents are not followed. Values of the payload are never repeated: a task's log may be public,
//! and a payload may hold secrets.

use serde_json::Value;

use crate::limits::{VIOLATION_BYTES_MAX, VIOLATIONS_MAX};

use super::NotPrepared;
use super::log::{cut, printable};

/// A schema ready to be checked against.
#[derive(Debug)]
pub struct Checked {
    schema: Value,
    validator: jsonschema::Validator,
}

/// A schema that is not one.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the payload schema of this handler is not valid: {what}")]
pub struct Unusable {
    /// The schema.
    pub schema: Value,
    what: String,
}

impl Checked {
    /// Compiles a schema.
    ///
    /// # Errors
    ///
    /// Where it is not a valid schema, or refers to another document.
    pub fn new(schema: Value) -> Result<Self, Unusable> {
        match jsonschema::validator_for(&schema) {
            Ok(validator) => Ok(Self { schema, validator }),
            Err(error) => Err(Unusable { what: error.to_string(), schema }),
        }
    }

    /// The schema as it was given.
    #[must_use]
    pub const fn schema(&self) -> &Value {
        &self.schema
    }

    /// Checks a payload.
    ///
    /// # Errors
    ///
    /// [`NotPrepared::Malformed`] with one sentence for each violation, `path: what is wrong`, at most
    /// [`VIOLATIONS_MAX`] of them and a line that there are more.
    pub fn check(&self, payload: &Value) -> Result<(), NotPrepared> {
        if self.validator.is_valid(payload) {
            return Ok(());
        }
        let mut violations: Vec<String> = Vec::new();
        for error in self.validator.iter_errors(payload) {
            if violations.len() == VIOLATIONS_MAX {
                violations.push("there are more violations; these are the first".to_owned());
                break;
            }
            let path = error.instance_path().as_str();
            let mut sentence = printable(&format!("payload{path}: {}", error.masked()));
            cut(&mut sentence, VIOLATION_BYTES_MAX);
            violations.push(sentence);
        }
        if violations.is_empty() { Ok(()) } else { Err(NotPrepared::Malformed(violations)) }
    }
}
