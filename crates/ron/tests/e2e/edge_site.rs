//! Sites: a whole host through the cache, as RFC 9111 has it.

use crate::edge::{Edge, config};
use crate::edge_fill::{certificates, start_tls};
use ron_testkit::{Answer, Client, Gate, Node, Origin, Script, get, request};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An edge with one site, whose origin speaks plain HTTP.
struct Site {
    edge: Edge,
    origin: Origin,
}

fn table(origin: &Origin) -> String {
    format!(
        "[[edge.sites]]\nhosts = [\"test\"]\norigin = \"{}\"\nallow_http = true\nallow_private = true\n",
        origin.url()
    )
}

impl Site {
    fn start(choose: impl Fn(&str) -> Script + Send + Sync + 'static) -> Site {
        Site::with("", choose)
    }

    fn with(tables: &str, choose: impl Fn(&str) -> Script + Send + Sync + 'static) -> Site {
        let origin = Origin::start(choose);
        // Patient unless a test is about that: the machine may be slow.
        let patience = match tables.contains("[edge.ingress]") {
            true => "",
            false => "[edge.ingress]\ntimeout = \"30s\"\n[edge.fill]\ndeadline = \"30s\"\n",
        };
        let tables = format!("{tables}\n{patience}{}", table(&origin));
        let edge = Edge::of(Node::start(&["edge"], &config("", &tables)));
        Site { edge, origin }
    }

    fn get(&self, path: &str) -> Answer {
        self.edge.get(path, &[])
    }

    fn status(&self, path: &str) -> String {
        self.get(path).header("cache-status").unwrap_or_default().to_owned()
    }
}

fn ok(fields: &str, body: &[u8]) -> Script {
    Script::Answer(format!("200 OK\r\n{fields}"), body.to_vec())
}

#[test]
fn a_site_passes_unchanged_and_what_may_be_stored_is_reused() {
    let site = Site::start(|path| match path {
        "/page" => ok(
            "Cache-Control: max-age=60\r\nETag: W/\"own\"\r\nContent-Type: text/x-own\r\nX-Own: 1\r\nSet-Cookie: a=b\r\n",
            b"a page",
        ),
        "/private" => ok("Cache-Control: private, max-age=60\r\n", b"for you"),
        "/error" => Script::Answer("500 Oops\r\n".to_owned(), b"oops".to_vec()),
        _ => ok("Cache-Control: max-age=60\r\n", b"other"),
    });
    let first = site.get("/page");
    assert_eq!((first.status, first.text().as_str()), (200, "a page"));
    assert_eq!(
        (first.header("etag"), first.header("x-own"), first.header("set-cookie")),
        (Some("W/\"own\""), Some("1"), Some("a=b"))
    );
    assert_eq!(first.header("content-type"), Some("text/x-own"));
    assert_eq!(
        (first.header("via"), first.header("cache-status")),
        (Some("1.1 ron"), Some("ron-edge; fwd=uri-miss; stored"))
    );
    assert_eq!(
        (first.header("x-content-type-options"), first.header("repr-digest")),
        (None, None),
        "it is the site's own"
    );
    let again = site.get("/page");
    assert_eq!(
        (again.text().as_str(), again.header("etag"), again.header("x-own")),
        ("a page", Some("W/\"own\""), Some("1"))
    );
    assert!(
        again.header("age").is_some()
            && again.header("cache-status").unwrap().starts_with("ron-edge; hit; ttl=")
    );
    assert!(again.header("x-corr-id").is_some());
    assert_eq!(site.origin.count("/page"), 1);
    assert_eq!(site.edge.get("/page", &[("If-None-Match", "\"own\"")]).status, 304);
    let part = site.edge.get("/page", &[("Range", "bytes=2-3")]);
    assert_eq!(
        (part.status, part.text().as_str(), part.header("content-range")),
        (206, "pa", Some("bytes 2-3/6"))
    );
    let head = request(&site.edge.address(), "HEAD", "/page", &[], b"").unwrap();
    assert_eq!((head.status, head.header("content-length")), (200, Some("6")));
    assert_eq!(site.origin.count("/page"), 1);
    assert_eq!(site.status("/private"), "ron-edge; fwd=uri-miss; detail=private");
    site.get("/private");
    assert_eq!(site.origin.count("/private"), 2);
    assert_eq!((site.get("/error").status, site.get("/error").text().as_str()), (500, "oops"));
    for (result, least) in [("hit", 4.0), ("fill", 1.0), ("miss", 4.0)] {
        assert!(
            site.edge.node.metric(&format!("edge_cache_total{{result=\"{result}\"}}")) >= least,
            "{result}"
        );
    }
}

