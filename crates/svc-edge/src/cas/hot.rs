//! What is asked for again and again is kept at hand, within a bound: the bytes of small objects, the open files of others
//! and of those between.
//!
//! They hang on the object's own [`Condition`], so that a look costs no lock and an object that is replaced or goes
//! takes them along. The list only says whose turn it is to be let go: the one longest kept that nobody asked for since.

use super::catalog::Condition;
use arc_swap::ArcSwapOption;
use bytes::Bytes;
use ron_kernel::http::SentFile;
use ron_kernel::inventory::{Inventory, LockSpec};
use ron_kernel::lock::Lock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// Bytes of all objects that are kept so.
const BYTES_MAX: u64 = 32 << 20;
/// Files that are kept open.
const FILES_MAX: u64 = 256;

pub(crate) static HOT: LockSpec =
    LockSpec { service: "edge", name: "hot", rank: 20, guards: "which objects are kept at hand" };

/// Where something is kept of an object.
#[derive(Debug)]
pub(super) struct Slot<T> {
    kept: ArcSwapOption<T>,
    /// Somebody asked for it since it was last looked.
    wanted: AtomicBool,
}

impl<T> Default for Slot<T> {
    fn default() -> Slot<T> {
        Slot { kept: ArcSwapOption::empty(), wanted: AtomicBool::new(false) }
    }
}

impl<T> Slot<T> {
    pub(super) fn get(&self) -> Option<Arc<T>> {
        let kept = self.kept.load_full()?;
        // Written only if it changes, so that the readers of a popular object do not take its line from each other.
        if !self.wanted.load(Ordering::Relaxed) {
            self.wanted.store(true, Ordering::Relaxed);
        }
        Some(kept)
    }
}

#[derive(Debug, Default)]
struct Kept {
    queue: VecDeque<(Weak<Condition>, u64)>,
    weight: u64,
}

/// One kind of what is kept, `T`, in the slot of each object that is for it.
#[derive(Debug)]
pub(super) struct Hot<T> {
    kept: Lock<Kept>,
    slot: fn(&Condition) -> &Slot<T>,
    max: u64,
}

impl Hot<Bytes> {
    pub(super) fn bytes(inventory: &Inventory) -> Hot<Bytes> {
        Hot::new(inventory, |condition| &condition.hot_bytes, BYTES_MAX)
    }
}

impl Hot<SentFile> {
    pub(super) fn files(inventory: &Inventory) -> Hot<SentFile> {
        Hot::new(inventory, |condition| &condition.hot_file, FILES_MAX)
    }
}

impl<T> Hot<T> {
    fn new(inventory: &Inventory, slot: fn(&Condition) -> &Slot<T>, max: u64) -> Hot<T> {
        Hot { kept: Lock::new(inventory, &HOT, Kept::default()), slot, max }
    }

    /// Keeps something of an object that weighs so much, unless that is kept already.
    pub(super) fn keep(&self, condition: &Arc<Condition>, it: Arc<T>, weight: u64) {
        if weight > self.max / 8 {
            return;
        }
        let mut kept = self.kept.lock();
        let slot = &(self.slot)(condition).kept;
        if slot.load().is_some() {
            return;
        }
        slot.store(Some(it));
        kept.queue.push_back((Arc::downgrade(condition), weight));
        kept.weight += weight;
        let mut looks = 2 * kept.queue.len();
        while kept.weight > self.max && looks > 0 {
            looks -= 1;
            let Some((oldest, weight)) = kept.queue.pop_front() else { break };
            let alive = oldest.upgrade();
            let slot = alive.as_deref().map(self.slot);
            if slot.is_some_and(|slot| slot.wanted.swap(false, Ordering::Relaxed)) {
                kept.queue.push_back((oldest, weight));
                continue;
            }
            kept.weight -= weight;
            if let Some(slot) = slot {
                slot.kept.store(None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ron_kernel::metrics::Metrics;

    #[test]
    fn what_is_kept_stays_within_its_bound_and_what_is_wanted_stays_longest() {
        let mut hot = Hot::bytes(&Inventory::new(Metrics::default()));
        hot.max = 1000;
        let hundred = || Arc::new(Bytes::from_static(&[0; 100]));
        let all: Vec<Arc<Condition>> = (0..50).map(|_| Arc::default()).collect();
        for condition in &all {
            all[0].hot_bytes.get();
            hot.keep(condition, hundred(), 100);
            hot.keep(condition, hundred(), 100);
            assert!(hot.kept.lock().weight <= 1000);
        }
        let held: Vec<usize> = (0..50).filter(|index| all[*index].hot_bytes.get().is_some()).collect();
        assert_eq!(held.len(), 10);
        assert!(held.contains(&0) && held.contains(&49) && !held.contains(&20), "{held:?}");
        hot.keep(&Arc::default(), hundred(), 200);
        assert!(hot.kept.lock().weight <= 1000, "too large to be worth it");
        drop(all);
        for _ in 0..20 {
            hot.keep(&Arc::default(), hundred(), 100);
        }
        assert!(hot.kept.lock().queue.len() <= 10, "those that are gone leave their places");
    }

    #[test]
    fn no_more_files_are_open_than_the_bound_allows() {
        let hot = Hot::files(&Inventory::new(Metrics::default()));
        let all: Vec<Arc<Condition>> = (0..300).map(|_| Arc::default()).collect();
        for condition in &all {
            hot.keep(condition, Arc::new(tempfile::tempfile().unwrap().into()), 1);
        }
        assert_eq!(all.iter().filter(|condition| condition.hot_file.get().is_some()).count(), 256);
    }
}
