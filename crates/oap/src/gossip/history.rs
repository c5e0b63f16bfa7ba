//! The messages a node can still give to others: by topic, bounded by count, bytes and age.

use super::message::{Envelope, MessageId, Mixing, Topic};
use super::wire::Window;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

/// What is that close to its age may be gone from a node whose clock is ahead; a guess.
const EXPIRING_MS: u64 = 5_000;
/// A topic in which nothing was published for so long pushes nothing out; a guess.
const QUIET_MS: u64 = 1_000;

/// What is kept of one topic.
#[derive(Clone, Copy, Debug)]
pub struct HistoryLimits {
    pub count: usize,
    pub bytes: usize,
    pub age: Duration,
}

/// A message that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    pub id: MessageId,
    pub envelope: Envelope,
    pub payload: Bytes,
    /// Hops it took to come here.
    pub hops: u8,
    /// Whether its signature was checked. One that was not came from its origin itself, over a transport that has
    /// proved the origin's key, and is for nobody else before it is.
    pub checked: bool,
    /// How many messages it is: one, or those of a bundle.
    pub count: usize,
}

#[derive(Debug)]
pub(super) struct History {
    limits: HistoryLimits,
    /// Bytes that all topics together may keep.
    bytes_max: usize,
    bytes: usize,
    /// By the number of the frames that carry them. Of two messages with one number the younger is kept.
    messages: HashMap<u64, Kept, Mixing>,
    topics: BTreeMap<Topic, Line>,
}

#[derive(Debug, Default)]
struct Line {
    /// By time of publication, which is the same at every node.
    order: BTreeSet<(u64, MessageId)>,
    bytes: usize,
    /// Everything published after this is still here.
    floor: u64,
}

impl History {
    pub(super) fn new(limits: HistoryLimits, bytes_max: usize, mixing: Mixing) -> History {
        let messages = HashMap::with_hasher(mixing);
        History { limits, bytes_max, bytes: 0, messages, topics: BTreeMap::new() }
    }

    pub(super) fn get(&self, id: MessageId) -> Option<&Kept> {
        self.numbered(id.corr()).filter(|kept| kept.id == id)
    }

    /// The message whose frames have this number.
    pub(super) fn numbered(&self, corr: u64) -> Option<&Kept> {
        self.messages.get(&corr)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Messages of a topic, the oldest first.
    pub(super) fn of<'a>(&'a self, topic: &Topic) -> impl Iterator<Item = &'a Kept> {
        let order = self.topics.get(topic).into_iter().flat_map(|line| &line.order);
        order.filter_map(|(_, id)| self.get(*id))
    }

    pub(super) fn insert(&mut self, kept: Kept) {
        if let Some(other) = self.numbered(kept.id.corr()) {
            if other.id == kept.id {
                return;
            }
            self.remove(other.id);
        }
        let (topic, size) = (kept.envelope.topic.clone(), kept.payload.len());
        if !self.topics.contains_key(&topic) {
            self.topics.insert(topic.clone(), Line::default());
        }
        let Some(line) = self.topics.get_mut(&topic) else { return };
        line.order.insert((kept.envelope.time, kept.id));
        line.bytes += size;
        self.bytes += size;
        self.messages.insert(kept.id.corr(), kept);
        while line.order.len() > self.limits.count || line.bytes > self.limits.bytes {
            self.bytes -= line.drop_oldest(&mut self.messages);
        }
        while self.bytes > self.bytes_max {
            let Some(largest) = self.topics.values_mut().max_by_key(|line| line.bytes) else { return };
            self.bytes -= largest.drop_oldest(&mut self.messages);
        }
    }

    /// A message's signature holds.
    pub(super) fn set_checked(&mut self, id: MessageId) {
        if let Some(kept) = self.messages.get_mut(&id.corr()).filter(|kept| kept.id == id) {
            kept.checked = true;
        }
    }

    /// Takes out a message that should never have been taken.
    pub(super) fn remove(&mut self, id: MessageId) {
        if self.get(id).is_none() {
            return;
        }
        let Some(kept) = self.messages.remove(&id.corr()) else { return };
        if let Some(line) = self.topics.get_mut(&kept.envelope.topic) {
            line.order.remove(&(kept.envelope.time, id));
            line.bytes -= kept.payload.len();
        }
        self.bytes -= kept.payload.len();
    }

    /// Forgets what is older than its age.
    pub(super) fn expire(&mut self, unix_ms: u64) {
        let before = unix_ms.saturating_sub(millis(self.limits.age));
        for line in self.topics.values_mut() {
            while line.order.first().is_some_and(|(time, _)| *time < before) {
                self.bytes -= line.drop_oldest(&mut self.messages);
            }
        }
        // A topic of which nothing is left is forgotten when nothing it ever had would be taken.
        self.topics.retain(|_, line| !line.order.is_empty() || line.floor >= before);
    }

    pub(super) fn drop_topic(&mut self, topic: &Topic) {
        let Some(mut line) = self.topics.remove(topic) else { return };
        while !line.order.is_empty() {
            self.bytes -= line.drop_oldest(&mut self.messages);
        }
    }

    /// What this node can answer for, less what is about to be dropped here or there, which would make every comparison
    /// find a difference.
    pub(super) fn window(&self, topic: &Topic, unix_ms: u64, until: u64) -> Window {
        let age = millis(self.limits.age);
        let young = unix_ms.saturating_sub(age - (age / 8).min(EXPIRING_MS));
        let kept = self.topics.get(topic).map_or(0, |line| line.since(unix_ms));
        Window { since: young.max(kept), until }
    }

    /// Whether nothing of a window was dropped before its time.
    pub(super) fn keeps(&self, topic: &Topic, window: Window) -> bool {
        self.topics.get(topic).is_none_or(|line| line.floor < window.since)
    }

    /// How many messages a window has, and a hash of which.
    pub(super) fn digest(&self, topic: &Topic, window: Window) -> (u32, [u8; 32]) {
        let (mut hasher, mut count) = (blake3::Hasher::new(), 0);
        for id in self.ids(topic, window) {
            hasher.update(&id.0);
            count += 1;
        }
        (count, hasher.finalize().into())
    }

    pub(super) fn ids(&self, topic: &Topic, window: Window) -> impl Iterator<Item = MessageId> {
        let line = self.topics.get(topic).filter(|_| window.since <= window.until);
        let range = (window.since, MessageId([0; 32]))..=(window.until, MessageId([255; 32]));
        line.into_iter().flat_map(move |line| line.order.range(range.clone())).map(|(_, id)| *id)
    }
}

