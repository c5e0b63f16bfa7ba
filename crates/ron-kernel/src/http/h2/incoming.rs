//! The body of a request over HTTP/2, and what becomes of the part that nobody reads.

use crate::http::body::BodyError;
use crate::metrics::Counter;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::Sleep;

/// What is read and thrown away of a refused body, so that the client can read the answer.
const LINGER_BYTES: usize = 256 << 10;
const LINGER_TIME: Duration = Duration::from_secs(1);

/// The body of a request; each `read_timeout` must bring a piece of it.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// Until it is dropped.
    body: Option<hyper::body::Incoming>,
    unread: Unread,
    timeout: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    timeouts: Counter,
}

impl Incoming {
    pub(super) fn new(
        body: hyper::body::Incoming,
        unread: Unread,
        timeout: Duration,
        timeouts: Counter,
    ) -> Incoming {
        Incoming { body: Some(body), unread, timeout, timer: None, timeouts }
    }

    pub(in crate::http) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        if let Poll::Ready(frame) = Pin::new(body).poll_frame(cx) {
            self.timer = None;
            return Poll::Ready(frame.map(|frame| frame.map_err(|_reset| BodyError::Disconnected)));
        }
        let timeout = self.timeout;
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
        ready!(timer.as_mut().poll(cx));
        self.timeouts.inc();
        Poll::Ready(Some(Err(BodyError::ReadTimeout)))
    }

    pub(in crate::http) fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    pub(in crate::http) fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if let Some(body) = self.body.take() {
            self.unread.put(body);
        }
    }
}

/// What nobody wanted to read of a request's body. Let go at once it would reset the stream, and with it the answer
/// that the client has not read yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Unread(Arc<Mutex<Option<hyper::body::Incoming>>>);

impl Unread {
    pub(super) fn put(&self, body: hyper::body::Incoming) {
        if !body.is_end_stream() {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(body);
        }
    }

    pub(super) fn take(&self) -> Option<hyper::body::Incoming> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Reads on a little and throws it away.
pub(super) async fn discard(mut body: hyper::body::Incoming) {
    let mut read = 0;
    let discard = std::future::poll_fn(|cx| {
        loop {
            match ready!(Pin::new(&mut body).poll_frame(cx)) {
                Some(Ok(frame)) if read < LINGER_BYTES => read += frame.data_ref().map_or(0, Bytes::len),
                _ => return Poll::Ready(()),
            }
        }
    });
    let _ = tokio::time::timeout(LINGER_TIME, discard).await;
}
