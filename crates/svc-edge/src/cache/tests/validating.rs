//! Asking the origin about what is stored, and what its answer changes.

use super::*;

fn names_and_values(headers: &HeaderMap) -> Vec<(String, String)> {
    let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let mut all: Vec<_> = headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect();
    all.sort();
    all
}

fn assert_fields(found: &HeaderMap, expected: &str) {
    assert_eq!(names_and_values(found), names_and_values(&fields(expected)));
}

// RFC 9111 section 4.3.1.
#[test]
fn a_conditional_request_has_our_validators_and_the_clients_other_fields() {
    let check = |stored_fields: &str, request: &str, expected: &str| {
        let mut found = fields(request);
        make_conditional(&mut found, &stored(&format!("Cache-Control: max-age=60\n{stored_fields}")));
        assert_fields(&found, expected);
    };
    let modified = format!("Last-Modified: {DAY_BEFORE}");
    let since = format!("If-Modified-Since: {DAY_BEFORE}");
    check("ETag: \"a\"", "X: 1", "X: 1\nIf-None-Match: \"a\"");
    check("ETag: W/\"a\"", "", "If-None-Match: W/\"a\"");
    check(&format!("ETag: \"a\"\n{modified}"), "", &format!("If-None-Match: \"a\"\n{since}"));
    check(&modified, &format!("If-None-Match: \"b\"\nIf-Modified-Since: {DATE}"), &since);
    check("ETag: a", "If-None-Match: \"b\"", "");
    check(
        "ETag: \"a\"",
        "Range: bytes=0-1\nIf-Range: \"b\"",
        "Range: bytes=0-1\nIf-Range: \"b\"\nIf-None-Match: \"a\"",
    );
}

#[test]
fn a_revalidation_of_our_own_asks_as_the_client_did_that_it_was_stored_for() {
    let head = stored_for("A: 1\nC: x", "Cache-Control: max-age=60\nETag: \"a\"\nVary: A, B");
    assert_fields(&revalidation(&head), "A: 1\nIf-None-Match: \"a\"");
    assert!(head.selecting().matches(&revalidation(&head)));
}

// RFC 9111 section 3.4; RFC 9110 section 13.1.5.
#[test]
fn a_completion_asks_for_what_is_missing_of_the_same_representation() {
    let mut request = fields("X: 1\nRange: bytes=0-\nIf-Range: \"z\"\nIf-None-Match: \"z\"");
    make_completion(&mut request, &parts("Cache-Control: max-age=60\nETag: \"a\"", 0, 4), &(5..10));
    assert_fields(&request, "X: 1\nRange: bytes=5-\nIf-Range: \"a\"");
    let dated = parts(&format!("Cache-Control: max-age=60\nLast-Modified: {DAY_BEFORE}"), 4, 9);
    let mut request = HeaderMap::new();
    make_completion(&mut request, &dated, &(1..4));
    assert_fields(&request, &format!("Range: bytes=1-3\nIf-Range: {DAY_BEFORE}"));
    make_completion(&mut request, &dated, &(10..u64::MAX));
    assert_eq!(request["range"], "bytes=10-");
}

