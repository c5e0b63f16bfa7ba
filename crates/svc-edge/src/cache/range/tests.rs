//! Tests of ranges against a set of bytes.

use super::*;
use http::HeaderValue;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn headers(name: http::HeaderName, values: &[&str]) -> HeaderMap {
    values.iter().map(|value| (name.clone(), HeaderValue::from_str(value).unwrap())).collect()
}

// RFC 9110 sections 14.1.1, 14.1.2 and 14.2.
#[test]
fn a_range_is_one_of_bytes_or_none() {
    let check = |values: &[&str], expected: Wanted| {
        assert_eq!(Wanted::of(&Method::GET, &headers(RANGE, values)), expected, "{values:?}");
    };
    check(&[], Wanted::Whole);
    check(&["bytes=0-1"], Wanted::One(ByteRange::From(0, Some(1))));
    check(&["Bytes= 5-"], Wanted::One(ByteRange::From(5, None)));
    check(&["bytes=-5"], Wanted::One(ByteRange::Suffix(5)));
    check(&["bytes=0-99999999999999999999999"], Wanted::One(ByteRange::From(0, Some(u64::MAX))));
    check(&["bytes=0-1,3-4"], Wanted::Several);
    check(&["bytes=0-1", "bytes=3-4"], Wanted::Whole);
    for ignored in
        ["", "bytes", "bytes=", "bytes=-", "bytes=5-4", "bytes=a-b", "bytes=+1-2", "lines=0-1", "bytes 0-1"]
    {
        check(&[ignored], Wanted::Whole);
    }
    assert_eq!(Wanted::of(&Method::HEAD, &headers(RANGE, &["bytes=0-1"])), Wanted::Whole);
}

#[test]
fn a_range_lies_within_the_length() {
    for (range, len, expected) in [
        (ByteRange::From(0, Some(1)), Some(10), Placed::At(0..2)),
        (ByteRange::From(5, Some(99)), Some(10), Placed::At(5..10)),
        (ByteRange::From(0, Some(u64::MAX)), Some(10), Placed::At(0..10)),
        (ByteRange::From(9, None), Some(10), Placed::At(9..10)),
        (ByteRange::From(10, None), Some(10), Placed::Unsatisfiable),
        (ByteRange::Suffix(3), Some(10), Placed::At(7..10)),
        (ByteRange::Suffix(30), Some(10), Placed::At(0..10)),
        (ByteRange::Suffix(0), Some(10), Placed::Unsatisfiable),
        (ByteRange::Suffix(1), Some(0), Placed::Unsatisfiable),
        (ByteRange::From(0, Some(1)), None, Placed::At(0..2)),
        (ByteRange::From(0, None), None, Placed::Unknown),
        (ByteRange::Suffix(1), None, Placed::Unknown),
    ] {
        assert_eq!(range.place(len), expected, "{range:?} of {len:?}");
    }
}

// RFC 9110 section 14.4.
#[test]
fn content_range_is_one_that_can_be() {
    let check = |values: &[&str], expected: Option<(Range<u64>, Option<u64>)>| {
        let found = ContentRange::of(&headers(CONTENT_RANGE, values));
        assert_eq!(found, expected.map(|(range, complete)| ContentRange { range, complete }), "{values:?}");
    };
    check(&["bytes 4-9/10"], Some((4..10, Some(10))));
    check(&["Bytes 0-0/*"], Some((0..1, None)));
    for bad in [
        &[][..],
        &["bytes 4-9/9"],
        &["bytes 9-4/10"],
        &["bytes */10"],
        &["bytes 4-9"],
        &["bytes 4-/10"],
        &["bytes=4-9/10"],
        &["lines 4-9/10"],
        &["bytes 4-9/x"],
        &["bytes 0-99999999999999999999999/*"],
        &["bytes 0-1/99999999999999999999999"],
        &["bytes 4-9/10", "bytes 4-9/10"],
    ] {
        check(bad, None);
    }
}

#[test]
fn parts_that_contradict_each_other_are_refused() {
    let mut parts = Parts::new(0..5, Some(10)).unwrap();
    assert_eq!(parts.add(5..10, Some(11)), None, "another length");
    assert_eq!(parts.add(5..11, None), None, "past the end");
    assert_eq!(parts.add(5..5, None), None, "nothing");
    assert_eq!(parts, Parts::new(0..5, Some(10)).unwrap(), "and nothing has changed");
    let mut open = Parts::new(5..9, None).unwrap();
    assert_eq!(open.add(0..1, Some(8)), None, "a length that what is there already passes");
    assert_eq!((Parts::new(3..3, None), Parts::new(0..5, Some(4))), (None, None));
}

#[test]
fn the_number_of_parts_is_bounded() {
    let mut parts = Parts::new(0..1, None).unwrap();
    let added = (1..1000u64).filter(|at| parts.add(at * 10..at * 10 + 1, None).is_some()).count();
    assert_eq!((added, parts.parts().len()), (PARTS_MAX - 1, PARTS_MAX));
    let change = parts.add(0..10_000, Some(10_000)).unwrap();
    assert_eq!(change.removed.len(), PARTS_MAX, "one that has them all takes their place");
    assert_eq!(parts.whole(), Some(10_000));
}

proptest! {
    /// Against a set of single bytes: what is read was put in, from where it was put, and nothing is invented.
    #[test]
    fn combining_ranges_never_invents_bytes(
        ranges in proptest::collection::vec((0u64..40, 1u64..15), 1..12),
        asked in (0u64..50, 1u64..20),
    ) {
        let body: Vec<u8> = (0..60).collect();
        let cut = |range: &Range<u64>| body[range.start as usize..range.end as usize].to_vec();
        let first = ranges[0].0..ranges[0].0 + ranges[0].1;
        let mut parts = Parts::new(first.clone(), None).unwrap();
        let (mut kept, mut held) = (vec![cut(&first)], first.collect::<BTreeSet<u64>>());
        for (start, len) in &ranges[1..] {
            let range = *start..start + len;
            let change = parts.add(range.clone(), None).unwrap();
            change.removed.iter().for_each(|at| drop(kept.remove(*at)));
            if let Some(at) = change.inserted {
                kept.insert(at, cut(&range));
            }
            held.extend(range);
        }
        prop_assert_eq!(kept.len(), parts.parts().len());
        let range = asked.0..asked.0 + asked.1;
        let all_here = range.clone().all(|byte| held.contains(&byte));
        let pieces = parts.pieces(range.clone());
        prop_assert_eq!(pieces.is_some(), all_here);
        if let Some(pieces) = pieces {
            let read: Vec<u8> = pieces
                .iter()
                .flat_map(|piece| kept[piece.part][piece.bytes.start as usize..piece.bytes.end as usize].to_vec())
                .collect();
            prop_assert_eq!(read, cut(&range));
        }
        let gaps: Vec<u64> = range.filter(|byte| !held.contains(byte)).collect();
        let hull = gaps.first().map(|first| *first..gaps[gaps.len() - 1] + 1);
        prop_assert_eq!(parts.missing(asked.0..asked.0 + asked.1), hull);
        prop_assert_eq!(Parts::from_parts(parts.parts().to_vec(), parts.complete()), Some(parts));
    }
}
