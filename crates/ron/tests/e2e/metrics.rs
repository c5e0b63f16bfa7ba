//! Every metric of the design exists on a running node, with its labels, and moves when what it counts happens.

use crate::overlay::use_overlay;
use crate::whole::{Keys, Whole};
use ron_testkit::{Client, Gate, Node, Origin, Script, get};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LISTED: &str = include_str!("metrics.txt");

/// What a whole node cannot be made to do from outside, or not so that it can still be read: who moves it instead.
const ELSEWHERE: [(&str, &str, &str); 3] = [
    (
        "tasks_aborted_total",
        "crates/ron-kernel/src/task/tests.rs",
        "fn stragglers_are_named_aborted_and_counted",
    ),
    (
        "storage_backoff_total",
        "crates/svc-registry/src/shared.rs",
        "fn a_read_that_fails_is_tried_again_a_few_times_and_counted",
    ),
    (
        "stream_lagged_total",
        "crates/ron/tests/e2e/registry_service/streams.rs",
        "fn a_reader_that_takes_nothing_for_too_long_is_told_what_it_missed",
    ),
];

/// What has been seen of the node's page of metrics since the start.
#[derive(Default)]
struct Seen {
    first: BTreeMap<String, f64>,
    moved: BTreeSet<String>,
    /// Of each name, the labels of its series.
    labels: BTreeMap<String, BTreeSet<String>>,
    types: BTreeSet<String>,
}

impl Seen {
    fn look(&mut self, page: &str, first: bool) {
        for line in page.lines() {
            if let Some(declared) = line.strip_prefix("# TYPE ") {
                self.types.extend(declared.split(' ').next().map(str::to_owned));
            }
            let Some((series, value)) = line.rsplit_once(' ').filter(|_| !line.starts_with('#')) else {
                continue;
            };
            let Ok(value) = value.parse::<f64>() else { continue };
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            // A histogram moves when something was observed.
            let name = name.strip_suffix("_count").unwrap_or(name);
            let names = labels.split("=\"").map(|part| part.rsplit(['"', ',', '{']).next().unwrap_or(""));
            let count = labels.matches("=\"").count();
            let names: BTreeSet<String> = names.take(count).map(str::to_owned).collect();
            self.labels.entry(name.to_owned()).or_default().extend(names);
            if first {
                self.first.insert(series.to_owned(), value);
            }
            let before = self.first.get(series).copied().unwrap_or(0.0);
            if (value - before).abs() > 1e-9 {
                self.moved.insert(name.to_owned());
            }
        }
    }
}

/// Opens its gate when it goes, so that whoever waits there can end.
struct Opened<'a>(&'a Gate);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// Sets its flag when it goes.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn listed() -> impl Iterator<Item = (&'static str, BTreeSet<String>)> {
    let lines = LISTED.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| {
        let mut words = line.split(' ');
        (words.next().unwrap(), words.map(str::to_owned).collect())
    })
}

const GATEWAY: &str = "max_inflight = 2\nfair_queue = { work_capacity = 4 }\n";
const OVERLAY: &str = "admit = \"any\"\nhandshake_timeout = \"1s\"\nhandshakes_per_ip = 8\n";
const REGISTRY: &str = "channels = { proposals = 64, approvals = 64, committed = 4, events = 1024 }\n";
const REST: &str = "[node]\ndanger_ok = true\ndrain_deadline = \"5s\"\n[overlay.tls]\nmode = \"off\"\n\
    [overlay.peer]\nmax_rps = 0\negress_bytes = \"1200KiB\"\ninflight_frames = 8\n[overlay.timeouts]\nwrite = \"60s\"\n\
    [[gateway.upstreams]]\nname = \"dead\"\nservers = [\"http://127.0.0.1:1\"]\n\
    [[gateway.routes]]\npath = \"/dead\"\nupstream = \"dead\"\n\
    [[gateway.routes]]\npath = \"/mute\"\nupstream = \"o\"\ntimeout = \"300ms\"\n";

