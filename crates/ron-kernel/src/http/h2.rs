//! HTTP/2, spoken by hyper; limits, phases and orders are ours.

mod incoming;

pub(crate) use incoming::Incoming;

use super::body::{Body, BodyError};
use super::h1::head::{check_target, is_host};
use super::io::Io;
use super::serve::{ConnInfo, Handler, Server, ServerLimits, WritePatience};
use super::table::{ConnState, Entry, Order, Phase};
use crate::kernel::Service;
use crate::metrics::Counter;
use crate::problem::{CorrId, Rejection};
use crate::reason::Reason;
use crate::task::panic_text;
use bytes::Bytes;
use http::header::{EXPECT, HOST, HeaderValue};
use http::{Method, Request, Response, Uri};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use incoming::{Unread, discard};
use std::cell::RefCell;
use std::convert::Infallible;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Sleep;

/// Streams a client may have open at once on one connection.
const STREAMS_MAX: u32 = 128;
/// Streams reset by the client before they were answered, or by us for errors, before the connection ends.
const RESETS_MAX: usize = 64;
/// What a stream may have in flight towards us.
const WINDOW: u32 = 256 << 10;
/// Bytes of response buffered per stream while its window is shut.
const SEND_BUFFER: usize = 256 << 10;
/// A peer that does not answer a ping within this time is gone.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Told to end, a connection without streams may take this long about it.
const FAREWELL: Duration = Duration::from_secs(1);

/// What a client without a place is told: empty settings, and a GOAWAY that asks for calm.
const GO_AWAY: &[u8] = b"\0\0\0\x04\0\0\0\0\0\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0b";

/// Tells a client that there is no place for it.
pub(super) async fn turn_away<H: Handler>(server: &Server<H>, info: &ConnInfo, mut io: Io) {
    let refused = Rejection::new(Reason::Conns, "too many connections are open");
    drop(server.turned_away(refused, &CorrId::new(), info, None));
    let say = async {
        io.write_all(GO_AWAY).await?;
        io.shutdown().await
    };
    let _ = tokio::time::timeout(FAREWELL, say).await;
}

/// Serves a connection until it ends or is told to.
pub(super) async fn serve<H: Handler>(
    server: &Arc<Server<H>>,
    entry: &mut Entry,
    info: ConnInfo,
    mut io: Io,
) {
    let state = entry.state.clone();
    // A client that chose HTTP/2 and then says nothing is slow, not idle.
    tokio::select! {
        biased;
        order = state.ordered(Order::Drain) => {
            if order == Order::TimedOut {
                server.timeouts.read.inc();
            }
            return;
        }
        arrived = preface(&mut io) => if !arrived {
            return;
        },
    }
    entry.started();
    state.set_phase(Phase::Idle);
    let limits = server.limits().clone();
    let streams = Arc::new(AtomicUsize::new(0));
    let info = Arc::new(info);
    let service = service_fn(|request: Request<hyper::body::Incoming>| {
        let (server, state, streams, info) = (server.clone(), state.clone(), streams.clone(), info.clone());
        async move { Ok::<_, Infallible>(answer(&server, &state, streams, &info, request).await) }
    });
    let spawner = Spawner {
        service: server.service.clone(),
        write_timeout: limits.write_timeout,
        timeouts: server.timeouts.write.clone(),
    };
    let mut builder = hyper::server::conn::http2::Builder::new(spawner);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .max_pending_accept_reset_streams(RESETS_MAX)
        .max_local_error_reset_streams(RESETS_MAX)
        // Past this hyper refuses by itself; up to it the refusal is ours, with its reason.
        .max_header_list_size(u32::try_from(limits.header_bytes_max.saturating_mul(4)).unwrap_or(u32::MAX))
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW * 4)
        .max_send_buf_size(SEND_BUFFER)
        .keep_alive_interval(limits.idle_timeout)
        .keep_alive_timeout(PING_TIMEOUT);
    let mut conn = pin!(builder.serve_connection(TokioIo::new(io), service));
    let mut farewell: Option<Pin<Box<Sleep>>> = None;
    let ended = std::future::poll_fn(|cx| {
        state.watch(cx.waker());
        if state.order() > Order::None && farewell.is_none() {
            farewell = Some(Box::pin(tokio::time::sleep(FAREWELL)));
            conn.as_mut().graceful_shutdown();
        }
        if let Poll::Ready(ended) = conn.as_mut().poll(cx) {
            return Poll::Ready(ended);
        }
        while let Some(timer) = &mut farewell {
            ready!(timer.as_mut().poll(cx));
            // Time is up for a peer that does not answer; streams in flight are given theirs.
            if streams.load(Ordering::Acquire) == 0 {
                return Poll::Ready(Ok(()));
            }
            timer.as_mut().reset(tokio::time::Instant::now() + FAREWELL);
        }
        Poll::Pending
    });
    if let Err(error) = ended.await {
        tracing::debug!(service = server.service.name(), %error, "HTTP/2 connection ended");
    }
}

