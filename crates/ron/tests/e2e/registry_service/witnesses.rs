//! Witnesses of a registry: whose word is taken, what they have seen, and that a dead one holds up nobody.

use super::{OPEN, Registry, log_key, now, settings};
use ed25519_dalek::SigningKey;
use ron_log::checkpoint::{AddCheckpoint, cosign, cosignatures};
use ron_log::note::NoteSignature;
use ron_log::tree::{Hash, verify_consistency};
use ron_log::{Checkpoint, Note, NoteKey, Tree};
use ron_testkit::{Origin, Script};
use serde_json::json;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How a witness behaves.
#[derive(Clone, Copy, PartialEq)]
enum Mood {
    Well,
    /// It answers with its line twice, and with others that are not its own.
    Noisy,
    /// It answers with others' lines alone.
    Lying,
    /// It takes a request and says nothing.
    Silent,
    /// It closes each connection.
    Down,
}

struct State {
    mood: Mood,
    seen: (u64, Hash),
}

/// A witness in this process.
struct Witness {
    key: NoteKey,
    address: String,
    state: Arc<Mutex<State>>,
}

impl Witness {
    fn start(name: &str, seed: u8) -> Witness {
        let signing = SigningKey::from_bytes(&[seed; 32]);
        let key = NoteKey::cosignature(name, signing.verifying_key());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let state = Arc::new(Mutex::new(State { mood: Mood::Well, seen: (0, Tree::default().root()) }));
        let (own, own_name) = (state.clone(), name.to_owned());
        std::thread::spawn(move || {
            let mut unanswered = Vec::new();
            for socket in listener.incoming() {
                let mut socket = socket.unwrap();
                let mood = own.lock().unwrap().mood;
                match mood {
                    Mood::Down => {}
                    Mood::Silent => unanswered.push(socket),
                    _ => answer(&mut socket, &mut own.lock().unwrap(), &own_name, &signing),
                }
            }
        });
        Witness { key, address, state }
    }

    /// Its entry in the configuration.
    fn url(&self) -> String {
        format!("\"http://{} {}\"", self.address, self.key)
    }

    fn set(&self, mood: Mood) {
        self.state.lock().unwrap().mood = mood;
    }

    fn seen(&self) -> (u64, Hash) {
        self.state.lock().unwrap().seen
    }
}

/// Reads one request and answers it as a witness must, or not quite.
fn answer(socket: &mut TcpStream, state: &mut State, name: &str, key: &SigningKey) {
    let mut reader = BufReader::new(socket);
    let (mut line, mut length) = (String::new(), 0);
    while reader.read_line(&mut line).unwrap_or(0) > 2 {
        if let Some(stated) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = stated.trim().parse().unwrap();
        }
        line.clear();
    }
    let mut body = vec![0; length];
    if reader.read_exact(&mut body).is_err() {
        return;
    }
    let asked = AddCheckpoint::parse(&body).unwrap();
    let Checkpoint { size, root, .. } = Checkpoint::parse(&asked.checkpoint.text).unwrap();
    let (status, answer) = if asked.old_size != state.seen.0 || size == state.seen.0 && root != state.seen.1 {
        ("409 Conflict", format!("{}\n", state.seen.0))
    } else if !verify_consistency(state.seen.0, size, &asked.proof, &state.seen.1, &root) {
        ("422 Unprocessable Content", String::new())
    } else {
        state.seen = (size, root);
        let (text, mut log) = (&asked.checkpoint.text, asked.checkpoint.signatures[0].clone());
        log.bytes[7] ^= 1;
        let stranger = cosign(text, "stranger.example", &SigningKey::from_bytes(&[99; 32]), 1);
        let own = cosign(text, name, key, now() / 1000);
        let lines: Vec<NoteSignature> = match state.mood {
            Mood::Noisy => {
                let others = std::iter::repeat_n(stranger, 50);
                others.chain([log, own, cosign(text, name, key, 1)]).collect()
            }
            Mood::Lying => vec![stranger, log, cosign(&text.replace('\n', "\n0"), name, key, 1)],
            _ => vec![own],
        };
        ("200 OK", lines.iter().map(ToString::to_string).collect())
    };
    let length = answer.len();
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    let _ = reader.get_mut().write_all(format!("{head}{answer}").as_bytes());
}

