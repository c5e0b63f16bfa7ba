//! Whether a response may be stored, and what is kept of it.

use super::*;
use crate::cache::head::age_of;
use std::time::Duration;

fn check(request: &str, status: u16, response: &str, expected: Option<NotStored>) {
    let found = judged(request, status, response, &Policy::default());
    assert_eq!(found.err(), expected, "{request:?} {status} {response:?}");
}

// RFC 9111 section 3; RFC 9110 section 15.1.
#[test]
fn explicit_freshness_makes_any_final_status_storable() {
    for status in [200, 203, 204, 299, 301, 302, 303, 307, 308, 400, 404, 410, 499, 500, 502, 503, 504, 599] {
        check("", status, "Cache-Control: max-age=60", None);
        check("", status, "Cache-Control: s-maxage=60", None);
        check("", status, "CDN-Cache-Control: max-age=60", None);
        check("", status, "Expires: Thu, 18 Aug 2050 02:01:18 GMT", None);
    }
    check("", 100, "Cache-Control: max-age=60", Some(NotStored::Status));
    // RFC 6585 and fields of the one request.
    for status in [304, 407, 412, 416, 428, 429, 431, 511] {
        check("", status, "Cache-Control: max-age=60", Some(NotStored::Status));
    }
}

// RFC 9111 section 3: without it, the status must be heuristically cacheable or the response public.
#[test]
fn without_freshness_it_takes_a_validator_and_a_known_status() {
    for status in [200, 203, 204, 300, 301, 308, 405, 414, 501] {
        check("", status, "ETag: \"a\"", None);
        check("", status, "", Some(NotStored::Freshness));
    }
    for status in [201, 202, 302, 403, 500, 502, 599] {
        check("", status, "ETag: \"a\"", Some(NotStored::Freshness));
        check("", status, "ETag: \"a\"\nCache-Control: public", None);
    }
    check("", 200, "Cache-Control: max-age=0", Some(NotStored::Freshness));
    check("", 200, "Cache-Control: max-age=x", Some(NotStored::Freshness));
    check("", 200, "Cache-Control: max-age=60, no-cache", Some(NotStored::Freshness));
    check("", 200, "Cache-Control: max-age=60, no-cache\nETag: \"a\"", None);
    check("", 200, "Cache-Control: max-age=0, stale-while-revalidate=5", None);
    check("", 200, "Cache-Control: max-age=0, stale-if-error=5", None);
}

// RFC 9111 sections 5.2.2.3, 5.2.2.5 and 5.2.2.7.
#[test]
fn what_forbids_storing_is_heeded() {
    check("", 200, "Cache-Control: max-age=60, no-store", Some(NotStored::NoStore));
    check("", 200, "Cache-Control: max-age=60, private", Some(NotStored::Private));
    check("", 200, "Cache-Control: max-age=60, private=\"a\"", None);
    check("", 200, "Cache-Control: max-age=60, no-store, must-understand", None);
    check("", 599, "Cache-Control: max-age=60, no-store, must-understand", Some(NotStored::Status));
    check("", 599, "Cache-Control: max-age=60, must-understand", Some(NotStored::Status));
    check("", 200, "Cache-Control: max-age=60\nVary: *", Some(NotStored::Vary));
    check("Cache-Control: no-store", 200, "Cache-Control: max-age=60", Some(NotStored::Request));
    check("Pragma: no-cache", 200, "Cache-Control: max-age=60", None);
    // RFC 9213 section 2.2: the targeted field alone counts.
    check("", 200, "Cache-Control: no-store\nCDN-Cache-Control: max-age=60", None);
    check("", 200, "Cache-Control: max-age=60\nCDN-Cache-Control: no-store", Some(NotStored::NoStore));
    check("", 200, "Cache-Control: max-age=60\nCDN-Cache-Control: private", Some(NotStored::Private));
    check("", 200, "Cache-Control: no-store\nCDN-Cache-Control: max-age=60, &&&", Some(NotStored::NoStore));
    check("", 200, "Cache-Control: no-store\nCDN-Cache-Control: max-age=\"60\"", Some(NotStored::Freshness));
}

