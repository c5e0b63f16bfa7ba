//! The session with a peer whose topics are bridged: one task dials, reads and writes.

use super::peer::{Answer, Answered, Call, FEED, Refused};
use bytes::{Bytes, BytesMut};
use oap::NodeId;
use oap::control::{CLIENT, CRC32C, Goaway, Hello};
use oap::frame::{APP_SERVICES, CHUNK, Flags, Frame, HEADER};
use oap::session::{Closed, Event, Outgoing, Place, Role, SendError, Session, SessionConfig};
use ron_kernel::channel::{self, Receiver, Sender};
use ron_kernel::health::Severity;
use ron_kernel::http::Io;
use ron_kernel::kernel::{Missing, Service};
use ron_kernel::metrics::Counter;
use ron_kernel::sync::Limits;
use ron_kernel::task::TaskResult;
use ron_transport::dial::DialError;
use ron_transport::{Backoff, Dialer, PeerAddress, Proved, Writer};
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWrite};

/// What a feed holds that its client has not taken.
const FEED_BYTES: usize = 2 << 20;
/// The longest answer to a publication, which is an id.
const ANSWER_MAX: usize = 16 << 10;
/// How long the peer may take a batch, or be silent within a frame.
const IO_TIMEOUT: Duration = Duration::from_secs(5);
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// How long behind a call's deadline an answer may come; a peer that says nothing by then is no use.
const OVERDUE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_secs(1);
/// What readiness calls it while there is no session.
const BRIDGE: &str = "bridge";

/// This side of the session, whether there is one or not.
#[derive(Clone)]
pub(super) struct Link {
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
    pub(super) fn new(
        service: &Service,
        dialer: Dialer,
        peer: PeerAddress,
        node: NodeId,
        asked: Receiver<Call>,
    ) -> Link {
        let retries = service.counter("backoff_retries_total", "Calls tried again.", "op", "connect");
        let timeouts = service.io_timeout("connect");
        let (service, asked, since) = (service.clone(), Arc::new(asked), Instant::now());
        Link { service, dialer, peer, node, asked, since, retries, timeouts }
    }

    /// Keeps a session, and makes a new one when it ends, until the service drains.
    pub(super) async fn run(self) -> TaskResult {
        let mut backoff = Backoff::default();
        let mut missing = Missing::new(&self.service, BRIDGE, Severity::Degraded);
        missing.note(true);
        let mut told = None;
        loop {
            let dialled = tokio::select! {
                biased;
                () = self.service.shutdown().draining() => return Ok(()),
                dialled = self.dialer.dial(&self.peer) => dialled,
            };
            let why = match dialled {
                Ok((io, proved)) => match self.session(io, proved, &mut missing).await {
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
                    if matches!(error, DialError::ConnectTimeout) {
                        self.timeouts.inc();
                    }
                    error.to_string()
                }
            };
            missing.because(&why);
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
    async fn session(
        &self,
        io: Io,
        proved: Option<Proved>,
        missing: &mut Missing,
    ) -> Result<(), (String, bool)> {
        let (mut read, writer) = ron_transport::split(io);
        let mut open = Open {
            session: Session::new(self.config(proved), self.since.elapsed()),
            writer,
            calls: HashMap::new(),
            service: &self.service,
            missing,
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

/// A session and the calls over it. Dropped, it answers those that wait that they are lost.
struct Open<'a, W> {
    session: Session,
    writer: Writer<W>,
    calls: HashMap<u64, Waiting>,
    service: &'a Service,
    missing: &'a mut Missing,
    opened: bool,
    unwritten: bool,
}

impl<W: AsyncWrite + Unpin> Open<'_, W> {
    /// Does what the session says next; gives a reason if it is over.
    fn happen(&mut self, now: Duration) -> Option<String> {
        while let Some(event) = self.session.poll(now) {
            match event {
                Event::Send(outgoing) => self.push(&outgoing),
                Event::Open(_) => {
                    self.opened = true;
                    self.missing.note(false);
                    tracing::info!("the overlay peer is reached");
                }
                Event::Frame(frame, place) => self.answered(frame, place),
                // It seemed open until the peer had looked: that is no success, or it would be dialled again at once.
                Event::Goaway(Goaway::Policy) => {
                    self.opened = false;
                    let key = "put this node's key and an address into overlay.peers there";
                    return Some(format!("the peer does not admit this node: {key}"));
                }
                Event::Goaway(reason) => {
                    self.opened &= reason != Goaway::Limit;
                    return Some(format!("the peer goes away: {}", reason.name()));
                }
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
