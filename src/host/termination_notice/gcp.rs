//! Google's metadata service: two values.

use std::time::Duration;

use reqwest::Method;
use reqwest::header::HeaderValue;

use super::NoticeReader;
use super::metadata_service::{MetadataClient, MetadataReply};
use crate::domain::termination_notice::{NoticeReading, Termination};
use crate::domain::time::Instant;
use crate::limits::METADATA_TIMEOUT;

const FLAVOR: &str = "metadata-flavor";
const GOOGLE: &str = "Google";
const INSTANCE: &str = "/computeMetadata/v1/instance/";

pub(super) async fn responds(client: &MetadataClient) -> bool {
    get(client, "id").await.is_ok_and(|reply| reply.status == 200)
}

/// A value that announces the end of the VM.
#[derive(Clone, Copy)]
pub(super) struct WatchedValue {
    name: &'static str,
    staying: &'static [&'static str],
    terminating: &'static str,
    /// Google's documented time from the change of the value to the end of the VM.
    notice: Duration,
}

pub(super) const PREEMPTION: WatchedValue =
    WatchedValue { name: "preempted", staying: &["FALSE"], terminating: "TRUE", notice: Duration::from_secs(30) };

/// A live migration does not stop the VM. Hosts with GPUs get an hour's notice, which cannot be told from here.
pub(super) const MAINTENANCE: WatchedValue = WatchedValue {
    name: "maintenance-event",
    staying: &["NONE", "MIGRATE_ON_HOST_MAINTENANCE"],
    terminating: "TERMINATE_ON_HOST_MAINTENANCE",
    notice: Duration::from_secs(60),
};

pub(super) struct Reader<'a> {
    client: &'a MetadataClient,
    value: WatchedValue,
    last_staying_at: Option<Instant>,
}

impl<'a> Reader<'a> {
    pub(super) const fn new(client: &'a MetadataClient, value: WatchedValue) -> Self {
        Self { client, value, last_staying_at: None }
    }
}

impl NoticeReader for Reader<'_> {
    async fn read(&mut self, sent_at: Instant) -> Result<NoticeReading, String> {
        let WatchedValue { name, staying, terminating, notice } = self.value;
        let reply = get(self.client, name).await?;
        let value = reply.body.trim();
        if reply.status == 200 && staying.contains(&value) {
            self.last_staying_at = Some(sent_at);
            return Ok(NoticeReading::Nothing);
        }
        if reply.status != 200 || value != terminating {
            return Err(format!("{name}: {}", reply.unexpected_reply()));
        }
        // The value has changed after it was last read; before the first read at any time.
        let at = self.last_staying_at.map(|at| at.plus(notice));
        Ok(NoticeReading::Terminating(at.map_or(Termination::Soon, Termination::At)))
    }
}

/// Google's service identifies itself in a header.
async fn get(client: &MetadataClient, name: &str) -> Result<MetadataReply, String> {
    let path = format!("{INSTANCE}{name}");
    let reply = client.send(Method::GET, &path, (FLAVOR, HeaderValue::from_static(GOOGLE)), METADATA_TIMEOUT).await?;
    if reply.header(FLAVOR) == Some(GOOGLE) {
        Ok(reply)
    } else {
        Err(format!("{path}: the reply is not Google's: it has no `Metadata-Flavor: Google`"))
    }
}
