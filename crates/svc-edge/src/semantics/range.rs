//! `Range` (RFC 9110, section 14).

use crate::cache::list::trim;
use crate::cache::range::{ByteRange, Placed};
use std::ops::Range;

/// Ranges that one request may ask for.
const PARTS_MAX: usize = 16;

/// What of a representation is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// All of it: the field says nothing that can be understood.
    Whole,
    /// 416: it can be understood, and nothing of it exists; or it is abuse.
    Unsatisfiable,
    /// At least one; none is empty, none touches another.
    Parts(Vec<Range<u64>>),
}

/// Reads the field's value for a representation of `len` bytes. `several` allows more than one part in an answer.
pub fn select(value: &[u8], len: u64, several: bool) -> Selection {
    let Some(set) = parse(value) else { return Selection::Whole };
    if set.len() > PARTS_MAX {
        return Selection::Unsatisfiable;
    }
    // A suffix of nothing is all of it, and no Content-Range can say so.
    if len == 0 && set.iter().any(|range| matches!(range, ByteRange::Suffix(1..))) {
        return Selection::Whole;
    }
    let mut parts: Vec<Range<u64>> = Vec::new();
    for range in set {
        if let Placed::At(wanted) = range.place(Some(len)) {
            add(&mut parts, wanted);
        }
    }
    match parts.len() {
        0 => Selection::Unsatisfiable,
        1 => Selection::Parts(parts),
        _ if several => Selection::Parts(parts),
        _ => Selection::Whole,
    }
}

/// Adds a part, joined with those that it touches, in the place of the first of them.
fn add(parts: &mut Vec<Range<u64>>, mut wanted: Range<u64>) {
    let mut place = parts.len();
    let mut index = 0;
    while index < parts.len() {
        let other = &parts[index];
        if wanted.start <= other.end && other.start <= wanted.end {
            wanted = wanted.start.min(other.start)..wanted.end.max(other.end);
            parts.remove(index);
            place = place.min(index);
            // Grown, it may touch one that it did not touch before.
            index = 0;
        } else {
            index += 1;
        }
    }
    parts.insert(place.min(parts.len()), wanted);
}

/// The set of a `bytes` range; `None` if the field is to be ignored.
fn parse(value: &[u8]) -> Option<Vec<ByteRange>> {
    let value = trim(value);
    let (unit, set) = value.split_at(value.iter().position(|byte| *byte == b'=')?);
    if !unit.eq_ignore_ascii_case(b"bytes") {
        return None;
    }
    let items = set[1..].split(|byte| *byte == b',').map(trim).filter(|item| !item.is_empty());
    let ranges = items.map(ByteRange::of).collect::<Option<Vec<_>>>()?;
    (!ranges.is_empty()).then_some(ranges)
}
