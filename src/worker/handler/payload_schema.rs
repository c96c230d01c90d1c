//! Validates payloads against a JSON Schema.
//!
//! References to other documents are not followed. A violation never quotes the payload, which may contain secrets while
//! the task's log may be public.

use jsonschema::ValidationError;
use jsonschema::error::ValidationErrorKind;
use serde_json::Value;

use journeyman_domain::limits::{VIOLATION_BYTES_MAX, VIOLATIONS_MAX};

use super::log::{printable, truncate_at_char};
use super::{PrepareError, PrepareFailure};

#[derive(Debug)]
pub struct PayloadSchema {
    schema: Value,
    validator: Result<jsonschema::Validator, String>,
}

/// Says what is wrong: with each alternative, where the schema has several.
fn describe(error: &ValidationError<'_>) -> String {
    let (ValidationErrorKind::AnyOf { context } | ValidationErrorKind::OneOfNotValid { context }) = error.kind() else {
        return format!("payload{}: {}", error.instance_path().as_str(), error.masked());
    };
    let alternatives: Vec<String> = context.iter().flatten().map(describe).collect();
    alternatives.join("; or ")
}

impl PayloadSchema {
    pub fn new(schema: Value) -> Self {
        let validator = jsonschema::validator_for(&schema).map_err(|error| error.to_string());
        Self { schema, validator }
    }

    pub const fn schema(&self) -> &Value {
        &self.schema
    }

    /// Why the schema is invalid. Every payload is rejected then.
    pub fn error(&self) -> Option<&str> {
        self.validator.as_ref().err().map(String::as_str)
    }

    /// Lists at most [`VIOLATIONS_MAX`] violations as `path: message`.
    pub fn validate(&self, payload: &Value) -> Result<(), PrepareError> {
        let validator = self.validator.as_ref().map_err(|error| {
            PrepareError::new(PrepareFailure::Internal, format!("invalid payload schema of this handler: {error}"))
        })?;
        let describe = |error: ValidationError<'_>| {
            let mut violation = printable(&describe(&error));
            truncate_at_char(&mut violation, VIOLATION_BYTES_MAX);
            violation
        };
        let violations: Vec<String> = validator.iter_errors(payload).take(VIOLATIONS_MAX).map(describe).collect();
        if violations.is_empty() { Ok(()) } else { Err(PrepareError::malformed(violations)) }
    }
}
