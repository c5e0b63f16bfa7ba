//! One HTTP/1.1 connection on the server side.
//!
//! The connection's task drives the handler itself: no hop, no channel. A request without a body never shares
//! anything; one with a body shares the socket's read side with [`Incoming`] through a lock that only these two
//! take and that is never held across a poll.

use super::decoder::{BodyDecoder, Decoded};
use super::head::{Framing, HeadError, HeadReader, RequestHead};
use crate::http::body::{Body, BodyError};
use crate::http::fields::Written;
use crate::http::interim::Interim;
use crate::http::io::Io;
use crate::http::serve::{ConnInfo, Handler, Server, WritePatience};
use crate::http::table::{Entry, Order, Phase};
use crate::http::tunnel::{Ended, Pump, Tunnel};
use crate::metrics::Counter;
use crate::problem::{CorrId, Rejection, X_CORR_ID};
use crate::reason::Reason;
use crate::task::panic_text;
use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, DATE, HeaderName, TRANSFER_ENCODING};
use http::{Method, Request, Response, StatusCode, Version};
use http_body::{Body as _, Frame, SizeHint};
use std::cell::RefCell;
use std::future::Future;
use std::io::IoSlice;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// Heads are read into a scratch buffer of the thread and copied out, so an idle connection holds no buffer.
const SCRATCH: usize = 16 << 10;
/// A body up to this size is copied behind its head, to leave in one write.
const COALESCE: usize = 16 << 10;
/// What is read and thrown away after a refusal, so that the client can read the answer.
const LINGER_BYTES: usize = 256 << 10;
const LINGER_TIME: Duration = Duration::from_secs(1);
/// Room for a response head of the usual size.
const HEAD_ROOM: usize = 768;
const TURN_AWAY_TIME: Duration = Duration::from_millis(50);

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

thread_local! {
    static SCRATCH_BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; SCRATCH]);
}

/// Reads what is there by way of the scratch buffer, so that the buffer holds it and no more; returns how much.
pub(crate) fn poll_read_exact(
    io: &mut Io,
    buffer: &mut BytesMut,
    cx: &mut Context<'_>,
) -> Poll<std::io::Result<usize>> {
    SCRATCH_BUFFER.with_borrow_mut(|scratch| {
        let mut read = ReadBuf::new(scratch);
        ready!(Pin::new(io).poll_read(cx, &mut read))?;
        buffer.extend_from_slice(read.filled());
        Poll::Ready(Ok(read.filled().len()))
    })
}

/// The socket and what was read from it, shared with the request body while there is one.
#[derive(Debug)]
pub(crate) struct Wire {
    inner: Mutex<Inner>,
    interim: Arc<Interim>,
}

#[derive(Debug)]
struct Inner {
    io: Io,
    buffer: BytesMut,
    body: BodyDecoder,
    /// The body broke off; nothing more of it can be read.
    failed: bool,
    /// Whoever waits for the body's next piece. The socket wakes only who read from it last.
    reader: Option<Waker>,
}

impl Inner {
    /// Reads what is there into the buffer; returns how much.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<std::io::Result<usize>> {
        poll_read_exact(&mut self.io, &mut self.buffer, cx)
    }

    fn poll_fill_body(&mut self, cx: &mut Context<'_>) -> Poll<std::io::Result<usize>> {
        self.buffer.reserve(self.body.wanted());
        tokio_util::io::poll_read_buf(Pin::new(&mut self.io), cx, &mut self.buffer)
    }

    /// The next piece of the body that is already in the buffer.
    fn decode(&mut self) -> Result<Decoded, BodyError> {
        if self.failed {
            return Err(BodyError::Disconnected);
        }
        self.body.decode(&mut self.buffer).map_err(|bad| {
            self.failed = true;
            BodyError::Malformed(bad.0)
        })
    }

    /// Throws away a body that has already arrived; true if nothing of it is left to come.
    fn discard_arrived(&mut self) -> bool {
        while let Ok(Decoded::Data(_) | Decoded::Trailers(_)) = self.decode() {}
        self.body.is_done()
    }
}

