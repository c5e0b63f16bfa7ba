//! A registry that governs other nodes: what it commits goes live there, and nothing that is not right.

use ed25519_dalek::SigningKey;
use ron_kernel::key::PrivateKey;
use ron_log::{Approval, Checkpoint, Note, NoteKey, Proposal, Role, Signer, SignerSet, TrustRoots};
use ron_testkit::{Answer, Node, Origin, Script, get, request, ron};
use serde_json::{Value, json};
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A registry whose signers are `s0`, `s1`, …; two must approve. It has an overlay too.
pub(crate) struct Registry {
    node: Option<Node>,
    keys: Vec<SigningKey>,
    pub(crate) roots: TrustRoots,
}

fn set(keys: &[SigningKey], of: &[usize]) -> SignerSet {
    let signer = |index: &usize| Signer {
        id: format!("s{index}"),
        keys: vec![ron_log::key::PublicKey::Ed25519(keys[*index].verifying_key().into())],
        roles: vec![Role::Approve],
        not_after: None,
    };
    SignerSet::new(2, false, of.iter().map(signer).collect()).unwrap()
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

pub(crate) fn put(kind: &str, id: &str, body: Value) -> Value {
    json!({"op": "put", "kind": kind, "id": id, "body": body})
}

pub(crate) fn route(id: &str, upstream: &str) -> Value {
    put("route", id, json!({"path": format!("/{id}"), "upstream": upstream}))
}

impl Registry {
    pub(crate) fn start() -> Registry {
        Registry::start_with("")
    }

    /// `rest` goes behind its tables.
    fn start_with(rest: &str) -> Registry {
        let keys: Vec<_> =
            (0..4).map(|_| SigningKey::from_bytes(&PrivateKey::generate().unwrap().seed())).collect();
        let roots = TrustRoots { log: "test.example/log".into(), signers: set(&keys, &[0, 1, 2]) };
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("trust-roots.json"), roots.canonical()).unwrap();
        let config = format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n[overlay]\nlisten = \"127.0.0.1:0\"\nadmit = \"any\"\n\
                      [registry]\nlisten = \"127.0.0.1:0\"\nauth = \"open\"\n\
                      [registry.checkpoint]\ninterval = \"100ms\"\n{rest}"
        );
        std::fs::write(dir.path().join("ron.toml"), config).unwrap();
        Registry { node: Some(spawn(dir, &["registry", "overlay"])), keys, roots }
    }

    fn node(&self) -> &Node {
        self.node.as_ref().expect("it runs")
    }

    pub(crate) fn address(&self) -> String {
        self.node().address("registry", "http")
    }

    /// Ends the process and gives its folder.
    fn stop(&mut self) -> tempfile::TempDir {
        let mut node = self.node.take().expect("it runs");
        assert_eq!(node.stop(), 0);
        std::mem::replace(&mut node.dir, tempfile::tempdir().unwrap())
    }

    fn resume(&mut self, dir: tempfile::TempDir) {
        self.node = Some(spawn(dir, &["registry", "overlay"]));
    }

    /// Commits changes that these signers approve.
    fn commit_by(&self, signers: &[usize], ops: &[Value]) -> Answer {
        let head = get(&self.address(), "/registry/head").json();
        let nonce = format!("{:032x}", u128::from(ron_kernel::random::u64()));
        let payload = json!({
            "schema": "ron.registry/1", "base_version": head["version"], "note": "",
            "signers_version": head["signers_version"], "nonce": nonce, "ops": ops, "expires_at": now() + 3_600_000,
        });
        let b3 = Proposal::parse(payload.to_string().as_bytes()).unwrap().b3();
        let approval = |index: &usize| -> Value {
            let approval = Approval::sign(&format!("s{index}"), &self.keys[*index], b3, now());
            serde_json::from_str(&approval.canonical()).unwrap()
        };
        let approvals: Vec<Value> = signers.iter().map(approval).collect();
        let body = json!({"payload": payload, "approvals": approvals}).to_string();
        let json = [("Content-Type", "application/json")];
        request(&self.address(), "POST", "/registry/proposals?commit=true", &json, body.as_bytes()).unwrap()
    }

    pub(crate) fn commit(&self, ops: &[Value]) -> u64 {
        let answer = self.commit_by(&[0, 1], ops);
        assert_eq!(answer.status, 201, "{}", answer.text());
        answer.json()["version"].as_u64().unwrap()
    }
}

