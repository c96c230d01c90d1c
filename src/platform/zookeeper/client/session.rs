//! The session: one task that owns the socket, sends the calls, keeps the session alive, and reconnects.

use std::convert::Infallible;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::connection::{Connection, Loss, Request, boot_now};
use super::jute::Reader;
use super::records::{self, Granted};
use super::transport::{Stream, Transport};
use super::watches::Watches;
use super::{ConnectOptions, Error};
use journeyman_domain::jitter::Jitter;
use journeyman_domain::limits::{
    ZOOKEEPER_CONNECT_ATTEMPT_MAX, ZOOKEEPER_CONNECT_ATTEMPT_MIN, ZOOKEEPER_CONNECT_TIMEOUT,
    ZOOKEEPER_HANDSHAKE_BYTES_MAX, ZOOKEEPER_READ_BYTES, ZOOKEEPER_RECONNECT_DELAY_MAX, ZOOKEEPER_RECONNECT_DELAY_MIN,
};
use journeyman_domain::time as boot;

/// The stages of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionState {
    /// A server answers.
    Connected,
    /// The session looks for a server.
    Disconnected,
    /// The servers have forgotten the session.
    Expired,
    /// The servers do not accept the credentials.
    AuthFailed,
    /// The client has closed the session, or its task has panicked.
    Closed,
}

impl SessionState {
    /// True once the session has ended.
    pub const fn is_terminated(self) -> bool {
        matches!(self, Self::Expired | Self::AuthFailed | Self::Closed)
    }
}

/// What a client sees of its session.
#[derive(Debug, Clone, Copy)]
pub(super) struct Status {
    pub(super) state: SessionState,
    pub(super) id: i64,
    pub(super) timeout: Duration,
    /// The server counts the timeout from then on, or from later.
    pub(super) proved_at: boot::Instant,
}

pub(super) struct Session {
    transport: Transport,
    requests: mpsc::Receiver<Request>,
    status: watch::Sender<Status>,
    asked_timeout: Duration,
    auth: Option<Vec<u8>>,
    password: Vec<u8>,
    last_zxid: i64,
    watches: Watches,
    heard_at: Instant,
    delay: Duration,
    jitter: Jitter,
}

impl Session {
    /// Opens a session with the first server that takes it.
    pub(super) async fn open(
        options: &ConnectOptions,
        requests: mpsc::Receiver<Request>,
    ) -> Result<(Self, Stream), Error> {
        let mut jitter = Jitter::seeded(uuid::Uuid::new_v4().as_u64_pair().0);
        let (asked_timeout, now) = (options.session_timeout, Instant::now());
        let mut session = Self {
            transport: Transport::new(&options.servers, options.tls.clone(), &mut jitter)?,
            requests,
            status: watch::Sender::new(Status {
                state: SessionState::Disconnected,
                id: 0,
                timeout: asked_timeout,
                proved_at: boot_now(),
            }),
            asked_timeout,
            auth: options.auth.as_ref().map(|(scheme, credentials)| records::auth(scheme, credentials)),
            password: vec![0; 16],
            last_zxid: 0,
            watches: Watches::default(),
            heard_at: now,
            delay: ZOOKEEPER_RECONNECT_DELAY_MIN,
            jitter,
        };
        let stream = session.find_server(now + ZOOKEEPER_CONNECT_TIMEOUT).await?;
        Ok((session, stream))
    }