// RFC 9111 section 4.3.4.
#[test]
fn a_304_confirms_what_it_is_about() {
    let hour = "Cache-Control: max-age=3600";
    let a1 = stored_for("L: 1", &format!("{hour}\nVary: L\nETag: \"a\""));
    let a2 = stored_for("L: 1\nM: 1", &format!("{hour}\nVary: M\nETag: \"a\""));
    let b = stored_for("L: 1\nN: 1", &format!("{hour}\nVary: N\nETag: \"b\""));
    let other = stored_for("L: 2", &format!("{hour}\nVary: L\nETag: \"a\""));
    let weak = stored(&format!("{hour}\nETag: W/\"w\""));
    let dated = stored(&format!("{hour}\nLast-Modified: {DAY_BEFORE}"));
    let request = fields("L: 1\nM: 1\nN: 1\nIf-None-Match: \"a\"");
    let plain = Policy::default();
    let check = |response: &str, stored: &[&StoredHead], expected: &[usize]| {
        let response = fields(response);
        let found = validated(
            (StatusCode::NOT_MODIFIED, &response),
            &request,
            stored,
            (Some(0), None),
            &plain,
            RECEIVED,
        );
        let none = expected.is_empty();
        let expected = if none { Validated::Unrelated } else { Validated::Confirmed(expected.to_vec()) };
        assert_eq!(found, expected, "{response:?}");
    };
    // A strong validator: all that have it, of those that the request could have selected.
    check("ETag: \"a\"", &[&a1, &b, &a2, &other], &[0, 2]);
    check("ETag: \"c\"", &[&a1, &b, &a2], &[]);
    check("ETag: \"w\"", &[&weak], &[]);
    let day_before = format!("Date: {DATE}\nLast-Modified: {DAY_BEFORE}");
    check(&day_before, &[&dated, &weak], &[0]);
    check(&format!("ETag: \"new\"\n{day_before}"), &[&dated], &[0]);
    let just_made = stored(&format!("{hour}\nLast-Modified: {DATE}"));
    let later = "Date: Sun, 06 Nov 1994 09:50:00 GMT";
    check(&format!("{later}\nLast-Modified: {DATE}"), &[&just_made], &[0]);
    check(&format!("ETag: \"new\"\nLast-Modified: {DATE}"), &[&just_made], &[]);
    // A weak one: the newest that has it.
    check("ETag: W/\"w\"", &[&weak, &a1], &[0]);
    check("ETag: W/\"a\"", &[&a1, &b], &[0]);
    check("ETag: W/\"x\"", &[&a1, &b], &[]);
    // None at all: what was asked about.
    check("", &[&a1, &b], &[0]);
}

#[test]
fn a_304_with_another_tag_is_about_what_was_asked_if_that_is_accepted() {
    let hour = "Cache-Control: max-age=3600";
    let a = stored(&format!("{hour}\nETag: \"a\""));
    let b = stored(&format!("{hour}\nETag: \"b\""));
    let weak = stored(&format!("{hour}\nETag: W/\"w\""));
    let dated = stored(&format!("{hour}\nLast-Modified: {DAY_BEFORE}"));
    let part = parts(&format!("{hour}\nETag: \"a\""), 0, 4);
    let lenient = Policy { accept_changed_tag: true, ..Policy::default() };
    let check = |response: &str, stored: &[&StoredHead], expected: Option<usize>| {
        let answer = (StatusCode::NOT_MODIFIED, &fields(response));
        let found = validated(answer, &HeaderMap::new(), stored, (Some(0), None), &lenient, RECEIVED);
        let expected = expected.map_or(Validated::Unrelated, |at| Validated::Confirmed(vec![at]));
        assert_eq!(found, expected, "{response}");
    };
    check("ETag: \"c\"", &[&a, &b], Some(0));
    check("ETag: W/\"c\"", &[&a, &b], Some(0));
    check("ETag: \"w\"", &[&weak, &b], Some(0));
    // What it does name, it is about.
    check("ETag: \"b\"", &[&a, &b], Some(1));
    check("ETag: W/\"b\"", &[&a, &b], Some(1));
    check("ETag: \"c\"", &[&part], Some(0));
    // A date is no tag.
    check(&format!("Last-Modified: {DATE}"), &[&dated], None);
    check(&format!("ETag: \"c\"\nLast-Modified: {DATE}"), &[&dated], None);
    check(&format!("Last-Modified: {DATE}"), &[&a], None);
    // The bytes keep the tag with which they came.
    for (head, new, expected) in [
        (&a, "\"c\"", "\"a\""),
        (&a, "W/\"c\"", "\"a\""),
        (&a, "W/\"a\"", "W/\"a\""),
        (&weak, "\"w\"", "W/\"w\""),
    ] {
        let updated = freshen(head, &HeaderMap::new(), &fields(&format!("ETag: {new}\nX: 1")), AT_ONCE);
        let kept = updated.head.headers();
        assert!(updated.keep && kept.contains_key("x") && kept["etag"] == expected, "{new}");
    }
}

