//! Packs on another server: read by ranges over TLS, one version at a time.

use crate::edge::config;
use crate::edge_fill::{certificates, start_tls};
use crate::packs::{start, write};
use ron_testkit::{Answer, Gate, Node, Origin, Script, get, request, ron};
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use svc_edge::pack::TileCoord;
use svc_edge::pack::sample::Sample;

/// A file on a server, as it is now: its bytes and its tag. None: the server fails.
type Served = Arc<Mutex<Option<(Vec<u8>, String)>>>;

pub(crate) fn sample(seed: u64) -> Sample {
    Sample { max_zoom: 6, gap_percent: 20, seed, ..Sample::default() }
}

pub(crate) fn bytes(seed: u64) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::read(write(dir.path(), "a.pmtiles", &sample(seed))).unwrap()
}

fn version(seed: u64) -> Option<(Vec<u8>, String)> {
    Some((bytes(seed), format!("\"v{seed}\"")))
}

/// What a server with ranges and conditions answers.
pub(crate) fn ranged(head: &str, file: &(Vec<u8>, String)) -> Script {
    let field = |name: &str| {
        let line = head.lines().find(|line| line.to_ascii_lowercase().starts_with(name))?;
        Some(line[name.len()..].trim().to_owned())
    };
    let (bytes, tag) = file;
    if field("if-match:").is_some_and(|wanted| wanted != *tag) {
        return Script::Answer(format!("412 Precondition Failed\r\nETag: {tag}\r\n"), Vec::new());
    }
    let range = field("range:").unwrap();
    let (start, end) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
    let (start, end): (usize, usize) = (start.parse().unwrap(), end.parse().unwrap());
    let end = end.min(bytes.len() - 1);
    let head = format!(
        "206 Partial Content\r\nETag: {tag}\r\nContent-Range: bytes {start}-{end}/{}\r\n",
        bytes.len()
    );
    Script::Answer(head, bytes[start..=end].to_vec())
}

/// A server over TLS with one file, and the table of a pack for it.
struct Server {
    origin: Origin,
    served: Served,
    folder: std::path::PathBuf,
    _certs: tempfile::TempDir,
}

impl Server {
    fn start(served: Option<(Vec<u8>, String)>) -> Server {
        let (certs, folder) = certificates();
        let served: Served = Arc::new(Mutex::new(served));
        let seen = served.clone();
        let origin = start_tls(&folder, move |_| {
            let seen = seen.clone();
            Script::by_request(move |head| match &*seen.lock().unwrap() {
                Some(file) => ranged(head, file),
                None => Script::Answer("500 Internal Server Error\r\n".to_owned(), Vec::new()),
            })
        });
        Server { origin, served, folder, _certs: certs }
    }

    fn table(&self, keys: &str) -> String {
        let port = self.origin.address.rsplit(':').next().unwrap();
        format!(
            "[[edge.packs]]\nname = \"far\"\npath = \"https://localhost:{port}/far.pmtiles\"\nca_file = {:?}\n{keys}\n",
            self.folder.join("ca.pem")
        )
    }

    fn node(&self, keys: &str) -> Node {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "near.pmtiles", &sample(9));
        let near = "[[edge.packs]]\nname = \"near\"\npath = \"near.pmtiles\"\n";
        start(dir, &config("", &format!("{PATIENT}{near}{}", self.table(keys))))
    }

    fn set(&self, file: Option<(Vec<u8>, String)>) {
        *self.served.lock().unwrap() = file;
    }
}

pub(crate) const PATIENT: &str =
    "[edge.ingress]\nrps_limit = 0\ntimeout = \"60s\"\n[edge.fill]\ndeadline = \"30s\"\n";
const PRIVATE: &str = "allow_private = true";

pub(crate) fn listed(node: &Node, name: &str) -> Value {
    let catalogue = get(&node.address("edge", "http"), "/edge/packs").json();
    let packs = catalogue["packs"].as_array().unwrap();
    packs.iter().find(|pack| pack["name"] == name).cloned().unwrap_or_default()
}

pub(crate) fn tile(node: &Node, pack: &str, coord: TileCoord) -> Answer {
    let plain = [("Accept-Encoding", "identity")];
    request(&node.address("edge", "http"), "GET", &format!("/edge/packs/{pack}/{coord}"), &plain, b"")
        .unwrap()
}

pub(crate) fn is_serving(node: &Node, name: &str) -> bool {
    listed(node, name)["state"] == "serving"
}

/// A tile of the deepest zoom whose content is its own, one for each number; none of them lies at the front of the file.
pub(crate) fn coord(sample: &Sample, number: usize) -> TileCoord {
    let deepest = || sample.coords().filter(|coord| coord.z() == sample.max_zoom);
    let mut known: HashMap<Vec<u8>, usize> = HashMap::new();
    for tile in deepest().filter_map(|coord| sample.tile(coord)) {
        *known.entry(tile).or_default() += 1;
    }
    let single = |coord: &TileCoord| sample.tile(*coord).is_some_and(|tile| known[&tile] == 1);
    let mut found: Vec<TileCoord> = deepest().filter(single).collect();
    found.sort_by_key(|coord| std::cmp::Reverse(coord.id()));
    found[number]
}

