//! `Vary` (RFC 9110 section 12.5.5, RFC 9111 section 4.1): which requests a stored response answers.

use super::list::{members, members_or_empty, trim};
use http::header::{
    ACCEPT_CHARSET, ACCEPT_ENCODING, ACCEPT_LANGUAGE, AUTHORIZATION, COOKIE, FROM, HOST, IF_MODIFIED_SINCE,
    IF_RANGE, IF_UNMODIFIED_SINCE, ORIGIN, PROXY_AUTHORIZATION, RANGE, REFERER, USER_AGENT, VARY,
};
use http::{HeaderMap, HeaderName, HeaderValue};

/// Fields that are no lists: a comma in them is like any other character.
const SINGLE: [HeaderName; 12] = [
    AUTHORIZATION,
    COOKIE,
    FROM,
    HOST,
    IF_MODIFIED_SINCE,
    IF_RANGE,
    IF_UNMODIFIED_SINCE,
    ORIGIN,
    PROXY_AUTHORIZATION,
    RANGE,
    REFERER,
    USER_AGENT,
];

/// Bytes of a request that are kept to tell it from others.
const SELECTING_MAX: usize = 4096;

/// What a response varies by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Vary {
    /// `*`, or something unreadable: no request is known to get the same.
    Anything,
    /// Sorted; empty where the field is absent.
    Fields(Vec<HeaderName>),
}

impl Vary {
    pub fn of(response: &HeaderMap) -> Self {
        let lines = response.get_all(VARY).iter();
        let names = lines
            .flat_map(|line| members(line.as_bytes()))
            .map(|name| HeaderName::from_bytes(name).ok().filter(|_| name != b"*"));
        match names.collect::<Option<Vec<_>>>() {
            None => Self::Anything,
            Some(mut names) => {
                names.sort_unstable_by(|a, b| a.as_str().cmp(b.as_str()));
                names.dedup();
                Self::Fields(names)
            }
        }
    }
}

/// The fields of a request that its response varied by, in normal form; a request that has the same gets the
/// same response.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selecting {
    /// Sorted by name; no value where the request did not have the field.
    fields: Vec<(HeaderName, Option<HeaderValue>)>,
}

impl Selecting {
    /// `None`: nothing will ever match, or it is too much to keep.
    pub fn of(response: &HeaderMap, request: &HeaderMap) -> Option<Self> {
        let Vary::Fields(names) = Vary::of(response) else { return None };
        let fields = names.into_iter().map(|name| {
            let value = normal(&name, request);
            (name, value)
        });
        let fields: Vec<(HeaderName, Option<HeaderValue>)> = fields.collect();
        let size = |(name, value): &(HeaderName, Option<HeaderValue>)| {
            name.as_str().len() + value.as_ref().map_or(0, HeaderValue::len)
        };
        (fields.iter().map(size).sum::<usize>() <= SELECTING_MAX).then_some(Self { fields })
    }

    pub fn matches(&self, request: &HeaderMap) -> bool {
        self.fields.iter().all(|(name, value)| normal(name, request) == *value)
    }

    /// Whether there is nothing to tell requests apart by.
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    pub fn fields(&self) -> &[(HeaderName, Option<HeaderValue>)] {
        &self.fields
    }

    /// Puts back together what [`Self::fields`] gave; `None` where the names are not sorted.
    pub fn from_fields(fields: Vec<(HeaderName, Option<HeaderValue>)>) -> Option<Self> {
        fields.is_sorted_by(|(a, _), (b, _)| a.as_str() < b.as_str()).then_some(Self { fields })
    }
}

