//! Who is calling: keys, JWTs, capabilities, the Unix socket, and what each may do.

use crate::config;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ed25519_dalek::{Signer as _, SigningKey};
use ron_testkit::{Answer, Node, Origin, Script, api_key, get, request, ron};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

fn signing(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

/// A set with the public keys of these seeds; each is called by its seed.
pub(crate) fn jwks(seeds: &[u8]) -> String {
    let key = |seed: &u8| {
        let x = URL_SAFE_NO_PAD.encode(signing(*seed).verifying_key().as_bytes());
        json!({"kty": "OKP", "crv": "Ed25519", "use": "sig", "kid": seed.to_string(), "x": x})
    };
    json!({"keys": seeds.iter().map(key).collect::<Vec<_>>()}).to_string()
}

/// A JWT of the key `seed`, said to be of the key `kid`, with these claims over the usual ones.
pub(crate) fn jwt(seed: u8, kid: &str, over: Value) -> String {
    let mut claims = json!({"iss": "https://issuer", "aud": "api", "exp": now() + 600, "sub": "joe"});
    for (name, value) in over.as_object().unwrap() {
        claims[name] = value.clone();
    }
    let header = json!({"alg": "EdDSA", "typ": "JWT", "kid": kid});
    let encode = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let message = format!("{}.{}", encode(header), encode(claims));
    let signature = signing(seed).sign(message.as_bytes()).to_bytes();
    format!("{message}.{}", URL_SAFE_NO_PAD.encode(signature))
}

fn ask(node: &Node, path: &str, token: &str) -> Answer {
    request(&node.gateway(), "GET", path, &[("Authorization", &format!("Bearer {token}"))], b"").unwrap()
}

fn rejected(node: &Node, reason: &str) -> f64 {
    node.metric(&format!("rejected_total{{service=\"gateway\",reason=\"{reason}\"}}"))
}

const ROUTES: &str = "[[gateway.routes]]\npath = \"/closed/*\"\nupstream = \"o\"\nauth = \"required\"\n\
    [[gateway.routes]]\npath = \"/admin/*\"\nupstream = \"o\"\nscopes = [\"admin\"]\n";

/// Tries tokens on a path, and looks whether each has its status, its reason and its count.
fn check_refusals(node: &Node, cases: &[(&str, &str, u16, &str)]) {
    for (path, token, status, reason) in cases {
        let before = rejected(node, reason);
        let answer = if token.is_empty() { get(&node.gateway(), path) } else { ask(node, path, token) };
        assert_eq!((answer.status, answer.reason()), (*status, *reason), "{path} {}", answer.text());
        assert!(answer.header("www-authenticate").unwrap().starts_with("Bearer"), "{reason}");
        assert_eq!(rejected(node, reason), before + 1.0, "{reason} is not counted");
    }
}

fn origin() -> Origin {
    Origin::start(|_| Script::Body(b"hi".to_vec()))
}

#[test]
fn a_jwt_is_checked_with_the_keys_of_a_file_and_each_fault_has_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("keys.json"), jwks(&[1])).unwrap();
    std::fs::write(dir.path().join("revoked"), "jti:lost # on a train\n").unwrap();
    let at = dir.path().display();
    let auth = format!(
        "auth = {{ mode = \"jwt\", revocations = \"{at}/revoked\", jwt = {{ jwks_file = \"{at}/keys.json\", \
         issuer = \"https://issuer\", audience = \"api\", algorithms = [\"EdDSA\"] }} }}"
    );
    let rest = format!(
        "{ROUTES}[[gateway.tenants]]\nid = \"acme\"\nquantum = 3\nmatch = {{ claim = \"org=acme\" }}\n[log]\nlevel = \"debug\"\n"
    );
    let origin = origin();
    let node = Node::start(&["gateway"], &config(&origin.url(), &auth, &rest));
    let good = |over: Value| jwt(1, "1", over);
    for token in [good(json!({})), good(json!({"scope": "admin x"})), good(json!({"aud": ["x", "api"]}))] {
        assert_eq!(ask(&node, "/closed/x", &token).status, 200);
    }
    assert_eq!(ask(&node, "/admin/x", &good(json!({"scope": "admin"}))).status, 200);
    assert_eq!(
        (get(&node.gateway(), "/x").status, node.metric("jwks_keys{service=\"gateway\"}")),
        (200, 1.0)
    );
    let expired = good(json!({"exp": now() - 3600}));
    check_refusals(
        &node,
        &[
            ("/closed/x", "", 401, "unauth"),
            ("/admin/x", "", 401, "unauth"),
            ("/x", "nonsense", 401, "token_invalid"),
            ("/x", &jwt(2, "1", json!({})), 401, "token_invalid"),
            ("/x", &good(json!({"iss": "https://other"})), 401, "token_invalid"),
            ("/x", &good(json!({"nbf": now() + 3600})), 401, "token_invalid"),
            ("/x", &expired, 401, "token_expired"),
            ("/x", &good(json!({"aud": "other"})), 401, "token_audience"),
            ("/x", &good(json!({"jti": "lost"})), 401, "token_revoked"),
            ("/admin/x", &good(json!({"scope": "adm"})), 403, "forbidden"),
        ],
    );
    let explained = |token: &str| {
        let question = json!({"method": "GET", "url": "/closed/x", "headers": {"authorization": format!("Bearer {token}")}});
        node.admin_post("/gateway/explain", &question.to_string()).json()
    };
    let (known, unknown) = (explained(&good(json!({"org": ["x", "acme"]}))), explained(&good(json!({}))));
    assert_eq!((&known["tenant"], &known["class"]), (&"acme".into(), &"authed".into()), "{known}");
    assert_eq!((&unknown["tenant"], &unknown["class"]), (&"other".into(), &"authed".into()), "{unknown}");
    let log = node.log();
    assert!(log.contains("token_expired") && !log.contains(&expired), "tokens are not logged");
    // What the files say from now on.
    std::fs::write(dir.path().join("revoked"), "").unwrap();
    node.eventually("the list is read again", |node| {
        ask(node, "/x", &good(json!({"jti": "lost"}))).status == 200
    });
    std::fs::write(dir.path().join("keys.json"), jwks(&[2])).unwrap();
    node.eventually("so are the keys", |node| ask(node, "/x", &jwt(2, "2", json!({}))).status == 200);
    assert_eq!(ask(&node, "/x", &good(json!({}))).reason(), "token_invalid");
    std::fs::write(dir.path().join("keys.json"), "{}").unwrap();
    node.eventually("a bad file is told", |node| {
        get(&node.admin(), "/readyz").json()["missing"] == json!(["config_reload"])
    });
    assert_eq!(ask(&node, "/x", &jwt(2, "2", json!({}))).status, 200, "the last good keys stay");
}

