//! The management interface's counts of queues. RabbitMQ updates them every five seconds by default.

use serde::Deserialize;

use super::{Management, ManagementError};
use journeyman_domain::limits::{AMQP_MANAGEMENT_PAGE_QUEUES, AMQP_MANAGEMENT_QUEUES_MAX};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueCounts {
    pub name: String,
    /// Messages that consumers hold.
    pub unacknowledged: u32,
}

#[derive(Deserialize)]
struct QueuePage {
    items: Vec<CountedQueue>,
    page_count: u32,
}

#[derive(Deserialize)]
struct CountedQueue {
    name: String,
    messages_unacknowledged: Option<u64>,
}

impl Management {
    /// Counts of the queues with names that start with `start`; queues that were not counted yet are missing.
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
        "queues/{}?page={page}&page_size={AMQP_MANAGEMENT_PAGE_QUEUES}&use_regex=true&name={}\
         &columns=name,messages_unacknowledged",
        urlencoding::encode(vhost),
        urlencoding::encode(&name)
    )
}

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

fn parse_counts(queue: CountedQueue) -> Option<QueueCounts> {
    let unacknowledged = u32::try_from(queue.messages_unacknowledged?).unwrap_or(u32::MAX);
    Some(QueueCounts { name: queue.name, unacknowledged })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_that_was_not_counted_yet_has_no_counts() {
        let page: QueuePage = serde_json::from_str(
            r#"{"page_count": 1, "page": 1, "filtered_count": 2, "items": [
                {"name": "core-req-1", "messages_unacknowledged": 3}, {"name": "core-req-3"}]}"#,
        )
        .unwrap();
        let counted: Vec<QueueCounts> = page.items.into_iter().filter_map(parse_counts).collect();
        assert_eq!(counted, [QueueCounts { name: "core-req-1".to_owned(), unacknowledged: 3 }]);
    }

    #[test]
    fn the_start_of_a_name_is_matched_literally() {
        assert_eq!(escape_regex("a.b%2Fc-ü*"), r"a\.b\%2Fc\-ü\*");
        let path = queues_path("/", "core-req-", 2);
        assert!(path.starts_with("queues/%2F?page=2&"), "{path}");
        assert!(path.contains("&name=%5Ecore%5C-req%5C-&"), "{path}");
    }
}
