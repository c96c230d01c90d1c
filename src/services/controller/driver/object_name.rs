//! Names of units, containers and cluster objects from any text: `jm--core--infra-3d42`.

use sha2::{Digest as _, Sha256};

const PREFIX: &str = "jm";
const SEPARATOR: &str = "--";
const EMPTY: &str = "-z";
const HASH: &str = "-x";
const HASH_DIGITS: usize = 20;

pub(super) fn object_name(parts: &[&str], most: usize) -> String {
    let mut name = PREFIX.to_owned();
    for part in parts {
        name.push_str(SEPARATOR);
        name.push_str(&if part.is_empty() { EMPTY.to_owned() } else { encode(part) });
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

fn encode(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let encode = |byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("-{byte:02x}") };
    text.bytes().map(encode).collect()
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
