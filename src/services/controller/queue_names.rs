//! Names of exchanges and queues. Every byte of a pool or key that is not an ASCII letter or digit is written as `%XX`.

use lapin::message::Delivery;

use super::error_replies::DIED_IN;
use journeyman_domain::group::Key;
use journeyman_domain::limits::AMQP_NAME_BYTES_MAX;
use journeyman_platform::amqp::{REPLACEMENT_CHAR, headers};

#[derive(Debug, Clone)]
pub struct QueueNames {
    pool: String,
}

impl QueueNames {
    pub fn new(pool: &str) -> Self {
        Self { pool: escaped(pool) }
    }

    pub fn are_valid(&self) -> bool {
        let longest =
            [self.dead_letter_exchange(), self.orphan_exchange(), self.activity_exchange(), self.lock_queue()];
        longest.iter().all(|name| name.len() <= AMQP_NAME_BYTES_MAX)
    }

    pub fn requests_exchange(&self) -> String {
        format!("{}-req-xchg", self.pool)
    }

    pub fn orphan_exchange(&self) -> String {
        format!("{}-orphan-xchg", self.pool)
    }

    pub fn dead_letter_exchange(&self) -> String {
        format!("{}-deadletter-xchg", self.pool)
    }

    pub fn activity_exchange(&self) -> String {
        format!("{}-activity-xchg", self.pool)
    }

    pub fn orphan_queue(&self) -> String {
        format!("{}-orphan", self.pool)
    }

    pub fn dead_letter_queue(&self) -> String {
        format!("{}-deadletter", self.pool)
    }

    pub fn activity_queue(&self) -> String {
        format!("{}-activity", self.pool)
    }

    pub fn poison_queue(&self) -> String {
        format!("{}-poison", self.pool)
    }

    pub fn lock_queue(&self) -> String {
        format!("{}-controller", self.pool)
    }

    pub fn request_queue_prefix(&self) -> String {
        format!("{}-req-", self.pool)
    }

    pub fn request_queue(&self, key: &Key) -> Option<String> {
        let name = format!("{}{}", self.request_queue_prefix(), self.encoded_key(key));
        (name.len() <= AMQP_NAME_BYTES_MAX).then_some(name)
    }

    pub fn encoded_key(&self, key: &Key) -> String {
        escaped(key.as_str())
    }

    pub fn bindings(&self, key: &Key) -> Vec<String> {
        let escaped = self.encoded_key(key);
        if escaped == key.as_str() { vec![escaped] } else { vec![key.as_str().to_owned(), escaped] }
    }

    pub fn parse_routing_key(&self, routing_key: &str) -> Option<Key> {
        // lapin replaced invalid UTF-8.
        if routing_key.contains(REPLACEMENT_CHAR) {
            return None;
        }
        Key::new(&unescaped(routing_key)?)
    }

    /// The key under which a dead letter was published.
    pub fn original_key(&self, letter: &Delivery) -> String {
        let (routing_key, table) = (letter.routing_key.as_str(), letter.properties.headers().as_ref());
        let died_in = table.and_then(|table| headers::text(table, DIED_IN));
        match died_in.and_then(|queue| self.parse_queue_name(queue)) {
            Some(key) if self.parse_routing_key(routing_key).as_ref() != Some(&key) => self.encoded_key(&key),
            Some(_) | None => routing_key.to_owned(),
        }
    }

    pub fn parse_queue_name(&self, queue: &str) -> Option<Key> {
        let key = self.parse_routing_key(queue.strip_prefix(&self.request_queue_prefix())?)?;
        (self.request_queue(&key).as_deref() == Some(queue)).then_some(key)
    }
}

fn escaped(text: &str) -> String {
    let escape =
        |byte: u8| if byte.is_ascii_alphanumeric() { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(escape).collect()
}

/// Plain text stands for itself.
fn unescaped(text: &str) -> Option<String> {
    let read = urlencoding::decode(text).ok()?;
    Some(if escaped(&read) == text { read.into_owned() } else { text.to_owned() })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_names_are_those_that_existing_clients_and_workers_look_for() {
        let names = QueueNames::new("core");
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
    fn a_pool_whose_names_have_no_room_is_known() {
        assert!(QueueNames::new(&"p".repeat(230)).are_valid());
        assert!(!QueueNames::new(&"ü".repeat(60)).are_valid());
    }

    proptest! {
        #[test]
        fn a_key_is_found_again_in_the_name_of_its_queue(text in "(.|%[0-9a-fA-F]{2}){0,80}") {
                            let names = QueueNames::new("a pool/1");
                let Some(key) = names.parse_routing_key(&text) else { return Ok(()) };
                prop_assert!(names.bindings(&key).contains(&text), "the request reaches it");
                if let Some(queue) = names.request_queue(&key) {
                    prop_assert_eq!(names.parse_queue_name(&queue), Some(key));
                }
        }
    }
}
