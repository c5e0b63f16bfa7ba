//! The registry's commands: those that need files alone, and those that ask a node.

use ron_kernel::key::PrivateKey;
use ron_log::export::{ExportWriter, FrameKind};
use ron_log::proof::{Inclusion, ProofFile};
use ron_log::tree::leaf_hash;
use ron_log::{Approval, B3, Checkpoint, ConflictRule, Entry, NoteKey, Proposal, State, Tree, TrustRoots};
use ron_testkit::Node;
use std::path::Path;
use std::process::Output;

fn run(dir: &Path, args: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = ron_testkit::ron(args, dir);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap().trim().to_owned();
    (status.code().unwrap(), text(stdout), text(stderr))
}

/// Three signers, two of whom must approve; their keys lie in files named after them.
fn genesis(dir: &Path) -> TrustRoots {
    let mut args: Vec<String> =
        ["registry", "genesis", "--log", "test.example/log", "--threshold", "2", "--out", "roots.json"]
            .map(str::to_owned)
            .into();
    for name in ["a", "b", "c"] {
        let (code, key, _) = run(dir, &["key", "new", "--out", name]);
        assert_eq!(code, 0);
        args.extend(["--signer".to_owned(), format!("{name}={key}")]);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (code, pin, error) = run(dir, &args);
    assert_eq!(code, 0, "{error}");
    let roots = TrustRoots::parse(&std::fs::read(dir.join("roots.json")).unwrap()).unwrap();
    assert_eq!(pin, roots.b3().to_string());
    let (code, _, error) = run(dir, &args);
    assert!(code == 1 && error.contains("roots.json"), "what is there is not overwritten: {error}");
    roots
}

/// A proposal as a person writes it, approved by two on their own machines.
fn approved(dir: &Path, roots: &TrustRoots) -> (Entry, Proposal) {
    let text = format!(
        "{{ \"schema\": \"ron.registry/1\", \"base_version\": 0, \"signers_version\": 0, \"nonce\": \"{}\",\n\
         \"ops\": [{{\"op\": \"put\", \"kind\": \"x-note\", \"id\": \"n\", \"body\": {{\"b\": 1, \"a\": [true]}}}}],\n\
         \"note\": \"first\", \"expires_at\": 99999 }}",
        "7".repeat(32)
    );
    std::fs::write(dir.join("p.json"), &text).unwrap();
    let proposal = Proposal::parse(text.as_bytes()).unwrap();
    let state = State::genesis(roots);
    let id = proposal.b3().to_string();
    let approvals = [("a", "p.json"), ("c", id.as_str())].map(|(name, what)| {
        let (code, approval, error) = run(dir, &["registry", "sign", what, "--key", name, "--signer", name]);
        assert_eq!(code, 0, "{error}");
        let shown =
            ["first", "put x-note/n", "\"b\": 1", "version 0"].iter().all(|part| error.contains(part));
        assert!(shown || what != "p.json" && error.contains("all that is known"), "{error}");
        Approval::parse(approval.as_bytes()).unwrap().check(proposal.b3(), state.signers(), None).unwrap()
    });
    (state.commit(&proposal, &approvals, 5, ConflictRule::Touched).unwrap(), proposal)
}

#[test]
fn what_signers_and_auditors_do_needs_files_alone() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let roots = genesis(dir);
    let (entry, proposal) = approved(dir, &roots);
    let log = PrivateKey::generate().unwrap();
    let signing = ed25519_dalek::SigningKey::from_bytes(&log.seed());
    let note_key = NoteKey::ed25519(&roots.log, signing.verifying_key());
    let (first, first_proposal) = roots.genesis();
    let mut tree = Tree::default();
    for entry in [&first, &entry] {
        tree.append(leaf_hash(entry.bytes()), |_, _, _| {});
    }
    let checkpoint = Checkpoint { origin: roots.log.clone(), size: 2, root: tree.root() }.sign(&signing);
    let (mut writer, mut export) = ExportWriter::begin(&roots, &note_key);
    for (entry, proposal) in [(&first, &first_proposal), (&entry, &proposal)] {
        export.extend(writer.frame(FrameKind::Record, entry.bytes()));
        export.extend(writer.frame(FrameKind::Payload, proposal.bytes()));
    }
    export.extend(writer.frame(FrameKind::Checkpoint, checkpoint.to_string().as_bytes()));
    export.extend(writer.end());
    let subject = Inclusion { entry, proposal, path: vec![leaf_hash(first.bytes())] };
    let proof = ProofFile { subject, rotations: Vec::new(), checkpoint }.text().into_bytes();
    let key = log.public().to_string();
    for (flag, good, says) in [("--export", export, "good: 2 entries"), ("--proof", proof, "good: version 1")]
    {
        let verify = |bytes: &[u8]| {
            std::fs::write(dir.join("file"), bytes).unwrap();
            run(dir, &["registry", "verify", flag, "file", "--trust-roots", "roots.json", "--log-key", &key])
        };
        let (code, said, error) = verify(&good);
        assert!(code == 0 && said.starts_with(says), "{said} {error}");
        for at in (0..good.len()).step_by(97) {
            let mut bad = good.clone();
            bad[at] ^= 1;
            let (code, said, _) = verify(&bad);
            assert!(code == 1 && !said.is_empty(), "{flag}: byte {at} was changed and not missed");
        }
        assert_eq!(verify(&good[..good.len() - 1]).0, 1, "cut short");
    }
}

