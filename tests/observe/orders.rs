//! Orders to a controller over HTTP: the token, the document that describes them, and the buttons of the page.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use journeyman::control::Answer as Obeyed;
use journeyman::control::controller::Ordered;
use journeyman::observe::controller::openapi;
use journeyman::observe::controller::orders::{Orders, Telling, Token};
use journeyman::observe::page::Refresh;
use journeyman::observe::page::controller::{Acts, show};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::answers::{Answer, get};
use crate::browser::{Scripts, chromium, dom, shoot};
use crate::groups::{Server, busy, failing};

const TOKEN: &str = "a-token-of-tests-0123456789";

/// A controller that obeys, and what it was told.
async fn obedient() -> (Server, Arc<Mutex<Vec<Value>>>) {
    let told: Arc<Mutex<Vec<Value>>> = Arc::default();
    let hears = Arc::clone(&told);
    let tell = move |ordered: Ordered| -> Telling {
        hears.lock().unwrap().push(serde_json::to_value(ordered).unwrap());
        Box::pin(std::future::ready(Ok(Obeyed { said: "group \"17\" of pool core is paused".to_owned() })))
    };
    let orders = Orders { token: Some(Token::new(TOKEN)), tell: Arc::new(tell) };
    (Server::with(busy(), orders).await, told)
}

