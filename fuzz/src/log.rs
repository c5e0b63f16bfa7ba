//! The registry's decoders. Each gets the input as it is, and as edits of a frozen vector, which no chance
//! would ever put together.

use crate::Target;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ron_log::checkpoint::AddCheckpoint;
use ron_log::export::{ExportReader, ExportVerifier};
use ron_log::json::Json;
use ron_log::tile::{TilePath, push_record, records};
use ron_log::{
    Approval, B3, Checkpoint, Entry, Note, NoteKey, ProofFile, Proposal, Signatures, State, TrustRoots,
    Verifier, Witness,
};
use serde_json::Value;
use std::sync::LazyLock;

static VECTORS: LazyLock<Value> = LazyLock::new(|| {
    serde_json::from_str(include_str!("../../crates/ron-log/vectors/registry.json")).expect("the vectors")
});

fn text(value: &'static Value) -> &'static str {
    value.as_str().expect("text")
}

static ROOTS: LazyLock<TrustRoots> =
    LazyLock::new(|| TrustRoots::parse(text(&VECTORS["roots"]).as_bytes()).expect("the roots"));
static LOG_KEY: LazyLock<NoteKey> =
    LazyLock::new(|| NoteKey::parse(text(&VECTORS["log_key"])).expect("the log's key"));
static EXPORT: LazyLock<Vec<u8>> =
    LazyLock::new(|| BASE64_STANDARD.decode(text(&VECTORS["exports"][1])).expect("an export"));

/// The input itself, then the seed with four bytes an edit: where, how, and what to put there.
pub(crate) fn each(data: &[u8], seed: &[u8], target: Target) {
    target(data);
    let mut bytes = seed.to_vec();
    for edit in data.chunks_exact(4) {
        let at = usize::from(u16::from_le_bytes([edit[0], edit[1]])) % (bytes.len() + 1);
        match edit[2] % 4 {
            0 if at < bytes.len() => bytes[at] = edit[3],
            1 if at < bytes.len() => bytes[at] ^= edit[3],
            2 => bytes.insert(at, edit[3]),
            3 if at < bytes.len() => drop(bytes.drain(at..bytes.len().min(at + usize::from(edit[3])))),
            _ => {}
        }
    }
    target(&bytes);
}

/// What is read is written canonically, once and for all; what is canonical is written as it was read.
pub(crate) fn json(data: &[u8]) {
    each(data, text(&VECTORS["json"][1]["input"]).as_bytes(), |data| {
        if let Ok(value) = Json::parse(data) {
            let written = value.canonical();
            let again = Json::parse_canonical(written.as_bytes()).expect("what is written is canonical");
            assert_eq!(again.canonical(), written);
            assert!(serde_json::from_slice::<Value>(data).is_ok(), "another reader takes it too");
        }
        if let Ok(value) = Json::parse_canonical(data) {
            assert_eq!(value.canonical().as_bytes(), data);
            assert_eq!(Json::parse(data).expect("canonical JSON is JSON"), value);
        }
    });
}

pub(crate) fn payload(data: &[u8]) {
    each(data, text(&VECTORS["entries"][4]["payload"]).as_bytes(), |data| {
        if let Ok(proposal) = Proposal::parse(data) {
            let again = Proposal::parse_canonical(proposal.bytes().to_vec()).expect("canonical");
            assert_eq!((again.b3(), &again), (B3::of(proposal.bytes()), &proposal));
        }
        let (quick, general) = ron_log::fuzzing::payload(data);
        assert_eq!(quick, general.ok(), "the quick reader and the general one agree");
        let approval = text(&VECTORS["approvals"]["ed25519"]);
        let sent = [br#"{"payload":"#, data, br#","approvals":["#, approval.as_bytes(), b"]}"].concat();
        let (quick, general) = ron_log::fuzzing::with_approvals(&sent);
        assert!(
            quick.is_none() || quick == general,
            "what the quick reader takes, the general one reads alike"
        );
        let _ = TrustRoots::parse(data);
    });
}

pub(crate) fn approval(data: &[u8]) {
    each(data, text(&VECTORS["approvals"]["ed25519"]).as_bytes(), |data| {
        if let Ok(approval) = Approval::parse(data) {
            assert_eq!(Approval::parse(approval.canonical().as_bytes()).expect("canonical"), approval);
        }
    });
}

pub(crate) fn record(data: &[u8]) {
    each(data, text(&VECTORS["entries"][4]["record"]).as_bytes(), |data| {
        if let Ok(entry) = Entry::parse(data.to_vec()) {
            assert_eq!(entry.record().canonical().as_bytes(), data, "a record has one form");
        }
        let (quick, general) = ron_log::fuzzing::record(data);
        if let Some(quick) = quick {
            assert_eq!(Ok(quick), general, "the quick reader and the general one agree");
        }
    });
}

pub(crate) fn state(data: &[u8]) {
    each(data, text(&VECTORS["state"]).as_bytes(), |data| {
        if let Ok(state) = State::parse(data) {
            assert_eq!(state.canonical().as_bytes(), data, "a state has one form");
        }
    });
}

/// A note reads back as it was written, and none but the log's own says anything.
pub(crate) fn note(data: &[u8]) {
    let good = text(&VECTORS["checkpoint"]);
    each(data, good.as_bytes(), |data| {
        if let Ok(note) = Note::parse(data) {
            assert_eq!(note.to_string().as_bytes(), data);
            if let Ok(checkpoint) = Checkpoint::verify(&note, &LOG_KEY) {
                assert!(text(&VECTORS["checkpoint"]).starts_with(&checkpoint.text()), "a forged checkpoint");
            }
        }
        let _ = std::str::from_utf8(data).map(NoteKey::parse);
    });
    each(data, format!("old 5\n{}\n\n{good}", BASE64_STANDARD.encode([7; 32])).as_bytes(), |data| {
        if let Some(request) = AddCheckpoint::parse(data) {
            assert_eq!(request.body().as_bytes(), data);
        }
        if let Ok(continued) = Witness::new(vec![LOG_KEY.clone()]).check(data) {
            assert!(text(&VECTORS["checkpoint"]).starts_with(&continued.text), "a forged checkpoint");
        }
    });
}

pub(crate) fn tile(data: &[u8]) {
    each(data, b"entries/x001/x234/067.p/25", |data| {
        let Ok(path) = std::str::from_utf8(data) else { return };
        if let Some(tile) = TilePath::parse(path) {
            assert_eq!(tile.to_string(), path, "a tile has one path");
        }
    });
}

pub(crate) fn bundle(data: &[u8]) {
    let mut seed = Vec::new();
    (1..4).for_each(|length| push_record(&mut seed, &vec![7; length]));
    each(data, &seed, |data| {
        if let Ok(found) = records(data) {
            let mut again = Vec::new();
            // A record of ours is shorter than a length can say.
            if found.iter().all(|record| record.len() <= ron_log::entry::RECORD_MAX) {
                found.iter().for_each(|record| push_record(&mut again, record));
                assert_eq!(again, data);
            }
        }
    });
}

/// No edit of a proof file proves anything else.
pub(crate) fn proof(data: &[u8]) {
    each(data, text(&VECTORS["proofs"][1]).as_bytes(), |data| {
        let Ok(file) = ProofFile::parse(data) else { return };
        assert_eq!(file.text().as_bytes(), data);
        if file.verify(&ROOTS, &LOG_KEY, &[], 0).is_ok() {
            let known = |entry: &Value| {
                entry["record"].as_str().is_some_and(|it| it.as_bytes() == file.subject.entry.bytes())
            };
            assert!(VECTORS["entries"].as_array().expect("a list").iter().any(known), "a forged change");
        }
    });
}

/// An export reads alike whole or in pieces, and none but the true one is good.
pub(crate) fn export(data: &[u8]) {
    each(data, &EXPORT, |data| {
        let check = |piece: usize| {
            let mut verifier = ExportVerifier::new(ROOTS.b3(), Some(LOG_KEY.clone()), Signatures::Trust);
            data.chunks(piece).for_each(|piece| verifier.push(piece));
            verifier.finish()
        };
        let faults = check(data.len().max(1));
        assert_eq!(faults, check(61));
        assert_eq!(faults.is_empty(), data == EXPORT.as_slice());
        let mut reader = ExportReader::default();
        reader.push(data);
        while let Ok(Some(_)) = reader.next_frame() {}
    });
}

/// Whatever a store holds, the verifier says so and goes on.
pub(crate) fn verifier(data: &[u8]) {
    each(data, text(&VECTORS["entries"][1]["record"]).as_bytes(), |data| {
        let mut verifier = Verifier::new(ROOTS.clone(), Some(LOG_KEY.clone()), Signatures::Trust);
        verifier.checkpoint(text(&VECTORS["checkpoint"]).as_bytes());
        let entries = VECTORS["entries"].as_array().expect("a list");
        for (version, entry) in entries.iter().enumerate() {
            let (record, payload) = (text(&entry["record"]).as_bytes(), text(&entry["payload"]).as_bytes());
            verifier.entry(if version == 1 { data } else { record }, payload);
        }
        let good = data == text(&entries[1]["record"]).as_bytes();
        assert_eq!(verifier.finish().is_empty(), good);
    });
}
