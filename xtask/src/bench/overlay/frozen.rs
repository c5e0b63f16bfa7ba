//! One of eight nodes stops in the middle of a stream, and later goes on: what the others notice of it, second by second,
//! beside gossipsub.

use super::field::{Field, quantiles, unix_nanos};
use super::gossip::ring;
use super::gossipsub::{self, Gossipsub};
use super::nodes::{Arrival, Nodes, Published, rss, signal};
use crate::bench::plot::{COLOURS, Line, Panel, Steps, svg};
use crate::bench::{Bench, table};
use serde_json::{Map, Value, json};
use std::time::Duration;

const SIZE: usize = 16 << 10;
const RATE: f64 = 300.0;
/// Who stops.
const FROZEN: usize = 3;
/// Some of those who do not.
const LIVE: [usize; 4] = [1, 2, 4, 7];
const PHASES: [&str; 3] = ["before", "frozen", "after"];
const NANOS: u64 = 1_000_000_000;

/// What one of the two showed.
struct Run {
    name: String,
    told: Published,
    /// Frames for the frozen one that the publisher shed, where it says so.
    shed: Option<f64>,
    phases: Vec<Phase>,
    seconds: Vec<Second>,
}

/// A third of it.
struct Phase {
    /// Of what the live ones were due.
    delivered: f64,
    p50: f64,
    p99: f64,
    /// The publisher's at its end.
    rss: f64,
}

struct Second {
    p99: f64,
    /// Of the publisher and of the largest of the other live nodes, in MiB.
    publisher: f64,
    largest: f64,
}

pub(in crate::bench) fn run(bench: &Bench) -> Option<Value> {
    let third = u64::from(bench.seconds) * 4;
    let mut ron = Field::start(bench, "", ring)?;
    let mut runs = vec![measured("ron".to_owned(), third, &mut ron)?];
    let shed = "queue_dropped_total{service=\"overlay\",queue=\"gossip_egress\"}";
    runs[0].shed = Some(ron.nodes[0].metric(shed));
    drop(ron);
    if let Some(program) = gossipsub::built() {
        runs.push(measured(gossipsub::name(), third, &mut Gossipsub::start(&program, ring)?)?);
    }
    print(&runs, third);
    let path = bench.out.join("frozen.svg");
    std::fs::write(&path, picture(&runs, third)).ok()?;
    println!("  {}", path.display());
    Some(runs.iter().map(|of| (of.name.clone(), of.to_json())).collect::<Map<_, _>>().into())
}

fn measured(name: String, third: u64, nodes: &mut dyn Nodes) -> Option<Run> {
    println!("frozen: {name}, for {} s", third * 3);
    for node in LIVE {
        nodes.follow(node)?;
    }
    // Nobody measures these: the tree is there afterwards.
    nodes.pace(RATE, Duration::from_secs(1), SIZE)?;
    let (pids, length) = (nodes.pids(), Duration::from_secs(third * 3));
    let (told, memory) = std::thread::scope(|threads| {
        let watch = threads.spawn(move || watched(&pids, third));
        let told = nodes.pace(RATE, length, SIZE);
        Some((told?, watch.join().ok()?))
    })?;
    // What is late yet arrives is part of it.
    std::thread::sleep(Duration::from_secs(3));
    let mut all: Vec<Arrival> = Vec::new();
    for node in LIVE {
        all.extend(nodes.arrivals(node, told.from, told.to)?);
    }
    let within = |from: u64, to: u64| {
        let from = told.from + from * NANOS..told.from + to * NANOS;
        let mut took: Vec<f64> =
            all.iter().filter(|(due, _)| from.contains(due)).map(|(_, took)| *took).collect();
        took.sort_by(f64::total_cmp);
        took
    };
    let phase = |number: u64| {
        let took = within(number * third, (number + 1) * third);
        let (p50, p99) = quantiles(&took);
        let due = RATE * third as f64 * LIVE.len() as f64;
        let rss = memory.get(((number + 1) * third - 1) as usize).map_or(f64::NAN, |of| of.0);
        Phase { delivered: took.len() as f64 / due, p50, p99, rss }
    };
    let second = |(number, (publisher, largest)): (u64, &(f64, f64))| {
        let p99 = quantiles(&within(number, number + 1)).1;
        Second { p99, publisher: *publisher, largest: *largest }
    };
    let seconds = (0..).zip(&memory).map(second).collect();
    Some(Run { name, told, shed: None, phases: (0..3).map(phase).collect(), seconds })
}

