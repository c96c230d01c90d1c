//! The API of a cluster, as its reference describes it: objects as JSON under their paths.

use std::path::PathBuf;

use reqwest::header::CONTENT_TYPE;
use reqwest::{Method, StatusCode};
use serde_json::Value;

use super::Cluster;
use crate::controller::driver::Trouble;
use crate::limits::{DRIVER_CALL_TIMEOUT, DRIVER_OUTPUT_BYTES_MAX};

/// A kind of objects: the group and version they are of, and what they are called together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kind(&'static str, &'static str);

pub(super) const DEPLOYMENTS: Kind = Kind("apis/apps/v1", "deployments");
pub(super) const PODS: Kind = Kind("api/v1", "pods");
pub(super) const SECRETS: Kind = Kind("api/v1", "secrets");
pub(super) const SCALED_OBJECTS: Kind = Kind("apis/keda.sh/v1alpha1", "scaledobjects");
pub(super) const TRIGGER_AUTHENTICATIONS: Kind = Kind("apis/keda.sh/v1alpha1", "triggerauthentications");

/// One namespace of a cluster.
pub(super) struct Api {
    http: reqwest::Client,
    server: String,
    namespace: String,
    token_file: Option<PathBuf>,
}

/// What came of a call.
pub(super) enum Answer {
    Done(Value),
    /// There is no such object.
    Missing,
    /// It is there already, or is not what it was when it was read.
    Conflict,
}

impl Api {
    pub(super) fn new(cluster: &Cluster) -> Result<Self, Trouble> {
        crate::host::tls::choose();
        let unusable = |file: &std::path::Path, error: &dyn std::fmt::Display| {
            Trouble(format!("{} cannot be used: {error}", file.display()))
        };
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("journeyman/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .timeout(DRIVER_CALL_TIMEOUT);
        if let Some(path) = &cluster.ca_file {
            let pem = std::fs::read(path).map_err(|error| unusable(path, &error))?;
            let certificates = reqwest::Certificate::from_pem_bundle(&pem).map_err(|error| unusable(path, &error))?;
            builder = builder.tls_certs_only(certificates);
        }
        let http = builder.build().map_err(|error| Trouble(format!("no client can be made: {error}")))?;
        let (server, namespace) = (cluster.server.trim_end_matches('/').to_owned(), cluster.namespace.clone());
        Ok(Self { http, server, namespace, token_file: cluster.token_file.clone() })
    }

    /// Those that have this label.
    pub(super) async fn list(&self, kind: Kind, label: &str, value: &str) -> Result<Vec<Value>, Trouble> {
        let selector = urlencoding::encode(&format!("{label}={value}")).into_owned();
        let path = format!("{}?labelSelector={selector}", self.path(kind));
        match self.call(Method::GET, &path, None).await? {
            Answer::Done(Value::Object(mut list)) => match list.remove("items") {
                Some(Value::Array(items)) => Ok(items),
                Some(_) | None => Err(Trouble(format!("{path} has no items"))),
            },
            Answer::Done(_) | Answer::Missing | Answer::Conflict => Err(Trouble(format!("{path} is no list"))),
        }
    }

    pub(super) async fn get(&self, kind: Kind, name: &str) -> Result<Option<Value>, Trouble> {
        match self.call(Method::GET, &self.object(kind, name), None).await? {
            Answer::Done(object) => Ok(Some(object)),
            Answer::Missing | Answer::Conflict => Ok(None),
        }
    }

    pub(super) async fn create(&self, kind: Kind, object: &Value) -> Result<Answer, Trouble> {
        self.call(Method::POST, &self.path(kind), Some(("application/json", object))).await
    }

    /// Changes parts of an object; one that its `resourceVersion` names only while that is still so.
    pub(super) async fn patch(&self, kind: Kind, name: &str, change: &Value) -> Result<Answer, Trouble> {
        let body = Some(("application/merge-patch+json", change));
        self.call(Method::PATCH, &self.object(kind, name), body).await
    }

    pub(super) async fn delete(&self, kind: Kind, name: &str, how: &Value) -> Result<(), Trouble> {
        self.call(Method::DELETE, &self.object(kind, name), Some(("application/json", how))).await.map(drop)
    }

    fn path(&self, Kind(group, kind): Kind) -> String {
        format!("/{group}/namespaces/{}/{kind}", self.namespace)
    }

    fn object(&self, kind: Kind, name: &str) -> String {
        format!("{}/{name}", self.path(kind))
    }

    /// The last lines that a pod has said; nothing where they cannot be had.
    pub(super) async fn last_words(&self, pod: &str) -> String {
        let path = format!("{}/log?tailLines=20", self.object(PODS, pod));
        match self.fetch(Method::GET, &path, None).await {
            Ok((StatusCode::OK, said)) => String::from_utf8_lossy(&said).into_owned(),
            Ok(_) | Err(_) => String::new(),
        }
    }

    async fn call(&self, method: Method, path: &str, body: Option<(&str, &Value)>) -> Result<Answer, Trouble> {
        let (status, bytes) = self.fetch(method.clone(), path, body).await?;
        let said: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        match status {
            StatusCode::NOT_FOUND => Ok(Answer::Missing),
            StatusCode::CONFLICT => Ok(Answer::Conflict),
            status if status.is_success() => Ok(Answer::Done(said)),
            status => {
                let why = said["message"].as_str().unwrap_or_default();
                Err(Trouble(format!("{method} {path}: {status}: {why}")))
            }
        }
    }

    async fn fetch(
        &self,
        method: Method,
        path: &str,
        body: Option<(&str, &Value)>,
    ) -> Result<(StatusCode, Vec<u8>), Trouble> {
        let trouble = |what: &str| Trouble(format!("{method} {path}: {what}"));
        let lost = |error: reqwest::Error| trouble(&deepest(&error.without_url()));
        let mut request = self.http.request(method.clone(), format!("{}{path}", self.server));
        if let Some(file) = &self.token_file {
            // It is another one every hour or so.
            let token = tokio::fs::read_to_string(file).await;
            request = request.bearer_auth(token.map_err(|error| trouble(&format!("the token: {error}")))?.trim());
        }
        if let Some((kind, body)) = body {
            request = request.header(CONTENT_TYPE, kind).body(body.to_string());
        }
        let mut answer = request.send().await.map_err(lost)?;
        let status = answer.status();
        let mut bytes = Vec::new();
        while let Some(piece) = answer.chunk().await.map_err(lost)? {
            bytes.extend_from_slice(&piece);
            if bytes.len() > DRIVER_OUTPUT_BYTES_MAX {
                return Err(trouble("its answer is too long"));
            }
        }
        Ok((status, bytes))
    }
}

/// The last cause: what is above it says no more than that a request was sent.
fn deepest(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(cause) = last.source() {
        last = cause;
    }
    last.to_string()
}
