//! The bytes below AMQP: a TCP connection, with TLS around it where the address says so.
//!
//! lapin brings a TLS of its own, and with it forty crates that read formats nobody asked for. It takes any stream, so it is
//! given ours: the same rustls that the rest of the program uses.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use async_rs::traits::Reactor;
use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio};
use futures_core::Stream;
use futures_io::{AsyncRead, AsyncWrite};
use tokio_util::compat::{Compat, TokioAsyncReadCompatExt as _};

use super::utf8_sanitizer::Utf8Sanitizer;

/// The runtime as lapin sees it: tokio, with streams of our own.
pub(super) type LapinRuntime = RuntimeParts<Tokio, StreamReactor>;

/// Tokio and [`BrokerStream`]s.
pub(super) fn runtime() -> Runtime<LapinRuntime> {
    let tokio = Tokio::current();
    Runtime::new(RuntimeParts::new(tokio.clone(), StreamReactor { tokio }))
}

/// Makes plain wires, and everything else as tokio does.
#[derive(Debug, Clone)]
pub(super) struct StreamReactor {
    tokio: Tokio,
}

/// A connection to a broker.
pub(super) struct BrokerStream {
    transport: Transport,
    sanitizer: Utf8Sanitizer,
    /// What has come and was not passed on yet, from there on.
    buffer: Vec<u8>,
    consumed: usize,
}

enum Transport {
    /// As it is.
    Plain(Compat<tokio::net::TcpStream>),
    /// Encrypted.
    #[cfg(feature = "amqps")]
    Tls(Box<Compat<tokio_rustls::client::TlsStream<tokio::net::TcpStream>>>),
}

impl From<tokio::net::TcpStream> for BrokerStream {
    fn from(stream: tokio::net::TcpStream) -> Self {
        Transport::Plain(stream.compat()).into()
    }
}

impl From<Transport> for BrokerStream {
    fn from(line: Transport) -> Self {
        Self { transport: line, sanitizer: Utf8Sanitizer::default(), buffer: Vec::new(), consumed: 0 }
    }
}

#[cfg(feature = "amqps")]
impl From<Compat<tokio_rustls::client::TlsStream<tokio::net::TcpStream>>> for BrokerStream {
    fn from(stream: Compat<tokio_rustls::client::TlsStream<tokio::net::TcpStream>>) -> Self {
        Transport::Tls(Box::new(stream)).into()
    }
}

impl BrokerStream {
    fn with_transport<T>(self: Pin<&mut Self>, of: impl FnOnce(Pin<&mut dyn AsyncReadWrite>) -> T) -> T {
        match &mut self.get_mut().transport {
            Transport::Plain(stream) => of(Pin::new(stream)),
            #[cfg(feature = "amqps")]
            Transport::Tls(stream) => of(Pin::new(&mut **stream)),
        }
    }
}

trait AsyncReadWrite: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncReadWrite for T {}

impl AsyncRead for BrokerStream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            let left = self.buffer.get(self.consumed..).unwrap_or_default();
            if !left.is_empty() || into.is_empty() {
                let count = left.len().min(into.len());
                let (Some(from), Some(to)) = (left.get(..count), into.get_mut(..count)) else {
                    return Poll::Ready(Ok(0));
                };
                to.copy_from_slice(from);
                self.consumed += count;
                return Poll::Ready(Ok(count));
            }
            let count = match self.as_mut().with_transport(|stream| stream.poll_read(context, into)) {
                Poll::Ready(Ok(count)) => count,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            };
            let Self { sanitizer: sound, buffer: come, consumed: passed, .. } = &mut *self;
            come.clear();
            *passed = 0;
            match into.get(..count) {
                Some(bytes) if count > 0 => sound.feed(bytes, come),
                _ => sound.finish(come),
            }
            if count == 0 && come.is_empty() {
                return Poll::Ready(Ok(0));
            }
        }
    }
}

impl AsyncWrite for BrokerStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        self.with_transport(|stream| stream.poll_write(context, from))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.with_transport(|stream| stream.poll_write_vectored(context, from))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with_transport(|stream| stream.poll_flush(context))
    }

    fn poll_close(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.with_transport(|stream| stream.poll_close(context))
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
        async move { Ok(tokio::net::TcpStream::connect(address).await?.into()) }
    }
}