#[test]
fn tiles_come_from_a_server_by_ranges_and_once_for_all_who_want_them() {
    let server = Server::start(version(1));
    let node = server.node(PRIVATE);
    node.eventually("the server is reached", |node| is_serving(node, "far"));
    for at in sample(1).coords().step_by(37) {
        let answer = tile(&node, "far", at);
        match sample(1).tile(at) {
            Some(tile) => assert_eq!((answer.status, answer.body), (200, tile), "{at}"),
            None => assert!(matches!(answer.status, 204 | 404), "{at} {}", answer.status),
        }
    }
    let far = listed(&node, "far");
    assert_eq!((&far["verified"], &far["check"]), (&false.into(), &"structure".into()), "{far}");
    let shown = ron(&["edge", "packs", "--config", "ron.toml"], node.dir.path());
    assert!(String::from_utf8_lossy(&shown.stdout).contains("structure"));
    // Warm: neither directory nor tile is asked for again.
    let at = coord(&sample(1), 3);
    assert_eq!(tile(&node, "far", at).status, 200);
    let asked = server.origin.seen.lock().unwrap().len();
    assert_eq!(tile(&node, "far", at).status, 200);
    assert_eq!(server.origin.seen.lock().unwrap().len(), asked);
    assert!(
        server
            .origin
            .seen
            .lock()
            .unwrap()
            .iter()
            .all(|head| head.to_ascii_lowercase().contains("range: bytes="))
    );
    let whole = request(&node.address("edge", "http"), "GET", "/edge/packs/far.pmtiles", &[], b"").unwrap();
    assert_eq!((whole.status, whole.body), (200, bytes(1)));
}

#[test]
fn those_who_want_the_same_tile_share_one_request_and_not_too_many_wait() {
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    let (_certs, folder) = certificates();
    let (gate, file) = (Gate::default(), Arc::new(version(1).unwrap()));
    let at = coord(&sample(1), 5);
    let held = gate.clone();
    let origin = start_tls(&folder, move |_| {
        let (held, file) = (held.clone(), file.clone());
        Script::by_request(move |head| {
            // Only reads beyond the front of the file wait: leaves and tiles.
            let first = head
                .lines()
                .find_map(|line| line.strip_prefix("range: bytes=")?.split_once('-')?.0.parse().ok());
            if first.is_some_and(|first: usize| first > 20_000) {
                ASKED.fetch_add(1, Ordering::SeqCst);
                held.pass();
            }
            ranged(head, &file)
        })
    });
    let port = origin.address.rsplit(':').next().unwrap();
    let table = format!(
        "{PATIENT}[[edge.packs]]\nname = \"far\"\npath = \"https://localhost:{port}/a\"\nca_file = {:?}\n{PRIVATE}\n",
        folder.join("ca.pem")
    );
    let node = start(tempfile::tempdir().unwrap(), &config("", &table));
    node.eventually("the server is reached", |node| is_serving(node, "far"));
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..70).map(|_| scope.spawn(|| tile(&node, "far", at))).collect();
        let busy = "busy_rejections_total{service=\"edge\",endpoint=\"/edge/packs\",queue=\"\"}";
        node.eventually("all wait or are refused", |node| {
            node.metric("inflight_requests{service=\"edge\"}") == 64.0 && node.metric(busy) == 6.0
        });
        gate.open();
        let (mut good, mut refused) = (0, 0);
        for reader in readers {
            let answer = reader.join().unwrap();
            match answer.status {
                429 => refused += usize::from(answer.reason() == "busy"),
                status => {
                    assert_eq!((status, Some(answer.body)), (200, sample(1).tile(at)));
                    good += 1;
                }
            }
        }
        assert_eq!((good, refused), (64, 6));
    });
    assert!(ASKED.load(Ordering::SeqCst) <= 3, "a leaf and a tile, not one for each: {ASKED:?}");
}

#[test]
fn a_pack_that_is_replaced_on_its_server_is_mounted_anew_and_never_mixed() {
    let server = Server::start(version(1));
    let node = server.node(PRIVATE);
    node.eventually("the server is reached", |node| is_serving(node, "far"));
    let (kept, other) = (coord(&sample(1), 0), coord(&sample(1), 40));
    assert_eq!(tile(&node, "far", kept).body, sample(1).tile(kept).unwrap());
    let before = listed(&node, "far")["generation"].clone();
    server.set(version(2));
    // Whoever notices gets what it asked for from the new one; whatever is sent is all of one version.
    node.eventually("the new version is served", |node| {
        let answer = tile(node, "far", other);
        let known = [sample(1).tile(other), sample(2).tile(other)];
        match answer.status {
            200 => assert!(known.contains(&Some(answer.body.clone()))),
            204 => assert!(known[1].is_none()),
            status => panic!("{status} {}", answer.text()),
        }
        listed(node, "far")["generation"] != before
    });
    for at in [kept, other] {
        let answer = tile(&node, "far", at);
        match sample(2).tile(at) {
            Some(tile) => assert_eq!((answer.status, answer.body), (200, tile)),
            None => assert_eq!(answer.status, 204),
        }
    }
}

