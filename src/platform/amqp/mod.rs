//! Connections to an AMQP 0-9-1 broker: address, TLS, login.
//!
//! lapin's own recovery is not used. It reconnects silently, so that deliveries of the lost connection are acknowledged in vain and
//! run twice. A caller of [`Broker::connect`] knows that its connection is a new one.

pub mod delay;
pub mod headers;
pub mod management;
mod short_string;
mod stream;
mod tls;
mod topology;
mod utf8_sanitizer;

use std::path::PathBuf;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use lapin::options::{BasicConsumeOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};
use lapin::uri::{AMQPScheme, AMQPUri, AMQPUserInfo};
use lapin::{AsyncTcpStream, Channel, Connection, ConnectionProperties, Consumer, ErrorKind};
use parking_lot::{Mutex, RwLock};
use secrecy::{ExposeSecret as _, SecretString};

use crate::http::client::tls_hint;
use crate::redact;
use journeyman_domain::limits::{AMQP_CALL_TIMEOUT, AMQP_HEARTBEAT};
use journeyman_domain::refusal::{CallError, Refusal};

pub use lapin;
pub use short_string::{NameTooLong, to_short_string, to_short_string_or_none};
pub use topology::{
    bind_queue, declare_exchange, declare_own_queue, declare_queue, find_exchange, find_queue, find_queue_on,
};
use utf8_sanitizer::Utf8Sanitizer;
pub use utf8_sanitizer::{REPLACEMENT_CHAR, Release};

/// Reads the address of a broker again; `None` if it cannot be read.
pub type RereadUri = Arc<dyn Fn() -> Option<SecretString> + Send + Sync>;

/// How to reach a broker.
#[derive(Clone)]
pub struct BrokerConfig {
    /// `amqp://user:password@host:port/vhost`, or `amqps://`.
    pub uri: SecretString,
    /// Called before each connection: its user and password replace those of `uri`. The files of TLS are read then too.
    pub reread_uri: Option<RereadUri>,
    /// Certificates (PEM) of the CAs that may sign the broker's certificate; the system's CAs otherwise.
    pub ca: Option<PathBuf>,
    /// The client certificate, for TLS.
    pub client: Option<ClientCertificate>,
}

impl BrokerConfig {
    /// Without TLS files.
    pub fn new(uri: impl Into<SecretString>) -> Self {
        Self { uri: uri.into(), reread_uri: None, ca: None, client: None }
    }
}

/// A client certificate (PEM).
#[derive(Debug, Clone)]
pub struct ClientCertificate {
    /// The certificate and its intermediates.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// A broker configuration that cannot be used. Holds no password.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct InvalidBrokerConfig(String);

/// A broker to connect to.
#[derive(Clone)]
pub struct Broker {
    uri: AMQPUri,
    /// The heartbeat in seconds, where the address sets none.
    default_heartbeat: u16,
    display_url: String,
    settings: BrokerConfig,
    login: Arc<RwLock<Login>>,
    release: Arc<Mutex<Option<Release>>>,
}

/// User and password, redacted in all logs for as long as a clone of the broker exists.
struct Login {
    /// The address that they are from.
    text: SecretString,
    user: AMQPUserInfo,
    _redaction: redact::HiddenSecrets,
}

impl Login {
    fn new(text: SecretString, uri: &AMQPUri) -> Self {
        let user = uri.authority.userinfo.clone();
        Self { _redaction: redact::hide([user.password.as_str()]), text, user }
    }
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
    /// [`InvalidBrokerConfig`], without the address.
    pub fn new(settings: &BrokerConfig) -> Result<Self, InvalidBrokerConfig> {
        let uri = parse_uri(&settings.uri)?;
        let display_url = display_url(&uri);
        if uri.scheme == AMQPScheme::AMQPS {
            tls::TlsClient::new(&uri.authority.host, settings)?;
        }
        let login = Arc::new(RwLock::new(Login::new(settings.uri.clone(), &uri)));
        let (settings, release) = (settings.clone(), Arc::default());
        Ok(Self { uri, default_heartbeat: AMQP_HEARTBEAT, display_url, settings, login, release })
    }

