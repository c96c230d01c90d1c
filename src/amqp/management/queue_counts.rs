//! What a broker's management interface counts of queues: what waits, what is held, and how fast it comes and goes.
//!
//! RabbitMQ counts every five seconds unless told otherwise, and says nothing of a queue that it has not counted yet.

use serde::Deserialize;

use super::{Management, ManagementError};
use crate::limits::{AMQP_MANAGEMENT_PAGE_QUEUES, AMQP_MANAGEMENT_QUEUES_MAX};

/// What is counted of a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueCounts {
    /// The queue.
    pub name: String,
    /// Messages that nobody holds.
    pub ready: u32,
    /// Messages that were handed out and are not acknowledged.
    pub unacknowledged: u32,
    /// How many come in 1,000 seconds; `None` where none has come.
    pub published_per_1000s: Option<u64>,
    /// How many are acknowledged in 1,000 seconds; `None` where none was.
    pub acknowledged_per_1000s: Option<u64>,
    /// The policy that it goes by.
    pub policy: Option<String>,
}

#[derive(Deserialize)]
struct QueuePage {
    items: Vec<CountedQueue>,
    page_count: u32,
}

#[derive(Deserialize)]
struct CountedQueue {
    name: String,
    messages_ready: Option<u64>,
    messages_unacknowledged: Option<u64>,
    #[serde(default)]
    message_stats: MessageStats,
    policy: Option<String>,
}

#[derive(Default, Deserialize)]
struct MessageStats {
    publish_details: Option<RateDetails>,
    ack_details: Option<RateDetails>,
}

#[derive(Deserialize)]
struct RateDetails {
    rate: f64,
}

impl Management {
    /// What is counted of the queues whose names begin with this, as far as it is.
    ///
    /// # Errors
    ///
    /// [`ManagementError`], without user and password.
    pub async fn queue_counts(&self, start: &str) -> Result<Vec<QueueCounts>, ManagementError> {
        let mut counted = Vec::new();
        for page in 1..=AMQP_MANAGEMENT_QUEUES_MAX / AMQP_MANAGEMENT_PAGE_QUEUES {
            let QueuePage { items, page_count } = self.get(&queues_path(&self.vhost, start, page)).await?;
            counted.extend(items.into_iter().filter_map(parse_counts));
            if page >= page_count {
                break;
            }
        }
        Ok(counted)
    }
}

fn queues_path(vhost: &str, start: &str, page: u32) -> String {
    let name = format!("^{}", escape_regex(start));
    format!(
        "queues/{}?page={page}&page_size={AMQP_MANAGEMENT_PAGE_QUEUES}&use_regex=true&name={}&columns=name,policy,messages_ready,\
         messages_unacknowledged,message_stats.publish_details.rate,message_stats.ack_details.rate",
        urlencoding::encode(vhost),
        urlencoding::encode(&name)
    )
}

/// A text as the pattern that nothing else matches.
#[must_use]
pub fn escape_regex(text: &str) -> String {
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
fn parse_counts(queue: CountedQueue) -> Option<QueueCounts> {
    let number = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
    Some(QueueCounts {
        ready: number(queue.messages_ready?),
        unacknowledged: number(queue.messages_unacknowledged?),
        published_per_1000s: queue.message_stats.publish_details.and_then(per_1000s),
        acknowledged_per_1000s: queue.message_stats.ack_details.and_then(per_1000s),
        name: queue.name,
        policy: queue.policy.filter(|policy| !policy.is_empty()),
    })
}

#[expect(clippy::cast_possible_truncation, reason = "it is within bounds, and fractions of it mean nothing")]
fn per_1000s(RateDetails { rate }: RateDetails) -> Option<u64> {
    (rate.is_finite() && (0.0..1e12).contains(&rate)).then_some((rate * 1e3) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_read_and_what_is_not_counted_yet_is_not_taken_for_none() {
        let page: QueuePage = serde_json::from_str(
            r#"{"page_count": 1, "page": 1, "filtered_count": 3, "items": [
                {"name": "core-req-1", "policy": "p", "messages_ready": 2, "messages_unacknowledged": 3,
                 "message_stats": {"publish_details": {"rate": 1.6}, "ack_details": {"rate": 0.4}}},
                {"name": "core-req-2", "messages_ready": 0, "messages_unacknowledged": 0},
                {"name": "core-req-3"}]}"#,
        )
        .unwrap();
        let counted: Vec<QueueCounts> = page.items.into_iter().filter_map(parse_counts).collect();
        let first = QueueCounts {
            name: "core-req-1".to_owned(),
            ready: 2,
            unacknowledged: 3,
            published_per_1000s: Some(1_600),
            acknowledged_per_1000s: Some(400),
            policy: Some("p".to_owned()),
        };
        let second = QueueCounts {
            name: "core-req-2".to_owned(),
            ready: 0,
            unacknowledged: 0,
            published_per_1000s: None,
            acknowledged_per_1000s: None,
            policy: None,
        };
        assert_eq!(counted, [first, second]);
    }

    #[test]
    fn a_name_is_asked_for_as_it_is_and_at_its_start() {
        assert_eq!(escape_regex("a.b%2Fc-ü*"), r"a\.b\%2Fc\-ü\*");
        let path = queues_path("/", "core-req-", 2);
        assert!(path.starts_with("queues/%2F?page=2&"), "{path}");
        assert!(path.contains("&name=%5Ecore%5C-req%5C-&"), "{path}");
    }
}
