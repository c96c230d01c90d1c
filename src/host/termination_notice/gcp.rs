//! Google's metadata service: long polls for two values.

use reqwest::header::HeaderValue;

use super::metadata_service::{MetadataClient, MetadataReply as HttpReply, MetadataRequest as HttpCall};
use super::{DueCall, NoticeSink, SinkClosed, next_call};
use crate::domain::termination_notice::gcp::{GcpReply, GcpRequest, GcpTracker, MAINTENANCE_NOTICE, PREEMPTION_NOTICE};
use crate::domain::termination_notice::{NoticeOrigin, PollSchedule};
use crate::limits::{METADATA_TIMEOUT, NOTICE_LONG_POLL_WAIT};

const FLAVOR: &str = "metadata-flavor";
const GOOGLE: &str = "Google";
const INSTANCE: &str = "/computeMetadata/v1/instance/";

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

    /// A live migration does not stop the VM.
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

pub(super) async fn responds(service: &MetadataClient) -> Option<NoticeOrigin> {
    let call = HttpCall::get(format!("{INSTANCE}id"), FLAVOR, HeaderValue::from_static(GOOGLE), METADATA_TIMEOUT);
    let reply = service.send(call).await.ok()?;
    (reply.status == 200 && is_from_google(&reply)).then_some(NoticeOrigin::Gcp)
}

/// Google's service identifies itself in a header.
fn is_from_google(reply: &HttpReply) -> bool {
    reply.header(FLAVOR) == Some(GOOGLE)
}

pub(super) async fn watch(service: &MetadataClient, schedule: PollSchedule, seed: u64, sink: NoticeSink) {
    tokio::join!(
        watch_value(service, WatchedValue::Preempted, GcpTracker::new(schedule, PREEMPTION_NOTICE, seed), &sink),
        watch_value(service, WatchedValue::Maintenance, GcpTracker::new(schedule, MAINTENANCE_NOTICE, seed ^ 1), &sink),
    );
}

async fn watch_value(service: &MetadataClient, value: WatchedValue, mut tracker: GcpTracker, sink: &NoticeSink) {
    let clock = service.clock();
    let mut etag = String::new();
    loop {
        let DueCall { call, sent_at } = next_call(clock, |now| tracker.next_request(now)).await;
        let (reply, error) = match fetch(service, value, call, &etag).await {
            Ok(fetched) => {
                etag = fetched.etag;
                sink.record_answer();
                (fetched.reply, None)
            }
            Err(error) => (GcpReply::Unavailable, Some(error)),
        };
        let event = tracker.on_reply(call, reply, sent_at, clock.now());
        if let Err(SinkClosed) = sink.report(event, error.as_deref()).await {
            return;
        }
    }
}

struct FetchedValue {
    reply: GcpReply,
    /// Sent with the next long poll, so that a change between two polls is not missed.
    etag: String,
}

async fn fetch(
    service: &MetadataClient,
    value: WatchedValue,
    call: GcpRequest,
    etag: &str,
) -> Result<FetchedValue, String> {
    let mut path = format!("{INSTANCE}{}", value.path());
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
        return Err(format!("{}: the reply is not Google's: it has no `Metadata-Flavor: Google`", value.path()));
    }
    let parsed = if reply.status == 200 { value.parse(&reply.body) } else { None };
    let etag = reply.header("etag").unwrap_or_default().to_owned();
    parsed
        .map(|reply| FetchedValue { reply, etag })
        .ok_or_else(|| format!("{}: {}", value.path(), reply.unexpected_reply()))
}
