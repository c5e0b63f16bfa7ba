//! Each refusal that one request can meet: status, reason, and the count of it.
//!
//! What takes a crowd or a shutdown stands with its own subject: `busy`, `shed`, `degraded`, `conns`, the quotas, the
//! decoded sizes, `upstream_error`, `forbidden` and `draining`.

use ron_testkit::{Client, Node, Origin, Script};
use std::time::Duration;

const CONFIG: &str = r#"
[admin]
listen = "127.0.0.1:0"
[gateway]
listen = "127.0.0.1:0"
read_timeout = "300ms"
limits = { max_body_bytes = "1KiB", max_headers = 10, max_header_bytes = "4KiB" }
quotas = { burst_factor = 1 }
auth = { mode = "api_key" }
[[gateway.tenants]]
id = "acme"
rps = 1
keys = ["sha256:6ab9f1eb8f7d3388f4f9d586f66e99fd54080df2c446f0e58668b09c08a16dd0"]
[[gateway.upstreams]]
name = "o"
servers = ["ORIGIN"]
[[gateway.upstreams]]
name = "failing"
servers = ["ORIGIN"]
breaker = { failures = 1, open = "1m" }
[[gateway.routes]]
path = "/echo"
upstream = "o"
[[gateway.routes]]
path = "/members"
upstream = "o"
auth = "required"
[[gateway.routes]]
path = "/reads"
upstream = "o"
methods = ["GET", "PURGE"]
[[gateway.routes]]
path = "/silent"
upstream = "o"
timeout = "200ms"
[[gateway.routes]]
path = "/failing"
upstream = "failing"
[[gateway.routes]]
path = "/decoded"
upstream = "o"
decode = true
"#;

fn node(origin: &Origin, config: &str) -> Node {
    Node::start(&["gateway"], &config.replace("ORIGIN", &origin.url()))
}

fn origin() -> Origin {
    Origin::start(|path| match path {
        "/silent" => Script::After(Duration::from_secs(2)),
        "/failing" => Script::Raw(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n".to_vec()),
        _ => Script::Echo,
    })
}

/// Sends the bytes on a connection of their own and reads one answer: its status and its reason.
fn raw(node: &Node, request: &str) -> (u16, String) {
    let mut client = Client::connect(&node.gateway()).unwrap();
    client.send(request.as_bytes()).unwrap();
    let answer = client.read_answer("GET").unwrap();
    (answer.status, answer.reason().to_owned())
}

#[test]
fn every_simple_refusal_has_its_status_its_reason_and_its_count() {
    let origin = origin();
    let node = node(&origin, CONFIG);
    assert_eq!(raw(&node, "GET /failing HTTP/1.1\r\nHost: a\r\n\r\n").0, 500);
    assert_eq!(raw(&node, "GET /members HTTP/1.1\r\nHost: a\r\nX-Api-Key: k1\r\n\r\n").0, 200);
    let many: String = (0..12).map(|n| format!("X-{n}: y\r\n")).collect();
    let cases = [
        (400, "malformed", "GET /echo HTTP/1.1\r\n\r\n".to_owned()),
        (401, "unauth", "GET /members HTTP/1.1\r\nHost: a\r\n\r\n".to_owned()),
        (401, "token_invalid", "GET /members HTTP/1.1\r\nHost: a\r\nX-Api-Key: k2\r\n\r\n".to_owned()),
        (404, "no_route", "GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n".to_owned()),
        (405, "method", "POST /reads HTTP/1.1\r\nHost: a\r\n\r\n".to_owned()),
        (408, "read_timeout", "GET /echo HT".to_owned()),
        (411, "length_required", "POST /echo HTTP/1.0\r\nHost: a\r\n\r\nabc".to_owned()),
        (413, "body_cap", "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1025\r\n\r\n".to_owned()),
        (414, "uri", format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "y".repeat(2000))),
        (
            415,
            "unsupported_encoding",
            "POST /decoded HTTP/1.1\r\nHost: a\r\nContent-Encoding: lzma\r\nContent-Length: 1\r\n\r\nx"
                .to_owned(),
        ),
        (417, "expectation", "GET /echo HTTP/1.1\r\nHost: a\r\nExpect: miracles\r\n\r\n".to_owned()),
        (429, "quota_tenant", "GET /members HTTP/1.1\r\nHost: a\r\nX-Api-Key: k1\r\n\r\n".to_owned()),
        (431, "headers", format!("GET /echo HTTP/1.1\r\nHost: a\r\n{many}\r\n")),
        (501, "method_unknown", "BREW /echo HTTP/1.1\r\nHost: a\r\n\r\n".to_owned()),
        (501, "method_unknown", "CONNECT a.org:443 HTTP/1.1\r\nHost: a.org:443\r\n\r\n".to_owned()),
        (503, "breaker_open", "GET /failing HTTP/1.1\r\nHost: a\r\n\r\n".to_owned()),
        (504, "deadline", "GET /silent HTTP/1.1\r\nHost: a\r\n\r\n".to_owned()),
    ];
    for (status, reason, request) in cases {
        let series = format!("rejected_total{{service=\"gateway\",reason=\"{reason}\"}}");
        let before = node.metric(&series);
        // A second has a new token for the tenant, which a request may get that comes late.
        let mut answer = raw(&node, &request);
        for _ in 0..20 {
            if reason == "quota_tenant" && answer.0 == 200 {
                answer = raw(&node, &request);
            }
        }
        assert_eq!(answer, (status, reason.to_owned()), "{request:?}");
        assert!(node.metric(&series) > before, "{reason} is not counted");
    }
    // What looks alike and is fine.
    for good in [
        "POST /echo HTTP/1.1\r\nHost: a\r\n\r\n",
        "POST /echo HTTP/1.0\r\nContent-Length: 2\r\n\r\nab",
        "GET /echo HTTP/1.0\r\n\r\n",
        "PROPFIND /echo HTTP/1.1\r\nHost: a\r\n\r\n",
        "PURGE /reads HTTP/1.1\r\nHost: a\r\n\r\n",
    ] {
        assert_eq!(raw(&node, good), (200, String::new()), "{good:?}");
    }
}

#[test]
fn a_host_that_nobody_serves_is_told_so_unless_a_route_takes_every_host() {
    let origin = origin();
    let hosted = CONFIG.replace("path = ", "hosts = [\"a.org\", \"*.b.org\"]\npath = ");
    let node = node(&origin, &hosted);
    let ask = |host: &str, path: &str| raw(&node, &format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    assert_eq!(ask("c.org", "/echo"), (421, "host".to_owned()));
    assert_eq!(node.metric("rejected_total{service=\"gateway\",reason=\"host\"}"), 1.0);
    assert_eq!((ask("a.org", "/echo").0, ask("x.b.org:8080", "/echo").0), (200, 200));
    assert_eq!(ask("a.org", "/nowhere"), (404, "no_route".to_owned()));
    let anybody = format!("{hosted}[[gateway.routes]]\npath = \"/any\"\nupstream = \"o\"\n");
    node.write_config(&anybody.replace("ORIGIN", &origin.url()));
    assert_eq!(node.admin_post("/admin/reload", "").status, 200);
    assert_eq!((ask("c.org", "/any").0, ask("c.org", "/echo").1), (200, "no_route".to_owned()));
}
