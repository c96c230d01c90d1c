//! Azure's metadata service: the name of this VM, then the scheduled events of its whole availability set.

use std::time::Duration;

use jiff::Timestamp;
use reqwest::Method;
use reqwest::header::HeaderValue;
use serde::Deserialize;

use super::NoticeReader;
use super::metadata_service::{MetadataClient, MetadataReply};
use journeyman_domain::limits::METADATA_TIMEOUT;
use journeyman_domain::termination_notice::{NoticeReading, Termination};
use journeyman_domain::time::Instant;

const COMPUTE: &str = "/metadata/instance/compute?api-version=2021-02-01&format=json";
const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";
/// The first request for events starts the service, which takes up to two minutes.
const FIRST_REPLY_TIMEOUT: Duration = Duration::from_secs(130);

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
    /// Empty once the event has started.
    #[serde(default)]
    not_before: String,
}

pub(super) async fn responds(client: &MetadataClient) -> bool {
    fetch_vm_name(client).await.is_ok()
}

pub(super) struct Reader<'a> {
    client: &'a MetadataClient,
    vm_name: Option<String>,
    events_timeout: Duration,
}

impl<'a> Reader<'a> {
    pub(super) const fn new(client: &'a MetadataClient) -> Self {
        Self { client, vm_name: None, events_timeout: FIRST_REPLY_TIMEOUT }
    }
}

impl NoticeReader for Reader<'_> {
    async fn read(&mut self, sent_at: Instant) -> Result<NoticeReading, String> {
        let vm_name = match &self.vm_name {
            Some(name) => name,
            None => self.vm_name.insert(fetch_vm_name(self.client).await?),
        };
        let reply = get(self.client, EVENTS, self.events_timeout).await?;
        let EventList { events } = reply.json()?;
        self.events_timeout = METADATA_TIMEOUT;
        let times = events.iter().filter(|event| event.terminates(vm_name)).map(|event| parse_time(&event.not_before));
        // `None` sorts first: an event under way outranks a scheduled one.
        let earliest = times.map(|time| time.map(|time| reply.to_local_clock(time, sent_at))).min();
        Ok(earliest.map_or(NoticeReading::Nothing, |at| {
            NoticeReading::Terminating(at.map_or(Termination::Soon, Termination::At))
        }))
    }
}

async fn get(client: &MetadataClient, path: &str, timeout: Duration) -> Result<MetadataReply, String> {
    client.send(Method::GET, path, ("metadata", HeaderValue::from_static("true")), timeout).await
}

async fn fetch_vm_name(client: &MetadataClient) -> Result<String, String> {
    let reply = get(client, COMPUTE, METADATA_TIMEOUT).await?;
    let ComputeMetadata { name } = reply.json()?;
    if name.is_empty() { Err(reply.unexpected_reply()) } else { Ok(name) }
}

impl ScheduledEvent {
    /// Whether the VM ends, restarts, or moves to another host without its memory. A freeze takes some seconds.
    fn terminates(&self, vm_name: &str) -> bool {
        matches!(self.event_type.as_str(), "Preempt" | "Terminate" | "Reboot" | "Redeploy")
            && self.resources.iter().any(|resource| resource.eq_ignore_ascii_case(vm_name))
    }
}

/// `Mon, 19 Sep 2016 18:29:47 GMT` as documented, or RFC 3339.
fn parse_time(text: &str) -> Option<Timestamp> {
    let text = text.trim();
    text.parse().ok().or_else(|| jiff::fmt::rfc2822::parse(text).ok().map(|zoned| zoned.timestamp()))
}
