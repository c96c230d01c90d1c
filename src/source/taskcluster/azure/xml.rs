//! Parser for the XML of Azure queues: a message list or an error.
//!
//! Hostile input costs at most its own length: no DOCTYPE, no entities but the predefined ones and character
//! references, and limits on depth, attributes and messages. Unknown elements are skipped.

use quick_xml::Reader;
use quick_xml::escape::resolve_xml_entity;
use quick_xml::events::{BytesStart, Event};

use crate::limits::{POLL_MESSAGES_MAX, XML_ATTRIBUTES_MAX, XML_DEPTH_MAX};

/// A message; missing fields are empty.
#[derive(Default)]
pub(super) struct RawMessage {
    pub(super) id: String,
    pub(super) receipt: String,
    pub(super) dequeue_count: String,
    pub(super) text: String,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct RawError {
    pub(super) code: String,
    pub(super) message: String,
}

pub(super) fn parse_messages(document: &str) -> Result<Vec<RawMessage>, String> {
    let mut reader = XmlReader::new(document);
    let mut found = Vec::new();
    let mut root_seen = false;
    let mut in_message = false;
    loop {
        match reader.next()? {
            XmlEvent::Open { depth: 1, name } if name == "QueueMessagesList" && !root_seen => {
                root_seen = true;
            }
            XmlEvent::Open { depth: 1, .. } => return Err("it is not a message list".into()),
            XmlEvent::Open { depth: 2, name } => {
                in_message = name == "QueueMessage";
                if !in_message {
                    continue;
                }
                if found.len() == usize::from(POLL_MESSAGES_MAX) {
                    return Err(format!("it has more than {POLL_MESSAGES_MAX} messages"));
                }
                found.push(RawMessage::default());
            }
            XmlEvent::Close { depth: 3, name, text } if in_message => {
                let Some(message) = found.last_mut() else {
                    continue;
                };
                match name.as_str() {
                    "MessageId" => message.id = text,
                    "PopReceipt" => message.receipt = text,
                    "DequeueCount" => message.dequeue_count = text,
                    "MessageText" => message.text = text,
                    _ => {}
                }
            }
            XmlEvent::Open { .. } | XmlEvent::Close { .. } => {}
            XmlEvent::End if root_seen => return Ok(found),
            XmlEvent::End => return Err("it has no message list".into()),
        }
    }
}

pub(super) fn parse_error(document: &str) -> Option<RawError> {
    let mut reader = XmlReader::new(document);
    let mut found = RawError::default();
    loop {
        match reader.next().ok()? {
            XmlEvent::Open { depth: 1, name } if name != "Error" => return None,
            XmlEvent::Close { depth: 2, name, text } => match name.as_str() {
                "Code" => found.code = text,
                "Message" => found.message = text,
                _ => {}
            },
            XmlEvent::Open { .. } | XmlEvent::Close { .. } => {}
            XmlEvent::End => return (!found.code.is_empty()).then_some(found),
        }
    }
}

enum XmlEvent {
    Open {
        depth: usize,
        name: String,
    },
    /// `text` is the text after the last child element.
    Close {
        depth: usize,
        name: String,
        text: String,
    },
    End,
}

struct XmlReader<'a> {
    reader: Reader<&'a [u8]>,
    depth: usize,
    text: String,
    /// Pending end of a self-closing element.
    closing: Option<String>,
}

impl<'a> XmlReader<'a> {
    fn new(document: &'a str) -> Self {
        Self { reader: Reader::from_str(document), depth: 0, text: String::new(), closing: None }
    }

