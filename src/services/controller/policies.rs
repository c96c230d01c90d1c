//! Keeps the RabbitMQ policies of a pool. A policy applies to existing queues and can change; queue arguments cannot.

use serde_json::{Map, Value};
use tokio::time::timeout;

use super::queue_names::QueueNames;
use super::topology::message_ttl_ms;
use super::{Controller, ControllerConfig};
use crate::controller::config::PoolConfig;
use journeyman_domain::limits::CONTROLLER_POLICIES_TIMEOUT;
use journeyman_platform::amqp::management::{BrokerPolicy, Management, escape_regex};

const PRIORITY: i64 = 10;

pub(super) type PolicyCheck = Result<(), String>;

pub(super) async fn apply_policies(management: &Management, names: &QueueNames, pool: &PoolConfig) -> PolicyCheck {
    let queues = (format!("{}queues", names.request_queue_prefix()), queue_policy(names, pool));
    for (name, policy) in [queues, (names.requests_exchange(), exchange_policy(names))] {
        if management.ensure_policy(&name, &policy).await.map_err(|why| why.to_string())? {
            tracing::info!(policy = name, "policy applied: its limits hold for existing queues, too");
        }
    }
    Ok(())
}

impl Controller {
    /// Within a short time, so that requests are not delayed when a pool is taken over. `None` without a management interface.
    pub(super) async fn apply_policies(&mut self) -> Option<PolicyCheck> {
        let ControllerConfig { management, names, settings, .. } = self.config.clone();
        let management = management?;
        let apply = apply_policies(&management, &names, &settings);
        let result = self.run_while(timeout(CONTROLLER_POLICIES_TIMEOUT, apply)).await;
        let no_reply = || format!("no reply from the management interface within {CONTROLLER_POLICIES_TIMEOUT:?}");
        let result = result.unwrap_or_else(|_| Err(no_reply()));
        self.on_policy_result(result.clone());
        Some(result)
    }

    pub(super) fn on_policy_result(&mut self, result: PolicyCheck) {
        if let Err(why) = &result
            && self.policy_result.as_ref() != Some(&result)
        {
            let text = "cannot apply policies, so TTL, length and limits hold for new queues only";
            tracing::warn!(pool = self.config.pool, "{text}: {why}");
            self.record_error(format!("policies: {why}"));
        }
        self.policy_result = Some(result);
    }
}

fn queue_policy(names: &QueueNames, pool: &PoolConfig) -> BrokerPolicy {
    let mut definition = Map::new();
    definition.insert("dead-letter-exchange".to_owned(), Value::from(names.dead_letter_exchange()));
    let limit = pool.delivery_limit();
    let numbers = [("message-ttl", message_ttl_ms(pool)), ("max-length", pool.max_length), ("delivery-limit", limit)];
    for (name, value) in numbers {
        definition.extend(value.map(|value| (name.to_owned(), Value::from(value))));
    }
    BrokerPolicy {
        pattern: format!("^{}", escape_regex(&names.request_queue_prefix())),
        apply_to: "queues".to_owned(),
        priority: PRIORITY,
        definition,
    }
}

fn exchange_policy(names: &QueueNames) -> BrokerPolicy {
    BrokerPolicy {
        pattern: format!("^{}$", escape_regex(&names.requests_exchange())),
        apply_to: "exchanges".to_owned(),
        priority: PRIORITY,
        definition: Map::from_iter([("alternate-exchange".to_owned(), Value::from(names.orphan_exchange()))]),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::controller::config::QueueType;
    use journeyman_platform::settings::values::OptionalSpan;

    #[test]
    fn a_policy_is_for_queues_of_its_own_pool_and_says_what_is_configured() {
        let names = QueueNames::new("co.re");
        let message_ttl = OptionalSpan(Some(Duration::from_millis(1_500)));
        let pool = PoolConfig { message_ttl, delivery_limit: Some(3), ..PoolConfig::default() };
        let policy = queue_policy(&names, &pool);
        assert_eq!((policy.pattern.as_str(), policy.apply_to.as_str()), (r"^co\%2Ere\-req\-", "queues"));
        let said: Vec<&str> = policy.definition.keys().map(String::as_str).collect();
        assert_eq!(said, ["dead-letter-exchange", "message-ttl"], "a classic queue has no limit of deliveries");
        let safe = PoolConfig { queue_type: QueueType::Quorum, ..pool };
        assert_eq!(queue_policy(&names, &safe).definition["delivery-limit"], 3);
        let silent = PoolConfig { delivery_limit: None, ..safe };
        assert_eq!(queue_policy(&names, &silent).definition["delivery-limit"], 20, "3.10 has no limit, 4 has this one");
        assert_eq!(exchange_policy(&names).pattern, r"^co\%2Ere\-req\-xchg$");
    }
}