#[test]
fn approved_entries_that_the_log_never_signed_are_not_taken_for_its_history() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let roots = genesis(dir);
    // Its approvals are good, for they are public; it was withdrawn and never committed.
    let (invented, proposal) = approved(dir, &roots);
    let log = PrivateKey::generate().unwrap();
    let signing = ed25519_dalek::SigningKey::from_bytes(&log.seed());
    let (first, first_proposal) = roots.genesis();
    let mut tree = Tree::default();
    tree.append(leaf_hash(first.bytes()), |_, _, _| {});
    let checkpoint = Checkpoint { origin: roots.log.clone(), size: 1, root: tree.root() }.sign(&signing);
    let (mut writer, mut export) =
        ExportWriter::begin(&roots, &NoteKey::ed25519(&roots.log, signing.verifying_key()));
    for (kind, content) in [
        (FrameKind::Record, first.bytes()),
        (FrameKind::Payload, first_proposal.bytes()),
        (FrameKind::Checkpoint, checkpoint.to_string().as_bytes()),
        (FrameKind::Record, invented.bytes()),
        (FrameKind::Payload, proposal.bytes()),
    ] {
        export.extend(writer.frame(kind, content));
    }
    export.extend(writer.end());
    std::fs::write(dir.join("x"), &export).unwrap();
    let key = log.public().to_string();
    for with in [&["--log-key", &key][..], &[]] {
        let verify = ["registry", "verify", "--export", "x", "--trust-roots", "roots.json"];
        let (code, out, error) = run(dir, &[&verify[..], with].concat());
        assert!(
            code == 1 && out == "version 1: from here on no checkpoint of the log's key covers the entries",
            "{out} {error}"
        );
        let import = ["registry", "import", "x", "--dir", "made", "--trust-roots", "roots.json"];
        let (code, _, error) = run(dir, &[&import[..], with].concat());
        assert!(code == 1 && error.contains("nothing was imported") && !dir.join("made").exists(), "{error}");
    }
    let import = [
        "registry",
        "import",
        "x",
        "--dir",
        "made",
        "--trust-roots",
        "roots.json",
        "--unsigned",
        "--log-key",
        &key,
    ];
    let (code, out, error) = run(dir, &import);
    assert!(code == 0 && out.ends_with("signed up to 1 of 2 by the log key given"), "{out} {error}");
    let verify = ["registry", "verify", "--dir", "made", "--trust-roots", "roots.json"];
    let (code, out, _) = run(dir, &verify);
    assert!(code == 0 && out.contains("no checkpoint was checked"), "{out}");
    let (code, out, _) = run(dir, &[&verify[..], &["--json", "--log-key", &key]].concat());
    let said: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &said["entries"], &said["signed"]), (0, &2.into(), &1.into()), "{out}");
}

