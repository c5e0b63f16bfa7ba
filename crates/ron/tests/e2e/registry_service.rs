//! The registry from outside: propose, approve, commit, read, prove, refuse.

mod faults;
mod streams;
mod upkeep;
mod witnesses;

use ed25519_dalek::SigningKey;
use ron_kernel::key::PrivateKey;
use ron_log::{Approval, B3, Checkpoint, Note, NoteKey, Proposal, Role, Signer, SignerSet, TrustRoots};
use ron_testkit::{Answer, Node, get, request};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A registry with three signers of whom two must approve.
struct Registry {
    node: Node,
    keys: Vec<SigningKey>,
}

fn trust_roots(keys: &[SigningKey]) -> TrustRoots {
    let signer = |(index, key): (usize, &SigningKey)| Signer {
        id: format!("s{index}"),
        keys: vec![ron_log::key::PublicKey::Ed25519(key.verifying_key().into())],
        roles: vec![Role::Propose, Role::Approve, Role::Commit],
        not_after: None,
    };
    let signers = SignerSet::new(2, false, keys.iter().enumerate().map(signer).collect()).unwrap();
    TrustRoots { log: "test.example/log".into(), signers }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

/// The configuration with `rest` in the registry's table and below it.
fn settings(rest: &str) -> String {
    format!(
        "[node]\ndanger_ok = true\n[admin]\nlisten = \"127.0.0.1:0\"\n\
         [registry]\nlisten = \"127.0.0.1:0\"\ntrust_roots = \"trust-roots.json\"\ndir = \"reg\"\n{rest}\n"
    )
}

const OPEN: &str = "auth = \"open\"\n";

impl Registry {
    /// `rest` goes into the registry's table.
    fn start(rest: &str) -> Registry {
        Registry::start_in(tempfile::tempdir().unwrap(), rest)
    }

    fn start_in(dir: tempfile::TempDir, rest: &str) -> Registry {
        let keys: Vec<_> =
            (0..3).map(|_| SigningKey::from_bytes(&PrivateKey::generate().unwrap().seed())).collect();
        let file = trust_roots(&keys).canonical();
        std::fs::write(dir.path().join("trust-roots.json"), file).unwrap();
        std::fs::write(dir.path().join("ron.toml"), settings(rest)).unwrap();
        Registry { node: spawn(dir), keys }
    }

    fn address(&self) -> String {
        self.node.address("registry", "http")
    }

    /// Ends the process with a signal and starts it again in the same folder.
    fn restart(&mut self, signal: &str) {
        self.node.signal(signal);
        self.node.wait();
        self.start_again();
    }

    /// Starts a node in the folder of one that has ended.
    fn start_again(&mut self) {
        let dir = std::mem::replace(&mut self.node.dir, tempfile::tempdir().unwrap());
        let _ = std::fs::remove_file(dir.path().join("addresses.json"));
        self.node = spawn(dir);
    }

    fn get(&self, path: &str) -> Answer {
        get(&self.address(), path)
    }

    fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_with(path, &[], body.to_string().as_bytes())
    }

    fn post_with(&self, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut all = vec![("Content-Type", "application/json")];
        all.extend(headers);
        request(&self.address(), "POST", path, &all, body).unwrap()
    }

    fn payload(&self, id: &str, body: &Value) -> Value {
        let head = self.get("/registry/head").json();
        payload(&head, id, body)
    }

    fn approval(&self, index: usize, payload: &Value) -> Value {
        let b3 = Proposal::parse(payload.to_string().as_bytes()).unwrap().b3();
        let approval = Approval::sign(&format!("s{index}"), &self.keys[index], b3, now());
        serde_json::from_str(&approval.canonical()).unwrap()
    }

    /// A payload with two approvals.
    fn approved(&self, payload: &Value) -> Value {
        json!({"payload": payload, "approvals": [self.approval(0, payload), self.approval(1, payload)]})
    }

    /// Commits a change of one item in one round trip.
    fn commit(&self, id: &str, body: &Value) -> Answer {
        self.post("/registry/proposals?commit=true", &self.approved(&self.payload(id, body)))
    }

    fn committed(&self, count: usize) {
        for n in 0..count {
            let answer = self.commit(&format!("{}", n % 5), &json!(n));
            assert_eq!(answer.status, 201, "{}", answer.text());
        }
    }

    fn metric(&self, series: &str) -> f64 {
        self.node.metric(series)
    }

    fn ready(&self, scope: &str) -> Answer {
        get(&self.node.admin(), &format!("/readyz?scope={scope}"))
    }
}

