//! Which stored response answers a request, and whether the origin is asked first.

use super::*;

/// Whether the one stored response is reused after so many seconds: `h`it, `w`hile revalidating, or how it is
/// forwarded: `s`tale, `r`equest, `p`artial, `u`ri or `v`ary miss; `e` in front where it may stand in for an
/// error, `+` behind where it can be validated; `5` for a 504.
fn outcome(request: &str, head: &StoredHead, secs: u64) -> String {
    match verdict(request, &[head], secs) {
        Verdict::Reuse(reuse) => if reuse.revalidate { "w" } else { "h" }.to_owned(),
        Verdict::NotCached => "5".to_owned(),
        Verdict::Forward(forward) => {
            let stands_in = if forward.on_error.is_some() { "e" } else { "" };
            let validated = if forward.validate.is_some() { "+" } else { "" };
            format!("{stands_in}{}{validated}", &forward.reason.token()[..1])
        }
    }
}

// RFC 9111 section 4.2: fresh as long as the lifetime is greater than the age.
#[test]
fn a_response_is_reused_until_its_lifetime_is_over() {
    let head = stored("Cache-Control: max-age=60\nETag: \"a\"");
    for (secs, expected) in [(0, "h"), (59, "h"), (60, "s+"), (61, "s+")] {
        assert_eq!(outcome("", &head, secs), expected, "after {secs} s");
    }
    assert_eq!(outcome("", &stored("Cache-Control: max-age=60"), 61), "s");
    assert_eq!(outcome("", &stored("Cache-Control: max-age=60\nAge: 7200\nETag: \"a\""), 0), "s+");
    assert_eq!(outcome("", &stored("ETag: \"a\""), 0), "s+");
}

// RFC 9111 sections 5.2.2.4 and 4.4.
#[test]
fn what_must_be_validated_is_never_reused_unasked() {
    let mut head = stored("Cache-Control: max-age=60, no-cache, stale-if-error=99\nETag: \"a\"");
    assert_eq!(outcome("", &head, 0), "s+");
    assert_eq!(outcome("Cache-Control: max-stale", &head, 0), "s+");
    head = stored("Cache-Control: max-age=60, stale-if-error=99, stale-while-revalidate=99\nETag: \"a\"");
    head.invalidate();
    assert_eq!(outcome("", &head, 0), "s+");
    assert_eq!(outcome("Cache-Control: max-stale", &head, 0), "s+");
    assert_eq!(outcome("", &stored("Cache-Control: max-age=60, no-cache=\"x\""), 0), "h");
}

// RFC 5861 sections 3 and 4; RFC 9111 section 4.2.4.
#[test]
fn stale_use_is_as_the_origin_allows() {
    let check = |directives: &str, secs: u64, expected: &str| {
        let head = stored(&format!("Cache-Control: max-age=10, {directives}\nETag: \"a\""));
        assert_eq!(outcome("", &head, secs), expected, "{directives} after {secs} s");
    };
    check("stale-while-revalidate=5", 9, "h");
    check("stale-while-revalidate=5", 10, "w");
    check("stale-while-revalidate=5", 14, "w");
    check("stale-while-revalidate=5", 15, "s+");
    check("stale-if-error=5", 14, "es+");
    check("stale-if-error=5", 15, "s+");
    check("stale-while-revalidate=2, stale-if-error=5", 11, "w");
    check("stale-while-revalidate=2, stale-if-error=5", 13, "es+");
    for forbidding in ["must-revalidate", "proxy-revalidate", "s-maxage=10"] {
        check(&format!("{forbidding}, stale-while-revalidate=5, stale-if-error=5"), 11, "s+");
        let head = stored(&format!("Cache-Control: max-age=10, {forbidding}\nETag: \"a\""));
        assert_eq!(outcome("Cache-Control: max-stale", &head, 11), "s+", "{forbidding}");
        assert_eq!(outcome("", &head, 9), "h", "{forbidding}");
    }
}

