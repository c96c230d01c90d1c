//! The exchange and the queues that a Screwdriver's build messages go through: what is missing, what loses messages, and the
//! declaration of ones that lose none.

use std::collections::{BTreeMap, BTreeSet};

use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Connection, ExchangeKind};

use crate::screwdriver::config::ScrewdriverSource;
use journeyman_domain::limits::SCREWDRIVER_QUEUES_MAX;
use journeyman_domain::refusal::{CallError, Refusal};
use journeyman_platform::amqp::management::{Binding, ExchangeRouting, Management, ManagementError, QueueRouting};
use journeyman_platform::amqp::{
    self, NOT_FOUND, error_text, find_exchange, find_queue, header_table, reply_code, text_value, to_short_string,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub subject: String,
    pub severity: Severity,
    pub text: String,
    pub fix: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    Ok,
    /// Messages may be lost or late.
    Danger,
    /// Builds are not started or not checked.
    Broken,
}

/// What the broker says.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    exchange_exists: bool,
    /// By name: those of the source, and those that dead letters lead to.
    queues: BTreeMap<String, QueueFacts>,
    /// `None` without a management interface.
    exchange: Option<ExchangeRouting>,
}

#[derive(Debug, Clone, Default)]
struct QueueFacts {
    exists: bool,
    /// `None` without a management interface.
    routing: Option<QueueRouting>,
}

impl Facts {
    /// Looks the exchange and the queues up, as Screwdriver's own worker does at its start; where there is a management
    /// interface also what they do with messages.
    ///
    /// # Errors
    ///
    /// Fails if the broker or its management interface does not answer.
    pub async fn read(
        connection: &Connection,
        management: Option<&Management>,
        source: &ScrewdriverSource,
    ) -> Result<Self, CallError> {
        let mut facts = Self::default();
        let exchange = short(&source.exchange)?;
        facts.exchange_exists = exists("exchange", &source.exchange, find_exchange(connection, exchange).await)?;
        if let Some(management) = management.filter(|_| facts.exchange_exists) {
            facts.exchange = found(management.exchange_routing(&source.exchange).await)?;
        }
        let mut pending: Vec<String> = roles(source).map(|(_, name)| name.to_owned()).collect();
        while let Some(name) = pending.pop().filter(|_| facts.queues.len() < SCREWDRIVER_QUEUES_MAX) {
            if facts.queues.contains_key(&name) {
                continue;
            }
            let exists = exists("queue", &name, find_queue(connection, short(&name)?).await)?;
            let routing = match management.filter(|_| exists) {
                Some(management) => found(management.queue_routing(&name).await)?,
                None => None,
            };
            facts.queues.insert(name.clone(), QueueFacts { exists, routing });
            pending.extend(facts.after(source, &name).into_iter().map(str::to_owned));
        }
        Ok(facts)
    }

    fn routing(&self, queue: &str) -> Option<&QueueRouting> {
        self.queues.get(queue)?.routing.as_ref()
    }

    /// The queues that a message reaches by an exchange; none by one that is not looked at.
    fn reached<'a>(&'a self, source: &ScrewdriverSource, exchange: &str, key: &'a str) -> Vec<&'a str> {
        match &self.exchange {
            _ if exchange.is_empty() => vec![key],
            Some(routing) if exchange == source.exchange => {
                let is_reached = |binding: &&Binding| match routing.kind.as_str() {
                    "topic" => is_match(&words(&binding.routing_key), &words(key)),
                    "fanout" => true,
                    _ => binding.routing_key == key,
                };
                routing.bindings.iter().filter(is_reached).map(|binding| binding.queue.as_str()).collect()
            }
            Some(_) | None => Vec::new(),
        }
    }

    /// The queues that get the dead letters of a queue.
    fn after<'a>(&'a self, source: &ScrewdriverSource, queue: &'a str) -> Vec<&'a str> {
        let Some((exchange, key)) = self.routing(queue).and_then(|routing| dead_letters(routing, queue)) else {
            return Vec::new();
        };
        self.reached(source, exchange, key)
    }

