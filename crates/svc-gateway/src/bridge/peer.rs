//! Topics of another node: one session with it, over which requests are asked and feeds are followed.
//!
//! One task dials, reads and writes. Callers give it their calls in a bounded queue and wait under their own
//! deadlines; a feed whose client is too slow is ended, and no other notices.

use super::Topics;
use bytes::{Bytes, BytesMut};
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body::{Body as HttpBody, Frame as BodyFrame};
use oap::NodeId;
use oap::control::{CLIENT, CRC32C, Goaway, Hello};
use oap::frame::{APP_SERVICES, CHUNK, Flags, Frame, HEADER};
use oap::session::{Closed, Event, Outgoing, Place, Role, SendError, Session, SessionConfig};
use ron_kernel::admission::deadline::Budget;
use ron_kernel::channel::{self, Receiver, Sender};
use ron_kernel::health::Severity;
use ron_kernel::http::{Body, BodyError, Io, WritePatience};
use ron_kernel::inventory::{ChannelKind, ChannelSpec, Policy};
use ron_kernel::kernel::Service;
use ron_kernel::metrics::Counter;
use ron_kernel::problem::{CorrId, Rejection, X_CORR_ID, json_response};
use ron_kernel::reason::Reason;
use ron_kernel::sync::Limits;
use ron_kernel::task::TaskResult;
use ron_transport::{Backoff, Dialer, PeerAddress, Proved, Writer};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::io::AsyncReadExt as _;
use tokio::sync::oneshot;

pub(crate) static CALLS: ChannelSpec = ChannelSpec {
    service: "gateway",
    name: "bridge_calls",
    kind: ChannelKind::Mpsc,
    capacity: 256,
    policy: Policy::RejectNew,
    producers: &["conn"],
    consumers: &["bridge"],
};

/// Pieces of one feed that its client has not taken.
pub(crate) static FEED: ChannelSpec = ChannelSpec {
    service: "gateway",
    name: "bridge_feed",
    kind: ChannelKind::Mpsc,
    capacity: 256,
    policy: Policy::RejectNew,
    producers: &["bridge"],
    consumers: &["conn"],
};
const FEED_BYTES: usize = 2 << 20;

/// The longest answer to a publication, which is an id.
const ANSWER_MAX: usize = 16 << 10;
/// How long the peer may take a batch, or be silent within a frame.
const IO_TIMEOUT: Duration = Duration::from_secs(5);
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// How long behind a call's deadline an answer may come; a peer that says nothing by then is no use.
const OVERDUE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_secs(1);
/// The longest that a publication may wait, whatever its client says.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// How long a client may take nothing of a feed.
const PATIENCE: Duration = Duration::from_secs(10);
const BRIDGE: &str = "bridge";

/// Why a call came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Refused {
    /// There is no session.
    Down,
    /// It ended, and what became of the call is not known.
    Lost,
    /// As many calls are under way as the peer takes.
    Busy,
    /// The peer said so.
    Status(u16, String),
}

/// What a call is answered with.
enum Answered {
    Published(Bytes),
    Following(Receiver<Bytes>),
}

type Answer = oneshot::Sender<Result<Answered, Refused>>;

/// A request of a client.
struct Call {
    corr: u64,
    head: Bytes,
    /// None: it follows.
    payload: Option<Bytes>,
    until: Instant,
    answer: Answer,
}

/// A call that the peer has.
enum Waiting {
    Publish {
        answer: Answer,
        text: BytesMut,
        until: Instant,
    },
    /// Nothing came of it yet.
    Follow {
        answer: Answer,
        until: Instant,
    },
    Feed(Sender<Bytes>),
}

/// Shows the rows of the queues also where there is none.
pub(crate) fn declare(service: &Service) {
    for spec in [&CALLS, &FEED] {
        drop(channel::queue::<()>(service.inventory(), spec, Limits::items(spec.capacity), spec.policy));
    }
}