fn spawn(dir: tempfile::TempDir) -> Node {
    Node::spawn(dir, &["run", "registry", "--config", "ron.toml"], &[])
}

fn payload(head: &Value, id: &str, body: &Value) -> Value {
    let nonce = format!("{:032x}", u128::from(ron_kernel::random::u64()));
    json!({
        "schema": "ron.registry/1", "base_version": head["version"], "signers_version": head["signers_version"],
        "nonce": nonce, "ops": [{"op": "put", "kind": "x-demo", "id": id, "body": body}], "note": "é\"",
        "expires_at": now() + 3_600_000,
    })
}

/// The log's key, as it is served.
fn log_key(registry: &Registry) -> NoteKey {
    NoteKey::parse(registry.get("/registry/log-key").text().trim()).unwrap()
}

#[test]
fn a_change_is_proposed_approved_committed_and_served() {
    let registry = Registry::start(OPEN);
    let head = registry.get("/registry/head").json();
    assert_eq!((&head["version"], &head["signers_version"]), (&json!(0), &json!(0)));
    let payload = registry.payload("1", &json!({"n": 1}));
    let b3 = Proposal::parse(payload.to_string().as_bytes()).unwrap().b3().to_string();
    let proposed = registry.post("/registry/proposals", &payload);
    assert_eq!(proposed.status, 202);
    assert_eq!(proposed.json()["payload_b3"], b3.as_str());
    let again = registry.post("/registry/proposals", &payload);
    assert_eq!((again.status, again.json()), (202, proposed.json()), "idempotent");
    let approvals = format!("/registry/approvals/{b3}");
    let first = registry.post(&approvals, &registry.approval(0, &payload)).json();
    assert_eq!(first, json!({"approvals": 1, "quorum": {"m": 2, "n": 3}, "met": false}));
    let listed = registry.get("/registry/proposals").json();
    assert_eq!(listed["proposals"][0]["approved_by"], json!(["s0"]));
    let commit = format!("/registry/commit/{b3}");
    assert_eq!(registry.post(&commit, &json!({})).reason(), "quorum_failed");
    assert_eq!(registry.post(&approvals, &registry.approval(1, &payload)).json()["met"], true);
    let one = registry.get(&format!("/registry/proposals/{b3}")).json();
    assert_eq!((&one["state"], &one["met"], &one["payload"]), (&json!("pending"), &json!(true), &payload));
    let committed = registry.post(&commit, &json!({}));
    assert_eq!((committed.status, &committed.json()["version"]), (201, &json!(1)));
    let repeated = registry.post(&commit, &json!({}));
    assert_eq!((repeated.status, &repeated.json()["hash"]), (201, &committed.json()["hash"]));
    let settled = registry.get(&format!("/registry/proposals/{b3}")).json();
    assert_eq!((&settled["state"], &settled["version"]), (&json!("committed"), &json!(1)));
    let entry = registry.get("/registry/1");
    assert_eq!((&entry.json()["payload"], &entry.json()["hash"]), (&payload, &committed.json()["hash"]));
    assert!(entry.header("cache-control").unwrap().contains("immutable"));
    let item = registry.get("/registry/items/x-demo/1").json();
    assert_eq!((&item["version"], &item["body"]), (&json!(1), &json!({"n": 1})));
    assert_eq!(registry.get("/registry/items?at=0&kind=x-demo").json()["items"], json!([]));
    assert_eq!(registry.get("/registry/items").json()["items"].as_array().unwrap().len(), 2);
    let log = registry.get("/registry/log?from=0&limit=1").json();
    assert_eq!((log["entries"].as_array().unwrap().len(), &log["next"]), (1, &json!(1)));
    assert_eq!(registry.get("/registry/log").json()["entries"][1], entry.json());
    // What HEAD did can be undone, by approval like anything else.
    let undo = registry.post("/registry/supersede", &json!({}));
    assert_eq!(undo.status, 202);
    let undone =
        registry.post("/registry/proposals?commit=true", &registry.approved(&undo.json()["payload"]));
    assert_eq!(undone.status, 201, "{}", undone.text());
    assert_eq!(registry.get("/registry/items/x-demo/1").status, 404);
    assert_eq!(registry.get("/registry/items/x-demo/1?at=1").json()["body"], json!({"n": 1}));
    // One that is withdrawn is gone.
    let other = registry.payload("2", &json!(2));
    let id = registry.post("/registry/proposals", &other).json()["proposal_id"].as_str().unwrap().to_owned();
    let path = format!("/registry/proposals/{id}");
    assert_eq!(request(&registry.address(), "DELETE", &path, &[], b"").unwrap().status, 200);
    assert_eq!(registry.get(&path).json()["state"], "withdrawn");
    assert_eq!(registry.metric("registry_updates_total{result=\"committed\"}"), 2.0);
    assert_eq!(registry.metric("registry_head_version"), 2.0);
    assert!(registry.metric("approval_verify_seconds_count{alg=\"ed25519\"}") >= 4.0);
}

