//! What can be measured of eight linked nodes, each a process, whoever made them.

use super::field::NODES;
use crate::bench::process::{Cpu, rss_mib};
use std::process::Command;
use std::time::{Duration, Instant};

/// How long what was published may take to arrive everywhere.
const SETTLE: Duration = Duration::from_secs(5);

/// What became of publications, and the instants of the Unix clock between which they were due.
#[derive(Clone, Copy, Debug)]
pub(super) struct Published {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) accepted: u64,
    pub(super) refused: u64,
    /// Peers that could not be given an accepted message, where the publisher is told of them.
    pub(super) peers_refused: u64,
}

impl Published {
    /// Deliveries that are due for it.
    pub(super) fn expected(&self) -> f64 {
        (self.accepted * (NODES as u64 - 1)) as f64
    }
}

/// When a message was due, in nanoseconds, and how many milliseconds it took to a follower.
pub(super) type Arrival = (u64, f64);

/// Nodes of which the first publishes.
pub(super) trait Nodes {
    fn pids(&self) -> Vec<u32>;

    /// Messages that have come to nodes that did not publish them.
    fn delivered(&mut self) -> f64;

    /// Copies of messages that were there already.
    fn duplicates(&mut self) -> f64;

    /// Lets a node's messages be followed from now on.
    fn follow(&mut self, node: usize) -> Option<()>;

    /// What a followed node has seen of what was due within these instants.
    fn arrivals(&mut self, node: usize, from: u64, to: u64) -> Option<Vec<Arrival>>;

    /// Publishes at a rate, each message at its instant.
    fn pace(&mut self, rate: f64, length: Duration, size: usize) -> Option<Published>;

    /// Publishes as much as is taken.
    fn flat_out(&mut self, length: Duration, size: usize) -> Option<Published>;

    /// Processor time of all nodes and of the load.
    fn cpu(&self) -> f64 {
        self.pids().into_iter().map(Cpu::own).fold(Cpu::own(std::process::id()), |sum, of| sum + of)
    }

    /// Waits until so many were delivered since, or nothing more comes; says how many were.
    fn settle(&mut self, before: f64, expected: f64) -> f64 {
        let begun = Instant::now();
        loop {
            let delivered = self.delivered() - before;
            if delivered >= expected || begun.elapsed() > SETTLE {
                return delivered;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The sorted times of what these nodes have seen of what was due within these instants.
    fn took(&mut self, nodes: &[usize], from: u64, to: u64) -> Option<Vec<f64>> {
        let mut all = Vec::new();
        for node in nodes {
            all.extend(self.arrivals(*node, from, to)?.into_iter().map(|(_, took)| took));
        }
        all.sort_by(f64::total_cmp);
        Some(all)
    }
}

/// Resident memory of each, in MiB.
pub(super) fn rss(pids: &[u32]) -> Vec<f64> {
    pids.iter().map(|pid| rss_mib(*pid)).collect()
}

/// Stops a process, or lets it go on.
pub(super) fn signal(pid: u32, name: &str) {
    let _ = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status();
}
