//! Who may do what: signatures, certificates, scopes, and requests that are not what they should be.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use journeyman::queue::{Auth, RegisteredClient};
use serde_json::{Value, json};

use super::client::{Api, slugid};
use super::place::{Place, ROOT};

fn narrow(place: &Place, id: &str, token: &str) -> Api {
    Api { id: id.to_owned(), token: token.to_owned(), ..place.api.clone() }
}

async fn with_worker() -> Place {
    Place::with(|settings| {
        settings.clients.push(RegisteredClient {
            client_id: "worker".to_owned(),
            access_token: "of-the-worker".into(),
            scopes: vec!["queue:claim-work:p/*".to_owned(), "queue:worker-id:wg/*".to_owned()],
        });
    })
    .await
}

#[tokio::test]
async fn a_client_may_do_what_its_scopes_cover_and_nothing_else() {
    let place = with_worker().await;
    let worker = narrow(&place, "worker", "of-the-worker");
    place.api.create("p/w", json!({})).await;
    assert_eq!(worker.claim_work("p/w", "w1", 1).await.len(), 1);
    let body = json!({"workerGroup": "other", "workerId": "w1"});
    let (code, line) = worker.post("claim-work/p%2Fw", body).await.refusal(403);
    assert_eq!(code, "InsufficientScopes");
    assert!(line.contains("missing the following scopes:\n\n```\nqueue:worker-id:other/w1\n```"), "{line}");
    let definition = place.api.definition("p/w", json!({}));
    let answer = worker.queue("PUT", &format!("task/{}", slugid()), Some(&definition)).await;
    assert_eq!(answer.refusal(403).0, "InsufficientScopes");
    place.running.stop().await;
}

#[tokio::test]
async fn an_unknown_client_and_a_garbled_header_are_refused() {
    let place = Place::new().await;
    let unknown = narrow(&place, "nobody", "x");
    assert_eq!(unknown.get("ping").await.refusal(401).0, "AuthenticationFailed");
    for header in [
        "",
        "Hawk",
        "Hawk id",
        "Hawk id=\"\u{e9}\"",
        "Bearer x",
        "Hawk id=\"a\", ts=\"99999999999999999999\", nonce=\"n\", mac=\"AA==\"",
    ] {
        let request = place.api.request("GET", "/api/queue/v1/ping", None).header("authorization", header);
        assert_eq!(place.api.send(request).await.refusal(401).0, "AuthenticationFailed", "{header}");
    }
    place.running.stop().await;
}

#[tokio::test]
async fn the_query_is_part_of_what_is_signed() {
    let place = Place::new().await;
    let header = place.api.header("GET", "/api/queue/v1/journeyman/tasks?limit=1", None);
    let request = place.api.request("GET", "/api/queue/v1/journeyman/tasks?limit=2", None);
    let (_, line) = place.api.send(request.header("authorization", header)).await.refusal(401);
    assert_eq!(line, "Unauthorized: Bad mac");
    place.api.get("journeyman/tasks?limit=1").await.expect(200);
    place.running.stop().await;
}

#[tokio::test]
async fn a_clock_a_quarter_of_an_hour_off_is_tolerated_and_more_is_not() {
    let place = Place::new().await;
    for (skew, status) in [(890, 200), (-890, 200), (910, 401), (-910, 401)] {
        let off = Api { skew, ..place.api.clone() };
        assert_eq!(off.get("ping").await.status, status, "{skew}");
    }
    place.running.stop().await;
}

#[tokio::test]
async fn the_credentials_of_a_claim_are_good_for_five_minutes_after_it() {
    let place = Place::with(|settings| settings.claim_delay = std::time::Duration::from_secs(3_600)).await;
    let task = place.api.create("p/w", json!({})).await;
    let claims = place.api.claim_work("p/w", "w1", 1).await;
    let worker = place.api.with(&claims[0]["credentials"]);
    place.advance(1_200 + 299).await;
    worker.bare_post(&format!("task/{task}/runs/0/reclaim")).await.expect(200);
    place.advance(2).await;
    let (code, line) = worker.bare_post(&format!("task/{task}/runs/0/reclaim")).await.refusal(401);
    assert_eq!((code.as_str(), line.as_str()), ("AuthenticationFailed", "ext.certificate.expiry < now"));
    place.running.stop().await;
}

#[tokio::test]
async fn the_credentials_of_a_claim_hold_its_scopes_alone_and_cannot_be_widened() {
    let place = Place::new().await;
    let task = place.api.create("p/w", json!({"scopes": ["project:x"]})).await;
    let other = place.api.create("p/w", json!({})).await;
    let claims = place.api.claim_work("p/w", "w1", 2).await;
    let worker = place.api.with(&claims[0]["credentials"]);
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
    place.running.stop().await;
}

