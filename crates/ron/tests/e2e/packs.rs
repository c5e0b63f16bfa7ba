//! Packs over HTTP: every tile as the pack has it, whatever happens to the file.

use crate::browser::Browser;
use crate::edge::config;
use ron_testkit::{Answer, Client, Node, get, request, ron};
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use svc_edge::pack::header::Header;
use svc_edge::pack::sample::Sample;
use svc_edge::pack::{Compression, TileCoord};
use tempfile::TempDir;

/// No limit on the rate: tests ask for every tile. And patience: they run beside each other.
const FAST: &str = "[edge.ingress]\nrps_limit = 0\ntimeout = \"60s\"\n";

/// Writes a pack under a name, in one step.
pub(crate) fn write(dir: &Path, name: &str, sample: &Sample) -> PathBuf {
    let path = dir.join(name);
    let partial = dir.join(format!("{name}.part"));
    let spill = || tempfile::tempfile().unwrap();
    let mut out = std::io::BufWriter::new(File::create(&partial).unwrap());
    sample.write(spill(), spill(), &mut out).unwrap();
    out.into_inner().unwrap();
    std::fs::rename(partial, &path).unwrap();
    path
}

pub(crate) fn start(dir: TempDir, text: &str) -> Node {
    std::fs::write(dir.path().join("ron.toml"), text).unwrap();
    Node::spawn(dir, &["run", "edge", "--config", "ron.toml"], &[])
}

/// The tables of packs of these names and files.
fn packs(packs: &[(&str, &str, &str)]) -> String {
    let one = |(name, path, b3): &(&str, &str, &str)| {
        format!("[[edge.packs]]\nname = \"{name}\"\npath = \"{path}\"\nb3 = \"{b3}\"\n")
    };
    FAST.to_owned() + &packs.iter().map(one).collect::<String>()
}

fn edge(node: &Node) -> String {
    node.address("edge", "http")
}

fn ask(node: &Node, path: &str, headers: &[(&str, &str)]) -> Answer {
    request(&edge(node), "GET", path, headers, b"").unwrap()
}

fn b3(bytes: &[u8]) -> String {
    format!("b3:{}", blake3::hash(bytes).to_hex())
}

/// What the catalogue says of a pack.
fn listed(node: &Node, name: &str) -> Value {
    let catalogue = get(&edge(node), "/edge/packs").json();
    let packs = catalogue["packs"].as_array().unwrap();
    packs.iter().find(|pack| pack["name"] == name).cloned().unwrap_or_default()
}

fn path(pack: &str, coord: TileCoord) -> String {
    format!("/edge/packs/{pack}/{}/{}/{}", coord.z(), coord.x(), coord.y())
}

#[test]
fn every_tile_is_served_as_it_is_stored_or_decoded_for_who_cannot() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample { max_zoom: 3, gap_percent: 30, ..Sample::default() };
    write(dir.path(), "a.pmtiles", &sample);
    let node = start(dir, &config("", &packs(&[("a", "a.pmtiles", "")])));
    let mut client = Client::connect(&edge(&node)).unwrap();
    let (mut tiles, mut gaps) = (0, 0);
    // The first tile that there is says where the zooms begin.
    let first = sample.coords().find(|coord| sample.tile(*coord).is_some()).unwrap();
    for coord in sample.coords().filter(|coord| coord.z() >= first.z()) {
        let plain = client.request("GET", &path("a", coord), &[("Accept-Encoding", "br")], b"").unwrap();
        let Some(tile) = sample.tile(coord) else {
            assert_eq!((plain.status, plain.body.len()), (204, 0), "{coord}");
            assert_eq!(plain.header("cache-control"), Some("no-cache"));
            gaps += 1;
            continue;
        };
        tiles += 1;
        assert_eq!((plain.status, &plain.body), (200, &tile), "{coord}");
        assert_eq!((plain.header("content-encoding"), plain.header("vary")), (None, Some("Accept-Encoding")));
        assert_eq!(plain.header("content-type"), Some("application/vnd.mapbox-vector-tile"));
        let stored = client.request("GET", &path("a", coord), &[("Accept-Encoding", "gzip")], b"").unwrap();
        assert_eq!((stored.status, stored.header("content-encoding")), (200, Some("gzip")));
        assert_eq!(stored.body, Compression::Gzip.encode(&tile).unwrap());
        for answer in [&plain, &stored] {
            let tag = format!("\"{}\"", b3(&answer.body));
            assert_eq!(answer.header("etag"), Some(tag.as_str()));
            assert_eq!(answer.header("cache-status"), Some("ron-edge; hit"));
            assert!(answer.header("repr-digest").unwrap().starts_with("sha-256=:"));
        }
        // Who does not say may have what is stored.
        let unsaid = client.request("GET", &path("a", coord), &[], b"").unwrap();
        assert_eq!((unsaid.header("content-encoding"), &unsaid.body), (Some("gzip"), &stored.body));
    }
    assert!(tiles > 20 && gaps > 3, "{tiles} tiles, {gaps} gaps");
    assert!(node.metric("edge_pack_cache_bytes{kind=\"tiles\"}") > 1000.0);
    assert_eq!(node.metric("edge_packs{state=\"serving\"}"), 1.0);
}

