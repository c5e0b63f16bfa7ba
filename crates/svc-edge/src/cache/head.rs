//! A stored response without its bytes: its fields, whom it answers, how old it is and how long it is good.

use super::date::{self, UnixMillis};
use super::directives::{Expires, ResponseRules, Scope};
use super::list::{delta_seconds, members_or_empty, trim};
use super::range::Parts;
use super::validators::Validators;
use super::vary::Selecting;
use http::header::{
    AGE, CONNECTION, CONTENT_LENGTH, DATE, LAST_MODIFIED, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use std::time::Duration;

/// What the operator decides where the origin says nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// How long a successful response without explicit freshness is good; `None`: no longer than it takes.
    pub ttl: Option<Duration>,
    /// The same for 404 and 410.
    pub negative_ttl: Duration,
    /// Freshness guessed from `Last-Modified` (RFC 9111 section 4.2.2). Off by default.
    pub heuristic: Option<Heuristic>,
    /// Whether clients' `Cache-Control` and `Pragma` are heeded; they may be ignored (RFC 9111 section 5.2.1).
    pub client_directives: bool,
    /// Whether an unclear age makes a response stale, where RFC 9111 section 5.1 has what cannot be read ignored.
    pub cautious_age: bool,
    /// Whether a 304 is believed whatever its tag, which RFC 9111 section 4.3.4 forbids.
    pub accept_changed_tag: bool,
}

/// So much of the time since the last modification, but no longer than a limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Heuristic {
    pub percent: u32,
    pub max: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            ttl: None,
            negative_ttl: Duration::from_secs(10),
            heuristic: None,
            client_directives: true,
            cautious_age: false,
            accept_changed_tag: false,
        }
    }
}

/// When the origin was asked, and when its response's head was there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    pub requested: UnixMillis,
    pub received: UnixMillis,
}

/// What there is of the content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    Whole { len: u64 },
    Parts(Parts),
}

/// A response as it is kept. Its fields are those that a cache may keep and that do not depend on a connection,
/// on a time or on how much of the content is sent; its status is that of the whole, also where only parts
/// are here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredHead {
    status: StatusCode,
    headers: HeaderMap,
    selecting: Selecting,
    received: UnixMillis,
    initial_age_ms: u64,
    /// Its `Age` was neither one plain number nor a list of one line without blanks, whose first member counts. Kept, so that
    /// whether this matters can be decided later.
    pub(super) unclear_age: bool,
    /// Must not be used before the origin has confirmed it.
    invalid: bool,
    pub(super) body: Body,
    /// Read from `headers`.
    rules: ResponseRules,
    date: i64,
}

/// How old a response is, and how old it may become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Freshness {
    pub age_ms: u64,
    pub lifetime_ms: u64,
}

impl Freshness {
    pub fn is_fresh(&self) -> bool {
        self.lifetime_ms > self.age_ms
    }

    /// By how much it is too old.
    pub fn staleness_ms(&self) -> u64 {
        self.age_ms.saturating_sub(self.lifetime_ms)
    }

    /// Seconds that are left; negative for a stale response (RFC 9211 section 2.5).
    pub fn ttl_secs(&self) -> i64 {
        let signed = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX);
        (signed(self.lifetime_ms).saturating_sub(signed(self.age_ms))).div_euclid(1000)
    }
}

impl StoredHead {
    /// Keeps what may be kept of a response's fields.
    pub(super) fn new(
        status: StatusCode,
        mut headers: HeaderMap,
        selecting: Selecting,
        exchange: Exchange,
        body: Body,
    ) -> Self {
        let (initial_age_ms, unclear_age) = (initial_age_ms(&headers, exchange), has_unclear_age(&headers));
        let rules = ResponseRules::of(&headers, exchange.received);
        clean(&mut headers);
        for name in rules.no_cache.fields().iter().chain(rules.private.fields()) {
            headers.remove(name);
        }
        // RFC 9110 section 6.6.1: a response without a date, or with none that can be read, has that of its receipt.
        if date_of(&headers, exchange.received).is_none() {
            let date = date::format(exchange.received.secs());
            headers.insert(DATE, HeaderValue::try_from(date).expect("a date is made of visible characters"));
        }
        let head = Self::restore(status, headers, selecting, exchange.received, initial_age_ms, body);
        Self { unclear_age, ..head }
    }

    /// Puts one together from what was kept.
    pub(super) fn restore(
        status: StatusCode,
        headers: HeaderMap,
        selecting: Selecting,
        received: UnixMillis,
        initial_age_ms: u64,
        body: Body,
    ) -> Self {
        let rules = ResponseRules::of(&headers, received);
        let date = date_of(&headers, received).unwrap_or(received.secs());
        let (unclear_age, invalid) = (false, false);
        Self { status, headers, selecting, received, initial_age_ms, unclear_age, invalid, body, rules, date }
    }

    pub fn status(&self) -> StatusCode {
        self.status
    }

    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    pub fn selecting(&self) -> &Selecting {
        &self.selecting
    }

    pub fn received(&self) -> UnixMillis {
        self.received
    }

    pub(super) fn initial_age_ms(&self) -> u64 {
        self.initial_age_ms
    }

    pub fn body(&self) -> &Body {
        &self.body
    }

    pub fn rules(&self) -> &ResponseRules {
        &self.rules
    }

    /// What `Date` says, in Unix seconds.
    pub fn date(&self) -> i64 {
        self.date
    }