/// Begins to keep a session with a peer; the answer asks it.
pub(crate) fn start(service: &Service, dialer: Dialer, peer: PeerAddress, node: NodeId) -> Topics {
    let (calls, asked) =
        channel::queue(service.inventory(), &CALLS, Limits::items(CALLS.capacity), CALLS.policy);
    let (own, asked) = (service.clone(), Arc::new(asked));
    let retries = service.counter("backoff_retries_total", "Calls tried again.", "op", "connect");
    let timeouts = service.io_timeout("connect");
    service.permanent(BRIDGE, 0, move || {
        let link = Link {
            service: own.clone(),
            dialer: dialer.clone(),
            peer: peer.clone(),
            node,
            asked: asked.clone(),
            since: Instant::now(),
            retries: retries.clone(),
            timeouts: timeouts.clone(),
        };
        link.run()
    });
    Arc::new(move |topic, request, corr| {
        let calls = calls.clone();
        Box::pin(async move { ask(&calls, topic, request, &corr).await })
    })
}

/// Puts a request to the peer and waits for what it says.
async fn ask(
    calls: &Sender<Call>,
    topic: String,
    mut request: Request<Body>,
    corr: &CorrId,
) -> Result<Response<Body>, Rejection> {
    let now = Instant::now();
    let unix = || {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
    };
    let budget = Budget::of(request.headers(), WAIT_MAX, now, unix)
        .map_err(|bad| Rejection::new(Reason::Malformed, format!("{} cannot be read", bad.0)))?;
    let follow = request.method() == Method::GET;
    let payload = if follow {
        None
    } else {
        let read = request.body_mut().collect(usize::MAX).await;
        Some(read.map_err(|_broken| Rejection::new(Reason::Malformed, "the body could not be read"))?)
    };
    let mut head =
        json!({"do": if follow { "follow" } else { "publish" }, "topic": topic, "corr": corr.as_str()});
    if let Some(own) = budget.client {
        let left = own.saturating_duration_since(now).as_millis();
        head["timeout_ms"] = u64::try_from(left).unwrap_or(u64::MAX).into();
    }
    let (answer, answered) = oneshot::channel();
    let head = Bytes::from(format!("{head}\n"));
    let call = Call { corr: number_of(corr.as_str()), head, payload, until: budget.until, answer };
    if calls.try_send(call).is_err() {
        return Err(Rejection::new(Reason::Shed, "too many calls wait for the overlay peer").retry_after(1));
    }
    match answered.await.unwrap_or(Err(Refused::Lost)) {
        Ok(Answered::Published(text)) => {
            let said: Value = serde_json::from_slice(&text).unwrap_or_default();
            let id = said["id"].as_str().ok_or_else(|| refusal(&Refused::Status(500, String::new())))?;
            Ok(json_response(StatusCode::ACCEPTED, &json!({"id": id}), corr))
        }
        Ok(Answered::Following(pieces)) => {
            let mut response = Response::new(Body::stream(Feed { pieces: Some(pieces), waiting: None }));
            let headers = response.headers_mut();
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
            headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
            headers.insert(X_CORR_ID, corr.value().clone());
            response.extensions_mut().insert(WritePatience(PATIENCE));
            Ok(response)
        }
        Err(refused) => Err(refusal(&refused)),
    }
}

/// The number that stands for a correlation id: itself if it is one, else of its hash. 0 is none.
fn number_of(corr: &str) -> u64 {
    let hash = || {
        let digest: [u8; 32] = Sha256::digest(corr).into();
        u64::from_be_bytes(digest[..8].try_into().expect("eight of thirty-two"))
    };
    corr.parse().unwrap_or_else(|_not_a_number| hash()).max(1)
}