fn spawn(dir: tempfile::TempDir, services: &[&str]) -> Node {
    let _ = std::fs::remove_file(dir.path().join("addresses.json"));
    Node::spawn(dir, &[&["run"], services, &["--config", "ron.toml"]].concat(), &[])
}

/// A way to the registry that stays where it is when the registry moves, and that can be cut.
struct Relay {
    address: String,
    to: Arc<Mutex<Option<String>>>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    /// With `waits` off, nobody is told anything by waiting for it.
    fn start(to: &Registry, waits: bool) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let relay = Relay { address, to: Arc::new(Mutex::new(Some(to.address()))), open: Arc::default() };
        let (to, open) = (relay.to.clone(), relay.open.clone());
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Some(to) = to.lock().unwrap().clone() else { continue };
                let Ok(server) = TcpStream::connect(to) else { continue };
                let ends = [&client, &server].map(|stream| stream.try_clone().unwrap());
                open.lock().unwrap().extend(ends);
                let (mut from, mut into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || {
                    let mut piece = vec![0; 64 << 10];
                    while let Ok(read @ 1..) = from.read(&mut piece) {
                        let waiting = piece[..read].windows(5).any(|word| word == b"wait=");
                        if !waits && waiting {
                            continue;
                        }
                        if into.write_all(&piece[..read]).is_err() {
                            break;
                        }
                    }
                    let _ = into.shutdown(Shutdown::Both);
                });
                let (mut from, mut into) = (server, client);
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut into);
                    let _ = into.shutdown(Shutdown::Both);
                });
            }
        });
        relay
    }

    fn cut(&self) {
        *self.to.lock().unwrap() = None;
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn lead_to(&self, registry: &Registry) {
        self.cut();
        *self.to.lock().unwrap() = Some(registry.address());
    }
}

/// The configuration of a node that follows; `gateway` goes into its table, `rest` behind it.
fn following(relay: &Relay, roots: &TrustRoots, rest: &str) -> String {
    following_at(&format!("http://{}", relay.address), roots, rest)
}

pub(crate) fn following_at(url: &str, roots: &TrustRoots, rest: &str) -> String {
    format!(
        "[node]\nfollow = {{ url = \"{url}\", trust_roots = \"roots.json\", trust_roots_b3 = \"{}\" }}\n\
         [admin]\nlisten = \"127.0.0.1:0\"\n[gateway]\nlisten = \"127.0.0.1:0\"\n{rest}\n",
        roots.b3()
    )
}

fn follower(services: &[&str], relay: &Relay, roots: &TrustRoots, rest: &str) -> Node {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("roots.json"), roots.canonical()).unwrap();
    std::fs::write(dir.path().join("ron.toml"), following(relay, roots, rest)).unwrap();
    spawn(dir, services)
}

fn restart(mut node: Node, services: &[&str]) -> Node {
    assert_eq!(node.stop(), 0);
    let dir = std::mem::replace(&mut node.dir, tempfile::tempdir().unwrap());
    spawn(dir, services)
}

fn status(node: &Node) -> Value {
    node.admin_get("/node/follow").json()
}

fn is_at(node: &Node, version: u64) {
    node.eventually("it has followed", |node| status(node)["version"] == version);
}

fn serves(node: &Node, path: &str) {
    node.eventually(path, |node| get(&node.gateway(), path).status == 200);
}

