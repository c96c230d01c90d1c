//! What the exchanges and queues of a pool are called.
//!
//! The document and its known implementation differ. The implementation's names are those that existing clients and workers
//! look for: there a pool and a key stand in names with every byte that is no ASCII letter or digit as `%XX`, and clients
//! send their keys in that form.

use super::escape;
use crate::amqp::SUBSTITUTE;
use crate::domain::group::Key;
use crate::limits::AMQP_NAME_BYTES_MAX;

/// Whose names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Spelling {
    /// Those of the known implementation.
    #[default]
    Implementation,
    /// Those of the document: keys are written as they are.
    Document,
}

/// The names of one pool.
#[derive(Debug, Clone)]
pub struct Names {
    pool: String,
    spelling: Spelling,
}

impl Names {
    /// Those of `pool`.
    #[must_use]
    pub fn new(pool: &str, spelling: Spelling) -> Self {
        let pool = match spelling {
            Spelling::Implementation => escaped(pool),
            Spelling::Document => pool.to_owned(),
        };
        Self { pool, spelling }
    }

    /// Whether AMQP has room for them.
    #[must_use]
    pub fn fit(&self) -> bool {
        let longest = [self.dead_letters(), self.orphans(), self.activity(), self.lock_queue()];
        longest.iter().all(|name| name.len() <= AMQP_NAME_BYTES_MAX)
    }

    /// Where requests are published.
    #[must_use]
    pub fn requests(&self) -> String {
        format!("{}-req-xchg", self.pool)
    }

    /// Where requests go whose key has no queue.
    #[must_use]
    pub fn orphans(&self) -> String {
        format!("{}-orphan-xchg", self.pool)
    }

    /// Where requests go that no worker will have.
    #[must_use]
    pub fn dead_letters(&self) -> String {
        match self.spelling {
            Spelling::Implementation => format!("{}-deadletter-xchg", self.pool),
            Spelling::Document => format!("{}-dl-xchg", self.pool),
        }
    }

    /// Where workers report.
    #[must_use]
    pub fn activity(&self) -> String {
        format!("{}-activity-xchg", self.pool)
    }

    /// The queue behind [`Names::orphans`].
    #[must_use]
    pub fn orphan_queue(&self) -> String {
        format!("{}-orphan", self.pool)
    }

    /// The queue behind [`Names::dead_letters`].
    #[must_use]
    pub fn dead_letter_queue(&self) -> String {
        match self.spelling {
            Spelling::Implementation => format!("{}-deadletter", self.pool),
            Spelling::Document => format!("{}-dl", self.pool),
        }
    }

    /// The queue behind [`Names::activity`].
    #[must_use]
    pub fn activity_queue(&self) -> String {
        format!("{}-activity", self.pool)
    }

    /// Requests that killed who worked on them.
    #[must_use]
    pub fn poison_queue(&self) -> String {
        format!("{}-poison", self.pool)
    }

    /// Whoever holds it is the controller of the pool.
    #[must_use]
    pub fn lock_queue(&self) -> String {
        format!("{}-controller", self.pool)
    }

    /// What the names of request queues begin with.
    #[must_use]
    pub fn request_queue_start(&self) -> String {
        format!("{}-req-", self.pool)
    }

    /// The request queue of a key; `None` where its name would be too long.
    #[must_use]
    pub fn request_queue(&self, key: &Key) -> Option<String> {
        let name = format!("{}{}", self.request_queue_start(), self.worker_key(key));
        (name.len() <= AMQP_NAME_BYTES_MAX).then_some(name)
    }

    /// The key as workers are told it.
    #[must_use]
    pub fn worker_key(&self, key: &Key) -> String {
        match self.spelling {
            Spelling::Implementation => escaped(key.as_str()),
            Spelling::Document => key.as_str().to_owned(),
        }
    }

    /// What a client may write for the key: as it is, and in the form of names.
    #[must_use]
    pub fn bindings(&self, key: &Key) -> Vec<String> {
        let escaped = self.worker_key(key);
        if escaped == key.as_str() { vec![escaped] } else { vec![key.as_str().to_owned(), escaped] }
    }