async fn post(server: &Server, more: &str, body: &str) -> Answer {
    let length = body.len();
    let head = format!("POST /v1/orders HTTP/1.1\r\nHost: {}\r\nContent-Length: {length}\r\n{more}", server.address);
    let mut stream = TcpStream::connect(server.address).await.expect("somebody listens");
    stream.write_all(format!("{head}Connection: close\r\n\r\n{body}").as_bytes()).await.expect("it is read");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("it is UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
}

const JSON: &str = "Content-Type: application/json\r\n";

#[tokio::test]
async fn an_order_over_http_needs_the_token_and_is_told_to_the_controller() {
    let (server, told) = obedient().await;
    let order =
        json!({ "pool": "core", "order": { "pause": { "key": "17", "seconds": 60.0 } }, "note": { "by": "ana" } });
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
    let looked = get(server.address, "/v1/orders").await;
    assert_eq!((looked.status, looked.head.contains("allow: post")), (405, true), "{}", looked.body);
    assert_eq!(told.lock().unwrap().len(), 0, "nobody has obeyed");

    let obeyed = post(&server, &format!("{JSON}Authorization: Bearer {TOKEN}\r\n"), &order.to_string()).await;
    assert_eq!((obeyed.status, &*obeyed.body), (200, "{\"said\":\"group \\\"17\\\" of pool core is paused\"}\n"));
    assert_eq!(*told.lock().unwrap(), [order]);
    let odd = post(&server, &format!("{JSON}Authorization: Bearer {TOKEN}\r\n"), "{\"order\":{\"explode\":{}}}").await;
    assert_eq!(odd.status, 400);
    assert!(odd.body.contains("drain a worker") && odd.body.contains("explode"), "{}", odd.body);
    let large = post(&server, &format!("{JSON}Authorization: Bearer {TOKEN}\r\n"), &"x".repeat(100_000)).await;
    assert_eq!(large.status, 413, "{}", large.body);
}

/// The schema of an answer, with what it refers to.
fn schema(document: &Value, of: &Value) -> Value {
    let mut schema = of.clone();
    schema["components"] = document["components"].clone();
    schema
}

#[tokio::test]
async fn the_document_has_every_path_and_every_answer_is_as_it_says() {
    let (server, _) = obedient().await;
    let served = get(server.address, "/openapi.json").await;
    let document: Value = serde_json::from_str(&served.body).expect("JSON");
    assert_eq!(document, openapi::document());
    assert_eq!(document["openapi"], "3.1.0");
    let paths = document["paths"].as_object().expect("paths");
    let mut checked = BTreeSet::new();
    for (path, item) in paths {
        let methods: Vec<&String> = item.as_object().expect("methods").keys().collect();
        let (method, answer) = if path == "/v1/orders" {
            let order = json!({ "order": { "resume": {} } }).to_string();
            ("post", post(&server, &format!("{JSON}Authorization: Bearer {TOKEN}\r\n"), &order).await)
        } else {
            ("get", get(server.address, path).await)
        };
        assert_eq!(methods, [method], "{path}");
        let said = &item[method]["responses"][answer.status.to_string()];
        let (media, content) = said["content"].as_object().and_then(|content| content.iter().next()).expect("content");
        assert!(answer.head.contains(&format!("content-type: {media}")), "{path}: {}", answer.head);
        if media == "application/json" {
            let validator = jsonschema::validator_for(&schema(&document, &content["schema"])).expect("a schema");
            let body: Value = serde_json::from_str(&answer.body).expect("JSON");
            if let Err(error) = validator.validate(&body) {
                panic!("{path}: {error}");
            }
        }
        checked.insert(path.as_str());
    }
    // And what the server itself says there is, is there.
    let other = get(server.address, "/nothing").await.body;
    let hinted = other.trim_end().trim_start_matches("there is: ").split(", ");
    for path in hinted.map(|path| path.split('?').next().expect("a path")) {
        assert!(checked.contains(path), "{path}: {checked:?}");
    }
    for path in
        ["/livez", "/readyz", "/metrics", "/", "/still", "/status", "/status.json", "/openapi.json", "/v1/orders"]
    {
        assert!(checked.contains(path), "{path}");
    }
    // Every refusal is as it says too.
    let answer = &document["paths"]["/v1/orders"]["post"]["responses"]["401"]["content"]["application/json"]["schema"];
    let refused: Value = serde_json::from_str(&post(&server, JSON, "{}").await.body).expect("JSON");
    assert!(jsonschema::is_valid(&schema(&document, answer), &refused), "{refused}");
    let body = &document["paths"]["/v1/orders"]["post"]["requestBody"]["content"]["application/json"]["schema"];
    let body = schema(&document, body);
    for (order, meant) in [
        (json!({ "order": { "pause": {} } }), true),
        (json!({ "pool": "core", "order": { "scale": { "key": "", "min": 2, "seconds": 60 } } }), true),
        (json!({ "order": { "drain": { "worker": "a" } }, "note": { "by": "ana", "text": "why" } }), true),
        (json!({ "order": { "drain": {} } }), false),
        (json!({ "order": { "stop": {} } }), false),
        (json!({ "order": { "retry": { "key": "a", "more": 1 } } }), false),
    ] {
        assert_eq!(jsonschema::is_valid(&body, &order), meant, "{order}");
        assert_eq!(serde_json::from_value::<Ordered>(order.clone()).is_ok(), meant, "{order}");
    }
}

#[tokio::test]
async fn the_page_has_orders_only_where_a_token_is_configured_and_shows_none_by_itself() {
    let (server, _) = obedient().await;
    let page = get(server.address, "/").await.body;
    assert!(page.contains("give orders") && page.contains("data-order"), "{page}");
    assert!(!page.contains(TOKEN) && !page.contains("<form"), "{page}");
    let still = get(server.address, "/still").await.body;
    assert!(!still.contains("give orders") && !still.contains("data-order"), "{still}");
    let without = show(&busy(), Refresh::ByItself, Acts::No, jiff::Timestamp::now()).html;
    assert!(!without.contains("give orders") && !without.contains("data-order"), "{without}");
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
  click("button[data-order*='retry']");
  await wait();
  const box = document.querySelector(".numbers");
  box.querySelector("input[name=min]").value = "2";
  box.querySelector("input[name=minutes]").value = "5";
  box.querySelector("button").click();
  await wait();
  click("button[data-order*='drain']");
  await wait();
  document.body.dataset.done = "yes";
})();
"##;