impl Wire {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The body of a request, read from the connection as it is asked for.
#[derive(Debug)]
pub(crate) struct Incoming {
    wire: Arc<Wire>,
    wants_continue: bool,
    timeout: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    timeouts: Counter,
}

impl Incoming {
    pub(crate) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let mut inner = self.wire.lock();
        loop {
            match inner.decode() {
                Ok(Decoded::Data(data)) => {
                    self.timer = None;
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Ok(Decoded::Trailers(trailers)) => return Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
                Ok(Decoded::End) => return Poll::Ready(None),
                Ok(Decoded::More) => {}
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
            if std::mem::take(&mut self.wants_continue) {
                self.wire.interim.want_continue();
            }
            match inner.poll_fill_body(cx) {
                Poll::Ready(Ok(read)) if read > 0 => {}
                Poll::Ready(_) => {
                    inner.failed = true;
                    return Poll::Ready(Some(Err(BodyError::Disconnected)));
                }
                Poll::Pending => {
                    inner.reader = Some(cx.waker().clone());
                    let timeout = self.timeout;
                    let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
                    ready!(timer.as_mut().poll(cx));
                    inner.failed = true;
                    self.timeouts.inc();
                    return Poll::Ready(Some(Err(BodyError::ReadTimeout)));
                }
            }
            self.timer = None;
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.wire.lock().body.is_done()
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        self.wire.lock().body.left().map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// How a connection ended, as far as the accept loop cares.
#[derive(Debug)]
pub(crate) enum End {
    Closed,
    /// The client speaks HTTP/2 without TLS; the socket is handed back with the bytes read so far.
    Http2(Io),
}

/// Why a response could not be written to its end.
enum Cut {
    Client,
    WriteTimeout,
    Aborted,
    Body(BodyError),
}

#[expect(clippy::large_enum_variant, reason = "made once per request and taken apart at once")]
enum NextHead {
    Head(RequestHead),
    Bad(HeadError),
    TimedOut,
    Closed,
    Http2,
}

/// What the response must know of its request.
struct Asked {
    method: Method,
    version: Version,
    keep_alive: bool,
}

pub(crate) struct Conn<'a, H> {
    server: &'a Server<H>,
    entry: &'a mut Entry,
    info: &'a ConnInfo,
    wire: Arc<Wire>,
    out: BytesMut,
    /// By when the client must have taken the answer.
    until: Option<Instant>,
    linger_time: Duration,
    /// What the response at hand asks for in place of the server's `write_timeout`.
    patience: Option<Duration>,
}

impl<'a, H: Handler> Conn<'a, H> {
    pub(crate) fn new(
        server: &'a Server<H>,
        entry: &'a mut Entry,
        info: &'a ConnInfo,
        io: Io,
    ) -> Conn<'a, H> {
        let inner =
            Inner { io, buffer: BytesMut::new(), body: BodyDecoder::Done, failed: false, reader: None };
        let wire = Wire { inner: Mutex::new(inner), interim: info.interim.clone().unwrap_or_default() };
        let (wire, out) = (Arc::new(wire), BytesMut::new());
        Conn { server, entry, info, wire, out, until: None, linger_time: LINGER_TIME, patience: None }
    }

    /// Serves requests until the connection ends.
    pub(crate) async fn run(mut self) -> End {
        let mut first = true;
        loop {
            match self.next_head(first).await {
                NextHead::Head(head) => {
                    self.entry.started();
                    let read_timeout = self.server.limits().read_timeout;
                    if !self.answer(head, read_timeout).await {
                        break;
                    }
                }
                NextHead::Bad(error) => {
                    self.refuse(rejection_of(error)).await;
                    break;
                }
                NextHead::TimedOut => {
                    self.server.timeouts.read.inc();
                    self.refuse(Rejection::new(
                        Reason::ReadTimeout,
                        "the request head did not arrive in time",
                    ))
                    .await;
                    break;
                }
                NextHead::Closed => break,
                NextHead::Http2 => {
                    let ahead = self.wire.lock().buffer.split().freeze();
                    // No request body exists yet, so nobody else holds the wire.
                    let Some(wire) = Arc::into_inner(self.wire) else { return End::Closed };
                    let mut io = wire.inner.into_inner().unwrap_or_else(PoisonError::into_inner).io;
                    io.unread(ahead);
                    return End::Http2(io);
                }
            }
            first = false;
            self.entry.state.set_phase(Phase::Idle);
        }
        // A TLS peer that reads nothing would hold the farewell up for ever.
        let farewell = std::future::poll_fn(|cx| Pin::new(&mut self.wire.lock().io).poll_shutdown(cx));
        let _ = tokio::time::timeout(LINGER_TIME, farewell).await;
        End::Closed
    }

    /// Tells the client that there is no place for it, without reading its request.
    pub(crate) async fn turn_away(mut self) {
        // Briefly: the few places for this must be free for the next.
        self.linger_time = TURN_AWAY_TIME;
        self.refuse(Rejection::new(Reason::Conns, "too many connections are open")).await;
    }

    async fn next_head(&mut self, first: bool) -> NextHead {
        let mut reader = HeadReader::default();
        let state = &self.entry.state;
        std::future::poll_fn(|cx| {
            state.watch(cx.waker());
            let mut inner = self.wire.lock();
            loop {
                if !inner.buffer.is_empty() {
                    if state.phase() == Phase::Idle {
                        state.set_phase(Phase::Head);
                    }
                    let known = inner.buffer.len().min(PREFACE.len());
                    if first && inner.buffer[..known] == PREFACE[..known] {
                        if known == PREFACE.len() {
                            return Poll::Ready(NextHead::Http2);
                        }
                    } else {
                        match reader.request(&mut inner.buffer, self.server.limits().head()) {
                            Ok(Some(head)) => return Poll::Ready(NextHead::Head(head)),
                            Ok(None) => {}
                            Err(error) => return Poll::Ready(NextHead::Bad(error)),
                        }
                    }
                }
                let untouched = inner.buffer.is_empty();
                let order = state.order();
                let read = match order {
                    Order::TimedOut if !untouched => return Poll::Ready(NextHead::TimedOut),
                    Order::TimedOut => {
                        self.server.timeouts.read.inc();
                        return Poll::Ready(NextHead::Closed);
                    }
                    Order::Close | Order::Abort => return Poll::Ready(NextHead::Closed),
                    Order::None | Order::Drain => inner.poll_fill(cx),
                };
                match read {
                    Poll::Ready(Ok(read)) if read > 0 => {}
                    // The end, or an error: what came of a head does not matter any more.
                    Poll::Ready(_) => return Poll::Ready(NextHead::Closed),
                    // Told to drain: a request that already lay in the socket was looked for just now. One that the client
                    // has only just sent is waited for; its answer says that the connection ends.
                    Poll::Pending if order == Order::Drain && untouched && !state.is_in_use() => {
                        return Poll::Ready(NextHead::Closed);
                    }
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await
    }

    /// Answers one request; false if the connection must end.
    async fn answer(&mut self, head: RequestHead, read_timeout: Duration) -> bool {
        self.entry.state.set_phase(Phase::Busy);
        self.entry.state.set_request(&head.method, &head.uri);
        let asked = Asked { method: head.method.clone(), version: head.version, keep_alive: head.keep_alive };
        let sent = head.headers.get(X_CORR_ID).cloned();
        self.wire.interim.reset();
        let body = self.begin_body(&head, read_timeout);
        let mut request = Request::new(body);
        *request.method_mut() = head.method;
        *request.uri_mut() = head.uri;
        *request.version_mut() = head.version;
        *request.headers_mut() = head.headers;
        let server = self.server;
        let response = {
            let call = pin!(server.handler.call(request, self.info));
            match self.drive(call).await {
                Some(Driven::Response(response)) => response,
                Some(Driven::Panic(text)) => {
                    server.service.tasks().panicked("request", &text);
                    server.refused(
                        Rejection::new(Reason::Internal, "the request could not be answered"),
                        &CorrId::of(sent.as_ref()),
                    )
                }
                Some(Driven::Aborted) => {
                    server.service.tasks().aborted("request");
                    let late =
                        Rejection::new(Reason::Draining, "the service shut down before the answer was ready");
                    server.refused(late, &CorrId::of(sent.as_ref()))
                }
                None => {
                    server.count_left();
                    return false;
                }
            }
        };
        match self.respond(&asked, response).await {
            Ok(keep) => keep,
            Err(Cut::WriteTimeout) => {
                server.timeouts.write.inc();
                false
            }
            Err(Cut::Aborted) => {
                server.service.tasks().aborted("request");
                false
            }
            Err(Cut::Body(error)) => {
                tracing::debug!(%error, corr_id = CorrId::of(sent.as_ref()).as_str(), "response cut");
                false
            }
            Err(Cut::Client) => false,
        }
    }

    fn begin_body(&self, head: &RequestHead, timeout: Duration) -> Body {
        if head.framing == Framing::Length(0) {
            return Body::default();
        }
        self.wire.lock().body = BodyDecoder::new(head.framing);
        Body::h1(Incoming {
            wire: self.wire.clone(),
            wants_continue: head.expect_continue,
            timeout,
            timer: None,
            timeouts: self.server.timeouts.read.clone(),
        })
    }

    /// Polls the handler to its answer, meanwhile sending interim answers and noticing a client that
    /// left (then `None`).
    async fn drive<F>(&mut self, mut call: Pin<&mut F>) -> Option<Driven>
    where
        F: Future<Output = Response<Body>> + Send,
    {
        let state = self.entry.state.clone();
        let mut said = BytesMut::new();
        let driven = std::future::poll_fn(|cx| {
            state.watch(cx.waker());
            self.wire.interim.waker.register(cx.waker());
            // At the end of a drain too the handler has the last word: it may know more of what it began.
            match catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(cx))) {
                Ok(Poll::Ready(response)) => return Poll::Ready(Some(Driven::Response(response))),
                Ok(Poll::Pending) => {}
                Err(panic) => return Poll::Ready(Some(Driven::Panic(panic_text(panic.as_ref())))),
            }
            if state.order() == Order::Abort {
                return Poll::Ready(Some(Driven::Aborted));
            }
            self.wire.interim.take_all(&mut said);
            let mut inner = self.wire.lock();
            while !said.is_empty() {
                match Pin::new(&mut inner.io).poll_write(cx, &said) {
                    Poll::Ready(Ok(written)) if written > 0 => said.advance(written),
                    Poll::Ready(_) => return Poll::Ready(None),
                    Poll::Pending => break,
                }
            }
            if client_left(&mut inner, cx) { Poll::Ready(None) } else { Poll::Pending }
        })
        .await;
        // What was said in the same breath as the answer goes out before it.
        self.wire.interim.take(&mut said);
        self.out.unsplit(said);
        driven
    }

    /// Writes the response; true if the connection can take another request.
    async fn respond(&mut self, asked: &Asked, mut response: Response<Body>) -> Result<bool, Cut> {
        // While the handler still streams the body on, what has arrived of it is not ours to throw away.
        let alone = Arc::strong_count(&self.wire) == 1;
        let body_read =
            if alone { self.wire.lock().discard_arrived() } else { self.wire.lock().body.is_done() };
        let draining = self.entry.state.order() >= Order::Drain;
        let keep = asked.keep_alive && body_read && !draining;
        let mut body = std::mem::take(response.body_mut());
        self.until = body.until();
        let written = body.take_written();
        let written = written.as_deref();
        let plan = Plan::of(asked, &response, &body, written);
        let keep = keep && plan.framing != Framing::UntilClose;
        self.patience = response.extensions().get::<WritePatience>().map(|patience| patience.0);
        encode_head(&mut self.out, asked, &response, written, plan, keep);
        if let Some(tunnel) = body.take_tunnel() {
            self.flush(Bytes::new()).await?;
            return self.tunnel(tunnel).await.map(|()| false);
        }
        if plan.bodiless {
            self.flush(Bytes::new()).await?;
        } else if let Some(bytes) = body.take_full() {
            self.flush(bytes).await?;
        } else if matches!(plan.framing, Framing::Length(length) if self.is_sendable(&mut body, length)) {
            self.send_file(&mut body).await?;
        } else {
            self.stream(&mut body, plan.framing).await?;
        }
        drop(body);
        if !body_read {
            self.linger().await;
        }
        Ok(keep)
    }

    /// Passes bytes on in both directions until the connection ends.
    async fn tunnel(&mut self, tunnel: Tunnel) -> Result<(), Cut> {
        let mut pump = Pump::new(tunnel, self.patience.unwrap_or(self.server.limits().write_timeout));
        let state = self.entry.state.clone();
        {
            let mut inner = self.wire.lock();
            let ahead = inner.buffer.split().freeze();
            inner.io.unread(ahead);
        }
        std::future::poll_fn(|cx| {
            state.watch(cx.waker());
            if state.order() == Order::Abort {
                return Poll::Ready(Err(Cut::Aborted));
            }
            match ready!(pump.poll(&mut self.wire.lock().io, cx)) {
                Ended::Closed => Poll::Ready(Ok(())),
                Ended::WriteTimeout => Poll::Ready(Err(Cut::WriteTimeout)),
            }
        })
        .await
    }

    /// Passes a body's frames on as they come, under backpressure.
    async fn stream(&mut self, body: &mut Body, framing: Framing) -> Result<(), Cut> {
        let mut left = if let Framing::Length(length) = framing { length } else { u64::MAX };
        loop {
            let Some(frame) = self.next_frame(body).await? else { break };
            let frame = match frame.into_data() {
                Ok(data) if data.is_empty() => continue,
                Ok(data) => data,
                Err(frame) => {
                    if let (Framing::Chunked, Ok(trailers)) = (framing, frame.into_trailers()) {
                        return self.finish_chunked(Some(&trailers)).await;
                    }
                    continue;
                }
            };
            left = left
                .checked_sub(frame.len() as u64)
                .ok_or(Cut::Body(BodyError::Malformed("the body is longer than its Content-Length")))?;
            if framing == Framing::Chunked {
                self.out.extend_from_slice(format!("{:x}\r\n", frame.len()).as_bytes());
                self.flush_with(frame, b"\r\n").await?;
            } else {
                self.flush(frame).await?;
            }
        }
        match framing {
            Framing::Chunked => self.finish_chunked(None).await,
            Framing::Length(_) if left > 0 => {
                Err(Cut::Body(BodyError::Malformed("the body is shorter than its Content-Length")))
            }
            _ => self.flush(Bytes::new()).await,
        }
    }

    async fn finish_chunked(&mut self, trailers: Option<&http::HeaderMap>) -> Result<(), Cut> {
        self.out.extend_from_slice(b"0\r\n");
        for (name, value) in trailers.into_iter().flatten() {
            push_field(&mut self.out, name.as_str(), value.as_bytes());
        }
        self.out.extend_from_slice(b"\r\n");
        self.flush(Bytes::new()).await
    }

    /// The next frame. What is waiting to be written goes out first unless the frame is there already.
    async fn next_frame(&mut self, body: &mut Body) -> Result<Option<Frame<Bytes>>, Cut> {
        let now = std::future::poll_fn(|cx| {
            Poll::Ready(match Pin::new(&mut *body).poll_frame(cx) {
                Poll::Ready(frame) => Some(frame),
                Poll::Pending => None,
            })
        })
        .await;
        if let Some(frame) = now {
            return frame.transpose().map_err(Cut::Body);
        }
        self.flush(Bytes::new()).await?;
        let state = self.entry.state.clone();
        std::future::poll_fn(|cx| {
            state.watch(cx.waker());
            if state.order() == Order::Abort {
                return Poll::Ready(Err(Cut::Aborted));
            }
            if let Poll::Ready(frame) = Pin::new(&mut *body).poll_frame(cx) {
                return Poll::Ready(frame.transpose().map_err(Cut::Body));
            }
            if client_left(&mut self.wire.lock(), cx) { Poll::Ready(Err(Cut::Client)) } else { Poll::Pending }
        })
        .await
    }

    async fn flush(&mut self, data: Bytes) -> Result<(), Cut> {
        self.flush_with(data, b"").await
    }

    /// Whether a body is a file of which just this length goes out, to a socket that takes it from there.
    fn is_sendable(&self, body: &mut Body, length: u64) -> bool {
        body.as_file().is_some_and(|file| file.left() == length) && self.wire.lock().io.takes_files()
    }

    /// Sends a file, by way of this process only where it has to be read from its disk first.
    async fn send_file(&mut self, body: &mut Body) -> Result<(), Cut> {
        while let Some(file) = body.as_file().filter(|file| file.left() > 0) {
            let Some(window) = file.at_hand() else {
                if let Some(Ok(bytes)) = self.next_frame(body).await?.map(Frame::into_data) {
                    self.flush(bytes).await?;
                }
                continue;
            };
            let until = file.left() - window;
            self.write_out(|io, head, cx| {
                if !head.is_empty() {
                    let written = ready!(io.poll_write_before_file(cx, head)).map_err(|_gone| Cut::Client)?;
                    head.advance(written);
                    return Poll::Ready(Ok(false));
                }
                let length = usize::try_from(file.left() - until).unwrap_or(usize::MAX);
                let sent = io.poll_send_file(cx, file.file(), file.offset(), length);
                match ready!(sent).map_err(|_gone| Cut::Client)? {
                    0 => Poll::Ready(Err(Cut::Body(BodyError::Upstream("the file has ended".to_owned())))),
                    sent => {
                        file.advance(sent as u64);
                        Poll::Ready(Ok(file.left() == until))
                    }
                }
            })
            .await?;
        }
        Ok(())
    }

    /// Writes the head buffer, `data` and `tail`.
    async fn flush_with(&mut self, mut data: Bytes, mut tail: &'static [u8]) -> Result<(), Cut> {
        if data.len() + tail.len() <= COALESCE {
            self.out.extend_from_slice(&data);
            self.out.extend_from_slice(tail);
            (data, tail) = (Bytes::new(), b"");
        }
        self.write_out(|io, out, cx| {
            if out.is_empty() && data.is_empty() && tail.is_empty() {
                let flushed = ready!(Pin::new(io).poll_flush(cx));
                return Poll::Ready(flushed.map(|()| true).map_err(|_gone| Cut::Client));
            }
            let slices = [IoSlice::new(out), IoSlice::new(&data), IoSlice::new(tail)];
            match ready!(Pin::new(io).poll_write_vectored(cx, &slices)) {
                Ok(written) if written > 0 => {
                    advance(written, out, &mut data, &mut tail);
                    Poll::Ready(Ok(false))
                }
                _ => Poll::Ready(Err(Cut::Client)),
            }
        })
        .await
    }

    /// Writes step by step until all is written (`true`); each `write_timeout` must see some progress, and whoever
    /// takes a little now and then is held to the answer's own deadline.
    async fn write_out(
        &mut self,
        mut step: impl FnMut(&mut Io, &mut BytesMut, &mut Context<'_>) -> Poll<Result<bool, Cut>>,
    ) -> Result<(), Cut> {
        let timeout = self.patience.unwrap_or(self.server.limits().write_timeout);
        let mut timer: Option<Pin<Box<Sleep>>> = None;
        let state = self.entry.state.clone();
        let deadline = self.until.zip(self.info.timer.as_deref());
        let (wire, out) = (&self.wire, &mut self.out);
        std::future::poll_fn(|cx| {
            let mut inner = wire.lock();
            loop {
                match step(&mut inner.io, out, cx) {
                    Poll::Ready(Ok(true)) => return Poll::Ready(Ok(())),
                    Poll::Ready(Ok(false)) => timer = None,
                    Poll::Ready(Err(cut)) => return Poll::Ready(Err(cut)),
                    Poll::Pending => {
                        state.watch(cx.waker());
                        if state.order() == Order::Abort {
                            return Poll::Ready(Err(Cut::Aborted));
                        }
                        let timer = timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
                        let late = deadline.is_some_and(|(until, of)| of.poll_until(until, cx).is_ready());
                        if !late {
                            ready!(timer.as_mut().poll(cx));
                        }
                        return Poll::Ready(Err(Cut::WriteTimeout));
                    }
                }
            }
        })
        .await
    }

    /// Refuses what could not be read as a request, and ends the connection so that the client sees why.
    async fn refuse(&mut self, rejection: Rejection) {
        let asked = Asked { method: Method::GET, version: Version::HTTP_11, keep_alive: false };
        let mut response = self.server.turned_away(rejection, &CorrId::new(), self.info, None);
        let body = std::mem::take(response.body_mut());
        let plan = Plan::of(&asked, &response, &body, None);
        encode_head(&mut self.out, &asked, &response, None, plan, false);
        let mut body = body;
        if self.flush(body.take_full().unwrap_or_default()).await.is_ok() {
            self.linger().await;
        }
    }

    /// Shuts the write half and reads on a little, so that unread input does not reset the answer away.
    async fn linger(&mut self) {
        let wire = &self.wire;
        // Whoever still passes the body on must not take what is thrown away here for the end of it.
        let reader = {
            let mut inner = wire.lock();
            inner.failed = true;
            inner.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
        let mut read = 0;
        let mut shut = false;
        let state = self.entry.state.clone();
        let discard = std::future::poll_fn(|cx| {
            state.watch(cx.waker());
            let mut inner = wire.lock();
            if !shut {
                if ready!(Pin::new(&mut inner.io).poll_shutdown(cx)).is_err() {
                    return Poll::Ready(());
                }
                shut = true;
            }
            loop {
                inner.buffer.clear();
                match inner.poll_fill(cx) {
                    Poll::Ready(Ok(n)) if n > 0 && read < LINGER_BYTES => read += n,
                    Poll::Ready(_) => return Poll::Ready(()),
                    Poll::Pending => {
                        return if state.order() == Order::Abort { Poll::Ready(()) } else { Poll::Pending };
                    }
                }
            }
        });
        let _ = tokio::time::timeout(self.linger_time, discard).await;
    }
}

enum Driven {
    Response(Response<Body>),
    Panic(String),
    Aborted,
}

/// Whether the client closed its side, looked at only while no body is being read. Pipelined bytes are kept.
fn client_left(inner: &mut Inner, cx: &mut Context<'_>) -> bool {
    if !inner.body.is_done() || !inner.buffer.is_empty() {
        return false;
    }
    matches!(inner.poll_fill(cx), Poll::Ready(Ok(0) | Err(_)))
}

fn advance(mut written: usize, out: &mut BytesMut, data: &mut Bytes, tail: &mut &'static [u8]) {
    let from_out = written.min(out.len());
    let _ = out.split_to(from_out);
    written -= from_out;
    let from_data = written.min(data.len());
    let _ = data.split_to(from_data);
    *tail = &tail[written - from_data..];
}

fn rejection_of(error: HeadError) -> Rejection {
    let reason = match error {
        HeadError::Malformed(_) => Reason::Malformed,
        HeadError::TooLarge => Reason::Headers,
        HeadError::UriTooLong => Reason::Uri,
        HeadError::Expectation => Reason::Expectation,
        HeadError::LengthRequired => Reason::LengthRequired,
    };
    Rejection::new(reason, error.to_string())
}

/// How a response's body goes out.
#[derive(Clone, Copy)]
struct Plan {
    framing: Framing,
    /// Answers to HEAD, and statuses without a body.
    bodiless: bool,
    /// The length is ours to state, not the handler's.
    state_length: bool,
}

impl Plan {
    /// The length of a body that goes into the head's buffer.
    fn short_len(self) -> usize {
        match self.framing {
            Framing::Length(length) if length <= COALESCE as u64 => usize::try_from(length).unwrap_or(0),
            _ => 0,
        }
    }

    fn of(asked: &Asked, response: &Response<Body>, body: &Body, written: Option<&Written>) -> Plan {
        let status = response.status();
        let never = status.is_informational() || matches!(status.as_u16(), 204 | 304);
        let stated = match written {
            Some(written) => written.length,
            None => {
                response.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok())
            }
        };
        let framing = match (stated, body.exact_len()) {
            (Some(length), _) => Framing::Length(length),
            (None, Some(length)) => Framing::Length(length),
            (None, None) if asked.version == Version::HTTP_11 => Framing::Chunked,
            (None, None) => Framing::UntilClose,
        };
        let head_without_length = asked.method == Method::HEAD && body.exact_len() == Some(0);
        Plan {
            framing,
            bodiless: never || asked.method == Method::HEAD,
            state_length: stated.is_none() && !never && !head_without_length,
        }
    }
}

fn encode_head(
    out: &mut BytesMut,
    asked: &Asked,
    response: &Response<Body>,
    written: Option<&Written>,
    plan: Plan,
    keep: bool,
) {
    out.reserve(HEAD_ROOM + plan.short_len());
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(response.status().as_str().as_bytes());
    out.extend_from_slice(b" ");
    out.extend_from_slice(response.status().canonical_reason().unwrap_or("").as_bytes());
    out.extend_from_slice(b"\r\n");
    for (name, value) in response.headers() {
        let forbidden = *name == CONTENT_LENGTH && response.status() == StatusCode::NO_CONTENT;
        if !forbidden && *name != CONNECTION && *name != TRANSFER_ENCODING && *name != KEEP_ALIVE {
            push_field(out, name.as_str(), value.as_bytes());
        }
    }
    if let Some(written) = written {
        out.extend_from_slice(&written.lines);
    }
    if !written.map_or_else(|| response.headers().contains_key(DATE), |written| written.dated) {
        crate::http::serve::with_date(|date| push_field(out, "date", date.as_bytes()));
    }
    if plan.state_length {
        match plan.framing {
            Framing::Length(length) => push_field(out, "content-length", length.to_string().as_bytes()),
            Framing::Chunked => push_field(out, "transfer-encoding", b"chunked"),
            Framing::UntilClose => {}
        }
    }
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        push_field(out, "connection", b"upgrade");
    } else if !keep {
        push_field(out, "connection", b"close");
    } else if asked.version == Version::HTTP_10 {
        push_field(out, "connection", b"keep-alive");
    }
    out.extend_from_slice(b"\r\n");
}

fn push_field(out: &mut BytesMut, name: &str, value: &[u8]) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}