// RFC 9111 sections 5.2.1 and 5.4; RFC 8246 section 2; RFC 5861 section 4.
#[test]
fn a_client_may_ask_for_more_or_be_content_with_less() {
    let head = stored("Cache-Control: max-age=60\nETag: \"a\"");
    for (directives, secs, expected) in [
        ("no-cache", 0, "r+"),
        ("no-store", 0, "h"),
        ("max-age=5", 5, "h"),
        ("max-age=5", 6, "r+"),
        ("max-age=0", 1, "r+"),
        ("max-age=x", 1, "r+"),
        ("min-fresh=20", 40, "h"),
        ("min-fresh=20", 41, "r+"),
        ("max-stale", 99, "h"),
        ("max-stale=5", 65, "h"),
        ("max-stale=5", 66, "s+"),
        ("max-stale=5, max-age=60", 62, "r+"),
        ("max-stale=5, max-age=99", 62, "h"),
        ("max-age=99", 62, "r+"),
        ("max-stale, no-cache", 62, "r+"),
        ("only-if-cached", 0, "h"),
        ("only-if-cached", 60, "5"),
        ("only-if-cached, no-cache", 0, "5"),
        ("only-if-cached, max-stale", 60, "h"),
        ("stale-if-error=5", 61, "es+"),
        ("stale-if-error=5, no-cache", 1, "er+"),
    ] {
        let found = outcome(&format!("Cache-Control: {directives}"), &head, secs);
        assert_eq!(found, expected, "{directives} after {secs} s");
    }
    assert_eq!(outcome("Pragma: no-cache", &head, 0), "r+");
    let background = stored("Cache-Control: max-age=60, stale-while-revalidate=60");
    assert_eq!(outcome("Cache-Control: max-age=90", &background, 70), "r", "it did not ask for a stale one");
    let unchanging = stored("Cache-Control: max-age=60, immutable\nETag: \"a\"");
    assert_eq!(outcome("Cache-Control: max-age=0", &unchanging, 5), "h");
    assert_eq!(outcome("Cache-Control: no-cache", &unchanging, 5), "r+");
    assert_eq!(outcome("Cache-Control: max-age=0", &unchanging, 65), "r+");
    let deaf = Policy { client_directives: false, ..Policy::default() };
    let request = fields("Cache-Control: no-cache, only-if-cached");
    let found = decide((&Method::GET, &request), &[&head], &deaf, after(1));
    assert!(matches!(found, Verdict::Reuse(_)), "{found:?}");
}

#[test]
fn an_unclear_age_makes_a_response_stale_if_that_is_asked_for() {
    let cautious = Policy { cautious_age: true, ..Policy::default() };
    let asked = |age: &str, rules: &str, wishes: &str| {
        let head = stored(&format!("Cache-Control: max-age=60{rules}\nETag: \"a\"\n{age}"));
        assert_eq!(outcome("", &head, 5), "h", "{age}: as the RFC has it");
        match decide((&Method::GET, &fields(wishes)), &[&head], &cautious, after(5)) {
            Verdict::Forward(forward) => {
                assert_eq!((forward.reason, forward.validate), (Reason::Stale, Some(0)), "{age}");
                Some(forward.on_error.is_some())
            }
            _ => None,
        }
    };
    for age in ["", "Age: 0", "Age: 7", "Age: 007", "Age:  7 ", "Age: 7,0"] {
        assert_eq!(asked(age, "", ""), None, "{age}");
    }
    let unclear = [
        "Age: 0, 0",
        "Age: 0\nAge: 0",
        "Age: 7\nAge: x",
        "Age:",
        "Age: x",
        "Age: -7",
        "Age: 7.0",
        "Age: 7;x=1",
        "Age: 7,",
        "Age: 7,x",
    ];
    for age in unclear {
        assert_eq!(asked(age, "", ""), Some(false), "{age}");
        // Nobody knows how stale it is; but it is better than an error, to those who say so.
        assert_eq!(asked(age, ", stale-while-revalidate=600", ""), Some(false), "{age}");
        assert_eq!(asked(age, ", immutable", "Cache-Control: max-stale"), Some(false), "{age}");
        assert_eq!(asked(age, ", stale-if-error=600", ""), Some(true), "{age}");
    }
    let worthless = judged("", 200, "Cache-Control: max-age=60\nAge: x", &cautious);
    assert_eq!(worthless, Err(NotStored::Freshness), "without a validator it could never be used");
    // What confirms it says how old it is now.
    let head = stored("Cache-Control: max-age=60\nETag: \"a\"\nAge: x");
    for (confirmed, fresh) in [("", true), ("Age: 3", true), ("Age: 3\nAge: 3", false), ("Age: x", false)] {
        let head = freshen(&head, &HeaderMap::new(), &fields(confirmed), AT_ONCE).head;
        assert_eq!(head.freshness(&cautious, after(5)).is_fresh(), fresh, "{confirmed}");
    }
}

#[test]
fn without_anything_that_fits_the_origin_is_asked() {
    let head = stored_for("A: 1", "Cache-Control: max-age=60\nVary: A");
    assert_eq!(outcome("A: 1", &head, 0), "h");
    assert_eq!(outcome("A: 2", &head, 0), "v");
    assert_eq!(outcome("Cache-Control: only-if-cached", &head, 0), "5");
    assert!(matches!(verdict("", &[], 0), Verdict::Forward(Forward { reason: Reason::UriMiss, .. })));
    assert_eq!(verdict("Cache-Control: only-if-cached", &[], 0), Verdict::NotCached);
    // RFC 9111 section 4.3.2: conditions that only the origin can judge.
    let plain = stored("Cache-Control: max-age=60\nETag: \"a\"");
    assert_eq!(outcome("If-Match: \"a\"", &plain, 0), "r");
    assert_eq!(outcome(&format!("If-Unmodified-Since: {DATE}"), &plain, 0), "r");
    for method in [Method::POST, Method::PUT, Method::OPTIONS, Method::from_bytes(b"M-SEARCH").unwrap()] {
        let found = decide((&method, &HeaderMap::new()), &[&plain], &Policy::default(), RECEIVED);
        assert!(matches!(found, Verdict::Forward(Forward { reason: Reason::Method, validate: None, .. })));
    }
    let found = decide((&Method::HEAD, &HeaderMap::new()), &[&plain], &Policy::default(), RECEIVED);
    assert!(matches!(found, Verdict::Reuse(_)), "a GET answers a HEAD");
}

