//! Directories against a naive reading of them, and those that must be refused.

use super::*;
use proptest::prelude::*;

const SPAN: Span = Span { ids: 0..1000, tile_bytes: 10_000, leaf_bytes: 5_000 };

fn entry(id: u64, run: u32, offset: u64, length: u32) -> Entry {
    Entry { id, offset, length, run }
}

fn parsed(entries: &[Entry]) -> Result<Directory, Fault> {
    Directory::parse(&Directory::write(entries), &SPAN)
}

#[test]
fn the_layout_is_the_one_that_is_specified() {
    let entries = [entry(5, 1, 0, 100), entry(42, 3, 100, 200), entry(69, 0, 300, 2)];
    let bytes = [3, 5, 37, 27, 1, 3, 0, 100, 0xc8, 1, 2, 1, 0, 0];
    assert_eq!(Directory::write(&entries), bytes);
    assert_eq!(Directory::parse(&bytes, &SPAN).unwrap().entries(), entries);
}

#[test]
fn what_lies_where_it_must_not_is_refused() {
    let check = |entries: &[Entry], fault| assert_eq!(parsed(entries), Err(fault), "{entries:?}");
    check(&[], Fault::NoEntries);
    check(&[entry(1, 3, 0, 1), entry(3, 1, 1, 1)], Fault::Order);
    check(&[entry(1, 1, 0, 1), entry(1, 1, 1, 1)], Fault::Order);
    check(&[entry(1, 0, 0, 1), entry(1, 1, 1, 1)], Fault::Order);
    check(&[entry(1000, 1, 0, 1)], Fault::Span);
    check(&[entry(999, 2, 0, 1)], Fault::Span);
    check(&[entry(1, u32::MAX, 0, 1)], Fault::Span);
    check(&[entry(1, 1, 0, 0)], Fault::EmptyEntry);
    check(&[entry(1, 1, 9_999, 2)], Fault::EntryOutside);
    check(&[entry(1, 0, 4_999, 2)], Fault::EntryOutside);
    check(&[entry(1, 1, u64::MAX - 1, 1)], Fault::EntryOutside);
    check(&[entry(1, 1, 0, 10), entry(2, 1, 9, 10)], Fault::EntriesOverlap);
    check(&[entry(1, 1, 5, 10), entry(2, 1, 5, 9)], Fault::EntriesOverlap);
    check(&[entry(1, 0, 5, 10), entry(2, 1, 5, 10), entry(3, 0, 5, 10)], Fault::EntriesOverlap);
    let shared = [entry(1, 1, 5, 10), entry(3, 0, 0, 10), entry(4, 1, 5, 10)];
    assert_eq!(parsed(&shared).unwrap().entries(), shared, "contents may be shared, sections are apart");
}

#[test]
fn numbers_that_claim_more_than_there_is_are_refused() {
    let check = |bytes: &[u8], fault| assert_eq!(Directory::parse(bytes, &SPAN), Err(fault), "{bytes:?}");
    check(&[], Fault::Numbers);
    check(&[0xff, 0xff, 0x3f, 1, 1, 1, 1], Fault::Numbers);
    check(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1], Fault::DirectoryCap);
    check(&[1, 1, 1, 1, 0], Fault::Numbers);
    check(&[1, 1, 1, 1, 1, 0], Fault::Numbers);
    let bytes = Directory::write(&[entry(5, 1, 0, 100), entry(42, 0, 100, 200)]);
    for cut in 0..bytes.len() {
        check(&bytes[..cut], Fault::Numbers);
    }
}

/// Gaps, runs and lengths; whether it is a leaf; whether it has the content of an earlier one.
fn entries() -> impl Strategy<Value = Vec<Entry>> {
    prop::collection::vec((0u64..9, 0u32..4, 1u32..50, any::<prop::sample::Index>(), 0..3), 1..40).prop_map(
        |parts| {
            let (mut id, mut free, mut made) = (0, [0, 0], Vec::<Entry>::new());
            for (gap, run, length, which, again) in parts {
                id += gap;
                let earlier: Vec<Entry> = made.iter().filter(|entry| entry.run > 0).copied().collect();
                let (offset, length) = if again == 0 && run > 0 && !earlier.is_empty() {
                    let same = which.get(&earlier);
                    (same.offset, same.length)
                } else {
                    let free = &mut free[usize::from(run == 0)];
                    *free += u64::from(length);
                    (*free - u64::from(length), length)
                };
                made.push(Entry { id, offset, length, run });
                id += u64::from(run.max(1));
            }
            made
        },
    )
}

proptest! {
    #[test]
    fn a_directory_finds_what_a_walk_through_it_finds(entries in entries()) {
        let directory = parsed(&entries).unwrap();
        prop_assert_eq!(directory.entries(), &entries[..]);
        for id in 0..520 {
            let mut expected = Found::Absent;
            for (at, entry) in entries.iter().enumerate() {
                if entry.run > 0 && (entry.id..entry.id + u64::from(entry.run)).contains(&id) {
                    expected = Found::Tile(entry.section());
                }
                let until = entries.get(at + 1).map_or(1000, |next| next.id);
                if entry.run == 0 && (entry.id..until).contains(&id) {
                    expected = Found::Leaf(Leaf { section: entry.section(), from: entry.id, until });
                }
            }
            prop_assert_eq!(directory.find(id), expected);
        }
    }

    #[test]
    fn any_bytes_are_a_directory_that_holds_together_or_none(bytes: Vec<u8>) {
        if let Ok(directory) = Directory::parse(&bytes, &SPAN) {
            let again = Directory::parse(&Directory::write(directory.entries()), &SPAN);
            prop_assert_eq!(again, Ok(directory));
        }
    }
}
