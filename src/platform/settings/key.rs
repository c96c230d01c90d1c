//! Names of keys, in files and as variables.

use super::problem::ValueOrigin;

/// Prefix of variables that set keys.
pub const PREFIX: &str = "JOURNEYMAN__";

/// A value that a variable or a flag sets.
#[derive(Debug, Clone)]
pub struct Setting {
    pub(crate) path: Vec<String>,
    /// It becomes a number, a boolean or a list where the key needs one.
    pub(crate) text: String,
    pub(crate) origin: ValueOrigin,
}

impl Setting {
    /// For a dotted key. `flag` is the flag as it was written.
    pub fn of_flag(flag: String, key: &str, text: &str) -> Self {
        let path = key.split('.').map(str::to_owned).collect();
        Self { path, text: text.to_owned(), origin: ValueOrigin::Flag(flag) }
    }
}

pub const NAME_EXPECTED: &str = "letters, digits, `.`, `/`, `_` and `-`, at most 64, without `__`";
pub const VARIABLE_EXPECTED: &str = "letters, digits, `.`, `_` and `-`, at most 128, not starting with a digit";

pub fn is_variable(name: &str) -> bool {
    let is_clean = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    is_clean && name.len() <= 128 && name.starts_with(|first: char| !first.is_ascii_digit())
}

/// Whether a name can be part of a key, of a variable's name and of a log field.
pub fn is_name(name: &str) -> bool {
    let is_clean = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte));
    is_clean && !name.is_empty() && name.len() <= 64 && !name.contains("__")
}

pub fn join(key: &str, name: &str) -> String {
    match (key.is_empty(), name.is_empty()) {
        (true, _) => name.to_owned(),
        (_, true) => key.to_owned(),
        (false, false) => format!("{key}.{name}"),
    }
}

/// A key as environment variables spell it.
pub(crate) fn shout(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}

/// The variable that sets a key, such as `JOURNEYMAN__WORKER__CAPACITY` for `worker.capacity`.
pub fn variable(key: &str) -> String {
    format!("{PREFIX}{}", shout(&key.replace('.', "__")))
}
