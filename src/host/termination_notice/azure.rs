//! Azure's metadata service: the name of this VM, then the scheduled events of its whole availability set.

use jiff::Timestamp;
use reqwest::header::HeaderValue;
use serde::Deserialize;

use super::metadata_service::{MetadataClient, MetadataReply as HttpReply, MetadataRequest as HttpCall};
use super::{DueCall, NoticeSink, SinkClosed, next_call};
use crate::domain::termination_notice::azure::{
    AzureRequest, AzureTimeout, AzureTracker, EVENT_NOTICE_MIN, FIRST_REPLY_TIMEOUT, VmEvent, VmEventKind,
};
use crate::domain::termination_notice::{NoticeOrigin, PollSchedule, Termination};
use crate::domain::time::Instant;
use crate::limits::{METADATA_TIMEOUT, NOTICE_EVENTS_MAX};

const COMPUTE: &str = "/metadata/instance/compute?api-version=2021-02-01&format=json";
const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";

#[derive(Deserialize)]
struct ComputeMetadata {
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct EventList {
    events: Vec<ScheduledEvent>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ScheduledEvent {
    event_type: String,
    #[serde(default)]
    resources: Vec<String>,
    #[serde(default)]
    event_status: String,
    #[serde(default)]
    not_before: String,
}

pub(super) async fn responds(service: &MetadataClient) -> Option<NoticeOrigin> {
    fetch_vm_name(service).await.ok().map(|_| NoticeOrigin::Azure)
}

pub(super) async fn watch(service: &MetadataClient, schedule: PollSchedule, seed: u64, sink: NoticeSink) {
    let (mut tracker, clock) = (AzureTracker::new(schedule, seed), service.clock());
    loop {
        let DueCall { call, sent_at } = next_call(clock, |now| tracker.next_request(now)).await;
        let (event, error) = match call {
            AzureRequest::Name => {
                let name = fetch_vm_name(service).await;
                let event = tracker.on_name(name.as_deref().ok(), sent_at, clock.now());
                (event, name.err())
            }
            AzureRequest::Events(timeout) => {
                let events = fetch_events(service, timeout, sent_at).await;
                let event = tracker.on_events(events.as_deref().ok(), sent_at, clock.now());
                if events.is_ok() {
                    sink.record_answer();
                }
                (event, events.err())
            }
        };
        if let Err(SinkClosed) = sink.report(event, error.as_deref()).await {
            return;
        }
    }
}

fn metadata_request(path: &str, timeout: std::time::Duration) -> HttpCall {
    HttpCall::get(path, "metadata", HeaderValue::from_static("true"), timeout)
}

async fn fetch_vm_name(service: &MetadataClient) -> Result<String, String> {
    let reply = service.send(metadata_request(COMPUTE, METADATA_TIMEOUT)).await?;
    let compute = (reply.status == 200).then(|| serde_json::from_str(&reply.body).ok()).flatten();
    compute.map(|ComputeMetadata { name }| name).ok_or_else(|| reply.unexpected_reply())
}

async fn fetch_events(
    service: &MetadataClient,
    timeout: AzureTimeout,
    sent_at: Instant,
) -> Result<Vec<VmEvent>, String> {
    let timeout = match timeout {
        AzureTimeout::Default => METADATA_TIMEOUT,
        AzureTimeout::FirstReply => FIRST_REPLY_TIMEOUT,
    };
    let reply = service.send(metadata_request(EVENTS, timeout)).await?;
    let list = (reply.status == 200).then(|| serde_json::from_str(&reply.body).ok()).flatten();
    let EventList { events } = list.ok_or_else(|| reply.unexpected_reply())?;
    Ok(events.into_iter().take(NOTICE_EVENTS_MAX).map(|event| to_scheduled(event, &reply, sent_at)).collect())
}

fn to_scheduled(event: ScheduledEvent, reply: &HttpReply, sent_at: Instant) -> VmEvent {
    let kind = match event.event_type.as_str() {
        "Preempt" | "Terminate" | "Reboot" | "Redeploy" => VmEventKind::Terminates,
        "Freeze" => VmEventKind::Freezes,
        _ => VmEventKind::Other,
    };
    // An event without a time has started.
    let termination = match parse_time(&event.not_before) {
        Some(at) => Termination::At(reply.to_local_clock(at, sent_at)),
        None if event.not_before.trim().is_empty() || event.event_status == "Started" => Termination::Soon,
        None => Termination::At(sent_at.plus(EVENT_NOTICE_MIN)),
    };
    VmEvent { kind, resources: event.resources.into_iter().map(String::into_boxed_str).collect(), termination }
}

/// `Mon, 19 Sep 2016 18:29:47 GMT` as documented, or RFC 3339.
fn parse_time(text: &str) -> Option<Timestamp> {
    let text = text.trim();
    text.parse().ok().or_else(|| jiff::fmt::rfc2822::parse(text).ok().map(|zoned| zoned.timestamp()))
}
