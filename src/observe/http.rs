//! Health, metrics and the status page over HTTP, for those who watch a worker. Nothing here gives an order.
//!
//! | path | answers with |
//! | --- | --- |
//! | `/livez` | 200 where the worker's loop answers in time |
//! | `/readyz` | 200 where it claims, or would if a slot were free; `?verbose` names every check |
//! | `/metrics` | OpenMetrics |
//! | `/` | the status page, which refreshes itself; `/status` does not |
//! | `/status.json` | the same as JSON, as `journeyman status -o json` shows it |

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{Response, StatusCode};
use tokio::time::timeout;

use super::door::{self, Check, Site, TEXT, ready, said};
pub use super::door::{Door, Reach};
use super::page::{self, Refresh};
use super::{family, metrics};
use crate::control::Status;
use crate::limits::HTTP_LOOK_TIMEOUT;
use crate::worker::view::{Blocked, State, View};

/// Looks at the worker: `None` once it has exited.
pub type Look = dyn Fn() -> Looking + Send + Sync;
/// A look that is under way.
pub type Looking = Pin<Box<dyn Future<Output = Option<Status>> + Send>>;

/// Answers until it is dropped.
pub async fn serve(door: Door, look: Arc<Look>) -> Infallible {
    let site = Site {
        paths: &["/livez", "/readyz", "/metrics", "/", "/status", "/status.json"],
        hint: "/livez, /readyz?verbose, /metrics, /, /status, /status.json",
        answer: Box::new(move |path, query| {
            let look = Arc::clone(&look);
            Box::pin(async move { answer(&path, query.as_deref(), &*look).await })
        }),
        guarded: Vec::new(),
    };
    door::serve(door, site).await
}

async fn answer(path: &str, query: Option<&str>, look: &Look) -> Response<Body> {
    let status = match timeout(HTTP_LOOK_TIMEOUT, look()).await {
        Ok(Some(status)) => status,
        Ok(None) => return said(StatusCode::SERVICE_UNAVAILABLE, TEXT, "the worker has exited\n".to_owned()),
        Err(_) => {
            let text = format!("the worker's loop did not answer within {HTTP_LOOK_TIMEOUT:?}\n");
            return said(StatusCode::SERVICE_UNAVAILABLE, TEXT, text);
        }
    };
    match path {
        "/livez" => said(StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" => ready(&checks(&status.view), query),
        "/metrics" => match metrics::text(status) {
            Ok(text) => said(StatusCode::OK, family::CONTENT_TYPE, text),
            Err(_) => said(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "the metrics cannot be written\n".to_owned()),
        },
        "/status.json" => {
            let json = serde_json::to_string_pretty(&status).unwrap_or_default();
            said(StatusCode::OK, "application/json", json + "\n")
        }
        _ => {
            let refresh = if path == "/" { Refresh::ByItself } else { Refresh::Never };
            page::worker::show(&status, refresh, jiff::Timestamp::now()).answer()
        }
    }
}

fn checks(view: &View) -> Vec<Check> {
    let why = view.not_claiming.clone().unwrap_or_default();
    let unless = |words: &[Blocked]| view.blocked.filter(|blocked| words.contains(blocked)).map(|_| why.clone());
    let held = |name: &str, words: &[Blocked]| Check { name: name.to_owned(), wrong: unless(words), remark: None };
    let going = view.state != State::Running && view.state != State::Paused;
    let taken = view.tasks.len() + view.kept.len();
    let free = view.capacity.saturating_sub(u32::try_from(taken).unwrap_or(u32::MAX));
    let remark =
        if free == 0 { "every slot is taken; the next that is free claims".to_owned() } else { format!("{free} free") };
    vec![
        sources(view),
        held("not paused", &[Blocked::Paused]),
        Check { name: "stays".to_owned(), wrong: going.then(|| why.clone()), remark: None },
        held("host is fit", &[Blocked::Unfit]),
        held("services", &[Blocked::Service]),
        held("disk", &[Blocked::Disk]),
        held("memory", &[Blocked::Memory]),
        Check { name: "slots".to_owned(), wrong: None, remark: Some(remark) },
    ]
}

/// One source that answers is enough to work.
fn sources(view: &View) -> Check {
    let up = view.sources.iter().filter(|source| source.polled_seconds_ago.is_some() && !source.in_trouble).count();
    let of = format!("{up} of {} answer", view.sources.len());
    let troubles = view.sources.iter().filter_map(|source| {
        source.error.as_ref().map(|error| format!("; {}: {}", source.name, error.text.replace(['\n', '\r'], " ")))
    });
    let text = troubles.fold(of, |text, trouble| text + &trouble);
    match up {
        0 => Check { name: "sources".to_owned(), wrong: Some(text), remark: None },
        _ => Check { name: "sources".to_owned(), wrong: None, remark: Some(text) },
    }
}
