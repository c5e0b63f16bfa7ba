//! `cargo xtask bench registry`: ron's registry beside etcd and PostgreSQL, all flushing before they answer, on one disk.
//!
//! etcd is asked through its own JSON gateway, so that one client can load both; a key and a value of about a
//! kilobyte are a put there and a committed change here. PostgreSQL moves its head and appends in one statement.

use super::load::{self, Client, Figures};
use super::peers::{self, Server};
use super::process::{CLIENT_CORE, Cpu, PROXY_CORE, pin, rss_mib};
use super::{Bench, table};
use ed25519_dalek::SigningKey;
use ron_log::key::PublicKey;
use ron_log::{Approval, Key, Op, Payload, Proposal, Role, Signer, SignerSet, TrustRoots};
use ron_testkit::percentile;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const COMMIT: &str = "/registry/proposals?commit=true";
const CLIENTS: [u32; 3] = [1, 64, 512];
/// Bytes of a value.
const VALUE: usize = 1000;
const STREAMS: usize = 1000;
const UPDATES: u64 = 20;
/// Proposals that wait to be committed: as many as there may be.
const PENDING: u64 = 10_000;
/// Far in the future, for what is made beforehand.
const EXPIRES: u64 = 4_000_000_000_000;

fn key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

/// So many of so many must approve.
fn roots(threshold: u64, count: u8) -> TrustRoots {
    let signer = |seed: u8| Signer {
        id: format!("s{seed}"),
        keys: vec![PublicKey::Ed25519(key(seed).verifying_key().into())],
        roles: vec![Role::Approve],
        not_after: None,
    };
    let signers = SignerSet::new(threshold, false, (1..=count).map(signer).collect()).expect("a good set");
    TrustRoots { log: "bench.example/log".into(), signers }
}

/// A change of its own item.
fn proposal(number: u64) -> Proposal {
    let payload = Payload {
        base_version: 0,
        signers_version: 0,
        nonce: u128::from(number).to_be_bytes(),
        ops: vec![Op {
            key: Key::new("x-bench", &number.to_string()).expect("a key"),
            body: Some(format!("\"{}\"", "x".repeat(VALUE))),
        }],
        note: String::new(),
        expires_at: EXPIRES,
    };
    Proposal::new(payload).expect("a good payload")
}

/// The same with its approvals, ready to be committed in one request.
fn change(number: u64, approvals: u8) -> String {
    let proposal = proposal(number);
    let sign = |seed: u8| Approval::sign(&format!("s{seed}"), &key(seed), proposal.b3(), 0).canonical();
    let approvals: Vec<String> = (1..=approvals).map(sign).collect();
    let payload = String::from_utf8_lossy(proposal.bytes());
    format!(r#"{{"payload":{payload},"approvals":[{}]}}"#, approvals.join(","))
}

/// A script that sends each line of a file once.
fn each_line(bench: &Bench, count: u64, line: impl Fn(u64) -> String) -> Option<String> {
    each(bench, "wrk.format(\"POST\", nil, {[\"Content-Type\"] = \"application/json\"}, line)", count, line)
}

/// A script that makes a request of each line of a file.
fn each(bench: &Bench, request: &str, count: u64, line: impl Fn(u64) -> String) -> Option<String> {
    let file = bench.dir.join("bodies");
    let text: String = (0..count).map(|number| line(number) + "\n").collect();
    std::fs::write(&file, text).ok()?;
    Some(format!(
        "local sent, n = {{}}, 0\n\
         function init(args)\nfor line in io.lines(\"{}\") do\nsent[#sent + 1] = {request}\nend\nend\n\
         function request()\nn = n + 1\nreturn sent[(n - 1) % #sent + 1]\nend\n",
        file.display()
    ))
}

/// Flushes that the machine's disks have done.
fn flushes() -> f64 {
    let text = std::fs::read_to_string("/proc/diskstats").unwrap_or_default();
    text.lines().filter_map(|line| line.split_whitespace().nth(18)?.parse::<f64>().ok()).sum()
}

fn written(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix("write_bytes: ")?.parse().ok()).unwrap_or(0.0)
}

/// One run of writes.
struct Written {
    figures: Figures,
    flushes: f64,
    bytes: f64,
}

fn writes(bench: &Bench, server: &Server, client: Client<'_>, seconds: u32, count: u64) -> Option<Written> {
    let (flushed, bytes) = (flushes(), written(server.pid));
    let figures = load::measure(&bench.dir, server, client, seconds)?;
    let entries = figures.rate * f64::from(seconds);
    if figures.refused > 0.0 || entries > count as f64 {
        println!("{}: {:.4} refused, {entries:.0} of {count} sent", server.name, figures.refused);
        return None;
    }
    let per = |now: f64, before: f64| (now - before) / entries.max(1.0);
    Some(Written { flushes: per(flushes(), flushed), bytes: per(written(server.pid), bytes), figures })
}

