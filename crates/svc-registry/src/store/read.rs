//! Reading the store: everything as it was at one moment.

use super::index::Index;
use super::states::States;
use super::{
    APPROVALS, CHECKPOINTS, COMMITTED, Disk, ENTRIES, GONE, HEAD, IN_JOURNAL, JOURNALED, KEPT_BYTES,
    MANIFESTS, META, MIN_VERSION, PAYLOADS, PROPOSALS, ROOTS, SNAPSHOTS, StoreError, TILES, head_of,
};
use redb::{
    Database, ReadOnlyTable, ReadTransaction, ReadableDatabase as _, ReadableTable as _, TableDefinition,
};
use ron_log::tile::{TILE_WIDTH, Tile};
use ron_log::tree::leaf_hash;
use ron_log::{Approval, B3, Entry, Head, Key, Proposal, TrustRoots};
use std::sync::{Arc, OnceLock};

/// A view that does not change.
#[derive(Debug)]
pub struct Reader {
    shown: Arc<Shown>,
    states: Arc<States>,
}

/// The database at one moment.
pub(super) struct Shown {
    transaction: ReadTransaction,
    /// Of a table that is asked with every proposal.
    committed: OnceLock<ReadOnlyTable<&'static [u8], u64>>,
}

impl std::fmt::Debug for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A table would read its pages for this.
        f.write_str("Shown")
    }
}

impl Shown {
    pub(super) fn of(database: &Database) -> Result<Shown, StoreError> {
        let transaction = database.begin_read().map_err(StoreError::of)?;
        Ok(Shown { transaction, committed: OnceLock::new() })
    }

    /// What the table of committed payloads lacks.
    pub(super) fn index(&self) -> Result<Index, StoreError> {
        Index::read(&self.transaction)
    }

    /// The version a payload was committed as, unless that is in memory alone.
    pub(super) fn committed(&self, payload: B3) -> Result<Option<u64>, StoreError> {
        let table = match self.committed.get() {
            Some(table) => table,
            None => {
                let opened = self.transaction.open_table(COMMITTED).map_err(StoreError::of)?;
                self.committed.get_or_init(|| opened)
            }
        };
        let found = table.get(payload.0.as_slice()).map_err(StoreError::of)?;
        Ok(found.map(|found| found.value()))
    }
}

/// A pending proposal as it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    pub received_at: u64,
    pub ends_at: u64,
    pub payload: Vec<u8>,
    pub approvals: Vec<Approval>,
}

/// Why a proposal is pending no more, without having been committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    Expired,
    Withdrawn,
}

/// A record and its payload.
type Pair = (Vec<u8>, Vec<u8>);
/// A snapshot: version, note, state.
type KeptState = (u64, Vec<u8>, Vec<u8>);
/// Entries and payloads read at a time.
type Pairs = Vec<(u64, Vec<u8>, Vec<u8>)>;

impl Reader {
    pub(super) fn new(shown: Arc<Shown>, disk: &Disk) -> Reader {
        Reader { shown, states: disk.states.clone() }
    }

    fn table<K: redb::Key + 'static, V: redb::Value + 'static>(
        &self,
        table: TableDefinition<K, V>,
    ) -> Result<ReadOnlyTable<K, V>, StoreError> {
        self.shown.transaction.open_table(table).map_err(StoreError::of)
    }

    fn numbered(
        &self,
        table: TableDefinition<u64, &'static [u8]>,
        key: u64,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        let found = self.table(table)?.get(key).map_err(StoreError::of)?;
        Ok(found.map(|found| found.value().to_vec()))
    }

    fn meta(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let found = self.table(META)?.get(key).map_err(StoreError::of)?;
        Ok(found.map(|found| found.value().to_vec()))
    }

    fn number(&self, key: &str) -> Result<u64, StoreError> {
        let bytes = self.meta(key)?.and_then(|bytes| bytes.try_into().ok());
        Ok(bytes.map_or(0, u64::from_be_bytes))
    }

    /// The roots the store was made with.
    pub fn roots(&self) -> Result<TrustRoots, StoreError> {
        let bytes = self.meta(ROOTS)?.unwrap_or_default();
        TrustRoots::parse(&bytes).map_err(|bad| StoreError::Damaged(format!("the pinned trust roots: {bad}")))
    }

    pub fn head(&self) -> Result<Head, StoreError> {
        let bytes = self.meta(HEAD)?;
        bytes.as_deref().and_then(head_of).ok_or_else(|| StoreError::Damaged("HEAD is no HEAD".into()))
    }

    /// The version of the last entry that is there, whatever HEAD says.
    pub fn last_version(&self) -> Result<Option<u64>, StoreError> {
        let last = self.table(ENTRIES)?.last().map_err(StoreError::of)?.map(|(version, _)| version.value());
        Ok(last)
    }

