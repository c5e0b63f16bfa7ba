//! The items of a state, in a tree that copies share: to keep what it was before a change costs next to nothing.
//!
//! A branch has sixteen children, chosen by four bits of a hash of the key; what few items there are lie in one list,
//! which becomes a branch when it grows. A change copies the branches on its way, unless nobody else has them.

use crate::item::Key;
use crate::state::Held;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::mem;
use std::sync::Arc;

const FANOUT: usize = 16;
/// Bits of the hash that choose one of them.
const BITS: u32 = FANOUT.trailing_zeros();
/// A list that grows beyond it becomes a branch, as long as the hash has bits left.
const FEW_MAX: usize = 16;

/// Items and the memory of deleted ones. Cloning is cheap.
#[derive(Clone, Debug, Default)]
pub(crate) struct Items {
    root: Arc<Node>,
    count: usize,
}

type Item = Arc<(Key, Held)>;

#[derive(Clone, Debug)]
enum Node {
    /// In any order, each with the hash of its key.
    Few(Vec<(u64, Item)>),
    Branch([Arc<Node>; FANOUT]),
}

impl Default for Node {
    fn default() -> Self {
        Self::Few(Vec::new())
    }
}

impl Items {
    pub(crate) fn get(&self, key: &Key) -> Option<&Held> {
        self.get_by(hash(key), key)
    }

    fn get_by(&self, hash: u64, key: &Key) -> Option<&Held> {
        let (mut node, mut rest) = (&self.root, hash);
        loop {
            match &**node {
                Node::Branch(children) => {
                    node = &children[rest as usize % FANOUT];
                    rest >>= BITS;
                }
                Node::Few(items) => {
                    let found = items.iter().find(|(known, item)| *known == hash && item.0 == *key);
                    return found.map(|(_, item)| &item.1);
                }
            }
        }
    }

    /// Puts an item, and gives what was there.
    pub(crate) fn put(&mut self, key: Key, held: Held) -> Option<Held> {
        self.put_by(hash(&key), key, held)
    }

    fn put_by(&mut self, hash: u64, key: Key, held: Held) -> Option<Held> {
        let (mut node, mut depth) = (&mut self.root, 0);
        loop {
            let own = Arc::make_mut(node);
            match own {
                Node::Branch(children) => {
                    node = &mut children[child(hash, depth)];
                    depth += 1;
                }
                Node::Few(items) => {
                    let item = Arc::new((key, held));
                    let known = items.iter_mut().find(|(known, held)| *known == hash && held.0 == item.0);
                    if let Some((_, known)) = known {
                        let before = mem::replace(known, item);
                        return Some(
                            Arc::try_unwrap(before).map_or_else(|shared| shared.1.clone(), |it| it.1),
                        );
                    }
                    items.push((hash, item));
                    self.count += 1;
                    if items.len() > FEW_MAX && BITS * depth < u64::BITS {
                        *own = branch(mem::take(items), depth);
                    }
                    return None;
                }
            }
        }
    }

    /// All of them, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Key, &Held)> {
        let (mut nodes, mut few) = (vec![&self.root], [].iter() as std::slice::Iter<'_, (u64, Item)>);
        std::iter::from_fn(move || {
            loop {
                if let Some((_, item)) = few.next() {
                    return Some((&item.0, &item.1));
                }
                match &**nodes.pop()? {
                    Node::Branch(children) => nodes.extend(children),
                    Node::Few(items) => few = items.iter(),
                }
            }
        })
    }

    /// All of them, by kind and id.
    pub(crate) fn sorted(&self) -> Vec<(&Key, &Held)> {
        let mut all = Vec::with_capacity(self.count);
        all.extend(self.iter());
        all.sort_unstable_by_key(|(key, _)| *key);
        all
    }
}

impl PartialEq for Items {
    fn eq(&self, other: &Self) -> bool {
        self.count == other.count && self.iter().all(|(key, held)| other.get(key) == Some(held))
    }
}

impl Eq for Items {}

fn hash(key: &Key) -> u64 {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish()
}

fn child(hash: u64, depth: u32) -> usize {
    (hash >> (BITS * depth)) as usize % FANOUT
}

fn branch(items: Vec<(u64, Item)>, depth: u32) -> Node {
    let mut lists = [const { Vec::new() }; FANOUT];
    for item in items {
        lists[child(item.0, depth)].push(item);
    }
    Node::Branch(lists.map(|list| Arc::new(Node::Few(list))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn key(n: u64) -> Key {
        Key::new("x-n", &n.to_string()).unwrap()
    }

    fn held(version: u64) -> Held {
        Held { version, body: (!version.is_multiple_of(3)).then(|| version.to_string().into()) }
    }

    fn check(items: &Items, expected: &BTreeMap<Key, Held>) {
        assert_eq!(items.sorted(), expected.iter().collect::<Vec<_>>());
        assert!(expected.iter().all(|(key, held)| items.get(key) == Some(held)));
        assert_eq!(items.get(&Key::new("x-other", "1").unwrap()), None);
    }

    proptest! {
        #[test]
        fn copies_keep_what_they_had(puts in prop::collection::vec(0u64..3000, 1..3000), every in 1usize..500) {
            let (mut items, mut expected) = (Items::default(), BTreeMap::new());
            let mut copies = Vec::new();
            for (version, n) in puts.into_iter().enumerate() {
                if version % every == 0 {
                    copies.push((items.clone(), expected.clone()));
                }
                let held = held(version as u64);
                prop_assert_eq!(items.put(key(n), held.clone()), expected.insert(key(n), held));
            }
            copies.push((items, expected));
            for (index, (items, expected)) in copies.iter().enumerate() {
                check(items, expected);
                let same = copies.iter().map(|(other, _)| items == other);
                let expected = copies.iter().map(|(_, other)| expected == other);
                prop_assert!(same.eq(expected), "{}", index);
            }
        }
    }

    #[test]
    fn keys_whose_hashes_are_the_same_to_the_last_bit_are_told_apart() {
        let mut items = Items::default();
        for n in 0..100 {
            assert_eq!(items.put_by(u64::MAX, key(n), held(n)), None);
        }
        assert!((0..100).all(|n| items.get_by(u64::MAX, &key(n)) == Some(&held(n))));
        assert_eq!(items.put_by(u64::MAX, key(7), held(200)), Some(held(7)));
        assert_eq!((items.count, items.sorted().len()), (100, 100));
    }
}