/// An issuer that publishes what `keys` says, or fails if it is empty.
fn issuer(keys: &Arc<Mutex<String>>) -> Origin {
    let keys = keys.clone();
    Origin::start(move |_| match keys.lock().unwrap().clone() {
        empty if empty.is_empty() => Script::Raw(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n".to_vec()),
        keys => Script::Body(keys.into_bytes()),
    })
}

fn node_with_issuer(issuer: &Origin, origin: &Origin, refresh: &str) -> Node {
    let auth = format!(
        "auth = {{ mode = \"jwt\", jwt = {{ jwks_url = \"{}/keys\", refresh = \"{refresh}\" }} }}",
        issuer.url()
    );
    Node::start(&["gateway"], &config(&origin.url(), &auth, ROUTES))
}

#[test]
fn keys_follow_their_issuer_and_the_last_good_ones_are_kept() {
    let keys = Arc::new(Mutex::new(String::new()));
    let (issuer, origin) = (issuer(&keys), origin());
    let node = node_with_issuer(&issuer, &origin, "1s");
    let (old, new) = (jwt(1, "1", json!({})), jwt(2, "2", json!({})));
    let early = ask(&node, "/closed/x", &old);
    assert_eq!((early.status, early.reason()), (503, "not_ready"), "it is not the token's fault");
    assert!(early.header("retry-after").is_some());
    let missing = |node: &Node| {
        let ready = get(&node.admin(), "/readyz");
        assert_eq!(ready.status, 200, "nothing is refused that could be served");
        ready.json()["missing"].to_string().contains("gateway.jwks")
    };
    node.eventually("readiness says so", missing);
    node.eventually("it says why", |node| {
        get(&node.admin(), "/readyz").json()["why"]["gateway.jwks"].is_string()
    });
    *keys.lock().unwrap() = jwks(&[1]);
    node.eventually("keys are fetched", |node| ask(node, "/closed/x", &old).status == 200);
    node.eventually("nothing is missing", |node| !missing(node));
    assert_eq!(ask(&node, "/closed/x", &new).reason(), "token_invalid");
    // A rotation: for a while both are good.
    *keys.lock().unwrap() = jwks(&[1, 2]);
    node.eventually("the new key is found", |node| ask(node, "/closed/x", &new).status == 200);
    assert_eq!(ask(&node, "/closed/x", &old).status, 200);
    *keys.lock().unwrap() = String::new();
    let failed = "jwks_refresh_total{service=\"gateway\",result=\"failed\"}";
    let before = node.metric(failed);
    node.eventually("the issuer fails", |node| node.metric(failed) > before && missing(node));
    assert_eq!((ask(&node, "/closed/x", &old).status, ask(&node, "/closed/x", &new).status), (200, 200));
    *keys.lock().unwrap() = jwks(&[2]);
    node.eventually("the old key is gone", |node| ask(node, "/closed/x", &old).reason() == "token_invalid");
    assert_eq!(ask(&node, "/closed/x", &new).status, 200);
    assert!(node.metric("jwks_refresh_total{service=\"gateway\",result=\"ok\"}") >= 3.0);
}

#[test]
fn while_keys_rotate_under_load_no_good_token_is_refused() {
    let keys = Arc::new(Mutex::new(jwks(&[1])));
    let (issuer, origin) = (issuer(&keys), origin());
    let node = node_with_issuer(&issuer, &origin, "1s");
    node.eventually("keys are fetched", |node| ask(node, "/x", &jwt(1, "1", json!({}))).status == 200);
    let (current, stop) = (AtomicU8::new(1), AtomicBool::new(false));
    let asked: [AtomicUsize; 4] = Default::default();
    let done = || asked.iter().map(|count| count.load(Ordering::SeqCst)).collect::<Vec<_>>();
    std::thread::scope(|scope| {
        for count in &asked {
            let (node, current, stop) = (&node, &current, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    let key = current.load(Ordering::SeqCst);
                    let answer = ask(node, "/closed/x", &jwt(key, &key.to_string(), json!({})));
                    if answer.status != 200 {
                        stop.store(true, Ordering::SeqCst);
                        panic!("key {key}: {} {}", answer.status, answer.reason());
                    }
                    count.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        for key in 1..4 {
            // As issuers do it: the new key is known before it signs, the old one until nothing of it is left. The
            // others let the new one sign at once.
            *keys.lock().unwrap() = jwks(&[key, key + 1]);
            node.eventually("both are known", |node| {
                key > 1 || stop.load(Ordering::SeqCst) || node.metric("jwks_keys{service=\"gateway\"}") == 2.0
            });
            current.store(key + 1, Ordering::SeqCst);
            let before = done();
            node.eventually("all have changed over", |_| {
                stop.load(Ordering::SeqCst) || done().iter().zip(&before).all(|(now, then)| *now >= then + 2)
            });
            *keys.lock().unwrap() = jwks(&[key + 1]);
            node.eventually("the old one is gone", |node| {
                stop.load(Ordering::SeqCst) || node.metric("jwks_keys{service=\"gateway\"}") == 1.0
            });
        }
        stop.store(true, Ordering::SeqCst);
    });
    assert_eq!(rejected(&node, "token_invalid"), 0.0);
    assert_eq!(ask(&node, "/closed/x", &jwt(1, "1", json!({}))).reason(), "token_invalid");
}

#[test]
fn a_token_of_a_key_that_was_not_fetched_yet_waits_for_it() {
    let keys = Arc::new(Mutex::new(jwks(&[1])));
    let (issuer, origin) = (issuer(&keys), origin());
    let node = node_with_issuer(&issuer, &origin, "1h");
    node.eventually("keys are fetched", |node| ask(node, "/closed/x", &jwt(1, "1", json!({}))).status == 200);
    let refused = rejected(&node, "not_ready");
    for key in 2..5 {
        *keys.lock().unwrap() = jwks(&[key - 1, key]);
        let token = jwt(key, &key.to_string(), json!({}));
        assert_eq!(ask(&node, "/closed/x", &token).status, 200, "the first one already, of key {key}");
    }
    assert_eq!((rejected(&node, "token_invalid"), rejected(&node, "not_ready")), (0.0, refused));
    assert_eq!(ask(&node, "/closed/x", &jwt(1, "1", json!({}))).reason(), "token_invalid");
}

#[test]
fn an_issuer_that_does_not_answer_holds_up_who_has_a_new_key_for_a_while_and_nobody_else() {
    let hangs = Arc::new(AtomicBool::new(false));
    let seen = hangs.clone();
    let issuer = Origin::start(move |_| match seen.load(Ordering::SeqCst) {
        true => Script::After(Duration::from_secs(60)),
        false => Script::Body(jwks(&[1]).into_bytes()),
    });
    let origin = origin();
    let node = node_with_issuer(&issuer, &origin, "1h");
    let (old, new) = (jwt(1, "1", json!({})), jwt(2, "2", json!({})));
    node.eventually("keys are fetched", |node| ask(node, "/closed/x", &old).status == 200);
    hangs.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| ask(&node, "/closed/x", &new));
        node.eventually("the issuer is asked", |_| issuer.seen.lock().unwrap().len() > 1);
        assert_eq!(ask(&node, "/closed/x", &old).status, 200);
        assert_eq!(waits.join().unwrap().reason(), "token_invalid");
    });
    node.eventually("it is counted", |node| {
        node.metric("io_timeouts_total{service=\"gateway\",op=\"rpc\"}") == 1.0
    });
    assert_eq!(ask(&node, "/closed/x", &old).status, 200, "the last good keys serve");
}

