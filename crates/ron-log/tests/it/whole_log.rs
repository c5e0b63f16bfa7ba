//! A whole log is checked, in pieces or at once, and whatever was changed in it is named.

use crate::fixture::{Log, key, log_key, log_note_key, log_of, roots};
use ron_log::checkpoint::cosign;
use ron_log::export::{ExportReader, ExportVerifier, ExportWriter, FrameKind};
use ron_log::snapshot::PruneDigest;
use ron_log::tile::Tile;
use ron_log::tree::leaf_hash;
use ron_log::{B3, Fault, FaultKind, NoteKey, PruneManifest, Signatures, Snapshot, State, Tree, Verifier};
use std::convert::Infallible;
use std::ops::ControlFlow;

/// What a node keeps, as bytes that can be damaged.
#[derive(Clone)]
pub(crate) struct Kept {
    entries: Vec<(Vec<u8>, Vec<u8>)>,
    tiles: Vec<(Tile, Vec<u8>)>,
    checkpoint: Vec<u8>,
}

impl Kept {
    fn of(log: &Log) -> Self {
        let bytes = |(entry, proposal): &(ron_log::Entry, ron_log::Proposal)| {
            (entry.bytes().to_vec(), proposal.bytes().to_vec())
        };
        let tile = |((level, index), bytes): (&(u8, u64), &Vec<u8>)| {
            (Tile { level: *level, index: *index, width: (bytes.len() / 32) as u16 }, bytes.clone())
        };
        Self {
            entries: log.changes.iter().map(bytes).collect(),
            tiles: log.hashes.iter().map(tile).collect(),
            checkpoint: log.checkpoint().sign(&log_key()).to_string().into_bytes(),
        }
    }

    fn run(&self, verifier: &mut Verifier, to: u64, stop: impl Fn(u64) -> bool) {
        let read = |version: u64| Ok::<_, Infallible>(self.entries.get(version as usize).cloned());
        let tile = |tile: Tile| {
            Ok(self
                .tiles
                .iter()
                .find(|(other, _)| (other.level, other.index) == (tile.level, tile.index))
                .map(|(_, bytes)| bytes.clone()))
        };
        let progress =
            |version| if stop(version) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        verifier.run(to, read, tile, progress).expect("reading from memory");
    }

    fn faults(&self, signatures: Signatures) -> Vec<Fault> {
        let mut verifier = Verifier::new(roots(), Some(log_note_key()), signatures);
        verifier.checkpoint(&self.checkpoint);
        self.run(&mut verifier, self.entries.len() as u64 - 1, |_| false);
        verifier.finish()
    }
}

#[test]
fn a_good_log_has_no_fault_at_once_or_in_pieces() {
    let (log, state) = log_of(21);
    let kept = Kept::of(&log);
    assert_eq!(kept.faults(Signatures::Check), []);
    let mut verifier = Verifier::new(roots(), Some(log_note_key()), Signatures::Check);
    kept.run(&mut verifier, 21, |version| version == 9);
    assert_eq!(verifier.next_version(), 10);
    let (halfway, tree): (State, Tree) =
        (verifier.state().expect("a state").clone(), verifier.tree().clone());
    kept.run(&mut verifier, 21, |_| false);
    assert_eq!((verifier.state(), verifier.faults()), (Some(&state), [].as_slice()));
    let mut resumed = Verifier::resume(roots(), Some(log_note_key()), Signatures::Check, halfway, tree);
    resumed.checkpoint(&kept.checkpoint);
    kept.run(&mut resumed, 21, |_| false);
    assert_eq!(resumed.state(), Some(&state));
    assert_eq!(resumed.finish(), []);
}

