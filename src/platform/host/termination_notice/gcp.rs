//! Google's metadata service: long polls for two values.

use std::time::Duration;

use reqwest::Method;
use reqwest::header::HeaderValue;

use super::NoticeReader;
use super::metadata_service::{MetadataClient, MetadataReply};
use journeyman_domain::limits::{METADATA_TIMEOUT, NOTICE_LONG_POLL_WAIT};
use journeyman_domain::termination_notice::{NoticeReading, Termination};
use journeyman_domain::time::Instant;

const FLAVOR: &str = "metadata-flavor";
const GOOGLE: &str = "Google";
const INSTANCE: &str = "/computeMetadata/v1/instance/";

pub(super) async fn responds(client: &MetadataClient) -> bool {
    get(client, &format!("{INSTANCE}id"), METADATA_TIMEOUT).await.is_ok_and(|reply| reply.status == 200)
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

/// Watches a value with `wait_for_change`.
pub(super) struct Reader<'a> {
    client: &'a MetadataClient,
    value: WatchedValue,
    /// Of the last value, if its change can be waited for. Sent with the long poll, so that a change between two polls is not missed.
    etag: Option<String>,
    last_staying_at: Option<Instant>,
}

impl<'a> Reader<'a> {
    pub(super) const fn new(client: &'a MetadataClient, value: WatchedValue) -> Self {
        Self { client, value, etag: None, last_staying_at: None }
    }
}

impl NoticeReader for Reader<'_> {
    async fn read(&mut self, _: Instant) -> Result<NoticeReading, String> {
        let WatchedValue { name, staying, terminating, notice } = self.value;
        let (mut path, mut timeout) = (format!("{INSTANCE}{name}"), METADATA_TIMEOUT);
        // Taken, so that the value is read without waiting after an error.
        let etag = self.etag.take();
        if let Some(etag) = &etag {
            path.push_str(&format!("?wait_for_change=true&timeout_sec={}", NOTICE_LONG_POLL_WAIT.as_secs()));
            if !etag.is_empty() {
                path.push_str(&format!("&last_etag={}", urlencoding::encode(etag)));
            }
            timeout += NOTICE_LONG_POLL_WAIT;
        }
        let reply = get(self.client, &path, timeout).await?;
        let (value, now) = (reply.body.trim(), self.client.clock.now());
        let stays = staying.contains(&value);
        if reply.status != 200 || !stays && value != terminating {
            return Err(format!("{name}: {}", reply.unexpected_reply()));
        }
        if stays {
            self.last_staying_at = Some(now);
        }
        let next_etag = reply.header("etag").unwrap_or_default().to_owned();
        self.etag = self.last_staying_at.is_some().then_some(next_etag);
        if stays {
            return Ok(NoticeReading::Nothing);
        }
        // A long poll returns at the change; a read may be late by the time since the last one, and the first read by any time.
        let changed_at = if etag.is_some() { Some(now) } else { self.last_staying_at };
        Ok(NoticeReading::Terminating(changed_at.map_or(Termination::Soon, |at| Termination::At(at.plus(notice)))))
    }
}

/// Google's service identifies itself in a header.
async fn get(client: &MetadataClient, path: &str, timeout: Duration) -> Result<MetadataReply, String> {
    let reply = client.send(Method::GET, path, (FLAVOR, HeaderValue::from_static(GOOGLE)), timeout).await?;
    if reply.header(FLAVOR) == Some(GOOGLE) {
        Ok(reply)
    } else {
        Err(format!("{path}: the reply is not Google's: it has no `Metadata-Flavor: Google`"))
    }
}
