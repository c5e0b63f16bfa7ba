//! One of eight nodes stops in the middle of a stream: what the others notice of it, second by second.

use super::field::{Field, Follower, Publisher, quantiles, unix_nanos};
use super::gossip::ring;
use crate::bench::{Bench, table};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SIZE: usize = 16 << 10;
const RATE: f64 = 300.0;
/// Who stops.
const FROZEN: usize = 3;
const NANOS: u64 = 1_000_000_000;

/// One second of it.
struct Second {
    p99: f64,
    /// Of the publisher and of the largest of the other live nodes, in MiB.
    publisher: f64,
    largest: f64,
}

pub(in crate::bench) fn run(bench: &Bench) -> Option<Value> {
    let field = Field::start(bench, "", ring)?;
    let live = [1, 2, 4, 7];
    let followers: Vec<Follower> =
        live.iter().map(|number| Follower::start(&field.nodes[*number])).collect::<Option<_>>()?;
    let half = u64::from(bench.seconds) * 4;
    let mut publisher = Publisher::start(&field.nodes[0], SIZE, false)?;
    // A message that nobody measures, so that the tree is there.
    publisher.pace(RATE, Duration::from_secs(1), SIZE)?;
    let over = AtomicBool::new(false);
    let (begun, rss) = (unix_nanos(), std::sync::Mutex::new(Vec::new()));
    let frozen_at = std::thread::scope(|threads| {
        threads.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_secs(1));
                let mut now = field.rss();
                now.remove(FROZEN);
                let largest = now[1..].iter().copied().fold(0.0, f64::max);
                rss.lock().expect("nobody panics with it").push((now[0], largest));
            }
        });
        let paced = publisher.pace(RATE, Duration::from_secs(half), SIZE);
        let frozen_at = unix_nanos();
        field.nodes[FROZEN].signal("STOP");
        let after = publisher.pace(RATE, Duration::from_secs(half), SIZE);
        over.store(true, Ordering::Relaxed);
        paced.and(after).map(|_| frozen_at)
    });
    let (ended, told) = (unix_nanos(), publisher.finish()?);
    field.nodes[FROZEN].signal("CONT");
    let frozen_at = frozen_at?;
    std::thread::sleep(Duration::from_millis(500));
    let between = |from: u64, to: u64| {
        let mut all: Vec<f64> = followers.iter().flat_map(|follower| follower.between(from, to)).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    let rss = rss.into_inner().expect("nobody panics with it");
    let second = |(number, (publisher, largest)): (usize, &(f64, f64))| {
        let from = begun + number as u64 * NANOS;
        Second { p99: quantiles(&between(from, from + NANOS)).1, publisher: *publisher, largest: *largest }
    };
    let seconds: Vec<Second> = rss.iter().enumerate().map(second).collect();
    let (before, after) = (between(begun, frozen_at), between(frozen_at, ended));
    let (was, is) = (quantiles(&before), quantiles(&after));
    let shed = field.nodes[0].metric("queue_dropped_total{service=\"overlay\",queue=\"gossip_egress\"}");
    let rows = vec![
        table::row(&["others", "messages", "p50 ms", "p99 ms"]),
        vec!["all run".into(), before.len().to_string(), format!("{:.2}", was.0), format!("{:.2}", was.1)],
        vec!["one frozen".into(), after.len().to_string(), format!("{:.2}", is.0), format!("{:.2}", is.1)],
    ];
    table::print("frozen: 8 nodes, 16 KiB at 300/s; the others' p99 (goal: within 10 %)", &rows);
    println!(
        "  of {} accepted and {} refused the publisher was told {} refusals by peers and shed {shed:.0} frames",
        told.accepted, told.refused, told.peers_refused
    );
    println!("{}", text_plot(&seconds, half as usize));
    let path = bench.out.join("frozen.svg");
    std::fs::write(&path, svg(&seconds, half as usize)).ok()?;
    println!("  {}", path.display());
    let lines: Vec<Value> = seconds
        .iter()
        .map(|of| json!({"p99_ms": of.p99, "publisher_rss_mib": of.publisher, "largest_rss_mib": of.largest}))
        .collect();
    Some(json!({"before": {"p50_ms": was.0, "p99_ms": was.1}, "frozen": {"p50_ms": is.0, "p99_ms": is.1},
        "peers_refused": told.peers_refused, "shed": shed, "seconds": lines}))
}

/// A bar for each second: how long the 99th of 100 messages took, and the publisher's memory beside it.
fn text_plot(seconds: &[Second], frozen: usize) -> String {
    let most = seconds.iter().map(|of| of.p99).fold(0.001, f64::max);
    let mut out = String::new();
    for (number, of) in seconds.iter().enumerate() {
        let bar = "#".repeat((of.p99 / most * 40.0).ceil() as usize);
        let note = if number == frozen { "  <- frozen" } else { "" };
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "  {number:>3} s  {bar:<40} {:>8.2} ms  RSS {:>6.1} MiB, largest other {:>6.1}{note}",
            of.p99, of.publisher, of.largest
        );
    }
    out
}

/// The same as a picture.
fn svg(seconds: &[Second], frozen: usize) -> String {
    let (width, height, gap) = (720.0, 200.0, 60.0);
    let x = |number: usize| gap + width * (number as f64 + 0.5) / seconds.len().max(1) as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        width + gap * 2.0,
        (height + gap) * 2.0 + gap
    );
    type Value = fn(&Second) -> f64;
    let panels: [(&str, [(&str, Value); 2]); 2] = [
        ("p99 of the others, ms", [("#c0392b", |of| of.p99), ("#c0392b", |of| of.p99)]),
        (
            "RSS, MiB: publisher blue, largest other green",
            [("#2471a3", |of| of.publisher), ("#1e8449", |of| of.largest)],
        ),
    ];
    for (place, (title, lines)) in panels.iter().enumerate() {
        let top = gap + place as f64 * (height + gap);
        let most =
            seconds.iter().flat_map(|of| lines.iter().map(move |line| line.1(of))).fold(0.001, f64::max);
        let _ = writeln!(out, "<text x=\"{gap}\" y=\"{}\">{title} (top: {most:.1})</text>", top - 8.0);
        let _ = writeln!(
            out,
            "<rect x=\"{gap}\" y=\"{top}\" width=\"{width}\" height=\"{height}\" fill=\"none\" stroke=\"#bbb\"/>"
        );
        for (colour, value) in lines {
            let point = |(number, of): (usize, &Second)| {
                format!("{:.1},{:.1}", x(number), top + height * (1.0 - value(of) / most))
            };
            let points: Vec<String> = seconds.iter().enumerate().map(point).collect();
            let _ = writeln!(
                out,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                points.join(" ")
            );
        }
        let at = gap + width * frozen as f64 / seconds.len().max(1) as f64;
        let _ = writeln!(out, "<path d=\"M{at} {top}v{height}\" stroke=\"#888\" stroke-dasharray=\"6 4\"/>");
    }
    out + "</svg>\n"
}
