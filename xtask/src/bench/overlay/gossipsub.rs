//! rust-libp2p's gossipsub to compare with: nodes of a small program of ours, in `xtask/peers/gossipsub`.

use super::field::NODES;
use super::nodes::{Arrival, Nodes, Published};
use crate::run::{root, status, target};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// What it is called in tables, with the version that its lock file pins.
pub(super) fn name() -> String {
    let lock = std::fs::read_to_string(root().join("xtask/peers/gossipsub/Cargo.lock")).unwrap_or_default();
    let after = lock.split_once("name = \"libp2p\"\nversion = \"").map_or("", |(_, after)| after);
    format!("gossipsub of libp2p {}", after.split('"').next().unwrap_or_default())
}

/// Builds the program, into a folder of its own in the one target folder; says so if that cannot be done.
pub(super) fn built() -> Option<PathBuf> {
    let folder = target().join("peers");
    let mut command = Command::new("cargo");
    command.args(["build", "--quiet", "--release", "--locked", "--manifest-path"]);
    command.arg(root().join("xtask/peers/gossipsub/Cargo.toml")).arg("--target-dir").arg(&folder);
    let good = status(command);
    if !good {
        println!("gossipsub could not be built and is not compared with");
    }
    good.then(|| folder.join("release/gossipsub"))
}

/// Eight of its nodes; they end with this.
pub(super) struct Gossipsub {
    nodes: Vec<Process>,
}

struct Process {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    address: String,
}

impl Gossipsub {
    /// Nodes of which the later dial the earlier, where `linked` says so, once each has its links and its mesh.
    pub(super) fn start(program: &Path, linked: impl Fn(usize, usize) -> bool) -> Option<Gossipsub> {
        let mut all = Gossipsub { nodes: Vec::new() };
        let mut links = [0; NODES];
        for number in 0..NODES {
            let mut node = Process::start(program)?;
            for (other, earlier) in all.nodes.iter().enumerate().filter(|(other, _)| linked(*other, number)) {
                node.order(&format!("dial {}", earlier.address))?;
                links[other] += 1;
                links[number] += 1;
            }
            all.nodes.push(node);
        }
        let begun = Instant::now();
        // Its mesh is made at heartbeats, a second apart.
        while !all.counts()?.iter().zip(links).all(|(of, links)| of[0] == links && of[1] >= links.min(5)) {
            if begun.elapsed() > Duration::from_secs(30) {
                println!("the nodes of gossipsub do not find each other: {:?}", all.counts()?);
                return None;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Some(all)
    }

    /// Links, those of the mesh, messages and copies of each node.
    fn counts(&mut self) -> Option<Vec<[u64; 4]>> {
        self.nodes.iter_mut().map(|node| node.ask("count", "count")?.try_into().ok()).collect()
    }

    fn published(&mut self, order: &str) -> Option<Published> {
        let [from, to, accepted, refused] = self.nodes[0].ask(order, "published")?[..] else { return None };
        Some(Published { from, to, accepted, refused, peers_refused: 0 })
    }
}

impl Nodes for Gossipsub {
    fn pids(&self) -> Vec<u32> {
        self.nodes.iter().map(|node| node.child.id()).collect()
    }

    fn delivered(&mut self) -> f64 {
        self.counts().map_or(f64::NAN, |counts| counts.iter().map(|of| of[2]).sum::<u64>() as f64)
    }

    fn duplicates(&mut self) -> f64 {
        self.counts().map_or(f64::NAN, |counts| counts.iter().map(|of| of[3] - of[2]).sum::<u64>() as f64)
    }

    fn follow(&mut self, node: usize) -> Option<()> {
        self.nodes[node].order("follow")
    }

    fn arrivals(&mut self, node: usize, from: u64, to: u64) -> Option<Vec<Arrival>> {
        let pairs = self.nodes[node].ask(&format!("seen {from} {to}"), "seen")?;
        Some(pairs.chunks_exact(2).map(|pair| (pair[0], pair[1] as f64 / 1e6)).collect())
    }

    fn pace(&mut self, rate: f64, length: Duration, size: usize) -> Option<Published> {
        self.published(&format!("pace {rate} {} {size}", length.as_millis()))
    }

    fn flat_out(&mut self, length: Duration, size: usize) -> Option<Published> {
        self.published(&format!("flat {} {size}", length.as_millis()))
    }
}

impl Process {
    fn start(program: &Path) -> Option<Process> {
        let mut command = Command::new(program);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn().ok()?;
        let (orders, answers) = (child.stdin.take()?, BufReader::new(child.stdout.take()?));
        let mut node = Process { child, orders, answers, address: String::new() };
        node.address = node.answer("node")?;
        Some(node)
    }

    fn order(&mut self, line: &str) -> Option<()> {
        writeln!(self.orders, "{line}").ok()
    }

    /// Gives an order and returns the numbers of the answer that begins with this word.
    fn ask(&mut self, order: &str, word: &str) -> Option<Vec<u64>> {
        self.order(order)?;
        self.answer(word)?.split_whitespace().map(|number| number.parse().ok()).collect()
    }

    fn answer(&mut self, word: &str) -> Option<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line).ok().filter(|read| *read > 0)?;
        line.trim().strip_prefix(word).map(|rest| rest.trim().to_owned())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
