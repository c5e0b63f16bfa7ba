//! The tree's edge: which tiles a new leaf changes.

use ron_log::Tree;
use ron_log::tile::TILE_WIDTH;
use ron_log::tree::Hash;
use std::collections::BTreeMap;

/// Adds a leaf; `changed` gets each tile it changes, as a whole, and `edge` keeps those that are not full.
pub fn append(
    tree: &mut Tree,
    edge: &mut BTreeMap<u8, Vec<u8>>,
    leaf: Hash,
    changed: &mut BTreeMap<(u8, u64), Vec<u8>>,
) {
    tree.append(leaf, |level, place, hash| {
        let tile = edge.entry(level).or_default();
        tile.extend_from_slice(hash);
        changed.insert((level, place / TILE_WIDTH), tile.clone());
        if (place + 1) % TILE_WIDTH == 0 {
            edge.remove(&level);
        }
    });
}
