//! An upstream of known capacity, five equal tenants, one of which floods: what each gets at 1 to 20 times the
//! capacity, and what happens afterwards.

use super::plot::{COLOURS, Line, Panel, Steps, svg};
use super::process::{PROXY_CORE, pin};
use super::{Bench, table};
use ron_testkit::{Client, Fault, Flow, Load, Node, Outcome, Sample, SlotOrigin, api_key, percentile};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The upstream's capacity is low enough for the client to make twenty times as much on its core.
const SLOTS: usize = 10;
const SERVICE: Duration = Duration::from_millis(20);
const QUEUE: usize = 128;
const MULTIPLES: [f64; 5] = [1.0, 2.0, 5.0, 10.0, 20.0];
/// The first one floods.
const TENANTS: [&str; 5] = ["flood", "b", "c", "d", "e"];
/// What a tenant that behaves asks for, of its fair share.
const MODEST: f64 = 0.8;
const WARM_UP: Duration = Duration::from_secs(1);

/// What one step showed. Times in milliseconds.
#[derive(Clone, Debug)]
struct Step {
    multiple: f64,
    offered: f64,
    goodput: f64,
    /// What each tenant got of what it was due.
    shares: Vec<f64>,
    jain: f64,
    /// Of those that behave.
    p50: f64,
    p99: f64,
    /// Refusals as a client with one connection sees them.
    reject_p50: f64,
    reject_p99: f64,
    rss_before: f64,
    rss_after: f64,
    /// Until a probe takes its usual time again.
    recovery: f64,
    /// How late the client itself was.
    late_p99: f64,
    /// Requests without a whole answer.
    lost: usize,
}

struct Field {
    node: Node,
    length: Duration,
}

pub(super) fn run(bench: &Bench) -> Option<Value> {
    let origin = SlotOrigin::start(SLOTS, SERVICE, |_| Fault::None);
    let node = Node::start_binary(&bench.binary, &["gateway"], &config(&origin));
    pin(node.pid(), PROXY_CORE);
    let field = Field { node, length: Duration::from_secs(u64::from(bench.seconds) * 2 + 2) };
    // The rate that the upstream really manages through the gateway, timers and all.
    let samples = field.send(&[1000.0; 5]);
    let capacity = field.good(&samples, None);
    if capacity < 100.0 {
        println!("the upstream managed only {capacity:.0} requests/s");
        return None;
    }
    let modest = MODEST * capacity / TENANTS.len() as f64;
    let alone = field.send(&[0.0, modest]);
    let (alone_p50, alone_p99) = latencies(&alone, |sample| sample.flow == 1);
    let normal = Duration::from_secs_f64(alone_p50 * 1.5 / 1e3);
    let mut steps: Vec<Step> = MULTIPLES
        .iter()
        .map(|multiple| {
            let others = modest * (TENANTS.len() - 1) as f64;
            let flood = multiple * capacity - others;
            let due = [flood.min(capacity - others), modest, modest, modest, modest];
            field.step(*multiple, &[flood, modest, modest, modest, modest], &due, normal)
        })
        .collect();
    std::fs::write(bench.out.join("overload.svg"), picture(capacity, alone_p99, &steps)).ok()?;
    let equal = capacity / TENANTS.len() as f64;
    steps.push(field.step(10.0, &[equal * 10.0; 5], &[equal; 5], normal));
    print(capacity, alone_p99, modest, &steps);
    println!("  {}", bench.out.join("overload.svg").display());
    Some(json!({
        "capacity": capacity, "modest_rate": modest, "alone_p50_ms": alone_p50, "alone_p99_ms": alone_p99,
        "steps": steps.iter().map(Step::to_json).collect::<Vec<_>>(),
    }))
}

impl Field {
    /// Sends so many requests a second for each tenant.
    fn send(&self, rates: &[f64]) -> Vec<Sample> {
        let flow = |(rate, key): (&f64, &&str)| {
            let request = format!("GET / HTTP/1.1\r\nHost: bench\r\nX-Api-Key: {key}\r\n\r\n");
            Flow { request: request.into_bytes().into(), rate: rate.max(0.001), leaves: 0.0 }
        };
        let flows: Vec<Flow> = rates.iter().zip(&TENANTS).map(flow).collect();
        let load = Load::new(&self.node.gateway(), Duration::from_secs(10), 1);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a thread can have a runtime").block_on(load.run(&flows, self.length));
        load.take()
    }

