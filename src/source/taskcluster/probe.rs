//! Read-only probes of a deployment: reachability, clock, credentials, scopes.

use jiff::Timestamp;
use reqwest::Method;
use serde::Deserialize;

use super::client_calls::pending_tasks_request;
use super::transport::{Api, ApiRequest, date_header};
use crate::source::CallError;

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

    /// currentScopes; without an auth service, a call that checks the signature before scopes.
    ///
    /// # Errors
    ///
    /// `Denied` if the credentials are rejected.
    pub async fn check_credentials(&self, task_queue: &str) -> Result<CredentialCheck, CallError> {
        let mut call = ApiRequest::to_queue("currentScopes".to_owned(), Method::GET, "/scopes/current".to_owned());
        call.service = "auth";
        match self.call(call).await {
            Ok(reply) => Ok(CredentialCheck::Scopes(reply.json::<Scopes>()?.scopes)),
            Err(failed) if matches!(failed.status, Some(401 | 403)) => Err(failed.error),
            Err(_) => match self.call(pending_tasks_request(task_queue)).await {
                Err(failed) if failed.status != Some(403) => Err(failed.error),
                Ok(_) | Err(_) => Ok(CredentialCheck::Accepted),
            },
        }
    }
}
