//! What readers see: HEAD and the items, swapped in as a whole after each batch. Nobody waits for the writer.

use ron_log::{B3, Head, Key, SignerSet, State, Tree};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

/// The last entry, as it is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadInfo {
    pub(crate) version: u64,
    pub(crate) hash: B3,
    pub(crate) payload_b3: B3,
    /// The version that last changed the signer set.
    pub(crate) signers_version: u64,
    pub(crate) committed_at: u64,
}

impl HeadInfo {
    pub(crate) fn head(&self) -> Head {
        Head { version: self.version, hash: self.hash }
    }
}

/// The registry after an entry.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) head: HeadInfo,
    pub(crate) signers: Arc<SignerSet>,
    pub(crate) tree: Tree,
    pub(crate) items: Items,
}

/// An item and the version that last changed it.
pub(crate) type Item = (u64, Arc<str>);

const FANOUT: usize = 64;

/// The items by a hash of their keys, three levels deep: a change copies four short lists, up to some millions of
/// items, so that every batch can leave a view of its own. What nothing was ever put into is shared.
#[derive(Clone, Debug)]
pub(crate) struct Items {
    all: List<List<List<Arc<Shard>>>>,
    nothing: List<List<Arc<Shard>>>,
}

type List<T> = Arc<Vec<T>>;
/// A few, in any order.
type Shard = Vec<(Key, Item)>;

impl Default for Items {
    fn default() -> Items {
        let row: List<Arc<Shard>> = Arc::new(vec![Arc::default(); FANOUT]);
        let nothing = Arc::new(vec![row; FANOUT]);
        Items { all: Arc::new(vec![nothing.clone(); FANOUT]), nothing }
    }
}

impl Items {
    pub(crate) fn of(state: &State) -> Items {
        let mut items = Items::default();
        for (key, version, body) in state.items() {
            items.set(key, Some((version, body.clone())));
        }
        items
    }

    pub(crate) fn set(&mut self, key: &Key, item: Option<Item>) {
        let [first, second, third] = place(key);
        let rows = Arc::make_mut(&mut Arc::make_mut(&mut self.all)[first]);
        let shard = Arc::make_mut(&mut Arc::make_mut(&mut rows[second])[third]);
        shard.retain(|(known, _)| known != key);
        if let Some(item) = item {
            shard.reserve_exact(1);
            shard.push((key.clone(), item));
        }
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Item> {
        let [first, second, third] = place(key);
        self.all[first][second][third].iter().find(|(known, _)| known == key).map(|(_, item)| item)
    }

    /// All of a kind, or all, by kind and id.
    pub(crate) fn sorted(&self, kind: Option<&str>) -> Vec<(&Key, &Item)> {
        let none = &self.nothing[0];
        let rows =
            self.all.iter().filter(|rows| !Arc::ptr_eq(rows, &self.nothing)).flat_map(|rows| rows.iter());
        let shards = rows.filter(|row| !Arc::ptr_eq(row, none)).flat_map(|row| row.iter());
        let all = shards.flat_map(|shard| shard.iter()).map(|(key, item)| (key, item));
        let mut found: Vec<_> = all.filter(|(key, _)| kind.is_none_or(|kind| key.kind == kind)).collect();
        found.sort_by_key(|(key, _)| *key);
        found
    }
}

fn place(key: &Key) -> [usize; 3] {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    let hash = hasher.finish() as usize;
    [hash % FANOUT, hash / FANOUT % FANOUT, hash / FANOUT / FANOUT % FANOUT]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_keeps_what_it_had_while_the_next_one_changes() {
        let key = |n: u64| Key::new("x-n", &n.to_string()).unwrap();
        let mut items = Items::default();
        for n in 0..10_000 {
            items.set(&key(n), Some((n, "1".into())));
        }
        let before = items.clone();
        items.set(&key(7), Some((10_000, "2".into())));
        items.set(&key(8), None);
        assert_eq!(before.get(&key(7)), Some(&(7, "1".into())));
        assert_eq!(items.get(&key(7)), Some(&(10_000, "2".into())));
        assert_eq!(
            (items.get(&key(8)), before.sorted(None).len(), items.sorted(None).len()),
            (None, 10_000, 9_999)
        );
        assert!(items.sorted(Some("x-n")).windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert!(items.sorted(Some("x-other")).is_empty());
    }
}
