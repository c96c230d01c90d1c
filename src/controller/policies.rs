//! What the broker is asked to do with the queues of a pool by policies, where its management interface is there.
//!
//! A policy holds for queues that are there already, and may be changed; arguments of a queue stay for as long as it does. So what
//! may change goes by policy where that is possible. Where dead letters go is an argument in any case, and said once more here for
//! queues that somebody else has made.

use std::future::pending;
use std::pin::Pin;

use serde_json::{Map, Value};
use tokio::time::sleep;

use super::names::Names;
use super::topology::{Keeping, Profile};
use crate::amqp::management::{Agreed, Management, Policy, literally};
use crate::limits::CONTROLLER_POLICIES_EVERY;

/// That of other tools is 0 as a rule. It is what the known controller has.
const PRIORITY: i64 = 10;

/// The policy of a pool's queues. The known controller has one of the same name, which this one replaces.
pub(super) fn of_queues(names: &Names) -> String {
    format!("{}queues", names.request_queue_start())
}

/// What came of a look at the policies of a pool: whether they had to be made, or why they are not what they should be.
pub(super) type Look = Result<Made, String>;

/// Whether policies had to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Made {
    Before,
    Now,
}

/// Looks at the policies of a pool again and again: somebody may take them away, and the management interface may not be there at
/// first.
pub(super) struct Looks<'a> {
    under_way: Option<Pin<Box<dyn Future<Output = Look> + Send + 'a>>>,
    management: Option<&'a Management>,
    names: &'a Names,
    keeping: Keeping,
}

impl<'a> Looks<'a> {
    /// The first is begun when it is waited for. Without a management interface there is none.
    pub(super) fn new(management: Option<&'a Management>, names: &'a Names, keeping: Keeping) -> Self {
        let first = management.map(|management| Box::pin(agree(management, names, keeping)) as _);
        Self { under_way: first, management, names, keeping }
    }

    /// Waits for the next one.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a look that was begun is gone on with.
    pub(super) async fn next(&mut self) -> Look {
        let (Some(under_way), Some(management)) = (&mut self.under_way, self.management) else {
            return pending().await;
        };
        let look = under_way.await;
        let (names, keeping) = (self.names, self.keeping);
        self.under_way = Some(Box::pin(async move {
            sleep(CONTROLLER_POLICIES_EVERY).await;
            agree(management, names, keeping).await
        }));
        look
    }
}

async fn agree(management: &Management, names: &Names, keeping: Keeping) -> Look {
    let mut made = Made::Before;
    for (name, policy) in [(of_queues(names), queues(names, keeping)), (names.requests(), requests(names))] {
        match management.agree(&name, &policy).await.map_err(|why| why.to_string())? {
            Agreed::Before => {}
            Agreed::Now => made = Made::Now,
            Agreed::Never(how) => return Err(format!("the policy {name} is not what it should be: {how}")),
        }
    }
    Ok(made)
}

fn queues(names: &Names, keeping: Keeping) -> Policy {
    let mut definition = Map::new();
    definition.insert("dead-letter-exchange".to_owned(), Value::from(names.dead_letters()));
    let limit = keeping.delivery_limit.filter(|_| keeping.profile == Profile::Safe);
    let numbers = [("message-ttl", keeping.message_ttl), ("max-length", keeping.max_length), ("delivery-limit", limit)];
    for (name, value) in numbers {
        definition.extend(value.map(|value| (name.to_owned(), Value::from(value))));
    }
    Policy {
        pattern: format!("^{}", literally(&names.request_queue_start())),
        apply_to: "queues".to_owned(),
        priority: PRIORITY,
        definition,
    }
}

fn requests(names: &Names) -> Policy {
    Policy {
        pattern: format!("^{}$", literally(&names.requests())),
        apply_to: "exchanges".to_owned(),
        priority: PRIORITY,
        definition: Map::from_iter([("alternate-exchange".to_owned(), Value::from(names.orphans()))]),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Spelling;
    use super::*;

    #[test]
    fn a_policy_is_for_queues_of_its_own_pool_and_says_what_is_configured() {
        let names = Names::new("co.re", Spelling::Document);
        let keeping = Keeping { message_ttl: Some(1_500), delivery_limit: Some(3), ..Keeping::default() };
        let policy = queues(&names, keeping);
        assert_eq!((policy.pattern.as_str(), policy.apply_to.as_str()), (r"^co\.re\-req\-", "queues"));
        let said: Vec<&str> = policy.definition.keys().map(String::as_str).collect();
        assert_eq!(said, ["dead-letter-exchange", "message-ttl"], "a classic queue has no limit of deliveries");
        let safe = queues(&names, Keeping { profile: Profile::Safe, ..keeping });
        assert_eq!(safe.definition["delivery-limit"], 3);
        assert_eq!(requests(&names).pattern, r"^co\.re\-req\-xchg$");
        assert_eq!(of_queues(&names), "co.re-req-queues");
    }
}
