//! Names on the wire: of queues, exchanges, keys, content types, headers. AMQP has room for 255 bytes of one, and lapin panics
//! at more, so whatever was not written here comes by this.

use lapin::types::ShortString;

use crate::limits::AMQP_NAME_BYTES_MAX;

/// A name is longer than AMQP has room for. Holds nothing of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} has {bytes} bytes, and AMQP has room for {AMQP_NAME_BYTES_MAX}")]
pub struct NameTooLong {
    /// What it is the name of.
    pub what: &'static str,
    /// What it has.
    pub bytes: usize,
}

/// Takes a name; `what` says of what, for the error.
///
/// # Errors
///
/// Where it is too long.
pub fn to_short_string(what: &'static str, name: &str) -> Result<ShortString, NameTooLong> {
    ShortString::try_new(name).map_err(|_| NameTooLong { what, bytes: name.len() })
}

/// The same for a name that may be too long and is not needed then.
#[must_use]
pub fn to_short_string_or_none(name: &str) -> Option<ShortString> {
    ShortString::try_new(name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_255_bytes_is_one_and_a_longer_one_is_refused_without_being_shown() {
        let longest = "é".repeat(127) + "x";
        assert_eq!(to_short_string("the key", &longest).map(|name| name.as_str().to_owned()), Ok(longest.clone()));
        let error = to_short_string("the key", &format!("{longest}y")).unwrap_err();
        assert_eq!(error.to_string(), "the key has 256 bytes, and AMQP has room for 255");
        assert_eq!(to_short_string_or_none(&"y".repeat(256)), None);
    }
}
