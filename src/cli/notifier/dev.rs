//! `journeyman notifier dev`: a notifier, an endpoint and a receiver that fails, in one terminal.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;
use serde_json::value::to_raw_value;
use tokio_util::sync::CancellationToken;

use super::client::Client;
use super::listen::Receiver;
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::output;
use crate::config::values::Secret;
use crate::domain::lane::dispatcher::EndpointLimits;
use crate::domain::lane::retry::RetryPolicy;
use crate::http::{BearerToken, Exposure, HttpListener};
use crate::limits::{NOTIFIER_ATTEMPTS_PER_ENDPOINT, NOTIFIER_DEV_TIMEOUT};
use crate::notifier::{
    Database, Endpoint, Event, Format, Notifier, NotifierConfig, Publisher, SealKeys, Sender, SenderConfig, SigningKey,
    Tokens, TypePattern,
};
use crate::sqlite::Db;

const EVENTS: usize = 8;

/// # Errors
///
/// [`Exit::HostUnusable`] if it cannot listen, [`Exit::Failed`] if an event is lost or out of order.
pub(super) async fn run() -> ExitResult {
    let key = format!("whsec_{}", STANDARD.encode(random()));
    let signing_key = || key.parse::<SigningKey>().map_err(|error| Failure::from_error(Exit::Internal, &error));
    let receiver = Arc::new(Receiver::failing_first(1, vec![signing_key()?]));
    let listener = HttpListener::listen((Ipv4Addr::LOCALHOST, 0).into(), Exposure::Loopback).await.map_err(unusable)?;
    let url = format!("http://{}/hook", listener.address().map_err(unusable)?);
    let token = STANDARD.encode(random());
    let notifier = Notifier::start(config(&url, signing_key()?, &token)?);
    let notifier = notifier.await.map_err(|error| Failure::from_error(Exit::HostUnusable, &error))?;
    let address = format!("http://{}", notifier.address().map_err(unusable)?);
    let base: reqwest::Url = address.parse().map_err(|error| Failure::from_error(Exit::Internal, &error))?;
    let stop = CancellationToken::new();
    let showing = async {
        let shown = tokio::time::timeout(NOTIFIER_DEV_TIMEOUT, show(&receiver, &base, &token)).await;
        stop.cancel();
        shown.unwrap_or_else(|_| Err(Failure::new(Exit::Failed, format!("not done in {NOTIFIER_DEV_TIMEOUT:?}"))))
    };
    let running = async { tokio::join!(Box::pin(notifier.run(stop.clone())), showing) };
    tokio::select! {
        never = listener.serve(Receiver::router(&receiver)) => match never {},
        (ended, shown) = running => {
            ended.map_err(|error| Failure::from_error(Exit::Internal, &error))?;
            shown
        }
    }
}

async fn show(receiver: &Receiver, base: &reqwest::Url, token: &str) -> ExitResult {
    let publisher = Publisher::new(base, Secret::new(token));
    let publisher = publisher.map_err(|error| Failure::from_error(Exit::Internal, &error))?;
    let client = Client::of(base.clone(), Secret::new(token))?;
    let publish = async |range: std::ops::Range<usize>| {
        let events: Result<Vec<Event>, Failure> = range.map(event).collect();
        publisher.publish(&events?).await.map_err(|error| Failure::from_error(Exit::Failed, &error))
    };
    output::line("Three events of each of two builds. The receiver fails the first attempt of each; its build waits.")?;
    publish(0..6).await?;
    receiver.wait_for(6, 6).await;
    output::line("\nThe receiver is down. Two more events wait for it.")?;
    receiver.set_down(true);
    publish(6..EVENTS).await?;
    receiver.wait_for(8, 6).await;
    output::line("\nIt is back, and an operator does not wait for the next attempt: journeyman notifier redeliver dev")?;
    receiver.set_down(false);
    client.post(&["endpoints", "dev", "redeliver"], &json!({})).await?;
    receiver.wait_for(EVENTS, EVENTS).await;
    let (attempts, breaches) = receiver.attempts();
    output::line(&format!("\n{EVENTS} events, {attempts} attempts, {breaches} out of order, 0 lost."))?;
    if breaches == 0 { Ok(Exit::Success) } else { Ok(Exit::Failed) }
}

fn event(number: usize) -> Result<Event, Failure> {
    let data = to_raw_value(&json!({ "step": number / 2 + 1 }));
    Ok(Event {
        source: "dev".to_owned(),
        id: number.to_string(),
        r#type: "build.step".to_owned(),
        key: format!("build-{}", number % 2 + 1),
        epoch: None,
        time: None,
        last: false,
        data: data.map_err(|error| Failure::from_error(Exit::Internal, &error))?,
    })
}

fn config(url: &str, key: SigningKey, token: &str) -> Result<NotifierConfig, Failure> {
    let internal = |error: &dyn std::error::Error| Failure::from_error(Exit::Internal, error);
    let allowed_networks = vec!["127.0.0.0/8".parse().map_err(|error: ipnet::AddrParseError| internal(&error))?];
    let sender = SenderConfig { allowed_networks, ..SenderConfig::default() };
    let endpoint = Endpoint {
        url: url.parse().map_err(|error: url::ParseError| internal(&error))?,
        headers: reqwest::header::HeaderMap::new(),
        keys: [key].into(),
        timeout: Duration::from_secs(5),
        retry: RetryPolicy::default(),
        format: Format::Standard,
        limits: EndpointLimits { attempts_max: NOTIFIER_ATTEMPTS_PER_ENDPOINT.into(), rate: None },
    };
    Ok(NotifierConfig {
        database: Database::Sqlite(Db::Memory),
        listen: (Ipv4Addr::LOCALHOST, 0).into(),
        tokens: Tokens { write: BearerToken::new(token), read: None },
        retention: Duration::from_secs(60 * 60),
        sender: Sender::new(sender).map_err(|error| internal(&error))?,
        seal_keys: SealKeys(Vec::new()),
        amqp: None,
        mistral: None,
        endpoints: [(Arc::from("dev"), (endpoint, vec![TypePattern::new("*")]))].into(),
    })
}

fn random() -> [u8; 32] {
    let (one, two) = (uuid::Uuid::new_v4().into_bytes(), uuid::Uuid::new_v4().into_bytes());
    let mut bytes = [0; 32];
    bytes.iter_mut().zip(one.into_iter().chain(two)).for_each(|(byte, from)| *byte = from);
    bytes
}

fn unusable(error: std::io::Error) -> Failure {
    Failure::from_error(Exit::HostUnusable, &error)
}
