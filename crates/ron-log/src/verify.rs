//! Checking a whole log: every entry from the genesis on, the tree, the checkpoints and the snapshot.
//!
//! A [`Verifier`] is fed in order and keeps nothing but the state and the edge of the tree, so that it can
//! stop after any entry and go on later. It does not stop at a fault: it names each with its version.

mod fault;

pub use fault::{Fault, FaultKind};

use crate::approval::{Approval, ApprovalError, CheckedApproval, Unchecked, signed_by_all};
use crate::checkpoint::{Checkpoint, cosignatures};
use crate::entry::{EntryRecord, entry_hash};
use crate::hash::B3;
use crate::note::{Note, NoteError, NoteKey};
use crate::payload::Payload;
use crate::quorum::Judgement;
use crate::roots::TrustRoots;
use crate::snapshot::{PruneManifest, Snapshot};
use crate::state::{Head, State, is_late};
use crate::tile::{TILE_WIDTH, Tile, decimal};
use crate::tree::{Hash, Tree, leaf_hash};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

/// Whether approvals' signatures are checked, or everything but them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signatures {
    Check,
    Trust,
}

/// A check under way.
#[derive(Debug)]
pub struct Verifier {
    roots: TrustRoots,
    /// Without it, checkpoints and snapshots are not believed.
    log: Option<NoteKey>,
    /// Whose cosignatures are checked, and how many a checkpoint needs to count as witnessed.
    witnesses: (Vec<NoteKey>, u64),
    /// The size of the last checkpoint that is witnessed.
    witnessed: u64,
    signatures: Signatures,
    /// None before the first entry.
    state: Option<State>,
    tree: Tree,
    /// The hashes of the tiles at the tree's edge, by level.
    edge: BTreeMap<u8, Vec<u8>>,
    /// Roots that checkpoints give for sizes not reached yet.
    awaited: BTreeMap<u64, Hash>,
    /// Size of the largest tree whose root the log signed.
    signed: u64,
    /// The first version whose entry was there.
    first: u64,
    /// The leaves of entries below the first one kept that were shown all the same.
    early: BTreeMap<u64, Hash>,
    /// The entry before was faulty, so that what follows from it is no fault of the next.
    suspect: bool,
    faults: Vec<Fault>,
}

impl Verifier {
    pub fn new(roots: TrustRoots, log: Option<NoteKey>, signatures: Signatures) -> Self {
        Self {
            roots,
            log,
            witnesses: (Vec::new(), 0),
            witnessed: 0,
            signatures,
            state: None,
            tree: Tree::default(),
            edge: BTreeMap::new(),
            awaited: BTreeMap::new(),
            signed: 0,
            first: 0,
            early: BTreeMap::new(),
            suspect: false,
            faults: Vec::new(),
        }
    }

    /// Goes on after what an earlier check found good: the state after its last entry, and the tree of as many
    /// leaves. Tiles that the tree's edge had begun are not compared.
    pub fn resume(
        roots: TrustRoots,
        log: Option<NoteKey>,
        signatures: Signatures,
        state: State,
        tree: Tree,
    ) -> Self {
        let mut verifier = Self::new(roots, log, signatures);
        verifier.state = Some(state);
        verifier.tree = tree;
        verifier
    }

    /// Also checks cosignatures: a wrong one by any of these witnesses is a fault, and so it is if no checkpoint
    /// has those of at least `quorum` of them.
    #[must_use]
    pub fn witnessed_by(mut self, witnesses: Vec<NoteKey>, quorum: u64) -> Self {
        self.witnesses = (witnesses, quorum);
        self
    }

    /// The size of the last checkpoint that enough of the witnesses cosigned; 0 if there was none.
    pub fn witnessed(&self) -> u64 {
        self.witnessed
    }

    /// The version that must come next.
    pub fn next_version(&self) -> u64 {
        self.state.as_ref().map_or(0, |state| state.head().version + 1)
    }

    pub fn state(&self) -> Option<&State> {
        self.state.as_ref()
    }

    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// What it came to, for whoever goes on from there.
    pub(crate) fn into_parts(self) -> Option<(State, Tree)> {
        Some((self.state?, self.tree))
    }

    /// How many entries from the first on the log's key has signed for; those after have their approvals alone.
    pub fn signed(&self) -> u64 {
        self.signed
    }

