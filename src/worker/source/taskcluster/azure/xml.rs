//! Parser for the XML of Azure queues: a message list or an error.
//!
//! Hostile input costs at most its own length: no entities but the predefined ones and character references, and a
//! limit on the length of a tag. Unknown elements are skipped.

use serde::Deserialize;

use journeyman_domain::limits::{POLL_MESSAGES_MAX, XML_TAG_BYTES_MAX};

#[derive(Deserialize)]
enum Document {
    QueueMessagesList(MessageList),
    Error(RawError),
}

#[derive(Deserialize)]
struct MessageList {
    #[serde(rename = "QueueMessage", default)]
    messages: Vec<RawMessage>,
}

/// A message; missing fields are empty.
#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct RawMessage {
    #[serde(rename = "MessageId")]
    pub(super) id: String,
    #[serde(rename = "PopReceipt")]
    pub(super) receipt: String,
    pub(super) dequeue_count: String,
    #[serde(rename = "MessageText")]
    pub(super) text: String,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct RawError {
    pub(super) code: String,
    #[serde(default)]
    pub(super) message: String,
}

pub(super) fn parse_messages(document: &str) -> Result<Vec<RawMessage>, String> {
    match parse(document)? {
        Document::QueueMessagesList(list) if list.messages.len() <= usize::from(POLL_MESSAGES_MAX) => Ok(list.messages),
        Document::QueueMessagesList(_) => Err(format!("it has more than {POLL_MESSAGES_MAX} messages")),
        Document::Error(_) => Err("it is not a message list".into()),
    }
}

pub(super) fn parse_error(document: &str) -> Option<RawError> {
    match parse(document).ok()? {
        Document::Error(error) => Some(error),
        Document::QueueMessagesList(_) => None,
    }
}

fn parse(document: &str) -> Result<Document, String> {
    // The tags of a queue have few attributes; the parser would remember all of them.
    let tag_bytes = |part: &str| part.split('>').next().unwrap_or_default().len();
    if document.split('<').skip(1).any(|part| tag_bytes(part) > XML_TAG_BYTES_MAX) {
        return Err("it has a tag that is too long".into());
    }
    quick_xml::de::from_str(document).map_err(|_| "it is not the XML of a queue".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(document: &str) -> Vec<String> {
        let found = parse_messages(document).unwrap();
        found.into_iter().map(|message| message.id).collect()
    }

    #[test]
    fn every_spelling_of_an_empty_list_is_empty() {
        for document in [
            "<QueueMessagesList/>",
            "<QueueMessagesList />",
            "<QueueMessagesList></QueueMessagesList>",
            "<QueueMessagesList>\r\n  \r\n</QueueMessagesList>\n",
            "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?><QueueMessagesList/>",
            "<?xml version=\"1.0\"?><!-- c --><q:QueueMessagesList xmlns:q=\"u\"/>",
        ] {
            assert_eq!(ids(document), [""; 0], "{document}");
        }
    }

    #[test]
    fn predefined_and_character_entities_are_decoded() {
        let found = parse_messages(
            "<QueueMessagesList><QueueMessage><MessageId>&lt;a&#43;b&#x2f;&amp;&gt;</MessageId>\
             <PopReceipt><![CDATA[x&y]]></PopReceipt><MessageText/></QueueMessage></QueueMessagesList>",
        )
        .unwrap();
        assert_eq!(found[0].id, "<a+b/&>");
        assert_eq!(found[0].receipt, "x&y");
        assert_eq!(found[0].text, "");
    }

    #[test]
    fn elements_nobody_asked_for_change_nothing() {
        let document = "<QueueMessagesList><Other><MessageId>no</MessageId></Other><QueueMessage>\
             <New><MessageId>no</MessageId></New><MessageId>yes</MessageId><MessageId2>no</MessageId2>\
             </QueueMessage></QueueMessagesList>";
        assert_eq!(ids(document), ["yes"]);
    }

    #[test]
    fn other_documents_are_rejected() {
        let entity = "<QueueMessagesList><QueueMessage><MessageId>&b;</MessageId></QueueMessage></QueueMessagesList>";
        let bomb = format!("<!DOCTYPE l [<!ENTITY a \"aaaa\"><!ENTITY b \"&a;&a;\">]>{entity}");
        let deep = format!("<QueueMessagesList>{}", "<a>".repeat(100_000));
        let wide = format!("<QueueMessagesList {}/>", "a=\"b\" ".repeat(1_000_000 / 6));
        let many = format!("<QueueMessagesList>{}</QueueMessagesList>", "<QueueMessage/>".repeat(33));
        for document in [entity, &bomb, &deep, &wide, &many] {
            assert!(parse_messages(document).is_err(), "{document}");
        }
        for document in [
            "",
            "<html><body>502</body></html>",
            "<Error><Code>x</Code></Error>",
            "<QueueMessagesList>",
            "<QueueMessagesList></Other>",
            "<QueueMessagesList>&#xD800;</QueueMessagesList>",
            "</QueueMessagesList>",
        ] {
            assert!(parse_messages(document).is_err(), "{document}");
        }
    }

    #[test]
    fn errors_are_read() {
        let found = parse_error(
            "<?xml version=\"1.0\"?>\n<Error>\n <Code>A</Code>\n <Message>b\nRequestId:c</Message></Error>",
        );
        let expected = RawError { code: "A".into(), message: "b\nRequestId:c".into() };
        assert_eq!(found, Some(expected));
        assert_eq!(parse_error("<html/>"), None);
        assert_eq!(parse_error("nothing"), None);
    }

    proptest::proptest! {
        #[test]
        fn no_input_makes_the_parser_panic(document in "(<[/!?]?[a-zQM]{0,3}[ /=\"]{0,2}>?|&#?x?[0-9a-f]{0,4};?|[ \\PC]{0,4}){0,40}") {
            parse_messages(&document).ok();
            parse_error(&document).ok_or(()).ok();
        }
    }
}
