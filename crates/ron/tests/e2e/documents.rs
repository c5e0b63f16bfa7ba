//! Generated documents are current, and what a machine can judge about the tree is judged.

use ron::documents::{concurrency_page, config_page, operating_page};
use ron_kernel::reason::Reason;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

/// Compares, or with `UPDATE_DOCS=1` (that is `cargo xtask docs`) writes.
fn check(name: &str, text: &str) {
    let path = root().join("docs").join(name);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == text, "docs/{name} is not current: run `cargo xtask docs`");
}

/// Every service there is.
fn whole_node() -> ron_testkit::Node {
    let dir = tempfile::tempdir().unwrap();
    let text = crate::config(
        "http://127.0.0.1:1",
        "",
        "[edge]\nlisten = \"127.0.0.1:0\"\n[overlay]\nlisten = \"127.0.0.1:0\"\n[registry]\nlisten = \"127.0.0.1:0\"\n",
    );
    std::fs::write(dir.path().join("ron.toml"), text).unwrap();
    ron_testkit::Node::spawn(dir, &["up", "--config", "ron.toml"], &[])
}

#[test]
fn the_configuration_page_is_current() {
    check("config.md", &config_page());
}

#[test]
fn the_concurrency_page_is_current() {
    check("concurrency.md", &concurrency_page());
}

/// Fields of the access log that the operating page explains; the access log's own test reads them.
const FIELDS: [&str; 3] = ["queue_ms", "upstream_ms", "total_ms"];

/// Causes that the operating page explains; the registry's and its followers' own tests see them in readiness.
const CAUSES: [&str; 8] = [
    "registry_follow",
    "registry_fork",
    "registry.storage_full",
    "registry.storage_slow",
    "registry.storage_stopped",
    "registry.behind_witness",
    "registry.clock_behind",
    "registry.corrupt_store",
];

#[test]
fn the_operating_page_is_current_and_names_only_metrics_and_keys_that_exist() {
    let written = std::fs::read_to_string(root().join("docs/operating.md")).unwrap();
    let page = operating_page(&written).expect("the page has a place for the table of refusals");
    check("operating.md", &page);
    assert!(!page.contains("see the reason's own words"), "a reason has no advice");
    let keys: Vec<String> =
        ron_kernel::config::KeyDoc::all::<ron::config::Config>().into_iter().map(|key| key.path).collect();
    let node = whole_node();
    ron_testkit::get(&node.gateway(), "/");
    let metrics = ron_testkit::get(&node.admin(), "/metrics").text();
    // A word in backquotes that looks like a key or a metric is one.
    for word in page.split('`').skip(1).step_by(2) {
        let name = word.split(['{', '[', ' ', '(']).find(|part| part.contains('_')).unwrap_or(word);
        let plain = name.bytes().all(|byte| byte.is_ascii_lowercase() || matches!(byte, b'_' | b'.'));
        let known = keys.iter().any(|key| key.ends_with(name)) || metrics.contains(name);
        let said = Reason::ALL.iter().any(|reason| reason.code() == name) || FIELDS.contains(&name);
        let said = said || CAUSES.contains(&name);
        assert!(!plain || !name.contains('_') || known || said, "{name} is neither a key nor a metric");
    }
}