/// Waits for the 24 bytes with which a client begins, and puts them back; false if they do not come.
async fn preface(io: &mut Io) -> bool {
    let mut first = [0; 24];
    let arrived = io.read_exact(&mut first).await.is_ok();
    if arrived {
        io.unread(Bytes::copy_from_slice(&first));
    }
    arrived
}

async fn answer<H: Handler>(
    server: &Server<H>,
    state: &Arc<ConnState>,
    streams: Arc<AtomicUsize>,
    info: &ConnInfo,
    request: Request<hyper::body::Incoming>,
) -> Response<Tracked> {
    let open = Open::new(state.clone(), streams);
    state.set_request(request.method(), request.uri());
    let stall = STALL.with_borrow(Option::clone).unwrap_or_default();
    let _ = stall.request.set((request.method().clone(), request.uri().clone()));
    let unread = Unread::default();
    let corr = CorrId::from_headers(request.headers());
    let limits = server.limits();
    let response = if let Some(rejection) = check(&request, &limits) {
        let refused = server.turned_away(rejection, &corr, info, Some((request.method(), request.uri())));
        unread.put(request.into_body());
        refused
    } else {
        let (timeout, timeouts) = (limits.read_timeout, server.timeouts.read.clone());
        drop(limits);
        let kept = unread.clone();
        let request = request.map(|body| Body::h2(Incoming::new(body, kept, timeout, timeouts)));
        let mut left = Left(Some(server));
        let mut call = pin!(server.handler.call(request, info));
        let called = std::future::poll_fn(|cx| {
            catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(cx)))
                .map_or_else(|panic| Poll::Ready(Err(panic_text(panic.as_ref()))), |polled| polled.map(Ok))
        });
        let answered = tokio::select! {
            biased;
            called = called => called.unwrap_or_else(|panic| {
                server.service.tasks().panicked("request", &panic);
                server.refused(Rejection::new(Reason::Internal, "the request could not be answered"), &corr)
            }),
            () = server.service.shutdown().reached(crate::shutdown::Phase::Aborting) => {
                server.service.tasks().aborted("request");
                let late = Rejection::new(Reason::Draining, "the service shut down before the answer was ready");
                server.refused(late, &corr)
            }
        };
        left.0 = None;
        answered
    };
    if let Some(WritePatience(patience)) = response.extensions().get() {
        let _ = stall.patience.set(*patience);
    }
    stall.wait();
    let service = server.service.clone();
    response.map(|body| Tracked { body, stall, unread, service, open: Some(open) })
}

/// Counts a request whose client left, unless it is answered before this is dropped.
struct Left<'a, H: Handler>(Option<&'a Server<H>>);

impl<H: Handler> Drop for Left<'_, H> {
    fn drop(&mut self) {
        if let Some(server) = self.0 {
            server.count_left();
        }
    }
}

/// What HTTP/1.1 is held to while its head is read.
fn check(request: &Request<hyper::body::Incoming>, limits: &ServerLimits) -> Option<Rejection> {
    let (headers, uri) = (request.headers(), request.uri());
    let bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    if headers.len() > limits.headers_max || bytes > limits.header_bytes_max {
        return Some(Rejection::new(Reason::Headers, "the header section has too many fields or bytes"));
    }
    if uri.path_and_query().is_some_and(|target| target.as_str().len() > limits.header_bytes_max / 4) {
        return Some(Rejection::new(Reason::Uri, "the request target is too long"));
    }
    if headers.get(EXPECT).is_some_and(|value| !value.as_bytes().eq_ignore_ascii_case(b"100-continue")) {
        return Some(Rejection::new(Reason::Expectation, "the expectation is not 100-continue"));
    }
    let (authority, host) =
        (uri.authority().map(|authority| authority.as_str().as_bytes()), headers.get(HOST));
    let host = host.map(HeaderValue::as_bytes);
    let one = match (authority, host) {
        (Some(authority), Some(host)) => authority.eq_ignore_ascii_case(host),
        (None, None) => false,
        _ => true,
    };
    let sound = host.is_none_or(is_host) && check_target(uri).is_ok();
    (!one || !sound).then(|| Rejection::new(Reason::Malformed, "the request names no host, or more than one"))
}