impl Line {
    /// From when on everything is here and will be for a while: while messages come that push others out, the oldest
    /// eighth is left aside.
    fn since(&self, unix_ms: u64) -> u64 {
        let oldest = if self.floor > 0 { self.floor + 1 } else { 0 };
        let newest = self.order.last().map_or(0, |(time, _)| *time);
        if oldest == 0 || unix_ms.saturating_sub(newest) > QUIET_MS {
            return oldest;
        }
        self.order.iter().nth(self.order.len() / 8).map_or(oldest, |(time, _)| oldest.max(*time))
    }

    /// Drops the oldest message; says how many bytes it had.
    fn drop_oldest(&mut self, messages: &mut HashMap<u64, Kept, Mixing>) -> usize {
        let Some((time, id)) = self.order.pop_first() else { return 0 };
        self.floor = self.floor.max(time);
        let size = messages.remove(&id.corr()).map_or(0, |kept| kept.payload.len());
        self.bytes -= size;
        size
    }
}

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::NodeId;

    #[test]
    fn of_two_messages_with_one_number_the_younger_is_kept() {
        let limits = HistoryLimits { count: 10, bytes: 100, age: Duration::from_secs(1) };
        let mut history = History::new(limits, 100, Mixing(3));
        let topic = Topic::parse("t").unwrap();
        let mut insert = |last: u8, size: usize| {
            let mut id = MessageId([1; 32]);
            id.0[31] = last;
            let (origin, topic) = (NodeId([0; 32]), topic.clone());
            let envelope =
                Envelope { origin, seq: 1, time: u64::from(last), topic, bundle: false, signature: None };
            let payload = vec![0; size].into();
            history.insert(Kept { id, envelope, payload, hops: 0, checked: true, count: 1 });
            id
        };
        let (older, younger) = (insert(1, 10), insert(2, 20));
        insert(2, 20);
        assert!(history.get(older).is_none());
        assert_eq!(history.get(younger).map(|kept| kept.id), Some(younger));
        assert_eq!(history.numbered(older.corr()).map(|kept| kept.id), Some(younger));
        assert_eq!((history.bytes(), history.of(&topic).count()), (20, 1));
        history.remove(older);
        history.drop_topic(&topic);
        assert_eq!((history.bytes(), history.of(&topic).count()), (0, 0));
    }
}
