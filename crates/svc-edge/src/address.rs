//! What an object is called: `b3:` and the BLAKE3 hash of its bytes.

use std::fmt;

/// An object's address. Two objects with one address have the same bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address(pub [u8; 32]);

impl Address {
    /// `b3:` and 64 digits in lower case: one spelling only, so that an address can be compared as text.
    pub fn parse(text: &str) -> Option<Address> {
        Address::from_hex(text.strip_prefix("b3:")?)
    }

    pub fn from_hex(hex: &str) -> Option<Address> {
        if hex.len() != 64 || !hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            return None;
        }
        blake3::Hash::from_hex(hex).ok().map(|hash| Address(hash.into()))
    }

    pub fn hex(&self) -> String {
        blake3::Hash::from(self.0).to_hex().to_string()
    }

    /// The entity tag of a representation that is these bytes: strong, and the same on every node.
    pub fn etag(&self) -> String {
        let hex = blake3::Hash::from(self.0).to_hex();
        // Every answer has one, so it is put together without the formatter.
        ["\"b3:", hex.as_str(), "\""].concat()
    }
}

impl From<blake3::Hash> for Address {
    fn from(hash: blake3::Hash) -> Address {
        Address(hash.into())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b3:{}", self.hex())
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_one_spelling() {
        let address = Address::from(blake3::hash(b"abc"));
        let text = address.to_string();
        assert_eq!(text, "b3:6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85");
        assert_eq!(Address::parse(&text), Some(address));
        assert_eq!(address.etag(), format!("\"{text}\""));
        for wrong in [
            &text[3..],
            &text.to_uppercase(),
            &text[..66],
            &format!("{text}0"),
            "b3:",
            &text.replace('6', "g"),
        ] {
            assert_eq!(Address::parse(wrong), None, "{wrong}");
        }
    }
}
