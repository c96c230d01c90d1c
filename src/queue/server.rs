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

use super::connection::Watched;
use super::{App, Stop, http};
use crate::limits::{
    QUEUE_ACCEPT_REST, QUEUE_BUFFER_BYTES_MAX, QUEUE_CONNECTIONS_MAX, QUEUE_CROWD_PATIENCE, QUEUE_HEAD_BYTES_MAX,
    QUEUE_HEAD_LINES_MAX, QUEUE_IDLE_MAX, QUEUE_STRANGER_TIME_MAX, QUEUE_STRANGERS_MAX,
};

/// What a connection holds of the server's room.
pub(crate) struct Seat {
    stranger: Mutex<Option<OwnedSemaphorePermit>>,
    _place: Option<OwnedSemaphorePermit>,
}

impl Seat {
    /// The caller has proved itself: the connection counts as a stranger's no longer.
    pub(crate) fn prove(&self) {
        self.stranger.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    pub(crate) fn is_strangers(&self) -> bool {
        self.stranger.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

/// Who is let in.
struct Door {
    places: Arc<Semaphore>,
    strangers: Arc<Semaphore>,
    /// Tells every stranger inside to go, since others wait.
    crowded: Notify,
}

/// A connection that was let in.
struct Guest {
    stream: TcpStream,
    seat: Arc<Seat>,
}

impl Door {
    fn new() -> Self {
        Self {
            places: Arc::new(Semaphore::new(QUEUE_CONNECTIONS_MAX)),
            strangers: Arc::new(Semaphore::new(QUEUE_STRANGERS_MAX)),
            crowded: Notify::new(),
        }
    }

    /// Lets the next connection in; the others wait in the system's own queue.
    ///
    /// # Cancel safety
    ///
    /// No connection is lost when it is dropped.
    async fn admit(&self, listener: &TcpListener) -> Guest {
        let place = Arc::clone(&self.places).acquire_owned().await.ok();
        let stranger = match timeout(QUEUE_CROWD_PATIENCE, Arc::clone(&self.strangers).acquire_owned()).await {
            Ok(seat) => seat.ok(),
            Err(_) => {
                // Nobody inside has proved itself for so long.
                self.crowded.notify_waiters();
                Arc::clone(&self.strangers).acquire_owned().await.ok()
            }
        };
        let stream = self.accept(listener).await;
        Guest { stream, seat: Arc::new(Seat { stranger: Mutex::new(stranger), _place: place }) }
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
                    sleep(QUEUE_ACCEPT_REST).await;
                    // What strangers hold may be what is missing.
                    self.crowded.notify_waiters();
                }
            }
        }
    }
}

/// Serves until the queue is to stop, and then until the calls under way have been answered.
pub(super) async fn serve(listener: TcpListener, app: Arc<App>, mut stopping: watch::Receiver<Stop>) {
    let door = Arc::new(Door::new());
    let mut connections = JoinSet::new();
    loop {
        let guest = tokio::select! {
            biased;
            () = stopped(&mut stopping) => break,
            guest = door.admit(&listener) => guest,
        };
        while connections.try_join_next().is_some() {}
        connections.spawn(connection(guest, Arc::clone(&door), Arc::clone(&app), stopping.clone()));
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn stopped(stopping: &mut watch::Receiver<Stop>) {
    // Where the sender is gone, the queue has been dropped.
    stopping.wait_for(|stop| *stop == Stop::Now).await.ok();
}

async fn connection(guest: Guest, door: Arc<Door>, app: Arc<App>, mut stopping: watch::Receiver<Stop>) {
    let Guest { stream, seat } = guest;
    let crowded = door.crowded.notified();
    let own = Arc::clone(&seat);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let (app, seat) = (Arc::clone(&app), Arc::clone(&seat));
        async move { Ok::<_, Infallible>(http::serve(&app, &seat, request.map(Body::new)).await) }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(QUEUE_IDLE_MAX)
        .max_headers(QUEUE_HEAD_LINES_MAX)
        .max_header_size(QUEUE_HEAD_BYTES_MAX)
        .max_buf_size(QUEUE_BUFFER_BYTES_MAX);
    let mut served = Box::pin(builder.serve_connection(TokioIo::new(Watched::new(stream)), service));
    let mut leave = std::pin::pin!(async {
        tokio::select! {
            () = crowded => {}
            () = sleep(QUEUE_STRANGER_TIME_MAX) => {}
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
                if own.is_strangers() {
                    return;
                }
                strange = false;
            }
            () = stopped(&mut stopping), if !told => {
                if own.is_strangers() {
                    return;
                }
                served.as_mut().graceful_shutdown();
                told = true;
            }
        }
    }
}
