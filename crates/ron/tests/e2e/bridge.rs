//! Topics of the overlay through the gateway: of this process, of another node, and of peers that play a part.

use ed25519_dalek::SigningKey;
use oap::control::{Choice, Hello};
use oap::frame::{APP_CONTROL, APP_SERVICES, FRAME_MAX, Flags, Frame, Kind};
use oap::{Decoded, Decoder, NodeId};
use ron_testkit::{Answer, Client, Node, command, get, ron};
use serde_json::Value;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

const FREE: &str = "listen = \"127.0.0.1:0\"";

/// A gateway alone; `keys` goes into its table, `rest` behind it.
fn gateway(keys: &str, rest: &str) -> Node {
    Node::start(&["gateway"], &format!("[admin]\n{FREE}\n[gateway]\n{FREE}\n{keys}\n{rest}\n"))
}

/// An overlay alone that admits everybody.
fn overlay(listen: &str, rest: &str) -> Node {
    let text = format!("[admin]\n{FREE}\n[overlay]\nlisten = \"{listen}\"\nadmit = \"any\"\n{rest}\n");
    Node::start(&["overlay"], &text)
}

fn bridge_to(peer: &str) -> String {
    format!("[gateway.bridge]\nenabled = true\npeer = \"{peer}\"")
}

fn peer(node: &Node) -> String {
    format!("{}@{}", node.address("overlay", "node"), node.address("overlay", "oap"))
}

fn post(node: &Node, topic: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    ron_testkit::request(&node.gateway(), "POST", &format!("/overlay/topics/{topic}"), headers, body).unwrap()
}

/// A topic that is followed through a gateway.
struct Feed {
    client: Client,
    text: String,
}