#[test]
fn a_tile_has_conditions_ranges_a_head_and_one_path() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "a.pmtiles", &Sample { gap_percent: 0, ..Sample::default() });
    let node = start(dir, &config("", &packs(&[("a", "a.pmtiles", "")])));
    let tile = ask(&node, "/edge/packs/a/0/0/0.mvt", &[]);
    let tag = tile.header("etag").unwrap().to_owned();
    assert_eq!((tile.status, tile.header("cache-control")), (200, Some("no-cache")));
    let again = |tag: &str| ask(&node, "/edge/packs/a/0/0/0.pbf", &[("If-None-Match", tag)]);
    for tag in [&tag, &format!("W/{tag}"), "*"] {
        let kept = again(tag);
        assert_eq!(
            (kept.status, kept.body.len(), kept.header("etag")),
            (304, 0, Some(tile.header("etag").unwrap()))
        );
    }
    assert_eq!(again("\"b3:other\"").status, 200);
    // The tag of the stored tile is not that of the decoded one.
    let decoded =
        ask(&node, "/edge/packs/a/0/0/0", &[("Accept-Encoding", "identity"), ("If-None-Match", &tag)]);
    assert_eq!(decoded.status, 200);
    let failed = ask(&node, "/edge/packs/a/0/0/0", &[("If-Match", "\"b3:other\"")]);
    assert_eq!((failed.status, failed.reason()), (412, "precondition"));
    let part = ask(&node, "/edge/packs/a/0/0/0", &[("Range", "bytes=2-5")]);
    assert_eq!((part.status, &part.body[..]), (206, &tile.body[2..6]));
    let beyond = ask(&node, "/edge/packs/a/0/0/0", &[("Range", "bytes=99999999-")]);
    assert_eq!((beyond.status, beyond.reason()), (416, "invalid_range"));
    let none = ask(&node, "/edge/packs/a/0/0/0", &[("Accept-Encoding", "identity;q=0, br")]);
    assert_eq!((none.status, none.reason()), (406, "not_acceptable"));
    let head = request(&edge(&node), "HEAD", "/edge/packs/a/0/0/0", &[], b"").unwrap();
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!(head.header("content-length"), Some(tile.body.len().to_string().as_str()));
    for nothing in
        ["a/0/0/0.png", "a/6/0/0", "a/2/4/0", "a/2/01/0", "b/0/0/0", "a/0/0", "b.json", "a.mbtiles"]
    {
        let answer = ask(&node, &format!("/edge/packs/{nothing}"), &[]);
        assert_eq!((answer.status, answer.reason()), (404, "not_found"), "{nothing}");
    }
    let written = request(&edge(&node), "PUT", "/edge/packs/a/0/0/0", &[], b"x").unwrap();
    assert_eq!((written.status, written.header("allow")), (405, Some("GET, HEAD, OPTIONS")));
}