#[test]
fn keys_that_are_made_up_do_not_hammer_the_issuer_and_a_real_one_is_found() {
    let keys = Arc::new(Mutex::new(jwks(&[1])));
    let (issuer, origin) = (issuer(&keys), origin());
    let begun = Instant::now();
    let node = node_with_issuer(&issuer, &origin, "1h");
    node.eventually("keys are fetched", |node| ask(node, "/x", &jwt(1, "1", json!({}))).status == 200);
    for n in 0..100 {
        assert_eq!(ask(&node, "/x", &jwt(3, &format!("made up {n}"), json!({}))).status, 401);
    }
    *keys.lock().unwrap() = jwks(&[1, 2]);
    node.eventually("a new key is not waited for an hour", |node| {
        ask(node, "/x", &jwt(2, "2", json!({}))).status == 200
    });
    let (fetched, gaps) = (issuer.seen.lock().unwrap().len() as u64, begun.elapsed().as_secs() / 5);
    // The first, five that may come close together, one each gap.
    assert!((2..=6 + gaps).contains(&fetched), "{fetched} fetches in {gaps} gaps");
}

fn mint(dir: &Path, args: &[&str]) -> String {
    let made = ron(&[&["token"], args].concat(), dir);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    String::from_utf8(made.stdout).unwrap().trim().to_owned()
}

