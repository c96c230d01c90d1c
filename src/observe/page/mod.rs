//! The status pages: HTML that works without scripts and loads nothing from other hosts.
//!
//! The templates escape text from tasks, clients and persons; the Content-Security-Policy allows the page's own style and
//! scripts only, by hash.

pub mod controller;
pub mod source;
pub mod worker;

use axum::http::header::CONTENT_SECURITY_POLICY;
use axum::response::{Html, IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::{SignedDuration, Timestamp, Unit};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use sha2::{Digest as _, Sha256};

use super::untrusted_text;
pub(crate) use journeyman_domain::units::format_seconds;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
const COMMANDS_SCRIPT: &str = include_str!("act.js");
const TASKS_SCRIPT: &str = include_str!("tasks.js");
const NOTIFIER_SCRIPT: &str = include_str!("notifier.js");
/// Without scripts.
const RELOAD_SECONDS: u8 = 10;

#[derive(Debug, Clone)]
pub struct HtmlPage {
    pub html: String,
    /// `Content-Security-Policy`
    pub policy: String,
}

impl IntoResponse for HtmlPage {
    fn into_response(self) -> Response {
        ([(CONTENT_SECURITY_POLICY, self.policy)], Html(self.html)).into_response()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandButtons {
    Hidden,
    /// They need scripts and the bearer token.
    Shown,
    /// As forms, which carry the page's own token.
    Forms,
    /// Those of a notifier, with what they are about: all of it needs scripts and a token.
    Notifier,
}

impl CommandButtons {
    const fn script(self) -> Option<&'static str> {
        match self {
            Self::Hidden => None,
            Self::Shown => Some(COMMANDS_SCRIPT),
            Self::Forms => Some(TASKS_SCRIPT),
            Self::Notifier => Some(NOTIFIER_SCRIPT),
        }
    }
}

pub(crate) struct PageContent {
    pub(crate) title: String,
    pub(crate) name: Markup,
    pub(crate) main: Markup,
    /// After `main`, and kept when `main` is refreshed.
    pub(crate) aside: Markup,
    pub(crate) buttons: CommandButtons,
    pub(crate) links: Markup,
    pub(crate) version: String,
    pub(crate) pid: u32,
}

/// The links of a worker's and a controller's page.
fn status_links() -> Markup {
    html! {
        a href="/metrics" { "metrics" } " · " a href="/readyz" { "readiness" } " · " a href="/status.json" { "JSON" }
    }
}

pub(crate) fn build_page(parts: PageContent, clock: SnapshotClock) -> HtmlPage {
    let hash = |text: &str| format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text)));
    let buttons_script = parts.buttons.script().map_or_else(String::new, hash);
    let forms = if parts.buttons == CommandButtons::Forms { "'self'" } else { "'none'" };
    let policy = format!(
        "default-src 'none'; style-src {}; script-src {} {buttons_script}; connect-src 'self'; base-uri 'none'; \
         form-action {forms}; frame-ancestors 'none'",
        hash(STYLE),
        hash(SCRIPT)
    );
    HtmlPage { html: untrusted_text::clean(&document(parts, clock).into_string()), policy }
}

fn document(parts: PageContent, clock: SnapshotClock) -> Markup {
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (parts.title) }
                noscript { meta http-equiv="refresh" content=(RELOAD_SECONDS); }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { "journeyman" }
                    span { (parts.name) }
                    div #live {
                        span #state { "as of " (clock.time_of_day(0.0)) }
                        button #stop type="button" hidden { "pause refresh" }
                    }
                    @match parts.buttons {
                        CommandButtons::Shown => { (token_form("http.token_file")) }
                        CommandButtons::Notifier => { (token_form("notifier.token_file")) }
                        CommandButtons::Hidden | CommandButtons::Forms => {}
                    }
                }
                main { (parts.main) }
                // Outside of `main`, so that a refresh does not replace it.
                @if parts.buttons != CommandButtons::Hidden { section #aside { (parts.aside) } }
                footer {
                    p { (parts.links) }
                    p { "version " (parts.version) " · process " (parts.pid) " · hover over a time for the full date" }
                }
                script { (PreEscaped(SCRIPT)) }
                @if let Some(script) = parts.buttons.script() { script { (PreEscaped(script)) } }
            }
        }
    }
}

/// The token is never part of a URL.
fn token_form(key: &str) -> Markup {
    html! {
        div #commands {
            output #message {}
            input #token type="password" autocomplete="off" placeholder={ "token of " (key) } aria-label="token" hidden;
            button #use type="button" hidden { "use token" }
            button #ask type="button" hidden { "enable commands" }
        }
    }
}

/// The time of the snapshot, to which its durations are relative.
#[derive(Clone, Copy)]
pub(crate) struct SnapshotClock {
    pub(crate) now: Timestamp,
}

impl SnapshotClock {
    pub(crate) fn ago(self, seconds: f64) -> Markup {
        self.time_tag(-seconds, &format!("{} ago", format_seconds(seconds)))
    }

    pub(crate) fn ahead(self, seconds: f64) -> Markup {
        self.time_tag(seconds, &format_seconds(seconds))
    }

    pub(crate) fn time_tag(self, seconds: f64, text: &str) -> Markup {
        let then = self.absolute(seconds);
        html! { time datetime=(then) title=(then) { (text) } }
    }

    /// With the date unless it is today.
    pub(crate) fn time_of_day(self, seconds: f64) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d1_a_page_has_no_control_and_no_directional_characters() {
        let name = "a\u{202e}b\u{9b}c\u{2066}d";
        let main = html! { p { (name) } };
        let parts = PageContent {
            title: name.to_owned(),
            name: html! {},
            main,
            aside: html! {},
            buttons: CommandButtons::Shown,
            links: html! {},
            version: String::new(),
            pid: 1,
        };
        let page = build_page(parts, SnapshotClock { now: Timestamp::UNIX_EPOCH });
        assert!(page.html.contains("<p>a b c d</p>"), "{}", page.html);
        assert!(page.html.contains(COMMANDS_SCRIPT) && page.html.contains(STYLE), "the hashes hold");
    }
}