#[test]
fn the_dashboard_asks_only_for_metrics_that_exist() {
    let text = std::fs::read_to_string(root().join("docs/gateway-dashboard.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&text).unwrap();
    let node = whole_node();
    ron_testkit::get(&node.gateway(), "/");
    let page = ron_testkit::get(&node.admin(), "/metrics").text();
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let known: std::collections::HashSet<&str> = types.collect();
    let panels = dashboard["panels"].as_array().unwrap();
    let queries = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let mut asked = std::collections::HashSet::new();
    for query in queries.map(|target| target["expr"].as_str().unwrap()) {
        let names = metrics_of(query);
        assert!(!names.is_empty(), "{query} asks for nothing");
        for name in names {
            assert!(known.contains(name.as_str()), "{name} in {query} is no metric of a node");
            asked.insert(name);
        }
    }
    // What the design wants to be seen of a gateway's concurrency.
    for wanted in [
        "queue_depth",
        "queue_dropped_total",
        "tasks_aborted_total",
        "io_timeouts_total",
        "downstream_latency_seconds",
        "busy_rejections_total",
        "fq_inflight",
        "fq_tokens",
        "rejected_total",
    ] {
        assert!(asked.contains(wanted), "{wanted} is in no panel");
    }
}

/// The names of metrics in a query: `ready` and words with an underscore, outside of labels and groupings.
fn metrics_of(query: &str) -> Vec<String> {
    let mut plain = String::new();
    let mut rest = query.replace(" by (", " {");
    while let Some(open) = rest.find(['{', '[']) {
        plain.push_str(&rest[..open]);
        plain.push(' ');
        let close = rest[open..].find(['}', ']', ')']).map_or(rest.len(), |close| open + close + 1);
        rest = rest[close..].to_owned();
    }
    plain.push_str(&rest);
    let words = plain.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let is_name = |word: &str| word == "ready" || word.contains('_') && word != "histogram_quantile";
    let names = words.filter(|word| is_name(word));
    names.map(|name| name.strip_suffix("_bucket").unwrap_or(name).to_owned()).collect()
}

/// The design documents' channel tables, as ruled; a service's rows are compared once it exists.
/// `access_log` is not among theirs: it came with the log itself.
/// Nor is the edge's `changes`, by which its one writer is told; its `work` comes with live fill.
/// The overlay's `replies`, `gossip_calls` and `deliveries` are how its tasks, users and engine talk.
/// The gateway's `bridge_calls` and `bridge_feed` are how requests reach the overlay of another node.
const CHANNELS: [(&str, &str, &str, usize, &str); 29] = [
    ("edge", "work", "mpsc", 512, "reject_new"),
    ("edge", "changes", "mpsc", 512, "reject_new"),
    ("edge", "events", "broadcast", 1024, "lossy_broadcast"),
    ("edge", "shutdown", "watch", 1, "latest"),
    ("edge", "config", "watch", 1, "latest"),
    ("gateway", "work", "fair", 512, "reject_new"),
    ("gateway", "sched", "mpsc", 512, "reject_new"),
    ("gateway", "access_log", "mpsc", 4096, "reject_new"),
    ("gateway", "bridge_calls", "mpsc", 256, "reject_new"),
    ("gateway", "bridge_feed", "mpsc", 256, "reject_new"),
    ("gateway", "events", "broadcast", 1024, "lossy_broadcast"),
    ("gateway", "shutdown", "watch", 1, "latest"),
    ("gateway", "config", "watch", 1, "latest"),
    ("overlay", "ingress_work", "mpsc", 512, "reject_new"),
    ("overlay", "gossip_ingress", "mpsc", 512, "reject_new"),
    ("overlay", "gossip_egress", "mpsc", 512, "reject_new"),
    ("overlay", "replies", "mpsc", 512, "reject_new"),
    ("overlay", "gossip_calls", "mpsc", 4096, "reject_new"),
    ("overlay", "deliveries", "mpsc", 1024, "drop_oldest"),
    ("overlay", "events", "broadcast", 1024, "lossy_broadcast"),
    ("overlay", "shutdown", "watch", 1, "latest"),
    ("overlay", "config", "mpsc", 16, "collapse"),
    ("registry", "proposals", "mpsc", 512, "reject_new"),
    ("registry", "approvals", "mpsc", 512, "reject_new"),
    ("registry", "committed", "broadcast", 1024, "lossy_broadcast"),
    ("registry", "events", "broadcast", 1024, "lossy_broadcast"),
    ("registry", "shutdown", "watch", 1, "latest"),
    ("registry", "cfg_reload", "mpsc", 16, "collapse"),
    ("registry", "retention_cmd", "mpsc", 8, "skip"),
];

#[test]
fn the_inventory_of_a_running_node_is_what_the_design_and_the_document_say() {
    let node = whole_node();
    let shown = ron_testkit::get(&node.admin(), "/debug/channels").json();
    let rows = shown["channels"].as_array().unwrap();
    let page = concurrency_page();
    for (service, name, kind, capacity, policy) in CHANNELS {
        let row = rows.iter().find(|row| row["service"] == service && row["name"] == name);
        let row = row.unwrap_or_else(|| panic!("{service}.{name} does not run"));
        assert_eq!(
            (&row["kind"], &row["capacity"], &row["policy"]),
            (&kind.into(), &capacity.into(), &policy.into())
        );
        assert!(
            page.contains(&format!("| `{name}` | {kind} | {capacity} | {policy} |")),
            "{name} is not in the document"
        );
    }
    for row in rows.iter().filter(|row| row["service"] != "kernel") {
        let (service, name) = (row["service"].as_str().unwrap(), row["name"].as_str().unwrap());
        assert!(
            CHANNELS.iter().any(|known| known.0 == service && known.1 == name),
            "{service}.{name} is not in the design"
        );
    }
}

#[test]
fn every_documented_key_is_used_by_some_test() {
    let mut files = Vec::new();
    sources(&root().join("crates/ron/tests/e2e"), &mut files);
    let others = files.iter().filter(|path| !path.ends_with("documents.rs"));
    let tests: String = others.map(|path| std::fs::read_to_string(path).unwrap()).collect();
    for key in ron_kernel::config::KeyDoc::all::<ron::config::Config>() {
        let name = key.path.rsplit('.').next().unwrap();
        assert!(tests.contains(name), "no end-to-end test sets {}", key.path);
    }
}

/// Every Rust file of the workspace.
fn sources(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        let name = entry.file_name();
        if path.is_dir() && name != "target" && !name.to_string_lossy().starts_with('.') {
            sources(&path, out);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            out.push(path);
        }
    }
}

#[test]
fn every_file_says_what_it_is_for() {
    let mut files = Vec::new();
    sources(&root(), &mut files);
    assert!(files.len() > 50);
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with("//!") || text.starts_with("#!"),
            "{} does not open with //!",
            path.display()
        );
        assert!(text.lines().count() > 2, "{} is empty", path.display());
    }
}