    /// Sets the heartbeat unless the address does. A connection ends after about two heartbeats without traffic.
    pub const fn with_default_heartbeat(mut self, seconds: u16) -> Self {
        self.default_heartbeat = seconds;
        self
    }

    /// The same broker, in another vhost.
    ///
    /// # Errors
    ///
    /// Fails if the name is too long.
    pub fn in_vhost(mut self, vhost: &str) -> Result<Self, NameTooLong> {
        to_short_string("the name of a vhost", vhost)?;
        vhost.clone_into(&mut self.uri.vhost);
        self.display_url = display_url(&self.uri);
        Ok(self)
    }

    pub fn vhost(&self) -> &str {
        &self.uri.vhost
    }

    /// The release that the broker named at the last connection.
    pub fn release(&self) -> Option<Release> {
        *self.release.lock()
    }

    /// The name that was read last.
    pub fn user(&self) -> String {
        self.user_info().username
    }

    /// The address without user and password.
    pub fn display_url(&self) -> &str {
        &self.display_url
    }

    /// Opens a connection, named `name` at the broker.
    ///
    /// # Errors
    ///
    /// [`Refusal::Denied`] where the broker rejects the login, [`Refusal::Retry`] otherwise.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn connect(&self, name: &str) -> Result<Connection, CallError> {
        let mut properties = ConnectionProperties::default().with_connection_name(LongString::from(name));
        for (key, value) in [("product", "journeyman"), ("version", env!("CARGO_PKG_VERSION"))] {
            properties = properties.with_client_property(key.into(), value.into());
        }
        self.reread_login();
        let broker = self.clone();
        let open = async move |uri: AMQPUri, _| {
            let stream = broker.open_stream(&uri).await.map_err(lapin::Error::from)?;
            Ok(AsyncTcpStream::Plain(stream))
        };
        let mut uri = self.uri.clone();
        uri.authority.userinfo = self.user_info();
        uri.query.heartbeat.get_or_insert(self.default_heartbeat);
        let connecting = Box::pin(Connection::connector(uri, stream::runtime(), open, properties));
        self.bounded_or_code("connect", connecting).await.map_err(|(mut error, code)| {
            if code == Some(NOT_ALLOWED) {
                error.message += "; does the virtual host at the end of the broker's URI exist (`rabbitmqctl add_vhost` \
                                  creates one), and may the user enter it?";
            }
            error
        })
    }

    fn reread_login(&self) {
        let Some(text) = self.settings.reread_uri.as_ref().and_then(|reread| reread()) else { return };
        match parse_uri(&text) {
            Ok(uri) if uri.authority.userinfo == self.login.read().user => {}
            Ok(uri) => *self.login.write() = Login::new(text, &uri),
            Err(error) => tracing::warn!("keeping the login of the broker in use: {error}"),
        }
    }

    /// The address that was read last, with user and password.
    pub fn uri(&self) -> SecretString {
        self.login.read().text.clone()
    }

    /// User and password that were read last.
    fn user_info(&self) -> AMQPUserInfo {
        self.login.read().user.clone()
    }

    /// Runs a call for at most [`AMQP_CALL_TIMEOUT`]. An error names the operation and the broker.
    pub async fn bounded<T>(
        &self,
        operation: &str,
        call: impl Future<Output = lapin::Result<T>>,
    ) -> Result<T, CallError> {
        let timed_out =
            || CallError::retry(format!("{operation} at {}: timed out after {AMQP_CALL_TIMEOUT:?}", self.display_url));
        let ended = tokio::time::timeout(AMQP_CALL_TIMEOUT, call).await.map_err(|_| timed_out())?;
        ended.map_err(|error| self.call_error(operation, &error))
    }

    /// Bounds a call as [`Broker::bounded`] does; an error has the broker's reply code.
    pub async fn bounded_or_code<T>(
        &self,
        operation: &str,
        call: impl Future<Output = lapin::Result<T>>,
    ) -> Result<T, (CallError, Option<u16>)> {
        let mut code = None;
        let watched = async { call.await.inspect_err(|error| code = reply_code(error)) };
        let ended = self.bounded(operation, watched).await;
        ended.map_err(|error| (error, code))
    }