#[test]
fn clients_are_told_of_the_pack_and_can_read_the_archive_itself() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "a.pmtiles", &Sample::default());
    let bytes = std::fs::read(file).unwrap();
    let node = start(dir, &config("", &packs(&[("a", "a.pmtiles", "")])));
    let about = ask(&node, "/edge/packs/a.json", &[]);
    assert_eq!((about.status, about.header("content-type")), (200, Some("application/json")));
    let about = about.json();
    let generation = about["generation"].as_str().unwrap();
    // The host that the client named.
    let url = format!("http://test/edge/packs/a/{{z}}/{{x}}/{{y}}.mvt?v={generation}");
    assert_eq!((&about["tilejson"], &about["tiles"][0]), (&"3.0.0".into(), &url.into()));
    assert_eq!((&about["maxzoom"], &about["vector_layers"][0]["id"]), (&5.into(), &"land".into()));
    let forever = ask(&node, &format!("/edge/packs/a/0/0/0.mvt?v={generation}"), &[]);
    assert!(forever.header("cache-control").unwrap().contains("immutable"));
    let other = ask(&node, "/edge/packs/a/0/0/0.mvt?v=other", &[]);
    assert_eq!(other.header("cache-control"), Some("no-cache"), "that generation is not this one");
    // What is wrong with a request is not good for ever.
    for (field, value, status) in [
        ("Accept-Encoding", "identity;q=0, br", 406),
        ("If-Match", "\"other\"", 412),
        ("Range", "bytes=9999999-", 416),
    ] {
        let refused = ask(&node, &format!("/edge/packs/a/0/0/0.mvt?v={generation}"), &[(field, value)]);
        assert_eq!((refused.status, refused.header("cache-control")), (status, None));
    }
    // What is written once for a tile is what is put together for a HEAD.
    for query in ["", &format!("?v={generation}")] {
        let fields = |method: &str| {
            let path = format!("/edge/packs/a/0/0/0.mvt{query}");
            let answer =
                request(&edge(&node), method, &path, &[("Origin", "https://other.test")], b"").unwrap();
            let mut fields = answer.headers;
            fields.retain(|(name, _)| !["date", "x-corr-id"].contains(&name.as_str()));
            fields.sort();
            fields
        };
        assert!(fields("GET").len() > 10, "{:?}", fields("GET"));
        assert_eq!(fields("GET"), fields("HEAD"), "{query}");
    }
    node.eventually("the pack is checked", |node| listed(node, "a")["verified"] == true);
    let entry = listed(&node, "a");
    assert_eq!((&entry["state"], &entry["b3"]), (&"serving".into(), &b3(&bytes).into()));
    assert_eq!((&entry["size"], &entry["format"]), (&bytes.len().into(), &"pmtiles".into()));
    let whole = ask(&node, "/edge/packs/a.pmtiles", &[]);
    assert_eq!((whole.status, whole.header("content-type")), (200, Some("application/vnd.pmtiles")));
    assert!(whole.body == bytes);
    assert_eq!(whole.header("etag"), Some(format!("\"{}\"", b3(&bytes)).as_str()));
    let part = ask(&node, "/edge/packs/a.pmtiles", &[("Range", "bytes=0-126")]);
    assert_eq!((part.status, &part.body[..]), (206, &bytes[..127]));
    let several = ask(&node, "/edge/packs/a.pmtiles", &[("Range", "bytes=0-6,1000-1009")]);
    assert_eq!(several.status, 206);
    assert!(several.body.windows(10).any(|window| window == &bytes[1000..1010]));
    let kept = ask(&node, "/edge/packs/a.pmtiles", &[("If-None-Match", &format!("\"{}\"", b3(&bytes)))]);
    assert_eq!(kept.status, 304);
}

