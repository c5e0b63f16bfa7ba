//! A witness as a process: what it cosigns, what it refuses, and that it never forgets.

use ed25519_dalek::SigningKey;
use ron_log::checkpoint::AddCheckpoint;
use ron_log::note::signature_lines;
use ron_log::tile::Tile;
use ron_log::tree::{Hash, consistency, leaf_hash};
use ron_log::{Checkpoint, Note, NoteKey, Tree};
use ron_testkit::{Answer, command, request, ron};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

const ORIGIN: &str = "log.example/one";

/// A log that grows at will, and may be made to tell another history.
#[derive(Clone, Default)]
struct Log {
    tree: Tree,
    hashes: BTreeMap<(u8, u64), Vec<u8>>,
}

impl Log {
    fn grow(&mut self, leaf: &[u8]) {
        let hashes = &mut self.hashes;
        self.tree.append(leaf_hash(leaf), |level, place, hash| {
            hashes.entry((level, place / 256)).or_default().extend_from_slice(hash);
        });
    }

    fn of(leaves: &[&str]) -> Log {
        let mut log = Log::default();
        leaves.iter().for_each(|leaf| log.grow(leaf.as_bytes()));
        log
    }

    fn checkpoint(&self, key: &SigningKey) -> Note {
        Checkpoint { origin: ORIGIN.into(), size: self.tree.size(), root: self.tree.root() }.sign(key)
    }

    fn proof(&self, from: u64) -> Vec<Hash> {
        let read = |tile: Tile| {
            let all = &self.hashes[&(tile.level, tile.index)];
            Ok::<_, std::convert::Infallible>(all[..usize::from(tile.width) * 32].to_vec())
        };
        consistency(from, self.tree.size(), read).unwrap()
    }

    /// The request that takes a witness on from a size.
    fn add(&self, old_size: u64) -> AddCheckpoint {
        let proof = if old_size <= self.tree.size() { self.proof(old_size) } else { Vec::new() };
        AddCheckpoint { old_size, proof, checkpoint: self.checkpoint(&log_key()) }
    }
}

fn log_key() -> SigningKey {
    SigningKey::from_bytes(&[7; 32])
}

fn log_line() -> String {
    NoteKey::ed25519(ORIGIN, log_key().verifying_key()).to_string()
}

struct Witness {
    child: Child,
    key: NoteKey,
    address: String,
}

impl Witness {
    /// Starts it and waits for the two lines by which it says who and where it is.
    fn start(dir: &Path, more: &[&str]) -> Witness {
        let args =
            ["registry", "witness", "--listen", "127.0.0.1:0", "--key", "w.key", "--name", "w.example"];
        let log = std::fs::File::options().create(true).append(true).open(dir.join("log")).unwrap();
        let mut child =
            command(&[&args, more].concat(), dir).stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut line = || lines.next().and_then(Result::ok);
        let (Some(key), Some(url)) = (line(), line()) else {
            panic!("it does not start: {}", std::fs::read_to_string(dir.join("log")).unwrap())
        };
        let address = url.strip_prefix("http://").unwrap().to_owned();
        Witness { child, key: NoteKey::parse(&key).unwrap(), address }
    }

    fn post(&self, body: &[u8]) -> Answer {
        request(&self.address, "POST", "/add-checkpoint", &[], body).unwrap()
    }

    /// Its cosignature, checked.
    fn cosigned(&self, add: &AddCheckpoint) -> u64 {
        let answer = self.post(add.body().as_bytes());
        assert_eq!(answer.status, 200, "{}", answer.text());
        let mut note = add.checkpoint.clone();
        note.signatures.extend(signature_lines(&answer.text()).unwrap());
        note.verify(&self.key).unwrap().unwrap()
    }

