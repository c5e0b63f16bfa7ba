//! From what is kept to what the Committer works with: the state, the tree and its edge. Checks HEAD and the tail.

use super::{Reader, Store, StoreError};
use ron_log::state::Before;
use ron_log::tile::Tile;
use ron_log::tree::leaf_hash;
use ron_log::{Checkpoint, Entry, Head, Note, NoteKey, Proposal, Snapshot, State, Tree, TrustRoots};

/// Entries read at a time.
const PIECE: usize = 256;
const PIECE_BYTES: usize = 4 << 20;

/// What the log adds up to.
#[derive(Debug)]
pub struct Restored {
    pub state: State,
    pub tree: Tree,
    /// The last entry, and what its items were before it.
    pub last: (Entry, Before),
}

/// What is kept does not add up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    #[error("version {version}: {what}")]
    Damaged { version: u64, what: String },
    #[error("only versions from {min_version} on are kept")]
    Pruned { min_version: u64 },
    #[error("{0}")]
    Store(#[from] StoreError),
}

pub(crate) fn damaged(version: u64, what: impl ToString) -> RestoreError {
    RestoreError::Damaged { version, what: what.to_string() }
}

impl Store {
    /// Reads the newest good snapshot and every entry after it.
    pub fn restore(&self, roots: &TrustRoots, log: &NoteKey) -> Result<Restored, RestoreError> {
        let reader = self.reader()?;
        let head = reader.head()?;
        // The last entry is always applied here, so that it is known what it replaced.
        let mut replay = Replay::before(&reader, head.version, roots, log)?;
        replay.run(&reader, head.version)?;
        if replay.state.head() != head {
            return Err(damaged(head.version, "HEAD names another entry"));
        }
        check_tree(&reader, &replay.tree, log)?;
        let Replay { state, tree, last } = replay;
        Ok(Restored { state, tree, last })
    }

    /// What can be read of a log with a damaged version: all of it where a signed state from after the damage leads to
    /// HEAD, else what there was before.
    pub fn restore_despite(
        &self,
        damaged_version: u64,
        roots: &TrustRoots,
        log: &NoteKey,
    ) -> Result<(State, Tree, Entry), RestoreError> {
        let reader = self.reader()?;
        let after = after_damage(&reader, damaged_version, roots, log);
        if let Ok(Some(whole)) = after {
            return Ok(whole);
        }
        let last = damaged_version.saturating_sub(1);
        let mut replay = Replay::before(&reader, last, roots, log)?;
        replay.run(&reader, last)?;
        Ok((replay.state, replay.tree, replay.last.0))
    }

    /// The state after a version that is kept.
    pub fn state_at(&self, version: u64, roots: &TrustRoots, log: &NoteKey) -> Result<State, RestoreError> {
        let reader = self.reader()?;
        // Asked of the same view that is read from: a pruning may go on meanwhile.
        let min_version = reader.min_version()?;
        if version.saturating_add(1) < min_version {
            return Err(RestoreError::Pruned { min_version });
        }
        let mut replay = Replay::before(&reader, version.saturating_add(1), roots, log)?;
        replay.run(&reader, version)?;
        Ok(replay.state)
    }
}

/// The log up to HEAD by a signed state that is newer than a damaged version, if there is one and all of it fits.
fn after_damage(
    reader: &Reader,
    damaged_version: u64,
    roots: &TrustRoots,
    log: &NoteKey,
) -> Result<Option<(State, Tree, Entry)>, RestoreError> {
    let head = reader.head()?;
    let mut replay = Replay::before(reader, head.version.saturating_add(1), roots, log)?;
    if replay.head().version <= damaged_version {
        return Ok(None);
    }
    replay.run(reader, head.version)?;
    check_tree(reader, &replay.tree, log)?;
    let entry = reader.entry(head.version)?.and_then(|record| Entry::parse(record).ok());
    let entry = entry.filter(|entry| replay.head() == head && entry.hash() == head.hash);
    Ok(entry.map(|entry| (replay.state, replay.tree, entry)))
}

/// Entries applied one after the other, each checked against the chain.
#[derive(Debug)]
pub struct Replay {
    pub state: State,
    pub tree: Tree,
    pub last: (Entry, Before),
}