    /// The key that a client means by a routing key; `None` where it is no text, or cannot be the name of a queue as it is.
    #[must_use]
    pub fn key(&self, routing_key: &str) -> Option<Key> {
        // Something of it was no text.
        if routing_key.contains(SUBSTITUTE) {
            return None;
        }
        match self.spelling {
            Spelling::Implementation => Key::new(&unescaped(routing_key)?),
            // No environment holds a zero, and a broker drops the ends of lines from the name of a queue.
            Spelling::Document => Key::new(routing_key).filter(|key| !key.as_str().contains(['\0', '\r', '\n'])),
        }
    }

    /// What a request came under, as its client may have written it. What a worker has put back comes under the name of its queue
    /// from then on: where it died says better whose it is.
    #[must_use]
    pub fn came_under(&self, routing_key: &str, died_in: Option<&str>) -> String {
        match died_in.and_then(|queue| self.key_of(queue)) {
            Some(key) if self.key(routing_key).as_ref() != Some(&key) => self.worker_key(&key),
            Some(_) | None => routing_key.to_owned(),
        }
    }

    /// The key of a request queue; `None` where it is none of this pool.
    #[must_use]
    pub fn key_of(&self, queue: &str) -> Option<Key> {
        let key = self.key(queue.strip_prefix(&self.request_queue_start())?)?;
        (self.request_queue(&key).as_deref() == Some(queue)).then_some(key)
    }
}

fn escaped(text: &str) -> String {
    escape::QUEUE.write(text)
}

/// The other way. What is in no such form, to the letter, is what it is: its queue is bound under the one form and the other, and a third
/// would never reach it. `None` where it would not be text.
fn unescaped(text: &str) -> Option<String> {
    match escape::QUEUE.read(text) {
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
        let names = Names::new("core", Spelling::Implementation);
        let key = Key::new("infra=42").unwrap();
        assert_eq!(names.requests(), "core-req-xchg");
        assert_eq!(
            (names.dead_letters(), names.dead_letter_queue()),
            ("core-deadletter-xchg".into(), "core-deadletter".into())
        );
        assert_eq!(names.request_queue(&key).as_deref(), Some("core-req-infra%3D42"));
        assert_eq!(names.bindings(&key), ["infra=42", "infra%3D42"]);
        assert_eq!(names.worker_key(&key), "infra%3D42");
        assert_eq!((names.key("infra=42"), names.key("infra%3D42")), (Some(key.clone()), Some(key)));
        assert_eq!(names.key_of("core-req-xchg").unwrap().as_str(), "xchg");
        assert_eq!(names.key_of("other-req-1"), None);
    }

    #[test]
    fn the_documents_names_are_the_other_choice() {
        let names = Names::new("core", Spelling::Document);
        let key = Key::new("infra=42").unwrap();
        assert_eq!((names.dead_letters(), names.dead_letter_queue()), ("core-dl-xchg".into(), "core-dl".into()));
        assert_eq!(names.request_queue(&key).as_deref(), Some("core-req-infra=42"));
        assert_eq!(names.bindings(&key), ["infra=42"]);
        for odd in ["a\nb", "a\rb", "a\0b"] {
            assert_eq!(names.key(odd), None, "no queue has that name");
            assert!(Names::new("core", Spelling::Implementation).key(odd).is_some());
        }
    }

    #[test]
    fn a_pool_whose_names_have_no_room_is_known() {
        assert!(Names::new(&"p".repeat(230), Spelling::Implementation).fit());
        assert!(!Names::new(&"ü".repeat(60), Spelling::Implementation).fit());
        assert!(!Names::new(&"p".repeat(250), Spelling::Document).fit());
    }

    proptest! {
        #[test]
        fn a_key_is_found_again_in_the_name_of_its_queue(text in "(.|%[0-9a-fA-F]{2}){0,80}") {
            for spelling in [Spelling::Implementation, Spelling::Document] {
                let names = Names::new("a pool/1", spelling);
                let Some(key) = names.key(&text) else { continue };
                prop_assert!(names.bindings(&key).contains(&text), "the request reaches it");
                if let Some(queue) = names.request_queue(&key) {
                    prop_assert_eq!(names.key_of(&queue), Some(key));
                }
            }
        }
    }
}
