//! BLAKE3's own tree, kept beside an object so that any part of it can be checked without reading the rest.
//!
//! The outboard holds both children's chaining values of every inner node above groups of [`GROUP`] bytes, children
//! before parents: it can be written while the object is hashed, and a reader finds each node by arithmetic. An object
//! of one group has none: its address is its check.

use crate::address::Address;
use blake3::Hasher;
use blake3::hazmat::{HasherExt as _, Mode, merge_subtrees_non_root, merge_subtrees_root};
use std::io;

/// Bytes that are checked at a time; 64 chunks of BLAKE3.
pub const GROUP: u64 = 64 << 10;
const NODE: u64 = 64;

type ChainingValue = [u8; 32];

/// How many groups an object of this length has.
fn groups_of(len: u64) -> u64 {
    len.div_ceil(GROUP).max(1)
}

/// Length of the outboard of an object of this length.
pub fn outboard_len(len: u64) -> u64 {
    (groups_of(len) - 1) * NODE
}

/// Hashes an object as it comes and gives out its tree.
#[derive(Debug)]
pub struct TreeHasher {
    group: Hasher,
    filled: u64,
    /// Groups that are closed.
    groups: u64,
    stack: Vec<ChainingValue>,
    last: Option<(ChainingValue, ChainingValue)>,
}

impl Default for TreeHasher {
    fn default() -> TreeHasher {
        TreeHasher { group: Hasher::new(), filled: 0, groups: 0, stack: Vec::new(), last: None }
    }
}

impl TreeHasher {
    /// Adds bytes; `emit` gets the nodes that are complete.
    pub fn update(
        &mut self,
        mut data: &[u8],
        emit: &mut impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        while !data.is_empty() {
            if self.filled == GROUP {
                // Only now is it known not to be the last, and so not the root.
                self.close_group(emit)?;
            }
            let room = usize::try_from(GROUP - self.filled).unwrap_or(usize::MAX);
            let (now, later) = data.split_at(room.min(data.len()));
            self.group.update(now);
            self.filled += now.len() as u64;
            data = later;
        }
        Ok(())
    }

    fn close_group(&mut self, emit: &mut impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let mut value = self.group.finalize_non_root();
        self.groups += 1;
        self.filled = 0;
        self.group = Hasher::new();
        self.group.set_input_offset(self.groups * GROUP);
        // As many complete subtrees end here as the count has trailing zeros.
        for _ in 0..self.groups.trailing_zeros() {
            let left = self.stack.pop().expect("a complete subtree has a left half");
            value = self.join(left, value, emit)?;
        }
        self.stack.push(value);
        Ok(())
    }

