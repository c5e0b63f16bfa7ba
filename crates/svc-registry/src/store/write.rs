//! Writing the store: a batch is made durable by one flush, in the journal or in a transaction of its own.

use super::{
    APPROVALS, CHECKPOINTS, COMMITTED, Disk, ENTRIES, GONE, Gone, HEAD, IN_JOURNAL, JOURNALED, KEPT_BYTES,
    Keeping, MANIFESTS, META, MIN_VERSION, Opened, PAYLOADS, PROPOSALS, ROOTS, SNAPSHOTS, Store, StoreError,
    TILES, changes_signers, head_bytes, head_of, index,
};
use redb::{Database, Durability, ReadableTable, Table, WriteTransaction};
use ron_log::tile::TILE_WIDTH;
use ron_log::tree::{Hash, leaf_hash};
use ron_log::{Approval, B3, Entry, Head, Note, Proposal, PruneManifest, Tree, TrustRoots};
use std::collections::{BTreeMap, btree_map};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Of the checkpoints, how many of the newest stay, and how far apart the older ones are.
const CHECKPOINTS_KEPT: usize = 1000;
const CHECKPOINTS_APART: u64 = 256;

/// What one batch changes.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// New entries in order, each with its payload.
    pub entries: Vec<(Entry, Arc<Proposal>)>,
    /// What the tree grows by: a tile's level, the place there, and the hash; in order.
    pub hashes: Vec<(u8, u64, Hash)>,
    /// New proposals: payload, when it came, when it ends.
    pub proposals: Vec<(Arc<Proposal>, u64, u64)>,
    pub approvals: Vec<(B3, Approval)>,
    /// Proposals that are pending no more, and whether and when they came to nothing.
    pub ended: Vec<(B3, Option<(Gone, u64)>)>,
    /// Of the proposals that came to nothing, those that are forgotten.
    pub forgotten: Vec<B3>,
}

impl Changes {
    /// Lets the tree grow by a leaf.
    pub fn grow(&mut self, tree: &mut Tree, leaf: Hash) {
        tree.append(leaf, |level, place, hash| self.hashes.push((level, place, *hash)));
    }

    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// How many things change.
    pub(super) fn count(&self) -> usize {
        let Changes { entries, hashes: _, proposals, approvals, ended, forgotten } = self;
        entries.len() + proposals.len() + approvals.len() + ended.len() + forgotten.len()
    }

    /// HEAD after it, if it moves.
    pub(super) fn head(&self) -> Option<Head> {
        let (last, _) = self.entries.last()?;
        Some(Head { version: last.record().version, hash: last.hash() })
    }

    pub(super) fn bytes(&self) -> u64 {
        let entries = self.entries.iter().map(|(entry, payload)| entry.bytes().len() + payload.bytes().len());
        let proposals = self.proposals.iter().map(|(payload, _, _)| payload.bytes().len());
        let hashes = std::iter::once(self.hashes.len() * size_of::<Hash>());
        entries.chain(proposals).chain(hashes).sum::<usize>() as u64
    }
}

/// The only way to move HEAD. There is one at a time; dropped, it can be taken anew.
#[derive(Debug)]
pub struct LogWriter {
    store: Store,
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        self.store.inner.writer_taken.store(false, Ordering::Release);
    }
}

impl LogWriter {
    pub(super) fn new(store: &Store) -> LogWriter {
        LogWriter { store: store.clone() }
    }

    /// Writes a batch if HEAD is what the writer believes; when this returns, it is durable.
    pub fn write(&mut self, expected: Head, changes: Changes) -> Result<(), StoreError> {
        self.store.writing(changes.bytes(), |opened, disk| opened.append(disk, expected, changes))
    }

    /// Has the database take in what was written, if there is enough of it or all shall be, and flush what the journal
    /// needs to go on.
    pub fn settle(&self, all: bool) {
        let waits = |opened: &Opened| {
            let queue = opened.behind.queue();
            queue.is_ok_and(|queue| if all { !queue.is_empty() } else { queue.is_enough() })
                || opened.flush_wanted().is_some()
        };
        if self.store.opened().is_ok_and(|opened| waits(&opened)) {
            self.store.settle();
        }
    }
}

impl Store {
    /// One transaction, all or nothing.
    fn transact(
        &self,
        bytes: u64,
        durability: Durability,
        act: impl Fn(&WriteTransaction) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.writing(bytes, |opened, disk| opened.write(disk, durability, act))
    }