    fn next(&mut self) -> Result<XmlEvent, String> {
        if let Some(name) = self.closing.take() {
            return self.close(name);
        }
        loop {
            let event = self.reader.read_event().map_err(|_| self.error_at("is not well-formed XML"))?;
            match event {
                Event::Start(start) => return self.open(&start),
                Event::Empty(start) => {
                    self.closing = Some(element_name(&start));
                    return self.open(&start);
                }
                Event::End(end) => {
                    return self.close(end.local_name().as_ref().to_owned());
                }
                Event::Text(text) => self.text.push_str(&text.xml10_content()),
                Event::CData(data) => self.text.push_str(&data.xml10_content()),
                Event::GeneralRef(reference) => {
                    let character = reference
                        .resolve_char_ref()
                        .map_err(|_| self.error_at("has an invalid character reference"))?;
                    match (character, resolve_xml_entity(&reference)) {
                        (Some(character), _) => self.text.push(character),
                        (None, Some(text)) => self.text.push_str(text),
                        (None, None) => return Err(self.error_at("has an entity")),
                    }
                }
                Event::DocType(_) => return Err(self.error_at("has a document type")),
                Event::Decl(_) | Event::PI(_) | Event::Comment(_) => {}
                Event::Eof if self.depth > 0 => return Err(self.error_at("is truncated")),
                Event::Eof => return Ok(XmlEvent::End),
            }
        }
    }

    fn open(&mut self, start: &BytesStart<'_>) -> Result<XmlEvent, String> {
        if self.depth == XML_DEPTH_MAX {
            return Err(self.error_at("is nested too deeply"));
        }
        let mut attributes = start.attributes();
        let attributes = attributes.with_checks(false).take(XML_ATTRIBUTES_MAX + 1);
        if attributes.count() > XML_ATTRIBUTES_MAX {
            return Err(self.error_at("has an element with too many attributes"));
        }
        self.depth += 1;
        self.text.clear();
        Ok(XmlEvent::Open { depth: self.depth, name: element_name(start) })
    }

    fn close(&mut self, name: String) -> Result<XmlEvent, String> {
        let depth = self.depth;
        self.depth = depth.checked_sub(1).ok_or_else(|| self.error_at("has an unmatched end tag"))?;
        Ok(XmlEvent::Close { depth, name, text: std::mem::take(&mut self.text) })
    }

    fn error_at(&self, how: &str) -> String {
        format!("it {how} (at byte {})", self.reader.buffer_position())
    }
}

fn element_name(start: &BytesStart<'_>) -> String {
    start.local_name().as_ref().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(document: &str) -> Vec<String> {
        let found = parse_messages(document).unwrap();
        found.into_iter().map(|message| message.id).collect()
    }

    fn refusal(document: &str) -> String {
        parse_messages(document).err().unwrap()
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
    fn entity_bombs_and_document_types_are_refused() {
        let bomb = "<!DOCTYPE l [<!ENTITY a \"aaaa\"><!ENTITY b \"&a;&a;\">]><QueueMessagesList/>";
        assert!(refusal(bomb).contains("document type"));
        let entity = "<QueueMessagesList><QueueMessage><MessageId>&b;</MessageId></QueueMessage></QueueMessagesList>";
        assert!(refusal(entity).contains("entity"));
    }

    #[test]
    fn depth_attributes_and_messages_are_bounded() {
        let deep = format!("<QueueMessagesList>{}", "<a>".repeat(100_000));
        assert!(refusal(&deep).contains("nested too deeply"));
        let wide = format!("<QueueMessagesList {}/>", "a=\"b\" ".repeat(1_000_000 / 6));
        assert!(refusal(&wide).contains("too many attributes"));
        let many = format!("<QueueMessagesList>{}</QueueMessagesList>", "<QueueMessage/>".repeat(33));
        assert!(refusal(&many).contains("more than 32 messages"));
    }

    #[test]
    fn what_is_no_list_is_refused_with_a_reason() {
        assert!(refusal("").contains("no message list"));
        assert!(refusal("<html><body>502</body></html>").contains("not a message list"));
        assert!(refusal("<Error><Code>x</Code></Error>").contains("not a message list"));
        assert!(refusal("<QueueMessagesList>").contains("is truncated"));
        assert!(refusal("<QueueMessagesList></Other>").contains("well-formed"));
        assert!(refusal("<QueueMessagesList/><QueueMessagesList/>").contains("not a message list"));
        assert!(refusal("<QueueMessagesList>&#xD800;</QueueMessagesList>").contains("character"));
        assert!(refusal("</QueueMessagesList>").starts_with("it "));
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
