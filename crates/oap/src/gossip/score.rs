//! What a node has done wrong, and for how long nobody here talks to it.

use crate::node::NodeId;
use std::collections::BTreeMap;
use std::time::Duration;

/// Nodes with a record.
const RECORDS_MAX: usize = 4096;
/// At this many points a node is greylisted.
const LIMIT: u64 = 100_000;
/// Points that are forgiven each second.
const FORGIVEN: u64 = 4_000;

/// What a peer can do wrong; a thousand points are the worth of a small thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Offence {
    /// A frame or message that says nothing, or what may not be said.
    Invalid,
    Oversized,
    /// A message without a signature, or with one that does not hold.
    Unsigned,
    /// The same message again, or one from before what is remembered.
    Replayed,
    /// More frames than the budget.
    Excessive,
    /// Announced and not given.
    Withheld,
}

impl Offence {
    pub const fn name(self) -> &'static str {
        match self {
            Offence::Invalid => "invalid",
            Offence::Oversized => "oversized",
            Offence::Unsigned => "unsigned",
            Offence::Replayed => "replayed",
            Offence::Excessive => "excessive",
            Offence::Withheld => "withheld",
        }
    }

    const fn points(self) -> u64 {
        match self {
            Offence::Invalid | Offence::Oversized => 20_000,
            Offence::Unsigned => 34_000,
            Offence::Replayed => 1_000,
            Offence::Excessive => 250,
            Offence::Withheld => 50,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Scores {
    records: BTreeMap<NodeId, Record>,
}

#[derive(Debug)]
struct Record {
    points: u64,
    at: Duration,
    greylisted: Option<Duration>,
}

impl Scores {
    /// Until when a node is greylisted, if it is.
    pub(super) fn greylisted(&self, node: NodeId, now: Duration) -> Option<Duration> {
        self.records.get(&node)?.greylisted.filter(|until| *until > now)
    }

    /// 0 is best, -100 is greylisted.
    pub(super) fn score(&self, node: NodeId, now: Duration) -> i64 {
        let points = self.records.get(&node).map_or(0, |record| record.left(now));
        -i64::try_from(points / 1000).unwrap_or(i64::MAX)
    }

    /// Counts an offence. Says until when the node is greylisted, if it is for this.
    pub(super) fn offend(
        &mut self,
        node: NodeId,
        offence: Offence,
        now: Duration,
        ttl: Duration,
    ) -> Option<Duration> {
        if self.records.len() >= RECORDS_MAX && !self.records.contains_key(&node) {
            self.sweep(now);
            let least = |(_, record): &(&NodeId, &Record)| (record.greylisted, record.left(now));
            let gone = self.records.iter().min_by_key(least).map(|(node, _)| *node);
            gone.and_then(|node| self.records.remove(&node));
        }
        let record = self.records.entry(node).or_insert(Record { points: 0, at: now, greylisted: None });
        record.points = record.left(now) + offence.points();
        record.at = now;
        if record.points < LIMIT || record.greylisted.is_some_and(|until| until > now) {
            return None;
        }
        record.points = 0;
        record.greylisted = Some(now + ttl);
        record.greylisted
    }

    /// Forgets who has made up for everything.
    pub(super) fn sweep(&mut self, now: Duration) {
        self.records
            .retain(|_, record| record.left(now) > 0 || record.greylisted.is_some_and(|until| until > now));
    }
}

impl Record {
    fn left(&self, now: Duration) -> u64 {
        let millis = u64::try_from(now.saturating_sub(self.at).as_millis()).unwrap_or(u64::MAX);
        self.points.saturating_sub(millis.saturating_mul(FORGIVEN / 1000))
    }
}