    /// Does what writes, if there is room for so many bytes.
    pub(super) fn writing(
        &self,
        bytes: u64,
        write: impl FnOnce(&Opened, &Disk) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.room_for(bytes)?;
        if let Some(until) = self.inner.stalled_until.load_full() {
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        }
        let opened = self.opened()?;
        let disk = &self.inner.disk;
        let done = write(&opened, disk);
        if disk.flush_failed() {
            return Err(StoreError::FlushFailed);
        }
        match done {
            Err(StoreError::Database(_)) if disk.is_full() => {
                drop(opened);
                // Reads need the database again at once; should that fail, the next write tries.
                let _ = self.reopen();
                Err(StoreError::Full)
            }
            done => done,
        }
    }
}

/// One transaction of the database.
pub(super) fn transact(
    database: &Database,
    durability: Durability,
    act: impl Fn(&WriteTransaction) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let mut transaction = database.begin_write().map_err(StoreError::of)?;
    transaction.set_durability(durability).map_err(StoreError::of)?;
    // What was flushed is never given up for what was before it, and a start after a crash need not look through all of it.
    transaction.set_quick_repair(true);
    act(&transaction)?;
    transaction.commit().map_err(StoreError::of)
}

/// Reads a number of the table of single values and changes it.
fn number(transaction: &WriteTransaction, key: &str) -> Result<u64, StoreError> {
    let meta = transaction.open_table(META).map_err(StoreError::of)?;
    let known = meta.get(key).map_err(StoreError::of)?.and_then(|value| value.value().try_into().ok());
    Ok(known.map_or(0, u64::from_be_bytes))
}

fn change_number(
    transaction: &WriteTransaction,
    key: &str,
    change: impl Fn(u64) -> u64,
) -> Result<(), StoreError> {
    let number = change(number(transaction, key)?);
    let mut meta = transaction.open_table(META).map_err(StoreError::of)?;
    meta.insert(key, number.to_be_bytes().as_slice()).map_err(StoreError::of)?;
    Ok(())
}

/// Notes that a batch of the journal is in the database.
pub(super) fn journaled(transaction: &WriteTransaction, number: u64) -> Result<(), StoreError> {
    change_number(transaction, JOURNALED, |_| number)
}

/// Notes whether the journal may have what is not here.
pub(super) fn in_journal(transaction: &WriteTransaction, used: bool) -> Result<(), StoreError> {
    change_number(transaction, IN_JOURNAL, |_| u64::from(used))
}

/// Does what batches say, each of which goes on from the one before, if HEAD is what the first expects.
pub(super) fn apply(transaction: &WriteTransaction, batches: &[(Head, &Changes)]) -> Result<(), StoreError> {
    {
        let mut meta = transaction.open_table(META).map_err(StoreError::of)?;
        let head = meta.get(HEAD).map_err(StoreError::of)?.and_then(|value| head_of(value.value()));
        if head != batches.first().map(|(expected, _)| *expected) {
            return Err(StoreError::HeadMoved);
        }
        if let Some(head) = batches.iter().rev().find_map(|(_, changes)| changes.head()) {
            meta.insert(HEAD, head_bytes(head).as_slice()).map_err(StoreError::of)?;
        }
    }
    if batches.iter().any(|(_, changes)| !changes.entries.is_empty()) {
        append(transaction, batches)?;
    }
    batches.iter().try_for_each(|(_, changes)| change_proposals(transaction, changes))
}

fn change_proposals(transaction: &WriteTransaction, changes: &Changes) -> Result<(), StoreError> {
    // First, for what has ended may be proposed again.
    end_proposals(transaction, changes)?;
    if !changes.proposals.is_empty() {
        let mut proposals = transaction.open_table(PROPOSALS).map_err(StoreError::of)?;
        let mut gone = transaction.open_table(GONE).map_err(StoreError::of)?;
        for (proposal, received_at, ends_at) in &changes.proposals {
            let row = (*received_at, *ends_at, proposal.bytes());
            proposals.insert(proposal.b3().0.as_slice(), row).map_err(StoreError::of)?;
            // One that was withdrawn may be proposed again.
            gone.remove(proposal.b3().0.as_slice()).map_err(StoreError::of)?;
        }
    }
    if !changes.approvals.is_empty() {
        let mut approvals = transaction.open_table(APPROVALS).map_err(StoreError::of)?;
        for (payload, approval) in &changes.approvals {
            let key = [payload.0.as_slice(), approval.signer.as_bytes()].concat();
            approvals.insert(key.as_slice(), approval.canonical().as_bytes()).map_err(StoreError::of)?;
        }
    }
    Ok(())
}