/// A registry whose checkpoints are made when somebody waits for one.
fn witnessed(witnesses: &[&Witness], quorum: usize) -> String {
    let urls: Vec<String> = witnesses.iter().map(|witness| witness.url()).collect();
    let urls = urls.join(", ");
    format!(
        "{OPEN}checkpoint = {{ interval = \"1h\" }}\nwitness = {{ urls = [{urls}], quorum = {quorum} }}\n"
    )
}

impl Registry {
    /// Commits and waits so far, for so many seconds; with what came of it.
    fn commit_and(&self, wait: &str, seconds: u64) -> (u16, String) {
        let change = self.approved(&self.payload("a", &json!(now())));
        let answer = self.post_with(
            &format!("/registry/proposals?commit=true&wait={wait}"),
            &[("Request-Timeout", &seconds.to_string())],
            change.to_string().as_bytes(),
        );
        (answer.status, answer.reason().to_owned())
    }

    fn checkpoint(&self) -> (Note, u64) {
        let note = Note::parse(&self.get("/checkpoint").body).unwrap();
        let size = Checkpoint::verify(&note, &log_key(self)).unwrap().size;
        (note, size)
    }

    fn is_ready(&self) {
        self.node.eventually("writes are taken", |_| self.ready("write").status == 200);
    }

    /// Stops it, does something to its folder, and starts it again.
    fn while_stopped(&mut self, act: impl FnOnce(&Path)) {
        self.node.stop();
        act(self.node.dir.path());
        self.start_again();
    }

    /// Writes are refused for this cause, and it is told; reads go on.
    fn is_held(&self, cause: &str) {
        let mut told = String::new();
        self.node.eventually(cause, |_| {
            told = self.ready("write").text();
            told.contains(&format!("\"registry.{cause}\""))
        });
        let size = self.checkpoint().1;
        assert_eq!(self.commit_and("durable", 5), (503, "not_ready".to_owned()), "{told}");
        assert_eq!(self.ready("read").status, 200);
        assert_eq!(self.checkpoint().1, size, "nothing is signed");
    }
}

fn copy(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir(to).unwrap();
    for file in std::fs::read_dir(from).unwrap() {
        let (from, to) = file.map(|file| (file.path(), to.join(file.file_name()))).unwrap();
        if from.is_dir() {
            copy(&from, &to);
        } else {
            std::fs::copy(from, to).unwrap();
        }
    }
}

#[test]
fn of_what_a_witness_answers_only_its_own_good_line_counts() {
    let (one, two) = (Witness::start("one.example", 71), Witness::start("two.example", 72));
    two.set(Mood::Down);
    one.set(Mood::Noisy);
    let mut registry = Registry::start(&witnessed(&[&one, &two], 1));
    registry.is_ready();
    assert_eq!(registry.commit_and("witnessed:1", 10), (201, String::new()));
    assert_eq!(
        registry.commit_and("witnessed:2", 2),
        (504, "timeout".to_owned()),
        "two lines are one witness"
    );
    let (note, size) = registry.checkpoint();
    assert_eq!((note.signatures.len(), size), (2, 3));
    assert_eq!(cosignatures(&note, &[one.key.clone(), two.key.clone()]), Ok(1));
    registry.restart("KILL");
    registry.is_ready();
    assert_eq!(
        registry.checkpoint().0.signatures[0],
        note.signatures[0],
        "nothing that was stored is damaged"
    );
    one.set(Mood::Lying);
    assert_eq!(registry.commit_and("checkpointed", 2), (504, "timeout".to_owned()));
    assert_eq!(registry.checkpoint().1, 3, "what has too few cosignatures is not served");
    registry
        .node
        .eventually("it is told", |_| registry.ready("write").text().contains("registry.witness_quorum"));
    two.set(Mood::Well);
    assert_eq!(registry.commit_and("witnessed:1", 10).0, 201);
}

#[test]
fn after_a_restart_only_what_enough_have_cosigned_is_served() {
    let witness = Witness::start("one.example", 71);
    let mut registry = Registry::start(&witnessed(&[&witness], 1));
    registry.is_ready();
    assert_eq!(registry.commit_and("checkpointed", 10).0, 201);
    witness.set(Mood::Down);
    assert_eq!(registry.commit_and("checkpointed", 2), (504, "timeout".to_owned()));
    let before = registry.get("/checkpoint").body;
    registry.restart("KILL");
    assert_eq!(registry.get("/checkpoint").body, before, "size 3 is signed and not cosigned");
    registry.is_ready();
    witness.set(Mood::Well);
    registry.node.eventually("it is asked again", |_| registry.checkpoint().1 == 3);
    assert_eq!(cosignatures(&registry.checkpoint().0, &[witness.key]), Ok(1));
}

