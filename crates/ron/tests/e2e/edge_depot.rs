//! An object store behind the edge's own: what is acknowledged is there, and comes back from there. The store is moto, a
//! server by others; `cargo xtask test` installs it.

use crate::edge::{Edge, config};
use crate::pack_s3::{Moto, write_keys};
use ron_testkit::{Client, Node, Origin, Script, get, ron};

/// The tables of an edge whose objects are in a bucket of this store.
fn tables(moto: &Moto, deadline: &str, cas: &str) -> String {
    let limits = "[edge.ingress]\nrps_limit = 0\ntimeout = \"30s\"\n[edge.fill]\nnegative_ttl = \"1h\"\n";
    let limits = format!("{limits}deadline = \"{deadline}\"\n");
    let cas = format!("[edge.cas]\nbackend = \"s3\"\nbucket = \"tiles\"\nprefix = \"edge/\"\n{cas}\n");
    format!("{limits}{cas}{}", moto.table("credentials_file = \"s3.keys\""))
}

fn edge(moto: &Moto, cas: &str) -> Edge {
    edge_within(moto, "10s", cas)
}

fn edge_within(moto: &Moto, deadline: &str, cas: &str) -> Edge {
    let dir = tempfile::tempdir().unwrap();
    let (id, secret) = moto.keys();
    write_keys(dir.path(), id, secret);
    std::fs::write(dir.path().join("ron.toml"), config("", &tables(moto, deadline, cas))).unwrap();
    Edge::of(Node::spawn(dir, &["run", "edge", "--config", "ron.toml"], &[]))
}

fn bytes(seed: u32, len: u32) -> Vec<u8> {
    (0..len).map(|n| (n.wrapping_mul(2_654_435_761).wrapping_add(seed * 977) >> 11) as u8).collect()
}

/// Puts an object; returns its path.
fn put(edge: &Edge, body: &[u8]) -> String {
    let answer = edge.put("/edge/cas", body);
    assert_eq!(answer.status, 201, "{}", answer.text());
    answer.header("location").unwrap().to_owned()
}

/// Its path in the store.
fn far(path: &str) -> String {
    let hex = path.rsplit(':').next().unwrap();
    format!("/tiles/edge/b3/{}/{}/{hex}", &hex[..2], &hex[2..4])
}

#[test]
fn what_is_acknowledged_is_in_a_bucket_of_moto_and_comes_back_from_there() {
    let moto = Moto::start();
    let first = edge(&moto, "");
    let objects: Vec<Vec<u8>> = (1..4).map(|seed| bytes(seed, 300_000)).collect();
    let paths: Vec<String> = objects.iter().map(|body| put(&first, body)).collect();
    assert_eq!(first.put("/edge/cas", &objects[0]).status, 200, "it is there already");
    let named = first.send("PUT", "/edge/assets/a.bin", &[], &objects[1]);
    assert_eq!(named.status, 201, "{}", named.text());
    moto.was_asked("PUT", &far(&paths[0]), 2);

    // Another node has room for one of them at a time, and gets each as often as it is wanted.
    let second = edge(&moto, "max_bytes = \"512KiB\"");
    for _ in 0..2 {
        for (path, body) in paths.iter().zip(&objects) {
            let answer = second.get(path, &[]);
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert!(answer.body == *body && answer.header("cache-status").unwrap().contains("fwd=uri-miss"));
            let again = second.get(path, &[("Range", "bytes=100000-100009")]);
            assert_eq!((again.status, &again.body[..]), (206, &body[100_000..100_010]));
            assert!(again.header("cache-status").unwrap().contains("hit"));
        }
    }
    // It had to go in between.
    moto.was_asked("GET", &far(&paths[0]), 2);
    assert_eq!(second.get("/edge/assets/a.bin", &[]).status, 403, "names are each node's own");
    let zeros = "0".repeat(64);
    for _ in 0..2 {
        let nothing = second.get(&format!("/edge/cas/b3:{zeros}"), &[]);
        assert_eq!((nothing.status, nothing.reason()), (404, "not_found"));
    }
    // That there is nothing is remembered for a while.
    moto.was_asked("GET", &far(&format!("b3:{zeros}")), 1);

    // However many want an object, it is fetched once.
    let third = edge(&moto, "");
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..20).map(|_| scope.spawn(|| third.get(&paths[2], &[]))).collect();
        for reader in readers {
            let answer = reader.join().unwrap();
            assert!(answer.status == 200 && answer.body == objects[2], "{}", answer.status);
        }
    });
    moto.was_asked("GET", &far(&paths[2]), 3);
}