fn append(transaction: &WriteTransaction, batches: &[(Head, &Changes)]) -> Result<(), StoreError> {
    let mut entries = transaction.open_table(ENTRIES).map_err(StoreError::of)?;
    let mut payloads = transaction.open_table(PAYLOADS).map_err(StoreError::of)?;
    let mut tiles = transaction.open_table(TILES).map_err(StoreError::of)?;
    let mut bytes = 0;
    for (entry, proposal) in batches.iter().flat_map(|(_, changes)| &changes.entries) {
        let version = entry.record().version;
        entries.insert(version, entry.bytes()).map_err(StoreError::of)?;
        payloads.insert(version, proposal.bytes()).map_err(StoreError::of)?;
        bytes += (entry.bytes().len() + proposal.bytes().len()) as u64;
    }
    for (place, tile) in grown(&tiles, batches.iter().flat_map(|(_, changes)| &changes.hashes))? {
        tiles.insert(place, tile.as_slice()).map_err(StoreError::of)?;
    }
    change_number(transaction, KEPT_BYTES, |kept| kept + bytes)
}

/// The tiles that grow, each as it is in the end.
fn grown<'a>(
    tiles: &impl ReadableTable<(u8, u64), &'static [u8]>,
    hashes: impl Iterator<Item = &'a (u8, u64, Hash)>,
) -> Result<BTreeMap<(u8, u64), Vec<u8>>, StoreError> {
    let mut grown: BTreeMap<(u8, u64), Vec<u8>> = BTreeMap::new();
    for (level, place, hash) in hashes {
        let key = (*level, place / TILE_WIDTH);
        let tile = match grown.entry(key) {
            btree_map::Entry::Occupied(tile) => tile.into_mut(),
            btree_map::Entry::Vacant(new) => {
                let stored = tiles.get(key).map_err(StoreError::of)?;
                new.insert(stored.map_or_else(Vec::new, |stored| stored.value().to_vec()))
            }
        };
        let before = (place % TILE_WIDTH) as usize * size_of::<Hash>();
        if tile.len() < before {
            return Err(StoreError::Damaged(format!("tile {level} {} is too short", key.1)));
        }
        tile.truncate(before);
        tile.extend_from_slice(hash);
    }
    Ok(grown)
}

fn end_proposals(transaction: &WriteTransaction, changes: &Changes) -> Result<(), StoreError> {
    if changes.ended.is_empty() && changes.forgotten.is_empty() {
        return Ok(());
    }
    let mut proposals = transaction.open_table(PROPOSALS).map_err(StoreError::of)?;
    let mut approvals = transaction.open_table(APPROVALS).map_err(StoreError::of)?;
    let mut gone = transaction.open_table(GONE).map_err(StoreError::of)?;
    for (payload, how) in &changes.ended {
        proposals.remove(payload.0.as_slice()).map_err(StoreError::of)?;
        let mut keys = Vec::new();
        for row in approvals.range(payload.0.as_slice()..).map_err(StoreError::of)? {
            let key = row.map_err(StoreError::of)?.0.value().to_vec();
            if !key.starts_with(&payload.0) {
                break;
            }
            keys.push(key);
        }
        for key in keys {
            approvals.remove(key.as_slice()).map_err(StoreError::of)?;
        }
        if let Some((how, at)) = how {
            let how = u8::from(*how == Gone::Withdrawn);
            gone.insert(payload.0.as_slice(), (how, *at)).map_err(StoreError::of)?;
        }
    }
    for payload in &changes.forgotten {
        gone.remove(payload.0.as_slice()).map_err(StoreError::of)?;
    }
    Ok(())
}

/// Adds signed notes, and removes what they cover. It cannot touch HEAD.
#[derive(Clone, Debug)]
pub struct NoteWriter {
    store: Store,
}

impl NoteWriter {
    pub(super) fn new(store: &Store) -> NoteWriter {
        NoteWriter { store: store.clone() }
    }