fn ready(node: &Node) -> Value {
    let answer = get(&node.admin(), "/readyz");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

fn missing(node: &Node, cause: &str) -> bool {
    ready(node)["missing"].as_array().unwrap().iter().any(|missing| missing == cause)
}

/// `ron config show`: what is in force, and what stands in the way of something newer.
fn shown(dir: &Path) -> (String, String) {
    let output = ron(&["config", "show", "--config", "ron.toml"], dir);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}", text(&output.stderr));
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_route_that_two_approved_goes_live_and_one_that_is_wrong_does_not() {
    let origin = Origin::start(|_| Script::Body(b"governed".to_vec()));
    let mut registry = Registry::start();
    let relay = Relay::start(&registry, true);
    let node = follower(&["gateway"], &relay, &registry.roots, "");
    assert_eq!(get(&node.gateway(), "/r").status, 404);
    let upstream = put("upstream", "u", json!({"name": "u", "servers": [origin.url()]}));
    // What governs nothing, however deep it is, holds nobody up.
    let deep = (1..29).fold(json!([]), |inner, _| json!([inner]));
    let version = registry.commit(&[upstream, route("r", "u"), put("x-deep", "d", deep)]);
    serves(&node, "/r");
    assert_eq!(get(&node.gateway(), "/r").text(), "governed");
    is_at(&node, version);
    node.eventually("all is well", |node| ready(node)["degraded"] == false);
    assert_eq!(node.metric("registry_follow_version"), version as f64);
    assert!(node.metric("registry_follow_updates_total{result=\"applied\"}") >= 1.0);
    assert!(node.metric("config_reload_total{service=\"kernel\",result=\"ok\"}") >= 1.0);
    let (values, _) = shown(node.dir.path());
    let line = "gateway.routes[0].path = \"/r\"  # registry version 1 approved by [s0, s1] (route r)";
    assert!(values.contains(line), "{values}");

    // Whoever mirrors the registry may see what it has signed.
    let seen = get(&node.admin(), "/node/follow/checkpoint").json();
    assert!(seen["note"].as_str().unwrap().starts_with("test.example/log\n"), "{seen}");
    assert_eq!(seen["checkpoint"], status(&node)["checkpoint"]);
    assert_eq!(get(&node.admin(), "/node/follow").status, 401);

    // Broken on purpose: what was good stays, and everybody can read why.
    registry.commit(&[route("bad", "nowhere"), route("r2", "u")]);
    node.eventually("it is rejected", |node| missing(node, "registry_follow"));
    let ready_page = ready(&node);
    assert_eq!((&ready_page["ready"], &ready_page["degraded"]), (&json!(true), &json!(true)));
    let why = ready_page["why"]["registry_follow"].as_str().unwrap().to_owned();
    assert!(
        why.contains("version 2 is rejected") && why.contains("there is no upstream \"nowhere\""),
        "{why}"
    );
    assert!(node.log().contains("nowhere"), "{}", node.log());
    assert_eq!((get(&node.gateway(), "/r").status, get(&node.gateway(), "/r2").status), (200, 404));
    assert!(node.metric("registry_follow_updates_total{result=\"rejected\"}") >= 1.0);
    let (values, remarks) = shown(node.dir.path());
    assert!(values.contains("registry version 1 approved by [s0, s1]"), "{values}");
    assert!(remarks.contains("registry version 2 is rejected, version 1 is in force"), "{remarks}");

    // Without the registry a restart serves the last good set.
    relay.cut();
    let dir = registry.stop();
    let node = restart(node, &["gateway"]);
    serves(&node, "/r");
    node.eventually("the registry is missed", |node| status(node)["trouble"].is_string());
    assert!(missing(&node, "registry_follow") && get(&node.gateway(), "/r2").status == 404);

    // Mended, it goes on from where it was.
    registry.resume(dir);
    registry.commit(&[json!({"op": "delete", "kind": "route", "id": "bad"})]);
    relay.lead_to(&registry);
    serves(&node, "/r2");
    node.eventually("all is well", |node| ready(node)["degraded"] == false);
    assert!(node.metric("backoff_retries_total{service=\"kernel\",op=\"follow\"}") >= 1.0);
}

#[test]
fn the_file_wins_over_what_the_registry_says_of_the_same_path() {
    let origin = Origin::start(|_| Script::Echo);
    let registry = Registry::start();
    let relay = Relay::start(&registry, true);
    let own = |path: &str| {
        let url = origin.url();
        format!(
            "[[gateway.upstreams]]\nname = \"own\"\nservers = [\"{url}\"]\n[[gateway.routes]]\npath = \"{path}\"\nupstream = \"own\"\n"
        )
    };
    let node = follower(&["gateway"], &relay, &registry.roots, &own("/a"));
    registry.commit(&[route("b", "own")]);
    serves(&node, "/b");
    // A change of the file that contradicts: the registry's set goes as a whole.
    node.write_config(&following(&relay, &registry.roots, &own("/b")));
    node.eventually("the file wins", |node| missing(node, "registry_follow"));
    assert_eq!((get(&node.gateway(), "/a").status, get(&node.gateway(), "/b").status), (404, 200));
    assert!(shown(node.dir.path()).1.contains("the file alone is in force"));
    node.write_config(&following(&relay, &registry.roots, &own("/a")));
    serves(&node, "/a");
    node.eventually("both are in force", |node| ready(node)["degraded"] == false);
    serves(&node, "/b");
}

#[test]
fn tenants_upstreams_origins_packs_and_peers_are_governed_like_routes() {
    let registry = Registry::start();
    let relay = Relay::start(&registry, true);
    let rest = "[edge]\nlisten = \"127.0.0.1:0\"\n[overlay]\nlisten = \"127.0.0.1:0\"\n";
    let services = ["gateway", "edge", "overlay"];
    let node = follower(&services, &relay, &registry.roots, rest);
    assert!(ron(&["init", "sample"], node.dir.path()).status.success());
    let peer = registry.node().address("overlay", "node");
    let peer_at = format!("{peer}@{}", registry.node().address("overlay", "oap"));
    registry.commit(&[
        put("tenant", "gold", json!({"id": "gold", "quantum": 4})),
        put("upstream", "u", json!({"name": "u", "servers": ["http://127.0.0.1:1"]})),
        put("origin", "img", json!({"prefix": "/img/", "url": "https://img.example/"})),
        put("pack", "tiles", json!({"name": "tiles", "path": "sample/sample.pmtiles"})),
        put("peer", "registry", json!({"address": peer_at})),
    ]);
    let edge = node.address("edge", "http");
    node.eventually("the pack is served", |_| get(&edge, "/edge/packs").text().contains("\"tiles\""));
    let gateway = node.admin_get("/gateway/status").json();
    assert!(gateway["tenants"].as_array().unwrap().iter().any(|tenant| tenant["id"] == "gold"), "{gateway}");
    assert!(
        gateway["upstreams"].as_array().unwrap().iter().any(|upstream| upstream["name"] == "u"),
        "{gateway}"
    );
    let connected = |node: &Node| {
        let peers = node.admin_get("/overlay/peers").json();
        peers["peers"]
            .as_array()
            .unwrap()
            .iter()
            .any(|known| known["node"] == peer.as_str() && known["state"] == "open")
    };
    node.eventually("the peer is dialled", connected);
    assert!(shown(node.dir.path()).0.contains("edge.origins[0].prefix = \"/img/\"  # registry version 1"));
    let gone = |kind: &str, id: &str| json!({"op": "delete", "kind": kind, "id": id});
    registry.commit(&[gone("pack", "tiles"), gone("peer", "registry"), gone("tenant", "gold")]);
    node.eventually("the pack is gone", |_| !get(&edge, "/edge/packs").text().contains("\"tiles\""));
    node.eventually("the peer is let go", |node| !connected(node));
}

#[test]
fn a_registry_that_let_its_first_entries_go_is_followed_from_the_state_it_signed() {
    let origin = Origin::start(|_| Script::Echo);
    let registry = Registry::start_with("[registry.retention]\npolicy = \"count\"\nmax_count = 20\n");
    let relay = Relay::start(&registry, true);
    let away = follower(&["gateway"], &relay, &registry.roots, "");
    let upstream = put("upstream", "u", json!({"name": "u", "servers": [origin.url()]}));
    registry.commit(&[upstream, route("first", "u")]);
    serves(&away, "/first");
    let mut away = away;
    assert_eq!(away.stop(), 0);
    for number in 0..290 {
        registry.commit(&[put("x-note", "n", json!(number))]);
    }
    registry.node().eventually("it is pruned", |_| {
        registry.commit(&[put("x-note", "n", json!(0))]);
        get(&registry.address(), "/registry/retention").json()["min_version"].as_u64().unwrap() > 0
    });
    let last = registry.commit(&[route("last", "u")]);
    // One that begins, and one that was away for too long.
    let new = follower(&["gateway"], &relay, &registry.roots, "");
    let dir = std::mem::replace(&mut away.dir, tempfile::tempdir().unwrap());
    for node in [new, spawn(dir, &["gateway"])] {
        serves(&node, "/first");
        serves(&node, "/last");
        is_at(&node, last);
        node.eventually("it says so", |node| node.log().contains("followed from a state that it signed"));
        node.eventually("nothing is missing", |node| ready(node)["degraded"] == false);
    }
}

#[test]
fn a_signer_that_was_revoked_governs_nothing_any_more() {
    let origin = Origin::start(|_| Script::Echo);
    let registry = Registry::start();
    let relay = Relay::start(&registry, true);
    let node = follower(&["gateway"], &relay, &registry.roots, "");
    let upstream = put("upstream", "u", json!({"name": "u", "servers": [origin.url()]}));
    assert_eq!(registry.commit_by(&[0, 2], &[upstream, route("a", "u")]).status, 201);
    serves(&node, "/a");
    let newer: Value = serde_json::from_str(&set(&registry.keys, &[0, 1, 3]).canonical()).unwrap();
    assert_eq!(registry.commit_by(&[0, 1, 3], &[put("signers", "main", newer)]).status, 201);
    let refused = registry.commit_by(&[0, 2], &[route("b", "u")]);
    assert_eq!((refused.status, refused.reason()), (422, "revoked_key"), "{}", refused.text());
    assert_eq!(registry.commit_by(&[0, 3], &[route("c", "u")]).status, 201);
    serves(&node, "/c");
    assert_eq!(get(&node.gateway(), "/b").status, 404);
    is_at(&node, 3);
    assert!(shown(node.dir.path()).0.contains("registry version 3 approved by [s0, s3] (route c)"));
}

#[test]
fn five_nodes_hear_of_a_change_from_each_other_and_need_not_wait_for_the_registry() {
    let origin = Origin::start(|_| Script::Echo);
    let registry = Registry::start();
    // Nobody is told by the registry itself: whoever waits there waits in vain.
    let relay = Relay::start(&registry, false);
    let peer =
        |node: &Node| format!("{}@{}", node.address("overlay", "node"), node.address("overlay", "oap"));
    let overlay =
        |peer: &str| format!("[overlay]\nlisten = \"127.0.0.1:0\"\nadmit = \"any\"\npeers = [\"{peer}\"]\n");
    let mut nodes: Vec<Node> = Vec::new();
    for _ in 0..5 {
        let before = peer(nodes.last().unwrap_or(registry.node()));
        nodes.push(follower(&["gateway", "overlay"], &relay, &registry.roots, &overlay(&before)));
    }
    for (index, node) in nodes.iter().enumerate() {
        let sessions = if index == 4 { 1.0 } else { 2.0 };
        node.eventually("it has its sessions", |node| node.metric("sessions_active") == sessions);
        is_at(node, 0);
        node.eventually("it has asked once", |node| status(node)["log_key"].is_string());
    }
    let upstream = put("upstream", "u", json!({"name": "u", "servers": [origin.url()]}));
    registry.commit(&[upstream, route("r", "u")]);
    for node in &nodes {
        serves(node, "/r");
    }
    // One or the other may have looked for itself at that very moment.
    let heard = |nodes: &[Node]| {
        let heard = "registry_follow_heads_total{source=\"gossip\"}";
        nodes.iter().filter(|node| node.metric(heard) >= 1.0).count()
    };
    nodes[0].eventually("they heard of it", |_| heard(&nodes) >= 3);
}

/// A folder as it is now.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn a_follower_that_has_seen_more_holds_a_registry_that_was_put_back() {
    let mut registry = Registry::start();
    let relay = Relay::start(&registry, true);
    let node = follower(&["gateway"], &relay, &registry.roots, "");
    registry.commit(&[put("x-a", "a", json!(1))]);
    let dir = registry.stop();
    let old = tempfile::tempdir().unwrap();
    copy(dir.path(), old.path());
    registry.resume(dir);
    relay.lead_to(&registry);
    registry.commit(&[put("x-a", "a", json!(2))]);
    node.eventually("the checkpoint was seen", |node| status(node)["checkpoint"] == 3);
    drop(registry.stop());
    let file = old.path().join("ron.toml");
    let mirror = format!("[registry]\nmirrors = [\"http://{}/node/follow/checkpoint\"]\n", node.admin());
    let config = std::fs::read_to_string(&file).unwrap().replacen("[registry]\n", &mirror, 1);
    std::fs::write(&file, config).unwrap();
    registry.resume(old);
    registry.node().eventually("it is held", |node| {
        let answer = get(&node.admin(), "/readyz");
        answer.status == 503
            && answer.text().contains("behind_mirror_")
            && answer.text().contains("_saw_3_has_2")
    });
    let refused = registry.commit_by(&[0, 1], &[put("x-a", "a", json!(3))]);
    assert_eq!((refused.status, refused.reason()), (503, "not_ready"), "{}", refused.text());
}

