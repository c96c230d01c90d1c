//! Reports a worker's activity to a controller of AMQP workers.
//!
//! It reads the worker's [`Liveness`] and never blocks the worker. An unreachable broker costs no task time, shows in
//! the status and the metrics, and is retried.

use std::sync::Arc;

use lapin::options::BasicPublishOptions;
use lapin::{BasicProperties, Channel, Connection};

use crate::worker::liveness::Liveness;
use crate::worker::status;
use journeyman_domain::activity::{ActivityReport, ActivityReporter, Event};
use journeyman_domain::limits::{ACTIVITY_REPEAT_INTERVAL, AMQP_CLOSE_TIMEOUT};
use journeyman_domain::poll::POLL_RETRY;
use journeyman_platform::amqp::{self, Broker};
use journeyman_platform::host::clock::{Clock, or_pending};
use journeyman_platform::retry::Retry;

/// The exchange and routing key to which reports are published.
#[derive(Debug, Clone)]
pub struct Config {
    pub broker: Broker,
    /// Must exist; it is never declared.
    pub exchange: String,
    /// The worker's key in the controller.
    pub key: String,
    /// The worker's id in the controller.
    pub worker_id: String,
}

/// Never resolves.
pub async fn report(settings: Config, liveness: Arc<Liveness>) {
    let clock = Clock::boot();
    let mut reporter = ActivityReporter::new(ACTIVITY_REPEAT_INTERVAL);
    let mut retry = Retry::new(POLL_RETRY);
    let what = format!("cannot report activity to {}", settings.exchange);
    let mut state = status::ActivityStatus { exchange: settings.exchange.clone(), ..status::ActivityStatus::default() };
    liveness.set_activity(&state);
    loop {
        let why = match connect(&settings).await {
            Ok(open) => {
                let why =
                    publish_reports(&settings, &open, &mut reporter, &liveness, &mut state, clock, &mut retry).await;
                amqp::close(&open.connection, AMQP_CLOSE_TIMEOUT).await;
                why
            }
            Err(why) => why,
        };
        reporter.handle(Event::Disconnected, clock.now());
        state.failures += 1;
        state.error = Some(why.clone());
        liveness.set_activity(&state);
        tokio::time::sleep(retry.on_failure(&what, why)).await;
    }
}

struct ReportChannel {
    connection: Connection,
    channel: Channel,
}

async fn connect(settings: &Config) -> Result<ReportChannel, String> {
    let name = format!("{} (activity)", settings.worker_id);
    let connection = settings.broker.clone().connect(&name).await.map_err(|refused| refused.message)?;
    let channel = settings.broker.bounded("open a channel", amqp::confirm_channel(&connection)).await;
    Ok(ReportChannel { channel: channel.map_err(|refused| refused.message)?, connection })
}

/// Publishes reports until that fails; returns why.
async fn publish_reports(
    settings: &Config,
    open: &ReportChannel,
    reporter: &mut ActivityReporter,
    liveness: &Liveness,
    state: &mut status::ActivityStatus,
    clock: Clock,
    retry: &mut Retry,
) -> String {
    let mut seen = liveness.claims_received();
    observe_liveness(reporter, liveness, clock);
    reporter.handle(Event::Connected, clock.now());
    loop {
        while let Some(report) = reporter.next_report() {
            if let Err(why) = publish(settings, &open.channel, report).await {
                return why;
            }
            if retry.failures() > 0 || state.reports == 0 {
                tracing::info!(exchange = settings.exchange, "reporting activity");
                retry.on_success();
            }
            state.reports += 1;
            state.error = None;
            liveness.set_activity(state);
        }
        let deadline = reporter.next_deadline();
        let now = clock.now();
        match reporter.next_report_allowed_at().filter(|rested| now < *rested) {
            // Thousands of requests a second cause no wake-ups here.
            Some(rested) => clock.sleep_until(deadline.map_or(rested, |at| at.min(rested))).await,
            None => tokio::select! {
                () = liveness.changed() => {}
                () = or_pending(deadline.map(|at| clock.sleep_until(at))) => {}
            },
        }
        observe_liveness(reporter, liveness, clock);
        let received = liveness.claims_received();
        let event =
            if std::mem::replace(&mut seen, received) == received { Event::Tick } else { Event::ClaimsReceived };
        reporter.handle(event, clock.now());
    }
}

fn observe_liveness(reporter: &mut ActivityReporter, liveness: &Liveness, clock: Clock) {
    if liveness.is_claiming() {
        reporter.handle(Event::Ready, clock.now());
    }
    reporter.handle(Event::ClaimsHeld(liveness.claims_held()), clock.now());
}

async fn publish(settings: &Config, channel: &Channel, report: ActivityReport) -> Result<(), String> {
    let (event, id) = (amqp::text_value(report.as_str()), amqp::text_value(&settings.worker_id));
    let headers = amqp::header_table([("x-event", event), ("x-worker-id", id)]);
    let exchange =
        amqp::to_short_string("the name of the exchange", &settings.exchange).map_err(|error| error.to_string())?;
    let key = amqp::to_short_string("the key", &settings.key).map_err(|error| error.to_string())?;
    let publishing = async {
        let properties = BasicProperties::default().with_headers(headers);
        channel.basic_publish(exchange, key, BasicPublishOptions::default(), &[], properties).await?.await
    };
    let confirmed = settings.broker.bounded("report activity", publishing).await.map_err(|refused| refused.message)?;
    if confirmed.is_nack() { Err("the broker rejected a report".to_owned()) } else { Ok(()) }
}
