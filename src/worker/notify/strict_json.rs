//! Finds in valid JSON what parsers of receivers refuse.

use journeyman_domain::limits::NOTIFIER_NESTING_MAX;

/// What is refused, and the byte at which it begins.
pub(super) fn find_refused(json: &str) -> Option<(&'static str, usize)> {
    let (bytes, mut at, mut depth) = (json.as_bytes(), 0, 0_usize);
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'[' | b'{' if depth >= NOTIFIER_NESTING_MAX => return Some(("values that nest too deep", at)),
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            b'"' => {
                at = match end_of_string(bytes, at + 1) {
                    Ok(end) => end,
                    Err(escape) => return Some(("half of a surrogate pair", escape)),
                }
            }
            b'-' | b'0'..=b'9' => {
                let is_part = |byte: &u8| matches!(byte, b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9');
                let length = bytes.iter().skip(at).take_while(|byte| is_part(byte)).count();
                let number = json.get(at..at + length).and_then(|number| number.parse::<f64>().ok());
                if !number.is_some_and(f64::is_finite) {
                    return Some(("a number that is too large", at));
                }
                at += length;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// Where the closing quote is; an error has the place of an escape.
fn end_of_string(bytes: &[u8], mut at: usize) -> Result<usize, usize> {
    loop {
        match (bytes.get(at), bytes.get(at + 1)) {
            (None | Some(b'"'), _) => return Ok(at),
            (Some(b'\\'), Some(b'u')) => {
                at = match (unit(bytes, at), unit(bytes, at + 6)) {
                    (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => at + 12,
                    (Some(0xd800..=0xdfff), _) => return Err(at),
                    _ => at + 6,
                }
            }
            (Some(b'\\'), _) => at += 2,
            _ => at += 1,
        }
    }
}

/// The unit of UTF-16 that is escaped here.
fn unit(bytes: &[u8], at: usize) -> Option<u16> {
    let digits = bytes.get(at..at + 6)?.strip_prefix(b"\\u")?;
    u16::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f9_what_other_parsers_refuse_is_found_with_its_place() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        for (json, expected) in [
            (r#"{"a": "\ud83d\ude00 \\ud800", "b": [1e308, -0.5E+3, 0]}"#, None),
            (r#""\ud800""#, Some(("half of a surrogate pair", 1))),
            (r#"{"\udc00x": 1}"#, Some(("half of a surrogate pair", 2))),
            (r#"["\\\"", "\ud83d\u0041"]"#, Some(("half of a surrogate pair", 10))),
            (r#""\ud83d"#, Some(("half of a surrogate pair", 1))),
            ("[1, -1e999999]", Some(("a number that is too large", 4))),
            (&nested(NOTIFIER_NESTING_MAX), None),
            (&nested(NOTIFIER_NESTING_MAX + 1), Some(("values that nest too deep", NOTIFIER_NESTING_MAX))),
            (&format!("[{}]", vec!["[]"; 100].join(",")), None),
        ] {
            assert_eq!(find_refused(json), expected, "{json}");
        }
    }
}