#[test]
fn what_is_served_is_proved_by_the_log_key_alone() {
    let mut registry =
        Registry::start(&format!("{OPEN}checkpoint = {{ interval = \"1h\", entries = 1000 }}"));
    registry.committed(260);
    let last = registry.approved(&registry.payload("last", &json!(1)));
    let waited = registry.post("/registry/proposals?commit=true&wait=checkpointed", &last);
    assert_eq!(waited.status, 201, "{}", waited.text());
    let key = log_key(&registry);
    let note = Note::parse(&registry.get("/checkpoint").body).unwrap();
    let checkpoint = Checkpoint::verify(&note, &key).unwrap();
    assert_eq!(checkpoint.size, 262);
    assert_eq!(registry.get("/registry/head").json()["checkpoint"]["size"], 262);
    let hashes = |answer: &Value| -> Vec<[u8; 32]> {
        use base64::Engine as _;
        let decode = |text: &Value| base64::prelude::BASE64_STANDARD.decode(text.as_str().unwrap()).unwrap();
        answer["hashes"].as_array().unwrap().iter().map(|text| decode(text).try_into().unwrap()).collect()
    };
    let bundle = registry.get("/tile/entries/000").body;
    let records = ron_log::tile::records(&bundle).unwrap();
    assert_eq!(records.len(), 256);
    let leaf = ron_log::tree::leaf_hash(records[7]);
    let path = hashes(&registry.get("/registry/proof/inclusion?version=7").json());
    assert!(ron_log::tree::verify_inclusion(&leaf, 7, 262, &path, &checkpoint.root));
    assert_eq!(registry.get("/tile/0/000").body[7 * 32..8 * 32], leaf);
    assert_eq!(registry.get("/tile/0/001.p/6").body.len(), 6 * 32);
    assert_eq!(registry.get("/tile/0/001.p/7").status, 404, "the tree has no such tile");
    let item = registry.get("/registry/items/x-demo/last?proof=1").json();
    let record = ron_log::tile::records(&registry.get("/tile/entries/001.p/6").body).unwrap()[5].to_vec();
    let path = hashes(&item["proof"]);
    let leaf = ron_log::tree::leaf_hash(&record);
    assert!(ron_log::tree::verify_inclusion(&leaf, 261, 262, &path, &checkpoint.root));
    assert_eq!(item["entry"]["version"], 261);
    registry.committed(3);
    let path = hashes(&registry.get("/registry/proof/consistency?from=100&to=262").json());
    let tree = |size: u64| {
        ron_log::Tree::from_tiles(size, |tile| {
            Ok::<_, ()>(registry.get(&format!("/tile/{}", ron_log::tile::TilePath::Hashes(tile))).body)
        })
    };
    assert!(ron_log::tree::verify_consistency(100, 262, &path, &tree(100).unwrap().root(), &checkpoint.root));
    let snapshot = registry.get("/registry/snapshot").json();
    let signed =
        ron_log::Snapshot::verify(&Note::parse(snapshot["note"].as_str().unwrap().as_bytes()).unwrap(), &key)
            .unwrap();
    let state = ron_log::json::Json::parse(snapshot["state"].to_string().as_bytes()).unwrap().canonical();
    assert_eq!(signed.state_b3, B3::of(state.as_bytes()));
    let export = registry.get("/registry/export").body;
    std::fs::write(registry.node.dir.path().join("log.export"), &export).unwrap();
    let public = PrivateKey::read(&registry.node.dir.path().join("node.key")).unwrap().public().to_string();
    let check = |file: &str| {
        let args = ["registry", "verify", "--export", file, "--log-key", &public];
        ron_testkit::ron(&args, registry.node.dir.path())
    };
    let covering = registry.get("/checkpoint").body;
    let good = check("log.export");
    assert!(String::from_utf8_lossy(&good.stdout).starts_with("good: 265 entries"), "{good:?}");
    let mut spoiled = export.clone();
    let middle = spoiled.len() / 2;
    spoiled[middle] ^= 1;
    std::fs::write(registry.node.dir.path().join("bad.export"), &spoiled).unwrap();
    assert_eq!(check("bad.export").status.code(), Some(1));
    assert!(registry.metric("registry_checkpoint_age_seconds") < 60.0);
    registry
        .node
        .eventually("everything is verified again", |node| node.metric("registry_verified_version") == 264.0);
    registry.restart("TERM");
    assert_eq!(registry.get("/checkpoint").body, covering, "it is kept");
    assert_eq!(registry.get("/registry/head").json()["version"], 264);
}