    /// Whether a message that expires in a queue expires in others until it is back: the broker drops it then.
    fn expires_in_circle(&self, source: &ScrewdriverSource, queue: &str) -> bool {
        let (mut pending, mut seen) = (vec![queue], BTreeSet::new());
        while let Some(next) = pending.pop() {
            let expires = self.routing(next).is_some_and(|routing| routing.message_ttl.is_some());
            if expires && seen.insert(next) {
                let after = self.after(source, next);
                if after.contains(&queue) {
                    return true;
                }
                pending.extend(after);
            }
        }
        false
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Main,
    Retry,
    Wait,
}

fn roles(source: &ScrewdriverSource) -> impl Iterator<Item = (Role, &str)> {
    let wait = source.wait_queue.as_deref().map(|wait| (Role::Wait, wait));
    [(Role::Main, source.main_queue.as_str()), (Role::Retry, source.retry_queue.as_str())].into_iter().chain(wait)
}

/// Exchange and key of a queue's dead letters. Messages are published by the name of their queue.
fn dead_letters<'a>(routing: &'a QueueRouting, queue: &'a str) -> Option<(&'a str, &'a str)> {
    Some((routing.dead_letter_exchange.as_deref()?, routing.dead_letter_key.as_deref().unwrap_or(queue)))
}

/// What is missing and what is dangerous; one line for each part that is neither.
pub fn judge(source: &ScrewdriverSource, facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    let exchange = format!("exchange {}", source.exchange);
    let mut of_exchange = Findings { subject: exchange, found: Vec::new() };
    match &facts.exchange {
        _ if !facts.exchange_exists => of_exchange.broken("does not exist", "`--apply` declares it".to_owned()),
        Some(routing) => {
            if routing.kind != "topic" {
                let text = format!("is of type {}, and the queue service expects `topic`", routing.kind);
                of_exchange.danger(text, "declare another one, and name it in `exchange`");
            }
            if let Some(catch_all) = routing.bindings.iter().find(|binding| binding.routing_key.is_empty()) {
                let text = format!(
                    "queue {} is bound with an empty key, which catches no message: those without a queue are confirmed and gone",
                    catch_all.queue
                );
                of_exchange.danger(
                    text,
                    "give the exchange an alternate exchange (policy `alternate-exchange`) that leads to the queue",
                );
            }
        }
        None => of_exchange
            .danger("exists; bindings, and arguments of queues, were not checked", "set `amqp.management_url`"),
    }
    findings.extend(of_exchange.or_ok("exists"));
    for (role, name) in roles(source) {
        let mut of_queue = Findings { subject: format!("queue {name}"), found: Vec::new() };
        match facts.queues.get(name) {
            Some(QueueFacts { exists: true, routing: Some(routing) }) => {
                judge_queue(source, facts, role, (name, routing), &mut of_queue);
            }
            Some(QueueFacts { exists: true, routing: None }) => {}
            Some(QueueFacts { exists: false, .. }) | None => {
                of_queue.broken("does not exist", "`--apply` declares it".to_owned());
            }
        }
        findings.extend(of_queue.or_ok("exists"));
    }
    findings
}

