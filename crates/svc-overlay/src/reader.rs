//! The reader of a connection: bytes into the session's state machine, and what comes of them to where it belongs.

use crate::calls::Call;
use crate::conn::Active;
use crate::link::{End, Link, Opened};
use crate::services::{Services, UNWRITTEN_MAX};
use crate::shared::Shared;
use bytes::BytesMut;
use oap::error::{FrameError, problem};
use oap::frame::{APP_GOSSIP, APP_SERVICES, FRAME_MIN_MAX, Flags, Frame, Kind};
use oap::gossip::{Incoming, Offence};
use oap::session::{Agreed, Closed, Event, Place, Session};
use oap::{NodeId, session};
use ron_kernel::shutdown::Phase;
use ron_kernel::sync::Permit;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::sync::oneshot;

/// After this many frames at once others get a turn, above all the engine.
const AT_ONCE: usize = 32;
/// What is still read, and thrown away, of a peer that is told to go: or it might not hear why.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 256 << 10;

pub(crate) struct Reader<R> {
    pub(crate) shared: Arc<Shared>,
    pub(crate) link: Arc<Link>,
    pub(crate) io: R,
    pub(crate) session: Session,
    pub(crate) frames: Vec<Incoming>,
    /// A place among the handshakes, until HELLO is over.
    pub(crate) shaking: Option<Permit>,
    /// Once it is a session.
    pub(crate) active: Option<Active>,
    /// Once the peer has asked for something.
    pub(crate) services: Option<Box<Services>>,
}

impl<R: AsyncRead + Unpin + Send> Reader<R> {
    /// Reads until the session is over, and says why it is.
    pub(crate) async fn run(mut self) -> End {
        let end = self.serve().await;
        self.link.end(end);
        // The first reason is the true one: a peer that was told to go closes the connection.
        let end = self.link.ended().unwrap_or(end);
        let drained = self.link.is_finishing();
        self.link.finish();
        if !drained
            && !matches!(end, End::Peer | End::Io | End::WriteTimeout | End::HandshakeTimeout | End::Refused)
        {
            let _ = tokio::time::timeout(LINGER, self.linger()).await;
        }
        end
    }

    async fn serve(&mut self) -> End {
        let (shared, link) = (self.shared.clone(), self.link.clone());
        let shutdown = shared.service.shutdown().clone();
        let mut draining = pin!(shutdown.draining());
        let mut aborting = pin!(shutdown.reached(Phase::Aborting));
        let mut drains = false;
        let mut armed = shared.now();
        let mut timer = pin!(tokio::time::sleep_until(shared.instant(armed)));
        loop {
            if let Some(end) = self.events().await {
                return end;
            }
            let due = self.session.due().unwrap_or(armed);
            if due < armed || armed <= shared.now() {
                armed = due;
                timer.as_mut().reset(shared.instant(due));
            }
            tokio::select! {
                biased;
                () = link.stop.notified() => {
                    let end = link.ended().unwrap_or(End::Peer);
                    if let Some(reason) = end.goaway() {
                        self.session.goaway(reason);
                        self.answers();
                    }
                    return end;
                }
                () = &mut aborting, if drains => return End::Draining,
                () = &mut draining, if !drains => {
                    drains = true;
                    if link.opened.get().is_none() {
                        return End::Draining;
                    }
                    // The engine has the writer drain when it has done with what came before.
                    self.session.goaway(oap::control::Goaway::Draining);
                }
                () = &mut timer => self.session.relax(),
                read = self.io.read_buf(self.session.space()) => match read {
                    Ok(0) => return if drains { End::Draining } else { End::Peer },
                    Ok(_) => {}
                    Err(_) => return End::Io,
                },
                frame = served(&mut self.services, &link), if self.services.is_some() => {
                    if let Some(end) = self.respond(&frame) {
                        return end;
                    }
                }
                // There may be room for more of an answer.
                () = link.wrote.notified(), if self.services.is_some() => {}
            }
        }
    }

    /// Does what the session says next; gives an end if there is one.
    async fn events(&mut self) -> Option<End> {
        // What was read together came together: the clock is asked once, and after every wait.
        let (mut end, mut now) = (None, self.shared.now());
        while end.is_none()
            && let Some(event) = self.session.poll(now)
        {
            end = match event {
                Event::Open(agreed) => {
                    let end = self.open(agreed).await;
                    now = self.shared.now();
                    end
                }
                event => self.event(event),
            };
            if self.frames.len() >= AT_ONCE {
                self.hand_over().await;
                tokio::task::yield_now().await;
                now = self.shared.now();
            }
        }
        if !self.frames.is_empty() {
            self.hand_over().await;
        }
        end
    }