    /// Good answers per second, of one tenant or of all, that came after the warm-up and before the end.
    fn good(&self, samples: &[Sample], flow: Option<usize>) -> f64 {
        let counts = |sample: &&Sample| {
            let came = sample.due + sample.latency;
            sample.outcome == Outcome::Answered(200)
                && (WARM_UP..self.length).contains(&came)
                && flow.is_none_or(|flow| sample.flow == flow)
        };
        samples.iter().filter(counts).count() as f64 / (self.length - WARM_UP).as_secs_f64()
    }

    fn step(&self, multiple: f64, rates: &[f64], due: &[f64], normal: Duration) -> Step {
        let rss_before = self.node.rss_mib();
        let (gateway, length) = (self.node.gateway(), self.length);
        let probing = std::thread::spawn(move || probe(&gateway, length, normal));
        let samples = self.send(rates);
        let (mut rejects, recovery) = probing.join().expect("a probe does not panic");
        let shares: Vec<f64> =
            due.iter().enumerate().map(|(flow, due)| self.good(&samples, Some(flow)) / due).collect();
        let (p50, p99) = latencies(&samples, |sample| sample.flow > 0);
        let mut late: Vec<Duration> = samples.iter().map(|sample| sample.late).collect();
        Step {
            multiple,
            offered: samples.len() as f64 / length.as_secs_f64(),
            goodput: self.good(&samples, None),
            jain: shares.iter().sum::<f64>().powi(2)
                / (shares.len() as f64 * shares.iter().map(|share| share * share).sum::<f64>()),
            shares,
            p50,
            p99,
            reject_p50: millis(percentile(&mut rejects, 0.5)),
            reject_p99: millis(percentile(&mut rejects, 0.99)),
            rss_before,
            rss_after: self.node.rss_mib(),
            recovery: millis(recovery),
            late_p99: millis(percentile(&mut late, 0.99)),
            lost: samples.iter().filter(|sample| !matches!(sample.outcome, Outcome::Answered(_))).count(),
        }
    }
}

impl Step {
    fn to_json(&self) -> Value {
        json!({
            "multiple": self.multiple, "offered": self.offered, "goodput": self.goodput, "shares": self.shares,
            "jain": self.jain, "p50_ms": self.p50, "p99_ms": self.p99, "reject_p50_ms": self.reject_p50,
            "reject_p99_ms": self.reject_p99, "rss_before_mib": self.rss_before, "rss_after_mib": self.rss_after,
            "recovery_ms": self.recovery, "client_late_p99_ms": self.late_p99, "lost": self.lost,
        })
    }
}