    /// The first version that is kept.
    pub fn min_version(&self) -> Result<u64, StoreError> {
        self.number(MIN_VERSION)
    }

    /// Bytes of the records and payloads kept.
    pub fn kept_bytes(&self) -> Result<u64, StoreError> {
        self.number(KEPT_BYTES)
    }

    /// Whether the journal may have what is not here.
    pub(super) fn in_journal(&self) -> Result<bool, StoreError> {
        Ok(self.number(IN_JOURNAL)? != 0)
    }

    /// The last batch that came through the journal.
    pub(super) fn journaled(&self) -> Result<u64, StoreError> {
        self.number(JOURNALED)
    }

    pub fn entry(&self, version: u64) -> Result<Option<Vec<u8>>, StoreError> {
        self.numbered(ENTRIES, version)
    }

    pub fn payload(&self, version: u64) -> Result<Option<Vec<u8>>, StoreError> {
        self.numbered(PAYLOADS, version)
    }

    /// Record and payload of a version.
    pub fn pair(&self, version: u64) -> Result<Option<Pair>, StoreError> {
        Ok(self.entry(version)?.zip(self.payload(version)?))
    }

    /// Records and payloads from a version on, as many as are asked for but no more than so many bytes and one.
    pub fn pairs(&self, from: u64, count: usize, bytes_max: usize) -> Result<Pairs, StoreError> {
        let (entries, payloads) = (self.table(ENTRIES)?, self.table(PAYLOADS)?);
        let (mut found, mut bytes) = (Vec::new(), 0);
        let payloads = payloads.range(from..).map_err(StoreError::of)?;
        // Both have the same versions.
        for (row, other) in entries.range(from..).map_err(StoreError::of)?.take(count).zip(payloads) {
            let ((version, record), (same, payload)) =
                (row.map_err(StoreError::of)?, other.map_err(StoreError::of)?);
            if version.value() != same.value() {
                break;
            }
            bytes += record.value().len() + payload.value().len();
            found.push((version.value(), record.value().to_vec(), payload.value().to_vec()));
            if bytes > bytes_max {
                break;
            }
        }
        Ok(found)
    }

    /// The same of entries that must be there, each as it was written: record and payload are those of the tree. None if
    /// they were let go of.
    pub fn sure_pairs(&self, from: u64, count: usize, bytes_max: usize) -> Result<Pairs, StoreError> {
        let pairs = self.pairs(from, count, bytes_max)?;
        let checked = self.check_pairs(from, &pairs).and_then(|()| {
            let bytes: usize = pairs.iter().map(|(_, record, payload)| record.len() + payload.len()).sum();
            if pairs.len() < count && bytes <= bytes_max { self.lacks(from, pairs.len()) } else { Ok(()) }
        });
        self.unless_pruned(from, checked.map(|()| pairs))
    }

    /// One of them.
    pub fn sure_pair(&self, version: u64) -> Result<Option<Pair>, StoreError> {
        let found = self.sure_pairs(version, 1, usize::MAX)?.pop();
        Ok(found.map(|(_, record, payload)| (record, payload)))
    }

    fn check_pairs(&self, from: u64, pairs: &Pairs) -> Result<(), StoreError> {
        self.check_records(from, pairs.iter().map(|(version, record, _)| (*version, record.as_slice())))?;
        for (version, record, payload) in pairs {
            let named = Entry::parse(record.clone()).ok().map(|entry| entry.record().payload_b3);
            if named != Some(B3::of(payload)) {
                return Err(damaged_entry(*version, "the payload is not the one the record names"));
            }
        }
        Ok(())
    }

    /// Records of entries that must be there, without their payloads, each as it was written. None if they were let go of.
    pub fn sure_entries(&self, from: u64, count: usize) -> Result<Vec<Vec<u8>>, StoreError> {
        let table = self.table(ENTRIES)?;
        let mut found = Vec::new();
        for row in table.range(from..).map_err(StoreError::of)?.take(count) {
            let (version, record) = row.map_err(StoreError::of)?;
            found.push((version.value(), record.value().to_vec()));
        }
        let checked = self.check_records(from, found.iter().map(|(version, it)| (*version, it.as_slice())));
        let checked =
            checked.and_then(|()| if found.len() < count { self.lacks(from, found.len()) } else { Ok(()) });
        self.unless_pruned(from, checked.map(|()| found.into_iter().map(|(_, record)| record).collect()))
    }

    /// Fewer entries are here than must be.
    fn lacks(&self, from: u64, found: usize) -> Result<(), StoreError> {
        let version = from + found as u64;
        if version <= self.head()?.version {
            return Err(damaged_entry(version, "the entry or its payload is missing"));
        }
        // The database could not take it in; it may be whole in the journal.
        Err(StoreError::Damaged(format!("version {version} has not come into the database")))
    }

