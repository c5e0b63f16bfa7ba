//! Ranges (RFC 9110 section 14) and the parts of a representation that a cache holds (RFC 9111 sections 3.3, 3.4).

use super::list::trim;
use http::header::{CONTENT_RANGE, RANGE};
use http::{HeaderMap, Method};
use std::ops::Range;

/// Most parts that one response is kept in; past that it is not worth putting together.
pub const PARTS_MAX: usize = 64;

/// How much of a representation is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// No `Range`, or one that a server ignores.
    Whole,
    One(ByteRange),
    /// Several ranges. Nobody has to serve them as such.
    Several,
}

/// One range of a `Range` field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ByteRange {
    /// The last position counts; without one, all that follows.
    From(u64, Option<u64>),
    /// So many bytes at the end.
    Suffix(u64),
}

/// Where a range lies in a representation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placed {
    At(Range<u64>),
    Unsatisfiable,
    /// It depends on a length that is not known.
    Unknown,
}

impl Wanted {
    pub fn of(method: &Method, headers: &HeaderMap) -> Self {
        let mut lines = headers.get_all(RANGE).iter();
        let (Some(line), None) = (lines.next(), lines.next()) else { return Self::Whole };
        let spec =
            line.as_bytes().split_at_checked(6).filter(|(unit, _)| unit.eq_ignore_ascii_case(b"bytes="));
        let Some((_, ranges)) = spec.filter(|_| *method == Method::GET) else { return Self::Whole };
        if ranges.contains(&b',') {
            return Self::Several;
        }
        ByteRange::of(trim(ranges)).map_or(Self::Whole, Self::One)
    }
}

impl ByteRange {
    pub fn of(text: &[u8]) -> Option<Self> {
        let at = text.iter().position(|byte| *byte == b'-')?;
        let (first, last) = (&text[..at], &text[at + 1..]);
        if first.is_empty() {
            return number(last).map(Self::Suffix);
        }
        let first = number(first)?;
        if last.is_empty() {
            return Some(Self::From(first, None));
        }
        number(last).filter(|last| first <= *last).map(|last| Self::From(first, Some(last)))
    }

    pub fn place(self, complete: Option<u64>) -> Placed {
        match (self, complete) {
            (Self::From(first, Some(last)), None) => Placed::At(first..last.saturating_add(1)),
            (Self::From(_, None) | Self::Suffix(_), None) => Placed::Unknown,
            (Self::From(first, last), Some(len)) if first < len => {
                Placed::At(first..last.map_or(len, |last| len.min(last.saturating_add(1))))
            }
            (Self::Suffix(count), Some(len)) if count > 0 && len > 0 => {
                Placed::At(len.saturating_sub(count)..len)
            }
            (_, Some(_)) => Placed::Unsatisfiable,
        }
    }
}

/// Digits that fit; more of them are past the end of anything, and so is the largest number.
pub(super) fn number(text: &[u8]) -> Option<u64> {
    let good = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    good.then(|| {
        let digit = |digit: &u8| u64::from(digit - b'0');
        text.iter().fold(0, |sum: u64, next| sum.saturating_mul(10).saturating_add(digit(next)))
    })
}

/// What `Content-Range` says of a 206: where its bytes belong, and how many there are in all, if known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContentRange {
    pub range: Range<u64>,
    pub complete: Option<u64>,
}

impl ContentRange {
    /// `None` for anything but one range of bytes that can be (RFC 9110 section 14.4).
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut lines = headers.get_all(CONTENT_RANGE).iter();
        let (line, None) = (lines.next()?.as_bytes(), lines.next()) else { return None };
        let (unit, rest) = line.split_at_checked(6)?;
        let slash = rest.iter().position(|byte| *byte == b'/')?;
        let dash = rest[..slash].iter().position(|byte| *byte == b'-')?;
        let (first, last) = (number(&rest[..dash])?, number(&rest[dash + 1..slash])?);
        let complete = match &rest[slash + 1..] {
            b"*" => None,
            length => Some(number(length).filter(|len| *len < u64::MAX)?),
        };
        let good =
            unit.eq_ignore_ascii_case(b"bytes ") && first <= last && last < complete.unwrap_or(u64::MAX);
        good.then(|| Self { range: first..last + 1, complete })
    }
}

