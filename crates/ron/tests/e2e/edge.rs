//! The edge over HTTP: what is stored is served as the RFCs say, and whatever is refused is counted.

use ron_testkit::{Answer, Client, Node, request, ron};
use sha2::{Digest as _, Sha256};
use std::io::Write as _;
use std::process::{Command, Stdio};

/// A configuration whose `[edge]` has these lines, and these tables behind it.
pub(crate) fn config(edge: &str, tables: &str) -> String {
    format!("[admin]\nlisten = \"127.0.0.1:0\"\n[edge]\nlisten = \"127.0.0.1:0\"\n{edge}\n{tables}\n")
}

/// A node with an edge, and a capability for it.
pub(crate) struct Edge {
    pub(crate) node: Node,
    pub(crate) token: String,
}

impl Edge {
    pub(crate) fn start(edge: &str, tables: &str) -> Edge {
        Edge::of(Node::start(&["edge"], &config(edge, tables)))
    }

    pub(crate) fn of(node: Node) -> Edge {
        let token = mint(&node, &["--scope", "edge:write,edge:purge"]);
        Edge { node, token }
    }

    pub(crate) fn address(&self) -> String {
        self.node.address("edge", "http")
    }

    pub(crate) fn get(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        request(&self.address(), "GET", path, headers, b"").unwrap()
    }

    pub(crate) fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let bearer = format!("Bearer {}", self.token);
        let headers = [headers, &[("Authorization", bearer.as_str())]].concat();
        request(&self.address(), method, path, &headers, body).unwrap()
    }

    pub(crate) fn put(&self, path: &str, body: &[u8]) -> Answer {
        self.send("PUT", path, &[], body)
    }

    /// How often a reason was counted, in both of its families.
    pub(crate) fn refusals(&self, reason: &str) -> f64 {
        let kernel = self.node.metric(&format!("rejected_total{{service=\"edge\",reason=\"{reason}\"}}"));
        let own = self.node.metric(&format!("edge_rejects_total{{reason=\"{reason}\"}}"));
        assert!((kernel - own).abs() < 0.5, "{reason}: {kernel} and {own} differ");
        own
    }
}

