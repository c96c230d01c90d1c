//! The page of a source: what its queue holds and who works for it.

use jiff::Timestamp;
use maud::{Markup, html};
use serde_json::Value;

use super::{CommandButtons, HtmlPage, PageContent, SnapshotClock, build_page};
use crate::source::InspectionTable;

const REFRESH_SECONDS: u8 = 30;

pub fn render(name: &str, tables: &Result<Vec<InspectionTable>, String>, now: Timestamp) -> HtmlPage {
    let clock = SnapshotClock { now };
    let main = html! {
        h2.title data-refresh-seconds=(REFRESH_SECONDS) { "Source " (name) }
        @match tables {
            Ok(tables) => { @for one in tables { (table(one, clock)) } },
            Err(why) => { p.first.bad { strong { "unknown" } (why) } },
        }
    };
    let parts = PageContent {
        title: format!("{name} · journeyman"),
        name: html! { a href="/" { "worker" } },
        main,
        aside: html! {},
        buttons: CommandButtons::Hidden,
        links: html! { a href="/" { "worker" } " · " a href="/sources.json" { "JSON" } },
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
    };
    build_page(parts, clock)
}

fn table(one: &InspectionTable, clock: SnapshotClock) -> Markup {
    let title = |column: &str| column.trim_end_matches("_seconds_ago").replace('_', " ");
    html! {
        h2 { (one.name[..1].to_uppercase()) (one.name[1..]) }
        @if one.rows.is_empty() { div.empty { p { "None." } } } @else {
            table {
                thead { tr { @for column in one.columns { th { (title(column)) } } } }
                tbody {
                    @for row in &one.rows {
                        tr { @for column in one.columns { td data-label=(title(column)) { (cell(column, &row[*column], clock)) } } }
                    }
                }
            }
        }
        @if one.more > 0 { p.dim { "and " (one.more) " more" } }
        @if let Some(note) = one.note { p.dim { (note) } }
    }
}

fn cell(column: &str, value: &Value, clock: SnapshotClock) -> Markup {
    match value {
        Value::Null => html! { "–" },
        Value::Bool(is_set) => html! { (if *is_set { "yes" } else { "no" }) },
        Value::Number(seconds) if column.ends_with("_seconds_ago") => clock.ago(seconds.as_f64().unwrap_or(0.0)),
        Value::String(text) => html! { (text) },
        Value::Array(items) => html! { @for item in items { p { (cell(column, item, clock)) } } },
        Value::Object(fields) => html! { @for value in fields.values() { (cell(column, value, clock)) " " } },
        Value::Number(number) => html! { (number) },
    }
}
