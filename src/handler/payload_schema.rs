//! Validates payloads against a JSON Schema.
//!
//! References to other documents are not followed. A violation never quotes the payload, which may contain secrets while
//! the task's log may be public.

use serde_json::Value;

use crate::limits::{VIOLATION_BYTES_MAX, VIOLATIONS_MAX};

use super::PrepareError;
use super::log::{printable, truncate_at_char};

#[derive(Debug)]
pub struct PayloadSchema {
    schema: Value,
    validator: jsonschema::Validator,
}

#[derive(Debug, Clone, thiserror::Error)]
#[error("invalid payload schema of this handler: {message}")]
pub struct InvalidSchema {
    pub schema: Value,
    message: String,
}

impl PayloadSchema {
    pub fn new(schema: Value) -> Result<Self, InvalidSchema> {
        match jsonschema::validator_for(&schema) {
            Ok(validator) => Ok(Self { schema, validator }),
            Err(error) => Err(InvalidSchema { message: error.to_string(), schema }),
        }
    }

    #[must_use]
    pub const fn schema(&self) -> &Value {
        &self.schema
    }

    /// Lists at most [`VIOLATIONS_MAX`] violations as `path: message`.
    pub fn validate(&self, payload: &Value) -> Result<(), PrepareError> {
        if self.validator.is_valid(payload) {
            return Ok(());
        }
        let mut violations: Vec<String> = Vec::new();
        for error in self.validator.iter_errors(payload) {
            if violations.len() == VIOLATIONS_MAX {
                violations.push(format!("more violations follow; only the first {VIOLATIONS_MAX} are listed"));
                break;
            }
            let path = error.instance_path().as_str();
            let mut violation = printable(&format!("payload{path}: {}", error.masked()));
            truncate_at_char(&mut violation, VIOLATION_BYTES_MAX);
            violations.push(violation);
        }
        if violations.is_empty() { Ok(()) } else { Err(PrepareError::malformed(violations)) }
    }
}