/// What an HTTP client is told.
fn refusal(refused: &Refused) -> Rejection {
    let said = |reason, detail: &str, fallback: &'static str| {
        if detail.is_empty() {
            Rejection::new(reason, fallback)
        } else {
            Rejection::new(reason, detail.to_owned())
        }
    };
    match refused {
        Refused::Down => {
            Rejection::new(Reason::NoUpstream, "the overlay peer cannot be reached").retry_after(1)
        }
        Refused::Lost => Rejection::new(
            Reason::UpstreamError,
            "the connection to the overlay peer broke; whether the message was published is not known",
        ),
        Refused::Busy => {
            Rejection::new(Reason::Busy, "the overlay peer takes no more calls now").retry_after(1)
        }
        Refused::Status(400, detail) => {
            said(Reason::Malformed, detail, "the overlay peer could not read this")
        }
        Refused::Status(413, detail) => said(Reason::BodyCap, detail, "the message is larger than allowed"),
        Refused::Status(429, detail) => said(Reason::Busy, detail, "no peer has room for it").retry_after(1),
        Refused::Status(503, detail) => {
            said(Reason::NoUpstream, detail, "the overlay peer is shutting down").retry_after(1)
        }
        Refused::Status(504, detail) => said(Reason::Deadline, detail, "it was not done in time"),
        // What is wrong between this node and its peer is no fault of the client, nor its business.
        Refused::Status(..) => Rejection::new(Reason::UpstreamError, "the overlay peer refused"),
    }
}

/// This side of the session, whether there is one or not.
struct Link {
    service: Service,
    dialer: Dialer,
    peer: PeerAddress,
    node: NodeId,
    asked: Arc<Receiver<Call>>,
    since: Instant,
    retries: Counter,
    timeouts: Counter,
}

impl Link {
    /// Keeps a session, and makes a new one when it ends, until the service drains.
    async fn run(self) -> TaskResult {
        let mut backoff = Backoff::default();
        let _undo = Undo(self.service.clone());
        self.service.lose(BRIDGE, Severity::Degraded);
        let mut told = None;
        loop {
            let dialled = tokio::select! {
                biased;
                () = self.service.shutdown().draining() => return Ok(()),
                dialled = self.dialer.dial(&self.peer) => dialled,
            };
            let why = match dialled {
                Ok((io, proved)) => match self.session(io, proved).await {
                    Ok(()) => return Ok(()),
                    Err((why, opened)) => {
                        if opened {
                            backoff.succeed();
                            told = None;
                        }
                        why
                    }
                },
                Err(error) => {
                    if matches!(error, ron_transport::dial::DialError::ConnectTimeout) {
                        self.timeouts.inc();
                    }
                    error.to_string()
                }
            };
            self.service.lose(BRIDGE, Severity::Degraded);
            if told.as_ref() != Some(&why) {
                tracing::warn!(peer = %self.peer, why, "no session with the overlay peer; it is tried again");
                told = Some(why);
            }
            self.retries.inc();
            let again = tokio::time::sleep(backoff.fail(ron_kernel::random::unit()));
            let mut again = std::pin::pin!(again);
            loop {
                tokio::select! {
                    biased;
                    () = self.service.shutdown().draining() => return Ok(()),
                    () = &mut again => break,
                    call = self.asked.recv() => match call {
                        Some(call) => drop(call.answer.send(Err(Refused::Down))),
                        None => return Ok(()),
                    },
                }
            }
        }
    }