/// All lines of a field as one value, which is the same for requests that mean the same and only for those:
/// lines are joined, and blanks around the commas of a list dropped. Order stays, since servers heed it.
fn normal(name: &HeaderName, request: &HeaderMap) -> Option<HeaderValue> {
    let mut lines = request.get_all(name).iter().peekable();
    lines.peek()?;
    let joined = lines.map(|line| trim(line.as_bytes())).collect::<Vec<_>>().join(&b',');
    let out = if SINGLE.contains(name) {
        joined
    } else if [ACCEPT_ENCODING, ACCEPT_LANGUAGE, ACCEPT_CHARSET].contains(name) {
        // Of codings, language tags and charsets case does not matter, nor do blanks before a weight.
        let member = |member: &[u8]| {
            let parts: Vec<_> = member.split(|byte| *byte == b';').map(trim).collect();
            parts.join(&b';').to_ascii_lowercase()
        };
        members(&joined).map(member).collect::<Vec<_>>().join(&b',')
    } else {
        members_or_empty(&joined).collect::<Vec<_>>().join(&b',')
    };
    // Parts of values joined by commas are a value.
    HeaderValue::from_bytes(&out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let value = |text: &str| HeaderValue::from_bytes(text.as_bytes()).unwrap();
        lines.iter().map(|(name, text)| (HeaderName::from_static(name), value(text))).collect()
    }

    #[test]
    fn vary_is_a_list_of_names_or_anything() {
        let check = |lines: &[&str], expected: Option<&[&str]>| {
            let lines: Vec<_> = lines.iter().map(|line| ("vary", *line)).collect();
            let found = Vary::of(&headers(&lines));
            let names = |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect();
            assert_eq!(found, expected.map_or(Vary::Anything, |list| Vary::Fields(names(list))), "{lines:?}");
        };
        check(&[], Some(&[]));
        check(&[""], Some(&[]));
        check(&["Foo"], Some(&["foo"]));
        check(&["foo, Bar", "FOO"], Some(&["bar", "foo"]));
        for any in [&["*"][..], &["*, *"], &[", *"], &["", "*"], &["*, foo"], &["foo, *"], &["foo bar"]] {
            check(any, None);
        }
    }

    // RFC 9111 section 4.1.
    #[test]
    fn requests_that_mean_the_same_match_and_no_others() {
        let check = |name: &'static str, stored: &[&str], asked: &[&str], expected: bool| {
            let lines = |values: &[&str]| headers(&values.iter().map(|it| (name, *it)).collect::<Vec<_>>());
            let selecting = Selecting::of(&headers(&[("vary", name)]), &lines(stored)).unwrap();
            assert_eq!(selecting.matches(&lines(asked)), expected, "{name}: {stored:?} and {asked:?}");
        };
        check("foo", &["1"], &["1"], true);
        check("foo", &["1"], &["2"], false);
        check("foo", &["1"], &[], false);
        check("foo", &[], &["1"], false);
        check("foo", &[], &[], true);
        check("foo", &[], &[""], false);
        check("foo", &["1, 2"], &["1", "2"], true);
        check("foo", &["1,2"], &[" 1 ,\t2 "], true);
        check("foo", &["1,2"], &["2,1"], false);
        check("foo", &["1,,2"], &["1,2"], false);
        check("foo", &["a"], &["A"], false);
        check("foo", &["a b"], &["ab"], false);
        check("foo", &["\"a, b\""], &["\"a,b\""], false);
        check("user-agent", &["x (a, b)"], &["x (a,b)"], false);
        check("cookie", &["a=1"], &["a=1"], true);
        check("accept-language", &["en, de"], &["EN ,dE"], true);
        check("accept-language", &["en, de;q=0.5"], &["en,,de ; q=0.5"], true);
        check("accept-language", &["en, de"], &["de, en"], false);
        check("accept-language", &["en de"], &["ende"], false);
        check("accept-encoding", &["gzip, br"], &["GZip,br"], true);
        check("accept-encoding", &["gzip"], &["gzip;q=0"], false);
    }

    #[test]
    fn what_is_too_long_is_not_kept_to_tell_requests_apart() {
        let of = |len: usize| {
            Selecting::of(&headers(&[("vary", "foo")]), &headers(&[("foo", &"x".repeat(len))])).is_some()
        };
        assert!(of(SELECTING_MAX - 3) && !of(SELECTING_MAX - 2));
    }

    #[test]
    fn every_field_of_several_must_match() {
        let stored = headers(&[("a", "1"), ("b", "2"), ("other", "x")]);
        let selecting = Selecting::of(&headers(&[("vary", "B, A, C")]), &stored).unwrap();
        assert!(selecting.matches(&headers(&[("b", "2"), ("a", "1"), ("other", "y")])));
        assert!(!selecting.matches(&headers(&[("b", "2"), ("a", "3")])));
        assert!(!selecting.matches(&headers(&[("b", "2"), ("a", "1"), ("c", "")])));
        assert_eq!(Selecting::of(&headers(&[("vary", "a, *")]), &stored), None);
    }

    proptest! {
        /// What is kept of a request selects what was stored for it, so that we can ask as its client did.
        #[test]
        fn a_normal_form_is_its_own(
            name in prop::sample::select(vec!["x-list", "accept-language", "cookie"]),
            lines in proptest::collection::vec("[aB,;\" ]{0,6}", 1..4),
        ) {
            let lines: Vec<_> = lines.iter().map(|line| (name, line.as_str())).collect();
            let selecting = Selecting::of(&headers(&[("vary", name)]), &headers(&lines)).unwrap();
            let again: HeaderMap =
                selecting.fields().iter().map(|(name, value)| (name.clone(), value.clone().unwrap())).collect();
            prop_assert!(selecting.matches(&again));
        }

        /// The reference: a value with all blanks removed. Whatever differs even then never matches.
        #[test]
        fn values_that_differ_in_more_than_blanks_never_match(
            name in prop::sample::select(vec!["x-list", "accept", "cookie", "user-agent"]),
            a in "[ab,\" ]{0,6}", b in "[ab,\" ]{0,6}",
        ) {
            let bare = |text: &str| text.replace(' ', "");
            let selecting = Selecting::of(&headers(&[("vary", name)]), &headers(&[(name, &a)])).unwrap();
            if selecting.matches(&headers(&[(name, &b)])) {
                prop_assert_eq!(bare(&a), bare(&b));
            }
            prop_assert!(selecting.matches(&headers(&[(name, &a)])));
        }

        #[test]
        fn parts_put_back_together_are_the_same(a in "[a-c, ]{0,9}", b in "[a-c, ]{0,9}") {
            let request = headers(&[("x-a", &a), ("x-b", &b)]);
            let selecting = Selecting::of(&headers(&[("vary", "x-b, x-a, x-c")]), &request).unwrap();
            prop_assert_eq!(Selecting::from_fields(selecting.fields().to_vec()), Some(selecting));
        }
    }
}