/// Parts of one representation, each a stored piece of its own, in order, none of them within another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parts {
    complete: Option<u64>,
    parts: Vec<Range<u64>>,
}

/// Some bytes of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub part: usize,
    /// Counted from the part's beginning.
    pub bytes: Range<u64>,
}

/// What a new part changes, so that whoever keeps the bytes can do the same: first take out, then put in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Places of parts that the new one contains, last first.
    pub removed: Vec<usize>,
    /// Where the new part goes; nowhere if its bytes are there already.
    pub inserted: Option<usize>,
}

impl Parts {
    /// `None` where there are no bytes, or more than the representation has.
    pub fn new(range: Range<u64>, complete: Option<u64>) -> Option<Self> {
        Self::from_parts(vec![range], complete)
    }

    /// Puts parts together that were taken apart; `None` where they cannot have been parts.
    pub fn from_parts(parts: Vec<Range<u64>>, complete: Option<u64>) -> Option<Self> {
        let within = |part: &Range<u64>| part.start < part.end && part.end <= complete.unwrap_or(u64::MAX);
        let good = (1..=PARTS_MAX).contains(&parts.len())
            && complete != Some(u64::MAX)
            && parts.iter().all(within)
            && parts.is_sorted_by(|a, b| a.start < b.start && a.end < b.end);
        good.then_some(Self { complete, parts })
    }

    pub fn parts(&self) -> &[Range<u64>] {
        &self.parts
    }

    /// How long the representation is, if known.
    pub fn complete(&self) -> Option<u64> {
        self.complete
    }

    /// The length of the representation, if every byte of it is here.
    pub fn whole(&self) -> Option<u64> {
        self.complete.filter(|len| self.missing(0..*len).is_none())
    }

    /// Takes in a part of the same representation; `None` where it cannot be one, or there are too many.
    pub fn add(&mut self, range: Range<u64>, complete: Option<u64>) -> Option<Change> {
        let agreed = match (self.complete, complete) {
            (Some(a), Some(b)) if a != b => return None,
            (a, b) => a.or(b),
        };
        let end = self.parts.last().map_or(0, |part| part.end).max(range.end);
        if range.start >= range.end || end > agreed.unwrap_or(u64::MAX) {
            return None;
        }
        let contains =
            |outer: &Range<u64>, inner: &Range<u64>| outer.start <= inner.start && inner.end <= outer.end;
        if self.parts.iter().any(|part| contains(part, &range)) {
            self.complete = agreed;
            return Some(Change { removed: Vec::new(), inserted: None });
        }
        let inside = |at: &usize| contains(&range, &self.parts[*at]);
        let removed: Vec<usize> = (0..self.parts.len()).rev().filter(inside).collect();
        if self.parts.len() - removed.len() >= PARTS_MAX {
            return None;
        }
        self.complete = agreed;
        for at in &removed {
            self.parts.remove(*at);
        }
        let at = self.parts.partition_point(|part| part.start < range.start);
        self.parts.insert(at, range);
        Some(Change { removed, inserted: Some(at) })
    }

    /// Where to read a range; `None` if some of it is missing.
    pub fn pieces(&self, range: Range<u64>) -> Option<Vec<Piece>> {
        let (mut pieces, mut at) = (Vec::new(), range.start);
        for (index, part) in self.parts.iter().enumerate() {
            if at < range.end && part.contains(&at) {
                let end = part.end.min(range.end);
                pieces.push(Piece { part: index, bytes: at - part.start..end - part.start });
                at = end;
            }
        }
        (at >= range.end).then_some(pieces)
    }

    /// The one range that has all that is missing of another, and as little else as can be.
    pub fn missing(&self, range: Range<u64>) -> Option<Range<u64>> {
        let (mut start, mut end) = (range.start, range.end);
        self.parts.iter().for_each(|part| {
            if part.contains(&start) {
                start = part.end;
            }
        });
        self.parts.iter().rev().for_each(|part| {
            if part.start < end && end <= part.end {
                end = part.start;
            }
        });
        (start < end).then_some(start..end)
    }
}

#[cfg(test)]
mod tests;
