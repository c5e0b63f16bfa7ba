//! Eight processes with six links each, which relay: what arrives at rising rates, and when.

use super::field::{Field, Follower, NODES, Publisher, quantiles};
use crate::bench::{Bench, table};
use serde_json::{Value, json};
use std::time::Duration;

const SIZE: usize = 1024;
const RATES: [f64; 6] = [500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 15_000.0];

/// Everybody but the one across, and oneself.
pub(super) fn ring(a: usize, b: usize) -> bool {
    b - a != NODES / 2
}

pub(in crate::bench) fn run(bench: &Bench) -> Option<Value> {
    let field = Field::start(bench, "", ring)?;
    // A local user where messages come straight from the publisher, and one where they are relayed.
    let followers = [Follower::start(&field.nodes[1])?, Follower::start(&field.nodes[NODES / 2])?];
    let columns = [
        "published/s",
        "accepted",
        "delivered",
        "duplicates",
        "p50 ms",
        "p99 ms",
        "relayed p99",
        "CPU us/delivery",
    ];
    let mut rows = vec![table::row(&columns)];
    let mut result = Vec::new();
    let length = Duration::from_secs(u64::from(bench.seconds) * 2);
    for rate in RATES {
        let mut publisher = Publisher::start(&field.nodes[0], SIZE, false)?;
        let duplicates = || field.total("gossip_messages_total{result=\"duplicate\"}");
        let (before, doubled, spent) = (field.delivered(), duplicates(), field.cpu());
        let (from, to) = publisher.pace(rate, length, SIZE)?;
        let told = publisher.finish()?;
        let expected = (told.accepted * (NODES as u64 - 1)) as f64;
        let delivered = field.settle(before, expected);
        let (spent, doubled) = (field.cpu() - spent, duplicates() - doubled);
        let times = followers.each_ref().map(|follower| follower.between(from, to));
        let relayed = quantiles(&times[1]).1;
        let mut all = times.concat();
        all.sort_by(f64::total_cmp);
        let (p50, p99) = quantiles(&all);
        let offered = (told.accepted + told.refused) as f64;
        let (accepted, share) = (told.accepted as f64 / offered, delivered / expected);
        let (each, doubled) = (spent * 1e6 / delivered, doubled / delivered);
        rows.push(vec![
            format!("{rate:.0}"),
            format!("{accepted:.4}"),
            format!("{share:.4}"),
            format!("{doubled:.3}"),
            format!("{p50:.2}"),
            format!("{p99:.2}"),
            format!("{relayed:.2}"),
            format!("{each:.1}"),
        ]);
        result.push(json!({"rate": rate, "accepted_share": accepted, "delivered_share": share,
            "duplicates_per_delivery": doubled, "p50_ms": p50, "p99_ms": p99, "relayed_p99_ms": relayed,
            "cpu_us_per_delivery": each}));
    }
    let title = "gossip: 8 nodes, 6 links each, TLS, signed, 1 KiB, two followed (goal: 10,000/s all delivered, p99 10 ms)";
    table::print(title, &rows);
    Some(result.into())
}
