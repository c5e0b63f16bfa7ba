//! `Repr-Digest` and `Content-Digest` (RFC 9530), of which SHA-256 is written and read.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{HeaderMap, HeaderName};

pub const REPR_DIGEST: HeaderName = HeaderName::from_static("repr-digest");
pub const CONTENT_DIGEST: HeaderName = HeaderName::from_static("content-digest");

/// A digest field that cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub struct BadDigest;

pub fn repr_digest(sha256: &[u8; 32]) -> String {
    format!("sha-256=:{}:", STANDARD.encode(sha256))
}

/// The SHA-256 that one of the two fields states. Other algorithms are not looked at.
pub fn sha256_of(headers: &HeaderMap, name: &HeaderName) -> Result<Option<[u8; 32]>, BadDigest> {
    let mut found = None;
    for value in headers.get_all(name) {
        for member in value.to_str().map_err(|_not_ascii| BadDigest)?.split(',') {
            let (name, digest) = member.trim_matches([' ', '\t']).split_once('=').ok_or(BadDigest)?;
            if name != "sha-256" {
                continue;
            }
            let inner = digest.strip_prefix(':').and_then(|rest| rest.strip_suffix(':')).ok_or(BadDigest)?;
            let bytes = STANDARD.decode(inner).map_err(|_not_base64| BadDigest)?;
            // Of two members with one name the last counts (RFC 9651).
            found = Some(bytes.try_into().map_err(|_wrong_length| BadDigest)?);
        }
    }
    Ok(found)
}