#[test]
fn what_is_not_read_passes_through_and_other_hosts_are_not_served() {
    let site = Site::start(|_| Script::Echo);
    let echoed = site.edge.send(
        "POST",
        "/echo",
        &[("Connection", "x-hop"), ("X-Hop", "1"), ("X-Kept", "2")],
        b"a body",
    );
    let text = echoed.text().to_lowercase();
    let lied = site.edge.get(
        "/lies",
        &[
            ("X-Forwarded-Host", "evil"),
            ("X_Forwarded_Proto", "gopher"),
            ("Forwarded", "for=evil"),
            ("X-Real-IP", "6.6.6.6"),
        ],
    );
    let lies = ["evil", "gopher", "6.6.6.6"];
    assert!(lied.status == 200 && !lies.iter().any(|lie| lied.text().contains(lie)), "{}", lied.text());
    assert!(text.ends_with("a body") && text.contains("x-kept: 2") && !text.contains("x-hop"), "{text}");
    assert!(text.contains("x-forwarded-host: test") && text.contains("x-forwarded-for: 127.0.0.1"), "{text}");
    assert!(text.contains("via: 1.1 ron") && text.contains("request-timeout: "), "{text}");
    // Other hosts are not served, and what is ours is ours on every host.
    let mut client = Client::connect(&site.edge.address()).unwrap();
    client.send(b"GET /page HTTP/1.1\r\nHost: other\r\n\r\n").unwrap();
    assert_eq!(client.read_answer("GET").unwrap().status, 404);
    assert_eq!(site.get("/edge/assets/x").reason(), "not_allowed");
    let long = format!("/{}", "l".repeat(4096));
    assert_eq!(
        (site.get(&long).status, site.status(&long)),
        (200, "ron-edge; fwd=bypass".to_owned()),
        "not kept"
    );
    for target in ["/x", "test:80"] {
        let mut client = Client::connect(&site.edge.address()).unwrap();
        client.send(format!("CONNECT {target} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes()).unwrap();
        let refused = client.read_answer("CONNECT").unwrap();
        assert!((400..=501).contains(&refused.status), "{target}: {}", refused.status);
    }
    assert!(!site.origin.last().contains("CONNECT"), "no tunnel is asked for");
    let large = site.edge.send("POST", "/echo", &[], &vec![0; (1 << 20) + 1]);
    assert_eq!((large.status, large.reason()), (413, "body_cap"));
}

#[test]
fn a_response_is_kept_over_a_kill_and_purged_by_path_prefix_and_key() {
    let mut site = Site::start(|path| {
        let key = if path.starts_with("/k") { "Surrogate-Key: news front\r\n" } else { "" };
        ok(&format!("Cache-Control: max-age=600\r\n{key}"), path.as_bytes())
    });
    let paths = ["/a", "/a?x=1", "/b/1", "/b/2", "/k1", "/k2"];
    for path in paths {
        assert_eq!(site.get(path).text(), path);
    }
    site.edge.node.signal("KILL");
    site.edge.node.wait();
    let dir = std::mem::replace(&mut site.edge.node.dir, tempfile::tempdir().unwrap());
    let _ = std::fs::remove_file(dir.path().join("addresses.json"));
    site.edge.node = Node::spawn(dir, &["run", "edge", "--config", "ron.toml"], &[]);
    for path in paths {
        let answer = site.get(path);
        assert!(
            answer.text() == path && answer.header("cache-status").unwrap().starts_with("ron-edge; hit"),
            "{path}"
        );
    }
    let purge =
        |body: &str| site.edge.send("POST", "/edge/purge", &[], body.as_bytes()).json()["removed"].clone();
    assert_eq!(purge(r#"{"path":"/a?x=1"}"#), 1);
    assert_eq!(
        (purge(r#"{"path":"/a"}"#), purge(r#"{"prefix":"/b/"}"#), purge(r#"{"key":"front"}"#)),
        (1.into(), 2.into(), 2.into())
    );
    assert_eq!(purge(r#"{"prefix":"/"}"#), 0);
    for path in paths {
        site.get(path);
        assert_eq!(site.origin.count(path), 2, "{path}");
    }
}

#[test]
fn surrogate_keys_are_those_of_the_last_answer_and_all_or_nothing() {
    let confirmed = AtomicUsize::new(0);
    let site = Site::start(move |path| match path {
        "/many" => {
            ok(&format!("Cache-Control: max-age=60\r\nSurrogate-Key:{}\r\n", " k".repeat(257)), b"many")
        }
        _ if confirmed.fetch_add(1, Ordering::SeqCst) > 0 => Script::Answer(
            "304 Not Modified\r\nETag: \"1\"\r\nCache-Control: max-age=60\r\nSurrogate-Key: new\r\n"
                .to_owned(),
            Vec::new(),
        ),
        _ => ok(
            "ETag: \"1\"\r\nCache-Control: max-age=0\r\nSurrogate-Key: old\r\nX-Reason: theirs\r\n",
            b"page",
        ),
    });
    assert_eq!(
        (site.get("/many").status, site.status("/many").as_str()),
        (200, "ron-edge; fwd=uri-miss; detail=surrogate-keys")
    );
    assert_eq!((site.get("/page").text().as_str(), site.get("/page").text().as_str()), ("page", "page"));
    let hit = site.get("/page");
    assert_eq!((hit.header("x-reason"), hit.header("surrogate-key")), (None, Some("new")));
    assert_eq!(site.origin.count("/page"), 2, "fetched and confirmed");
    let purge =
        |body: &str| site.edge.send("POST", "/edge/purge", &[], body.as_bytes()).json()["removed"].clone();
    assert_eq!((purge(r#"{"key":"old"}"#), purge(r#"{"key":"new"}"#)), (0.into(), 1.into()));
}

#[test]
fn a_herd_is_collapsed_and_a_private_answer_is_not_shared() {
    fn vary(head: &str) -> Script {
        ok("Cache-Control: max-age=60\r\nVary: X-Who\r\n", field(head, "x-who").as_bytes())
    }
    let number = AtomicUsize::new(0);
    let gates = [Gate::default(), Gate::default(), Gate::default()];
    let [shared, private, varied] = gates.clone();
    let limits = "[edge.ingress]\nmax_inflight = 2000\nmax_conns_per_ip = 2000\nrps_limit = 0\ntimeout = \"60s\"\n[edge.fill]\ndeadline = \"60s\"";
    let site = Site::with(limits, move |path| match path {
        "/shared" => {
            shared.pass();
            ok("Cache-Control: max-age=60\r\n", &[7; 30_000])
        }
        "/vary" => {
            varied.pass();
            Script::ByHead(vary)
        }
        _ => {
            private.pass();
            let number = number.fetch_add(1, Ordering::SeqCst);
            ok("Cache-Control: private\r\n", number.to_string().as_bytes())
        }
    });
    let [shared, private, varied] = gates;
    let herd = |path: &str, gate: &Gate, clients: usize, who: &dyn Fn(usize) -> String| -> Vec<Answer> {
        let mut all: Vec<Client> =
            (0..clients).map(|_| Client::connect(&site.edge.address()).unwrap()).collect();
        for (n, client) in all.iter_mut().enumerate() {
            client
                .send(format!("GET {path} HTTP/1.1\r\nHost: test\r\nX-Who: {}\r\n\r\n", who(n)).as_bytes())
                .unwrap();
        }
        site.edge.node.eventually("all are in", |node| {
            node.metric("inflight_requests{service=\"edge\"}") as usize >= clients
        });
        gate.open();
        all.iter_mut().map(|client| client.read_answer("GET").unwrap()).collect()
    };
    let shared = herd("/shared", &shared, 100, &|_| "a".to_owned());
    assert!(shared.iter().all(|answer| answer.status == 200 && answer.body == vec![7; 30_000]));
    assert_eq!(site.origin.count("/shared"), 1);
    assert!(
        shared
            .iter()
            .any(|answer| answer.header("cache-status") == Some("ron-edge; fwd=uri-miss; collapsed"))
    );
    assert!(site.edge.node.metric("edge_cache_total{result=\"collapsed\"}") >= 50.0);
    let private = herd("/private", &private, 5, &|_| "a".to_owned());
    let mut texts: Vec<String> = private.iter().map(Answer::text).collect();
    texts.sort();
    texts.dedup();
    assert_eq!((texts.len(), site.origin.count("/private")), (5, 5), "each has its own");
    let varied = herd("/vary", &varied, 6, &|n| (n % 2).to_string());
    let own = |(n, answer): (usize, &Answer)| answer.text() == (n % 2).to_string();
    assert!(varied.iter().enumerate().all(own), "{varied:?}");
    assert!((2..=4).contains(&site.origin.count("/vary")), "{}", site.origin.count("/vary"));
}

/// A field of a request's head; empty if it has none.
fn field<'a>(head: &'a str, name: &str) -> &'a str {
    let lines = head.lines().filter_map(|line| line.split_once(": "));
    lines.filter(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value).next().unwrap_or("")
}

impl Site {
    /// Asks while an origin is held at a gate, each when the one before it is in; opens it when all are.
    fn together(&self, path: &str, gate: &Gate, fields: &[&str]) -> Vec<Answer> {
        let mut all = Vec::new();
        let before = self.origin.count(path);
        for (number, field) in fields.iter().enumerate() {
            let mut client = Client::connect(&self.edge.address()).unwrap();
            client.send(format!("GET {path} HTTP/1.1\r\nHost: test\r\n{field}\r\n\r\n").as_bytes()).unwrap();
            all.push(client);
            self.edge.node.eventually("it is in", |node| {
                let inside = node.metric("inflight_requests{service=\"edge\"}");
                inside > number as f64 && self.origin.count(path) > before
            });
        }
        gate.open();
        all.iter_mut().map(|client| client.read_answer("GET").unwrap()).collect()
    }
}

#[test]
fn who_waits_with_others_gets_nothing_that_the_store_may_not_give_to_all() {
    fn own(head: &str) -> Script {
        let who = field(head, "cookie").to_owned();
        ok(&format!("ETag: \"{who}\"\r\nSet-Cookie: {who}\r\n"), who.as_bytes())
    }
    let gate = Gate::default();
    let held = gate.clone();
    let site = Site::start(move |_| {
        held.pass();
        Script::ByHead(own)
    });
    let answers = site.together("/account", &gate, &["Cookie: a", "Cookie: b", "Cookie: c"]);
    let seen: Vec<_> =
        answers.iter().map(|it| (it.text(), it.header("set-cookie").unwrap().to_owned())).collect();
    assert_eq!(seen, ["a", "b", "c"].map(|who| (who.to_owned(), who.to_owned())));
}

#[test]
fn what_was_confirmed_to_one_client_is_not_confirmed_to_another() {
    /// Every language is in its first version, or German in its second.
    fn say(head: &str, german: &str) -> Script {
        let language = field(head, "accept-language");
        let version = if language == "de" { german } else { "1" };
        let tag = format!("\"{language}{version}\"");
        let fields =
            format!("Cache-Control: max-age=0, must-revalidate\r\nVary: Accept-Language\r\nETag: {tag}\r\n");
        match field(head, "if-none-match") == tag {
            true => Script::Answer(format!("304 Not Modified\r\n{fields}"), Vec::new()),
            false => ok(&fields, tag.as_bytes()),
        }
    }
    let (gate, changed) = (Gate::default(), Arc::new(AtomicUsize::new(0)));
    let (held, now) = (gate.clone(), changed.clone());
    let site = Site::start(move |_| match now.load(Ordering::SeqCst) {
        0 => Script::ByHead(|head| say(head, "1")),
        _ => {
            held.pass();
            Script::ByHead(|head| say(head, "2"))
        }
    });
    for (language, tag) in [("en", "\"en1\""), ("de", "\"de1\"")] {
        assert_eq!(site.edge.get("/x", &[("Accept-Language", language)]).text(), tag);
    }
    changed.store(1, Ordering::SeqCst);
    let answers = site.together("/x", &gate, &["Accept-Language: en", "Accept-Language: de"]);
    assert_eq!((answers[0].text().as_str(), answers[1].text().as_str()), ("\"en1\"", "\"de2\""));
    assert_eq!(answers[0].header("cache-status"), Some("ron-edge; fwd=stale; fwd-status=304"));
}

#[test]
fn what_a_head_makes_private_is_not_kept() {
    fn choose(head: &str) -> Script {
        let own = if head.starts_with("HEAD") { "private\r\nSet-Cookie: own" } else { "max-age=600" };
        ok(&format!("ETag: \"1\"\r\nCache-Control: {own}\r\n"), b"x")
    }
    let site = Site::start(|_| Script::ByHead(choose));
    site.get("/x");
    assert!(site.status("/x").starts_with("ron-edge; hit"));
    let fields = [("Cache-Control", "no-cache"), ("Authorization", "Basic YTpi")];
    let head = request(&site.edge.address(), "HEAD", "/x", &fields, b"").unwrap();
    assert_eq!((head.status, head.header("set-cookie")), (200, Some("own")));
    let after = site.get("/x");
    assert_eq!((after.header("set-cookie"), after.header("cache-control")), (None, Some("max-age=600")));
    assert_eq!(after.header("cache-status"), Some("ron-edge; fwd=uri-miss; stored"));
}

#[test]
fn who_comes_while_an_answer_arrives_joins_it_only_if_it_is_fresh() {
    let half = |fields: &str| {
        Script::Stall(format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: 100\r\n\r\nhalf").into_bytes())
    };
    let limits = "[edge.fill]\nstall_timeout = \"5s\"\ndeadline = \"30s\"\n[edge.ingress]\ntimeout = \"30s\"";
    let site = Site::with(limits, move |path| match path {
        "/fresh" => half("Cache-Control: max-age=60\r\n"),
        "/other" => ok("", b"other"),
        _ => half("Cache-Control: no-cache\r\nETag: \"1\"\r\n"),
    });
    for (path, expected) in [("/fresh", 1), ("/checked", 2)] {
        let mut clients = Vec::new();
        for _ in 0..2 {
            let mut client = Client::connect(&site.edge.address()).unwrap();
            client.send(format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes()).unwrap();
            clients.push(client.read_head().unwrap());
        }
        assert_eq!(site.origin.count(path), expected, "{path}");
        assert!(clients.iter().all(|head| head.starts_with("HTTP/1.1 200")), "{clients:?}");
    }
}

#[test]
fn what_is_stored_for_whom_is_decided_by_what_the_origin_saw() {
    fn choose(head: &str) -> Script {
        let seen =
            ["accept-language", "x-forwarded-for", "forwarded"].map(|name| field(head, name)).join("|");
        let fields = "Cache-Control: max-age=600\r\nVary: Accept-Language, X-Forwarded-For, Forwarded\r\n";
        ok(fields, seen.as_bytes())
    }
    let site = Site::start(|_| Script::ByHead(choose));
    let get = |fields: &[(&str, &str)]| {
        let mut client = Client::connect(&site.edge.address()).unwrap();
        client.request("GET", "/x", fields, b"").unwrap()
    };
    // A field that goes no further than here says nothing about what comes back.
    let hidden = get(&[("Accept-Language", "de"), ("Connection", "Accept-Language")]);
    assert_eq!(hidden.text(), "|127.0.0.1|");
    let german = get(&[("Accept-Language", "de")]);
    assert_eq!(german.text(), "de|127.0.0.1|");
    assert_eq!(german.header("cache-status"), Some("ron-edge; fwd=vary-miss; stored"));
    // Nor does what a client says of itself where the origin is told by us.
    let claimed = get(&[("X-Forwarded-For", "192.0.2.1"), ("Forwarded", "for=192.0.2.1")]);
    assert_eq!(claimed.text(), "|127.0.0.1|");
    assert!(claimed.header("cache-status").unwrap().starts_with("ron-edge; hit"));
}

#[test]
fn offline_asks_for_no_confirmation_and_uses_nothing_that_needs_it() {
    let site = Site::start(|path| {
        let rule = match path {
            "/swr" => "max-age=0, stale-while-revalidate=600",
            "/strict" => "max-age=0, must-revalidate",
            "/never" => "no-cache, max-age=600",
            _ => "max-age=0",
        };
        ok(&format!("Cache-Control: {rule}\r\nETag: \"1\"\r\n"), b"kept")
    });
    let paths = ["/swr", "/strict", "/never", "/plain"];
    paths.iter().for_each(|path| assert_eq!(site.get(path).text(), "kept"));
    site.edge.node.write_config(&config("mode = \"offline\"", &table(&site.origin)));
    assert_eq!(site.edge.node.admin_post("/admin/reload", "").status, 200);
    let statuses = paths.map(|path| (site.get(path).status, site.get(path).status));
    assert_eq!(statuses, [(200, 200), (504, 504), (504, 504), (200, 200)]);
    let asked: Vec<usize> = paths.iter().map(|path| site.origin.count(path)).collect();
    assert_eq!(asked, [1; 4], "nobody was asked again");
}

#[test]
fn what_was_on_its_way_when_it_was_purged_or_changed_is_not_stored() {
    for change in ["purge", "post"] {
        let (gate, count) = (Gate::default(), AtomicUsize::new(0));
        let held = gate.clone();
        let site = Site::start(move |_| match count.fetch_add(1, Ordering::SeqCst) {
            0 => {
                held.pass();
                ok("Cache-Control: max-age=600\r\n", b"old")
            }
            _ => ok("Cache-Control: max-age=600\r\n", b"new"),
        });
        let mut client = Client::connect(&site.edge.address()).unwrap();
        client.send(b"GET /x HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        site.edge.node.eventually("it is on its way", |_| site.origin.count("/x") == 1);
        let changed = match change {
            "purge" => site.edge.send("POST", "/edge/purge", &[], br#"{"path":"/x"}"#),
            _ => site.edge.send("POST", "/x", &[], b"change"),
        };
        assert_eq!(changed.status, 200, "{change}");
        // Not stored, so that what the held answer leaves behind can be seen.
        let now = site.edge.get("/x", &[("Cache-Control", "no-store")]);
        assert_eq!(now.text(), "new", "{change}: nobody joins what is out of date");
        gate.open();
        assert_eq!(client.read_answer("GET").unwrap().text(), "old");
        let after = site.get("/x");
        assert_eq!((after.text().as_str(), site.origin.count("/x") > 2), ("new", true), "{change}");
    }
}

#[test]
fn a_part_whose_end_nobody_knows_is_not_asked_for_twice_in_vain() {
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = seen.clone();
    let site = Site::start(move |_| match counted.fetch_add(1, Ordering::SeqCst) {
        // All of it is there, and the last chunk is not.
        0 => Script::Raw(
            b"HTTP/1.1 200 OK\r\nCache-Control: max-age=600\r\nETag: \"1\"\r\n\
              Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n"
                .to_vec(),
        ),
        1 => {
            Script::Answer("416 Range Not Satisfiable\r\nContent-Range: bytes */4\r\n".to_owned(), Vec::new())
        }
        _ => ok("Cache-Control: max-age=600\r\nETag: \"1\"\r\n", b"body"),
    });
    let mut client = Client::connect(&site.edge.address()).unwrap();
    client.send(b"GET /x HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    assert!(client.read_answer("GET").is_err(), "cut");
    let whole = site.get("/x");
    assert_eq!((whole.status, whole.text().as_str()), (200, "body"));
    assert_eq!(seen.load(Ordering::SeqCst), 3);
}

#[test]
fn what_the_store_cannot_take_reaches_its_client_all_the_same() {
    let site = Site::with("[edge.cas]\nmax_bytes = \"1MiB\"", |path| match path {
        "/large" => ok("Cache-Control: max-age=600\r\n", &[7; 2 << 20]),
        "/long" => {
            let head = "HTTP/1.1 200 OK\r\nCache-Control: max-age=600\r\nTransfer-Encoding: chunked\r\n\r\n";
            let chunks = (0..40).flat_map(|n| [&b"186a0\r\n"[..], &[n; 100_000], b"\r\n"].concat());
            Script::Raw(head.bytes().chain(chunks).chain(*b"0\r\n\r\n").collect())
        }
        _ => ok("Cache-Control: max-age=600\r\n", b"a page"),
    });
    assert_eq!(site.get("/large").body.len(), 2 << 20);
    // How long this one is nobody knows before it is there.
    let long = site.get("/long");
    let right = |(n, piece): (usize, &[u8])| piece.iter().all(|byte| usize::from(*byte) == n);
    assert!(long.body.len() == 4_000_000 && long.body.chunks(100_000).enumerate().all(right));
    // A store that cannot be written to.
    std::fs::remove_dir_all(site.edge.node.dir.path().join("cas/tmp")).unwrap();
    for _ in 0..2 {
        assert_eq!(site.get("/page").text(), "a page");
        assert_eq!(site.get("/long").body, long.body);
    }
    assert_eq!((site.origin.count("/page"), site.origin.count("/long")), (2, 3));
}

#[test]
fn an_answer_that_breaks_off_is_completed_by_its_own_version_only() {
    fn version(head: &str, seen: usize) -> Script {
        let ranged = head.to_lowercase().contains("if-range: \"1\"");
        let part = |tag: &str, body: &[u8]| {
            let fields = "Cache-Control: max-age=600\r\nContent-Range: bytes 5-9/10\r\n";
            Script::Answer(format!("206 Partial Content\r\n{fields}ETag: \"{tag}\"\r\n"), body.to_vec())
        };
        match (head.split(' ').nth(1).unwrap_or_default(), seen) {
            (_, 0) => Script::Raw(
                b"HTTP/1.1 200 OK\r\nCache-Control: max-age=600\r\nETag: \"1\"\r\nContent-Length: 10\r\n\r\n11111".to_vec(),
            ),
            ("/same", 1) if ranged => part("1", b"11111"),
            // An origin that does not heed what it was asked.
            ("/lies", 1) if ranged => part("2", b"22222"),
            _ => ok("Cache-Control: max-age=600\r\nETag: \"2\"\r\n", b"2222222222"),
        }
    }
    let seen = Arc::new(std::sync::Mutex::new(std::collections::HashMap::<String, usize>::new()));
    let site = Site::start(move |path| {
        let mut seen = seen.lock().unwrap();
        let count = seen.entry(path.to_owned()).or_default();
        *count += 1;
        match *count {
            1 => Script::ByHead(|head| version(head, 0)),
            2 => Script::ByHead(|head| version(head, 1)),
            _ => Script::ByHead(|head| version(head, 2)),
        }
    });
    for (path, expected, asked) in
        [("/same", "1111111111", 2), ("/new", "2222222222", 2), ("/lies", "2222222222", 3)]
    {
        let broken = request(&site.edge.address(), "GET", path, &[], b"");
        assert!(!broken.is_ok_and(|answer| answer.body.len() == 10), "{path}");
        for _ in 0..2 {
            let whole = site.get(path);
            assert_eq!((whole.status, whole.text().as_str()), (200, expected), "{path}");
        }
        assert_eq!(site.origin.count(path), asked, "{path}");
    }
}

#[test]
fn stale_responses_are_confirmed_refreshed_behind_the_back_and_stand_in() {
    let version = Arc::new(AtomicUsize::new(1));
    let now = version.clone();
    let site = Site::with("[edge.retry]\ntries = 1", move |path| {
        let version = now.load(Ordering::SeqCst);
        let tag = format!("ETag: \"{version}\"\r\n");
        let body = version.to_string().into_bytes();
        match (path, version) {
            ("/swr", _) => Script::Answer(
                format!("200 OK\r\nCache-Control: max-age=0, stale-while-revalidate=600\r\n{tag}"),
                body,
            ),
            ("/sie", 3) => Script::Answer("503 Busy\r\n".to_owned(), Vec::new()),
            ("/sie", _) => Script::Answer(
                format!("200 OK\r\nCache-Control: max-age=0, stale-if-error=600\r\n{tag}"),
                body,
            ),
            ("/tag", 2) => Script::Answer(
                "304 Not Modified\r\nETag: \"1\"\r\nX-New: 2\r\nCache-Control: max-age=600\r\n".to_owned(),
                Vec::new(),
            ),
            _ => Script::Answer(format!("200 OK\r\nCache-Control: no-cache\r\n{tag}"), body),
        }
    });
    let text = |path: &str| site.get(path).text();
    assert_eq!((text("/swr"), text("/sie"), text("/tag")), ("1".into(), "1".into(), "1".into()));
    version.store(2, Ordering::SeqCst);
    let confirmed = site.get("/tag");
    assert_eq!((confirmed.text().as_str(), confirmed.header("x-new")), ("1", Some("2")));
    assert_eq!(confirmed.header("cache-status"), Some("ron-edge; fwd=stale; fwd-status=304"));
    assert!(site.origin.last().to_lowercase().contains("if-none-match: \"1\""));
    assert!(site.status("/tag").starts_with("ron-edge; hit"), "good again, as the 304 says");
    assert_eq!(text("/swr"), "1");
    site.edge.node.eventually("it is refreshed", |_| text("/swr") == "2");
    version.store(3, Ordering::SeqCst);
    let stale = site.get("/sie");
    assert!(stale.text() == "1" || stale.text() == "2", "{}", stale.text());
    assert!(stale.header("cache-status").unwrap().contains("stale-if-error"));
    assert!(site.edge.node.metric("edge_cache_total{result=\"stale\"}") >= 2.0);
    let only = site.edge.get("/never", &[("Cache-Control", "only-if-cached")]);
    assert_eq!((only.status, site.origin.count("/never")), (504, 0));
}

#[test]
fn an_unsafe_request_makes_the_cache_forget_and_head_is_heard() {
    let site = Site::start(|path| match path {
        "/moved" => Script::Answer("201 Created\r\nLocation: /list\r\n".to_owned(), Vec::new()),
        _ => ok("Cache-Control: max-age=600\r\nETag: \"1\"\r\n", b"x"),
    });
    for path in ["/list", "/doc"] {
        site.get(path);
        assert!(site.status(path).starts_with("ron-edge; hit"));
    }
    assert_eq!(site.edge.send("PUT", "/doc", &[], b"new").status, 200);
    assert_eq!(site.edge.send("POST", "/moved", &[], b"new").status, 201);
    assert!(site.status("/doc").contains("fwd=uri-miss") && site.status("/list").contains("fwd=uri-miss"));
    let head = request(&site.edge.address(), "HEAD", "/other", &[], b"").unwrap();
    assert_eq!((head.status, head.body.len(), head.header("content-length")), (200, 0, Some("1")));
}

// RFC 9110 section 9.3.3.
#[test]
fn what_a_post_says_of_its_target_is_kept_for_those_who_get_it() {
    let site = Site::start(|path| match path {
        "/self" => ok("Cache-Control: max-age=600\r\nContent-Location: /self\r\n", b"of the post"),
        "/other" => ok("Cache-Control: max-age=600\r\nContent-Location: /self\r\n", b"not it"),
        "/vague" => ok("Content-Location: /vague\r\nETag: \"1\"\r\n", b"for how long?"),
        _ => ok("Cache-Control: max-age=600\r\n", b"x"),
    });
    let post = |path: &str| request(&site.edge.address(), "POST", path, &[], b"a body").unwrap();
    let posted = post("/self");
    assert_eq!((posted.status, posted.text().as_str()), (200, "of the post"));
    assert_eq!(posted.header("cache-status"), Some("ron-edge; fwd=method; stored"));
    let got = site.get("/self");
    assert_eq!((got.text().as_str(), site.origin.count("/self")), ("of the post", 1));
    assert!(got.header("cache-status").unwrap().starts_with("ron-edge; hit"));
    // Another one says that it changed that, and is itself none that could be kept.
    for (path, kept) in [("/other", false), ("/vague", false), ("/plain", false), ("/self", true)] {
        post(path);
        let before = site.origin.count(path);
        site.get(path);
        assert_eq!(site.origin.count(path) == before, kept, "{path}");
    }
    assert_eq!(site.edge.send("POST", "/self", &[], b"a body").status, 200);
    assert!(site.status("/self").contains("fwd=uri-miss"), "who had credentials speaks for himself");
    post("/other");
    assert!(site.status("/self").contains("fwd=uri-miss"), "its Content-Location is forgotten");
}

// RFC 9110 section 7.6.2.
#[test]
fn a_request_that_counts_its_hops_goes_no_further_than_it_may() {
    let site = Site::start(|_| Script::Echo);
    let ask = |method: &str, hops: &str| {
        request(&site.edge.address(), method, "/x", &[("Max-Forwards", hops)], b"").unwrap()
    };
    let here = ask("OPTIONS", "0");
    assert_eq!((here.status, site.origin.count("/x")), (204, 0));
    assert!(here.header("allow").unwrap().contains("GET"));
    assert_eq!((ask("TRACE", "0").status, site.origin.count("/x")), (405, 0));
    assert!(ask("OPTIONS", "2").text().to_lowercase().contains("max-forwards: 1\r\n"));
    assert!(ask("GET", "0").text().to_lowercase().contains("max-forwards: 0\r\n"), "others do not count");
}

#[test]
fn what_says_when_it_was_modified_is_reused_for_a_while_if_that_is_allowed() {
    let fields = "Last-Modified: Mon, 02 Jan 2006 15:04:05 GMT\r\n";
    let origin = Origin::start(move |_| ok(fields, b"old"));
    for (heuristic, expected) in [("", 2), ("heuristic_max = \"1h\"\n", 1)] {
        let before = origin.count("/x");
        let tables = format!("[edge.ingress]\ntimeout = \"30s\"\n{}{heuristic}", table(&origin));
        let edge = Edge::of(Node::start(&["edge"], &config("", &tables)));
        for _ in 0..2 {
            assert_eq!(edge.get("/x", &[]).text(), "old");
        }
        assert_eq!(origin.count("/x") - before, expected, "{heuristic}");
    }
}

#[test]
fn an_age_that_is_unclear_is_not_believed_where_caution_is_asked_for() {
    let site = Site::start(|path| {
        let age = match path {
            "/list" => "Age: 0, 0\r\n",
            "/lines" => "Age: 0\r\nAge: 0\r\n",
            "/float" => "Age: 0.5\r\n",
            "/plain" => "Age: 5\r\n",
            _ => "",
        };
        ok(&format!("Cache-Control: max-age=600\r\nETag: \"1\"\r\n{age}"), b"of some age")
    });
    let paths = ["/list", "/lines", "/float", "/plain", "/none"];
    let asked = |times: usize| {
        for _ in 0..times {
            paths.iter().for_each(|path| assert_eq!(site.get(path).text(), "of some age", "{path}"));
        }
        paths.map(|path| site.origin.count(path))
    };
    assert_eq!(asked(2), [1; 5]);
    // What is stored obeys too, and again when nobody is cautious any more.
    for (option, expected) in [("cautious_age = true\n", [3, 3, 3, 1, 1]), ("", [3, 3, 3, 1, 1])] {
        site.edge.node.write_config(&config("", &format!("{}{option}", table(&site.origin))));
        assert_eq!(site.edge.node.admin_post("/admin/reload", "").status, 200);
        assert_eq!(asked(2), expected, "{option}");
    }
    assert!(site.status("/list").starts_with("ron-edge; hit; ttl="));
}

#[test]
fn a_304_with_another_tag_confirms_where_that_is_accepted() {
    /// Confirms by the name that the content has without its coding.
    fn say(head: &str) -> Script {
        let rule = "Cache-Control: max-age=0\r\n";
        match field(head, "if-none-match") {
            "" => ok(&format!("{rule}ETag: \"1-gzip\"\r\n"), b"the same"),
            _ => Script::Answer(format!("304 Not Modified\r\n{rule}ETag: \"1\"\r\n"), Vec::new()),
        }
    }
    let origin = Origin::start(|_| Script::ByHead(say));
    for (option, requests) in [("", 5), ("accept_changed_tag = true\n", 3)] {
        let before = origin.count("/x");
        let tables = format!("[edge.ingress]\ntimeout = \"30s\"\n{}{option}", table(&origin));
        let edge = Edge::of(Node::start(&["edge"], &config("", &tables)));
        for _ in 0..3 {
            let answer = edge.get("/x", &[]);
            assert_eq!((answer.text().as_str(), answer.header("etag")), ("the same", Some("\"1-gzip\"")));
        }
        assert_eq!(origin.count("/x") - before, requests, "{option}");
    }
    assert_eq!(field(&origin.last(), "if-none-match"), "\"1-gzip\"", "the tag with which it came");
}

#[test]
fn a_changed_protocol_goes_through_a_site() {
    let site = Site::start(|path| match path {
        "/socket" => Script::Upgrade,
        _ => Script::Echo,
    });
    let mut client = Client::connect(&site.edge.address()).unwrap();
    let fields =
        [("Connection", "keep-alive, Upgrade"), ("Upgrade", "echo"), ("Sec-WebSocket-Version", "13")];
    let answer = client.request("GET", "/socket", &fields, b"").unwrap();
    assert_eq!((answer.status, answer.header("upgrade")), (101, Some("echo")));
    assert_eq!(client.read_exact(5).unwrap(), b"hello");
    client.send(b"back and forth").unwrap();
    assert_eq!(client.read_exact(14).unwrap(), b"back and forth");
    let seen = site.origin.last().to_lowercase();
    assert!(seen.contains("connection: upgrade\r\nupgrade: echo\r\n"), "{seen}");
    assert!(seen.contains("sec-websocket-version: 13"), "{seen}");
    // It is a connection now and no request; nobody is kept waiting for its place.
    site.edge.node.eventually("it is no request any more", |node| {
        node.metric("inflight_requests{service=\"edge\"}") < 0.5
    });
    // HTTP by another name is not let through.
    let sly = site.edge.get("/x", &[("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c")]);
    assert!(sly.status == 200 && !sly.text().to_lowercase().contains("upgrade"), "{}", sly.text());
}

// RFC 9112 section 6.3.
#[test]
fn an_answer_in_a_transfer_coding_that_does_not_exist_ends_with_its_connection() {
    let answer =
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: unheard-of\r\nCache-Control: max-age=600\r\n\r\nas it is";
    let site = Site::start(|path| match path {
        // This one waits for its client to go first.
        "/kept" => Script::Stall(answer.to_vec()),
        "/closed" => Script::Raw(answer.to_vec()),
        _ => Script::Raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nas it is".to_vec()),
    });
    for path in ["/kept", "/closed"] {
        for _ in 0..2 {
            let answer = site.get(path);
            assert_eq!((answer.status, answer.text().as_str()), (200, "as it is"), "{path}");
            assert_eq!(answer.header("transfer-encoding").filter(|it| *it != "chunked"), None);
        }
        assert_eq!(site.origin.count(path), 1, "{path}");
    }
    assert_eq!(site.get("/coded").status, 502, "nobody asked for a coding, and nobody here undoes it");
}

#[test]
fn parts_of_a_response_are_kept_and_completed() {
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = seen.clone();
    let site = Site::start(move |_| {
        let head = "206 Partial Content\r\nCache-Control: max-age=600\r\nETag: \"1\"\r\n";
        match counted.fetch_add(1, Ordering::SeqCst) {
            0 => Script::Answer(format!("{head}Content-Range: bytes 0-4/10\r\n"), b"01234".to_vec()),
            1 => Script::Answer(format!("{head}Content-Range: bytes 5-9/10\r\n"), b"56789".to_vec()),
            _ => Script::HangUp,
        }
    });
    let first = site.edge.get("/x", &[("Range", "bytes=0-4")]);
    assert_eq!((first.status, first.text().as_str()), (206, "01234"));
    let within = site.edge.get("/x", &[("Range", "bytes=1-3")]);
    assert_eq!((within.status, within.text().as_str()), (206, "123"), "of what is here");
    assert_eq!(seen.load(Ordering::SeqCst), 1);
    let whole = site.get("/x");
    assert_eq!((whole.status, whole.text().as_str()), (200, "0123456789"), "completed");
    assert!(site.origin.last().to_lowercase().contains("range: bytes=5-"), "{}", site.origin.last());
    let across = site.edge.get("/x", &[("Range", "bytes=3-6")]);
    assert_eq!((across.status, across.text().as_str()), (206, "3456"));
    assert_eq!(seen.load(Ordering::SeqCst), 2);
}

#[test]
fn a_flipped_bit_is_fetched_again_and_offline_serves_what_is_there() {
    let site =
        Site::with("[edge.cas]\nverify = \"always\"", |_| ok("Cache-Control: max-age=600\r\n", &[5; 70_000]));
    assert_eq!(site.get("/x").body, [5; 70_000]);
    let mut folders = vec![site.edge.node.dir.path().join("cas/b3")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                folders.push(entry);
            } else if entry.extension().is_none() {
                let mut bytes = std::fs::read(&entry).unwrap();
                bytes[3] ^= 4;
                std::fs::write(&entry, bytes).unwrap();
            }
        }
    }
    assert_eq!((site.get("/x").body, site.origin.count("/x")), (vec![5; 70_000], 2));
    site.edge.node.write_config(&config(
        "mode = \"offline\"",
        &format!("[edge.cas]\nverify = \"always\"\n{}", table(&site.origin)),
    ));
    assert_eq!(site.edge.node.admin_post("/admin/reload", "").status, 200);
    assert_eq!(site.get("/x").body.len(), 70_000);
    assert_eq!(
        (site.get("/y").reason(), site.edge.send("POST", "/y", &[], b"x").reason()),
        ("not_found", "not_found")
    );
    assert_eq!(site.origin.count("/y"), 0);
}

#[test]
fn a_site_over_tls_is_asked_by_its_name_and_private_ones_only_if_allowed() {
    let (certs, folder) = certificates();
    let origin = start_tls(&folder, |_| ok("Cache-Control: max-age=60\r\n", b"over TLS"));
    let port = origin.address.rsplit(':').next().unwrap();
    let table = |keys: &str| {
        format!(
            "[[edge.sites]]\nhosts = [\"*\"]\norigin = \"https://localhost:{port}\"\nca_file = {:?}\nmax_inflight = 4\nrps = 0\n{keys}\n",
            folder.join("ca.pem")
        )
    };
    let edge = Edge::of(Node::start(&["edge"], &config("", &table("allow_private = true"))));
    assert_eq!(edge.get("/x", &[]).text(), "over TLS");
    assert!(origin.last().contains(&format!("host: localhost:{port}")));
    edge.node.write_config(&config("", &table("")));
    assert_eq!(edge.node.admin_post("/admin/reload", "").status, 200);
    assert_eq!(edge.get("/y", &[]).reason(), "not_allowed");
    let channels = get(&edge.node.admin(), "/debug/channels").json();
    let work = channels["channels"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["name"] == "work" && row["service"] == "edge");
    assert_eq!(work.unwrap()["capacity"], 512);
    drop(certs);
}