    pub(super) fn status(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    fn timeout(&self) -> Duration {
        self.status.borrow().timeout
    }

    fn set_state(&self, state: SessionState) {
        self.status.send_modify(|status| status.state = state);
    }

    /// Serves the calls until the session has ended, or its client is dropped and the server has closed it.
    pub(super) async fn run(mut self, mut stream: Stream) {
        loop {
            let proved_at = self.status.borrow().proved_at;
            let mut connection = Connection::new(Instant::now(), proved_at);
            connection.start(self.auth.as_deref(), self.last_zxid, &mut self.watches);
            self.watches.on_reconnected();
            let Err(loss) = self.serve(stream, &mut connection).await;
            let (state, why) = match loss {
                Loss::Connection(why) if connection.is_closing => (SessionState::Closed, why),
                Loss::Connection(why) => (SessionState::Disconnected, why),
                Loss::Session(state) => (state, "the server has ended it".to_owned()),
            };
            let id = self.status.borrow().id;
            // Before the calls in flight fail: their callers ask for the state.
            self.set_state(state);
            drop(connection);
            self.watches.on_connection_lost();
            if state.is_terminated() {
                tracing::debug!(session = format!("{id:#x}"), ?state, "a session with ZooKeeper has ended");
                return;
            }
            tracing::info!(session = format!("{id:#x}"), "lost the connection to ZooKeeper, reconnecting: {why}");
            // The last word of a connection may have reached the server two thirds of the timeout after the server's last word reached
            // this client, and the session lasts for one timeout from there.
            stream = match self.find_server(self.heard_at + self.timeout() * 5 / 3).await {
                Ok(stream) => stream,
                Err(error) => {
                    tracing::info!(session = format!("{id:#x}"), "the session with ZooKeeper has expired: {error}");
                    return self.set_state(SessionState::Expired);
                }
            };
        }
    }

    /// Tries one server after the other until one takes the session.
    async fn find_server(&mut self, ends_at: Instant) -> Result<Stream, Error> {
        loop {
            let longest = (self.timeout() / 3).clamp(ZOOKEEPER_CONNECT_ATTEMPT_MIN, ZOOKEEPER_CONNECT_ATTEMPT_MAX);
            let (began_at, sent_at) = (Instant::now(), boot_now());
            let attempt_ends_at = ends_at.min(began_at + longest);
            let why = match timeout_at(attempt_ends_at, self.try_server()).await {
                Ok(Ok((stream, granted))) => {
                    self.on_granted(granted, sent_at);
                    return Ok(stream);
                }
                Ok(Err(Loss::Connection(why))) => why,
                Ok(Err(Loss::Session(_))) => return Err(Error::SessionExpired),
                Err(_) => "no answer".to_owned(),
            };
            tracing::debug!("no connection to ZooKeeper: {why}");
            let next_at = began_at + self.delay / 2 + self.jitter.below(self.delay / 2);
            self.delay = (self.delay * 2).min(ZOOKEEPER_RECONNECT_DELAY_MAX).min(self.timeout() / 6);
            if next_at.max(Instant::now()) >= ends_at {
                return Err(Error::Connect(why));
            }
            sleep_until(next_at).await;
        }
    }

    async fn try_server(&mut self) -> Result<(Stream, Granted), Loss> {
        let mut stream = self.transport.connect().await?;
        let id = self.status.borrow().id;
        let request = records::connect(self.last_zxid, self.asked_timeout, id, &self.password);
        stream.write_u32(u32::try_from(request.len()).unwrap_or(u32::MAX)).await?;
        stream.write_all(&request).await?;
        stream.flush().await?;
        let length = usize::try_from(stream.read_u32().await?).unwrap_or(usize::MAX);
        if length > ZOOKEEPER_HANDSHAKE_BYTES_MAX {
            return Err(Loss::Connection(format!("{length} bytes instead of a session: is this a ZooKeeper?")));
        }
        let mut answer = vec![0; length];
        stream.read_exact(&mut answer).await?;
        match records::granted(&mut Reader::new(&answer))? {
            Some(granted) if id == 0 || granted.id == id => Ok((stream, granted)),
            None if id == 0 => Err(Loss::Connection("the server grants no session".to_owned())),
            Some(_) | None => Err(Loss::Session(SessionState::Expired)),
        }
    }

    fn on_granted(&mut self, granted: Granted, proved_at: boot::Instant) {
        self.heard_at = Instant::now();
        self.password = granted.password;
        let (state, id, timeout) = (SessionState::Connected, granted.id, granted.timeout);
        tracing::debug!(session = format!("{id:#x}"), ?timeout, "connected to ZooKeeper");
        self.status.send_replace(Status { state, id, timeout, proved_at });
    }

    /// Serves one connection. Each branch can be dropped without loss: what was read or written is in the connection.
    async fn serve(&mut self, stream: Stream, connection: &mut Connection) -> Result<Infallible, Loss> {
        let (mut reader, mut writer) = tokio::io::split(stream);
        // A lease counts from the last answer: the younger that is, the longer an outage may last.
        let (ping_after, leave_after) = (self.timeout() / 10, self.timeout() * 2 / 3);
        let mut input = bytes::BytesMut::new();
        loop {
            let now = Instant::now();
            if now >= connection.sent_at + ping_after {
                connection.ping(now);
            }
            // All that wait leave in one write.
            while connection.has_room() {
                match self.requests.try_recv() {
                    Ok(request) => connection.send(request, &mut self.watches, now),
                    Err(mpsc::error::TryRecvError::Disconnected) => connection.close(now),
                    Err(mpsc::error::TryRecvError::Empty) => break,
                }
            }
            let wake_at = (self.heard_at + leave_after).min(connection.sent_at + ping_after);
            input.reserve(ZOOKEEPER_READ_BYTES);
            tokio::select! {
                biased;
                written = connection.write_to(&mut writer), if connection.has_output() => written?,
                read = reader.read_buf(&mut input) => {
                    if read? == 0 {
                        return Err(Loss::Connection("the server has closed it".to_owned()));
                    }
                    while let Some(last_zxid) = connection.receive(&mut input, &mut self.watches)? {
                        self.last_zxid = self.last_zxid.max(last_zxid);
                        self.delay = ZOOKEEPER_RECONNECT_DELAY_MIN;
                    }
                    self.heard_at = Instant::now();
                    self.status.send_if_modified(|status| {
                        status.proved_at = connection.proved_at;
                        false
                    });
                }
                request = self.requests.recv(), if connection.has_room() => match request {
                    Some(request) => connection.send(request, &mut self.watches, Instant::now()),
                    None => connection.close(Instant::now()),
                },
                // Only where nothing can be read: a process that was stopped does not blame the server.
                () = sleep_until(wake_at) => {
                    if Instant::now() >= self.heard_at + leave_after {
                        return Err(Loss::Connection(format!("the server is silent for {leave_after:?}")));
                    }
                }
            }
        }
    }
}

impl Drop for Session {
    /// A task that panics or whose runtime ends leaves no client that believes in its session.
    fn drop(&mut self) {
        self.status.send_if_modified(|status| {
            let was_open = !status.state.is_terminated();
            if was_open {
                status.state = SessionState::Closed;
            }
            was_open
        });
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpSocket, TcpStream};

