//! Tests of the directives, by section of RFC 9111 and its relatives.

use super::*;
use http::HeaderValue;
use proptest::prelude::*;

const NOW: UnixMillis = UnixMillis(1_700_000_000_000);

fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
    let value = |text: &str| HeaderValue::from_bytes(text.as_bytes()).unwrap();
    lines.iter().map(|(name, text)| (HeaderName::from_static(name), value(text))).collect()
}

fn rules(lines: &[&str]) -> ResponseRules {
    let lines: Vec<_> = lines.iter().map(|line| ("cache-control", *line)).collect();
    ResponseRules::of(&headers(&lines), NOW)
}

fn named(names: &[&'static str]) -> Scope {
    Scope::Fields(names.iter().map(|name| HeaderName::from_static(name)).collect())
}

// RFC 9111 section 5.2.
#[test]
fn directives_are_read_in_any_case_and_either_form_of_argument() {
    let none = ResponseRules::default();
    let aged = |max_age| ResponseRules { max_age: Some(max_age), ..none.clone() };
    for (line, expected) in [
        ("max-age=10", aged(10)),
        ("MaX-aGe=10", aged(10)),
        ("max-age=\"10\"", aged(10)),
        ("foo, max-age=10, bar=1", aged(10)),
        (",, max-age=10 ,", aged(10)),
        ("max-age=2147483649", aged(1 << 31)),
        ("No-StOrE", ResponseRules { no_store: true, ..none.clone() }),
        ("no-store=1", ResponseRules { no_store: true, ..none.clone() }),
        ("no-store max-age=10", ResponseRules { no_store: true, ..none.clone() }),
        ("public=1", none.clone()),
        ("public, immutable", ResponseRules { public: true, immutable: true, ..none.clone() }),
        ("must-understand", ResponseRules { must_understand: true, ..none.clone() }),
        ("must-revalidate", ResponseRules { must_revalidate: true, ..none.clone() }),
        ("proxy-revalidate", ResponseRules { proxy_revalidate: true, ..none.clone() }),
        ("s-maxage=7", ResponseRules { s_maxage: Some(7), ..none.clone() }),
        ("stale-while-revalidate=5", ResponseRules { stale_while_revalidate: 5, ..none.clone() }),
        ("stale-if-error=6", ResponseRules { stale_if_error: 6, ..none.clone() }),
        ("", none.clone()),
    ] {
        assert_eq!(rules(&[line]), expected, "{line}");
    }
}

// RFC 9111 section 4.2.1: what cannot be read makes the response stale.
#[test]
fn an_unreadable_lifetime_is_none_at_all() {
    for bad in
        ["max-age", "max-age=", "max-age= 10", "max-age=-1", "max-age=1.5", "max-age='10'", "max-age=10a"]
    {
        assert_eq!(rules(&[bad]).max_age, Some(0), "{bad}");
    }
    assert_eq!(rules(&["s-maxage=x"]).s_maxage, Some(0));
    assert_eq!(rules(&["max-age =10"]).max_age, Some(0), "a space is no part of a directive");
}

// RFC 9111 section 4.2.1: the first one counts.
#[test]
fn of_repeated_lifetimes_the_first_counts() {
    assert_eq!(rules(&["max-age=1, max-age=100"]).max_age, Some(1));
    assert_eq!(rules(&["max-age=100", "max-age=1"]).max_age, Some(100));
    assert_eq!(rules(&["max-age=x, max-age=1"]).max_age, Some(0));
}

#[test]
fn nothing_quoted_is_a_directive() {
    assert_eq!(rules(&[r#"extension="max-age=3600", max-age=1"#]).max_age, Some(1));
    assert_eq!(rules(&[r#"max-age=1, extension="a, max-age=3600, no-store""#]), rules(&["max-age=1"]));
    assert_eq!(rules(&[r#"extension="\", no-store""#]), rules(&[""]));
    assert_eq!(rules(&[r#"extension="never ends, public"#]), rules(&[""]));
    assert!(rules(&[r#"extension="never ends"#, "no-store"]).no_store, "another line begins anew");
}

// RFC 9111 sections 5.2.2.4 and 5.2.2.7.
#[test]
fn no_cache_and_private_can_be_limited_to_fields() {
    for (line, expected) in [
        ("no-cache", Scope::Everything),
        (r#"no-cache="a, B""#, named(&["a", "b"])),
        ("no-cache=a", named(&["a"])),
        (r#"no-cache="a", no-cache="b""#, named(&["a", "b"])),
        (r#"no-cache="a", no-cache"#, Scope::Everything),
        (r#"no-cache, no-cache="a""#, Scope::Everything),
        (r#"no-cache="""#, Scope::Everything),
        (r#"no-cache="a b""#, Scope::Everything),
        (r#"no-cache="a"#, Scope::Everything),
        (r#"no-cache="content-encoding""#, Scope::Everything),
        (r#"no-cache="x, Vary""#, Scope::Everything),
        ("max-age=1", Scope::Nothing),
    ] {
        assert_eq!(rules(&[line]).no_cache, expected, "{line}");
        let line = line.replace("no-cache", "private");
        assert_eq!(rules(&[&line]).private, expected, "{line}");
    }
}

// RFC 9213 sections 2.1 and 2.2.
#[test]
fn a_targeted_field_stands_in_place_of_the_others() {
    let check = |targeted: &str, expected: Option<ResponseRules>| {
        let future = "Thu, 18 Aug 2050 02:01:18 GMT";
        let usual = [("cache-control", "max-age=9, no-store"), ("expires", future)];
        let found =
            ResponseRules::of(&headers(&[&usual[..], &[("cdn-cache-control", targeted)]].concat()), NOW);
        let otherwise = || ResponseRules::of(&headers(&usual), NOW);
        assert_eq!(found, expected.unwrap_or_else(otherwise), "{targeted}");
    };
    let none = ResponseRules::default();
    check("max-age=10", Some(ResponseRules { max_age: Some(10), ..none.clone() }));
    check("max-age=99999999999", Some(ResponseRules { max_age: Some(1 << 31), ..none.clone() }));
    check("none", Some(none.clone()));
    check(
        "private;x=1, no-cache=\"a\"",
        Some(ResponseRules { private: Scope::Everything, no_cache: named(&["a"]), ..none.clone() }),
    );
    check(
        "max-age=1, s-maxage=2, stale-if-error=3, stale-while-revalidate=4",
        Some(ResponseRules {
            max_age: Some(1),
            s_maxage: Some(2),
            stale_if_error: 3,
            stale_while_revalidate: 4,
            ..none.clone()
        }),
    );
    // Empty or wrong: as if it were not there.
    for ignored in ["", " ", "max-age=10, &&&&", "MaX-aGe=10", "max-age =10", "max-age= 10", "max-age=10,"] {
        check(ignored, None);
    }
    // A wrong type takes its member with it, not the field.
    for wrong in
        ["max-age=\"10\"", "max-age=10.5", "max-age=-10", "max-age", "no-store=1", "public=?0", "no-cache=5"]
    {
        check(wrong, Some(none.clone()));
    }
}

// RFC 9111 section 5.3.
#[test]
fn expires_is_one_date_or_the_past() {
    let good = "Thu, 18 Aug 2050 02:01:18 GMT";
    let check = |lines: &[&str], expected| {
        let lines: Vec<_> = lines.iter().map(|line| ("expires", *line)).collect();
        assert_eq!(ResponseRules::of(&headers(&lines), NOW).expires, expected, "{lines:?}");
    };
    check(&[], None);
    check(&[good], Some(Expires::At(2_544_400_878)));
    check(&[good, good], Some(Expires::At(2_544_400_878)));
    check(&[good, "Thu, 18 Aug 2050 02:01:19 GMT"], Some(Expires::Invalid));
    check(&["0"], Some(Expires::Invalid));
    check(&[""], Some(Expires::Invalid));
}

// RFC 9111 sections 5.2.1 and 5.4.
#[test]
fn a_request_asks_in_its_own_words() {
    let none = RequestRules::default();
    for (lines, expected) in [
        (vec![], none.clone()),
        (
            vec![("cache-control", "No-Cache, no-store, only-if-cached")],
            RequestRules { no_cache: true, no_store: true, only_if_cached: true, ..none.clone() },
        ),
        (
            vec![("cache-control", "max-age=1, min-fresh=2, max-stale=3, stale-if-error=4")],
            RequestRules {
                max_age: Some(1),
                min_fresh: 2,
                max_stale: Some(3),
                stale_if_error: 4,
                ..none.clone()
            },
        ),
        (vec![("cache-control", "max-stale")], RequestRules { max_stale: Some(u64::MAX), ..none.clone() }),
        (vec![("cache-control", "max-stale=x")], none.clone()),
        (vec![("cache-control", "max-stale x")], none.clone()),
        (vec![("cache-control", "max-age=x")], RequestRules { max_age: Some(0), ..none.clone() }),
        (vec![("pragma", "foo, No-Cache")], RequestRules { no_cache: true, ..none.clone() }),
        (
            vec![("pragma", "no-cache"), ("cache-control", "max-age=5")],
            RequestRules { max_age: Some(5), ..none.clone() },
        ),
    ] {
        assert_eq!(RequestRules::of(&headers(&lines)), expected, "{lines:?}");
    }
}

proptest! {
    /// What forbids is never lost, wherever it stands among other directives.
    #[test]
    fn a_prohibition_among_others_is_found(
        before in "[a-z]{1,8}(=[a-z0-9]{1,5}|=\"[a-z, =]{0,9}\")?",
        after in "[a-z]{1,8}(=[a-z0-9]{1,5}|=\"[a-z, =]{0,9}\")?",
    ) {
        let line = format!("{before}, no-store , {after}");
        prop_assert!(rules(&[&line]).no_store);
    }

    /// A value that is all one quoted argument changes nothing, whatever stands in it.
    #[test]
    fn a_quoted_argument_changes_nothing(text in "[a-z0-9=, -]{0,40}") {
        prop_assert_eq!(rules(&[&format!("x-y=\"{text}\"")]), ResponseRules::default());
    }
}
