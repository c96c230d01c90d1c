//! The client against a server of the test: credentials and their renewal, and TLS.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use hyper::StatusCode;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::{KubernetesClient, KubernetesError, PODS, Pod};

type Answer = (StatusCode, Value);

/// A server that answers as it is told, and then with an empty list.
struct Server {
    address: SocketAddr,
    /// The path, query and headers that decide who asks.
    seen: Arc<Mutex<Vec<String>>>,
    answers: Arc<Mutex<VecDeque<Answer>>>,
    _server: JoinSet<()>,
}

type Shared = (Arc<Mutex<Vec<String>>>, Arc<Mutex<VecDeque<Answer>>>);

async fn answer(State((seen, answers)): State<Shared>, request: Request) -> Response {
    let mut line = request.uri().path_and_query().map(ToString::to_string).unwrap_or_default();
    for (name, value) in request.headers() {
        if matches!(name.as_str(), "authorization" | "host" | "impersonate-user" | "impersonate-group") {
            write!(line, " {name}={}", value.to_str().unwrap()).unwrap();
        }
    }
    seen.lock().push(line);
    let (status, body) = answers.lock().pop_front().unwrap_or((StatusCode::OK, json!({ "items": null })));
    let body = body.as_str().map_or_else(|| body.to_string(), str::to_owned);
    (status, Body::from(body)).into_response()
}

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, shared) = (listener.local_addr().unwrap(), Shared::default());
        let router = Router::new().fallback(answer).with_state(shared.clone());
        let mut server = JoinSet::new();
        server.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, seen: shared.0, answers: shared.1, _server: server }
    }

    fn answer_with(&self, status: StatusCode, body: Value) {
        self.answers.lock().push_back((status, body));
    }

    /// The values of a header in each request.
    fn seen(&self, header: &str) -> Vec<String> {
        let seen = self.seen.lock();
        let value = |line: &String| line.split_once(&format!(" {header}=")).map(|(_, rest)| rest.to_owned());
        let first = |text: String| text.split(" host=").next().unwrap_or_default().to_owned();
        seen.iter().map(|line| value(line).map(first).unwrap_or_default()).collect()
    }
}

fn client(folder: &Path, server: &str, user: &Value) -> KubernetesClient {
    let config = json!({
        "current-context": "here",
        "contexts": [{ "name": "here", "context": { "cluster": "a", "user": "a" } }],
        "clusters": [{ "name": "b" }, { "name": "a", "cluster": { "server": server } }],
        "users": [{ "name": "a", "user": user }],
    });
    let path = folder.join("kubeconfig");
    std::fs::write(&path, config.to_string()).unwrap();
    KubernetesClient::new(Some(path), "builds".to_owned())
}

async fn list(client: &KubernetesClient) -> Result<usize, KubernetesError> {
    let list = client.list::<Pod>(&PODS, ("the pods of", "a"), &[("limit", "1")]).await?;
    Ok(list.items.unwrap_or_default().len())
}

#[tokio::test]
async fn a_token_that_was_rotated_is_read_again_when_the_old_one_is_refused() {
    let (server, place) = (Server::start().await, TempDir::new().unwrap());
    let token = |text: &str| std::fs::write(place.path().join("token"), text).unwrap();
    token("one\n");
    let client = client(place.path(), &format!("http://{}/prefix/", server.address), &json!({ "tokenFile": "token" }));
    assert_eq!(list(&client).await.unwrap(), 0);
    token("two");
    server.answer_with(StatusCode::UNAUTHORIZED, json!({ "message": "Unauthorized" }));
    assert_eq!(list(&client).await.unwrap(), 0);
    assert_eq!(server.seen("authorization"), ["Bearer one", "Bearer one", "Bearer two"]);
    assert!(server.seen.lock()[0].starts_with("/prefix/api/v1/namespaces/builds/pods?limit=1 "));

    // A fresh one that is refused is not sent again.
    *client.connection.lock().await = None;
    server.answer_with(StatusCode::UNAUTHORIZED, json!({ "message": "Unauthorized" }));
    let error = list(&client).await.unwrap_err();
    assert_eq!(error.to_string(), "cannot list the pods of a: 401 Unauthorized");
    assert!(matches!(error, KubernetesError::Unauthorized(_)) && server.seen.lock().len() == 4);
}