#[test]
fn a_capability_is_narrowed_offline_checked_locally_and_revoked_by_a_list() {
    let rest = format!("{ROUTES}[[gateway.tenants]]\nid = \"acme\"\n");
    let auth = "auth = { mode = \"biscuit\", revocations = \"revoked\" }";
    let origin = origin();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("ron.toml"), config(&origin.url(), auth, &rest)).unwrap();
    std::fs::write(dir.path().join("revoked"), "").unwrap();
    let node = Node::spawn(dir, &["run", "gateway", "--config", "ron.toml"], &[]);
    let dir = node.dir.path();
    let minted = mint(dir, &["mint", "--scope", "admin,read", "--tenant", "acme", "--key", "node.key"]);
    let narrow = |args: &[&str]| mint(dir, &[&["attenuate", &minted], args].concat());
    assert_eq!(ask(&node, "/admin/x", &minted).status, 200);
    let reader = narrow(&["--scope", "read", "--path", "/closed/", "--method", "get", "--aud", "gateway"]);
    assert_eq!(ask(&node, "/closed/x", &reader).status, 200);
    let expired = mint(dir, &["mint", "--scope", "admin", "--ttl", "0s", "--key", "node.key"]);
    check_refusals(
        &node,
        &[
            ("/closed/x", "", 401, "unauth"),
            ("/closed/x", &minted[1..], 401, "token_invalid"),
            ("/closed/x", &expired, 401, "token_expired"),
            ("/closed/x", &narrow(&["--aud", "edge"]), 401, "token_audience"),
            ("/admin/x", &narrow(&["--scope", "read"]), 403, "forbidden"),
            ("/closed/x", &narrow(&["--path", "/open/"]), 403, "forbidden"),
            ("/closed/x", &narrow(&["--method", "put"]), 403, "forbidden"),
        ],
    );
    // What is checked is what the upstream gets, and nothing beside it.
    let good = format!("Bearer {minted}");
    let before = origin.count("/closed/x");
    for other in ["Bearer forged", "Basic eDp5", &good] {
        let both = [("Authorization", good.as_str()), ("Authorization", other)];
        let answer = request(&node.gateway(), "GET", "/closed/x", &both, b"").unwrap();
        assert_eq!((answer.status, answer.reason()), (400, "malformed"), "{other}");
    }
    assert_eq!(origin.count("/closed/x"), before);
    let short = ask(&node, "/admin/x", &narrow(&["--scope", "read"])).json()["detail"].clone();
    assert!(
        short.as_str().unwrap().contains("it needs the scope admin, and must not be narrowed"),
        "{short}"
    );
    let inspect = |token: &str| {
        let shown = mint(dir, &["inspect", token, "--config", "ron.toml", "--json"]);
        serde_json::from_str::<Value>(&shown).unwrap()
    };
    let shown = inspect(&reader);
    assert_eq!((shown["trusted"].as_bool(), shown["ids"].as_array().unwrap().len()), (Some(true), 2));
    let readable = mint(dir, &["inspect", &reader, "--config", "ron.toml"]);
    assert!(readable.contains(shown["ids"][1].as_str().unwrap()), "{readable}");
    std::fs::write(dir.join("revoked"), format!("{}\n", shown["ids"][1].as_str().unwrap())).unwrap();
    node.eventually("the narrowed one is revoked", |node| {
        ask(node, "/closed/x", &reader).reason() == "token_revoked"
    });
    assert_eq!(ask(&node, "/closed/x", &minted).status, 200, "what it came from is not");
    assert!(rejected(&node, "token_revoked") >= 1.0);
}

