//! One HTTP/2 connection to a server, shared by many calls; hyper speaks it.

use super::{Answer, CallError, CallLimits, Outgoing, Payload, Remote, ResponseBody, Source, retain};
use crate::http::body::{Body, BodyError};
use crate::http::fields::Fields;
use crate::http::io::Io;
use crate::kernel::Service;
use bytes::Bytes;
use http::HeaderName;
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// What a stream may have in flight towards us. A connection may have as much for each of its streams, or a few whose
/// clients read slowly would hold up all the others.
const STREAM_WINDOW: u32 = 256 << 10;
const CONN_WINDOW: u32 = STREAM_WINDOW * super::STREAMS_MAX as u32;
/// Largest header section of an answer, as for HTTP/1.1.
const HEADER_BYTES_MAX: u32 = 128 << 10;
/// While streams are open, the server must answer a ping this often and within this time.
const PING_EVERY: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection without a single answer for so long is not trusted with another request.
const SILENCE: Duration = Duration::from_secs(1);

/// The connection, to be cloned by each call.
#[derive(Clone)]
pub(super) struct Multiplexed {
    sender: SendRequest<Outbound>,
    streams: Arc<AtomicUsize>,
    /// Answers that came.
    answers: Arc<AtomicUsize>,
}

impl std::fmt::Debug for Multiplexed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Multiplexed({} streams)", self.streams())
    }
}

impl Multiplexed {
    pub(super) async fn new(
        remote: &Arc<Remote>,
        service: &Service,
        io: Io,
    ) -> Result<Multiplexed, hyper::Error> {
        let mut builder = Builder::new(Spawner(service.clone()));
        builder
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONN_WINDOW)
            .max_header_list_size(HEADER_BYTES_MAX)
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_TIMEOUT);
        let (sender, conn) = builder.handshake(TokioIo::new(io)).await?;
        let (of, shutdown) = (Arc::downgrade(remote), service.shutdown().clone());
        let name = remote.address.to_string();
        service.scoped("upstream_conn", move || name.clone(), async move {
            let mut conn = std::pin::pin!(conn);
            let ended = tokio::select! {
                biased;
                ended = &mut conn => ended,
                () = shutdown.draining() => {
                    // With no sender left, the connection ends when its streams have.
                    if let Some(remote) = of.upgrade() {
                        remote.forget_multiplexed();
                    }
                    conn.await
                }
            };
            if let Err(error) = ended {
                tracing::debug!(%error, "HTTP/2 connection to a server ended");
            }
        });
        Ok(Multiplexed { sender, streams: Arc::default(), answers: Arc::default() })
    }

    pub(super) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    pub(super) fn is_same(&self, other: &Multiplexed) -> bool {
        Arc::ptr_eq(&self.streams, &other.streams)
    }

    pub(super) fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }

    /// Sends the request and waits for the head of the answer; hyper moves the body meanwhile.
    pub(super) async fn exchange(
        mut self,
        remote: &Remote,
        head: &dyn Outgoing,
        body: &mut Option<Body>,
        limits: CallLimits,
    ) -> Result<Answer, CallError> {
        let scheme = if remote.address.is_https() { "https" } else { "http" };
        let open = Open::new(&self.streams);
        let mut unheard = Unheard::new(remote, &self);
        let failed = Arc::new(Mutex::new(None));
        let sent = body.take().unwrap_or_default();
        let bodiless = sent.exact_len() == Some(0);
        let outbound = Outbound { body: sent, may_trail: head.trailers(), failed: failed.clone() };
        let request = head.http2(scheme, remote.address.authority()).map(|()| outbound);
        let answered = self.sender.try_send_request(request).await;
        unheard.conn = None;
        match answered {
            Ok(response) => {
                self.answers.fetch_add(1, Ordering::Relaxed);
                let (parts, incoming) = response.into_parts();
                let download = Download { incoming, _open: open };
                let payload = Payload::Stream(ResponseBody::new(Source::Http2(download), limits.silence));
                let fields = Fields::Map(parts.headers);
                Ok(Answer { status: parts.status, version: parts.version, fields, payload })
            }
            Err(mut error) => {
                // Given back whole: the connection was closing and took nothing.
                if let Some(request) = error.take_message() {
                    *body = Some(request.into_body().body);
                    return Err(CallError::Stale);
                }
                if bodiless {
                    *body = Some(Body::default());
                }
                let failed = failed.lock().unwrap_or_else(PoisonError::into_inner).take();
                Err(failed
                    .map_or_else(|| CallError::Broken(error.error().to_string()), CallError::RequestBody))
            }
        }
    }
}

/// A call given up without an answer. If the whole connection had none for a good while it may be dead, and pings
/// take their time to find that out: no further request goes over it.
struct Unheard<'a> {
    remote: &'a Remote,
    /// `None` once there is an answer.
    conn: Option<Multiplexed>,
    answers: usize,
    begun: Instant,
}

impl<'a> Unheard<'a> {
    fn new(remote: &'a Remote, conn: &Multiplexed) -> Unheard<'a> {
        let answers = conn.answers.load(Ordering::Relaxed);
        Unheard { remote, conn: Some(conn.clone()), answers, begun: Instant::now() }
    }
}

impl Drop for Unheard<'_> {
    fn drop(&mut self) {
        if let Some(conn) = &self.conn
            && conn.answers.load(Ordering::Relaxed) == self.answers
            && self.begun.elapsed() >= SILENCE
        {
            self.remote.forget(conn);
        }
    }
}

/// Counts a stream from its request to the end of its response.
#[derive(Debug)]
struct Open(Arc<AtomicUsize>);

impl Open {
    fn new(streams: &Arc<AtomicUsize>) -> Open {
        streams.fetch_add(1, Ordering::Relaxed);
        Open(streams.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request body on its way out.
pub(super) struct Outbound {
    body: Body,
    may_trail: fn(&HeaderName) -> bool,
    /// Why the body failed, for the call to tell.
    failed: Arc<Mutex<Option<BodyError>>>,
}

impl HttpBody for Outbound {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx).map(|next| {
            Some(match next? {
                Ok(frame) => Ok(match frame.into_trailers() {
                    Ok(mut trailers) => {
                        retain(&mut trailers, self.may_trail);
                        Frame::trailers(trailers)
                    }
                    Err(frame) => frame,
                }),
                Err(error) => {
                    let text = error.to_string();
                    *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                    Err(std::io::Error::other(text))
                }
            })
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A response body as it streams.
#[derive(Debug)]
pub(super) struct Download {
    incoming: hyper::body::Incoming,
    _open: Open,
}

impl Download {
    pub(super) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        Pin::new(&mut self.incoming)
            .poll_frame(cx)
            .map_err(|error| BodyError::Upstream(format!("it ended in the middle: {error}")))
    }

    pub(super) fn is_end(&self) -> bool {
        self.incoming.is_end_stream()
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

/// Starts what hyper wants done beside a connection: bodies on their way out.
#[derive(Clone)]
struct Spawner(Service);

impl<F> hyper::rt::Executor<F> for Spawner
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.scoped("upstream_stream", || "request body".to_owned(), future);
    }
}