#[test]
fn a_dead_witness_holds_up_nobody_and_is_asked_again() {
    let (one, two) = (Witness::start("one.example", 71), Witness::start("two.example", 72));
    let mut registry = Registry::start(&witnessed(&[&one, &two], 0));
    registry.is_ready();
    one.set(Mood::Silent);
    for _ in 0..3 {
        let begun = Instant::now();
        assert_eq!(registry.commit_and("witnessed:1", 10).0, 201);
        assert!(begun.elapsed() < Duration::from_secs(4), "it waits for one that says nothing");
    }
    let (note, size) = registry.checkpoint();
    assert_eq!(cosignatures(&note, &[one.key.clone(), two.key.clone()]), Ok(1));
    // Nothing is committed any more, and yet the other cosignature comes.
    one.set(Mood::Well);
    let both = [one.key.clone(), two.key.clone()];
    registry
        .node
        .eventually("both have cosigned", |_| cosignatures(&registry.checkpoint().0, &both) == Ok(2));
    assert_eq!(registry.checkpoint().1, size);
    assert!(registry.metric("backoff_retries_total{service=\"registry\",op=\"witness\"}") > 0.0);
    one.set(Mood::Silent);
    two.set(Mood::Down);
    registry.restart("KILL");
    assert_eq!(cosignatures(&registry.checkpoint().0, &both), Ok(2), "both are kept");
    assert_eq!(registry.commit_and("durable", 5), (503, "not_ready".to_owned()), "they may have seen more");
    registry.is_ready();
    assert_eq!(registry.commit_and("checkpointed", 5).0, 201, "who cannot be reached does not block");
}

#[test]
fn a_log_restored_from_something_old_signs_and_writes_nothing() {
    let mut registry = Registry::start(&format!("{OPEN}checkpoint = {{ interval = \"1h\" }}\n"));
    assert_eq!(registry.commit_and("checkpointed", 10).0, 201);
    registry.while_stopped(|dir| copy(&dir.join("reg"), &dir.join("backup")));
    assert_eq!(registry.commit_and("checkpointed", 10).0, 201);
    registry.while_stopped(|dir| copy(&dir.join("backup"), &dir.join("reg")));
    registry.is_held("behind_own_checkpoint_saw_3_has_2");
    // An operator who means it says so.
    registry.while_stopped(|dir| std::fs::remove_file(dir.join("reg.signed")).unwrap());
    assert_eq!(registry.commit_and("checkpointed", 10).0, 201);
    registry.while_stopped(|dir| copy(&dir.join("backup"), &dir.join("reg")));
    registry.is_held("behind_own_checkpoint_saw_3_has_2");
}

#[test]
fn a_witness_that_saw_more_or_something_else_holds_the_log_alone() {
    let (one, two) = (Witness::start("one.example", 71), Witness::start("two.example", 72));
    let mut registry = Registry::start(&witnessed(&[&one, &two], 0));
    registry.is_ready();
    assert_eq!(registry.commit_and("witnessed:2", 10).0, 201);
    let early = two.seen();
    registry.while_stopped(|dir| copy(&dir.join("reg"), &dir.join("backup")));
    registry.is_ready();
    assert_eq!(registry.commit_and("witnessed:2", 10).0, 201);
    registry.while_stopped(|dir| {
        copy(&dir.join("backup"), &dir.join("reg"));
        std::fs::remove_file(dir.join("reg.signed")).unwrap();
    });
    registry.is_held("behind_witness_one.example_saw_3_has_2");
    registry.is_held("behind_witness_two.example_saw_3_has_2");
    two.state.lock().unwrap().seen = early;
    registry
        .node
        .eventually("one of them is content", |_| !registry.ready("write").text().contains("two.example"));
    registry.is_held("behind_witness_one.example_saw_3_has_2");
    let reload = |witnesses: &[&Witness]| {
        registry.node.write_config(&settings(&witnessed(witnesses, 0)));
        assert_eq!(registry.node.admin_post("/admin/reload", "").status, 200);
    };
    // Without the other the log goes on, and tells another history than the one that was seen.
    reload(&[&two]);
    registry.is_ready();
    assert_eq!(registry.commit_and("witnessed:1", 10).0, 201);
    reload(&[&two, &one]);
    registry.is_held("fork_witness_one.example_saw_3_has_3");
    reload(&[&two]);
    registry.is_ready();
    assert_eq!(registry.commit_and("witnessed:1", 10).0, 201);
    reload(&[&two, &one]);
    registry.is_held("fork_witness_one.example_saw_3_has_4");
}

