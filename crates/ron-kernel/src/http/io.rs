//! A byte stream of any kind a listener can produce.

use bytes::{Buf, Bytes, BytesMut};
use rustix::fs::sendfile;
use rustix::net::{SendFlags, send};
use std::fs::File;
use std::future::Future as _;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsStream;

/// What is read at once where more keeps coming than is asked for: TLS asks for a quarter of a record.
const AHEAD: usize = 64 << 10;

/// A connection, and bytes that were read ahead of it.
#[derive(Debug)]
pub struct Io {
    stream: Stream,
    ahead: Bytes,
    reading: Reading,
}

/// How a connection is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    /// Exactly what is asked for.
    Asked,
    /// Ahead, as soon as a read is filled.
    Quiet,
    /// Ahead: the last read was filled, so that there is more. A connection on which nothing comes has no buffer.
    Flowing,
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Tls(Box<TlsStream<Io>>),
    Unix(UnixStream),
    Other(Box<dyn Duplex>),
}

/// A stream of a kind that the kernel does not know.
pub trait Duplex: AsyncRead + AsyncWrite + std::fmt::Debug + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + std::fmt::Debug + Send + Unpin> Duplex for S {}

impl From<Box<dyn Duplex>> for Io {
    fn from(stream: Box<dyn Duplex>) -> Io {
        Io { stream: Stream::Other(stream), ahead: Bytes::new(), reading: Reading::Asked }
    }
}

impl From<TcpStream> for Io {
    fn from(stream: TcpStream) -> Io {
        Io { stream: Stream::Tcp(stream), ahead: Bytes::new(), reading: Reading::Asked }
    }
}

impl From<UnixStream> for Io {
    fn from(stream: UnixStream) -> Io {
        Io { stream: Stream::Unix(stream), ahead: Bytes::new(), reading: Reading::Asked }
    }
}

impl From<TlsStream<Io>> for Io {
    fn from(mut stream: TlsStream<Io>) -> Io {
        stream.get_mut().0.reading = Reading::Quiet;
        Io { stream: Stream::Tls(Box::new(stream)), ahead: Bytes::new(), reading: Reading::Asked }
    }
}

impl Io {
    /// Gives back bytes that were read too early; they are the next to be read.
    pub fn unread(&mut self, bytes: Bytes) {
        self.ahead = if self.ahead.is_empty() {
            bytes
        } else {
            [bytes, std::mem::take(&mut self.ahead)].concat().into()
        };
    }

    /// Whether bytes of a file can go out without passing through here.
    pub(crate) fn takes_files(&self) -> bool {
        matches!(self.stream, Stream::Tcp(_))
    }

    /// Writes what is followed by bytes of a file, so that they leave together.
    pub(crate) fn poll_write_before_file(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        self.poll_try_write(cx, |socket| Ok(send(socket, bytes, SendFlags::MORE | SendFlags::NOSIGNAL)?))
    }

    /// Sends bytes of a file; none if it has no more.
    pub(crate) fn poll_send_file(
        &mut self,
        cx: &mut Context<'_>,
        file: &File,
        mut offset: u64,
        length: usize,
    ) -> Poll<std::io::Result<usize>> {
        self.poll_try_write(cx, |socket| Ok(sendfile(socket, file, Some(&mut offset), length)?))
    }

    /// Reads all that has come, as far as there is room. Once that is no more than was asked for, the next read is a
    /// plain one again.
    fn poll_read_ahead(&mut self, cx: &mut Context<'_>, asked: usize) -> Poll<std::io::Result<()>> {
        let mut room = BytesMut::with_capacity(AHEAD);
        let polled = pin!(self.stream.read_buf(&mut room)).poll(cx);
        if room.len() <= asked {
            self.reading = Reading::Quiet;
        }
        self.ahead = room.freeze();
        polled.map_ok(|_| ())
    }

    fn poll_try_write(
        &mut self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&TcpStream) -> std::io::Result<usize>,
    ) -> Poll<std::io::Result<usize>> {
        let Stream::Tcp(stream) = &self.stream else {
            return Poll::Ready(Err(std::io::ErrorKind::Unsupported.into()));
        };
        loop {
            ready!(stream.poll_write_ready(cx))?;
            match stream.try_io(Interest::WRITABLE, || write(stream)) {
                // It was not ready after all: the socket wakes us.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
        }
    }
}

