//! One session as a state machine: bytes and times in, events out. It owns the decoder, since what HELLO agrees
//! on holds from the very next frame.
//!
//! Whoever drives it reads into [`Session::space`], calls [`Session::poll`] until it gives nothing, writes every
//! [`Event::Send`] before anything that is queued, and calls [`Session::poll`] again at [`Session::due`].

mod exchange;

pub use exchange::Place;

use crate::bucket::Bucket;
use crate::control::{CLIENT, CRC32C, Control, Goaway, Hello};
use crate::decode::{Decoded, Decoder};
use crate::error::{FrameError, problem};
use crate::frame::{APP_CONTROL, Encoded, FRAME_MAX, FRAME_MIN_MAX, Flags, Frame, Kind};
use crate::node::NodeId;
use bytes::BytesMut;
use exchange::{Exchanges, Verdict};
use std::collections::VecDeque;
use std::time::Duration;

/// Control frames and refusals that a peer may cause at once, and each second.
const CONTROL_BURST: u32 = 64;
const CONTROL_RATE: u32 = 32;
/// The number of the frame that says HELLO.
const HELLO: u64 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Dialer,
    Listener,
}

/// What a session is told about itself.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    pub role: Role,
    pub hello: Hello,
    /// The key that the transport has proved; without one, what HELLO says is believed.
    pub proved: Option<NodeId>,
    /// Applications besides control that somebody here speaks.
    pub apps: Vec<u16>,
    pub handshake_timeout: Duration,
    /// From a frame's first byte to its last.
    pub read_timeout: Duration,
    pub idle_timeout: Duration,
}

/// What the two sides agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    pub version: u16,
    pub max_frame: u32,
    /// Requests that the peer takes at once.
    pub max_inflight: u32,
    pub crc32c: bool,
    /// The peer takes no part in the gossip.
    pub client: bool,
    pub node: Option<NodeId>,
    pub ua: String,
}

/// A frame to write, and whether its checksum follows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing {
    pub frame: Encoded,
    pub checked: bool,
}

/// Why a session is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    HandshakeTimeout,
    ReadTimeout,
    Idle,
    Protocol(FrameError),
    /// The peer caused more control frames or refusals than anybody needs.
    Limit,
    /// The peer is not who it says.
    Policy,
    /// The listener refused our HELLO with this status.
    Refused(u16),
}

#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    Send(Outgoing),
    Open(Agreed),
    Rtt(Duration),
    /// A frame in its order, inflated, for the application that it names.
    Frame(Frame, Place),
    /// An error response to something that is no open request: an event, or a request that is over.
    Stray(Frame),
    /// A message of the peer that the application may have begun with and that will never be whole.
    Broken(u16, u64),
    /// A frame that was refused; the session goes on.
    Rejected(FrameError),
    Goaway(Goaway),
    Closed(Closed),
}

/// Why a frame cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    #[error("the session is not open")]
    NotOpen,
    #[error("the peer takes nothing new")]
    GoingAway,
    #[error("the exchange is over")]
    Over,
    #[error(transparent)]
    Frame(#[from] FrameError),
}

#[derive(Debug)]
enum State {
    Hello,
    Open(Agreed),
    Closed,
}

#[derive(Debug)]
pub struct Session {
    config: SessionConfig,
    decoder: Decoder,
    state: State,
    events: VecDeque<Event>,
    theirs: Exchanges,
    ours: Exchanges,
    control: Bucket,
    began: Duration,
    /// When the last frame was whole, and when the one that is coming began.
    heard: Duration,
    partial: Option<Duration>,
    ping: Option<Ping>,
    ping_due: Duration,
    corr: u64,
    /// Which side said that it takes nothing new.
    we_go: bool,
    they_go: bool,
}

#[derive(Debug)]
struct Ping {
    corr: u64,
    sent: Duration,
}

impl Session {
    pub fn new(config: SessionConfig, now: Duration) -> Session {
        let max = config.hello.max_inflight;
        let mut session = Session {
            decoder: Decoder::new(FRAME_MIN_MAX),
            state: State::Hello,
            events: VecDeque::new(),
            theirs: Exchanges::new(max),
            ours: Exchanges::new(0),
            control: Bucket::new(CONTROL_RATE, CONTROL_BURST, now),
            began: now,
            heard: now,
            partial: None,
            ping: None,
            ping_due: now,
            corr: HELLO,
            we_go: false,
            they_go: false,
            config,
        };
        if session.config.role == Role::Dialer {
            let hello = session.config.hello.payload(None);
            session.write(Frame::request(APP_CONTROL, HELLO, hello));
        }
        session
    }

