//! BLAKE3 hashes of several inputs of one to two KiB, side by side.
//!
//! A hash of one KiB is a chain of sixteen steps, each of which waits for the one before. The chains of several inputs go
//! side by side, as many as the processor has room for: there an input costs a third of what it does alone.

use blake3::hazmat::{HasherExt as _, Mode, merge_subtrees_root};
use blake3::platform::Platform;
use blake3::{CHUNK_LEN, Hasher, IncrementCounter};
use std::ops::RangeInclusive;

/// As many as the widest processors hash side by side.
const LANES: usize = 16;

/// BLAKE3's first words, and the marks of a chunk's first and last blocks.
const IV: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 2;

/// Bytes of an input that gains: a whole chunk and a rest. Longer ones have chunks enough of their own, and in shorter
/// ones no chunk is whole.
pub const GAINS: RangeInclusive<usize> = CHUNK_LEN + 1..=2 * CHUNK_LEN;

/// An input of [`GAINS`] bytes.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    pub chunk: &'a [u8; CHUNK_LEN],
    pub rest: &'a [u8],
}

impl<'a> Input<'a> {
    /// None if it is of another length.
    pub fn of(bytes: &'a [u8]) -> Option<Self> {
        let (chunk, rest) = bytes.split_first_chunk()?;
        GAINS.contains(&bytes.len()).then_some(Self { chunk, rest })
    }
}

/// The hashes of inputs, in their order.
pub fn hash_all(inputs: &[Input<'_>]) -> Vec<[u8; 32]> {
    let mut hashes = Vec::with_capacity(inputs.len());
    for inputs in inputs.chunks(LANES) {
        let (mut first, mut chunks) = ([0; 32 * LANES], [&[0; CHUNK_LEN]; LANES]);
        chunks.iter_mut().zip(inputs).for_each(|(chunk, input)| *chunk = input.chunk);
        // Not for the public, but there is no other way to hash different beginnings together. Tests compare.
        Platform::detect().hash_many(
            &chunks[..inputs.len()],
            &IV,
            0,
            IncrementCounter::No,
            0,
            CHUNK_START,
            CHUNK_END,
            &mut first,
        );
        let (first, _) = first.as_chunks::<32>();
        hashes.extend(first.iter().zip(inputs).map(|(left, input)| {
            let right =
                Hasher::new().set_input_offset(CHUNK_LEN as u64).update(input.rest).finalize_non_root();
            <[u8; 32]>::from(merge_subtrees_root(left, &right, Mode::Hash))
        }));
    }
    hashes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn together_they_have_the_hashes_that_they_have_alone(
            sizes in proptest::collection::vec(prop_oneof![1000usize..1050, 2000usize..2100], 0..50),
            seed in any::<u8>(),
        ) {
            let bytes: Vec<u8> = (0..3000_u32).map(|at| (at * 31) as u8 ^ seed).collect();
            let inputs: Vec<&[u8]> = sizes.iter().zip(0..).map(|(size, at)| &bytes[at..at + size]).collect();
            let (gaining, alone): (Vec<_>, Vec<_>) = inputs
                .iter()
                .filter_map(|bytes| Some((Input::of(bytes)?, *blake3::hash(bytes).as_bytes())))
                .unzip();
            prop_assert_eq!(gaining.len(), sizes.iter().filter(|size| GAINS.contains(size)).count());
            prop_assert_eq!(hash_all(&gaining), alone);
        }
    }
}
