//! What the log and its witnesses sign.

use crate::fixture::{key, log_key, log_note_key, log_of, roots};
use ron_log::checkpoint::{AddCheckpoint, cosign, cosignature, cosignatures};
use ron_log::note::{NoteError, signature_lines};
use ron_log::snapshot::PruneDigest;
use ron_log::tree::consistency;
use ron_log::{B3, Checkpoint, Note, NoteKey, PruneManifest, Snapshot, State};

#[test]
fn a_note_signed_by_another_implementation_verifies() {
    // From the documentation of Go's golang.org/x/mod/sumdb/note.
    let key = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW";
    let text = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n\n\u{2014} PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n";
    let key = NoteKey::parse(key).expect("a key");
    let note = Note::parse(text.as_bytes()).expect("a note");
    assert_eq!(note.verify(&key), Ok(None));
    assert_eq!(note.to_string(), text);
    assert_eq!(NoteKey::parse(&key.to_string()), Some(key.clone()));
    let other = Note { text: note.text.replace("problem", "question"), ..note };
    assert_eq!(other.verify(&key), Err(NoteError::WrongSignature("PeterNeumann".into())));
}

#[test]
fn a_checkpoint_is_believed_from_the_logs_key_alone() {
    let (log, _) = log_of(9);
    let note = log.checkpoint().sign(&log_key());
    let read = Note::parse(note.to_string().as_bytes()).expect("a note");
    assert_eq!(read, note);
    assert_eq!(Checkpoint::verify(&read, &log_note_key()), Ok(log.checkpoint()));
    let stranger = NoteKey::ed25519(&roots().log, key(9).verifying_key());
    assert_eq!(Checkpoint::verify(&read, &stranger), Err(NoteError::Unsigned(roots().log)));
    let text = log.checkpoint().text();
    for bad in [
        format!("{text}more\n"),
        text.replace("\n10\n", "\n010\n"),
        text.replace("\n10\n", "\n-1\n"),
        text.replace("=\n", "\n"),
        text.trim_end().to_owned(),
        format!("\n{text}"),
    ] {
        assert_eq!(Checkpoint::parse(&bad), None, "{bad}");
    }
    let mut twice = read.clone();
    twice.signatures.push(twice.signatures[0].clone());
    twice.signatures[1].bytes[5] ^= 1;
    assert!(Checkpoint::verify(&twice, &log_note_key()).is_err(), "a known key's wrong signature spoils it");
}

#[test]
fn witnesses_cosign_what_continues_what_they_saw() {
    let (log, _) = log_of(12);
    let size = log.tree.size();
    let proof = consistency(5, size, |tile| log.tile(tile)).expect("a proof");
    let request = AddCheckpoint { old_size: 5, proof, checkpoint: log.checkpoint().sign(&log_key()) };
    assert_eq!(AddCheckpoint::parse(request.body().as_bytes()), Some(request.clone()));
    for bad in ["", "old 5", "old 05\n\n", "old 5\nshort\n\n", "new 5\n\n"] {
        assert_eq!(
            AddCheckpoint::parse(request.body().replacen("old 5\n", bad, 1).as_bytes()),
            None,
            "{bad}"
        );
    }
    let mut note = request.checkpoint;
    let witness = |seed: u8| NoteKey::cosignature("witness.example/w", key(seed).verifying_key());
    let line = cosign(&note.text, "witness.example/w", &key(50), 1_700_000_000);
    note.signatures.extend(signature_lines(&line.to_string()).expect("a line"));
    assert_eq!(note.verify(&witness(50)), Ok(Some(1_700_000_000)));
    assert_eq!(cosignatures(&note, &[witness(50), witness(51)]), Ok(1));
    assert_eq!(NoteKey::parse(&witness(50).to_string()), Some(witness(50)));
    // The time is signed too.
    note.signatures[1].bytes[7] ^= 1;
    assert!(cosignatures(&note, &[witness(50)]).is_err());
}

#[test]
fn a_snapshot_restores_the_state_it_names() {
    let (_, state) = log_of(11);
    let bytes = state.canonical();
    let snapshot = Snapshot {
        log: roots().log,
        version: state.head().version,
        hash: state.head().hash,
        state_b3: B3::of(bytes.as_bytes()),
    };
    let note = Note::parse(snapshot.sign(&log_key()).to_string().as_bytes()).expect("a note");
    assert_eq!(Snapshot::verify(&note, &log_note_key()), Ok(snapshot));
    assert_eq!(State::parse(bytes.as_bytes()).expect("a state"), state);
    assert_eq!(Checkpoint::parse(&note.text), None, "nor can it pass for a checkpoint");
    let stale = bytes.replace("\"signers_version\":8", "\"signers_version\":4");
    assert!(stale != bytes && State::parse(stale.as_bytes()).is_err());
}

#[test]
fn a_prune_manifest_says_what_went_and_what_covers_it() {
    let (log, _) = log_of(6);
    let mut digest = PruneDigest::default();
    log.changes[..4].iter().for_each(|(entry, proposal)| digest.push(entry.hash(), proposal.b3()));
    let Checkpoint { origin, size, root } = log.checkpoint();
    let manifest =
        PruneManifest { log: origin, min_version: 4, size, root, digest: digest.finish(), pruned_at: 9 };
    let note = Note::parse(manifest.sign(&log_key()).to_string().as_bytes()).expect("a note");
    assert_eq!(PruneManifest::verify(&note, &log_note_key()), Ok(manifest.clone()));
    assert!(Snapshot::verify(&note, &log_note_key()).is_err());
    let beyond = PruneManifest { min_version: 7, ..manifest };
    assert!(PruneManifest::verify(&beyond.sign(&log_key()), &log_note_key()).is_err(), "not covered");
}

#[test]
fn of_a_witness_s_answer_only_its_own_good_line_is_taken() {
    let (log, _) = log_of(3);
    let note = log.checkpoint().sign(&log_key());
    let witness = NoteKey::cosignature("witness.example/w", key(50).verifying_key());
    let good = cosign(&note.text, "witness.example/w", &key(50), 1_700_000_000);
    let stranger = cosign(&note.text, "witness.example/x", &key(51), 1_700_000_000);
    let impostor = cosign(&note.text, "witness.example/w", &key(51), 1_700_000_000);
    let other = cosign(&log.checkpoint().text().replace("\n4\n", "\n5\n"), "witness.example/w", &key(50), 1);
    let mut spoiled = note.signatures[0].clone();
    spoiled.bytes[0] ^= 1;
    let lines = [stranger, impostor, other, spoiled];
    assert_eq!(cosignature(&note.text, &lines, &witness), None);
    let lines = [&lines[..], std::slice::from_ref(&good)].concat();
    assert_eq!(cosignature(&note.text, &lines, &witness), Some(good));
}
