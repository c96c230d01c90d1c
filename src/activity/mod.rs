//! Tells a controller of AMQP workers what a worker does, whatever its tasks come from.
//!
//! Nothing waits for it: the worker leaves word in its [`Pulse`], and this looks there. A broker that cannot be reached
//! costs a task nothing, shows in the status and the metrics, and is tried again.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, LongString};
use lapin::{BasicProperties, Channel, Connection};
use tokio::time::timeout;

use crate::amqp::{self, Broker};
use crate::domain::activity::{Activity, Happening, Policy, Report};
use crate::domain::backoff::Backoff;
use crate::domain::jitter::Jitter;
use crate::domain::poll::TROUBLE;
use crate::host::clock::Clock;
use crate::limits::{AMQP_CALL_TIMEOUT, AMQP_CLOSE_WAIT};
use crate::worker::pulse::Pulse;
use crate::worker::view;

/// Where reports go, and what they say of whom.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The broker.
    pub broker: Broker,
    /// The exchange. It is never declared.
    pub exchange: String,
    /// The worker's key, as it was given.
    pub key: String,
    /// What the controller calls this worker.
    pub worker_id: String,
    /// How often a task that goes on is reported while nothing else is.
    pub repeat: Duration,
}

/// Reports for as long as it is polled. Never resolves.
pub async fn report(settings: Settings, pulse: Arc<Pulse>) {
    let clock = Clock::boot();
    let mut machine = Activity::new(Policy { repeat: settings.repeat });
    let mut jitter = Jitter::seeded(uuid::Uuid::new_v4().as_u64_pair().0);
    let mut backoff = Backoff::NEW;
    let mut state = view::Activity { exchange: settings.exchange.clone(), ..view::Activity::default() };
    pulse.tell(&state);
    loop {
        let why = match open(&settings).await {
            Ok(open) => {
                let why = speak(&settings, &open, &mut machine, &pulse, &mut state, clock, &mut backoff).await;
                amqp::close(&open.connection, AMQP_CLOSE_WAIT).await;
                why
            }
            Err(why) => why,
        };
        machine.handle(Happening::Disconnected, clock.now());
        if backoff.tries() == 0 {
            tracing::warn!(exchange = settings.exchange, "no activity reports for now: {why}");
        } else {
            tracing::debug!(exchange = settings.exchange, "still no activity reports: {why}");
        }
        state.failures += 1;
        state.error = Some(why);
        pulse.tell(&state);
        tokio::time::sleep(backoff.wait(TROUBLE, None, &mut jitter)).await;
    }
}

struct Open {
    connection: Connection,
    channel: Channel,
}

async fn open(settings: &Settings) -> Result<Open, String> {
    let name = format!("{} (activity)", settings.worker_id);
    let connection = settings.broker.connect(&name).await.map_err(|refused| refused.what)?;
    let opening = async {
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok::<_, lapin::Error>(channel)
    };
    match timeout(AMQP_CALL_TIMEOUT, opening).await {
        Ok(Ok(channel)) => Ok(Open { connection, channel }),
        Ok(Err(error)) => Err(settings.broker.refused("open a channel", &error).what),
        Err(_) => Err(format!("open a channel at {}: not done in {AMQP_CALL_TIMEOUT:?}", settings.broker.shown())),
    }
}

/// Reports until that fails; says why.
async fn speak(
    settings: &Settings,
    open: &Open,
    machine: &mut Activity,
    pulse: &Pulse,
    state: &mut view::Activity,
    clock: Clock,
    backoff: &mut Backoff,
) -> String {
    let mut seen = pulse.received();
    look(machine, pulse, clock);
    machine.handle(Happening::Connected, clock.now());
    loop {
        while let Some(report) = machine.next_report() {
            if let Err(why) = publish(settings, &open.channel, report).await {
                return why;
            }
            if backoff.tries() > 0 || state.reports == 0 {
                tracing::info!(exchange = settings.exchange, "activity is reported");
                backoff.reset();
            }
            state.reports += 1;
            state.error = None;
            pulse.tell(state);
        }
        let deadline = machine.next_deadline();
        let now = clock.now();
        match machine.rests_until().filter(|rested| now < *rested) {
            // Thousands of requests a second wake nobody here.
            Some(rested) => clock.sleep_until(deadline.map_or(rested, |at| at.min(rested))).await,
            None => tokio::select! {
                () = pulse.changed() => {}
                () = async { match deadline {
                    Some(at) => clock.sleep_until(at).await,
                    None => std::future::pending().await,
                } } => {}
            },
        }
        look(machine, pulse, clock);
        let received = pulse.received();
        let happening =
            if std::mem::replace(&mut seen, received) == received { Happening::Tick } else { Happening::Received };
        machine.handle(happening, clock.now());
    }
}

/// What the worker has left word of.
fn look(machine: &mut Activity, pulse: &Pulse, clock: Clock) {
    if pulse.is_claiming() {
        machine.handle(Happening::Ready, clock.now());
    }
    machine.handle(Happening::Held(pulse.held()), clock.now());
}

async fn publish(settings: &Settings, channel: &Channel, report: Report) -> Result<(), String> {
    let text = |text: &str| AMQPValue::LongString(LongString::from(text));
    let headers = amqp::table([("x-event", text(report.as_str())), ("x-worker-id", text(&settings.worker_id))]);
    let exchange = amqp::short("the name of the exchange", &settings.exchange).map_err(|error| error.to_string())?;
    let key = amqp::short("the key", &settings.key).map_err(|error| error.to_string())?;
    let publishing = async {
        let properties = BasicProperties::default().with_headers(headers);
        channel.basic_publish(exchange, key, BasicPublishOptions::default(), &[], properties).await?.await
    };
    match timeout(AMQP_CALL_TIMEOUT, publishing).await {
        Ok(Ok(confirmed)) if confirmed.is_nack() => Err("the broker refused a report".to_owned()),
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(settings.broker.refused("report activity", &error).what),
        Err(_) => Err(format!("report activity at {}: not done in {AMQP_CALL_TIMEOUT:?}", settings.broker.shown())),
    }
}