    /// A checkpoint, and with a new one the state it was made with, whose bytes are told. Of the older states those that
    /// `keep` names stay, and the one that a pruned log begins with.
    pub fn checkpoint(
        &self,
        size: u64,
        note: &str,
        keeping: Option<Keeping<'_>>,
        keep: impl Fn(u64) -> bool,
    ) -> Result<u64, StoreError> {
        let version = size.saturating_sub(1);
        self.with_state(version, note.len(), keeping, |transaction, signed| {
            let mut checkpoints = transaction.open_table(CHECKPOINTS).map_err(StoreError::of)?;
            checkpoints.insert(size, note.as_bytes()).map_err(StoreError::of)?;
            let Some(signed) = signed else { return Ok(()) };
            thin(transaction, &mut checkpoints)?;
            // Read here and not before: a pruning may have come in between.
            let base = number(transaction, MIN_VERSION)?.checked_sub(1);
            let mut snapshots = transaction.open_table(SNAPSHOTS).map_err(StoreError::of)?;
            snapshots.retain(|version, _| keep(version) || Some(version) == base).map_err(StoreError::of)?;
            snapshots.insert(version, signed.as_bytes()).map_err(StoreError::of)?;
            Ok(())
        })
    }

    /// Says what will be pruned, before it is: the manifest, and the state before the first version kept.
    pub fn manifest(&self, min_version: u64, note: &str, keeping: Keeping<'_>) -> Result<(), StoreError> {
        let version = min_version.saturating_sub(1);
        self.with_state(version, note.len(), Some(keeping), |transaction, signed| {
            let mut manifests = transaction.open_table(MANIFESTS).map_err(StoreError::of)?;
            manifests.insert(min_version, note.as_bytes()).map_err(StoreError::of)?;
            let mut snapshots = transaction.open_table(SNAPSHOTS).map_err(StoreError::of)?;
            let signed = signed.unwrap_or_default();
            snapshots.insert(version, signed.as_bytes()).map_err(StoreError::of)?;
            change_number(transaction, MIN_VERSION, |_| min_version)
        })?;
        Ok(())
    }

    /// Keeps a state, if there is one, then does what is to be done with the note that signs it. Batches wait for the
    /// latter alone.
    fn with_state(
        &self,
        version: u64,
        bytes: usize,
        keeping: Option<Keeping<'_>>,
        act: impl Fn(&WriteTransaction, Option<&str>) -> Result<(), StoreError>,
    ) -> Result<u64, StoreError> {
        let disk = &self.store.inner.disk;
        let _alone = disk.states.alone();
        let (mut signed, mut state_bytes) = (None, 0);
        if let Some(Keeping { state, sign }) = keeping {
            self.store.room_for(bytes as u64)?;
            let failed = |error| if disk.is_full() { StoreError::Full } else { StoreError::of_io(error) };
            // Those whose note went with the last one: whoever was reading then has done so.
            let noted = self.store.reader()?.snapshot_versions()?;
            disk.states.retain(&noted).map_err(failed)?;
            let (hash, bytes) = disk.note(disk.states.put(version, state)).map_err(failed)?;
            (signed, state_bytes) = (Some(sign(hash)), bytes);
        }
        self.store.transact(bytes as u64, Durability::Immediate, |transaction| {
            act(transaction, signed.as_deref())
        })?;
        Ok(state_bytes)
    }

    /// A manifest of a pruning that a later one goes beyond, as a restored log has it.
    pub fn former_manifest(&self, min_version: u64, note: &str) -> Result<(), StoreError> {
        self.store.transact(note.len() as u64, Durability::Immediate, |transaction| {
            let mut manifests = transaction.open_table(MANIFESTS).map_err(StoreError::of)?;
            manifests.insert(min_version, note.as_bytes()).map_err(StoreError::of)?;
            Ok(())
        })
    }

    /// A change of the signer set from below the first version kept, as a restored log has it.
    pub fn former_signers(&self, entry: &Entry, payload: &[u8]) -> Result<(), StoreError> {
        let bytes = (entry.bytes().len() + payload.len()) as u64;
        self.store.transact(bytes, Durability::Immediate, |transaction| {
            let version = entry.record().version;
            let mut entries = transaction.open_table(ENTRIES).map_err(StoreError::of)?;
            entries.insert(version, entry.bytes()).map_err(StoreError::of)?;
            let mut payloads = transaction.open_table(PAYLOADS).map_err(StoreError::of)?;
            payloads.insert(version, payload).map_err(StoreError::of)?;
            change_number(transaction, KEPT_BYTES, |kept| kept + bytes)
        })
    }

