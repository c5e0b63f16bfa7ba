//! Validators (RFC 9110 section 8.8) and the conditions that clients put on them (section 13).

use super::date::{self, UnixMillis};
use super::list::trim;
use http::header::{DATE, ETAG, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, LAST_MODIFIED};
use http::{HeaderMap, HeaderName};

/// How much younger than a modification a response must be, so that no second one fits between them and no
/// small difference of clocks matters (RFC 9110 section 8.8.2.2).
const STRONG_DATE_SECS: i64 = 60;

/// An entity tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntityTag<'a> {
    pub weak: bool,
    /// What stands between the quotes.
    pub opaque: &'a [u8],
}

impl<'a> EntityTag<'a> {
    /// A tag and nothing else.
    pub fn of(value: &'a [u8]) -> Option<Self> {
        Self::first(trim(value)).filter(|(_, rest)| rest.is_empty()).map(|(tag, _)| tag)
    }

    /// A tag at the beginning, and what follows it. A backslash in it is like any other character.
    fn first(value: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let weak = value.strip_prefix(b"W/");
        let inner = weak.unwrap_or(value).strip_prefix(b"\"")?;
        let end = inner.iter().position(|byte| *byte == b'"')?;
        let opaque = &inner[..end];
        let good = opaque.iter().all(|byte| matches!(byte, 0x21 | 0x23..=0x7e | 0x80..));
        good.then_some((Self { weak: weak.is_some(), opaque }, &inner[end + 1..]))
    }

    /// The tags of a list, as far as it can be read.
    pub fn list(value: &'a [u8]) -> impl Iterator<Item = Self> {
        let mut rest = skip_blank(value);
        std::iter::from_fn(move || {
            let (tag, after) = Self::first(rest)?;
            // What is no comma behind a tag makes that tag and all that follows unreadable.
            let next = trim(after);
            if !next.is_empty() && next[0] != b',' {
                rest = &[];
                return None;
            }
            rest = skip_blank(next);
            Some(tag)
        })
    }

    pub fn matches_strongly(&self, other: &Self) -> bool {
        !self.weak && !other.weak && self.opaque == other.opaque
    }

    pub fn matches_weakly(&self, other: &Self) -> bool {
        self.opaque == other.opaque
    }
}

/// Without the commas and blanks that it begins with.
fn skip_blank(list: &[u8]) -> &[u8] {
    let start = list.iter().position(|byte| !matches!(byte, b' ' | b'\t' | b',')).unwrap_or(list.len());
    &list[start..]
}

/// What a list of tags says about a tag: whether it is among them, or the list is `*`.
fn names(list: &[u8], tag: Option<&EntityTag<'_>>) -> bool {
    let matches = |found: EntityTag<'_>| tag.is_some_and(|tag| tag.matches_weakly(&found));
    trim(list) == b"*" || EntityTag::list(list).any(matches)
}

/// The validators of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validators<'a> {
    pub etag: Option<EntityTag<'a>>,
    /// Unix seconds.
    pub modified: Option<i64>,
    date: Option<i64>,
}

/// How far two responses are known to be of the same representation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sameness {
    Unknown,
    /// Equivalent, if not byte for byte.
    Weak,
    Strong,
}

impl<'a> Validators<'a> {
    pub fn of(headers: &'a HeaderMap, now: UnixMillis) -> Self {
        let date = |name: HeaderName| headers.get(name).and_then(|value| date::parse(value.as_bytes(), now));
        let etag = headers.get(ETAG).and_then(|value| EntityTag::of(value.as_bytes()));
        Self { etag, modified: date(LAST_MODIFIED), date: date(DATE) }
    }

    pub fn exist(&self) -> bool {
        self.etag.is_some() || self.modified.is_some()
    }

    /// Whether one of them names these bytes and no others.
    pub fn are_strong(&self) -> bool {
        match &self.etag {
            Some(etag) => !etag.weak,
            None => self.has_strong_date(),
        }
    }

