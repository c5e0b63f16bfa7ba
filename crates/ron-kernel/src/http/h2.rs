//! HTTP/2, spoken by hyper; limits, phases and orders are ours.

use super::body::{Body, BodyError};
use super::io::Io;
use super::serve::{ConnInfo, Handler, Server};
use super::table::{ConnState, Entry, Order, Phase};
use crate::problem::{CorrId, Rejection};
use crate::reason::Reason;
use crate::task::panic_text;
use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

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

/// Serves a connection until it ends or is told to.
pub(super) async fn serve<H: Handler>(server: &Arc<Server<H>>, entry: &mut Entry, info: ConnInfo, io: Io) {
    entry.started();
    let state = entry.state.clone();
    state.set_phase(Phase::Idle);
    let limits = server.limits().clone();
    let streams = Arc::new(AtomicUsize::new(0));
    let info = Arc::new(info);
    let service = service_fn(|request: Request<hyper::body::Incoming>| {
        let (server, state, streams, info) = (server.clone(), state.clone(), streams.clone(), info.clone());
        async move { Ok::<_, Infallible>(answer(&server, &state, streams, &info, request).await) }
    });
    let mut builder = hyper::server::conn::http2::Builder::new(Spawner(server.service.clone()));
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .max_pending_accept_reset_streams(RESETS_MAX)
        .max_local_error_reset_streams(RESETS_MAX)
        .max_header_list_size(u32::try_from(limits.header_bytes_max).unwrap_or(u32::MAX))
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW * 4)
        .max_send_buf_size(SEND_BUFFER)
        .keep_alive_interval(limits.idle_timeout)
        .keep_alive_timeout(PING_TIMEOUT);
    let mut conn = pin!(builder.serve_connection(TokioIo::new(io), service));
    let mut told = false;
    let ended = std::future::poll_fn(|cx| {
        state.watch(cx.waker());
        if state.order() > Order::None && !told {
            told = true;
            conn.as_mut().graceful_shutdown();
        }
        conn.as_mut().poll(cx)
    });
    if let Err(error) = ended.await {
        tracing::debug!(service = server.service.name(), %error, "HTTP/2 connection ended");
    }
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
    let corr = CorrId::from_headers(request.headers());
    let response = if request.headers().len() > server.limits().headers_max {
        server.rejections.count(Reason::Headers);
        server.count_unrouted(Reason::Headers.status());
        Rejection::new(Reason::Headers, "the header section has too many fields").into_response(&corr)
    } else {
        let mut call = pin!(server.handler.call(request.map(Body::h2), info));
        let called = std::future::poll_fn(|cx| {
            catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(cx)))
                .map_or_else(|panic| Poll::Ready(Err(panic_text(panic.as_ref()))), |polled| polled.map(Ok))
        });
        tokio::select! {
            biased;
            called = called => called.unwrap_or_else(|panic| {
                server.service.tasks().panicked("request", &panic);
                server.rejections.count(Reason::Internal);
                Rejection::new(Reason::Internal, "the request could not be answered").into_response(&corr)
            }),
            () = server.service.shutdown().reached(crate::shutdown::Phase::Aborting) => {
                server.service.tasks().aborted("request");
                server.rejections.count(Reason::Draining);
                let late = Rejection::new(Reason::Draining, "the service shut down before the answer was ready");
                late.into_response(&corr)
            }
        }
    };
    response.map(|body| Tracked { body, _open: open })
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

/// A response body that keeps its stream counted.
struct Tracked {
    body: Body,
    _open: Open,
}

impl HttpBody for Tracked {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Starts a stream's task under its service.
#[derive(Clone)]
struct Spawner(crate::kernel::Service);

impl<F> hyper::rt::Executor<F> for Spawner
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.scoped("stream", || "HTTP/2 stream".to_owned(), future);
    }
}