    use super::super::session_tests::Server;
    use super::*;

    /// Whether it refuses connections or, as a host that is down, does not answer at all.
    #[tokio::test]
    async fn d2_a_server_is_tried_at_least_each_second_until_the_session_ends() {
        let server = Server::start(Duration::from_secs(60)).await;
        let (options, (_requests, receiver)) = (server.options(), mpsc::channel(1));
        let (opened, line) = tokio::join!(Session::open(&options, receiver), server.accept());
        let (mut session, stream) = opened.unwrap();
        drop((server, line, stream));
        let [refusing, full] = [(), ()].map(|()| {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
            socket
        });
        let (refuses, is_silent) = (refusing.local_addr().unwrap(), full.local_addr().unwrap());
        let _full = full.listen(1).unwrap();
        // What comes after these has to wait.
        let _waiting = [TcpStream::connect(is_silent).await.unwrap(), TcpStream::connect(is_silent).await.unwrap()];
        tokio::time::pause();
        for address in [refuses, is_silent] {
            session.transport = Transport::new(&address.to_string(), None, &mut session.jitter).unwrap();
            let began_at = Instant::now();
            assert!(session.find_server(began_at + Duration::from_secs(100)).await.is_err());
            let (tries, took) = (session.transport.next, began_at.elapsed());
            assert!(tries >= 99 && took >= Duration::from_secs(99), "{tries} tries in {took:?}");
        }
    }
}