/// Stops a node after the first third and lets it go on after the second; returns what the publisher and the largest of
/// the others used at the end of each second.
fn watched(pids: &[u32], third: u64) -> Vec<(f64, f64)> {
    let (begun, mut memory) = (unix_nanos(), Vec::new());
    for second in 1..=third * 3 {
        let left = (begun + second * NANOS).saturating_sub(unix_nanos());
        std::thread::sleep(Duration::from_nanos(left));
        let mut now = rss(pids);
        now.remove(FROZEN);
        memory.push((now[0], now[1..].iter().copied().fold(0.0, f64::max)));
        if second == third {
            signal(pids[FROZEN], "STOP");
        } else if second == third * 2 {
            signal(pids[FROZEN], "CONT");
        }
    }
    memory
}

fn print(runs: &[Run], third: u64) {
    let mut rows =
        vec![table::row(&["", "one node", "delivered", "p50 ms", "p99 ms", "to before", "RSS MiB"])];
    for of in runs {
        for (phase, name) in of.phases.iter().zip(PHASES) {
            rows.push(vec![
                of.name.clone(),
                name.to_owned(),
                format!("{:.4}", phase.delivered),
                format!("{:.2}", phase.p50),
                format!("{:.2}", phase.p99),
                format!("{:.2}", phase.p99 / of.phases[0].p99),
                format!("{:.1}", phase.rss),
            ]);
        }
    }
    let title = format!(
        "frozen: 8 nodes, 16 KiB at 300/s, one frozen for {third} s: four others' times and the publisher's memory\n  \
         (goals: p99 within 10 %, memory flat, the publisher told)"
    );
    table::print(&title, &rows);
    for of in runs {
        let shed = of.shed.map_or(String::new(), |shed| format!(", and shed {shed:.0} frames for others"));
        println!(
            "  {}: of {} publications {} were refused; told of {} refusals by peers{shed}",
            of.name,
            of.told.accepted + of.told.refused,
            of.told.refused,
            of.told.peers_refused
        );
    }
    let mut rows = vec![table::row(&["second"])];
    rows[0].extend(runs.iter().flat_map(|of| [format!("{} p99 ms", of.name), "RSS MiB".to_owned()]));
    for number in 0..runs[0].seconds.len() {
        let mut row = vec![format!("{number} {}", PHASES[(number as u64 / third).min(2) as usize])];
        for of in runs.iter().filter_map(|of| of.seconds.get(number)) {
            row.extend([format!("{:.2}", of.p99), format!("{:.1}", of.publisher)]);
        }
        rows.push(row);
    }
    table::print("frozen, second by second", &rows);
}

/// Latency of the others and memory of the publisher over time.
fn picture(runs: &[Run], third: u64) -> String {
    let lines = |value: fn(&Second) -> f64| {
        let line = |(of, colour): (_, &&'static str)| {
            let of: &Run = of;
            Line { name: &of.name, colour, dashed: false, values: of.seconds.iter().map(value).collect() }
        };
        runs.iter().zip(&COLOURS[..]).map(line).collect::<Vec<_>>()
    };
    let panels = [
        Panel { title: "p99 of four other nodes", unit: "ms", tenfold: true, lines: lines(|of| of.p99) },
        Panel {
            title: "Memory of the publisher",
            unit: "MiB",
            tenfold: false,
            lines: lines(|of| of.publisher),
        },
    ];
    let every = third.div_ceil(4);
    let names = (0..third * 3)
        .map(|second| if second % every == 0 { second.to_string() } else { String::new() })
        .collect();
    let rules = vec![(third as usize, "frozen"), (third as usize * 2, "goes on")];
    svg(&Steps { title: "seconds", names, rules }, &panels)
}

impl Run {
    fn to_json(&self) -> Value {
        let phase = |(of, name): (&Phase, &str)| {
            let figures = json!({"delivered_share": of.delivered, "p50_ms": of.p50, "p99_ms": of.p99, "publisher_rss_mib": of.rss});
            (name.to_owned(), figures)
        };
        let mut page: Map<String, Value> = self.phases.iter().zip(PHASES).map(phase).collect();
        let second = |of: &Second| json!({"p99_ms": of.p99, "publisher_rss_mib": of.publisher, "largest_rss_mib": of.largest});
        page.insert("refused".to_owned(), self.told.refused.into());
        page.insert("peers_refused".to_owned(), self.told.peers_refused.into());
        page.insert("shed".to_owned(), json!(self.shed));
        page.insert("seconds".to_owned(), self.seconds.iter().map(second).collect());
        page.into()
    }
}
