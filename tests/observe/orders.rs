//! Commands to a controller over HTTP: the token, and the buttons of the page.

use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Html;
use axum::routing::{get as get_route, post as post_route};
use axum::{Json, Router};
use journeyman::console::app::targets::{Address, Target};
use journeyman::console::app::{Console, routes};
use journeyman::console::controller::poison_section;
use journeyman::console::page::section;
use journeyman::control::controller_api::{
    ControllerStatusReply, Inventories, PoisonActionRequest, PoolCommandRequest,
};
use journeyman::control::worker_api::ApiError;
use journeyman_platform::http::client::client_builder;
use journeyman_platform::http::{BearerToken, Exposure, HttpListener};
use journeyman_platform::settings::values::Secret;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::observe::groups::{busy, failing};
use crate::observe::views::Server;
use crate::support::headless::{Scripts, chromium, dom};
use crate::support::http::{Answer, exchange, get};

const TOKEN: &str = "a-token-of-tests-0123456789";

type ControllerServer = Server<ControllerStatusReply>;
type Received = Arc<Mutex<Vec<Value>>>;

/// Accepts every command, and records it.
pub(super) fn accepting(received: Received) -> Router {
    let command = async |State(received): State<Received>, body: Bytes| {
        let request = PoolCommandRequest::parse(&body)?;
        received.lock().unwrap().push(serde_json::to_value(request).unwrap());
        Ok::<_, ApiError>(Json(json!({ "message": "group \"17\" of pool core is paused" })))
    };
    let action = async |State(received): State<Received>, body: Bytes| {
        let request = PoisonActionRequest::parse(&body)?;
        received.lock().unwrap().push(serde_json::to_value(request).unwrap());
        let failed = json!({ "0123456789ab": "no such request" });
        Ok::<_, ApiError>(Json(json!({ "succeeded": ["5f0c2b7d91aa"], "failed": failed, "not_scanned": 0 })))
    };
    Router::new()
        .route("/v1/commands", post_route(command))
        .route("/v1/poison", get_route(async || Json(json!({ "core": put_aside() }))).post(action))
        .with_state(received)
}

/// An inventory as it may be.
pub(crate) fn put_aside() -> Value {
    json!({ "not_scanned": 3, "requests": [
        {
            "id": "5f0c2b7d91aa", "key": "infra=42", "reason": "delivery_limit", "attempts": 4, "poison_count": 2, "body_bytes": 1204,
            "poisoned_at": "2026-11-22T09:14:03Z", "worker": "8a6f3c1e-5b0d-4c1f-9a51-000000170000", "worker_exit": "signal: 9 (SIGKILL)",
            "worker_log": ["loading <b>infra</b> 42", "terminate called after throwing an instance of 'std::bad_alloc'"],
            "properties": { "correlation_id": "1" }, "headers": { "x-rpc-path": "/echo" },
        },
        {
            "id": "0123456789ab", "reason": "unknown", "poison_count": 1, "body_bytes": 0, "worker_log": [], "properties": {}, "headers": {},
        },
    ] })
}

/// A controller that accepts commands, and what it received.
async fn obedient() -> (ControllerServer, Received) {
    let received = Received::default();
    let commands = accepting(Arc::clone(&received));
    (Server::with_commands(busy(), Some(BearerToken::new(TOKEN)), commands).await, received)
}

async fn post(server: &ControllerServer, more: &str, body: &str) -> Answer {
    asked(server, "POST /v1/commands", more, body).await
}

async fn asked(server: &ControllerServer, what: &str, more: &str, body: &str) -> Answer {
    let length = body.len();
    let head = format!("{what} HTTP/1.1\r\nHost: {}\r\nContent-Length: {length}\r\n{more}", server.address);
    exchange(server.address, &format!("{head}Connection: close\r\n\r\n{body}")).await
}

const JSON: &str = "Content-Type: application/json\r\n";

