//! `journeyman notifier listen`: a receiver of webhooks on this machine, which shows, checks and refuses them on request.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use clap::Args;
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::sync::watch;

use super::endpoints::keys;
use crate::cli::exit::{Exit, ExitResult};
use crate::cli::output;
use crate::cli::signals::ExitSignals;
use journeyman_domain::limits::{NOTIFIER_BODY_BYTES_MAX, NOTIFIER_LISTEN_LANES_MAX};
use journeyman_platform::http::{Exposure, HttpListener};
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::{Listen, SecretFile, Span};
use journeyman_services::notifier::{Signed, SigningKey, verify};

/// `journeyman notifier listen`
#[derive(Debug, Args)]
pub(super) struct ListenArgs {
    /// Address to listen on, of this machine. With port 0 the system chooses a port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7091")]
    listen: Listen,
    /// File with a key of the endpoint, `whsec_…` or `whsk_…`, to verify signatures with; several are possible
    #[arg(long = "key-file", value_name = "FILE")]
    key_files: Vec<SecretFile>,
    /// Fail the first attempts of each event [default: all of them with --status, else none]
    #[arg(long, value_name = "COUNT")]
    fail_first: Option<u32>,
    /// Status of failed attempts, such as 410 for a receiver that is gone [default: 500]
    #[arg(long, value_name = "CODE", value_parser = clap::value_parser!(u16).range(200..=599))]
    status: Option<u16>,
    /// `Retry-After` of failed attempts, in seconds
    #[arg(long, value_name = "SECONDS")]
    retry_after: Option<u32>,
    /// Wait before each answer
    #[arg(long, value_name = "TIME")]
    delay: Option<Span>,
}

pub(super) struct Receiver {
    keys: Vec<SigningKey>,
    /// Attempts of each event.
    fail_first: u32,
    status: StatusCode,
    retry_after: Option<u32>,
    delay: Duration,
    is_down: AtomicBool,
    lanes: Mutex<HashMap<String, Lane>>,
    totals: watch::Sender<Totals>,
}

/// Counts of all deliveries.
#[derive(Debug, Clone, Copy, Default)]
struct Totals {
    answered: [usize; 2],
    out_of_order: usize,
}

/// The last event of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lane {
    epoch: u32,
    seq: u64,
    attempts: u32,
}

/// # Errors
///
/// [`Exit::HostUnusable`] if it cannot listen, [`Exit::Config`] for a key that cannot be used.
pub(super) async fn run(arguments: ListenArgs, environment: &Environment) -> ExitResult {
    let fail_first = if arguments.status.is_some() { u32::MAX } else { 0 };
    let failed = StatusCode::from_u16(arguments.status.unwrap_or(500));
    let keys = keys("--key-file", &arguments.key_files, environment)?;
    let receiver = Arc::new(Receiver {
        status: failed.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
        retry_after: arguments.retry_after,
        delay: arguments.delay.map_or(Duration::ZERO, |delay| delay.0),
        ..Receiver::failing_first(arguments.fail_first.unwrap_or(fail_first), keys)
    });
    let mut signals = ExitSignals::listen()?;
    let listener = HttpListener::listen(arguments.listen.0, Exposure::Loopback).await?;
    output::line(&format!("listening on http://{}", listener.address()?))?;
    tokio::select! {
        never = listener.serve(Receiver::router(&receiver)) => match never {},
        _ = signals.next() => Ok(Exit::Success),
    }
}

async fn receive(State(receiver): State<Arc<Receiver>>, headers: HeaderMap, body: Bytes) -> Response {
    let (lane, line) = receiver.describe(&headers, &body);
    let is_failed = lane.attempts <= receiver.fail_first || receiver.is_down.load(Ordering::SeqCst);
    tokio::time::sleep(receiver.delay).await;
    let status = if is_failed { receiver.status } else { StatusCode::NO_CONTENT };
    let line = format!("{} {line} → {}", jiff::Zoned::now().strftime("%H:%M:%S"), status.as_u16());
    if let Err(error) = output::line(&line) {
        tracing::debug!(%error, "cannot print a delivery");
    }
    receiver.totals.send_modify(|totals| {
        let [failed, delivered] = &mut totals.answered;
        *(if is_failed { failed } else { delivered }) += 1;
        totals.out_of_order += usize::from(line.contains(" GAP of ") || line.contains(" OLDER than "));
    });
    match receiver.retry_after.filter(|_| is_failed) {
        Some(seconds) => (status, [(header::RETRY_AFTER, seconds.to_string())]).into_response(),
        None => status.into_response(),
    }
}

impl Receiver {
    pub(super) fn failing_first(attempts: u32, keys: Vec<SigningKey>) -> Self {
        Self {
            keys,
            fail_first: attempts,
            status: StatusCode::INTERNAL_SERVER_ERROR,
            retry_after: None,
            delay: Duration::ZERO,
            is_down: AtomicBool::new(false),
            lanes: Mutex::default(),
            totals: watch::Sender::default(),
        }
    }