fn judge_queue(
    source: &ScrewdriverSource,
    facts: &Facts,
    role: Role,
    (name, routing): (&str, &QueueRouting),
    found: &mut Findings,
) {
    let exchange = &source.exchange;
    if !facts.reached(source, exchange, name).contains(&name) {
        let text = format!("is not bound to {exchange} by its name: messages for it are confirmed and gone");
        found.broken(text, "`--apply` binds it".to_owned());
    }
    if !routing.is_durable {
        found.danger("is not durable: its messages are gone when the broker restarts", REDECLARE);
    }
    if routing.is_mirrored {
        found.danger(
            "has a policy with `ha-mode`: RabbitMQ 4 has no mirrored classic queues",
            "remove the policy before an upgrade",
        );
    }
    let dead = dead_letters(routing, name);
    let mut after = facts.after(source, name);
    after.retain(|queue| facts.queues.get(*queue).is_some_and(|queue| queue.exists));
    match dead {
        // Another exchange is not looked at.
        Some((to, key)) if after.is_empty() && (to.is_empty() || to == exchange) => {
            let text = format!("sends dead letters with the key {key}, which leads to no queue: they are gone");
            found.broken(text, format!("declare a queue {key} whose messages expire into this one, and bind it"));
        }
        Some(_) => {}
        None if role == Role::Wait => {
            found.broken("has no dead letter exchange: checks expire there and are gone", REDECLARE.to_owned());
        }
        None if role == Role::Main => {
            found.broken(
                "has no dead letter exchange: builds that are to be started again later are gone",
                REDECLARE.to_owned(),
            );
        }
        None => found.danger(
            "has no dead letter exchange: messages that Screwdriver's own worker rejects are gone",
            "let only this worker consume it, or declare it with one",
        ),
    }
    let ttl = routing.message_ttl.map(|ttl| format!("messages expire after {ttl:?}")).filter(|_| role != Role::Wait);
    match ttl {
        Some(ttl) if facts.expires_in_circle(source, name) => {
            let text = format!("{ttl} and come back by expiring again: the broker drops such a message silently");
            found.danger(text, "declare it without `x-message-ttl`");
        }
        Some(ttl) if role == Role::Retry || dead.is_none() => {
            found.danger(format!("{ttl}: builds are not checked then"), "declare it without `x-message-ttl`");
        }
        Some(_) | None => {}
    }
    if role == Role::Wait {
        if dead.is_some() && !after.is_empty() && !after.contains(&source.retry_queue.as_str()) {
            let text = format!("sends expired checks to {} and not to {}", after.join(", "), source.retry_queue);
            found.broken(text, format!("declare it with the dead letter key {}", source.retry_queue));
        }
        found.danger(
            "a check with a short delay waits there for longer ones in front of it",
            "leave `wait_queue` out: this worker has delays that do not",
        );
    }
}

const REDECLARE: &str = "delete it while it is empty, and declare it with `--apply`";

struct Findings {
    subject: String,
    found: Vec<Finding>,
}

impl Findings {
    fn push(&mut self, severity: Severity, text: String, fix: String) {
        self.found.push(Finding { subject: self.subject.clone(), severity, text, fix });
    }

    fn danger(&mut self, text: impl Into<String>, fix: &str) {
        self.push(Severity::Danger, text.into(), fix.to_owned());
    }

    fn broken(&mut self, text: impl Into<String>, fix: String) {
        self.push(Severity::Broken, text.into(), fix);
    }

    fn or_ok(mut self, text: &str) -> Vec<Finding> {
        if self.found.is_empty() {
            self.push(Severity::Ok, text.to_owned(), String::new());
        }
        self.found
    }
}

/// Declares what is missing, and binds the queues by their names. Changes no queue that exists.
///
/// # Errors
///
/// Fails if the broker refuses.
pub async fn apply(
    connection: &Connection,
    facts: &Facts,
    source: &ScrewdriverSource,
) -> Result<Vec<Finding>, CallError> {
    let exchange = &source.exchange;
    let mut done = Vec::new();
    let mut tell = |subject: String, text: String| {
        done.push(Finding { subject, severity: Severity::Ok, text, fix: String::new() });
    };
    let calls = async {
        let channel = connection.create_channel().await?;
        if !facts.exchange_exists {
            amqp::declare_exchange(&channel, exchange, ExchangeKind::Topic, FieldTable::default()).await?;
            tell(format!("exchange {exchange}"), "declared: topic, durable".to_owned());
        }
        for queue in plan(source) {
            let (name, is_missing) = (queue.name.as_str(), queue.is_missing(facts));
            // A queue for rejected messages may be there without the other.
            if is_missing && (queue.delays.is_none() || find_queue(connection, name.into()).await.is_err()) {
                amqp::declare_queue(&channel, name, queue.arguments(exchange)).await?;
                tell(format!("queue {name}"), format!("declared: durable, {}", queue.describe(exchange)));
            }
            if (is_missing || queue.delays.is_none()) && !facts.reached(source, exchange, name).contains(&name) {
                amqp::bind_queue(&channel, name, exchange, name).await?;
                tell(format!("queue {name}"), format!("bound to {exchange} by its name"));
            }
        }
        channel.close(lapin::protocol::constants::REPLY_SUCCESS, "OK".into()).await
    };
    let failed = |error: lapin::Error| {
        let message = format!("cannot declare the queues of {exchange}: {}", error_text(&error));
        CallError::new(amqp::refusal(&error), message)
    };
    calls.await.map_err(failed)?;
    Ok(done)
}