    pub fn validators(&self) -> Validators<'_> {
        Validators::of(&self.headers, self.received)
    }

    pub fn is_invalid(&self) -> bool {
        self.invalid
    }

    /// Whether it may not be used without the origin's word, however much its client would like to (section 4.2.4).
    pub fn needs_origin(&self, freshness: Freshness) -> bool {
        let never = self.invalid || self.rules.no_cache == Scope::Everything;
        never || !freshness.is_fresh() && self.rules.forbids_stale()
    }

    /// From now on it must be validated before it is used (RFC 9111 section 4.4).
    pub fn invalidate(&mut self) {
        self.invalid = true;
    }

    /// How much of the content is known to exist, if its end is.
    pub fn complete_len(&self) -> Option<u64> {
        match &self.body {
            Body::Whole { len } => Some(*len),
            Body::Parts(parts) => parts.complete(),
        }
    }

    /// Whether it answers the very requests that another does, and so takes its place.
    pub fn replaces(&self, other: &Self) -> bool {
        self.selecting == other.selecting
    }

    /// RFC 9111 sections 4.2.1 and 4.2.3.
    pub fn freshness(&self, policy: &Policy, now: UnixMillis) -> Freshness {
        let age_ms = self.initial_age_ms.saturating_add(now.since(self.received));
        Freshness { age_ms, lifetime_ms: self.lifetime_ms(policy) }
    }

    /// Whether nobody can say for how long it has been stale, if it is.
    pub(super) fn is_of_unknown_age(&self, policy: &Policy) -> bool {
        policy.cautious_age && self.unclear_age
    }

    pub(super) fn lifetime_ms(&self, policy: &Policy) -> u64 {
        if self.is_of_unknown_age(policy) {
            return 0;
        }
        let stated = self.rules.s_maxage.or(self.rules.max_age).map(|secs| secs.saturating_mul(1000));
        stated.unwrap_or_else(|| match self.rules.expires {
            Some(Expires::At(at)) => secs_to_ms(at.saturating_sub(self.date)),
            Some(Expires::Invalid) => 0,
            None => self.assigned_ms(policy),
        })
    }

    /// The lifetime of a response whose origin gave it none (RFC 9111 section 4.2.2).
    fn assigned_ms(&self, policy: &Policy) -> u64 {
        if !is_heuristically_cacheable(self.status) && !self.rules.public {
            return 0;
        }
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        if matches!(self.status, StatusCode::NOT_FOUND | StatusCode::GONE) {
            return millis(policy.negative_ttl);
        }
        if let Some(ttl) = policy.ttl.filter(|_| self.status.is_success() || self.status.is_redirection()) {
            return millis(ttl);
        }
        let modified = self.headers.get(LAST_MODIFIED);
        let modified = modified.and_then(|value| date::parse(value.as_bytes(), self.received));
        match (policy.heuristic, modified) {
            (Some(heuristic), Some(modified)) => {
                let since = secs_to_ms(self.date.saturating_sub(modified));
                (since / 100).saturating_mul(u64::from(heuristic.percent)).min(millis(heuristic.max))
            }
            _ => 0,
        }
    }
}

fn secs_to_ms(secs: i64) -> u64 {
    u64::try_from(secs).unwrap_or(0).saturating_mul(1000)
}

fn date_of(headers: &HeaderMap, now: UnixMillis) -> Option<i64> {
    headers.get(DATE).and_then(|value| date::parse(value.as_bytes(), now))
}

/// RFC 9110 section 15.1.
pub fn is_heuristically_cacheable(status: StatusCode) -> bool {
    matches!(status.as_u16(), 200 | 203 | 204 | 206 | 300 | 301 | 308 | 404 | 405 | 410 | 414 | 501)
}

/// The corrected initial age (RFC 9111 section 4.2.3).
fn initial_age_ms(headers: &HeaderMap, exchange: Exchange) -> u64 {
    // A date has whole seconds, so the clock is compared in those.
    let date = date_of(headers, exchange.received);
    let apparent = date.map_or(0, |date| secs_to_ms(exchange.received.secs().saturating_sub(date)));
    let stated = age_of(headers).unwrap_or(0).saturating_mul(1000);
    apparent.max(stated.saturating_add(exchange.received.since(exchange.requested)))
}

/// The first member of `Age`, if it is one (RFC 9111 section 5.1). A number stays one with parameters behind it:
/// to ignore it would make an old response young.
pub fn age_of(headers: &HeaderMap) -> Option<u64> {
    let first = members_or_empty(headers.get(AGE)?.as_bytes()).next()?;
    delta_seconds(first.split(|byte| *byte == b';').next()?.trim_ascii_end())
}

/// Whether there is an `Age` that is anything but one number. A list that somebody wrote in one piece counts by its first
/// member (RFC 9111 section 5.1); blanks after its commas are what is left of lines of several senders (RFC 9110 section
/// 5.3), who do not agree.
fn has_unclear_age(headers: &HeaderMap) -> bool {
    let mut lines = headers.get_all(AGE).iter();
    let is_clear = |line: &[u8]| trim(line).split(|byte| *byte == b',').all(|it| delta_seconds(it).is_some());
    lines.next().is_some_and(|line| !is_clear(line.as_bytes())) || lines.next().is_some()
}

/// Takes out what no cache keeps (RFC 9111 section 3.1), and what is worked out anew for each answer.
pub(super) fn clean(headers: &mut HeaderMap) {
    const OURS: [&str; 4] = ["keep-alive", "proxy-connection", "proxy-authentication-info", "x-reason"];
    let listed: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|line| members_or_empty(line.as_bytes()))
        .filter_map(|name| HeaderName::from_bytes(name).ok())
        .collect();
    let of_the_hop =
        [CONNECTION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];
    let of_the_answer = [AGE, CONTENT_LENGTH];
    let named = OURS.map(HeaderName::from_static);
    for name in listed.iter().chain(&of_the_hop).chain(&of_the_answer).chain(&named) {
        headers.remove(name);
    }
}
