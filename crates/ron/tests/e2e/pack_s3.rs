//! Packs in an object store. The store is moto, a server by others that computes every signature itself and refuses what
//! has another one; `cargo xtask test` installs it.

use crate::edge::config;
use crate::edge_fill::{certificates, start_tls};
use crate::pack_remote::{PATIENT, bytes, check, coord, is_serving, listed, ranged, sample, tile};
use crate::packs::start;
use ron_testkit::{Node, Script, get, request};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A store with a user, who may do everything, and with a bucket.
pub(crate) struct Moto {
    server: Child,
    address: String,
    /// Of the user: the key's name, and the secret.
    id: String,
    secret: String,
    /// Its log: a line for each request.
    lines: Arc<Mutex<Vec<String>>>,
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Moto {
    pub(crate) fn start() -> Moto {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../tools/s3");
        assert!(folder.join("moto").exists(), "run `cargo xtask test`, which installs moto");
        let mut server = Command::new("python3")
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p", "0"])
            .env("PYTHONPATH", &folder)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(server.stderr.take().unwrap()).lines();
        let address = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| Some(line.split_once("Running on http://")?.1.trim().to_owned()));
        let seen: Arc<Mutex<Vec<String>>> = Arc::default();
        let kept = seen.clone();
        std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| kept.lock().unwrap().push(line))
        });
        let (id, secret) = (String::new(), String::new());
        let mut moto = Moto { server, address: address.unwrap(), id, secret, lines: seen };
        // The first request of each kind has it load much.
        let begun = Instant::now();
        while !moto.answers("iam") || !moto.answers("s3") {
            assert!(begun.elapsed() < Duration::from_secs(120), "moto does not answer");
        }
        moto.iam("CreateUser", "");
        let key = moto.iam("CreateAccessKey", "");
        let within = |name: &str| {
            key.split_once(&format!("<{name}>")).unwrap().1.split('<').next().unwrap().to_owned()
        };
        (moto.id, moto.secret) = (within("AccessKeyId"), within("SecretAccessKey"));
        let allowed =
            r#"{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}"#;
        let allowed: String = allowed.bytes().map(|byte| format!("%{byte:02X}")).collect();
        moto.iam("PutUserPolicy", &format!("&PolicyName=all&PolicyDocument={allowed}"));
        moto.put("/tiles", b"");
        moto
    }

    fn answers(&self, service: &str) -> bool {
        let field = unchecked(service);
        request(&self.address, "GET", "/?Action=ListUsers", &[("Authorization", &*field)], b"").is_ok()
    }

    fn iam(&self, action: &str, more: &str) -> String {
        let field = unchecked("iam");
        let fields = [("Authorization", &*field), ("Content-Type", "application/x-www-form-urlencoded")];
        let body = format!("Action={action}&Version=2010-05-08&UserName=ron{more}");
        let answer = request(&self.address, "POST", "/", &fields, body.as_bytes()).unwrap();
        assert_eq!(answer.status, 200, "{action}: {}", answer.text());
        answer.text()
    }

    /// Puts an object, or makes a bucket, while nobody is asked who he is.
    pub(crate) fn put(&self, path: &str, body: &[u8]) {
        self.ask_for_keys(false);
        // What is there already may be replaced by somebody only.
        let field = unchecked("s3");
        let fields = [("Authorization", &*field), ("Content-Type", "text/plain")];
        let answer = request(&self.address, "PUT", path, &fields, body).unwrap();
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        self.ask_for_keys(true);
        assert!(get(&self.address, path).status >= 400, "nobody gets it without keys");
    }

    fn ask_for_keys(&self, ask: bool) {
        let count: &[u8] = if ask { b"0" } else { b"inf" };
        let plain = [("Content-Type", "text/plain")];
        let answer = request(&self.address, "POST", "/moto-api/reset-auth", &plain, count).unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    /// The user's key: its name, and the secret.
    pub(crate) fn keys(&self) -> (&str, &str) {
        (&self.id, &self.secret)
    }

    /// Waits until its log says that it was asked for a path in this way so often, and not more often.
    pub(crate) fn was_asked(&self, method: &str, path: &str, times: usize) {
        let wanted = format!("\"{method} {path} ");
        let count = || self.lines.lock().unwrap().iter().filter(|line| line.contains(&wanted)).count();
        let begun = Instant::now();
        while count() < times && begun.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(count(), times, "{method} {path}");
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.server.id().to_string();
        assert!(Command::new("kill").args([format!("-{name}"), pid]).status().unwrap().success());
    }

    /// The table of this store.
    pub(crate) fn table(&self, keys: &str) -> String {
        let address = &self.address;
        format!(
            "[edge.s3]\nendpoint = \"http://{address}\"\nallow_http = true\nallow_private = true\n{keys}\n"
        )
    }
}

/// Says who asks, and of which service, while that is believed.
fn unchecked(service: &str) -> String {
    format!(
        "AWS4-HMAC-SHA256 Credential=x/20200101/us-east-1/{service}/aws4_request, SignedHeaders=host, Signature=x"
    )
}