    /// Queues what has come for the engine.
    async fn hand_over(&mut self) {
        self.shared.receive(&self.link, &mut self.frames);
        if let Some(opened) = self.link.opened.get() {
            self.shared.pause(opened.peer).await;
        }
    }

    /// Only the answers that the session still owes.
    fn answers(&mut self) {
        while let Some(event) = self.session.poll(self.shared.now()) {
            if let Event::Send(answer) = event {
                self.link.reply(answer);
            }
        }
    }

    fn event(&mut self, event: Event) -> Option<End> {
        let peer = self.link.opened.get().map(|opened| opened.peer);
        match event {
            Event::Send(answer) => {
                return (!self.link.reply(answer)).then_some(End::Limit);
            }
            Event::Rtt(sample) => {
                if let Some(peer) = peer {
                    self.shared.hint(Call::Rtt(peer, sample));
                }
            }
            Event::Frame(frame, place) => return self.frame(frame, place),
            Event::Stray(frame) => {
                if let Some(peer) = peer.filter(|_| frame.app == APP_GOSSIP && frame.code == 429) {
                    self.shared.hint(Call::Refused(peer, frame.corr));
                }
            }
            Event::Rejected(error) => self.rejected(error),
            Event::Goaway(reason) => {
                tracing::debug!(peer = self.link.at, reason = reason.name(), "the peer goes away");
                let _ = self.link.told.set(reason);
            }
            Event::Closed(why) => return Some(self.closed(why)),
            Event::Broken(APP_SERVICES, corr) => {
                if let Some(services) = &mut self.services {
                    services.forget(corr);
                }
            }
            Event::Broken(..) | Event::Open(_) => {}
        }
        None
    }

    /// A frame of gossip is a whole event of a node that is known; anything else is nobody's.
    fn frame(&mut self, frame: Frame, place: Place) -> Option<End> {
        if frame.app == APP_SERVICES {
            let services = self.services.get_or_insert_with(|| Box::new(Services::new(&self.shared)));
            let answer = services.take(frame, place);
            return answer.and_then(|answer| self.respond(&answer));
        }
        let Some(opened) = self.link.opened.get() else {
            tracing::info!(peer = self.link.at, "gossip from a peer that did not say who it is");
            self.session.goaway(oap::control::Goaway::Policy);
            self.answers();
            return Some(End::Policy);
        };
        let event = frame.flags.kind() == Some(Kind::Event) && place == Place::Whole;
        if event && frame.tenant == 0 && frame.cap.is_empty() {
            let Frame { corr, payload, .. } = frame;
            self.frames.push(Incoming { peer: opened.peer, corr, payload });
            return None;
        }
        self.rejected(FrameError::Kind(frame.flags.bits()));
        let last = matches!(place, Place::Whole | Place::Last);
        if frame.flags.kind() == Some(Kind::Request) && last {
            let body =
                problem(400, "malformed", "gossip frames are whole events without tenant or capability");
            let answer = Frame { flags: Flags::RESP, code: 400, payload: body, ..frame };
            let answer = Frame { cap: bytes::Bytes::new(), ..answer };
            return self.respond(&answer);
        }
        None
    }

    /// Sends a frame of an answer; one to what the peer has given up is nobody's.
    fn respond(&mut self, frame: &Frame) -> Option<End> {
        match self.session.send(frame) {
            Ok(answer) => (!self.link.reply(answer)).then_some(End::Limit),
            Err(_) => None,
        }
    }

    fn rejected(&self, error: FrameError) {
        self.shared.numbers.reject(error.code());
        if !matches!(error, FrameError::Busy | FrameError::GoingAway | FrameError::UnknownApp(_)) {
            self.offended();
        }
    }

    fn offended(&self) {
        if let Some(opened) = self.link.opened.get() {
            self.shared.hint(Call::Offend(opened.peer, Offence::Invalid));
        }
    }