#[test]
fn faults_are_named_with_their_version() {
    let (log, _) = log_of(12);
    let good = Kept::of(&log);
    let named = |kept: &Kept| -> Vec<u64> {
        let mut versions: Vec<u64> =
            kept.faults(Signatures::Check).iter().map(|fault| fault.version).collect();
        versions.dedup();
        versions
    };
    let mut two = good.clone();
    let at = two.entries[5].1.len() - 3;
    two.entries[5].1[at] ^= 1;
    two.entries[9].1[at] ^= 1;
    assert_eq!(named(&two), [5, 9], "a changed payload is its own version's fault");
    let mut short = good.clone();
    short.entries.truncate(10);
    assert!(short.faults(Signatures::Check).contains(&Fault { version: 12, kind: FaultKind::Truncated }));
    let mut swapped = good.clone();
    swapped.entries.swap(6, 7);
    assert!(named(&swapped).starts_with(&[6]));
    let mut lost = good.clone();
    lost.tiles[0].1.truncate(3 * 32);
    let faults = lost.faults(Signatures::Check);
    assert!(matches!(faults[..], [Fault { version: 3, kind: FaultKind::Tile(_) }]), "{faults:?}");
    assert_eq!(faults[0].to_string(), "version 3: tile/0/000.p/13 differs from the entries");
    let mut changed = good.clone();
    changed.tiles[0].1[7 * 32 + 9] ^= 1;
    assert_eq!(named(&changed), [7], "a changed hash is its own version's fault");
    let mut unsigned = good.clone();
    let last = unsigned.checkpoint.len() - 10;
    unsigned.checkpoint[last] ^= 1;
    assert_eq!(named(&unsigned), [12], "a checkpoint is the fault of the version it ends with");
    let mut other = roots();
    other.signers = crate::fixture::set(2, &[2, 3, 4]);
    let mut verifier = Verifier::new(other, None, Signatures::Check);
    good.run(&mut verifier, 12, |_| false);
    assert_eq!(verifier.faults()[0], Fault { version: 0, kind: FaultKind::Genesis });
}

#[test]
fn an_unapproved_entry_is_found_though_the_chain_is_whole() {
    let (mut log, state) = log_of(5);
    let proposal = crate::fixture::propose(&state, vec![crate::fixture::put("x-note", "n1", "1")]);
    let approvals = crate::fixture::checked(&state, &proposal, &[2, 3]);
    let entry =
        state.commit(&proposal, &approvals, 1_000_000, ron_log::ConflictRule::Touched).expect("a commit");
    let mut record = entry.record().clone();
    record.approvals.truncate(1);
    log.push((ron_log::Entry::new(record.clone()).expect("a record"), proposal.clone()));
    let faults = Kept::of(&log).faults(Signatures::Trust);
    assert_eq!(faults, [Fault { version: 6, kind: FaultKind::Quorum }]);
    let (mut log, _) = log_of(5);
    record.approvals = entry.record().approvals.clone();
    record.approvals[1].sig = record.approvals[0].sig.clone();
    log.push((ron_log::Entry::new(record).expect("a record"), proposal));
    assert_eq!(Kept::of(&log).faults(Signatures::Trust), [], "all but the signatures");
    let faults = Kept::of(&log).faults(Signatures::Check);
    assert!(
        matches!(&faults[..], [Fault { version: 6, kind: FaultKind::Approval(signer, _) }, _] if signer == "s3")
    );
}

#[test]
fn any_changed_byte_of_what_is_kept_is_found() {
    let (log, _) = log_of(4);
    let good = Kept::of(&log);
    let found = |kept: &Kept, what: &str, at: usize| {
        assert_ne!(kept.faults(Signatures::Trust), [], "{what}, byte {at}");
    };
    for version in 0..good.entries.len() {
        for at in 0..good.entries[version].0.len() {
            let mut kept = good.clone();
            kept.entries[version].0[at] ^= 1 << (at % 8);
            found(&kept, &format!("record {version}"), at);
        }
        for at in 0..good.entries[version].1.len() {
            let mut kept = good.clone();
            kept.entries[version].1[at] ^= 1 << (at % 8);
            found(&kept, &format!("payload {version}"), at);
        }
    }
    for at in 0..good.tiles[0].1.len() {
        let mut kept = good.clone();
        kept.tiles[0].1[at] ^= 1 << (at % 8);
        found(&kept, "tile", at);
    }
    for at in 0..good.checkpoint.len() {
        let mut kept = good.clone();
        kept.checkpoint[at] ^= 1 << (at % 8);
        found(&kept, "checkpoint", at);
    }
}

