//! Client of the API server of a kubeconfig, or of the cluster that this pod runs in.

use std::path::PathBuf;
use std::sync::Arc;

use hyper::{HeaderMap, Response, StatusCode};
use jiff::Timestamp;
use kube::api::{ApiResource, DynamicObject};
use kube::client::{ClientBuilder, DynBody};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Config, Error, Resource};
use parking_lot::Mutex;
use tokio::time::{Duration, Instant, timeout};
use tower::util::MapResponseLayer;

use crate::host::crypto_provider::install_crypto_provider;
use crate::http::client::{error_chain, root_cause};
use journeyman_domain::limits::{KUBERNETES_CALL_TIMEOUT, KUBERNETES_CONNECT_TIMEOUT, KUBERNETES_RETRY_AFTER_MAX};

/// Named by what the caller does next.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KubernetesError {
    /// There is no such object.
    #[error("{0}")]
    Gone(String),
    /// The object exists already or has changed: read it.
    #[error("{0}")]
    Conflict(String),
    /// An operator has to grant access, or quota.
    #[error("{0}")]
    Denied(String),
    /// The request is wrong: do not repeat it.
    #[error("{0}")]
    Rejected(String),
    /// The call may have taken effect: read, then repeat it.
    #[error("{0}")]
    Retry(String),
}

pub(crate) struct KubernetesClient {
    kubeconfig: Option<PathBuf>,
    namespace: String,
    /// Made anew after a failure, so that rotated credentials and certificates are read.
    client: tokio::sync::Mutex<Option<Client>>,
    /// By `Retry-After`.
    not_before: Arc<Mutex<Option<Instant>>>,
    /// The server's clock at its last answer.
    server_time: Arc<Mutex<Option<(Timestamp, Instant)>>>,
}

impl KubernetesClient {
    pub(crate) fn new(kubeconfig: Option<PathBuf>, namespace: String) -> Self {
        Self {
            kubeconfig,
            namespace,
            client: tokio::sync::Mutex::default(),
            not_before: Arc::default(),
            server_time: Arc::default(),
        }
    }

    /// The time by the server's clock; by this host's before its first answer.
    pub(crate) fn now(&self) -> Timestamp {
        let since = |(time, at): (Timestamp, Instant)| time.checked_add(at.elapsed()).ok();
        self.server_time.lock().and_then(since).unwrap_or_else(Timestamp::now)
    }

    pub(crate) async fn api<K>(&self) -> Result<Api<K>, KubernetesError>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Ok(Api::namespaced(self.client().await?, &self.namespace))
    }

    pub(crate) async fn objects(&self, kind: &ApiResource) -> Result<Api<DynamicObject>, KubernetesError> {
        Ok(Api::namespaced_with(self.client().await?, &self.namespace, kind))
    }

    async fn client(&self) -> Result<Client, KubernetesError> {
        let wait = self.not_before.lock().map(|at| at.duration_since(Instant::now()));
        if let Some(wait) = wait.filter(|wait| !wait.is_zero()) {
            let text = format!("the Kubernetes API is overloaded and asked to wait; {wait:.1?} are left");
            return Err(KubernetesError::Retry(text));
        }
        let mut client = self.client.lock().await;
        if let Some(client) = &*client {
            return Ok(client.clone());
        }
        let connected = self.connect().await.map_err(|error| {
            KubernetesError::Denied(format!("cannot configure the Kubernetes client: {}", error_chain(&error)))
        })?;
        Ok(client.insert(connected).clone())
    }

    async fn connect(&self) -> Result<Client, Error> {
        install_crypto_provider();
        let mut config = match &self.kubeconfig {
            Some(path) => {
                Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &KubeConfigOptions::default()).await?
            }
            None => Config::infer().await.map_err(Error::InferConfig)?,
        };
        config.connect_timeout = Some(KUBERNETES_CONNECT_TIMEOUT);
        // The callers repeat their calls.
        config.default_retry = false;
        let (not_before, server_time) = (Arc::clone(&self.not_before), Arc::clone(&self.server_time));
        let layer = MapResponseLayer::new(move |response: Response<Box<DynBody>>| {
            if let Some(wait) = retry_after(response.status(), response.headers()) {
                *not_before.lock() = Some(Instant::now() + wait);
            }
            if let Some(time) = date(response.headers()) {
                *server_time.lock() = Some((time, Instant::now()));
            }
            response
        });
        Ok(ClientBuilder::try_from(config)?.with_layer(&layer).build())
    }

    /// Awaits a call and says in its error what failed.
    pub(crate) async fn check<T>(
        &self,
        verb: &str,
        name: &str,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, KubernetesError> {
        let (error, reconnects) = match timeout(KUBERNETES_CALL_TIMEOUT, call).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => {
                (classify(verb, name, &error), !matches!(&error, Error::Api(status) if status.code != 401))
            }
            Err(_) => {
                let text =
                    format!("cannot {verb} {name}: the Kubernetes API did not reply in {KUBERNETES_CALL_TIMEOUT:?}");
                (KubernetesError::Retry(text), true)
            }
        };
        if reconnects {
            *self.client.lock().await = None;
        }
        Err(error)
    }
}

fn date(headers: &HeaderMap) -> Option<Timestamp> {
    Some(jiff::fmt::rfc2822::parse(headers.get("date")?.to_str().ok()?).ok()?.timestamp())
}

fn retry_after(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    let is_overloaded = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    let seconds = headers.get("retry-after").filter(|_| is_overloaded)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds).min(KUBERNETES_RETRY_AFTER_MAX))
}

fn classify(verb: &str, name: &str, error: &Error) -> KubernetesError {
    let Error::Api(status) = error else {
        return KubernetesError::Retry(format!("cannot {verb} {name}: {}", root_cause(error)));
    };
    let text = format!("cannot {verb} {name}: {} {}", status.code, status.message);
    match status.code {
        404 => KubernetesError::Gone(text),
        409 => KubernetesError::Conflict(text),
        401 | 403 => KubernetesError::Denied(text),
        429 | 500.. => KubernetesError::Retry(text),
        _ => KubernetesError::Rejected(text),
    }
}

/// `None` for an object that does not exist.
pub(crate) fn existing<T>(answer: Result<T, KubernetesError>) -> Result<Option<T>, KubernetesError> {
    match answer {
        Ok(object) => Ok(Some(object)),
        Err(KubernetesError::Gone(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classified(code: u16) -> KubernetesError {
        let status = kube::core::Status::failure("why", "Reason").with_code(code);
        classify("read pod", "a", &Error::Api(status.boxed()))
    }

    #[test]
    fn an_error_is_named_by_what_the_caller_does_next() {
        assert!(matches!(classified(404), KubernetesError::Gone(_)));
        assert!(matches!(classified(409), KubernetesError::Conflict(_)));
        assert!(matches!((classified(401), classified(403)), (KubernetesError::Denied(_), KubernetesError::Denied(_))));
        assert!(matches!(classified(422), KubernetesError::Rejected(_)));
        for code in [429, 500, 503, 504] {
            assert!(matches!(classified(code), KubernetesError::Retry(_)), "{code}");
        }
        assert_eq!(classified(422).to_string(), "cannot read pod a: 422 why");
    }
}