thread_local! {
    /// The stall watch of the stream being polled, for `answer` to hand to its body.
    static STALL: RefCell<Option<Arc<Stall>>> = const { RefCell::new(None) };
}

/// Since when a response waits for its client to open the window: in milliseconds of the stream's own clock, plus one.
#[derive(Debug)]
struct Stall {
    begun: Instant,
    waiting: AtomicU64,
    /// What the stream asked for.
    request: OnceLock<(Method, Uri)>,
    /// What its response asks for in place of the server's `write_timeout`.
    patience: OnceLock<Duration>,
}

impl Default for Stall {
    fn default() -> Stall {
        let (waiting, request, patience) = (AtomicU64::new(0), OnceLock::new(), OnceLock::new());
        Stall { begun: Instant::now(), waiting, request, patience }
    }
}

impl Stall {
    fn wait(&self) {
        let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.waiting.store(now.saturating_add(1), Ordering::Release);
    }

    fn go_on(&self) {
        self.waiting.store(0, Ordering::Release);
    }

    fn describe(&self) -> String {
        let age = self.begun.elapsed();
        match self.request.get() {
            Some((method, uri)) => format!("{method} {} for {age:?}", uri.path()),
            None => format!("without a request for {age:?}"),
        }
    }

    /// How long the client has let us wait.
    fn waited(&self) -> Option<Duration> {
        let since = self.waiting.load(Ordering::Acquire).checked_sub(1)?;
        Some(self.begun.elapsed().saturating_sub(Duration::from_millis(since)))
    }
}

/// Counts a stream from its request to the last byte of its response.
struct Open {
    state: Arc<ConnState>,
    streams: Arc<AtomicUsize>,
}

impl Open {
    fn new(state: Arc<ConnState>, streams: Arc<AtomicUsize>) -> Open {
        if streams.fetch_add(1, Ordering::AcqRel) == 0 {
            state.set_phase(Phase::Busy);
        }
        Open { state, streams }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if self.streams.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.state.set_phase(Phase::Idle);
        }
    }
}

/// A response body that keeps its stream counted and notes whether it waits for data or for the client.
struct Tracked {
    body: Body,
    stall: Arc<Stall>,
    unread: Unread,
    service: Service,
    /// Until it is dropped.
    open: Option<Open>,
}

impl Drop for Tracked {
    fn drop(&mut self) {
        // The response's own body may hold on to the request's.
        self.body = Body::default();
        let (Some(body), Some(open)) = (self.unread.take(), self.open.take()) else { return };
        if tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let (stall, shutdown) = (self.stall.clone(), self.service.shutdown().clone());
        self.service.scoped("stream", move || stall.describe(), async move {
            let _open = open;
            tokio::select! {
                () = discard(body) => {}
                () = shutdown.reached(crate::shutdown::Phase::Aborting) => {}
            }
        });
    }
}

impl HttpBody for Tracked {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        // Asked for more, we are not stalled; with a piece in hand, hyper comes back only when the window is open.
        if polled.is_pending() {
            self.stall.go_on()
        } else {
            self.stall.wait()
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Starts a stream's task under its service, and ends it if the client's window stays shut.
#[derive(Clone)]
struct Spawner {
    service: Service,
    write_timeout: Duration,
    timeouts: Counter,
}

impl<F> hyper::rt::Executor<F> for Spawner
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        let (timeout, timeouts) = (self.write_timeout, self.timeouts.clone());
        let stall = Arc::new(Stall::default());
        let described = stall.clone();
        let mut future = Box::pin(future);
        let mut timer: Option<Pin<Box<Sleep>>> = None;
        let watched = std::future::poll_fn(move |cx| {
            STALL.set(Some(stall.clone()));
            let polled = future.as_mut().poll(cx);
            STALL.set(None);
            if polled.is_ready() {
                return Poll::Ready(());
            }
            while let Some(waited) = stall.waited() {
                let timeout = stall.patience.get().copied().unwrap_or(timeout);
                if waited >= timeout {
                    // Dropping the stream resets it and frees what it holds.
                    timeouts.inc();
                    return Poll::Ready(());
                }
                let until = tokio::time::Instant::now() + (timeout - waited);
                let timer = timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
                timer.as_mut().reset(until);
                ready!(timer.as_mut().poll(cx));
            }
            Poll::Pending
        });
        self.service.scoped("stream", move || described.describe(), watched);
    }
}
