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
        let digits = text.strip_prefix("b3:")?.as_bytes();
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

pub(crate) fn hex(bytes: &[u8], out: &mut [u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (pair, byte) in out.chunks_exact_mut(2).zip(bytes) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
}

pub(crate) fn unhex(digits: &[u8], out: &mut [u8]) -> bool {
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    if digits.len() != out.len() * 2 {
        return false;
    }
    for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
        let (Some(high), Some(low)) = (value(pair[0]), value(pair[1])) else { return false };
        *byte = high << 4 | low;
    }
    true
}
