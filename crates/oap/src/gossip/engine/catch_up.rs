//! Catching up: two nodes compare what they keep of a topic, and each tells the other what it may lack.

use super::{Engine, Now};
use crate::gossip::PeerId;
use crate::gossip::fair::Lane;
use crate::gossip::ledger::{Cause, Queue};
use crate::gossip::message::Topic;
use crate::gossip::wire::{Gossip, Window};
use std::time::Duration;

/// What was published just now is on its way by other means.
const SETTLE_MS: u64 = 2_000;
/// A comparison that is answered this often is over.
const ROUNDS: u8 = 3;
/// How soon a topic is compared after something happened to its tree.
const SOON: Duration = Duration::from_secs(3);

impl Engine {
    /// A comparison with a peer chosen by chance, and the time of the next one.
    pub(super) fn compare(&mut self, now: Now, topic: &Topic) {
        if !self.topics.contains_key(topic) {
            return;
        }
        let wait = self.digest_wait();
        self.expect_digest(now, topic, wait);
        let which = self.random.below(self.peers.len());
        if let Some(peer) = self.peers.keys().nth(which).copied() {
            self.digest(now, peer, topic, 0, now.unix_ms.saturating_sub(SETTLE_MS));
        }
    }

    /// Sets the time of a topic's next comparison.
    pub(super) fn expect_digest(&mut self, now: Now, topic: &Topic, wait: Duration) {
        let Some(state) = self.topics.get_mut(topic) else { return };
        self.digest_due.remove(&(state.digest, topic.clone()));
        state.digest = now.mono + wait;
        self.digest_due.insert((state.digest, topic.clone()));
    }

    /// Something happened to the tree.
    pub(super) fn expect_digest_soon(&mut self, now: Now, topic: &Topic) {
        if self.topics.get(topic).is_some_and(|state| state.digest > now.mono + SOON) {
            self.expect_digest(now, topic, SOON);
        }
    }

    /// Between three and five quarters of the interval, so that nodes do not all compare at once.
    pub(super) fn digest_wait(&mut self) -> Duration {
        self.config.digest_interval * (75 + self.random.below(50) as u32) / 100
    }

    /// Tells a peer what is kept here of a topic.
    pub(super) fn digest(&mut self, now: Now, peer: PeerId, topic: &Topic, round: u8, until: u64) {
        let window = self.history.window(topic, now.unix_ms, until);
        let (count, hash) = self.history.digest(topic, window);
        if window.since <= window.until {
            self.tell(peer, &Gossip::Digest { round, topic: topic.clone(), window, count, hash });
        }
    }

    /// A peer says what it keeps.
    pub(super) fn digested(
        &mut self,
        now: Now,
        from: PeerId,
        round: u8,
        topic: &Topic,
        window: Window,
        theirs: (u32, [u8; 32]),
    ) {
        if round >= ROUNDS || window.since > window.until {
            return;
        }
        self.touch(now, topic);
        let ours = self.history.window(topic, now.unix_ms, window.until);
        if ours.since > window.since && !self.history.keeps(topic, window) {
            // Some of it was dropped here: only what both keep can be compared.
            if round + 1 < ROUNDS {
                self.digest(now, from, topic, round + 1, window.until);
            }
            return;
        }
        if self.history.digest(topic, window) == theirs {
            return;
        }
        self.announce_history(now, from, topic, window);
        if round + 1 < ROUNDS {
            let (count, hash) = self.history.digest(topic, window);
            let answer = Gossip::Digest { round: round + 1, topic: topic.clone(), window, count, hash };
            self.tell(from, &answer);
        }
    }

    /// Announces what is kept of a window, as far as there is room; from any place on, so that every part of it
    /// gets its turn if there is room for a part only.
    fn announce_history(&mut self, now: Now, to: PeerId, topic: &Topic, window: Window) {
        let Some(peer) = self.peers.get(&to) else { return };
        let room = self.config.announce_max.saturating_sub(peer.announce_count);
        let ids: Vec<_> = self.history.ids(topic, window).collect();
        let first = if ids.len() > room { self.random.below(ids.len()) } else { 0 };
        for id in ids.iter().cycle().skip(first).take(ids.len().min(room)) {
            if let Some(kept) = self.history.get(*id).cloned() {
                self.announce(now, to, &kept, true);
            }
        }
        let left = ids.len().saturating_sub(room) as u64;
        self.ledger.note_shed(Queue::Announce, Lane::Bulk, Cause::Full, left);
    }
}
