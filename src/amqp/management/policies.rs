//! Policies of the broker, which apply to queues and exchanges by name.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Management, ManagementError};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerPolicy {
    /// A regular expression; it matches anywhere in a name unless it is anchored.
    pub pattern: String,
    /// `queues` or `exchanges`.
    #[serde(rename = "apply-to")]
    pub apply_to: String,
    /// Only the matching policy with the highest one applies.
    pub priority: i64,
    pub definition: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyResult {
    Unchanged,
    Applied,
    /// The broker read it in another way; the text describes the difference.
    Mismatch(String),
}

impl Management {
    /// Sets a policy that differs, reads it back, and compares. It is set only if it differs: the broker then visits every queue.
    ///
    /// # Errors
    ///
    /// [`ManagementError`], without user and password.
    pub async fn ensure_policy(&self, name: &str, policy: &BrokerPolicy) -> Result<PolicyResult, ManagementError> {
        let path = format!("policies/{}/{}", urlencoding::encode(&self.vhost), urlencoding::encode(name));
        match self.get::<BrokerPolicy>(&path).await {
            Ok(read) if read == *policy => return Ok(PolicyResult::Unchanged),
            Ok(_) | Err(ManagementError::NotFound) => {}
            Err(why) => return Err(why),
        }
        self.put(&path, policy).await?;
        let read: BrokerPolicy = self.get(&path).await?;
        Ok(if read == *policy {
            PolicyResult::Applied
        } else {
            PolicyResult::Mismatch(describe_mismatch(policy, &read))
        })
    }
}

fn describe_mismatch(asked: &BrokerPolicy, read: &BrokerPolicy) -> String {
    let shown = |policy: &BrokerPolicy| serde_json::to_string(policy).unwrap_or_default();
    format!("it was asked for {} and has {}", shown(asked), shown(read))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_policy_applies_to_is_spelt_as_the_broker_reads_it() {
        let definition = Map::from_iter([("message-ttl".to_owned(), Value::from(1_500))]);
        let asked = BrokerPolicy { pattern: "^a".to_owned(), apply_to: "queues".to_owned(), priority: 10, definition };
        let json = serde_json::to_value(&asked).unwrap();
        assert_eq!(json["apply-to"], "queues");
        // As RabbitMQ reads back what was misspelt.
        let read = BrokerPolicy { apply_to: "all".to_owned(), ..asked.clone() };
        assert!(describe_mismatch(&asked, &read).contains(r#""apply-to":"all""#));
        let back = r#"{"vhost": "/", "name": "p", "pattern": "^a", "apply-to": "queues", "definition": {"message-ttl": 1500}, "priority": 10}"#;
        assert_eq!(serde_json::from_str::<BrokerPolicy>(back).unwrap(), asked);
    }
}