#[test]
fn every_refusal_has_its_status_its_reason_and_its_count() {
    let registry = Registry::start(&format!(
        "{OPEN}limits = {{ max_body_bytes = \"4KiB\", decompress_ratio_cap = 10 }}"
    ));
    let good = registry.payload("a", &json!(1));
    let id = registry.post("/registry/proposals", &good).json()["proposal_id"].as_str().unwrap().to_owned();
    let (approve, commit) = (format!("/registry/approvals/{id}"), format!("/registry/commit/{id}"));
    let with = |member: &str, value: Value| {
        let mut payload = registry.payload("b", &json!(2));
        payload[member] = value;
        payload
    };
    let mut forged = registry.approval(1, &good);
    forged["signer"] = json!("s2");
    let mut stranger = registry.approval(1, &good);
    stranger["signer"] = json!("nobody");
    assert_eq!(registry.post(&approve, &registry.approval(0, &good)).status, 200);
    let mut second = registry.approval(1, &good);
    second["signer"] = json!("s0");
    let unknown = format!("/registry/commit/{}", B3::ZERO);
    assert_eq!(registry.commit("b", &json!(0)).status, 201);
    let unwitnessed = format!("{commit}?wait=witnessed:1");
    let cases: [(u16, &str, &str, Value); 15] = [
        (400, "malformed", &unwitnessed, json!({})),
        (400, "malformed", "/registry/proposals", with("base_version", json!(9))),
        (400, "malformed", "/registry/proposals", json!({"schema": "other"})),
        (400, "malformed", "/registry/proposals?comit=true", good.clone()),
        (400, "malformed", "/registry/commit/1", json!({})),
        (400, "malformed", &approve, json!({"signer": "s1"})),
        (404, "not_found", &unknown, json!({})),
        (409, "duplicate_approval", &approve, second),
        (413, "body_cap", "/registry/proposals", json!("x".repeat(5000))),
        (422, "invalid_sig", &approve, forged),
        (422, "revoked_key", &approve, stranger),
        (422, "quorum_failed", &commit, json!({})),
        (422, "policy_changed", "/registry/proposals", with("signers_version", json!(7))),
        (422, "expired", "/registry/proposals", with("expires_at", json!(now() - 1000))),
        (
            409,
            "chain_mismatch",
            "/registry/proposals?commit=true",
            registry.approved(&with("base_version", json!(0))),
        ),
    ];
    for (status, reason, path, body) in cases {
        let series = format!("rejected_total{{service=\"registry\",reason=\"{reason}\"}}");
        let before = registry.metric(&series);
        let answer = registry.post(path, &body);
        assert_eq!((answer.status, answer.reason()), (status, reason), "{path} {}", answer.text());
        assert_eq!(answer.json()["code"], reason);
        assert!(registry.metric(&series) > before, "{reason} is not counted");
    }
    assert!(registry.metric("commit_cas_fail_total") >= 1.0);
    let odd = registry.post("/registry/proposals", &with("extra", json!(1)));
    assert!(odd.status == 400 && odd.text().contains("extra"), "{}", odd.text());
}