    /// Where to read into.
    pub fn space(&mut self) -> &mut BytesMut {
        self.decoder.space()
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.decoder.push(bytes);
    }

    /// Gives back the memory of a session that is quiet.
    pub fn relax(&mut self) {
        self.decoder.relax();
    }

    pub fn agreed(&self) -> Option<&Agreed> {
        match &self.state {
            State::Open(agreed) => Some(agreed),
            State::Hello | State::Closed => None,
        }
    }

    /// Exchanges of either side that are not over: what a drain waits for.
    pub fn open(&self) -> usize {
        self.theirs.open() + self.ours.open()
    }

    /// A number that no request of this side has had.
    pub fn next_corr(&mut self) -> u64 {
        self.corr += 1;
        self.corr
    }

    /// Measures the round trip at the next poll, and not only when the session has been quiet.
    pub fn ping(&mut self) {
        self.ping_due = Duration::ZERO;
    }

    /// When to poll even if nothing comes.
    pub fn due(&self) -> Option<Duration> {
        let reading = self.partial.map(|since| since + self.config.read_timeout);
        match self.state {
            State::Closed => None,
            State::Hello => Some(self.began + self.config.handshake_timeout),
            State::Open(_) => {
                let quiet = self.ping_due.min(self.heard + self.config.idle_timeout);
                Some(reading.map_or(quiet, |reading| reading.min(quiet)))
            }
        }
    }

