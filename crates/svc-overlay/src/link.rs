//! What the tasks of one connection share, and the engine with them.

use crate::shared::Shared;
use oap::NodeId;
use oap::control::Goaway;
use oap::error::FrameError;
use oap::frame::{APP_GOSSIP, FRAME_MAX, Frame};
use oap::gossip::{Lane, PeerId, SharedEgress};
use oap::session::{Agreed, Outgoing, Role};
use ron_kernel::channel::{self, Receiver, Sender};
use ron_kernel::inventory::{ChannelKind, ChannelSpec, Policy, Probe};
use ron_kernel::sync::Limits;
use ron_transport::Proved;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;
use tokio::sync::Notify;

/// Answers that go before everything that is queued: of the protocol itself, and to what found no room.
pub(crate) static REPLIES: ChannelSpec = ChannelSpec {
    service: "overlay",
    name: "replies",
    kind: ChannelKind::Mpsc,
    capacity: 512,
    policy: Policy::RejectNew,
    producers: &["reader", "gossip"],
    consumers: &["writer"],
};

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The peer closed it.
    Peer,
    /// It broke.
    Io,
    Draining,
    Idle,
    Duplicate,
    Protocol,
    Limit,
    Policy,
    Greylisted,
    HandshakeTimeout,
    ReadTimeout,
    WriteTimeout,
    /// The peer refused our HELLO.
    Refused,
    /// The peer does not want this node: it does not list it, or has greylisted it.
    Unwelcome,
    /// The peer has no room for the session.
    Crowded,
    /// The engine began anew, and knows nobody.
    Restart,
    /// Our own task panicked.
    Panic,
}

impl End {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            End::Peer => "peer",
            End::Io => "io",
            End::Draining => "draining",
            End::Idle => "idle",
            End::Duplicate => "duplicate",
            End::Protocol => "protocol",
            End::Limit => "limit",
            End::Policy => "policy",
            End::Greylisted => "greylisted",
            End::HandshakeTimeout => "handshake_timeout",
            End::ReadTimeout => "read_timeout",
            End::WriteTimeout => "write_timeout",
            End::Refused => "refused",
            End::Unwelcome => "unwelcome",
            End::Crowded => "crowded",
            End::Restart => "restart",
            End::Panic => "panic",
        }
    }

    /// What the peer is told, where somebody other than the session itself ends it.
    pub(crate) const fn goaway(self) -> Option<Goaway> {
        match self {
            End::Draining | End::Restart => Some(Goaway::Draining),
            End::Duplicate => Some(Goaway::Duplicate),
            End::Policy | End::Greylisted => Some(Goaway::Policy),
            End::Limit => Some(Goaway::Limit),
            End::Idle => Some(Goaway::Idle),
            _ => None,
        }
    }
}

/// A session that the engine knows.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) peer: PeerId,
    pub(crate) node: NodeId,
    pub(crate) egress: SharedEgress,
    pub(crate) since: Duration,
}

/// A queue with less than this part of its bytes left is as good as full.
const FULL_WITHIN: usize = 16;

/// How the writer is to finish.
const OPEN: u8 = 0;
const DRAIN: u8 = 1;
const NOW: u8 = 2;

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) role: Role,
    /// The other end's address.
    pub(crate) at: String,
    pub(crate) proved: Option<Proved>,
    replies: Sender<Outgoing>,
    /// For the writer: there is something to write, or it is to finish.
    pub(crate) wake: Notify,
    /// For the reader: the writer has written something.
    pub(crate) wrote: Notify,
    /// For the reader: somebody has ended the session.
    pub(crate) stop: Notify,
    pub(crate) agreed: OnceLock<Agreed>,
    pub(crate) opened: OnceLock<Opened>,
    /// Why the peer goes away, as it said itself.
    pub(crate) told: OnceLock<Goaway>,
    end: OnceLock<End>,
    finish: AtomicU8,
    /// Whether it became a session.
    session: AtomicBool,
    /// Whether it was said already that the peer is slow.
    pub(crate) slow: AtomicBool,
}

impl Link {
    pub(crate) fn new(
        shared: &Shared,
        role: Role,
        at: String,
        proved: Option<Proved>,
    ) -> (Link, Receiver<Outgoing>) {
        let (replies, receiver) = channel::queue(
            shared.service.inventory(),
            &REPLIES,
            Limits::items(REPLIES.capacity),
            REPLIES.policy,
        );
        let link = Link {
            role,
            at,
            proved,
            replies,
            wake: Notify::new(),
            wrote: Notify::new(),
            stop: Notify::new(),
            agreed: OnceLock::new(),
            opened: OnceLock::new(),
            told: OnceLock::new(),
            end: OnceLock::new(),
            finish: AtomicU8::new(OPEN),
            session: AtomicBool::new(false),
            slow: AtomicBool::new(false),
        };
        (link, receiver)
    }

    /// Queues an answer; false if the peer has left too many unread.
    pub(crate) fn reply(&self, answer: Outgoing) -> bool {
        let taken = self.replies.try_send(answer).is_ok();
        self.wake.notify_one();
        taken
    }

    /// Answers that the writer has not taken yet.
    pub(crate) fn unwritten(&self) -> usize {
        self.replies.depth()
    }

    /// Tells the peer that a gossip frame found no room. One that reads nothing need not be told.
    pub(crate) fn refuse(&self, shared: &Shared, corr: u64) {
        let error = FrameError::Busy;
        shared.numbers.reject(error.code());
        let frame = Frame::response(APP_GOSSIP, corr, error.status(), error.problem());
        if let Ok(frame) = frame.encode(FRAME_MAX) {
            self.reply(Outgoing { frame, checked: self.is_checked() });
        }
    }

    /// Whether the peer's queue has no room left, up to the part of it that is smaller than many a frame.
    pub(crate) fn is_full(&self, shared: &Shared) -> bool {
        let part = shared.settings.load().peer.egress_bytes.usize() / FULL_WITHIN;
        self.opened.get().is_some_and(|opened| !opened.egress.lock().has_room(Lane::Normal, part))
    }

    /// HELLO is over, and the peer is admitted.
    pub(crate) fn set_open(&self) {
        self.session.store(true, Ordering::SeqCst);
    }

    pub(crate) fn was_open(&self) -> bool {
        self.session.load(Ordering::SeqCst)
    }

    pub(crate) fn is_checked(&self) -> bool {
        self.agreed.get().is_some_and(|agreed| agreed.crc32c)
    }

    /// Ends the session from outside; the first reason stands.
    pub(crate) fn end(&self, why: End) {
        let _ = self.end.set(why);
        self.stop.notify_one();
    }

    pub(crate) fn ended(&self) -> Option<End> {
        self.end.get().copied()
    }

    /// The writer writes its answers and ends.
    pub(crate) fn finish(&self) {
        self.finish.store(NOW, Ordering::SeqCst);
        self.wake.notify_one();
    }

    /// The writer writes all that is queued and ends.
    pub(crate) fn drain(&self) {
        let _ = self.finish.compare_exchange(OPEN, DRAIN, Ordering::SeqCst, Ordering::SeqCst);
        self.wake.notify_one();
    }

    pub(crate) fn is_finishing(&self) -> bool {
        self.finish.load(Ordering::SeqCst) != OPEN
    }

    pub(crate) fn finishes_now(&self) -> bool {
        self.finish.load(Ordering::SeqCst) == NOW
    }
}

/// The peer's egress queue, as the inventory shows it.
impl Probe for Link {
    fn depth(&self) -> usize {
        self.opened.get().map_or(0, |opened| opened.egress.depth())
    }
}
