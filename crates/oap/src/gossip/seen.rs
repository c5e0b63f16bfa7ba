//! Which messages have been here, so that none is taken twice: bounded by count and by age.
//!
//! A message older than its age is refused by its time, so that its id need not be kept. One that is forgotten
//! earlier, because there are too many, leaves its sequence behind: what its origin published before is not
//! taken any more.

use super::PeerId;
use super::message::{Envelope, MessageId, Mixing};
use crate::node::NodeId;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// Origins whose sequences are kept. Past that the youngest time stands in for them all.
const FLOORS_MAX: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    New,
    Seen(First),
    /// Perhaps seen, and forgotten.
    Forgotten,
}

/// How a message came first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct First {
    pub(super) from: Option<PeerId>,
    /// It was asked for, perhaps more than once: a second copy says nothing about who sends it.
    pub(super) asked: bool,
}

#[derive(Debug)]
pub(super) struct Seen {
    max: usize,
    first: HashMap<MessageId, First, Mixing>,
    /// The numbers of those that were asked for.
    asked: BTreeSet<u64>,
    order: VecDeque<Entry>,
    floors: BTreeMap<NodeId, Floor>,
    floor_time: u64,
}

#[derive(Debug)]
struct Entry {
    id: MessageId,
    origin: NodeId,
    floor: Floor,
}

#[derive(Clone, Copy, Debug, Default)]
struct Floor {
    seq: u64,
    time: u64,
}

impl Seen {
    pub(super) fn new(max: usize, mixing: Mixing) -> Seen {
        Seen {
            max,
            first: HashMap::with_hasher(mixing),
            asked: BTreeSet::new(),
            order: VecDeque::new(),
            floors: BTreeMap::new(),
            floor_time: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    pub(super) fn has(&self, id: MessageId) -> bool {
        self.first.contains_key(&id)
    }

    /// Whether a message with this number was asked for and has come.
    pub(super) fn was_asked(&self, corr: u64) -> bool {
        self.asked.contains(&corr)
    }

    pub(super) fn knows(&self, id: MessageId, envelope: &Envelope) -> Known {
        match self.first.get(&id) {
            Some(first) => Known::Seen(*first),
            None if envelope.time <= self.floor_time => Known::Forgotten,
            None => match self.floors.get(&envelope.origin) {
                Some(floor) if envelope.seq <= floor.seq => Known::Forgotten,
                _ => Known::New,
            },
        }
    }

    pub(super) fn insert(&mut self, id: MessageId, envelope: &Envelope, first: First) {
        if self.first.insert(id, first).is_some() {
            return;
        }
        if first.asked {
            self.asked.insert(id.corr());
        }
        let floor = Floor { seq: envelope.seq, time: envelope.time };
        self.order.push_back(Entry { id, origin: envelope.origin, floor });
        while self.order.len() > self.max {
            self.forget();
        }
    }

    /// Forgets what would be refused by its time: published before this.
    pub(super) fn expire(&mut self, before: u64) {
        while self.order.front().is_some_and(|entry| entry.floor.time < before) {
            self.pop();
        }
        self.floors.retain(|_, floor| floor.time >= before);
    }

    fn forget(&mut self) {
        let Some(entry) = self.pop() else { return };
        if self.floors.len() >= FLOORS_MAX && !self.floors.contains_key(&entry.origin) {
            self.floor_time = self.floor_time.max(entry.floor.time);
            return;
        }
        let floor = self.floors.entry(entry.origin).or_default();
        floor.seq = floor.seq.max(entry.floor.seq);
        floor.time = floor.time.max(entry.floor.time);
    }
    fn pop(&mut self) -> Option<Entry> {
        let entry = self.order.pop_front()?;
        if self.first.remove(&entry.id).is_some_and(|first| first.asked) {
            self.asked.remove(&entry.id.corr());
        }
        Some(entry)
    }
}
