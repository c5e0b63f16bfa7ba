//! `cargo xtask bench edge`: ron's edge beside nginx (files, and a cache), Varnish, and Martin where it is installed.
//!
//! All serve the same bytes under the same paths, warm, to one client.

use super::compare::{alternate, report};
use super::load::Client;
use super::peers::{self, Server};
use super::process::rss_mib;
use super::{Bench, table};
use crate::run::cargo;
use ron_testkit::{Origin, Script, percentile};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Objects, by name and bytes.
const OBJECTS: [(&str, usize); 3] = [("1k", 1 << 10), ("64k", 64 << 10), ("1m", 1 << 20)];
const CONNECTIONS: u32 = 64;
/// The zoom down to which the pack has tiles, some 330,000 of them; and of how many the clients ask.
const ZOOM: &str = "9";
const TILES: &str = "5000";
const LARGE: u64 = 2 << 30;
/// Readers of the large object at a time.
const READERS: usize = 4;

/// Puts the objects where nginx finds them.
fn files(bench: &Bench) -> Option<()> {
    let folder = bench.dir.join("root/edge/assets");
    std::fs::create_dir_all(&folder).ok()?;
    for (name, len) in OBJECTS {
        // Not to be compressed, so that all send the same.
        let bytes: Vec<u8> = (0..len as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
        std::fs::write(folder.join(format!("{name}.bin")), bytes).ok()?;
    }
    Some(())
}

/// An upload to ron, of a file or of so many zeros.
fn put(bench: &Bench, node: &Server, name: &str, body: &mut dyn std::io::Read, len: u64) -> Option<()> {
    let token = Command::new(&bench.binary)
        .args(["token", "mint", "--scope", "edge:write", "--key", "node.key"])
        .current_dir(node.folder()?)
        .output()
        .ok()?;
    let token = String::from_utf8(token.stdout).ok()?;
    let mut stream = TcpStream::connect(&node.http).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(120))).ok()?;
    let head = format!(
        "PUT /edge/assets/{name} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len}\r\n\
         Authorization: Bearer {}\r\n\r\n",
        token.trim()
    );
    stream.write_all(head.as_bytes()).ok()?;
    std::io::copy(body, &mut stream).ok()?;
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).ok()?;
    (&answer == b"HTTP/1.1 201").then_some(())
}

/// ron first, then its peers, all with the objects.
fn all(bench: &Bench) -> Option<(Server, Server, Vec<Server>)> {
    files(bench)?;
    let origin = peers::files(&bench.dir, "origin", true)?;
    let node = peers::edge(bench, "");
    for (name, len) in OBJECTS {
        let name = format!("{name}.bin");
        let mut file = File::open(bench.dir.join("root/edge/assets").join(&name)).ok()?;
        put(bench, &node, &name, &mut file, len as u64)?;
    }
    let peers = vec![
        peers::files(&bench.dir, "nginx", false)?,
        peers::nginx_cache(&bench.dir, &origin.http)?,
        peers::varnish(&bench.dir, &origin.http)?,
    ];
    Some((origin, node, peers))
}

fn compare(bench: &Bench, title: &str, name: &str, script: &str) -> Option<Value> {
    let (_origin, node, peers) = all(bench)?;
    let servers: Vec<&Server> = std::iter::once(&node).chain(&peers).collect();
    let path = format!("/edge/assets/{name}.bin");
    let client = Client::Wrk { connections: CONNECTIONS, path: &path, script };
    let figures = alternate(bench, &servers, |_| client)?;
    let names: Vec<&str> = servers.iter().map(|server| server.name).collect();
    Some(report(title, &names, &figures))
}

/// Warm hits by size.
pub(super) fn objects(bench: &Bench) -> Option<Value> {
    let mut result = Map::new();
    for (name, _) in OBJECTS {
        let title =
            format!("objects: {name}, warm, 64 connections (goal: CPU <= 1.2 x nginx, <= 1.0 x Varnish)");
        result.insert(name.to_owned(), compare(bench, &title, name, "")?);
    }
    Some(result.into())
}