#[test]
fn wrong_arguments_are_told_what_would_be_right() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let roots = genesis(dir);
    let key = roots.signers.signers()[0].clone();
    let one = format!("a={}", run(dir, &["key", "show", "a"]).1);
    let two = format!("b={}", run(dir, &["key", "show", "b"]).1);
    let three = format!("c={}", run(dir, &["key", "show", "c"]).1);
    let check = |args: &[&str], code: i32, expected: &str| {
        let (ended, said, error) = run(dir, args);
        assert!(ended == code && error.contains(expected), "{args:?}: {ended} {said} {error}");
    };
    let minority = [
        "registry",
        "genesis",
        "--threshold",
        "1",
        "--out",
        "x",
        "--signer",
        &one,
        "--signer",
        &two,
        "--signer",
        &three,
    ];
    check(&minority, 64, "threshold");
    check(
        &["registry", "genesis", "--threshold", "1", "--out", "x", "--signer", "a=ed25519:short"],
        64,
        "--signer a=ed25519:short",
    );
    assert!(!dir.join("x").exists());
    check(
        &["registry", "sign", "nothing", "--key", "a", "--signer", "a"],
        1,
        "neither an id (b3:…) nor a file",
    );
    std::fs::write(dir.join("junk"), "{\"schema\":1}").unwrap();
    check(&["registry", "sign", "junk", "--key", "a", "--signer", "a"], 1, "junk is no proposal");
    let id = B3::of(b"").to_string();
    check(
        &["registry", "sign", &id, "--key", "roots.json", "--signer", "a"],
        1,
        "is no Ed25519 or ML-DSA-44 key",
    );
    check(
        &["registry", "sign", &B3::of(b"").to_string(), "--key", "a", "--signer", "two words"],
        64,
        "--signer two words",
    );
    check(&["registry", "verify", "--trust-roots", "roots.json"], 64, "--config FILE or --url URL");
    check(&["registry", "verify", "--proof", "junk", "--trust-roots", "roots.json"], 64, "--log-key");
    check(
        &["registry", "verify", "--export", "junk", "--trust-roots", "junk"],
        1,
        "junk holds no trust roots",
    );
    assert_eq!(key.id, "a");
}

const NODE: &str = "[admin]\nlisten = \"127.0.0.1:0\"\n[registry]\nlisten = \"127.0.0.1:0\"\n\
    trust_roots = \"roots.json\"\n[registry.checkpoint]\nentries = 1\ninterval = \"100ms\"\n";

/// A node with the three signers of [`genesis`], and a capability for everything.
fn node() -> (Node, String) {
    node_with(NODE)
}

