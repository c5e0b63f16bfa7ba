//! What leaves the cache, and what makes stored responses unusable.

use super::*;
use http::Uri;

fn answered(method: &Method, request: &str, head: &StoredHead, secs: u64) -> Option<Answer> {
    let freshness = head.freshness(&Policy::default(), after(secs));
    answer((method, &fields(request)), head, freshness, after(secs))
}

fn get(request: &str, head: &StoredHead) -> (u16, Option<std::ops::Range<u64>>, HeaderMap) {
    let answer = answered(&Method::GET, request, head, 5).unwrap();
    (answer.status.as_u16(), answer.content, answer.headers)
}

// RFC 9111 section 4: Age always; RFC 9110 section 8.6: the length of what is sent.
#[test]
fn a_stored_response_leaves_with_its_age_and_length() {
    let head = stored("Cache-Control: max-age=60\nAge: 30\nX: 1");
    let (status, content, headers) = get("", &head);
    assert_eq!((status, content), (200, Some(0..10)));
    assert_eq!(
        (&headers["age"], &headers["content-length"], &headers["x"]),
        (&HeaderValue::from(35), &HeaderValue::from(10), &HeaderValue::from(1))
    );
    assert_eq!(headers["date"], DATE, "the date is the origin's");
    let answer = answered(&Method::HEAD, "Range: bytes=0-1", &head, 0).unwrap();
    assert_eq!(
        (answer.status, answer.content, &answer.headers["content-length"]),
        (StatusCode::OK, None, &HeaderValue::from(10))
    );
    let empty =
        judged("", 204, "Cache-Control: max-age=60", &Policy::default()).unwrap().complete(0).unwrap();
    let (status, content, headers) = get("", &empty);
    assert_eq!((status, content, headers.contains_key("content-length")), (204, Some(0..0), false));
}

// RFC 9110 section 13.2.1.
#[test]
fn conditions_are_heeded_where_there_is_a_representation() {
    let with = |status| {
        let response = "Cache-Control: max-age=60\nETag: \"1\"";
        judged("", status, response, &Policy::default()).unwrap().complete(10).unwrap()
    };
    for (status, expected) in [(200, 304), (203, 304), (404, 404), (302, 302), (500, 500)] {
        assert_eq!(get("If-None-Match: \"1\"", &with(status)).0, expected, "{status}");
    }
    assert_eq!(get("Range: bytes=0-1", &with(203)).0, 203);
}

// RFC 9111 section 4.3.2; RFC 9110 section 15.4.5.
#[test]
fn a_client_that_has_it_gets_a_304_with_what_it_needs() {
    let head = stored(&format!(
        "Cache-Control: max-age=60
ETag: \"a\"
Last-Modified: {DAY_BEFORE}
Content-Type: x/y
Content-Location: /z
Vary: A
X: 1"
    ));
    let (status, content, headers) = get("If-None-Match: W/\"a\"", &head);
    assert_eq!((status, content), (304, None));
    for kept in ["age", "cache-control", "content-location", "date", "etag", "vary", "x"] {
        assert!(headers.contains_key(kept), "{kept}");
    }
    for left in ["content-type", "content-length", "last-modified"] {
        assert!(!headers.contains_key(left), "{left}");
    }
    assert_eq!(get("If-None-Match: \"b\"", &head).0, 200);
    assert_eq!(get(&format!("If-Modified-Since: {DAY_BEFORE}"), &head).0, 304);
    assert_eq!(get("If-None-Match: \"a\"\nRange: bytes=0-1", &head).0, 304);
    let missing = judged("", 404, "ETag: \"a\"", &Policy::default()).unwrap().complete(3).unwrap();
    assert_eq!(get("If-None-Match: \"a\"", &missing).0, 404, "a condition is about a representation");
}