#[test]
fn what_cannot_be_read_is_refused_and_bombs_are_stopped() {
    let registry = Registry::start(&format!(
        "{OPEN}limits = {{ max_body_bytes = \"4KiB\", decompress_ratio_cap = 10 }}"
    ));
    let (approve, commit) =
        (format!("/registry/approvals/{}", B3::ZERO), format!("/registry/commit/{}", B3::ZERO));
    let raw = |text: &str| {
        let mut client = ron_testkit::Client::connect(&registry.address()).unwrap();
        client.send(text.as_bytes()).unwrap();
        let answer = client.read_answer("POST").unwrap();
        (answer.status, answer.reason().to_owned())
    };
    let lacking = format!("POST {commit} HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(raw(&lacking), (411, "length_required".to_owned()));
    let other = "PUT /registry/head HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n";
    assert_eq!(raw(other), (405, "method".to_owned()));
    let coded =
        format!("POST {approve} HTTP/1.1\r\nHost: a\r\nContent-Encoding: lzma\r\nContent-Length: 1\r\n\r\nx");
    assert_eq!(raw(&coded), (415, "unsupported_encoding".to_owned()));
    for (path, status) in
        [("/registry/99", 404), ("/registry/none", 404), ("/", 404), ("/registry/items/x-demo/zz", 404)]
    {
        assert_eq!(registry.get(path).status, status, "{path}");
    }
    for bad in [
        "/registry/log?from=x",
        "/registry/log?limit=0",
        "/registry/items/nokind/1",
        "/registry/head?wait=soon",
        "/registry/proof/inclusion",
    ] {
        assert_eq!(registry.get(bad).reason(), "malformed", "{bad}");
    }
    // A bomb stops at the ratio; an honest body passes.
    let bomb = gzip(&[b' '; 1 << 16]);
    let answer = registry.post_with("/registry/proposals", &[("Content-Encoding", "gzip")], &bomb);
    assert!([413].contains(&answer.status), "{}", answer.text());
    let packed = gzip(registry.payload("gz", &json!(1)).to_string().as_bytes());
    let answer = registry.post_with("/registry/proposals", &[("Content-Encoding", "gzip")], &packed);
    assert_eq!(answer.status, 202, "{}", answer.text());
    assert_eq!(registry.get("/registry/head").header("access-control-allow-origin"), None, "CORS is off");
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut child = std::process::Command::new("gzip")
        .arg("-c")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    child.wait_with_output().unwrap().stdout
}

#[test]
fn a_write_needs_a_capability_with_its_scope() {
    let registry = Registry::start("");
    let dir = registry.node.dir.path();
    let mint = |args: &[&str]| {
        let all = [&["token", "mint", "--key", "node.key"], args].concat();
        String::from_utf8(ron_testkit::ron(&all, dir).stdout).unwrap().trim().to_owned()
    };
    let payload = registry.payload("a", &json!(1));
    let propose = |path: &str, token: &str, body: &Value| {
        let bearer = format!("bEARER {token}");
        let headers = if token.is_empty() { vec![] } else { vec![("Authorization", bearer.as_str())] };
        registry.post_with(path, &headers, body.to_string().as_bytes())
    };
    let none = propose("/registry/proposals", "", &payload);
    assert_eq!(
        (none.status, none.reason(), none.header("www-authenticate")),
        (401, "unauth", Some("Bearer"))
    );
    assert_eq!(propose("/registry/proposals", "junk", &payload).reason(), "token_invalid");
    let approver = mint(&["--scope", "registry:approve"]);
    assert_eq!(propose("/registry/proposals", &approver, &payload).reason(), "forbidden");
    let elsewhere = mint(&["--scope", "registry:propose", "--aud", "edge"]);
    assert_eq!(propose("/registry/proposals", &elsewhere, &payload).reason(), "token_audience");
    let proposer = mint(&["--scope", "registry:propose"]);
    assert_eq!(propose("/registry/proposals", &proposer, &payload).status, 202);
    let whole = registry.approved(&payload);
    assert_eq!(propose("/registry/proposals?commit=true", &proposer, &whole).reason(), "forbidden");
    let both = mint(&["--scope", "registry:propose,registry:commit"]);
    assert_eq!(propose("/registry/proposals?commit=true", &both, &whole).status, 201);
    assert_eq!(registry.get("/registry/head").json()["version"], 1, "reading needs nothing");
}

#[test]
fn a_page_of_another_site_can_neither_write_nor_listen() {
    let registry = Registry::start(OPEN);
    let (address, body) = (registry.address(), registry.payload("a", &json!(1)).to_string());
    let send = |method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]| {
        let answer = request(&address, method, path, headers, body).unwrap();
        (answer.status, answer.reason().to_owned())
    };
    let json = ("Content-Type", "application/json");
    // What the requests of these tests call their host.
    let own = "http://test";
    let foreign = ("Origin", "http://elsewhere.example");
    let refused = (403, "forbidden".to_owned());
    assert_eq!(send("POST", "/registry/proposals", &[json, foreign], body.as_bytes()), refused);
    assert_eq!(send("POST", "/registry/supersede", &[("Origin", "null")], b""), refused);
    assert_eq!(send("GET", "/registry/ws", &[foreign], b""), refused);
    assert_eq!(send("GET", "/registry/head", &[foreign], b"").0, 200, "reading is for everybody");
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"] {
        let sent = send("POST", "/registry/proposals", &[("Content-Type", kind)], body.as_bytes());
        assert_eq!(sent, (400, "malformed".to_owned()), "{kind}");
    }
    assert_eq!(send("POST", "/registry/proposals", &[], body.as_bytes()).0, 400, "no type at all");
    assert_eq!(send("POST", "/registry/proposals", &[json, ("Origin", own)], body.as_bytes()).0, 202);
}

