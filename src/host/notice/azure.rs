//! Azure's metadata service: the name of this VM, then the events planned for its whole set.

use jiff::Timestamp;
use reqwest::header::HeaderValue;
use serde::Deserialize;

use super::service::{Call as HttpCall, Reply as HttpReply, Service};
use super::{Due, NobodyListens, Teller, due};
use crate::domain::notice::azure::{Azure, Call, FIRST_ANSWER, Kind, LEAST, Patience, Scheduled};
use crate::domain::notice::{Goes, Pace, Provider};
use crate::domain::time::Instant;
use crate::limits::{METADATA_TIMEOUT, NOTICE_EVENTS_MAX};

const COMPUTE: &str = "/metadata/instance/compute?api-version=2021-02-01&format=json";
const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";

#[derive(Deserialize)]
struct Compute {
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct List {
    events: Vec<Event>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Event {
    event_type: String,
    #[serde(default)]
    resources: Vec<String>,
    #[serde(default)]
    event_status: String,
    #[serde(default)]
    not_before: String,
}

pub(super) async fn there(service: &Service) -> Option<Provider> {
    name(service).await.ok().map(|_| Provider::Azure)
}

pub(super) async fn watch(service: &Service, pace: Pace, seed: u64, teller: Teller) {
    let (mut rules, clock) = (Azure::new(pace, seed), service.clock());
    loop {
        let Due { call, sent_at } = due(clock, |now| rules.next(now)).await;
        let (news, trouble) = match call {
            Call::Name => {
                let name = name(service).await;
                let news = rules.named(name.as_deref().ok(), sent_at, clock.now());
                (news, name.err())
            }
            Call::Events(patience) => {
                let events = events(service, patience, sent_at).await;
                let news = rules.listed(events.as_deref().ok(), sent_at, clock.now());
                if events.is_ok() {
                    teller.answered();
                }
                (news, events.err())
            }
        };
        if let Err(NobodyListens) = teller.tell(news, trouble.as_deref()).await {
            return;
        }
    }
}

fn get(path: &str, timeout: std::time::Duration) -> HttpCall {
    HttpCall::get(path, "metadata", HeaderValue::from_static("true"), timeout)
}

async fn name(service: &Service) -> Result<String, String> {
    let reply = service.call(get(COMPUTE, METADATA_TIMEOUT)).await?;
    let compute = (reply.status == 200).then(|| serde_json::from_str(&reply.body).ok()).flatten();
    compute.map(|Compute { name }| name).ok_or_else(|| reply.unexpected())
}

async fn events(service: &Service, patience: Patience, sent_at: Instant) -> Result<Vec<Scheduled>, String> {
    let timeout = match patience {
        Patience::Usual => METADATA_TIMEOUT,
        Patience::Long => FIRST_ANSWER,
    };
    let reply = service.call(get(EVENTS, timeout)).await?;
    let list = (reply.status == 200).then(|| serde_json::from_str(&reply.body).ok()).flatten();
    let List { events } = list.ok_or_else(|| reply.unexpected())?;
    Ok(events.into_iter().take(NOTICE_EVENTS_MAX).map(|event| scheduled(event, &reply, sent_at)).collect())
}

fn scheduled(event: Event, reply: &HttpReply, sent_at: Instant) -> Scheduled {
    let kind = match event.event_type.as_str() {
        "Preempt" | "Terminate" | "Reboot" | "Redeploy" => Kind::Ends,
        "Freeze" => Kind::Freezes,
        _ => Kind::Other,
    };
    // Without a time it has begun.
    let goes = match time(&event.not_before) {
        Some(at) => Goes::At(reply.on_our_clock(at, sent_at)),
        None if event.not_before.trim().is_empty() || event.event_status == "Started" => Goes::Soon,
        None => Goes::At(sent_at.plus(LEAST)),
    };
    Scheduled { kind, resources: event.resources.into_iter().map(String::into_boxed_str).collect(), goes }
}

/// `Mon, 19 Sep 2016 18:29:47 GMT` as documented, or RFC 3339 as everywhere else.
fn time(text: &str) -> Option<Timestamp> {
    let text = text.trim();
    text.parse().ok().or_else(|| jiff::fmt::rfc2822::parse(text).ok().map(|zoned| zoned.timestamp()))
}