#[test]
fn a_registry_that_shows_two_histories_is_caught_and_everybody_told() {
    let origin = Origin::start(|_| Script::Echo);
    let mut registry = Registry::start();
    let relays = [Relay::start(&registry, true), Relay::start(&registry, true)];
    let overlay = "[overlay]\nlisten = \"127.0.0.1:0\"\nadmit = \"any\"\n";
    let near = follower(&["gateway", "overlay"], &relays[0], &registry.roots, overlay);
    let at = format!("{}@{}", near.address("overlay", "node"), near.address("overlay", "oap"));
    let far = format!("{overlay}peers = [\"{at}\"]\n");
    let far = follower(&["gateway", "overlay"], &relays[1], &registry.roots, &far);
    far.eventually("they are peers", |node| node.metric("sessions_active") == 1.0);
    let upstream = put("upstream", "u", json!({"name": "u", "servers": [origin.url()]}));
    registry.commit(&[upstream]);
    // A copy of everything the registry has, put back after it went on.
    let dir = registry.stop();
    let old = tempfile::tempdir().unwrap();
    copy(dir.path(), old.path());
    registry.resume(dir);
    relays.iter().for_each(|relay| relay.lead_to(&registry));
    registry.commit(&[route("true", "u")]);
    for node in [&near, &far] {
        serves(node, "/true");
        node.eventually("the checkpoint was seen", |node| status(node)["checkpoint"] == 3);
    }
    let none = ron(&["registry", "evidence", "--config", "ron.toml"], near.dir.path());
    assert!(none.status.success() && String::from_utf8_lossy(&none.stdout).contains("none"), "{none:?}");
    relays.iter().for_each(Relay::cut);
    drop(registry.stop());
    registry.resume(old);
    registry.commit(&[route("lie", "u")]);
    // Only one of them asks the registry again; the other hears of it.
    relays[0].lead_to(&registry);
    for node in [&near, &far] {
        node.eventually("it is caught", |node| missing(node, "registry_fork"));
        assert_eq!((get(&node.gateway(), "/true").status, get(&node.gateway(), "/lie").status), (200, 404));
    }
    let log_key = NoteKey::parse(get(&registry.address(), "/registry/log-key").text().trim()).unwrap();
    for (node, services) in [(near, ["gateway", "overlay"]), (far, ["gateway", "overlay"])] {
        let check = |node: &Node| {
            let said = ron(&["registry", "evidence", "--json", "--config", "ron.toml"], node.dir.path());
            assert_eq!(said.status.code(), Some(1), "{said:?}");
            let said: Value = serde_json::from_slice(&said.stdout).unwrap();
            let note = |note: &Value| Note::parse(note.as_str().unwrap().as_bytes()).unwrap();
            let notes: Vec<Note> = said["notes"].as_array().unwrap().iter().map(note).collect();
            let signed: Vec<Checkpoint> =
                notes.iter().map(|note| Checkpoint::verify(note, &log_key).unwrap()).collect();
            assert_eq!((signed.len(), signed[0].size, signed[1].size), (2, 3, 3));
            assert_ne!(signed[0].root, signed[1].root);
        };
        check(&node);
        // It is not forgotten, and the last good set is served on.
        let node = restart(node, &services);
        assert!(missing(&node, "registry_fork"));
        check(&node);
        serves(&node, "/true");
        let said = ron(&["registry", "evidence", "--config", "ron.toml"], node.dir.path());
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(
            said.contains("the log signed two histories of size 3")
                && said.contains("\u{2014} test.example/log"),
            "{said}"
        );
    }
}

