//! Eight processes with six links each, which relay: what arrives at rising rates, and when, beside gossipsub.

use super::field::{Field, NODES, quantiles};
use super::gossipsub::{self, Gossipsub};
use super::nodes::Nodes;
use crate::bench::{Bench, table};
use serde_json::{Map, Value, json};
use std::time::Duration;

const SIZE: usize = 1024;
const RATES: [f64; 6] = [500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 15_000.0];
/// Whose messages are followed: one that gets them straight from the publisher, and one to which they are relayed.
const FOLLOWED: [usize; 2] = [1, NODES / 2];

/// Everybody but the one across, and oneself.
pub(super) fn ring(a: usize, b: usize) -> bool {
    b - a != NODES / 2
}

/// What one rate showed.
struct Step {
    rate: f64,
    accepted: f64,
    delivered: f64,
    duplicates: f64,
    p50: f64,
    p99: f64,
    relayed: f64,
    per_cpu: f64,
    /// Of the publisher, at the end, in MiB.
    rss: f64,
}

pub(in crate::bench) fn run(bench: &Bench) -> Option<Value> {
    let columns = [
        "",
        "published/s",
        "accepted",
        "delivered",
        "duplicates",
        "p50 ms",
        "p99 ms",
        "relayed p99",
        "delivered/CPU s",
        "CPU us/delivery",
        "RSS MiB",
    ];
    let mut rows = vec![table::row(&columns)];
    let mut result = Map::new();
    let mut steps = |name: String, start: &dyn Fn() -> Option<Box<dyn Nodes>>| {
        let mut all = Vec::new();
        for rate in RATES {
            println!("gossip: {name} at {rate}/s");
            // Nodes of their own for each rate: what one that was too high left behind is nobody else's.
            let step = step(bench, &mut *start()?, rate)?;
            rows.push(step.row(&name));
            all.push(step.to_json());
        }
        result.insert(name, all.into());
        Some(())
    };
    steps("ron".to_owned(), &|| Some(Box::new(Field::start(bench, "", ring)?)))?;
    if let Some(program) = gossipsub::built() {
        steps(gossipsub::name(), &|| Some(Box::new(Gossipsub::start(&program, ring)?)))?;
    }
    let title = "gossip: 8 nodes, 6 links each, encrypted, signed, 1 KiB, two followed (goal: 10,000/s all delivered, \
        p99 10 ms);\n  times are of what arrived; ron's users are served over HTTP, gossipsub's in its process";
    table::print(title, &rows);
    Some(result.into())
}

fn step(bench: &Bench, nodes: &mut dyn Nodes, rate: f64) -> Option<Step> {
    let length = Duration::from_secs(u64::from(bench.seconds) * 2);
    for node in FOLLOWED {
        nodes.follow(node)?;
    }
    // Nobody measures these: the tree is there afterwards.
    let warm = nodes.pace(RATES[0], Duration::from_secs(1), SIZE)?;
    nodes.settle(0.0, warm.expected());
    let (before, doubled, spent) = (nodes.delivered(), nodes.duplicates(), nodes.cpu());
    let told = nodes.pace(rate, length, SIZE)?;
    let delivered = nodes.settle(before, told.expected());
    let (spent, doubled) = (nodes.cpu() - spent, nodes.duplicates() - doubled);
    let (p50, p99) = quantiles(&nodes.took(&FOLLOWED, told.from, told.to)?);
    let relayed = quantiles(&nodes.took(&FOLLOWED[1..], told.from, told.to)?).1;
    Some(Step {
        rate,
        accepted: told.accepted as f64 / (told.accepted + told.refused) as f64,
        delivered: delivered / told.expected(),
        duplicates: doubled / delivered,
        p50,
        p99,
        relayed,
        per_cpu: delivered / spent,
        rss: super::nodes::rss(&nodes.pids()[..1])[0],
    })
}

impl Step {
    fn row(&self, name: &str) -> Vec<String> {
        vec![
            name.to_owned(),
            format!("{:.0}", self.rate),
            format!("{:.4}", self.accepted),
            format!("{:.4}", self.delivered),
            format!("{:.3}", self.duplicates),
            format!("{:.2}", self.p50),
            format!("{:.2}", self.p99),
            format!("{:.2}", self.relayed),
            format!("{:.0}", self.per_cpu),
            format!("{:.1}", 1e6 / self.per_cpu),
            format!("{:.0}", self.rss),
        ]
    }

    fn to_json(&self) -> Value {
        json!({"rate": self.rate, "accepted_share": self.accepted, "delivered_share": self.delivered,
            "duplicates_per_delivery": self.duplicates, "p50_ms": self.p50, "p99_ms": self.p99,
            "relayed_p99_ms": self.relayed, "delivered_per_cpu_second": self.per_cpu,
            "cpu_us_per_delivery": 1e6 / self.per_cpu, "publisher_rss_mib": self.rss})
    }
}