/// An export of the log; one of a pruned log keeps the versions from `min` on.
pub(crate) fn export(log: &Log, min: usize) -> Vec<u8> {
    let (mut writer, mut out) = ExportWriter::begin(&roots(), &log_note_key());
    let (mut state, mut tree) = (State::genesis(&roots()), Tree::default());
    tree.append(leaf_hash(log.changes[0].0.bytes()), |_, _, _| {});
    if min > 0 {
        let mut digest = PruneDigest::default();
        let mut leaves = leaf_hash(log.changes[0].0.bytes()).to_vec();
        digest.push(log.changes[0].0.hash(), log.changes[0].1.b3());
        for (entry, proposal) in &log.changes[1..min] {
            state.apply(entry, proposal.payload()).expect("the next");
            digest.push(entry.hash(), proposal.b3());
            leaves.extend(leaf_hash(entry.bytes()));
            tree.append(leaf_hash(entry.bytes()), |_, _, _| {});
        }
        let covering = log.checkpoint();
        let (log_name, digest) = (roots().log, digest.finish());
        let manifest = PruneManifest {
            log: log_name.clone(),
            min_version: min as u64,
            size: covering.size,
            root: covering.root,
            digest,
            pruned_at: 5,
        };
        let bytes = state.canonical();
        let ron_log::Head { version, hash } = state.head();
        let snapshot = Snapshot { log: log_name, version, hash, state_b3: B3::of(bytes.as_bytes()) };
        out.extend(writer.frame(FrameKind::PruneManifest, manifest.sign(&log_key()).to_string().as_bytes()));
        // Every fourth change is one of the signer set.
        for (entry, proposal) in log.changes[..min].iter().skip(4).step_by(4) {
            out.extend(writer.frame(FrameKind::Record, entry.bytes()));
            out.extend(writer.frame(FrameKind::Payload, proposal.bytes()));
        }
        for (kind, content) in [
            (FrameKind::PrunedLeaves, leaves),
            (FrameKind::SnapshotNote, snapshot.sign(&log_key()).to_string().into_bytes()),
            (FrameKind::SnapshotState, bytes.into_bytes()),
        ] {
            out.extend(writer.frame(kind, &content));
        }
    }
    for (version, (entry, proposal)) in log.changes.iter().enumerate().skip(min) {
        out.extend(writer.frame(FrameKind::Record, entry.bytes()));
        out.extend(writer.frame(FrameKind::Payload, proposal.bytes()));
        if version > 0 {
            tree.append(leaf_hash(entry.bytes()), |_, _, _| {});
        }
        if version % 3 == 2 || version + 1 == log.changes.len() {
            let checkpoint =
                ron_log::Checkpoint { origin: roots().log, size: tree.size(), root: tree.root() };
            out.extend(
                writer.frame(FrameKind::Checkpoint, checkpoint.sign(&log_key()).to_string().as_bytes()),
            );
        }
    }
    out.extend(writer.end());
    out
}

fn faults_of(bytes: &[u8], piece: usize) -> Vec<Fault> {
    let mut verifier = ExportVerifier::new(roots().b3(), Some(log_note_key()), Signatures::Trust);
    bytes.chunks(piece).for_each(|piece| verifier.push(piece));
    verifier.finish()
}

#[test]
fn cosignatures_are_asked_for_and_a_wrong_one_is_a_fault() {
    let (log, _) = log_of(5);
    let mut kept = Kept::of(&log);
    let witness = |seed: u8| NoteKey::cosignature("w.example", key(seed).verifying_key());
    let faults = |kept: &Kept, witnesses: Vec<NoteKey>, quorum: u64| {
        let verifier = Verifier::new(roots(), Some(log_note_key()), Signatures::Check);
        let mut verifier = verifier.witnessed_by(witnesses, quorum);
        verifier.checkpoint(&kept.checkpoint);
        kept.run(&mut verifier, 5, |_| false);
        (verifier.witnessed(), verifier.finish())
    };
    let unwitnessed = vec![Fault { version: 5, kind: FaultKind::Unwitnessed }];
    assert_eq!(faults(&kept, vec![witness(60)], 1), (0, unwitnessed.clone()));
    let mut note = log.checkpoint().sign(&log_key());
    note.signatures.push(cosign(&note.text, "w.example", &key(60), 1));
    note.signatures.push(cosign(&note.text, "w.example", &key(60), 2));
    kept.checkpoint = note.to_string().into_bytes();
    assert_eq!(faults(&kept, vec![witness(60), witness(61)], 1), (6, vec![]));
    assert_eq!(faults(&kept, vec![witness(60), witness(61)], 2), (0, unwitnessed), "one witness counts once");
    note.signatures[2].bytes[20] ^= 1;
    kept.checkpoint = note.to_string().into_bytes();
    let (_, found) = faults(&kept, vec![witness(60)], 0);
    assert!(matches!(found[..], [Fault { kind: FaultKind::Note(_), .. }]), "{found:?}");
}