#[derive(Default)]
struct PlannedQueue {
    name: String,
    /// The queue of the source whose rejected messages it delays.
    delays: Option<String>,
    dead_letters_to: String,
    ttl_ms: Option<i64>,
    has_priorities: bool,
}

impl PlannedQueue {
    /// A queue and the one that delays its rejected messages.
    fn pair(name: &str, ttl_ms: i64) -> [Self; 2] {
        let (name, delay) = (name.to_owned(), format!("{name}dlr"));
        let own = Self { name: name.clone(), dead_letters_to: delay.clone(), has_priorities: true, ..Self::default() };
        let delays = Some(name.clone());
        [own, Self { name: delay, delays, dead_letters_to: name, ttl_ms: Some(ttl_ms), has_priorities: false }]
    }

    /// Whether it is missing. One that only delays is declared with the queue that needs it.
    fn is_missing(&self, facts: &Facts) -> bool {
        let name = self.delays.as_ref().unwrap_or(&self.name);
        !facts.queues.get(name).is_some_and(|queue| queue.exists)
    }

    fn arguments(&self, exchange: &str) -> FieldTable {
        const PRIORITY_MAX: i32 = 3;
        let ttl = self.ttl_ms.map(|ttl_ms| ("x-message-ttl", AMQPValue::LongLongInt(ttl_ms)));
        let priorities = self.has_priorities.then_some(("x-max-priority", AMQPValue::LongInt(PRIORITY_MAX)));
        let always = [
            ("x-queue-type", text_value("classic")),
            ("x-dead-letter-exchange", text_value(exchange)),
            ("x-dead-letter-routing-key", text_value(&self.dead_letters_to)),
        ];
        header_table(always.into_iter().chain(ttl).chain(priorities))
    }

    fn describe(&self, exchange: &str) -> String {
        let ttl = self.ttl_ms.map(|ttl_ms| format!(", messages expire after {ttl_ms} ms")).unwrap_or_default();
        format!("dead letters to {exchange} with the key {}{ttl}", self.dead_letters_to)
    }
}

/// Screwdriver's queues, but none lets messages expire in a circle, and none drops what is rejected.
fn plan(source: &ScrewdriverSource) -> impl Iterator<Item = PlannedQueue> {
    const MAIN_DELAY_MS: i64 = 5_000;
    const RETRY_DELAY_MS: i64 = 60_000;
    let wait = source.wait_queue.iter().map(|wait| PlannedQueue {
        name: wait.clone(),
        dead_letters_to: source.retry_queue.clone(),
        ..PlannedQueue::default()
    });
    let main = PlannedQueue::pair(&source.main_queue, MAIN_DELAY_MS);
    main.into_iter().chain(PlannedQueue::pair(&source.retry_queue, RETRY_DELAY_MS)).chain(wait)
}

fn short(name: &str) -> Result<ShortString, CallError> {
    to_short_string("the name of a queue or an exchange", name)
        .map_err(|error| CallError { refusal: Refusal::Rejected, message: error.to_string() })
}

