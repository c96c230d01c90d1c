//! Google's metadata service: two values, each waited for in a call of its own.

use reqwest::header::HeaderValue;

use super::service::{Call as HttpCall, Reply as HttpReply, Service};
use super::{Due, NobodyListens, Teller, due};
use crate::domain::notice::gcp::{Call, MAINTENANCE, PREEMPTED, Reply, Value};
use crate::domain::notice::{Pace, Provider};
use crate::limits::{METADATA_TIMEOUT, NOTICE_CHANGE_WAIT};

const FLAVOR: &str = "metadata-flavor";
const GOOGLE: &str = "Google";
const INSTANCE: &str = "/computeMetadata/v1/instance/";

/// What is watched, and what its values mean.
#[derive(Debug, Clone, Copy)]
enum Key {
    Preempted,
    Maintenance,
}

impl Key {
    const fn name(self) -> &'static str {
        match self {
            Self::Preempted => "preempted",
            Self::Maintenance => "maintenance-event",
        }
    }

    /// A migration leaves the VM where its tasks are.
    fn read(self, value: &str) -> Option<Reply> {
        match (self, value.trim()) {
            (Self::Preempted, "TRUE") | (Self::Maintenance, "TERMINATE_ON_HOST_MAINTENANCE") => Some(Reply::Goes),
            (Self::Preempted, "FALSE") | (Self::Maintenance, "NONE" | "MIGRATE_ON_HOST_MAINTENANCE") => {
                Some(Reply::Stays)
            }
            _ => None,
        }
    }
}

pub(super) async fn there(service: &Service) -> Option<Provider> {
    let call = HttpCall::get(format!("{INSTANCE}id"), FLAVOR, HeaderValue::from_static(GOOGLE), METADATA_TIMEOUT);
    let reply = service.call(call).await.ok()?;
    (reply.status == 200 && genuine(&reply)).then_some(Provider::Gcp)
}

/// Whoever answers for Google says so in a header of the answer.
fn genuine(reply: &HttpReply) -> bool {
    reply.header(FLAVOR) == Some(GOOGLE)
}

pub(super) async fn watch(service: &Service, pace: Pace, seed: u64, teller: Teller) {
    tokio::join!(
        watch_value(service, Key::Preempted, Value::new(pace, PREEMPTED, seed), &teller),
        watch_value(service, Key::Maintenance, Value::new(pace, MAINTENANCE, seed ^ 1), &teller),
    );
}

async fn watch_value(service: &Service, key: Key, mut rules: Value, teller: &Teller) {
    let clock = service.clock();
    let mut etag = String::new();
    loop {
        let Due { call, sent_at } = due(clock, |now| rules.next(now)).await;
        let (reply, trouble) = match ask(service, key, call, &etag).await {
            Ok(told) => {
                etag = told.etag;
                teller.answered();
                (told.reply, None)
            }
            Err(trouble) => (Reply::Trouble, Some(trouble)),
        };
        let news = rules.answered(call, reply, sent_at, clock.now());
        if let Err(NobodyListens) = teller.tell(news, trouble.as_deref()).await {
            return;
        }
    }
}

struct Told {
    reply: Reply,
    /// The value as the service names it, so that a change between two calls is not missed.
    etag: String,
}

async fn ask(service: &Service, key: Key, call: Call, etag: &str) -> Result<Told, String> {
    let mut path = format!("{INSTANCE}{}", key.name());
    let mut timeout = METADATA_TIMEOUT;
    if call == Call::WaitForChange {
        path.push_str(&format!("?wait_for_change=true&timeout_sec={}", NOTICE_CHANGE_WAIT.as_secs()));
        if !etag.is_empty() {
            path.push_str(&format!("&last_etag={}", urlencoding::encode(etag)));
        }
        timeout += NOTICE_CHANGE_WAIT;
    }
    let reply = service.call(HttpCall::get(path, FLAVOR, HeaderValue::from_static(GOOGLE), timeout)).await?;
    if !genuine(&reply) {
        return Err(format!("{}: an answer that is not Google's: it lacks `Metadata-Flavor: Google`", key.name()));
    }
    let read = if reply.status == 200 { key.read(&reply.body) } else { None };
    let etag = reply.header("etag").unwrap_or_default().to_owned();
    read.map(|read| Told { reply: read, etag }).ok_or_else(|| format!("{}: {}", key.name(), reply.unexpected()))
}