fn node_with(config: &str) -> (Node, String) {
    let dir = tempfile::tempdir().unwrap();
    genesis(dir.path());
    std::fs::write(dir.path().join("ron.toml"), config).unwrap();
    std::fs::write(dir.path().join("route.json"), r#"{"path": "/a", "upstream": "u"}"#).unwrap();
    let node = Node::spawn(dir, &["run", "registry", "--config", "ron.toml"], &[]);
    let scopes = "registry:propose,registry:approve,registry:commit";
    let (code, token, error) =
        run(node.dir.path(), &["token", "mint", "--scope", scopes, "--key", "node.key"]);
    assert_eq!(code, 0, "{error}");
    (node, token)
}

/// A command to that node, with the capability.
fn ask(node: &Node, token: &str, args: &[&str]) -> (i32, String, String) {
    let args = [&["registry"], args, &["--config", "ron.toml", "--token", token]].concat();
    run(node.dir.path(), &args)
}

/// Proposes, has two approve, commits.
fn change(node: &Node, token: &str, id: &str, note: &str) {
    commit(node, token, &["put", "route", id, "route.json", "--note", note]);
}

fn commit(node: &Node, token: &str, proposing: &[&str]) {
    let (code, proposal, error) = ask(node, token, &[proposing, &["--yes"]].concat());
    assert_eq!(code, 0, "{error}");
    for signer in ["a", "b"] {
        let (code, _, error) = ask(node, token, &["approve", &proposal, "--key", signer, "--signer", signer]);
        assert_eq!(code, 0, "{error}");
    }
    let (code, _, error) = ask(node, token, &["commit", &proposal, "--wait", "checkpointed"]);
    assert_eq!(code, 0, "{error}");
}

#[test]
fn a_refusal_says_what_to_do() {
    let (node, token) = node();
    let put = ["put", "route", "r", "route.json", "--yes"];
    // Where the node's key can be read, it makes a capability by itself.
    let url = format!("http://{}", node.address("registry", "http"));
    let (code, _, error) = run(node.dir.path(), &[&["registry"], &put[..], &["--url", &url]].concat());
    assert!(code == 1 && error.contains("401 unauth") && error.contains("ron token mint"), "{error}");
    let (code, own, error) =
        run(node.dir.path(), &[&["registry"], &put[..], &["--config", "ron.toml"]].concat());
    assert_eq!(code, 0, "{error}");
    assert_eq!(ask(&node, &token, &["withdraw", own.trim()]).0, 0);
    let check = |args: &[&str], code: i32, says: &str| {
        let (exit, out, error) = ask(&node, &token, args);
        assert!(exit == code && error.contains(says), "{args:?}: {exit} {out} {error}");
        out
    };
    check(&put[..4], 64, "say --yes");
    check(&["put", "route", "r", "roots.json", "--yes"], 64, "no good change: ops[0]: path: is missing");
    check(&["put", "route", "r", "a", "--yes"], 1, "a is no JSON");
    check(&["delete", "route", "r", "--yes"], 1, "there is no item route/r to delete");
    check(&["get", "7"], 1, "404 not_found");
    check(&["approve", "7", "--key", "a", "--signer", "a"], 64, "is no proposal's id");
    let id = check(&put, 0, "+   \"path\": \"/a\"");
    check(&["approve", &id], 64, "--key FILE with --signer NAME, or --approval FILE");
    check(&["approve", &id, "--key", "b", "--signer", "a"], 1, "422 invalid_sig");
    check(&["approve", &id, "--key", "a", "--signer", "nobody"], 1, "422 revoked_key");
    check(&["commit", &id], 1, "422 quorum_failed");
    check(&["commit", &id, "--wait", "never"], 64, "durable, checkpointed or witnessed:K");
    let pending: serde_json::Value = serde_json::from_str(&check(&["proposals", "--json"], 0, "")).unwrap();
    assert_eq!(pending["proposals"][0]["proposal_id"], id.as_str());
    change(&node, &token, "r", "first");
    for signer in ["a", "b"] {
        check(&["approve", &id, "--key", signer, "--signer", signer], 0, "nothing changes");
    }
    check(&["commit", &id], 1, "409 chain_mismatch");
    assert_eq!(check(&["withdraw", &id], 0, ""), "withdrawn");
    check(&["commit", &id], 1, "it was withdrawn");
    check(&["approve", &id, "--key", "a", "--signer", "a"], 1, "withdrawn and cannot be approved");
    let undo = check(&["supersede"], 0, "-   \"path\": \"/a\"");
    for signer in ["a", "b"] {
        check(
            &["approve", &undo, "--key", signer, "--signer", signer],
            0,
            "delete route/r, last changed by version 1",
        );
    }
    check(&["commit", &undo], 0, "");
    check(
        &["approve", &undo, "--key", "a", "--signer", "a"],
        1,
        "committed as version 2 and needs no approval",
    );
    check(&["items", "route", "r"], 1, "404 not_found");
    check(&["export", "route.json"], 64, "say --force to overwrite it");
    check(&["export", "route.json", "--force"], 0, "");
    let (code, _, error) = run(node.dir.path(), &["registry", "head", "--url", "http://127.0.0.1:1"]);
    assert!(code == 1 && error.contains("no node answers at 127.0.0.1:1"), "{error}");
}

#[test]
fn a_body_as_deep_and_as_exact_as_it_may_be_is_shown_approved_and_verified_as_it_is() {
    let (node, token) = node();
    let dir = node.dir.path();
    let good = |args: &[&str]| {
        let (code, out, error) = ask(&node, &token, args);
        assert_eq!(code, 0, "{args:?}: {out} {error}");
        out + &error
    };
    // The numbers are read wrongly by whoever does not take care of the last bit.
    let body = |deep: usize| {
        let deep = format!("{}{}", "[".repeat(deep), "]".repeat(deep));
        format!("{{\"deep\":{deep},\"h\":4503599627370495.5,\"n\":14.750598826453967}}")
    };
    std::fs::write(dir.join("deep.json"), body(28)).unwrap();
    let proposal = ask(&node, &token, &["put", "x-geo", "home", "deep.json", "--yes"]).1;
    let http = node.address("registry", "http");
    let shown = ron_testkit::get(&http, &format!("/registry/proposals/{proposal}")).text();
    assert!(shown.contains(&format!("\"body\":{}", body(28))), "{shown}");
    assert!(good(&["approve", &proposal, "--key", "a", "--signer", "a"]).contains("14.750598826453967"));
    good(&["approve", &proposal, "--key", "b", "--signer", "b"]);
    good(&["commit", &proposal, "--wait", "checkpointed"]);
    good(&["proof", "1", "--out", "proof"]);
    good(&["export", "export"]);
    assert!(good(&["verify"]).contains("good: 2 entries"));
    let key = run(dir, &["key", "show", "node.key"]).1;
    for what in [["--proof", "proof"], ["--export", "export"]] {
        let offline = [&["registry", "verify", "--trust-roots", "roots.json", "--log-key", &key], &what[..]];
        let (code, said, error) = run(dir, &offline.concat());
        assert!(code == 0 && said.starts_with("good: "), "{said} {error}");
    }
    // Once more from what is shown: nothing changes.
    let item: serde_json::Value = serde_json::from_str(&good(&["items", "x-geo", "home", "--json"])).unwrap();
    std::fs::write(dir.join("again.json"), item["body"].to_string()).unwrap();
    let (_, _, error) = ask(&node, &token, &["put", "x-geo", "home", "again.json", "--yes"]);
    assert!(error.contains("nothing changes"), "{error}");
    // Whoever asks in CBOR gets the same number.
    let cbor = [("Accept", "application/cbor")];
    let entry = ron_testkit::request(&http, "GET", "/registry/1", &cbor, b"").unwrap().body;
    let exact = 14.750598826453967_f64.to_be_bytes();
    assert!(entry.windows(8).any(|bytes| bytes == exact), "{entry:?}");
    // To undo a later change brings it back as it was.
    std::fs::write(dir.join("other.json"), "1").unwrap();
    commit(&node, &token, &["put", "x-geo", "home", "other.json"]);
    assert!(good(&["supersede"]).contains("14.750598826453967"));
    std::fs::write(dir.join("deep.json"), body(29)).unwrap();
    let (code, _, error) = ask(&node, &token, &["put", "x-geo", "home", "deep.json", "--yes"]);
    assert!(code != 0 && error.contains("nested too deeply"), "{error}");
}

#[test]
fn signers_with_post_quantum_and_hybrid_keys_approve_by_the_command_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    let made = |name: &str, alg: &str| {
        let (code, key, error) = run(path, &["key", "new", "--out", name, "--alg", alg]);
        assert!(code == 0 && key.starts_with(&format!("{alg}:")), "{error}");
        assert_eq!(run(path, &["key", "show", name]).1, key);
        key
    };
    let hybrid = format!("a={},{}", made("a", "ed25519"), made("a2", "ml-dsa-44"));
    let quantum = format!("b={}", made("b", "ml-dsa-44"));
    let genesis =
        ["registry", "genesis", "--log", "test.example/log", "--threshold", "2", "--out", "roots.json"];
    let (code, _, error) = run(path, &[&genesis[..], &["--signer", &hybrid, "--signer", &quantum]].concat());
    assert_eq!(code, 0, "{error}");
    std::fs::write(path.join("ron.toml"), NODE).unwrap();
    std::fs::write(path.join("route.json"), r#"{"path": "/a", "upstream": "u"}"#).unwrap();
    let node = Node::spawn(dir, &["run", "registry", "--config", "ron.toml"], &[]);
    let scopes = "registry:propose,registry:approve,registry:commit";
    let (_, token, _) = run(node.dir.path(), &["token", "mint", "--scope", scopes, "--key", "node.key"]);
    let (_, id, _) = ask(&node, &token, &["put", "route", "r", "route.json", "--yes", "--out", "p.json"]);
    let refused = |keys: &[&str], code: i32, says: &str| {
        let (found, _, error) = ask(&node, &token, &[&["approve", &id, "--signer", "a"], keys].concat());
        assert!(found == code && error.contains(says), "{keys:?}: {found} {error}");
    };
    refused(&["--key", "a"], 1, "signs with both (--key twice)");
    refused(&["--key", "a", "--key", "a"], 64, "one of each algorithm");
    refused(&["--key", "a", "--key", "b"], 1, "invalid_sig");
    for _ in 0..2 {
        let both = ["approve", &id, "--signer", "a", "--key", "a2", "--key", "a"];
        let (code, said, error) = ask(&node, &token, &both);
        assert!(code == 0 && said.contains("1 approvals"), "the same each time: {error}");
    }
    let (code, approval, error) =
        run(node.dir.path(), &["registry", "sign", "p.json", "--key", "b", "--signer", "b"]);
    assert!(code == 0 && approval.contains("\"alg\":\"ml-dsa-44\""), "{error}");
    std::fs::write(node.dir.path().join("b.approval"), approval).unwrap();
    let (code, _, error) = ask(&node, &token, &["approve", &id, "--approval", "b.approval"]);
    assert_eq!(code, 0, "{error}");
    let (code, _, error) = ask(&node, &token, &["commit", &id, "--wait", "checkpointed"]);
    assert_eq!(code, 0, "{error}");
    let (code, out, error) = run(node.dir.path(), &["registry", "verify", "--config", "ron.toml"]);
    assert!(code == 0 && out.contains("good: 2 entries"), "{out} {error}");
    // Keys of signers are not what a witness or a capability is signed with.
    let (code, _, error) = run(node.dir.path(), &["token", "mint", "--scope", scopes, "--key", "b"]);
    assert!(code == 1 && error.contains("is no Ed25519 key"), "{error}");
}

#[test]
fn what_was_changed_afterwards_is_found_and_two_histories_are_shown() {
    let (mut node, token) = node();
    let dir = node.dir.path().to_owned();
    change(&node, &token, "r", "an unmistakable note");
    let good = |args: &[&str], says: &str| {
        let (code, out, error) = run(&dir, args);
        assert!(code == 0 && out.contains(says), "{args:?}: {code} {out} {error}");
    };
    good(&["registry", "verify", "--config", "ron.toml"], "good: 2 entries");
    good(&["registry", "export", "x.export", "--config", "ron.toml"], "2 entries");
    good(
        &["registry", "proof", "1", "--out", "p", "--trust-roots", "roots.json", "--config", "ron.toml"],
        "proves",
    );
    // What the log once signed, and what it never should have.
    let log = ed25519_dalek::SigningKey::from_bytes(&PrivateKey::read(&dir.join("node.key")).unwrap().seed());
    let checkpoint = ron_testkit::get(&node.address("registry", "http"), "/checkpoint");
    std::fs::write(dir.join("kept"), &checkpoint.body).unwrap();
    let other =
        Checkpoint { origin: "test.example/log".into(), size: 2, root: [7; 32] }.sign(&log).to_string();
    std::fs::write(dir.join("other"), &other).unwrap();
    good(
        &["registry", "evidence", "kept", "--config", "ron.toml"],
        "none: the log of size 2 continues all 1",
    );
    let (code, out, _) = run(&dir, &["registry", "evidence", "kept", "other", "--config", "ron.toml"]);
    assert!(code == 1 && out.contains(other.trim()) && out.contains(checkpoint.text().trim()), "{out}");
    assert_eq!(node.stop(), 0);

    let edit = |file: &str, from: &str, to: &str| {
        let mut bytes = std::fs::read(dir.join(file)).unwrap();
        let places: Vec<usize> =
            (0..bytes.len()).filter(|at| bytes[*at..].starts_with(from.as_bytes())).collect();
        assert!(!places.is_empty(), "{from} is in {file}");
        places.iter().for_each(|at| bytes[*at..at + to.len()].copy_from_slice(to.as_bytes()));
        std::fs::write(dir.join(file), bytes).unwrap();
    };
    let verify = ["registry", "verify", "--dir", "registry", "--trust-roots", "roots.json", "--log-key"];
    let key = PrivateKey::read(&dir.join("node.key")).unwrap().public().to_string();
    let verify = [&verify[..], &[key.as_str()]].concat();
    good(&verify, "good: 2 entries");
    edit("registry/registry.redb", "an unmistakable", "an unmistaXable");
    let (code, out, error) = run(&dir, &verify);
    assert!(code == 1 && out.contains("version 1: the payload is not the one"), "{out} {error}");
    let (code, out, _) = run(&dir, &[&verify[..], &["--json"]].concat());
    let said: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &said["good"], &said["faults"][0]["version"]), (1, &false.into(), &1.into()), "{out}");
    edit("x.export", "an unmistakable", "an unmistaXable");
    let (code, out, error) =
        run(&dir, &["registry", "import", "x.export", "--dir", "again", "--trust-roots", "roots.json"]);
    assert!(
        code == 1 && out.contains("version 1") && error.contains("nothing was imported"),
        "{out} {error}"
    );
    assert!(!dir.join("again").exists());
}