#[test]
fn a_pack_that_is_replaced_changes_for_new_requests_only() {
    let dir = tempfile::tempdir().unwrap();
    let old = Sample { max_zoom: 2, gap_percent: 0, ..Sample::default() };
    let new = Sample { seed: 2, ..old };
    let file = write(dir.path(), "a.pmtiles", &old);
    // More than the buffers between two ends hold: most of it is still to be read when the file is replaced.
    File::options().write(true).open(&file).unwrap().set_len(48 << 20).unwrap();
    let before = std::fs::read(&file).unwrap();
    let node = start(dir, &config("", &packs(&[("a", "a.pmtiles", "")])));
    let generation = listed(&node, "a")["generation"].clone();
    let mut slow = Client::connect(&edge(&node)).unwrap();
    slow.send(b"GET /edge/packs/a.pmtiles HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let first = slow.read_exact(64 << 10).unwrap();
    write(node.dir.path(), "a.pmtiles", &new);
    node.eventually("the new file is served", |node| listed(node, "a")["generation"] != generation);
    let coord = TileCoord::new(2, 1, 1).unwrap();
    let tile = ask(&node, &path("a", coord), &[("Accept-Encoding", "identity")]);
    assert_eq!(tile.body, new.tile(coord).unwrap());
    let head = first.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
    let rest = slow.read_exact(before.len() - (first.len() - head)).unwrap();
    assert!(first[head..] == before[..first.len() - head] && rest == before[first.len() - head..]);
    node.write_config(&config("", &packs(&[("b", "a.pmtiles", "")])));
    node.eventually("the pack has another name", |node| listed(node, "b")["state"] == "serving");
    assert_eq!(ask(&node, &path("a", coord), &[]).status, 404);
}

#[test]
fn a_bad_pack_is_refused_and_the_others_stay() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample { max_zoom: 2, gap_percent: 0, ..Sample::default() };
    write(dir.path(), "good.pmtiles", &sample);
    std::fs::write(dir.path().join("bad.pmtiles"), "no pack at all").unwrap();
    let text =
        packs(&[("good", "good.pmtiles", ""), ("bad", "bad.pmtiles", ""), ("gone", "gone.pmtiles", "")]);
    let node = start(dir, &config("", &text));
    assert_eq!(ask(&node, "/edge/packs/good/0/0/0", &[]).status, 200);
    for name in ["bad", "gone"] {
        let answer = ask(&node, &format!("/edge/packs/{name}/0/0/0"), &[]);
        assert_eq!((answer.status, answer.reason()), (502, "pack_invalid"), "{name}");
    }
    assert_eq!(node.metric("edge_rejects_total{reason=\"pack_invalid\"}"), 2.0);
    assert_eq!(node.metric("edge_packs{state=\"refused\"}"), 2.0);
    assert!(listed(&node, "bad")["refused"].as_str().unwrap().contains("neither a PMTiles archive"));
    let ready = get(&node.admin(), "/readyz");
    assert_eq!((ready.status, &ready.json()["missing"][0]), (200, &"edge.packs".into()));
    // One that was good stays when its file turns bad.
    std::fs::write(node.dir.path().join("new"), "no pack either").unwrap();
    std::fs::rename(node.dir.path().join("new"), node.dir.path().join("good.pmtiles")).unwrap();
    node.eventually("it is noticed", |node| listed(node, "good")["state"] == "refused");
    assert_eq!(ask(&node, "/edge/packs/good/2/1/1", &[]).status, 200);
    for name in ["good.pmtiles", "bad.pmtiles", "gone.pmtiles"] {
        write(node.dir.path(), name, &sample);
    }
    node.eventually("all is well", |node| node.metric("edge_packs{state=\"serving\"}") > 2.5);
    assert_eq!(ask(&node, "/edge/packs/gone/0/0/0", &[]).status, 200);
    assert_eq!(get(&node.admin(), "/readyz").json()["degraded"], false);
}

#[test]
fn a_pack_with_a_pin_is_served_if_its_bytes_have_that_address() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample { max_zoom: 2, gap_percent: 0, ..Sample::default() };
    let pin = b3(&std::fs::read(write(dir.path(), "a.pmtiles", &sample)).unwrap());
    write(dir.path(), "b.pmtiles", &Sample { seed: 2, ..sample });
    let pinned = |file: &str| config("", &packs(&[("p", file, &pin)]));
    let mut node = start(dir, &pinned("b.pmtiles"));
    node.eventually("the wrong one is refused", |node| listed(node, "p")["state"] == "refused");
    assert_eq!(ask(&node, "/edge/packs/p/0/0/0", &[]).status, 502);
    assert!(listed(&node, "p")["refused"].as_str().unwrap().contains("not the one that edge.packs names"));
    node.write_config(&pinned("a.pmtiles"));
    node.eventually("the right one is served", |node| listed(node, "p")["state"] == "serving");
    assert_eq!(ask(&node, "/edge/packs/p/0/0/0", &[]).status, 200);
    let entry = listed(&node, "p");
    assert_eq!((&entry["verified"], &entry["b3"]), (&true.into(), &pin.clone().into()));
    // What is known of it is known after a restart, at once.
    assert_eq!(node.stop(), 0);
    let dir = std::mem::replace(&mut node.dir, tempfile::tempdir().unwrap());
    let node = Node::spawn(dir, &["run", "edge", "--config", "ron.toml"], &[]);
    assert_eq!(listed(&node, "p"), entry);
    let trees = std::fs::read_dir(node.dir.path().join("cas/packs")).unwrap().count();
    assert_eq!(trees, 1, "that of the other pack is gone");
}

