//! Authentication, authorization and invalid requests.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use journeyman_services::queue::{Auth, Config, RegisteredClient};
use serde_json::{Value, json};

use super::client::{Answer, Api, slugid};
use super::test_queue::{ROOT, TestQueue};

fn narrow(server: &TestQueue, id: &str, token: &str) -> Api {
    Api { id: id.to_owned(), token: token.to_owned(), ..server.api.clone() }
}

/// A queue, and a client that may claim tasks only.
async fn with_worker() -> (TestQueue, Api) {
    let server = TestQueue::with(|settings| {
        settings.clients.push(RegisteredClient {
            client_id: "worker".to_owned(),
            access_token: "of-the-worker".into(),
            scopes: vec!["queue:claim-work:p/*".to_owned(), "queue:worker-id:wg/*".to_owned()],
        });
    });
    let server = server.await;
    let worker = narrow(&server, "worker", "of-the-worker");
    (server, worker)
}

#[tokio::test]
async fn a_client_may_call_what_its_scopes_cover() {
    let (server, worker) = with_worker().await;
    server.api.create("p/w", json!({})).await;
    assert_eq!(worker.claim_work("p/w", "w1", 1).await.len(), 1);
    let body = json!({"workerGroup": "other", "workerId": "w1"});
    let (code, line) = worker.post("claim-work/p%2Fw", body).await.refusal(403);
    assert_eq!(code, "InsufficientScopes");
    assert!(line.contains("queue:worker-id:other/w1") && !line.contains("queue:claim-work"), "{line}");
    let definition = server.api.definition("p/w", json!({}));
    let answer = worker.queue("PUT", &format!("task/{}", slugid()), Some(&definition)).await;
    assert_eq!(answer.refusal(403).0, "InsufficientScopes");
}

#[tokio::test]
async fn unknown_clients_and_invalid_headers_are_rejected() {
    let server = TestQueue::new().await;
    let unknown = narrow(&server, "unknown", "x");
    assert_eq!(unknown.get("ping").await.refusal(401).0, "AuthenticationFailed");
    for header in [
        "",
        "Hawk",
        "Hawk id",
        "Hawk id=\"\u{e9}\"",
        "Bearer x",
        "Hawk id=\"a\", ts=\"99999999999999999999\", nonce=\"n\", mac=\"AA==\"",
    ] {
        let request = server.api.request("GET", "/api/queue/v1/ping", None).header("authorization", header);
        assert_eq!(server.api.send(request).await.refusal(401).0, "AuthenticationFailed", "{header}");
    }
}

#[tokio::test]
async fn the_signature_covers_the_query() {
    let server = TestQueue::new().await;
    let header = server.api.header("GET", "/api/queue/v1/journeyman/tasks?limit=1", None);
    let request = server.api.request("GET", "/api/queue/v1/journeyman/tasks?limit=2", None);
    let (_, line) = server.api.send(request.header("authorization", header)).await.refusal(401);
    assert_eq!(line, "Unauthorized: Bad mac");
    server.api.get("journeyman/tasks?limit=1").await.expect(200);
}

#[tokio::test]
async fn clock_skew_is_tolerated_up_to_15_minutes() {
    let server = TestQueue::new().await;
    for (skew, status) in [(890, 200), (-890, 200), (910, 401), (-910, 401)] {
        let off = Api { skew, ..server.api.clone() };
        assert_eq!(off.get("ping").await.status, status, "{skew}");
    }
}

#[tokio::test]
async fn claim_credentials_expire_five_minutes_after_the_claim() {
    let server = TestQueue::with(|settings| settings.claim_delay = std::time::Duration::from_secs(3_600)).await;
    let task = server.api.create("p/w", json!({})).await;
    let claims = server.api.claim_work("p/w", "w1", 1).await;
    let worker = server.api.with(&claims[0]["credentials"]);
    server.advance(1_200 + 299).await;
    worker.bare_post(&format!("task/{task}/runs/0/reclaim")).await.expect(200);
    server.advance(2).await;
    let (code, line) = worker.bare_post(&format!("task/{task}/runs/0/reclaim")).await.refusal(401);
    assert_eq!((code.as_str(), line.as_str()), ("AuthenticationFailed", "ext.certificate.expiry < now"));
}

#[tokio::test]
async fn claim_credentials_are_limited_to_the_claim() {
    let server = TestQueue::new().await;
    let task = server.api.create("p/w", json!({"scopes": ["project:x"]})).await;
    let other = server.api.create("p/w", json!({})).await;
    let claims = server.api.claim_work("p/w", "w1", 2).await;
    let worker = server.api.with(&claims[0]["credentials"]);
    let refused = worker.bare_post(&format!("task/{other}/runs/0/reclaim")).await;
    assert_eq!(refused.refusal(403).0, "InsufficientScopes");
    for (part, value) in [("scopes", json!(["*"])), ("expiry", json!(9_999_999_999_999_i64)), ("issuer", json!(ROOT))] {
        let mut forged = worker.clone();
        let certificate = forged.certificate.as_mut().expect("a certificate");
        certificate[part] = value;
        assert_eq!(
            forged.bare_post(&format!("task/{task}/runs/0/reclaim")).await.refusal(401).0,
            "AuthenticationFailed"
        );
    }
    worker.bare_post(&format!("task/{task}/runs/0/reclaim")).await.expect(200);
}

