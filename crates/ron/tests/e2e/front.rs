//! `ron up` on one port: the gateway in front of the node's own services.

use ron_testkit::{Answer, Client, Node, Origin, Script, get, ron};

fn request(address: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    ron_testkit::request(address, method, path, headers, body).unwrap()
}

/// A whole node with every listener on a free port; `keys` goes into the gateway's table, `rest` behind it.
fn text(keys: &str, rest: &str) -> String {
    format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n[gateway]\nlisten = \"127.0.0.1:0\"\n{keys}\n\
         [edge]\nlisten = \"127.0.0.1:0\"\n[overlay]\nlisten = \"127.0.0.1:0\"\n[registry]\nlisten = \"127.0.0.1:0\"\n{rest}\n"
    )
}

fn up(keys: &str, rest: &str) -> Node {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("ron.toml"), text(keys, rest)).unwrap();
    Node::spawn(dir, &["up", "--config", "ron.toml"], &[])
}

fn mint(node: &Node, scope: &str) -> String {
    let minted = ron(&["token", "mint", "--scope", scope, "--key", "node.key"], node.dir.path());
    assert!(minted.status.success(), "{}", String::from_utf8_lossy(&minted.stderr));
    format!("Bearer {}", String::from_utf8(minted.stdout).unwrap().trim())
}

