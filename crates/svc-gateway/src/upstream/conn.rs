//! One HTTP/1.1 connection to a server, on the client side.

use super::Server;
use crate::forward::may_trail;
use crate::gate::Pass;
use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{Method, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use ron_kernel::admission::deadline::Budget;
use ron_kernel::http::h1::chunked::BadChunk;
use ron_kernel::http::h1::decoder::{BodyDecoder, Decoded};
use ron_kernel::http::h1::head::{Framing, HeadLimits, HeadReader, ResponseHead};
use ron_kernel::http::{Body, BodyError, Io};
use std::future::Future;
use std::io::IoSlice;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// An upstream is trusted more than a client, but not without bound.
const HEAD_LIMITS: HeadLimits = HeadLimits { headers_max: 256, bytes_max: 128 << 10 };
const READ: usize = 16 << 10;
/// An answer of at most this length is held to its budget to the last byte.
const SHORT: u64 = 1 << 20;

/// Why a call did not yield a response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("the upstream could not be reached: {0}")]
    Connect(String),
    #[error("the upstream broke the connection: {0}")]
    Broken(String),
    #[error("the upstream's answer is malformed: {0}")]
    Malformed(String),
    #[error("the request body failed: {0}")]
    RequestBody(BodyError),
    /// A kept connection was closed before it took the request; it is safe to try another.
    #[error("the connection had been closed")]
    Stale,
}

/// What a call holds on to while its response streams.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) pass: Option<Pass>,
    /// What the request costs without its response, and the factor for both.
    pub(crate) request_cost: u64,
    pub(crate) cost_factor: u64,
    /// Longest silence of the upstream within a body.
    pub(crate) silence: Duration,
    pub(crate) budget: Budget,
    /// The head says that the body is chunked.
    pub(crate) chunked: bool,
}

#[derive(Debug)]
pub(crate) struct ClientConn {
    io: Io,
    buffer: BytesMut,
    reused: bool,
}

impl ClientConn {
    pub(super) fn new(io: Io) -> ClientConn {
        ClientConn { io, buffer: BytesMut::new(), reused: false }
    }

    /// Whether the server has neither closed the connection nor sent anything unasked.
    pub(super) fn is_quiet(&mut self) -> bool {
        let mut byte = [0];
        let mut cx = Context::from_waker(Waker::noop());
        Pin::new(&mut self.io).poll_read(&mut cx, &mut ReadBuf::new(&mut byte)).is_pending()
    }

    /// Sends the request and waits for the head of the response; the upload goes on meanwhile.
    pub(super) async fn exchange(
        mut self,
        head: &BytesMut,
        method: &Method,
        body: &mut Option<Body>,
        call: &mut Call,
        server: &Arc<Server>,
    ) -> Result<Response<Body>, CallError> {
        let mut upload = Upload::new(head, body.take().unwrap_or_default(), call.chunked);
        let mut reader = HeadReader::default();
        let received = std::future::poll_fn(|cx| {
            let upload_failed = match upload.poll(&mut self.io, cx) {
                Poll::Ready(Err(error)) => Some(error),
                Poll::Ready(Ok(())) | Poll::Pending => None,
            };
            loop {
                match reader.response(&mut self.buffer, HEAD_LIMITS, method) {
                    Ok(Some(head)) if head.status.as_u16() == 101 => {
                        let unasked = "it switches protocols unasked".to_owned();
                        return Poll::Ready(Err(CallError::Malformed(unasked)));
                    }
                    Ok(Some(head)) if head.status.is_informational() => continue,
                    Ok(Some(head)) => return Poll::Ready(Ok(head)),
                    Ok(None) => {}
                    Err(error) => return Poll::Ready(Err(CallError::Malformed(error.to_string()))),
                }
                self.buffer.reserve(READ);
                match tokio_util::io::poll_read_buf(Pin::new(&mut self.io), cx, &mut self.buffer) {
                    Poll::Ready(Ok(read)) if read > 0 => {}
                    Poll::Ready(ended) => {
                        let reason =
                            ended.map_or_else(|error| error.to_string(), |_| "it was closed".to_owned());
                        return Poll::Ready(Err(CallError::Broken(reason)));
                    }
                    // An upstream may refuse an upload and say why: its answer counts more than the broken pipe.
                    Poll::Pending => {
                        return upload_failed.map_or(Poll::Pending, |error| Poll::Ready(Err(error)));
                    }
                }
            }
        })
        .await;
        match received {
            Ok(head) => {
                let mut decoder = BodyDecoder::new(head.framing);
                let first = self.first_piece(&mut decoder).await?;
                Ok(self.response(head, decoder, first, upload, call, server))
            }
            Err(CallError::Broken(_))
                if self.reused && self.buffer.is_empty() && upload.can_repeat(method) =>
            {
                // Nothing of the body was taken from it: the next connection gets it whole.
                *body = Some(upload.body);
                Err(CallError::Stale)
            }
            Err(error) => Err(error),
        }
    }

