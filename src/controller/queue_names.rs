//! Names of exchanges and queues. Every byte of a pool or key that is not an ASCII letter or digit is written as `%XX`.

use super::name_encoding;
use crate::amqp::REPLACEMENT_CHAR;
use crate::domain::group::Key;
use crate::limits::AMQP_NAME_BYTES_MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NamingScheme {
    #[default]
    Osrdyne,
    Specification,
}

#[derive(Debug, Clone)]
pub struct QueueNames {
    pool: String,
    scheme: NamingScheme,
}

impl QueueNames {
    #[must_use]
    pub fn new(pool: &str, scheme: NamingScheme) -> Self {
        let pool = match scheme {
            NamingScheme::Osrdyne => escaped(pool),
            NamingScheme::Specification => pool.to_owned(),
        };
        Self { pool, scheme }
    }

    #[must_use]
    pub fn are_valid(&self) -> bool {
        let longest =
            [self.dead_letter_exchange(), self.orphan_exchange(), self.activity_exchange(), self.lock_queue()];
        longest.iter().all(|name| name.len() <= AMQP_NAME_BYTES_MAX)
    }

    #[must_use]
    pub fn requests_exchange(&self) -> String {
        format!("{}-req-xchg", self.pool)
    }

    #[must_use]
    pub fn orphan_exchange(&self) -> String {
        format!("{}-orphan-xchg", self.pool)
    }

    #[must_use]
    pub fn dead_letter_exchange(&self) -> String {
        match self.scheme {
            NamingScheme::Osrdyne => format!("{}-deadletter-xchg", self.pool),
            NamingScheme::Specification => format!("{}-dl-xchg", self.pool),
        }
    }

    #[must_use]
    pub fn activity_exchange(&self) -> String {
        format!("{}-activity-xchg", self.pool)
    }

    #[must_use]
    pub fn orphan_queue(&self) -> String {
        format!("{}-orphan", self.pool)
    }

    #[must_use]
    pub fn dead_letter_queue(&self) -> String {
        match self.scheme {
            NamingScheme::Osrdyne => format!("{}-deadletter", self.pool),
            NamingScheme::Specification => format!("{}-dl", self.pool),
        }
    }

    #[must_use]
    pub fn activity_queue(&self) -> String {
        format!("{}-activity", self.pool)
    }

    #[must_use]
    pub fn poison_queue(&self) -> String {
        format!("{}-poison", self.pool)
    }

    #[must_use]
    pub fn lock_queue(&self) -> String {
        format!("{}-controller", self.pool)
    }

    #[must_use]
    pub fn request_queue_prefix(&self) -> String {
        format!("{}-req-", self.pool)
    }

    #[must_use]
    pub fn request_queue(&self, key: &Key) -> Option<String> {
        let name = format!("{}{}", self.request_queue_prefix(), self.encoded_key(key));
        (name.len() <= AMQP_NAME_BYTES_MAX).then_some(name)
    }

    #[must_use]
    pub fn encoded_key(&self, key: &Key) -> String {
        match self.scheme {
            NamingScheme::Osrdyne => escaped(key.as_str()),
            NamingScheme::Specification => key.as_str().to_owned(),
        }
    }

    #[must_use]
    pub fn bindings(&self, key: &Key) -> Vec<String> {
        let escaped = self.encoded_key(key);
        if escaped == key.as_str() { vec![escaped] } else { vec![key.as_str().to_owned(), escaped] }
    }

    #[must_use]
    pub fn parse_routing_key(&self, routing_key: &str) -> Option<Key> {
        // lapin replaced invalid UTF-8.
        if routing_key.contains(REPLACEMENT_CHAR) {
            return None;
        }
        match self.scheme {
            NamingScheme::Osrdyne => Key::new(&unescaped(routing_key)?),
            NamingScheme::Specification => {
                Key::new(routing_key).filter(|key| !key.as_str().contains(['\0', '\r', '\n']))
            }
        }
    }

