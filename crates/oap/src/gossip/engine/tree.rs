//! Who is pushed to and who is told: a tree for each topic, found by pruning what is not needed.

use super::{Engine, Now, Published};
use crate::Encoded;
use crate::gossip::fair::Lane;
use crate::gossip::history::Kept;
use crate::gossip::ledger::{Cause, Queue};
use crate::gossip::message::Topic;
use crate::gossip::peer::Peer;
use crate::gossip::wire::{Gossip, IDS_MAX, OVERHEAD, flow};
use crate::gossip::{PeerId, bundle};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Larger messages go in the lane for bulk; a bundle of small ones never does.
pub(super) const NORMAL_MAX: usize = bundle::BYTES_MAX;
/// Announcements wait so long for others to go with, a part of the round trip between these.
const ANNOUNCE_MIN: Duration = Duration::from_millis(5);
const ANNOUNCE_MAX: Duration = Duration::from_millis(25);
/// Where so many go at once, the next wait as long as they may: there are many, and each frame costs both sides more
/// than all that it says.
const ANNOUNCE_MANY: usize = 16;
/// Announcements in one frame, so that it fits in the smallest that a peer takes.
const ANNOUNCED: usize = 256;
/// How long announcements wait that found no room.
const ANNOUNCE_AGAIN: Duration = Duration::from_millis(50);
/// A topic that nobody here follows and of which nothing is kept is forgotten after this.
const TOPIC_IDLE: Duration = Duration::from_secs(60);

/// Pushes in a row that bring nothing new before a peer is asked not to push. With one, messages of several
/// publishers that are on their way at the same time break a circle in several places, and the tree falls apart:
/// in simulated networks (16 nodes, publishers by chance) the 99th of 100 deliveries then took three times as long.
const USELESS_MAX: u32 = 5;

#[derive(Debug, Default)]
pub(super) struct TopicState {
    /// Peers that messages are pushed to. The others are told of them.
    pub(super) eager: BTreeSet<PeerId>,
    /// When a peer was last asked not to push.
    pub(super) pruned: BTreeMap<PeerId, Duration>,
    /// Pushes of a peer in a row that brought nothing new.
    pub(super) useless: BTreeMap<PeerId, u32>,
    /// When its history is compared next.
    pub(super) digest: Duration,
    used: Duration,
}

impl Engine {
    /// Notes that a topic is in use; a new one begins with every peer eager, as far as the fan-out goes. There
    /// is always room for one more: the one that was idle longest and is not followed goes.
    pub(super) fn touch(&mut self, now: Now, topic: &Topic) {
        if let Some(state) = self.topics.get_mut(topic) {
            state.used = now.mono;
            return;
        }
        if self.topics.len() >= self.config.topics_max {
            let idle = self.topics.iter().filter(|(topic, _)| !self.follows.contains(*topic));
            let oldest = idle.min_by_key(|(_, state)| state.used).map(|(topic, _)| topic.clone());
            if let Some(topic) = oldest {
                self.ledger.note_shed(Queue::Topics, Lane::Bulk, Cause::Dropped, 1);
                self.forget_topic(&topic);
            }
        }
        let eager = self.choose(topic);
        self.topics.insert(topic.clone(), TopicState { eager, used: now.mono, ..TopicState::default() });
        let wait = self.digest_wait();
        self.expect_digest(now, topic, wait);
    }

    pub(super) fn forget_topic(&mut self, topic: &Topic) {
        if let Some(state) = self.topics.remove(topic) {
            self.digest_due.remove(&(state.digest, topic.clone()));
        }
        self.history.drop_topic(topic);
    }

    pub(super) fn sweep_topics(&mut self, now: Now) {
        let idle = |(topic, state): &(&Topic, &TopicState)| {
            now.mono.saturating_sub(state.used) > TOPIC_IDLE
                && !self.follows.contains(*topic)
                && self.history.of(topic).next().is_none()
        };
        let idle: Vec<Topic> = self.topics.iter().filter(idle).map(|(topic, _)| topic.clone()).collect();
        idle.iter().for_each(|topic| self.forget_topic(topic));
    }

    /// Peers to begin with: those that follow the topic first, otherwise by chance.
    fn choose(&mut self, topic: &Topic) -> BTreeSet<PeerId> {
        let mut peers: Vec<PeerId> = self.peers.keys().copied().collect();
        if peers.len() > self.config.relay_fanout {
            self.random.shuffle(&mut peers);
            peers.sort_by_key(|peer| !self.peers[peer].follows.contains(topic));
            peers.truncate(self.config.relay_fanout);
        }
        peers.into_iter().collect()
    }

