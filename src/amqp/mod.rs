//! The way to an AMQP 0-9-1 broker: its address, TLS, and one connection at a time.
//!
//! It knows nothing of requests, reports or queues. lapin's own recovery is not used: it gives no sign of a connection that
//! was lost and made again, so that what was delivered before is acknowledged in vain and runs twice. Who asks for a
//! connection here gets a new one, and knows it.

pub mod headers;
pub mod management;
mod short_string;
mod stream;
#[cfg(feature = "amqps")]
mod tls;
mod utf8_sanitizer;

use std::path::PathBuf;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{AsyncTcpStream, Connection, ConnectionProperties, ErrorKind};
use secrecy::{ExposeSecret as _, SecretString};

use crate::domain::refusal::Refusal;
use crate::limits::{AMQP_CONNECT_TIMEOUT, AMQP_HEARTBEAT};
use crate::redact;
use crate::source::CallError;

pub use lapin;
pub use short_string::{NameTooLong, to_short_string, to_short_string_or_none};
pub use utf8_sanitizer::REPLACEMENT_CHAR;

/// What it takes to reach a broker.
#[derive(Debug, Clone)]
pub struct BrokerConfig {
    /// `amqp://user:password@host:port/vhost`, or `amqps://`.
    pub uri: SecretString,
    /// What TLS needs besides this system's own certificates.
    pub tls: TlsFiles,
}

/// Files of TLS, all in PEM.
#[derive(Debug, Clone, Default)]
pub struct TlsFiles {
    /// Who may vouch for the broker. Where it is named, nobody else may.
    pub ca: Option<PathBuf>,
    /// Who we are.
    pub client: Option<ClientCertificate>,
}

/// A client certificate.
#[derive(Debug, Clone)]
pub struct ClientCertificate {
    /// It, and those that vouch for it.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Why settings cannot be used. Holds no password.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct InvalidBrokerConfig(String);

/// A broker that connections can be made to.
#[derive(Clone)]
pub struct Broker {
    uri: AMQPUri,
    /// Its address does not say how often each side has to be heard.
    is_default_heartbeat: bool,
    display_url: String,
    /// No log shows the password for as long as there is something that logs in with it.
    _redaction: Arc<redact::HiddenSecrets>,
    #[cfg(feature = "amqps")]
    tls: Option<tls::TlsClient>,
}

impl std::fmt::Debug for Broker {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Broker({})", self.display_url)
    }
}

impl Broker {
    /// Reads the address and the files.
    ///
    /// # Errors
    ///
    /// What cannot be used, without the address.
    pub fn new(settings: &BrokerConfig) -> Result<Self, InvalidBrokerConfig> {
        // The templates of one controller end it with a semicolon.
        let text = settings.uri.expose_secret().trim().trim_end_matches(';');
        // What is taken for a host would be asked for by name, and shown.
        if text.matches('@').count() > 1 {
            let what = "it has more than one `@`: in a user, a password or a vhost it is written %40";
            return Err(InvalidBrokerConfig(format!("the AMQP address cannot be read ({what}, `/` %2F and `:` %3A)")));
        }
        let mut uri: AMQPUri = text.parse().map_err(|what: String| {
            // One of the reasons quotes the address, and the password in it.
            let what = if what.starts_with("Invalid URL") { "it is no URL" } else { what.as_str() };
            InvalidBrokerConfig(format!("the AMQP address cannot be read ({what}); one is amqp://host:5672/vhost, with user:password@ before the host"))
        })?;
        // To the letter a slash and nothing after it is a vhost without a name. Nobody has one, and everybody means the usual one.
        if uri.vhost.is_empty() {
            "/".clone_into(&mut uri.vhost);
        }
        to_short_string("the vhost of the AMQP address", &uri.vhost)
            .map_err(|error| InvalidBrokerConfig(error.to_string()))?;
        let is_usual = uri.query.heartbeat.is_none();
        uri.query.heartbeat.get_or_insert(AMQP_HEARTBEAT);
        let shown = format!(
            "{}://{}:{}/{}",
            uri.scheme,
            uri.authority.host,
            uri.authority.port,
            urlencoding::encode(&uri.vhost)
        );
        #[cfg(feature = "amqps")]
        let tls = match uri.scheme {
            AMQPScheme::AMQPS => Some(tls::TlsClient::new(&uri.authority.host, &settings.tls)?),
            AMQPScheme::AMQP => None,
        };
        #[cfg(not(feature = "amqps"))]
        if uri.scheme == AMQPScheme::AMQPS {
            return Err(InvalidBrokerConfig("this build has no TLS for AMQP (feature `amqps`)".to_owned()));
        }
        Ok(Self {
            _redaction: Arc::new(redact::hide([uri.authority.userinfo.password.as_str()])),
            uri,
            is_default_heartbeat: is_usual,
            display_url: shown,
            #[cfg(feature = "amqps")]
            tls,
        })
    }

