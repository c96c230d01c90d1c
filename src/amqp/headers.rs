//! Headers as others write them: the same text comes as a byte array, as a long string or as a short one, by which
//! library its author uses.
#![expect(clippy::wildcard_enum_match_arm, reason = "of the types that a header may have, these count")]

use std::borrow::Cow;

use lapin::types::{AMQPValue, FieldTable};

/// A header's text, of whatever type, where it is text in UTF-8.
#[must_use]
pub fn text<'a>(table: &'a FieldTable, name: &str) -> Option<&'a str> {
    match table.inner().get(name)? {
        AMQPValue::LongString(text) => std::str::from_utf8(text.as_bytes()).ok(),
        AMQPValue::ByteArray(bytes) => std::str::from_utf8(bytes.as_slice()).ok(),
        AMQPValue::ShortString(text) => Some(text.as_str()),
        _ => None,
    }
}

/// A header's whole number, of whatever width, where it is not negative.
#[must_use]
pub fn number(table: &FieldTable, name: &str) -> Option<u64> {
    match table.inner().get(name)? {
        AMQPValue::ShortShortInt(number) => (*number).try_into().ok(),
        AMQPValue::ShortShortUInt(number) => Some((*number).into()),
        AMQPValue::ShortInt(number) => (*number).try_into().ok(),
        AMQPValue::ShortUInt(number) => Some((*number).into()),
        AMQPValue::LongInt(number) => (*number).try_into().ok(),
        AMQPValue::LongUInt(number) => Some((*number).into()),
        AMQPValue::LongLongInt(number) => (*number).try_into().ok(),
        AMQPValue::Timestamp(number) => Some(*number),
        _ => None,
    }
}

/// Every header that can be written as text, in the order of their names: text, numbers, `true` and `false`. Tables, lists and
/// bytes that are no UTF-8 cannot.
pub fn text_entries(table: &FieldTable) -> impl Iterator<Item = (&str, Cow<'_, str>)> {
    table.inner().iter().filter_map(|(name, value)| {
        let written = text(table, name.as_str()).map(Cow::Borrowed).or_else(|| scalar_text(value).map(Cow::Owned))?;
        Some((name.as_str(), written))
    })
}

fn scalar_text(value: &AMQPValue) -> Option<String> {
    match value {
        AMQPValue::Boolean(value) => Some(value.to_string()),
        AMQPValue::ShortShortInt(number) => Some(number.to_string()),
        AMQPValue::ShortShortUInt(number) => Some(number.to_string()),
        AMQPValue::ShortInt(number) => Some(number.to_string()),
        AMQPValue::ShortUInt(number) => Some(number.to_string()),
        AMQPValue::LongInt(number) => Some(number.to_string()),
        AMQPValue::LongUInt(number) => Some(number.to_string()),
        AMQPValue::LongLongInt(number) => Some(number.to_string()),
        AMQPValue::Timestamp(number) => Some(number.to_string()),
        AMQPValue::Float(number) => Some(number.to_string()),
        AMQPValue::Double(number) => Some(number.to_string()),
        _ => None,
    }
}

/// About how many bytes they take on the wire: no less.
#[must_use]
pub fn wire_bytes(table: &FieldTable) -> usize {
    const NAME: usize = 1;
    table.inner().iter().map(|(name, value)| NAME + name.as_str().len() + value_wire_bytes(value)).sum()
}

fn value_wire_bytes(value: &AMQPValue) -> usize {
    // The type, and a length or the longest number.
    const HEAD: usize = 9;
    HEAD + match value {
        AMQPValue::LongString(text) => text.as_bytes().len(),
        AMQPValue::ByteArray(bytes) => bytes.as_slice().len(),
        AMQPValue::ShortString(text) => text.as_str().len(),
        AMQPValue::FieldTable(table) => wire_bytes(table),
        AMQPValue::FieldArray(values) => values.as_slice().iter().map(value_wire_bytes).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_from_each_type_that_it_comes_in_and_from_no_other() {
        let mut table = FieldTable::default();
        table.insert("x".into(), AMQPValue::ByteArray(b"/echo".to_vec().into()));
        table.insert("s".into(), AMQPValue::LongString("/echo".into()));
        table.insert("binary".into(), AMQPValue::ByteArray(vec![0xff, 0xfe].into()));
        table.insert("number".into(), AMQPValue::LongInt(7));
        table.insert("void".into(), AMQPValue::Void);
        assert_eq!((text(&table, "x"), text(&table, "s")), (Some("/echo"), Some("/echo")));
        for odd in ["binary", "number", "void", "missing"] {
            assert_eq!(text(&table, odd), None, "{odd}");
        }
        table.insert("half".into(), AMQPValue::Double(0.5));
        table.insert("yes".into(), AMQPValue::Boolean(true));
        table.insert("nested".into(), AMQPValue::FieldTable(FieldTable::default()));
        let texts: Vec<(&str, Cow<'_, str>)> = text_entries(&table).collect();
        let wanted = [("half", "0.5"), ("number", "7"), ("s", "/echo"), ("x", "/echo"), ("yes", "true")];
        assert_eq!(texts, wanted.map(|(name, text)| (name, text.into())));
    }

    #[test]
    fn headers_take_as_much_as_is_in_them() {
        let mut inner = FieldTable::default();
        inner.insert("name".into(), AMQPValue::LongString("x".repeat(100).as_str().into()));
        let mut table = FieldTable::default();
        table.insert(
            "a".into(),
            AMQPValue::FieldArray(vec![AMQPValue::FieldTable(inner), AMQPValue::Boolean(true)].into()),
        );
        assert_eq!(wire_bytes(&table), (2 + 9) + (9 + (5 + 9 + 100)) + 9);
    }

    #[test]
    fn a_number_is_read_in_every_width_and_never_below_zero() {
        let mut table = FieldTable::default();
        table.insert("a".into(), AMQPValue::ShortShortInt(1));
        table.insert("b".into(), AMQPValue::LongLongInt(2));
        table.insert("c".into(), AMQPValue::LongInt(-1));
        table.insert("d".into(), AMQPValue::LongString("3".into()));
        assert_eq!((number(&table, "a"), number(&table, "b")), (Some(1), Some(2)));
        assert_eq!((number(&table, "c"), number(&table, "d")), (None, None));
    }
}
