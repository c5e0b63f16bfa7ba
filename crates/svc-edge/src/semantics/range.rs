//! `Range` (RFC 9110, section 14).

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
    if len == 0 && set.iter().any(|spec| matches!(spec, Spec::Suffix(1..))) {
        return Selection::Whole;
    }
    let mut parts: Vec<Range<u64>> = Vec::new();
    for spec in set {
        let wanted = match spec {
            Spec::From(first, last) => first..last.saturating_add(1).min(len),
            Spec::Suffix(length) => len.saturating_sub(length)..len,
        };
        if !wanted.is_empty() {
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

enum Spec {
    From(u64, u64),
    Suffix(u64),
}

/// The set of a `bytes` range; `None` if the field is to be ignored.
fn parse(value: &[u8]) -> Option<Vec<Spec>> {
    let text = std::str::from_utf8(value).ok()?.trim_matches([' ', '\t']);
    let (unit, set) = text.split_once('=')?;
    if !unit.eq_ignore_ascii_case("bytes") {
        return None;
    }
    let mut specs = Vec::new();
    for item in set.split(',').map(|item| item.trim_matches([' ', '\t'])).filter(|item| !item.is_empty()) {
        let (first, last) = item.split_once('-')?;
        let spec = match (number(first), number(last)) {
            (Some(first), None) if last.is_empty() => Spec::From(first, u64::MAX - 1),
            (Some(first), Some(last)) if first <= last => Spec::From(first, last),
            (None, Some(length)) if first.is_empty() => Spec::Suffix(length),
            _ => return None,
        };
        specs.push(spec);
    }
    (!specs.is_empty()).then_some(specs)
}

/// Digits only; what is too large for a number is larger than anything stored.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u64::MAX))
}