#[test]
fn cbor_is_spoken_as_well_as_json() {
    let registry = Registry::start(OPEN);
    let body = registry.approved(&registry.payload("a", &json!({"f": 1.5, "n": -3, "t": ["é", null, true]})));
    let headers = [("Content-Type", "application/cbor"), ("Accept", "application/cbor")];
    let answer = request(
        &registry.address(),
        "POST",
        "/registry/proposals?commit=true",
        &headers,
        &svc_registry::cbor::encode(&body),
    )
    .unwrap();
    assert_eq!((answer.status, answer.header("content-type")), (201, Some("application/cbor")));
    assert_eq!(svc_registry::cbor::decode(&answer.body).unwrap()["version"], 1);
    let entry = request(&registry.address(), "GET", "/registry/1", &headers[1..], b"").unwrap();
    let plain = registry.get("/registry/1");
    assert_eq!(svc_registry::cbor::decode(&entry.body).unwrap(), plain.json());
    assert_ne!(entry.header("etag"), plain.header("etag"), "other bytes, another tag");
    assert_eq!((entry.header("vary"), plain.header("vary")), (Some("Accept"), Some("Accept")));
    let first = registry.get("/registry/log?limit=1");
    assert_eq!(first.header("cache-control"), None, "retention may move the first version");
    assert!(registry.get("/registry/log?from=0&limit=1").header("cache-control").is_some());
    let bad = request(&registry.address(), "POST", "/registry/proposals", &headers, b"\x9f\xff").unwrap();
    assert_eq!((bad.status, bad.reason()), (400, "malformed"));
}

