//! Conditional requests, in the order of precedence of RFC 9110, section 13.2.2.

use crate::cache::list::trim;
use crate::cache::validators::EntityTag;
use http::Method;
use http::header::{
    HeaderMap, HeaderName, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, IF_UNMODIFIED_SINCE,
};
use ron_kernel::date::parse_http_date;

/// What a representation that exists is compared by.
#[derive(Clone, Copy, Debug)]
pub struct Validators<'a> {
    /// Its strong entity tags, quotes included: one, or for a change of all of its variants each one's.
    pub etags: &'a [&'a str],
    /// Unix seconds.
    pub modified: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Proceed,
    /// 304
    NotModified,
    /// 412
    Failed,
}

/// A list of entity tags, or `*`. What cannot be read of it matches nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Tags {
    Any,
    List(Vec<Tag>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Tag {
    weak: bool,
    /// What stands between the quotes.
    opaque: Vec<u8>,
}

/// The conditions of a request, read once; they can outlive it until a change is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preconditions {
    matching: Option<Tags>,
    none_matching: Option<Tags>,
    modified_since: Option<u64>,
    unmodified_since: Option<u64>,
    /// `Some(None)`: there is an `If-Range` that cannot be read.
    range: Option<Option<RangeCondition>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum RangeCondition {
    Tag(Tag),
    Date(u64),
}

impl Preconditions {
    /// `now` is in Unix seconds; dates with two digits for the year are read by it.
    pub fn of(headers: &HeaderMap, now: u64) -> Preconditions {
        let date = |name: HeaderName| parse_http_date(single(headers, &name)?, now);
        let range = headers.contains_key(IF_RANGE).then(|| {
            let text = single(headers, &IF_RANGE)?;
            match EntityTag::of(text.as_bytes()) {
                Some(tag) => Some(RangeCondition::Tag(tag.into())),
                None => parse_http_date(text, now).map(RangeCondition::Date),
            }
        });
        Preconditions {
            matching: Tags::of(headers, &IF_MATCH),
            none_matching: Tags::of(headers, &IF_NONE_MATCH),
            modified_since: date(IF_MODIFIED_SINCE),
            unmodified_since: date(IF_UNMODIFIED_SINCE),
            range,
        }
    }

    /// Whether there is anything to evaluate.
    pub fn is_empty(&self) -> bool {
        *self == Preconditions { range: self.range.clone(), ..Preconditions::default() }
    }

    /// `current` is `None` where nothing exists yet.
    pub fn evaluate(&self, method: &Method, current: Option<Validators<'_>>) -> Outcome {
        let reads = matches!(*method, Method::GET | Method::HEAD);
        let modified = current.and_then(|current| current.modified);
        if let Some(tags) = &self.matching {
            if !tags.meet(current, Tag::equals_strongly) {
                return Outcome::Failed;
            }
        } else if let (Some(since), Some(modified)) = (self.unmodified_since, modified)
            && modified > since
        {
            return Outcome::Failed;
        }
        if let Some(tags) = &self.none_matching {
            if tags.meet(current, Tag::equals_weakly) {
                return if reads { Outcome::NotModified } else { Outcome::Failed };
            }
        } else if let (true, Some(since), Some(modified)) = (reads, self.modified_since, modified)
            && modified <= since
        {
            return Outcome::NotModified;
        }
        Outcome::Proceed
    }

    /// Whether a `Range` is to be honoured. A date is a strong validator only if a second has passed since: within it
    /// the object could have changed again.
    pub fn range_applies(&self, current: Validators<'_>, now: u64) -> bool {
        match &self.range {
            None => true,
            Some(None) => false,
            Some(Some(RangeCondition::Tag(tag))) => {
                current.etags.iter().any(|etag| tag.equals_strongly(etag))
            }
            Some(Some(RangeCondition::Date(date))) => current.modified == Some(*date) && *date < now,
        }
    }
}

/// The value of a field that may come once only.
fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    value.to_str().ok().map(str::trim)
}

impl Tags {
    fn of(headers: &HeaderMap, name: &HeaderName) -> Option<Tags> {
        let mut tags = Vec::new();
        let mut found = false;
        for value in headers.get_all(name) {
            found = true;
            if trim(value.as_bytes()) == b"*" {
                return Some(Tags::Any);
            }
            tags.extend(EntityTag::list(value.as_bytes()).map(Tag::from));
        }
        found.then_some(Tags::List(tags))
    }

    fn meet(&self, current: Option<Validators<'_>>, equals: fn(&Tag, &str) -> bool) -> bool {
        match (self, current) {
            (_, None) => false,
            (Tags::Any, Some(_)) => true,
            (Tags::List(tags), Some(current)) => {
                tags.iter().any(|tag| current.etags.iter().any(|etag| equals(tag, etag)))
            }
        }
    }
}

impl Tag {
    fn equals_strongly(&self, strong: &str) -> bool {
        !self.weak && self.equals_weakly(strong)
    }

    fn equals_weakly(&self, strong: &str) -> bool {
        EntityTag::of(strong.as_bytes()).is_some_and(|tag| tag.opaque == self.opaque)
    }
}

impl From<EntityTag<'_>> for Tag {
    fn from(tag: EntityTag<'_>) -> Tag {
        Tag { weak: tag.weak, opaque: tag.opaque.to_owned() }
    }
}
