//! What is asked for again and again is kept at hand, within a bound: the bytes of small objects, the open files of others.
//!
//! They hang on the object's own [`Condition`], so that a look costs no lock and an object that is replaced or goes
//! takes them along. The list only says whose turn it is to be let go: the one longest kept that nobody asked for since.

use super::catalog::Condition;
use bytes::Bytes;
use ron_kernel::inventory::{Inventory, LockSpec};
use ron_kernel::lock::Lock;
use std::collections::VecDeque;
use std::fs::File;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// Bytes of all objects that are kept so.
const HOT_BYTES: u64 = 32 << 20;
/// An open file counts as so many bytes: at most 256 are open.
const FILE_BYTES: u64 = HOT_BYTES / 256;

pub(crate) static HOT: LockSpec =
    LockSpec { service: "edge", name: "hot", rank: 20, guards: "which objects are kept at hand" };

/// What is kept of an object.
#[derive(Clone, Debug)]
pub(super) enum Held {
    Bytes(Bytes),
    File(Arc<File>),
}

#[derive(Debug, Default)]
struct Kept {
    queue: VecDeque<(Weak<Condition>, u64)>,
    bytes: u64,
}

#[derive(Debug)]
pub(super) struct Hot {
    kept: Lock<Kept>,
    max: u64,
}

impl Hot {
    pub(super) fn new(inventory: &Inventory) -> Hot {
        Hot { kept: Lock::new(inventory, &HOT, Kept::default()), max: HOT_BYTES }
    }

    /// Keeps an object's bytes or file, unless something is kept of it already.
    pub(super) fn keep(&self, condition: &Arc<Condition>, held: Held) {
        let len = match &held {
            Held::Bytes(bytes) => bytes.len() as u64,
            Held::File(_) => FILE_BYTES,
        };
        if len > self.max / 8 {
            return;
        }
        let mut kept = self.kept.lock();
        if condition.held.load().is_some() {
            return;
        }
        condition.held.store(Some(Arc::new(held)));
        kept.queue.push_back((Arc::downgrade(condition), len));
        kept.bytes += len;
        let mut looks = 2 * kept.queue.len();
        while kept.bytes > self.max && looks > 0 {
            looks -= 1;
            let Some((oldest, len)) = kept.queue.pop_front() else { break };
            let alive = oldest.upgrade();
            if alive.as_ref().is_some_and(|condition| condition.wanted.swap(false, Ordering::Relaxed)) {
                kept.queue.push_back((oldest, len));
                continue;
            }
            kept.bytes -= len;
            if let Some(condition) = alive {
                condition.held.store(None);
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
        let mut hot = Hot::new(&Inventory::new(Metrics::default()));
        hot.max = 1000;
        let all: Vec<Arc<Condition>> = (0..50).map(|_| Arc::default()).collect();
        for condition in &all {
            all[0].wanted.store(true, Ordering::Relaxed);
            hot.keep(condition, Held::Bytes(vec![0; 100].into()));
            hot.keep(condition, Held::Bytes(vec![0; 100].into()));
            assert!(hot.kept.lock().bytes <= 1000);
        }
        let held: Vec<usize> = (0..50).filter(|index| all[*index].held.load().is_some()).collect();
        assert_eq!(held.len(), 10);
        assert!(held.contains(&0) && held.contains(&49) && !held.contains(&20), "{held:?}");
        hot.keep(&Arc::default(), Held::Bytes(vec![0; 200].into()));
        assert!(hot.kept.lock().bytes <= 1000, "too large to be worth it");
        drop(all);
        for _ in 0..20 {
            hot.keep(&Arc::default(), Held::Bytes(vec![0; 100].into()));
        }
        assert!(hot.kept.lock().queue.len() <= 10, "those that are gone leave their places");
    }
    #[test]
    fn no_more_files_are_open_than_the_bound_allows() {
        let hot = Hot::new(&Inventory::new(Metrics::default()));
        let all: Vec<Arc<Condition>> = (0..300).map(|_| Arc::default()).collect();
        for condition in &all {
            hot.keep(condition, Held::File(Arc::new(tempfile::tempfile().unwrap())));
        }
        assert_eq!(all.iter().filter(|condition| condition.held.load().is_some()).count(), 256);
    }
}