    /// Removes up to `count` records and payloads below the first version kept, but for changes of the signer set:
    /// without them no later change could be proved by the trust roots. Says how many there were. It need
    /// not be durable at once: the manifest is, and what is left over is removed later.
    pub fn prune(&self, count: usize) -> Result<usize, StoreError> {
        let min = self.store.reader()?.min_version()?;
        self.store.writing(0, |opened, disk| opened.index_below(disk, min))?;
        let removed = std::cell::Cell::new(0);
        self.store.transact(0, Durability::None, |transaction| {
            let mut entries = transaction.open_table(ENTRIES).map_err(StoreError::of)?;
            let mut payloads = transaction.open_table(PAYLOADS).map_err(StoreError::of)?;
            let mut bytes = 0;
            let mut going = Vec::new();
            for row in entries.range(..min).map_err(StoreError::of)? {
                let version = row.map_err(StoreError::of)?.0.value();
                let payload = payloads.get(version).map_err(StoreError::of)?;
                if !payload.is_some_and(|payload| changes_signers(version, payload.value())) {
                    going.push(version);
                }
                if going.len() == count {
                    break;
                }
            }
            for version in going {
                let record = entries.remove(version).map_err(StoreError::of)?;
                bytes += record.map_or(0, |record| record.value().len() as u64);
                let payload = payloads.remove(version).map_err(StoreError::of)?;
                bytes += payload.map_or(0, |payload| payload.value().len() as u64);
                removed.set(removed.get() + 1);
            }
            drop((entries, payloads));
            change_number(transaction, KEPT_BYTES, |kept| kept.saturating_sub(bytes))
        })?;
        Ok(removed.get())
    }
}

/// The newest checkpoints stay, of the older ones the first in each so many sizes and those that a manifest names.
/// One falls back with each new one, so that there is at most one to let go.
fn thin(transaction: &WriteTransaction, checkpoints: &mut Table<'_, u64, &[u8]>) -> Result<(), StoreError> {
    let mut older = checkpoints.range::<u64>(..).map_err(StoreError::of)?.rev().skip(CHECKPOINTS_KEPT);
    let mut size = || older.next().transpose().map(|row| row.map(|(size, _)| size.value()));
    let (last, before) = (size().map_err(StoreError::of)?, size().map_err(StoreError::of)?);
    let Some((last, before)) = last.zip(before) else { return Ok(()) };
    drop(older);
    if last / CHECKPOINTS_APART != before / CHECKPOINTS_APART {
        return Ok(());
    }
    let manifests = transaction.open_table(MANIFESTS).map_err(StoreError::of)?;
    for row in manifests.iter().map_err(StoreError::of)? {
        let note = Note::parse(row.map_err(StoreError::of)?.1.value());
        if note.ok().and_then(|note| PruneManifest::parse(&note.text)).is_some_and(|named| named.size == last)
        {
            return Ok(());
        }
    }
    checkpoints.remove(last).map_err(StoreError::of)?;
    Ok(())
}

/// Makes every table and, in a new store, the genesis; gives the roots the store was made with.
pub(super) fn prepare(
    database: &Database,
    canonical: &str,
    roots: &TrustRoots,
) -> Result<Vec<u8>, StoreError> {
    let known = std::cell::RefCell::new(canonical.as_bytes().to_vec());
    transact(database, Durability::Immediate, |transaction| {
        for table in [ENTRIES, PAYLOADS, CHECKPOINTS, MANIFESTS] {
            transaction.open_table(table).map_err(StoreError::of)?;
        }
        transaction.open_table(SNAPSHOTS).map_err(StoreError::of)?;
        {
            let mut meta = transaction.open_table(META).map_err(StoreError::of)?;
            let found = meta.get(ROOTS).map_err(StoreError::of)?.map(|found| found.value().to_vec());
            if let Some(found) = found {
                *known.borrow_mut() = found;
                drop(meta);
                return index::prepare(transaction);
            }
            transaction.open_table(COMMITTED).map_err(StoreError::of)?;
            meta.insert(ROOTS, canonical.as_bytes()).map_err(StoreError::of)?;
            let (entry, _) = roots.genesis();
            let before = head_bytes(Head { version: 0, hash: entry.hash() });
            meta.insert(HEAD, before.as_slice()).map_err(StoreError::of)?;
        }
        let (entry, proposal) = roots.genesis();
        let mut changes = Changes::default();
        changes.grow(&mut Tree::default(), leaf_hash(entry.bytes()));
        let head = Head { version: 0, hash: entry.hash() };
        changes.entries.push((entry, Arc::new(proposal)));
        apply(transaction, &[(head, &changes)])?;
        transaction.open_table(PROPOSALS).map_err(StoreError::of)?;
        transaction.open_table(APPROVALS).map_err(StoreError::of)?;
        transaction.open_table(GONE).map_err(StoreError::of)?;
        Ok(())
    })?;
    Ok(known.into_inner())
}