#[tokio::test]
async fn a_command_over_http_needs_the_token_and_reaches_the_controller() {
    let (server, told) = obedient().await;
    let order =
        json!({ "pool": "core", "command": { "pause": { "key": "17", "seconds": 60.0 } }, "note": { "by": "ana" } });
    let refused = post(&server, JSON, &order.to_string()).await;
    assert_eq!(refused.status, 401, "{}", refused.body);
    assert!(
        refused.head.contains("www-authenticate: bearer") && refused.body.contains("http.token_file"),
        "{}",
        refused.body
    );
    let other = post(&server, &format!("{JSON}Authorization: Bearer {TOKEN}x\r\n"), &order.to_string()).await;
    assert_eq!(other.status, 401, "{}", other.body);
    let form = post(&server, &format!("Authorization: Bearer {TOKEN}\r\n"), &order.to_string()).await;
    assert_eq!(form.status, 415, "{}", form.body);
    assert_eq!(told.lock().unwrap().len(), 0, "nothing was sent");

    let obeyed = post(&server, &format!("{JSON}Authorization: Bearer {TOKEN}\r\n"), &order.to_string()).await;
    assert_eq!((obeyed.status, &*obeyed.body), (200, "{\"message\":\"group \\\"17\\\" of pool core is paused\"}"));
    assert_eq!(*told.lock().unwrap(), [order]);
    let odd =
        post(&server, &format!("{JSON}Authorization: Bearer {TOKEN}\r\n"), "{\"command\":{\"explode\":{}}}").await;
    assert_eq!(odd.status, 400);
    assert!(odd.body.contains("a controller accepts") && odd.body.contains("explode"), "{}", odd.body);
    let large = post(&server, &format!("{JSON}Authorization: Bearer {TOKEN}\r\n"), &"x".repeat(100_000)).await;
    assert_eq!(large.status, 413, "{}", large.body);
}

#[tokio::test]
async fn poisoned_requests_are_listed_and_settled_over_http_with_the_token() {
    let (server, told) = obedient().await;
    let token = format!("{JSON}Authorization: Bearer {TOKEN}\r\n");
    let drop = json!({ "pool": "core", "selection": { "ids": ["5f0c2b7d91aa"] }, "action": "discard", "by": "ana" });
    for what in ["GET /v1/poison", "POST /v1/poison"] {
        assert_eq!(asked(&server, what, JSON, &drop.to_string()).await.status, 401, "{what}");
    }
    assert_eq!(told.lock().unwrap().len(), 0, "nothing was sent");
    let seen: Value =
        serde_json::from_str(&asked(&server, "GET /v1/poison?pool=core", &token, "").await.body).expect("JSON");
    assert_eq!(seen, json!({ "core": put_aside() }));
    let settled = asked(&server, "POST /v1/poison", &token, &drop.to_string()).await;
    assert!(settled.status == 200 && settled.body.contains("5f0c2b7d91aa"), "{}", settled.body);
    assert_eq!(*told.lock().unwrap(), [drop]);
    let odd = asked(&server, "POST /v1/poison", &token, "{\"action\":\"eat\"}").await;
    assert!(odd.status == 400 && odd.body.contains("requeue") && odd.body.contains("eat"), "{}", odd.body);
    let other = asked(&server, "DELETE /v1/poison", &token, "").await;
    assert!(other.status == 405 && other.head.contains("allow: get,head,post"), "{}", other.head);
}

