//! Tables from the RFCs, and properties against naive readings of them.

use super::*;
use http::header::{HeaderName, HeaderValue};
use proptest::prelude::*;

const NOW: u64 = 1_800_000_000;
const MODIFIED: u64 = 1_700_000_000;

fn variant(coding: Coding, len: u64) -> Variant {
    Variant { coding, address: Address([coding as u8; 32]), len }
}

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let pair = |(name, value): &(&'static str, &str)| {
        (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
    };
    let mut map = HeaderMap::new();
    for (name, value) in pairs.iter().map(pair) {
        map.append(name, value);
    }
    map
}

fn decided(pairs: &[(&'static str, &str)], len: u64) -> Decision {
    let variants = [variant(Coding::Identity, len)];
    let available = Available { variants: &variants, content_type: "text/plain", modified: Some(MODIFIED) };
    decide(&Method::GET, &headers(pairs), available, true, NOW)
}

#[test]
fn conditions_are_met_in_the_order_of_the_rfc() {
    let own = variant(Coding::Identity, 0).address.etag();
    let (weak, since) = (format!("W/{own}"), "Tue, 14 Nov 2023 22:13:20 GMT");
    let (before, after) = ("Tue, 14 Nov 2023 22:13:19 GMT", "Tue, 14 Nov 2023 22:13:21 GMT");
    let other = "\"x\"";
    let two = format!("{other}, {own}");
    let cases: [(u16, &[(&'static str, &str)]); 24] = [
        (200, &[]),
        (200, &[("if-match", &own)]),
        (200, &[("if-match", &two)]),
        (200, &[("if-match", other), ("if-match", &own)]),
        (200, &[("if-match", "*")]),
        (412, &[("if-match", other)]),
        (412, &[("if-match", &weak)]),
        (412, &[("if-match", "nonsense")]),
        (200, &[("if-match", &own), ("if-unmodified-since", before)]),
        (412, &[("if-unmodified-since", before)]),
        (200, &[("if-unmodified-since", since)]),
        (200, &[("if-unmodified-since", "yesterday")]),
        (304, &[("if-none-match", &own)]),
        (304, &[("if-none-match", &weak)]),
        (304, &[("if-none-match", "*")]),
        (304, &[("if-none-match", &two)]),
        (200, &[("if-none-match", other)]),
        (200, &[("if-none-match", other), ("if-modified-since", after)]),
        (304, &[("if-modified-since", since)]),
        (304, &[("if-modified-since", after)]),
        (200, &[("if-modified-since", before)]),
        (200, &[("if-modified-since", after), ("if-modified-since", after)]),
        (412, &[("if-match", other), ("if-none-match", &own)]),
        (304, &[("if-match", &own), ("if-none-match", &own)]),
    ];
    for (status, fields) in cases {
        assert_eq!(decided(fields, 10).status.as_u16(), status, "{fields:?}");
    }
}

#[test]
fn a_change_fails_where_a_reader_is_told_that_nothing_changed() {
    let own = "\"a\"";
    let current = Validators { etags: &["\"b\"", own], modified: Some(MODIFIED) };
    let cases = [
        (("if-none-match", "*"), Outcome::Failed, Outcome::Proceed),
        (("if-none-match", own), Outcome::Failed, Outcome::Proceed),
        (("if-match", own), Outcome::Proceed, Outcome::Failed),
        (("if-match", "*"), Outcome::Proceed, Outcome::Failed),
    ];
    for (field, present, absent) in cases {
        let conditions = Preconditions::of(&headers(&[field]), NOW);
        assert!(!conditions.is_empty());
        assert_eq!(conditions.evaluate(&Method::PUT, Some(current)), present, "{field:?}");
        assert_eq!(conditions.evaluate(&Method::PUT, None), absent, "{field:?}");
    }
    let dated = Preconditions::of(&headers(&[("if-modified-since", "Tue, 14 Nov 2023 22:13:21 GMT")]), NOW);
    assert_eq!(dated.evaluate(&Method::PUT, Some(current)), Outcome::Proceed, "it is for readers only");
    assert!(Preconditions::of(&headers(&[("if-range", own)]), NOW).is_empty());
}

#[test]
fn a_range_is_honoured_if_its_condition_holds() {
    let own = variant(Coding::Identity, 0).address.etag();
    let weak = format!("W/{own}");
    let cases = [
        (206, own.as_str()),
        (200, weak.as_str()),
        (200, "\"x\""),
        (200, "nonsense"),
        (206, "Tue, 14 Nov 2023 22:13:20 GMT"),
        (200, "Tue, 14 Nov 2023 22:13:21 GMT"),
    ];
    for (status, condition) in cases {
        let fields = [("range", "bytes=0-0"), ("if-range", condition)];
        assert_eq!(decided(&fields, 10).status.as_u16(), status, "{condition}");
    }
    let variants = [variant(Coding::Identity, 10)];
    let fresh = Available { variants: &variants, content_type: "text/plain", modified: Some(MODIFIED) };
    let fields = headers(&[("range", "bytes=0-0"), ("if-range", "Tue, 14 Nov 2023 22:13:20 GMT")]);
    let status = decide(&Method::GET, &fields, fresh, true, MODIFIED).status;
    assert_eq!(status, 200, "within the same second it could have changed twice");
    assert_eq!(decide(&Method::HEAD, &headers(&[("range", "bytes=0-0")]), fresh, true, NOW).status, 200);
}

#[test]
fn ranges_are_read_strictly_and_answered_exactly() {
    use Selection::{Parts, Unsatisfiable, Whole};
    let one = |range: Range<u64>| Parts(vec![range]);
    let cases = [
        ("bytes=0-4", one(0..5)),
        ("Bytes = 0-4", Whole),
        ("BYTES=0-4", one(0..5)),
        ("bytes=5-", one(5..10)),
        ("bytes=-3", one(7..10)),
        ("bytes=-30", one(0..10)),
        ("bytes=0-99999999999999999999999", one(0..10)),
        ("bytes=9-9", one(9..10)),
        ("bytes=10-", Unsatisfiable),
        ("bytes=10-20", Unsatisfiable),
        ("bytes=-0", Unsatisfiable),
        ("bytes=99999999999999999999999-", Unsatisfiable),
        ("bytes=5-4", Whole),
        ("bytes=a-4", Whole),
        ("bytes=--4", Whole),
        ("bytes=+1-4", Whole),
        ("bytes=", Whole),
        ("bytes=,", Whole),
        ("bytes=0-1,x", Whole),
        ("lines=0-1", Whole),
        ("bytes 0-1", Whole),
        ("bytes=0-0, ,2-3", Parts(vec![0..1, 2..4])),
        ("bytes=8-,0-1", Parts(vec![8..10, 0..2])),
        ("bytes=0-3,2-5", one(0..6)),
        ("bytes=0-3,4-5", one(0..6)),
        ("bytes=6-7,0-0,4-5", Parts(vec![4..8, 0..1])),
        ("bytes=0-0,20-30", one(0..1)),
    ];
    for (value, expected) in cases {
        assert_eq!(select(value.as_bytes(), 10, true), expected, "{value}");
    }
    assert_eq!(select(b"bytes=0-0,2-3", 10, false), Whole, "several parts are off");
    assert_eq!(select(b"bytes=0-3,2-3", 10, false), one(0..4), "they come to one");
    assert_eq!((select(b"bytes=-1", 0, true), select(b"bytes=0-", 0, true)), (Whole, Unsatisfiable));
    let many = |count: u64| (0..count).map(|n| format!("{}-{}", 3 * n, 3 * n)).collect::<Vec<_>>().join(",");
    assert!(
        matches!(select(format!("bytes={}", many(16)).as_bytes(), 100, true), Parts(parts) if parts.len() == 16)
    );
    assert_eq!(select(format!("bytes={}", many(17)).as_bytes(), 100, true), Unsatisfiable);
}

#[test]
fn one_part_is_a_range_and_several_are_a_multipart_body_of_the_stated_length() {
    let single = decided(&[("range", "bytes=2-4")], 10);
    assert_eq!((single.content_range.as_deref(), single.content_length), (Some("bytes 2-4/10"), 3));
    assert_eq!(single.pieces, [Piece::Bytes(2..5)]);
    let none = decided(&[("range", "bytes=10-")], 10);
    assert_eq!((none.status.as_u16(), none.content_range.as_deref()), (416, Some("bytes */10")));
    let several = decided(&[("range", "bytes=0-0,5-6")], 10);
    let mut body = Vec::new();
    for piece in &several.pieces {
        match piece {
            Piece::Text(text) => body.extend_from_slice(text),
            Piece::Bytes(range) => body.extend(range.clone().map(|n| b'0' + u8::try_from(n).unwrap())),
        }
    }
    let boundary = several.content_type.strip_prefix("multipart/byteranges; boundary=").unwrap();
    let expected = format!(
        "--{boundary}\r\nContent-Type: text/plain\r\nContent-Range: bytes 0-0/10\r\n\r\n0\r\n\
         --{boundary}\r\nContent-Type: text/plain\r\nContent-Range: bytes 5-6/10\r\n\r\n56\r\n--{boundary}--\r\n"
    );
    assert_eq!(String::from_utf8(body).unwrap(), expected);
    assert_eq!(several.content_length, expected.len() as u64);
    assert_eq!((several.status.as_u16(), several.content_range), (206, None));
}

#[test]
fn the_encoding_that_is_liked_best_is_sent() {
    let variants = [
        variant(Coding::Identity, 100),
        variant(Coding::Gzip, 50),
        variant(Coding::Brotli, 40),
        variant(Coding::Zstd, 45),
    ];
    let chosen = |field: Option<&str>| {
        negotiate(field.iter().map(|field| field.as_bytes()), &variants).map(|variant| variant.coding)
    };
    let cases = [
        (None, Some(Coding::Identity)),
        (Some(""), Some(Coding::Identity)),
        (Some("gzip"), Some(Coding::Gzip)),
        (Some("GZIP, deflate"), Some(Coding::Gzip)),
        (Some("x-gzip"), Some(Coding::Gzip)),
        (Some("gzip, br, zstd"), Some(Coding::Brotli)),
        (Some("gzip, br;q=0.9, zstd;q=0.95"), Some(Coding::Gzip)),
        (Some("deflate"), Some(Coding::Identity)),
        (Some("gzip;q=0"), Some(Coding::Identity)),
        (Some("*"), Some(Coding::Brotli)),
        (Some("*, br;q=0"), Some(Coding::Zstd)),
        (Some("identity, gzip;q=0.5"), Some(Coding::Identity)),
        (Some("identity;q=0, gzip;q=0.001"), Some(Coding::Gzip)),
        (Some("identity;q=0"), None),
        (Some("*;q=0"), None),
        (Some("*;q=0, identity;q=0.1"), Some(Coding::Identity)),
        (Some("gzip;q=2, br;q=x, zstd;level=3"), Some(Coding::Identity)),
        (Some("gzip ; q=1.000"), Some(Coding::Gzip)),
        (Some("gzip;q=1.001"), Some(Coding::Identity)),
    ];
    for (field, expected) in cases {
        assert_eq!(chosen(field), expected, "{field:?}");
    }
    let alone = [variant(Coding::Gzip, 50)];
    let gzip = Some(Coding::Gzip);
    assert_eq!(negotiate(std::iter::empty(), &alone).map(|v| v.coding), gzip, "any coding is acceptable");
    assert_eq!(negotiate([&b"br"[..]].into_iter(), &alone), None);
}

#[test]
fn a_path_is_decoded_once_and_names_one_thing() {
    for (path, name) in [
        ("a/b.png", "a/b.png"),
        ("a%20b", "a b"),
        ("%2541", "%41"),
        ("%C3%A4", "ä"),
        ("a//b", "a//b"),
        ("...", "..."),
    ] {
        assert_eq!(decode_path(path).as_deref(), Ok(name));
    }
    let cases = [
        ("", BadPath::Empty),
        ("a/../b", BadPath::Dots),
        ("a/%2e%2E/b", BadPath::Dots),
        ("a%2f..%2fb", BadPath::Dots),
        (".", BadPath::Dots),
        ("a%00", BadPath::Byte),
        ("a%0a", BadPath::Byte),
        ("a\\b", BadPath::Byte),
        ("a%5cb", BadPath::Byte),
        ("%ff", BadPath::Byte),
        ("%c2%80", BadPath::Byte),
        ("%", BadPath::Escape),
        ("%g0", BadPath::Escape),
        ("%2", BadPath::Escape),
        ("%+1", BadPath::Escape),
    ];
    for (path, expected) in cases {
        assert_eq!(decode_path(path), Err(expected), "{path}");
    }
    assert_eq!(decode_path(&"a".repeat(1025)), Err(BadPath::Long));
}

#[test]
fn digests_are_those_of_rfc_9530() {
    // The RFC's own example (appendix B.1): {"hello": "world"} and a line feed.
    let stated = "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:";
    let fields = |value: &str| sha256_of(&headers(&[("content-digest", value)]), &CONTENT_DIGEST);
    let digest = fields(stated).unwrap().unwrap();
    assert_eq!(repr_digest(&digest), stated);
    assert_eq!(fields(&format!("sha-512=:AA==:, {stated}")), Ok(Some(digest)));
    assert_eq!(fields("sha-512=:AA==:"), Ok(None));
    for wrong in ["sha-256", "sha-256=:AA==:", "sha-256=AA==", "sha-256=:!:"] {
        assert_eq!(fields(wrong), Err(BadDigest), "{wrong}");
    }
}

#[test]
fn types_follow_the_extension_and_say_what_is_worth_compressing() {
    assert_eq!((type_of("a/b.PNG"), type_of("a.b/c")), ("image/png", "application/octet-stream"));
    assert_eq!(type_of("x.tar.gz"), "application/gzip");
    for media in ["text/html; charset=utf-8", "application/geo+json", "image/svg+xml", "Application/JSON"] {
        assert!(is_compressible(media), "{media}");
    }
    for media in ["image/png", "video/mp4", "application/zip", "font/woff2", "text/event-stream", ""] {
        assert!(!is_compressible(media), "{media}");
    }
}

/// A range as it is written, and which bytes of `len` it asks for.
fn spec() -> impl Strategy<Value = (String, Option<(u64, u64)>, Option<u64>)> {
    prop_oneof![
        (0u64..40, 0u64..40).prop_map(|(a, b)| {
            let (first, last) = (a.min(b), a.max(b));
            (format!("{first}-{last}"), Some((first, last)), None)
        }),
        (0u64..40).prop_map(|first| (format!("{first}-"), Some((first, u64::MAX)), None)),
        (0u64..40).prop_map(|length| (format!("-{length}"), None, Some(length))),
    ]
}

proptest! {
    /// Byte by byte: what is asked for is what is sent, once.
    #[test]
    fn a_set_of_ranges_selects_exactly_the_bytes_it_names(
        specs in proptest::collection::vec(spec(), 1..20),
        len in 1u64..40,
    ) {
        let value = format!("bytes={}", specs.iter().map(|spec| spec.0.as_str()).collect::<Vec<_>>().join(", "));
        let wanted: Vec<u64> = (0..len)
            .filter(|at| specs.iter().any(|(_, span, suffix)| {
                span.is_some_and(|(first, last)| (first..=last).contains(at))
                    || suffix.is_some_and(|suffix| *at + suffix >= len)
            }))
            .collect();
        match select(value.as_bytes(), len, true) {
            Selection::Whole => prop_assert!(false, "a good set was ignored: {value}"),
            Selection::Unsatisfiable => prop_assert!(wanted.is_empty() || specs.len() > 16, "{value}"),
            Selection::Parts(parts) => {
                let mut sent: Vec<u64> = parts.iter().cloned().flatten().collect();
                prop_assert!(parts.iter().all(|part| parts.iter().all(|other| part == other || part.end < other.start || other.end < part.start)));
                sent.sort_unstable();
                prop_assert_eq!(sent, wanted);
            }
        }
    }

    /// Nobody likes anything better than what was chosen, and nothing is refused that somebody likes.
    #[test]
    fn no_variant_is_liked_better_than_the_one_chosen(
        weights in proptest::collection::vec(proptest::option::of(0u16..=10), 5),
        stored in proptest::collection::vec(any::<bool>(), 4),
    ) {
        let names = ["identity", "gzip", "br", "zstd", "*"];
        let members = names.iter().zip(&weights).filter_map(|(name, weight)| {
            weight.map(|weight| format!("{name};q={}.{}", weight / 10, weight % 10))
        });
        let field = members.collect::<Vec<_>>().join(",");
        let variants: Vec<Variant> = Coding::ALL.into_iter().zip(&stored).filter(|(_, stored)| **stored)
            .map(|(coding, _)| variant(coding, 100)).collect();
        let liked = |coding: Coding| match weights[coding as usize].or(weights[4]) {
            Some(weight) => (weight > 0).then_some(f64::from(weight)),
            None => (coding == Coding::Identity).then_some(0.0),
        };
        let best = variants.iter().filter_map(|variant| liked(variant.coding)).max_by(f64::total_cmp);
        let chosen = negotiate([field.as_bytes()].into_iter(), &variants);
        prop_assert_eq!(chosen.and_then(|variant| liked(variant.coding)), best, "{}", field);
    }

    /// The five steps of the RFC, written down as five steps.
    #[test]
    fn conditions_agree_with_a_naive_reading_of_the_rfc(
        matching in proptest::option::of(tags()),
        none_matching in proptest::option::of(tags()),
        modified_since in proptest::option::of(0u64..4),
        unmodified_since in proptest::option::of(0u64..4),
        exists in any::<bool>(),
        method in prop_oneof![Just(Method::GET), Just(Method::HEAD), Just(Method::PUT)],
    ) {
        let mut fields = HeaderMap::new();
        let mut put = |name: &'static str, value: Option<String>| {
            if let Some(value) = value {
                fields.insert(name, HeaderValue::from_str(&value).unwrap());
            }
        };
        let date = |at: u64| ron_kernel::date::http_date(MODIFIED + at);
        put("if-match", matching.as_ref().map(|tags| tags.join(",")));
        put("if-none-match", none_matching.as_ref().map(|tags| tags.join(",")));
        put("if-modified-since", modified_since.map(date));
        put("if-unmodified-since", unmodified_since.map(date));
        let current = exists.then_some(Validators { etags: &["\"a\""], modified: Some(MODIFIED + 2) });
        let reads = method != Method::PUT;
        let strong = |tags: &Vec<&str>| exists && tags.iter().any(|tag| *tag == "*" || *tag == "\"a\"");
        let weak = |tags: &Vec<&str>| strong(tags) || exists && tags.contains(&"W/\"a\"");
        let step_one = matching.as_ref().map(strong);
        let step_two = unmodified_since.filter(|_| matching.is_none() && exists).map(|at| at >= 2);
        let step_three = none_matching.as_ref().map(|tags| !weak(tags));
        let step_four = modified_since.filter(|_| none_matching.is_none() && exists && reads).map(|at| at < 2);
        let expected = if step_one == Some(false) || step_two == Some(false) {
            Outcome::Failed
        } else if step_three == Some(false) {
            if reads { Outcome::NotModified } else { Outcome::Failed }
        } else if step_four == Some(false) {
            Outcome::NotModified
        } else {
            Outcome::Proceed
        };
        prop_assert_eq!(Preconditions::of(&fields, NOW).evaluate(&method, current), expected);
    }

    /// A decoded path encodes to one that decodes to the same, and nothing in it climbs.
    #[test]
    fn a_name_survives_its_encoding(path in "[a-z./%25\\\\]{0,12}|(%[0-9a-f]{2}|[a-z./]){0,8}") {
        if let Ok(name) = decode_path(&path) {
            let encoded: String = name.bytes().map(|byte| format!("%{byte:02X}")).collect();
            prop_assert_eq!(decode_path(&encoded), Ok(name.clone()));
            prop_assert!(!name.split('/').any(|segment| segment == ".."));
        }
    }
}

fn tags() -> impl Strategy<Value = Vec<&'static str>> {
    prop_oneof![
        Just(vec!["*"]),
        proptest::collection::vec(
            prop_oneof![Just("\"a\""), Just("W/\"a\""), Just("\"b\""), Just("W/\"b\"")],
            1..4
        ),
    ]
}
