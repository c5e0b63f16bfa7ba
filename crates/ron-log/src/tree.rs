//! The Merkle tree over the entries' records: RFC 6962 hashing with SHA-256, grown one leaf at a time.

mod proof;

pub use proof::{ProofError, consistency, inclusion, verify_consistency, verify_inclusion};

use sha2::{Digest as _, Sha256};

/// A node's hash.
pub type Hash = [u8; 32];

pub fn leaf_hash(record: &[u8]) -> Hash {
    let mut hasher = Sha256::new();
    hasher.update([0]);
    hasher.update(record);
    hasher.finalize().into()
}

pub fn node_hash(left: &Hash, right: &Hash) -> Hash {
    let mut bytes = [1; 65];
    bytes[1..33].copy_from_slice(left);
    bytes[33..].copy_from_slice(right);
    Sha256::digest(bytes).into()
}

/// A growing tree: its size and the roots of the full subtrees it consists of, largest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tree {
    size: u64,
    peaks: Vec<Hash>,
}

impl Tree {
    /// The tree of the first `size` leaves, its peaks read from stored tiles.
    pub fn from_tiles<E>(
        size: u64,
        read: impl FnMut(crate::tile::Tile) -> Result<Vec<u8>, E>,
    ) -> Result<Self, ProofError<E>> {
        let mut nodes = proof::Nodes::new(size, read);
        let mut peaks = Vec::new();
        let mut start = 0;
        for level in (0..64).rev().filter(|level| size >> level & 1 == 1) {
            peaks.push(nodes.node(level, start >> level)?);
            start += 1 << level;
        }
        Ok(Self { size, peaks })
    }

    /// The tree with these peaks, if there is one for each bit of the size.
    pub(crate) fn from_peaks(size: u64, peaks: Vec<Hash>) -> Option<Self> {
        (peaks.len() == size.count_ones() as usize).then_some(Self { size, peaks })
    }

    pub(crate) fn peaks(&self) -> &[Hash] {
        &self.peaks
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    /// Adds a leaf. Each hash that belongs in a tile is told: tile level, place within the level, hash.
    pub fn append(&mut self, leaf: Hash, mut tile_hash: impl FnMut(u8, u64, &Hash)) {
        tile_hash(0, self.size, &leaf);
        let mut node = leaf;
        let merges = self.size.trailing_ones();
        self.size += 1;
        for level in 1..=merges {
            let left = self.peaks.pop().expect("a peak for each bit of the size");
            node = node_hash(&left, &node);
            if level % 8 == 0 {
                tile_hash((level / 8) as u8, (self.size >> level) - 1, &node);
            }
        }
        self.peaks.push(node);
    }

    pub fn root(&self) -> Hash {
        let mut peaks = self.peaks.iter().rev();
        match peaks.next() {
            None => Sha256::digest([]).into(),
            Some(last) => peaks.fold(*last, |right, left| node_hash(left, &right)),
        }
    }
}