#[tokio::test]
async fn a_console_sends_orders_on_with_its_own_token_and_nothing_else() {
    let (server, told) = obedient().await;
    let of_console = "the-token-of-the-console-0123456789";
    let address = Address {
        name: "core".to_owned(),
        url: format!("http://{}/", server.address).parse().expect("a URL"),
        token: Some(Secret::new(TOKEN)),
        http: client_builder().build().expect("a client"),
    };
    let wrong = Secret::new("another-token-than-that-of-the-role");
    let stale = Address { name: "stale".to_owned(), token: Some(wrong), ..address.clone() };
    let controllers = vec![Target::remote(address, "status.json"), Target::remote(stale, "status.json")];
    let console = Arc::new(Console { controllers, token: Some(BearerToken::new(of_console)), ..Console::default() });
    let listener = HttpListener::listen("127.0.0.1:0".parse().unwrap(), Exposure::Loopback).await.expect("a port");
    let address = listener.address().expect("an address");
    let mut tasks = tokio::task::JoinSet::new();
    let watched = Arc::clone(&console);
    tasks.spawn(async move { watched.watch().await });
    tasks.spawn(async move { match listener.serve(routes(console)).await {} });
    let page = loop {
        let page = get(address, "/").await.body;
        if !page.contains("has not answered yet") {
            break page;
        }
        tokio::task::yield_now().await;
    };
    assert!(page.contains("data-path=\"/via/core/v1/commands\""), "{page}");
    let order = json!({ "pool": "core", "command": { "resume": { "key": "17" } }, "note": { "by": "ana" } });
    let send = async |what: &str, token: &str, body: &str| {
        let length = body.len();
        let head = format!(
            "{what} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {length}\r\n{JSON}Authorization: Bearer {token}\r\n"
        );
        exchange(address, &format!("{head}Connection: close\r\n\r\n{body}")).await
    };
    for token in ["wrong", TOKEN] {
        assert_eq!(send("POST /via/core/v1/commands", token, &order.to_string()).await.status, 401);
    }
    for path in [
        "/via/core/livez",
        "/via/core/v1/../livez",
        "/via/core/v1/%2e%2e/livez",
        "/via/core//127.0.0.1:1/v1/x",
        "/via/other/v1/x",
    ] {
        assert_eq!(send(&format!("POST {path}"), of_console, "{}").await.status, 404, "{path}");
    }
    let refused = send("POST /via/stale/v1/commands", of_console, &order.to_string()).await;
    assert!(refused.status == 502 && refused.body.contains("[console.target.stale]"), "{}", refused.body);
    assert_eq!(told.lock().unwrap().len(), 0, "nothing was sent");
    let done = send("POST /via/core/v1/commands", of_console, &order.to_string()).await;
    assert!(done.status == 200 && !done.body.contains(TOKEN), "{}", done.body);
    assert_eq!(*told.lock().unwrap(), [order]);
    let poison = exchange(
        address,
        &format!("GET /via/core/v1/poison?pool=core HTTP/1.1\r\nHost: {address}\r\nAccept: text/html\r\nAuthorization: Bearer {of_console}\r\nConnection: close\r\n\r\n"),
    )
    .await;
    assert!(
        poison.body.contains("data-path=\"/via/core/v1/poison\"") && !poison.body.contains("data-path=\"/v1"),
        "{}",
        poison.body
    );
}

#[tokio::test]
async fn the_page_has_commands_only_if_a_token_is_configured() {
    let (server, _) = obedient().await;
    let page = get(server.address, "/").await.body;
    assert!(page.contains("token of http.token_file") && page.contains("data-path"), "{page}");
    assert!(!page.contains(TOKEN) && !page.contains("<form"), "{page}");
    let without = Server::with_commands(busy(), None, accepting(Received::default())).await;
    let without = get(without.address, "/").await.body;
    assert!(!without.contains("token of http.token_file") && !without.contains("data-path=\""), "{without}");
}

/// What a person would do: show the token, order three things, and give a wrong one.
const HANDS: &str = r##"
const click = (selector) => document.querySelector(selector).click();
const wait = () => new Promise((done) => setTimeout(done, 300));
(async () => {
  window.confirm = () => true;
  const shown = (selector) => getComputedStyle(document.querySelector(selector)).display !== "none";
  document.body.dataset.before = shown(".act");
  click("#ask");
  document.getElementById("token").value = "a-token-of-tests-0123456789";
  click("#use");
  document.body.dataset.after = shown(".act");
  click("button[data-body*='retry']");
  await wait();
  const box = document.querySelector("details.act");
  box.querySelector("input[data-place$=min]").value = "2";
  box.querySelector("input[data-place$=seconds]").value = "5";
  box.querySelector("button").click();
  await wait();
  click("button[data-body*='drain']");
  await wait();
  click("button[data-path*='poison?pool=core']");
  await wait();
  document.body.dataset.aside = document.querySelectorAll("#aside tbody tr").length;
  click("#aside button[data-body*='ids'][data-body*='requeue']");
  await wait();
  document.body.dataset.done = "yes";
})();
"##;

