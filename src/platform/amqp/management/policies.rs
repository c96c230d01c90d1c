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

impl Management {
    /// Sets a policy that differs, and returns whether it did: the broker visits every queue when a policy is set.
    ///
    /// # Errors
    ///
    /// [`ManagementError`], without user and password.
    pub async fn ensure_policy(&self, name: &str, policy: &BrokerPolicy) -> Result<bool, ManagementError> {
        let path = format!("policies/{}/{}", urlencoding::encode(&self.vhost), urlencoding::encode(name));
        match self.get::<BrokerPolicy>(&path).await {
            Ok(read) if read == *policy => return Ok(false),
            Ok(_) | Err(ManagementError::NotFound) => {}
            Err(why) => return Err(why),
        }
        self.put(&path, policy).await.map(|()| true)
    }
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
        let back = r#"{"vhost": "/", "name": "p", "pattern": "^a", "apply-to": "queues", "definition": {"message-ttl": 1500}, "priority": 10}"#;
        assert_eq!(serde_json::from_str::<BrokerPolicy>(back).unwrap(), asked);
    }
}
