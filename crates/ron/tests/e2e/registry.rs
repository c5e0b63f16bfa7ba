//! The registry's commands that need no node: trust roots, approvals, verification.

use ron_kernel::key::PrivateKey;
use ron_log::export::{ExportWriter, FrameKind};
use ron_log::proof::{Inclusion, ProofFile};
use ron_log::tree::leaf_hash;
use ron_log::{Approval, B3, Checkpoint, ConflictRule, Entry, NoteKey, Proposal, State, Tree, TrustRoots};
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
    check(
        &["registry", "sign", &B3::of(b"").to_string(), "--key", "a", "--signer", "two words"],
        64,
        "--signer two words",
    );
    check(&["registry", "verify", "--trust-roots", "roots.json"], 64, "--export FILE or --proof FILE");
    check(&["registry", "verify", "--proof", "junk", "--trust-roots", "roots.json"], 64, "--log-key");
    check(
        &["registry", "verify", "--export", "junk", "--trust-roots", "junk"],
        1,
        "junk holds no trust roots",
    );
    assert_eq!(key.id, "a");
}