    async fn open_stream(&self, uri: &AMQPUri) -> std::io::Result<stream::BrokerStream> {
        let stream = tokio::net::TcpStream::connect((uri.authority.host.as_str(), uri.authority.port)).await?;
        stream.set_nodelay(true)?;
        let transport = if uri.scheme == AMQPScheme::AMQPS {
            let tls = tls::TlsClient::new(&uri.authority.host, &self.settings).map_err(std::io::Error::other)?;
            tls.connect(stream).await?
        } else {
            stream::Transport::Left(stream)
        };
        Ok(stream::BrokerStream::new(transport, Utf8Sanitizer::new(Arc::clone(&self.release))))
    }

    /// Converts an error of lapin's; the message names the operation and the broker.
    pub fn call_error(&self, operation: &str, error: &lapin::Error) -> CallError {
        CallError::new(refusal(error), format!("{operation} at {}: {}", self.display_url, error_text(error)))
    }
}

fn display_url(uri: &AMQPUri) -> String {
    let (host, port) = (&uri.authority.host, uri.authority.port);
    format!("{}://{host}:{port}/{}", uri.scheme, urlencoding::encode(&uri.vhost))
}

fn parse_uri(text: &SecretString) -> Result<AMQPUri, InvalidBrokerConfig> {
    // osrdyne's templates end it with a semicolon.
    let text = text.expose_secret().trim().trim_end_matches(';');
    // The second part would be taken for a host name, resolved, and logged.
    if text.matches('@').count() > 1 {
        let what = "it has more than one `@`: in a user, a password or a vhost write %40";
        return Err(InvalidBrokerConfig(format!("invalid AMQP address ({what}, %2F for `/` and %3A for `:`)")));
    }
    let mut uri: AMQPUri = text.parse().map_err(|what: String| {
        // One of these messages quotes the address, and the password in it.
        let what = if what.starts_with("Invalid URL") { "not a URL" } else { what.as_str() };
        InvalidBrokerConfig(format!(
            "invalid AMQP address ({what}); the format is amqp://host:5672/vhost, with user:password@ before the host if needed"
        ))
    })?;
    // Strictly, a trailing slash is a vhost with an empty name; in practice it means the default vhost.
    if uri.vhost.is_empty() {
        "/".clone_into(&mut uri.vhost);
    }
    to_short_string("the vhost of the AMQP address", &uri.vhost)
        .map_err(|error| InvalidBrokerConfig(error.to_string()))?;
    Ok(uri)
}

/// What the caller of a call that failed so must do next.
pub fn refusal(error: &lapin::Error) -> Refusal {
    if reply_code(error) == Some(ACCESS_REFUSED) { Refusal::Denied } else { Refusal::Retry { retry_after: None } }
}

/// Reply code: no permission.
pub const ACCESS_REFUSED: u16 = 403;
/// Reply code: no such queue, exchange or vhost.
pub const NOT_FOUND: u16 = 404;
/// Reply code: an exclusive queue of another connection.
pub const RESOURCE_LOCKED: u16 = 405;
/// Reply code: it exists with other arguments, is in use, or a limit is reached.
pub const PRECONDITION_FAILED: u16 = 406;
/// Reply codes with which the broker closes a connection because of a call that it does not allow or implement.
pub const CALL_CLOSES_CONNECTION: [u16; 3] = [NOT_ALLOWED, 540, 541];
const NOT_ALLOWED: u16 = 530;

/// The broker's reply code and text, or lapin's own text.
pub fn error_text(error: &lapin::Error) -> String {
    match protocol_error(error) {
        Some(fault) => format!("{} {}", fault.get_id(), fault.get_message()),
        None => {
            let text = error.to_string();
            let hint = tls_hint(&text);
            text + hint
        }
    }
}

pub fn reply_code(error: &lapin::Error) -> Option<u16> {
    protocol_error(error).map(lapin::protocol::AMQPError::get_id)
}

fn protocol_error(error: &lapin::Error) -> Option<&lapin::protocol::AMQPError> {
    if let ErrorKind::ProtocolError(fault) = error.kind() { Some(fault) } else { None }
}

/// Closes a connection cleanly, within `within`.
pub async fn close(connection: &Connection, within: Duration) {
    let closing = connection.close(lapin::protocol::constants::REPLY_SUCCESS, "OK".into());
    match tokio::time::timeout(within, closing).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(error = error_text(&error), "an AMQP connection was not closed cleanly"),
        Err(_) => tracing::debug!("an AMQP connection was not closed in time"),
    }
}

