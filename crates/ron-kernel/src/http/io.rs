//! A byte stream of any kind a listener can produce.

use bytes::{Buf, Bytes};
use rustix::fs::sendfile;
use rustix::net::{SendFlags, send};
use std::fs::File;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsStream;

/// A connection, and bytes that were read ahead of it.
#[derive(Debug)]
pub struct Io {
    stream: Stream,
    ahead: Bytes,
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
        Io { stream: Stream::Other(stream), ahead: Bytes::new() }
    }
}

impl From<TcpStream> for Io {
    fn from(stream: TcpStream) -> Io {
        Io { stream: Stream::Tcp(stream), ahead: Bytes::new() }
    }
}

impl From<UnixStream> for Io {
    fn from(stream: UnixStream) -> Io {
        Io { stream: Stream::Unix(stream), ahead: Bytes::new() }
    }
}

impl From<TlsStream<Io>> for Io {
    fn from(stream: TlsStream<Io>) -> Io {
        Io { stream: Stream::Tls(Box::new(stream)), ahead: Bytes::new() }
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
        if !self.ahead.is_empty() {
            let take = self.ahead.len().min(out.remaining());
            out.put_slice(&self.ahead[..take]);
            self.ahead.advance(take);
            return Poll::Ready(Ok(()));
        }
        match &mut self.stream {
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