/// Every place of a text in a file's bytes is replaced by another of the same length.
fn replaced(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    let (mut bytes, mut found) = (bytes.to_vec(), false);
    for at in 0..bytes.len() {
        if bytes[at..].starts_with(from.as_bytes()) {
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
            found = true;
        }
    }
    assert!(found, "{from} is there");
    bytes
}

#[test]
fn whatever_is_damaged_in_a_store_is_told_and_looking_changes_nothing() {
    let (mut node, token) = node();
    change(&node, &token, "r", "first");
    let (code, _, error) =
        ask(&node, &token, &["put", "route", "s", "route.json", "--yes", "--note", "it waits"]);
    assert_eq!(code, 0, "{error}");
    let dir = node.dir.path().to_owned();
    let verify = || run(&dir, &["registry", "verify", "--dir", "registry", "--trust-roots", "roots.json"]);
    let (code, _, error) = verify();
    assert!(code == 1 && error.contains("in use by another process"), "{error}");
    node.signal("KILL");
    node.wait();
    let file = dir.join("registry/registry.redb");
    let whole = std::fs::read(&file).unwrap();
    let (code, out, error) = verify();
    assert!(code == 0 && out.contains("signed up to 2 of 2"), "{out} {error}");
    assert_eq!(std::fs::read(&file).unwrap(), whole, "not even the crash is mended");
    std::fs::remove_file(dir.join("addresses.json")).unwrap();
    // Opened and closed by a node, so that nothing looks at the sums of the pages any more.
    let mut again = Node::spawn(
        std::mem::replace(&mut node.dir, tempfile::tempdir().unwrap()),
        &["run", "registry", "--config", "ron.toml"],
        &[],
    );
    again.eventually("it serves", |node| node.admin_get("/readyz").status == 200);
    assert_eq!(again.stop(), 0);
    for (of, from, to, says) in [
        ("registry.redb", "ron.registry.snapshot/1", "ron.registry.snapshot/7", "a signed note"),
        ("states/1", "ron.registry.state/1", "ron.registry.state/7", "the snapshot's state"),
        ("registry.redb", "it waits", "it waitz", "the pending proposal b3:"),
    ] {
        let of = dir.join("registry").join(of);
        let whole = std::fs::read(&of).unwrap();
        std::fs::write(&of, replaced(&whole, from, to)).unwrap();
        let (code, out, error) = verify();
        assert!(code == 1 && out.contains(says), "{from}: {out} {error}");
        std::fs::write(&of, whole).unwrap();
    }
    let whole = std::fs::read(&file).unwrap();
    let mut damaged = None;
    let pages: Vec<usize> = (0..whole.len()).step_by(4096).filter(|at| whole[*at] != 0).collect();
    for at in pages.iter().copied().step_by(pages.len().div_ceil(24)) {
        let mut bytes = whole.clone();
        bytes[at..at + 64].fill(0xA5);
        std::fs::write(&file, &bytes).unwrap();
        let (code, out, error) = verify();
        assert!(code <= 1, "page {}: {out} {error}", at / 4096);
        if error.contains("registry.redb is damaged: make the folder anew from an export") {
            damaged = Some(bytes);
        }
    }
    std::fs::write(&file, damaged.expect("a page that redb panics about")).unwrap();
    let (code, _, error) = run(&dir, &["run", "registry", "--config", "ron.toml"]);
    assert!(code == 1 && error.contains("registry.redb is damaged: make the folder anew"), "{error}");
}

