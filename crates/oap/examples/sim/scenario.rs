//! What a seed stands for: a network, its load and its troubles, and what must hold in the end.

use crate::hostile::Hostility;
use crate::net::{GATHER, Net, Shape, Wire};
use oap::gossip::random::Random;
use oap::gossip::{Config, WhenFull};
use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

/// How long a network without trouble may take until everybody has everything: its messages are kept for longer.
const SETTLE: Duration = Duration::from_secs(240);
/// Duplicates for each delivery that a tree may cost once it is stable.
const DUPLICATES_MAX: f64 = 1.0;
const SECOND: Duration = Duration::from_secs(1);

/// What is asked for; the seed decides the rest.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wishes {
    pub(crate) nodes: Option<usize>,
    pub(crate) seconds: Option<u64>,
    /// Nothing goes wrong.
    pub(crate) calm: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    seed: u64,
    shape: Shape,
    seconds: u64,
    /// Messages published each second.
    rate: usize,
    /// Bounds are small and messages many: what is shed is counted, and not everything can arrive.
    tight: bool,
    /// A tenth of the nodes die each minute.
    churn: bool,
    /// The network is split between these seconds, before this place.
    split: Option<(u64, u64, usize)>,
    frozen: Option<usize>,
    slow: Option<(usize, u64)>,
    hostile: Option<(usize, Hostility)>,
}

impl Plan {
    pub(crate) fn new(seed: u64, wishes: Wishes) -> Plan {
        // Apart from the network's own chances, which begin with the same seed.
        let mut chance = Random::new(!seed);
        let chosen = [8, 16, 24, 32, 32, 32, 48, 100][chance.below(8)];
        let nodes = wishes.nodes.unwrap_or(chosen);
        let seconds = wishes.seconds.unwrap_or(30 + chance.below(60) as u64);
        let tight = !wishes.calm && chance.below(4) == 0;
        let mut shape = Shape {
            nodes,
            degree: 4 + chance.below(5),
            topics: 1 + chance.below(3),
            clocks_ms: [0, 500, 20_000][chance.below(3)],
            ingress: if tight { 32 } else { 512 },
            config: if tight { tight_config() } else { Config { gather: GATHER, ..Config::default() } },
            wire: Wire::default(),
        };
        let mut plan = Plan {
            seed,
            seconds,
            rate: if tight { 40 } else { 2 + chance.below(6) },
            tight,
            churn: false,
            split: None,
            frozen: None,
            slow: None,
            hostile: None,
            shape: shape.clone(),
        };
        if wishes.calm {
            return plan;
        }
        shape.wire.lost = [0, 10, 50][chance.below(3)];
        shape.wire.doubled = [0, 10][chance.below(2)];
        shape.wire.late_ms = [0, 10, 60][chance.below(3)];
        shape.wire.work = Duration::from_micros([5, 50, 200][chance.below(3)]);
        if tight {
            shape.config.egress.when_full = [WhenFull::RejectNew, WhenFull::DropOldest][chance.below(2)];
            shape.wire.work = Duration::from_micros([50, 1000, 4000][chance.below(3)]);
            shape.wire.bytes_per_second = 30_000 + chance.below(60_000) as u64;
        }
        let mut maybe = |of: usize| (chance.below(2) == 0).then(|| chance.below(of));
        plan.churn = maybe(1).is_some();
        let half = seconds / 2;
        plan.split = maybe(nodes).map(|at| (half / 2, half + half / 2, at));
        plan.frozen = maybe(nodes);
        plan.slow = maybe(nodes).map(|node| (node, 10_000));
        plan.hostile = maybe(nodes * 7).map(|any| (any / 7, Hostility::ALL[any % 7]));
        plan.shape = shape;
        plan
    }