#[test]
fn an_export_is_whole_or_its_faults_are_named() {
    let (log, state) = log_of(10);
    for min in [0, 1, 6] {
        let bytes = export(&log, min);
        assert_eq!(faults_of(&bytes, 7), faults_of(&bytes, bytes.len()));
        let mut verifier = ExportVerifier::new(roots().b3(), None, Signatures::Check);
        verifier.push(&bytes);
        assert_eq!(verifier.verifier().and_then(Verifier::state), Some(&state));
        assert_eq!(verifier.finish(), [], "from version {min}");
        assert!(!faults_of(&bytes[..bytes.len() - 1], 4096).is_empty(), "cut short");
        assert!(!faults_of(&[&bytes[..], b"\0"].concat(), 4096).is_empty(), "followed by more");
    }
    let mut verifier = ExportVerifier::new(B3::ZERO, None, Signatures::Check);
    verifier.push(&export(&log, 0));
    assert!(!verifier.finish().is_empty(), "other roots");
}

/// An export made anew of those frames of another that are kept.
fn only(bytes: &[u8], mut keep: impl FnMut(FrameKind) -> bool) -> Vec<u8> {
    let (mut writer, mut out) = ExportWriter::begin(&roots(), &log_note_key());
    let mut reader = ExportReader::default();
    reader.push(bytes);
    while let Some((kind, content)) = reader.next_frame().expect("a good export") {
        if !matches!(kind, FrameKind::Roots | FrameKind::LogKey | FrameKind::End) && keep(kind) {
            out.extend(writer.frame(kind, content));
        }
    }
    out.extend(writer.end());
    out
}

#[test]
fn entries_that_the_log_did_not_sign_are_a_fault_of_an_export() {
    let (log, _) = log_of(10);
    let good = export(&log, 0);
    assert_eq!(only(&good, |_| true), good);
    let unsigned = |version| [Fault { version, kind: FaultKind::Unsigned }];
    assert_eq!(faults_of(&only(&good, |kind| kind != FrameKind::Checkpoint), 4096), unsigned(0));
    // The checkpoints have sizes 3, 6, 9 and 11.
    let mut seen = 0;
    let short = only(&good, |kind| {
        seen += u32::from(kind == FrameKind::Checkpoint);
        kind != FrameKind::Checkpoint || seen < 4
    });
    assert_eq!(faults_of(&short, 4096), unsigned(9));
}

#[test]
fn a_pruned_change_of_the_signers_must_be_the_one_of_the_tree() {
    let (log, _) = log_of(10);
    let good = export(&log, 6);
    let (entry, proposal) = (&log.changes[4].0, &log.changes[4].1);
    let swapped = |record: &[u8], payload: &[u8]| {
        let (mut writer, mut out) = ExportWriter::begin(&roots(), &log_note_key());
        let (mut reader, mut seen) = (ExportReader::default(), 0);
        reader.push(&good);
        while let Some((kind, content)) = reader.next_frame().expect("a good export") {
            seen += u32::from(kind == FrameKind::Record);
            match kind {
                FrameKind::Roots | FrameKind::LogKey | FrameKind::End => {}
                FrameKind::Record if seen == 1 => out.extend(writer.frame(kind, record)),
                FrameKind::Payload if seen == 1 => out.extend(writer.frame(kind, payload)),
                _ => out.extend(writer.frame(kind, content)),
            }
        }
        out.extend(writer.end());
        faults_of(&out, 4096)
    };
    assert_eq!(swapped(entry.bytes(), proposal.bytes()), []);
    let fault = |version, kind| [Fault { version, kind }];
    assert_eq!(swapped(entry.bytes(), log.changes[5].1.bytes()), fault(4, FaultKind::PayloadHash));
    let text = String::from_utf8(entry.bytes().to_vec()).expect("text");
    let later = text.replace(r#""committed_at":"#, r#""committed_at":1"#);
    assert_eq!(swapped(later.as_bytes(), proposal.bytes()), fault(4, FaultKind::Leaf));
    let (kept, proposal) = (&log.changes[8].0, &log.changes[8].1);
    assert_eq!(
        swapped(kept.bytes(), proposal.bytes()),
        fault(8, FaultKind::Leaf),
        "it is not below the first kept"
    );
}

#[test]
fn any_changed_byte_of_an_export_is_found() {
    let (log, _) = log_of(4);
    for min in [0, 3] {
        let good = export(&log, min);
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << (at % 8);
            assert_ne!(faults_of(&bytes, bytes.len()), [], "byte {at} of {}", good.len());
        }
    }
}