    fn has_strong_date(&self) -> bool {
        let apart = |modified: i64| self.date.is_some_and(|date| date >= modified + STRONG_DATE_SECS);
        self.modified.is_some_and(apart)
    }

    /// Tags decide where both have one, dates where not.
    pub fn sameness(&self, other: &Self) -> Sameness {
        match (&self.etag, &other.etag) {
            (Some(a), Some(b)) if a.matches_strongly(b) => Sameness::Strong,
            (Some(a), Some(b)) if a.matches_weakly(b) => Sameness::Weak,
            (Some(_), Some(_)) => Sameness::Unknown,
            _ if self.modified.is_none() || self.modified != other.modified => Sameness::Unknown,
            _ if self.has_strong_date() && other.has_strong_date() => Sameness::Strong,
            _ => Sameness::Weak,
        }
    }

    /// Whether the client has this representation already (RFC 9111 section 4.3.2). Where the response gives
    /// no `Last-Modified`, its `Date` stands in.
    pub fn are_known_to(&self, request: &HeaderMap, now: UnixMillis) -> bool {
        let mut lists = request.get_all(IF_NONE_MATCH).iter().peekable();
        if lists.peek().is_some() {
            return lists.any(|list| names(list.as_bytes(), self.etag.as_ref()));
        }
        let since = request.get(IF_MODIFIED_SINCE).and_then(|value| date::parse(value.as_bytes(), now));
        let made = self.modified.or(self.date);
        since.is_some_and(|since| made.is_some_and(|made| made <= since))
    }