/// Opens a channel with publisher confirms.
pub async fn confirm_channel(connection: &Connection) -> lapin::Result<Channel> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(channel)
}

/// Starts a consumer. Closes the channel if it is dropped meanwhile: lapin would keep the consumer, which takes messages in vain.
pub async fn consume(
    channel: &Channel,
    queue: ShortString,
    tag: ShortString,
    options: BasicConsumeOptions,
) -> lapin::Result<Consumer> {
    consume_with(channel, queue, tag, options, FieldTable::default()).await
}

/// Starts a consumer with arguments, as [`consume`].
pub async fn consume_with(
    channel: &Channel,
    queue: ShortString,
    tag: ShortString,
    options: BasicConsumeOptions,
    arguments: FieldTable,
) -> lapin::Result<Consumer> {
    struct CloseOnDrop<'a>(Option<&'a Channel>);
    impl Drop for CloseOnDrop<'_> {
        fn drop(&mut self) {
            if let Some(channel) = self.0 {
                poll_once(channel.close(lapin::protocol::constants::REPLY_SUCCESS, "OK".into()));
            }
        }
    }
    let mut guard = CloseOnDrop(Some(channel));
    let consumer = channel.basic_consume(queue, tag, options, arguments).await?;
    guard.0 = None;
    Ok(consumer)
}

/// Sends a frame without waiting for the reply: lapin sends on the first poll.
pub fn poll_once(what: impl Future) {
    let _sent = std::pin::pin!(what).poll(&mut Context::from_waker(Waker::noop()));
}

/// A text as the value of a header or an argument.
pub fn text_value(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

pub fn header_table(entries: impl IntoIterator<Item = (&'static str, AMQPValue)>) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in entries {
        table.insert(name.into(), value);
    }
    table
}

/// Copies properties of a message: what a message keeps that is published again, and the ones that are named.
#[macro_export]
macro_rules! copy_properties {
    ($from:expr => $to:expr $(, $get:ident $with:ident)*) => {
        $crate::copy_properties!(
            @ $from, $to, content_type with_content_type, content_encoding with_content_encoding,
            correlation_id with_correlation_id, reply_to with_reply_to, message_id with_message_id,
            timestamp with_timestamp, kind with_type, app_id with_app_id $(, $get $with)*
        )
    };
    (@ $from:expr, $to:expr, $($get:ident $with:ident),*) => {{
        let mut to: $crate::amqp::lapin::BasicProperties = $to;
        $(if let Some(value) = $from.$get() { to = to.$with(value.clone()); })*
        to
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(uri: &str) -> Broker {
        Broker::new(&BrokerConfig::new(uri)).unwrap()
    }

    #[test]
    fn an_address_without_a_vhost_has_the_default_one() {
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
    fn user_and_password_are_unescaped_and_never_displayed() {
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
    fn a_password_is_redacted_while_its_broker_exists() {
        let line = "login with broker-canary/17 or broker-canary%2F17";
        let broker = read("amqp://me:broker-canary%2F17@host/");
        let kept = broker.clone();
        drop(broker);
        assert_eq!(redact::text(line), "login with [redacted] or [redacted]");
        drop(kept);
        assert_eq!(redact::text(line), line);
    }

    #[test]
    fn an_invalid_address_is_reported_without_the_password() {
        for invalid in [
            "",
            "host:5672",
            "me:secret@host",
            "http://me:secret@host/",
            "amqp://me:secret@host:notaport/",
            "amqp://me:se@cr/secret@host/",
        ] {
            let error = Broker::new(&BrokerConfig::new(invalid)).unwrap_err().to_string();
            assert!(error.contains("invalid AMQP address") && !error.contains("secret"), "{invalid}: {error}");
            assert_eq!(redact::text(&error), error, "the format is not redacted");
        }
        let uri = format!("amqp://me:secret@host/{}", "v".repeat(256));
        let error = Broker::new(&BrokerConfig::new(uri)).unwrap_err().to_string();
        assert_eq!(error, "the vhost of the AMQP address has 256 bytes, and AMQP has room for 255");
    }
}
