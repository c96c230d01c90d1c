//! The worker's own log: lines for a person on a terminal, a JSON object a line otherwise, always on stderr.
//!
//! A thread of its own writes it: the first line at once, what follows within [`LOG_BATCH_DELAY`] together. Who reads it may be
//! slow, or not read at all: then lines are dropped and counted, and no lease, signal or kill ever waits for the log.
//!
//! A task's log is another thing and does not pass here. No line shows a secret, see [`redact`].

use std::io::{self, IsTerminal as _, Write, stderr};
use std::sync::{Mutex, OnceLock, PoisonError};

use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{DefaultFields, Format, Writer};
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::fmt::{MakeWriter, SubscriberBuilder};
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::Environment;
use crate::config::schema::{Log, LogFormat};
use crate::limits::{LOG_BATCH_DELAY, LOG_LINES_QUEUED_MAX, LOG_WRITE_BYTES};
use crate::redact;

/// Whether lines may be coloured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Color {
    /// Where stderr is a terminal.
    Auto,
    /// Not at all.
    Never,
}

/// What the environment says about colours: any `NO_COLOR` means none.
#[must_use]
pub fn color_from_environment(environment: &Environment) -> Color {
    if environment.get("NO_COLOR").is_some() { Color::Never } else { Color::Auto }
}

/// Starts logging for the whole process. A second call changes nothing.
pub fn start(settings: &Log, color: Color) {
    let terminal = stderr().is_terminal();
    let human = match settings.format {
        LogFormat::Auto => terminal,
        LogFormat::Human => true,
        LogFormat::Json => false,
    };
    let base = tracing_subscriber::fmt()
        .with_env_filter(filter(settings))
        .with_writer(background_writer(RedactingWriter(BatchingWriter::new(stderr()))));
    // Only a second call fails, and then the first one's settings stay.
    if human {
        let colored = terminal && color == Color::Auto;
        let base = base.with_ansi(colored).with_target(false).with_timer(TimeOfDay).with_filter_reloading();
        let handle = base.reload_handle();
        if base.finish().try_init().is_ok() {
            store_set_filter(move |filter| handle.reload(filter).is_ok());
        }
    } else {
        start_json(base);
    }
}

/// Starts it, a JSON object a line.
fn start_json<W>(base: SubscriberBuilder<DefaultFields, Format, EnvFilter, W>)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let base = base.json().flatten_event(true).with_current_span(true).with_span_list(false).with_filter_reloading();
    let handle = base.reload_handle();
    if base.finish().try_init().is_ok() {
        store_set_filter(move |filter| handle.reload(filter).is_ok());
    }
}

/// Libraries that write what passes through them, payloads and passwords included. No setting shows their lines.
const SUPPRESSED_TARGETS: [&str; 2] = ["lapin", "amq_protocol"];

fn filter(settings: &Log) -> EnvFilter {
    let wanted = |directive: &&str| !SUPPRESSED_TARGETS.iter().any(|name| directive.trim().starts_with(name));
    let directives = settings.level.as_str().split(',').filter(wanted).map(str::to_owned);
    let directives: Vec<_> = directives.chain(SUPPRESSED_TARGETS.map(|name| format!("{name}=off"))).collect();
    EnvFilter::try_new(directives.join(",")).unwrap_or_else(|_| EnvFilter::new("info,lapin=off,amq_protocol=off"))
}

/// What replaces the filter of the log that was started.
type SetFilterFn = dyn Fn(EnvFilter) -> bool + Send + Sync;
static SET_FILTER: OnceLock<Box<SetFilterFn>> = OnceLock::new();

fn store_set_filter(refilter: impl Fn(EnvFilter) -> bool + Send + Sync + 'static) {
    // A log is started once.
    drop(SET_FILTER.set(Box::new(refilter)));
}

/// Writes lines of these levels from here on. Where no log was started, nothing.
pub fn set_filter(settings: &Log) {
    let told = SET_FILTER.get().is_none_or(|refilter| refilter(filter(settings)));
    if !told {
        tracing::error!("the log goes on with the levels it had");
    }
}

/// Starts logging for the whole process, each line as a JSON object that is handed to `line`. A second call changes nothing.
pub fn start_with_callback(settings: &Log, line: fn(&[u8])) {
    start_json(
        tracing_subscriber::fmt()
            .with_env_filter(filter(settings))
            .with_writer(background_writer(RedactingWriter(CallbackWriter(line)))),
    );
}

