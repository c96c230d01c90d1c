//! EC2's instance metadata service, version 2: every request needs a token, and gets its own.

use jiff::Timestamp;
use reqwest::Method;
use reqwest::header::HeaderValue;
use serde::Deserialize;

use super::NoticeReader;
use super::metadata_service::MetadataClient;
use journeyman_domain::limits::{METADATA_TIMEOUT, NOTICE_TOKEN_TTL};
use journeyman_domain::termination_notice::{NoticeReading, Termination};
use journeyman_domain::time::Instant;

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
    pub(super) client: &'a MetadataClient,
}

impl NoticeReader for Reader<'_> {
    async fn read(&mut self, sent_at: Instant) -> Result<NoticeReading, String> {
        let token = fetch_token(self.client).await?;
        let path = "/latest/meta-data/spot/instance-action";
        let reply = self.client.send(Method::GET, path, (TOKEN, token), METADATA_TIMEOUT).await?;
        if reply.status == 404 {
            return Ok(NoticeReading::Nothing);
        }
        let InstanceAction { action, time } = reply.json()?;
        let time: Option<Timestamp> = time.and_then(|text| text.parse().ok());
        Ok(NoticeReading::Terminating(match time {
            // EC2 announces a hibernation when it begins, so its time does not count.
            Some(time) if action != "hibernate" => Termination::At(reply.to_local_clock(time, sent_at)),
            Some(_) | None => Termination::Soon,
        }))
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