#[test]
fn a_server_that_is_down_costs_its_own_pack_only_and_is_tried_again() {
    let server = Server::start(None);
    let node = server.node(PRIVATE);
    node.eventually("it is refused with its reason", |node| {
        listed(node, "far")["refused"].as_str().is_some_and(|why| why.contains("500"))
    });
    assert_eq!(tile(&node, "near", coord(&sample(9), 0)).status, 200);
    let refused = tile(&node, "far", coord(&sample(1), 0));
    assert_eq!((refused.status, refused.reason()), (502, "upstream"));
    assert_eq!(node.metric("edge_packs{state=\"refused\"}"), 1.0);
    server.set(version(1));
    node.eventually("it is tried again", |node| is_serving(node, "far"));
    assert_eq!(tile(&node, "far", coord(&sample(1), 0)).status, 200);
    // What fails later is an answer of its own, and what is in memory is served on.
    server.set(None);
    let failed = tile(&node, "far", coord(&sample(1), 60));
    assert_eq!((failed.status, failed.reason()), (502, "upstream"));
    assert_eq!(tile(&node, "far", coord(&sample(1), 0)).status, 200);
}

#[test]
fn a_server_that_says_nothing_is_given_up_in_time() {
    let (_certs, folder) = certificates();
    let file = Arc::new(version(1).unwrap());
    let origin = start_tls(&folder, move |_| {
        let file = file.clone();
        Script::by_request(move |head| {
            let first = head
                .lines()
                .find_map(|line| line.strip_prefix("range: bytes=")?.split_once('-')?.0.parse().ok());
            if first.is_some_and(|first: usize| first > 20_000) {
                Script::Silence
            } else {
                ranged(head, &file)
            }
        })
    });
    let port = origin.address.rsplit(':').next().unwrap();
    let table = format!(
        "[edge.ingress]\ntimeout = \"60s\"\n[edge.fill]\ndeadline = \"2s\"\n\
         [[edge.packs]]\nname = \"far\"\npath = \"https://localhost:{port}/a\"\nca_file = {:?}\n{PRIVATE}\n",
        folder.join("ca.pem")
    );
    let node = start(tempfile::tempdir().unwrap(), &config("", &table));
    node.eventually("the server is reached", |node| is_serving(node, "far"));
    let late = tile(&node, "far", coord(&sample(1), 0));
    assert_eq!((late.status, late.reason()), (504, "timeout"));
    assert!(node.metric("io_timeouts_total{service=\"edge\",op=\"fill\"}") >= 1.0);
}

#[test]
fn the_rules_for_origins_hold_for_packs_too() {
    let server = Server::start(version(1));
    let node = server.node("");
    node.eventually("its address is refused", |node| {
        listed(node, "far")["refused"].as_str().is_some_and(|why| why.contains("allow_private"))
    });
    assert_eq!(server.origin.seen.lock().unwrap().len(), 0, "nobody was asked");
    let weak = Server::start(Some((bytes(1), "W/\"v\"".to_owned())));
    let node = weak.node(PRIVATE);
    node.eventually("a tag that says little is refused", |node| {
        listed(node, "far")["refused"].as_str().is_some_and(|why| why.contains("ETag"))
    });
    let offline = server.table(PRIVATE);
    let node = start(tempfile::tempdir().unwrap(), &config("mode = \"offline\"", &offline));
    assert!(listed(&node, "far")["refused"].as_str().unwrap().contains("offline"));
    check("path = \"http://a/b\"", "not supported");
    check("path = \"gs://bucket/a.pmtiles\"", "s3://BUCKET/KEY");
    check("path = \"https://user@a/b\"", "user");
    check("path = \"a.pmtiles\"\nallow_private = true", "is a file");
    check(&format!("path = \"https://a/b\"\nb3 = \"b3:{}\"", "0".repeat(64)), "is for a file");
    check("path = \"https://a/b\"\nca_file = \"nowhere.pem\"", "ca_file");
}

/// A pack that the check of the configuration refuses.
pub(crate) fn check(keys: &str, why: &str) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(
        dir.path().join("ron.toml"),
        config("", &format!("[[edge.packs]]\nname = \"far\"\n{keys}\n")),
    )
    .unwrap();
    let output = ron(&["config", "check", "ron.toml"], Path::new(dir.path()));
    let error =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.code() == Some(64) && error.contains(why), "{error}");
}
