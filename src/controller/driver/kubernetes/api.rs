//! Client of the Kubernetes API.

use std::path::PathBuf;

use reqwest::header::CONTENT_TYPE;
use reqwest::{Method, StatusCode};
use serde_json::Value;

use crate::config::pool::KubernetesDriverConfig;
use crate::controller::driver::DriverError;
use crate::http::client::{BodyError, client_builder, read_body, root_cause};
use crate::limits::{DRIVER_CALL_TIMEOUT, DRIVER_OUTPUT_BYTES_MAX};

#[derive(Debug, Clone, Copy)]
pub(super) struct ResourceKind(&'static str, &'static str);

pub(super) const DEPLOYMENTS: ResourceKind = ResourceKind("apis/apps/v1", "deployments");
pub(super) const PODS: ResourceKind = ResourceKind("api/v1", "pods");
pub(super) const SECRETS: ResourceKind = ResourceKind("api/v1", "secrets");
pub(super) const SCALED_OBJECTS: ResourceKind = ResourceKind("apis/keda.sh/v1alpha1", "scaledobjects");
pub(super) const TRIGGER_AUTHENTICATIONS: ResourceKind =
    ResourceKind("apis/keda.sh/v1alpha1", "triggerauthentications");

/// Mounted into every pod.
const SERVICE_ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

pub(super) struct KubernetesApi {
    http: reqwest::Client,
    server: String,
    namespace: String,
    token_file: Option<PathBuf>,
}

impl KubernetesApi {
    pub(super) fn new(cluster: &KubernetesDriverConfig) -> Result<Self, DriverError> {
        let unusable = |file: &std::path::Path, error: &dyn std::fmt::Display| {
            DriverError(format!("cannot use {}: {error}", file.display()))
        };
        let mut builder = client_builder().timeout(DRIVER_CALL_TIMEOUT);
        let is_tls = cluster.server.parts().scheme() == "https";
        let service_account =
            cluster.service_account_dir.clone().or_else(|| is_tls.then(|| PathBuf::from(SERVICE_ACCOUNT_DIR)));
        if let Some(path) = service_account.as_ref().filter(|_| is_tls).map(|dir| dir.join("ca.crt")) {
            let pem = std::fs::read(&path).map_err(|error| unusable(&path, &error))?;
            let certificates = reqwest::Certificate::from_pem_bundle(&pem).map_err(|error| unusable(&path, &error))?;
            builder = builder.tls_certs_only(certificates);
        }
        let http = builder.build().map_err(|error| DriverError(format!("cannot build an HTTP client: {error}")))?;
        let server = cluster.server.as_str().trim_end_matches('/').to_owned();
        Ok(Self {
            http,
            server,
            namespace: cluster.namespace.clone(),
            token_file: service_account.map(|dir| dir.join("token")),
        })
    }

    pub(super) async fn list(&self, kind: ResourceKind, label: &str, value: &str) -> Result<Vec<Value>, DriverError> {
        let selector = urlencoding::encode(&format!("{label}={value}")).into_owned();
        let path = format!("{}?labelSelector={selector}", self.collection_path(kind));
        let list = self.call(Method::GET, &path, None).await?;
        match list.and_then(|mut list| list.get_mut("items").map(Value::take)) {
            Some(Value::Array(items)) => Ok(items),
            Some(_) | None => Err(DriverError(format!("{path} is not a list"))),
        }
    }

    pub(super) async fn get(&self, kind: ResourceKind, name: &str) -> Result<Option<Value>, DriverError> {
        self.call(Method::GET, &self.object_path(kind, name), None).await
    }

    pub(super) async fn create(&self, kind: ResourceKind, object: &Value) -> Result<Value, DriverError> {
        let path = self.collection_path(kind);
        let created = self.call(Method::POST, &path, Some(("application/json", object))).await?;
        created.ok_or_else(|| DriverError(format!("{path} was not found")))
    }

    pub(super) async fn patch(
        &self,
        kind: ResourceKind,
        name: &str,
        change: &Value,
    ) -> Result<Option<Value>, DriverError> {
        let body = Some(("application/merge-patch+json", change));
        self.call(Method::PATCH, &self.object_path(kind, name), body).await
    }

    pub(super) async fn delete(&self, kind: ResourceKind, name: &str, how: &Value) -> Result<(), DriverError> {
        self.call(Method::DELETE, &self.object_path(kind, name), Some(("application/json", how))).await.map(drop)
    }

    fn collection_path(&self, ResourceKind(group, kind): ResourceKind) -> String {
        format!("/{group}/namespaces/{}/{kind}", self.namespace)
    }

    fn object_path(&self, kind: ResourceKind, name: &str) -> String {
        format!("{}/{name}", self.collection_path(kind))
    }

    pub(super) async fn log_tail(&self, pod: &str) -> String {
        let path = format!("{}/log?tailLines=20", self.object_path(PODS, pod));
        match self.fetch(Method::GET, &path, None).await {
            Ok((StatusCode::OK, said)) => String::from_utf8_lossy(&said).into_owned(),
            Ok(_) | Err(_) => String::new(),
        }
    }

    /// `None` if the object does not exist.
    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<(&str, &Value)>,
    ) -> Result<Option<Value>, DriverError> {
        let (status, bytes) = self.fetch(method.clone(), path, body).await?;
        let said: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        match status {
            StatusCode::NOT_FOUND => Ok(None),
            status if status.is_success() => Ok(Some(said)),
            status => {
                let why = said["message"].as_str().unwrap_or_default();
                Err(DriverError(format!("{method} {path}: {status}: {why}")))
            }
        }
    }

    async fn fetch(
        &self,
        method: Method,
        path: &str,
        body: Option<(&str, &Value)>,
    ) -> Result<(StatusCode, Vec<u8>), DriverError> {
        let trouble = |what: &str| DriverError(format!("{method} {path}: {what}"));
        let lost = |error: reqwest::Error| trouble(&root_cause(&error.without_url()));
        let mut request = self.http.request(method.clone(), format!("{}{path}", self.server));
        if let Some(file) = &self.token_file {
            // Kubernetes rotates the token about every hour.
            let token = tokio::fs::read_to_string(file).await;
            request = request.bearer_auth(token.map_err(|error| trouble(&format!("the token: {error}")))?.trim());
        }
        if let Some((kind, body)) = body {
            request = request.header(CONTENT_TYPE, kind).body(body.to_string());
        }
        let mut answer = request.send().await.map_err(lost)?;
        let status = answer.status();
        let body = read_body(&mut answer, DRIVER_OUTPUT_BYTES_MAX).await.map_err(|error| match error {
            BodyError::Connection(error) => lost(error),
            BodyError::TooLong => trouble("the response is too large"),
        })?;
        Ok((status, body))
    }
}
