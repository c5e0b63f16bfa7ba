//! What became of everything: nothing is lost without a line here.

use super::fair::Lane;
use std::collections::BTreeMap;

/// Where something was shed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Queue {
    /// Frames that have come and wait for the engine.
    Ingress,
    /// Frames that wait to be written to a peer.
    Egress,
    /// Messages that a peer is still to be told of.
    Announce,
    /// Messages that were announced and have not come.
    Missing,
    /// Topics that are carried.
    Topics,
}

impl Queue {
    pub const fn name(self) -> &'static str {
        match self {
            Queue::Ingress => "gossip_ingress",
            Queue::Egress => "gossip_egress",
            Queue::Announce => "gossip_announce",
            Queue::Missing => "gossip_missing",
            Queue::Topics => "gossip_topics",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    Full,
    /// The queues of the whole process are full.
    Ceiling,
    /// An older frame that made room.
    Dropped,
    /// A frame of a peer with more than its share.
    Displaced,
    /// The peer has spent its budget.
    Budget,
    /// Nobody who announced it gave it.
    Timeout,
    /// The peer left.
    Gone,
}

impl Cause {
    pub const fn name(self) -> &'static str {
        match self {
            Cause::Full => "full",
            Cause::Ceiling => "ceiling",
            Cause::Dropped => "dropped",
            Cause::Displaced => "displaced",
            Cause::Budget => "budget",
            Cause::Timeout => "timeout",
            Cause::Gone => "gone",
        }
    }
}

/// What became of a message that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    Delivered,
    Duplicate,
    Invalid,
    /// Too old, or from before what is remembered of its origin.
    Expired,
    Shed,
}

impl Outcome {
    pub const fn name(self) -> &'static str {
        match self {
            Outcome::Delivered => "delivered",
            Outcome::Duplicate => "duplicate",
            Outcome::Invalid => "invalid",
            Outcome::Expired => "expired",
            Outcome::Shed => "shed",
        }
    }
}

/// Counts since the beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    shed: BTreeMap<(Queue, Lane, Cause), u64>,
    outcomes: BTreeMap<Outcome, u64>,
    /// Gossip frames that were queued for a peer, and that came from one.
    pub frames_out: u64,
    pub frames_in: u64,
}

impl Ledger {
    pub fn shed(&self) -> impl Iterator<Item = (Queue, Lane, Cause, u64)> {
        self.shed.iter().map(|((queue, lane, cause), count)| (*queue, *lane, *cause, *count))
    }

    pub fn shed_total(&self) -> u64 {
        self.shed.values().sum()
    }

    pub fn outcome(&self, outcome: Outcome) -> u64 {
        self.outcomes.get(&outcome).copied().unwrap_or(0)
    }

    /// Something was shed; whoever owns a queue outside the engine says so too.
    pub fn note_shed(&mut self, queue: Queue, lane: Lane, cause: Cause, count: u64) {
        if count > 0 {
            *self.shed.entry((queue, lane, cause)).or_default() += count;
        }
    }

    pub(super) fn note(&mut self, outcome: Outcome) {
        self.note_all(outcome, 1);
    }

    /// The same for the messages of a bundle.
    pub(super) fn note_all(&mut self, outcome: Outcome, messages: usize) {
        *self.outcomes.entry(outcome).or_default() += messages as u64;
    }
}