#[test]
fn head_has_a_validator_and_can_be_waited_for() {
    let registry = Registry::start(OPEN);
    registry.node.eventually("the first checkpoint", |_| registry.get("/checkpoint").status == 200);
    let head = registry.get("/registry/head");
    let etag = head.header("etag").unwrap().to_owned();
    let again =
        request(&registry.address(), "GET", "/registry/head", &[("If-None-Match", &etag)], b"").unwrap();
    assert_eq!((again.status, again.body.len()), (304, 0));
    let begun = std::time::Instant::now();
    let same = registry.get("/registry/head?wait=300ms&after=0");
    assert_eq!((same.status, &same.json()["version"]), (200, &json!(0)));
    assert!(begun.elapsed() >= Duration::from_millis(300));
    let address = registry.address();
    let waiting = std::thread::spawn(move || get(&address, "/registry/head?wait=20s&after=0"));
    assert_eq!(registry.commit("a", &json!(1)).status, 201);
    assert_eq!(waiting.join().unwrap().json()["version"], 1);
    assert_ne!(registry.get("/registry/head").header("etag").unwrap(), etag);
    let entry = registry.get("/registry/1");
    let etag = entry.header("etag").unwrap();
    let again = request(&registry.address(), "GET", "/registry/1", &[("If-None-Match", etag)], b"").unwrap();
    assert_eq!(again.status, 304);
}

