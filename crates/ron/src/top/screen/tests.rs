//! Screens of a made-up node, compared with those in `golden.txt`; `UPDATE_DOCS=1` writes them.

use super::*;
use crate::top::sample::{Behind, Metrics, Sample};
use proptest::prelude::*;
use serde_json::json;

/// A node after so many seconds of some load, its gateway flooded.
fn sample(seconds: u64) -> Sample {
    let n = seconds * 100;
    let page = format!(
        "http_requests_total{{service=\"gateway\",route=\"/api/*\",method=\"GET\",status=\"200\"}} {}\n\
         http_requests_total{{service=\"gateway\",route=\"/api/*\",method=\"GET\",status=\"429\"}} {n}\n\
         http_requests_total{{service=\"registry\",route=\"/registry/head\",method=\"GET\",status=\"200\"}} {seconds}\n\
         rejected_total{{service=\"gateway\",reason=\"busy\"}} {n}\n\
         rejected_total{{service=\"gateway\",reason=\"headers\"}} 3\n\
         rejected_total{{service=\"edge\",reason=\"busy\"}} 0\n\
         request_latency_seconds_bucket{{service=\"gateway\",route=\"/api/*\",method=\"GET\",le=\"0.001\"}} {}\n\
         request_latency_seconds_bucket{{service=\"gateway\",route=\"/api/*\",method=\"GET\",le=\"0.01\"}} {}\n\
         request_latency_seconds_bucket{{service=\"gateway\",route=\"/api/*\",method=\"GET\",le=\"+Inf\"}} {}\n\
         inflight_requests{{service=\"gateway\"}} 512\nconnections_open{{service=\"gateway\"}} 1200\n\
         queue_depth{{service=\"gateway\",queue=\"work\"}} 500\n\
         queue_dropped_total{{service=\"gateway\",queue=\"work\"}} {n}\n\
         fq_served_cost_total{{tenant=\"acme\"}} {}\nfq_served_cost_total{{tenant=\"other\"}} 0\n\
         sessions_active 1\nsession_open_total 2\ngossip_messages_total{{result=\"delivered\"}} {}\n\
         registry_head_version {seconds}\nregistry_checkpoint_age_seconds 4\nregistry_pending_proposals 1\n\
         commit_latency_seconds_count {seconds}\nedge_cache_total{{result=\"hit\"}} {n}\nedge_cas_bytes 123456789\n",
        n * 9,
        n * 8,
        n * 10,
        n * 10,
        n * 4096,
        seconds * 5,
    );
    let channel = |service: &str, name: &str, depth: u64| {
        json!({"service": service, "name": name, "kind": "mpsc", "capacity": 512, "policy": "reject_new",
            "instances": 1, "depth": depth, "dropped": 0})
    };
    let task = |kind: &str, state: &str, restarts: u64, exit: Option<&str>| json!({"service": "gateway", "kind": kind, "index": 0, "state": state, "restarts": restarts, "last_exit": exit});
    Sample {
        at: Duration::from_secs(seconds),
        metrics: Metrics::parse(&page),
        ready: json!({"ready": false, "degraded": true, "missing": ["gateway.overload"], "services":
            {"gateway": "degraded", "edge": "ready", "overlay": "ready", "registry": "ready"}}),
        version: json!({"version": "0.1.0"}),
        channels: json!({"channels": [channel("edge", "work", 0), channel("gateway", "work", 500),
            channel("registry", "proposals", 100)]}),
        tasks: json!({"tasks": [task("listener", "running", 0, None),
            task("worker", "backoff", 2, Some("panicked: \u{1b}[2J"))]}),
        gateway: Behind::Said(json!({
            "tenants": [{"id": "acme", "class": "authed", "quantum": 4, "queued": 400, "share": 256},
                {"id": "other", "class": "anon", "quantum": 1, "queued": 100, "share": 256}],
            "upstreams": [{"name": "api", "breaker": "open", "inflight": 250, "max_inflight": 256,
                "servers": [{"healthy": true}, {"healthy": false}]}],
        })),
        overlay: Behind::Said(
            json!({"peers": [{"node": "ed25519:xcjHJ8_BFHkoYfLEXGMEKa4WKoYJ9zOJGSFKTDZMLMs",
            "address": "10.0.0.7:9443", "state": "open", "direction": "out", "rtt_us": 850, "queued_frames": 3}]}),
        ),
        head: Some(json!({"hash": format!("b3:{}", "ab".repeat(32)), "checkpoint": {"size": seconds + 1}})),
    }
}

fn model() -> Model {
    Model::of(&sample(12), Some(&sample(10)))
}

fn bar() -> Bar<'static> {
    Bar { node: "127.0.0.1:9600", interval: Duration::from_secs(1), silent: None }
}

fn text(lines: &[Line]) -> String {
    lines.iter().map(|line| line.text.clone() + "\n").collect()
}

#[test]
fn the_screens_are_those_agreed_on() {
    let (model, mut out) = (model(), String::new());
    for (page, ..) in PAGES {
        let view = View { page, ..View::new(80, 24) };
        out += &text(&screen(Known::Shown(&model), &view, &bar()));
    }
    let help = View { help: true, ..View::new(80, 24) };
    out += &text(&screen(Known::Shown(&model), &help, &bar()));
    let error = "no node answers at 127.0.0.1:9600 (known from --url): start it with `ron up`, or name another with --url or --config: Connection refused (os error 111)";
    out += &text(&screen(Known::Lost(error), &View::new(80, 24), &bar()));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/top/screen/golden.txt");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &out).unwrap();
    }
    assert_eq!(out, std::fs::read_to_string(path).unwrap_or_default());
}

