//! The messages a node can still give to others: by topic, bounded by count, bytes and age.

use super::message::{Envelope, MessageId, Topic};
use super::wire::Window;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

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
}

#[derive(Debug)]
pub(super) struct History {
    limits: HistoryLimits,
    /// Bytes that all topics together may keep.
    bytes_max: usize,
    bytes: usize,
    messages: BTreeMap<MessageId, Kept>,
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
    pub(super) fn new(limits: HistoryLimits, bytes_max: usize) -> History {
        History { limits, bytes_max, bytes: 0, messages: BTreeMap::new(), topics: BTreeMap::new() }
    }

    pub(super) fn get(&self, id: MessageId) -> Option<&Kept> {
        self.messages.get(&id)
    }

    /// The first message whose id is not below this.
    pub(super) fn from(&self, id: MessageId) -> Option<&Kept> {
        self.messages.range(id..).next().map(|(_, kept)| kept)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Messages of a topic, the oldest first.
    pub(super) fn of<'a>(&'a self, topic: &Topic) -> impl Iterator<Item = &'a Kept> {
        let order = self.topics.get(topic).into_iter().flat_map(|line| &line.order);
        order.filter_map(|(_, id)| self.messages.get(id))
    }

    pub(super) fn insert(&mut self, kept: Kept) {
        let topic = kept.envelope.topic.clone();
        let line = self.topics.entry(topic.clone()).or_default();
        let size = kept.payload.len();
        if !line.order.insert((kept.envelope.time, kept.id)) {
            return;
        }
        line.bytes += size;
        self.bytes += size;
        self.messages.insert(kept.id, kept);
        while self
            .topics
            .get(&topic)
            .is_some_and(|line| line.order.len() > self.limits.count || line.bytes > self.limits.bytes)
        {
            self.drop_oldest(&topic);
        }
        while self.bytes > self.bytes_max {
            let largest =
                self.topics.iter().max_by_key(|(_, line)| line.bytes).map(|(topic, _)| topic.clone());
            let Some(topic) = largest else { return };
            self.drop_oldest(&topic);
        }
    }

    /// A message's signature holds.
    pub(super) fn set_checked(&mut self, id: MessageId) {
        if let Some(kept) = self.messages.get_mut(&id) {
            kept.checked = true;
        }
    }

    /// Takes out a message that should never have been taken.
    pub(super) fn remove(&mut self, id: MessageId) {
        let Some(kept) = self.messages.remove(&id) else { return };
        if let Some(line) = self.topics.get_mut(&kept.envelope.topic) {
            line.order.remove(&(kept.envelope.time, id));
            line.bytes -= kept.payload.len();
        }
        self.bytes -= kept.payload.len();
    }

    /// Forgets what is older than its age.
    pub(super) fn expire(&mut self, unix_ms: u64) {
        let before = unix_ms.saturating_sub(millis(self.limits.age));
        let topics: Vec<Topic> = self.topics.keys().cloned().collect();
        for topic in topics {
            let old = |line: &Line| line.order.first().is_some_and(|(time, _)| *time < before);
            while self.topics.get(&topic).is_some_and(old) {
                self.drop_oldest(&topic);
            }
        }
        // A topic of which nothing is left is forgotten when nothing it ever had would be taken.
        self.topics.retain(|_, line| !line.order.is_empty() || line.floor >= before);
    }

    pub(super) fn drop_topic(&mut self, topic: &Topic) {
        while self.topics.get(topic).is_some_and(|line| !line.order.is_empty()) {
            self.drop_oldest(topic);
        }
        self.topics.remove(topic);
    }

    /// What this node can answer for, less an eighth: what is about to be dropped here or there would make every
    /// comparison find a difference.
    pub(super) fn window(&self, topic: &Topic, unix_ms: u64, until: u64) -> Window {
        let floor = self.topics.get(topic).map_or(0, |line| line.floor + 1);
        let oldest = floor.max(unix_ms.saturating_sub(millis(self.limits.age)));
        Window { since: oldest + until.saturating_sub(oldest) / 8, until }
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

    fn drop_oldest(&mut self, topic: &Topic) {
        let Some(line) = self.topics.get_mut(topic) else { return };
        let Some((time, id)) = line.order.pop_first() else { return };
        line.floor = line.floor.max(time);
        if let Some(kept) = self.messages.remove(&id) {
            line.bytes -= kept.payload.len();
            self.bytes -= kept.payload.len();
        }
    }
}

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