/// Credentials that a client makes for somebody by itself, as every Taskcluster client can.
fn made_by(client: &Api, named: Option<&str>, scopes: &[&str]) -> Api {
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
async fn a_client_may_hand_on_what_it_may_do_itself_and_no_more() {
    let place = with_worker().await;
    let worker = narrow(&place, "worker", "of-the-worker");
    place.api.create("p/w", json!({})).await;
    let scopes = ["queue:claim-work:p/w", "queue:worker-id:wg/*"];
    assert_eq!(made_by(&worker, None, &scopes).claim_work("p/w", "w1", 1).await.len(), 1);
    for wider in [&["*"][..], &["queue:claim-work:*", "queue:worker-id:wg/*"]] {
        let (code, line) = made_by(&worker, None, wider).get("ping").await.refusal(401);
        assert_eq!(code, "AuthenticationFailed");
        assert!(line.contains("certificate scopes"), "{line}");
    }
    // A name of its own takes a scope for that.
    assert_eq!(made_by(&worker, Some("other"), &scopes).get("ping").await.refusal(401).0, "AuthenticationFailed");
    made_by(&place.api, Some("other"), &["queue:status:*"]).get("ping").await.expect(200);
    place.running.stop().await;
}

#[tokio::test]
async fn authorized_scopes_narrow_what_a_caller_may_do_and_never_widen_it() {
    let place = with_worker().await;
    let narrowed = Api { authorized_scopes: Some(vec!["queue:status:*".to_owned()]), ..place.api.clone() };
    let task = place.api.create("p/w", json!({})).await;
    narrowed.get(&format!("task/{task}/status")).await.expect(200);
    assert_eq!(narrowed.bare_post(&format!("task/{task}/cancel")).await.refusal(403).0, "InsufficientScopes");
    let widened = Api { authorized_scopes: Some(vec!["*".to_owned()]), ..narrow(&place, "worker", "of-the-worker") };
    assert_eq!(widened.get("ping").await.refusal(401).0, "AuthenticationFailed");
    place.running.stop().await;
}

#[tokio::test]
async fn nobody_may_ask_for_a_ping_and_for_public_artifacts_and_for_nothing_else() {
    let place = Place::new().await;
    assert_eq!(place.api.anonymous("GET", "ping", None).await.status, 200);
    let task = place.api.create("p/w", json!({})).await;
    for path in [format!("task/{task}"), format!("task/{task}/status"), "pending/p%2Fw".to_owned()] {
        assert_eq!(place.api.anonymous("GET", &path, None).await.refusal(403).0, "InsufficientScopes", "{path}");
    }
    let missing = place.api.anonymous("GET", &format!("task/{task}/artifacts/public/x"), None).await;
    assert_eq!(missing.refusal(404).0, "ResourceNotFound");
    let private = place.api.anonymous("GET", &format!("task/{task}/artifacts/private/x"), None).await;
    assert_eq!(private.refusal(403).0, "InsufficientScopes");
    place.running.stop().await;
}

#[tokio::test]
async fn an_open_queue_asks_nobody() {
    let place = Place::with(|settings| settings.auth = Auth::Open).await;
    let body = place.api.definition("p/w", json!({}));
    let answer = place.api.anonymous("PUT", &format!("task/{}", slugid()), Some(&body)).await;
    answer.expect(200);
    place.running.stop().await;
}

#[tokio::test]
async fn a_body_that_is_not_json_or_does_not_say_so_is_refused() {
    let place = Place::new().await;
    let path = "/api/queue/v1/claim-work/p%2Fw";
    let header = || place.api.header("POST", path, None);
    let send = |kind: &'static str, body: &'static str| {
        let request = place.api.request("POST", path, None).header("authorization", header());
        place.api.send(request.header("content-type", kind).body(body))
    };
    for (kind, body) in
        [("text/plain", "{}"), ("application/json", "{"), ("application/json", "7"), ("application/json", "\u{0}")]
    {
        assert_eq!(send(kind, body).await.refusal(400).0, "MalformedPayload", "{kind} {body}");
    }
    let (code, _) = send("application/json; charset=utf-8", "{}").await.refusal(400);
    assert_eq!(code, "InputValidationError");
    place.running.stop().await;
}

#[tokio::test]
async fn an_address_that_cannot_be_is_refused_before_anything_is_looked_up() {
    let place = Place::new().await;
    for path in ["task/nope/status", "task/..%2f..%2fetc/status", "pending/only-one-part"] {
        assert_eq!(place.api.get(path).await.refusal(400).0, "InvalidRequestArguments", "{path}");
    }
    let answer = place.api.anonymous("GET", "nosuch", None).await;
    assert_eq!((answer.status, answer.json()), (404, json!({"error": "Not found"})));
    let nowhere = place.api.send(place.api.request("GET", "/", None)).await;
    assert_eq!(nowhere.json(), json!({"error": "Not found"}));
    place.running.stop().await;
}

#[tokio::test]
async fn no_refusal_repeats_a_credential() {
    let place = Place::new().await;
    let task = place.api.create("p/w", json!({})).await;
    let claims = place.api.claim_work("p/w", "w1", 1).await;
    let worker = place.api.with(&claims[0]["credentials"]);
    let answer = worker.bare_post(&format!("task/{task}/cancel")).await;
    answer.refusal(403);
    for secret in [worker.token.as_str(), certificate_part(&worker, "signature"), certificate_part(&worker, "seed")] {
        assert!(!answer.text.contains(secret), "{}", answer.text);
    }
    place.running.stop().await;
}

fn certificate_part<'a>(worker: &'a Api, name: &str) -> &'a str {
    worker.certificate.as_ref().and_then(|all| all.get(name)).and_then(Value::as_str).expect("a part of it")
}