/// Temporary credentials issued by a client, as every Taskcluster client can.
fn issued_by(client: &Api, named: Option<&str>, scopes: &[&str]) -> Api {
    let sign = |text: &str| {
        let key = hawk::Key::new(client.token.as_bytes(), hawk::SHA256).expect("a key");
        key.sign(text.as_bytes()).expect("it can be signed")
    };
    let start = client.clock.unix_millis();
    let (expiry, seed) = (start + 3_600_000, slugid() + &slugid());
    let issuer = named.map_or_else(String::new, |id| format!("clientId:{id}\nissuer:{}\n", client.id));
    let scopes_text = scopes.join("\n");
    let text = format!("version:1\n{issuer}seed:{seed}\nstart:{start}\nexpiry:{expiry}\nscopes:\n{scopes_text}");
    let mut certificate = json!({
        "version": 1, "scopes": scopes, "start": start, "expiry": expiry, "seed": seed,
        "signature": STANDARD.encode(sign(&text)),
    });
    if named.is_some() {
        certificate["issuer"] = json!(client.id);
    }
    let id = named.unwrap_or(&client.id).to_owned();
    Api { id, token: URL_SAFE_NO_PAD.encode(sign(&seed)), certificate: Some(certificate), ..client.clone() }
}

#[tokio::test]
async fn a_client_may_issue_credentials_with_its_own_scopes_only() {
    let (server, worker) = with_worker().await;
    server.api.create("p/w", json!({})).await;
    let scopes = ["queue:claim-work:p/w", "queue:worker-id:wg/*"];
    assert_eq!(issued_by(&worker, None, &scopes).claim_work("p/w", "w1", 1).await.len(), 1);
    for wider in [&["*"][..], &["queue:claim-work:*", "queue:worker-id:wg/*"]] {
        let (code, line) = issued_by(&worker, None, wider).get("ping").await.refusal(401);
        assert_eq!(code, "AuthenticationFailed");
        assert!(line.contains("certificate scopes"), "{line}");
    }
    // Naming the credentials needs auth:create-client.
    assert_eq!(issued_by(&worker, Some("other"), &scopes).get("ping").await.refusal(401).0, "AuthenticationFailed");
    issued_by(&server.api, Some("other"), &["queue:status:*"]).get("ping").await.expect(200);
}

#[tokio::test]
async fn authorized_scopes_only_restrict() {
    let (server, worker) = with_worker().await;
    let narrowed = Api { authorized_scopes: Some(vec!["queue:status:*".to_owned()]), ..server.api.clone() };
    let task = server.api.create("p/w", json!({})).await;
    narrowed.get(&format!("task/{task}/status")).await.expect(200);
    assert_eq!(narrowed.bare_post(&format!("task/{task}/cancel")).await.refusal(403).0, "InsufficientScopes");
    let widened = Api { authorized_scopes: Some(vec!["*".to_owned()]), ..worker };
    assert_eq!(widened.get("ping").await.refusal(401).0, "AuthenticationFailed");
}

#[tokio::test]
async fn anonymous_callers_may_ping_and_read_public_artifacts() {
    let server = TestQueue::new().await;
    assert_eq!(server.api.anonymous("GET", "ping", None).await.status, 200);
    let task = server.api.create("p/w", json!({})).await;
    for path in [format!("task/{task}"), format!("task/{task}/status"), "pending/p%2Fw".to_owned()] {
        assert_eq!(server.api.anonymous("GET", &path, None).await.refusal(403).0, "InsufficientScopes", "{path}");
    }
    let missing = server.api.anonymous("GET", &format!("task/{task}/artifacts/public/x"), None).await;
    assert_eq!(missing.refusal(404).0, "ResourceNotFound");
    let private = server.api.anonymous("GET", &format!("task/{task}/artifacts/private/x"), None).await;
    assert_eq!(private.refusal(403).0, "InsufficientScopes");
}

#[tokio::test]
async fn an_open_queue_accepts_anonymous_callers() {
    let server = TestQueue::with(|settings| settings.auth = Auth::Open).await;
    let body = server.api.definition("p/w", json!({}));
    server.api.anonymous("PUT", &format!("task/{}", slugid()), Some(&body)).await.expect(200);
}

async fn with_headers(api: &Api, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
    let request = api.request(method, path, None);
    api.send(headers.iter().fold(request, |request, (name, value)| request.header(*name, *value))).await
}