// RFC 9110 sections 14.2, 14.4, 15.3.7 and 15.5.17.
#[test]
fn a_range_is_served_from_the_whole_or_from_parts_that_hold_it() {
    let whole = stored("Cache-Control: max-age=60\nETag: \"a\"");
    let part = parts("Cache-Control: max-age=60\nETag: \"a\"", 4, 9);
    let check = |head: &StoredHead,
                 request: &str,
                 status: u16,
                 expected: std::ops::Range<u64>,
                 place: &str| {
        let (found, content, headers) = get(request, head);
        assert_eq!((found, content), (status, Some(expected.clone())), "{request}");
        assert_eq!(headers.get("content-range").map_or("", |it| it.to_str().unwrap()), place, "{request}");
        assert_eq!(headers["content-length"], HeaderValue::from(expected.end - expected.start));
    };
    check(&whole, "Range: bytes=0-1", 206, 0..2, "bytes 0-1/10");
    check(&whole, "Range: bytes=8-99", 206, 8..10, "bytes 8-9/10");
    check(&whole, "Range: bytes=-3\nIf-Range: \"a\"", 206, 7..10, "bytes 7-9/10");
    check(&whole, "Range: bytes=0-1\nIf-Range: \"b\"", 200, 0..10, "");
    check(&whole, "Range: bytes=0-1,3-4", 200, 0..10, "");
    check(&part, "Range: bytes=6-8", 206, 6..9, "bytes 6-8/10");
    check(&part, "Range: bytes=6-", 206, 6..10, "bytes 6-9/10");
    for (head, request) in
        [(&part, ""), (&part, "Range: bytes=3-4"), (&part, "Range: bytes=4-5\nIf-Range: \"b\"")]
    {
        assert_eq!(answered(&Method::GET, request, head, 0), None, "{request:?}: bytes are missing");
    }
    assert_eq!(answered(&Method::HEAD, "", &part, 0), None);
    let (status, content, headers) = get("Range: bytes=10-", &whole);
    assert_eq!(
        (status, content, &headers["content-range"]),
        (416, None, &HeaderValue::from_static("bytes */10"))
    );
    assert!(!headers.contains_key("cache-control"), "a 416 is not to be kept in place of the whole");
    let open = judged("", 206, "Cache-Control: max-age=60\nContent-Range: bytes 0-4/*", &Policy::default());
    let open = open.unwrap().complete(5).unwrap();
    check(&open, "Range: bytes=1-2", 206, 1..3, "bytes 1-2/*");
    assert_eq!(answered(&Method::GET, "Range: bytes=1-", &open, 0), None);
}

// RFC 9211 section 2.
#[test]
fn cache_status_says_what_happened() {
    let plain = CacheStatus { cache: "ron-edge", ..CacheStatus::default() };
    for (status, expected) in [
        (CacheStatus { hit: true, ttl: Some(376), ..plain }, "ron-edge; hit; ttl=376"),
        (CacheStatus { hit: true, ttl: Some(-412), ..plain }, "ron-edge; hit; ttl=-412"),
        (
            CacheStatus { forwarded: Some(Reason::UriMiss), stored: true, collapsed: true, ..plain },
            "ron-edge; fwd=uri-miss; stored; collapsed",
        ),
        (
            CacheStatus {
                forwarded: Some(Reason::Stale),
                forwarded_status: Some(StatusCode::NOT_MODIFIED),
                ttl: Some(i64::MAX),
                ..plain
            },
            "ron-edge; fwd=stale; fwd-status=304; ttl=999999999999999",
        ),
        (
            CacheStatus { forwarded: Some(Reason::VaryMiss), key: Some("/a?\"b\"\\"), ..plain },
            "ron-edge; fwd=vary-miss; key=\"/a?\\\"b\\\"\\\\\"",
        ),
        (CacheStatus { detail: Some("no-store"), ..plain }, "ron-edge; detail=no-store"),
        (CacheStatus { detail: Some("zu gro\u{df}"), ..plain }, "ron-edge; detail=\"zu gro\""),
        (CacheStatus { cache: "1 cache", hit: true, ..plain }, "\"1 cache\"; hit"),
    ] {
        assert_eq!(status.value(), expected);
    }
    let mut headers = fields("Cache-Status: origin; hit");
    plain.append_to(&mut headers);
    let all: Vec<_> = headers.get_all(CACHE_STATUS).iter().collect();
    assert_eq!(all, ["origin; hit", "ron-edge"], "after those nearer to the origin");
}

