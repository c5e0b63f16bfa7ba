//! HTTP as RFC 9110 and its relatives want it, without I/O: conditions, ranges, encodings, paths, fields.
//!
//! Start from [`decide`]: from a request's fields and the stored [`Variant`]s of what it asks for it says which one is
//! sent, with which status, and which bytes of it.

mod conditional;
mod digest;
mod media;
mod negotiate;
mod range;
mod target;

pub use conditional::{Outcome, Preconditions, Validators};
pub use digest::{BadDigest, CONTENT_DIGEST, REPR_DIGEST, repr_digest, sha256_of};
pub use media::{is_compressible, type_of};
pub use negotiate::{Coding, negotiate};
pub use range::{Selection, select};
pub use target::{BadPath, decode_path, encode_path};

use crate::address::Address;
use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, HeaderMap, RANGE};
use http::{Method, StatusCode};
use std::fmt::Write as _;
use std::ops::Range;

/// One stored representation of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    pub coding: Coding,
    pub address: Address,
    pub len: u64,
}

/// What can be sent: the variants, of which at least one exists, and what they have in common.
#[derive(Clone, Copy, Debug)]
pub struct Available<'a> {
    pub variants: &'a [Variant],
    pub content_type: &'a str,
    /// Unix seconds.
    pub modified: Option<u64>,
}

/// What to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub status: StatusCode,
    /// `None`: nothing that is stored is acceptable.
    pub variant: Option<Variant>,
    pub content_type: String,
    pub content_range: Option<String>,
    pub content_length: u64,
    pub pieces: Vec<Piece>,
}

/// Something of a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Between the parts of a multipart body.
    Text(Bytes),
    /// These bytes of the representation.
    Bytes(Range<u64>),
}

/// What a GET or HEAD with these fields is answered. `now` is in Unix seconds.
pub fn decide(
    method: &Method,
    headers: &HeaderMap,
    available: Available<'_>,
    multi_range: bool,
    now: u64,
) -> Decision {
    let accepted = headers.get_all(ACCEPT_ENCODING);
    let Some(variant) = negotiate(accepted.iter().map(|value| value.as_bytes()), available.variants) else {
        return Decision::bare(StatusCode::NOT_ACCEPTABLE, None);
    };
    let conditions = Preconditions::of(headers, now);
    // Most requests have no condition, and need no tag to compare it with.
    let etag = if conditions == Preconditions::default() { String::new() } else { variant.address.etag() };
    let validators = Validators { etags: &[&etag], modified: available.modified };
    match conditions.evaluate(method, Some(validators)) {
        Outcome::Failed => return Decision::bare(StatusCode::PRECONDITION_FAILED, Some(variant)),
        Outcome::NotModified => return Decision::bare(StatusCode::NOT_MODIFIED, Some(variant)),
        Outcome::Proceed => {}
    }
    // A range is defined for GET alone, and one line of it.
    let mut lines = headers.get_all(RANGE).iter();
    let range = lines.next().filter(|_| lines.next().is_none() && *method == Method::GET);
    let selection = match range {
        Some(range) if conditions.range_applies(validators, now) => {
            select(range.as_bytes(), variant.len, multi_range)
        }
        _ => Selection::Whole,
    };
    let content_type = available.content_type.to_owned();
    match selection {
        Selection::Whole => Decision {
            status: StatusCode::OK,
            variant: Some(variant),
            content_type,
            content_range: None,
            content_length: variant.len,
            pieces: vec![Piece::Bytes(0..variant.len)],
        },
        Selection::Unsatisfiable => Decision {
            content_range: Some(format!("bytes */{}", variant.len)),
            ..Decision::bare(StatusCode::RANGE_NOT_SATISFIABLE, Some(variant))
        },
        Selection::Parts(parts) if parts.len() == 1 => Decision {
            status: StatusCode::PARTIAL_CONTENT,
            variant: Some(variant),
            content_type,
            content_range: Some(content_range(&parts[0], variant.len)),
            content_length: parts[0].end - parts[0].start,
            pieces: vec![Piece::Bytes(parts[0].clone())],
        },
        Selection::Parts(parts) => multipart(variant, &content_type, &parts),
    }
}

impl Decision {
    fn bare(status: StatusCode, variant: Option<Variant>) -> Decision {
        Decision {
            status,
            variant,
            content_type: String::new(),
            content_range: None,
            content_length: 0,
            pieces: Vec::new(),
        }
    }
}

fn content_range(part: &Range<u64>, len: u64) -> String {
    format!("bytes {}-{}/{len}", part.start, part.end - 1)
}

/// Several parts as one body. The boundary is of the object's own hash, which the object cannot contain.
fn multipart(variant: Variant, content_type: &str, parts: &[Range<u64>]) -> Decision {
    let boundary = &variant.address.hex()[..40];
    let mut pieces = Vec::with_capacity(2 * parts.len() + 1);
    let mut content_length = 0;
    for (index, part) in parts.iter().enumerate() {
        let mut head = String::with_capacity(160);
        let before = if index == 0 { "" } else { "\r\n" };
        let _ = write!(
            head,
            "{before}--{boundary}\r\nContent-Type: {content_type}\r\nContent-Range: {}\r\n\r\n",
            content_range(part, variant.len)
        );
        content_length += head.len() as u64 + (part.end - part.start);
        pieces.push(Piece::Text(head.into()));
        pieces.push(Piece::Bytes(part.clone()));
    }
    let end = format!("\r\n--{boundary}--\r\n");
    content_length += end.len() as u64;
    pieces.push(Piece::Text(end.into()));
    Decision {
        status: StatusCode::PARTIAL_CONTENT,
        variant: Some(variant),
        content_type: format!("multipart/byteranges; boundary={boundary}"),
        content_range: None,
        content_length,
        pieces,
    }
}

#[cfg(test)]
mod tests;
