//! All services at once: one that is flooded refuses, and takes nothing from the others.

use crate::whole::{Keys, Whole};
use ron_testkit::{Client, Gate, Node, Origin, Script, get};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// How many clients flood the gateway, each asking again as soon as it is answered.
const CLIENTS: usize = 32;
/// How often each of the others is used meanwhile.
const ROUNDS: usize = 15;

/// When it goes, whoever floods stops and whoever is held is let go, so that a test that fails ends too.
struct Flood<'a>(&'a AtomicBool, &'a Gate);

impl Drop for Flood<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        self.1.open();
    }
}

#[test]
fn a_flooded_gateway_takes_nothing_from_registry_edge_and_overlay() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Gate::default();
    let held = gate.clone();
    let upstream = Origin::start(move |_| {
        held.pass();
        Script::Body(b"hi".to_vec())
    });
    let gateway = "max_inflight = 4\nrequest_timeout = \"2m\"\nfair_queue = { work_capacity = 8 }";
    let whole = Whole::make(dir.path(), upstream, &Keys { gateway, ..Keys::default() });
    let node = Node::spawn(dir, &["up", "--config", "ron.toml"], &[]);
    let (answers, stop) = (Mutex::new(BTreeMap::new()), AtomicBool::new(false));
    let flood = |path: String| {
        while !stop.load(Ordering::Relaxed) {
            // A refusal may close the connection; whoever floods comes back on another.
            let mut client = Client::connect(&node.gateway()).unwrap();
            let answer = client.request("GET", &path, &[], b"").unwrap();
            let said = (answer.status, answer.reason().to_owned());
            *answers.lock().unwrap().entry(said).or_insert(0_u32) += 1;
        }
    };
    std::thread::scope(|scope| {
        let _flood = Flood(&stop, &gate);
        let flood = &flood;
        for client in 0..CLIENTS {
            scope.spawn(move || flood(format!("/{client}")));
        }
        let refused = "rejected_total{service=\"gateway\",reason=\"busy\"}";
        node.eventually("the gateway is full and refuses", |node| {
            node.metric(refused) > 50.0 && node.metric("inflight_requests{service=\"gateway\"}") == 4.0
        });
        others_work(&whole, &node);
        let before = node.metric(refused);
        node.eventually("the flood went on meanwhile", |node| node.metric(refused) > before);
        let depth = node.metric("queue_depth{service=\"gateway\",queue=\"work\"}");
        assert!((1.0..=8.0).contains(&depth), "{depth}");
    });
    let answers = answers.into_inner().unwrap();
    assert!(
        answers.keys().all(|(status, reason)| *status == 200 || reason == "busy" || reason == "shed"),
        "{answers:?}"
    );
    // What was admitted was answered: four that ran and eight that waited, at least.
    assert!(answers[&(200, String::new())] >= 12, "{answers:?}");
    for service in ["edge", "registry", "overlay"] {
        for reason in ["busy", "shed", "timeout", "deadline"] {
            let series = format!("rejected_total{{service=\"{service}\",reason=\"{reason}\"}}");
            assert_eq!(node.metric(&series), 0.0, "{series}");
        }
    }
    // It recovers as soon as the flood ends.
    node.eventually("the gateway serves", |node| get(&node.gateway(), "/after").status == 200);
}

/// Commits, hits, fills, uploads and publications, every one of which succeeds.
fn others_work(whole: &Whole, node: &Node) {
    let (edge, registry) = (node.address("edge", "http"), node.address("registry", "http"));
    for round in 0..ROUNDS {
        let committed = whole.commit(&registry, &round.to_string(), &json!(round));
        assert_eq!(committed.status, 201, "{}", committed.text());
        let stored = whole.send(&edge, "PUT", &format!("/edge/assets/{round}"), b"stored");
        assert_eq!(stored.status, 201, "{}", stored.text());
        assert_eq!(get(&edge, &format!("/edge/assets/{round}")).text(), "stored");
        assert_eq!(get(&edge, &format!("/edge/assets/far/{round}")).text(), "from afar");
        let published = node.admin_post("/overlay/topics/news", &round.to_string());
        assert_eq!(published.status, 202, "{}", published.text());
        for service in ["edge", "registry", "overlay"] {
            assert_eq!(get(&node.admin(), &format!("/readyz?service={service}")).status, 200, "{service}");
        }
    }
    assert_eq!(get(&registry, "/registry/head").json()["version"], ROUNDS);
}
