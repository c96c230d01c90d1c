//! Pages: rows as HTML that works without scripts and loads nothing from other hosts.
//!
//! The templates escape text from tasks, clients and persons; the Content-Security-Policy allows the page's own style and
//! scripts only, by hash.

use axum::http::header::CONTENT_SECURITY_POLICY;
use axum::response::{Html, IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::{SignedDuration, Timestamp, Unit};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use sha2::{Digest as _, Sha256};

use super::rows::{Action, Cell, Level, Report, Row, Section, Table, Value};
use crate::console::untrusted_text;

const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = include_str!("page/page.js");
/// Without scripts.
const RELOAD_SECONDS: u8 = 10;
pub(crate) const REFRESH_SECONDS: u8 = 2;
const SHORT_CHARS_MAX: usize = 24;

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

pub(crate) struct PageContent {
    pub(crate) title: String,
    pub(crate) name: Markup,
    pub(crate) main: Markup,
    /// The key of the file with the token for the buttons, if it has some.
    pub(crate) commands: Option<&'static str>,
    pub(crate) refresh_seconds: u8,
    pub(crate) links: Markup,
    /// The page stays at its end while it grows.
    pub(crate) follows: bool,
    /// Links to the other pages of the console.
    pub(crate) nav: Markup,
}

impl PageContent {
    pub(crate) fn new(title: impl Into<String>, name: Markup, main: Markup) -> Self {
        Self {
            title: title.into(),
            name,
            main,
            commands: None,
            refresh_seconds: REFRESH_SECONDS,
            links: html! {},
            nav: html! {},
            follows: false,
        }
    }

    pub(crate) fn build(self) -> HtmlPage {
        let hash = |text: &str| format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text)));
        let policy = format!(
            "default-src 'none'; style-src {}; script-src {}; connect-src 'self'; img-src 'self'; base-uri 'none'; \
             form-action 'self'; frame-ancestors 'none'",
            hash(STYLE),
            hash(SCRIPT)
        );
        HtmlPage { html: untrusted_text::clean(&self.document().into_string()), policy }
    }

    fn document(self) -> Markup {
        html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    title { (self.title) }
                    @if self.refresh_seconds > 0 { noscript { meta http-equiv="refresh" content=(RELOAD_SECONDS); } }
                    style { (PreEscaped(STYLE)) }
                }
                body {
                    header {
                        h1 { "journeyman" }
                        @if !self.nav.0.is_empty() { nav { (self.nav) } }
                        span { (self.name) }
                        div #live {
                            span #state { "as of " (Timestamp::now().strftime("%H:%M:%S UTC")) }
                            button #stop type="button" hidden { "pause refresh" }
                        }
                        @if let Some(key) = self.commands { (token_form(key)) }
                    }
                    main data-refresh-seconds=(self.refresh_seconds) data-follows[self.follows] { (self.main) }
                    // Outside of `main`, so that a refresh does not replace it.
                    section #aside {}
                    footer {
                        p { (self.links) }
                        p { "version " (env!("CARGO_PKG_VERSION")) " · process " (std::process::id()) " · hover over a time for the full date" }
                    }
                    script { (PreEscaped(SCRIPT)) }
                }
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
            button #ask type="button" hidden { "use a token" }
        }
    }
}

/// Removes the buttons of a page without commands.
pub(crate) fn remove_actions(report: &mut Report) {
    for Section { title, tables, .. } in &mut report.sections {
        let cells = tables.iter_mut().flat_map(|table| table.rows.iter_mut().flatten());
        cells.chain([title]).for_each(|cell| cell.actions.clear());
    }
}

pub fn section(Section { title, headline, alerts, facts, tables }: &Section) -> Markup {
    html! {
        section {
            @if !title.parts.is_empty() { h2 { (cell(title)) } }
            @if !headline.state.is_empty() {
                p class={ "first " (class(headline.level)) } { strong { (headline.state) } (cell(&headline.cell)) }
            }
            @for (level, text) in alerts { p class=(class(*level)) { (prose(text)) } }
            (self::facts(facts))
            @for one in tables { (table(one)) }
        }
    }
}

