//! What responses and requests say about caching: `Cache-Control`, `CDN-Cache-Control`, `Expires`, `Pragma`.

use super::date::{self, UnixMillis};
use super::list::{DELTA_MAX, delta_seconds, is_token_byte, members, trim, unquote};
use super::structured::{Bare, dictionary};
use http::header::{CACHE_CONTROL, CONTENT_ENCODING, CONTENT_RANGE, EXPIRES, PRAGMA, VARY};
use http::{HeaderMap, HeaderName};

pub const CDN_CACHE_CONTROL: HeaderName = HeaderName::from_static("cdn-cache-control");

/// A directive that can be limited to some fields (`no-cache`, `private`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Scope {
    #[default]
    Nothing,
    /// These fields, and not the rest of the response.
    Fields(Vec<HeaderName>),
    Everything,
}

impl Scope {
    /// The names of a list; everything where it is empty, unreadable, or names what the body cannot be
    /// understood or found without.
    fn of_list(list: &[u8]) -> Self {
        let names: Option<Vec<_>> = members(list).map(|name| HeaderName::from_bytes(name).ok()).collect();
        let vital = [CACHE_CONTROL, CDN_CACHE_CONTROL, CONTENT_ENCODING, CONTENT_RANGE, VARY];
        match names {
            Some(names) if !names.is_empty() && !names.iter().any(|name| vital.contains(name)) => {
                Self::Fields(names)
            }
            _ => Self::Everything,
        }
    }

    /// Both at once: the stricter of the two.
    fn add(&mut self, other: Self) {
        *self = match (std::mem::take(self), other) {
            (Self::Fields(mut names), Self::Fields(more)) => {
                names.extend(more);
                Self::Fields(names)
            }
            (Self::Everything, _) | (_, Self::Everything) => Self::Everything,
            (Self::Nothing, other) | (other, Self::Nothing) => other,
        };
    }

    pub fn fields(&self) -> &[HeaderName] {
        if let Self::Fields(names) = self { names } else { &[] }
    }
}

/// The caching rules of a response, from the one field that counts (RFC 9213 section 2.2).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResponseRules {
    pub no_store: bool,
    pub no_cache: Scope,
    pub private: Scope,
    pub public: bool,
    pub must_revalidate: bool,
    pub proxy_revalidate: bool,
    pub must_understand: bool,
    /// RFC 8246.
    pub immutable: bool,
    /// In seconds, like all that follow; zero where the argument is unreadable (RFC 9111 section 4.2.1).
    pub max_age: Option<u64>,
    pub s_maxage: Option<u64>,
    /// RFC 5861.
    pub stale_while_revalidate: u64,
    pub stale_if_error: u64,
    /// `Expires` as Unix seconds, unless a targeted field stands in its place.
    pub expires: Option<Expires>,
}

/// What `Expires` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expires {
    At(i64),
    /// No date, or several: it has expired (RFC 9111 section 5.3).
    Invalid,
}

impl ResponseRules {
    pub fn of(headers: &HeaderMap, now: UnixMillis) -> Self {
        let targeted = headers.get_all(CDN_CACHE_CONTROL).iter().map(|value| value.as_bytes());
        if let Some(members) = dictionary(targeted).filter(|members| !members.is_empty()) {
            let mut rules = Self::default();
            members.iter().for_each(|(name, value)| rules.targeted(name, value));
            return rules;
        }
        let mut rules = Self { expires: expires(headers, now), ..Self::default() };
        for line in headers.get_all(CACHE_CONTROL) {
            members(line.as_bytes()).filter_map(Directive::of).for_each(|directive| rules.apply(&directive));
        }
        rules
    }

    /// Whether stale use is forbidden whatever else is said (RFC 9111 section 4.2.4).
    pub fn forbids_stale(&self) -> bool {
        self.must_revalidate
            || self.proxy_revalidate
            || self.s_maxage.is_some()
            || self.no_cache == Scope::Everything
    }

    /// Whether a shared cache may keep what was meant for an authorised client (RFC 9111 section 3.5).
    pub fn allows_authorized(&self) -> bool {
        self.public || self.must_revalidate || self.s_maxage.is_some()
    }

    fn apply(&mut self, directive: &Directive<'_>) {
        let seconds = || directive.seconds().unwrap_or(0);
        let plain = directive.argument.is_none() && !directive.malformed;
        match &*directive.name {
            "no-store" => self.no_store = true,
            "no-cache" => self.no_cache.add(directive.scope()),
            "private" => self.private.add(directive.scope()),
            "must-revalidate" => self.must_revalidate = true,
            "proxy-revalidate" => self.proxy_revalidate = true,
            "must-understand" => self.must_understand = true,
            // What allows more is believed only in its plain form.
            "public" => self.public |= plain,
            "immutable" => self.immutable |= plain,
            "max-age" => self.max_age = self.max_age.or_else(|| Some(seconds())),
            "s-maxage" => self.s_maxage = self.s_maxage.or_else(|| Some(seconds())),
            "stale-while-revalidate" if self.stale_while_revalidate == 0 => {
                self.stale_while_revalidate = seconds();
            }
            "stale-if-error" if self.stale_if_error == 0 => self.stale_if_error = seconds(),
            _ => {}
        }
    }