/// Changes one byte of a file and nothing that can be seen without reading it.
fn flip(file: &Path, at: u64) {
    let modified = std::fs::metadata(file).unwrap().modified().unwrap();
    let open = File::options().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    open.read_exact_at(&mut byte, at).unwrap();
    open.write_all_at(&[byte[0] ^ 4], at).unwrap();
    open.set_modified(modified).unwrap();
}

#[test]
fn a_flipped_bit_does_not_reach_a_client_when_every_read_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample { max_zoom: 4, gap_percent: 0, compression: Compression::None, ..Sample::default() };
    let file = write(dir.path(), "a.pmtiles", &sample);
    let bytes = std::fs::read(&file).unwrap();
    let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
    let cas = "[edge.cas]\nverify = \"always\"\n";
    let node = start(dir, &config("", &(packs(&[("a", "a.pmtiles", "")]) + cas)));
    node.eventually("the pack is checked", |node| listed(node, "a")["verified"] == true);
    flip(&node.dir.path().join("a.pmtiles"), header.tiles.offset);
    // The first tile of a clustered archive comes first.
    let bad = ask(&node, "/edge/packs/a/0/0/0", &[]);
    assert_eq!((bad.status, bad.reason()), (502, "digest_mismatch"));
    assert_eq!(listed(&node, "a")["state"], "damaged");
    assert_eq!(get(&node.admin(), "/readyz").json()["missing"][0], "edge.packs");
    let whole = ask(&node, "/edge/packs/a.pmtiles", &[]);
    assert_eq!((whole.status, whole.reason()), (502, "digest_mismatch"));
}

#[test]
fn a_bad_directory_costs_its_own_tiles_only() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample {
        max_zoom: 8,
        points_max: 1,
        sea_percent: 30,
        compression: Compression::None,
        ..Sample::default()
    };
    let file = write(dir.path(), "a.pmtiles", &sample);
    let bytes = std::fs::read(&file).unwrap();
    let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
    assert!(header.leaves.length > 1000, "there are leaf directories");
    let broken = File::options().write(true).open(&file).unwrap();
    broken.write_all_at(&[0xff; 64], header.leaves.offset).unwrap();
    let node = start(dir, &config("", &packs(&[("a", "a.pmtiles", "")])));
    for tries in 1..=2 {
        let bad = ask(&node, "/edge/packs/a/0/0/0", &[]);
        assert_eq!((bad.status, bad.reason()), (502, "pack_invalid"));
        assert_eq!(node.metric("edge_rejects_total{reason=\"pack_invalid\"}"), f64::from(tries));
    }
    let last = sample.coords().last().unwrap();
    let answer = ask(&node, &path("a", last), &[]);
    assert_eq!(answer.status, if sample.tile(last).is_some() { 200 } else { 204 });
    assert!(node.metric("edge_pack_cache_bytes{kind=\"directories\"}") > 0.0);
}

