//! Stored heads as bytes.

use super::*;

#[test]
fn a_head_reads_back_as_it_was_written() {
    let mut invalid = stored("Cache-Control: max-age=60\nETag: \"a\"\nSet-Cookie: a=b\nSet-Cookie: c=d");
    invalid.invalidate();
    let varied = stored_for("A: 1, 2", "Cache-Control: s-maxage=9, private=\"x\"\nVary: b, A");
    let part = parts("ETag: \"a\"\nX-Text: \u{fc}", 4, 6);
    let unclear = parts("ETag: \"a\"\nAge: 1, 2", 4, 6);
    for head in [invalid, varied, part, unclear] {
        let bytes = head.encode();
        assert_eq!(StoredHead::decode(&bytes), Ok(head));
        for cut in 0..bytes.len() {
            assert!(StoredHead::decode(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        assert_eq!(StoredHead::decode(&[&bytes[..], &[0]].concat()), Err(DecodeError::Malformed));
    }
}

/// Frozen: indexes on disk hold these bytes.
#[test]
fn the_first_version_stays_as_it_is() {
    let head = stored_for("A: 1", "Cache-Control: max-age=60\nVary: A");
    let mut expected = vec![1, 200, 1, 0];
    expected.extend([0xc0, 0x9d, 0xd2, 0x85, 0xe9, 0x16, 0, 10]);
    expected.extend([1, 1, b'a', 2, b'1', 3]);
    for (name, value) in [("date", DATE), ("cache-control", "max-age=60"), ("vary", "A")] {
        expected.push(name.len() as u8);
        expected.extend(name.as_bytes());
        expected.push(value.len() as u8);
        expected.extend(value.as_bytes());
    }
    assert_eq!(head.encode(), expected);
    expected[0] = 2;
    assert_eq!(StoredHead::decode(&expected), Err(DecodeError::Version(2)));
}

#[test]
fn numbers_and_parts_that_cannot_be_are_refused() {
    let good = [1, 200, 1, 0, 0, 0, 10, 0, 0];
    assert!(StoredHead::decode(&good).is_ok());
    let with = |at: usize, bytes: &[u8]| [&good[..at], bytes, &good[at + 1..]].concat();
    for bad in [
        with(3, &[8]),                                                       // an unknown flag
        with(4, &[0x80, 0]), // a number in two bytes that needs one
        with(4, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2]), // past 64 bits
        with(7, &[9]),       // more fields than bytes
        with(8, &[0xff, 0xff, 3]),
        [&[1, 200, 1, 2, 0, 0, 11, 1, 5, 6], &[0, 0][..]].concat(), // parts past their end
        [&[1, 200, 1, 2, 0, 0, 11, 0], &[0, 0][..]].concat(),       // no parts
    ] {
        assert_eq!(StoredHead::decode(&bad), Err(DecodeError::Malformed), "{bad:?}");
    }
    assert!(StoredHead::decode(&[1, 200, 1, 7, 0, 0, 11, 1, 5, 5, 0, 0]).is_ok());
    assert_eq!(StoredHead::decode(&[]), Err(DecodeError::Malformed));
}