impl AsyncRead for Io {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.ahead.is_empty() && self.reading == Reading::Flowing && out.remaining() < AHEAD {
            ready!(self.poll_read_ahead(cx, out.remaining()))?;
        } else if self.ahead.is_empty() {
            let room = out.remaining();
            ready!(Pin::new(&mut self.stream).poll_read(cx, out))?;
            if self.reading == Reading::Quiet && room > 0 && out.remaining() == 0 {
                self.reading = Reading::Flowing;
            }
            return Poll::Ready(Ok(()));
        }
        let take = self.ahead.len().min(out.remaining());
        out.put_slice(&self.ahead[..take]);
        self.ahead.advance(take);
        if self.ahead.is_empty() {
            // What is used up keeps its memory until it is gone.
            self.ahead = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        match &mut *self {
            Stream::Tcp(stream) => Pin::new(stream).poll_read(cx, out),
            Stream::Tls(stream) => Pin::new(stream).poll_read(cx, out),
            Stream::Unix(stream) => Pin::new(stream).poll_read(cx, out),
            Stream::Other(stream) => Pin::new(stream).poll_read(cx, out),
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        match &mut self.stream {
            Stream::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Unix(stream) => Pin::new(stream).poll_write(cx, bytes),
            Stream::Other(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        match &mut self.stream {
            Stream::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bytes),
            Stream::Unix(stream) => Pin::new(stream).poll_write_vectored(cx, bytes),
            Stream::Other(stream) => Pin::new(stream).poll_write_vectored(cx, bytes),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match &mut self.stream {
            // Nothing is buffered below a plain socket.
            Stream::Tcp(_) | Stream::Unix(_) => Poll::Ready(Ok(())),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(cx),
            Stream::Other(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match &mut self.stream {
            Stream::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Tls(stream) => {
                ready!(Pin::new(&mut *stream).poll_flush(cx))?;
                Pin::new(stream).poll_shutdown(cx)
            }
            Stream::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Stream::Other(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncWriteExt as _, DuplexStream};

    /// A connection that is read ahead, as below TLS, and its other end.
    fn ahead() -> (Io, DuplexStream) {
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let stream: Box<dyn Duplex> = Box::new(ours);
        (Io { reading: Reading::Quiet, ..Io::from(stream) }, theirs)
    }

    #[tokio::test]
    async fn what_keeps_coming_is_read_ahead_and_arrives_in_order() {
        let (mut io, mut theirs) = ahead();
        let sent: Vec<u8> = (0..300_000u32).map(|number| (number % 251) as u8).collect();
        theirs.write_all(&sent).await.unwrap();
        drop(theirs);
        let (mut came, mut piece, mut most) = (Vec::new(), [0; 4096], 0);
        loop {
            let read = io.read(&mut piece).await.unwrap();
            if read == 0 {
                break;
            }
            came.extend_from_slice(&piece[..read]);
            most = most.max(io.ahead.len());
        }
        assert!(came == sent && most == AHEAD - piece.len(), "{} bytes, at most {most} ahead", came.len());
    }

    #[tokio::test]
    async fn a_connection_that_has_gone_quiet_keeps_no_buffer() {
        let (mut io, mut theirs) = ahead();
        theirs.write_all(&[7; 10_000]).await.unwrap();
        let mut piece = [0; 4096];
        for left in [0, 10_000 - 2 * 4096, 0] {
            assert!(io.read(&mut piece).await.unwrap() > 0);
            assert_eq!(io.ahead.len(), left);
        }
        assert_eq!(io.reading, Reading::Flowing);
        // Nothing has come: the next read begins small.
        assert!(
            std::future::poll_fn(|cx| Poll::Ready(
                Pin::new(&mut io).poll_read(cx, &mut ReadBuf::new(&mut piece)).is_pending()
            ))
            .await
        );
        assert_eq!((io.reading, io.ahead.len()), (Reading::Quiet, 0));
    }

    #[tokio::test]
    async fn a_connection_without_tls_is_read_as_asked() {
        let (ours, mut theirs) = tokio::io::duplex(1 << 20);
        let stream: Box<dyn Duplex> = Box::new(ours);
        let mut io = Io::from(stream);
        theirs.write_all(&[7; 100_000]).await.unwrap();
        let mut piece = [0; 4096];
        for _ in 0..4 {
            assert_eq!(io.read(&mut piece).await.unwrap(), piece.len());
            assert!(io.ahead.is_empty());
        }
    }
}