    /// That it refuses so, with the size it knows where that is the answer.
    fn refuses(&self, body: &str, status: u16, size: Option<u64>) {
        let answer = self.post(body.as_bytes());
        assert_eq!(answer.status, status, "{}", answer.text());
        if let Some(size) = size {
            assert_eq!(answer.text(), format!("{size}\n"));
            assert_eq!(answer.header("content-type"), Some("text/x.tlog.size"));
        } else {
            assert_eq!(answer.json()["status"], status);
        }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    assert!(ron(&["key", "new", "--out", "w.key"], dir.path()).status.success());
    dir
}

#[test]
fn a_witness_cosigns_one_history_and_no_other() {
    let dir = folder();
    let line = log_line();
    let witness = Witness::start(dir.path(), &["--log", &line]);
    let mut log = Log::of(&["a", "b", "c"]);
    let before = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    assert!(witness.cosigned(&log.add(0)) >= before);
    witness.cosigned(&log.add(3));
    let first = log.add(0);
    witness.refuses(&first.body(), 409, Some(3));
    ["d", "e", "f", "g"].iter().for_each(|leaf| log.grow(leaf.as_bytes()));
    witness.cosigned(&log.add(3));

    // Another history of the same size, and one that goes on from it.
    let mut forked = Log::of(&["a", "b", "c", "d", "e", "f", "X"]);
    witness.refuses(&forked.add(7).body(), 409, Some(7));
    forked.grow(b"h");
    witness.refuses(&forked.add(7).body(), 422, None);
    // A good history with a bad proof, one too many, or none.
    log.grow(b"h");
    let good = log.add(7);
    let mut bad = good.clone();
    bad.proof[0][0] ^= 1;
    witness.refuses(&bad.body(), 422, None);
    bad = AddCheckpoint { proof: [good.proof.clone(), vec![[1; 32]]].concat(), ..good.clone() };
    witness.refuses(&bad.body(), 422, None);
    witness.refuses(&AddCheckpoint { proof: vec![], ..good.clone() }.body(), 422, None);
    // Smaller than what was seen, or than it says itself.
    let old = Log::of(&["a", "b", "c"]);
    witness.refuses(&old.add(3).body(), 409, Some(7));
    witness.refuses(&old.add(7).body(), 400, None);

    let stranger = SigningKey::from_bytes(&[8; 32]);
    let unsigned = AddCheckpoint { checkpoint: log.checkpoint(&stranger), ..good.clone() };
    witness.refuses(&unsigned.body(), 403, None);
    let other = Checkpoint { origin: "log.example/two".into(), size: 1, root: [0; 32] }.sign(&stranger);
    witness.refuses(&AddCheckpoint { old_size: 0, proof: vec![], checkpoint: other }.body(), 404, None);
    witness.refuses("old 07\n\nnot a note", 400, None);
    witness.refuses(&"a".repeat(300 << 10), 413, None);
    assert_eq!(request(&witness.address, "GET", "/add-checkpoint", &[], b"").unwrap().status, 405);
    assert_eq!(request(&witness.address, "GET", "/", &[], b"").unwrap().status, 404);
    witness.cosigned(&good);
}

#[test]
fn what_was_answered_outlives_a_kill_at_once() {
    let dir = folder();
    let line = log_line();
    let mut log = Log::default();
    for round in 0..20u64 {
        let witness = Witness::start(dir.path(), &["--log", &line]);
        if round > 0 {
            // A witness that forgot would take this other history from the beginning.
            let other = Log::of(&vec!["other"; round as usize]);
            witness.refuses(&other.add(0).body(), 409, Some(round));
            witness.refuses(&other.add(round).body(), 409, Some(round));
        }
        log.grow(&round.to_be_bytes());
        witness.cosigned(&log.add(round));
        witness.kill();
    }
}

#[test]
fn a_witness_ends_when_told_and_shares_its_state_with_nobody() {
    let dir = folder();
    let line = log_line();
    let mut witness = Witness::start(dir.path(), &["--log", &line]);
    witness.cosigned(&Log::of(&["a"]).add(0));
    let args = ["registry", "witness", "--listen", "127.0.0.1:0", "--key", "w.key", "--log", &line];
    let second = ron(&args, dir.path());
    assert_eq!(second.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&second.stderr).contains("in use by another witness"));
    let pid = witness.child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(witness.child.wait().unwrap().code(), Some(0));

    let state = dir.path().join("witness.state");
    let good = std::fs::read_to_string(&state).unwrap();
    std::fs::write(&state, good.replace(" 1 ", " 01 ")).unwrap();
    let damaged = ron(&args, dir.path());
    assert_eq!(damaged.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&damaged.stderr).contains("is no witness's state"));
    let unwatching = ron(&args[..6], dir.path());
    assert_eq!(unwatching.status.code(), Some(64));
}

#[test]
fn the_list_of_logs_is_read_again_when_it_changes() {
    let dir = folder();
    let file = dir.path().join("logs");
    let stranger = NoteKey::ed25519("log.example/two", SigningKey::from_bytes(&[8; 32]).verifying_key());
    std::fs::write(&file, format!("# whom we watch\n{stranger}\n")).unwrap();
    let witness = Witness::start(dir.path(), &["--logs", "logs"]);
    let add = Log::of(&["a"]).add(0);
    witness.refuses(&add.body(), 404, None);
    std::fs::write(&file, format!("{stranger}\n{}\n", log_line())).unwrap();
    let begun = std::time::Instant::now();
    while witness.post(add.body().as_bytes()).status != 200 {
        assert!(begun.elapsed() < std::time::Duration::from_secs(10), "the change is never seen");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
