//! The roles that a console shows: those of its own process, and others at their addresses, which it asks in the background, so that
//! no page waits for one.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use reqwest::Client;
use reqwest::header::AUTHORIZATION;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout};
use url::Url;

use journeyman_domain::limits::{
    CONSOLE_ANSWER_BYTES_MAX, CONSOLE_ASK_INTERVAL, CONSOLE_ASK_TIMEOUT, HTTP_SNAPSHOT_TIMEOUT,
};
use journeyman_platform::http::client::{BodyError, read_body, root_cause};
use journeyman_platform::settings::values::Secret;
use journeyman_worker::source::taskcluster::Api;

/// Takes a snapshot; `None` once the worker or controller has exited.
pub type SnapshotFn<S> = dyn Fn() -> Pin<Box<dyn Future<Output = Option<S>> + Send>> + Send + Sync;

/// A queue, which is asked for each page.
pub struct QueueTarget {
    /// The first part of the paths of its pages.
    pub name: String,
    pub api: Api,
}

/// The address of a role.
#[derive(Clone)]
pub struct Address {
    pub name: String,
    /// Ends with a slash.
    pub url: Url,
    pub token: Option<Secret>,
    pub http: Client,
}

impl Address {
    /// # Errors
    ///
    /// What failed, for a person; never the token.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, String> {
        let url = self.url.join(path).map_err(|error| error.to_string())?;
        let mut request = self.http.get(url).timeout(CONSOLE_ASK_TIMEOUT);
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {}", token.reveal()));
        }
        let at = || format!("{} at {}", self.name, self.url);
        let mut response = request.send().await.map_err(|error| format!("{}: {}", at(), root_cause(&error)))?;
        if !response.status().is_success() {
            return Err(format!("{}: it answered {}", at(), response.status()));
        }
        let body = read_body(&mut response, CONSOLE_ANSWER_BYTES_MAX).await.map_err(|error| match error {
            BodyError::TooLong => format!("{}: its answer is larger than {CONSOLE_ANSWER_BYTES_MAX} bytes", at()),
            BodyError::Connection(error) => format!("{}: {}", at(), root_cause(&error)),
        })?;
        serde_json::from_slice(&body).map_err(|error| format!("{}: its answer cannot be read: {error}", at()))
    }
}

/// A role.
pub enum Target<S> {
    Own(Arc<SnapshotFn<S>>),
    Remote(Arc<Remote<S>>),
}

/// A role elsewhere, and what it answered last.
pub struct Remote<S> {
    pub address: Address,
    path: &'static str,
    latest: Mutex<Latest<S>>,
}

struct Latest<S> {
    status: Option<(Instant, Arc<S>)>,
    error: Option<String>,
}

/// What is known of a role.
pub struct Reading<S> {
    pub status: Option<Arc<S>>,
    /// How old the status is, if it is not of now.
    pub age: Option<Duration>,
    pub error: Option<String>,
}

impl<S> Target<S> {
    pub fn remote(address: Address, path: &'static str) -> Self {
        let latest = Latest { status: None, error: Some(format!("{} has not answered yet", address.name)) };
        Self::Remote(Arc::new(Remote { address, path, latest: Mutex::new(latest) }))
    }

    pub async fn read(&self) -> Reading<S> {
        match self {
            Self::Own(snapshot) => match timeout(HTTP_SNAPSHOT_TIMEOUT, snapshot()).await {
                Ok(Some(status)) => Reading { status: Some(Arc::new(status)), age: None, error: None },
                Ok(None) => Reading { status: None, age: None, error: Some("it has exited".to_owned()) },
                Err(_) => {
                    let error = format!("it did not answer within {HTTP_SNAPSHOT_TIMEOUT:?}");
                    Reading { status: None, age: None, error: Some(error) }
                }
            },
            Self::Remote(remote) => {
                let latest = remote.latest.lock();
                let (at, status) = latest.status.clone().unzip();
                Reading { status, age: at.map(|at| at.elapsed()), error: latest.error.clone() }
            }
        }
    }

    /// True for a role of this process, or one that is asked for each page.
    pub fn is_own(&self) -> bool {
        matches!(self, Self::Own(_))
    }

    /// The address that a console sends orders to.
    pub fn address(&self) -> Option<&Address> {
        match self {
            Self::Own(_) => None,
            Self::Remote(remote) => Some(&remote.address),
        }
    }
}

impl<S: DeserializeOwned> Target<S> {
    /// Asks a role elsewhere again and again; does not end.
    pub async fn watch(&self) {
        let Self::Remote(remote) = self else { return };
        loop {
            let answer = remote.address.get(remote.path).await;
            {
                let mut latest = remote.latest.lock();
                latest.error = answer.as_ref().err().cloned();
                if let Ok(status) = answer {
                    latest.status = Some((Instant::now(), Arc::new(status)));
                }
            }
            sleep(CONSOLE_ASK_INTERVAL).await;
        }
    }
}

impl<S> Reading<S> {
    /// Why nothing is known.
    pub fn gone(&self) -> Option<&str> {
        self.error.as_deref().filter(|_| self.status.is_none())
    }
}

/// Reads all targets at the same time.
pub async fn read_all<S>(targets: &[Target<S>]) -> Vec<Reading<S>> {
    join_all(targets.iter().map(Target::read)).await
}