#[test]
fn a_mirror_that_saw_more_or_something_else_holds_the_log_and_a_dead_one_nobody() {
    let shown = Arc::new(Mutex::new(Script::HangUp));
    let shows = shown.clone();
    let mirror = Origin::start(move |_| shows.lock().unwrap().clone());
    let show = |script| *shown.lock().unwrap() = script;
    let mirrors = format!("mirrors = [\"{}/checkpoint\"]", mirror.url());
    let mut registry = Registry::start(&format!("{OPEN}{mirrors}\ncheckpoint = {{ interval = \"1h\" }}\n"));
    registry.is_ready();
    assert_eq!(mirror.count("/checkpoint"), 1, "it was asked");
    let ready = registry.ready("write").json();
    assert_eq!((&ready["ready"], &ready["missing"]), (&json!(true), &json!(["registry.mirror"])), "{ready}");
    assert_eq!(registry.commit_and("checkpointed", 10).0, 201);
    show(Script::Body(registry.get("/checkpoint").body));
    registry.while_stopped(|dir| copy(&dir.join("reg"), &dir.join("backup")));
    registry.is_ready();
    assert_eq!(registry.commit_and("checkpointed", 10).0, 201);
    show(Script::Body(registry.get("/registry/head").body));
    let restored = |dir: &Path| {
        copy(&dir.join("backup"), &dir.join("reg"));
        std::fs::remove_file(dir.join("reg.signed")).unwrap();
    };
    registry.while_stopped(restored);
    registry.is_held(&format!("behind_mirror_{}/checkpoint_saw_3_has_2", mirror.address));
    // Without its word the log goes on, and tells another history than the one that was seen.
    let seen = std::mem::replace(&mut *shown.lock().unwrap(), Script::HangUp);
    registry.while_stopped(|_| {});
    registry.is_ready();
    assert_eq!(registry.commit_and("checkpointed", 10).0, 201);
    show(seen);
    registry.while_stopped(|_| {});
    registry.is_held(&format!("fork_mirror_{}/checkpoint_saw_3_has_3", mirror.address));
}

#[test]
fn a_witness_that_comes_back_is_asked_at_once_if_somebody_waits() {
    let witness = Witness::start("one.example", 71);
    witness.set(Mood::Down);
    let registry = Registry::start(&witnessed(&[&witness], 0));
    registry.is_ready();
    // The next time it would be asked is eight seconds away then.
    let series = "backoff_retries_total{service=\"registry\",op=\"witness\"}";
    registry.node.eventually("it was asked a few times", |node| node.metric(series) >= 3.0);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| registry.commit_and("witnessed:1", 6));
        registry.node.eventually("it was asked for who waits", |node| node.metric(series) >= 5.0);
        witness.set(Mood::Well);
        assert_eq!(waits.join().unwrap(), (201, String::new()));
    });
}

/// What is changed in HEAD.
type Lie = fn(&mut serde_json::Value);

/// A node in front of a registry that says something else in HEAD.
fn lying(registry: &Registry, lie: Lie) -> Origin {
    let address = registry.address();
    Origin::start(move |path| {
        let answer = ron_testkit::get(&address, path);
        let mut body = answer.body;
        if path == "/registry/head" {
            let mut head = serde_json::from_slice(&body).unwrap();
            lie(&mut head);
            body = head.to_string().into_bytes();
        }
        let status = if answer.status == 200 { "200 OK" } else { "404 Not Found" };
        Script::Answer(format!("{status}\r\nContent-Type: application/json\r\n"), body)
    })
}