#[test]
fn a_registry_that_cannot_show_how_its_checkpoints_go_together_is_caught_until_it_can() {
    let origin = Origin::start(|_| Script::Echo);
    let mut registry = Registry::start();
    let relay = Relay::start(&registry, true);
    let node = follower(&["gateway"], &relay, &registry.roots, "");
    let upstream = put("upstream", "u", json!({"name": "u", "servers": [origin.url()]}));
    registry.commit(&[upstream]);
    let dir = registry.stop();
    let old = tempfile::tempdir().unwrap();
    copy(dir.path(), old.path());
    registry.resume(dir);
    relay.lead_to(&registry);
    registry.commit(&[route("true", "u")]);
    node.eventually("the checkpoint was seen", |node| status(node)["checkpoint"] == 3);
    relay.cut();
    let dir = registry.stop();
    registry.resume(old);
    registry.commit(&[route("lie", "u")]);
    registry.commit(&[route("lie2", "u")]);
    registry.node().eventually("it has signed for both", |_| {
        get(&registry.address(), "/checkpoint").text().starts_with("test.example/log\n4\n")
    });
    relay.lead_to(&registry);
    node.eventually("it is caught", |node| missing(node, "registry_fork"));
    let said = ron(&["registry", "evidence", "--config", "ron.toml"], node.dir.path());
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("a history of size 4 that does not go with that of size 3"), "{said}");
    assert_eq!((get(&node.gateway(), "/true").status, get(&node.gateway(), "/lie").status), (200, 404));
    // The proof could have been spoilt on its way: who can give a better one is believed again.
    relay.cut();
    drop(registry.stop());
    registry.resume(dir);
    registry.commit(&[route("more", "u")]);
    relay.lead_to(&registry);
    serves(&node, "/more");
    node.eventually("all is well", |node| ready(node)["degraded"] == false);
}