// RFC 9111 section 4.4.
#[test]
fn an_unsafe_request_invalidates_its_target_and_where_it_points() {
    let target: Uri = "https://Example.org/a/b?q=1".parse().unwrap();
    let check = |method: &str, status: u16, response: &str, expected: &[&str]| {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let status = StatusCode::from_u16(status).unwrap();
        assert_eq!(
            invalidated(&method, &target, (status, &fields(response))),
            expected,
            "{method} {response}"
        );
    };
    for method in ["POST", "PUT", "DELETE", "PATCH", "M-SEARCH"] {
        check(method, 200, "", &["/a/b?q=1"]);
        check(method, 303, "", &["/a/b?q=1"]);
        check(method, 404, "Location: /c", &[]);
        check(method, 500, "", &[]);
    }
    for method in ["GET", "HEAD", "OPTIONS", "TRACE"] {
        check(method, 200, "Content-Location: /c", &[]);
    }
    for (reference, path) in [
        ("/c", "/c"),
        ("c", "/a/c"),
        ("c?x#y", "/a/c?x"),
        ("./c/../d/.", "/a/d/"),
        ("../../c", "/c"),
        ("..", "/"),
        ("?x=1", "/a/b?x=1"),
        ("//example.org/c", "/c"),
        ("https://example.ORG:443/c?x", "/c?x"),
        ("https://example.org/c/../d", "/d"),
    ] {
        check("POST", 201, &format!("Location: {reference}"), &["/a/b?q=1", path]);
        check("POST", 201, &format!("Content-Location: {reference}"), &["/a/b?q=1", path]);
    }
    for elsewhere in [
        "https://example.com/c",
        "http://example.org/c",
        "https://example.org:444/c",
        "//other/c",
        "mailto:a@b",
        "a b:",
        "#x",
        "",
    ] {
        check("POST", 201, &format!("Location: {elsewhere}"), &["/a/b?q=1"]);
    }
    check("PUT", 200, "Location: /c\nContent-Location: /d", &["/a/b?q=1", "/c", "/d"]);
    check("PUT", 200, "Location: /c\nContent-Location: /c", &["/a/b?q=1", "/c"]);
}

#[test]
fn a_purge_takes_a_path_a_prefix_or_a_key() {
    let response = fields("Surrogate-Key: one  two\nSurrogate-Key: three\nCache-Tag: four five,six");
    let keys: Vec<_> = surrogate_keys(&response).map(|key| std::str::from_utf8(key).unwrap()).collect();
    assert_eq!(keys, ["one", "two", "three", "four five", "six"]);
    let check = |purge: Purge, path: &str, expected: bool| {
        assert_eq!(purge.concerns(path, &response), expected, "{purge:?} {path}");
    };
    let path = |text: &str| Purge::Path(text.to_owned());
    check(path("/a"), "/a", true);
    check(path("/a"), "/a?x=1", true);
    check(path("/a?x=1"), "/a?x=1", true);
    check(path("/a?x=1"), "/a", false);
    check(path("/a"), "/a/b", false);
    check(path("/a"), "/ab", false);
    let prefix = |text: &str| Purge::Prefix(text.to_owned());
    check(prefix("/a/"), "/a/b?x", true);
    check(prefix("/a/"), "/a", false);
    check(prefix("/"), "/a", true);
    let key = |text: &str| Purge::Key(text.to_owned());
    check(key("two"), "/", true);
    check(key("four five"), "/", true);
    check(key("five"), "/", false);
    check(key("Two"), "/", false);
    check(key(""), "/", false);
}