    pub(super) fn router(receiver: &Arc<Self>) -> Router {
        let router = Router::new().fallback(receive).layer(DefaultBodyLimit::max(NOTIFIER_BODY_BYTES_MAX));
        router.with_state(Arc::clone(receiver))
    }

    /// Fails every attempt, or only the first ones again.
    pub(super) fn set_down(&self, is_down: bool) {
        self.is_down.store(is_down, Ordering::SeqCst);
    }

    /// Waits until so many attempts have failed, and so many have not.
    pub(super) async fn wait_for(&self, failed: usize, delivered: usize) {
        let is_so = |totals: &Totals| totals.answered[0] >= failed && totals.answered[1] >= delivered;
        drop(self.totals.subscribe().wait_for(is_so).await);
    }

    /// The attempts, and how many broke the order.
    pub(super) fn attempts(&self) -> (usize, usize) {
        let totals = self.totals.borrow();
        (totals.answered.iter().sum(), totals.out_of_order)
    }

    fn describe(&self, headers: &HeaderMap, body: &[u8]) -> (Lane, String) {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let key = headers.get("journeyman-lane").map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
        let key = key.unwrap_or_else(|| "-".to_owned());
        let id = text("webhook-id").unwrap_or("-");
        let epoch = text("journeyman-epoch").and_then(|text| text.parse().ok()).unwrap_or_default();
        let seq = text("journeyman-seq").and_then(|text| text.parse().ok()).unwrap_or_default();
        let (lane, order) = follow(&mut self.lanes.lock(), &key, epoch, seq);
        let signature = match verify(&self.keys, headers, body, jiff::Timestamp::now().as_second()) {
            _ if self.keys.is_empty() => "not checked",
            Signed::By(version) => version,
            Signed::Wrongly => "WRONG",
            Signed::TooOld => "too old",
            Signed::Not => "none",
        };
        let kind = event_type(body);
        let line = format!("{kind} lane={key} epoch={epoch} seq={seq} id={id} signature={signature}{order}");
        (lane, line)
    }
}

/// The type of an event in the formats `standard` and `cloudevents`, or of a Mistral's.
fn event_type(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Named {
        #[serde(alias = "event")]
        r#type: String,
    }
    serde_json::from_slice(body).map_or_else(|_| "-".to_owned(), |Named { r#type }| r#type)
}

/// What a delivery is to the one before in its lane: the next one, the same again, or a breach of the order.
fn follow(lanes: &mut HashMap<String, Lane>, key: &str, epoch: u32, seq: u64) -> (Lane, String) {
    let first = Lane { epoch, seq, attempts: 1 };
    let Some(last) = lanes.get_mut(key) else {
        if lanes.len() < NOTIFIER_LISTEN_LANES_MAX {
            lanes.insert(key.to_owned(), first);
        }
        return (first, String::new());
    };
    let before = *last;
    let next = if epoch == before.epoch { before.seq.saturating_add(1) } else { 1 };
    let order = if (epoch, seq) == (before.epoch, before.seq) {
        last.attempts = last.attempts.saturating_add(1);
        return (*last, format!(" attempt={}", last.attempts));
    } else if epoch < before.epoch || seq < next {
        return (first, format!(" OLDER than epoch={} seq={}", before.epoch, before.seq));
    } else if seq > next {
        format!(" GAP of {}", seq - next)
    } else {
        String::new()
    };
    *last = first;
    (first, order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_repeats_and_old_events_of_a_lane_are_told() {
        let mut lanes = HashMap::new();
        for (key, epoch, seq, told) in [
            ("a", 0, 3, ""),
            ("b", 0, 1, ""),
            ("a", 0, 3, " attempt=2"),
            ("a", 0, 3, " attempt=3"),
            ("a", 0, 4, ""),
            ("a", 0, 7, " GAP of 2"),
            ("a", 0, 5, " OLDER than epoch=0 seq=7"),
            ("a", 0, 8, ""),
            ("a", 1, 1, ""),
            ("a", 2, 2, " GAP of 1"),
            ("a", 0, 9, " OLDER than epoch=2 seq=2"),
            ("b", 0, 2, ""),
        ] {
            assert_eq!(follow(&mut lanes, key, epoch, seq).1, told, "{key} {epoch} {seq}");
        }
    }

    #[test]
    fn the_type_is_that_of_each_format() {
        for (body, expected) in [
            (r#"{"type":"build.finished","timestamp":"t","data":{"type":"x"}}"#, "build.finished"),
            (r#"{"specversion":"1.0","type":"build.finished"}"#, "build.finished"),
            (r#"{"id":"7","event":"WORKFLOW_SUCCEEDED"}"#, "WORKFLOW_SUCCEEDED"),
            ("[1]", "-"),
            ("nonsense", "-"),
        ] {
            assert_eq!(event_type(body.as_bytes()), expected);
        }
    }
}