    fn closed(&self, why: Closed) -> End {
        match why {
            Closed::HandshakeTimeout => End::HandshakeTimeout,
            Closed::ReadTimeout => {
                self.shared.numbers.read_timeouts.inc();
                // It has begun a frame and not gone on.
                self.offended();
                End::ReadTimeout
            }
            Closed::Idle => End::Idle,
            Closed::Protocol(error) => {
                self.rejected(error);
                let node = self.link.opened.get().map(|opened| opened.node.to_string());
                tracing::warn!(
                    peer = self.link.at,
                    node,
                    error = error.code(),
                    "a frame that ends the session"
                );
                End::Protocol
            }
            Closed::Limit => {
                self.offended();
                End::Limit
            }
            Closed::Policy => End::Policy,
            Closed::Refused(status) => {
                tracing::info!(peer = self.link.at, status, "the peer refused HELLO");
                End::Refused
            }
        }
    }

    /// HELLO is over: the engine is told, unless the node may not be a peer.
    async fn open(&mut self, agreed: Agreed) -> Option<End> {
        let (node, max_frame, client) = (agreed.node, agreed.max_frame, agreed.client);
        let _ = self.link.agreed.set(agreed);
        self.shaking = None;
        let refused = if !self.shared.admits(node) {
            Some(End::Policy)
        } else {
            match node.filter(|_| !client) {
                None => None,
                Some(node) if !self.shared.may_open(node) => Some(End::Limit),
                Some(node) => self.join(node, max_frame).await.err(),
            }
        };
        let Some(end) = refused else {
            self.link.set_open();
            self.active = Some(Active::new(&self.shared));
            return None;
        };
        if end == End::Policy {
            let who =
                node.map_or_else(|| "a peer that does not say who it is".to_owned(), |it| it.to_string());
            tracing::warn!(peer = self.link.at, node = who, "not admitted: it is not among overlay.peers");
        }
        if let Some(reason) = end.goaway() {
            self.session.goaway(reason);
            self.answers();
        }
        Some(end)
    }

    async fn join(&mut self, node: NodeId, max_frame: u32) -> Result<(), End> {
        let (answer, answered) = oneshot::channel();
        let call = Call::Open { link: self.link.clone(), node, max_frame, answer };
        if !self.shared.call(call) {
            return Err(End::Limit);
        }
        // An engine that ends before it answers has begun anew, and knows nobody.
        let (peer, egress) = answered.await.map_err(|_gone| End::Restart)??;
        let opened = Opened { peer, node, egress, since: self.shared.now() };
        let _ = self.link.opened.set(opened);
        self.link.wake.notify_one();
        // How far the peer is decides how long the engine waits for it.
        self.session.ping();
        Ok(())
    }

    async fn linger(&mut self) {
        let mut left = LINGER_BYTES;
        let mut thrown = BytesMut::with_capacity(4096);
        while let Ok(read) = self.io.read_buf(&mut thrown).await {
            left = left.saturating_sub(read);
            if read == 0 || left == 0 {
                return;
            }
            thrown.clear();
        }
    }
}

/// The next frame of an answer, if the writer has room for it.
async fn served(services: &mut Option<Box<Services>>, link: &Link) -> Frame {
    let max = link.agreed.get().map_or(FRAME_MIN_MAX, |agreed| agreed.max_frame);
    std::future::poll_fn(|cx| match services {
        Some(services) if link.unwritten() < UNWRITTEN_MAX => services.poll_next(max, cx),
        _ => Poll::Pending,
    })
    .await
}

/// What a session is told about itself.
pub(crate) fn session_config(shared: &Shared, link: &Link) -> session::SessionConfig {
    let settings = shared.settings.load();
    let mut hello = oap::control::Hello {
        ua: concat!("ron/", env!("CARGO_PKG_VERSION")).to_owned(),
        max_frame: u32::try_from(settings.gossip.max_frame_bytes.0).unwrap_or(oap::frame::FRAME_MAX),
        node: Some(shared.node),
        ..oap::control::Hello::default()
    };
    if link.proved.is_none() {
        // Nothing else would notice a flipped bit.
        hello.features.push(oap::control::CRC32C.to_owned());
    }
    session::SessionConfig {
        role: link.role,
        hello,
        proved: link.proved.map(|proved| proved.node),
        apps: vec![APP_GOSSIP, APP_SERVICES],
        handshake_timeout: settings.handshake_timeout.0,
        read_timeout: settings.timeouts.read.0,
        idle_timeout: settings.timeouts.idle.0,
    }
}
