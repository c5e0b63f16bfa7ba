//! What must hold in a network, and figures of how it does.

use crate::net::{Accepted, CEILING, Net, Node, follows, node_id};
use oap::gossip::{Cause, Kept, MessageId, Outcome, Queue};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The messages that are kept as one.
fn ids(kept: &Kept) -> impl Iterator<Item = MessageId> {
    kept.messages().into_iter().map(|(id, ..)| id)
}

impl Net {
    /// Whatever does not add up anywhere, whatever was asked of the network.
    pub(crate) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            let mut check = |good: bool, what: String| {
                if !good {
                    faults.push(format!("node {index}: {what}"));
                }
            };
            let twice = node.delivered.values().filter(|(count, _)| *count > 1).count();
            check(twice == 0, format!("{twice} messages were delivered more than once"));
            self.accounts(node, &mut check);
            self.bounds(node, &mut check);
        }
        faults
    }

    /// Every frame that was queued, came or carried a message is somewhere in the ledger, or still waits.
    fn accounts(&self, node: &Node, check: &mut impl FnMut(bool, String)) {
        let (ledger, frames) = (node.engine.ledger(), &node.frames);
        let shed = |queue, causes: &[Cause]| -> u64 {
            let of = |it: &(Queue, _, Cause, u64)| it.0 == queue && causes.contains(&it.2);
            ledger.shed().filter(of).map(|it| it.3).sum()
        };
        let waiting = |link: &crate::net::Link| link.egress.lock().frames() - link.writing.len();
        let waiting: usize = node.links.values().map(waiting).sum();
        let gone = shed(Queue::Egress, &[Cause::Dropped, Cause::Gone]);
        let (out, found) = (ledger.frames_out, frames.written + waiting as u64 + gone);
        check(out == found, format!("{out} frames were queued, {found} are accounted for"));

        let refused = shed(Queue::Ingress, &[Cause::Full, Cause::Ceiling, Cause::Displaced]);
        let found = ledger.frames_in + node.ingress.len() as u64 + refused + frames.forgotten;
        check(frames.came == found, format!("{} frames came, {found} are accounted for", frames.came));

        let (messages, outcomes) = (frames.messages, frames.outcomes);
        check(messages == outcomes, format!("{messages} messages came to {outcomes} ends"));
    }

    /// No queue, memory or table is larger than it may be, and every place that is taken is taken by something.
    fn bounds(&self, node: &Node, check: &mut impl FnMut(bool, String)) {
        let config = &self.shape.config;
        let mut queued = node.ingress.bytes();
        for link in node.links.values() {
            let egress = link.egress.lock();
            queued += egress.bytes();
            let within = egress.frames() <= config.egress.frames && egress.bytes() <= config.egress.bytes;
            check(within, format!("{} frames of {} bytes wait for a peer", egress.frames(), egress.bytes()));
        }
        let used = node.ceiling.used();
        check(used == queued, format!("{used} bytes of places are taken, {queued} bytes wait"));
        check(node.queued_max <= CEILING, format!("{} bytes waited", node.queued_max));
        check(node.ingress.len() <= self.shape.ingress, format!("{} frames came in", node.ingress.len()));
        let (kept, seen, missing) = node.engine.kept();
        let within = kept <= config.history_bytes_max && seen <= config.seen_max;
        check(within && missing <= config.missing_max, format!("keeps {kept}, {seen} and {missing}"));
    }

    /// Who of those who follow its topic does not have a message, by place and number, except at these nodes.
    ///
    /// What nobody has who is alive is not missed: its publisher died with it, and this is looked for elsewhere.
    pub(crate) fn missed(&self, except: &BTreeSet<usize>) -> Vec<(usize, usize)> {
        let honest = || self.nodes.iter().enumerate().filter(|(index, _)| !except.contains(index));
        let mut holders: BTreeSet<MessageId> = BTreeSet::new();
        for node in honest().filter_map(|(_, node)| node.as_ref()) {
            holders.extend(node.delivered.keys());
            for topic in &self.topics {
                holders.extend(node.engine.history(topic).flat_map(ids));
            }
        }
        let mut missed = Vec::new();
        for (index, node) in honest().filter_map(|(index, node)| Some((index, node.as_ref()?))) {
            for (number, it) in self.accepted.iter().enumerate() {
                let owed = follows(index, it.topic) && holders.contains(&it.id);
                if owed && !node.delivered.contains_key(&it.id) {
                    missed.push((index, number));
                }
            }
        }
        missed
    }

    /// Messages that nobody has who is alive, though their publishers are still those who published them.
    pub(crate) fn lost(&self) -> Vec<&Accepted> {
        let has = |it: &Accepted, node: &Node| {
            node.delivered.contains_key(&it.id)
                || node.engine.history(&self.topics[it.topic]).flat_map(ids).any(|id| id == it.id)
        };
        let alive = |it: &&Accepted| it.life == self.lives[it.by] && self.nodes[it.by].is_some();
        let lost = |it: &&Accepted| !self.nodes.iter().flatten().any(|node| has(it, node));
        self.accepted.iter().filter(alive).filter(lost).collect()
    }

    /// Nodes that somebody greylisted, except these.
    pub(crate) fn blamed(&self, except: &BTreeSet<usize>) -> Vec<String> {
        let hostile: Vec<_> = except.iter().map(|node| node_id(*node)).collect();
        let nodes = self.nodes.iter().enumerate().filter(|(index, _)| !except.contains(index));
        let blamed =
            nodes.filter_map(|(index, node)| Some((index, node.as_ref()?))).flat_map(|(index, node)| {
                let honest = node.greylisted.iter().filter(|(node, ..)| !hostile.contains(node));
                honest.map(move |(node, offence, at)| {
                    format!("{node} by node {index} for {offence:?} at {at:?}")
                })
            });
        blamed.collect()
    }

    /// Messages delivered and duplicates of them, at all nodes that live.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let sum = |outcome| -> u64 {
            self.nodes.iter().flatten().map(|node| node.engine.ledger().outcome(outcome)).sum()
        };
        (sum(Outcome::Delivered), sum(Outcome::Duplicate))
    }

    /// Duplicates for each message delivered since these counts were taken.
    pub(crate) fn duplicates_since(&self, (delivered, duplicate): (u64, u64)) -> f64 {
        let (more, again) = self.counts();
        (again - duplicate) as f64 / (more - delivered).max(1) as f64
    }

    /// How long deliveries took, in order, of messages accepted from then on, except at these nodes.
    pub(crate) fn latencies(&self, since: Duration, except: &BTreeSet<usize>) -> Vec<Duration> {
        let times: BTreeMap<MessageId, Duration> =
            self.accepted.iter().filter(|it| it.at >= since).map(|it| (it.id, it.at)).collect();
        let nodes = self.nodes.iter().enumerate().filter(|(index, _)| !except.contains(index));
        let took = nodes.filter_map(|(_, node)| node.as_ref()).flat_map(|node| &node.delivered);
        let mut all: Vec<Duration> =
            took.filter_map(|(id, (_, when))| Some(when.saturating_sub(*times.get(id)?))).collect();
        all.sort_unstable();
        all
    }

    /// What was shed at all nodes that live, by queue and cause.
    pub(crate) fn shed(&self) -> BTreeMap<(Queue, Cause), u64> {
        let mut sums = BTreeMap::new();
        for (queue, _, cause, count) in
            self.nodes.iter().flatten().flat_map(|node| node.engine.ledger().shed())
        {
            *sums.entry((queue, cause)).or_default() += count;
        }
        sums
    }
}