/// What ends the writing thread, and what it had to drop.
static WRITER: Mutex<Option<(WorkerGuard, ErrorCounter)>> = Mutex::new(None);

/// A writer that never waits.
fn background_writer(to: impl Write + Send + 'static) -> NonBlocking {
    let builder = NonBlockingBuilder::default().buffered_lines_limit(LOG_LINES_QUEUED_MAX).lossy(true);
    let (writer, guard) = builder.thread_name("log").finish(to);
    *WRITER.lock().unwrap_or_else(PoisonError::into_inner) = Some((guard, writer.error_counter()));
    writer
}

/// How many lines were dropped, since nobody took them in time.
#[must_use]
pub fn dropped_lines() -> u64 {
    let writing = WRITER.lock().unwrap_or_else(PoisonError::into_inner);
    writing.as_ref().map_or(0, |(_, counter)| counter.dropped_lines() as u64)
}

/// Waits, a second at most, until what was logged is written. Nothing is logged from then on.
pub fn flush_and_stop() {
    drop(WRITER.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// Hands on what is written.
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

/// Writes at once what comes together: lines that follow each other closely cost a call to the system and the wake-up of a
/// thread together, and not each.
struct BatchingWriter<W> {
    to: W,
    lines: Vec<u8>,
}

impl<W: Write> BatchingWriter<W> {
    const fn new(to: W) -> Self {
        Self { to, lines: Vec::new() }
    }

    fn write_out(&mut self) -> io::Result<()> {
        let written = self.to.write_all(&self.lines);
        // What could not be written is lost: nobody waits for a log.
        self.lines.clear();
        written
    }
}

impl<W: Write> Write for BatchingWriter<W> {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        if self.lines.len() + lines.len() > LOG_WRITE_BYTES {
            self.write_out()?;
        }
        self.lines.extend_from_slice(lines);
        Ok(lines.len())
    }

    /// Called by the writing thread when nothing waits any more.
    fn flush(&mut self) -> io::Result<()> {
        if self.lines.is_empty() {
            return self.to.flush();
        }
        self.write_out()?;
        self.to.flush()?;
        std::thread::sleep(LOG_BATCH_DELAY);
        Ok(())
    }
}

/// Writes whole lines, which is what it is given, without the secrets in them.
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

/// The time of day where the reader is; the date is on the reader's wall.
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
    fn a_library_that_writes_what_it_carries_is_never_shown_whatever_is_asked_for() {
        for level in ["trace", "lapin=trace", "info,lapin::channel=trace,lapin=warn,amq_protocol=debug"] {
            let page = Page::default();
            let written = page.clone();
            let settings = Log { level: level.parse().unwrap(), ..Log::default() };
            let base = tracing_subscriber::fmt().with_env_filter(filter(&settings)).with_ansi(false);
            tracing::subscriber::with_default(base.with_writer(move || RedactingWriter(page.clone())).finish(), || {
                tracing::error!(target: "lapin::channel", body = "payload-canary", "Server returned us a message");
                tracing::error!(target: "amq_protocol::frame", body = "payload-canary", "a frame");
                tracing::error!(target: "journeyman::source", "said");
            });
            let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
            assert!(!text.contains("payload-canary"), "{level}: {text}");
            assert_eq!(text.contains("said"), level != "lapin=trace", "{level}: {text}");
        }
    }

    /// Notes how much each call writes.
    #[derive(Default)]
    struct Calls(Vec<usize>);

    impl Write for &mut Calls {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.push(bytes.len());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_that_come_together_are_written_together_up_to_a_bound() {
        let mut calls = Calls::default();
        let mut lines = RedactingWriter(BatchingWriter::new(&mut calls));
        lines.write_all(b"one\n").unwrap();
        lines.write_all(b"two\n").unwrap();
        lines.flush().unwrap();
        lines.flush().unwrap();
        for _ in 0..3 {
            lines.write_all(&[b'x'; LOG_WRITE_BYTES / 2]).unwrap();
        }
        lines.flush().unwrap();
        assert_eq!(calls.0, [8, LOG_WRITE_BYTES, LOG_WRITE_BYTES / 2]);
    }

    #[test]
    fn no_line_shows_a_secret_in_either_format() {
        let _hidden = redact::hide(["log-canary-\"51f2\""]);
        for json in [true, false] {
            let page = Page::default();
            let written = page.clone();
            let base = tracing_subscriber::fmt().with_ansi(false).with_writer(move || RedactingWriter(page.clone()));
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