    /// The same, whose connections end when nothing was heard on them for about two times so many seconds, unless its address says
    /// how many.
    #[must_use]
    pub const fn with_default_heartbeat(mut self, seconds: u16) -> Self {
        if self.is_default_heartbeat {
            self.uri.query.heartbeat = Some(seconds);
        }
        self
    }

    /// The address without who we are.
    #[must_use]
    pub fn display_url(&self) -> &str {
        &self.display_url
    }

    /// Makes a connection, which the broker shows as `name`.
    ///
    /// # Errors
    ///
    /// [`Refusal::Denied`] where the broker does not let us in, [`Refusal::Retry`] otherwise.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn connect(&self, name: &str) -> Result<Connection, CallError> {
        let mut properties = ConnectionProperties::default().with_connection_name(LongString::from(name));
        for (key, value) in [("product", "journeyman"), ("version", env!("CARGO_PKG_VERSION"))] {
            properties = properties.with_client_property(key.into(), value.into());
        }
        let broker = self.clone();
        let wires = async move |uri: AMQPUri, _| {
            let stream = broker.open_stream(&uri).await.map_err(lapin::Error::from)?;
            Ok(AsyncTcpStream::Plain(stream))
        };
        let connecting = Connection::connector(self.uri.clone(), stream::runtime(), wires, properties);
        match tokio::time::timeout(AMQP_CONNECT_TIMEOUT, connecting).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(error)) => Err(self.call_error("connect", &error)),
            Err(_) => {
                Err(retry_error(format!("connect to {}: not done in {AMQP_CONNECT_TIMEOUT:?}", self.display_url)))
            }
        }
    }

    async fn open_stream(&self, uri: &AMQPUri) -> std::io::Result<stream::BrokerStream> {
        let stream = tokio::net::TcpStream::connect((uri.authority.host.as_str(), uri.authority.port)).await?;
        stream.set_nodelay(true)?;
        #[cfg(feature = "amqps")]
        if let Some(tls) = &self.tls {
            return tls.connect(stream).await;
        }
        Ok(stream.into())
    }

    /// What an error of lapin's asks for. The sentence names the operation and the broker.
    #[must_use]
    pub fn call_error(&self, operation: &str, error: &lapin::Error) -> CallError {
        CallError {
            refusal: refusal(error),
            message: format!("{operation} at {}: {}", self.display_url, error_text(error)),
        }
    }
}

/// Nothing definite was learnt.
#[must_use]
pub fn retry_error(what: String) -> CallError {
    CallError { refusal: Refusal::Retry { retry_after: None }, message: what }
}

fn refusal(error: &lapin::Error) -> Refusal {
    if reply_code(error) == Some(ACCESS_REFUSED) { Refusal::Denied } else { Refusal::Retry { retry_after: None } }
}

/// The reply code of a broker that does not let somebody in, or not do something.
pub const ACCESS_REFUSED: u16 = 403;
/// The reply code about what is not there.
pub const NOT_FOUND: u16 = 404;

/// The reply code about what is somebody else's alone.
pub const RESOURCE_LOCKED: u16 = 405;

/// The broker's own code and text, where it gave one.
#[must_use]
pub fn error_text(error: &lapin::Error) -> String {
    protocol_error(error).map_or_else(|| error.to_string(), |said| format!("{} {}", said.get_id(), said.get_message()))
}

/// The code that the broker gave, if it did.
#[must_use]
pub fn reply_code(error: &lapin::Error) -> Option<u16> {
    protocol_error(error).map(lapin::protocol::AMQPError::get_id)
}

fn protocol_error(error: &lapin::Error) -> Option<&lapin::protocol::AMQPError> {
    if let ErrorKind::ProtocolError(said) = error.kind() { Some(said) } else { None }
}

/// Whether the broker does not let anybody publish at present, for want of memory or disk.
#[must_use]
pub fn is_blocked(connection: &Connection) -> bool {
    connection.status().blocked()
}

/// Closes a connection in an orderly way, within `within`.
pub async fn close(connection: &Connection, within: Duration) {
    let closing = connection.close(lapin::protocol::constants::REPLY_SUCCESS, "OK".into());
    match tokio::time::timeout(within, closing).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(error = error_text(&error), "an AMQP connection was not closed in order"),
        Err(_) => tracing::debug!("an AMQP connection was not closed in time"),
    }
}

/// Something of a connection that is being set up: closed when it is dropped, unless somebody keeps it. lapin alone would hold
/// on to it, with whatever was asked for on it.
pub(crate) struct CloseOnDrop<T: StartClose>(Option<T>);