// RFC 9111 section 4.3.3; RFC 5861 section 4.
#[test]
fn an_error_is_passed_on_unless_something_may_stand_in() {
    let head = stored("Cache-Control: max-age=60\nETag: \"a\"");
    let (none, plain) = (HeaderMap::new(), Policy::default());
    let check = |status: u16, on_error: Option<usize>, expected: Validated| {
        let status = StatusCode::from_u16(status).unwrap();
        let found = validated((status, &none), &none, &[&head], (Some(0), on_error), &plain, RECEIVED);
        assert_eq!(found, expected, "{status}");
    };
    for status in [500, 502, 503, 504] {
        check(status, Some(0), Validated::StandIn(0));
        check(status, None, Validated::Answer);
    }
    for status in [200, 206, 404, 501, 505] {
        check(status, Some(0), Validated::Answer);
    }
    let unasked =
        validated((StatusCode::NOT_MODIFIED, &none), &none, &[&head], (None, None), &plain, RECEIVED);
    assert_eq!(unasked, Validated::Answer, "a 304 to the client's own condition is the client's");
}

// RFC 9111 section 3.2.
#[test]
fn an_update_replaces_fields_but_not_what_the_bytes_depend_on() {
    let head = stored(
        "Cache-Control: max-age=60
Age: 30
ETag: \"a\"
Content-Type: text/plain
Content-Encoding: gzip
Content-MD5: one
X: 1
X: 2
Y: 1",
    );
    let response = fields(
        "Date: Sun, 06 Nov 1994 08:55:00 GMT
Cache-Control: max-age=90
ETag: \"a\"
Content-Type: text/html
Content-Encoding: br
Content-MD5: two
Content-Length: 0
Content-Range: bytes 0-1/2
Connection: Z
Z: 1
X: 3
Set-Cookie: a=b",
    );
    let exchange = Exchange { requested: after(300), received: after(300) };
    let found = freshen(&head, &HeaderMap::new(), &response, exchange);
    assert!(found.keep);
    assert_fields(
        found.head.headers(),
        "Date: Sun, 06 Nov 1994 08:55:00 GMT
Cache-Control: max-age=90
ETag: \"a\"
Content-Type: text/html
Content-Encoding: gzip
Content-MD5: one
X: 3
Y: 1
Set-Cookie: a=b",
    );
    assert_eq!(found.head.body(), &Body::Whole { len: 10 });
    let freshness = found.head.freshness(&Policy::default(), after(301));
    assert_eq!((freshness.age_ms, freshness.lifetime_ms), (1000, 90_000), "the age is the new one's");
    let undated = freshen(&head, &HeaderMap::new(), &fields("ETag: \"a\"\nAge: 7"), exchange).head;
    assert_eq!(undated.date(), after(300).secs(), "and so is the date, where it does not say");
    assert_eq!(undated.freshness(&Policy::default(), after(301)).age_ms, 8000);
}

#[test]
fn an_update_may_end_the_leave_to_keep_it() {
    let mut head = stored_for("A: 1", "Cache-Control: max-age=60\nETag: \"a\"\nVary: A");
    head.invalidate();
    let update = |request: &str, response: &str| freshen(&head, &fields(request), &fields(response), AT_ONCE);
    for forbidding in ["Cache-Control: no-store", "Cache-Control: private", "Vary: *"] {
        assert!(!update("A: 1", forbidding).keep, "{forbidding}");
    }
    assert!(!update("A: 1\nAuthorization: x", "").keep);
    let found = update("A: 1\nB: 2", "Vary: B\nCache-Control: max-age=5, no-cache=\"etag\"");
    assert!(found.keep && !found.head.is_invalid());
    assert!(found.head.selecting().matches(&fields("B: 2\nA: 7")), "it now varies by another field");
    assert!(!found.head.headers().contains_key("etag"), "a field for one client only");
}