#[test]
fn other_bytes_under_an_address_in_a_bucket_of_moto_reach_nobody() {
    let moto = Moto::start();
    let first = edge(&moto, "");
    let path = put(&first, &bytes(1, 100_000));
    moto.put(&far(&path), &bytes(2, 100_000));
    let second = edge(&moto, "");
    let bad = second.get(&path, &[]);
    assert_eq!((bad.status, bad.reason()), (502, "digest_mismatch"));
    assert_eq!(second.node.metric("edge_cas_bytes"), 0.0, "nothing of it is kept");
    assert_eq!(first.get(&path, &[]).body, bytes(1, 100_000));
}

#[test]
fn without_its_moto_an_edge_serves_what_it_has_and_takes_nothing() {
    let moto = Moto::start();
    let first = edge(&moto, "");
    let path = put(&first, b"here");
    let second = edge(&moto, "");
    moto.signal("STOP");
    let refused = first.put("/edge/cas", b"new");
    assert_eq!((refused.status, refused.reason()), (503, "storage"), "{}", refused.text());
    assert!(refused.header("retry-after").is_some());
    assert!(first.node.metric("io_timeouts_total{service=\"edge\",op=\"fill\"}") >= 1.0);
    first.node.eventually("readiness names it", |node| {
        let ready = get(&node.admin(), "/readyz");
        ready.status == 503 && ready.json()["missing"][0] == "edge.depot"
    });
    assert_eq!(get(&first.node.admin(), "/readyz?scope=read").status, 200);
    assert_eq!(first.get(&path, &[]).body, b"here");
    let cold = second.get(&path, &[]);
    assert_eq!((cold.status, cold.reason()), (504, "timeout"), "{}", cold.text());
    moto.signal("CONT");
    first.node.eventually("it is well again", |node| get(&node.admin(), "/readyz").status == 200);
    let path = put(&first, b"new");
    second.node.eventually("others find it", |_| second.get(&path, &[]).body == b"new");
    moto.signal("KILL");
    first.node.eventually("it is gone", |_| first.put("/edge/cas", b"newer").reason() == "storage");
    assert_eq!(first.get(&path, &[]).body, b"new");
    let nothing = second.get(&format!("/edge/cas/b3:{}", "1".repeat(64)), &[]);
    assert_eq!((nothing.status, nothing.reason()), (503, "storage"), "{}", nothing.text());
    assert!(first.node.metric("backoff_retries_total{service=\"edge\",op=\"live_fill\"}") >= 1.0);
}

#[test]
fn an_edge_that_starts_without_its_moto_or_its_keys_waits_for_them() {
    let moto = Moto::start();
    moto.signal("STOP");
    let edge = edge_within(&moto, "2s", "");
    let away = get(&edge.node.admin(), "/readyz");
    assert!(away.status == 503 && away.json()["missing"][0] == "edge.depot", "{}", away.text());
    let refused = edge.put("/edge/cas", b"early");
    assert_eq!((refused.status, refused.reason()), (503, "storage"));
    assert_eq!(edge.refusals("storage"), 1.0);
    moto.signal("CONT");
    edge.node.eventually("it is there", |node| get(&node.admin(), "/readyz").status == 200);
    let path = put(&edge, b"late");

    // Other keys are taken up by themselves, and said to be wrong.
    let (id, secret) = moto.keys();
    write_keys(edge.node.dir.path(), id, "not the secret");
    edge.node.eventually("the keys are wrong", |node| {
        let why = get(&node.admin(), "/readyz").json()["why"]["edge.depot"].to_string();
        why.contains("403 SignatureDoesNotMatch")
    });
    assert_eq!((edge.put("/edge/cas", b"wrong").status, &edge.get(&path, &[]).body[..]), (503, &b"late"[..]));
    write_keys(edge.node.dir.path(), id, secret);
    edge.node.eventually("the keys are right", |node| get(&node.admin(), "/readyz").status == 200);
    put(&edge, b"right");
    assert!(!edge.node.log().contains(secret) && !edge.node.log().contains("not the secret"));
}

