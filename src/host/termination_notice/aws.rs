//! EC2's instance metadata service, version 2: every request needs a token.

use jiff::Timestamp;
use reqwest::Method;
use reqwest::header::HeaderValue;
use serde::Deserialize;

use super::NoticeReader;
use super::metadata_service::MetadataClient;
use crate::domain::termination_notice::{NoticeReading, Termination};
use crate::domain::time::Instant;
use crate::limits::{METADATA_TIMEOUT, NOTICE_TOKEN_TTL};

const TOKEN: &str = "x-aws-ec2-metadata-token";
const TOKEN_TTL: &str = "x-aws-ec2-metadata-token-ttl-seconds";

#[derive(Deserialize)]
struct InstanceAction {
    action: String,
    time: Option<String>,
}

pub(super) async fn responds(client: &MetadataClient) -> bool {
    fetch_token(client).await.is_ok()
}

pub(super) struct Reader<'a> {
    client: &'a MetadataClient,
    /// Replaced when the service rejects it, as it does when it has expired.
    token: Option<HeaderValue>,
}

impl<'a> Reader<'a> {
    pub(super) const fn new(client: &'a MetadataClient) -> Self {
        Self { client, token: None }
    }
}

impl NoticeReader for Reader<'_> {
    async fn read(&mut self, sent_at: Instant) -> Result<NoticeReading, String> {
        if let Some(token) = self.token.take()
            && let Some(reading) = fetch_action(self.client, &token, sent_at).await?
        {
            self.token = Some(token);
            return Ok(reading);
        }
        let token = fetch_token(self.client).await?;
        let reading = fetch_action(self.client, &token, sent_at).await?;
        self.token = Some(token);
        reading.ok_or_else(|| "the service rejects the token that it issued".to_owned())
    }
}

async fn fetch_token(client: &MetadataClient) -> Result<HeaderValue, String> {
    let ttl = HeaderValue::from(NOTICE_TOKEN_TTL.as_secs());
    let reply = client.send(Method::PUT, "/latest/api/token", (TOKEN_TTL, ttl), METADATA_TIMEOUT).await?;
    let mut value = HeaderValue::from_str(reply.body.trim()).map_err(|_| reply.unexpected_reply())?;
    if reply.status != 200 || value.is_empty() {
        return Err(reply.unexpected_reply());
    }
    value.set_sensitive(true);
    Ok(value)
}

/// `None` if the token is not accepted.
async fn fetch_action(
    client: &MetadataClient,
    token: &HeaderValue,
    sent_at: Instant,
) -> Result<Option<NoticeReading>, String> {
    let path = "/latest/meta-data/spot/instance-action";
    let reply = client.send(Method::GET, path, (TOKEN, token.clone()), METADATA_TIMEOUT).await?;
    match reply.status {
        401 => return Ok(None),
        404 => return Ok(Some(NoticeReading::Nothing)),
        _ => {}
    }
    let InstanceAction { action, time } = reply.json()?;
    let time: Option<Timestamp> = time.and_then(|text| text.parse().ok());
    Ok(Some(NoticeReading::Terminating(match time {
        // EC2 announces a hibernation when it begins, so its time does not count.
        Some(time) if action != "hibernate" => Termination::At(reply.to_local_clock(time, sent_at)),
        Some(_) | None => Termination::Soon,
    })))
}
