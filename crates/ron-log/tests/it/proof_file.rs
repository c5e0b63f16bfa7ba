//! One file proves a change, offline, after any number of signer sets.

use crate::fixture::{Log, key, log_key, log_note_key, log_of, roots};
use ron_log::checkpoint::cosign;
use ron_log::proof::ProofFileError;
use ron_log::{NoteKey, ProofFile, TrustRoots};

pub(crate) fn proof(log: &Log, version: u64) -> ProofFile {
    let changes_signers =
        |version: &u64| log.changes[*version as usize].1.payload().ops.iter().any(|op| op.key.is_signers());
    let mut checkpoint = log.checkpoint().sign(&log_key());
    checkpoint.signatures.push(cosign(&checkpoint.text, "w.example/1", &key(60), 1_700_000_000));
    ProofFile {
        subject: log.inclusion(version),
        rotations: (1..version).filter(changes_signers).map(|version| log.inclusion(version)).collect(),
        checkpoint,
    }
}

pub(crate) fn witness() -> NoteKey {
    NoteKey::cosignature("w.example/1", key(60).verifying_key())
}

#[test]
fn each_change_is_proved_by_its_file() {
    let (log, _) = log_of(14);
    for version in 0..=14 {
        let file = proof(&log, version);
        let read = ProofFile::parse(file.text().as_bytes()).expect("a file");
        assert_eq!(read, file);
        assert_eq!(read.verify(&roots(), &log_note_key(), &[witness()], 1), Ok(log.checkpoint()));
    }
    let file = proof(&log, 10);
    let missing = NoteKey::cosignature("w.example/2", key(61).verifying_key());
    let unwitnessed = file.verify(&roots(), &log_note_key(), &[witness(), missing], 2);
    assert_eq!(unwitnessed, Err(ProofFileError::Unwitnessed));
    let skipped = ProofFile { rotations: file.rotations[1..].to_vec(), ..file.clone() };
    assert_eq!(skipped.verify(&roots(), &log_note_key(), &[], 0), Err(ProofFileError::NotApproved(8)));
    let other = TrustRoots { signers: crate::fixture::set(2, &[4, 5, 6]), ..roots() };
    assert_eq!(file.verify(&other, &log_note_key(), &[], 0), Err(ProofFileError::NotApproved(4)));
}

#[test]
fn any_changed_byte_of_a_proof_file_is_found() {
    let (log, _) = log_of(9);
    let text = proof(&log, 9).text().into_bytes();
    for at in 0..text.len() {
        let mut bytes = text.clone();
        bytes[at] ^= 1 << (at % 8);
        let found = ProofFile::parse(&bytes)
            .and_then(|file| file.verify(&roots(), &log_note_key(), &[witness()], 1))
            .is_err();
        assert!(found, "byte {at}: {:?}", String::from_utf8_lossy(&bytes[at.saturating_sub(20)..]));
    }
}