    /// One session from HELLO to its end: why it ended and whether it was open, or `Ok` in a drain.
    async fn session(&self, io: Io, proved: Option<Proved>) -> Result<(), (String, bool)> {
        let (mut read, writer) = ron_transport::split(io);
        let mut open = Open {
            session: Session::new(self.config(proved), self.since.elapsed()),
            writer,
            calls: HashMap::new(),
            service: &self.service,
            opened: false,
            unwritten: false,
        };
        loop {
            let happened = open.happen(self.since.elapsed());
            if open.unwritten && open.writer.flush(IO_TIMEOUT).await.is_err() {
                return Err(("the peer takes nothing".to_owned(), open.opened));
            }
            open.unwritten = false;
            if let Some(why) = happened {
                return Err((why, open.opened));
            }
            let due = open.session.due().unwrap_or_default().saturating_sub(self.since.elapsed()).min(LOOK);
            tokio::select! {
                biased;
                () = self.service.shutdown().draining() => {
                    open.session.goaway(Goaway::Draining);
                    open.happen(self.since.elapsed());
                    let _ = open.writer.flush(IO_TIMEOUT).await;
                    return Ok(());
                }
                read = read.read_buf(open.session.space()) => match read {
                    Ok(0) => return Err(("the peer closed the connection".to_owned(), open.opened)),
                    Ok(_) => {}
                    Err(error) => return Err((format!("the connection broke: {error}"), open.opened)),
                },
                Some(call) = self.asked.recv(), if open.opened => open.begin(call),
                () = tokio::time::sleep(due) => {}
            }
            if open.is_overdue(Instant::now()) {
                return Err(("the peer does not answer".to_owned(), open.opened));
            }
        }
    }

    fn config(&self, proved: Option<Proved>) -> SessionConfig {
        let mut hello = Hello {
            ua: concat!("ron/", env!("CARGO_PKG_VERSION")).to_owned(),
            features: vec![CLIENT.to_owned()],
            node: Some(self.node),
            ..Hello::default()
        };
        if proved.is_none() {
            hello.features.push(CRC32C.to_owned());
        }
        SessionConfig {
            role: Role::Dialer,
            hello,
            proved: proved.map(|proved| proved.node),
            apps: Vec::new(),
            handshake_timeout: self.dialer.handshake_timeout,
            read_timeout: IO_TIMEOUT,
            idle_timeout: IDLE_TIMEOUT,
        }
    }
}

/// Nothing is missing once nobody wants it.
struct Undo(Service);

impl Drop for Undo {
    fn drop(&mut self) {
        self.0.restore(BRIDGE);
    }
}

/// A session and the calls over it. Dropped, it answers those that wait that they are lost.
struct Open<'a, W> {
    session: Session,
    writer: Writer<W>,
    calls: HashMap<u64, Waiting>,
    service: &'a Service,
    opened: bool,
    unwritten: bool,
}