/// A file of keys that only its owner can read, put in the place of the one before.
pub(crate) fn write_keys(dir: &Path, id: &str, secret: &str) {
    let new = dir.join("s3.new");
    std::fs::write(&new, format!("[default]\naws_access_key_id = {id}\naws_secret_access_key = {secret}\n"))
        .unwrap();
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::rename(new, dir.join("s3.keys")).unwrap();
}

fn pack(name: &str, key: &str) -> String {
    format!("[[edge.packs]]\nname = \"{name}\"\npath = \"s3://{key}\"\n")
}

fn refused(node: &Node, name: &str) -> String {
    listed(node, name)["refused"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn tiles_come_out_of_a_bucket_of_moto_for_those_who_have_its_keys() {
    let moto = Moto::start();
    moto.put("/tiles/maps/far%20away.pmtiles", &bytes(1));
    let dir = tempfile::tempdir().unwrap();
    write_keys(dir.path(), &moto.id, &moto.secret);
    let tables = [
        moto.table("credentials_file = \"s3.keys\"\nregion = \"us-east-1\"\npath_style = true"),
        pack("far", "tiles/maps/far away.pmtiles"),
        pack("nokey", "tiles/nothing.pmtiles"),
        pack("nobucket", "nobody/nothing.pmtiles"),
    ];
    let node = start(dir, &config("", &format!("{PATIENT}{}", tables.concat())));
    node.eventually("the store is reached", |node| is_serving(node, "far"));
    for at in sample(1).coords().step_by(97) {
        let answer = tile(&node, "far", at);
        match sample(1).tile(at) {
            Some(tile) => assert_eq!((answer.status, answer.body), (200, tile), "{at}"),
            None => assert!(matches!(answer.status, 204 | 404), "{at} {}", answer.status),
        }
    }
    let whole = request(&node.address("edge", "http"), "GET", "/edge/packs/far.pmtiles", &[], b"").unwrap();
    assert!(whole.status == 200 && whole.body == bytes(1));
    assert_eq!(listed(&node, "far")["check"], "structure");
    node.eventually("what is not there is named", |node| {
        refused(node, "nokey").contains("404 NoSuchKey: it has no such key")
            && refused(node, "nobucket").contains("404 NoSuchBucket: it has no such bucket")
    });

    // With other keys the store is asked anew, and what was mounted stays until there is something better.
    let before = listed(&node, "far")["generation"].clone();
    write_keys(node.dir.path(), &moto.id, "not the secret");
    node.eventually("the keys are wrong", |node| refused(node, "far").contains("403 SignatureDoesNotMatch"));
    assert_eq!(tile(&node, "far", coord(&sample(1), 0)).status, 200);
    write_keys(node.dir.path(), "nobody", &moto.secret);
    node.eventually("nobody has such keys", |node| refused(node, "far").contains("403 InvalidAccessKeyId"));
    write_keys(node.dir.path(), &moto.id, &moto.secret);
    node.eventually("the keys are right again", |node| is_serving(node, "far"));
    assert_eq!(listed(&node, "far")["generation"], before, "the same object is the same generation");
    let log = node.log();
    assert!(
        !log.contains(&moto.secret) && !log.contains("not the secret") && !log.contains("Signature="),
        "{log}"
    );
}

#[test]
fn an_object_of_moto_that_is_replaced_is_mounted_anew_and_never_mixed() {
    let moto = Moto::start();
    moto.put("/tiles/far.pmtiles", &bytes(1));
    let tables = moto.table("") + &pack("far", "tiles/far.pmtiles");
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("ron.toml"), config("", &format!("{PATIENT}{tables}"))).unwrap();
    let keys = [("AWS_ACCESS_KEY_ID", moto.id.as_str()), ("AWS_SECRET_ACCESS_KEY", moto.secret.as_str())];
    let node = Node::spawn(dir, &["run", "edge", "--config", "ron.toml"], &keys);
    node.eventually("the store is reached with the environment's keys", |node| is_serving(node, "far"));
    let (kept, other) = (coord(&sample(1), 0), coord(&sample(1), 40));
    assert_eq!(tile(&node, "far", kept).body, sample(1).tile(kept).unwrap());
    let before = listed(&node, "far")["generation"].clone();
    moto.put("/tiles/far.pmtiles", &bytes(2));
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
    let answer = tile(&node, "far", kept);
    match sample(2).tile(kept) {
        Some(tile) => assert_eq!((answer.status, answer.body), (200, tile)),
        None => assert_eq!(answer.status, 204),
    }
}

#[test]
fn a_moto_that_stands_still_or_is_killed_costs_what_is_not_in_memory() {
    let moto = Moto::start();
    moto.put("/tiles/far.pmtiles", &bytes(1));
    let dir = tempfile::tempdir().unwrap();
    write_keys(dir.path(), &moto.id, &moto.secret);
    let limits = "[edge.ingress]\nrps_limit = 0\ntimeout = \"60s\"\n[edge.fill]\ndeadline = \"3s\"\n";
    let tables = moto.table("credentials_file = \"s3.keys\"") + &pack("far", "tiles/far.pmtiles");
    let node = start(dir, &config("", &format!("{limits}{tables}")));
    node.eventually("the store is reached", |node| is_serving(node, "far"));
    let (warm, cold) = (coord(&sample(1), 0), coord(&sample(1), 60));
    node.eventually("a tile is read", |node| tile(node, "far", warm).status == 200);
    moto.signal("STOP");
    let late = tile(&node, "far", cold);
    assert_eq!((late.status, late.reason()), (504, "timeout"));
    assert!(node.metric("io_timeouts_total{service=\"edge\",op=\"fill\"}") >= 1.0);
    assert_eq!(tile(&node, "far", warm).body, sample(1).tile(warm).unwrap());
    moto.signal("CONT");
    node.eventually("it goes on", |node| tile(node, "far", cold).status == 200);
    moto.signal("KILL");
    let colder = coord(&sample(1), 90);
    node.eventually("it is gone", |node| {
        let failed = tile(node, "far", colder);
        (failed.status, failed.reason()) == (502, "upstream")
    });
    assert!(node.metric("backoff_retries_total{service=\"edge\",op=\"live_fill\"}") >= 1.0);
    assert_eq!(tile(&node, "far", warm).body, sample(1).tile(warm).unwrap());
}

#[test]
fn a_store_is_asked_over_tls_and_its_view_of_the_clock_is_passed_on() {
    let (_certs, folder) = certificates();
    let file = (bytes(1), "\"v1\"".to_owned());
    let origin = start_tls(&folder, move |_| {
        let file = file.clone();
        Script::by_request(move |head| {
            let lower = head.to_ascii_lowercase();
            let signed = "signedheaders=host;if-match;range;x-amz-content-sha256;x-amz-date,";
            if head.starts_with("GET /base/tiles/late ") {
                let body = b"<Error><Code>RequestTimeTooSkewed</Code></Error>".to_vec();
                return Script::Answer("403 Forbidden\r\n".to_owned(), body);
            }
            assert!(lower.contains("authorization: aws4-hmac-sha256 credential=id/"), "{head}");
            assert!(!lower.contains("if-match") || lower.contains(signed), "{head}");
            assert!(lower.contains("/eu-north-7/s3/aws4_request"), "{head}");
            ranged(head, &file)
        })
    });
    let port = origin.address.rsplit(':').next().unwrap().to_owned();
    let store = format!(
        "[edge.s3]\nendpoint = \"https://localhost:{port}/base/\"\nregion = \"eu-north-7\"\n\
         credentials_file = \"s3.keys\"\nca_file = {:?}\n",
        folder.join("ca.pem")
    );
    let packs = pack("far", "tiles/far.pmtiles") + &pack("late", "tiles/late");
    let node = |private: &str| {
        let dir = tempfile::tempdir().unwrap();
        write_keys(dir.path(), "id", "secret");
        start(dir, &config("", &format!("{PATIENT}{store}{private}\n{packs}")))
    };
    let closed = node("");
    closed.eventually("its address is refused", |node| refused(node, "far").contains("allow_private"));
    assert_eq!(origin.seen.lock().unwrap().len(), 0, "nobody was asked");
    let open = node("allow_private = true");
    open.eventually("the store is reached", |node| is_serving(node, "far"));
    let at = coord(&sample(1), 0);
    assert_eq!(tile(&open, "far", at).body, sample(1).tile(at).unwrap());
    open.eventually("the clock is named", |node| refused(node, "late").contains("clock"));
}

#[test]
fn what_cannot_be_asked_of_a_store_is_said_before_anything_starts() {
    let object = "path = \"s3://tiles/a.pmtiles\"";
    check("path = \"s3://tiles\"", "s3://BUCKET/KEY");
    check("path = \"s3://Tiles/a\"", "has no bucket");
    check("path = \"s3://tiles/../a\"", "has no key");
    check(&format!("{object}\nallow_private = true"), "those of [edge.s3]");
    check(&format!("{object}\nb3 = \"b3:{}\"", "0".repeat(64)), "is for a file");
    let store = |keys: &str, why: &str| check(&format!("{object}\n[edge.s3]\n{keys}"), why);
    store("endpoint = \"http://store.example.org\"", "allow_http = true allows http://");
    store("endpoint = \"https://user@store.example.org\"", "must not name a user");
    store("endpoint = \"https://192.0.2.1\"\npath_style = false", "path_style = true");
    store("region = \"Nowhere!\"", "is no region");
    store("ca_file = \"nowhere.pem\"", "edge.s3.ca_file");
    store("credentials_file = \"nowhere\"", "edge.s3.credentials_file");
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("ron.toml"), config("", &pack("far", "tiles/a.pmtiles"))).unwrap();
    let none = Node::spawn(dir, &["run", "edge", "--config", "ron.toml"], &[("AWS_ACCESS_KEY_ID", "")]);
    none.eventually("keys are missing", |node| refused(node, "far").contains("AWS_ACCESS_KEY_ID"));
}
