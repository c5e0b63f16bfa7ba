//! What packs keep in memory: decoded leaf directories and tiles, as many as fit into a number of bytes.

use super::Fault;
use super::directory::{Directory, Leaf};
use ron_kernel::inventory::{Inventory, LockSpec};
use ron_kernel::lock::{Lock, LockGuard};
use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) static DIRECTORIES: LockSpec = LockSpec {
    service: "edge",
    name: "pack_directories",
    rank: 50,
    guards: "leaf directories of packs in memory; for a look or an insertion, never while reading or decoding",
};

/// Values within a number of bytes. What somebody comes back for stays; of the rest the oldest goes first.
#[derive(Debug)]
pub(crate) struct Kept<K, V> {
    bytes_max: usize,
    slots: Lock<Slots<K, V>>,
}

#[derive(Debug)]
struct Slots<K, V> {
    slots: HashMap<K, Slot<V>>,
    /// In the order of their turn to go.
    order: VecDeque<K>,
    bytes: usize,
}

#[derive(Debug)]
struct Slot<V> {
    value: V,
    bytes: usize,
    used: bool,
}

impl<K: Copy + Eq + Hash, V: Clone> Kept<K, V> {
    /// What a value takes beside its own bytes.
    const OVERHEAD: usize = 2 * size_of::<K>() + size_of::<Slot<V>>();

    pub(crate) fn new(inventory: &Inventory, spec: &'static LockSpec, bytes_max: usize) -> Self {
        let slots = Slots { slots: HashMap::new(), order: VecDeque::new(), bytes: 0 };
        Self { bytes_max, slots: Lock::new(inventory, spec, slots) }
    }

    /// What it holds now.
    pub(crate) fn bytes(&self) -> usize {
        self.lock().bytes
    }

    pub(crate) fn find(&self, key: K) -> Option<V> {
        let mut kept = self.lock();
        let slot = kept.slots.get_mut(&key)?;
        slot.used = true;
        Some(slot.value.clone())
    }

    /// Keeps a value of so many bytes, unless that is more than fits, or it is there already.
    pub(crate) fn keep(&self, key: K, value: V, bytes: usize) {
        let bytes = bytes.saturating_add(Self::OVERHEAD);
        if bytes > self.bytes_max {
            return;
        }
        let mut kept = self.lock();
        let Slots { slots, order, bytes: sum } = &mut *kept;
        // Two requests may have read the same at the same time.
        if slots.contains_key(&key) {
            return;
        }
        while *sum + bytes > self.bytes_max
            && let Some(oldest) = order.pop_front()
        {
            let again = slots.get_mut(&oldest).is_some_and(|slot| std::mem::take(&mut slot.used));
            if again {
                order.push_back(oldest);
            } else if let Some(slot) = slots.remove(&oldest) {
                *sum -= slot.bytes;
            }
        }
        *sum += bytes;
        slots.insert(key, Slot { value, bytes, used: false });
        order.push_back(key);
    }

    fn lock(&self) -> LockGuard<'_, Slots<K, V>> {
        self.slots.lock()
    }
}

/// A cache for the leaf directories of any number of packs. A faulty leaf is remembered too, so that asking for it
/// again costs nothing.
#[derive(Debug)]
pub struct DirectoryCache {
    packs: AtomicU64,
    inventory: Inventory,
    /// By a pack's number, which no other pack of the cache ever had, and the leaf.
    kept: Kept<(u64, Leaf), Result<Arc<Directory>, Fault>>,
}

impl DirectoryCache {
    pub fn new(inventory: &Inventory, bytes_max: usize) -> Self {
        let kept = Kept::new(inventory, &DIRECTORIES, bytes_max);
        Self { packs: AtomicU64::new(0), inventory: inventory.clone(), kept }
    }

    /// What it holds now.
    pub fn bytes(&self) -> usize {
        self.kept.bytes()
    }

    /// Where locks are listed.
    pub(crate) fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// A number for another pack.
    pub(super) fn enrol(&self) -> u64 {
        self.packs.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn find(&self, pack: u64, leaf: Leaf) -> Option<Result<Arc<Directory>, Fault>> {
        self.kept.find((pack, leaf))
    }

    pub(super) fn keep(&self, pack: u64, leaf: Leaf, directory: Result<Arc<Directory>, Fault>) {
        let bytes = directory.as_ref().map_or(0, |directory| directory.bytes());
        self.kept.keep((pack, leaf), directory, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::super::directory::{Entry, Span};
    use super::super::header::Section;
    use super::*;
    use ron_kernel::metrics::Metrics;

    fn cache(bytes: usize) -> DirectoryCache {
        DirectoryCache::new(&Inventory::new(Metrics::default()), bytes)
    }

    fn leaf(number: u64) -> Leaf {
        Leaf { section: Section { offset: number, length: 1 }, from: 0, until: 1 }
    }

    fn directory(entries: u64) -> Result<Arc<Directory>, Fault> {
        let entry = |id| Entry { id, offset: id, length: 1, run: 1 };
        let bytes = Directory::write(&(0..entries).map(entry).collect::<Vec<_>>());
        let span = Span { ids: 0..1000, tile_bytes: 1000, leaf_bytes: 0 };
        Ok(Arc::new(Directory::parse(&bytes, &span).unwrap()))
    }

    #[test]
    fn the_cache_keeps_to_its_bytes_and_to_what_is_used() {
        let cache = cache(20_000);
        let pack = cache.enrol();
        cache.keep(pack, leaf(0), directory(100));
        for number in 1..1000 {
            assert!(cache.find(pack, leaf(0)).is_some(), "it is asked for all the time");
            cache.keep(pack, leaf(number), directory(1 + number % 200));
            assert!(cache.bytes() <= 20_000);
        }
        assert!(cache.find(pack, leaf(1)).is_none(), "nobody came back for it");
        assert_eq!(cache.find(pack, leaf(999)), Some(directory(200)));
        let kept = cache.kept.lock();
        assert_eq!(kept.bytes, kept.slots.values().map(|slot| slot.bytes).sum::<usize>());
        assert_eq!(kept.slots.len(), kept.order.len());
    }

    #[test]
    fn packs_do_not_see_each_other_s_leaves() {
        let cache = cache(20_000);
        let (one, other) = (cache.enrol(), cache.enrol());
        cache.keep(one, leaf(0), directory(1));
        cache.keep(other, leaf(0), Err(Fault::Order));
        cache.keep(other, leaf(0), directory(1));
        assert_eq!(cache.find(one, leaf(0)), Some(directory(1)));
        assert_eq!(cache.find(other, leaf(0)), Some(Err(Fault::Order)));
    }

    #[test]
    fn what_is_larger_than_the_cache_is_not_kept() {
        let cache = cache(1000);
        cache.keep(0, leaf(0), directory(900));
        assert_eq!((cache.bytes(), cache.find(0, leaf(0))), (0, None));
    }
}