#[test]
fn rates_are_differences_and_a_counter_that_fell_began_anew() {
    let after = |after: Sample, before: Sample| Model::of(&after, Some(&before)).services.remove(1);
    // By name: the gateway is the second.
    let row = after(sample(12), sample(10));
    assert_eq!(
        (row.name.as_str(), row.requests.per_second, row.requests.total),
        ("gateway", Some(1000.0), 12_000.0)
    );
    assert_eq!(row.refused, Rate { total: 1203.0, per_second: Some(100.0) });
    let restarted = Sample { at: Duration::from_secs(14), ..sample(2) };
    // Its 2000 requests came within the four seconds; three refusals were there before and after.
    let row = after(restarted, sample(10));
    assert_eq!((row.requests.per_second, row.refused.per_second), (Some(500.0), Some(50.0)));
    let first = Model::of(&sample(3), None);
    assert_eq!(first.services[1].requests, Rate { total: 3000.0, per_second: None });
    // No time has passed: there is no rate, and nothing is divided by it.
    assert_eq!(after(sample(3), sample(3)).requests.per_second, None);
}

#[test]
fn quantiles_lie_within_the_bucket_they_fall_into() {
    let row = &model().services[1];
    let (p50, p99) = (row.p50.unwrap(), row.p99.unwrap());
    assert!(0.0 < p50 && p50 <= 0.001, "{p50}");
    assert!(0.001 < p99 && p99 <= 0.01, "{p99}");
    assert_eq!(model().services[0].p50, None);
}

#[test]
fn keys_lead_to_pages_rows_and_one_service() {
    let model = model();
    let known = Known::Shown(&model);
    let mut view = View::new(80, 24);
    let shown = |view: &View| text(&screen(known, view, &bar()));
    view.press(Key::Down, known);
    assert!(shown(&view).contains("\n>gateway "));
    view.press(Key::Enter, known);
    assert!(shown(&view).contains("QUEUES") && shown(&view).contains("only gateway"));
    assert!(shown(&view).contains("gateway  work") && !shown(&view).contains("proposals"));
    view.press(Key::Char('4'), known);
    assert!(shown(&view).contains("REFUSED") && shown(&view).contains("only gateway"));
    view.press(Key::Escape, known);
    assert!(!shown(&view).contains("only gateway"));
    view.press(Key::Left, known);
    assert_eq!(view.page, Page::Tenants);
    for _ in 0..50 {
        view.press(Key::Down, known);
    }
    assert!(shown(&view).contains("\n>api "), "{}", shown(&view));
    assert!(!shown(&view).contains("Ctrl-L"));
    view.press(Key::Char('?'), known);
    assert!(shown(&view).contains("Ctrl-L"));
    assert_eq!((view.press(Key::Escape, known), view.page), (Wish::Nothing, Page::Tenants));
    assert!(!shown(&view).contains("Ctrl-L"));
    assert_eq!(view.press(Key::Char('q'), known), Wish::Quit);
    assert_eq!(view.press(Key::Interrupt, Known::Waiting), Wish::Quit);
}

#[test]
fn without_the_token_the_page_says_what_is_wanted() {
    let sample = Sample { gateway: Behind::of(401, b"{}"), ..sample(1) };
    let model = Model::of(&sample, None);
    let view = View { page: Page::Tenants, ..View::new(100, 24) };
    assert!(text(&screen(Known::Shown(&model), &view, &bar())).contains("The admin token is wanted"));
    assert_eq!(model.to_json()["token_wanted"], true);
}

fn any_key() -> impl Strategy<Value = Key> {
    prop_oneof![
        Just(Key::Up),
        Just(Key::Down),
        Just(Key::Left),
        Just(Key::Right),
        Just(Key::PageUp),
        Just(Key::PageDown),
        Just(Key::Home),
        Just(Key::End),
        Just(Key::Tab),
        Just(Key::Enter),
        Just(Key::Escape),
        proptest::char::range(' ', '~').prop_map(Key::Char),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_screen_of_any_size_is_filled_and_never_overfilled(
        width in 0_usize..200, height in 0_usize..60, keys in proptest::collection::vec(any_key(), 0..40),
    ) {
        let model = model();
        let known = Known::Shown(&model);
        let mut view = View::new(width, height);
        for key in keys {
            view.press(key, known);
        }
        for known in [known, Known::Waiting, Known::Lost("a b\u{1b}c")] {
            let lines = screen(known, &view, &bar());
            prop_assert_eq!(lines.len(), height);
            for line in lines {
                prop_assert!(line.text.chars().count() <= width);
                prop_assert!(!line.text.chars().any(char::is_control));
            }
        }
        // The chosen row is on the screen when there is room for one.
        let chosen = screen(known, &view, &bar()).iter().filter(|line| line.style == Style::Chosen).count();
        prop_assert!(chosen <= 1);
        if height > 5 && !view.help && view.page == Page::Queues && view.service.is_none() {
            prop_assert_eq!(chosen, 1);
        }
    }
}
