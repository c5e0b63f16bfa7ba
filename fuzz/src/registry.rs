//! What the registry's service reads itself: CBOR.

use svc_registry::cbor::{decode, encode};

/// What is read is written and read back as the same.
pub(crate) fn cbor(data: &[u8]) {
    if let Ok(value) = decode(data) {
        let written = encode(&value);
        assert_eq!(decode(&written).as_ref(), Ok(&value));
        assert!(serde_json::from_str::<serde_json::Value>(&value.to_string()).is_ok(), "JSON can say it");
    }
}