fn exists<T>(what: &str, name: &str, answer: lapin::Result<T>) -> Result<bool, CallError> {
    match answer {
        Ok(_) => Ok(true),
        Err(error) if reply_code(&error) == Some(NOT_FOUND) => Ok(false),
        Err(error) => Err(CallError::retry(format!("cannot look up {what} {name}: {}", error_text(&error)))),
    }
}

fn found<T>(answer: Result<T, ManagementError>) -> Result<Option<T>, CallError> {
    match answer {
        Ok(found) => Ok(Some(found)),
        Err(ManagementError::NotFound) => Ok(None),
        Err(ManagementError::Failed(why)) => Err(CallError::retry(why)),
    }
}

fn words(key: &str) -> Vec<&str> {
    key.split('.').collect()
}

/// True if a topic exchange lets a key through.
fn is_match(pattern: &[&str], key: &[&str]) -> bool {
    match pattern.split_first() {
        None => key.is_empty(),
        Some((&"#", rest)) => (0..=key.len()).any(|skipped| is_match(rest, &key[skipped..])),
        Some((word, rest)) => {
            key.split_first().is_some_and(|(first, key)| (*word == "*" || word == first) && is_match(rest, key))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;

    fn source(wait: Option<&str>) -> ScrewdriverSource {
        ScrewdriverSource { wait_queue: wait.map(str::to_owned), ..ScrewdriverSource::default() }
    }

    fn routing(ttl: Option<u64>, dead_letter_key: Option<&str>) -> QueueRouting {
        QueueRouting {
            is_durable: true,
            message_ttl: ttl.map(Duration::from_millis),
            dead_letter_exchange: dead_letter_key.map(|_| "build".to_owned()),
            dead_letter_key: dead_letter_key.map(str::to_owned),
            is_mirrored: false,
        }
    }

    /// A broker with these queues, each bound by its name.
    fn facts(queues: &[(&str, QueueRouting)]) -> Facts {
        let bindings: Vec<Value> = queues.iter().map(|(name, _)| binding(name, name)).collect();
        let exists = |(name, routing): &(&str, QueueRouting)| {
            ((*name).to_owned(), QueueFacts { exists: true, routing: Some(routing.clone()) })
        };
        let bindings = serde_json::from_value(bindings.into()).unwrap();
        Facts {
            exchange_exists: true,
            queues: queues.iter().map(exists).collect(),
            exchange: Some(ExchangeRouting { kind: "topic".to_owned(), bindings }),
        }
    }

    fn binding(queue: &str, key: &str) -> Value {
        json!({ "destination": queue, "destination_type": "queue", "routing_key": key })
    }

    /// The seed's broker.
    fn seed() -> Vec<(&'static str, QueueRouting)> {
        vec![
            ("sdQueue", routing(Some(28_800_000), Some("sdQueuedlr"))),
            ("sdQueuedlr", routing(Some(5_000), Some("sdQueue"))),
            ("sdRetryQueue", routing(None, None)),
            ("sdRetryQueue-wait", routing(None, Some("sdRetryQueue"))),
        ]
    }

    fn told(facts: &Facts, wait: Option<&str>) -> Vec<(Severity, String)> {
        judge(&source(wait), facts)
            .into_iter()
            .map(|one| (one.severity, format!("{} {}", one.subject, one.text)))
            .collect()
    }

    #[track_caller]
    fn says(facts: &Facts, severity: Severity, words: &str) {
        let found = told(facts, None);
        assert!(found.iter().any(|(one, text)| *one == severity && text.contains(words)), "{words}: {found:?}");
    }

    #[test]
    fn the_dangers_of_the_seeds_queues_are_named() {
        let found = told(&facts(&seed()), Some("sdRetryQueue-wait"));
        let expected = [
            (Severity::Ok, "exchange build exists"),
            (
                Severity::Danger,
                "queue sdQueue messages expire after 28800s and come back by expiring again: the broker drops such a message silently",
            ),
            (
                Severity::Danger,
                "queue sdRetryQueue has no dead letter exchange: messages that Screwdriver's own worker rejects are gone",
            ),
            (
                Severity::Danger,
                "queue sdRetryQueue-wait a check with a short delay waits there for longer ones in front of it",
            ),
        ];
        assert_eq!(found, expected.map(|(severity, text)| (severity, text.to_owned())));
    }

    #[test]
    fn what_is_declared_has_no_danger() {
        let source = source(None);
        let planned: Vec<PlannedQueue> = plan(&source).collect();
        let queues: Vec<(&str, QueueRouting)> = planned
            .iter()
            .map(|queue| {
                let ttl = queue.ttl_ms.map(|ttl_ms| u64::try_from(ttl_ms).unwrap());
                (queue.name.as_str(), routing(ttl, Some(&queue.dead_letters_to)))
            })
            .collect();
        let found = told(&facts(&queues), None);
        assert!(found.iter().all(|(severity, _)| *severity == Severity::Ok) && found.len() == 3, "{found:?}");
    }

    #[test]
    fn what_is_missing_is_broken() {
        let nothing = told(&Facts::default(), Some("w"));
        assert!(nothing.iter().all(|(severity, _)| *severity == Severity::Broken) && nothing.len() == 4, "{nothing:?}");
        let mut unbound = facts(&seed());
        unbound.exchange.as_mut().unwrap().bindings.retain(|binding| binding.queue != "sdQueue");
        says(&unbound, Severity::Broken, "queue sdQueue is not bound to build by its name");
        let mut queues = seed();
        queues.remove(1);
        says(
            &facts(&queues),
            Severity::Broken,
            "queue sdQueue sends dead letters with the key sdQueuedlr, which leads to no queue",
        );
        for (wait, words) in [
            (routing(None, None), "queue w has no dead letter exchange"),
            (routing(None, Some("sdQueue")), "queue w sends expired checks to sdQueue and not to sdRetryQueue"),
        ] {
            let mut queues = seed();
            queues.push(("w", wait));
            let found = told(&facts(&queues), Some("w"));
            assert!(found.iter().any(|(one, text)| *one == Severity::Broken && text.starts_with(words)), "{found:?}");
        }
    }

    #[test]
    fn what_may_lose_messages_is_dangerous() {
        let mut seed = facts(&seed());
        let exchange = seed.exchange.as_mut().unwrap();
        exchange.bindings.push(serde_json::from_value(binding("default", "")).unwrap());
        "direct".clone_into(&mut exchange.kind);
        says(&seed, Severity::Danger, "exchange build queue default is bound with an empty key");
        says(&seed, Severity::Danger, "exchange build is of type direct");
        let retry = seed.queues.get_mut("sdRetryQueue").unwrap().routing.as_mut().unwrap();
        *retry = QueueRouting { is_durable: false, is_mirrored: true, ..routing(Some(1_000), None) };
        for words in ["is not durable", "ha-mode", "messages expire after 1s: builds are not checked then"] {
            says(
                &seed,
                Severity::Danger,
                &format!("queue sdRetryQueue {words}").replace(" ha-mode", " has a policy with `ha-mode`"),
            );
        }
        seed.exchange = None;
        says(&seed, Severity::Danger, "were not checked");
    }

    #[test]
    fn a_key_is_matched_as_a_topic_exchange_does() {
        for (pattern, key, is_matched) in [
            ("a", "a", true),
            ("a", "b", false),
            ("", "", true),
            ("", "a", false),
            ("#", "a.b", true),
            ("#", "", true),
            ("*", "a", true),
            ("*", "a.b", false),
            ("a.#.c", "a.c", true),
            ("a.#.c", "a.b.b.c", true),
            ("a.*.c", "a.c", false),
        ] {
            assert_eq!(is_match(&words(pattern), &words(key)), is_matched, "{pattern} {key}");
        }
    }
}
