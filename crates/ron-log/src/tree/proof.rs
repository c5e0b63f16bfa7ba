//! Inclusion and consistency: made from tiles, checked from hashes alone.

use super::{Hash, node_hash};
use crate::tile::{TILE_WIDTH, Tile};
use std::collections::BTreeMap;

/// Why a proof could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProofError<E> {
    #[error("there is no such leaf or tree")]
    OutOfRange,
    #[error("tile {0:?} is shorter than its tree says")]
    ShortTile(Tile),
    #[error("a tile could not be read")]
    Read(E),
}

/// The audit path of a leaf in the tree of a size, from the leaf's sibling up.
pub fn inclusion<E>(
    index: u64,
    size: u64,
    read: impl FnMut(Tile) -> Result<Vec<u8>, E>,
) -> Result<Vec<Hash>, ProofError<E>> {
    if index >= size {
        return Err(ProofError::OutOfRange);
    }
    let mut nodes = Nodes::new(size, read);
    let (mut start, mut end, mut path) = (0, size, Vec::new());
    while end - start > 1 {
        let middle = start + split(end - start);
        if index < middle {
            path.push(nodes.range(middle, end)?);
            end = middle;
        } else {
            path.push(nodes.range(start, middle)?);
            start = middle;
        }
    }
    path.reverse();
    Ok(path)
}

/// The proof that the tree of size `to` continues that of size `from`.
pub fn consistency<E>(
    from: u64,
    to: u64,
    read: impl FnMut(Tile) -> Result<Vec<u8>, E>,
) -> Result<Vec<Hash>, ProofError<E>> {
    if from > to {
        return Err(ProofError::OutOfRange);
    }
    if from == 0 || from == to {
        return Ok(Vec::new());
    }
    let mut nodes = Nodes::new(to, read);
    let (mut start, mut end, mut path) = (0, to, Vec::new());
    // Down to the subtree that the old tree ends with.
    while end != from {
        let middle = start + split(end - start);
        if from <= middle {
            path.push(nodes.range(middle, end)?);
            end = middle;
        } else {
            path.push(nodes.range(start, middle)?);
            start = middle;
        }
    }
    // The old tree's own root is known to whoever asks.
    if start > 0 {
        path.push(nodes.range(start, end)?);
    }
    path.reverse();
    Ok(path)
}

/// Whether a path leads from a leaf to the root of a tree.
pub fn verify_inclusion(leaf: &Hash, index: u64, size: u64, path: &[Hash], root: &Hash) -> bool {
    if index >= size {
        return false;
    }
    let (mut node, mut at, mut last) = (*leaf, index, size - 1);
    for sibling in path {
        if last == 0 {
            return false;
        }
        if at & 1 == 1 || at == last {
            node = node_hash(sibling, &node);
            while at & 1 == 0 && at != 0 {
                at >>= 1;
                last >>= 1;
            }
        } else {
            node = node_hash(&node, sibling);
        }
        at >>= 1;
        last >>= 1;
    }
    last == 0 && node == *root
}

/// Whether a path shows that a tree continues another.
pub fn verify_consistency(from: u64, to: u64, path: &[Hash], from_root: &Hash, to_root: &Hash) -> bool {
    if from > to {
        return false;
    }
    if from == to {
        return path.is_empty() && from_root == to_root;
    }
    if from == 0 {
        return path.is_empty();
    }
    let whole = from.is_power_of_two().then_some(from_root);
    let mut hashes = whole.into_iter().chain(path);
    let Some(first) = hashes.next() else { return false };
    let (mut at, mut last) = (from - 1, to - 1);
    while at & 1 == 1 {
        at >>= 1;
        last >>= 1;
    }
    let (mut old, mut new) = (*first, *first);
    for hash in hashes {
        if last == 0 {
            return false;
        }
        if at & 1 == 1 || at == last {
            old = node_hash(hash, &old);
            new = node_hash(hash, &new);
            while at & 1 == 0 && at != 0 {
                at >>= 1;
                last >>= 1;
            }
        } else {
            new = node_hash(&new, hash);
        }
        at >>= 1;
        last >>= 1;
    }
    last == 0 && old == *from_root && new == *to_root
}

/// The largest power of two below a count of at least two.
fn split(count: u64) -> u64 {
    1 << (63 - (count - 1).leading_zeros())
}

/// The nodes of a tree, computed from its tiles; each tile is read once.
pub(super) struct Nodes<R> {
    size: u64,
    read: R,
    tiles: BTreeMap<(u8, u64), Vec<u8>>,
}

impl<E, R: FnMut(Tile) -> Result<Vec<u8>, E>> Nodes<R> {
    pub(super) fn new(size: u64, read: R) -> Self {
        Self { size, read, tiles: BTreeMap::new() }
    }

    /// The hash over the leaves from `start` to `end`.
    fn range(&mut self, start: u64, end: u64) -> Result<Hash, ProofError<E>> {
        let count = end - start;
        if count.is_power_of_two() && start.is_multiple_of(count) {
            return self.node(count.trailing_zeros(), start / count);
        }
        let middle = start + split(count);
        Ok(node_hash(&self.range(start, middle)?, &self.range(middle, end)?))
    }

    /// A full subtree's root, by its height and its place among those of that height.
    pub(super) fn node(&mut self, height: u32, place: u64) -> Result<Hash, ProofError<E>> {
        let (level, within) = ((height / 8) as u8, height % 8);
        let first = place << within;
        let tile = Tile::of(level, first / TILE_WIDTH, self.size).ok_or(ProofError::OutOfRange)?;
        let bytes = match self.tiles.entry((tile.level, tile.index)) {
            std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::btree_map::Entry::Vacant(new) => {
                let bytes = (self.read)(tile).map_err(ProofError::Read)?;
                // A full tile may be given for a partial one that it has replaced.
                if bytes.len() < usize::from(tile.width) * 32 {
                    return Err(ProofError::ShortTile(tile));
                }
                new.insert(bytes)
            }
        };
        let from = (first % TILE_WIDTH) as usize * 32;
        let wanted = bytes.get(from..from + (32 << within)).ok_or(ProofError::ShortTile(tile))?;
        let mut row: Vec<Hash> = wanted.as_chunks().0.to_vec();
        while row.len() > 1 {
            row = row.as_chunks().0.iter().map(|[left, right]| node_hash(left, right)).collect();
        }
        Ok(row[0])
    }
}
