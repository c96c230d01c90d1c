//! The management interface's counts of queues. RabbitMQ updates them every five seconds by default.

use serde::Deserialize;

use super::{Management, ManagementError};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueCounts {
    pub name: String,
    /// Messages that consumers hold.
    pub unacknowledged: u32,
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
        let queues = self.list_queues::<CountedQueue>(&counts_query(start)).await?;
        Ok(queues.into_iter().filter_map(parse_counts).collect())
    }
}

fn counts_query(start: &str) -> String {
    let name = format!("^{}", escape_regex(start));
    format!("use_regex=true&name={}&columns=name,messages_unacknowledged", urlencoding::encode(&name))
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
    use super::super::Page;
    use super::*;

    #[test]
    fn a_queue_that_was_not_counted_yet_has_no_counts() {
        let page: Page<CountedQueue> = serde_json::from_str(
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
        let query = counts_query("core-req-");
        assert!(query.contains("&name=%5Ecore%5C-req%5C-&"), "{query}");
    }
}
