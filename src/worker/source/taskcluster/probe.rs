//! Read-only probes of a deployment: reachability, clock, credentials, scopes.

use jiff::Timestamp;
use reqwest::Method;
use serde::Deserialize;
use tokio::time::timeout;

use super::Taskcluster;
use super::transport::{Api, ApiRequest, date_header};
use crate::source::CallError;
use journeyman_domain::limits::{DOCTOR_CALL_TIMEOUT, QUARANTINE_CHECK_INTERVAL};
use journeyman_domain::time::Instant;
use journeyman_platform::host::clock::Clock;

/// What a deployment says about the credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CredentialCheck {
    /// The scopes of the credentials.
    Scopes(Vec<String>),
    /// The signature is valid; the scopes are unknown.
    Accepted,
}

#[derive(Deserialize)]
struct Scopes {
    scopes: Vec<String>,
}

impl Api {
    /// ping of the queue service. Returns the time of its clock.
    ///
    /// # Errors
    ///
    /// It does not respond, or not as expected.
    pub async fn ping(&self) -> Result<Option<Timestamp>, CallError> {
        let response =
            self.send(ApiRequest::to_queue("ping of the queue".to_owned(), Method::GET, "/ping".to_owned())).await?;
        Ok(date_header(&response))
    }

    /// currentScopes; without an auth service or the scope for it, what a call says that checks the signature before scopes.
    ///
    /// # Errors
    ///
    /// `Denied` if the credentials are rejected.
    pub async fn check_credentials(&self, task_queue: &str) -> Result<CredentialCheck, CallError> {
        let mut call = ApiRequest::to_queue("currentScopes".to_owned(), Method::GET, "/scopes/current".to_owned());
        call.service = "auth";
        match self.call(call).await {
            Ok(reply) => Ok(CredentialCheck::Scopes(reply.json::<Scopes>()?.scopes)),
            Err(failed) if failed.status == Some(401) => Err(failed.error),
            Err(failed) if failed.status == Some(403) => Ok(CredentialCheck::Accepted),
            Err(_) => match self.pending_tasks_reply(task_queue).await {
                Err(failed) if failed.status != Some(403) => Err(failed.error),
                Ok(_) | Err(_) => Ok(CredentialCheck::Accepted),
            },
        }
    }

    /// getWorker: until when the worker is in quarantine.
    ///
    /// # Errors
    ///
    /// `Gone` if the queue does not know the worker yet, `Denied` without the scope
    /// `queue:get-worker:<task queue>/<worker group>/<worker id>`.
    pub async fn quarantined_until(
        &self,
        task_queue: &str,
        worker_group: &str,
        worker_id: &str,
    ) -> Result<Option<Timestamp>, CallError> {
        let (provisioner, worker_type) = task_queue.split_once('/').unwrap_or((task_queue, ""));
        let path = format!(
            "/provisioners/{}/worker-types/{}/workers/{}/{}",
            urlencoding::encode(provisioner),
            urlencoding::encode(worker_type),
            urlencoding::encode(worker_group),
            urlencoding::encode(worker_id)
        );
        let call = ApiRequest::to_queue(format!("getWorker {worker_group}/{worker_id}"), Method::GET, path);
        let reply: WireWorker = self.call(call).await?.json()?;
        Ok(reply.quarantine_until.filter(|until| *until > Timestamp::now()))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireWorker {
    quarantine_until: Option<Timestamp>,
}

/// What the source knows of its worker's quarantine.
#[derive(Default)]
pub(super) struct QuarantineCheck {
    checked_at: Option<Instant>,
    pub(super) until: Option<Timestamp>,
}

impl Taskcluster {
    /// Asks now and then why the queue gives no tasks. Without the scope for it, the answer stays unknown.
    pub(super) async fn check_quarantine(&self) {
        let now = Clock::boot().now();
        let before = {
            let mut known = self.quarantine.lock();
            if known.checked_at.is_some_and(|at| now.since(at) < QUARANTINE_CHECK_INTERVAL) {
                return;
            }
            known.checked_at = Some(now);
            known.until
        };
        let worker = &self.service.worker_identity;
        let asked = self.service.api.quarantined_until(&self.service.task_queue, &worker.group, &worker.id);
        let until = match timeout(DOCTOR_CALL_TIMEOUT, asked).await {
            Ok(Ok(until)) => until,
            Ok(Err(error)) => return tracing::debug!("cannot ask for quarantine: {}", error.message),
            Err(_) => return,
        };
        self.quarantine.lock().until = until;
        match until {
            Some(until) if before != Some(until) => {
                tracing::warn!("the queue has this worker in quarantine until {until} and gives it no tasks");
            }
            None if before.is_some() => tracing::info!("this worker is no longer in quarantine"),
            Some(_) | None => {}
        }
    }
}