    /// What begins below the first version kept need not be there.
    fn unless_pruned<T: Default>(&self, from: u64, read: Result<T, StoreError>) -> Result<T, StoreError> {
        match read {
            Err(StoreError::DamagedEntry { .. }) if from < self.min_version()? => Ok(T::default()),
            read => read,
        }
    }

    /// Whether records from a version on follow each other and are the tree's leaves.
    fn check_records<'a>(
        &self,
        from: u64,
        records: impl Iterator<Item = (u64, &'a [u8])>,
    ) -> Result<(), StoreError> {
        let table = self.table(TILES)?;
        let mut tile = None;
        for (expected, (version, record)) in (from..).zip(records) {
            if version != expected {
                return Err(damaged_entry(expected, "the entry is missing"));
            }
            let (index, place) = (version / TILE_WIDTH, (version % TILE_WIDTH) as usize);
            if tile.as_ref().is_none_or(|(known, _)| *known != index) {
                let hashes = table.get((0, index)).map_err(StoreError::of)?;
                tile = Some((index, hashes.map_or_else(Vec::new, |hashes| hashes.value().to_vec())));
            }
            let leaf = tile.as_ref().and_then(|(_, hashes)| hashes.as_chunks::<32>().0.get(place));
            if leaf != Some(&leaf_hash(record)) {
                return Err(damaged_entry(version, "the record is not the one in the tree"));
            }
        }
        Ok(())
    }

    /// What is left of the entries below the first one kept: the changes of the signer set.
    pub fn former_signers(&self) -> Result<Vec<Pair>, StoreError> {
        let (entries, payloads) = (self.table(ENTRIES)?, self.table(PAYLOADS)?);
        let mut found = Vec::new();
        for row in entries.range(..self.min_version()?).map_err(StoreError::of)? {
            let (version, record) = row.map_err(StoreError::of)?;
            let payload = payloads.get(version.value()).map_err(StoreError::of)?;
            if let Some(payload) = payload.filter(|payload| changes_signers(version.value(), payload.value()))
            {
                found.push((record.value().to_vec(), payload.value().to_vec()));
            }
        }
        Ok(found)
    }

    /// A tile's hashes, cut to the width that is asked for; none if there are not as many.
    pub fn tile(&self, tile: Tile) -> Result<Option<Vec<u8>>, StoreError> {
        let found = self.table(TILES)?.get((tile.level, tile.index)).map_err(StoreError::of)?;
        let wanted = usize::from(tile.width) * 32;
        Ok(found.and_then(|found| found.value().get(..wanted).map(<[u8]>::to_vec)))
    }

    /// The same where it must be there.
    pub fn sure_tile(&self, tile: Tile) -> Result<Vec<u8>, StoreError> {
        self.tile(tile)?.ok_or_else(|| StoreError::Damaged(format!("tile {tile:?} is missing")))
    }

    pub fn gone(&self, payload: B3) -> Result<Option<(Gone, u64)>, StoreError> {
        let found = self.table(GONE)?.get(payload.0.as_slice()).map_err(StoreError::of)?;
        Ok(found.map(|found| {
            let (how, at) = found.value();
            (if how == 0 { Gone::Expired } else { Gone::Withdrawn }, at)
        }))
    }

    /// Every proposal that came to nothing: when, which, how.
    pub fn all_gone(&self) -> Result<Vec<(u64, B3, Gone)>, StoreError> {
        let mut found = Vec::new();
        for row in self.table(GONE)?.iter().map_err(StoreError::of)? {
            let (key, value) = row.map_err(StoreError::of)?;
            let (how, at) = value.value();
            let how = if how == 0 { Gone::Expired } else { Gone::Withdrawn };
            found.extend(key.value().try_into().ok().map(|hash| (at, B3(hash), how)));
        }
        Ok(found)
    }

    /// A pending proposal, whose payload is the one its id names.
    pub fn proposal(&self, payload: B3) -> Result<Option<Kept>, StoreError> {
        let found = self.table(PROPOSALS)?.get(payload.0.as_slice()).map_err(StoreError::of)?;
        let Some(found) = found else { return Ok(None) };
        let (received_at, ends_at, bytes) = found.value();
        if B3::of(bytes) != payload {
            return Err(StoreError::Damaged(format!("the proposal {payload} is not what was proposed")));
        }
        let approvals = self.approvals(payload)?;
        Ok(Some(Kept { received_at, ends_at, payload: bytes.to_vec(), approvals }))
    }

