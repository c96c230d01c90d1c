//! The status pages: HTML documents that are whole without scripts and without anything from elsewhere.
//!
//! What a task, a client or a person wrote is escaped by the templates; the policy allows a page's own style and script, each
//! by its hash, and nothing else. [`worker`] has the page of a worker, [`controller`] that of a controller.

pub mod controller;
pub mod worker;

use axum::body::Body;
use axum::http::header::{CONTENT_SECURITY_POLICY, HeaderValue};
use axum::http::{Response, StatusCode};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::{SignedDuration, Timestamp, Unit};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use sha2::{Digest as _, Sha256};

use super::server::response;
use crate::worker::snapshot::format_duration;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
const COMMANDS_SCRIPT: &str = include_str!("act.js");
/// How often a browser without scripts asks again.
const RELOAD_SECONDS: u8 = 10;

/// Whether the page refreshes itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refresh {
    /// Every two seconds, or every ten without scripts.
    Auto,
    /// It stays as it is.
    Never,
}

/// A page, and what a browser may make of it.
#[derive(Debug, Clone)]
pub struct HtmlPage {
    /// The document.
    pub html: String,
    /// The value of `Content-Security-Policy`.
    pub policy: String,
}

impl HtmlPage {
    /// As an answer.
    pub(super) fn into_response(self) -> Response<Body> {
        let mut answer = response(StatusCode::OK, "text/html; charset=utf-8", self.html);
        let policy =
            HeaderValue::from_str(&self.policy).unwrap_or_else(|_| HeaderValue::from_static("default-src 'none'"));
        answer.headers_mut().insert(CONTENT_SECURITY_POLICY, policy);
        answer
    }
}

/// Whether who looks can give orders too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandButtons {
    /// They cannot.
    Hidden,
    /// They can where they have the token and run scripts.
    Shown,
}

/// What is the page's own.
struct PageContent {
    title: String,
    /// Whose page it is.
    name: Markup,
    main: Markup,
    links: Markup,
    buttons: CommandButtons,
    version: String,
    pid: u32,
}

/// A page of these parts.
fn build_page(parts: PageContent, refresh: Refresh, clock: SnapshotClock) -> HtmlPage {
    let hash = |text: &str| STANDARD.encode(Sha256::digest(text));
    let script = match refresh {
        Refresh::Auto => {
            let act = if parts.buttons == CommandButtons::Shown {
                format!(" 'sha256-{}'", hash(COMMANDS_SCRIPT))
            } else {
                String::new()
            };
            format!("script-src 'sha256-{}'{act}; connect-src 'self'; ", hash(SCRIPT))
        }
        Refresh::Never => String::new(),
    };
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{}'; {script}base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        hash(STYLE)
    );
    HtmlPage { html: document(parts, refresh, clock).into_string(), policy }
}

fn document(parts: PageContent, refresh: Refresh, clock: SnapshotClock) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (parts.title) }
                @if refresh == Refresh::Auto {
                    noscript { meta http-equiv="refresh" content=(RELOAD_SECONDS); }
                }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { "journeyman" }
                    span { (parts.name) }
                    div #live {
                        span #state { "as of " (clock.time_of_day(0.0)) }
                        button #stop type="button" hidden { "hold" }
                    }
                    @if parts.buttons == CommandButtons::Shown { (token_form()) }
                }
                main { (parts.main) }
                // Outside of what refreshes itself: what somebody reads there stays.
                @if parts.buttons == CommandButtons::Shown { section #aside {} }
                footer {
                    p { (parts.links) }
                    p { "version " (parts.version) " · process " (parts.pid) " · a time shows itself in full under the pointer" }
                }
                @if refresh == Refresh::Auto {
                    script { (PreEscaped(SCRIPT)) }
                    @if parts.buttons == CommandButtons::Shown { script { (PreEscaped(COMMANDS_SCRIPT)) } }
                }
            }
        }
    }
}

/// Where the token is given. It is never part of an address.
fn token_form() -> Markup {
    html! {
        div #orders {
            output #said {}
            input #token type="password" autocomplete="off" placeholder="the token of http.token_file" aria-label="token" hidden;
            button #use type="button" hidden { "use it" }
            button #ask type="button" hidden { "give orders" }
        }
    }
}

/// The time of the view, from which every span in it counts.
#[derive(Clone, Copy)]
struct SnapshotClock {
    now: Timestamp,
}

impl SnapshotClock {
    fn ago(self, seconds: f64) -> Markup {
        self.time_tag(-seconds, &format!("{} ago", format_seconds(seconds)))
    }

    fn ahead(self, seconds: f64) -> Markup {
        self.time_tag(seconds, &format_seconds(seconds))
    }

    fn time_tag(self, seconds: f64, text: &str) -> Markup {
        let then = self.absolute(seconds);
        html! { time datetime=(then) title=(then) { (text) } }
    }

    /// The time itself, without the day where that is today's.
    fn time_of_day(self, seconds: f64) -> String {
        let then = self.absolute(seconds);
        let day = |time: Timestamp| time.strftime("%Y-%m-%d").to_string();
        let same = day(then) == day(self.now);
        then.strftime(if same { "%H:%M:%S UTC" } else { "%Y-%m-%d %H:%M UTC" }).to_string()
    }

    fn absolute(self, seconds: f64) -> Timestamp {
        let span = SignedDuration::try_from_secs_f64(seconds).unwrap_or_default();
        let then = self.now.saturating_add(span).unwrap_or(self.now);
        then.round(Unit::Second).unwrap_or(then)
    }
}

fn format_seconds(seconds: f64) -> String {
    format_duration(std::time::Duration::from_secs_f64(seconds.clamp(0.0, f64::from(u32::MAX))))
}