/// Serves a page without its policy and with hands, and obeys. Answers with what it was told.
async fn hands(page: String) -> (std::net::SocketAddr, Arc<Mutex<Vec<(String, Value)>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("it has one");
    let told: Arc<Mutex<Vec<(String, Value)>>> = Arc::default();
    let hears = Arc::clone(&told);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (page, hears) = (page.clone(), Arc::clone(&hears));
            tokio::spawn(async move {
                let mut text = Vec::new();
                let mut piece = [0; 4096];
                let (head, body) = loop {
                    let read = stream.read(&mut piece).await.unwrap_or(0);
                    text.extend_from_slice(&piece[..read]);
                    let so_far = String::from_utf8_lossy(&text).into_owned();
                    let Some((head, body)) = so_far.split_once("\r\n\r\n") else {
                        if read == 0 { return } else { continue }
                    };
                    let length = head.to_ascii_lowercase();
                    let length =
                        length.split("content-length: ").nth(1).and_then(|rest| rest.lines().next()?.parse().ok());
                    if body.len() >= length.unwrap_or(0) {
                        break (head.to_owned(), body.to_owned());
                    }
                };
                let (media, answer) = if head.starts_with("POST /v1/orders ") {
                    let shown = head
                        .lines()
                        .find_map(|line| line.to_ascii_lowercase().strip_prefix("authorization: ").map(str::to_owned));
                    hears.lock().unwrap().push((shown.unwrap_or_default(), serde_json::from_str(&body).expect("JSON")));
                    ("application/json", json!({ "said": "it is <b>obeyed</b>" }).to_string())
                } else {
                    ("text/html", page)
                };
                let head = format!(
                    "HTTP/1.1 200 OK\r\nContent-Type: {media}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                    answer.len()
                );
                drop(stream.write_all(format!("{head}{answer}").as_bytes()).await);
            });
        }
    });
    (address, told)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_buttons_of_the_page_order_what_they_say_with_the_token_that_was_given() {
    let Some(chromium) = chromium() else { return };
    let page = show(&failing(), Refresh::ByItself, Acts::Possible, jiff::Timestamp::now()).html;
    let page = page.replace("</body>", &format!("<script>{HANDS}</script></body>"));
    let (address, told) = hands(page).await;
    let seen = dom(&chromium, Scripts::On, &format!("http://{address}/"), 5_000).await;
    assert!(seen.contains("data-before=\"false\"") && seen.contains("data-after=\"true\""), "{seen}");
    assert!(seen.contains("data-done=\"yes\"") && seen.contains("it is &lt;b&gt;obeyed&lt;/b&gt;</output>"), "{seen}");
    assert!(!seen.replace(HANDS, "").contains(TOKEN), "it is in no document but that of the hands: {seen}");
    let told = told.lock().unwrap().clone();
    let orders: Vec<&Value> = told.iter().map(|(_, told)| &told["order"]).collect();
    assert_eq!(orders.len(), 3, "{told:?}");
    assert!(orders[0]["retry"]["key"].is_string(), "{told:?}");
    let scale = &orders[1]["scale"];
    assert_eq!((&scale["min"], &scale["max"], &scale["seconds"]), (&2.into(), &Value::Null, &300.into()), "{told:?}");
    assert!(orders[2]["drain"]["worker"].as_str().is_some_and(|worker| worker.starts_with("8a6f3c1e")), "{told:?}");
    for (shown, told) in &told {
        assert_eq!(shown, &format!("bearer {TOKEN}"));
        assert_eq!((&told["pool"], &told["note"]["by"]), (&"core".into(), &"the page".into()));
        let ordered = serde_json::from_value::<Ordered>(told.clone());
        assert!(ordered.is_ok(), "{told}: {ordered:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_orders_of_the_page_can_be_seen() {
    let Some(chromium) = chromium() else { return };
    let page = show(&failing(), Refresh::ByItself, Acts::Possible, jiff::Timestamp::now()).html;
    let open = "<script>document.body.classList.add('may'); for (const d of document.querySelectorAll('details')) d.open = true; \
                document.getElementById('ask').textContent = 'no more orders';</script></body>";
    let (address, _) = hands(page.replace("</body>", open)).await;
    shoot(&chromium, "controller-orders", &format!("http://{address}/")).await;
}
