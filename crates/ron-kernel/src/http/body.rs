//! Bodies, in and out.

use super::fields::Written;
use super::file::FileBody;
use super::h1::conn::Incoming;
use super::tunnel::Tunnel;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;
use tokio::time::{Sleep, sleep_until};

/// Why a body could not be read to its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BodyError {
    #[error("no byte of the body arrived in time")]
    ReadTimeout,
    #[error("the body is larger than allowed")]
    TooLarge,
    #[error("{0}")]
    Malformed(&'static str),
    #[error("the sender went away")]
    Disconnected,
    #[error("the deadline has passed")]
    Deadline,
    #[error("the body cannot be decoded: {0}")]
    Decode(#[from] crate::admission::decode::DecodeError),
    #[error("{0}")]
    Upstream(String),
}

/// A stream of a body's frames.
type BoxBody = Pin<Box<dyn HttpBody<Data = Bytes, Error = BodyError> + Send>>;

/// A message body. Nothing is buffered that has not been asked for.
#[derive(Default)]
pub struct Body {
    kind: Kind,
    until: Option<Instant>,
    /// Rings then, for whoever waits for the next frame.
    timer: Option<Pin<Box<Sleep>>>,
    /// Fields of the answer that it is the body of, if they are written already.
    written: Option<Arc<Written>>,
}

#[derive(Default)]
enum Kind {
    #[default]
    Empty,
    Full(Bytes),
    File(Box<FileBody>),
    H1(Incoming),
    H2(Box<super::h2::Incoming>),
    Stream(BoxBody),
    Tunnel(Box<Tunnel>),
}

impl Body {
    pub fn full(bytes: impl Into<Bytes>) -> Body {
        let bytes = bytes.into();
        Body::of(if bytes.is_empty() { Kind::Empty } else { Kind::Full(bytes) })
    }

    /// A stretch of a file.
    pub fn file(file: FileBody) -> Body {
        Body::of(Kind::File(Box::new(file)))
    }

    pub fn stream(stream: impl HttpBody<Data = Bytes, Error = BodyError> + Send + 'static) -> Body {
        Body::of(Kind::Stream(Box::pin(stream)))
    }

    fn of(kind: Kind) -> Body {
        Body { kind, until: None, timer: None, written: None }
    }

    /// The same body, which a client must have taken whole by then; nothing comes after that but the error.
    #[must_use]
    pub fn ending_by(self, until: Option<Instant>) -> Body {
        Body { until, ..self }
    }

    /// The same body with fields that go before it as they are, behind those of its response. For clients of HTTP/1.1
    /// only, which [`ConnInfo::interim`](super::ConnInfo) tells.
    #[must_use]
    pub fn behind(self, written: impl Into<Arc<Written>>) -> Body {
        Body { written: Some(written.into()), ..self }
    }

    /// Whether there are such fields.
    pub fn is_behind(&self) -> bool {
        self.written.is_some()
    }

    pub(crate) fn take_written(&mut self) -> Option<Arc<Written>> {
        self.written.take()
    }

    /// By when a client must have taken it whole.
    pub fn until(&self) -> Option<Instant> {
        self.until
    }

    /// What `wrap` makes of it, still bound to end in time and with its fields before it.
    #[must_use]
    pub fn wrapped(mut self, wrap: impl FnOnce(Body) -> Body) -> Body {
        let (until, written) = (self.until, self.written.take());
        Body { until, written, ..wrap(self) }
    }

    /// The same body with each of its pieces passed through `map`, which keeps their lengths.
    #[must_use]
    pub fn map_data(
        self,
        map: impl FnMut(Bytes) -> Result<Bytes, BodyError> + Send + Unpin + 'static,
    ) -> Body {
        self.wrapped(|body| Body::stream(Mapped { body, map }))
    }

    /// The same body, ended with [`BodyError::TooLarge`] once more than `cap` bytes came.
    #[must_use]
    pub fn capped(self, cap: u64) -> Body {
        let mut left = cap;
        self.map_data(move |piece| {
            left = left.checked_sub(piece.len() as u64).ok_or(BodyError::TooLarge)?;
            Ok(piece)
        })
    }

    /// The far side of a connection that changes its protocol; only an answer with status 101 has it.
    pub fn tunnel(tunnel: Tunnel) -> Body {
        Body::of(Kind::Tunnel(Box::new(tunnel)))
    }

    pub(crate) fn take_tunnel(&mut self) -> Option<Tunnel> {
        match std::mem::take(&mut self.kind) {
            Kind::Tunnel(tunnel) => Some(*tunnel),
            other => {
                self.kind = other;
                None
            }
        }
    }

    pub(crate) fn h1(incoming: Incoming) -> Body {
        Body::of(Kind::H1(incoming))
    }

    pub(crate) fn h2(incoming: super::h2::Incoming) -> Body {
        Body::of(Kind::H2(Box::new(incoming)))
    }

    pub(crate) fn as_file(&mut self) -> Option<&mut FileBody> {
        match &mut self.kind {
            Kind::File(file) => Some(file),
            _ => None,
        }
    }

    /// The bytes, if they are all here already.
    pub(crate) fn take_full(&mut self) -> Option<Bytes> {
        match &mut self.kind {
            Kind::Empty => Some(Bytes::new()),
            Kind::Full(bytes) => Some(std::mem::take(bytes)),
            _ => None,
        }
    }

    /// The length of a body that is all here already.
    pub fn ready_len(&self) -> Option<u64> {
        match &self.kind {
            Kind::Empty | Kind::Tunnel(_) => Some(0),
            Kind::Full(bytes) => Some(bytes.len() as u64),
            _ => None,
        }
    }

    /// The next frame; `None` at the end. Cancel-safe.
    pub async fn frame(&mut self) -> Option<Result<Frame<Bytes>, BodyError>> {
        std::future::poll_fn(|cx| Pin::new(&mut *self).poll_frame(cx)).await
    }

    /// The whole body, up to a cap.
    pub async fn collect(&mut self, cap: usize) -> Result<Bytes, BodyError> {
        let mut out = bytes::BytesMut::new();
        while let Some(frame) = self.frame().await {
            if let Ok(data) = frame?.into_data() {
                if out.len() + data.len() > cap {
                    return Err(BodyError::TooLarge);
                }
                out.extend_from_slice(&data);
            }
        }
        Ok(out.freeze())
    }

    /// The length, where it is known beforehand.
    pub fn exact_len(&self) -> Option<u64> {
        self.size_hint().exact()
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let polled = match &mut self.kind {
            Kind::Empty | Kind::Tunnel(_) => return Poll::Ready(None),
            Kind::Full(bytes) => {
                let bytes = std::mem::take(bytes);
                self.kind = Kind::Empty;
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            Kind::File(file) => file.poll_frame(cx),
            Kind::H1(incoming) => incoming.poll_frame(cx),
            Kind::H2(incoming) => incoming.poll_frame(cx),
            Kind::Stream(stream) => stream.as_mut().poll_frame(cx),
        };
        let Some(until) = self.until else { return polled };
        let late = match polled {
            Poll::Ready(None) => false,
            Poll::Ready(Some(_)) => Instant::now() >= until,
            Poll::Pending => {
                let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(until.into())));
                timer.as_mut().poll(cx).is_ready()
            }
        };
        if late { Poll::Ready(Some(Err(BodyError::Deadline))) } else { polled }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Empty | Kind::Tunnel(_) => true,
            Kind::Full(_) => false,
            Kind::File(file) => file.left() == 0,
            Kind::H1(incoming) => incoming.is_done(),
            Kind::H2(incoming) => incoming.is_end_stream(),
            Kind::Stream(stream) => stream.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Empty | Kind::Tunnel(_) => SizeHint::with_exact(0),
            Kind::Full(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Kind::File(file) => SizeHint::with_exact(file.left()),
            Kind::H1(incoming) => incoming.size_hint(),
            Kind::H2(incoming) => incoming.size_hint(),
            Kind::Stream(stream) => stream.size_hint(),
        }
    }
}

