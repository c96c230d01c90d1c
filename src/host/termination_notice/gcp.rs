//! Google's metadata service: two values, each waited for in a call of its own.

use reqwest::header::HeaderValue;

use super::metadata_service::{MetadataReply as HttpReply, MetadataRequest as HttpCall, MetadataService};
use super::{DueCall, NoticeSink, SinkClosed, next_call};
use crate::domain::termination_notice::gcp::{GcpReply, GcpRequest, GcpTracker, MAINTENANCE_NOTICE, PREEMPTION_NOTICE};
use crate::domain::termination_notice::{PollSchedule, Provider};
use crate::limits::{METADATA_TIMEOUT, NOTICE_LONG_POLL_WAIT};

const FLAVOR: &str = "metadata-flavor";
const GOOGLE: &str = "Google";
const INSTANCE: &str = "/computeMetadata/v1/instance/";

/// What is watched, and what its values mean.
#[derive(Debug, Clone, Copy)]
enum WatchedValue {
    Preempted,
    Maintenance,
}

impl WatchedValue {
    const fn path(self) -> &'static str {
        match self {
            Self::Preempted => "preempted",
            Self::Maintenance => "maintenance-event",
        }
    }

    /// A migration leaves the VM where its tasks are.
    fn parse(self, value: &str) -> Option<GcpReply> {
        match (self, value.trim()) {
            (Self::Preempted, "TRUE") | (Self::Maintenance, "TERMINATE_ON_HOST_MAINTENANCE") => {
                Some(GcpReply::Terminating)
            }
            (Self::Preempted, "FALSE") | (Self::Maintenance, "NONE" | "MIGRATE_ON_HOST_MAINTENANCE") => {
                Some(GcpReply::Staying)
            }
            _ => None,
        }
    }
}

pub(super) async fn responds(service: &MetadataService) -> Option<Provider> {
    let call = HttpCall::get(format!("{INSTANCE}id"), FLAVOR, HeaderValue::from_static(GOOGLE), METADATA_TIMEOUT);
    let reply = service.send(call).await.ok()?;
    (reply.status == 200 && is_from_google(&reply)).then_some(Provider::Gcp)
}

/// Whoever answers for Google says so in a header of the answer.
fn is_from_google(reply: &HttpReply) -> bool {
    reply.header(FLAVOR) == Some(GOOGLE)
}

pub(super) async fn watch(service: &MetadataService, pace: PollSchedule, seed: u64, teller: NoticeSink) {
    tokio::join!(
        watch_value(service, WatchedValue::Preempted, GcpTracker::new(pace, PREEMPTION_NOTICE, seed), &teller),
        watch_value(service, WatchedValue::Maintenance, GcpTracker::new(pace, MAINTENANCE_NOTICE, seed ^ 1), &teller),
    );
}

async fn watch_value(service: &MetadataService, key: WatchedValue, mut rules: GcpTracker, teller: &NoticeSink) {
    let clock = service.clock();
    let mut etag = String::new();
    loop {
        let DueCall { call, sent_at } = next_call(clock, |now| rules.next_request(now)).await;
        let (reply, trouble) = match fetch(service, key, call, &etag).await {
            Ok(told) => {
                etag = told.etag;
                teller.record_answer();
                (told.reply, None)
            }
            Err(trouble) => (GcpReply::Unavailable, Some(trouble)),
        };
        let news = rules.on_reply(call, reply, sent_at, clock.now());
        if let Err(SinkClosed) = teller.report(news, trouble.as_deref()).await {
            return;
        }
    }
}

struct FetchedValue {
    reply: GcpReply,
    /// The value as the service names it, so that a change between two calls is not missed.
    etag: String,
}

async fn fetch(
    service: &MetadataService,
    key: WatchedValue,
    call: GcpRequest,
    etag: &str,
) -> Result<FetchedValue, String> {
    let mut path = format!("{INSTANCE}{}", key.path());
    let mut timeout = METADATA_TIMEOUT;
    if call == GcpRequest::WaitForChange {
        path.push_str(&format!("?wait_for_change=true&timeout_sec={}", NOTICE_LONG_POLL_WAIT.as_secs()));
        if !etag.is_empty() {
            path.push_str(&format!("&last_etag={}", urlencoding::encode(etag)));
        }
        timeout += NOTICE_LONG_POLL_WAIT;
    }
    let reply = service.send(HttpCall::get(path, FLAVOR, HeaderValue::from_static(GOOGLE), timeout)).await?;
    if !is_from_google(&reply) {
        return Err(format!("{}: an answer that is not Google's: it lacks `Metadata-Flavor: Google`", key.path()));
    }
    let read = if reply.status == 200 { key.parse(&reply.body) } else { None };
    let etag = reply.header("etag").unwrap_or_default().to_owned();
    read.map(|read| FetchedValue { reply: read, etag })
        .ok_or_else(|| format!("{}: {}", key.path(), reply.unexpected_reply()))
}