    /// What happens next.
    pub fn poll(&mut self, now: Duration) -> Option<Event> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(event);
            }
            if matches!(self.state, State::Closed) {
                return None;
            }
            match self.decoder.next_frame() {
                Ok(Some(decoded)) => {
                    (self.heard, self.partial) = (now, None);
                    self.decoded(decoded, now);
                }
                Ok(None) => {
                    let begun = self.decoder.is_partial();
                    self.partial = if begun { self.partial.or(Some(now)) } else { None };
                    self.timers(now);
                    if self.events.is_empty() {
                        return None;
                    }
                }
                Err(error) => {
                    self.write(Frame::response(APP_CONTROL, 0, error.status(), error.problem()));
                    self.close(Some(Goaway::Protocol), Closed::Protocol(error));
                }
            }
        }
    }

    /// A frame of an application, checked against those before; it is then the caller's to write.
    pub fn send(&mut self, frame: &Frame) -> Result<Outgoing, SendError> {
        let State::Open(agreed) = &self.state else { return Err(SendError::NotOpen) };
        let (max, checked) = (agreed.max_frame, agreed.crc32c);
        let encoded = frame.encode(max)?;
        let response = frame.flags.kind() == Some(Kind::Response);
        let new = frame.flags.kind() == Some(Kind::Request) && !self.ours.knows(frame.corr);
        if new && (self.they_go || self.we_go) {
            return Err(SendError::GoingAway);
        }
        let side = if response { &mut self.theirs } else { &mut self.ours };
        match side.judge(frame) {
            Verdict::Take(_) | Verdict::Stray => Ok(Outgoing { frame: encoded, checked }),
            // The peer throws it away, and forgets the message.
            Verdict::Ignore if !response && frame.flags.has(Flags::END) => {
                Ok(Outgoing { frame: encoded, checked })
            }
            Verdict::Ignore => Err(SendError::Over),
            Verdict::Refuse(error) => Err(error.into()),
        }
    }

    /// Tells the peer to expect nothing more; requests that are open may still be answered.
    pub fn goaway(&mut self, reason: Goaway) {
        if !matches!(self.state, State::Closed) {
            self.we_go = true;
            self.write(Frame::event(APP_CONTROL, 0, Control::Goaway(reason).payload()));
        }
    }

    fn write(&mut self, frame: Frame) {
        let checked = self.agreed().is_some_and(|agreed| agreed.crc32c);
        if let Ok(frame) = frame.encode(FRAME_MAX) {
            self.events.push_back(Event::Send(Outgoing { frame, checked }));
        }
    }

    fn close(&mut self, goaway: Option<Goaway>, why: Closed) {
        if let Some(reason) = goaway {
            self.goaway(reason);
        }
        self.events.push_back(Event::Closed(why));
        self.state = State::Closed;
    }

    fn timers(&mut self, now: Duration) {
        let since = |then: Duration| now.saturating_sub(then);
        if matches!(self.state, State::Hello) {
            if since(self.began) >= self.config.handshake_timeout {
                self.close(None, Closed::HandshakeTimeout);
            }
            return;
        }
        if self.partial.is_some_and(|begun| since(begun) >= self.config.read_timeout) {
            return self.close(Some(Goaway::Limit), Closed::ReadTimeout);
        }
        if since(self.heard) >= self.config.idle_timeout {
            return self.close(Some(Goaway::Idle), Closed::Idle);
        }
        if now >= self.ping_due {
            // Three tries fit before the other side's silence ends the session.
            self.ping_due = now + self.config.idle_timeout / 4;
            let corr = self.next_corr();
            self.ping = Some(Ping { corr, sent: now });
            self.write(Frame::request(APP_CONTROL, corr, Control::Ping(corr).payload()));
        }
    }

    fn decoded(&mut self, decoded: Decoded, now: Duration) {
        if matches!(self.state, State::Hello) {
            return match decoded {
                Decoded::Frame(frame) => self.hello(&frame, now),
                Decoded::Refused { error, .. } => self.refuse_hello(HELLO, error),
            };
        }
        match decoded {
            Decoded::Frame(frame) if frame.app == APP_CONTROL => self.control(&frame, now),
            Decoded::Frame(frame) => self.application(frame, now),
            Decoded::Refused { frame, error } => self.refuse(&frame, error, now),
        }
    }

    fn hello(&mut self, frame: &Frame, now: Duration) {
        let listener = self.config.role == Role::Listener;
        let first = if listener { Flags::REQ } else { Flags::RESP };
        if frame.app != APP_CONTROL || frame.flags != first || (!listener && frame.corr != HELLO) {
            let corr = if frame.flags.kind() == Some(Kind::Response) { 0 } else { frame.corr };
            return self.refuse_hello(corr, FrameError::Sequence);
        }
        if frame.code >= 400 {
            return self.close(None, Closed::Refused(frame.code));
        }
        let said = if listener { self.listen(frame) } else { self.dial(frame) };
        match said {
            Ok(None) => {}
            Ok(Some(agreed)) => self.opened(agreed, now),
            Err(error) => self.refuse_hello(if listener { frame.corr } else { 0 }, error),
        }
    }

    fn listen(&mut self, frame: &Frame) -> Result<Option<Agreed>, FrameError> {
        let hello = match Hello::parse(&frame.payload) {
            // A control frame that is none of ours is still not HELLO.
            Err(_) if Control::parse(&frame.payload).is_ok() => return Err(FrameError::Sequence),
            other => other?,
        };
        let ours = &self.config.hello;
        let offered = hello.versions.iter().copied().max().unwrap_or(0);
        let choice = ours.choose(&hello).ok_or(FrameError::BadVersion(offered))?;
        if !self.is_who_it_says(&hello) {
            self.forbid(frame.corr);
            return Ok(None);
        }
        let answer = ours.payload(Some(&choice));
        self.write(Frame::response(APP_CONTROL, frame.corr, 200, answer));
        Ok(Some(self.agree(&hello, choice.version, choice.max_frame, &choice.features)))
    }

    fn dial(&mut self, frame: &Frame) -> Result<Option<Agreed>, FrameError> {
        let (hello, choice) = Hello::parse_answer(&frame.payload)?;
        if !self.config.hello.allows(&choice) {
            return Err(FrameError::BadVersion(choice.version));
        }
        if !self.is_who_it_says(&hello) {
            self.close(Some(Goaway::Policy), Closed::Policy);
            return Ok(None);
        }
        Ok(Some(self.agree(&hello, choice.version, choice.max_frame, &choice.features)))
    }

    fn agree(&self, hello: &Hello, version: u16, max_frame: u32, features: &[String]) -> Agreed {
        Agreed {
            version,
            max_frame,
            max_inflight: hello.max_inflight,
            crc32c: features.iter().any(|feature| feature == CRC32C),
            client: hello.features.iter().any(|feature| feature == CLIENT),
            node: self.config.proved.or(hello.node),
            ua: hello.ua.clone(),
        }
    }

    fn is_who_it_says(&self, hello: &Hello) -> bool {
        !matches!((hello.node, self.config.proved), (Some(said), Some(proved)) if said != proved)
    }

    fn opened(&mut self, agreed: Agreed, now: Duration) {
        self.decoder.agree(agreed.max_frame, agreed.crc32c);
        self.ours = Exchanges::new(agreed.max_inflight);
        if self.config.role == Role::Dialer {
            self.events.push_back(Event::Rtt(now.saturating_sub(self.began)));
        }
        self.events.push_back(Event::Open(agreed.clone()));
        self.state = State::Open(agreed);
        self.ping_due = now + self.config.idle_timeout / 4;
    }

    fn forbid(&mut self, corr: u64) {
        let body = problem(403, "forbidden", "the key in HELLO is not that of the connection");
        self.write(Frame::response(APP_CONTROL, corr, 403, body));
        self.close(Some(Goaway::Policy), Closed::Policy);
    }

    fn refuse_hello(&mut self, corr: u64, error: FrameError) {
        self.write(Frame::response(APP_CONTROL, corr, error.status(), error.problem()));
        self.close(Some(Goaway::Protocol), Closed::Protocol(error));
    }

    fn control(&mut self, frame: &Frame, now: Duration) {
        if !self.control.take(now) {
            return self.close(Some(Goaway::Limit), Closed::Limit);
        }
        let kind = frame.flags.kind();
        if kind == Some(Kind::Response) {
            return self.pong(frame, now);
        }
        let whole = Flags::START | Flags::END | Flags::COMP;
        if frame.flags.without(whole) != frame.flags {
            return self.refuse(frame, FrameError::Control, now);
        }
        match (kind, Control::parse(&frame.payload)) {
            (Some(Kind::Request), Ok(Control::Ping(n))) if frame.corr != 0 => {
                self.write(Frame::response(APP_CONTROL, frame.corr, 200, Control::Pong(n).payload()));
            }
            (Some(Kind::Event), Ok(Control::Goaway(reason))) => {
                self.they_go = true;
                self.events.push_back(Event::Goaway(reason));
            }
            (Some(Kind::Event), Ok(Control::Unknown)) => {}
            _ => self.refuse(frame, FrameError::Control, now),
        }
    }

    fn pong(&mut self, frame: &Frame, now: Duration) {
        match &self.ping {
            Some(ping) if ping.corr == frame.corr => {
                let rtt = now.saturating_sub(ping.sent);
                if Control::parse(&frame.payload) == Ok(Control::Pong(ping.corr)) {
                    self.events.push_back(Event::Rtt(rtt));
                }
                self.ping = None;
            }
            // A late answer to a ping that another has replaced, or to nothing: an error answers itself.
            _ if frame.code >= 400 => self.events.push_back(Event::Stray(frame.clone())),
            _ if frame.corr <= self.corr => {}
            _ => self.refuse(frame, FrameError::Sequence, now),
        }
    }

    fn application(&mut self, frame: Frame, now: Duration) {
        let response = frame.flags.kind() == Some(Kind::Response);
        if !response && !self.theirs.is_broken(&frame) {
            if !self.config.apps.contains(&frame.app) {
                return self.refuse(&frame, FrameError::UnknownApp(frame.app), now);
            }
            let new = frame.flags.kind() == Some(Kind::Request) && !self.theirs.knows(frame.corr);
            if self.we_go && new {
                return self.refuse(&frame, FrameError::GoingAway, now);
            }
        }
        let side = if response { &mut self.ours } else { &mut self.theirs };
        let verdict = side.judge(&frame);
        self.ours.prune();
        if self.theirs.is_overrun() {
            return self.close(Some(Goaway::Limit), Closed::Limit);
        }
        match verdict {
            Verdict::Take(place) if !frame.flags.has(Flags::COMP) => {
                self.events.push_back(Event::Frame(frame, place));
            }
            Verdict::Take(place) => match frame.clone().inflate() {
                Ok(frame) => self.events.push_back(Event::Frame(frame, place)),
                Err(error) => self.refuse(&frame, error, now),
            },
            Verdict::Ignore => {}
            Verdict::Stray => self.events.push_back(Event::Stray(frame)),
            Verdict::Refuse(error) => self.refuse(&frame, error, now),
        }
    }

    /// Answers with an error, which ends the message that the frame belongs to.
    fn refuse(&mut self, frame: &Frame, error: FrameError, now: Duration) {
        if !self.control.take(now) {
            return self.close(Some(Goaway::Limit), Closed::Limit);
        }
        let response = frame.flags.kind() == Some(Kind::Response);
        let side = if response { &mut self.ours } else { &mut self.theirs };
        let known = side.refuse(frame);
        if side.is_overrun() {
            return self.close(Some(Goaway::Limit), Closed::Limit);
        }
        self.events.push_back(Event::Rejected(error));
        if known {
            self.events.push_back(Event::Broken(frame.app, frame.corr));
        }
        // A response is answered under no number, since its own belongs to a request of ours; an error is not
        // answered at all, or two sides could go on about each other's errors for ever.
        if !(response && frame.code >= 400) {
            let corr = if response { 0 } else { frame.corr };
            self.write(Frame::response(frame.app, corr, error.status(), error.problem()));
        }
    }
}