#[test]
fn a_pack_that_is_cut_short_while_it_is_read_crashes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample { max_zoom: 5, gap_percent: 0, ..Sample::default() };
    let file = write(dir.path(), "a.pmtiles", &sample);
    let node = start(dir, &config("", &packs(&[("a", "a.pmtiles", "")])));
    let asked = AtomicUsize::new(0);
    // Says whether the tile was refused.
    let check = |client: &mut Client, coord: TileCoord| {
        let answer = client.request("GET", &path("a", coord), &[], b"").unwrap();
        asked.fetch_add(1, Ordering::Relaxed);
        if answer.status == 200 {
            assert_eq!(answer.body[..2], [0x1f, 0x8b]);
            return false;
        }
        assert_eq!((answer.status, answer.reason()), (502, "pack_invalid"), "{coord}");
        true
    };
    let connect = || Client::connect(&edge(&node)).unwrap();
    std::thread::scope(|scope| {
        for step in 0..2 {
            let (check, mut client) = (&check, connect());
            let upper = sample.coords().take_while(|coord| coord.z() < 5).skip(step).step_by(2);
            scope.spawn(move || {
                upper.for_each(|coord| {
                    check(&mut client, coord);
                })
            });
        }
        while asked.load(Ordering::Relaxed) < 50 {
            std::thread::yield_now();
        }
        File::options().write(true).open(&file).unwrap().set_len(200).unwrap();
    });
    let mut client = connect();
    let gone = sample.coords().filter(|coord| coord.z() == 5 && check(&mut client, *coord)).count();
    assert!(gone > 100, "the tiles that nobody had asked for are gone, all but the sea: {gone}");
    assert_eq!(get(&node.admin(), "/healthz").status, 200);
    node.eventually("it is told", |node| get(&node.admin(), "/readyz").json()["missing"][0] == "edge.packs");
    assert_eq!(node.metric("tasks_panicked_total{service=\"edge\",kind=\"conn\"}"), 0.0);
}

#[test]
fn an_mbtiles_file_is_converted_and_served_like_the_archive() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample { max_zoom: 3, gap_percent: 20, ..Sample::default() };
    write(dir.path(), "a.pmtiles", &sample);
    let convert = |from: &str, to: &str| ron(&["edge", "pack", "convert", from, to], dir.path());
    let done = convert("a.pmtiles", "b.mbtiles");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert!(String::from_utf8_lossy(&done.stdout).starts_with("b.mbtiles: "));
    assert!(convert("b.mbtiles", "c.pmtiles").status.success());
    assert_eq!(convert("a.pmtiles", "b.mbtiles").status.code(), Some(64), "it exists");
    assert_eq!(convert("a.pmtiles", "d.pmtiles").status.code(), Some(64), "it is one already");
    assert_eq!(convert("ron.toml", "d.pmtiles").status.code(), Some(1));
    let nowhere = convert("a.pmtiles", "none/d.mbtiles");
    assert_eq!(nowhere.status.code(), Some(64));
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("there is no folder none"));
    let left = std::fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.file_name());
    assert!(left.into_iter().all(|name| !name.to_string_lossy().ends_with("part")), "nothing is left behind");
    let text = packs(&[("a", "a.pmtiles", ""), ("b", "b.mbtiles", ""), ("c", "c.pmtiles", "")]);
    let node = start(dir, &config("", &text));
    for coord in sample.coords() {
        let expected = ask(&node, &path("a", coord), &[]);
        for name in ["b", "c"] {
            let answer = ask(&node, &path(name, coord), &[]);
            assert_eq!((answer.status, answer.header("etag")), (expected.status, expected.header("etag")));
            assert!(answer.status == 404 || answer.body == expected.body, "{name} {coord}");
        }
    }
    assert_eq!(ask(&node, "/edge/packs/b.pmtiles", &[]).status, 404, "it is no archive");
    node.eventually("all are checked", |node| {
        ["a", "b", "c"].iter().all(|name| listed(node, name)["verified"] == true)
    });
    let shown = ron(&["edge", "packs", "--config", "ron.toml"], node.dir.path());
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.lines().count() == 4 && shown.contains("mbtiles"), "{shown}");
    let json =
        ron(&["edge", "packs", "--url", &format!("http://{}", edge(&node)), "--json"], node.dir.path());
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["packs"].as_array().unwrap().len(), 3);
}