#[test]
fn credentials_have_a_rate_of_their_own_however_often_they_are_narrowed() {
    let auth = "auth = { mode = \"biscuit\" }\nquotas = { per_capability_rps = 1, burst_factor = 3 }";
    let origin = origin();
    let node = Node::start(&["gateway"], &config(&origin.url(), auth, ROUTES));
    let dir = node.dir.path();
    let minted = mint(dir, &["mint", "--scope", "a", "--key", "node.key"]);
    let narrowed: Vec<String> =
        (0..8).map(|n| mint(dir, &["attenuate", &minted, "--ttl", &format!("{}h", n + 1)])).collect();
    let answers: Vec<Answer> = narrowed.iter().map(|token| ask(&node, "/closed/x", token)).collect();
    let refused: Vec<&Answer> = answers.iter().filter(|answer| answer.status == 429).collect();
    assert!(!refused.is_empty(), "eight at once are more than three");
    for answer in refused {
        assert_eq!(answer.reason(), "quota_capability");
        assert!(answer.header("retry-after").is_some());
        assert_eq!(answer.header("ratelimit-policy"), Some("\"capability\";q=1;w=1"));
    }
    assert!(rejected(&node, "quota_capability") >= 1.0);
    let other = mint(dir, &["mint", "--scope", "a", "--key", "node.key"]);
    assert_eq!(ask(&node, "/closed/x", &other).status, 200, "another one has its own");
    assert_eq!(get(&node.gateway(), "/x").status, 200, "and so has nobody in particular");
}