    /// A new peer is eager for everything, as far as the fan-out goes.
    pub(super) fn join_trees(&mut self, peer: PeerId) {
        for state in self.topics.values_mut() {
            if state.eager.len() < self.config.relay_fanout {
                state.eager.insert(peer);
            }
        }
    }

    /// An eager peer was lost: everybody is eager again, until duplicates prune them.
    pub(super) fn heal(&mut self, now: Now, gone: PeerId) {
        let topics: Vec<Topic> = self.topics.keys().cloned().collect();
        for topic in topics {
            let Some(state) = self.topics.get_mut(&topic) else { continue };
            state.pruned.remove(&gone);
            state.useless.remove(&gone);
            if state.eager.remove(&gone) {
                let eager = self.choose(&topic);
                if let Some(state) = self.topics.get_mut(&topic) {
                    state.eager = eager;
                }
                self.expect_digest_soon(now, &topic);
            }
        }
    }

    /// Makes a peer eager if there is room. Says whether it is.
    pub(super) fn make_eager(&mut self, topic: &Topic, peer: PeerId) -> bool {
        let Some(state) = self.topics.get_mut(topic) else { return false };
        let room = state.eager.len() < self.config.relay_fanout;
        if room {
            state.eager.insert(peer);
            state.pruned.remove(&peer);
        }
        room || state.eager.contains(&peer)
    }

    /// A peer pushed what was here already: it is told not to, once in a round trip or so.
    pub(super) fn prune(&mut self, now: Now, topic: &Topic, peer: PeerId) {
        let Some(again) = self.peers.get(&peer).map(|peer| peer.rtt.limit()) else { return };
        let Some(state) = self.topics.get_mut(topic) else { return };
        let useless = state.useless.entry(peer).or_default();
        *useless += 1;
        if *useless < USELESS_MAX {
            return;
        }
        *useless = 0;
        let eager = state.eager.remove(&peer);
        let lately = state.pruned.get(&peer).is_some_and(|last| now.mono < *last + again);
        if eager || !lately {
            state.pruned.insert(peer, now.mono);
            self.tell(peer, &Gossip::Prune { topic: topic.clone() });
        }
    }

    pub(super) fn pruned(&mut self, topic: &Topic, peer: PeerId) {
        if let Some(state) = self.topics.get_mut(topic) {
            state.eager.remove(&peer);
        }
    }

    /// Pushes a message to those who are eager for it and announces it to the rest.
    pub(super) fn relay(&mut self, now: Now, kept: &Kept, from: Option<PeerId>, history: bool) -> Published {
        let mut reach = Published { id: kept.id, queued: 0, lazy: 0, refused: 0 };
        let topic = &kept.envelope.topic;
        let eager = self.topics.get(topic).map(|state| &state.eager);
        let has = self.missing.get(kept.id).map_or(&[][..], |wanted| &wanted.announcers);
        let others = self.peers.keys().filter(|peer| Some(**peer) != from && !has.contains(peer));
        let is_eager = |peer: &PeerId| eager.is_some_and(|eager| eager.contains(peer));
        let peers: Vec<(PeerId, bool)> = others.map(|peer| (*peer, is_eager(peer))).collect();
        let push = !history && kept.checked && kept.hops < self.config.hop_limit;
        let frame = if push && peers.iter().any(|(_, eager)| *eager) { self.encode(kept) } else { None };
        let lane = if kept.payload.len() <= NORMAL_MAX { Lane::Normal } else { Lane::Bulk };
        let flow = flow(topic.as_str().as_bytes());
        for (peer, eager) in peers {
            let frame = frame.as_ref().filter(|_| eager && self.may_push(now, kept, peer));
            if let Some(frame) = frame {
                if self.send(peer, lane, flow, frame.clone()) {
                    reach.queued += 1;
                    continue;
                }
                self.choke(now, peer, true);
            }
            if self.announce(now, peer, kept, history) {
                reach.lazy += 1;
            } else {
                reach.refused += 1;
            }
        }
        reach
    }

    /// Whether whoever can wait with a message should: most of those that it could be pushed to have half a queue to write.
    /// A publisher that is faster than its peers would find them without room, and what is announced instead is out of the
    /// history before they have asked for it. Few that are slow hold up nobody, and neither does one that alone is eager.
    pub(super) fn is_pressed(&self, topic: &Topic, len: usize) -> bool {
        let eager = self.topics.get(topic).into_iter().flat_map(|state| &state.eager);
        let filling =
            |peer: &&Peer| len + OVERHEAD <= peer.max_frame as usize && !peer.egress.lock().is_half_empty();
        let filling = eager.filter_map(|id| self.peers.get(id)).filter(filling).count();
        2 * filling > self.peers.len().min(self.config.relay_fanout)
    }