    /// Whether a range of this representation is what the client wants: no `If-Range`, or one that names it
    /// strongly (RFC 9110 section 13.1.5).
    pub fn satisfy_if_range(&self, request: &HeaderMap, now: UnixMillis) -> bool {
        let Some(condition) = request.get(IF_RANGE) else { return true };
        match EntityTag::of(condition.as_bytes()) {
            Some(tag) => self.etag.is_some_and(|etag| etag.matches_strongly(&tag)),
            None => {
                let date = date::parse(condition.as_bytes(), now);
                date.is_some() && date == self.modified && self.has_strong_date()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    const NOW: UnixMillis = UnixMillis(1_700_000_000_000);
    const MADE: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
    const LATER: &str = "Sun, 06 Nov 1994 08:50:37 GMT";

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let value = |text: &str| HeaderValue::from_bytes(text.as_bytes()).unwrap();
        lines.iter().map(|(name, text)| (HeaderName::from_static(name), value(text))).collect()
    }

    #[test]
    fn a_tag_is_quoted_and_perhaps_weak() {
        let tag = |weak, opaque: &'static str| Some(EntityTag { weak, opaque: opaque.as_bytes() });
        assert_eq!(EntityTag::of(b"\"abc\""), tag(false, "abc"));
        assert_eq!(EntityTag::of(b"W/\"abc\""), tag(true, "abc"));
        assert_eq!(EntityTag::of(b"\"\""), tag(false, ""));
        assert_eq!(EntityTag::of(b"\"a\\\""), tag(false, "a\\"));
        assert_eq!(EntityTag::of("\"\u{fc}\"".as_bytes()), tag(false, "\u{fc}"));
        for bad in
            ["", "abc", "\"abc", "abc\"", "w/\"a\"", "W\"a\"", "W /\"a\"", "\"a\"b", "\"a b\"", "\"a\",\"b\""]
        {
            assert_eq!(EntityTag::of(bad.as_bytes()), None, "{bad}");
        }
    }

    // RFC 9110 section 13.1.2: weak comparison; RFC 9111 section 4.3.2: tags before dates, Date for want of
    // Last-Modified.
    #[test]
    fn a_client_that_has_it_is_told_so() {
        let check = |stored: &[(&'static str, &str)], asked: &[(&'static str, &str)], expected: bool| {
            let stored = headers(stored);
            let found = Validators::of(&stored, NOW).are_known_to(&headers(asked), NOW);
            assert_eq!(found, expected, "{stored:?} and {asked:?}");
        };
        let tagged = [("etag", "\"a\""), ("last-modified", MADE)];
        check(&tagged, &[], false);
        check(&tagged, &[("if-none-match", "\"a\"")], true);
        check(&tagged, &[("if-none-match", "W/\"a\"")], true);
        check(&tagged, &[("if-none-match", "\"x\" , ,W/\"y\",\"a\"")], true);
        check(&tagged, &[("if-none-match", "\"x\\\", \"a\"")], true);
        check(&tagged, &[("if-none-match", "\"x\""), ("if-none-match", "\"a\"")], true);
        check(&tagged, &[("if-none-match", "*")], true);
        check(&tagged, &[("if-none-match", "\"x, \\\"a\"")], false);
        check(&tagged, &[("if-none-match", "a")], false);
        check(&tagged, &[("if-none-match", "\"b\""), ("if-modified-since", LATER)], false);
        check(&[("etag", "W/\"a\"")], &[("if-none-match", "\"a\"")], true);
        check(&[("last-modified", MADE)], &[("if-none-match", "\"a\""), ("if-modified-since", MADE)], false);
        check(&tagged, &[("if-modified-since", MADE)], true);
        check(&tagged, &[("if-modified-since", "Sunday, 06-Nov-94 08:49:37 GMT")], true);
        check(&[("last-modified", LATER)], &[("if-modified-since", MADE)], false);
        check(&[("date", MADE)], &[("if-modified-since", LATER)], true);
        check(&[("date", LATER)], &[("if-modified-since", MADE)], false);
        check(&tagged, &[("if-modified-since", "yesterday")], false);
    }

    // RFC 9110 sections 8.8.2.2 and 8.8.3.2.
    #[test]
    fn sameness_is_as_strong_as_its_validators() {
        let check = |a: &[(&'static str, &str)], b: &[(&'static str, &str)], expected| {
            let (a, b) = (headers(a), headers(b));
            let (a, b) = (Validators::of(&a, NOW), Validators::of(&b, NOW));
            assert_eq!((a.sameness(&b), b.sameness(&a)), (expected, expected), "{a:?} and {b:?}");
        };
        let (late, at_once) = (("date", LATER), ("date", MADE));
        let modified = ("last-modified", MADE);
        check(&[("etag", "\"a\"")], &[("etag", "\"a\"")], Sameness::Strong);
        check(&[("etag", "\"a\"")], &[("etag", "W/\"a\"")], Sameness::Weak);
        check(&[("etag", "\"a\""), modified, late], &[("etag", "\"b\""), modified, late], Sameness::Unknown);
        check(&[("etag", "\"a\""), modified, late], &[modified, late], Sameness::Strong);
        check(&[modified, late], &[modified, at_once], Sameness::Weak);
        check(&[modified], &[modified], Sameness::Weak);
        check(&[modified, late], &[("last-modified", LATER), late], Sameness::Unknown);
        check(&[], &[], Sameness::Unknown);
    }

    // RFC 9110 section 13.1.5.
    #[test]
    fn if_range_compares_strongly() {
        let check = |stored: &[(&'static str, &str)], condition: &str, expected: bool| {
            let stored = headers(stored);
            let request = headers(&[("if-range", condition)]);
            assert_eq!(Validators::of(&stored, NOW).satisfy_if_range(&request, NOW), expected, "{condition}");
        };
        check(&[("etag", "\"a\"")], "\"a\"", true);
        check(&[("etag", "\"a\"")], "\"b\"", false);
        check(&[("etag", "\"a\"")], "W/\"a\"", false);
        check(&[("etag", "W/\"a\"")], "W/\"a\"", false);
        check(&[("last-modified", MADE), ("date", LATER)], MADE, true);
        check(&[("last-modified", MADE), ("date", MADE)], MADE, false);
        check(&[("last-modified", MADE), ("date", LATER)], LATER, false);
        check(&[], "rubbish", false);
        assert!(Validators::of(&HeaderMap::new(), NOW).satisfy_if_range(&HeaderMap::new(), NOW));
    }
}