#[test]
fn keys_have_the_scopes_of_their_tenant_and_local_users_none() {
    let auth = "auth = { mode = \"api_key\" }\nuds = { path = \"g.sock\" }";
    let tenants = format!(
        "{ROUTES}[[gateway.tenants]]\nid = \"root\"\nscopes = [\"admin\"]\nkeys = [\"{}\"]\n\
         [[gateway.tenants]]\nid = \"user\"\nkeys = [\"{}\"]\n",
        api_key("root"),
        api_key("user")
    );
    let origin = origin();
    let node = Node::start(&["gateway"], &config(&origin.url(), auth, &tenants));
    assert_eq!((ask(&node, "/admin/x", "root").status, ask(&node, "/closed/x", "user").status), (200, 200));
    check_refusals(&node, &[("/admin/x", "user", 403, "forbidden"), ("/admin/x", "", 401, "unauth")]);
    let local = |path: &str| {
        use std::io::{Read as _, Write as _};
        let mut stream = std::os::unix::net::UnixStream::connect(node.dir.path().join("g.sock")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer[9..12].to_owned()
    };
    assert_eq!((local("/closed/x"), local("/admin/x")), ("200".to_owned(), "403".to_owned()));
}

#[test]
fn an_identity_that_could_not_work_is_refused_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let check = |auth: &str, rest: &str, wanted: &str| {
        std::fs::write(dir.path().join("ron.toml"), config("http://127.0.0.1:1", auth, rest)).unwrap();
        let checked = ron(&["config", "check", "ron.toml"], dir.path());
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert!(!checked.status.success() && said.contains(wanted), "{auth}: {said}");
    };
    let jwt = |inner: &str| format!("auth = {{ mode = \"jwt\", jwt = {{ {inner} }} }}");
    check("auth = { mode = \"jwt\" }", "", "gateway.auth.jwt: mode is \"jwt\", so this must say where");
    check(&jwt("issuer = \"a\""), "", "needs one of jwks_file and jwks_url");
    check(&jwt("jwks_file = \"none.json\""), "", "\"none.json\" cannot be read");
    check(&jwt("jwks_file = \"ron.toml\""), "", "\"ron.toml\" is no key set");
    check(&jwt("jwks_url = \"http://issuer.example/k\""), "", "keys fetched in the clear");
    check(
        &jwt("jwks_url = \"http://127.0.0.1/k\", algorithms = [\"HS256\"]"),
        "",
        "is not one of EdDSA, ES256",
    );
    check(&jwt("jwks_url = \"http://127.0.0.1/k\", refresh = \"10ms\""), "", "refresh: must be at least 1s");
    check("auth = { mode = \"biscuit\", revocations = \"ron.toml\" }", "", "line 1 is no id of a token");
    let tenant = "[[gateway.tenants]]\nid = \"a\"\nmatch = { claim = \"org=a\" }\n";
    check("", tenant, "gateway.auth.mode is not \"jwt\"");
    let twice = format!("{tenant}{}", tenant.replace("\"a\"\n", "\"b\"\n"));
    check(&jwt("jwks_url = \"http://127.0.0.1/k\""), &twice, "is the claim of tenant \"a\" too");
    check("", "auth = \"required\"\n", "nobody could get in");
    check("", "auth = \"none\"\nscopes = [\"a\"]\n", "credentials are not looked at");
}