    fn join(
        &mut self,
        left: ChainingValue,
        right: ChainingValue,
        emit: &mut impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<ChainingValue> {
        emit(&left)?;
        emit(&right)?;
        self.last = Some((left, right));
        Ok(merge_subtrees_non_root(&left, &right, Mode::Hash))
    }

    /// The address of what came.
    pub fn finish(mut self, emit: &mut impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<Address> {
        if self.groups == 0 {
            return Ok(self.group.finalize().into());
        }
        self.close_group(emit)?;
        while let (Some(right), Some(left)) = (self.stack.pop(), self.stack.pop()) {
            let joined = self.join(left, right, emit)?;
            self.stack.push(joined);
        }
        let (left, right) = self.last.expect("two groups have a parent");
        Ok(merge_subtrees_root(&left, &right, Mode::Hash).into())
    }
}

/// Why a group is not believed.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    #[error("the bytes are not those of the address")]
    Mismatch,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A subtree whose chaining value is known to be right; `None` for the root, whose hash is the address.
#[derive(Debug)]
struct Node {
    first: u64,
    groups: u64,
    /// Index of its first node in the outboard.
    at: u64,
    value: Option<ChainingValue>,
}

/// Checks groups against an address by way of the outboard. Groups in order cost one node each.
#[derive(Debug)]
pub struct TreeChecker {
    address: Address,
    groups: u64,
    stack: Vec<Node>,
}

impl TreeChecker {
    pub fn new(address: Address, len: u64) -> TreeChecker {
        TreeChecker { address, groups: groups_of(len), stack: Vec::new() }
    }

    /// Checks the bytes of one group. `read` fills its buffer from an offset in the outboard.
    pub fn check(
        &mut self,
        group: u64,
        bytes: &[u8],
        read: &mut impl FnMut(u64, &mut [u8]) -> io::Result<()>,
    ) -> Result<(), CheckError> {
        if self.groups == 1 {
            let right = Address::from(blake3::hash(bytes)) == self.address;
            return if right { Ok(()) } else { Err(CheckError::Mismatch) };
        }
        let expected = self.value_of(group, read)?;
        let mut hasher = Hasher::new();
        hasher.set_input_offset(group * GROUP);
        hasher.update(bytes);
        if hasher.finalize_non_root() == expected { Ok(()) } else { Err(CheckError::Mismatch) }
    }

    fn value_of(
        &mut self,
        group: u64,
        read: &mut impl FnMut(u64, &mut [u8]) -> io::Result<()>,
    ) -> Result<ChainingValue, CheckError> {
        loop {
            let Some(node) = self.stack.pop() else {
                self.stack.push(Node { first: 0, groups: self.groups, at: 0, value: None });
                continue;
            };
            if !(node.first..node.first + node.groups).contains(&group) {
                continue;
            }
            if let (1, Some(value)) = (node.groups, node.value) {
                // Kept: a range may end and another begin within one group.
                self.stack.push(node);
                return Ok(value);
            }
            let mut pair = [0; NODE as usize];
            read((node.at + node.groups - 2) * NODE, &mut pair)?;
            let (left, right) = pair.split_at(32);
            let (left, right): (ChainingValue, ChainingValue) =
                (left.try_into().expect("half of 64"), right.try_into().expect("half of 64"));
            let right_one = match node.value {
                None => Address::from(merge_subtrees_root(&left, &right, Mode::Hash)) == self.address,
                Some(value) => merge_subtrees_non_root(&left, &right, Mode::Hash) == value,
            };
            if !right_one {
                return Err(CheckError::Mismatch);
            }
            let half = node.groups.next_power_of_two() / 2;
            self.stack.push(Node {
                first: node.first + half,
                groups: node.groups - half,
                at: node.at + half - 1,
                value: Some(right),
            });
            self.stack.push(Node { first: node.first, groups: half, at: node.at, value: Some(left) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(len: u64) -> Vec<u8> {
        (0..len).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
    }

    fn hashed(data: &[u8], piece: usize) -> (Address, Vec<u8>) {
        let (mut hasher, mut outboard) = (TreeHasher::default(), Vec::new());
        let mut emit = |node: &[u8]| {
            outboard.extend_from_slice(node);
            Ok(())
        };
        for piece in data.chunks(piece) {
            hasher.update(piece, &mut emit).unwrap();
        }
        (hasher.finish(&mut emit).unwrap(), outboard)
    }

    fn group(data: &[u8], index: u64) -> &[u8] {
        let start = usize::try_from(index * GROUP).unwrap();
        &data[start..data.len().min(start + usize::try_from(GROUP).unwrap())]
    }

    fn check(checker: &mut TreeChecker, outboard: &[u8], index: u64, bytes: &[u8]) -> Result<(), CheckError> {
        checker.check(index, bytes, &mut |at, buffer| {
            let at = usize::try_from(at).unwrap();
            buffer.copy_from_slice(outboard.get(at..at + buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
            Ok(())
        })
    }

    #[test]
    fn the_root_is_blake3_whatever_the_length_and_every_group_checks_in_any_order() {
        for groups in [0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 21] {
            for extra in [0, 1, 1025] {
                let data = bytes(groups * GROUP + extra);
                let (address, outboard) = hashed(&data, 100_000);
                assert_eq!(address, blake3::hash(&data).into(), "{groups} {extra}");
                assert_eq!(outboard.len() as u64, outboard_len(data.len() as u64));
                let mut checker = TreeChecker::new(address, data.len() as u64);
                let count = groups_of(data.len() as u64);
                for index in (0..count).chain((0..count).rev()).chain([count / 2, 0, count - 1]) {
                    check(&mut checker, &outboard, index, group(&data, index)).unwrap();
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_flipped_bit_passes(at in any::<prop::sample::Index>(), bit in 0u8..8, of_outboard in any::<bool>()) {
            let mut data = bytes(5 * GROUP + 77);
            let (address, mut outboard) = hashed(&data, 1 << 20);
            let target = if of_outboard { &mut outboard } else { &mut data };
            let index = at.index(target.len());
            target[index] ^= 1 << bit;
            let mut checker = TreeChecker::new(address, data.len() as u64);
            let checked: Vec<bool> =
                (0..6).map(|index| check(&mut checker, &outboard, index, group(&data, index)).is_ok()).collect();
            if of_outboard {
                prop_assert!(checked.contains(&false));
            } else {
                let hit = index as u64 / GROUP;
                prop_assert!((0..6u64).all(|group| checked[usize::try_from(group).unwrap()] == (group != hit)));
            }
        }
    }
}
