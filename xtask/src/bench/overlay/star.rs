//! One publisher and seven receivers, each a process, beside one NATS server with as many clients.

use super::field::{Field, Follower, NODES, Publisher, quantiles};
use super::nats::{Nats, Subscriber, publish};
use crate::bench::{Bench, table};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const SIZE: usize = 1024;
/// For the latency.
const RATE: f64 = 1000.0;
/// Publications on their way at once, flat out.
const WINDOW: u64 = 128;

/// What one of them showed.
struct Figures {
    name: &'static str,
    published: f64,
    per_cpu: f64,
    p50: f64,
    p99: f64,
    share: f64,
}

pub(in crate::bench) fn run(bench: &Bench) -> Option<Value> {
    let figures = [
        ron(bench, "ron, TLS, signed", "")?,
        ron(bench, "ron, plain, signed", "[overlay.tls]\nmode = \"off\"\n")?,
        nats(bench)?,
    ];
    let columns =
        ["", "published/s", "delivered/CPU s", "to NATS", "delivered", "p50 ms", "p99 ms at 1000/s"];
    let mut rows = vec![table::row(&columns)];
    let to = figures[2].per_cpu;
    let mut result = Vec::new();
    for of in &figures {
        rows.push(vec![
            of.name.to_owned(),
            format!("{:.0}", of.published),
            format!("{:.0}", of.per_cpu),
            format!("{:.2}", of.per_cpu / to),
            format!("{:.4}", of.share),
            format!("{:.2}", of.p50),
            format!("{:.2}", of.p99),
        ]);
        result.push(json!({"name": of.name, "published_per_second": of.published, "delivered_per_cpu_second": of.per_cpu,
            "to_nats": of.per_cpu / to, "delivered_share": of.share, "p50_ms": of.p50, "p99_ms": of.p99}));
    }
    table::print(
        "star: 1 publisher, 7 receivers, 1 KiB, flat out; the load's own work counted (goal: NATS)",
        &rows,
    );
    Some(result.into())
}

/// Receivers count what has come; at the even rate each is also followed by a local user.
fn ron(bench: &Bench, name: &'static str, keys: &str) -> Option<Figures> {
    let field = Field::start(bench, keys, |a, _| a == 0)?;
    let length = Duration::from_secs(u64::from(bench.seconds) * 2);
    let (before, spent, begun) = (field.delivered(), field.cpu(), Instant::now());
    let mut publisher = Publisher::start(&field.nodes[0], SIZE, true)?;
    publisher.flat_out(length, SIZE, WINDOW)?;
    let told = publisher.finish()?;
    let expected = (told.accepted * (NODES as u64 - 1)) as f64;
    let delivered = field.settle(before, expected);
    let (took, spent) = (begun.elapsed().as_secs_f64(), field.cpu() - spent);
    let followers: Vec<Follower> = field.nodes[1..].iter().map(Follower::start).collect::<Option<_>>()?;
    let mut publisher = Publisher::start(&field.nodes[0], SIZE, false)?;
    let (before, (from, to)) = (field.delivered(), publisher.pace(RATE, length, SIZE)?);
    let paced = publisher.finish()?;
    field.settle(before, (paced.accepted * (NODES as u64 - 1)) as f64);
    let mut all: Vec<f64> = followers.iter().flat_map(|follower| follower.between(from, to)).collect();
    all.sort_by(f64::total_cmp);
    let (p50, p99) = quantiles(&all);
    let (published, per_cpu) = (told.accepted as f64 / took, delivered / spent);
    Some(Figures { name, published, per_cpu, p50, p99, share: delivered / expected })
}

fn nats(bench: &Bench) -> Option<Figures> {
    let nats = Nats::start()?;
    let length = Duration::from_secs(u64::from(bench.seconds) * 2);
    let receivers: Vec<Subscriber> =
        (1..NODES).map(|_| Subscriber::start(&nats, false)).collect::<Option<_>>()?;
    let received = |receivers: &[Subscriber]| receivers.iter().map(Subscriber::received).sum::<u64>();
    let (spent, begun) = (nats.cpu(), Instant::now());
    let sent = publish(&nats, None, length, SIZE)?;
    let expected = sent * (NODES as u64 - 1);
    while received(&receivers) < expected && begun.elapsed() < length + Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let (took, spent, delivered) = (begun.elapsed().as_secs_f64(), nats.cpu() - spent, received(&receivers));
    drop(receivers);
    drop(nats);
    let nats = Nats::start()?;
    let receivers: Vec<Subscriber> =
        (1..NODES).map(|_| Subscriber::start(&nats, true)).collect::<Option<_>>()?;
    publish(&nats, Some(RATE), length, SIZE)?;
    std::thread::sleep(Duration::from_millis(200));
    let mut all: Vec<f64> = receivers.iter().flat_map(Subscriber::took).collect();
    all.sort_by(f64::total_cmp);
    let (p50, p99) = quantiles(&all);
    let share = delivered as f64 / expected as f64;
    Some(Figures {
        name: "NATS, plain",
        published: sent as f64 / took,
        per_cpu: delivered as f64 / spent,
        p50,
        p99,
        share,
    })
}