impl<W: tokio::io::AsyncWrite + Unpin> Open<'_, W> {
    /// Does what the session says next; gives a reason if it is over.
    fn happen(&mut self, now: Duration) -> Option<String> {
        while let Some(event) = self.session.poll(now) {
            match event {
                Event::Send(outgoing) => self.push(&outgoing),
                Event::Open(_) => {
                    self.opened = true;
                    self.service.restore(BRIDGE);
                    tracing::info!("the overlay peer is reached");
                }
                Event::Frame(frame, place) => self.answered(frame, place),
                Event::Goaway(reason) => return Some(format!("the peer goes away: {}", reason.name())),
                Event::Closed(why) => return Some(closed(why)),
                Event::Stray(_) | Event::Rejected(_) | Event::Rtt(_) | Event::Broken(..) => {}
            }
        }
        None
    }

    fn push(&mut self, outgoing: &Outgoing) {
        self.writer.push(&outgoing.frame, outgoing.checked);
        self.unwritten = true;
    }

    /// Sends a call to the peer.
    fn begin(&mut self, call: Call) {
        // Whoever asked has left, so that nothing need be done.
        if call.answer.is_closed() {
            return;
        }
        let Call { mut corr, head, payload, until, answer } = call;
        while self.calls.contains_key(&corr) {
            corr = self.session.next_corr();
        }
        let most = self.session.agreed().map_or(0, |agreed| agreed.max_frame as usize - HEADER).min(CHUNK);
        let frames = match &payload {
            None => {
                vec![Frame { flags: Flags::REQ | Flags::START, ..Frame::request(APP_SERVICES, corr, head) }]
            }
            Some(payload) => pieces(corr, &head, payload, most),
        };
        for frame in frames {
            match self.session.send(&frame) {
                Ok(outgoing) => self.push(&outgoing),
                Err(error) => {
                    let busy = matches!(error, SendError::Frame(oap::FrameError::Busy));
                    drop(answer.send(Err(if busy { Refused::Busy } else { Refused::Down })));
                    return;
                }
            }
        }
        let waiting = match payload {
            Some(_) => Waiting::Publish { answer, text: BytesMut::new(), until },
            None => Waiting::Follow { answer, until },
        };
        self.calls.insert(corr, waiting);
    }

    /// A frame of an answer.
    fn answered(&mut self, frame: Frame, place: Place) {
        let Frame { corr, code, payload, .. } = frame;
        let Some(waiting) = self.calls.remove(&corr) else { return };
        let last = matches!(place, Place::Whole | Place::Last);
        let follows = !matches!(waiting, Waiting::Publish { .. });
        match waiting {
            Waiting::Publish { answer, .. } | Waiting::Follow { answer, .. } if code >= 400 => {
                let said: Value = serde_json::from_slice(&payload).unwrap_or_default();
                let detail = said["detail"].as_str().unwrap_or_default().to_owned();
                drop(answer.send(Err(Refused::Status(code, detail))));
            }
            Waiting::Publish { answer, mut text, until } => {
                text.extend_from_slice(&payload[..payload.len().min(ANSWER_MAX - text.len())]);
                if last {
                    drop(answer.send(Ok(Answered::Published(text.freeze()))));
                } else {
                    self.calls.insert(corr, Waiting::Publish { answer, text, until });
                }
            }
            Waiting::Follow { answer, .. } => {
                let limits = Limits { items: FEED.capacity, bytes: FEED_BYTES };
                let (feed, pieces) = channel::queue(self.service.inventory(), &FEED, limits, FEED.policy);
                let taken = answer.send(Ok(Answered::Following(pieces))).is_ok();
                if taken && feed.try_send_sized(payload, 0).is_ok() && !last {
                    self.calls.insert(corr, Waiting::Feed(feed));
                }
            }
            // One whose client is gone or too slow is ended; an error ends it as its end does.
            Waiting::Feed(feed) => {
                let bytes = payload.len();
                if code < 400 && feed.try_send_sized(payload, bytes).is_ok() && !last {
                    self.calls.insert(corr, Waiting::Feed(feed));
                }
            }
        }
        // What was asked for stays open until this side says that it has heard enough.
        if follows && !self.calls.contains_key(&corr) {
            self.end(corr);
        }
    }

    fn end(&mut self, corr: u64) {
        let end = Frame { flags: Flags::REQ | Flags::END, ..Frame::request(APP_SERVICES, corr, "") };
        if let Ok(outgoing) = self.session.send(&end) {
            self.push(&outgoing);
        }
    }

    /// Whether the peer leaves a call unanswered that it should have answered long ago.
    fn is_overdue(&self, now: Instant) -> bool {
        self.calls.values().any(|waiting| match waiting {
            Waiting::Publish { until, .. } | Waiting::Follow { until, .. } => now > *until + OVERDUE,
            Waiting::Feed(_) => false,
        })
    }
}

impl<W> Drop for Open<'_, W> {
    fn drop(&mut self) {
        for (_, waiting) in self.calls.drain() {
            if let Waiting::Publish { answer, .. } | Waiting::Follow { answer, .. } = waiting {
                drop(answer.send(Err(Refused::Lost)));
            }
        }
    }
}

/// A publication in frames of at most so many bytes.
fn pieces(corr: u64, head: &Bytes, payload: &Bytes, most: usize) -> Vec<Frame> {
    let mut rest = BytesMut::with_capacity(head.len() + payload.len());
    rest.extend_from_slice(head);
    rest.extend_from_slice(payload);
    let mut rest = rest.freeze();
    if rest.len() <= most {
        return vec![Frame::request(APP_SERVICES, corr, rest)];
    }
    let mut frames = Vec::new();
    while !rest.is_empty() {
        let piece = rest.split_to(rest.len().min(most));
        let mut flags = Flags::REQ;
        if frames.is_empty() {
            flags = flags | Flags::START;
        }
        if rest.is_empty() {
            flags = flags | Flags::END;
        }
        frames.push(Frame { flags, ..Frame::request(APP_SERVICES, corr, piece) });
    }
    frames
}

