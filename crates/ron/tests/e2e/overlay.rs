//! The overlay: several real processes over loopback, and peers that are none.

mod crowd;
mod gossip;
mod hostile;
mod moves;
mod raw;
mod sessions;
mod trust;
mod wire;

pub(crate) use moves::use_overlay;
use raw::Raw;
use ron_testkit::{Node, command};
use serde_json::Value;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

/// A node that runs the overlay alone; `keys` goes into its table, `rest` behind it.
fn node(keys: &str, rest: &str) -> Node {
    Node::start(&["overlay"], &text("127.0.0.1:0", keys, rest))
}

fn text(listen: &str, keys: &str, rest: &str) -> String {
    format!("[admin]\nlisten = \"127.0.0.1:0\"\n[overlay]\nlisten = \"{listen}\"\n{keys}\n{rest}\n")
}

/// A node that speaks plain TCP with anybody.
fn open(keys: &str, rest: &str) -> Node {
    node(&format!("admit = \"any\"\n{keys}"), &format!("[overlay.tls]\nmode = \"off\"\n{rest}"))
}

/// How others write this node.
fn peer(node: &Node) -> String {
    format!("{}@{}", node.address("overlay", "node"), node.address("overlay", "oap"))
}

fn peers(nodes: &[&Node]) -> String {
    let quoted: Vec<String> = nodes.iter().map(|node| format!("\"{}\"", peer(node))).collect();
    format!("peers = [{}]", quoted.join(", "))
}

/// Peers with which there is a session.
fn connected(node: &Node) -> Vec<Value> {
    let known = node.admin_get("/overlay/peers").json();
    known["peers"].as_array().unwrap().iter().filter(|peer| peer["state"] == "open").cloned().collect()
}

fn connects(node: &Node, count: usize) {
    node.eventually("it has its sessions", |node| connected(node).len() == count);
}

/// `ron overlay sub` beside a node, and what it prints.
struct Follower {
    child: Child,
    lines: Receiver<Value>,
}

impl Follower {
    fn start(node: &Node, topic: &str) -> Follower {
        let args = ["overlay", "sub", topic, "--json", "--config", "ron.toml"];
        let mut child = command(&args, node.dir.path()).stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = sync_channel(10_000);
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let _ = sender.send(serde_json::from_str(&line).unwrap());
            }
        });
        node.eventually("it follows", |node| {
            let channels = ron_testkit::get(&node.admin(), "/debug/channels").json();
            let rows = channels["channels"].as_array().unwrap();
            rows.iter().any(|row| row["name"] == "deliveries" && row["instances"] != 0)
        });
        Follower { child, lines }
    }

    fn next(&self) -> Value {
        self.lines.recv_timeout(Duration::from_secs(20)).expect("a message comes")
    }

    /// Messages until there are so many, by their payloads.
    fn payloads(&self, count: usize) -> Vec<String> {
        let mut found: Vec<String> =
            (0..count).map(|_| self.next()["payload"].as_str().unwrap_or_default().to_owned()).collect();
        found.sort();
        found
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Publishes, and waits for room if there is none.
fn publish(node: &Node, topic: &str, payload: &str) -> Value {
    let begun = Instant::now();
    loop {
        let answer = node.admin_post(&format!("/overlay/topics/{topic}"), payload);
        if answer.status == 202 {
            return answer.json();
        }
        assert_eq!(answer.reason(), "busy", "{}", answer.text());
        assert!(begun.elapsed() < Duration::from_secs(20), "there is never room: {}", node.log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn reject(node: &Node, reason: &str) -> f64 {
    node.metric(&format!("frame_reject_total{{reason=\"{reason}\"}}"))
}