/// 64 KiB out of the middle of 1 MiB.
pub(super) fn ranges(bench: &Bench) -> Option<Value> {
    let script = "wrk.headers[\"Range\"] = \"bytes=300000-365535\"\n";
    compare(bench, "ranges: 64 KiB of 1 MiB, warm, 64 connections", "1m", script)
}

/// Tiles of a pack beside the same tiles as files.
pub(super) fn tiles(bench: &Bench) -> Option<Value> {
    // Always the same, so it is made once.
    let folder = bench.out.join(format!("sample-{ZOOM}-{TILES}"));
    if !folder.join("tiles").exists() {
        std::fs::create_dir_all(&folder).ok()?;
        let shown = folder.to_string_lossy().into_owned();
        let run = ["run", "-q", "-p", "svc-edge", "--example", "sample_pack", &shown, ZOOM, TILES];
        if !cargo(&run) {
            return None;
        }
    }
    let packs = bench.dir.join("root/edge/packs");
    std::fs::create_dir_all(&packs).ok()?;
    std::os::unix::fs::symlink(&folder, packs.join("p")).ok()?;
    let pack = folder.join("pack.pmtiles");
    let table = format!("[[edge.packs]]\nname = \"p\"\npath = \"{}\"\n", pack.display());
    let (node, files) = (peers::edge(bench, &table), peers::files(&bench.dir, "nginx", false)?);
    let martin = peers::martin(&pack);
    if martin.is_none() {
        println!(
            "martin is not installed (cargo install martin --locked --no-default-features --features pmtiles): tiles are measured without it"
        );
    }
    let servers: Vec<&Server> = [&node, &files].into_iter().chain(&martin).collect();
    let scripts = [each(&folder.join("tiles"), "/edge/packs/p/"), each(&folder.join("tiles"), "/pack/")];
    let client = |server: &Server| {
        let script = &scripts[usize::from(server.name == "martin")];
        Client::Wrk { connections: CONNECTIONS, path: "/", script }
    };
    let figures = alternate(bench, &servers, client)?;
    let names: Vec<&str> = servers.iter().map(|server| server.name).collect();
    let title = "tiles: of a pack, nginx the same as files (goal: >= 1.5 x Martin per CPU-second)";
    Some(report(title, &names, &figures))
}

/// A script that asks for each line of a file in turn.
fn each(list: &Path, prefix: &str) -> String {
    format!(
        "local sent, n = {{}}, 0\n\
         function init(args)\nfor line in io.lines(\"{}\") do\n\
         sent[#sent + 1] = wrk.format(\"GET\", \"{prefix}\" .. line, {{[\"Accept-Encoding\"] = \"gzip\"}})\nend\nend\n\
         function request()\nn = n + 1\nreturn sent[(n - 1) % #sent + 1]\nend\n",
        list.display()
    )
}

