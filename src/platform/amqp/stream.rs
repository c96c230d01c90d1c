//! The byte stream of a connection: TCP, with TLS where the address says `amqps`.
//!
//! lapin's own TLS would add forty crates, so lapin gets a stream that uses the rustls of the rest of the program.

use std::collections::VecDeque;
use std::future::Future;
use std::io::{self, Read as _};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::traits::Reactor;
use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio};
use futures_core::Stream;
use futures_io::{AsyncRead, AsyncWrite};
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio_util::compat::{Compat, TokioAsyncReadCompatExt as _};

use super::utf8_sanitizer::{Release, Utf8Sanitizer};

type Transport = tokio_util::either::Either<TcpStream, tokio_rustls::client::TlsStream<TcpStream>>;

/// tokio, with [`BrokerStream`] for TCP.
pub(super) type LapinRuntime = RuntimeParts<Tokio, StreamReactor>;

pub(super) fn runtime() -> Runtime<LapinRuntime> {
    let tokio = Tokio::current();
    Runtime::new(RuntimeParts::new(tokio.clone(), StreamReactor { tokio }))
}

#[derive(Debug, Clone)]
pub(super) struct StreamReactor {
    tokio: Tokio,
}

/// A connection to a broker.
pub(super) struct BrokerStream {
    transport: Compat<Transport>,
    sanitizer: Utf8Sanitizer,
    /// Sanitized input that lapin has not read yet.
    unread: VecDeque<u8>,
    /// Where to note what the broker says of itself.
    release: Arc<Mutex<Option<Release>>>,
}

impl BrokerStream {
    pub(super) fn new(transport: Transport) -> Self {
        let (sanitizer, unread, release) = (Utf8Sanitizer::default(), VecDeque::new(), Arc::default());
        Self { transport: transport.compat(), sanitizer, unread, release }
    }

    pub(super) fn noting_release(self, release: Arc<Mutex<Option<Release>>>) -> Self {
        Self { release, ..self }
    }

    pub(super) fn plain(stream: TcpStream) -> Self {
        let stream = Transport::Left(stream);
        Self::new(stream)
    }
}

impl AsyncRead for BrokerStream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        let Self { transport, sanitizer, unread, release } = &mut *self;
        while unread.is_empty() && !into.is_empty() {
            let count = ready!(Pin::new(&mut *transport).poll_read(context, into))?;
            if count == 0 {
                sanitizer.finish(unread);
                break;
            }
            sanitizer.feed(into.get(..count).unwrap_or_default(), unread);
            if let Some(named) = sanitizer.release.take() {
                *release.lock() = Some(named);
            }
        }
        Poll::Ready(unread.read(into))
    }
}

impl AsyncWrite for BrokerStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.transport).poll_write(context, from)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.transport).poll_write_vectored(context, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.transport).poll_flush(context)
    }

    fn poll_close(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.transport).poll_close(context)
    }
}

impl Reactor for StreamReactor {
    type TcpStream = BrokerStream;
    type Sleep = <Tokio as Reactor>::Sleep;

    fn register<H: io::Read + io::Write + AsFd + AsRawFd + Send + 'static>(
        &self,
        socket: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        self.tokio.register(socket)
    }

    fn sleep(&self, span: Duration) -> Self::Sleep {
        self.tokio.sleep(span)
    }

    fn interval(&self, span: Duration) -> impl Stream<Item = Instant> + Send + 'static {
        self.tokio.interval(span)
    }

    #[expect(clippy::manual_async_fn, reason = "the future must not borrow from `self`")]
    fn tcp_connect_addr(
        &self,
        address: SocketAddr,
    ) -> impl Future<Output = io::Result<Self::TcpStream>> + Send + 'static {
        async move { Ok(BrokerStream::plain(TcpStream::connect(address).await?)) }
    }
}