#[test]
fn a_fetch_from_moto_outlives_its_request_and_a_bad_copy_is_fetched_anew() {
    let moto = Moto::start();
    let first = edge(&moto, "");
    let body = bytes(1, 300_000);
    let path = put(&first, &body);
    let second = edge(&moto, "");
    moto.signal("STOP");
    let late = second.get(&path, &[("Request-Timeout", "500ms")]);
    assert_eq!((late.status, late.reason()), (504, "timeout"));
    assert!(second.node.metric("io_timeouts_total{service=\"edge\",op=\"read\"}") >= 1.0);
    moto.signal("CONT");
    second.node.eventually("it came all the same", |_| second.get(&path, &[]).body == body);
    moto.was_asked("GET", &far(&path), 1);

    // A bit that flips here costs one answer: the next is the store's.
    let hex = path.rsplit(':').next().unwrap();
    let file = first.node.dir.path().join(format!("cas/b3/{}/{}/{hex}", &hex[..2], &hex[2..4]));
    let mut flipped = body.clone();
    flipped[77] ^= 1;
    std::fs::write(&file, flipped).unwrap();
    let bad = first.get(&path, &[]);
    assert_eq!((bad.status, bad.reason()), (502, "digest_mismatch"), "{}", bad.text());
    let good = first.get(&path, &[]);
    assert!(good.status == 200 && good.body == body, "{}", good.status);
    assert!(std::fs::read(&file).unwrap() == body);
    // Where the store has nothing better, it is said to be bad.
    moto.put(&far(&path), b"other");
    let mut flipped = body.clone();
    flipped[78] ^= 1;
    std::fs::write(&file, flipped).unwrap();
    for _ in 0..2 {
        assert_eq!(
            (first.get(&path, &[]).status, first.get(&path, &[]).reason().to_owned()),
            (502, "digest_mismatch".to_owned())
        );
    }
}

#[test]
fn an_object_that_no_request_to_moto_could_carry_is_refused_by_its_length() {
    let moto = Moto::start();
    let edge = edge(&moto, "");
    let mut client = Client::connect(&edge.address()).unwrap();
    let head = format!(
        "PUT /edge/cas HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\n\r\n",
        edge.token,
        (5u64 << 30) + 1
    );
    client.send(head.as_bytes()).unwrap();
    let answer = client.read_answer("PUT").unwrap();
    assert_eq!((answer.status, answer.reason()), (413, "body_cap"));
    assert_eq!(edge.refusals("body_cap"), 1.0);
}

#[test]
fn a_store_that_ignores_conditions_is_refused_and_so_is_what_cannot_be() {
    let careless = Origin::start(|_| Script::Answer("200 OK\r\nETag: \"x\"\r\n".to_owned(), Vec::new()));
    let dir = tempfile::tempdir().unwrap();
    write_keys(dir.path(), "id", "secret");
    let store = format!(
        "[edge.cas]\nbackend = \"s3\"\nbucket = \"tiles\"\n[edge.s3]\nendpoint = \"http://{}\"\nallow_http = true\n\
         allow_private = true\ncredentials_file = \"s3.keys\"\n",
        careless.address
    );
    std::fs::write(dir.path().join("ron.toml"), config("", &store)).unwrap();
    let started = ron(&["run", "edge", "--config", "ron.toml"], dir.path());
    let said = String::from_utf8_lossy(&started.stderr).into_owned();
    assert!(started.status.code() == Some(1) && said.contains("ignores If-None-Match"), "{said}");

    let check = |edge: &str, tables: &str, why: &str| {
        std::fs::write(dir.path().join("ron.toml"), config(edge, tables)).unwrap();
        let checked = ron(&["config", "check", "ron.toml"], dir.path());
        let said =
            String::from_utf8_lossy(&checked.stderr).into_owned() + &String::from_utf8_lossy(&checked.stdout);
        assert!(checked.status.code() == Some(64) && said.contains(why), "{said}");
    };
    check("", "[edge.cas]\nbucket = \"tiles\"", "is for backend");
    check("", "[edge.cas]\nbackend = \"s3\"", "has no bucket");
    check("", "[edge.cas]\nbackend = \"s3\"\nbucket = \"tiles\"\nprefix = \"edge\"", "must end with a slash");
    check("", "[edge.cas]\nbackend = \"s3\"\nbucket = \"tiles\"\nprefix = \"../\"", "edge.cas.prefix");
    check("mode = \"offline\"", "[edge.cas]\nbackend = \"s3\"\nbucket = \"tiles\"", "offline");
    check(
        "",
        "[edge.cas]\nbackend = \"s3\"\nbucket = \"tiles\"\n[node]\namnesia = true",
        "node.amnesia is on",
    );
}
