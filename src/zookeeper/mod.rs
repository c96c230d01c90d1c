//! ZooKeeper: a session and its calls, and the mechanisms that Zuul builds on them, each readable by Zuul's own classes.
//!
//! A call names what it did and on which node when it fails. A node over the size limit is refused here, since a server
//! answers it by dropping the connection.

pub mod call;
pub mod components;
pub mod decode;
pub mod event_queue;
pub mod inspect;
pub mod janitor;
pub mod job_queue;
pub mod json_object;
pub mod lock;
pub mod map;
pub mod queue_counts;
pub mod semaphore;
pub mod shards;
pub mod submit;
pub mod watch;

use std::path::PathBuf;
use std::time::Duration;

use zookeeper_client as zk;
use zookeeper_client::{SessionState, TlsOptions};

pub use call::{Error, MultiError, Write};

use journeyman_domain::limits::{ZOOKEEPER_CONNECT_TIMEOUT, ZOOKEEPER_CREDENTIALS_BYTES_MAX};

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
        let mut connector = zk::Client::connector().with_session_timeout(config.session_timeout);
        if let Some(files) = &config.tls {
            connector = connector.with_tls(tls_options(files).await.map_err(failed)?);
        }
        let connecting = async {
            match config.tls {
                Some(_) => connector.secure_connect(&config.servers).await,
                None => connector.connect(&config.servers).await,
            }
        };
        let connected = tokio::time::timeout(ZOOKEEPER_CONNECT_TIMEOUT, connecting).await;
        let no_answer = || {
            let why = "no answer; are host and port right, with TLS or without it, and do the certificates fit?";
            Err(zk::Error::UnexpectedError(why.to_owned()))
        };
        let client = connected.unwrap_or_else(|_| no_answer()).map_err(failed)?;
        let Some(chroot) = &config.chroot else { return Ok(Self { client }) };
        Self { client: client.clone() }.ensure(chroot).await?;
        let client = client.chroot(chroot.clone());
        client.map(|client| Self { client }).map_err(|_| Error::new("use", chroot, zk::Error::BadArguments(&"chroot")))
    }

    /// The id that ephemeral nodes carry as their owner.
    pub fn id(&self) -> i64 {
        self.client.session_id().0
    }

    /// The timeout that the server granted.
    pub fn timeout(&self) -> Duration {
        self.client.session_timeout()
    }

    /// Whether its ephemeral nodes are gone.
    pub fn is_ended(&self) -> bool {
        self.client.state().is_terminated()
    }

    /// Resolves when the session has expired or was closed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn ended(&self) {
        let mut states = self.client.state_watcher();
        let mut state = states.state();
        while !state.is_terminated() {
            state = states.changed().await;
        }
    }

    /// Whether a server answers at the moment.
    pub fn is_connected(&self) -> bool {
        self.client.state() == SessionState::SyncConnected
    }
}

async fn tls_options(files: &TlsFiles) -> Result<TlsOptions, zk::Error> {
    crate::host::crypto_provider::install_crypto_provider();
    let (certificate, key) = (read(&files.certificate).await?, read(&files.key).await?);
    TlsOptions::new().with_pem_ca(&read(&files.ca).await?)?.with_pem_identity(&certificate, &key)
}

/// The error names the file, never its content.
async fn read(path: &std::path::Path) -> Result<String, zk::Error> {
    let failed = |why: String| zk::Error::UnexpectedError(format!("{}: {why}", path.display()));
    let bytes = tokio::fs::metadata(path).await.map_err(|error| failed(error.to_string()))?.len();
    if bytes > ZOOKEEPER_CREDENTIALS_BYTES_MAX {
        return Err(failed(format!("{bytes} bytes are no certificate or key")));
    }
    tokio::fs::read_to_string(path).await.map_err(|error| failed(error.to_string()))
}
