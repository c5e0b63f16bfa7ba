//! The frozen vectors that `docs/registry-format.md` cites, read by this crate and by the Python verifier.

use crate::fixture::{
    approve, ed_key, hybrid_sig, key, log_key, log_note_key, log_of, ml_key, ml_sig, roots, signer,
};
use crate::proof_file::{proof, witness};
use crate::whole_log::export;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ron_log::approval::{Sig, approval_message};
use ron_log::checkpoint::cosign;
use ron_log::json::Json;
use ron_log::tree::leaf_hash;
use ron_log::{Approval, B3, Signer, SignerSet};
use serde_json::{Value, json};
use std::process::Command;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/vectors/registry.json");
const VERIFIER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/verifier.py");

const JSON: [&str; 6] = [
    r#"{"b":1,"a":[true, null, false]}"#,
    "[1.0,-0,1e2,0.1,1e-7,1.5e-9,333333333.33333329,0.000001,-12.5]",
    r#""\u20ac$\u000f\nA'B\"\\\/\ud83d\ude02\u007f""#,
    "{\"\u{fb33}\":1,\"\u{1f602}\":2,\"\u{80}\":3,\"1\":4,\"\\r\":5}",
    r#"{"a":9007199254740991,"b":-9007199254740991}"#,
    "{ }",
];

const REFUSED: [&str; 9] = [
    r#"{"a":1,"a":2}"#,
    r#"{"a":1,"\u0061":2}"#,
    "9007199254740992",
    "1e16",
    r#""\ud800""#,
    "01",
    "[1,]",
    "NaN",
    "{} 1",
];

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

fn vectors() -> Value {
    let (log, state) = log_of(9);
    let mut checkpoint = log.checkpoint().sign(&log_key());
    checkpoint.signatures.push(cosign(&checkpoint.text, "w.example/1", &key(60), 1_700_000_000));
    let mut tree = ron_log::Tree::default();
    let mut tree_roots = Vec::new();
    let mut entries = Vec::new();
    for (entry, proposal) in &log.changes {
        let leaf = leaf_hash(entry.bytes());
        tree.append(leaf, |_, _, _| {});
        tree_roots.push(hex(&tree.root()));
        entries.push(json!({
            "record": text(entry.bytes()),
            "payload": text(proposal.bytes()),
            "hash": entry.hash().to_string(),
            "leaf": hex(&leaf),
        }));
    }
    let tiles: serde_json::Map<String, Value> = log
        .hashes
        .iter()
        .map(|((level, index), hashes)| (format!("{level}/{index}"), hex(hashes).into()))
        .collect();
    let subject = log.changes[1].1.b3();
    let approval = |sig| Approval { sig, ..approve(1, subject) }.canonical();
    let b3 = [0, 1, 64, 1024, 1025, 3073].map(|length| {
        let input: Vec<u8> = (0..length).map(|index: u32| (index % 251) as u8).collect();
        json!({"input": hex(&input), "b3": B3::of(&input).to_string()})
    });
    let proofs = [0, 3, 9].map(|version| proof(&log, version).text());
    let exports = [0, 6].map(|min| BASE64_STANDARD.encode(export(&log, min)));
    let json = JSON.map(
        |input| json!({"input": input, "canonical": Json::parse(input.as_bytes()).expect(input).canonical()}),
    );
    json!({
        "json": json,
        "json_refused": REFUSED,
        "b3": b3,
        "roots": roots().canonical(),
        "roots_b3": roots().b3().to_string(),
        "entries": entries,
        "state": state.canonical(),
        "tree_roots": tree_roots,
        "tiles": tiles,
        "log_key": log_note_key().to_string(),
        "witness_key": witness().to_string(),
        "checkpoint": checkpoint.to_string(),
        "approvals": {
            "payload_b3": subject.to_string(),
            "message": approval_message(subject),
            "keys": [ed_key(1).to_string(), ml_key(1).to_string()],
            "ed25519": approve(1, subject).canonical(),
            "ml-dsa-44": approval(Sig::MlDsa44(ml_sig(1, subject))),
            "hybrid": approval(hybrid_sig(1, subject)),
        },
        "proofs": proofs,
        "exports": exports,
    })
}

/// `UPDATE_VECTORS=1` writes the file; a change of it is a change of the format.
#[test]
fn the_formats_are_those_of_the_frozen_vectors() {
    let made = vectors();
    if std::env::var_os("UPDATE_VECTORS").is_some() {
        std::fs::write(FILE, format!("{made:#}\n")).expect("the file");
    }
    let frozen: Value = serde_json::from_slice(&std::fs::read(FILE).expect("the file")).expect("JSON");
    for (name, value) in frozen.as_object().expect("an object") {
        assert_eq!(*value, made[name], "{name}");
    }
    assert_eq!(frozen, made);
    let approvals = &frozen["approvals"];
    let subject = B3::parse(approvals["payload_b3"].as_str().expect("text")).expect("a hash");
    for (name, keys) in
        [("ed25519", vec![ed_key(1)]), ("ml-dsa-44", vec![ml_key(1)]), ("hybrid", vec![ed_key(1), ml_key(1)])]
    {
        let set = SignerSet::new(1, false, vec![Signer { keys, ..signer(1) }]).expect("a set");
        let approval = Approval::parse(approvals[name].as_str().expect("text").as_bytes()).expect(name);
        approval.check(subject, &set, None).expect(name);
    }
}

fn python(arguments: &[&str]) {
    let output = Command::new("python3").arg(VERIFIER).args(arguments).output().expect("python3 runs");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_python_verifier_finds_the_vectors_good() {
    python(&["vectors", FILE]);
}

#[test]
fn the_python_verifier_finds_changed_bits_in_every_part() {
    python(&["flip", FILE, "1", "40"]);
}