impl<T: StartClose> CloseOnDrop<T> {
    pub(crate) const fn new(what: T) -> Self {
        Self(Some(what))
    }

    pub(crate) fn disarm(mut self) -> Option<T> {
        self.0.take()
    }
}

impl<T: StartClose> Drop for CloseOnDrop<T> {
    fn drop(&mut self) {
        if let Some(what) = self.0.take() {
            what.start_close();
        }
    }
}

/// What can be told to close without waiting for it.
pub(crate) trait StartClose {
    fn start_close(&self);
}

impl StartClose for lapin::Channel {
    fn start_close(&self) {
        poll_once(self.close(lapin::protocol::constants::REPLY_SUCCESS, "OK".into()));
    }
}

impl StartClose for &Connection {
    fn start_close(&self) {
        poll_once(self.close(lapin::protocol::constants::REPLY_SUCCESS, "OK".into()));
    }
}

/// An order is given when it is first polled; what comes of it nobody waits for.
pub(crate) fn poll_once(what: impl Future) {
    let _sent = std::pin::pin!(what).poll(&mut Context::from_waker(Waker::noop()));
}

/// A table of headers.
#[must_use]
pub fn header_table(entries: impl IntoIterator<Item = (&'static str, AMQPValue)>) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in entries {
        table.insert(name.into(), value);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(uri: &str) -> Broker {
        let settings = BrokerConfig { uri: SecretString::from(uri), tls: TlsFiles::default() };
        Broker::new(&settings).unwrap()
    }

    #[test]
    fn an_address_without_a_vhost_means_the_usual_one() {
        for (uri, vhost) in [
            ("amqp://host", "/"),
            ("amqp://host/", "/"),
            ("amqp://host/;", "/"),
            ("amqp://host/?heartbeat=7", "/"),
            ("amqp://host?heartbeat=7", "/"),
            ("amqp://host/%2f", "/"),
            ("amqp://host/%2F", "/"),
            (" amqp://host:5672/%2f; ", "/"),
            ("amqp://host/name", "name"),
            ("amqp://host/a%2fb", "a/b"),
            ("amqp://host/name?heartbeat=7", "name"),
        ] {
            assert_eq!(read(uri).uri.vhost, vhost, "{uri}");
        }
        assert_eq!(read("amqp://host/").display_url(), "amqp://host:5672/%2F");
        assert_eq!(read("amqp://host/name").display_url(), "amqp://host:5672/name");
    }

    #[test]
    fn a_user_and_a_password_are_read_with_their_escapes_and_never_shown() {
        for (uri, user, password) in [
            ("amqp://host/", "guest", "guest"),
            ("amqp://me:secret@host/", "me", "secret"),
            ("amqp://m%65%40corp:p%2Fa%3as%25@host:5673/v", "me@corp", "p/a:s%"),
        ] {
            let broker = read(uri);
            let login = &broker.uri.authority.userinfo;
            assert_eq!((login.username.as_str(), login.password.as_str()), (user, password), "{uri}");
            let shown = format!("{} {broker:?}", broker.display_url());
            assert!(!shown.contains('@') && !shown.contains("secret") && !shown.contains("s%"), "{shown}");
        }
    }

    #[test]
    fn a_password_is_in_no_log_for_as_long_as_somebody_logs_in_with_it() {
        let line = "login with broker-canary/17 or broker-canary%2F17";
        let broker = read("amqp://me:broker-canary%2F17@host/");
        let kept = broker.clone();
        drop(broker);
        assert_eq!(redact::text(line), "login with [redacted] or [redacted]");
        drop(kept);
        assert_eq!(redact::text(line), line);
    }

    #[test]
    fn what_is_no_address_is_said_without_it() {
        for odd in [
            "",
            "host:5672",
            "me:secret@host",
            "http://me:secret@host/",
            "amqp://me:secret@host:notaport/",
            "amqp://me:se@cr/secret@host/",
        ] {
            let settings = BrokerConfig { uri: SecretString::from(odd), tls: TlsFiles::default() };
            let error = Broker::new(&settings).unwrap_err().to_string();
            assert!(error.contains("cannot be read") && !error.contains("secret"), "{odd}: {error}");
            assert_eq!(redact::text(&error), error, "what it should look like is shown");
        }
        let uri = SecretString::from(format!("amqp://me:secret@host/{}", "v".repeat(256)));
        let error = Broker::new(&BrokerConfig { uri, tls: TlsFiles::default() }).unwrap_err().to_string();
        assert_eq!(error, "the vhost of the AMQP address has 256 bytes, and AMQP has room for 255");
    }
}