#[test]
fn every_metric_of_the_design_exists_with_its_labels_and_moves() {
    let gate = Gate::default();
    let held = gate.clone();
    let upstream = Origin::start(move |path| match path {
        "/held" => {
            held.pass();
            Script::Body(b"hi".to_vec())
        }
        "/mute" | "/silent" => Script::Silence,
        "/big" => Script::Body(vec![b'x'; 16 << 20]),
        _ => Script::Body(b"hi".to_vec()),
    });
    let dir = tempfile::tempdir().unwrap();
    let keys = Keys { gateway: GATEWAY, overlay: OVERLAY, registry: REGISTRY, rest: REST };
    let whole = Whole::make(dir.path(), upstream, &keys);
    let mut node = Node::spawn(dir, &["up", "--config", "ron.toml"], &[]);
    let (admin, seen, stop) = (node.admin(), Mutex::new(Seen::default()), AtomicBool::new(false));
    seen.lock().unwrap().look(&get(&admin, "/metrics").text(), true);
    let moved = |names: &[&str]| {
        let begun = Instant::now();
        while let Some(still) = names.iter().find(|name| !seen.lock().unwrap().moved.contains(**name)) {
            assert!(begun.elapsed() < Duration::from_secs(60), "{still} does not move");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    std::thread::scope(|scope| {
        // Looks all the time, so that what is only so for a while is seen too, until the node is gone.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                if let Ok(page) = ron_testkit::request(&admin, "GET", "/metrics", &[], b"") {
                    seen.lock().unwrap().look(&page.text(), false);
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        // Whatever fails below, the one who looks ends, and so does the test.
        let _ended = Ended(&stop);
        use_gateway(&node, &gate, &moved);
        use_edge(&whole, &node, &moved);
        use_registry(&whole, &node, &moved);
        use_overlay(&node, &moved);
        reload(&node, &moved);
        // A request that does not end holds the drain open, so that it can be looked at.
        let mut slow = Client::connect(&node.gateway()).unwrap();
        slow.send(b"GET /silent HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        node.signal("TERM");
        moved(&["tasks_canceled_total"]);
    });
    assert_eq!(node.wait(), 0);
    judge(&seen.into_inner().unwrap());
}

fn judge(seen: &Seen) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let mut wrong = Vec::new();
    for (name, labels) in listed() {
        if !seen.types.contains(name) {
            wrong.push(format!("{name} is not on the page"));
        } else if let Some((_, file, test)) = ELSEWHERE.iter().find(|(metric, ..)| *metric == name) {
            let text = std::fs::read_to_string(root.join(file)).unwrap();
            assert!(
                text.contains(test) && text.contains(name.trim_end_matches("_total")),
                "{name} in {file}"
            );
        } else if !seen.moved.contains(name) {
            wrong.push(format!("{name} has not moved"));
        } else if !seen.labels[name].is_superset(&labels) {
            wrong.push(format!("{name} has the labels {:?}, not {labels:?}", seen.labels[name]));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn use_gateway(node: &Node, gate: &Gate, moved: &dyn Fn(&[&str])) {
    assert_eq!(get(&node.gateway(), "/").status, 200);
    moved(&["http_requests_total", "request_latency_seconds", "downstream_latency_seconds"]);
    moved(&["fq_served_cost_total", "tasks_spawned_total"]);
    std::thread::scope(|scope| {
        let opened = Opened(gate);
        // Two run, four wait; whoever finds no place is refused, and comes again.
        for _ in 0..12 {
            scope.spawn(|| {
                while get(&node.gateway(), "/held").status != 200 {
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
        }
        moved(&["inflight_requests", "fq_inflight", "fq_queued", "queue_depth"]);
        moved(&["queue_dropped_total", "busy_rejections_total", "rejected_total"]);
        moved(&["gateway_degraded", "ready"]);
        drop(opened);
    });
    moved(&["fq_tokens"]);
    node.eventually("the breaker opens", |node| get(&node.gateway(), "/dead").reason() == "breaker_open");
    moved(&["breaker_state", "backoff_retries_total"]);
    node.eventually("nobody answers", |node| get(&node.gateway(), "/mute").status == 504);
    moved(&["io_timeouts_total"]);
    let mut reads_nothing = Client::connect(&node.gateway()).unwrap();
    reads_nothing.send(b"GET /big HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    moved(&["buffered_bytes"]);
    drop(reads_nothing);
    kill(node, "gateway", "worker");
    moved(&["tasks_panicked_total", "service_restarts_total"]);
}

fn kill(node: &Node, service: &str, kind: &str) {
    let asked = json!({"service": service, "kind": kind, "fraction": 1.0}).to_string();
    assert_eq!(node.admin_post("/debug/tasks/kill", &asked).status, 200);
}

fn use_edge(whole: &Whole, node: &Node, moved: &dyn Fn(&[&str])) {
    let edge = node.address("edge", "http");
    assert_eq!(whole.send(&edge, "PUT", "/edge/assets/a", b"stored").status, 201);
    assert_eq!(get(&edge, "/edge/assets/a").text(), "stored");
    assert_eq!(get(&edge, "/edge/assets/far/a").text(), "from afar");
    assert_eq!(get(&edge, "/edge/assets/nowhere").reason(), "not_allowed");
    moved(&["edge_cas_bytes", "edge_cache_total", "edge_rejects_total"]);
    assert_eq!(node.admin_post("/edge/scrub", "").status, 200);
    moved(&["edge_scrub_ratio"]);
}

fn use_registry(whole: &Whole, node: &Node, moved: &dyn Fn(&[&str])) {
    let registry = node.address("registry", "http");
    let head = get(&registry, "/registry/head").json();
    let commit = |n: usize| {
        let committed = whole.commit(&registry, &n.to_string(), &json!(n));
        assert_eq!(committed.status, 201, "{}", committed.text());
    };
    commit(0);
    moved(&[
        "commit_latency_seconds",
        "commit_batch_size",
        "approval_verify_seconds",
        "registry_updates_total",
    ]);
    moved(&["registry_head_version", "registry_verified_version", "registry_checkpoint_age_seconds"]);
    // What it touches has changed since.
    let late = whole.approved(&head, "0", &json!("late")).to_string();
    let refused = whole.send(&registry, "POST", "/registry/proposals?commit=true", late.as_bytes());
    assert_eq!(refused.reason(), "chain_mismatch");
    moved(&["commit_cas_fail_total"]);
    let head = get(&registry, "/registry/head").json();
    let pending = whole.approved(&head, "pending", &json!(1)).to_string();
    let proposed = whole.send(&registry, "POST", "/registry/proposals", pending.as_bytes());
    assert!(proposed.status < 300, "{}", proposed.text());
    moved(&["registry_pending_proposals"]);
    let mut stream = Client::connect(&registry).unwrap();
    stream.send(b"GET /registry/stream HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    moved(&["stream_clients"]);
    drop(stream);
    // The publisher sleeps through more than its channel holds.
    let stalled =
        node.admin_post("/debug/registry/stall", &json!({"task": "publisher", "for": "2s"}).to_string());
    assert_eq!(stalled.status, 200);
    (1..20).for_each(commit);
    moved(&["bus_lagged_total"]);
    kill(node, "registry", "committer");
    moved(&["registry_recoveries_total"]);
}

fn reload(node: &Node, moved: &dyn Fn(&[&str])) {
    let text = std::fs::read_to_string(node.dir.path().join("ron.toml")).unwrap();
    node.write_config(&text.replace("max_inflight = 2\n", "max_inflight = 3\n"));
    assert_eq!(node.admin_post("/admin/reload", "").status, 200);
    moved(&["config_reload_total", "config_update_total", "registry_reload_success_total"]);
    node.write_config(&text.replace("max_inflight = 2\n", "max_inflight = \"many\"\n"));
    assert_eq!(node.admin_post("/admin/reload", "").status, 422);
    moved(&["registry_reload_fail_total"]);
}