// RFC 9111 section 4.1.
#[test]
fn of_several_that_match_the_newest_that_varies_is_selected() {
    let with_date = |request: &str, date: &str, rest: &str| {
        let response = format!("Date: {date}\nCache-Control: max-age=600\n{rest}");
        judged(request, 200, &response, &Policy::default()).unwrap().complete(10).unwrap()
    };
    let early = with_date("A: 1", "Sun, 06 Nov 1994 08:49:00 GMT", "Vary: A");
    let late = with_date("A: 1\nB: 2", "Sun, 06 Nov 1994 08:49:30 GMT", "Vary: B");
    let plain = with_date("", DATE, "");
    let all = [&late, &early, &plain];
    assert_eq!(select(&fields("A: 1\nB: 2"), &all), Some(0));
    assert_eq!(select(&fields("A: 1"), &all), Some(1));
    assert_eq!(select(&fields("A: 2"), &all), Some(2), "it says that it suits everyone");
    assert_eq!(select(&fields("A: 2"), &all[..2]), None);
    assert!(!early.replaces(&late) && early.replaces(&early.clone()));
}

// RFC 9111 section 3.3: an incomplete response answers only what it has, or is completed.
#[test]
fn parts_answer_what_they_hold_and_are_completed_for_the_rest() {
    let tagged = parts("Cache-Control: max-age=60\nETag: \"a\"", 4, 7);
    let completes = |request: &str, head: &StoredHead, secs: u64| match verdict(request, &[head], secs) {
        Verdict::Forward(Forward { reason: Reason::Partial, complete, validate: None, on_error: None }) => {
            complete.map(|(_, range)| range)
        }
        other => panic!("{request}: {other:?}"),
    };
    for held in ["bytes=4-7", "bytes=5-6", "bytes=4-4", "bytes=99-"] {
        assert_eq!(outcome(&format!("Range: {held}"), &tagged, 0), "h", "{held}");
        assert_eq!(outcome(&format!("Range: {held}"), &tagged, 60), "s+", "{held}");
    }
    for secs in [0, 60] {
        assert_eq!(completes("", &tagged, secs), Some(0..10));
        assert_eq!(completes("Range: bytes=6-", &tagged, secs), Some(8..10));
        assert_eq!(completes("Range: bytes=-5", &tagged, secs), Some(8..10));
        assert_eq!(completes("Range: bytes=0-5", &tagged, secs), Some(0..4));
        assert_eq!(completes("Range: bytes=0-1,5-6", &tagged, secs), None);
        assert_eq!(completes("Range: bytes=5-6\nIf-Range: \"b\"", &tagged, secs), Some(0..10));
        assert_eq!(completes("If-None-Match: \"a\"", &tagged, secs), None);
    }
    assert_eq!(outcome("Range: bytes=5-6\nIf-Range: \"a\"", &tagged, 0), "h");
    assert_eq!(outcome("Range: bytes=0-6\nCache-Control: only-if-cached", &tagged, 0), "5");
    // Without a strong validator they cannot be completed, but what they hold is good.
    let untagged = parts("Cache-Control: max-age=60", 4, 7);
    assert_eq!(outcome("Range: bytes=4-7", &untagged, 0), "h");
    assert_eq!(completes("", &untagged, 0), None);
    let cut = judged("", 200, "Cache-Control: max-age=60\nETag: \"a\"", &Policy::default()).unwrap();
    let cut = cut.incomplete(4).unwrap();
    assert_eq!(completes("", &cut, 0), Some(4..u64::MAX), "nobody knows where it ends");
    assert_eq!(completes("Range: bytes=2-", &cut, 0), Some(4..u64::MAX));
    assert_eq!(completes("Range: bytes=2-7", &cut, 0), Some(4..8));
    assert_eq!(completes("Range: bytes=-2", &cut, 0), None);
    assert_eq!(outcome("Range: bytes=2-3", &cut, 0), "h");
    let head_request = decide((&Method::HEAD, &HeaderMap::new()), &[&tagged], &Policy::default(), RECEIVED);
    assert!(matches!(head_request, Verdict::Forward(Forward { complete: None, .. })));
}
