//! Checks payloads against a JSON Schema that is compiled once, and words what does not fit for a task's author.
//!
//! References to other documents are not followed. Values of the payload are never repeated: a task's log may be public,
//! and a payload may hold secrets.

use serde_json::Value;

use crate::limits::{VIOLATION_BYTES_MAX, VIOLATIONS_MAX};

use super::PrepareError;
use super::log::{printable, truncate_at_char};

/// A schema ready to be checked against.
#[derive(Debug)]
pub struct PayloadSchema {
    schema: Value,
    validator: jsonschema::Validator,
}

/// A schema that is not one.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the payload schema of this handler is not valid: {message}")]
pub struct InvalidSchema {
    /// The schema.
    pub schema: Value,
    message: String,
}

impl PayloadSchema {
    /// Compiles a schema.
    ///
    /// # Errors
    ///
    /// Where it is not a valid schema, or refers to another document.
    pub fn new(schema: Value) -> Result<Self, InvalidSchema> {
        match jsonschema::validator_for(&schema) {
            Ok(validator) => Ok(Self { schema, validator }),
            Err(error) => Err(InvalidSchema { message: error.to_string(), schema }),
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
    /// [`PrepareError::Malformed`] with one sentence for each violation, `path: what is wrong`, at most
    /// [`VIOLATIONS_MAX`] of them and a line that there are more.
    pub fn validate(&self, payload: &Value) -> Result<(), PrepareError> {
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
            truncate_at_char(&mut sentence, VIOLATION_BYTES_MAX);
            violations.push(sentence);
        }
        if violations.is_empty() { Ok(()) } else { Err(PrepareError::Malformed(violations)) }
    }
}