#[tokio::test]
async fn b13_a_newline_after_a_value_of_a_kubeconfig_or_a_plugin_is_not_part_of_it() {
    let (server, place) = (Server::start().await, TempDir::new().unwrap());
    std::fs::write(place.path().join("token"), "one\n").unwrap();
    let issues = plugin(place.path(), "echo '{\"status\": {\"token\": \"one\\n\"}}'");
    let password = json!({ "username": "me\n", "password": "one\n" });
    for user in [json!({ "token": "one\n" }), json!({ "tokenFile": "token\n" }), issues, password] {
        let client = client(place.path(), &format!("http://{}\n", server.address), &user);
        assert_eq!(list(&client).await.unwrap(), 0, "{user}");
    }
    let bearer = "Bearer one";
    assert_eq!(server.seen("authorization"), [bearer, bearer, bearer, "Basic bWU6b25l"]);
}

#[tokio::test]
async fn a_file_that_cannot_be_read_again_leaves_the_last_token_in_use() {
    let (server, place) = (Server::start().await, TempDir::new().unwrap());
    std::fs::write(place.path().join("token"), "one").unwrap();
    let client = client(place.path(), &format!("http://{}", server.address), &json!({ "tokenFile": "token" }));
    list(&client).await.unwrap();
    std::fs::remove_file(place.path().join("token")).unwrap();
    client.connection.lock().await.as_mut().unwrap().renew_at = Some(tokio::time::Instant::now());
    list(&client).await.unwrap();
    assert_eq!(server.seen("authorization"), ["Bearer one", "Bearer one"]);
}

fn plugin(folder: &Path, script: &str) -> Value {
    use std::os::unix::fs::PermissionsExt as _;
    let path = folder.join("plugin");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let env = json!([{ "name": "WHO", "value": "me" }]);
    json!({ "exec": { "apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", "args": ["get", "token"], "env": env } })
}

#[tokio::test]
async fn a_credential_plugin_is_run_again_before_what_it_issued_expires() {
    let (server, place) = (Server::start().await, TempDir::new().unwrap());
    let count = place.path().join("count").display().to_string();
    let script = format!(
        "echo x >> {count}\ncase \"$KUBERNETES_EXEC_INFO\" in *'\"interactive\":false'*) ;; *) exit 1 ;; esac\n\
         echo 'kind: ExecCredential'; echo \"status: {{ token: $WHO-$2-$(wc -l < {count}), expirationTimestamp: '2999-01-01T00:00:00Z' }}\""
    );
    let mut user = plugin(place.path(), &script);
    (user["as"], user["as-groups"]) = (json!("other"), json!(["some"]));
    let client = client(place.path(), &format!("http://{}", server.address), &user);
    list(&client).await.unwrap();
    list(&client).await.unwrap();
    client.connection.lock().await.as_mut().unwrap().renew_at = Some(tokio::time::Instant::now());
    list(&client).await.unwrap();
    assert_eq!(
        server.seen("authorization"),
        ["Bearer me-token-1", "Bearer me-token-1", "Bearer me-token-2"]
            .map(|token| format!("{token} impersonate-user=other impersonate-group=some"))
    );
}

#[tokio::test]
async fn a_credential_plugin_that_fails_is_named_with_what_it_says_and_without_its_output() {
    let place = TempDir::new().unwrap();
    for (script, words) in [
        ("echo canary; echo 'log in first' >&2; exit 3", "failed: exit status: 3: log in first"),
        ("echo '{\"status\": {\"other\": \"canary\"}}'", "neither a token nor a certificate"),
        (
            "echo '{\"status\": {\"token\": \"canary\", \"expirationTimestamp\": \"soon\"}}'",
            "expirationTimestamp is not valid",
        ),
        ("echo '{canary: ['", "its output is not valid"),
    ] {
        let client = client(place.path(), "http://127.0.0.1:1", &plugin(place.path(), script));
        let error = list(&client).await.unwrap_err().to_string();
        let start = "cannot configure the Kubernetes client: the credential plugin ./plugin failed: ";
        assert!(error.starts_with(start) && error.contains(words) && !error.contains("canary"), "{error}");
    }
    let mut user = plugin(place.path(), "");
    (user["exec"]["command"], user["exec"]["installHint"]) = (json!("no-such-plugin"), json!("install it"));
    let error = list(&client(place.path(), "http://127.0.0.1:1", &user)).await.unwrap_err().to_string();
    assert!(error.contains("cannot run no-such-plugin") && error.ends_with("; install it"), "{error}");
}