    /// Runs it, saying what happens.
    pub(crate) fn run(mut self, mut say: impl FnMut(&Net, &str)) -> Report {
        let mut net = Net::new(self.shape.clone(), self.seed);
        // Whoever is cut off by another's misfortune cannot be expected to know anything.
        self.hostile = self.hostile.filter(|(node, _)| net.is_connected_without(&BTreeSet::from([*node])));
        let hostile: BTreeSet<usize> = self.hostile.iter().map(|(node, _)| *node).collect();
        let away: BTreeSet<usize> = self.frozen.iter().chain(&hostile).copied().collect();
        self.frozen = self.frozen.filter(|_| net.is_connected_without(&away));
        let mut report = Report { seed: self.seed, ..Report::default() };
        net.run_for(2 * SECOND);
        for second in 0..self.seconds {
            self.trouble(&mut net, second, &mut say);
            self.load(&mut net, &hostile, &mut report);
            if second % 10 == 9 {
                report.faults.extend(net.faults());
            }
            if !report.faults.is_empty() {
                break;
            }
        }
        say(&net, "the trouble is over");
        let begun = self.settle(&mut net, &hostile, &mut report);
        report.settled = net.now - begun;
        say(&net, "everybody has what there is");
        self.calm(&mut net, &hostile, &mut report);
        report.close(&net, &hostile);
        report
    }

    /// What goes wrong in this second.
    fn trouble(&self, net: &mut Net, second: u64, say: &mut impl FnMut(&Net, &str)) {
        let hostile = self.hostile.map(|(node, _)| node);
        if second == 3 {
            if let Some(node) = self.frozen {
                say(net, &format!("node {node} reads nothing from now on"));
                net.freeze(node);
            }
            if let Some((node, speed)) = self.slow {
                say(net, &format!("node {node} reads {speed} bytes a second"));
                net.slow_down(node, speed);
            }
        }
        match self.split {
            Some((from, _, at)) if from == second => {
                say(net, &format!("the network is split before node {at}"));
                net.split(|node| u8::from(node < at));
            }
            Some((_, until, _)) if until == second => {
                say(net, "the network is whole again");
                net.split(|_| 0);
            }
            _ => {}
        }
        if self.churn && net.random.below(600) < net.nodes.len() {
            let node = net.random.below(net.nodes.len());
            let back = Duration::from_millis(500 + net.random.below(20_000) as u64);
            if hostile != Some(node) {
                say(net, &format!("node {node} dies for {back:?}"));
                net.kill(node, back);
            }
        }
    }

    /// A second's messages, and a second's attacks.
    fn load(&self, net: &mut Net, hostile: &BTreeSet<usize>, report: &mut Report) {
        for tenth in 0..10 {
            if let Some((node, hostility)) = self.hostile {
                net.attack(node, hostility);
            }
            let due = self.rate * (tenth + 1) / 10 - self.rate * tenth / 10;
            for _ in 0..due {
                publish(net, hostile, self.tight, report);
                net.run_for(Duration::from_millis(100) / due as u32);
            }
            if due == 0 {
                net.run_for(Duration::from_millis(100));
            }
        }
    }

    /// No more trouble: waits until everybody has everything. Returns when it began.
    fn settle(&self, net: &mut Net, hostile: &BTreeSet<usize>, report: &mut Report) -> Duration {
        let begun = net.now;
        net.thaw();
        net.split(|_| 0);
        net.run_for(25 * SECOND);
        while !self.tight && !net.missed(hostile).is_empty() && net.now - begun < SETTLE {
            net.run_for(SECOND);
        }
        let missed = net.missed(hostile);
        if !self.tight {
            for (node, number) in missed.iter().take(5) {
                report.faults.push(format!("node {node} misses {:?}", net.accepted[*number]));
            }
            report.faults.extend(net.lost().iter().map(|it| format!("nobody has {it:?}")));
        }
        report.missed = missed.len();
        report.faults.extend(net.faults());
        begun
    }

