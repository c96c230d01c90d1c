//! A form for a new task, made of the schema of its handler.

use std::collections::BTreeMap;

use axum::extract::{Path, Query, State};
use axum::http::HeaderMap;
use futures_util::future::join_all;
use maud::{Markup, html};
use serde::Deserialize;
use serde_json::{Map, Value as Json};

use tokio::time::timeout;

use super::listing::parse_id;
use super::{Console, PageResult, Shared, within};
use crate::console::page::PageContent;
use journeyman_domain::limits::CONSOLE_OVERVIEW_TIMEOUT;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Given {
    queue: String,
    /// The task whose payload is filled in.
    from: String,
}

/// The schemas of payloads by task queue, as the workers tell them.
async fn schemas(console: &Console) -> BTreeMap<String, Json> {
    let mut found = console.schemas.clone();
    let remote = console.workers.iter().filter_map(|target| target.address());
    let asked =
        remote.map(|address| timeout(CONSOLE_OVERVIEW_TIMEOUT, address.get::<BTreeMap<String, Json>>("schemas.json")));
    for answer in join_all(asked).await {
        found.extend(answer.ok().and_then(Result::ok).unwrap_or_default());
    }
    found
}

pub(super) async fn page(
    State(console): Shared,
    Path(name): Path<String>,
    Query(given): Query<Given>,
    headers: HeaderMap,
) -> PageResult {
    let target = console.queue(&name)?;
    let may_read = console.token.is_some_and(|token| token.is_in(&headers) == Some(true));
    let schemas = schemas(&console).await;
    let mut queue = given.queue;
    let mut payload = Json::Null;
    let mut title = String::new();
    if !given.from.is_empty() && may_read {
        let mut definition = within(target.api.task_definition(&parse_id(&given.from)?)).await?;
        let text = |path: &str| definition.pointer(path).and_then(Json::as_str).unwrap_or_default().to_owned();
        title = text("/metadata/name");
        if queue.is_empty() {
            queue = format!("{}/{}", text("/provisionerId"), text("/workerType"));
        }
        payload = definition["payload"].take();
    }
    if queue.is_empty() {
        queue = schemas.keys().next().cloned().unwrap_or_default();
    }
    let schema = schemas.get(&queue).cloned().unwrap_or(Json::Null);
    let main = html! {
        form.search method="get" {
            label { "queue " input name="queue" value=(queue) list="queues" size="30"; }
            datalist id="queues" { @for known in schemas.keys() { option value=(known) {} } }
            @if !given.from.is_empty() { input type="hidden" name="from" value=(given.from); }
            button type="submit" { "choose" }
        }
        @if console.token.is_none() { p.empty { "Tasks are created with a token: set " code { "http.token_file" } " to a file with one." } }
        @if !given.from.is_empty() && !may_read { p.empty data-ask { "The payload of " code { (given.from) } " is filled in once the token is given." } }
        @if !queue.is_empty() {
            section.form {
                h2 { "new task for " (queue) }
                label { "name" input data-name="name" value=(title); }
                (fields(&schema, &payload))
                span.act { button type="button" data-create={ "/tasks/" (name) } data-queue=(queue) data-from=(given.from) { "create" } }
            }
        }
    };
    let content = console.page("create", html! { "queue " (name) }, main);
    // What a person types would be lost.
    Ok(PageContent { refresh_seconds: 0, ..content }.build())
}

/// One field for each property of the schema, or one for the whole payload.
fn fields(schema: &Json, payload: &Json) -> Markup {
    let Some(properties) = schema["properties"].as_object().filter(|properties| !properties.is_empty()) else {
        let text = if payload.is_null() { "{}".to_owned() } else { pretty(payload) };
        return html! { label { "payload, as JSON" textarea data-field="" data-kind="json" rows="10" { (text) } } };
    };
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    let is_required = |name: &String| required.iter().any(|one| one == name);
    let is_given = |name: &String| payload.get(name).is_some();
    let others = payload.as_object().into_iter().flatten().filter(|(name, _)| !properties.contains_key(*name));
    let (first, folded): (Vec<_>, Vec<_>) =
        properties.iter().partition(|(name, property)| is_required(name) || is_given(name) || is_simple(property));
    let draw = |(name, property): &(&String, &Json)| field(name, property, payload.get(*name), is_required(name));
    html! {
        @for one in &first { (draw(one)) }
        @for (name, value) in others { (field(name, &Json::Null, Some(value), false)) }
        @if !folded.is_empty() { details { summary { "more" } @for one in &folded { (draw(one)) } } }
    }
}

/// True if a person fills it in without JSON.
fn is_simple(property: &Json) -> bool {
    ["string", "integer", "number", "boolean"].iter().any(|simple| property["type"] == *simple)
}

fn pretty(value: &Json) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

