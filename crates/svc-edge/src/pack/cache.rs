//! Decoded leaf directories, as many as fit into a number of bytes.

use super::Fault;
use super::directory::{Directory, Leaf};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What an entry takes beside its directory.
const OVERHEAD: usize = 2 * size_of::<Key>() + size_of::<Slot>();

/// A cache for the leaf directories of any number of packs. What a request comes back for stays; of the rest the
/// oldest goes first. A faulty leaf is remembered too, so that asking for it again costs nothing.
#[derive(Debug)]
pub struct DirectoryCache {
    bytes_max: usize,
    packs: AtomicU64,
    /// Taken for a look-up or an insertion, never while reading or decoding.
    kept: Mutex<Kept>,
}

/// A pack's number, which no other pack of the cache ever had, and its leaf.
type Key = (u64, Leaf);

#[derive(Debug, Default)]
struct Kept {
    slots: HashMap<Key, Slot>,
    /// In the order of their turn to go.
    order: VecDeque<Key>,
    bytes: usize,
}

#[derive(Debug)]
struct Slot {
    directory: Result<Arc<Directory>, Fault>,
    used: bool,
}

impl Slot {
    fn bytes(&self) -> usize {
        OVERHEAD + self.directory.as_ref().map_or(0, |directory| directory.bytes())
    }
}

impl DirectoryCache {
    pub fn new(bytes_max: usize) -> Self {
        Self { bytes_max, packs: AtomicU64::new(0), kept: Mutex::default() }
    }

    /// What it holds now.
    pub fn bytes(&self) -> usize {
        self.lock().bytes
    }

    /// A number for another pack.
    pub(super) fn enrol(&self) -> u64 {
        self.packs.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn find(&self, pack: u64, leaf: Leaf) -> Option<Result<Arc<Directory>, Fault>> {
        let mut kept = self.lock();
        let slot = kept.slots.get_mut(&(pack, leaf))?;
        slot.used = true;
        Some(slot.directory.clone())
    }

    pub(super) fn keep(&self, pack: u64, leaf: Leaf, directory: Result<Arc<Directory>, Fault>) {
        let slot = Slot { directory, used: false };
        let bytes = slot.bytes();
        if bytes > self.bytes_max {
            return;
        }
        let mut kept = self.lock();
        let Kept { slots, order, bytes: sum } = &mut *kept;
        // Two requests may have decoded the same leaf at the same time.
        if slots.contains_key(&(pack, leaf)) {
            return;
        }
        while *sum + bytes > self.bytes_max
            && let Some(key) = order.pop_front()
        {
            let again = slots.get_mut(&key).is_some_and(|slot| std::mem::take(&mut slot.used));
            if again {
                order.push_back(key);
            } else if let Some(slot) = slots.remove(&key) {
                *sum -= slot.bytes();
            }
        }
        *sum += bytes;
        slots.insert((pack, leaf), slot);
        order.push_back((pack, leaf));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::directory::{Entry, Span};
    use super::super::header::Section;
    use super::*;

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
        let cache = DirectoryCache::new(20_000);
        let pack = cache.enrol();
        cache.keep(pack, leaf(0), directory(100));
        for number in 1..1000 {
            assert!(cache.find(pack, leaf(0)).is_some(), "it is asked for all the time");
            cache.keep(pack, leaf(number), directory(1 + number % 200));
            assert!(cache.bytes() <= 20_000);
        }
        assert!(cache.find(pack, leaf(1)).is_none(), "nobody came back for it");
        assert_eq!(cache.find(pack, leaf(999)), Some(directory(200)));
        let kept = cache.lock();
        assert_eq!(kept.bytes, kept.slots.values().map(Slot::bytes).sum::<usize>());
        assert_eq!(kept.slots.len(), kept.order.len());
    }

    #[test]
    fn packs_do_not_see_each_other_s_leaves() {
        let cache = DirectoryCache::new(20_000);
        let (one, other) = (cache.enrol(), cache.enrol());
        cache.keep(one, leaf(0), directory(1));
        cache.keep(other, leaf(0), Err(Fault::Order));
        cache.keep(other, leaf(0), directory(1));
        assert_eq!(cache.find(one, leaf(0)), Some(directory(1)));
        assert_eq!(cache.find(other, leaf(0)), Some(Err(Fault::Order)));
    }

    #[test]
    fn what_is_larger_than_the_cache_is_not_kept() {
        let cache = DirectoryCache::new(1000);
        cache.keep(0, leaf(0), directory(900));
        assert_eq!((cache.bytes(), cache.find(0, leaf(0))), (0, None));
    }
}