pub(crate) fn facts(rows: &[Row]) -> Markup {
    html! {
        @if !rows.is_empty() { dl.facts { @for row in rows { div { dt { (row.label) } dd { (cell(&row.cell)) } } } } }
    }
}

pub(crate) fn table(Table { title, columns, rows, more, empty }: &Table) -> Markup {
    html! {
        @if !title.is_empty() { h3 { (title) } }
        @if rows.is_empty() { p.empty { (prose(empty)) } } @else {
            table {
                thead { tr { @for column in columns { th { (column) } } } }
                tbody {
                    @for row in rows {
                        tr { @for (column, one) in columns.iter().zip(row) {
                            td.short[is_short(one)] data-label=(column) { (cell(one)) }
                        } }
                    }
                }
            }
            @if *more > 0 { p.dim { "and " (more) " more" } }
        }
    }
}

/// True if a browser may not break its lines.
fn is_short(cell: &Cell) -> bool {
    cell.text().chars().count() <= SHORT_CHARS_MAX
}

const fn class(level: Level) -> &'static str {
    match level {
        Level::Plain => "",
        Level::Good => "good",
        Level::Warn => "warn",
        Level::Bad => "bad",
    }
}

/// A sentence with commands in backticks.
pub(crate) fn prose(text: &str) -> Markup {
    html! {
        @for (index, part) in text.split('`').enumerate() {
            @if index % 2 == 0 { (part) } @else { code { (part) } }
        }
    }
}

pub(crate) fn cell(Cell { parts, actions }: &Cell) -> Markup {
    html! {
        @for (index, part) in parts.iter().enumerate() {
            @if part.is_note { small class=(class(part.level)) { (value(&part.value)) } }
            @else {
                @if index > 0 { " · " }
                @if part.level == Level::Plain { (value(&part.value)) }
                @else { span class=(class(part.level)) { (value(&part.value)) } }
            }
        }
        @for action in actions { " " (button(action)) }
    }
}

fn value(value: &Value) -> Markup {
    match value {
        Value::Text(text) => prose(text),
        Value::Code(text) => html! { code { (text) } },
        Value::Long(text) => html! { details data-name=(text) { summary { "more" } pre { (text) } } },
        Value::Link { text, href } => html! { a href=(href) { (text) } },
        Value::Count(_) | Value::Bytes(_) | Value::Took(_) => html! { (value.text()) },
        Value::Lasts(seconds) | Value::Ago(seconds) => time(-seconds, &value.text()),
        Value::In(seconds) => time(*seconds, &value.text()),
        Value::Left { seconds, of } => html! {
            @if let Some(whole) = of.filter(|whole| *whole > 0.0) {
                progress max=(whole) value=(seconds.clamp(0.0, whole)) {} " "
            }
            (time(*seconds, &value.text()))
        },
    }
}

/// `seconds` from now.
fn time(seconds: f64, text: &str) -> Markup {
    let span = SignedDuration::try_from_secs_f64(seconds).unwrap_or_default();
    let then = Timestamp::now().saturating_add(span).unwrap_or_default();
    let then = then.round(Unit::Second).unwrap_or(then);
    html! { time datetime=(then) title=(then) { (text) } }
}

/// Hidden until a token is entered.
fn button(Action { label, path, body, confirm, reason, numbers }: &Action) -> Markup {
    let body = (!body.is_null()).then(|| body.to_string());
    let button = |label: &str| {
        html! { button type="button" data-path=(path) data-body=[&body] data-confirm=[confirm] data-reason=[reason] { (label) } }
    };
    html! {
        @if numbers.is_empty() { span.act { (button(label)) } } @else {
            details.act data-name={ (path) (body.as_deref().unwrap_or_default()) } {
                summary { (label) }
                @for number in numbers {
                    label { (number.label) " "
                        input type="number" min="0" data-place=(number.place) data-times=(number.times) value=[number.value]; }
                    " "
                }
                (button("apply"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d1_a_page_has_no_control_and_no_directional_characters() {
        let name = "a\u{202e}b\u{9b}c\u{2066}d";
        let page = PageContent::new(name, html! {}, html! { p { (name) } }).build();
        assert!(page.html.contains("<p>a b c d</p>"), "{}", page.html);
        assert!(page.html.contains(SCRIPT) && page.html.contains(STYLE), "the hashes hold");
    }
}