#[test]
fn what_a_node_says_of_head_is_verified_too() {
    let registry = Registry::start(&format!("{OPEN}checkpoint = {{ interval = \"100ms\", entries = 1 }}"));
    registry.committed(3);
    registry.node.eventually("a checkpoint covers it", |_| {
        registry.get("/registry/head").json()["checkpoint"]["size"] == 4
    });
    let lies: [(&str, Lie); 7] = [
        ("", |_| {}),
        ("hash", |head| head["hash"] = head["payload_b3"].clone()),
        ("payload", |head| head["payload_b3"] = head["hash"].clone()),
        ("signers", |head| head["signers_version"] = json!(2)),
        ("no checkpoint", |head| head["checkpoint"] = json!(null)),
        ("root", |head| head["checkpoint"]["root"] = json!("AAAA")),
        ("note", |head| head["checkpoint"]["note"] = json!("junk")),
    ];
    for (what, lie) in lies {
        let node = lying(&registry, lie);
        let args = ["registry", "verify", "--url", &node.url(), "--trust-roots", "trust-roots.json"];
        let ran = ron_testkit::ron(&args, registry.node.dir.path());
        let said = String::from_utf8_lossy(&ran.stdout).into_owned();
        let error = String::from_utf8_lossy(&ran.stderr).into_owned();
        assert_eq!(ran.status.code(), Some(i32::from(!what.is_empty())), "{what}: {said} {error}");
        assert!(what.is_empty() || said.contains("version 3"), "{what}: {said} {error}");
    }
}

#[test]
fn an_auditor_asks_for_the_witnesses_word_too() {
    let witness = Witness::start("one.example", 71);
    let registry = Registry::start(&witnessed(&[&witness], 1));
    registry.is_ready();
    assert_eq!(registry.commit_and("witnessed:1", 10).0, 201);
    let (dir, url) = (registry.node.dir.path(), format!("http://{}", registry.address()));
    let run = |args: &[&str]| {
        let ran = ron_testkit::ron(&[&["registry"], args].concat(), dir);
        (
            ran.status.code().unwrap(),
            format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr)),
        )
    };
    assert_eq!(run(&["export", "log.export", "--url", &url]).0, 0);
    assert_eq!(run(&["proof", "1", "--out", "one.tlog-proof", "--url", &url]).0, 0);
    let log = log_key(&registry).key;
    let log = ron_log::key::PublicKey::Ed25519(log.into()).to_string();
    let good = witness.key.to_string();
    let other = Witness::start("other.example", 73).key.to_string();
    for (what, said) in [
        (["--export", "log.export"], ", cosigned to version 1"),
        (["--url", &url], ", cosigned to version 1"),
        (["--proof", "one.tlog-proof"], "cosigned by 1 or more of"),
    ] {
        let verify = |more: &[&str]| run(&[&["verify"], &what[..], &["--log-key", &log], more].concat());
        let (code, text) = verify(&["--witness-key", &good]);
        assert!(code == 0 && text.contains(said), "{what:?}: {text}");
        let (code, text) =
            verify(&["--witness-key", &good, "--witness-key", &other, "--witness-quorum", "1"]);
        assert!(code == 0 && text.contains(said), "{what:?}: {text}");
        let (code, text) = verify(&["--witness-key", &good, "--witness-key", &other]);
        assert!(code == 1 && text.contains("cosigned"), "{what:?}: {text}");
        assert_eq!(verify(&["--witness-key", "nonsense"]).0, 64);
        assert_eq!(verify(&["--witness-key", &good, "--witness-quorum", "2"]).0, 64);
    }
    // The one letter of the witness's line that differs is found by whoever knows the witness.
    let proof = std::fs::read_to_string(dir.join("one.tlog-proof")).unwrap();
    let line = proof.lines().last().unwrap();
    let at = line.len() - 40;
    let letter = if &line[at..=at] == "A" { "B" } else { "A" };
    let spoiled = proof.replace(line, &format!("{}{letter}{}", &line[..at], &line[at + 1..]));
    std::fs::write(dir.join("bad.tlog-proof"), spoiled).unwrap();
    let verify = ["verify", "--proof", "bad.tlog-proof", "--log-key", &log];
    assert_eq!(run(&verify).0, 0, "without the witness's key it is a stranger's line");
    assert_eq!(run(&[&verify[..], &["--witness-key", &good]].concat()).0, 1);
}