    /// What was found so far.
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }

    /// Notes what is wrong; whoever reads the log may find more than can be seen here.
    pub fn fault(&mut self, version: u64, kind: FaultKind) {
        self.faults.push(Fault { version, kind });
        self.suspect = true;
    }

    /// An entry from below the first one kept, before the pruned leaves, which must have it. A change of the signer
    /// set is shown so; who approved it is for a proof to say, which has the sets before it.
    pub fn early_entry(&mut self, record: &[u8], payload: &[u8]) {
        match EntryRecord::parse(record) {
            Ok(parsed) if parsed.payload_b3 != B3::of(payload) => {
                self.fault(parsed.version, FaultKind::PayloadHash);
            }
            Ok(parsed) => drop(self.early.insert(parsed.version, leaf_hash(record))),
            Err(bad) => self.fault(0, FaultKind::Record(bad)),
        }
    }

    /// The hash of a pruned record, in order, before anything else; they count once a checkpoint covers them.
    pub fn pruned_leaf(&mut self, leaf: Hash) {
        let version = self.tree.size();
        if self.early.remove(&version).is_some_and(|shown| shown != leaf) {
            self.fault(version, FaultKind::Leaf);
        }
        self.leaf(leaf);
    }

    /// Begins a pruned log with the snapshot it was pruned under, whose version is that of the last leaf.
    pub fn begin(&mut self, note: &[u8], state: &[u8]) {
        let version = self.tree.size().saturating_sub(1);
        match self.snapshot_of(note, state) {
            Ok((snapshot, state)) if snapshot.version + 1 == self.tree.size() && self.state.is_none() => {
                self.state = Some(state);
                self.first = self.tree.size();
            }
            Ok((snapshot, _)) => self.fault(snapshot.version, FaultKind::SnapshotVersion),
            Err(kind) => self.fault(version, kind),
        }
    }

    /// The first version whose entry was there to be checked; of a pruned log's earlier ones there are hashes alone.
    pub fn first_version(&self) -> u64 {
        self.first
    }

    /// Compares a snapshot of the present version with what the entries add up to.
    pub fn snapshot(&mut self, note: &[u8], state: &[u8]) {
        match self.snapshot_of(note, state) {
            Ok((_, given)) if Some(&given) == self.state.as_ref() => {}
            Ok((snapshot, _)) => self.fault(snapshot.version, FaultKind::SnapshotState),
            Err(kind) => self.fault(self.next_version().saturating_sub(1), kind),
        }
    }

    fn snapshot_of(&self, note: &[u8], state: &[u8]) -> Result<(Snapshot, State), FaultKind> {
        let snapshot = Snapshot::verify(&Note::parse(note)?, self.log_key()?)?;
        let given = State::parse(state).map_err(FaultKind::State)?;
        let head = Head { version: snapshot.version, hash: snapshot.hash };
        if B3::of(state) == snapshot.state_b3 && given.head() == head {
            Ok((snapshot, given))
        } else {
            Err(FaultKind::SnapshotState)
        }
    }

    fn log_key(&self) -> Result<&NoteKey, FaultKind> {
        let known = self.log.as_ref().filter(|key| key.name == self.roots.log);
        known.ok_or(FaultKind::Note(NoteError::Unsigned(self.roots.log.clone())))
    }

    /// A checkpoint, before or when the tree has its size.
    pub fn checkpoint(&mut self, note: &[u8]) {
        let (witnesses, quorum) = &self.witnesses;
        let checked = self.log_key().and_then(|log| {
            let note = Note::parse(note)?;
            let checkpoint = Checkpoint::verify(&note, log)?;
            Ok((checkpoint, cosignatures(&note, witnesses).map(|found| found >= *quorum)))
        });
        match checked {
            Ok((checkpoint, witnessed)) => {
                match witnessed {
                    Ok(true) => self.witnessed = self.witnessed.max(checkpoint.size),
                    Ok(false) => {}
                    Err(bad) => self.fault(checkpoint.size.saturating_sub(1), bad.into()),
                }
                self.expect_root(checkpoint.size, checkpoint.root);
            }
            Err(kind) => {
                // What is said to be signed is the best guess at which version it was about.
                let stated =
                    std::str::from_utf8(note).ok().and_then(|text| text.lines().nth(1)).and_then(decimal);
                let size = stated.unwrap_or_else(|| self.next_version());
                self.fault(size.saturating_sub(1), kind);
            }
        }
    }

    /// A prune manifest, before the pruned leaves; gives the first version that is kept.
    pub fn prune_manifest(&mut self, note: &[u8]) -> Option<u64> {
        match self.log_key().and_then(|log| Ok(PruneManifest::verify(&Note::parse(note)?, log)?)) {
            Ok(manifest) => {
                self.expect_root(manifest.size, manifest.root);
                Some(manifest.min_version)
            }
            Err(kind) => {
                self.fault(0, kind);
                None
            }
        }
    }

    fn expect_root(&mut self, size: u64, root: Hash) {
        let version = size.saturating_sub(1);
        if size == self.tree.size() {
            self.compare_root(root);
        } else if size < self.tree.size() {
            self.fault(version, FaultKind::LateCheckpoint);
        } else if self.awaited.insert(size, root).is_some_and(|other| other != root) {
            self.fault(version, FaultKind::Fork);
        }
    }

    fn compare_root(&mut self, signed: Hash) {
        if signed == self.tree.root() {
            self.signed = self.tree.size();
        } else {
            self.fault(self.tree.size().saturating_sub(1), FaultKind::Root);
        }
    }

    /// The next entry: its record's bytes and its payload's.
    pub fn entry(&mut self, record: &[u8], payload: &[u8]) {
        let hash = entry_hash(record);
        let suspected = std::mem::take(&mut self.suspect);
        match self.state.take() {
            None => {
                let (entry, proposal) = self.roots.genesis();
                if (entry.bytes(), proposal.bytes()) != (record, payload) {
                    self.fault(0, FaultKind::Genesis);
                }
                self.state = Some(State::genesis(&self.roots));
            }
            Some(mut state) => {
                let (before, version) = (state.head(), state.head().version + 1);
                let parsed = Payload::parse_canonical(payload);
                let mut base_version = None;
                match (EntryRecord::parse(record), &parsed) {
                    (Ok(record), Ok(read)) => {
                        self.next_entry(&state, record, payload, read, suspected);
                        base_version = Some(read.base_version);
                    }
                    (Err(bad), _) => self.fault(version, FaultKind::Record(bad)),
                    (_, Err(bad)) => self.fault(version, FaultKind::Payload(bad.clone())),
                }
                let touched = state.advance(Head { version, hash }, parsed.ok());
                if base_version.is_some_and(|base| is_late(base, before, touched)) {
                    self.fault(version, FaultKind::Conflict);
                }
                self.state = Some(state);
            }
        }
        self.leaf(leaf_hash(record));
    }

    fn next_entry(
        &mut self,
        state: &State,
        record: EntryRecord,
        bytes: &[u8],
        payload: &Payload,
        suspected: bool,
    ) {
        let version = state.head().version + 1;
        let payload_b3 = B3::of(bytes);
        let faults = [
            (record.version != version, FaultKind::Version(record.version)),
            (record.prev != state.head().hash && !suspected, FaultKind::Chain),
            (
                record.payload_b3 != payload_b3 || record.payload_bytes != bytes.len() as u64,
                FaultKind::PayloadHash,
            ),
            (record.signers_version != payload.signers_version, FaultKind::Policy),
            (payload.signers_version != state.signers_version(), FaultKind::Policy),
            (record.committed_at > payload.expires_at, FaultKind::Expired),
        ];
        for (is_so, kind) in faults {
            if is_so {
                self.fault(version, kind);
            }
        }
        self.approvals(state, record, payload);
    }

    /// Every recorded approval must be good and count, and together they must be enough.
    fn approvals(&mut self, state: &State, record: EntryRecord, payload: &Payload) {
        let version = state.head().version + 1;
        let Ok(proposed) = State::proposed_signers(payload) else { return };
        let (set, b3) = (state.signers(), record.payload_b3);
        let by: Vec<Result<_, ApprovalError>> = match self.signatures {
            Signatures::Check => {
                let of = |approval| Unchecked { approval, payload_b3: b3, proposed: proposed.as_ref() };
                signed_by_all(&record.approvals.iter().map(of).collect::<Vec<_>>(), set)
            }
            // Taken for good, by whoever it names.
            Signatures::Trust => {
                let named = |approval: &Approval| approval.named(set, proposed.as_ref()).next().cloned();
                let by = record.approvals.iter().map(named);
                by.map(|by| by.ok_or(ApprovalError::RevokedKey)).collect()
            }
        };
        let mut checked: Vec<CheckedApproval> = Vec::with_capacity(by.len());
        for (approval, by) in record.approvals.into_iter().zip(by) {
            match by {
                Ok(by) => checked.push(CheckedApproval { approval, payload_b3: b3, by }),
                Err(why) => self.fault(version, FaultKind::Approval(approval.signer, why)),
            }
        }
        let judged = Judgement::of(b3, &checked, set, proposed.as_ref(), record.committed_at)
            .expect("a record's approvals are by different signers");
        for (index, why) in &judged.set_aside {
            self.fault(version, FaultKind::Approval(checked[*index].approval().signer.clone(), *why));
        }
        if !judged.met() {
            self.fault(version, FaultKind::Quorum);
        }
    }

    /// An entry that is not there.
    pub fn missing(&mut self) {
        let version = self.next_version();
        self.fault(version, FaultKind::Missing);
        let mut state = self.state.take().unwrap_or_else(|| State::genesis(&self.roots));
        state.advance(Head { version, hash: B3::ZERO }, None);
        self.state = Some(state);
        self.leaf([0; 32]);
    }

    fn leaf(&mut self, leaf: Hash) {
        let edge = &mut self.edge;
        self.tree.append(leaf, |level, place, hash| {
            let tile = edge.entry(level).or_default();
            // What was pruned fills tiles that nobody compares and clears.
            if place % TILE_WIDTH == 0 {
                tile.clear();
            }
            // One that was begun before a resumption cannot be rebuilt.
            if tile.len() as u64 == place % TILE_WIDTH * 32 {
                tile.extend_from_slice(hash);
            }
        });
        if let Some(root) = self.awaited.remove(&self.tree.size()) {
            self.compare_root(root);
        }
    }

    /// The tiles that became full with the last entry or, at the end, every partial one; each is compared once.
    fn compare_tiles<E>(
        &mut self,
        partial: bool,
        read: &mut impl FnMut(Tile) -> Result<Option<Vec<u8>>, E>,
    ) -> Result<(), E> {
        let size = self.tree.size();
        let mut faults = Vec::new();
        for (level, hashes) in &mut self.edge {
            let held = size >> (8 * u32::from(*level));
            let (place, width) = ((held.max(1) - 1) / TILE_WIDTH, (held.max(1) - 1) % TILE_WIDTH + 1);
            let full = width == TILE_WIDTH;
            if hashes.len() as u64 != width * 32 || !(full || partial) {
                continue;
            }
            let tile = Tile { level: *level, index: place, width: width as u16 };
            let stored = read(tile)?.unwrap_or_default();
            if !stored.starts_with(hashes) || (stored.len() != hashes.len() && full) {
                let pairs = hashes.chunks(32).zip(stored.chunks(32));
                let same = pairs.take_while(|(made, kept)| made == kept).count() as u64;
                let first = (tile.start() + same.min(width - 1)) << (8 * u32::from(*level));
                faults.push((first, FaultKind::Tile(tile)));
            }
            if full {
                hashes.clear();
            }
        }
        for (version, kind) in faults {
            self.faults.push(Fault { version, kind });
        }
        Ok(())
    }

    /// Reads and checks entries up to a version, their tiles included. `progress` is told each version and may
    /// stop; calling again goes on from there. Errors of reading are the caller's own.
    pub fn run<E>(
        &mut self,
        to: u64,
        mut read: impl FnMut(u64) -> Result<Option<(Vec<u8>, Vec<u8>)>, E>,
        mut tile: impl FnMut(Tile) -> Result<Option<Vec<u8>>, E>,
        mut progress: impl FnMut(u64) -> ControlFlow<()>,
    ) -> Result<(), E> {
        while self.next_version() <= to {
            let version = self.next_version();
            match read(version)? {
                Some((record, payload)) => self.entry(&record, &payload),
                None => self.missing(),
            }
            self.compare_tiles(false, &mut tile)?;
            if progress(version).is_break() {
                return Ok(());
            }
        }
        self.compare_tiles(true, &mut tile)
    }

    /// Ends the check: what checkpoints promised must have come. Gives every fault.
    pub fn finish(mut self) -> Vec<Fault> {
        for version in std::mem::take(&mut self.early).into_keys() {
            self.fault(version, FaultKind::Leaf);
        }
        for size in std::mem::take(&mut self.awaited).into_keys() {
            self.fault(size - 1, FaultKind::Truncated);
        }
        if self.witnesses.1 > 0 && self.witnessed == 0 {
            self.fault(self.tree.size().saturating_sub(1), FaultKind::Unwitnessed);
        }
        self.faults
    }
}