    /// The hashes of all pending proposals, in their own order.
    pub fn proposals(&self) -> Result<Vec<B3>, StoreError> {
        let table = self.table(PROPOSALS)?;
        let mut found = Vec::new();
        for row in table.iter().map_err(StoreError::of)? {
            let (key, _) = row.map_err(StoreError::of)?;
            found.extend(key.value().try_into().ok().map(B3));
        }
        Ok(found)
    }

    fn approvals(&self, payload: B3) -> Result<Vec<Approval>, StoreError> {
        let table = self.table(APPROVALS)?;
        let mut found = Vec::new();
        for row in table.range(payload.0.as_slice()..).map_err(StoreError::of)? {
            let (key, value) = row.map_err(StoreError::of)?;
            if !key.value().starts_with(&payload.0) {
                break;
            }
            let approval = Approval::parse(value.value());
            found.push(approval.map_err(|bad| StoreError::Damaged(format!("an approval: {bad}")))?);
        }
        Ok(found)
    }

    /// The newest checkpoint.
    pub fn checkpoint(&self) -> Result<Option<(u64, Vec<u8>)>, StoreError> {
        let table = self.table(CHECKPOINTS)?;
        let last = table.last().map_err(StoreError::of)?;
        Ok(last.map(|(size, note)| (size.value(), note.value().to_vec())))
    }

    /// What is made of the newest checkpoint that anything is made of.
    pub fn newest_checkpoint<T>(
        &self,
        mut make: impl FnMut(&[u8]) -> Option<T>,
    ) -> Result<Option<T>, StoreError> {
        let table = self.table(CHECKPOINTS)?;
        for row in table.iter().map_err(StoreError::of)?.rev() {
            let found = make(row.map_err(StoreError::of)?.1.value());
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// The checkpoints of sizes in a range, oldest first.
    pub fn checkpoints(
        &self,
        sizes: std::ops::RangeInclusive<u64>,
    ) -> Result<Vec<(u64, Vec<u8>)>, StoreError> {
        let table = self.table(CHECKPOINTS)?;
        let rows = table.range(sizes).map_err(StoreError::of)?;
        let row = |row: Result<_, redb::StorageError>| {
            let (size, note): (redb::AccessGuard<'_, u64>, redb::AccessGuard<'_, &[u8]>) =
                row.map_err(StoreError::of)?;
            Ok((size.value(), note.value().to_vec()))
        };
        rows.map(row).collect()
    }

    /// The newest snapshot of a version up to this one: version, note, state. A state that is gone is empty, and so none
    /// that its note vouches for.
    pub fn snapshot(&self, up_to: u64) -> Result<Option<KeptState>, StoreError> {
        let Some((version, note)) = self.snapshot_note(up_to)? else { return Ok(None) };
        let state = self.states.get(version).map_err(StoreError::of_io)?;
        Ok(Some((version, note, state.unwrap_or_default())))
    }

    /// The hash of the state of a snapshot, if it is there.
    pub fn state_hash(&self, version: u64) -> Result<Option<B3>, StoreError> {
        self.states.hash(version).map_err(StoreError::of_io)
    }

    /// Version and note of the newest snapshot of a version up to this one.
    pub fn snapshot_note(&self, up_to: u64) -> Result<Option<(u64, Vec<u8>)>, StoreError> {
        let table = self.table(SNAPSHOTS)?;
        let last = table.range(..=up_to).map_err(StoreError::of)?.next_back().transpose();
        let last = last.map_err(StoreError::of)?;
        Ok(last.map(|(version, note)| (version.value(), note.value().to_vec())))
    }

    /// The versions of all snapshots.
    pub fn snapshot_versions(&self) -> Result<Vec<u64>, StoreError> {
        let table = self.table(SNAPSHOTS)?;
        let rows = table.iter().map_err(StoreError::of)?;
        rows.map(|row| Ok(row.map_err(StoreError::of)?.0.value())).collect()
    }

    /// Every prune manifest, oldest first.
    pub fn manifests(&self) -> Result<Vec<Vec<u8>>, StoreError> {
        let table = self.table(MANIFESTS)?;
        let rows = table.iter().map_err(StoreError::of)?;
        rows.map(|row| Ok(row.map_err(StoreError::of)?.1.value().to_vec())).collect()
    }
}

fn damaged_entry(version: u64, what: &'static str) -> StoreError {
    StoreError::DamagedEntry { version, what }
}

/// Whether an entry changes the signer set; the genesis, which anybody can make of the trust roots, does not count.
pub(crate) fn changes_signers(version: u64, payload: &[u8]) -> bool {
    // Most are told apart without being read.
    let may = std::str::from_utf8(payload).is_ok_and(|text| text.contains(r#""kind":"signers""#));
    version > 0
        && may
        && Proposal::parse_canonical(payload.to_vec())
            .is_ok_and(|proposal| proposal.payload().ops.iter().any(|op| op.key == Key::signers()))
}
