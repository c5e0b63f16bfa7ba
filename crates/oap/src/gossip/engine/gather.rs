//! Messages that come one after the other and are signed together: whoever takes part checks one signature for all of
//! them, and is woken once. The first is signed at once; those that follow within a moment wait for its end. The moment
//! is the longer the more came along the last time, so that few are not held up where nothing is saved by it. They are
//! accepted when they come, so that no publisher waits: only while every peer has room in plenty.

use super::tree::NORMAL_MAX;
use super::{Engine, First, Kept, Now, PublishError, Published};
use crate::gossip::bundle::{self, Room, Units};
use crate::gossip::signature::TOGETHER_MAX;
use crate::gossip::wire::OVERHEAD;
use std::time::Duration;

/// So many that were signed together are many: the next ones may wait as long as any; a guess.
const MANY: u32 = 8;
/// Bytes that wait to be signed, about: what peers are sure to have room for.
const BYTES_MAX: usize = 256 << 10;

#[derive(Debug, Default)]
pub(super) struct Gathered {
    units: Units,
    bytes: usize,
    /// Until when what comes waits.
    until: Option<Duration>,
}

impl Gathered {
    /// By when what waits is to be signed.
    pub(super) fn due(&self) -> Option<Duration> {
        self.until.filter(|_| !self.units.is_empty())
    }

    pub(super) fn is_enough(&self) -> bool {
        self.units.messages() >= TOGETHER_MAX || self.bytes >= BYTES_MAX
    }
}

impl Engine {
    /// Whether these may wait: something was signed just now, and nobody will be short of room for them.
    pub(super) fn may_gather(&mut self, now: Now, made: &[Result<Kept, PublishError>]) -> bool {
        let recent = self.gathered.until.is_some_and(|until| now.mono < until);
        let sizes = made.iter().flatten().map(|kept| kept.payload.len());
        let small = sizes.clone().all(|size| size <= NORMAL_MAX) && sizes.sum::<usize>() <= BYTES_MAX;
        let (count, announce_max) = (self.gathered.units.messages() + made.len(), self.config.announce_max);
        // Half of a queue, less what is kept for control, is more than what is gathered.
        let plenty =
            self.config.egress.frames >= 4 * TOGETHER_MAX && self.config.egress.bytes >= 4 * BYTES_MAX;
        let mut peers = self.peers.values();
        self.config.signed
            && recent
            && small
            && plenty
            && made.len() < TOGETHER_MAX
            && peers
                .all(|peer| peer.announce_count + count <= announce_max && peer.egress.lock().is_half_empty())
    }

    /// Takes a message to be signed with others, and says who will have it.
    pub(super) fn gather(&mut self, now: Now, kept: Kept) -> Published {
        let topic = kept.envelope.topic.clone();
        self.touch(now, &topic);
        let eager = self.topics.get(&topic).map(|state| &state.eager);
        let (id, size, room) = (kept.id, kept.payload.len() + OVERHEAD, self.bundle_room());
        self.gathered.bytes += size;
        let before = self.gathered.units.add(kept, room);
        let mut queued = 0;
        for (id, peer) in &mut self.peers {
            let pushed = eager.is_some_and(|eager| eager.contains(id))
                && size <= peer.max_frame as usize
                && !peer.is_choked(now.mono)
                && peer.push.has_more_than(before, now.mono);
            queued += usize::from(pushed);
        }
        let lazy = self.peers.len() - queued;
        Published { id, queued, lazy, refused: 0 }
    }

    /// Signs what waits, and sends it out. To be called before a node ends; else [`Engine::tick`] does.
    pub fn sign_gathered(&mut self, now: Now) {
        let units = std::mem::take(&mut self.gathered.units);
        if units.is_empty() {
            return;
        }
        self.gathered.bytes = 0;
        for kept in self.signed(now, units) {
            self.touch(now, &kept.envelope.topic);
            // It was accepted: whoever has no room for it after all can ask for it.
            let reach = self.relay(now, &kept, None, false);
            self.note_owed(now, reach);
            self.keep(kept, First { from: None, asked: false });
        }
    }

    /// What may go into one bundle, so that every peer can have it pushed and everybody can keep it.
    pub(super) fn bundle_room(&self) -> Room {
        let history = self.config.history;
        let frames = self.peers.values().map(|peer| peer.max_frame as usize).min();
        let frame = frames.unwrap_or(usize::MAX).min(self.config.max_frame_bytes as usize);
        Room {
            messages: bundle::MESSAGES_MAX.min(history.count / 4),
            bytes: bundle::BYTES_MAX.min(history.bytes / 4).min(frame.saturating_sub(OVERHEAD)),
        }
    }

    /// Makes bundles, and signs what is to be sent out together, if it is signed at all.
    pub(super) fn signed(&mut self, now: Now, units: Units) -> Vec<Kept> {
        let count = u32::try_from(units.messages()).unwrap_or(MANY).min(MANY);
        let mut sealed = units.seal();
        if self.config.signed {
            let leaves: Vec<_> = sealed.iter().map(|kept| kept.envelope.leaf(kept.id)).collect();
            for (kept, signature) in sealed.iter_mut().zip(self.author.sign(&leaves)) {
                kept.envelope.signature = Some(signature);
            }
            self.gathered.until = Some(now.mono + self.config.gather * count / MANY);
        }
        sealed
    }
}