/// Many who want one cold object at the same time, over an origin that takes its time.
pub(super) fn herd(bench: &Bench) -> Option<Value> {
    const HERD: usize = 100;
    const LATE: Duration = Duration::from_millis(50);
    let origin = Origin::start(|_| {
        Script::Late(LATE, "200 OK\r\nCache-Control: max-age=600\r\n".to_owned(), vec![b'x'; 20 << 10])
    });
    let site = format!(
        "[[edge.sites]]\nhosts = [\"*\"]\norigin = \"{}\"\nallow_http = true\nallow_private = true\n",
        origin.url()
    );
    let (address, dir) = (origin.address.as_str(), &bench.dir);
    let servers =
        [peers::edge(bench, &site), peers::nginx_cache(dir, address)?, peers::varnish(dir, address)?];
    let mut rows = vec![table::row(&["", "fetches", "p50 ms", "p99 ms"])];
    let mut result = Map::new();
    let mut delays = [const { Vec::new() }; 3];
    let mut fetches = [0; 3];
    for round in 0..bench.rounds {
        for (number, server) in servers.iter().enumerate() {
            let path = format!("/herd/{round}/{number}");
            delays[number].extend(stampede(&server.http, &path, HERD)?);
            fetches[number] += origin.count(&path);
        }
    }
    for ((server, delays), fetches) in servers.iter().zip(&mut delays).zip(fetches) {
        let mut at = |share| percentile(delays, share).as_secs_f64() * 1e3;
        let (p50, p99) = (at(0.5), at(0.99));
        let fetches = fetches as f64 / bench.rounds as f64;
        rows.push(vec![
            server.name.to_owned(),
            format!("{fetches:.1}"),
            format!("{p50:.1}"),
            format!("{p99:.1}"),
        ]);
        let one = json!({"fetches": fetches, "p50_ms": p50, "p99_ms": p99});
        result.insert(server.name.to_owned(), one);
    }
    table::print("herd: 100 clients, one cold object, origin of 50 ms (goal: 1 fetch, p99 <= 75 ms)", &rows);
    Some(result.into())
}

/// The time that each of so many clients waits for the whole answer; they are connected, and begin together.
fn stampede(address: &str, path: &str, clients: usize) -> Option<Vec<Duration>> {
    let begin = Barrier::new(clients);
    std::thread::scope(|scope| {
        let mut waiting = Vec::new();
        for _ in 0..clients {
            let mut client = ron_testkit::Client::connect(address).ok()?;
            let begin = &begin;
            waiting.push(scope.spawn(move || {
                begin.wait();
                let begun = Instant::now();
                let answer = client.request("GET", path, &[], b"").ok()?;
                (answer.status == 200 && answer.body.len() == 20 << 10).then(|| begun.elapsed())
            }));
        }
        waiting.into_iter().map(|client| client.join().ok().flatten()).collect()
    })
}

/// What a large object takes of memory while several read it.
pub(super) fn memory(bench: &Bench) -> Option<Value> {
    let node = peers::edge(bench, "");
    let before = rss_mib(node.pid);
    put(bench, &node, "large.bin", &mut std::io::repeat(7).take(LARGE), LARGE)?;
    let stored = rss_mib(node.pid);
    let done = AtomicBool::new(false);
    let highest = std::thread::scope(|scope| {
        let mut readers = Vec::new();
        for _ in 0..READERS {
            readers.push(scope.spawn(|| read(&node.http)));
        }
        let watching = scope.spawn(|| {
            let mut highest: f64 = 0.0;
            while !done.load(Ordering::Relaxed) {
                highest = highest.max(rss_mib(node.pid));
                std::thread::sleep(Duration::from_millis(50));
            }
            highest
        });
        let good = readers.into_iter().all(|reader| reader.join().ok().flatten() == Some(LARGE));
        done.store(true, Ordering::Relaxed);
        watching.join().ok().filter(|_| good)
    })?;
    let mut rows = vec![table::row(&["", "RSS MiB"])];
    for (name, rss) in [("before", before), ("2 GiB stored", stored), ("4 readers, highest", highest)] {
        rows.push(vec![name.to_owned(), format!("{rss:.1}")]);
    }
    table::print("memory: an object of 2 GiB (goal: flat)", &rows);
    Some(json!({"before_mib": before, "stored_mib": stored, "highest_mib": highest}))
}

/// Bytes of the body that came.
fn read(address: &str) -> Option<u64> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream
        .write_all(b"GET /edge/assets/large.bin HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
        .ok()?;
    let (mut buffer, mut all, mut head) = (vec![0; 256 << 10], 0, None);
    loop {
        let read = stream.read(&mut buffer).ok()?;
        if read == 0 {
            return Some(all - head?);
        }
        if head.is_none() {
            let at = buffer[..read].windows(4).position(|window| window == b"\r\n\r\n")?;
            head = Some(at as u64 + 4);
        }
        all += read as u64;
    }
}
