//! The byte stream of a connection: TCP, with TLS where the address says `amqps`.
//!
//! lapin's own TLS would add forty crates, so lapin gets a stream that uses the rustls of the rest of the program.

use std::future::Future;
use std::io::{self, Read as _};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::traits::Reactor;
use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio};
use bytes::{Buf as _, BytesMut};
use futures_core::Stream;
use futures_io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_util::compat::{Compat, TokioAsyncReadCompatExt as _};
use tokio_util::io::poll_read_buf;

use super::utf8_sanitizer::Utf8Sanitizer;

pub(super) type Transport = tokio_util::either::Either<TcpStream, tokio_rustls::client::TlsStream<TcpStream>>;

/// How much is read from the broker at once.
const READ_BYTES: usize = 64 << 10;

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
    /// Input that lapin has not read yet.
    unread: BytesMut,
    /// How much of it is sanitized: all but an incomplete frame.
    ready: usize,
}

impl BrokerStream {
    pub(super) fn new(transport: Transport, sanitizer: Utf8Sanitizer) -> Self {
        Self { transport: transport.compat(), sanitizer, unread: BytesMut::new(), ready: 0 }
    }
}

impl AsyncRead for BrokerStream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        let Self { transport, sanitizer, unread, ready } = &mut *self;
        while *ready == 0 && !into.is_empty() {
            unread.reserve(READ_BYTES);
            if ready!(poll_read_buf(Pin::new(transport.get_mut()), context, unread))? == 0 {
                *ready = unread.len();
                break;
            }
            *ready = sanitizer.sanitize(unread);
        }
        let count = unread.get(..*ready).unwrap_or_default().read(into)?;
        unread.advance(count);
        *ready -= count;
        Poll::Ready(Ok(count))
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
        async move {
            let stream = TcpStream::connect(address).await?;
            Ok(BrokerStream::new(Transport::Left(stream), Utf8Sanitizer::default()))
        }
    }
}
