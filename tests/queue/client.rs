//! A minimal Hawk client of the queue.

use std::sync::Once;
use std::time::{Duration, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hawk::{Credentials, Key, RequestBuilder, SHA256};
use journeyman_services::queue::QueueClock;
use reqwest::Method;
use serde_json::{Value, json};

#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) root: String,
    pub(crate) id: String,
    pub(crate) token: String,
    pub(crate) certificate: Option<Value>,
    pub(crate) authorized_scopes: Option<Vec<String>>,
    pub(crate) clock: QueueClock,
    pub(crate) http: reqwest::Client,
    /// Error of its clock, in seconds.
    pub(crate) skew: i64,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: reqwest::header::HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    pub(crate) fn expect(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text);
        if self.text.is_empty() { Value::Null } else { self.json() }
    }

    /// The code of an error response and its message.
    pub(crate) fn refusal(&self, status: u16) -> (String, String) {
        assert_eq!(self.status, status, "{}", self.text);
        let text = |name: &str| self.json()[name].as_str().unwrap_or_default().to_owned();
        (text("code"), text("message"))
    }
}

pub(crate) fn http() -> reqwest::Client {
    static PROVIDER: Once = Once::new();
    PROVIDER.call_once(|| {
        rustls::crypto::ring::default_provider().install_default().expect("there is no other provider");
    });
    let builder = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).no_proxy();
    builder.timeout(Duration::from_secs(60)).build().expect("a client can be built")
}

impl Api {
    /// The same client with other credentials.
    pub(crate) fn with(&self, credentials: &Value) -> Self {
        let text = |name: &str| credentials[name].as_str().expect("credentials are texts").to_owned();
        let certificate = serde_json::from_str(&text("certificate")).expect("a certificate is JSON");
        Self { id: text("clientId"), token: text("accessToken"), certificate: Some(certificate), ..self.clone() }
    }

    pub(crate) fn header(&self, method: &str, path: &str, hash: Option<&[u8]>) -> String {
        let authority = self.root.trim_start_matches("http://");
        let (host, port) = authority.rsplit_once(':').expect("the root has a port");
        let mut ext = json!({});
        if let Some(certificate) = &self.certificate {
            ext["certificate"] = certificate.clone();
        }
        if let Some(scopes) = &self.authorized_scopes {
            ext["authorizedScopes"] = json!(scopes);
        }
        let ext = STANDARD.encode(ext.to_string());
        let mut request = RequestBuilder::new(method, host, port.parse().expect("a port"), path);
        if self.certificate.is_some() || self.authorized_scopes.is_some() {
            request = request.ext(ext.as_str());
        }
        if let Some(hash) = hash {
            request = request.hash(hash);
        }
        let key = Key::new(self.token.as_bytes(), SHA256).expect("any token is a key");
        let credentials = Credentials { id: self.id.clone(), key };
        let now = self.clock.unix_millis() / 1000 + self.skew;
        let at = UNIX_EPOCH + Duration::from_secs(now.try_into().expect("it is after 1970"));
        let header = request.request().make_header_full(&credentials, at, "nonce").expect("a request can be signed");
        format!("Hawk {header}")
    }

    pub(crate) async fn send(&self, request: reqwest::RequestBuilder) -> Answer {
        let answer = request.send().await.expect("the queue answers");
        let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
        let text = answer.text().await.expect("an answer is text");
        Answer { status, headers, text }
    }

    pub(crate) fn request(&self, method: &str, path: &str, body: Option<&Value>) -> reqwest::RequestBuilder {
        let verb = Method::from_bytes(method.as_bytes()).expect("a method");
        let request = self.http.request(verb, format!("{}{path}", self.root));
        match body {
            Some(body) => request.header("content-type", "application/json").body(body.to_string()),
            None => request,
        }
    }

    pub(crate) async fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Answer {
        let header = self.header(method, path, None);
        self.send(self.request(method, path, body).header("authorization", header)).await
    }

    pub(crate) async fn queue(&self, method: &str, path: &str, body: Option<&Value>) -> Answer {
        self.call(method, &format!("/api/queue/v1/{path}"), body).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        self.queue("POST", path, Some(&body)).await
    }

    pub(crate) async fn bare_post(&self, path: &str) -> Answer {
        self.queue("POST", path, None).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.queue("GET", path, None).await
    }

    pub(crate) async fn anonymous(&self, method: &str, path: &str, body: Option<&Value>) -> Answer {
        self.send(self.request(method, &format!("/api/queue/v1/{path}"), body)).await
    }

    /// Creates a minimal task with `change` applied, and returns its id.
    pub(crate) async fn create(&self, queue: &str, change: Value) -> String {
        let id = slugid();
        let body = self.definition(queue, change);
        self.queue("PUT", &format!("task/{id}"), Some(&body)).await.expect(200);
        id
    }

    pub(crate) fn definition(&self, queue: &str, change: Value) -> Value {
        let now = self.clock.unix_millis();
        let mut body = json!({
            "taskQueueId": queue, "created": iso(now), "deadline": iso(now + 3_600_000),
            "payload": {"hello": "world"},
            "metadata": {"name": "n", "description": "d", "owner": "a@b.c", "source": "https://example.com"},
        });
        for (name, value) in change.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        body
    }

    pub(crate) async fn status(&self, task: &str) -> Value {
        self.get(&format!("task/{task}/status")).await.expect(200)["status"].take()
    }

    pub(crate) async fn claim_work(&self, queue: &str, worker: &str, tasks: u64) -> Vec<Value> {
        let body = json!({"workerGroup": "wg", "workerId": worker, "tasks": tasks});
        let mut reply = self.post(&format!("claim-work/{}", queue.replace('/', "%2F")), body).await.expect(200);
        reply["tasks"].as_array_mut().map(std::mem::take).expect("a list of claims")
    }
}

pub(crate) fn slugid() -> String {
    base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(uuid::Uuid::new_v4().as_bytes())
}

pub(crate) fn iso(unix_millis: i64) -> String {
    format!("{:.3}", jiff::Timestamp::from_millisecond(unix_millis).expect("a time"))
}