fn closed(why: Closed) -> String {
    match why {
        Closed::HandshakeTimeout => "the peer did not say HELLO in time".to_owned(),
        Closed::ReadTimeout => "a frame did not arrive in time".to_owned(),
        Closed::Idle => "the peer was silent".to_owned(),
        Closed::Protocol(error) => format!("the peer does not keep to OAP/1: {error}"),
        Closed::Limit => "the peer sends too many control frames".to_owned(),
        Closed::Policy => "the peer is not who it says".to_owned(),
        Closed::Refused(status) => {
            format!("the peer refused HELLO with {status}: is this node among its overlay.peers?")
        }
    }
}

type NextPiece = Pin<Box<dyn Future<Output = (Option<Bytes>, Receiver<Bytes>)> + Send>>;

/// A feed on its way to its client.
struct Feed {
    pieces: Option<Receiver<Bytes>>,
    waiting: Option<NextPiece>,
}

impl HttpBody for Feed {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<BodyFrame<Bytes>, BodyError>>> {
        if let Some(pieces) = self.pieces.take() {
            self.waiting = Some(Box::pin(async move { (pieces.recv().await, pieces) }));
        }
        let Some(waiting) = &mut self.waiting else { return Poll::Ready(None) };
        let (piece, pieces) = ready!(waiting.as_mut().poll(cx));
        self.waiting = None;
        let Some(piece) = piece else { return Poll::Ready(None) };
        self.pieces = Some(pieces);
        Poll::Ready(Some(Ok(BodyFrame::data(piece))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_correlation_id_has_a_number_which_is_never_none() {
        assert_eq!((number_of("77"), number_of("0")), (77, 1));
        let hashed = number_of("018f3a-request");
        assert!(hashed > 1 && hashed == number_of("018f3a-request") && hashed != number_of("another"));
    }

    #[test]
    fn what_a_peer_says_is_told_in_the_words_of_http() {
        let told = |refused| {
            let rejection = refusal(&refused);
            (rejection.reason.status(), rejection.reason.code())
        };
        let status = |code| told(Refused::Status(code, "why".to_owned()));
        assert_eq!(status(400), (400, "malformed"));
        assert_eq!([401, 403, 404, 409, 500].map(status), [(502, "upstream_error"); 5]);
        assert_eq!(status(413), (413, "body_cap"));
        assert_eq!(status(429), (429, "busy"));
        assert_eq!(status(503), (503, "no_upstream"));
        assert_eq!(status(504), (504, "deadline"));
        assert_eq!(
            (told(Refused::Down), told(Refused::Lost)),
            ((503, "no_upstream"), (502, "upstream_error"))
        );
        assert_eq!(told(Refused::Busy), (429, "busy"));
    }

    proptest! {
        #[test]
        fn a_publication_in_pieces_is_the_same_bytes(size in 0usize..9000, most in 40usize..5000) {
            let (head, payload) = (Bytes::from_static(b"{\"do\":1}\n"), Bytes::from(vec![7; size]));
            let frames = pieces(9, &head, &payload, most);
            let joined: Vec<u8> = frames.iter().flat_map(|frame| frame.payload.to_vec()).collect();
            prop_assert_eq!(joined, [&head[..], &payload[..]].concat());
            let several = frames.len() > 1;
            for (index, frame) in frames.iter().enumerate() {
                prop_assert!(frame.payload.len() <= most && frame.corr == 9);
                prop_assert_eq!(frame.flags.has(Flags::START), several && index == 0);
                prop_assert_eq!(frame.flags.has(Flags::END), several && index + 1 == frames.len());
            }
        }
    }
}