#[test]
fn verify_says_what_is_wrong_with_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let sample = Sample { max_zoom: 3, gap_percent: 0, ..Sample::default() };
    let file = write(dir.path(), "a.pmtiles", &sample);
    let verify = |args: &[&str]| ron(&[&["edge", "pack", "verify"], args].concat(), dir.path());
    let good = verify(&["a.pmtiles"]);
    let text = String::from_utf8_lossy(&good.stdout).into_owned();
    assert!(good.status.success() && text.starts_with("a.pmtiles: good; 85 tiles"), "{text}");
    let bytes = std::fs::read(&file).unwrap();
    let header = Header::parse(&bytes, bytes.len() as u64).unwrap();
    File::options().write(true).open(&file).unwrap().write_all_at(&[0; 8], header.tiles.offset).unwrap();
    let bad = verify(&["a.pmtiles"]);
    let text = String::from_utf8_lossy(&bad.stdout).into_owned();
    assert_eq!(bad.status.code(), Some(1));
    assert!(text.starts_with("tile 0/0/0: it is not valid in its compression"), "{text}");
    let json: Value = serde_json::from_slice(&verify(&["a.pmtiles", "--json"]).stdout).unwrap();
    assert_eq!((&json["good"], &json["findings"][0]["tile"]), (&false.into(), &"0/0/0".into()));
    let none = verify(&["none.pmtiles"]);
    assert_eq!(none.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&none.stderr).contains("none.pmtiles"));
}

#[test]
fn packs_that_cannot_be_meant_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let text = config("", &packs(&[("a b", "", "b3:12"), ("x", "x.pmtiles", ""), ("x", "x.pmtiles", "")]));
    std::fs::write(dir.path().join("ron.toml"), text).unwrap();
    let checked = ron(&["config", "check", "ron.toml"], dir.path());
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert_eq!(checked.status.code(), Some(64));
    for key in ["edge.packs[0].name", "edge.packs[0].path", "edge.packs[0].b3", "edge.packs[2].name"] {
        assert!(said.contains(key), "{key}: {said}");
    }
}

#[test]
fn without_a_disk_packs_are_checked_all_the_same_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "a.pmtiles", &Sample { max_zoom: 2, ..Sample::default() });
    let memory = "[edge.cas]\nbackend = \"memory\"\n";
    let node = start(dir, &config("", &(packs(&[("a", "a.pmtiles", "")]) + memory)));
    node.eventually("the pack is checked", |node| listed(node, "a")["verified"] == true);
    assert_eq!(ask(&node, "/edge/packs/a/0/0/0", &[]).status, 200);
    assert!(!node.dir.path().join("cas").exists());
}

/// Where the picture is left that the browser took.
const PICTURE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/preview.png");

#[test]
fn chromium_draws_a_pack_on_the_preview_page() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "a.pmtiles", &Sample { gap_percent: 0, sea_percent: 0, ..Sample::default() });
    let node = start(dir, &config("", &packs(&[("a", "a.pmtiles", "")])));
    let page = ask(&node, "/edge/preview/a", &[]);
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert!(page.header("content-security-policy").unwrap().contains("script-src 'self'"));
    assert!(page.text().contains("preview.mjs"), "built without its library: run `cargo xtask assets` first");
    // Where and how near is in the fragment.
    let mut browser = Browser::open(&format!("http://{}/edge/preview/a#3/20/30", edge(&node)));
    let drawn = "(({map, features}) => map === 'failed' || features > 2 ? map : null)(document.documentElement.dataset)";
    let state = browser.wait_for(drawn);
    let note = browser.evaluate("document.getElementById('note').textContent");
    assert_eq!((state.as_str(), note.as_str()), (Some("idle"), Some("")));
    std::fs::write(PICTURE, browser.picture()).unwrap();
    let tiles = "http_requests_total{service=\"edge\",route=\"/edge/packs\",method=\"GET\",status=\"200\"}";
    assert!(node.metric(tiles) > 4.0, "TileJSON and several tiles");
}

#[test]
fn the_preview_of_a_pack_that_is_not_there_is_not_found() {
    let dir = tempfile::tempdir().unwrap();
    let node = start(dir, &config("", FAST));
    for path in ["/edge/preview/a", "/edge/preview/lib/other.mjs", "/edge/preview/lib/none"] {
        assert_eq!(ask(&node, path, &[]).status, 404, "{path}");
    }
    let own = ask(&node, "/edge/preview/lib/preview.mjs", &[("Accept-Encoding", "identity")]);
    assert_eq!((own.status, own.header("content-type")), (200, Some("text/javascript; charset=utf-8")));
    assert!(own.text().contains("import"));
}