    /// A member of a targeted field; one of another type than its directive has is left out (RFC 9213 2.1).
    fn targeted(&mut self, name: &str, value: &Bare) {
        let seconds = || match value {
            Bare::Integer(seconds) => u64::try_from(*seconds).ok().map(|it| it.min(DELTA_MAX)),
            _ => None,
        };
        let scope = || match value {
            Bare::Boolean(true) => Scope::Everything,
            Bare::String(list) => Scope::of_list(list.as_bytes()),
            _ => Scope::Nothing,
        };
        let set = *value == Bare::Boolean(true);
        match name {
            "no-store" => self.no_store = set,
            "no-cache" => self.no_cache = scope(),
            "private" => self.private = scope(),
            "must-revalidate" => self.must_revalidate = set,
            "proxy-revalidate" => self.proxy_revalidate = set,
            "must-understand" => self.must_understand = set,
            "public" => self.public = set,
            "immutable" => self.immutable = set,
            "max-age" => self.max_age = seconds(),
            "s-maxage" => self.s_maxage = seconds(),
            "stale-while-revalidate" => self.stale_while_revalidate = seconds().unwrap_or(0),
            "stale-if-error" => self.stale_if_error = seconds().unwrap_or(0),
            _ => {}
        }
    }
}

fn expires(headers: &HeaderMap, now: UnixMillis) -> Option<Expires> {
    let mut lines = headers.get_all(EXPIRES).iter();
    let first = lines.next()?;
    // Lines that repeat the same date are one; others contradict each other.
    let single = lines.all(|line| line == first);
    let date = date::parse(first.as_bytes(), now).filter(|_| single);
    Some(date.map_or(Expires::Invalid, Expires::At))
}

/// What a client asks of the cache (RFC 9111 section 5.2.1), in seconds where it has an argument.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestRules {
    pub no_cache: bool,
    pub no_store: bool,
    pub only_if_cached: bool,
    pub max_age: Option<u64>,
    pub min_fresh: u64,
    /// By how much the answer may be too old; without an argument, by anything.
    pub max_stale: Option<u64>,
    pub stale_if_error: u64,
}

impl RequestRules {
    pub fn of(headers: &HeaderMap) -> Self {
        let mut rules = Self::default();
        let mut lines = headers.get_all(CACHE_CONTROL).iter().peekable();
        if lines.peek().is_none() {
            // Section 5.4: Pragma counts where nothing newer is said.
            let mut pragmas = headers.get_all(PRAGMA).iter().flat_map(|line| members(line.as_bytes()));
            rules.no_cache = pragmas.any(|pragma| pragma.eq_ignore_ascii_case(b"no-cache"));
        }
        for line in lines {
            members(line.as_bytes()).filter_map(Directive::of).for_each(|directive| rules.apply(&directive));
        }
        rules
    }

    fn apply(&mut self, directive: &Directive<'_>) {
        match &*directive.name {
            "no-cache" => self.no_cache = true,
            "no-store" => self.no_store = true,
            "only-if-cached" => self.only_if_cached = true,
            "max-age" => self.max_age = self.max_age.or(Some(directive.seconds().unwrap_or(0))),
            "min-fresh" if self.min_fresh == 0 => self.min_fresh = directive.seconds().unwrap_or(0),
            "max-stale" if self.max_stale.is_none() && !directive.malformed => {
                let any = directive.argument.is_none().then_some(u64::MAX);
                self.max_stale = any.or_else(|| directive.seconds());
            }
            "stale-if-error" if self.stale_if_error == 0 => {
                self.stale_if_error = directive.seconds().unwrap_or(0);
            }
            _ => {}
        }
    }
}

/// One member of `Cache-Control`.
struct Directive<'a> {
    /// In lower case.
    name: String,
    argument: Option<&'a [u8]>,
    /// Something other than an argument follows the name.
    malformed: bool,
}

impl<'a> Directive<'a> {
    fn of(member: &'a [u8]) -> Option<Self> {
        let end = member.iter().position(|byte| !is_token_byte(*byte)).unwrap_or(member.len());
        let (name, rest) = member.split_at(end);
        let name = std::str::from_utf8(name).ok().filter(|name| !name.is_empty())?.to_ascii_lowercase();
        let argument = rest.strip_prefix(b"=");
        Some(Self { name, argument, malformed: argument.is_none() && !rest.is_empty() })
    }

    /// The argument as seconds, quoted or not; `None` also where there is none.
    fn seconds(&self) -> Option<u64> {
        let argument = self.argument?;
        delta_seconds(argument).or_else(|| delta_seconds(&unquote(argument)?))
    }

    fn scope(&self) -> Scope {
        match self.argument {
            None => Scope::Everything,
            Some(argument) => match unquote(argument) {
                Some(list) => Scope::of_list(&list),
                None => Scope::of_list(trim(argument)),
            },
        }
    }
}

#[cfg(test)]
mod tests;
