//! What the gossip engine is asked, by whom it must not wait for.

use crate::link::{End, Link};
use bytes::Bytes;
use oap::NodeId;
use oap::gossip::{Offence, PeerId, PeerInfo, Published, SharedEgress, Topic};
use ron_kernel::inventory::{ChannelKind, ChannelSpec, Policy};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Calls of local users that may wait; the rest of the queue is for sessions.
pub(crate) const LOCAL_MAX: usize = 512;
/// Calls that may be lost: a round trip is measured again, an offence repeats itself.
pub(crate) const LOSSY_MAX: usize = 1024;

/// Sessions that open and close always find room: there are at most `max_conns` of them, with one call each.
pub(crate) static CALLS: ChannelSpec = ChannelSpec {
    service: "overlay",
    name: "gossip_calls",
    kind: ChannelKind::Mpsc,
    capacity: 4096,
    policy: Policy::RejectNew,
    producers: &["reader", "conn", "api"],
    consumers: &["gossip"],
};

#[derive(Debug)]
pub(crate) enum Call {
    /// A session is open; it waits for the answer before it reads on.
    Open {
        link: Arc<Link>,
        node: NodeId,
        max_frame: u32,
        answer: oneshot::Sender<Result<(PeerId, SharedEgress), End>>,
    },
    Close(PeerId),
    Rtt(PeerId, Duration),
    /// The peer had no room for the message with this number.
    Refused(PeerId, u64),
    Offend(PeerId, Offence),
    Publish {
        topic: Topic,
        payload: Bytes,
        /// Whoever asks will ask again if there is no room.
        patient: bool,
        answer: oneshot::Sender<Result<Published, oap::gossip::PublishError>>,
    },
    /// Several messages, in order, until no peer has room for one: its outcome is then the last.
    PublishAll {
        topic: Topic,
        payloads: Vec<Bytes>,
        patient: bool,
        answer: oneshot::Sender<Vec<Result<Published, oap::gossip::PublishError>>>,
    },
    Follow(Topic),
    Unfollow(Topic),
    Peers(oneshot::Sender<Known>),
}

/// What the engine knows of nodes.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) peers: Vec<PeerInfo>,
    /// Nodes that nobody talks to, how much longer, and why.
    pub(crate) greylisted: Vec<(NodeId, Duration, Offence)>,
}