#[test]
fn a_registry_is_followed_over_tls_by_whoever_knows_its_ca() {
    let mut registry = Registry::start();
    let dir = registry.stop();
    assert!(ron(&["init", "pki", "--tls"], dir.path()).status.success());
    let config = std::fs::read_to_string(dir.path().join("ron.toml")).unwrap();
    let tls = "[registry.tls]\nlisten = \"127.0.0.1:0\"\ncert = \"pki/tls/server.pem\"\nkey = \"pki/tls/server.key\"\n";
    std::fs::write(dir.path().join("ron.toml"), config + tls).unwrap();
    registry.resume(dir);
    let address = registry.node().address("registry", "https");
    let url = format!("https://localhost:{}", address.rsplit(':').next().unwrap());
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("roots.json"), registry.roots.canonical()).unwrap();
    std::fs::write(dir.path().join("ron.toml"), following_at(&url, &registry.roots, "")).unwrap();
    let ca = registry.node().dir.path().join("pki/tls/ca.pem");
    let env = [("SSL_CERT_FILE", ca.to_str().unwrap())];
    let node = Node::spawn(dir, &["run", "gateway", "--config", "ron.toml"], &env);
    let origin = Origin::start(|_| Script::Echo);
    let upstream = put("upstream", "u", json!({"name": "u", "servers": [origin.url()]}));
    let version = registry.commit(&[upstream, route("r", "u")]);
    serves(&node, "/r");
    is_at(&node, version);
}

