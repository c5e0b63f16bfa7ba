//! Tests of the decisions, by section of RFC 9111 and its relatives.

mod answers;
mod codec;
mod properties;
mod reusing;
mod storing;
mod validating;

use super::*;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};

/// 6 November 1994, 08:50:00: when responses are received in these tests.
const RECEIVED: UnixMillis = UnixMillis(784_111_800_000);
/// The same as a date.
const DATE: &str = "Sun, 06 Nov 1994 08:50:00 GMT";
const DAY_BEFORE: &str = "Sat, 05 Nov 1994 08:50:00 GMT";
const AT_ONCE: Exchange = Exchange { requested: RECEIVED, received: RECEIVED };

fn after(secs: u64) -> UnixMillis {
    UnixMillis(RECEIVED.0 + secs * 1000)
}

/// Fields from lines.
fn fields(text: &str) -> HeaderMap {
    let line = |line: &str| {
        let (name, value) = line.split_once(": ").unwrap_or((line.trim_end_matches(':'), ""));
        let name = HeaderName::from_bytes(name.trim().as_bytes()).unwrap();
        (name, HeaderValue::from_bytes(value.as_bytes()).unwrap())
    };
    text.lines().filter(|text| !text.trim().is_empty()).map(line).collect()
}

fn judged(request: &str, status: u16, response: &str, policy: &Policy) -> Result<Pending, NotStored> {
    let status = StatusCode::from_u16(status).unwrap();
    judge((&Method::GET, &fields(request)), (status, &fields(response)), AT_ONCE, policy)
}

/// A stored response of ten bytes.
fn stored_for(request: &str, response: &str) -> StoredHead {
    let response = format!("Date: {DATE}\n{response}");
    judged(request, 200, &response, &Policy::default()).expect("a storable response").complete(10).unwrap()
}

fn stored(response: &str) -> StoredHead {
    stored_for("", response)
}

/// Stored parts of ten bytes, of which these have come.
fn parts(response: &str, first: u64, last: u64) -> StoredHead {
    let response = format!("Date: {DATE}\nContent-Range: bytes {first}-{last}/10\n{response}");
    judged("", 206, &response, &Policy::default()).unwrap().complete(last - first + 1).unwrap()
}

fn verdict(request: &str, stored: &[&StoredHead], secs: u64) -> Verdict {
    decide((&Method::GET, &fields(request)), stored, &Policy::default(), after(secs))
}