// RFC 9111 section 3.5.
#[test]
fn what_credentials_got_is_shared_only_on_request() {
    let request = "Authorization: x";
    check(request, 200, "Cache-Control: max-age=60", Some(NotStored::Authorization));
    check(request, 200, "Cache-Control: max-age=60, proxy-revalidate", Some(NotStored::Authorization));
    check(request, 200, "Cache-Control: max-age=60, public", None);
    check(request, 200, "Cache-Control: max-age=60, must-revalidate", None);
    check(request, 200, "Cache-Control: s-maxage=60", None);
}

#[test]
fn only_a_get_is_stored() {
    for method in [Method::HEAD, Method::POST, Method::OPTIONS, Method::PUT] {
        let response = fields("Cache-Control: max-age=60");
        let found =
            judge((&method, &HeaderMap::new()), (StatusCode::OK, &response), AT_ONCE, &Policy::default());
        assert_eq!(found.err(), Some(NotStored::Method), "{method}");
    }
}

// RFC 9111 sections 3.1, 5.2.2.4 and 5.2.2.7; RFC 9110 section 7.6.1.
// RFC 9110 section 9.3.3.
#[test]
fn a_post_is_stored_where_it_says_that_it_is_what_a_get_would_get() {
    let target = "https://a.org/folder/doc?q=1".parse().unwrap();
    let check = |request: &str, status: u16, response: &str, expected: Option<NotStored>| {
        let answer = (StatusCode::from_u16(status).unwrap(), &fields(response));
        let judged = judge_post((&target, &fields(request)), answer, AT_ONCE, &Policy::default());
        assert_eq!(judged.err(), expected, "{request:?} {status} {response:?}");
    };
    let fresh = "Cache-Control: max-age=60\nContent-Location:";
    for own in ["/folder/doc?q=1", "doc?q=1", "https://A.org:443/folder/doc?q=1", "", "#part"] {
        check("", 200, &format!("{fresh} {own}"), None);
    }
    for other in ["/folder/doc", "/other", "http://a.org/folder/doc?q=1", "https://b.org/folder/doc?q=1"] {
        check("", 200, &format!("{fresh} {other}"), Some(NotStored::Method));
    }
    let own = "Content-Location: doc?q=1";
    check("", 200, "Cache-Control: max-age=60", Some(NotStored::Method));
    check("", 200, &format!("{fresh} doc?q=1\n{own}"), Some(NotStored::Method));
    check("", 201, &format!("{fresh} doc?q=1"), Some(NotStored::Method));
    check("", 200, &format!("{own}\nExpires: Mon, 07 Nov 1994 08:50:00 GMT"), None);
    check("", 200, &format!("{own}\nETag: \"1\""), Some(NotStored::Freshness));
    check("", 200, &format!("{own}\nCache-Control: no-store, max-age=60"), Some(NotStored::NoStore));
    check("Authorization: x", 200, &format!("{fresh} doc?q=1"), Some(NotStored::Authorization));
}

#[test]
fn fields_of_the_hop_and_of_one_client_are_not_kept() {
    let head = stored(
        "Cache-Control: max-age=60, no-cache=\"n\", private=\"p, Set-Cookie\"
Connection: a, close
Connection: b
a: 1
b: 2
c: 3
n: 4
p: 5
Set-Cookie: x=y
Keep-Alive: 5
Proxy-Authenticate: x
Proxy-Authentication-Info: x
Proxy-Connection: x
TE: x
Trailer: x
Transfer-Encoding: chunked
Upgrade: x
Age: 7
Content-Length: 10",
    );
    let mut names: Vec<_> = head.headers().keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["c", "cache-control", "date"]);
    let plain = stored(
        "Cache-Control: max-age=60\nSet-Cookie: a=b\nSet-Cookie: c=d\nX-Unknown: 1\nContent-Range: bytes 0-1/2",
    );
    assert!(plain.headers().contains_key("content-range"), "it means nothing but in a 206");
    assert_eq!(plain.headers().get_all("set-cookie").iter().count(), 2);
    assert!(plain.headers().contains_key("x-unknown"), "what is not known is kept");
}

// RFC 9110 section 6.6.1.
#[test]
fn a_response_without_a_date_gets_that_of_its_receipt() {
    for response in ["Cache-Control: max-age=60", "Cache-Control: max-age=60\nDate: today"] {
        let head = judged("", 200, response, &Policy::default()).unwrap().complete(0).unwrap();
        assert_eq!((head.headers()["date"].to_str().unwrap(), head.date()), (DATE, RECEIVED.secs()));
    }
}