#[test]
fn heads_that_are_told_for_nothing_do_not_make_a_follower_hammer_the_registry() {
    let registry = Registry::start();
    let relay = Relay::start(&registry, true);
    let peer = format!(
        "{}@{}",
        registry.node().address("overlay", "node"),
        registry.node().address("overlay", "oap")
    );
    let overlay = format!("[overlay]\nlisten = \"127.0.0.1:0\"\npeers = [\"{peer}\"]\n");
    let node = follower(&["gateway", "overlay"], &relay, &registry.roots, &overlay);
    node.eventually("it is a peer", |node| node.metric("sessions_active") == 1.0);
    node.eventually("it has asked once", |node| status(node)["log_key"].is_string());
    let asked = || -> f64 {
        let page = get(&registry.node().admin(), "/metrics").text();
        let heads = page
            .lines()
            .filter(|line| line.starts_with("http_requests_total{") && line.contains("/registry/head"));
        heads.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    let (before, begun) = (asked(), Instant::now());
    for version in 1..=100 {
        let told = json!({"version": version * 1000, "b3": "b3:"}).to_string();
        registry.node().admin_post("/overlay/topics/ron.registry.head", &told);
    }
    node.eventually("it has heard of them", |node| {
        node.metric("gossip_messages_total{result=\"delivered\"}") >= 100.0
    });
    // Each second one is looked at, and the registry asked to wait once more after it.
    let (asked, seconds) = (asked() - before, begun.elapsed().as_secs_f64());
    assert!(asked <= 2.0 * (seconds + 2.0), "{asked} in {seconds} s");
    assert!(!missing(&node, "registry_follow"), "nobody is to blame for what others say");
}

#[test]
fn a_node_follows_the_registry_in_its_own_process_from_its_first_start() {
    let dir = tempfile::tempdir().unwrap();
    let listen: Vec<String> = ["admin", "gateway", "edge", "overlay", "registry"]
        .iter()
        .flat_map(|service| ["--set".to_owned(), format!("{service}.listen=127.0.0.1:0")])
        .collect();
    let listen: Vec<&str> = listen.iter().map(String::as_str).collect();
    let node = Node::spawn(dir, &[&["up"], &listen[..]].concat(), &[]);
    let run = |args: &[&str]| {
        let output = ron(args, node.dir.path());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let scopes = "registry:propose,registry:approve,registry:commit";
    let token = run(&["token", "mint", "--scope", scopes, "--key", "ron-data/node.key"]);
    std::fs::write(
        node.dir.path().join("r.json"),
        "{\"path\": \"/new\", \"upstream\": \"demo\", \"cost\": 3}",
    )
    .unwrap();
    let id = run(&["registry", "put", "route", "new", "r.json", "--yes", "--token", &token]);
    run(&[
        "registry",
        "approve",
        &id,
        "--key",
        "ron-data/node.key",
        "--signer",
        "node",
        "--yes",
        "--token",
        &token,
    ]);
    run(&["registry", "commit", &id, "--token", &token]);
    let shown = || run(&["config", "show"]);
    node.eventually("it is in force", |_| {
        shown().contains("registry version 1 approved by [node] (route new)")
    });
    let admin = std::fs::read_to_string(node.dir.path().join("ron-data/admin.token")).unwrap();
    let bearer = format!("Bearer {admin}");
    let answer = request(&node.admin(), "GET", "/node/follow", &[("Authorization", &bearer)], b"").unwrap();
    assert_eq!((&answer.json()["version"], &answer.json()["in_force"]["items"]), (&json!(1), &json!(1)));
    let mut node = node;
    assert_eq!(node.stop(), 0);
    assert!(!node.log().contains("not followed now"), "an end is no trouble: {}", node.log());
}

#[test]
fn what_cannot_be_followed_is_said_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let roots = TrustRoots { log: "x".into(), signers: Registry::signers() };
    std::fs::write(dir.path().join("roots.json"), roots.canonical()).unwrap();
    let check = |follow: &str, code: i32, says: &str| {
        let text = format!(
            "[node]\nfollow = {follow}\n[admin]\nlisten = \"127.0.0.1:0\"\n[gateway]\nlisten = \"127.0.0.1:0\"\n"
        );
        std::fs::write(dir.path().join("ron.toml"), text).unwrap();
        let output = ron(&["run", "gateway", "--config", "ron.toml"], dir.path());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(code) && error.contains(says), "{follow}: {error}");
    };
    check("{ url = \"ftp://x\", trust_roots = \"roots.json\" }", 64, "node.follow.url");
    check("{ url = \"http://x:1/?a\", trust_roots = \"roots.json\" }", 64, "node.follow.url");
    check("{ url = \"http://x:1\" }", 64, "node.follow.trust_roots: is required");
    check(
        "{ url = \"http://x:1\", trust_roots = \"roots.json\", trust_roots_b3 = \"x\" }",
        64,
        "trust_roots_b3",
    );
    check("{ url = \"http://x:1\", trust_roots = \"none.json\" }", 1, "none.json cannot be read");
    let pin = format!("b3:{}", "0".repeat(64));
    check(
        &format!("{{ url = \"http://x:1\", trust_roots = \"roots.json\", trust_roots_b3 = \"{pin}\" }}"),
        1,
        "trust_roots_b3 pins",
    );
    // The file may be meant for a process with a registry too: that there is none here is said, and nothing refused.
    let node = Node::start(
        &["gateway"],
        "[node]\nfollow = { trust_roots = \"r.json\" }\n[admin]\nlisten = \"127.0.0.1:0\"\n[gateway]\nlisten = \"127.0.0.1:0\"\n",
    );
    let why = ready(&node)["why"]["registry_follow"].as_str().unwrap().to_owned();
    assert!(why.contains("no registry runs in this process"), "{why}");
}

impl Registry {
    fn signers() -> SignerSet {
        let keys: Vec<_> =
            (0..3).map(|_| SigningKey::from_bytes(&PrivateKey::generate().unwrap().seed())).collect();
        set(&keys, &[0, 1, 2])
    }
}
