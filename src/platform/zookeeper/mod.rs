//! ZooKeeper: a session and its calls, and the mechanisms that Zuul builds on them, each readable by Zuul's own classes.
//!
//! A call names what it did and on which node when it fails. A node over the size limit is refused here, since a server
//! answers it by dropping the connection.

pub mod call;
pub mod client;
pub mod components;
pub mod decode;
pub mod event_queue;
pub mod frozen_job;
pub mod inspect;
pub mod janitor;
mod job_error;
pub mod job_queue;
pub mod json_object;
pub mod lock;
pub mod queue_counts;
pub mod semaphore;
pub mod shards;
pub mod submit;
pub mod watch;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use call::{Error, MultiError};
pub use client::{CreateMode, Stat, Write};

use crate::host::tls_config::client_config;
use client as zk;
use journeyman_domain::limits::ZOOKEEPER_LEFTOVER_AGE;

/// Whose layout a queue has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// A queue of merge jobs of a Zuul.
    ZuulMerger,
    /// A queue of builds of a Zuul.
    ZuulExecutor,
    /// One node a task.
    Native,
}

impl Dialect {
    /// The queue of a Zuul for this zone.
    pub fn usual_queue(self, zone: Option<&str>) -> String {
        match (self, zone) {
            (Self::ZuulMerger, _) => "/zuul/merger".to_owned(),
            (Self::ZuulExecutor, None) => "/zuul/executor/unzoned".to_owned(),
            (Self::ZuulExecutor, Some(zone)) => format!("/zuul/executor/zones/{zone}"),
            (Self::Native, _) => "/journeyman".to_owned(),
        }
    }
}

/// How an ensemble is reached.
#[derive(Debug, Clone)]
pub struct ConnectConfig {
    /// Hosts with ports, separated by commas.
    pub servers: String,
    /// The node below which every path lies, such as `/ci`.
    pub chroot: Option<String>,
    /// The files of mutual TLS; without them the connection is in the clear.
    pub tls: Option<TlsFiles>,
    /// How long the session outlives its connection; the server may shorten or extend it.
    pub session_timeout: Duration,
}

/// The files of mutual TLS, in PEM.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// The certificate authority of the servers. Their certificates need subject alternative names.
    pub ca: PathBuf,
    /// The client's certificate.
    pub certificate: PathBuf,
    /// The client's private key.
    pub key: PathBuf,
}

/// A session. Its ephemeral nodes exist until it is dropped or expires.
#[derive(Debug)]
pub struct Session {
    client: zk::Client,
}

impl Session {
    /// Connects and creates the chroot. The files of TLS are read anew each time.
    ///
    /// # Errors
    ///
    /// If no server answers in time, refuses the certificate, or the files cannot be read.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the session ends with its client.
    pub async fn connect(config: &ConnectConfig) -> Result<Self, Error> {
        let failed = |cause| Error::new("connect to", &config.servers, cause);
        let tls = match config.tls.clone() {
            Some(files) => Some(Arc::new(read_tls(files).await.map_err(failed)?)),
            None => None,
        };
        let (servers, session_timeout) = (config.servers.clone(), config.session_timeout);
        let options = zk::ConnectOptions { servers, session_timeout, tls, auth: None };
        let client = zk::Client::connect(&options).await.map_err(|cause| {
            let hint = "are host and port right, with TLS or without it, and do the certificates fit?";
            let zk::Error::Connect(why) = &cause else { return failed(cause) };
            failed(zk::Error::Connect(format!("{why}; {hint}")))
        })?;
        let Some(chroot) = &config.chroot else { return Ok(Self { client }) };
        Self { client: client.clone() }.ensure(chroot).await?;
        let client = client.chroot(chroot).map_err(|cause| Error::new("use", chroot, cause))?;
        Ok(Self { client })
    }

    /// The id that ephemeral nodes carry as their owner.
    pub fn id(&self) -> i64 {
        self.client.session_id()
    }

    /// The timeout that the server granted.
    pub fn timeout(&self) -> Duration {
        self.client.session_timeout()
    }

    /// When the last request was sent that was answered, on the boot clock: the session lasts for its timeout from then on.
    pub fn proved_at(&self) -> journeyman_domain::time::Instant {
        self.client.proved_at()
    }

    /// True once its ephemeral nodes are gone.
    pub fn is_ended(&self) -> bool {
        self.client.state().is_terminated()
    }

    /// Resolves when the session has expired or was closed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn ended(&self) {
        self.client.ended().await;
    }
}

/// What is young may belong to something that is still being written.
fn is_leftover(stat: &Stat, now_ms: i64) -> bool {
    u128::try_from(now_ms.saturating_sub(stat.ctime)).unwrap_or(0) > ZOOKEEPER_LEFTOVER_AGE.as_millis()
}

async fn read_tls(files: TlsFiles) -> Result<rustls::ClientConfig, zk::Error> {
    let reading = move || client_config(Some(&files.ca), Some((&files.certificate, &files.key)));
    let read = tokio::task::spawn_blocking(reading).await.map_err(|error| zk::Error::Connect(error.to_string()))?;
    read.map_err(|error| zk::Error::Connect(error.to_string()))
}