// RFC 9111 section 3.3.
#[test]
fn content_that_is_not_what_was_stated_is_not_stored() {
    let pending = |status, response: &str| judged("", status, response, &Policy::default()).unwrap();
    let whole = pending(200, "Cache-Control: max-age=60\nContent-Length: 10");
    assert_eq!(whole.clone().complete(9), None);
    assert_eq!(whole.complete(10).unwrap().body(), &Body::Whole { len: 10 });
    let part = pending(206, "Cache-Control: max-age=60\nContent-Range: bytes 4-9/10");
    assert_eq!(part.clone().complete(5), None);
    let head = part.complete(6).unwrap();
    assert_eq!((head.status(), head.complete_len()), (StatusCode::OK, Some(10)));
    assert!(!head.headers().contains_key("content-range"));
    let all = pending(206, "Cache-Control: max-age=60\nContent-Range: bytes 0-9/10").complete(10);
    assert_eq!(all.unwrap().body(), &Body::Whole { len: 10 });
    for bad in ["", "Content-Range: bytes 9-4/10", "Content-Range: lines 0-1/10"] {
        check("", 206, &format!("Cache-Control: max-age=60\n{bad}"), Some(NotStored::Range));
    }
}

// RFC 9111 sections 3.3 and 3.4: what cannot be completed is not kept.
#[test]
fn what_broke_off_is_kept_where_a_strong_validator_lets_it_be_completed() {
    let broken = |status, response: &str, len| {
        let response = format!("Date: {DATE}\nCache-Control: max-age=60\n{response}");
        let head = judged("", status, &response, &Policy::default()).unwrap().incomplete(len)?;
        match head.body() {
            Body::Parts(parts) => Some((parts.parts()[0].clone(), parts.complete())),
            Body::Whole { .. } => panic!("it broke off"),
        }
    };
    assert_eq!(broken(200, "ETag: \"a\"\nContent-Length: 10", 4), Some((0..4, Some(10))));
    assert_eq!(broken(200, "ETag: \"a\"", 4), Some((0..4, None)));
    assert_eq!(broken(206, "ETag: \"a\"\nContent-Range: bytes 4-9/10", 2), Some((4..6, Some(10))));
    assert_eq!(broken(200, &format!("Last-Modified: {DAY_BEFORE}"), 4), Some((0..4, None)));
    assert_eq!(broken(200, "ETag: \"a\"\nContent-Length: 10", 0), None);
    assert_eq!(broken(200, "ETag: \"a\"\nContent-Length: 10", 11), None);
    assert_eq!(broken(206, "ETag: \"a\"\nContent-Range: bytes 4-5/10", 3), None);
    assert_eq!(broken(200, "ETag: W/\"a\"\nContent-Length: 10", 4), None);
    assert_eq!(broken(200, &format!("Last-Modified: {DATE}"), 4), None);
    assert_eq!(broken(404, "ETag: \"a\"", 4), None);
}

// RFC 9111 section 5.1.
#[test]
fn age_is_the_first_member_if_it_is_one() {
    for (lines, expected) in [
        ("Age: 7", Some(7)),
        ("Age: 7200, 0", Some(7200)),
        ("Age: 0\nAge: 7200", Some(0)),
        ("Age: 2147483649", Some(1 << 31)),
        ("Age: abc", None),
        ("Age: -7", None),
        ("Age: 7.0", None),
        ("Age: 7;x=1", Some(7)),
        ("Age: 7200 ;x", Some(7200)),
        ("Age: ;x=1", None),
        ("Age: , 7", None),
        ("", None),
    ] {
        assert_eq!(age_of(&fields(lines)), expected, "{lines}");
    }
}

