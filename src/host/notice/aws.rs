//! EC2's instance metadata service, in its second version: every question takes a token.

use jiff::Timestamp;
use reqwest::Method;
use reqwest::header::{HeaderMap, HeaderValue};
use serde::Deserialize;
use std::time::Duration;

use super::service::{Call as HttpCall, Reply as HttpReply, Service};
use super::{Due, NobodyListens, Teller, due};
use crate::domain::notice::aws::{Aws, Call, Reply};
use crate::domain::notice::{Answer, Goes, Pace, Provider};
use crate::domain::time::Instant;
use crate::limits::{METADATA_TIMEOUT, NOTICE_TOKEN_LIFE};

const TOKEN: &str = "x-aws-ec2-metadata-token";
const TOKEN_TTL: &str = "x-aws-ec2-metadata-token-ttl-seconds";

/// What is said of an interruption.
#[derive(Deserialize)]
struct Action {
    action: String,
    time: Option<String>,
}

/// What is said of the risk of one.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Rebalance {
    #[serde(rename = "noticeTime")]
    _notice_time: String,
}

struct Token {
    value: HeaderValue,
    life: Duration,
}

pub(super) async fn there(service: &Service) -> Option<Provider> {
    token(service).await.ok().map(|_| Provider::Aws)
}

pub(super) async fn watch(service: &Service, pace: Pace, seed: u64, teller: Teller) {
    let (mut rules, clock) = (Aws::new(pace, seed), service.clock());
    let mut value = HeaderValue::from_static("");
    loop {
        let Due { call, sent_at } = due(clock, |now| rules.next(now)).await;
        let (news, trouble) = if call == Call::Token {
            let (life, trouble) = match token(service).await {
                Ok(token) => {
                    value = token.value;
                    (Some(token.life), None)
                }
                Err(trouble) => (None, Some(trouble)),
            };
            (rules.token(life, sent_at, clock.now()), trouble)
        } else {
            let (reply, trouble) = ask(service, call, value.clone(), sent_at).await;
            if call == Call::Action && !matches!(reply, Reply::Unauthorized | Reply::Answer(Answer::Trouble)) {
                teller.answered();
            }
            (rules.answered(call, reply, sent_at, clock.now()), trouble)
        };
        if let Err(NobodyListens) = teller.tell(news, trouble.as_deref()).await {
            return;
        }
    }
}

async fn token(service: &Service) -> Result<Token, String> {
    let mut headers = HeaderMap::new();
    headers.insert(TOKEN_TTL, HeaderValue::from(NOTICE_TOKEN_LIFE.as_secs()));
    let call =
        HttpCall { method: Method::PUT, path: "/latest/api/token".to_owned(), headers, timeout: METADATA_TIMEOUT };
    let reply = service.call(call).await?;
    let mut value = HeaderValue::from_str(reply.body.trim()).map_err(|_| reply.unexpected())?;
    if reply.status != 200 || value.is_empty() {
        return Err(reply.unexpected());
    }
    value.set_sensitive(true);
    let life =
        reply.header(TOKEN_TTL).and_then(|text| text.parse().ok()).map_or(NOTICE_TOKEN_LIFE, Duration::from_secs);
    Ok(Token { value, life: life.min(NOTICE_TOKEN_LIFE) })
}

async fn ask(service: &Service, call: Call, token: HeaderValue, sent_at: Instant) -> (Reply, Option<String>) {
    let path = match call {
        Call::Rebalance => "/latest/meta-data/events/recommendations/rebalance",
        Call::Token | Call::Action => "/latest/meta-data/spot/instance-action",
    };
    let reply = match service.call(HttpCall::get(path, TOKEN, token, METADATA_TIMEOUT)).await {
        Ok(reply) => reply,
        Err(trouble) => return (Reply::Answer(Answer::Trouble), Some(trouble)),
    };
    let answer = match reply.status {
        401 => return (Reply::Unauthorized, None),
        404 => Some(Answer::Nothing),
        200 if call == Call::Rebalance => serde_json::from_str::<Rebalance>(&reply.body).ok().map(|_| Answer::AtRisk),
        200 => action(&reply, sent_at),
        _ => None,
    };
    match answer {
        Some(answer) => (Reply::Answer(answer), None),
        None => (Reply::Answer(Answer::Trouble), Some(reply.unexpected())),
    }
}

/// A hibernation is announced when it begins; its time is no promise.
fn action(reply: &HttpReply, sent_at: Instant) -> Option<Answer> {
    let Action { action, time } = serde_json::from_str(&reply.body).ok()?;
    let time: Option<Timestamp> = time.and_then(|text| text.parse().ok());
    Some(Answer::Goes(match time {
        Some(time) if action != "hibernate" => Goes::At(reply.on_our_clock(time, sent_at)),
        Some(_) | None => Goes::Soon,
    }))
}