// RFC 9111 section 4.3.5.
#[test]
fn a_head_updates_what_it_matches_and_ages_what_it_does_not() {
    let head = stored(&format!("Cache-Control: max-age=60\nETag: \"a\"\nLast-Modified: {DAY_BEFORE}"));
    let check = |response: &str, same: bool| {
        let response = format!("X: new\n{response}");
        let found = freshen_by_head(&head, &HeaderMap::new(), &fields(&response), AT_ONCE);
        assert_eq!(found.head.is_invalid(), !same, "{response}");
        assert_eq!(found.head.headers().contains_key("x"), same, "{response}");
        assert_eq!(found.head.body(), &Body::Whole { len: 10 });
    };
    check("", true);
    check("ETag: \"a\"\nContent-Length: 10", true);
    check(&format!("Last-Modified: {DAY_BEFORE}"), true);
    check("ETag: \"b\"", false);
    check(&format!("ETag: \"a\"\nLast-Modified: {DATE}"), false);
    check("ETag: \"a\"\nContent-Length: 11", false);
    check("ETag: \"a\"\nContent-Length: x", false);
    check("ETag: \"a\"\nContent-Encoding: gzip", false);
}

// RFC 9111 section 3.4; RFC 9110 section 15.3.7.3.
#[test]
fn parts_are_joined_only_by_the_same_strong_validator() {
    let head = parts("Cache-Control: max-age=60\nETag: \"a\"\nX: 1", 0, 4);
    let joined = |response: &str, len: u64| {
        combine(&head, &HeaderMap::new(), (&fields(&format!("Date: {DATE}\n{response}")), len), AT_ONCE)
    };
    let (found, change) = joined("ETag: \"a\"\nContent-Range: bytes 5-9/10\nX: 2", 5).unwrap();
    assert_eq!((change.removed, change.inserted), (vec![], Some(1)));
    let Body::Parts(both) = found.head.body() else { panic!("two pieces") };
    assert_eq!((both.whole(), found.head.headers()["x"].to_str().unwrap()), (Some(10), "2"));
    assert_eq!(
        decide((&Method::GET, &HeaderMap::new()), &[&found.head], &Policy::default(), RECEIVED),
        Verdict::Reuse(Reuse {
            stored: 0,
            freshness: Freshness { age_ms: 0, lifetime_ms: 60_000 },
            revalidate: false
        })
    );
    let (over, change) = joined("ETag: \"a\"\nContent-Range: bytes 0-9/10", 10).unwrap();
    assert_eq!((change.removed, change.inserted), (vec![0], Some(0)));
    assert_eq!(over.head.body(), &Body::Whole { len: 10 });
    let (cut, _) = joined("ETag: \"a\"\nContent-Range: bytes 5-9/10", 2).unwrap();
    let Body::Parts(cut) = cut.head.body() else { panic!("not all of it") };
    assert_eq!((cut.whole(), cut.missing(0..10)), (None, Some(7..10)));
    let whole = stored("Cache-Control: max-age=60\nETag: \"a\"");
    let part = fields(&format!("Date: {DATE}\nETag: \"a\"\nContent-Range: bytes 5-9/10\nX: 2"));
    let (updated, change) = combine(&whole, &HeaderMap::new(), (&part, 5), AT_ONCE).unwrap();
    assert_eq!((updated.head.body(), change.inserted), (whole.body(), None), "the whole stays whole");
    for (bad, len) in [
        ("ETag: \"b\"\nContent-Range: bytes 5-9/10", 5),
        ("ETag: W/\"a\"\nContent-Range: bytes 5-9/10", 5),
        ("Content-Range: bytes 5-9/10", 5),
        ("ETag: \"a\"\nContent-Range: bytes 5-9/11", 5),
        ("ETag: \"a\"\nContent-Range: bytes 5-9/10", 6),
        ("ETag: \"a\"\nContent-Range: bytes 5-9/10", 0),
        ("ETag: \"a\"\nContent-Range: bytes 5-7/10", 4),
        ("ETag: \"a\"", 5),
        ("ETag: \"a\"\nContent-Range: bytes 5-9/10\nContent-Encoding: gzip", 5),
    ] {
        assert_eq!(joined(bad, len), None, "{bad}");
    }
}
