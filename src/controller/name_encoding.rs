//! Encodes any text in the alphabet of queue names (`%3D`) or of object names (`-3d`), and decodes it.

use sha2::{Digest as _, Sha256};

pub(super) struct NameEncoding {
    escape: u8,
    digits: &'static [u8; 16],
    is_plain: fn(u8) -> bool,
}

pub(super) const QUEUE_NAME: NameEncoding =
    NameEncoding { escape: b'%', digits: b"0123456789ABCDEF", is_plain: |byte| byte.is_ascii_alphanumeric() };

pub(super) const OBJECT_NAME: NameEncoding = NameEncoding {
    escape: b'-',
    digits: b"0123456789abcdef",
    is_plain: |byte| byte.is_ascii_lowercase() || byte.is_ascii_digit(),
};

impl NameEncoding {
    pub(super) fn encode(&self, text: &str) -> String {
        let mut written = String::with_capacity(text.len());
        for byte in text.bytes() {
            if (self.is_plain)(byte) {
                written.push(char::from(byte));
            } else {
                let digit = |half: u8| char::from(self.digits[usize::from(half)]);
                written.extend([char::from(self.escape), digit(byte >> 4), digit(byte & 15)]);
            }
        }
        written
    }

    pub(super) fn decode(&self, text: &str) -> Option<Vec<u8>> {
        let (mut bytes, mut read) = (text.bytes(), Vec::with_capacity(text.len()));
        while let Some(byte) = bytes.next() {
            if byte == self.escape {
                read.push(hex_digit(bytes.next()?)? << 4 | hex_digit(bytes.next()?)?);
            } else if (self.is_plain)(byte) {
                read.push(byte);
            } else {
                return None;
            }
        }
        Some(read)
    }
}

fn hex_digit(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|half| u8::try_from(half).ok())
}

const PREFIX: &str = "jm";
const SEPARATOR: &str = "--";
const EMPTY: &str = "-z";
const HASH: &str = "-x";
const HASH_DIGITS: usize = 20;

pub(super) fn object_name(parts: &[&str], most: usize) -> String {
    let mut name = PREFIX.to_owned();
    for part in parts {
        name.push_str(SEPARATOR);
        name.push_str(&if part.is_empty() { EMPTY.to_owned() } else { OBJECT_NAME.encode(part) });
    }
    if name.len() <= most {
        return name;
    }
    let hash = hex::encode(Sha256::digest(name.as_bytes()));
    name.truncate(most.saturating_sub(HASH.len() + HASH_DIGITS));
    // No dash before the hash, which would read as an escape.
    name.truncate(name.trim_end_matches('-').len());
    name.push_str(HASH);
    name.push_str(&hash[..HASH_DIGITS]);
    name
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn is_label(name: &str) -> bool {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        name.bytes().all(|byte| plain(byte) || byte == b'-')
            && name.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase())
            && name.bytes().next_back().is_some_and(plain)
    }

    #[test]
    fn names_are_those_that_people_can_read() {
        assert_eq!(object_name(&["core", "infra=42"], 63), "jm--core--infra-3d42");
        assert_eq!(object_name(&["core", "", "Ü"], 63), "jm--core---z---c3-9c");
        assert_eq!(object_name(&["core", "-"], 63), "jm--core---2d");
        let long = object_name(&["core", &"k".repeat(200)], 63);
        assert_eq!((long.len(), &long[..43]), (63, &*format!("jm--core--{}-x", "k".repeat(31))));
    }

    #[test]
    fn every_byte_that_can_be_in_a_key_is_written_and_read() {
        for code in (0..=0x2ff_u32).filter_map(char::from_u32) {
            let text = format!("{code}a{code}");
            for form in [QUEUE_NAME, OBJECT_NAME] {
                assert_eq!(form.decode(&form.encode(&text)).as_deref(), Some(text.as_bytes()));
            }
        }
    }

    proptest! {
        #[test]
        fn different_parts_have_different_names(
            one in prop::collection::vec("([a-z-]|-x|z|\\PC){0,12}", 1..4),
            other in prop::collection::vec("([a-z-]|-x|z|\\PC){0,12}", 1..4),
            most in 32_usize..80,
        ) {
            let named = |parts: &[String], most| object_name(&parts.iter().map(String::as_str).collect::<Vec<_>>(), most);
            let names: BTreeSet<String> = [named(&one, most), named(&other, most)].into();
            prop_assert_eq!(names.len(), if one == other { 1 } else { 2 });
            for name in names {
                prop_assert!(is_label(&name) && name.len() <= most, "{name}");
            }
        }

    }
}
