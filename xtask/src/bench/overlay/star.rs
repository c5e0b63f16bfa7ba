//! One publisher and seven receivers, each a process, beside one NATS server with as many clients and a
//! star of gossipsub.

use super::field::{Field, NODES, quantiles};
use super::gossipsub::{self, Gossipsub};
use super::nats::{Nats, Subscriber, publish};
use super::nodes::Nodes;
use crate::bench::{Bench, table};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const SIZE: usize = 1024;
/// For the latency.
const RATE: f64 = 1000.0;

/// What one of them showed.
struct Figures {
    name: String,
    published: f64,
    per_cpu: f64,
    p50: f64,
    p99: f64,
    share: f64,
}

pub(in crate::bench) fn run(bench: &Bench) -> Option<Value> {
    let ron = |name: &str, keys: &str| {
        let start = || Some(Box::new(Field::start(bench, keys, |a, _| a == 0)?) as Box<dyn Nodes>);
        measured(bench, name.to_owned(), start)
    };
    let mut figures = vec![
        ron("ron, TLS, signed", "")?,
        ron("ron, plain, signed", "[overlay.tls]\nmode = \"off\"\n")?,
        nats(bench)?,
    ];
    if let Some(program) = gossipsub::built() {
        let name = format!("{}, Noise, signed", gossipsub::name());
        let start = || Some(Box::new(Gossipsub::start(&program, |a, _| a == 0)?) as Box<dyn Nodes>);
        figures.push(measured(bench, name, start)?);
    }
    let columns =
        ["", "published/s", "delivered/CPU s", "to NATS", "delivered", "p50 ms", "p99 ms at 1000/s"];
    let mut rows = vec![table::row(&columns)];
    let to = figures[2].per_cpu;
    let mut result = Vec::new();
    for of in &figures {
        rows.push(vec![
            of.name.clone(),
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

/// Receivers count what has come; at the even rate, for which all begin anew, each is also followed by a local user.
fn measured(bench: &Bench, name: String, start: impl Fn() -> Option<Box<dyn Nodes>>) -> Option<Figures> {
    println!("star: {name}");
    let mut nodes = start()?;
    let length = Duration::from_secs(u64::from(bench.seconds) * 2);
    let (before, spent) = (nodes.delivered(), nodes.cpu());
    let told = nodes.flat_out(length, SIZE)?;
    let delivered = nodes.settle(before, told.expected());
    let (took, spent) = ((told.to - told.from) as f64 / 1e9, nodes.cpu() - spent);
    drop(nodes);
    let (mut nodes, receivers) = (start()?, (1..NODES).collect::<Vec<usize>>());
    for node in &receivers {
        nodes.follow(*node)?;
    }
    let before = nodes.delivered();
    let paced = nodes.pace(RATE, length, SIZE)?;
    nodes.settle(before, paced.expected());
    let (p50, p99) = quantiles(&nodes.took(&receivers, paced.from, paced.to)?);
    let (published, per_cpu) = (told.accepted as f64 / took, delivered / spent);
    Some(Figures { name, published, per_cpu, p50, p99, share: delivered / told.expected() })
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
        name: "NATS, plain".to_owned(),
        published: sent as f64 / took,
        per_cpu: delivered as f64 / spent,
        p50,
        p99,
        share,
    })
}