    #[must_use]
    pub fn original_key(&self, routing_key: &str, died_in: Option<&str>) -> String {
        match died_in.and_then(|queue| self.parse_queue_name(queue)) {
            Some(key) if self.parse_routing_key(routing_key).as_ref() != Some(&key) => self.encoded_key(&key),
            Some(_) | None => routing_key.to_owned(),
        }
    }

    #[must_use]
    pub fn parse_queue_name(&self, queue: &str) -> Option<Key> {
        let key = self.parse_routing_key(queue.strip_prefix(&self.request_queue_prefix())?)?;
        (self.request_queue(&key).as_deref() == Some(queue)).then_some(key)
    }
}

fn escaped(text: &str) -> String {
    name_encoding::QUEUE_NAME.encode(text)
}

fn unescaped(text: &str) -> Option<String> {
    match name_encoding::QUEUE_NAME.decode(text) {
        Some(bytes) => {
            let read = String::from_utf8(bytes).ok()?;
            Some(if escaped(&read) == text { read } else { text.to_owned() })
        }
        None => Some(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_names_are_those_that_existing_clients_and_workers_look_for() {
        let names = QueueNames::new("core", NamingScheme::Osrdyne);
        let key = Key::new("infra=42").unwrap();
        assert_eq!(names.requests_exchange(), "core-req-xchg");
        assert_eq!(
            (names.dead_letter_exchange(), names.dead_letter_queue()),
            ("core-deadletter-xchg".into(), "core-deadletter".into())
        );
        assert_eq!(names.request_queue(&key).as_deref(), Some("core-req-infra%3D42"));
        assert_eq!(names.bindings(&key), ["infra=42", "infra%3D42"]);
        assert_eq!(names.encoded_key(&key), "infra%3D42");
        assert_eq!(
            (names.parse_routing_key("infra=42"), names.parse_routing_key("infra%3D42")),
            (Some(key.clone()), Some(key))
        );
        assert_eq!(names.parse_queue_name("core-req-xchg").unwrap().as_str(), "xchg");
        assert_eq!(names.parse_queue_name("other-req-1"), None);
    }

    #[test]
    fn the_documents_names_are_the_other_choice() {
        let names = QueueNames::new("core", NamingScheme::Specification);
        let key = Key::new("infra=42").unwrap();
        assert_eq!(
            (names.dead_letter_exchange(), names.dead_letter_queue()),
            ("core-dl-xchg".into(), "core-dl".into())
        );
        assert_eq!(names.request_queue(&key).as_deref(), Some("core-req-infra=42"));
        assert_eq!(names.bindings(&key), ["infra=42"]);
        for odd in ["a\nb", "a\rb", "a\0b"] {
            assert_eq!(names.parse_routing_key(odd), None, "no queue has that name");
            assert!(QueueNames::new("core", NamingScheme::Osrdyne).parse_routing_key(odd).is_some());
        }
    }

    #[test]
    fn a_pool_whose_names_have_no_room_is_known() {
        assert!(QueueNames::new(&"p".repeat(230), NamingScheme::Osrdyne).are_valid());
        assert!(!QueueNames::new(&"ü".repeat(60), NamingScheme::Osrdyne).are_valid());
        assert!(!QueueNames::new(&"p".repeat(250), NamingScheme::Specification).are_valid());
    }

    proptest! {
        #[test]
        fn a_key_is_found_again_in_the_name_of_its_queue(text in "(.|%[0-9a-fA-F]{2}){0,80}") {
            for spelling in [NamingScheme::Osrdyne, NamingScheme::Specification] {
                let names = QueueNames::new("a pool/1", spelling);
                let Some(key) = names.parse_routing_key(&text) else { continue };
                prop_assert!(names.bindings(&key).contains(&text), "the request reaches it");
                if let Some(queue) = names.request_queue(&key) {
                    prop_assert_eq!(names.parse_queue_name(&queue), Some(key));
                }
            }
        }
    }
}