    /// The frame that pushes a message, the same for all who get it.
    pub(super) fn encode(&self, kept: &Kept) -> Option<Encoded> {
        let (hops, envelope, payload) = (kept.hops, kept.envelope.clone(), kept.payload.clone());
        let message = Gossip::Message { hops, envelope, payload };
        message.encode_as(kept.id.corr(), self.config.max_frame_bytes).ok()
    }

    fn may_push(&mut self, now: Now, kept: &Kept, peer: PeerId) -> bool {
        self.peers.get_mut(&peer).is_some_and(|peer| {
            kept.payload.len() + OVERHEAD <= peer.max_frame as usize
                && !peer.is_choked(now.mono)
                && peer.push.take(now.mono)
        })
    }

    fn choke(&mut self, now: Now, peer: PeerId, full: bool) {
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.choke(now.mono, full);
        }
    }

    /// Puts a message on the list of what a peer is told next. Says whether there was room.
    pub(super) fn announce(&mut self, now: Now, id: PeerId, kept: &Kept, history: bool) -> bool {
        let Some(peer) = self.peers.get_mut(&id) else { return false };
        if peer.announce_count >= self.config.announce_max {
            self.ledger.note_shed(Queue::Announce, Lane::Control, Cause::Full, 1);
            return false;
        }
        let wait = match peer.announced {
            ..ANNOUNCE_MANY => (peer.rtt.mean() / 4).clamp(ANNOUNCE_MIN, ANNOUNCE_MAX),
            _ => ANNOUNCE_MAX,
        };
        // A payload is at most as large as a message may be, which is far below 4 GiB.
        let entry = (kept.id, kept.payload.len() as u32);
        peer.announce.entry((kept.envelope.topic.clone(), history)).or_default().push(entry);
        peer.announce_count += 1;
        if peer.announce_due.is_none() {
            peer.announce_due = Some(now.mono + wait);
            self.announce_due.insert((now.mono + wait, id));
        }
        true
    }

    /// Tells a peer all it is to be told; what finds no room is told later.
    pub(super) fn announce_now(&mut self, now: Now, id: PeerId) {
        const { assert!(ANNOUNCED <= IDS_MAX) };
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.announce_due = None;
        peer.announced = peer.announce_count;
        let (lists, max) = (std::mem::take(&mut peer.announce), peer.max_frame);
        peer.announce_count = 0;
        let (mut left, mut stuck) = (BTreeMap::new(), [false; 3]);
        for ((topic, history), entries) in lists {
            let lane = if history { Lane::Bulk } else { Lane::Control };
            let mut rest = &entries[..];
            while !rest.is_empty() {
                let (part, after) = rest.split_at(rest.len().min(ANNOUNCED));
                let said = Gossip::IHave { history, topic: topic.clone(), entries: part.to_vec() };
                // What waits is not lost, so that it is only queued, and counted, where there is room.
                let room = |frame: &Encoded| self.peers[&id].egress.lock().has_room(lane, frame.len());
                let frame = said.encode(max).ok().filter(|frame| !stuck[lane as usize] && room(frame));
                if !frame.is_some_and(|frame| self.send(id, lane, flow(topic.as_str().as_bytes()), frame)) {
                    stuck[lane as usize] = true;
                    break;
                }
                rest = after;
            }
            if !rest.is_empty() {
                left.insert((topic, history), rest.to_vec());
            }
        }
        if let Some(peer) = self.peers.get_mut(&id).filter(|_| !left.is_empty()) {
            peer.announce_count = left.values().map(Vec::len).sum();
            peer.announce = left;
            let due = now.mono + ANNOUNCE_AGAIN;
            peer.announce_due = Some(due);
            self.announce_due.insert((due, id));
        }
    }

    /// A peer had no room for the message with this number: it is told of it instead, and pushed nothing more
    /// for a while.
    pub fn refused(&mut self, now: Now, peer: PeerId, corr: u64) {
        self.choke(now, peer, false);
        match self.history.numbered(corr).cloned() {
            Some(kept) => {
                self.owed = Some(now.mono);
                self.announce(now, peer, &kept, false);
            }
            None => self.ledger.note_shed(Queue::Announce, Lane::Control, Cause::Gone, 1),
        }
    }
}
