//! `journeyman notifier dev`: a notifier, an endpoint and a receiver that fails, in one terminal.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::client::failure;
use super::listen::Receiver;
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::output;
use crate::console::notifier::CONSOLE;
use journeyman_domain::limits::NOTIFIER_DEV_TIMEOUT;
use journeyman_platform::http::{BearerToken, Exposure, HttpListener};
use journeyman_platform::settings::values::Secret;
use journeyman_platform::sqlite::Db;
use journeyman_services::notifier::{
    Database, EndpointSettings, Notifier, NotifierConfig, SealKeys, Sender, SenderConfig, Tokens,
};
use journeyman_worker::notify::{Event, NotifierClient, Publisher};

const EVENTS: usize = 8;

/// # Errors
///
/// [`Exit::HostUnusable`] if it cannot listen, [`Exit::Failed`] if an event is lost or out of order.
pub(super) async fn run() -> ExitResult {
    let key = format!("whsec_{}", STANDARD.encode(random()));
    let keys = vec![key.parse().map_err(|why: String| Failure::new(Exit::Internal, why))?];
    let receiver = Arc::new(Receiver::failing_first(1, keys));
    let listener = HttpListener::listen((Ipv4Addr::LOCALHOST, 0).into(), Exposure::Loopback).await?;
    let url = format!("http://{}/hook", listener.address()?);
    let token = STANDARD.encode(random());
    let notifier = Notifier::start(config(&url, &key, &token)?);
    let notifier = notifier.await.map_err(|error| Failure::from_error(Exit::HostUnusable, &error))?;
    let address = format!("http://{}", notifier.address()?);
    let base = address.parse().map_err(internal)?;
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
            ended.map_err(internal)?;
            shown
        }
    }
}

async fn show(receiver: &Receiver, base: &reqwest::Url, token: &str) -> ExitResult {
    let client = || NotifierClient::new(base.clone(), Secret::new(token)).map_err(internal);
    let (publisher, operator) = (Publisher::new(client()?), client()?);
    let publish = async |range: std::ops::Range<usize>| {
        let events: Result<Vec<Event>, Failure> = range.map(event).collect();
        publisher.publish(&events?).await.map_err(failure)
    };
    output::line("Three events of each of two builds. The receiver fails the first attempt of each; its build waits.")?;
    publish(0..6).await?;
    receiver.wait_for(6, 6).await;
    output::line("\nThe receiver is down. Two more events wait for it.")?;
    receiver.set_down(true);
    publish(6..EVENTS).await?;
    receiver.wait_for(8, 6).await;
    output::line(
        "\nIt is back, and an operator does not wait for the next attempt: journeyman notifier redeliver dev",
    )?;
    receiver.set_down(false);
    operator.post(&["endpoints", "dev", "redeliver"], &json!({})).await.map_err(failure)?;
    receiver.wait_for(EVENTS, EVENTS).await;
    let (attempts, breaches) = receiver.attempts();
    output::line(&format!("\n{EVENTS} events, {attempts} attempts, {breaches} out of order, 0 lost."))?;
    if breaches == 0 { Ok(Exit::Success) } else { Ok(Exit::Failed) }
}

fn event(number: usize) -> Result<Event, Failure> {
    let key = format!("build-{}", number % 2 + 1);
    let (id, data) = (number.to_string(), json!({ "step": number / 2 + 1 }));
    let event = json!({ "source": "dev", "id": id, "type": "build.step", "key": key, "data": data });
    serde_json::from_slice(event.to_string().as_bytes()).map_err(internal)
}

fn config(url: &str, key: &str, token: &str) -> Result<NotifierConfig, Failure> {
    let allowed_networks = vec!["127.0.0.0/8".parse().map_err(internal)?];
    let sender = SenderConfig { allowed_networks, ..SenderConfig::default() };
    let settings = json!({ "url": url, "events": ["*"], "keys": [key], "timeout_seconds": 5 });
    let endpoint: EndpointSettings = serde_json::from_value(settings).map_err(internal)?;
    Ok(NotifierConfig {
        database: Database::Sqlite(Db::Memory),
        listen: (Ipv4Addr::LOCALHOST, 0).into(),
        console: CONSOLE,
        tokens: Tokens { write: BearerToken::new(token), read: None, publish: None },
        retention: Duration::from_secs(60 * 60),
        sender: Sender::new(sender).map_err(internal)?,
        seal_keys: SealKeys(Vec::new()),
        amqp: None,
        mistral: None,
        outbox: None,
        endpoints: [(Arc::from("dev"), endpoint.build().map_err(internal)?)].into(),
    })
}

fn internal(error: impl std::error::Error) -> Failure {
    Failure::from_error(Exit::Internal, &error)
}

/// Bytes of the system's generator, as many as a key has.
fn random() -> Vec<u8> {
    [uuid::Uuid::new_v4(), uuid::Uuid::new_v4()].iter().flat_map(|id| id.into_bytes()).collect()
}