impl Feed {
    fn open(node: &Node, topic: &str) -> Feed {
        let mut client = Client::connect(&node.gateway()).unwrap();
        client.send(format!("GET /overlay/topics/{topic} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).unwrap();
        let head = client.read_head().unwrap();
        assert!(head.starts_with("HTTP/1.1 200") && head.contains("text/event-stream"), "{head}");
        let mut feed = Feed { client, text: String::new() };
        // From then on whatever is published comes.
        feed.until(": following");
        feed
    }

    /// Reads until there is this, and takes it out with all before it.
    fn until(&mut self, word: &str) -> String {
        loop {
            if let Some(at) = self.text.find(word) {
                return self.text.drain(..at + word.len()).collect();
            }
            let mut line = String::new();
            while !line.ends_with("\r\n") {
                line.push(char::from(self.client.read_exact(1).expect("the feed goes on")[0]));
            }
            let size = usize::from_str_radix(line.trim(), 16).unwrap();
            let piece = self.client.read_exact(size + 2).unwrap();
            self.text += std::str::from_utf8(&piece[..size]).unwrap();
        }
    }

    /// The next message.
    fn next(&mut self) -> Value {
        self.until("event: message\n");
        let event = self.until("\n\n");
        let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        let data: Value = serde_json::from_str(field("data: ")).unwrap();
        assert_eq!(data["id"], field("id: "));
        data
    }
}

#[test]
fn a_whole_node_publishes_and_streams_topics_on_the_gateways_port() {
    let dir = tempfile::tempdir().unwrap();
    let text = format!(
        "[admin]\n{FREE}\n[gateway]\n{FREE}\n[edge]\nenabled = false\n[registry]\nenabled = false\n[overlay]\n{FREE}\n"
    );
    std::fs::write(dir.path().join("ron.toml"), text).unwrap();
    let node = Node::spawn(dir, &["up", "--config", "ron.toml"], &[]);
    let mut feed = Feed::open(&node, "news/x");
    let said = post(&node, "news/x", &[("X-Corr-ID", "mine")], b"hello");
    assert_eq!((said.status, said.header("x-corr-id")), (202, Some("mine")), "{}", said.text());
    assert_eq!(said.json().as_object().unwrap().keys().collect::<Vec<_>>(), ["id"]);
    let came = feed.next();
    assert_eq!((&came["id"], &came["payload"]), (&said.json()["id"], &"hello".into()));
    assert_eq!((&came["topic"], &came["hops"]), (&"news/x".into(), &0.into()));
    assert_eq!(came["origin"], node.address("overlay", "node").as_str());
    assert!(said.json()["id"].as_str().unwrap().starts_with("b3:"));
    assert_eq!(post(&node, "news/x", &[], &[0xff, 0]).status, 202);
    assert_eq!(feed.next()["payload_b64"], "/wA=");
    assert_eq!(post(&node, "No", &[], b"x").reason(), "malformed");
    assert_eq!(post(&node, "a", &[], &vec![b'x'; (1 << 20) + 1]).reason(), "body_cap");
    assert_eq!(post(&node, "a", &[("Content-Encoding", "gzip")], b"no gzip").reason(), "malformed");
    let other = ron_testkit::request(&node.gateway(), "DELETE", "/overlay/topics/a", &[], b"").unwrap();
    assert_eq!((other.status, other.header("allow")), (405, Some("POST, GET")));
    assert_eq!(get(&node.gateway(), "/overlay/peers").reason(), "no_route", "only topics are bridged");
    let shown = ron(&["gateway", "routes", "--config", "ron.toml"], node.dir.path());
    assert!(String::from_utf8_lossy(&shown.stdout).contains("/overlay/topics/*"));
}

#[test]
fn another_nodes_topics_are_reached_over_a_session_that_comes_back() {
    let keys = tempfile::tempdir().unwrap();
    let named = format!("[node]\nkey_file = \"{}/a.key\"\n", keys.path().display());
    let far = overlay("127.0.0.1:0", &named);
    let (address, name) = (far.address("overlay", "oap"), peer(&far));
    let near = gateway("", &bridge_to(&name));
    near.eventually("it is reached", |near| get(&near.admin(), "/readyz").json()["degraded"] == false);
    let mut feed = Feed::open(&near, "t");
    // Larger than a frame, both ways.
    let large = "0123456789abcdef".repeat(10_000);
    let said = post(&near, "t", &[], large.as_bytes());
    assert_eq!(said.status, 202, "{}", said.text());
    let came = feed.next();
    assert!(came["payload"] == large.as_str());
    assert_eq!((&came["id"], &came["origin"]), (&said.json()["id"], &far.address("overlay", "node").into()));
    let there = ron(&["overlay", "pub", "t", "from there", "--config", "ron.toml"], far.dir.path());
    assert!(there.status.success());
    assert_eq!(feed.next()["payload"], "from there");
    assert_eq!(post(&near, "No", &[], b"x").reason(), "malformed", "as the peer says");
    let peers = far.admin_get("/overlay/peers").json();
    assert_eq!(peers["peers"].as_array().unwrap().len(), 0, "a client is no peer in the gossip");
    // Whoever has heard enough is not sent more.
    drop(feed);
    let following = |far: &Node| {
        let channels = get(&far.admin(), "/debug/channels").json();
        let rows = channels["channels"].as_array().unwrap();
        rows.iter().any(|row| row["name"] == "deliveries" && row["instances"] != 0)
    };
    far.eventually("nobody follows", |far| {
        post(&near, "t", &[], b"x");
        !following(far)
    });
    far.signal("KILL");
    near.eventually("it is missed", |near| {
        get(&near.admin(), "/readyz").json()["missing"] == serde_json::json!(["gateway.bridge"])
    });
    let down = post(&near, "t", &[], b"x");
    assert_eq!((down.status, down.reason(), down.header("retry-after")), (503, "no_upstream", Some("1")));
    near.eventually("it is tried again and again", |near| {
        near.metric("backoff_retries_total{service=\"gateway\",op=\"connect\"}") >= 3.0
    });
    let _again = overlay(&address, &named);
    near.eventually("it is there again", |near| post(near, "t", &[], b"x").status == 202);
    assert_eq!(get(&near.admin(), "/readyz").json()["degraded"], false);
}

#[test]
fn a_peer_that_does_not_list_the_gateway_is_asked_less_and_less_often_and_readiness_says_why() {
    let text = format!("[admin]\n{FREE}\n[overlay]\n{FREE}\n");
    let node = Node::start(&["overlay"], &text);
    let gate = gateway("", &bridge_to(&peer(&node)));
    gate.eventually("it says why", |gate| {
        let ready = get(&gate.admin(), "/readyz").json();
        ready["why"]["gateway.bridge"].as_str().is_some_and(|why| why.contains("does not admit this node"))
    });
    gate.eventually("it is tried again", |gate| {
        gate.metric("backoff_retries_total{service=\"gateway\",op=\"connect\"}") >= 5.0
    });
    let told = |gate: &Node| gate.log().matches("no session with the overlay peer").count();
    gate.eventually("it is said", |gate| told(gate) >= 1);
    assert_eq!(told(&gate), 1, "what does not change is said once: {}", gate.log());
}

#[test]
fn publishing_and_following_need_their_scopes() {
    let far = overlay("127.0.0.1:0", "");
    let node = gateway("", &format!("{}\n[gateway.auth]\nmode = \"biscuit\"\n", bridge_to(&peer(&far))));
    let mint = |scope: &str| {
        let minted = ron(&["token", "mint", "--scope", scope, "--key", "node.key"], node.dir.path());
        format!("Bearer {}", String::from_utf8(minted.stdout).unwrap().trim())
    };
    assert_eq!(post(&node, "t", &[], b"x").reason(), "unauth");
    assert_eq!(
        post(&node, "t", &[("Authorization", &mint("overlay:subscribe"))], b"x").reason(),
        "forbidden"
    );
    let publish = mint("overlay:publish");
    node.eventually("it is published", |node| {
        post(node, "t", &[("Authorization", &publish)], b"x").status == 202
    });
    let follow = |token: &str| {
        let mut client = Client::connect(&node.gateway()).unwrap();
        let head = format!("GET /overlay/topics/t HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\n\r\n");
        client.send(head.as_bytes()).unwrap();
        client.read_head().unwrap()
    };
    assert!(follow(&publish).starts_with("HTTP/1.1 403"));
    assert!(follow(&mint("overlay:subscribe")).starts_with("HTTP/1.1 200"));
}

#[test]
fn a_bridge_that_anybody_could_use_or_that_leads_nowhere_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let check = |text: &str| {
        std::fs::write(dir.path().join("ron.toml"), text).unwrap();
        let output = ron(&["config", "check", "ron.toml"], dir.path());
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let open = "[gateway]\nlisten = \"0.0.0.0:0\"\n[gateway.bridge]\nenabled = true\n";
    let (code, said) = check(open);
    assert_eq!(code, Some(64));
    assert!(said.contains("gateway.bridge.enabled") && said.contains("node.danger_ok"), "{said}");
    assert_eq!(check(&format!("[node]\ndanger_ok = true\n{open}")).0, Some(0));
    let (code, said) = check("[gateway.bridge]\nenabled = true\npeer = \"nobody\"\n");
    assert_eq!((code, said.contains("gateway.bridge.peer")), (Some(64), true), "{said}");
    let alone = format!("[admin]\n{FREE}\n[gateway]\n{FREE}\n[gateway.bridge]\nenabled = true\n");
    std::fs::write(dir.path().join("ron.toml"), alone).unwrap();
    let started = command(&["run", "gateway", "--config", "ron.toml"], dir.path()).output().unwrap();
    let said = String::from_utf8_lossy(&started.stderr).into_owned();
    assert!(!started.status.success() && said.contains("gateway.bridge.peer"), "{said}");
}

/// A listener that speaks OAP/1 over plain TCP, and does with each request what it is told.
struct Actor {
    listener: TcpListener,
}

impl Actor {
    fn new() -> Actor {
        Actor { listener: TcpListener::bind("127.0.0.1:0").unwrap() }
    }

    /// A gateway whose bridge leads here.
    fn gateway(&self, keys: &str) -> Node {
        let key = SigningKey::from_bytes(&[7; 32]).verifying_key();
        let name = format!("{}@{}", NodeId(key.to_bytes()), self.listener.local_addr().unwrap());
        gateway(keys, &format!("{}\n[overlay.tls]\nmode = \"off\"\n", bridge_to(&name)))
    }

    /// The next session, after HELLO.
    fn accept(&self) -> Part {
        let stream = self.listener.accept().unwrap().0;
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut part = Part { stream, decoder: Decoder::new(FRAME_MAX) };
        let hello = part.frame();
        let said = Hello::parse(&hello.payload).unwrap();
        assert!(said.features.contains(&"client".to_owned()), "{said:?}");
        let choice = Choice { version: 1, max_frame: 16 << 10, features: Vec::new() };
        let answer = Hello { max_frame: 16 << 10, ..Hello::default() }.payload(Some(&choice));
        part.send(&Frame::response(APP_CONTROL, hello.corr, 200, answer));
        part
    }
}

struct Part {
    stream: TcpStream,
    decoder: Decoder,
}

impl Part {
    fn send(&mut self, frame: &Frame) {
        self.stream.write_all(&frame.encode(FRAME_MAX).unwrap().to_vec()).unwrap();
    }

    fn frame(&mut self) -> Frame {
        loop {
            if let Some(Decoded::Frame(frame)) = self.decoder.next_frame().unwrap() {
                return frame;
            }
            let mut piece = [0; 65_536];
            let read = self.stream.read(&mut piece).expect("something comes");
            assert!(read > 0, "the session ended");
            self.decoder.push(&piece[..read]);
        }
    }

    /// The next request for a service: its frames joined, up to END or as far as it goes.
    fn request(&mut self) -> (u64, Value, Vec<u8>) {
        let mut text = Vec::new();
        loop {
            let frame = self.frame();
            if frame.app == APP_CONTROL {
                continue;
            }
            assert_eq!((frame.app, frame.flags.kind()), (APP_SERVICES, Some(Kind::Request)));
            text.extend_from_slice(&frame.payload);
            let end = text.iter().position(|byte| *byte == b'\n').unwrap();
            let head: Value = serde_json::from_slice(&text[..end]).unwrap();
            let more = frame.flags.has(Flags::START) || text.len() > frame.payload.len();
            if !more || frame.flags.has(Flags::END) || head["do"] == "follow" {
                return (frame.corr, head, text.split_off(end + 1));
            }
        }
    }

    fn answer(&mut self, corr: u64, status: u16, body: &str) {
        self.send(&Frame::response(APP_SERVICES, corr, status, body.to_owned()));
    }
}

#[test]
fn what_a_peer_answers_is_told_in_the_words_of_http() {
    let actor = Actor::new();
    let node = actor.gateway("");
    let mut part = actor.accept();
    let ask = |headers: Vec<(&'static str, &'static str)>| {
        let address = node.gateway();
        std::thread::spawn(move || {
            ron_testkit::request(&address, "POST", "/overlay/topics/a/b", &headers, &[b'x'; 40_000]).unwrap()
        })
    };
    let asked = ask(vec![("X-Corr-ID", "4711"), ("Request-Timeout", "15")]);
    let (corr, head, body) = part.request();
    assert_eq!((corr, &head["topic"], &head["corr"]), (4711, &"a/b".into(), &"4711".into()));
    assert!((1..=15_000).contains(&head["timeout_ms"].as_u64().unwrap()), "{head}");
    assert!(body == [b'x'; 40_000], "in frames as small as the peer wants them");
    part.answer(corr, 200, r#"{"id":"b3:00","more":1}"#);
    let answer = asked.join().unwrap();
    assert_eq!((answer.status, answer.json()), (202, serde_json::json!({"id": "b3:00"})));
    for (status, http, reason) in [
        (400, 400, "malformed"),
        (403, 502, "upstream_error"),
        (404, 502, "upstream_error"),
        (413, 413, "body_cap"),
        (429, 429, "busy"),
        (500, 502, "upstream_error"),
        (503, 503, "no_upstream"),
        (504, 504, "deadline"),
    ] {
        let asked = ask(Vec::new());
        let (corr, head, _) = part.request();
        assert!(head["timeout_ms"].is_null(), "who states no deadline does not wait for room");
        part.answer(corr, status, r#"{"detail":"as it is"}"#);
        let answer = asked.join().unwrap();
        assert_eq!((answer.status, answer.reason()), (http, reason), "{status}");
    }
    // An answer that is none, one that is cut off, one that never comes.
    let asked = ask(Vec::new());
    let (corr, ..) = part.request();
    part.answer(corr, 200, "no id");
    assert_eq!(asked.join().unwrap().reason(), "upstream_error");
    let asked = ask(Vec::new());
    part.request();
    drop(part);
    assert_eq!(asked.join().unwrap().reason(), "upstream_error");
    // It is dialled again.
    let mut part = actor.accept();
    let asked = ask(Vec::new());
    let (corr, ..) = part.request();
    part.answer(corr, 200, r#"{"id":"b3:01"}"#);
    assert_eq!(asked.join().unwrap().status, 202);
    let asked = ask(vec![("Request-Timeout", "200ms")]);
    part.request();
    assert_eq!(asked.join().unwrap().reason(), "deadline");
    assert!(node.metric("io_timeouts_total{service=\"gateway\",op=\"rpc\"}") >= 1.0);
    // A peer that leaves a call unanswered for long is no use, and another session is made.
    drop(actor.accept());
}

#[test]
fn a_client_that_does_not_read_loses_its_feed_and_no_other_does() {
    let actor = Actor::new();
    let node = actor.gateway("");
    let mut part = actor.accept();
    let mut open = |client: &mut Client| {
        client.send(b"GET /overlay/topics/t HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let (corr, ..) = part.request();
        part.send(&Frame {
            flags: Flags::RESP | Flags::START,
            ..Frame::response(APP_SERVICES, corr, 200, ": following\n\n")
        });
        corr
    };
    let (mut slow, mut quick) =
        (Client::connect(&node.gateway()).unwrap(), Client::connect(&node.gateway()).unwrap());
    let (slow_corr, quick_corr) = (open(&mut slow), open(&mut quick));
    assert!(quick.read_head().unwrap().starts_with("HTTP/1.1 200"));
    // Far more than the sockets and the queue of one feed hold, in pieces that the other one does not get.
    let piece = Frame::response(APP_SERVICES, slow_corr, 200, vec![b':'; 16_000]);
    let ended = std::thread::scope(|scope| {
        let mut reading = Part { stream: part.stream.try_clone().unwrap(), decoder: Decoder::new(FRAME_MAX) };
        let heard = scope.spawn(move || {
            loop {
                let frame = reading.frame();
                if frame.app == APP_SERVICES {
                    return (frame.corr, frame.flags);
                }
            }
        });
        while !heard.is_finished() {
            part.send(&piece);
        }
        heard.join().unwrap()
    });
    assert_eq!(ended, (slow_corr, Flags::REQ | Flags::END), "the peer is told to stop");
    assert!(node.metric("queue_dropped_total{service=\"gateway\",queue=\"bridge_feed\"}") >= 1.0);
    part.send(&Frame::response(APP_SERVICES, quick_corr, 200, "event: message\n\n"));
    let mut text = String::new();
    while !text.contains("event: message") {
        text.push(char::from(quick.read_exact(1).unwrap()[0]));
    }
}

#[test]
fn feeds_have_a_bound_of_their_own_and_publications_go_on() {
    let actor = Actor::new();
    let node = actor.gateway("max_inflight = 4\nrequest_timeout = \"2s\"");
    let mut part = actor.accept();
    let mut first = Client::connect(&node.gateway()).unwrap();
    first.send(b"GET /overlay/topics/t HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let (corr, ..) = part.request();
    part.send(&Frame {
        flags: Flags::RESP | Flags::START,
        ..Frame::response(APP_SERVICES, corr, 200, ":\n\n")
    });
    assert!(first.read_head().unwrap().starts_with("HTTP/1.1 200"));
    let mut second = Client::connect(&node.gateway()).unwrap();
    let refused = second.request("GET", "/overlay/topics/t", &[("Request-Timeout", "300ms")], b"").unwrap();
    assert!(["deadline", "shed"].contains(&refused.reason()), "{}", refused.reason());
    let count =
        |reason: &str| node.metric(&format!("rejected_total{{service=\"gateway\",reason=\"{reason}\"}}"));
    assert!(count("deadline") + count("shed") >= 1.0);
    let address = node.gateway();
    let asked = std::thread::spawn(move || {
        ron_testkit::request(&address, "POST", "/overlay/topics/t", &[], b"x").unwrap()
    });
    let (corr, head, _) = part.request();
    assert_eq!(head["do"], "publish");
    part.answer(corr, 200, r#"{"id":"b3:02"}"#);
    assert_eq!(asked.join().unwrap().status, 202);
}
