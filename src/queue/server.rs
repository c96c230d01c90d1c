//! The HTTP server: accepts connections and limits what unauthenticated ones may hold.
//!
//! A connection starts unauthenticated: few are open at once, each for a short time and one request. The first
//! authenticated request lifts these limits.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
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

pub(crate) struct ConnectionPermit {
    unauthenticated_permit: Mutex<Option<OwnedSemaphorePermit>>,
    _connection_permit: Option<OwnedSemaphorePermit>,
}

impl ConnectionPermit {
    pub(crate) fn mark_authenticated(&self) {
        self.unauthenticated_permit.lock().take();
    }

    pub(crate) fn is_unauthenticated(&self) -> bool {
        self.unauthenticated_permit.lock().is_some()
    }
}

struct ConnectionLimiter {
    connections: Arc<Semaphore>,
    unauthenticated: Arc<Semaphore>,
    evict_unauthenticated: Notify,
}

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

    /// Accepts the next connection once a slot is free.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    async fn admit(&self, listener: &TcpListener) -> AcceptedConnection {
        let place = Arc::clone(&self.connections).acquire_owned().await.ok();
        let unauthenticated_permit =
            match timeout(QUEUE_UNAUTHENTICATED_WAIT_MAX, Arc::clone(&self.unauthenticated).acquire_owned()).await {
                Ok(permit) => permit.ok(),
                Err(_) => {
                    // All of them have been unauthenticated for that long.
                    self.evict_unauthenticated.notify_waiters();
                    Arc::clone(&self.unauthenticated).acquire_owned().await.ok()
                }
            };
        let stream = self.accept(listener).await;
        AcceptedConnection {
            stream,
            permit: Arc::new(ConnectionPermit {
                unauthenticated_permit: Mutex::new(unauthenticated_permit),
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
                        tracing::debug!(%error, "cannot set TCP_NODELAY");
                    }
                    return stream;
                }
                Err(error) => {
                    if failures == 0 {
                        tracing::warn!(%error, "cannot accept connections; is the open file limit too low?");
                    }
                    failures = failures.saturating_add(1);
                    sleep(QUEUE_ACCEPT_RETRY_DELAY).await;
                    // The descriptors may be held by unauthenticated connections.
                    self.evict_unauthenticated.notify_waiters();
                }
            }
        }
    }
}

pub(super) async fn serve(listener: TcpListener, app: Arc<QueueState>, mut stopping: watch::Receiver<StopSignal>) {
    let limiter = Arc::new(ConnectionLimiter::new());
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop_requested(&mut stopping) => break,
            accepted = limiter.admit(&listener) => accepted,
        };
        while connections.try_join_next().is_some() {}
        connections.spawn(serve_connection(accepted, Arc::clone(&limiter), Arc::clone(&app), stopping.clone()));
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn stop_requested(stopping: &mut watch::Receiver<StopSignal>) {
    // The sender is dropped with the queue.
    stopping.wait_for(|stop| *stop == StopSignal::Stopping).await.ok();
}

async fn serve_connection(
    accepted: AcceptedConnection,
    limiter: Arc<ConnectionLimiter>,
    app: Arc<QueueState>,
    mut stopping: watch::Receiver<StopSignal>,
) {
    let AcceptedConnection { stream, permit } = accepted;
    let eviction = limiter.evict_unauthenticated.notified();
    let own = Arc::clone(&permit);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let (app, permit) = (Arc::clone(&app), Arc::clone(&permit));
        async move { Ok::<_, Infallible>(dispatch::serve(&app, &permit, request.map(Body::new)).await) }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(QUEUE_CONNECTION_IDLE_MAX)
        .max_headers(QUEUE_HEAD_LINES_MAX)
        .max_header_size(QUEUE_HEAD_BYTES_MAX)
        .max_buf_size(QUEUE_BUFFER_BYTES_MAX);
    let mut served = Box::pin(builder.serve_connection(TokioIo::new(IdleTimeoutStream::new(stream)), service));
    let mut evicted = std::pin::pin!(async {
        tokio::select! {
            () = eviction => {}
            () = sleep(QUEUE_UNAUTHENTICATED_AGE_MAX) => {}
        }
    });
    let (mut unauthenticated, mut stopping_sent) = (true, false);
    loop {
        tokio::select! {
            end = &mut served => {
                if let Err(error) = end {
                    tracing::debug!(%error, "connection closed");
                }
                return;
            }
            () = &mut evicted, if unauthenticated => {
                if own.is_unauthenticated() {
                    return;
                }
                unauthenticated = false;
            }
            () = stop_requested(&mut stopping), if !stopping_sent => {
                if own.is_unauthenticated() {
                    return;
                }
                served.as_mut().graceful_shutdown();
                stopping_sent = true;
            }
        }
    }
}
