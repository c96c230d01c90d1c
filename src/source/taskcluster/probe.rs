//! Questions to a deployment that change nothing there: is it up, what time does it have, who are we, what may we do.

use jiff::Timestamp;
use reqwest::Method;
use reqwest::tls::TlsInfo;
use serde::Deserialize;
use serde_json::Value;
use x509_cert::Certificate;
use x509_cert::der::Decode as _;

use super::api::{Api, Call, Service, date, segment};
use crate::source::Refused;

/// An answer to a ping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pong {
    /// The service's clock.
    pub date: Option<Timestamp>,
    /// When its certificate ends; `None` without TLS.
    pub certificate_ends: Option<Timestamp>,
}

/// What a service says of the one who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Known {
    /// These are our scopes.
    Scopes(Vec<String>),
    /// The signature is good; what it is good for cannot be asked.
    Recognized,
}

/// What a service says of a task queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pending {
    /// About so many tasks wait in it.
    About(u64),
    /// We may not ask, which no worker has to.
    MayNotAsk,
}

#[derive(Deserialize)]
struct Scopes {
    scopes: Vec<String>,
}

impl Api {
    /// ping of the queue.
    ///
    /// # Errors
    ///
    /// Where it does not answer as it should.
    pub async fn ping(&self) -> Result<Pong, Refused> {
        let response = self.send(Call::queue("ping of the queue".to_owned(), Method::GET, "/ping".to_owned())).await?;
        let certificate = response.extensions().get::<TlsInfo>().and_then(TlsInfo::peer_certificate);
        Ok(Pong { date: date(&response), certificate_ends: certificate.and_then(end_of) })
    }

    /// currentScopes, and where nobody answers that a call whose signature is judged before its scopes.
    ///
    /// # Errors
    ///
    /// `Denied` where the credentials are not accepted.
    pub async fn who_are_we(&self, task_queue: &str) -> Result<Known, Refused> {
        let mut call = Call::queue("currentScopes".to_owned(), Method::GET, "/scopes/current".to_owned());
        call.service = Service::Auth;
        match self.call(call).await {
            Ok(reply) => Ok(Known::Scopes(reply.json::<Scopes>()?.scopes)),
            Err(failed) if matches!(failed.status, Some(401 | 403)) => Err(failed.refused),
            Err(_) => self.pending(task_queue).await.map(|_| Known::Recognized),
        }
    }

    /// pendingTasks of a task queue.
    ///
    /// # Errors
    ///
    /// `Denied` where the credentials are not accepted, `Rejected` where there can be no such queue.
    pub async fn pending(&self, task_queue: &str) -> Result<Pending, Refused> {
        let path = format!("/pending/{}", segment(task_queue));
        let call = Call::queue(format!("pendingTasks of {task_queue}"), Method::GET, path);
        match self.call(call).await {
            Ok(reply) => {
                let reply: Value = reply.json()?;
                Ok(Pending::About(reply.get("pendingTasks").and_then(Value::as_u64).unwrap_or(0)))
            }
            Err(failed) if failed.status == Some(403) => Ok(Pending::MayNotAsk),
            Err(failed) => Err(failed.refused),
        }
    }
}

/// When a certificate ends.
fn end_of(der: &[u8]) -> Option<Timestamp> {
    let certificate = Certificate::from_der(der).ok()?;
    let end = certificate.tbs_certificate().validity().not_after.to_unix_duration();
    Timestamp::from_second(i64::try_from(end.as_secs()).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_certificate_is_read() {
        let der = include_bytes!("../../../fixtures/tls/ends-2031.der");
        assert_eq!(end_of(der), Some("2031-02-03T04:05:06Z".parse().unwrap()));
        assert_eq!(end_of(b"nonsense"), None);
    }
}
