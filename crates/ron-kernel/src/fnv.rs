//! FNV-1a, eight bytes at a time: for maps whose keys are all ours, so that nobody can choose them to collide.

use std::hash::Hasher;

const PRIME: u64 = 0x0100_0000_01b3;

#[derive(Clone, Copy, Debug)]
pub struct Fnv(u64);

/// A map by this hash.
pub type FnvMap<K, V> = std::collections::HashMap<K, V, std::hash::BuildHasherDefault<Fnv>>;

impl Default for Fnv {
    fn default() -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Fnv {
    fn finish(&self) -> u64 {
        // Maps take their place from the low bits and a tag from the high ones.
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.0 = (self.0 ^ u64::from_le_bytes(*word)).wrapping_mul(PRIME);
            self.0 ^= self.0 >> 29;
        }
        for byte in rest {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(PRIME);
        }
    }
}
