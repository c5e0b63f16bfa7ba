//! Mending: what was announced and does not come is asked for.

use super::{Engine, Now};
use crate::gossip::fair::Lane;
use crate::gossip::history::Kept;
use crate::gossip::ledger::{Cause, Queue};
use crate::gossip::message::{MessageId, Topic};
use crate::gossip::missing::{Heard, Stage, Wanted};
use crate::gossip::score::Offence;
use crate::gossip::wire::{Gossip, OVERHEAD, flow};
use crate::gossip::{PeerId, bundle};
use std::collections::BTreeMap;
use std::time::Duration;

/// Halves of a round trip that a pushed message is waited for once it is announced. In a simulated network of 32
/// nodes, 5 to 40 ms apart, with publishers by chance, one round trip cost 0.57 duplicates a message, one and a
/// half 0.24 and two 0.06; the longer it is, the less the tree keeps to short ways.
const PATIENCE: u32 = 3;
const WAIT_MIN: Duration = Duration::from_millis(2);
const WAIT_MAX: Duration = Duration::from_secs(1);
/// How long an answer is waited for: twice what a round trip takes at most, since it may have to queue.
const ANSWER_MIN: Duration = Duration::from_millis(50);
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// An answer this much larger may take a second longer.
const BYTES_PER_SECOND: u64 = 4 << 20;
/// Times that a message is asked for before it is left to the next comparison of histories.
const TRIES: u32 = 8;
/// Messages, and their bytes, that one peer is asked for at once.
const ASKED_MAX: usize = 64;
const ASKED_BYTES: usize = 2 << 20;

impl Engine {
    pub(super) fn ihave(
        &mut self,
        now: Now,
        from: PeerId,
        history: bool,
        topic: &Topic,
        entries: &[(MessageId, u32)],
    ) {
        self.touch(now, topic);
        let mut full = 0;
        for (id, size) in entries {
            if self.seen.has(*id) || self.history.get(*id).is_some() {
                continue;
            }
            if *size as usize > self.config.max_message_bytes.max(bundle::BYTES_MAX) {
                return self.invalid(now, from, Offence::Oversized);
            }
            let wait = if history { Duration::ZERO } else { self.patience(topic, from) };
            let heard = Heard { id: *id, topic: topic.clone(), size: *size, history, peer: from };
            full += u64::from(!self.missing.hear(heard, now.mono + wait));
        }
        self.ledger.note_shed(Queue::Missing, Lane::Control, Cause::Full, full);
        self.ask_due(now);
    }

    /// How long a message that was announced may still come by itself: some round trips to who announced it.
    /// Where nobody pushes, there is nothing to wait for.
    fn patience(&self, topic: &Topic, from: PeerId) -> Duration {
        let eager = self.topics.get(topic).map_or(0, |state| state.eager.len());
        let round_trips = self.peers.get(&from).map_or(WAIT_MAX, |peer| peer.rtt.mean() * PATIENCE / 2);
        if eager == 0 { Duration::ZERO } else { round_trips.clamp(WAIT_MIN, WAIT_MAX) }
    }

    /// Asks for everything that is due. Questions to one peer go together.
    pub(super) fn ask_due(&mut self, now: Now) {
        let mut grafts: BTreeMap<(PeerId, Topic), Vec<MessageId>> = BTreeMap::new();
        let mut wants: BTreeMap<PeerId, Vec<MessageId>> = BTreeMap::new();
        while let Some((_, id)) = self.missing.next_due().filter(|(due, _)| *due <= now.mono) {
            if !self.is_late(now, id) {
                continue;
            }
            let Some((peer, graft)) = self.ask(now, id) else { continue };
            match graft {
                Some(topic) => grafts.entry((peer, topic)).or_default().push(id),
                None => wants.entry(peer).or_default().push(id),
            }
        }
        for ((peer, topic), ids) in grafts {
            self.tell(peer, &Gossip::Graft { topic, ids });
        }
        for (peer, ids) in wants {
            self.tell(peer, &Gossip::IWant { ids });
        }
    }

    /// Deals with an answer that did not come. Says whether to ask somebody.
    fn is_late(&mut self, now: Now, id: MessageId) -> bool {
        let Some(wanted) = self.missing.get(id) else { return false };
        let stage = wanted.stage;
        if let Stage::Receiving(_) = stage
            && self.chunks_again(now, id)
        {
            return false;
        }
        if let Stage::Asked(peer) | Stage::Receiving(peer) = stage {
            self.stop_asking(now, id);
            self.missing.give_up_on(id, peer, false);
            self.offend(now, peer, Offence::Withheld);
        }
        let peers = &self.peers;
        self.missing.keep_announcers(id, |peer| peers.contains_key(&peer));
        let Some(wanted) = self.missing.get(id) else { return false };
        let (nobody, often) = (wanted.announcers.is_empty(), wanted.tries >= TRIES);
        if nobody || often {
            let cause = if nobody { Cause::Gone } else { Cause::Timeout };
            self.missing.remove(id);
            self.ledger.note_shed(Queue::Missing, Lane::Control, cause, 1);
        }
        !nobody && !often
    }