/// The time of one write with its flush on the servers' core, in microseconds: the disk's interrupts do not come to all
/// cores alike.
fn fdatasync(bench: &Bench) -> Option<(f64, f64)> {
    pin(std::process::id(), PROXY_CORE);
    let times = flush_times(bench);
    pin(std::process::id(), CLIENT_CORE);
    times
}

fn flush_times(bench: &Bench) -> Option<(f64, f64)> {
    let file = File::create(bench.dir.join("raw")).ok()?;
    file.write_all_at(&vec![0; 1 << 20], 0).ok()?;
    file.sync_all().ok()?;
    let mut times = Vec::new();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(u64::from(bench.seconds)) {
        let before = Instant::now();
        file.write_all_at(&[7; 1024], (times.len() as u64 % 1024) * 1024).ok()?;
        file.sync_data().ok()?;
        times.push(before.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Some((times[times.len() / 2], times[times.len() * 99 / 100]))
}

fn row(name: &str, clients: u32, figures: &Figures, ratios: [f64; 3], bytes: Option<f64>) -> Vec<String> {
    let [to_etcd, to_raw, flushes] = ratios;
    vec![
        name.to_owned(),
        clients.to_string(),
        format!("{:.0}", figures.rate),
        format!("{to_etcd:.2}"),
        format!("{:.0}", figures.p50),
        format!("{to_raw:.2}"),
        format!("{:.0}", figures.p99),
        format!("{flushes:.3}"),
        bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{bytes:.0}")),
        format!("{:.1}", figures.cpu()),
    ]
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// Durable commits beside puts.
pub(super) fn commits(bench: &Bench) -> Option<Value> {
    let (etcd, postgres) = (peers::etcd(&bench.dir)?, peers::postgres(&bench.dir)?);
    let policies = [("ron 1 of 1", 1, 1), ("ron 2 of 3", 2, 3)];
    let nodes =
        policies.map(|(name, m, n)| (peers::registry(bench, name, &roots(m, n).canonical()), m as u8));
    let (first, first_p99) = fdatasync(bench)?;
    // What a request costs that changes nothing: client, wires and wake-ups.
    let idle = Client::Wrk { connections: 1, path: "/registry/head", script: "" };
    let idle = load::measure(&bench.dir, &nodes[0].0, idle, bench.seconds)?.p50;
    let mut rows = vec![table::row(&[
        "",
        "clients",
        "commits/s",
        "to etcd",
        "p50 us",
        "to fdatasync",
        "p99 us",
        "flushes",
        "bytes",
        "CPU us",
    ])];
    let (mut result, mut next) = (Vec::new(), 0);
    for clients in CLIENTS {
        let count = u64::from(bench.seconds) * if clients == 1 { 12_000 } else { 60_000 };
        let mut etcd_rate = 0.0;
        for server in [&etcd, &postgres].into_iter().chain(nodes.iter().map(|node| &node.0)) {
            let approvals = nodes.iter().find(|node| node.0.pid == server.pid).map(|node| node.1);
            let (mut runs, mut raws) = (Vec::new(), Vec::new());
            for _ in 0..bench.rounds {
                // The disk is not as fast in every minute: the flush that one client is compared with is of this one.
                raws.push(if clients == 1 { fdatasync(bench)?.0 } else { first });
                let from = next;
                next += count;
                if server.pid == postgres.pid {
                    let client = Client::Statements { connections: clients, sql: &append() };
                    runs.extend(writes(bench, server, client, bench.seconds, u64::MAX));
                    continue;
                }
                let (path, script) = match approvals {
                    Some(approvals) => (COMMIT, each_line(bench, count, |it| change(from + it, approvals))?),
                    None => ("/v3/kv/put", each_line(bench, count, |it| put(from + it))?),
                };
                let client = Client::Wrk { connections: clients, path, script: &script };
                runs.push(writes(bench, server, client, bench.seconds, count)?);
            }
            if runs.is_empty() {
                // Sessions that wait for one row may commit nothing at all in a run's time.
                continue;
            }
            runs.sort_by(|a, b| a.figures.rate.total_cmp(&b.figures.rate));
            let Written { figures, flushes, bytes } = &runs[runs.len() / 2];
            if server.pid == etcd.pid {
                etcd_rate = figures.rate;
            }
            let (ratio, to_raw) = (figures.rate / etcd_rate, figures.p50 / median(raws));
            // What PostgreSQL's processes have written is not known any more when they have ended.
            let bytes = (server.pid != postgres.pid).then_some(*bytes);
            rows.push(row(server.name, clients, figures, [ratio, to_raw, *flushes], bytes));
            result.push(
                json!({"server": server.name, "clients": clients, "rate": figures.rate, "to_etcd": ratio,
                "p50_us": figures.p50, "p99_us": figures.p99, "p50_to_fdatasync": to_raw, "flushes": flushes,
                "bytes": bytes, "cpu_us": figures.cpu(), "rss_mib": rss_mib(server.pid)}),
            );
        }
    }
    let mut title =
        String::from("commits: one request, one durable change of 1 KB (goal: 64 clients >= 5 x etcd)");
    let _ = write!(
        title,
        "; fdatasync of 1 KiB on the same core: p50 {first:.0} us, p99 {first_p99:.0} us at the beginning, measured \
         again before each run of one client; a request that changes nothing: p50 {idle:.0} us; flushes are the machine's"
    );
    table::print(&title, &rows);
    Some(json!({"fdatasync_us": first, "fdatasync_p99_us": first_p99, "idle_p50_us": idle, "runs": result}))
}

/// One client commits what was proposed and approved before.
pub(super) fn alone(bench: &Bench) -> Option<Value> {
    let (mut runs, mut raws) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds {
        let node = peers::registry(bench, "ron", &roots(2, 3).canonical());
        let mut proposer = ron_testkit::Client::connect(&node.http).ok()?;
        for number in 0..PENDING {
            let (json, body) = ([("Content-Type", "application/json")], change(number, 2));
            let sent = proposer.request("POST", "/registry/proposals", &json, body.as_bytes());
            sent.ok().filter(|answer| answer.status == 202)?;
        }
        let request = "wrk.format(\"POST\", \"/registry/commit/\" .. line, nil, \"\")";
        let script = each(bench, request, PENDING, |it| proposal(it).b3().to_string())?;
        raws.push(fdatasync(bench)?.0);
        let client = Client::Wrk { connections: 1, path: "/", script: &script };
        runs.push(writes(bench, &node, client, 1, PENDING)?.figures);
    }
    let (figures, raw) = (Figures::median(&runs), median(raws));
    let ratio = figures.p50 / raw;
    let mut rows = vec![table::row(&["commits/s", "p50 us", "to fdatasync", "p99 us", "CPU us"])];
    let shown = [figures.rate, figures.p50, ratio, figures.p99, figures.cpu()];
    rows.push(shown.iter().zip([0, 0, 2, 0, 1]).map(|(it, digits)| format!("{it:.digits$}")).collect());
    let title = format!(
        "alone: one client commits what was proposed and approved by 2 of 3 before (goal: p50 <= 2 x fdatasync, {raw:.0} us)"
    );
    table::print(&title, &rows);
    Some(
        json!({"fdatasync_us": raw, "p50_us": figures.p50, "p50_to_fdatasync": ratio, "p99_us": figures.p99}),
    )
}

/// Moves the head and appends, all or nothing.
fn append() -> String {
    let body = "x".repeat(VALUE);
    format!(
        "WITH moved AS (UPDATE head SET version = version + 1 RETURNING version) \
         INSERT INTO log SELECT version, '{body}' FROM moved;\n"
    )
}

/// Digits are base64 as they stand.
fn put(number: u64) -> String {
    format!(r#"{{"key":"{number:012}","value":"{}"}}"#, "eHh4".repeat(VALUE / 3))
}

/// HEAD beside a range read of one key.
pub(super) fn reads(bench: &Bench) -> Option<Value> {
    let etcd = peers::etcd(&bench.dir)?;
    let node = peers::registry(bench, "ron", &roots(1, 1).canonical());
    for (server, path, body) in [(&etcd, "/v3/kv/put", put(0)), (&node, COMMIT, change(0, 1))] {
        let sent = ron_testkit::request(
            &server.http,
            "POST",
            path,
            &[("Content-Type", "application/json")],
            body.as_bytes(),
        );
        sent.ok().filter(|answer| answer.status < 300)?;
    }
    let range = "wrk.method = \"POST\"\nwrk.body = '{\"key\":\"000000000000\"}'\n";
    let asked = [(&etcd, "/v3/kv/range", range), (&node, "/registry/head", "")];
    let mut runs = [Vec::new(), Vec::new()];
    for _ in 0..bench.rounds {
        for ((server, path, script), runs) in asked.iter().zip(&mut runs) {
            let client = Client::Wrk { connections: 64, path, script };
            runs.push(load::measure(&bench.dir, server, client, bench.seconds)?);
        }
    }
    let [of_etcd, of_ron] = runs.map(|runs| Figures::median(&runs));
    let mut rows = vec![table::row(&["", "reads/s", "p50 us", "p99 us", "per CPU-second", "to etcd"])];
    let per = |figures: &Figures| 1e6 / figures.cpu();
    for (name, figures) in [("etcd range", &of_etcd), ("ron head", &of_ron)] {
        rows.push(vec![
            name.to_owned(),
            format!("{:.0}", figures.rate),
            format!("{:.0}", figures.p50),
            format!("{:.0}", figures.p99),
            format!("{:.0}", per(figures)),
            format!("{:.2}", per(figures) / per(&of_etcd)),
        ]);
    }
    table::print("reads: 64 connections (goal: >= 5 x etcd per CPU-second)", &rows);
    Some(json!({"ron": per(&of_ron), "etcd": per(&of_etcd), "ratio": per(&of_ron) / per(&of_etcd)}))
}

/// How soon a thousand readers of the stream have what was committed.
pub(super) fn streams(bench: &Bench) -> Option<Value> {
    let node = peers::registry(bench, "ron", &roots(1, 1).canonical());
    let seen: Arc<Mutex<Vec<(u64, Instant)>>> = Arc::default();
    let mut readers = Vec::new();
    for _ in 0..STREAMS {
        let mut stream = TcpStream::connect(&node.http).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
        stream.write_all(b"GET /registry/stream HTTP/1.1\r\nHost: bench\r\n\r\n").ok()?;
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).ok().filter(|_| line.contains(" 200 "))?;
        let seen = seen.clone();
        let read = move || {
            let mut own = Vec::new();
            for line in stream.lines().map_while(Result::ok) {
                let id = line.strip_prefix("id:").and_then(|id| id.trim().split('-').next()?.parse().ok());
                own.extend(id.map(|version: u64| (version, Instant::now())));
                if id == Some(UPDATES) {
                    break;
                }
            }
            seen.lock().unwrap_or_else(PoisonError::into_inner).append(&mut own);
        };
        readers.push(std::thread::Builder::new().stack_size(64 << 10).spawn(read).ok()?);
    }
    let mut client = ron_testkit::Client::connect(&node.http).ok()?;
    let (before, begun, mut committed) = (Cpu::of(node.pid), Instant::now(), Vec::new());
    for number in 1..=UPDATES {
        let body = change(number, 1);
        let json = [("Content-Type", "application/json")];
        client.request("POST", COMMIT, &json, body.as_bytes()).ok().filter(|answer| answer.status == 201)?;
        committed.push(Instant::now());
        std::thread::sleep(Duration::from_millis(100));
    }
    readers.into_iter().for_each(|reader| drop(reader.join()));
    let seen = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
    let delay = |(version, at): &(u64, Instant)| {
        Some(at.saturating_duration_since(*committed.get(usize::try_from(*version).ok()?.checked_sub(1)?)?))
    };
    let mut delays: Vec<Duration> = seen.iter().filter_map(delay).collect();
    let missed = STREAMS * UPDATES as usize - delays.len();
    let mut at = |share| percentile(&mut delays, share).as_secs_f64() * 1e3;
    let (p50, p95) = (at(0.5), at(0.95));
    let cpu = Cpu::of(node.pid).since(before).total() / begun.elapsed().as_secs_f64();
    let mut rows = vec![table::row(&["readers", "updates", "missed", "p50 ms", "p95 ms", "core used"])];
    rows.push(vec![
        STREAMS.to_string(),
        UPDATES.to_string(),
        missed.to_string(),
        format!("{p50:.1}"),
        format!("{p95:.1}"),
        format!("{cpu:.2}"),
    ]);
    table::print(
        "streams: from the commit's answer to each reader of the stream (goal: p95 <= 200 ms)",
        &rows,
    );
    Some(json!({"readers": STREAMS, "missed": missed, "p50_ms": p50, "p95_ms": p95}))
}

/// Whole logs verified, without signatures and with them.
pub(super) fn verify(_: &Bench) -> Option<Value> {
    let run = ["run", "--release", "-q", "-p", "ron-log", "--example", "verify_speed"];
    let output = std::process::Command::new("cargo").args(run).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let rate = |name: &str| -> Option<f64> {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split(": ").nth(1)?.split(' ').next()?.parse().ok()
    };
    let (without, with) = (rate("Trust")?, rate("Check")?);
    let mut rows = vec![table::row(&["signatures", "entries/s of one core"])];
    rows.push(vec!["not checked".to_owned(), format!("{without:.0}")]);
    rows.push(vec!["checked, 2 of 3".to_owned(), format!("{with:.0}")]);
    table::print("verify: a whole log (goal: >= 200000 without signatures)", &rows);
    Some(json!({"without_signatures": without, "with_signatures": with}))
}
