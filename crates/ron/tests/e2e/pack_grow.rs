//! `ron edge pack grow`: what an edge has filled so far becomes a pack like any other.

use crate::edge::{Edge, config};
use crate::edge_fill::{certificates, start_tls};
use crate::packs::start;
use ron_testkit::{Node, Script, request, ron};
use serde_json::Value;
use std::path::Path;
use svc_edge::pack::TileCoord;
use svc_edge::pack::grow::tile_of;
use svc_edge::pack::sample::Sample;

/// A sample whose tiles repeat, so that the archive has runs and contents that several tiles share.
fn sample() -> Sample {
    Sample { max_zoom: 4, gap_percent: 20, ..Sample::default() }
}

fn grow(dir: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let output = ron(&[&["edge", "pack", "grow", "--config", "ron.toml"], args].concat(), dir);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn tiles_that_were_filled_become_an_archive_that_serves_the_same_bytes() {
    let (_certs, folder) = certificates();
    let origin = start_tls(&folder, |path| match tile_of(path).map(|(coord, _)| sample().tile(coord)) {
        Some(Some(tile)) => Script::Answer(
            "200 OK\r\nContent-Type: application/x-protobuf\r\nCache-Control: max-age=600\r\n".to_owned(),
            tile,
        ),
        _ if path.ends_with("style.json") => Script::Body(b"{}".to_vec()),
        _ => Script::Answer("404 Not Found\r\n".to_owned(), Vec::new()),
    });
    let port = origin.address.rsplit(':').next().unwrap();
    let tables = format!(
        "[edge.ingress]\nrps_limit = 0\ntimeout = \"60s\"\n[edge.fill]\ndeadline = \"30s\"\n\
         [[edge.origins]]\nprefix = \"/tiles/\"\nurl = \"https://localhost:{port}/v1/\"\nca_file = {:?}\n\
         allow_private = true\n",
        folder.join("ca.pem")
    );
    let edge = Edge::of(Node::start(&["edge"], &config("", &tables)));
    let dir = edge.node.dir.path().to_owned();
    let (code, _, error) = grow(&dir, &["--prefix", "/tiles/", "--out", "a.pmtiles"]);
    assert!(code == Some(1) && error.contains("no tile is stored under /tiles/"), "{error}");
    let filled = |coord: &TileCoord| coord.x() % 3 != 1;
    let mut tiles = 0;
    for coord in sample().coords().filter(filled) {
        let answer = edge.get(&format!("/edge/assets/tiles/{coord}.pbf"), &[]);
        assert_eq!(answer.status, if sample().tile(coord).is_some() { 200 } else { 404 }, "{coord}");
        tiles += u64::from(answer.status == 200);
    }
    assert_eq!(edge.get("/edge/assets/tiles/style.json", &[]).status, 200);
    let (code, text, error) = grow(&dir, &["--prefix", "/tiles/", "--out", "a.pmtiles", "--json"]);
    assert_eq!(code, Some(0), "{error}");
    let grown: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((grown["tiles"].as_u64(), &grown["type"]), (Some(tiles), &"mvt".into()), "{grown}");
    assert_eq!((grown["skipped"].as_u64(), grown["maxzoom"].as_u64()), (Some(1), Some(4)), "{grown}");
    assert!(ron(&["edge", "pack", "verify", "a.pmtiles"], &dir).status.success());
    let left = std::fs::read_dir(&dir).unwrap().flatten().map(|entry| entry.file_name());
    assert!(left.into_iter().all(|name| !name.to_string_lossy().ends_with("part")), "nothing is left behind");
    assert_eq!(grow(&dir, &["--prefix", "/tiles/", "--out", "a.pmtiles"]).0, Some(64), "it exists");

    let other = tempfile::tempdir().unwrap();
    std::fs::copy(dir.join("a.pmtiles"), other.path().join("a.pmtiles")).unwrap();
    let pack = "[edge.ingress]\nrps_limit = 0\ntimeout = \"60s\"\n[[edge.packs]]\nname = \"a\"\npath = \"a.pmtiles\"\n";
    let served = start(other, &config("", pack));
    let first = sample().coords().filter(filled).find(|coord| sample().tile(*coord).is_some()).unwrap();
    for coord in sample().coords().filter(|coord| coord.z() >= first.z()) {
        let path = format!("/edge/packs/a/{coord}.pbf");
        let plain = [("Accept-Encoding", "identity")];
        let answer = request(&served.address("edge", "http"), "GET", &path, &plain, b"").unwrap();
        match sample().tile(coord).filter(|_| filled(&coord)) {
            Some(tile) => assert_eq!((answer.status, answer.body), (200, tile), "{coord}"),
            None => assert_eq!(answer.status, 204, "{coord}"),
        }
    }
    let described =
        request(&served.address("edge", "http"), "GET", "/edge/packs/a.json", &[], b"").unwrap().json();
    assert_eq!((&described["name"], &described["maxzoom"]), (&"/tiles/".into(), &4.into()), "{described}");
    assert!(!described["vector_layers"].as_array().unwrap().is_empty(), "{described}");
}

#[test]
fn what_is_stored_is_listed_in_pages_for_who_may_write() {
    let edge = Edge::start("", "[edge.ingress]\nrps_limit = 0\ntimeout = \"60s\"\n");
    // Two contents of 3 MiB do not go into one page, and one of 5 MiB into none.
    for (name, byte, len) in
        [("t/1/0/0.png", 1, 3 << 20), ("t/1/0/1.png", 2, 3 << 20), ("t/a.bin", 3, 5 << 20)]
    {
        let body = [&b"\x89PNG\r\n\x1a\n"[..], &vec![byte; len]].concat();
        assert_eq!(edge.put(&format!("/edge/assets/{name}"), &body).status, 201);
    }
    let list = |query: &str| edge.send("GET", &format!("/edge/assets{query}"), &[], b"");
    let first = list("?prefix=t/").json();
    assert_eq!(first["assets"].as_array().unwrap().len(), 1, "{}", first["next"]);
    let next = first["next"].as_str().unwrap();
    let second = list(&format!("?prefix=t/&after={next}")).json();
    let names: Vec<&Value> =
        second["assets"].as_array().unwrap().iter().map(|asset| &asset["name"]).collect();
    assert_eq!(names, ["t/1/0/1.png", "t/a.bin"]);
    assert!(second["next"].is_null() && second["assets"][1]["body"].is_null());
    assert!(list("?prefix=u").json()["assets"].as_array().unwrap().is_empty());
    for bad in ["", "?prefix=", "?after=x", "?prefix=t/&more=1"] {
        assert_eq!((list(bad).status, list(bad).reason()), (400, "malformed"), "{bad}");
    }
    assert_eq!(edge.get("/edge/assets?prefix=t/", &[]).reason(), "unauth");
    assert_eq!(edge.send("POST", "/edge/assets", &[], b"").status, 405);
    let dir = edge.node.dir.path();
    assert_eq!(edge.put("/edge/assets/t/b/1/0/0.png", b"\x89PNG\r\n\x1a\n").status, 201);
    let (code, _, error) = grow(dir, &["--prefix", "t/", "--out", "a.pmtiles"]);
    assert!(code == Some(1) && error.contains("the tile 1/0/0") && error.contains("--prefix"), "{error}");
    let (code, text, error) = grow(dir, &["--prefix", "t/1", "--out", "a.pmtiles"]);
    assert_eq!(
        (code, text.as_str()),
        (Some(0), "a.pmtiles: 2 tiles (png, zoom 1 to 1), 2 contents"),
        "{error}"
    );
}