impl Replay {
    /// Begins with the newest good snapshot of a version below, else with the genesis.
    pub fn before(
        reader: &Reader,
        version: u64,
        roots: &TrustRoots,
        log: &NoteKey,
    ) -> Result<Replay, RestoreError> {
        let mut below = version;
        while let Some(up_to) = below.checked_sub(1)
            && let Some((found, note, state)) = reader.snapshot(up_to)?
        {
            if let Some(state) = good_snapshot(&note, &state, log)
                && state.head().version == found
            {
                let read = |tile: Tile| reader.sure_tile(tile);
                let tree = Tree::from_tiles(found + 1, read).map_err(|bad| damaged(found, bad))?;
                return Ok(Replay { state, tree, last: (roots.genesis().0, Before::new()) });
            }
            tracing::warn!(version = found, "a snapshot of the registry is damaged and left out");
            below = found;
        }
        if reader.min_version()? > 0 {
            return Err(damaged(reader.min_version()? - 1, "there is no good snapshot to begin with"));
        }
        let (entry, _) = roots.genesis();
        let mut tree = Tree::default();
        tree.append(leaf_hash(entry.bytes()), |_, _, _| {});
        Ok(Replay { state: State::genesis(roots), tree, last: (entry, Before::new()) })
    }

    /// Applies entries up to a version.
    pub fn run(&mut self, reader: &Reader, to: u64) -> Result<(), RestoreError> {
        read_back(reader, self.head().version + 1, to, |version, entry, proposal| {
            let before = self.state.apply(&entry, proposal.payload());
            let before =
                before.map_err(|_not_next| damaged(version, "it does not follow the entry before"))?;
            self.tree.append(leaf_hash(entry.bytes()), |_, _, _| {});
            self.last = (entry, before);
            Ok(())
        })
    }

    pub fn head(&self) -> Head {
        self.state.head()
    }
}

/// Reads entries from one version to another, each with the payload that its record names.
pub(crate) fn read_back(
    reader: &Reader,
    from: u64,
    to: u64,
    mut act: impl FnMut(u64, Entry, Proposal) -> Result<(), RestoreError>,
) -> Result<(), RestoreError> {
    let mut next = from;
    while next <= to {
        let count = usize::try_from(to - next + 1).unwrap_or(PIECE).min(PIECE);
        let pairs = reader.pairs(next, count, PIECE_BYTES)?;
        if pairs.first().is_none_or(|(version, _, _)| *version != next) {
            return Err(damaged(next, "the entry or its payload is missing"));
        }
        let parsed = |(version, record, payload)| {
            let entry = Entry::parse(record).map_err(|bad| damaged(version, format!("the record: {bad}")))?;
            let proposal = Proposal::parse_canonical(payload);
            let proposal = proposal.map_err(|bad| damaged(version, format!("the payload: {bad}")))?;
            Ok((version, entry, proposal))
        };
        let read: Vec<Result<_, RestoreError>> = pairs.into_iter().map(parsed).collect();
        Proposal::hash_all(read.iter().flatten().map(|(_, _, proposal)| proposal));
        for each in read {
            let (version, entry, proposal) = each?;
            if proposal.b3() != entry.record().payload_b3 {
                return Err(damaged(version, "the payload is not the one the record names"));
            }
            act(version, entry, proposal)?;
            next = version + 1;
        }
    }
    Ok(())
}

/// A snapshot that the log signed and whose state is the one it signed.
pub fn good_snapshot(note: &[u8], state: &[u8], log: &NoteKey) -> Option<State> {
    let snapshot = Snapshot::verify(&Note::parse(note).ok()?, log).ok()?;
    let parsed = State::parse(state).ok()?;
    let same = ron_log::B3::of(state) == snapshot.state_b3
        && parsed.head() == Head { version: snapshot.version, hash: snapshot.hash };
    same.then_some(parsed)
}

/// The tiles make up the tree of the entries, and that of the newest checkpoint.
fn check_tree(reader: &Reader, tree: &Tree, log: &NoteKey) -> Result<(), RestoreError> {
    let read = |tile: Tile| reader.sure_tile(tile);
    let stored = Tree::from_tiles(tree.size(), read).map_err(|bad| damaged(tree.size() - 1, bad))?;
    if stored.root() != tree.root() {
        return Err(damaged(tree.size() - 1, "the tiles are not those of the entries"));
    }
    let Some((size, note)) = reader.checkpoint()? else { return Ok(()) };
    let checkpoint = Note::parse(&note).and_then(|note| Checkpoint::verify(&note, log));
    let checkpoint = checkpoint.map_err(|bad| damaged(size - 1, format!("the checkpoint: {bad}")))?;
    if checkpoint.size > tree.size() {
        return Err(damaged(tree.size(), "a checkpoint covers this version, which is not there"));
    }
    let then = Tree::from_tiles(checkpoint.size, read).map_err(|bad| damaged(size - 1, bad))?;
    if then.root() == checkpoint.root {
        Ok(())
    } else {
        Err(damaged(size - 1, "the checkpoint has another root"))
    }
}
