//! A TCP stream that fails after a period without traffic.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use crate::limits::QUEUE_CONNECTION_IDLE_MAX;

pub(super) struct IdleTimeoutStream {
    stream: TcpStream,
    idle: Pin<Box<Sleep>>,
    last_activity: Instant,
}

impl IdleTimeoutStream {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, idle: Box::pin(tokio::time::sleep(QUEUE_CONNECTION_IDLE_MAX)), last_activity: Instant::now() }
    }

    /// Records traffic; fails after too long without any.
    fn track<T>(&mut self, polled: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.last_activity = Instant::now();
            return polled;
        }
        while self.idle.as_mut().poll(cx).is_ready() {
            let end = self.last_activity + QUEUE_CONNECTION_IDLE_MAX;
            if end <= Instant::now() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.idle.as_mut().reset(end);
        }
        Poll::Pending
    }
}

impl AsyncRead for IdleTimeoutStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_read(cx, buf);
        this.track(polled, cx)
    }
}

impl AsyncWrite for IdleTimeoutStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write(cx, buf);
        this.track(polled, cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write_vectored(cx, bufs);
        this.track(polled, cx)
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
