//! Tells a controller of AMQP workers what a worker does, whatever its tasks come from.
//!
//! Nothing waits for it: the worker leaves word in its [`Liveness`], and this looks there. A broker that cannot be reached
//! costs a task nothing, shows in the status and the metrics, and is tried again.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, LongString};
use lapin::{BasicProperties, Channel, Connection};
use tokio::time::timeout;

use crate::amqp::{self, Broker};
use crate::domain::activity::{ActivityPolicy, ActivityReport, ActivityReporter, Event};
use crate::domain::backoff::Backoff;
use crate::domain::jitter::Jitter;
use crate::domain::poll::POLL_RETRY;
use crate::host::clock::Clock;
use crate::limits::{AMQP_CALL_TIMEOUT, AMQP_CLOSE_TIMEOUT};
use crate::worker::liveness::Liveness;
use crate::worker::status;

/// Where reports go, and what they say of whom.
#[derive(Debug, Clone)]
pub struct Config {
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
pub async fn report(settings: Config, pulse: Arc<Liveness>) {
    let clock = Clock::boot();
    let mut machine = ActivityReporter::new(ActivityPolicy { repeat_interval: settings.repeat });
    let mut jitter = Jitter::seeded(uuid::Uuid::new_v4().as_u64_pair().0);
    let mut backoff = Backoff::NEW;
    let mut state = status::ActivityStatus { exchange: settings.exchange.clone(), ..status::ActivityStatus::default() };
    pulse.set_activity(&state);
    loop {
        let why = match connect(&settings).await {
            Ok(open) => {
                let why =
                    publish_reports(&settings, &open, &mut machine, &pulse, &mut state, clock, &mut backoff).await;
                amqp::close(&open.connection, AMQP_CLOSE_TIMEOUT).await;
                why
            }
            Err(why) => why,
        };
        machine.handle(Event::Disconnected, clock.now());
        if backoff.tries() == 0 {
            tracing::warn!(exchange = settings.exchange, "no activity reports for now: {why}");
        } else {
            tracing::debug!(exchange = settings.exchange, "still no activity reports: {why}");
        }
        state.failures += 1;
        state.error = Some(why);
        pulse.set_activity(&state);
        tokio::time::sleep(backoff.wait(POLL_RETRY, None, &mut jitter)).await;
    }
}

struct ReportChannel {
    connection: Connection,
    channel: Channel,
}

async fn connect(settings: &Config) -> Result<ReportChannel, String> {
    let name = format!("{} (activity)", settings.worker_id);
    let connection = settings.broker.connect(&name).await.map_err(|refused| refused.message)?;
    let opening = async {
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok::<_, lapin::Error>(channel)
    };
    match timeout(AMQP_CALL_TIMEOUT, opening).await {
        Ok(Ok(channel)) => Ok(ReportChannel { connection, channel }),
        Ok(Err(error)) => Err(settings.broker.call_error("open a channel", &error).message),
        Err(_) => {
            Err(format!("open a channel at {}: not done in {AMQP_CALL_TIMEOUT:?}", settings.broker.display_url()))
        }
    }
}

/// Reports until that fails; says why.
async fn publish_reports(
    settings: &Config,
    open: &ReportChannel,
    machine: &mut ActivityReporter,
    pulse: &Liveness,
    state: &mut status::ActivityStatus,
    clock: Clock,
    backoff: &mut Backoff,
) -> String {
    let mut seen = pulse.claims_received();
    observe_liveness(machine, pulse, clock);
    machine.handle(Event::Connected, clock.now());
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
            pulse.set_activity(state);
        }
        let deadline = machine.next_deadline();
        let now = clock.now();
        match machine.next_report_allowed_at().filter(|rested| now < *rested) {
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
        observe_liveness(machine, pulse, clock);
        let received = pulse.claims_received();
        let happening =
            if std::mem::replace(&mut seen, received) == received { Event::Tick } else { Event::ClaimsReceived };
        machine.handle(happening, clock.now());
    }
}

/// What the worker has left word of.
fn observe_liveness(machine: &mut ActivityReporter, pulse: &Liveness, clock: Clock) {
    if pulse.is_claiming() {
        machine.handle(Event::Ready, clock.now());
    }
    machine.handle(Event::ClaimsHeld(pulse.claims_held()), clock.now());
}

async fn publish(settings: &Config, channel: &Channel, report: ActivityReport) -> Result<(), String> {
    let text = |text: &str| AMQPValue::LongString(LongString::from(text));
    let headers = amqp::header_table([("x-event", text(report.as_str())), ("x-worker-id", text(&settings.worker_id))]);
    let exchange =
        amqp::to_short_string("the name of the exchange", &settings.exchange).map_err(|error| error.to_string())?;
    let key = amqp::to_short_string("the key", &settings.key).map_err(|error| error.to_string())?;
    let publishing = async {
        let properties = BasicProperties::default().with_headers(headers);
        channel.basic_publish(exchange, key, BasicPublishOptions::default(), &[], properties).await?.await
    };
    match timeout(AMQP_CALL_TIMEOUT, publishing).await {
        Ok(Ok(confirmed)) if confirmed.is_nack() => Err("the broker refused a report".to_owned()),
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(settings.broker.call_error("report activity", &error).message),
        Err(_) => {
            Err(format!("report activity at {}: not done in {AMQP_CALL_TIMEOUT:?}", settings.broker.display_url()))
        }
    }
}
