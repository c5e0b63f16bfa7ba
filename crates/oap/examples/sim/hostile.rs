//! Peers that break the rules.

use crate::net::{EPOCH_MS, Net, key, node_id};
use bytes::Bytes;
use oap::Encoded;
use oap::frame::{APP_GOSSIP, FRAME_MAX, Frame};
use oap::gossip::wire::{Gossip, Window};
use oap::gossip::{Envelope, MessageId};

/// What a hostile node does besides its part, to all its peers at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hostility {
    /// Bytes that say nothing.
    Garbage,
    /// Messages in another's name.
    Forger,
    /// Messages of its own with another's signature: whoever takes its word for them is to be blamed by the next.
    Impostor,
    /// Ten times as many good messages as it may send.
    Flooder,
    /// The same message again and again.
    Repeater,
    /// Announcements of what does not exist.
    Liar,
    /// Control frames without end, each of which costs work or memory.
    Chatterer,
}

impl Hostility {
    pub(crate) const ALL: [Hostility; 7] = [
        Hostility::Garbage,
        Hostility::Forger,
        Hostility::Impostor,
        Hostility::Flooder,
        Hostility::Repeater,
        Hostility::Liar,
        Hostility::Chatterer,
    ];
}

impl Net {
    /// A tenth of a second of hostility, as long as anybody talks to the node.
    pub(crate) fn attack(&mut self, from: usize, hostility: Hostility) {
        if self.nodes[from].as_ref().is_none_or(|node| node.peers.is_empty()) {
            return;
        }
        let frames: Vec<Encoded> = (0..200).map(|_| self.hostile_frame(from, hostility)).collect();
        for to in 0..self.nodes.len() {
            frames.iter().for_each(|frame| self.inject(from, to, frame));
        }
    }

    fn hostile_frame(&mut self, from: usize, hostility: Hostility) -> Encoded {
        let any = self.random.number();
        let topic = self.topics[self.topics.len() - 1].clone();
        let mut id = MessageId([0; 32]);
        id.0[..8].copy_from_slice(&any.to_be_bytes());
        let gossip = match hostility {
            Hostility::Garbage => {
                let bytes = [&[any as u8 % 12, 0][..], &any.to_be_bytes().repeat(any as usize % 40)].concat();
                return Frame::event(APP_GOSSIP, any, bytes).encode(FRAME_MAX).expect("a frame");
            }
            Hostility::Forger => self.message(node_id(from + 1), any, any),
            Hostility::Impostor => self.message(node_id(from), any, from as u64 + 1),
            Hostility::Flooder => self.message(node_id(from), any, from as u64),
            Hostility::Repeater => self.message(node_id(from), 1, from as u64),
            Hostility::Liar => Gossip::IHave { history: false, topic, entries: vec![(id, 1000)] },
            Hostility::Chatterer if any.is_multiple_of(3) => Gossip::Graft { topic, ids: vec![id; 100] },
            Hostility::Chatterer if any % 3 == 1 => Gossip::IWant { ids: vec![id; 1000] },
            Hostility::Chatterer => {
                let window = Window { since: EPOCH_MS, until: EPOCH_MS + self.now.as_millis() as u64 };
                Gossip::Digest { round: 0, topic, window, count: 1, hash: id.0 }
            }
        };
        gossip.encode(FRAME_MAX).expect("a frame")
    }

    /// A message of this origin, signed with the key of this node.
    fn message(&self, origin: oap::NodeId, seq: u64, signer: u64) -> Gossip {
        let topic = self.topics[self.topics.len() - 1].clone();
        let mut envelope = Envelope { origin, seq, time: EPOCH_MS, topic, bundle: false, signature: None };
        let payload = Bytes::from_static(b"nobody asked for this");
        let id = envelope.id(&payload);
        envelope.sign(id, &key(signer as usize));
        Gossip::Message { hops: 0, envelope, payload }
    }
}
