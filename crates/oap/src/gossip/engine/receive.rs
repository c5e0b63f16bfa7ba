//! What a peer says.

use super::{Engine, Now};
use crate::gossip::engine::Action;
use crate::gossip::fair::Lane;
use crate::gossip::history::{Kept, millis};
use crate::gossip::ledger::{Cause, Outcome, Queue};
use crate::gossip::message::Envelope;
use crate::gossip::missing::Stage;
use crate::gossip::score::Offence;
use crate::gossip::seen::{First, Known};
use crate::gossip::wire::Gossip;
use crate::gossip::{PeerId, bundle};
use bytes::Bytes;

impl Engine {
    /// A gossip frame from a peer, with the number that it had.
    pub fn receive(&mut self, now: Now, from: PeerId, corr: u64, payload: &Bytes) {
        let Some(peer) = self.peers.get_mut(&from) else { return };
        peer.hear(now.mono, &self.config);
        self.ledger.frames_in += 1;
        let Some(gossip) = Gossip::parse(payload) else { return self.invalid(now, from, Offence::Invalid) };
        let data = matches!(gossip, Gossip::Message { .. } | Gossip::Manifest { .. } | Gossip::Chunk { .. });
        if !data && !peer.control.take(now.mono) {
            self.ledger.note_shed(Queue::Ingress, Lane::Control, Cause::Budget, 1);
            return self.offend(now, from, Offence::Excessive);
        }
        match gossip {
            Gossip::Message { hops, envelope, payload } => {
                self.message(now, from, corr, hops, envelope, payload);
            }
            Gossip::Manifest { hops, id, size, chunk, envelope } => {
                self.manifest(now, from, hops, id, (size, chunk), envelope);
            }
            Gossip::Chunk { id, index, bytes } => self.chunk(now, from, id, index, bytes),
            Gossip::IHave { history, topic, entries } => self.ihave(now, from, history, &topic, &entries),
            Gossip::IWant { ids } => self.give(now, from, &ids, Lane::Bulk),
            Gossip::Graft { topic, ids } => {
                if !self.make_eager(&topic, from) {
                    self.tell(from, &Gossip::Prune { topic });
                }
                self.give(now, from, &ids, Lane::Normal);
            }
            Gossip::Prune { topic } => self.pruned(&topic, from),
            Gossip::Topics(topics) => {
                let Some(peer) = self.peers.get_mut(&from) else { return };
                topics.into_iter().for_each(|(follows, topic)| peer.follow(follows, topic));
            }
            Gossip::Digest { round, topic, window, count, hash } => {
                self.digested(now, from, round, &topic, window, (count, hash));
            }
            Gossip::WantChunks { id, first, count } => self.give_chunks(now, from, id, first, count),
        }
    }

    pub(super) fn invalid(&mut self, now: Now, from: PeerId, offence: Offence) {
        self.ledger.note(Outcome::Invalid);
        self.offend(now, from, offence);
    }

    fn message(&mut self, now: Now, from: PeerId, corr: u64, hops: u8, envelope: Envelope, payload: Bytes) {
        let asked = self.missing.asked(from, corr).is_some();
        let Some(peer) = self.peers.get_mut(&from) else { return };
        if !asked && !peer.data.take(now.mono) {
            // A second answer to what was asked twice is nobody's excess.
            if self.seen.was_asked(corr) {
                return self.ledger.note(Outcome::Duplicate);
            }
            self.ledger.note_shed(Queue::Ingress, Lane::Normal, Cause::Budget, 1);
            self.ledger.note(Outcome::Shed);
            self.actions.push_back(Action::Refuse(from, corr));
            return self.offend(now, from, Offence::Excessive);
        }
        let count = match self.count(&envelope, &payload) {
            Ok(count) => count,
            Err(offence) => return self.invalid(now, from, offence),
        };
        if hops >= self.config.hop_limit && !asked {
            return self.invalid(now, from, Offence::Invalid);
        }
        if !self.is_timely(now, from, &envelope, asked) {
            return;
        }
        let id = envelope.id(&payload);
        if id.corr() != corr {
            return self.invalid(now, from, Offence::Invalid);
        }
        match self.seen.knows(id, &envelope) {
            Known::New => {
                let checked = !self.is_origins_word(from, &envelope);
                if checked && self.config.signed && !self.origins.signed(&envelope, id) {
                    return self.invalid(now, from, Offence::Unsigned);
                }
                let hops = hops.saturating_add(1);
                self.accept(now, from, Kept { id, envelope, payload, hops, checked, count });
            }
            Known::Forgotten => self.expired(now, from, asked),
            Known::Seen(first) => self.duplicate(now, from, &envelope, first, count),
        }
    }

