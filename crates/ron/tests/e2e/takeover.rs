//! One process takes the place of another, and no client is refused.

use crate::config;
use ron_testkit::{Client, Node, Origin, Script, command, get};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

fn origin() -> Origin {
    Origin::start(|path| match path {
        "/stream" => Script::Chunks(vec![b"abc".to_vec(); 40], Duration::from_millis(100)),
        "/echo" => Script::Upgrade,
        "/stuck" => Script::Silence,
        _ => Script::Body(b"hi".to_vec()),
    })
}

/// Less than what a process that drains gives a connection to say something, be it new or just answered.
const FIRST_WORD: Duration = Duration::from_millis(400);

/// Clients that make a connection for each request, and others that keep theirs, until they are told to stop.
struct Load {
    stop: Arc<AtomicBool>,
    good: Arc<AtomicUsize>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Load {
    fn start(address: &str) -> Load {
        let mut load = Load { stop: Arc::default(), good: Arc::default(), threads: Vec::new() };
        for _ in 0..4 {
            let (to, stop, good) = (address.to_owned(), load.stop.clone(), load.good.clone());
            load.threads.push(std::thread::spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    let begun = Instant::now();
                    let mut client = match Client::connect(&to) {
                        Ok(client) => client,
                        Err(error) => panic!("a connection was refused: {error}"),
                    };
                    let sent = client.send(b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
                    let asked = begun.elapsed();
                    match sent.and_then(|()| client.read_answer("GET")) {
                        Ok(answer) => {
                            assert_eq!((answer.status, answer.text()), (200, "hi".to_owned()));
                            good.fetch_add(1, Ordering::SeqCst);
                        }
                        // Closed without a word: whoever was slow to ask, on a busy machine, may ask again.
                        Err(error) => {
                            assert_ne!(error.kind(), ErrorKind::WouldBlock, "no answer came");
                            assert!(asked > FIRST_WORD, "a request failed that came at once: {error}");
                        }
                    }
                }
            }));
            let (address, stop, good) = (address.to_owned(), load.stop.clone(), load.good.clone());
            load.threads.push(std::thread::spawn(move || keep_asking(&address, &stop, &good)));
        }
        load
    }

    /// Waits until so many more were answered.
    fn more(&self, count: usize) {
        let (until, begun) = (self.good.load(Ordering::SeqCst) + count, Instant::now());
        while self.good.load(Ordering::SeqCst) < until {
            assert!(begun.elapsed() < Duration::from_secs(20), "nothing is answered any more");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn end(self) {
        self.stop.store(true, Ordering::SeqCst);
        for thread in self.threads {
            thread.join().unwrap();
        }
    }
}

/// One request after another on a connection, until an answer says that it was the last there.
fn keep_asking(address: &str, stop: &AtomicBool, good: &AtomicUsize) {
    while !stop.load(Ordering::SeqCst) {
        let mut before = Instant::now();
        let mut client = Client::connect(address).expect("no connection is refused");
        loop {
            let sent = client.send(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n");
            let gap = before.elapsed();
            before = Instant::now();
            match sent.and_then(|()| client.read_answer("GET")) {
                Ok(answer) => {
                    assert_eq!((answer.status, answer.text()), (200, "hi".to_owned()));
                    good.fetch_add(1, Ordering::SeqCst);
                    if answer.header("connection") == Some("close") || stop.load(Ordering::SeqCst) {
                        break;
                    }
                }
                Err(error) => {
                    assert!(gap > FIRST_WORD, "a request was lost that came at once: {error}");
                    break;
                }
            }
        }
    }
}

/// Waits until a process has ended by itself.
fn wait(child: &mut Child) -> i32 {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code().unwrap_or(-1);
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "it does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn local(node: &Node) -> String {
    let mut stream = UnixStream::connect(node.dir.path().join("g.sock")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer[9..12].to_owned()
}

#[test]
fn takeovers_under_load_refuse_nobody_and_what_is_under_way_goes_on() {
    let origin = origin();
    let mut node = Node::start(&["gateway"], &config(&origin.url(), "uds = { path = \"g.sock\" }", ""));
    let (gateway, admin) = (node.gateway(), node.admin());
    let mut stream = Client::connect(&gateway).unwrap();
    stream.send(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let mut upgraded = Client::connect(&gateway).unwrap();
    upgraded.send(b"GET /echo HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n").unwrap();
    assert_eq!(upgraded.read_answer("GET").unwrap().status, 101);
    assert_eq!(upgraded.read_exact(5).unwrap(), b"hello");
    let load = Load::start(&gateway);
    let mut former = Vec::new();
    for _ in 0..10 {
        load.more(10);
        former.push(node.take_over());
        assert_eq!((node.gateway(), node.admin()), (gateway.clone(), admin.clone()), "at the same addresses");
        node.eventually("the newcomer answers for both", |node| get(&node.admin(), "/readyz").status == 200);
        assert_eq!(local(&node), "200");
    }
    load.more(20);
    load.end();
    // The first process has only what it had begun.
    let mut first = former.remove(0);
    for mut child in former {
        assert_eq!(wait(&mut child), 0);
    }
    let whole = stream.read_answer("GET").unwrap();
    assert_eq!(whole.text(), "abc".repeat(40), "a stream ends where it began");
    assert!(first.try_wait().unwrap().is_none(), "an upgraded connection is not cut");
    upgraded.send(b"still there").unwrap();
    assert_eq!(upgraded.read_exact(11).unwrap(), b"still there");
    drop(upgraded);
    assert_eq!(wait(&mut first), 0);
    assert_eq!((get(&gateway, "/x").status, local(&node)), (200, "200".to_owned()), "no file went with it");
    assert_eq!(std::fs::read_to_string(node.dir.path().join("ron.lock")).unwrap(), node.pid().to_string());
    assert_eq!(node.stop(), 0);
    for file in ["addresses.json", "takeover.sock", "g.sock"] {
        assert!(!node.dir.path().join(file).exists(), "{file} is left");
    }
}

#[test]
fn a_process_that_was_taken_over_from_ends_at_its_own_deadline_or_when_told() {
    let origin = origin();
    let text = config(&origin.url(), "takeover_drain = \"1s\"", "");
    let mut node = Node::start(&["gateway"], &text);
    let ask = |path: &str| {
        let mut client = Client::connect(&node.gateway()).unwrap();
        client.send(format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes()).unwrap();
        client
    };
    let mut stuck = ask("/stuck");
    node.eventually("it is in flight", |node| node.metric("inflight_requests{service=\"gateway\"}") == 1.0);
    let mut former = node.take_over();
    assert_eq!(stuck.read_answer("GET").unwrap().reason(), "draining");
    assert_eq!(wait(&mut former), 0);
    // The next one would wait for ten minutes.
    node.write_config(&text.replace("\"1s\"", "\"10m\""));
    assert_eq!(node.admin_post("/admin/reload", "").status, 200, "the key is hot");
    let mut stuck = Client::connect(&node.gateway()).unwrap();
    stuck.send(b"GET /stuck HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    node.eventually("it is in flight", |node| node.metric("inflight_requests{service=\"gateway\"}") == 1.0);
    let mut former = node.take_over();
    node.eventually("it has let go", |node| node.log().matches("has taken over").count() == 2);
    assert!(former.try_wait().unwrap().is_none(), "it waits");
    let killed = std::process::Command::new("kill").arg(former.id().to_string()).status();
    assert!(killed.unwrap().success());
    assert_eq!(wait(&mut former), 0);
    assert_eq!(get(&node.gateway(), "/x").status, 200);
}

#[test]
fn a_takeover_that_cannot_be_changes_nothing() {
    let origin = origin();
    let text = config(&origin.url(), "", "");
    let node = Node::start(&["gateway"], &text);
    let refused = |dir: &std::path::Path, args: &[&str]| {
        let output = command(args, dir).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said =
        refused(node.dir.path(), &["run", "gateway", "registry", "--takeover", "--config", "ron.toml"]);
    assert!(said.contains("ron run gateway --takeover"), "{said}");
    // A process that runs more than a gateway keeps what it has, and says so.
    let more = Node::start(&["gateway", "overlay"], &format!("{text}[overlay]\nlisten = \"127.0.0.1:0\"\n"));
    let said = refused(more.dir.path(), &["run", "gateway", "--takeover", "--config", "ron.toml"]);
    assert!(
        said.contains(&format!("process {}", more.pid())) && said.contains("does not hand over"),
        "{said}"
    );
    assert_eq!(get(&more.gateway(), "/x").status, 200);
    // A newcomer that cannot start gives everything back.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let elsewhere = text.replacen(
        "[gateway]\nlisten = \"127.0.0.1:0\"",
        &format!("[gateway]\nlisten = \"{}\"", taken.local_addr().unwrap()),
        1,
    );
    std::fs::write(node.dir.path().join("other.toml"), elsewhere).unwrap();
    let said = refused(node.dir.path(), &["run", "gateway", "--takeover", "--config", "other.toml"]);
    assert!(said.contains("it is in use"), "{said}");
    node.eventually("it says so", |node| node.log().contains("a takeover came to nothing"));
    assert_eq!((get(&node.gateway(), "/x").status, get(&node.admin(), "/readyz").status), (200, 200));
    let nobody = tempfile::tempdir().unwrap();
    std::fs::write(nobody.path().join("ron.toml"), text).unwrap();
    let said = refused(nobody.path(), &["run", "gateway", "--takeover", "--config", "ron.toml"]);
    assert!(said.contains("start without --takeover"), "{said}");
    let locked = refused(node.dir.path(), &["run", "gateway", "--config", "ron.toml"]);
    assert!(locked.contains("is in use by another ron"), "the lock holds for who does not ask: {locked}");
}