pub(crate) fn mint(node: &Node, limits: &[&str]) -> String {
    let output = ron(&[&["token", "mint", "--key", "node.key"], limits].concat(), node.dir.path());
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn an_object_is_stored_once_and_served_by_its_address_for_ever() {
    let edge = Edge::start("", "");
    let created = edge.put("/edge/cas", b"some bytes");
    let address = created.json()["b3"].as_str().unwrap().to_owned();
    assert_eq!((created.status, created.json()["size"].as_u64()), (201, Some(10)));
    assert_eq!(created.header("location"), Some(format!("/edge/cas/{address}").as_str()));
    let path = format!("/edge/cas/{address}");
    assert_eq!(edge.put(&path, b"some bytes").status, 200);
    let answer = edge.get(&path, &[]);
    assert_eq!((answer.status, answer.text().as_str()), (200, "some bytes"));
    assert_eq!(answer.header("etag"), Some(format!("\"{address}\"").as_str()));
    assert_eq!(answer.header("cache-status"), Some("ron-edge; hit"));
    assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(answer.header("referrer-policy"), Some("no-referrer"));
    assert!(answer.header("cache-control").unwrap().contains("immutable") && answer.header("vary").is_none());
    let head = request(&edge.address(), "HEAD", &path, &[], b"").unwrap();
    assert_eq!((head.status, head.header("content-length"), head.body.len()), (200, Some("10"), 0));
    let kept = edge.get(&path, &[("If-None-Match", &format!("\"{address}\""))]);
    assert_eq!((kept.status, kept.body.len()), (304, 0));
    let missing = edge.get(&path.replace(&address[3..9], "000000"), &[]);
    assert_eq!((missing.status, missing.header("cache-status")), (404, Some("ron-edge; detail=miss")));
    assert_eq!(edge.node.metric("edge_cas_bytes"), 10.0);
    assert_eq!(edge.node.metric("edge_cache_total{result=\"hit\"}"), 3.0);
    assert_eq!(edge.node.metric("edge_cache_total{result=\"miss\"}"), 1.0);
}

/// The fields of an answer but for those that differ with each, sorted.
pub(crate) fn lasting(answer: &Answer) -> Vec<(String, String)> {
    let passing = ["date", "x-corr-id", "age", "connection"];
    let mut fields: Vec<_> =
        answer.headers.iter().filter(|(name, _)| !passing.contains(&name.as_str())).cloned().collect();
    fields.sort();
    fields
}

#[test]
fn a_hit_says_the_same_each_time_as_to_head_and_under_each_name_what_is_true_of_it() {
    let edge = Edge::start("", "");
    let body = "{} ".repeat(20_000);
    let address = edge.put("/edge/cas", body.as_bytes()).json()["b3"].as_str().unwrap().to_owned();
    edge.put("/edge/assets/a.txt", body.as_bytes());
    edge.put("/edge/assets/b.json", body.as_bytes());
    let cas = format!("/edge/cas/{address}");
    let names =
        [("/edge/assets/a.txt", "text/plain; charset=utf-8"), ("/edge/assets/b.json", "application/json")];
    for (path, content_type) in names.into_iter().chain([(&*cas, "application/octet-stream")]) {
        for coding in ["identity", "gzip"] {
            let asked = [("Accept-Encoding", coding)];
            let head = request(&edge.address(), "HEAD", path, &asked, b"").unwrap();
            assert_eq!((head.status, head.header("content-type")), (200, Some(content_type)), "{path}");
            assert!(head.headers.len() >= 12, "{:?}", head.headers);
            for _ in 0..3 {
                let answer = edge.get(path, &asked);
                assert_eq!(lasting(&answer), lasting(&head), "{path} as {coding}");
                assert_eq!(answer.header("content-length"), Some(answer.body.len().to_string().as_str()));
            }
        }
    }
}

#[test]
fn an_asset_has_a_type_encodings_with_their_own_tags_and_conditions() {
    let edge = Edge::start("", "");
    let text = "a line that comes again\n".repeat(400);
    assert_eq!(edge.put("/edge/assets/docs/a.txt", text.as_bytes()).status, 201);
    let plain = edge.get("/edge/assets/docs/a.txt", &[]);
    assert_eq!((plain.status, plain.text()), (200, text.clone()));
    assert_eq!(plain.header("content-type"), Some("text/plain; charset=utf-8"));
    assert_eq!((plain.header("vary"), plain.header("content-encoding")), (Some("Accept-Encoding"), None));
    let digest: [u8; 32] = Sha256::digest(&plain.body).into();
    assert_eq!(plain.header("repr-digest").unwrap(), format!("sha-256=:{}:", base64(&digest)));
    let mut tags = vec![plain.header("etag").unwrap().to_owned()];
    for (coding, decoder) in [("gzip", "gzip"), ("br", ""), ("zstd", "")] {
        let encoded = edge.get("/edge/assets/docs/a.txt", &[("Accept-Encoding", coding)]);
        assert_eq!((encoded.status, encoded.header("content-encoding")), (200, Some(coding)));
        assert_eq!(encoded.header("vary"), Some("Accept-Encoding"));
        assert!(encoded.body.len() < text.len() / 10);
        let digest: [u8; 32] = Sha256::digest(&encoded.body).into();
        assert_eq!(encoded.header("repr-digest").unwrap(), format!("sha-256=:{}:", base64(&digest)));
        tags.push(encoded.header("etag").unwrap().to_owned());
        // By its own address it is an object like any other.
        let address = tags.last().unwrap().trim_matches('"').to_owned();
        assert_eq!(edge.get(&format!("/edge/cas/{address}"), &[]).body, encoded.body);
        if decoder == "gzip" {
            assert_eq!(gunzip(&encoded.body), text.as_bytes());
        }
    }
    tags.sort();
    tags.dedup();
    assert_eq!(tags.len(), 4, "each representation has its own tag");
    let none = edge.get("/edge/assets/docs/a.txt", &[("Accept-Encoding", "identity;q=0, lzma")]);
    assert_eq!((none.status, none.reason()), (406, "not_acceptable"));
    let since = plain.header("last-modified").unwrap().to_owned();
    assert_eq!(edge.get("/edge/assets/docs/a.txt", &[("If-Modified-Since", &since)]).status, 304);
    let tag = plain.header("etag").unwrap();
    let changed = edge.send("PUT", "/edge/assets/docs/a.txt", &[("If-Match", "\"other\"")], b"no");
    assert_eq!((changed.status, changed.reason()), (412, "precondition"));
    let changed = edge.send(
        "PUT",
        "/edge/assets/docs/a.txt",
        &[("If-Match", tag), ("Content-Type", "text/x-own")],
        b"yes",
    );
    assert_eq!(changed.status, 200);
    let now = edge.get("/edge/assets/docs/a.txt", &[]);
    assert_eq!((now.text().as_str(), now.header("content-type")), ("yes", Some("text/x-own")));
    let only_new = edge.send("PUT", "/edge/assets/docs/a.txt", &[("If-None-Match", "*")], b"no");
    assert_eq!(only_new.status, 412);
}

#[test]
fn curl_gets_the_ranges_it_asks_for() {
    let edge = Edge::start("", "");
    let body: Vec<u8> = (0..600_000u32).flat_map(|n| (n as u16).to_le_bytes()).collect();
    assert_eq!(edge.put("/edge/assets/large.bin", &body).status, 201);
    let url = format!("http://{}/edge/assets/large.bin", edge.address());
    let curl = |range: &str| {
        let output = Command::new("curl").args(["-s", "-i", "-r", range, &url]).output().unwrap();
        let at = output.stdout.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
        (String::from_utf8_lossy(&output.stdout[..at]).to_lowercase(), output.stdout[at..].to_vec())
    };
    for (range, expected) in [
        ("0-0", 0..1),
        ("100-299", 100..300),
        ("65530-65545", 65_530..65_546),
        ("-10", body.len() - 10..body.len()),
        ("1000000-", 1_000_000..body.len()),
        ("300000-900000", 300_000..900_001),
    ] {
        let (head, got) = curl(range);
        assert!(head.starts_with("http/1.1 206"), "{range}: {head}");
        let stated =
            format!("content-range: bytes {}-{}/{}\r\n", expected.start, expected.end - 1, body.len());
        assert!(head.contains(&stated), "{range}: {head}");
        assert!(got == body[expected], "{range}");
    }
    let (head, got) = curl("0-9,700000-700009");
    let boundary =
        head.split("multipart/byteranges; boundary=").nth(1).unwrap().split("\r\n").next().unwrap();
    assert!(head.contains(&format!("content-length: {}\r\n", got.len())));
    let part = |range: std::ops::Range<usize>| {
        let mut part = format!(
            "--{boundary}\r\nContent-Type: application/octet-stream\r\nContent-Range: bytes {}-{}/{}\r\n\r\n",
            range.start,
            range.end - 1,
            body.len()
        )
        .into_bytes();
        part.extend_from_slice(&body[range]);
        part.extend_from_slice(b"\r\n");
        part
    };
    let whole = [part(0..10), part(700_000..700_010), format!("--{boundary}--\r\n").into_bytes()].concat();
    assert!(got == whole, "{}", String::from_utf8_lossy(&got[..200]));
    assert!(curl("9999999-").0.contains("content-range: bytes */1200000\r\n"));
    assert!(curl("5-1").0.starts_with("http/1.1 200"), "what cannot be read is ignored");
    edge.node.write_config(&config("http = { multi_range = false }", ""));
    assert_eq!(edge.node.admin_post("/admin/reload", "").status, 200);
    assert!(curl("0-9,700000-700009").0.starts_with("http/1.1 200"));
    // A download that broke off goes on where it was, and only if the object is the same.
    let tag =
        edge.get("/edge/assets/large.bin", &[("Range", "bytes=0-0")]).header("etag").unwrap().to_owned();
    for (condition, status) in [(tag.as_str(), 206), ("\"other\"", 200)] {
        let rest = edge.get("/edge/assets/large.bin", &[("Range", "bytes=5-"), ("If-Range", condition)]);
        assert_eq!(rest.status, status);
    }
}

/// What is refused, by a node that holds `a.bin` of 4096 bytes: status, reason, request.
fn refused_requests(edge: &Edge) -> Vec<(u16, &'static str, String)> {
    let other = mint(&edge.node, &["--scope", "edge:purge"]);
    let elsewhere = mint(&edge.node, &["--scope", "edge:write", "--path", "/edge/assets/b/"]);
    let gateway = mint(&edge.node, &["--scope", "edge:write", "--aud", "gateway"]);
    let expired = mint(&edge.node, &["--scope", "edge:write", "--ttl", "0s"]);
    let bearer = |token: &str| format!("Authorization: Bearer {token}\r\n");
    let good = bearer(&edge.token);
    let put = |path: &str, head: &str, body: &str| {
        format!("PUT {path} HTTP/1.1\r\nHost: a\r\n{head}Content-Length: {}\r\n\r\n{body}", body.len())
    };
    let get = |path: &str, head: &str| format!("GET {path} HTTP/1.1\r\nHost: a\r\n{head}\r\n");
    let large = "x".repeat(65_537);
    let chunked = put("/edge/cas", &good, "").replace("Content-Length: 0", "Transfer-Encoding: chunked")
        + &format!("10001\r\n{large}");
    let nobody = format!("/edge/cas/b3:{}", "0".repeat(64));
    let post = |body: &str| {
        format!("POST /edge/purge HTTP/1.1\r\nHost: a\r\n{good}Content-Length: {}\r\n\r\n{body}", body.len())
    };
    vec![
        (400, "malformed", get("/edge/assets/../x", "")),
        (400, "malformed", get("/edge/assets/a%00", "")),
        (400, "malformed", get("/edge/cas/b3:12", "")),
        (400, "malformed", get("/edge/assets/a.bin", "Request-Timeout: soon\r\n")),
        (400, "malformed", put("/edge/cas", &format!("{good}Content-Digest: sha-256=x\r\n"), "x")),
        (400, "malformed", put("/edge/cas", &format!("{good}Content-Range: bytes 0-0/5\r\n"), "x")),
        (
            400,
            "malformed",
            put("/edge/assets/x", &format!("{good}Surrogate-Key: {}\r\n", "k".repeat(1025)), "x"),
        ),
        (400, "malformed", post("{}")),
        (400, "malformed", post(r#"{"path":"a","key":"b"}"#)),
        (401, "unauth", put("/edge/cas", "", "x")),
        (401, "token_invalid", put("/edge/cas", &bearer("nonsense"), "x")),
        (401, "token_expired", put("/edge/cas", &bearer(&expired), "x")),
        (401, "token_audience", put("/edge/cas", &bearer(&gateway), "x")),
        (403, "forbidden", put("/edge/cas", &bearer(&other), "x")),
        (403, "forbidden", put("/edge/assets/a", &bearer(&elsewhere), "x")),
        (403, "not_allowed", get("/edge/assets/unknown", "")),
        (404, "not_found", get(&nobody, "")),
        (404, "not_found", get("/elsewhere", "")),
        (404, "not_found", format!("DELETE /edge/assets/unknown HTTP/1.1\r\nHost: a\r\n{good}\r\n")),
        (405, "method", "POST /edge/assets/a.bin HTTP/1.1\r\nHost: a\r\n\r\n".to_owned()),
        (405, "method", get("/edge/purge", "")),
        (406, "not_acceptable", get("/edge/assets/a.bin", "Accept-Encoding: *;q=0\r\n")),
        (
            408,
            "read_timeout",
            format!("PUT /edge/cas HTTP/1.1\r\nHost: a\r\n{good}Content-Length: 5\r\n\r\nab"),
        ),
        (412, "precondition", get("/edge/assets/a.bin", "If-Match: \"x\"\r\n")),
        (413, "body_cap", chunked),
        (413, "body_cap", put("/edge/cas", &good, "").replace("Length: 0", "Length: 65537")),
        (413, "body_cap", post(&format!("{{\"path\":\"{}\"}}", "a".repeat(1100)))),
        (415, "unsupported_encoding", put("/edge/cas", &format!("{good}Content-Encoding: gzip\r\n"), "x")),
        (416, "invalid_range", get("/edge/assets/a.bin", "Range: bytes=4096-\r\n")),
        (422, "digest_mismatch", put(&nobody, &good, "x")),
        (
            422,
            "digest_mismatch",
            put("/edge/cas", &format!("{good}Content-Digest: sha-256=:{}=:\r\n", "A".repeat(43)), "x"),
        ),
        (504, "timeout", get("/edge/assets/a.bin", "Request-Timeout: 0\r\n")),
    ]
}

#[test]
fn every_refusal_has_its_status_its_reason_and_its_count() {
    let edge = Edge::start(
        "ingress = { timeout = \"400ms\", body_bytes = \"1KiB\", rps_limit = 0, idle_timeout = \"5s\" }",
        "[edge.cas]\nmax_put_bytes = \"64KiB\"\nmax_bytes = \"80KiB\"",
    );
    assert_eq!(edge.put("/edge/assets/a.bin", &[7; 4096]).status, 201);
    for (status, reason, sent) in refused_requests(&edge) {
        let before = edge.refusals(reason);
        let mut client = Client::connect(&edge.address()).unwrap();
        client.send(sent.as_bytes()).unwrap();
        let answer = client.read_answer("GET").unwrap();
        assert_eq!((answer.status, answer.reason()), (status, reason), "{sent:?}");
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        assert_eq!(answer.json()["code"], reason);
        assert!(answer.header("x-corr-id").is_some() && answer.header("x-content-type-options").is_some());
        assert!(edge.refusals(reason) > before, "{reason} is not counted");
        let challenged = answer.header("www-authenticate").is_some();
        assert_eq!(challenged, status == 401, "{reason}");
        assert_eq!(answer.header("allow").is_some(), status == 405, "{reason}");
    }
    assert_eq!(edge.node.metric("edge_cas_bytes"), 4096.0, "nothing that was refused is kept");
    let range = edge.get("/edge/assets/a.bin", &[("Range", "bytes=9000-")]);
    assert_eq!(range.header("content-range"), Some("bytes */4096"));
    let names = std::fs::read_dir(edge.node.dir.path().join("cas/tmp")).unwrap().count();
    assert_eq!(names, 0, "and no half of it lies about");
}

#[test]
fn what_does_not_fit_is_refused_or_drives_out_what_is_not_pinned() {
    let edge = Edge::start("", "");
    assert_eq!(edge.put("/edge/assets/a.bin", &[7; 4096]).status, 201);
    edge.node.write_config(&config(
        "mode = \"offline\"",
        "[edge.cas]\nmax_bytes = \"80KiB\"\nmax_put_bytes = \"90KiB\"\npins = [\"/a.bin\"]",
    ));
    assert_eq!(edge.node.admin_post("/admin/reload", "").status, 200);
    let offline = edge.get("/edge/assets/unknown", &[]);
    assert_eq!((offline.status, offline.reason()), (404, "not_found"));
    let large = edge.put("/edge/cas", &[1; 81 << 10]);
    assert_eq!((large.status, large.reason()), (507, "storage"));
    assert_eq!(edge.refusals("storage"), 1.0);
    for seed in 0..30 {
        assert_eq!(edge.put("/edge/cas", &[seed; 10 << 10]).status, 201);
    }
    assert!(edge.node.metric("edge_cas_bytes") <= 81_920.0);
    assert_eq!(edge.get("/edge/assets/a.bin", &[]).status, 200, "what is pinned never goes");
}

#[test]
fn names_are_purged_one_by_one_by_prefix_and_by_key() {
    let edge = Edge::start("", "");
    for (path, key) in
        [("img/1", "red"), ("img/2", "blue red"), ("img/3", "blue"), ("doc/1", "red"), ("doc/2", "")]
    {
        let key: &[(&str, &str)] = if key.is_empty() { &[] } else { &[("Surrogate-Key", key)] };
        assert_eq!(edge.send("PUT", &format!("/edge/assets/{path}"), key, path.as_bytes()).status, 201);
    }
    let purge = |body: &str| {
        let answer = edge.send("POST", "/edge/purge", &[], body.as_bytes());
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["removed"].as_u64().unwrap()
    };
    assert_eq!(edge.send("DELETE", "/edge/assets/doc/2", &[], b"").status, 204);
    assert_eq!(edge.get("/edge/assets/doc/2", &[]).status, 403);
    assert_eq!(purge(r#"{"key":"red"}"#), 3);
    assert_eq!(purge(r#"{"key":"red"}"#), 0);
    assert_eq!(purge(r#"{"path":"/img/none"}"#), 0);
    assert_eq!(edge.node.metric("edge_cas_bytes"), 5.0);
    assert_eq!(purge(r#"{"prefix":"/img/"}"#), 1);
    assert_eq!(edge.node.metric("edge_cas_bytes"), 0.0);
}

#[test]
fn pages_of_allowed_origins_may_read_and_no_others() {
    let closed = Edge::start("", "");
    let asked = [("Origin", "https://a.org")];
    assert!(closed.get("/edge/assets/x", &asked).header("access-control-allow-origin").is_none());
    let edge = Edge::start("cors = { allow_origins = [\"https://a.org\"] }", "");
    let answer = edge.get("/edge/assets/x", &asked);
    assert_eq!(
        answer.header("access-control-allow-origin"),
        Some("https://a.org"),
        "refusals can be read too"
    );
    assert_eq!(answer.header("vary"), Some("Origin"));
    let other = edge.get("/edge/assets/x", &[("Origin", "https://b.org")]);
    assert!(other.header("access-control-allow-origin").is_none() && other.header("vary").is_some());
    let preflight = [("Origin", "https://a.org"), ("Access-Control-Request-Method", "PUT")];
    let allowed = request(&edge.address(), "OPTIONS", "/edge/assets/x", &preflight, b"").unwrap();
    assert_eq!(allowed.status, 204);
    assert!(allowed.header("access-control-allow-methods").unwrap().contains("PUT"));
    assert!(allowed.header("access-control-allow-headers").unwrap().contains("Authorization"));
    edge.node.write_config(&config("cors = { allow_origins = [\"*\"] }", ""));
    assert_eq!(edge.node.admin_post("/admin/reload", "").status, 200);
    // Who does not say may have it from a cache later, for a page that does.
    for asked in [&[("Origin", "https://b.org")][..], &[]] {
        let everybody = edge.get("/edge/assets/x", asked);
        assert_eq!(everybody.header("access-control-allow-origin"), Some("*"), "{asked:?}");
        assert!(everybody.header("access-control-expose-headers").is_some());
    }
}

#[test]
fn more_than_is_allowed_at_a_time_is_refused_at_once() {
    let edge = Edge::start(
        "ingress = { max_inflight = 1, rps_limit = 0, max_conns = 64, max_conns_per_ip = 60 }",
        "",
    );
    let mut slow = Client::connect(&edge.address()).unwrap();
    let head = format!(
        "PUT /edge/cas HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {}\r\nContent-Length: 4\r\n\r\nab",
        edge.token
    );
    slow.send(head.as_bytes()).unwrap();
    edge.node.eventually("the upload is under way", |node| {
        node.metric("inflight_requests{service=\"edge\"}") == 1.0
    });
    let refused = edge.get("/edge/assets/x", &[]);
    assert_eq!((refused.status, refused.reason(), refused.header("retry-after")), (429, "busy", Some("1")));
    assert_eq!(edge.refusals("busy"), 1.0);
    let series = "busy_rejections_total{service=\"edge\",endpoint=\"/edge/assets\",queue=\"\"}";
    assert_eq!(edge.node.metric(series), 1.0);
    slow.send(b"cd").unwrap();
    assert_eq!(slow.read_answer("PUT").unwrap().status, 201);
    assert_eq!(edge.get("/edge/assets/x", &[]).status, 403);
    edge.node.write_config(&config("ingress = { rps_limit = 2 }", ""));
    assert_eq!(edge.node.admin_post("/admin/reload", "").status, 200);
    let statuses: Vec<Answer> = (0..20).map(|_| edge.get("/edge/assets/x", &[])).collect();
    let refused = statuses.iter().find(|answer| answer.status == 429).expect("twenty at once are too many");
    assert_eq!((refused.reason(), refused.header("retry-after").is_some()), ("rate_limit", true));
    assert!(edge.refusals("rate_limit") >= 1.0);
}

#[test]
fn under_amnesia_objects_live_in_memory_and_no_file_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let text = config("", "[edge.cas]\nmemory_bytes = \"64KiB\"\n[node]\namnesia = true");
    std::fs::write(dir.path().join("ron.toml"), &text).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_ron"))
        .args(["run", "edge", "--config", "ron.toml"])
        .current_dir(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line)
        .unwrap();
    let addresses: serde_json::Value = serde_json::from_str(&line).unwrap();
    let address = addresses["edge"]["http"].as_str().unwrap();
    // The node's key is in memory, so that nobody can mint a capability for it but itself.
    let refused = request(address, "PUT", "/edge/cas", &[], b"x").unwrap();
    assert_eq!(refused.status, 401);
    let files: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(files, ["ron.toml"]);
    child.kill().unwrap();
    child.wait().unwrap();
    let explicit = text.replace("memory_bytes", "dir = \"elsewhere\"\nmemory_bytes");
    std::fs::write(dir.path().join("ron.toml"), explicit).unwrap();
    let checked = ron(&["config", "check", "ron.toml"], dir.path());
    assert!(String::from_utf8_lossy(&checked.stderr).contains("edge.cas.dir"));
}

#[test]
fn the_memory_store_says_amnesia_to_what_it_cannot_hold() {
    let edge = Edge::start("", "[edge.cas]\nbackend = \"memory\"\nmemory_bytes = \"64KiB\"");
    let answer = edge.put("/edge/cas", &[1; 70_000]);
    assert_eq!((answer.status, answer.reason()), (503, "amnesia"));
    assert_eq!(edge.refusals("amnesia"), 1.0);
    assert_eq!(edge.put("/edge/assets/a.bin", &[2; 60_000]).status, 201);
    assert_eq!(edge.get("/edge/assets/a.bin", &[]).body, [2; 60_000]);
    assert!(!edge.node.dir.path().join("cas").exists());
}

#[test]
fn the_edge_speaks_tls_and_http2_and_says_that_it_wants_no_other() {
    let dir = tempfile::tempdir().unwrap();
    assert!(ron(&["init", "made", "--tls"], dir.path()).status.success());
    let tls = dir.path().join("made/tls");
    let edge = Edge::start(
        "",
        &format!(
            "[edge.tls]\nlisten = \"127.0.0.1:0\"\ncert = \"{0}/server.pem\"\nkey = \"{0}/server.key\"",
            tls.display()
        ),
    );
    assert_eq!(edge.put("/edge/assets/a.txt", b"over tls").status, 201);
    let port = edge.node.address("edge", "https").rsplit(':').next().unwrap().to_owned();
    let url = format!("https://localhost:{port}/edge/assets/a.txt");
    for version in ["--http1.1", "--http2"] {
        let ca = tls.join("ca.pem");
        let output =
            Command::new("curl").args(["-s", "-i", version, "--cacert"]).arg(ca).arg(&url).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).to_lowercase();
        assert!(text.contains("strict-transport-security: max-age=") && text.ends_with("over tls"), "{text}");
    }
    assert!(edge.get("/edge/assets/a.txt", &[]).header("strict-transport-security").is_none());
}

#[test]
fn a_drain_lets_uploads_end_and_what_was_acknowledged_is_kept() {
    let store = "[edge.cas]\nverify = \"never\"\nfsync = \"never\"\nscrub_interval = \"1s\"";
    let mut edge = Edge::start("", store);
    let mut slow = Client::connect(&edge.address()).unwrap();
    let head = format!(
        "PUT /edge/assets/late HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {}\r\nContent-Length: 4\r\n\r\nab",
        edge.token
    );
    slow.send(head.as_bytes()).unwrap();
    edge.node.eventually("the upload is under way", |node| {
        node.metric("inflight_requests{service=\"edge\"}") == 1.0
    });
    edge.node.signal("TERM");
    edge.node.eventually("it drains", |node| {
        ron_testkit::get(&node.admin(), "/readyz").json()["services"]["edge"] == "draining"
    });
    slow.send(b"cd").unwrap();
    assert_eq!(slow.read_answer("PUT").unwrap().status, 201);
    assert_eq!(edge.node.wait(), 0);
    let dir = std::mem::replace(&mut edge.node.dir, tempfile::tempdir().unwrap());
    let again = Edge::of(Node::spawn(dir, &["run", "edge", "--config", "ron.toml"], &[]));
    assert_eq!(again.get("/edge/assets/late", &[]).text(), "abcd");
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let n = chunk.iter().fold(0u32, |n, byte| n << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for index in 0..4 {
            let digit = DIGITS[(n >> (18 - 6 * index)) as usize & 63];
            out.push(if index <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    out
}

fn gunzip(bytes: &[u8]) -> Vec<u8> {
    let mut child =
        Command::new("gzip").arg("-dc").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    child.wait_with_output().unwrap().stdout
}

#[test]
fn capabilities_are_believed_of_the_keys_that_are_named_and_of_no_others() {
    let keys = tempfile::tempdir().unwrap();
    let made = ron(&["key", "new", "--out", "other.key"], keys.path());
    let public = String::from_utf8(made.stdout).unwrap().trim().to_owned();
    let minted = ron(&["token", "mint", "--key", "other.key", "--scope", "edge:write"], keys.path());
    let foreign = format!("Bearer {}", String::from_utf8(minted.stdout).unwrap().trim());
    let edge = Edge::start("", "");
    let own = format!("Bearer {}", edge.token);
    let put = |bearer: &str| {
        let answer =
            request(&edge.address(), "PUT", "/edge/cas", &[("Authorization", bearer)], b"x").unwrap();
        (answer.status < 300, answer.reason().to_owned())
    };
    let refused = (false, "token_invalid".to_owned());
    assert_eq!((put(&own), put(&foreign)), ((true, String::new()), refused.clone()));
    edge.node.write_config(&format!("[node]\ntoken_keys = [\"{public}\"]\n{}", config("", "")));
    assert_eq!(edge.node.admin_post("/admin/reload", "").status, 200);
    assert_eq!((put(&own), put(&foreign)), (refused, (true, String::new())));
}
