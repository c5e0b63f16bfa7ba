//! What the edge reads of a request.

use http::header::{ACCEPT_ENCODING, IF_MATCH, IF_NONE_MATCH, IF_RANGE, IF_UNMODIFIED_SINCE, RANGE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use svc_edge::address::Address;
use svc_edge::semantics::{
    Available, CONTENT_DIGEST, Coding, Piece, Selection, Variant, decide, decode_path, select, sha256_of,
};

const LEN: u64 = 1000;

/// No selection passes the end, is empty, overlaps or has too many parts.
pub(crate) fn range(data: &[u8]) {
    for len in [0, 1, LEN, u64::MAX] {
        if let Selection::Parts(parts) = select(data, len, true) {
            assert!((1..=16).contains(&parts.len()));
            for (index, part) in parts.iter().enumerate() {
                assert!(part.start < part.end && part.end <= len);
                let apart = |other: &std::ops::Range<u64>| part.end < other.start || other.end < part.start;
                assert!(parts[index + 1..].iter().all(apart));
            }
        }
    }
}

/// Whatever a request's fields say, the answer's length is that of its pieces and its status is one of five.
pub(crate) fn decision(data: &[u8]) {
    let fields: [HeaderName; 7] = [
        RANGE,
        IF_RANGE,
        IF_MATCH,
        IF_NONE_MATCH,
        IF_UNMODIFIED_SINCE,
        http::header::IF_MODIFIED_SINCE,
        ACCEPT_ENCODING,
    ];
    let mut headers = HeaderMap::new();
    for line in data.split(|byte| *byte == b'\n') {
        let Some((which, value)) = line.split_first() else { continue };
        if let Ok(value) = HeaderValue::from_bytes(value) {
            headers.append(fields[usize::from(*which) % fields.len()].clone(), value);
        }
    }
    let variants = [Coding::Identity, Coding::Gzip].map(|coding| Variant {
        coding,
        address: Address([7; 32]),
        len: LEN,
    });
    let available =
        Available { variants: &variants, content_type: "text/plain", modified: Some(1_000_000_000) };
    for method in [Method::GET, Method::HEAD] {
        let decision = decide(&method, &headers, available, true, 2_000_000_000);
        let lengths = decision.pieces.iter().map(|piece| match piece {
            Piece::Text(text) => text.len() as u64,
            Piece::Bytes(range) => range.end - range.start,
        });
        assert_eq!(lengths.sum::<u64>(), decision.content_length);
        let known = [200, 206, 304, 406, 412, 416].map(|code| StatusCode::from_u16(code).ok());
        assert!(known.contains(&Some(decision.status)));
    }
}

/// A name has no way up and reads the same when it is encoded again.
pub(crate) fn path(data: &[u8]) {
    let Ok(name) = decode_path(&String::from_utf8_lossy(data)) else { return };
    assert!(!name.split('/').any(|segment| matches!(segment, "." | "..")) && !name.contains(['\\', '\0']));
    let encoded: String = name.bytes().map(|byte| format!("%{byte:02x}")).collect();
    assert_eq!(decode_path(&encoded), Ok(name));
}

pub(crate) fn digest(data: &[u8]) {
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_bytes(data) {
        headers.insert("content-digest", value);
        let _ = sha256_of(&headers, &CONTENT_DIGEST);
    }
}
