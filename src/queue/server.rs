//! The server: accepts connections, bounds what each may hold while its caller is unknown, and ends them with the queue.
//!
//! A connection starts as a stranger's. Few strangers are let in at once, each for a short time and for one request, so
//! that whoever cannot sign holds little of this process; the first request that proves itself makes the connection
//! one of the many.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::idle_timeout::IdleTimeoutStream;
use super::{QueueState, StopSignal, dispatch};
use crate::limits::{
    QUEUE_ACCEPT_RETRY_DELAY, QUEUE_BUFFER_BYTES_MAX, QUEUE_CONNECTION_IDLE_MAX, QUEUE_CONNECTIONS_MAX,
    QUEUE_HEAD_BYTES_MAX, QUEUE_HEAD_LINES_MAX, QUEUE_UNAUTHENTICATED_AGE_MAX, QUEUE_UNAUTHENTICATED_MAX,
    QUEUE_UNAUTHENTICATED_WAIT_MAX,
};

/// What a connection holds of the server's room.
pub(crate) struct ConnectionPermit {
    unauthenticated_permit: Mutex<Option<OwnedSemaphorePermit>>,
    _connection_permit: Option<OwnedSemaphorePermit>,
}

impl ConnectionPermit {
    /// The caller has proved itself: the connection counts as a stranger's no longer.
    pub(crate) fn mark_authenticated(&self) {
        self.unauthenticated_permit.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    pub(crate) fn is_unauthenticated(&self) -> bool {
        self.unauthenticated_permit.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

/// Who is let in.
struct ConnectionLimiter {
    connections: Arc<Semaphore>,
    unauthenticated: Arc<Semaphore>,
    /// Tells every stranger inside to go, since others wait.
    evict_unauthenticated: Notify,
}

/// A connection that was let in.
struct AcceptedConnection {
    stream: TcpStream,
    permit: Arc<ConnectionPermit>,
}

impl ConnectionLimiter {
    fn new() -> Self {
        Self {
            connections: Arc::new(Semaphore::new(QUEUE_CONNECTIONS_MAX)),
            unauthenticated: Arc::new(Semaphore::new(QUEUE_UNAUTHENTICATED_MAX)),
            evict_unauthenticated: Notify::new(),
        }
    }

    /// Lets the next connection in; the others wait in the system's own queue.
    ///
    /// # Cancel safety
    ///
    /// No connection is lost when it is dropped.
    async fn admit(&self, listener: &TcpListener) -> AcceptedConnection {
        let place = Arc::clone(&self.connections).acquire_owned().await.ok();
        let stranger =
            match timeout(QUEUE_UNAUTHENTICATED_WAIT_MAX, Arc::clone(&self.unauthenticated).acquire_owned()).await {
                Ok(seat) => seat.ok(),
                Err(_) => {
                    // Nobody inside has proved itself for so long.
                    self.evict_unauthenticated.notify_waiters();
                    Arc::clone(&self.unauthenticated).acquire_owned().await.ok()
                }
            };
        let stream = self.accept(listener).await;
        AcceptedConnection {
            stream,
            permit: Arc::new(ConnectionPermit {
                unauthenticated_permit: Mutex::new(stranger),
                _connection_permit: place,
            }),
        }
    }

    async fn accept(&self, listener: &TcpListener) -> TcpStream {
        let mut failures = 0_u32;
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    if let Err(error) = stream.set_nodelay(true) {
                        tracing::debug!(%error, "a connection's small writes will be delayed");
                    }
                    return stream;
                }
                Err(error) => {
                    if failures == 0 {
                        tracing::warn!(%error, "no connection can be accepted; is the limit of open files too low?");
                    }
                    failures = failures.saturating_add(1);
                    sleep(QUEUE_ACCEPT_RETRY_DELAY).await;
                    // What strangers hold may be what is missing.
                    self.evict_unauthenticated.notify_waiters();
                }
            }
        }
    }
}

/// Serves until the queue is to stop, and then until the calls under way have been answered.
pub(super) async fn serve(listener: TcpListener, app: Arc<QueueState>, mut stopping: watch::Receiver<StopSignal>) {
    let door = Arc::new(ConnectionLimiter::new());
    let mut connections = JoinSet::new();
    loop {
        let guest = tokio::select! {
            biased;
            () = stop_requested(&mut stopping) => break,
            guest = door.admit(&listener) => guest,
        };
        while connections.try_join_next().is_some() {}
        connections.spawn(serve_connection(guest, Arc::clone(&door), Arc::clone(&app), stopping.clone()));
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn stop_requested(stopping: &mut watch::Receiver<StopSignal>) {
    // Where the sender is gone, the queue has been dropped.
    stopping.wait_for(|stop| *stop == StopSignal::Stopping).await.ok();
}

async fn serve_connection(
    guest: AcceptedConnection,
    door: Arc<ConnectionLimiter>,
    app: Arc<QueueState>,
    mut stopping: watch::Receiver<StopSignal>,
) {
    let AcceptedConnection { stream, permit: seat } = guest;
    let crowded = door.evict_unauthenticated.notified();
    let own = Arc::clone(&seat);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let (app, seat) = (Arc::clone(&app), Arc::clone(&seat));
        async move { Ok::<_, Infallible>(dispatch::serve(&app, &seat, request.map(Body::new)).await) }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(QUEUE_CONNECTION_IDLE_MAX)
        .max_headers(QUEUE_HEAD_LINES_MAX)
        .max_header_size(QUEUE_HEAD_BYTES_MAX)
        .max_buf_size(QUEUE_BUFFER_BYTES_MAX);
    let mut served = Box::pin(builder.serve_connection(TokioIo::new(IdleTimeoutStream::new(stream)), service));
    let mut leave = std::pin::pin!(async {
        tokio::select! {
            () = crowded => {}
            () = sleep(QUEUE_UNAUTHENTICATED_AGE_MAX) => {}
        }
    });
    let (mut strange, mut told) = (true, false);
    loop {
        tokio::select! {
            end = &mut served => {
                if let Err(error) = end {
                    tracing::debug!(%error, "a connection has ended");
                }
                return;
            }
            () = &mut leave, if strange => {
                if own.is_unauthenticated() {
                    return;
                }
                strange = false;
            }
            () = stop_requested(&mut stopping), if !told => {
                if own.is_unauthenticated() {
                    return;
                }
                served.as_mut().graceful_shutdown();
                told = true;
            }
        }
    }
}