#[test]
fn an_export_that_lacks_what_was_committed_last_is_none() {
    let rare = NODE.replace("entries = 1\ninterval = \"100ms\"", "interval = \"1h\"");
    let (node, token) = node_with(&format!("[node]\ndanger_ok = true\n{rare}"));
    grow(&node, &token, 2);
    assert_eq!(ask(&node, &token, &["export", "all"]).0, 0);
    let good = std::fs::read(node.dir.path().join("all")).unwrap();
    grow(&node, &token, 1);
    node.admin_post("/debug/registry/stall", r#"{"task":"storage","for":"8s"}"#);
    let (code, _, error) = ask(&node, &token, &["export", "all", "--force"]);
    assert!(code == 1 && error.contains("ends with version 2, and the log with 3"), "{error}");
    assert!(error.contains("all.part is what came, signed up to version 2; all was not touched"), "{error}");
    assert_eq!(std::fs::read(node.dir.path().join("all")).unwrap(), good);
}

/// Commits so many entries, quicker than by commands.
fn grow(node: &Node, token: &str, count: usize) {
    let (address, bearer) = (node.address("registry", "http"), format!("Bearer {token}"));
    let headers = [("Content-Type", "application/json"), ("Authorization", &*bearer)];
    let keys = ["a", "b"].map(|name| {
        let key = PrivateKey::read(&node.dir.path().join(name)).unwrap();
        (name, ed25519_dalek::SigningKey::from_bytes(&key.seed()))
    });
    for n in 0..count {
        let head = ron_testkit::get(&address, "/registry/head").json();
        let payload = serde_json::json!({
            "schema": "ron.registry/1", "base_version": head["version"], "signers_version": head["signers_version"],
            "nonce": format!("{n:032x}"), "ops": [{"op": "put", "kind": "x-n", "id": "n", "body": n}], "note": "",
            "expires_at": 9_000_000_000_000_u64,
        });
        let b3 = Proposal::parse(payload.to_string().as_bytes()).unwrap().b3();
        let approvals = keys.each_ref().map(|(name, key)| -> serde_json::Value {
            serde_json::from_str(&Approval::sign(name, key, b3, 1).canonical()).unwrap()
        });
        let body = serde_json::json!({"payload": payload, "approvals": approvals}).to_string();
        let path = "/registry/proposals?commit=true";
        let answer = ron_testkit::request(&address, "POST", path, &headers, body.as_bytes()).unwrap();
        assert_eq!(answer.status, 201, "{}", answer.text());
    }
}

#[test]
fn a_pruned_log_is_verified_and_comes_back_from_its_export() {
    let dir = tempfile::tempdir().unwrap();
    genesis(dir.path());
    let config = format!("{NODE}[registry.retention]\npolicy = \"count\"\nmax_count = 2\n");
    std::fs::write(dir.path().join("ron.toml"), config).unwrap();
    std::fs::write(dir.path().join("route.json"), r#"{"path": "/a", "upstream": "u"}"#).unwrap();
    let mut node = Node::spawn(dir, &["run", "registry", "--config", "ron.toml"], &[]);
    let dir = node.dir.path().to_owned();
    let scopes = "registry:propose,registry:approve,registry:commit";
    let (_, token, _) = run(&dir, &["token", "mint", "--scope", scopes, "--key", "node.key"]);
    // The first change is one of the signers: it is needed to prove all that come after.
    let (_, signers, _) = ask(&node, &token, &["items", "signers", "main"]);
    std::fs::write(dir.join("signers.json"), signers.replace("\"c\"", "\"d\"")).unwrap();
    commit(&node, &token, &["put", "signers", "main", "signers.json", "--note", "change 1"]);
    change(&node, &token, "r", "change 2");
    grow(&node, &token, 300);
    change(&node, &token, "r", "the last one");
    let gone = |version: u64| format!("/registry/{version}");
    node.eventually("retention", |node| {
        ron_testkit::get(&node.address("registry", "http"), &gone(2)).status == 410
    });
    let good = |args: &[&str], says: &str| {
        let (code, out, error) = run(&dir, args);
        assert!(code == 0 && out.contains(says), "{args:?}: {code} {out} {error}");
    };
    good(&["registry", "verify", "--config", "ron.toml"], "good: 304 entries");
    good(&["registry", "export", "x.export", "--config", "ron.toml"], "x.export");
    let (code, out, error) = ask(&node, &token, &["log", "--limit", "1000"]);
    assert!(code == 0 && out.contains("the last one") && !out.contains("change 2"), "{out} {error}");
    // The first version kept can be watched from, though the one before it is gone.
    let kept = ron_testkit::get(&node.address("registry", "http"), "/registry/retention").json();
    let min = kept["min_version"].to_string();
    let watch = ["registry", "watch", "--from", &min, "--json", "--config", "ron.toml"];
    let mut watch = ron_testkit::command(&watch, &dir).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(watch.stdout.take().unwrap()), &mut line)
        .unwrap();
    watch.kill().unwrap();
    watch.wait().unwrap();
    let first: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(first["version"], kept["min_version"], "{line}");
    let (_, head, _) = ask(&node, &token, &["head", "--json"]);
    assert_eq!(node.stop(), 0);
    let key = PrivateKey::read(&dir.join("node.key")).unwrap().public().to_string();
    let verify =
        ["registry", "verify", "--trust-roots", "roots.json", "--log-key", &key, "--dir", "registry"];
    good(&verify, "good: 304 entries");
    std::fs::remove_dir_all(dir.join("registry")).unwrap();
    good(
        &[
            "registry",
            "import",
            "x.export",
            "--dir",
            "registry",
            "--trust-roots",
            "roots.json",
            "--log-key",
            &key,
        ],
        "registry: version 303",
    );
    good(&verify, "good: 304 entries");
    let dir = std::mem::replace(&mut node.dir, tempfile::tempdir().unwrap());
    let again = Node::spawn(dir, &["run", "registry", "--config", "ron.toml"], &[]);
    let (code, restored, error) = ask(&again, &token, &["head", "--json"]);
    assert_eq!(code, 0, "{error}");
    let hash = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap()["hash"].clone();
    assert_eq!(hash(&restored), hash(&head));
    change(&again, &token, "r9", "it goes on");
    let (code, _, error) =
        ask(&again, &token, &["proof", "304", "--out", "p", "--trust-roots", "roots.json"]);
    assert_eq!(code, 0, "{error}");
}
