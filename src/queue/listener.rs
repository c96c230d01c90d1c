//! Connections: so many at once, and each closed when nothing has moved on it for a while.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};

use crate::limits::{QUEUE_CONNECTIONS_MAX, QUEUE_IDLE_MAX};

/// Accepts so many connections at a time; the others wait in the system's own queue.
pub(super) struct Bounded {
    listener: TcpListener,
    seats: Arc<Semaphore>,
}

impl Bounded {
    pub(super) fn new(listener: TcpListener) -> Self {
        Self { listener, seats: Arc::new(Semaphore::new(QUEUE_CONNECTIONS_MAX)) }
    }
}

impl Listener for Bounded {
    type Io = Seated;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let seat = Arc::clone(&self.seats).acquire_owned().await.ok();
        let (stream, from) = Listener::accept(&mut self.listener).await;
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a connection's small writes will be delayed");
        }
        let idle = Box::pin(tokio::time::sleep(QUEUE_IDLE_MAX));
        (Seated { stream, idle, moved: Instant::now(), _seat: seat }, from)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// A connection that holds its seat.
pub(super) struct Seated {
    stream: TcpStream,
    idle: Pin<Box<Sleep>>,
    moved: Instant,
    _seat: Option<OwnedSemaphorePermit>,
}

impl Seated {
    /// Notes whether something moved; an error where nothing has for too long.
    fn watch<T>(&mut self, polled: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.moved = Instant::now();
            return polled;
        }
        while self.idle.as_mut().poll(cx).is_ready() {
            let end = self.moved + QUEUE_IDLE_MAX;
            if end <= Instant::now() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.idle.as_mut().reset(end);
        }
        Poll::Pending
    }
}

impl AsyncRead for Seated {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        this.watch(polled, cx)
    }
}

impl AsyncWrite for Seated {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write(cx, buf);
        this.watch(polled, cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write_vectored(cx, bufs);
        this.watch(polled, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}
