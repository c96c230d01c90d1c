//! The log of this process on stderr: plain lines on a terminal, otherwise one JSON object per line. Not the logs of tasks.
//!
//! A thread writes it. If the reader of stderr is too slow, lines are dropped and counted; nothing ever waits for the log.
//! Secrets are removed, see [`redact`].

use std::io::{self, BufWriter, IsTerminal as _, Write, stderr};
use std::sync::OnceLock;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tracing::{Event, Level, Subscriber, field};
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::layer::{Context, Layered, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt, reload};

use crate::otlp_logs::OtlpWriter;
use crate::redact;
use crate::settings::Environment;
use crate::settings::values::{Filter, Size, built_in};
use journeyman_domain::limits::{ALERTS_QUEUED_MAX, LOG_LINES_QUEUED_MAX, LOG_WRITE_BYTES, TASK_LOG_BYTES_MIN};

/// Logs.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// Format of the log: `auto` is `human` on a terminal and `json` otherwise.
    pub format: LogFormat,
    /// Lines that are logged: error, warn, info, debug, trace, or directives such as `info,journeyman_worker::source=debug`.
    pub level: Filter,
    /// Maximum size of a task's log: the first three quarters and the last quarter are kept, with a marker between them.
    pub task_log_max: Size<TASK_LOG_BYTES_MIN>,
    /// Each line that a payload prints begins with its time in the task's log, such as `[2026-11-30T10:20:44.549Z]`.
    pub task_log_times: bool,
    /// Names of variables whose values are redacted from every log, `*` matching anything: those of the worker's environment, and those that a task of `command` sets.
    pub redact_env: Vec<String>,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            format: LogFormat::Auto,
            level: built_in("info"),
            task_log_max: built_in("64MiB"),
            task_log_times: false,
            redact_env: redact::SECRET_NAME_PATTERNS.map(str::to_owned).to_vec(),
        }
    }
}

/// Format of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// `human` on a terminal, `json` otherwise.
    Auto,
    /// Lines for people.
    Human,
    /// One JSON object per line.
    Json,
}

/// A second call has no effect.
pub fn start(settings: &Log, environment: &Environment) {
    let terminal = stderr().is_terminal();
    let human = match settings.format {
        LogFormat::Auto => terminal,
        LogFormat::Human => true,
        LogFormat::Json => false,
    };
    let writer = background_writer(RedactingWriter(BufWriter::with_capacity(LOG_WRITE_BYTES, stderr())));
    let lines = if human {
        let colored = terminal && environment.get("NO_COLOR").is_none();
        let lines = fmt::layer().with_ansi(colored).with_target(false).with_timer(TimeOfDay);
        lines.with_writer(writer).boxed()
    } else {
        json_lines(writer)
    };
    let (writer, failure) = match OtlpWriter::from_environment(environment) {
        Ok(writer) => (writer, None),
        Err(failure) => (None, Some(failure)),
    };
    let exported = writer.map(|to| {
        let (writer, guard) = lossy_writer("log export", RedactingWriter(to));
        *EXPORT.lock() = Some(guard);
        json_lines(writer)
    });
    install(settings, [Some(lines), exported].into_iter().flatten().collect());
    if let Some(failure) = failure {
        tracing::error!("{failure}");
    }
}

static EXPORT: Mutex<Option<WorkerGuard>> = Mutex::new(None);

/// Passes each line, a JSON object, to `line`. A second call has no effect.
pub fn start_with_callback(settings: &Log, line: fn(&[u8])) {
    install(settings, vec![json_lines(background_writer(RedactingWriter(CallbackWriter(line))))]);
}

type LineLayer = Box<dyn Layer<Layered<reload::Layer<EnvFilter, Registry>, Registry>> + Send + Sync>;

fn json_lines(writer: NonBlocking) -> LineLayer {
    let lines = fmt::layer().json().flatten_event(true).with_current_span(true).with_span_list(false);
    lines.with_writer(writer).boxed()
}

fn install(settings: &Log, lines: Vec<LineLayer>) {
    let (filter, handle) = reload::Layer::new(filter(settings));
    // Only a second call fails.
    if tracing_subscriber::registry().with(filter).with(lines).with(AlertLayer).try_init().is_ok() {
        drop(FILTER.set(handle));
    }
}

static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

pub fn set_filter(settings: &Log) {
    if FILTER.get().is_some_and(|handle| handle.reload(filter(settings)).is_err()) {
        tracing::error!("cannot change the log level");
    }
}

/// Libraries that log payloads and passwords, or errors that their callers report; no setting enables them.
const SUPPRESSED_TARGETS: [&str; 3] = ["lapin", "amq_protocol", "kube"];

