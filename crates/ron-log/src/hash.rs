//! BLAKE3 hashes as the registry writes them, and the SHA-256 of the tree.

use std::fmt;

/// A BLAKE3-256 hash, written `b3:` and 64 lowercase hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct B3(pub [u8; 32]);

impl B3 {
    /// What stands for the entry before the first.
    pub const ZERO: Self = Self([0; 32]);

    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The hash of a domain separator and what follows it.
    pub(crate) fn tagged(tag: &[u8], bytes: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(tag);
        hasher.update(bytes);
        Self(*hasher.finalize().as_bytes())
    }

    /// Reads the one way of writing it.
    pub fn parse(text: &str) -> Option<Self> {
        Self::digits(text.strip_prefix("b3:")?.as_bytes())
    }

    /// Its digits alone.
    pub(crate) fn digits(digits: &[u8]) -> Option<Self> {
        let mut hash = [0; 32];
        unhex(digits, &mut hash).then_some(Self(hash))
    }
}

impl fmt::Display for B3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = [0; 67];
        text[..3].copy_from_slice(b"b3:");
        hex(&self.0, &mut text[3..]);
        f.write_str(std::str::from_utf8(&text).expect("hexadecimal digits"))
    }
}

impl fmt::Debug for B3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

const DIGITS: &[u8; 16] = b"0123456789abcdef";

pub(crate) fn hex(bytes: &[u8], out: &mut [u8]) {
    for (pair, byte) in out.chunks_exact_mut(2).zip(bytes) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
}

pub(crate) fn unhex(digits: &[u8], out: &mut [u8]) -> bool {
    if digits.len() != out.len() * 2 {
        return false;
    }
    let mut wrong = 0;
    for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
        let (high, low) = (VALUES[usize::from(pair[0])], VALUES[usize::from(pair[1])]);
        wrong |= high | low;
        *byte = high << 4 | low & 15;
    }
    wrong & NO_DIGIT == 0
}

const NO_DIGIT: u8 = 0x80;

/// What each lowercase hexadecimal digit stands for.
static VALUES: [u8; 256] = {
    let mut values = [NO_DIGIT; 256];
    let mut value = 0;
    while value < 16 {
        values[DIGITS[value as usize] as usize] = value;
        value += 1;
    }
    values
};