    /// How many messages a payload is, each within bounds.
    pub(super) fn count(&self, envelope: &Envelope, payload: &[u8]) -> Result<usize, Offence> {
        let max = self.config.max_message_bytes;
        if payload.len() > if envelope.bundle { bundle::BYTES_MAX } else { max } {
            return Err(Offence::Oversized);
        }
        if envelope.bundle { bundle::count(payload, max).ok_or(Offence::Invalid) } else { Ok(1) }
    }

    /// Whether a signed message comes from its origin itself, which the transport has proved, and is pushed to nobody
    /// else: the signature, which costs more than everything else together, then matters only to who asks for it.
    fn is_origins_word(&self, from: PeerId, envelope: &Envelope) -> bool {
        let own = self.peers.get(&from).is_some_and(|peer| peer.proved && peer.node == envelope.origin);
        let alone = match self.topics.get(&envelope.topic) {
            Some(state) => state.eager.iter().all(|peer| *peer == from),
            None => self.peers.len() == 1,
        };
        own && alone && envelope.signature.is_some()
    }

    /// Whether a message is from neither the future nor the past; counted if it is.
    pub(super) fn is_timely(&mut self, now: Now, from: PeerId, envelope: &Envelope, asked: bool) -> bool {
        let early = envelope.time > now.unix_ms.saturating_add(millis(self.config.skew));
        let old = envelope.time < self.oldest(now);
        if early {
            self.invalid(now, from, Offence::Invalid);
        } else if old {
            self.expired(now, from, asked);
        }
        !early && !old
    }

    fn expired(&mut self, now: Now, from: PeerId, asked: bool) {
        self.ledger.note(Outcome::Expired);
        if !asked {
            self.offend(now, from, Offence::Replayed);
        }
    }

    /// A message that is new, whole and its origin's.
    pub(super) fn accept(&mut self, now: Now, from: PeerId, kept: Kept) {
        let topic = kept.envelope.topic.clone();
        self.touch(now, &topic);
        let wanted = self.missing.get(kept.id);
        let history = wanted.is_some_and(|wanted| wanted.history);
        let pushed = wanted.is_none_or(|wanted| wanted.stage == Stage::Waiting);
        if pushed {
            self.make_eager(&topic, from);
            self.topics.get_mut(&topic).and_then(|state| state.useless.remove(&from));
        }
        self.relay(now, &kept, Some(from), history);
        let id = kept.id;
        self.transfer_over(id);
        let wanted = self.missing.remove(id);
        let asked = wanted.as_ref().is_some_and(|it| it.tries > 0 || it.stage != Stage::Waiting);
        wanted.iter().for_each(|wanted| self.not_asked(now, wanted));
        self.keep(kept, First { from: Some(from), asked });
    }

    fn duplicate(&mut self, now: Now, from: PeerId, envelope: &Envelope, first: First, count: usize) {
        self.ledger.note_all(Outcome::Duplicate, count);
        if first.asked {
            return;
        }
        if first.from == Some(from) {
            self.offend(now, from, Offence::Replayed);
        }
        self.prune(now, &envelope.topic, from);
    }
}
