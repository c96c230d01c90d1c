//! The worker's own log: lines for a person on a terminal, a JSON object a line otherwise, always on stderr.
//!
//! A task's log is another thing and does not pass here.

use std::io::{IsTerminal as _, stderr};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::Environment;
use crate::config::schema::{Log, LogFormat};

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
pub fn color(environment: &Environment) -> Color {
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
    let filter = EnvFilter::try_new(settings.level.as_str()).unwrap_or_else(|_| EnvFilter::new("info"));
    let base = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr);
    let started = if human {
        let colored = terminal && color == Color::Auto;
        base.with_ansi(colored).with_target(false).with_timer(TimeOfDay).finish().try_init()
    } else {
        base.json().flatten_event(true).with_current_span(true).with_span_list(false).finish().try_init()
    };
    // Only a second call fails, and then the first one's settings stay.
    drop(started);
}

/// The time of day where the reader is; the date is on the reader's wall.
struct TimeOfDay;

impl FormatTime for TimeOfDay {
    fn format_time(&self, out: &mut Writer<'_>) -> std::fmt::Result {
        write!(out, "{}", jiff::Zoned::now().strftime("%H:%M:%S%.3f"))
    }
}