    /// What has already come of the body, if anything. A body that is broken from the start is a failed call:
    /// nothing has been sent to the client yet, so it can still be told.
    async fn first_piece(&mut self, decoder: &mut BodyDecoder) -> Result<Option<Decoded>, CallError> {
        std::future::poll_fn(|cx| {
            let malformed = |bad: BadChunk| CallError::Malformed(bad.0.to_owned());
            match decoder.decode(&mut self.buffer).map_err(malformed)? {
                Decoded::More => {}
                decoded => return Poll::Ready(Ok(Some(decoded))),
            }
            self.buffer.reserve(READ);
            match tokio_util::io::poll_read_buf(Pin::new(&mut self.io), cx, &mut self.buffer) {
                Poll::Pending => Poll::Ready(Ok(None)),
                Poll::Ready(Ok(read)) if read > 0 => {
                    match decoder.decode(&mut self.buffer).map_err(malformed)? {
                        Decoded::More => Poll::Ready(Ok(None)),
                        decoded => Poll::Ready(Ok(Some(decoded))),
                    }
                }
                Poll::Ready(Ok(_)) if decoder.end_of_input() => Poll::Ready(Ok(None)),
                Poll::Ready(_) => Poll::Ready(Err(CallError::Broken("it ended after its head".to_owned()))),
            }
        })
        .await
    }

    fn response(
        mut self,
        head: ResponseHead,
        decoder: BodyDecoder,
        first: Option<Decoded>,
        upload: Upload,
        call: &mut Call,
        server: &Arc<Server>,
    ) -> Response<Body> {
        let mut response = Response::new(Body::default());
        *response.status_mut() = head.status;
        *response.headers_mut() = head.headers;
        let keep = head.keep_alive && upload.done;
        // A short body that came with its head needs no stream, and its connection is free at once.
        if let Framing::Length(length) = head.framing
            && keep
            && decoder.is_done()
            && self.buffer.is_empty()
        {
            let bytes = match first {
                Some(Decoded::Data(bytes)) => bytes,
                _ => Bytes::new(),
            };
            debug_assert_eq!(bytes.len() as u64, length);
            if let Some(pass) = &call.pass {
                pass.settle(call.cost_factor * (call.request_cost + bytes.len() as u64));
            }
            *response.body_mut() = Body::full(bytes);
            self.reused = true;
            server.keep(self);
            return response;
        }
        let pass = call.pass.take();
        *response.body_mut() = Body::stream(UpstreamBody {
            conn: Some(self),
            decoder,
            first,
            upload,
            keep_alive: head.keep_alive,
            server: server.clone(),
            silence: call.silence,
            silent: None,
            until: until(&response, &call.budget)
                .map(|until| Box::pin(tokio::time::sleep_until(until.into()))),
            pass,
            cost: call.request_cost,
            cost_factor: call.cost_factor,
        });
        response
    }
}

/// When the whole response must be there: a short one within its budget, any within the client's own deadline.
fn until(response: &Response<Body>, budget: &Budget) -> Option<Instant> {
    let field = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
    let short = field(CONTENT_LENGTH)
        .and_then(|length| length.parse::<u64>().ok())
        .is_some_and(|length| length <= SHORT);
    let stream = field(CONTENT_TYPE)
        .is_some_and(|kind| kind.starts_with("text/event-stream") || kind.starts_with("application/grpc"));
    if short && !stream { Some(budget.until) } else { budget.client }
}

/// The request on its way out.
#[derive(Debug)]
struct Upload {
    out: BytesMut,
    data: Bytes,
    body: Body,
    chunked: bool,
    done: bool,
    body_begun: bool,
}

impl Upload {
    fn new(head: &BytesMut, body: Body, chunked: bool) -> Upload {
        Upload { out: head.clone(), data: Bytes::new(), body, chunked, done: false, body_begun: false }
    }

    fn can_repeat(&self, method: &Method) -> bool {
        !self.body_begun && method.is_idempotent()
    }

    /// Writes on; ready when the whole request is out.
    fn poll(&mut self, io: &mut Io, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        let broken = |error: std::io::Error| CallError::Broken(error.to_string());
        while !self.done {
            while !self.out.is_empty() || !self.data.is_empty() {
                let slices = [IoSlice::new(&self.out), IoSlice::new(&self.data)];
                let written = ready!(Pin::new(&mut *io).poll_write_vectored(cx, &slices)).map_err(broken)?;
                if written == 0 {
                    return Poll::Ready(Err(CallError::Broken("it takes no more bytes".to_owned())));
                }
                let from_out = written.min(self.out.len());
                let _ = self.out.split_to(from_out);
                let _ = self.data.split_to(written - from_out);
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => self.push(frame),
                Some(Err(error)) => return Poll::Ready(Err(CallError::RequestBody(error))),
                None => {
                    if std::mem::take(&mut self.chunked) {
                        self.out.extend_from_slice(if self.body_begun {
                            b"\r\n0\r\n\r\n"
                        } else {
                            b"0\r\n\r\n"
                        });
                        continue;
                    }
                    self.done = true;
                }
            }
        }
        Pin::new(io).poll_flush(cx).map_err(broken)
    }