fn filter(settings: &Log) -> EnvFilter {
    let wanted = |directive: &&str| !SUPPRESSED_TARGETS.iter().any(|name| directive.trim().starts_with(name));
    let directives = settings.level.as_str().split(',').filter(wanted).map(str::to_owned);
    let directives: Vec<_> = directives.chain(SUPPRESSED_TARGETS.map(|name| format!("{name}=off"))).collect();
    EnvFilter::try_new(directives.join(","))
        .unwrap_or_else(|_| EnvFilter::new("info,lapin=off,amq_protocol=off,kube=off"))
}

static WRITER: Mutex<Option<(WorkerGuard, ErrorCounter)>> = Mutex::new(None);

/// Drops lines if `to` is too slow.
fn lossy_writer(thread: &str, to: impl Write + Send + 'static) -> (NonBlocking, WorkerGuard) {
    let builder = NonBlockingBuilder::default().buffered_lines_limit(LOG_LINES_QUEUED_MAX).lossy(true);
    builder.thread_name(thread).finish(to)
}

fn background_writer(to: impl Write + Send + 'static) -> NonBlocking {
    let (writer, guard) = lossy_writer("log", to);
    *WRITER.lock() = Some((guard, writer.error_counter()));
    writer
}

pub fn dropped_lines() -> u64 {
    let writing = WRITER.lock();
    writing.as_ref().map_or(0, |(_, counter)| counter.dropped_lines() as u64)
}

/// Waits up to a second until all lines are written. Later lines are discarded.
pub fn flush_and_stop() {
    drop(WRITER.lock().take());
    drop(EXPORT.lock().take());
}

/// An alert for the operator that was logged as an error, without secrets.
#[derive(Debug, Default)]
pub struct AlertLine {
    pub alert: String,
    pub message: String,
}

static ALERTS: OnceLock<mpsc::Sender<AlertLine>> = OnceLock::new();

/// The alerts from now on. A second call gets none.
pub fn subscribe_alerts() -> mpsc::Receiver<AlertLine> {
    let (sender, alerts) = mpsc::channel(ALERTS_QUEUED_MAX);
    drop(ALERTS.set(sender));
    alerts
}

struct AlertLayer;

impl<S: Subscriber> Layer<S> for AlertLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let Some(alerts) = ALERTS.get().filter(|_| *event.metadata().level() == Level::ERROR) else { return };
        let mut line = AlertLine::default();
        event.record(&mut line);
        if !line.alert.is_empty() {
            line.message = redact::text(&line.message).into_owned();
            alerts.try_send(line).ok();
        }
    }
}

impl field::Visit for AlertLine {
    fn record_debug(&mut self, field: &field::Field, value: &dyn std::fmt::Debug) {
        match field.name() {
            "alert" => self.alert = format!("{value:?}").trim_matches('"').to_owned(),
            "message" => self.message = format!("{value:?}"),
            _ => {}
        }
    }
}

struct CallbackWriter(fn(&[u8]));

impl Write for CallbackWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        (self.0)(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Each write is a whole line.
struct RedactingWriter<W>(W);

impl<W: Write> Write for RedactingWriter<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.write_all(&redact::bytes(line, None))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Local time without the date.
struct TimeOfDay;

impl FormatTime for TimeOfDay {
    fn format_time(&self, out: &mut Writer<'_>) -> std::fmt::Result {
        write!(out, "{}", jiff::Zoned::now().strftime("%H:%M:%S%.3f"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl Write for Page {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn libraries_that_log_payloads_are_never_shown_at_any_level() {
        for level in ["trace", "lapin=trace", "info,lapin::channel=trace,lapin=warn,amq_protocol=debug"] {
            let page = Page::default();
            let written = page.clone();
            let settings = Log { level: level.parse().unwrap(), ..Log::default() };
            let base = fmt().with_env_filter(filter(&settings)).with_ansi(false);
            tracing::subscriber::with_default(base.with_writer(move || RedactingWriter(page.clone())).finish(), || {
                tracing::error!(target: "lapin::channel", body = "payload-canary", "Server returned us a message");
                tracing::error!(target: "amq_protocol::frame", body = "payload-canary", "a frame");
                tracing::error!(target: "journeyman_worker::source", "said");
            });
            let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
            assert!(!text.contains("payload-canary"), "{level}: {text}");
            assert_eq!(text.contains("said"), level != "lapin=trace", "{level}: {text}");
        }
    }

    #[test]
    fn no_line_shows_a_secret_in_either_format() {
        let _hidden = redact::hide(["log-canary-\"51f2\""]);
        for json in [true, false] {
            let page = Page::default();
            let written = page.clone();
            let base = fmt().with_ansi(false).with_writer(move || RedactingWriter(page.clone()));
            let say = || tracing::warn!(token = "log-canary-\"51f2\"", "told log-canary-\"51f2\" twice");
            if json {
                tracing::subscriber::with_default(base.json().finish(), say);
            } else {
                tracing::subscriber::with_default(base.finish(), say);
            }
            let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
            assert!(!text.contains("51f2") && text.matches(redact::REPLACEMENT).count() == 2, "{text}");
        }
    }
}
