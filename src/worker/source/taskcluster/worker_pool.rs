//! The calls of a worker to the manager of its pool: registration, whether it is still needed, removal, errors.

use jiff::Timestamp;
use parking_lot::Mutex;
use reqwest::Method;
use serde::Deserialize;
use serde_json::json;

use super::error_response::sanitize;
use super::transport::{Api, ApiConfig, ApiRequest, InvalidConfig};
use super::wire::WireCredentials;
use crate::source::CallError;
use journeyman_domain::refusal::Refusal;
use journeyman_domain::worker_pool::{PoolAnswer, PoolCall};
use journeyman_platform::settings::values::Secret;

/// A worker as a member of its pool, which has the name of its task queue.
pub struct WorkerPool {
    api: Api,
    pool: String,
    worker_group: String,
    worker_id: String,
    registration: Option<Registration>,
}

/// What a worker in a pool of a static provider registers with.
struct Registration {
    /// Registering is not signed.
    unsigned: Api,
    provider_id: String,
    static_secret: Secret,
    /// Set by the last registration.
    one_time_secret: Mutex<Option<Secret>>,
}

#[derive(Deserialize)]
struct Registered {
    expires: Timestamp,
    credentials: WireCredentials,
    secret: Option<Secret>,
}

#[derive(Deserialize)]
struct ShouldTerminate {
    terminate: bool,
    #[serde(default)]
    reason: String,
}

impl WorkerPool {
    /// A member that uses the credentials of `api`.
    pub fn new(api: Api, pool: String, worker_group: String, worker_id: String) -> Self {
        Self { api, pool, worker_group, worker_id, registration: None }
    }

    /// A member that registers, and gives `api` its credentials.
    ///
    /// # Errors
    ///
    /// Those of [`Api::new`].
    pub fn registering(self, provider_id: String, static_secret: Secret) -> Result<Self, InvalidConfig> {
        let unsigned = Api::new(ApiConfig::new(self.api.root_url(), None))?;
        let registration = Registration { unsigned, provider_id, static_secret, one_time_secret: Mutex::default() };
        Ok(Self { registration: Some(registration), ..self })
    }

    /// Makes a call; the credentials of a registration are used from then on.
    ///
    /// # Errors
    ///
    /// What to do next.
    ///
    /// # Cancel safety
    ///
    /// A registration may be lost.
    pub async fn call(&self, call: PoolCall) -> Result<PoolAnswer, CallError> {
        if call == PoolCall::CheckTermination {
            let path = self.path("/should-terminate");
            let reply = self.api.call(self.request("shouldWorkerTerminate", Method::GET, path)).await?;
            let ShouldTerminate { terminate, reason } = reply.json()?;
            if terminate {
                tracing::info!("the manager of the worker pool does not need this worker: {}", sanitize(&reason));
            }
            return Ok(if terminate { PoolAnswer::Terminate } else { PoolAnswer::Needed });
        }
        let no_secret = || CallError::new(Refusal::Rejected, "this worker has no static secret to register with");
        let registration = self.registration.as_ref().ok_or_else(no_secret)?;
        let mut body = json!({"workerPoolId": self.pool, "workerGroup": self.worker_group, "workerId": self.worker_id});
        let (api, operation, path) = if call == PoolCall::Register {
            body["providerId"] = registration.provider_id.clone().into();
            body["workerIdentityProof"] = json!({"staticSecret": registration.static_secret.reveal()});
            (&registration.unsigned, "registerWorker", "/worker/register")
        } else {
            let secret = registration.one_time_secret.lock().clone();
            body["secret"] = secret.as_ref().map(Secret::reveal).unwrap_or_default().into();
            (&self.api, "reregisterWorker", "/worker/reregister")
        };
        let reply = api.call(self.request(operation, Method::POST, path.to_owned()).body(body)).await?;
        let now = reply.date_or_now();
        let Registered { expires, credentials, secret } = reply.json()?;
        // The new secret first: the old one is used up.
        *registration.one_time_secret.lock() = secret;
        self.api.replace_credentials(credentials.parse().map_err(CallError::retry)?);
        tracing::info!(%expires, "registered in the worker pool {}", self.pool);
        Ok(PoolAnswer::Registered { usable_for: expires.duration_since(now).try_into().unwrap_or_default() })
    }

    /// Takes the worker out of the pool.
    ///
    /// # Errors
    ///
    /// `Rejected` if the provider of the pool does not remove workers.
    pub async fn remove(&self) -> Result<(), CallError> {
        self.api.call(self.request("removeWorker", Method::DELETE, self.path(""))).await?;
        Ok(())
    }

    /// Adds an error to those of the pool, which everyone can read.
    ///
    /// # Errors
    ///
    /// What to do next.
    pub async fn report_error(&self, title: &str, description: &str) -> Result<(), CallError> {
        let path = format!("/worker-pool-errors/{}", urlencoding::encode(&self.pool));
        let body = json!({
            "workerGroup": self.worker_group, "workerId": self.worker_id,
            "kind": "journeyman", "title": title, "description": description, "extra": {},
        });
        self.api.call(self.request("reportWorkerError", Method::POST, path).body(body)).await?;
        Ok(())
    }

    fn request(&self, operation: &str, method: Method, path: String) -> ApiRequest<'static> {
        let operation = format!("{operation} {}/{} of {}", self.worker_group, self.worker_id, self.pool);
        ApiRequest { service: "worker-manager", ..ApiRequest::to_queue(operation, method, path) }
    }

    fn path(&self, rest: &str) -> String {
        format!("/workers/{}/{}/{}{rest}", urlencoding::encode(&self.pool), self.worker_group, self.worker_id)
    }
}
