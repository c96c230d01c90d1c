//! Names on the wire: queues, exchanges, keys, content types, headers. AMQP limits them to 255 bytes, and lapin panics on longer
//! ones, so every name that is not a constant passes through here.

use lapin::types::ShortString;

use journeyman_domain::limits::AMQP_NAME_BYTES_MAX;

/// A name is longer than AMQP allows. Holds nothing of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} has {bytes} bytes, and AMQP has room for {AMQP_NAME_BYTES_MAX}")]
pub struct NameTooLong {
    /// The kind of name.
    pub what: &'static str,
    /// Its length.
    pub bytes: usize,
}

/// Converts a name; `what` is the kind of name, for the error.
///
/// # Errors
///
/// [`NameTooLong`].
pub fn to_short_string(what: &'static str, name: &str) -> Result<ShortString, NameTooLong> {
    ShortString::try_new(name).map_err(|_| NameTooLong { what, bytes: name.len() })
}

/// Converts a name that can be left out.
pub fn to_short_string_or_none(name: &str) -> Option<ShortString> {
    ShortString::try_new(name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_255_bytes_is_accepted_and_a_longer_one_refused_without_showing_it() {
        let longest = "é".repeat(127) + "x";
        assert_eq!(to_short_string("the key", &longest).map(|name| name.as_str().to_owned()), Ok(longest.clone()));
        let error = to_short_string("the key", &format!("{longest}y")).unwrap_err();
        assert_eq!(error.to_string(), "the key has 256 bytes, and AMQP has room for 255");
        assert_eq!(to_short_string_or_none(&"y".repeat(256)), None);
    }
}