/// Asks as the one that floods, one request at a time: how long refusals take while the load lasts, and how long
/// after its end until an answer takes no longer than usual.
fn probe(gateway: &str, length: Duration, normal: Duration) -> (Vec<Duration>, Duration) {
    let begun = Instant::now();
    let mut client = Client::connect(gateway).expect("it listens");
    let mut rejects = Vec::new();
    loop {
        let asked = Instant::now();
        let status =
            client.request("GET", "/", &[("X-Api-Key", TENANTS[0])], b"").map(|answer| answer.status);
        let (took, over) = (asked.elapsed(), asked.saturating_duration_since(begun + length));
        match status {
            Ok(429 | 503) if over.is_zero() => rejects.push(took),
            Ok(200) if !over.is_zero() && took <= normal => return (rejects, over),
            _ if over > Duration::from_secs(30) => return (rejects, over),
            _ => {}
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Median and 99th percentile of the good answers to requests that were due after the warm-up.
fn latencies(samples: &[Sample], of: impl Fn(&Sample) -> bool) -> (f64, f64) {
    let counts =
        |sample: &&Sample| sample.outcome == Outcome::Answered(200) && sample.due >= WARM_UP && of(sample);
    let mut times: Vec<Duration> = samples.iter().filter(counts).map(|sample| sample.latency).collect();
    (millis(percentile(&mut times, 0.5)), millis(percentile(&mut times, 0.99)))
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn print(capacity: f64, alone_p99: f64, modest: f64, steps: &[Step]) {
    let peak = steps.iter().map(|step| step.goodput).fold(0.0, f64::max);
    let mut columns = vec!["load", "offered/s", "good/s", "of peak"];
    columns.extend(TENANTS);
    columns.extend([
        "Jain",
        "p50 ms",
        "p99 ms",
        "to alone",
        "reject p50 ms",
        "p99",
        "RSS MiB",
        "recovery ms",
    ]);
    columns.extend(["late p99 ms", "lost"]);
    let mut rows = vec![table::row(&columns)];
    for (index, step) in steps.iter().enumerate() {
        // In the last step everybody floods, so nobody's latency is to be compared with that alone.
        let last = index + 1 == steps.len();
        let (all, to_alone) =
            if last { (" all", "-".to_owned()) } else { ("", format!("{:.2}", step.p99 / alone_p99)) };
        let mut row = vec![
            format!("{:.0}x{all}", step.multiple),
            format!("{:.0}", step.offered),
            format!("{:.0}", step.goodput),
            format!("{:.3}", step.goodput / peak),
        ];
        row.extend(step.shares.iter().map(|share| format!("{share:.2}")));
        row.extend([
            format!("{:.4}", step.jain),
            format!("{:.1}", step.p50),
            format!("{:.1}", step.p99),
            to_alone,
            format!("{:.2}", step.reject_p50),
            format!("{:.2}", step.reject_p99),
            format!("{:.1}>{:.1}", step.rss_before, step.rss_after),
            format!("{:.0}", step.recovery),
            format!("{:.1}", step.late_p99),
            step.lost.to_string(),
        ]);
        rows.push(row);
    }
    table::print(
        &format!(
            "overload: an upstream of {capacity:.0} requests/s; four tenants ask for {modest:.0}/s each, {MODEST} of \
             their share,\n  the first for the rest; alone p99 {alone_p99:.1} ms; tenants' columns: got over due; in \
             the last row all five flood"
        ),
        &rows,
    );
}

/// Goodput, latency and shares over the offered load.
fn picture(capacity: f64, alone_p99: f64, steps: &[Step]) -> String {
    let line = |name, colour, dashed, values| Line { name, colour, dashed, values };
    let of = |field: fn(&Step) -> f64| steps.iter().map(field).collect::<Vec<f64>>();
    let flat = |value: f64| vec![value; steps.len()];
    let goodput = vec![
        line("good answers", COLOURS[1], false, of(|step| step.goodput)),
        line("capacity", "#888", true, flat(capacity)),
    ];
    let latency = vec![
        line("p99", COLOURS[0], false, of(|step| step.p99)),
        line("p50", COLOURS[1], false, of(|step| step.p50)),
        line("p99 alone", "#888", true, flat(alone_p99)),
        line("twice that", "#bbb", true, flat(alone_p99 * 2.0)),
    ];
    let share = |(index, name): (usize, &&'static str)| {
        let values = steps.iter().map(|step| step.shares[index]).collect();
        line(*name, COLOURS[index], index == 0, values)
    };
    let shares = TENANTS.iter().enumerate().map(share).collect();
    let panel = |title, unit, lines| Panel { title, unit, tenfold: false, lines };
    let panels = [
        panel("Goodput", "requests/s", goodput),
        panel("Latency of those that behave", "ms", latency),
        panel("What each tenant got of what it was due", "share", shares),
    ];
    let names = MULTIPLES.iter().map(|multiple| format!("{multiple}x")).collect();
    svg(&Steps { title: "offered load over capacity", names, rules: Vec::new() }, &panels)
}

fn config(origin: &SlotOrigin) -> String {
    let tenant = |id: &&str| format!("[[gateway.tenants]]\nid = \"{id}\"\nkeys = [\"{}\"]\n", api_key(id));
    let tenants: String = TENANTS.iter().map(tenant).collect();
    format!(
        "[node]\nworker_threads = 1\n[admin]\nlisten = \"127.0.0.1:0\"\n[gateway]\nlisten = \"127.0.0.1:0\"\n\
         max_conns_per_ip = 4096\nrequest_timeout = \"5s\"\n[gateway.auth]\nmode = \"api_key\"\n\
         [gateway.quotas]\nglobal_rps = 1000000\nper_ip_rps = 1000000\n\
         [gateway.fair_queue]\nwork_capacity = {QUEUE}\n{tenants}\
         [[gateway.upstreams]]\nname = \"o\"\nservers = [\"{}\"]\nmax_inflight = {SLOTS}\n\
         [[gateway.routes]]\npath = \"/*\"\nupstream = \"o\"\n",
        origin.url()
    )
}
