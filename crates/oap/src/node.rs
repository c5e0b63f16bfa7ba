//! Who a node is: its Ed25519 key.

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use std::fmt;

/// A node's public key, written `ed25519:` and base64url without padding.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub [u8; 32]);

impl NodeId {
    pub fn parse(text: &str) -> Option<NodeId> {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(text.strip_prefix("ed25519:")?).ok()?;
        <[u8; 32]>::try_from(bytes).ok().map(NodeId)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ed25519:{}", BASE64_URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
