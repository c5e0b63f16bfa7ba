//! Which version each committed payload became: of the newest in memory, of the others in the database.
//!
//! There they lie by their hashes, in no order that new ones have, so that each would cost a page of its own. They are
//! gathered here instead, in parts by hash, and one part after the other is written side by side. What is gathered need not
//! be durable: a start reads it again from the entries themselves.

use super::{COMMITTED, ENTRIES, HEAD, INDEXED, META, StoreError, head_of};
use redb::{ReadTransaction, ReadableTable as _, ReadableTableMetadata as _, WriteTransaction};
use ron_log::{B3, Entry};
use std::collections::BTreeMap;

const PARTS: usize = 16;
/// What is gathered before a part is written; so much a start has to read again, and as much once more.
pub(super) const GATHERED_MAX: usize = if cfg!(test) { 64 } else { 32 << 10 };

/// Payloads whose versions are not in the database.
#[derive(Debug, Default)]
pub(super) struct Index {
    parts: [Part; PARTS],
    count: usize,
    /// The part that is written next.
    next: usize,
}

#[derive(Debug, Default)]
struct Part {
    versions: BTreeMap<B3, u64>,
    /// The oldest of them.
    oldest: Option<u64>,
}

/// What is to be written.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    count: usize,
    rows: Vec<(B3, u64)>,
    /// The oldest that stays, if anything does.
    oldest: Option<u64>,
}

/// In the store of a build that wrote every payload at once, all are in the database.
pub(super) fn prepare(transaction: &WriteTransaction) -> Result<(), StoreError> {
    let mut meta = transaction.open_table(META).map_err(StoreError::of)?;
    let committed =
        transaction.open_table(COMMITTED).map_err(StoreError::of)?.len().map_err(StoreError::of)?;
    let head = meta.get(HEAD).map_err(StoreError::of)?.and_then(|value| head_of(value.value()));
    let next = head.map_or(0, |head| head.version + 1);
    if meta.get(INDEXED).map_err(StoreError::of)?.is_none() && committed == next {
        meta.insert(INDEXED, next.to_be_bytes().as_slice()).map_err(StoreError::of)?;
    }
    Ok(())
}

impl Index {
    /// What is not in the database yet.
    pub(super) fn read(transaction: &ReadTransaction) -> Result<Index, StoreError> {
        let mut index = Index::default();
        let meta = transaction.open_table(META).map_err(StoreError::of)?;
        let from = meta.get(INDEXED).map_err(StoreError::of)?.and_then(|value| value.value().try_into().ok());
        let entries = transaction.open_table(ENTRIES).map_err(StoreError::of)?;
        for row in entries.range(from.map_or(0, u64::from_be_bytes)..).map_err(StoreError::of)? {
            let (version, record) = row.map_err(StoreError::of)?;
            // What is wrong with it is told by who reads it for its own sake.
            if let Ok(entry) = Entry::parse(record.value().to_vec()) {
                index.add(entry.record().payload_b3, version.value());
            }
        }
        Ok(index)
    }

    pub(super) fn get(&self, payload: B3) -> Option<u64> {
        self.parts[part(payload)].versions.get(&payload).copied()
    }

    /// Adds what the database has as an entry, newer ones later.
    pub(super) fn add(&mut self, payload: B3, version: u64) {
        let part = &mut self.parts[part(payload)];
        self.count += usize::from(part.versions.insert(payload, version).is_none());
        part.oldest.get_or_insert(version);
    }

    /// What must be written so that no more is gathered than may be, or nothing at all.
    pub(super) fn leaving(&self, all: bool) -> Leaving {
        let (mut leaving, mut left) = (Leaving::default(), self.count);
        let over = |left| if all { left > 0 } else { left > GATHERED_MAX };
        while leaving.count < PARTS && over(left) {
            let part = &self.parts[(self.next + leaving.count) % PARTS];
            leaving.rows.extend(part.versions.iter().map(|(payload, version)| (*payload, *version)));
            left -= part.versions.len();
            leaving.count += 1;
        }
        let staying = (leaving.count..PARTS).map(|at| &self.parts[(self.next + at) % PARTS]);
        leaving.oldest = staying.filter_map(|part| part.oldest).min();
        leaving
    }

    /// It is in the database, for everybody to see.
    pub(super) fn left(&mut self, leaving: &Leaving) {
        for _ in 0..leaving.count {
            self.count -= std::mem::take(&mut self.parts[self.next]).versions.len();
            self.next = (self.next + 1) % PARTS;
        }
    }

    /// The oldest version that is here.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.parts.iter().filter_map(|part| part.oldest).min()
    }
}

impl Leaving {
    pub(super) fn is_nothing(&self) -> bool {
        self.rows.is_empty()
    }

    /// Writes it where every entry that is there was added before.
    pub(super) fn write(&self, transaction: &WriteTransaction) -> Result<(), StoreError> {
        let mut committed = transaction.open_table(COMMITTED).map_err(StoreError::of)?;
        for (payload, version) in &self.rows {
            committed.insert(payload.0.as_slice(), version).map_err(StoreError::of)?;
        }
        let mut meta = transaction.open_table(META).map_err(StoreError::of)?;
        let head = meta.get(HEAD).map_err(StoreError::of)?.and_then(|value| head_of(value.value()));
        let Some(first) = self.oldest.or_else(|| Some(head?.version + 1)) else { return Ok(()) };
        meta.insert(INDEXED, first.to_be_bytes().as_slice()).map_err(StoreError::of)?;
        Ok(())
    }
}

fn part(payload: B3) -> usize {
    // In the order that the database has them in.
    usize::from(payload.0[0]) * PARTS / 256
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_leave_in_turn_and_nothing_is_missing_in_between() {
        let id = |version: u64| B3::of(&version.to_be_bytes());
        let (mut index, mut written) = (Index::default(), BTreeMap::new());
        for version in 0..2000 {
            index.add(id(version), version);
            index.add(id(version), version);
            let leaving = index.leaving(false);
            assert_eq!(leaving.is_nothing(), index.count <= GATHERED_MAX);
            assert!(leaving.rows.is_sorted() || leaving.count > 1);
            written.extend(leaving.rows.iter().copied());
            index.left(&leaving);
            assert!(index.count <= GATHERED_MAX);
            let first = index.oldest().unwrap();
            assert!(first + 4 * GATHERED_MAX as u64 > version, "{first} of {version}");
            assert!((0..first).all(|version| written.get(&id(version)) == Some(&version)));
            let found = |version| index.get(id(version)).or_else(|| written.get(&id(version)).copied());
            assert!((first..=version).all(|version| found(version) == Some(version)));
        }
        let leaving = index.leaving(true);
        assert_eq!((leaving.oldest, leaving.rows.len()), (None, index.count));
        index.left(&leaving);
        assert_eq!((index.count, index.oldest()), (0, None));
    }
}
