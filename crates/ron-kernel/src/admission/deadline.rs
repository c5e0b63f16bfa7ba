//! How long a request may take: the route's budget or what the client asked for, whichever is less.

use http::header::{HeaderMap, HeaderName, HeaderValue};
use std::time::{Duration, Instant};

pub const REQUEST_TIMEOUT: HeaderName = HeaderName::from_static("request-timeout");
pub const DEADLINE: HeaderName = HeaderName::from_static("deadline");
pub const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// The point in time after which nobody waits for the answer any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    pub until: Instant,
    /// What the client asked for itself: it covers the whole response, streams included.
    pub client: Option<Instant>,
}

/// A deadline header that cannot be read: its name, and what it takes.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} cannot be read: write {1}")]
pub struct BadDeadline(&'static str, &'static str);

const BAD_REQUEST_TIMEOUT: BadDeadline =
    BadDeadline("Request-Timeout", "seconds, such as 2 or 2s, or 1500ms");
const BAD_GRPC_TIMEOUT: BadDeadline = BadDeadline("grpc-timeout", "up to 8 digits and one of H M S m u n");
const BAD_DEADLINE: BadDeadline = BadDeadline("Deadline", "a time in milliseconds since 1970");

impl Budget {
    /// `unix_millis` is the wall clock, for `Deadline`.
    pub fn of(
        headers: &HeaderMap,
        route: Duration,
        now: Instant,
        unix_millis: impl FnOnce() -> u64,
    ) -> Result<Budget, BadDeadline> {
        let mut asked: Option<Duration> = None;
        let mut consider =
            |duration: Duration| asked = Some(asked.map_or(duration, |other| other.min(duration)));
        if let Some(value) = headers.get(REQUEST_TIMEOUT) {
            consider(parse_request_timeout(value).ok_or(BAD_REQUEST_TIMEOUT)?);
        }
        if let Some(value) = headers.get(GRPC_TIMEOUT) {
            consider(parse_grpc_timeout(value).ok_or(BAD_GRPC_TIMEOUT)?);
        }
        if let Some(value) = headers.get(DEADLINE) {
            let at = digits(value.as_bytes()).ok_or(BAD_DEADLINE)?;
            consider(Duration::from_millis(at.saturating_sub(unix_millis())));
        }
        let until = now + asked.map_or(route, |asked| asked.min(route));
        Ok(Budget { until, client: asked.and_then(|asked| now.checked_add(asked)) })
    }

    pub fn remaining(&self, now: Instant) -> Duration {
        self.until.saturating_duration_since(now)
    }

    pub fn is_over(&self, now: Instant) -> bool {
        now >= self.until
    }
}

/// `2` (seconds), `2s` or `1500ms`.
fn parse_request_timeout(value: &HeaderValue) -> Option<Duration> {
    let text = value.as_bytes();
    if let Some(millis) = text.strip_suffix(b"ms") {
        return digits(millis).map(Duration::from_millis);
    }
    digits(text.strip_suffix(b"s").unwrap_or(text)).map(Duration::from_secs)
}

/// At most 8 digits and one of `H M S m u n`.
fn parse_grpc_timeout(value: &HeaderValue) -> Option<Duration> {
    let (unit, number) = value.as_bytes().split_last()?;
    let number = digits(number).filter(|_| value.len() <= 9)?;
    Some(match unit {
        b'H' => Duration::from_secs(number * 3600),
        b'M' => Duration::from_secs(number * 60),
        b'S' => Duration::from_secs(number),
        b'm' => Duration::from_millis(number),
        b'u' => Duration::from_micros(number),
        b'n' => Duration::from_nanos(number),
        _ => return None,
    })
}

/// Digits only: no sign, no space, at most 15 of them, so that no sum overflows.
fn digits(text: &[u8]) -> Option<u64> {
    let fits = (1..=15).contains(&text.len()) && text.iter().all(u8::is_ascii_digit);
    fits.then(|| text.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0')))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(name: HeaderName, value: &'static str) -> Result<u128, &'static str> {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_static(value));
        let now = Instant::now();
        let budget = Budget::of(&headers, Duration::from_secs(30), now, || 1_000_000);
        budget.map(|budget| budget.remaining(now).as_millis()).map_err(|bad| bad.0)
    }

    #[test]
    fn every_dialect_is_read_and_capped_by_the_route() {
        assert_eq!(budget(REQUEST_TIMEOUT, "2"), Ok(2000));
        assert_eq!(budget(REQUEST_TIMEOUT, "1500ms"), Ok(1500));
        assert_eq!(budget(REQUEST_TIMEOUT, "120"), Ok(30_000));
        assert_eq!(budget(DEADLINE, "1000250"), Ok(250));
        assert_eq!(budget(DEADLINE, "5"), Ok(0), "long past");
        assert_eq!(budget(GRPC_TIMEOUT, "100m"), Ok(100));
        assert_eq!(budget(GRPC_TIMEOUT, "99999999H"), Ok(30_000));
        assert_eq!(budget(GRPC_TIMEOUT, "1S"), Ok(1000));
    }

    #[test]
    fn what_cannot_be_read_names_its_header() {
        for bad in ["", "-1", "1.5", "ms", " 2", "1h", "9999999999999999"] {
            assert_eq!(budget(REQUEST_TIMEOUT, bad), Err("Request-Timeout"), "{bad:?}");
        }
        for bad in ["5", "123456789m", "m", "1x"] {
            assert_eq!(budget(GRPC_TIMEOUT, bad), Err("grpc-timeout"), "{bad:?}");
        }
        assert_eq!(budget(DEADLINE, "soon"), Err("Deadline"));
    }

    #[test]
    fn the_clients_own_deadline_is_kept_beside_the_routes() {
        let mut headers = HeaderMap::new();
        let now = Instant::now();
        let of = |headers: &HeaderMap| {
            let budget = Budget::of(headers, Duration::from_secs(5), now, || 0).unwrap();
            (budget.remaining(now).as_secs(), budget.client.map(|at| (at - now).as_secs()))
        };
        assert_eq!(of(&headers), (5, None));
        headers.insert(REQUEST_TIMEOUT, HeaderValue::from_static("9"));
        assert_eq!(of(&headers), (5, Some(9)), "the route's is shorter, the client's still covers a stream");
        headers.insert(GRPC_TIMEOUT, HeaderValue::from_static("1S"));
        assert_eq!(of(&headers), (1, Some(1)));
    }
}