#[tokio::test]
async fn d2_an_open_queue_refuses_the_calls_of_web_pages() {
    const PING: &str = "/api/queue/v1/ping";
    let allowed = || vec!["https://ui.example".to_owned()];
    let set = |auth| move |settings: &mut Config| (settings.auth, settings.allowed_origins) = (auth, allowed());
    let server = TestQueue::with(set(Auth::Open)).await;
    let api = &server.api;
    for (name, value) in [
        ("host", "evil.example:7070"),
        ("host", "127.0.0.1.evil.example"),
        ("origin", "https://evil.example"),
        ("origin", "null"),
    ] {
        let answer = with_headers(api, "GET", PING, &[(name, value)]).await;
        let (code, line) = answer.refusal(403);
        assert!(code == "InsufficientScopes" && line.contains("authentication is off"), "{name} {value}: {line}");
    }
    for headers in [&[("host", "localhost:7070")][..], &[("host", "[::1]")], &[("origin", "https://ui.example")], &[]] {
        assert_eq!(with_headers(api, "GET", PING, headers).await.status, 200, "{headers:?}");
    }
    // Other hosts reach this one by any name, but no page of another site does.
    let server = TestQueue::with(set(Auth::OpenToNetwork)).await;
    assert_eq!(with_headers(&server.api, "GET", PING, &[("host", "ci.example")]).await.status, 200);
    assert_eq!(with_headers(&server.api, "GET", PING, &[("origin", "https://evil.example")]).await.status, 403);
}

#[tokio::test]
async fn d8_pages_of_configured_origins_may_call_the_queue() {
    let server = TestQueue::with(|settings| settings.allowed_origins = vec!["https://ui.example".to_owned()]).await;
    let api = &server.api;
    let path = format!("/api/queue/v1/task/{}/status", slugid());
    let asked = [("origin", "https://ui.example"), ("access-control-request-method", "GET")];
    let preflight = with_headers(api, "OPTIONS", &path, &asked).await;
    assert_eq!(preflight.status, 204);
    assert_eq!(preflight.headers["access-control-allow-origin"], "https://ui.example");
    assert_eq!(preflight.headers["access-control-allow-headers"], "Authorization, Content-Type");
    let refused = with_headers(api, "GET", &path, &asked[..1]).await;
    assert_eq!((refused.status, &refused.headers["vary"]), (403, &"Origin".parse().expect("a header")));
    assert_eq!(refused.headers["access-control-allow-origin"], "https://ui.example");
    let other = with_headers(api, "GET", "/api/queue/v1/ping", &[("origin", "https://other.example")]).await;
    assert_eq!((other.status, other.headers.get("access-control-allow-origin")), (200, None));
}

#[tokio::test]
async fn bodies_must_be_json_with_the_json_content_type() {
    let server = TestQueue::new().await;
    let path = "/api/queue/v1/claim-work/p%2Fw";
    let header = || server.api.header("POST", path, None);
    let send = |kind: &'static str, body: &'static str| {
        let request = server.api.request("POST", path, None).header("authorization", header());
        server.api.send(request.header("content-type", kind).body(body))
    };
    for (kind, body) in [("text/plain", "{}"), ("application/json", "{"), ("application/json", "7")] {
        assert_eq!(send(kind, body).await.refusal(400).0, "MalformedPayload", "{kind} {body}");
    }
    let (code, _) = send("application/json; charset=utf-8", "{}").await.refusal(400);
    assert_eq!(code, "InputValidationError");
}

#[tokio::test]
async fn invalid_url_parameters_are_rejected() {
    let server = TestQueue::new().await;
    for path in ["task/nope/status", "task/..%2f..%2fetc/status", "pending/only-one-part"] {
        assert_eq!(server.api.get(path).await.refusal(400).0, "InvalidRequestArguments", "{path}");
    }
    assert_eq!(server.api.get("task/%ff").await.refusal(404).0, "ResourceNotFound");
    let answer = server.api.anonymous("GET", "nosuch", None).await;
    assert_eq!(answer.refusal(404).0, "ResourceNotFound");
    let nowhere = server.api.send(server.api.request("GET", "/", None)).await;
    assert_eq!(nowhere.refusal(404).0, "ResourceNotFound");
}

#[tokio::test]
async fn error_responses_contain_no_credentials() {
    let server = TestQueue::new().await;
    let task = server.api.create("p/w", json!({})).await;
    let claims = server.api.claim_work("p/w", "w1", 1).await;
    let worker = server.api.with(&claims[0]["credentials"]);
    let answer = worker.bare_post(&format!("task/{task}/cancel")).await;
    answer.refusal(403);
    for secret in [worker.token.as_str(), certificate_part(&worker, "signature"), certificate_part(&worker, "seed")] {
        assert!(!answer.text.contains(secret), "{}", answer.text);
    }
}

fn certificate_part<'a>(worker: &'a Api, name: &str) -> &'a str {
    worker.certificate.as_ref().and_then(|all| all.get(name)).and_then(Value::as_str).expect("a part of it")
}