fn field(name: &str, property: &Json, given: Option<&Json>, is_required: bool) -> Markup {
    let value = given.cloned().unwrap_or(Json::Null);
    let default = property.get("default").map(Json::to_string).unwrap_or_default();
    let text =
        value.as_str().map_or_else(|| if value.is_null() { String::new() } else { value.to_string() }, str::to_owned);
    let choices = property["enum"].as_array().filter(|choices| choices.iter().all(Json::is_string));
    let kind = property["type"].as_str().unwrap_or_default();
    html! {
        label {
            span { (name) @if is_required { " *" } @if let Some(hint) = property["description"].as_str() { small { (hint) } } }
            @if let Some(choices) = choices {
                (select(name, "text", &text, choices.iter().filter_map(Json::as_str)))
            } @else if kind == "boolean" {
                (select(name, "json", &text, ["true", "false"].into_iter()))
            } @else if kind == "integer" || kind == "number" {
                input type="number" step="any" data-field=(name) data-kind="json" value=(text) placeholder=(default);
            } @else if kind == "string" {
                textarea data-field=(name) data-kind="text" rows="1" placeholder=(default) { (text) }
            } @else {
                textarea data-field=(name) data-kind="json" rows="3" placeholder=(if default.is_empty() { "JSON" } else { &default }) { @if !value.is_null() { (pretty(&value)) } }
            }
        }
    }
}

/// Without a choice the property is left out.
fn select<'a>(name: &str, kind: &str, given: &str, choices: impl Iterator<Item = &'a str>) -> Markup {
    html! {
        select data-field=(name) data-kind=(kind) {
            option value="" selected[given.is_empty()] {}
            @for choice in choices { option value=(choice) selected[choice == given] { (choice) } }
        }
    }
}

/// A field that a person has changed: the property, how it is read, and its text. Without a property it is the whole payload.
pub(super) type Change = (String, String, String);

/// Makes the changes in a payload. An empty text of any kind but `text` removes the property, as it does one that was not given.
///
/// # Errors
///
/// A text that is no JSON.
pub(super) fn change(payload: &mut Map<String, Json>, changes: Vec<Change>) -> Result<(), String> {
    for (name, kind, text) in changes {
        if text.trim().is_empty() && (kind != "text" || !payload.contains_key(&name)) {
            payload.remove(&name);
            continue;
        }
        let read = || serde_json::from_slice::<Json>(text.as_bytes());
        let value = if kind == "text" { Ok(Json::String(text.clone())) } else { read() };
        match value {
            Ok(Json::Object(whole)) if name.is_empty() => *payload = whole,
            Ok(_) if name.is_empty() => return Err("payload: expected a JSON object".to_owned()),
            Ok(value) => drop(payload.insert(name, value)),
            Err(error) => return Err(format!("{}: {error}", if name.is_empty() { "payload" } else { &name })),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_property_has_a_field_of_its_type() {
        let schema = json!({
            "required": ["name"],
            "properties": {
                "name": { "type": "string", "description": "Whom <to> greet" },
                "times": { "type": "integer", "default": 2 },
                "loud": { "type": "boolean" },
                "mood": { "type": "string", "enum": ["glad", "sad"] },
                "env": { "type": "object" },
            },
        });
        let drawn = fields(&schema, &json!({ "name": "A\"da", "env": { "a": 1 }, "more": [1] })).into_string();
        for part in [
            "name *<small>Whom &lt;to&gt; greet",
            r#"data-kind="text" rows="1" placeholder="">A&quot;da</textarea>"#,
            r#"data-kind="json" value="" placeholder="2""#,
            r#"<select data-field="loud" data-kind="json"><option value="" selected></option>"#,
            r#"<option value="glad">"#,
            r#"data-field="more" data-kind="json""#,
        ] {
            assert!(drawn.contains(part), "{part}: {drawn}");
        }
        let drawn = fields(&Json::Null, &json!({ "a": 1 })).into_string();
        assert!(drawn.contains(r#"data-field="""#) && drawn.contains("&quot;a&quot;: 1"), "{drawn}");
    }

    #[test]
    fn what_is_not_changed_stays_as_it_was() {
        let given = r#"{"script":"a\nb\u200f","big":12345678901234567890,"label":"","cache":false,"gone":1}"#;
        let mut payload: Map<String, Json> = serde_json::from_slice(given.as_bytes()).unwrap();
        let text = |name: &str, kind: &str, text: &str| (name.to_owned(), kind.to_owned(), text.to_owned());
        let changes = vec![
            text("cache", "json", "true"),
            text("gone", "json", " "),
            text("new", "text", "x\ny"),
            text("none", "text", ""),
        ];
        change(&mut payload, changes).unwrap();
        let expected = r#"{"script":"a\nb‏","big":12345678901234567890,"label":"","cache":true,"new":"x\ny"}"#;
        assert_eq!(Json::Object(payload.clone()), serde_json::from_slice::<Json>(expected.as_bytes()).unwrap());
        change(&mut payload, vec![text("label", "text", "")]).unwrap();
        assert_eq!(payload["label"], "", "a text may be empty");
        assert!(change(&mut payload, vec![text("env", "json", "{")]).unwrap_err().starts_with("env: "));
        assert!(change(&mut payload, vec![text("", "json", "[]")]).is_err());
        change(&mut payload, vec![text("", "json", "{\"a\":1}")]).unwrap();
        assert_eq!(Json::Object(payload), json!({ "a": 1 }));
    }
}