    /// Chooses whom to ask, and whether with GRAFT; `None` if everybody is busy with earlier questions.
    fn ask(&mut self, now: Now, id: MessageId) -> Option<(PeerId, Option<Topic>)> {
        let wanted = self.missing.get(id)?;
        let (topic, size, tries, history) =
            (wanted.topic.clone(), wanted.size as usize, wanted.tries, wanted.history);
        let free = |peer: &&PeerId| {
            self.peers.get(*peer).is_some_and(|it| {
                it.asked == 0 || it.asked < ASKED_MAX && it.asked_bytes + size <= ASKED_BYTES
            })
        };
        let Some(id_of) = wanted.announcers.iter().find(free).copied() else {
            let first = wanted.announcers.first().copied();
            if let Some(peer) = first.and_then(|first| self.peers.get_mut(&first)) {
                peer.to_ask.push_back(id);
            }
            // Its turn comes when an answer does; this is for when none does.
            self.missing.set(id, Stage::Waiting, now.mono + ANSWER_MAX);
            return None;
        };
        let peer = self.peers.get_mut(&id_of)?;
        peer.asked += 1;
        peer.asked_bytes += size;
        let slow = Duration::from_micros(size as u64 * 1_000_000 / BYTES_PER_SECOND);
        let patience = (peer.rtt.limit() * 2).clamp(ANSWER_MIN, ANSWER_MAX) * 2u32.pow(tries.min(6));
        self.missing.set(id, Stage::Asked(id_of), now.mono + patience.min(ANSWER_MAX) + slow);
        let graft = !history && size + OVERHEAD <= self.config.max_frame_bytes as usize;
        let graft = graft && self.make_eager(&topic, id_of);
        Some((id_of, graft.then_some(topic)))
    }

    fn stop_asking(&mut self, now: Now, id: MessageId) {
        self.transfer_over(id);
        if let Some(wanted) = self.missing.get(id) {
            let (size, stage) = (wanted.size as usize, wanted.stage);
            self.free(now, size, stage);
        }
    }

    pub(super) fn not_asked(&mut self, now: Now, wanted: &Wanted) {
        self.free(now, wanted.size as usize, wanted.stage);
    }

    /// A peer has one question less to answer: the next that waited for that is asked.
    fn free(&mut self, now: Now, size: usize, stage: Stage) {
        let (Stage::Asked(peer) | Stage::Receiving(peer)) = stage else { return };
        let Some(peer) = self.peers.get_mut(&peer) else { return };
        peer.asked = peer.asked.saturating_sub(1);
        peer.asked_bytes = peer.asked_bytes.saturating_sub(size);
        while let Some(id) = peer.to_ask.pop_front() {
            if self.missing.get(id).is_some_and(|wanted| wanted.stage == Stage::Waiting) {
                return self.missing.set(id, Stage::Waiting, now.mono);
            }
        }
    }

    /// A message that others may have. One taken on its origin's own word is checked now; if its signature does not
    /// hold, the origin has fooled this node, and pays for it.
    fn vouched(&mut self, now: Now, id: MessageId) -> Option<Kept> {
        let kept = self.history.get(id)?.clone();
        if kept.checked {
            return Some(kept);
        }
        if self.origins.signed(&kept.envelope, id) {
            self.history.set_checked(id);
            return Some(kept);
        }
        self.history.remove(id);
        if let Some(origin) = self.nodes.get(&kept.envelope.origin).copied() {
            self.invalid(now, origin, Offence::Unsigned);
        }
        None
    }

    /// Gives a peer the messages it asks for, as far as they are here and there is room.
    pub(super) fn give(&mut self, now: Now, to: PeerId, ids: &[MessageId], lane: Lane) {
        self.owed = self.owed.map(|_| now.mono);
        for id in ids {
            let (Some(kept), Some(peer)) = (self.vouched(now, *id), self.peers.get(&to)) else {
                continue;
            };
            let whole = kept.payload.len() + OVERHEAD <= peer.max_frame as usize;
            let frame = if whole { self.encode(&kept) } else { self.encode_manifest(&kept, to) };
            if let Some(frame) = frame {
                self.send(to, lane, flow(kept.envelope.topic.as_str().as_bytes()), frame);
            }
        }
    }
}