type Requests = Arc<Mutex<Vec<(String, Value)>>>;

/// Serves a page without its policy, accepts its requests, and records them with their authorization.
async fn hands(page: String) -> (std::net::SocketAddr, Requests) {
    let poison: Inventories = serde_json::from_value(json!({ "core": put_aside() })).expect("an inventory");
    let (pool, found) = poison.first_key_value().expect("one");
    let poison = format!("<main>{}</main>", section(&poison_section(pool, found)).into_string());
    async fn accept(State(requests): State<Requests>, headers: HeaderMap, Json(body): Json<Value>) -> Json<Value> {
        let authorization = headers.get("authorization").and_then(|value| value.to_str().ok()).unwrap_or_default();
        requests.lock().unwrap().push((authorization.to_ascii_lowercase(), body));
        Json(json!({ "message": "it is <b>obeyed</b>", "succeeded": ["5f0c2b7d91aa"], "failed": {}, "not_scanned": 0 }))
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("it has one");
    let requests = Requests::default();
    let router = Router::new()
        .route("/", get_route(async move || Html(page)))
        .route("/v1/commands", post_route(accept))
        .route("/v1/poison", get_route(async move || Html(poison)).post(accept))
        .with_state(Arc::clone(&requests));
    tokio::spawn(async move { axum::serve(listener, router).await });
    (address, requests)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_buttons_of_the_page_send_commands_with_the_token() {
    let Some(chromium) = chromium() else { return };
    let server = Server::with_commands(failing(), Some(BearerToken::new(TOKEN)), accepting(Received::default())).await;
    let page = get(server.address, "/").await.body;
    let page = page.replace("</body>", &format!("<script>{HANDS}</script></body>"));
    let (address, told) = hands(page).await;
    let seen = dom(&chromium, Scripts::On, &format!("http://{address}/"), 5_000).await;
    assert!(seen.contains("data-before=\"false\"") && seen.contains("data-after=\"true\""), "{seen}");
    assert!(seen.contains("data-done=\"yes\"") && seen.contains("1 done</output>"), "{seen}");
    assert!(seen.contains("data-aside=\"2\"") && seen.contains("loading &lt;b&gt;infra&lt;/b&gt; 42"), "{seen}");
    assert!(!seen.replace(HANDS, "").contains(TOKEN), "it is in no document but that of the hands: {seen}");
    let mut told = told.lock().unwrap().clone();
    let (shown, settled) = told.pop().expect("it was told something");
    assert_eq!(shown, format!("bearer {TOKEN}"));
    let meant =
        json!({ "pool": "core", "selection": { "ids": ["5f0c2b7d91aa"] }, "action": "requeue", "by": "the page" });
    assert_eq!(settled, meant);
    assert!(serde_json::from_value::<PoisonActionRequest>(settled).is_ok());
    let orders: Vec<&Value> = told.iter().map(|(_, told)| &told["command"]).collect();
    assert_eq!(orders.len(), 3, "{told:?}");
    assert!(orders[0]["retry"]["key"].is_string(), "{told:?}");
    let scale = &orders[1]["scale"];
    assert_eq!((&scale["min"], &scale["max"], &scale["seconds"]), (&2.into(), &Value::Null, &300.into()), "{told:?}");
    assert!(orders[2]["drain"]["worker"].as_str().is_some_and(|worker| worker.starts_with("8a6f3c1e")), "{told:?}");
    for (shown, told) in &told {
        assert_eq!(shown, &format!("bearer {TOKEN}"));
        assert_eq!((&told["pool"], &told["note"]["by"]), (&"core".into(), &"the page".into()));
        let ordered = serde_json::from_value::<PoolCommandRequest>(told.clone());
        assert!(ordered.is_ok(), "{told}: {ordered:?}");
    }
}