// RFC 9111 section 4.2.1.
#[test]
fn the_lifetime_is_the_first_of_what_is_stated() {
    let check = |response: &str, expected: u64| {
        let head = stored(&format!("ETag: \"a\"\n{response}"));
        assert_eq!(head.freshness(&Policy::default(), RECEIVED).lifetime_ms, expected * 1000, "{response}");
    };
    let minute_later = "Expires: Sun, 06 Nov 1994 08:51:00 GMT";
    check("", 0);
    check(minute_later, 60);
    check("Expires: 0", 0);
    check(&format!("Expires: {DAY_BEFORE}"), 0);
    check(&format!("Cache-Control: max-age=5\n{minute_later}"), 5);
    check("Cache-Control: max-age=5\nExpires: 0", 5);
    check("Cache-Control: max-age=5, s-maxage=7", 7);
    check("Cache-Control: s-maxage=0, max-age=5", 0);
    check(&format!("Cache-Control: max-age=9, s-maxage=9\nCDN-Cache-Control: max-age=5\n{minute_later}"), 5);
    check(&format!("CDN-Cache-Control: none\nCache-Control: max-age=5\n{minute_later}"), 0);
    check("Expires: Sun, 21 Nov 2286 04:46:39 GMT", 9_215_927_799);
}

// RFC 9111 section 4.2.2.
#[test]
fn where_nothing_is_stated_the_operator_decides() {
    let check = |status: u16, response: &str, policy: &Policy, expected: Option<u64>| {
        let response = format!("Date: {DATE}\n{response}");
        let lifetime = judged("", status, &response, policy)
            .ok()
            .map(|pending| pending.head().freshness(policy, RECEIVED).lifetime_ms / 1000);
        assert_eq!(lifetime, expected, "{status} {response}");
    };
    let plain = Policy::default();
    check(404, "", &plain, Some(10));
    check(410, "", &plain, Some(10));
    check(404, "Cache-Control: max-age=3", &plain, Some(3));
    check(404, "Expires: 0", &plain, None);
    check(404, "Cache-Control: no-cache", &plain, None);
    check(404, "", &Policy { negative_ttl: Duration::ZERO, ..plain.clone() }, None);
    check(403, "", &plain, None);
    let hour = Policy { ttl: Some(Duration::from_secs(3600)), ..plain.clone() };
    check(200, "", &hour, Some(3600));
    check(200, "Cache-Control: max-age=3", &hour, Some(3));
    check(404, "", &hour, Some(10));
    check(500, "", &hour, None);
    check(302, "", &hour, None);
    let heuristic = Some(Heuristic { percent: 10, max: Duration::from_secs(3600) });
    let guess = Policy { heuristic, ..plain.clone() };
    check(200, "Last-Modified: Sun, 06 Nov 1994 08:40:00 GMT", &guess, Some(60));
    check(200, &format!("Last-Modified: {DAY_BEFORE}"), &guess, Some(3600));
    check(200, &format!("Last-Modified: {DAY_BEFORE}"), &plain, Some(0));
    check(599, &format!("Last-Modified: {DAY_BEFORE}"), &guess, None);
    check(599, &format!("Last-Modified: {DAY_BEFORE}\nCache-Control: public"), &guess, Some(3600));
    check(200, &format!("Last-Modified: {DAY_BEFORE}\nExpires: 0"), &guess, Some(0));
}

// RFC 9111 section 4.2.3.
#[test]
fn age_counts_the_way_the_wait_and_the_stay() {
    let check = |response: &str, delay_ms: u64, expected_ms: u64| {
        let requested = UnixMillis(RECEIVED.0 - delay_ms);
        let head = judge(
            (&Method::GET, &HeaderMap::new()),
            (StatusCode::OK, &fields(&format!("Cache-Control: max-age=60\n{response}"))),
            Exchange { requested, received: RECEIVED },
            &Policy::default(),
        );
        let head = head.unwrap().complete(0).unwrap();
        let age = |now| head.freshness(&Policy::default(), now).age_ms;
        assert_eq!(age(RECEIVED), expected_ms, "{response}");
        assert_eq!(age(after(5)), expected_ms + 5000, "{response}");
        assert_eq!(age(UnixMillis(0)), expected_ms, "a clock that was set back takes nothing away");
    };
    check(&format!("Date: {DATE}"), 0, 0);
    check("", 0, 0);
    check(&format!("Date: {DATE}"), 1500, 1500);
    check(&format!("Date: {DATE}\nAge: 30"), 1500, 31_500);
    check("Date: Sun, 06 Nov 1994 08:49:50 GMT", 0, 10_000);
    check("Date: Sun, 06 Nov 1994 08:49:50 GMT\nAge: 5", 0, 10_000);
    check("Date: Sun, 06 Nov 1994 08:59:50 GMT", 0, 0);
    check(&format!("Date: {DATE}\nAge: x"), 0, 0);
}