#[tokio::test]
async fn a_kubeconfig_that_cannot_be_used_is_refused_by_what_is_wrong_with_it() {
    let place = TempDir::new().unwrap();
    for (server, user, words) in [
        ("localhost:6443", json!({}), "neither http:// nor https://"),
        (
            "http://a",
            json!({ "client-certificate-data": "!" }),
            "client-certificate-data of the kubeconfig is no base64",
        ),
        ("http://a", json!({ "client-certificate-data": "YQ==" }), "no client-key"),
        (
            "http://a",
            json!({ "client-certificate-data": "YQ==", "client-key-data": "YQ==" }),
            "the certificate of the kubeconfig",
        ),
        ("http://a", json!({ "tokenFile": "none" }), "/none: No such file"),
        ("http://a", json!({ "auth-provider": { "name": "gcp" } }), "auth-provider gcp is not supported"),
        ("http://a", json!({ "token": "a\nb" }), "not valid in a header"),
    ] {
        let error = list(&client(place.path(), server, &user)).await.unwrap_err();
        assert!(matches!(&error, KubernetesError::Denied(text) if text.contains(words)), "{error}");
    }
}

#[tokio::test]
async fn a_server_with_a_certificate_of_its_own_is_verified_by_authority_and_name() {
    use base64::Engine as _;
    let issue = |names: &[&str]| {
        rcgen::generate_simple_self_signed(names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap()
    };
    let (own, other) = (issue(&["api.example"]), issue(&["api.example"]));
    let key = rustls::pki_types::PrivateKeyDer::try_from(own.signing_key.serialize_der()).unwrap();
    crate::crypto_provider::install_crypto_provider();
    let tls = rustls::ServerConfig::builder().with_no_client_auth().with_single_cert(vec![own.cert.der().clone()], key);
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls.unwrap()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = format!("https://{}", listener.local_addr().unwrap());
    let shared = Shared::default();
    let router = Router::new().fallback(answer).with_state(shared.clone());
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            if let Ok(stream) = acceptor.accept(stream).await {
                crate::http::serve_one(stream, router.clone(), std::time::Duration::from_secs(5)).await;
            }
        }
    });
    let place = TempDir::new().unwrap();
    let encoded = |pem: &str| base64::engine::general_purpose::STANDARD.encode(pem);
    let trusted = json!({ "server": server, "certificate-authority-data": encoded(&own.cert.pem()), "tls-server-name": "api.example" });
    let with = |field: &str, value: Value| {
        let mut cluster = trusted.clone();
        cluster[field] = value;
        cluster
    };
    for (cluster, is_trusted) in [
        (trusted.clone(), true),
        (with("tls-server-name", json!("other.example")), false),
        (with("tls-server-name", Value::Null), false),
        (with("certificate-authority-data", json!(encoded(&other.cert.pem()))), false),
        (json!({ "server": server, "insecure-skip-tls-verify": true }), true),
    ] {
        let config = json!({
            "current-context": "a", "contexts": [{ "name": "a", "context": { "cluster": "a" } }],
            "clusters": [{ "name": "a", "cluster": cluster }],
        });
        let path = place.path().join("kubeconfig");
        std::fs::write(&path, config.to_string()).unwrap();
        let listed = list(&KubernetesClient::new(Some(path), "builds".to_owned())).await;
        assert_eq!(listed.is_ok(), is_trusted, "{cluster}: {listed:?}");
    }
    // The name is for TLS alone.
    let address = server.split_once("://").unwrap().1;
    assert!(shared.0.lock().iter().all(|line| line.ends_with(&format!(" host={address}"))), "{:?}", shared.0.lock());
}