    fn push(&mut self, frame: Frame<Bytes>) {
        match frame.into_data() {
            Ok(data) if data.is_empty() => {}
            Ok(data) => {
                if self.chunked {
                    let line_end = if self.body_begun { "\r\n" } else { "" };
                    self.out.extend_from_slice(format!("{line_end}{:x}\r\n", data.len()).as_bytes());
                }
                self.body_begun = true;
                self.data = data;
            }
            Err(frame) => {
                let Ok(trailers) = frame.into_trailers() else { return };
                if std::mem::take(&mut self.chunked) {
                    self.out.extend_from_slice(if self.body_begun { b"\r\n0\r\n" } else { b"0\r\n" });
                    for (name, value) in trailers.iter().filter(|(name, _)| may_trail(name)) {
                        self.out.extend_from_slice(name.as_str().as_bytes());
                        self.out.extend_from_slice(b": ");
                        self.out.extend_from_slice(value.as_bytes());
                        self.out.extend_from_slice(b"\r\n");
                    }
                    self.out.extend_from_slice(b"\r\n");
                }
            }
        }
    }
}

/// A response body as it streams from the upstream; its connection is kept when it ends well.
struct UpstreamBody {
    conn: Option<ClientConn>,
    decoder: BodyDecoder,
    /// What came with the head.
    first: Option<Decoded>,
    upload: Upload,
    keep_alive: bool,
    server: Arc<Server>,
    silence: Duration,
    silent: Option<Pin<Box<Sleep>>>,
    until: Option<Pin<Box<Sleep>>>,
    pass: Option<Pass>,
    /// What request and response have cost so far.
    cost: u64,
    cost_factor: u64,
}

impl UpstreamBody {
    fn end(&mut self) {
        if let Some(mut conn) = self.conn.take()
            && self.keep_alive
            && self.upload.done
            && conn.buffer.is_empty()
        {
            conn.reused = true;
            self.server.keep(conn);
        }
    }
}

impl HttpBody for UpstreamBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let Some(conn) = &mut this.conn else { return Poll::Ready(None) };
        if let Some(until) = &mut this.until
            && until.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Some(Err(BodyError::Deadline)));
        }
        if !this.upload.done
            && let Poll::Ready(Err(error)) = this.upload.poll(&mut conn.io, cx)
        {
            // The upstream answered and takes no more: its answer still counts, its connection does not.
            tracing::debug!(%error, "upload given up");
            (this.upload.done, this.keep_alive) = (true, false);
        }
        loop {
            let decoded = match this.first.take() {
                Some(first) => Ok(first),
                None => this.decoder.decode(&mut conn.buffer),
            };
            match decoded {
                Ok(Decoded::Data(data)) => {
                    this.silent = None;
                    this.cost += data.len() as u64;
                    if let Some(pass) = &this.pass {
                        pass.settle(this.cost_factor.saturating_mul(this.cost));
                    }
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Ok(Decoded::Trailers(trailers)) => return Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
                Ok(Decoded::End) => {
                    this.end();
                    return Poll::Ready(None);
                }
                Ok(Decoded::More) => {}
                Err(bad) => return Poll::Ready(Some(Err(BodyError::Malformed(bad.0)))),
            }
            conn.buffer.reserve(this.decoder.wanted());
            match tokio_util::io::poll_read_buf(Pin::new(&mut conn.io), cx, &mut conn.buffer) {
                Poll::Ready(Ok(read)) if read > 0 => {}
                Poll::Ready(Ok(_)) if this.decoder.end_of_input() => this.keep_alive = false,
                // Cut short, or reset: never to be taken for a whole answer.
                Poll::Ready(_) => {
                    this.conn = None;
                    return Poll::Ready(Some(Err(BodyError::Upstream("it ended in the middle".to_owned()))));
                }
                Poll::Pending => {
                    let silence = this.silence;
                    let timer = this.silent.get_or_insert_with(|| Box::pin(tokio::time::sleep(silence)));
                    ready!(timer.as_mut().poll(cx));
                    return Poll::Ready(Some(Err(BodyError::Upstream("it fell silent".to_owned()))));
                }
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        let ahead = if let Some(Decoded::Data(data)) = &self.first { data.len() as u64 } else { 0 };
        self.decoder.left().map_or_else(SizeHint::default, |left| SizeHint::with_exact(left + ahead))
    }
}
