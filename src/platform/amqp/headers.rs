//! Reads headers of any AMQP type: client libraries send the same text as byte array, long string or short string.
#![expect(clippy::wildcard_enum_match_arm, reason = "the other header types have no such value")]

use std::borrow::Cow;

use lapin::types::{AMQPValue, FieldTable};

/// The method that a client calls.
pub const PATH: &str = "x-rpc-path";
/// The status of a reply.
pub const STATUS: &str = "x-status";
/// Set for a reply that others follow.
pub const PARTIAL: &str = "x-non-terminating-response";

/// A header as text, if it is UTF-8.
pub fn text<'a>(table: &'a FieldTable, name: &str) -> Option<&'a str> {
    match table.inner().get(name)? {
        AMQPValue::LongString(text) => std::str::from_utf8(text.as_bytes()).ok(),
        AMQPValue::ByteArray(bytes) => std::str::from_utf8(bytes.as_slice()).ok(),
        AMQPValue::ShortString(text) => Some(text.as_str()),
        _ => None,
    }
}

/// A header as a whole number, if it is not negative.
pub fn number(table: &FieldTable, name: &str) -> Option<u64> {
    integer(table.inner().get(name)?)?.try_into().ok()
}

/// Every header that has a textual form, by name: texts, numbers and booleans.
pub fn text_entries(table: &FieldTable) -> impl Iterator<Item = (&str, Cow<'_, str>)> {
    table.inner().iter().filter_map(|(name, value)| {
        let written = text(table, name.as_str()).map(Cow::Borrowed).or_else(|| scalar_text(value).map(Cow::Owned))?;
        Some((name.as_str(), written))
    })
}

fn scalar_text(value: &AMQPValue) -> Option<String> {
    match value {
        AMQPValue::Boolean(value) => Some(value.to_string()),
        AMQPValue::Float(number) => Some(number.to_string()),
        AMQPValue::Double(number) => Some(number.to_string()),
        other => integer(other).map(|number| number.to_string()),
    }
}

fn integer(value: &AMQPValue) -> Option<i128> {
    Some(match value {
        AMQPValue::ShortShortInt(number) => (*number).into(),
        AMQPValue::ShortShortUInt(number) => (*number).into(),
        AMQPValue::ShortInt(number) => (*number).into(),
        AMQPValue::ShortUInt(number) => (*number).into(),
        AMQPValue::LongInt(number) => (*number).into(),
        AMQPValue::LongUInt(number) => (*number).into(),
        AMQPValue::LongLongInt(number) => (*number).into(),
        AMQPValue::Timestamp(number) => (*number).into(),
        _ => return None,
    })
}

/// An upper bound of the table's size on the wire.
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
    fn text_is_read_from_every_text_type() {
        let mut table = FieldTable::default();
        table.insert("x".into(), AMQPValue::ByteArray(b"/echo".to_vec().into()));
        table.insert("s".into(), AMQPValue::LongString("/echo".into()));
        table.insert("binary".into(), AMQPValue::ByteArray(vec![0xff, 0xfe].into()));
        table.insert("number".into(), AMQPValue::LongInt(7));
        table.insert("void".into(), AMQPValue::Void);
        assert_eq!((text(&table, "x"), text(&table, "s")), (Some("/echo"), Some("/echo")));
        for name in ["binary", "number", "void", "missing"] {
            assert_eq!(text(&table, name), None, "{name}");
        }
        table.insert("half".into(), AMQPValue::Double(0.5));
        table.insert("yes".into(), AMQPValue::Boolean(true));
        table.insert("nested".into(), AMQPValue::FieldTable(FieldTable::default()));
        let texts: Vec<(&str, Cow<'_, str>)> = text_entries(&table).collect();
        let wanted = [("half", "0.5"), ("number", "7"), ("s", "/echo"), ("x", "/echo"), ("yes", "true")];
        assert_eq!(texts, wanted.map(|(name, text)| (name, text.into())));
    }

    #[test]
    fn the_size_bound_includes_nested_tables() {
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
    fn a_number_is_read_in_every_width_unless_negative() {
        let mut table = FieldTable::default();
        table.insert("a".into(), AMQPValue::ShortShortInt(1));
        table.insert("b".into(), AMQPValue::LongLongInt(2));
        table.insert("c".into(), AMQPValue::LongInt(-1));
        table.insert("d".into(), AMQPValue::LongString("3".into()));
        assert_eq!((number(&table, "a"), number(&table, "b")), (Some(1), Some(2)));
        assert_eq!((number(&table, "c"), number(&table, "d")), (None, None));
    }
}
