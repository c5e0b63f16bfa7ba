//! What is durable in the journal and not in the database yet.
//!
//! A batch is acknowledged once it is in the journal. The database takes in many batches at a time, which costs it a
//! fraction of what one by one would, and nobody who commits waits for it: whoever reads does, if something is left.

use super::write::Changes;
use super::{Head, StoreError};
use ron_log::B3;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// Changes that are enough for the database to take them in. The journal's length bounds what there can be.
const ENOUGH: usize = 256;

/// A batch of the journal.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) number: u64,
    /// HEAD before it.
    pub(super) expected: Head,
    pub(super) changes: Changes,
}

/// Those that wait, oldest first.
#[derive(Debug, Default)]
pub(super) struct Queue {
    batches: Vec<Arc<Batch>>,
    changes: usize,
    /// The version of each payload that they commit.
    committed: HashMap<B3, u64>,
    /// The database could not take them in.
    pub(super) failed: bool,
}

impl Queue {
    pub(super) fn push(&mut self, batch: Batch) {
        let entries = batch.changes.entries.iter();
        self.committed.extend(entries.map(|(entry, proposal)| (proposal.b3(), entry.record().version)));
        self.changes += batch.changes.count();
        self.batches.push(Arc::new(batch));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    pub(super) fn is_enough(&self) -> bool {
        self.changes >= ENOUGH
    }

    /// HEAD after the last of them that moved it.
    pub(super) fn head(&self) -> Option<Head> {
        let last = self.batches.iter().rev().find_map(|batch| batch.changes.head());
        last.or_else(|| Some(self.batches.first()?.expected))
    }

    pub(super) fn committed(&self, payload: B3) -> Option<u64> {
        self.committed.get(&payload).copied()
    }

    pub(super) fn batches(&self) -> Vec<Arc<Batch>> {
        self.batches.clone()
    }

    /// The oldest of them are in the database, for everybody to see.
    pub(super) fn forget(&mut self, count: usize) {
        for batch in self.batches.drain(..count) {
            self.changes -= batch.changes.count();
            for (_, proposal) in &batch.changes.entries {
                self.committed.remove(&proposal.b3());
            }
        }
    }
}

/// The right to write the database.
pub(super) type TakingIn<'a> = MutexGuard<'a, ()>;

/// The queue, and the right to empty it. Who has the journal may take either, and who empties the queue looks into it;
/// never the other way round.
#[derive(Debug, Default)]
pub(super) struct Behind {
    queue: Mutex<Queue>,
    taking_in: Mutex<()>,
}

impl Behind {
    /// Held for moments only.
    pub(super) fn queue(&self) -> Result<MutexGuard<'_, Queue>, StoreError> {
        self.queue.lock().map_err(panicked)
    }

    /// The database did not take them in the last time.
    pub(super) fn is_stuck(&self) -> Result<bool, StoreError> {
        Ok(self.taking_in.is_poisoned() || self.queue()?.failed)
    }

    /// Held by whoever takes them in, or writes the database otherwise.
    pub(super) fn taking_in(&self) -> Result<TakingIn<'_>, StoreError> {
        self.taking_in.lock().map_err(panicked)
    }
}

/// What is told once somebody panicked over the database.
pub(super) fn panicked<T>(_: T) -> StoreError {
    StoreError::Damaged("a write before this one ended in a panic".into())
}