#[test]
fn two_that_race_for_one_item_are_not_both_committed() {
    let registry = Registry::start(&format!("{OPEN}strict_head = false"));
    let head = registry.get("/registry/head").json();
    let bodies: Vec<Value> = (0..8).map(|n| registry.approved(&payload(&head, "same", &json!(n)))).collect();
    let answers: Vec<u16> = std::thread::scope(|scope| {
        let one = |body: &Value| registry.post("/registry/proposals?commit=true", body).status;
        #[expect(clippy::needless_collect, reason = "all begin before the first is waited for")]
        let running: Vec<_> = bodies.iter().map(|body| scope.spawn(move || one(body))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(answers.iter().filter(|status| **status == 201).count(), 1, "{answers:?}");
    assert_eq!(answers.iter().filter(|status| **status == 409).count(), 7, "{answers:?}");
    assert_eq!(registry.get("/registry/head").json()["version"], 1);
}

#[test]
fn the_quorum_alone_commits_where_that_is_wanted_and_a_new_signer_set_takes_over() {
    let registry = Registry::start(&format!("{OPEN}auto_commit = true"));
    let payload = registry.payload("a", &json!(1));
    let id =
        registry.post("/registry/proposals", &payload).json()["proposal_id"].as_str().unwrap().to_owned();
    let approve = format!("/registry/approvals/{id}");
    registry.post(&approve, &registry.approval(0, &payload));
    let last = registry.post(&approve, &registry.approval(2, &payload)).json();
    assert_eq!(last["committed"]["version"], 1, "{last}");
    let mut rotation = registry.payload("a", &json!(1));
    let set = trust_roots(&registry.keys[..2]).signers.canonical();
    let body: Value = serde_json::from_str(&set).unwrap();
    rotation["ops"] = json!([{"op": "put", "kind": "signers", "id": "main", "body": body}]);
    let done = registry.post("/registry/proposals?commit=true", &registry.approved(&rotation));
    assert_eq!((done.status, &done.json()["signers_version"]), (201, &json!(2)), "{}", done.text());
    let next = registry.payload("b", &json!(1));
    let both =
        json!({"payload": next, "approvals": [registry.approval(0, &next), registry.approval(2, &next)]});
    assert_eq!(registry.post("/registry/proposals?commit=true", &both).reason(), "revoked_key");
}

#[test]
fn the_page_of_routes_is_served_and_true() {
    let registry = Registry::start(OPEN);
    let page = registry.get("/registry/openapi.json").json();
    assert_eq!(page["openapi"], "3.1.0");
    for (path, operations) in page["paths"].as_object().unwrap() {
        if operations["get"].is_null() || path.contains("stream") || path.contains("/ws") {
            continue;
        }
        let asked = path.replace("{version}", "0").replace("{kind}", "signers").replace("{id}", "main");
        let asked =
            asked.replace("{path}", "0/000.p/1").replace("proof/inclusion", "proof/inclusion?version=0");
        let asked = asked.replace("proof/consistency", "proof/consistency?from=1");
        let asked =
            if path.contains("proposals/{id}") { format!("/registry/proposals/{}", B3::ZERO) } else { asked };
        registry.node.eventually("a first checkpoint", |_| registry.get("/checkpoint").status == 200);
        let expected = if path.contains("proposals/{id}") { 404 } else { 200 };
        let answer = registry.get(&asked);
        assert_eq!(answer.status, expected, "{asked}");
        is_as_written(&page, &operations["get"], &answer);
    }
    // What is written is answered as the page says too, and so is what is refused.
    let sent = registry.payload("a", &json!(1));
    let proposed = registry.post("/registry/proposals", &sent);
    let id = proposed.json()["proposal_id"].as_str().unwrap().to_owned();
    let approve =
        |index: usize| registry.post(&format!("/registry/approvals/{id}"), &registry.approval(index, &sent));
    let paths = &page["paths"];
    is_as_written(&page, &paths["/registry/proposals"]["post"], &proposed);
    is_as_written(&page, &paths["/registry/approvals/{id}"]["post"], &approve(0));
    is_as_written(
        &page,
        &paths["/registry/proposals/{id}"]["get"],
        &registry.get(&format!("/registry/proposals/{id}")),
    );
    is_as_written(&page, &paths["/registry/proposals"]["get"], &registry.get("/registry/proposals"));
    let commit = || registry.post(&format!("/registry/commit/{id}"), &json!({}));
    is_as_written(&page, &paths["/registry/commit/{id}"]["post"], &commit());
    approve(1);
    is_as_written(&page, &paths["/registry/commit/{id}"]["post"], &commit());
    let item = registry.get("/registry/items/x-demo/a?proof=1");
    is_as_written(&page, &paths["/registry/items/{kind}/{id}"]["get"], &item);
    is_as_written(
        &page,
        &paths["/registry/supersede"]["post"],
        &registry.post("/registry/supersede", &json!({})),
    );
}

/// An answer has a status and the members that the page of routes says, and no others.
fn is_as_written(page: &Value, operation: &Value, answer: &Answer) {
    let told = &operation["responses"][answer.status.to_string()];
    assert!(told.is_object(), "{} of {}", answer.status, operation["summary"]);
    let kind = answer.header("content-type").unwrap().split(';').next().unwrap();
    let content = &told["content"][kind];
    assert!(content.is_object(), "{kind} of {}: {told}", operation["summary"]);
    if kind.ends_with("json") && !content["schema"].is_null() {
        assert_eq!(misfit(page, &content["schema"], &answer.json()), None, "{}", answer.text());
    }
}

/// What of a value is not as a schema has it.
fn misfit(page: &Value, schema: &Value, value: &Value) -> Option<String> {
    let wrong = |what: &str| Some(format!("{value}: {what}"));
    if let Some(name) = schema["$ref"].as_str() {
        let schema = page.pointer(name.trim_start_matches('#')).expect("a schema that is there");
        return misfit(page, schema, value);
    }
    if let Some(several) = schema["oneOf"].as_array() {
        let fits = several.iter().filter(|schema| misfit(page, schema, value).is_none()).count();
        return if fits == 1 { None } else { wrong(&format!("fits {fits} of {several:?}")) };
    }
    if let Some(known) = schema["enum"].as_array() {
        return if known.contains(value) { None } else { wrong(&format!("is none of {known:?}")) };
    }
    let is_kind = match schema["type"].as_str() {
        None => schema["const"].is_null() || schema["const"] == *value,
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("integer") => value.is_u64(),
        Some("boolean") => value.is_boolean(),
        Some("null") => value.is_null(),
        Some(other) => panic!("{other}"),
    };
    if !is_kind {
        return wrong(&format!("is not {schema}"));
    }
    let mut items = value.as_array().into_iter().flatten();
    if let Some(bad) = items.find_map(|item| misfit(page, &schema["items"], item)) {
        return Some(bad);
    }
    let (members, properties) = (value.as_object()?, schema["properties"].as_object()?);
    let required = schema["required"].as_array().into_iter().flatten();
    if let Some(missing) = required.into_iter().find(|name| !members.contains_key(name.as_str().unwrap())) {
        return wrong(&format!("lacks {missing}"));
    }
    members.iter().find_map(|(name, value)| match properties.get(name) {
        Some(schema) => misfit(page, schema, value),
        None => wrong(&format!("has {name:?}")),
    })
}

fn flip(path: &Path, at: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at] ^= 0x10;
    std::fs::write(path, bytes).unwrap();
}