    /// Without any trouble everything arrives, soon and over a tree.
    fn calm(&self, net: &mut Net, hostile: &BTreeSet<usize>, report: &mut Report) {
        // On wires where a message takes longer than a round trip, announcements overtake it and cost duplicates.
        net.shape.wire = Wire::default();
        let publish_some = |net: &mut Net, report: &mut Report| {
            for _ in 0..100 {
                publish(net, hostile, true, report);
                net.run_for(Duration::from_millis(100));
            }
            net.run_for(3 * SECOND);
        };
        publish_some(net, report);
        let (before, since, begun) = (net.counts(), net.now, net.accepted.len());
        publish_some(net, report);
        net.run_for(10 * SECOND);
        report.duplicates = net.duplicates_since(before);
        if report.duplicates > DUPLICATES_MAX {
            report.faults.push(format!("{:.2} duplicates for each delivery", report.duplicates));
        }
        let late: Vec<_> = net.missed(hostile).into_iter().filter(|(_, number)| *number >= begun).collect();
        for (node, number) in late.iter().take(5) {
            report.faults.push(format!("in a calm, node {node} misses {:?}", net.accepted[*number]));
        }
        let took = net.latencies(since, hostile);
        let part = |of_hundred: usize| took.get(took.len() * of_hundred / 100).copied().unwrap_or_default();
        (report.p50, report.p99) = (part(50), part(99));
    }
}

/// Bounds that a few messages reach.
fn tight_config() -> Config {
    let mut config = Config { announce_max: 64, missing_max: 64, seen_max: 2048, ..Config::default() };
    (config.egress.frames, config.egress.bytes) = (32, 128 << 10);
    (config.history.count, config.history.bytes) = (64, 1 << 20);
    config
}

/// A message of some size by somebody.
fn publish(net: &mut Net, hostile: &BTreeSet<usize>, small: bool, report: &mut Report) {
    let node = net.random.below(net.nodes.len());
    if hostile.contains(&node) || net.nodes[node].is_none() {
        return;
    }
    let size = match net.random.below(if small { 90 } else { 100 }) {
        0..60 => 10 + net.random.below(300),
        60..90 => net.random.below(4000),
        90..99 => net.random.below(100_000),
        _ => net.random.below(3 << 20),
    };
    let topic = net.random.below(net.topics.len());
    report.busy += usize::from(net.publish(node, topic, vec![node as u8; size]).is_err());
}

/// How it went. Nothing is wrong if there are no faults.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) faults: Vec<String>,
    seed: u64,
    accepted: usize,
    /// Publications that found no room anywhere, or not everywhere.
    busy: usize,
    partly: usize,
    missed: usize,
    /// Simulated time from the end of the trouble until everybody had everything, or it was given up.
    settled: Duration,
    duplicates: f64,
    p50: Duration,
    p99: Duration,
    queued_max: usize,
    deaths: u32,
    greylisted: usize,
    shed: String,
    pub(crate) trace: u64,
}

impl Report {
    fn close(&mut self, net: &Net, hostile: &BTreeSet<usize>) {
        self.faults.extend(net.faults());
        self.faults
            .extend(net.blamed(hostile).iter().map(|it| format!("an honest node is greylisted: {it}")));
        self.accepted = net.accepted.len();
        self.partly = net.accepted.iter().filter(|it| it.reach.refused > 0).count();
        self.queued_max = net.nodes.iter().flatten().map(|node| node.queued_max).max().unwrap_or(0);
        self.deaths = net.lives.iter().map(|lives| lives - 1).sum();
        self.greylisted = net.nodes.iter().flatten().map(|node| node.greylisted.len()).sum();
        let sheds = net.shed().into_iter();
        let sheds: Vec<String> = sheds
            .map(|((queue, cause), count)| format!("{} {} {count}", queue.name(), cause.name()))
            .collect();
        self.shed = if sheds.is_empty() { "nothing".into() } else { sheds.join(", ") };
        self.trace = net.trace;
        let hostile_known = hostile.is_empty() || self.greylisted > 0;
        if !hostile_known {
            self.faults.push("nobody found out who is hostile".into());
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "seed {}: {} messages, {} refused, {} refused in part, {} missed somewhere",
            self.seed, self.accepted, self.busy, self.partly, self.missed
        )?;
        writeln!(
            f,
            "  settled after {:?}; then {:.2} duplicates a delivery, p50 {:?}, p99 {:?}",
            self.settled, self.duplicates, self.p50, self.p99
        )?;
        writeln!(
            f,
            "  {} deaths, {} greylistings, at most {} bytes queued at a node, shed: {}",
            self.deaths, self.greylisted, self.queued_max, self.shed
        )?;
        write!(f, "  trace {:016x}", self.trace)?;
        self.faults.iter().try_for_each(|fault| write!(f, "\n  WRONG: {fault}"))
    }
}