impl std::fmt::Debug for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Never the bytes themselves: a body has no place in a log.
        write!(f, "Body({:?})", self.exact_len())
    }
}

/// A body whose pieces are looked at, replaced or refused on their way.
struct Mapped<F> {
    body: Body,
    map: F,
}

impl<F: FnMut(Bytes) -> Result<Bytes, BodyError> + Unpin> HttpBody for Mapped<F> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let Some(frame) = ready!(Pin::new(&mut this.body).poll_frame(cx)) else { return Poll::Ready(None) };
        Poll::Ready(Some(match frame?.into_data() {
            Ok(piece) => (this.map)(piece).map(Frame::data),
            Err(trailers) => Ok(trailers),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Gives a piece each second, for ever.
    struct Slow(Pin<Box<Sleep>>);

    impl HttpBody for Slow {
        type Data = Bytes;
        type Error = BodyError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
            ready!(self.0.as_mut().poll(cx));
            self.0 = Box::pin(tokio::time::sleep(Duration::from_secs(1)));
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"x")))))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_ends_by_its_deadline_whoever_is_slow() {
        let slow = || Body::stream(Slow(Box::pin(tokio::time::sleep(Duration::from_secs(1)))));
        let begun = tokio::time::Instant::now();
        let until = (begun + Duration::from_millis(2500)).into_std();
        let mut body = slow().ending_by(Some(until));
        let mut pieces = 0;
        let error = loop {
            match body.frame().await.expect("it does not end") {
                Ok(_) => pieces += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, BodyError::Deadline) && pieces == 2, "{error}");
        assert_eq!(begun.elapsed(), Duration::from_millis(2500));
        assert!(slow().frame().await.expect("a piece").is_ok(), "without one it goes on");
    }
}