fn shown(node: &Node, args: &[&str]) -> String {
    let output = ron(&[args, &["--config", "ron.toml"]].concat(), node.dir.path());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// An open stream of the registry through the gateway.
fn stream(node: &Node) -> Client {
    stream_at(&node.gateway())
}

fn stream_at(address: &str) -> Client {
    let mut client = Client::connect(address).unwrap();
    client.send(b"GET /registry/stream HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let head = client.read_head().unwrap();
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("text/event-stream"), "{head}");
    client
}

#[test]
fn every_service_answers_on_the_gateways_port() {
    let node = up("", "");
    let (gateway, edge, registry) =
        (node.gateway(), node.address("edge", "http"), node.address("registry", "http"));
    for (path, direct) in [
        ("/registry/head", &registry),
        ("/registry/log-key", &registry),
        ("/checkpoint", &registry),
        ("/tile/0/000.p/1", &registry),
        ("/edge/packs", &edge),
    ] {
        let (through, direct) = (get(&gateway, path), get(direct, path));
        assert_eq!((through.status, through.body), (direct.status, direct.body), "{path}");
        assert!(through.headers.iter().any(|(name, _)| name == "via"), "{path} came by itself");
    }
    assert_eq!(get(&gateway, "/registry/head").status, 200);
    assert_eq!(get(&gateway, "/edge/packs").status, 200);
    assert_eq!(get(&gateway, "/elsewhere").reason(), "no_route");
    // What is larger than the gateway's own cap, with the capability that the edge wants.
    let large = vec![7; 3 << 20];
    assert_eq!(request(&gateway, "PUT", "/edge/assets/large", &[], &large).status, 401);
    let token = mint(&node, "edge:write,registry:propose");
    let put = request(&gateway, "PUT", "/edge/assets/large", &[("Authorization", &token)], &large);
    assert_eq!(put.status, 201, "{}", put.text());
    assert!(get(&gateway, "/edge/assets/large").body == large);
    assert_eq!(request(&gateway, "POST", "/registry/proposals", &[], b"{}").status, 401);
    let refused = request(&gateway, "POST", "/registry/proposals", &[("Authorization", &token)], b"{}");
    assert_eq!(refused.status, 400, "the registry took the capability: {}", refused.text());
    assert_eq!(request(&gateway, "BREW", "/edge/packs", &[], b"").status, 501);
}

#[test]
fn long_polls_streams_and_websockets_go_through() {
    // A budget that none of them would fit into.
    let node = up("request_timeout = \"100ms\"", "[registry.stream]\nheartbeat = \"300ms\"\n");
    let polled = get(&node.gateway(), "/registry/head?after=1000&wait=400ms");
    assert_eq!(polled.status, 200, "{}", polled.text());
    let mut following = stream(&node);
    let mut socket = Client::connect(&node.gateway()).unwrap();
    let key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n";
    let head = format!(
        "GET /registry/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n{key}\r\n"
    );
    socket.send(head.as_bytes()).unwrap();
    assert!(socket.read_head().unwrap().starts_with("HTTP/1.1 101"));
    socket.read_exact(2).unwrap();
    // Signs of life over several times the budget.
    following.read_exact(12).unwrap();
}

#[test]
fn one_address_in_front_is_not_counted_as_one_client() {
    let node = up("", "[registry.limits]\nmax_conns_per_ip = 1\n[edge.ingress]\nmax_conns_per_ip = 1\n");
    let _streams: Vec<Client> = (0..3).map(|_| stream(&node)).collect();
    node.eventually("all of them are open", |node| node.metric("stream_clients") == 3.0);
    assert_eq!(get(&node.gateway(), "/registry/head").status, 200);
    let shown = shown(&node, &["config", "show"]);
    assert!(
        shown.contains("registry.limits.trusted_proxies = [\"127.0.0.1\"]  # added by `ron up`")
            || shown.contains("registry.limits.trusted_proxies[0] = \"127.0.0.1\"  # added by `ron up`"),
        "{shown}"
    );
    // Without the gateway in front the caps hold for this machine too.
    let alone = up("front = false", "[registry.limits]\nmax_conns_per_ip = 1\n");
    let _first = stream_at(&alone.address("registry", "http"));
    let mut second = Client::connect(&alone.address("registry", "http")).unwrap();
    let refused = second.request("GET", "/registry/head", &[], b"");
    assert!(refused.map_or(true, |answer| answer.reason() == "conns"), "the second is one too many");
}

#[test]
fn commands_show_what_the_node_adds_and_the_file_goes_before() {
    let origin = Origin::start(|_| Script::Body(b"mine".to_vec()));
    let own = format!(
        "[[gateway.upstreams]]\nname = \"o\"\nservers = [\"{}\"]\n[[gateway.routes]]\npath = \"/edge/*\"\nupstream = \"o\"\n",
        origin.url()
    );
    let node = up("", &own);
    assert_eq!(get(&node.gateway(), "/edge/packs").text(), "mine");
    assert_eq!(get(&node.gateway(), "/registry/head").status, 200);
    let routes = shown(&node, &["gateway", "routes"]);
    assert!(routes.contains("/registry/*") && routes.contains("node.registry"), "{routes}");
    assert!(
        !routes.lines().any(|line| line.starts_with("/edge/*") && line.contains("node.edge")),
        "{routes}"
    );
    let status = shown(&node, &["gateway", "status"]);
    assert!(status.contains(&format!("http://{}", node.address("registry", "http"))), "{status}");
    let explained = shown(&node, &["gateway", "explain", "GET", "/registry/ws"]);
    assert!(explained.contains("of the node itself") && explained.contains("node.streams"), "{explained}");
    assert!(shown(&node, &["config", "show"]).contains("\"/registry/*\"  # added by `ron up`"));
    // Both are changed while it runs.
    node.write_config(&text("", ""));
    node.eventually("the edge answers", |node| get(&node.gateway(), "/edge/packs").text() != "mine");
    assert_eq!(get(&node.gateway(), "/edge/packs").status, 200);
    node.write_config(&text("front = false", ""));
    node.eventually("nothing leads there", |node| get(&node.gateway(), "/edge/packs").reason() == "no_route");
}

#[test]
fn a_file_that_would_open_the_registry_to_everybody_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = "[gateway]\nlisten = \"0.0.0.0:0\"\n[[gateway.upstreams]]\nname = \"node.edge\"\nservers = [\"http://127.0.0.1:1\"]\n[registry]\nauth = \"open\"\n";
    std::fs::write(dir.path().join("ron.toml"), file).unwrap();
    let checked = ron(&["config", "check", "ron.toml"], dir.path());
    let text = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert_eq!(checked.status.code(), Some(64));
    assert!(text.contains("registry.auth") && text.contains("gateway.front = false"), "{text}");
    assert!(text.contains("gateway.upstreams[0].name") && text.contains("choose another name"), "{text}");
}

#[test]
fn an_upstream_can_be_told_the_clients_own_deadline_only() {
    let origin = Origin::start(|_| Script::Body(b"hi".to_vec()));
    let node = Node::start(&["gateway"], &crate::config(&origin.url(), "", "tell_deadline = \"client\"\n"));
    assert_eq!(get(&node.gateway(), "/x").status, 200);
    assert!(!origin.last().to_ascii_lowercase().contains("request-timeout"), "{}", origin.last());
    let answer = request(&node.gateway(), "GET", "/x", &[("Request-Timeout", "90")], b"");
    assert_eq!(answer.status, 200);
    let told = origin.last().to_ascii_lowercase();
    let millis = told.lines().find_map(|line| line.strip_prefix("request-timeout: ")?.strip_suffix("ms"));
    // More than the route's own budget, for that is not what it is told of.
    assert!(
        millis.is_some_and(|millis| (31_000..=90_000).contains(&millis.parse::<u32>().unwrap())),
        "{told}"
    );
}
