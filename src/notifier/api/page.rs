//! The page of a notifier: how it is without a token, endpoints, lanes and attempts with one. Its script calls the API.

use std::sync::Arc;

use axum::extract::State;
use jiff::Timestamp;
use maud::html;

use super::status::EndpointCondition;
use super::{Api, Refused};
use crate::host::clock::stamp;
use crate::observe::page::{CommandButtons, HtmlPage, PageContent, SnapshotClock, build_page, format_seconds};

/// Each refresh reads the store.
const REFRESH_SECONDS: u8 = 5;

pub(super) async fn page(State(api): State<Arc<Api>>) -> Result<HtmlPage, Refused> {
    let endpoints = api.statuses().await?;
    let silent = endpoints.values().filter(|endpoint| endpoint.state != EndpointCondition::Active).count();
    let stopped: u32 = endpoints.values().map(|endpoint| endpoint.counts.parked + endpoint.counts.paused).sum();
    let messages: i64 = endpoints.values().map(|endpoint| endpoint.counts.messages).sum();
    let oldest = endpoints.values().filter_map(|endpoint| endpoint.counts.oldest).min();
    let mood = if silent > 0 {
        "first bad"
    } else if stopped > 0 {
        "first warn"
    } else {
        "first"
    };
    let main = html! {
        p class=(mood) data-refresh-seconds=(REFRESH_SECONDS) {
            strong { @if silent > 0 { (silent) " of " (endpoints.len()) " endpoints" } @else { "delivering" } }
            @if silent > 0 { "fail, rest, or are paused or disabled. " }
            (messages) " messages wait"
            @if let Some(oldest) = oldest { ", the oldest for " (format_seconds(stamp().since(oldest).as_secs_f64())) }
            @if stopped > 0 { "; lanes parked or paused: " (stopped) }
            "."
        }
        p.dim.empty.without { "Endpoints, lanes and attempts are shown with a token of the API: that of " code { "notifier.read_token_file" }
            " to look, that of " code { "notifier.token_file" } " for the buttons." }
    };
    let parts = PageContent {
        title: if silent > 0 { format!("{silent} not active · notifier") } else { "notifier".to_owned() },
        name: html! { "notifier" },
        main,
        aside: html! {},
        buttons: CommandButtons::Notifier,
        links: html! { a href="/metrics" { "metrics" } " · " a href="/v1/openapi.json" { "API" } },
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
    };
    Ok(build_page(parts, SnapshotClock { now: Timestamp::now() }))
}
