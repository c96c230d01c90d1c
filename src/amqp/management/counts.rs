//! What a broker's management interface counts of queues: what waits, what is held, and how fast it comes and goes.
//!
//! RabbitMQ counts every five seconds unless told otherwise, and says nothing of a queue that it has not counted yet.

use serde::Deserialize;

use super::{Management, NotTold};
use crate::limits::{AMQP_COUNTED_MAX, AMQP_COUNTED_PAGE};

/// What is counted of a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counted {
    /// The queue.
    pub name: String,
    /// Messages that nobody holds.
    pub ready: u32,
    /// Messages that were handed out and are not acknowledged.
    pub unacknowledged: u32,
    /// How many come in 1,000 seconds; `None` where none has come.
    pub published: Option<u64>,
    /// How many are acknowledged in 1,000 seconds; `None` where none was.
    pub acknowledged: Option<u64>,
    /// The policy that it goes by.
    pub policy: Option<String>,
}

#[derive(Deserialize)]
struct Page {
    items: Vec<Queue>,
    page_count: u32,
}

#[derive(Deserialize)]
struct Queue {
    name: String,
    messages_ready: Option<u64>,
    messages_unacknowledged: Option<u64>,
    #[serde(default)]
    message_stats: Stats,
    policy: Option<String>,
}

#[derive(Default, Deserialize)]
struct Stats {
    publish_details: Option<Rate>,
    ack_details: Option<Rate>,
}

#[derive(Deserialize)]
struct Rate {
    rate: f64,
}

impl Management {
    /// What is counted of the queues whose names begin with this, as far as it is.
    ///
    /// # Errors
    ///
    /// [`NotTold`], without user and password.
    pub async fn counts(&self, start: &str) -> Result<Vec<Counted>, NotTold> {
        let mut counted = Vec::new();
        for page in 1..=AMQP_COUNTED_MAX / AMQP_COUNTED_PAGE {
            let Page { items, page_count } = self.get(&path(&self.vhost, start, page)).await?;
            counted.extend(items.into_iter().filter_map(read));
            if page >= page_count {
                break;
            }
        }
        Ok(counted)
    }
}

fn path(vhost: &str, start: &str, page: u32) -> String {
    let name = format!("^{}", literally(start));
    format!(
        "queues/{}?page={page}&page_size={AMQP_COUNTED_PAGE}&use_regex=true&name={}&columns=name,policy,messages_ready,\
         messages_unacknowledged,message_stats.publish_details.rate,message_stats.ack_details.rate",
        urlencoding::encode(vhost),
        urlencoding::encode(&name)
    )
}

/// A text as the pattern that nothing else matches.
#[must_use]
pub fn literally(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for char in text.chars() {
        if char.is_ascii() && !char.is_ascii_alphanumeric() {
            pattern.push('\\');
        }
        pattern.push(char);
    }
    pattern
}

/// `None` where it was not counted yet: nothing known is not nothing there.
fn read(queue: Queue) -> Option<Counted> {
    let number = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
    Some(Counted {
        ready: number(queue.messages_ready?),
        unacknowledged: number(queue.messages_unacknowledged?),
        published: queue.message_stats.publish_details.and_then(thousandths),
        acknowledged: queue.message_stats.ack_details.and_then(thousandths),
        name: queue.name,
        policy: queue.policy.filter(|policy| !policy.is_empty()),
    })
}

#[expect(clippy::cast_possible_truncation, reason = "it is within bounds, and fractions of it mean nothing")]
fn thousandths(Rate { rate }: Rate) -> Option<u64> {
    (rate.is_finite() && (0.0..1e12).contains(&rate)).then_some((rate * 1e3) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_read_and_what_is_not_counted_yet_is_not_taken_for_none() {
        let page: Page = serde_json::from_str(
            r#"{"page_count": 1, "page": 1, "filtered_count": 3, "items": [
                {"name": "core-req-1", "policy": "p", "messages_ready": 2, "messages_unacknowledged": 3,
                 "message_stats": {"publish_details": {"rate": 1.6}, "ack_details": {"rate": 0.4}}},
                {"name": "core-req-2", "messages_ready": 0, "messages_unacknowledged": 0},
                {"name": "core-req-3"}]}"#,
        )
        .unwrap();
        let counted: Vec<Counted> = page.items.into_iter().filter_map(read).collect();
        let first = Counted {
            name: "core-req-1".to_owned(),
            ready: 2,
            unacknowledged: 3,
            published: Some(1_600),
            acknowledged: Some(400),
            policy: Some("p".to_owned()),
        };
        let second = Counted {
            name: "core-req-2".to_owned(),
            ready: 0,
            unacknowledged: 0,
            published: None,
            acknowledged: None,
            policy: None,
        };
        assert_eq!(counted, [first, second]);
    }

    #[test]
    fn a_name_is_asked_for_as_it_is_and_at_its_start() {
        assert_eq!(literally("a.b%2Fc-ü*"), r"a\.b\%2Fc\-ü\*");
        let path = path("/", "core-req-", 2);
        assert!(path.starts_with("queues/%2F?page=2&"), "{path}");
        assert!(path.contains("&name=%5Ecore%5C-req%5C-&"), "{path}");
    }
}
