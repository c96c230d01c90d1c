//! Buttons of the controller page. They are hidden until a token is entered.

use maud::{Markup, html};
use serde_json::json;

use crate::controller::status::{GroupStatus, PoolStatus, Role, WorkerStatus};

pub(super) fn pool_buttons(pool: &PoolStatus) -> Markup {
    html! {
        span.act {
            @if pool.paused.is_some() { (button(pool, &json!({ "resume": {} }), "resume", "")) }
            @else {
                (button(pool, &json!({ "pause": {} }), "pause", "Pause the whole pool? No worker is started or stopped until it is resumed."))
            }
            @if pool.role == Role::Active {
                " " button type="button" data-poison=(pool.name) { "poison queue" }
            }
        }
    }
}

pub(super) fn group_buttons(pool: &PoolStatus, group: &GroupStatus) -> Markup {
    if !pool.starts_workers {
        return html! {};
    }
    let key = &group.key;
    let scaled = group.scale_override.as_ref();
    let number = |number: Option<u32>| number.map_or_else(String::new, |number| number.to_string());
    html! {
        div.act {
            @if group.paused.is_some() && pool.paused.is_none() {
                (button(pool, &json!({ "resume": { "key": key } }), "resume", ""))
            } @else if pool.paused.is_none() {
                (button(pool, &json!({ "pause": { "key": key } }), "pause", ""))
            }
            @if group.consecutive_failures > 0 {
                " " (button(pool, &json!({ "retry": { "key": key } }), "retry now", ""))
            }
            details data-name=(format!("numbers {} {key}", pool.name)) {
                summary { "scale" }
                div.numbers data-pool=(pool.name) data-key=(key) {
                    input name="min" type="number" min="0" placeholder="min" aria-label="at least" value=(number(scaled.and_then(|scaled| scaled.min)));
                    " to "
                    input name="max" type="number" min="0" placeholder="max" aria-label="at most" value=(number(scaled.and_then(|scaled| scaled.max)));
                    " for "
                    input name="minutes" type="number" min="0" value="60" aria-label="minutes";
                    " min " button type="button" { "apply" }
                    @if scaled.is_some() {
                        " " (button(pool, &json!({ "scale": { "key": key, "seconds": 0 } }), "reset", ""))
                    }
                }
            }
        }
    }
}

pub(super) fn worker_buttons(pool: &PoolStatus, worker: &WorkerStatus) -> Markup {
    let ask = format!("Drain {}? It finishes what it holds.", worker.id);
    html! { span.act { (button(pool, &json!({ "drain": { "worker": worker.id } }), "drain", &ask)) } }
}

fn button(pool: &PoolStatus, command: &serde_json::Value, says: &str, ask: &str) -> Markup {
    let command = json!({ "pool": pool.name, "command": command }).to_string();
    html! { button type="button" data-command=(command) data-confirm=[Some(ask).filter(|ask| !ask.is_empty())] { (says) } }
}
