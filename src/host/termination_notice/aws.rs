//! EC2's instance metadata service, version 2: every request needs a token.

use jiff::Timestamp;
use reqwest::Method;
use reqwest::header::{HeaderMap, HeaderValue};
use serde::Deserialize;
use std::time::Duration;

use super::metadata_service::{MetadataClient, MetadataReply as HttpReply, MetadataRequest as HttpCall};
use super::{DueCall, NoticeSink, SinkClosed, next_call};
use crate::domain::termination_notice::aws::{AwsReply, AwsRequest, AwsTracker};
use crate::domain::termination_notice::{NoticeOrigin, NoticeReading, PollSchedule, Termination};
use crate::domain::time::Instant;
use crate::limits::{METADATA_TIMEOUT, NOTICE_TOKEN_TTL};

const TOKEN: &str = "x-aws-ec2-metadata-token";
const TOKEN_TTL: &str = "x-aws-ec2-metadata-token-ttl-seconds";

#[derive(Deserialize)]
struct InstanceAction {
    action: String,
    time: Option<String>,
}

struct MetadataToken {
    value: HeaderValue,
    ttl: Duration,
}

pub(super) async fn responds(service: &MetadataClient) -> Option<NoticeOrigin> {
    fetch_token(service).await.ok().map(|_| NoticeOrigin::Aws)
}

pub(super) async fn watch(service: &MetadataClient, schedule: PollSchedule, seed: u64, sink: NoticeSink) {
    let (mut tracker, clock) = (AwsTracker::new(schedule, seed), service.clock());
    let mut value = HeaderValue::from_static("");
    loop {
        let DueCall { call, sent_at } = next_call(clock, |now| tracker.next_request(now)).await;
        let (event, error) = match call {
            AwsRequest::Token => {
                let (ttl, error) = match fetch_token(service).await {
                    Ok(token) => {
                        value = token.value;
                        (Some(token.ttl), None)
                    }
                    Err(error) => (None, Some(error)),
                };
                (tracker.on_token(ttl, sent_at, clock.now()), error)
            }
            AwsRequest::InstanceAction => {
                let (reply, error) = fetch_action(service, value.clone(), sent_at).await;
                if !matches!(reply, AwsReply::Unauthorized | AwsReply::Reading(NoticeReading::Unavailable)) {
                    sink.record_answer();
                }
                (tracker.on_reply(reply, sent_at, clock.now()), error)
            }
        };
        if let Err(SinkClosed) = sink.report(event, error.as_deref()).await {
            return;
        }
    }
}

async fn fetch_token(service: &MetadataClient) -> Result<MetadataToken, String> {
    let mut headers = HeaderMap::new();
    headers.insert(TOKEN_TTL, HeaderValue::from(NOTICE_TOKEN_TTL.as_secs()));
    let call =
        HttpCall { method: Method::PUT, path: "/latest/api/token".to_owned(), headers, timeout: METADATA_TIMEOUT };
    let reply = service.send(call).await?;
    let mut value = HeaderValue::from_str(reply.body.trim()).map_err(|_| reply.unexpected_reply())?;
    if reply.status != 200 || value.is_empty() {
        return Err(reply.unexpected_reply());
    }
    value.set_sensitive(true);
    let ttl = reply.header(TOKEN_TTL).and_then(|text| text.parse().ok()).map_or(NOTICE_TOKEN_TTL, Duration::from_secs);
    Ok(MetadataToken { value, ttl: ttl.min(NOTICE_TOKEN_TTL) })
}

async fn fetch_action(service: &MetadataClient, token: HeaderValue, sent_at: Instant) -> (AwsReply, Option<String>) {
    let call = HttpCall::get("/latest/meta-data/spot/instance-action", TOKEN, token, METADATA_TIMEOUT);
    let reply = match service.send(call).await {
        Ok(reply) => reply,
        Err(error) => return (AwsReply::Reading(NoticeReading::Unavailable), Some(error)),
    };
    let reading = match reply.status {
        401 => return (AwsReply::Unauthorized, None),
        404 => Some(NoticeReading::Nothing),
        200 => parse_action(&reply, sent_at),
        _ => None,
    };
    match reading {
        Some(reading) => (AwsReply::Reading(reading), None),
        None => (AwsReply::Reading(NoticeReading::Unavailable), Some(reply.unexpected_reply())),
    }
}

/// EC2 announces a hibernation when it begins, so its time does not count.
fn parse_action(reply: &HttpReply, sent_at: Instant) -> Option<NoticeReading> {
    let InstanceAction { action, time } = serde_json::from_str(&reply.body).ok()?;
    let time: Option<Timestamp> = time.and_then(|text| text.parse().ok());
    Some(NoticeReading::Terminating(match time {
        Some(time) if action != "hibernate" => Termination::At(reply.to_local_clock(time, sent_at)),
        Some(_) | None => Termination::Soon,
    }))
}
