//! EC2's instance metadata service, in its second version: every question takes a token.

use jiff::Timestamp;
use reqwest::Method;
use reqwest::header::{HeaderMap, HeaderValue};
use serde::Deserialize;
use std::time::Duration;

use super::metadata_service::{MetadataReply as HttpReply, MetadataRequest as HttpCall, MetadataService};
use super::{DueCall, NoticeSink, SinkClosed, next_call};
use crate::domain::termination_notice::aws::{AwsReply, AwsRequest, AwsTracker};
use crate::domain::termination_notice::{NoticeReading, PollSchedule, Provider, Termination};
use crate::domain::time::Instant;
use crate::limits::{METADATA_TIMEOUT, NOTICE_TOKEN_TTL};

const TOKEN: &str = "x-aws-ec2-metadata-token";
const TOKEN_TTL: &str = "x-aws-ec2-metadata-token-ttl-seconds";

/// What is said of an interruption.
#[derive(Deserialize)]
struct InstanceAction {
    action: String,
    time: Option<String>,
}

/// What is said of the risk of one.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RebalanceNotice {
    #[serde(rename = "noticeTime")]
    _notice_time: String,
}

struct MetadataToken {
    value: HeaderValue,
    ttl: Duration,
}

pub(super) async fn responds(service: &MetadataService) -> Option<Provider> {
    fetch_token(service).await.ok().map(|_| Provider::Aws)
}

pub(super) async fn watch(service: &MetadataService, pace: PollSchedule, seed: u64, teller: NoticeSink) {
    let (mut rules, clock) = (AwsTracker::new(pace, seed), service.clock());
    let mut value = HeaderValue::from_static("");
    loop {
        let DueCall { call, sent_at } = next_call(clock, |now| rules.next_request(now)).await;
        let (news, trouble) = if call == AwsRequest::Token {
            let (life, trouble) = match fetch_token(service).await {
                Ok(token) => {
                    value = token.value;
                    (Some(token.ttl), None)
                }
                Err(trouble) => (None, Some(trouble)),
            };
            (rules.on_token(life, sent_at, clock.now()), trouble)
        } else {
            let (reply, trouble) = fetch(service, call, value.clone(), sent_at).await;
            if call == AwsRequest::InstanceAction
                && !matches!(reply, AwsReply::Unauthorized | AwsReply::Reading(NoticeReading::Unavailable))
            {
                teller.record_answer();
            }
            (rules.on_reply(call, reply, sent_at, clock.now()), trouble)
        };
        if let Err(SinkClosed) = teller.report(news, trouble.as_deref()).await {
            return;
        }
    }
}

async fn fetch_token(service: &MetadataService) -> Result<MetadataToken, String> {
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
    let life = reply.header(TOKEN_TTL).and_then(|text| text.parse().ok()).map_or(NOTICE_TOKEN_TTL, Duration::from_secs);
    Ok(MetadataToken { value, ttl: life.min(NOTICE_TOKEN_TTL) })
}

async fn fetch(
    service: &MetadataService,
    call: AwsRequest,
    token: HeaderValue,
    sent_at: Instant,
) -> (AwsReply, Option<String>) {
    let path = match call {
        AwsRequest::Rebalance => "/latest/meta-data/events/recommendations/rebalance",
        AwsRequest::Token | AwsRequest::InstanceAction => "/latest/meta-data/spot/instance-action",
    };
    let reply = match service.send(HttpCall::get(path, TOKEN, token, METADATA_TIMEOUT)).await {
        Ok(reply) => reply,
        Err(trouble) => return (AwsReply::Reading(NoticeReading::Unavailable), Some(trouble)),
    };
    let answer = match reply.status {
        401 => return (AwsReply::Unauthorized, None),
        404 => Some(NoticeReading::Nothing),
        200 if call == AwsRequest::Rebalance => {
            serde_json::from_str::<RebalanceNotice>(&reply.body).ok().map(|_| NoticeReading::AtRisk)
        }
        200 => parse_action(&reply, sent_at),
        _ => None,
    };
    match answer {
        Some(answer) => (AwsReply::Reading(answer), None),
        None => (AwsReply::Reading(NoticeReading::Unavailable), Some(reply.unexpected_reply())),
    }
}

/// A hibernation is announced when it begins; its time is no promise.
fn parse_action(reply: &HttpReply, sent_at: Instant) -> Option<NoticeReading> {
    let InstanceAction { action, time } = serde_json::from_str(&reply.body).ok()?;
    let time: Option<Timestamp> = time.and_then(|text| text.parse().ok());
    Some(NoticeReading::Terminating(match time {
        Some(time) if action != "hibernate" => Termination::At(reply.to_local_clock(time, sent_at)),
        Some(_) | None => Termination::Soon,
    }))
}
