//! The quick readers beside the general ones: what they take is what those take, and read alike.

use crate::fixture::{approve, hybrid_sig, log_of};
use proptest::prelude::*;
use ron_log::fuzzing::{payload, record, with_approvals};
use ron_log::json::NUMBER_MAX;
use ron_log::signers::SIGNERS_MAX;
use ron_log::{Approval, B3, EntryRecord, Key, Op, Payload};

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..10u64, 0..=NUMBER_MAX, Just(NUMBER_MAX), Just(NUMBER_MAX + 1)]
}

fn records() -> impl Strategy<Value = EntryRecord> {
    let approvals = prop::collection::btree_set(1u8..9, 0..4);
    (prop::array::uniform4(number()), approvals, any::<[u8; 32]>()).prop_map(|(numbers, seeds, hash)| {
        let [version, payload_bytes, signers_version, committed_at] = numbers;
        EntryRecord {
            version,
            prev: B3(hash),
            payload_b3: B3::of(&hash),
            payload_bytes,
            signers_version,
            approvals: seeds.into_iter().map(|seed| approve(seed, B3(hash))).collect(),
            committed_at,
        }
    })
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let body = prop_oneof![
        Just(None),
        Just(Some(r#"{"path":"/","upstream":"a"}"#.to_owned())),
        Just(Some("[1.5,null,{\"é\":\"\\n\"}]".to_owned())),
        // Of these depths the last is too deep.
        (28..=30usize).prop_map(|depth| Some("[".repeat(depth) + &"]".repeat(depth))),
    ];
    let kind = prop::sample::select(vec!["route", "x-note"]);
    let id = prop_oneof!["[a-c]", "[\"\\\\/é]{1,3}"];
    let op =
        (kind, id, body).prop_map(|(kind, id, body)| Op { key: Key::new(kind, &id).expect("a key"), body });
    prop::collection::vec(op, 0..4)
}

fn payloads() -> impl Strategy<Value = Payload> {
    (prop::array::uniform3(number()), any::<[u8; 16]>(), ops(), ".{0,8}").prop_map(
        |([base_version, signers_version, expires_at], nonce, ops, note)| Payload {
            base_version,
            signers_version,
            nonce,
            ops,
            note,
            expires_at,
        },
    )
}

/// Bytes changed, added and taken away, with a liking for what JSON is made of.
fn edited(mut bytes: Vec<u8>, edits: &[(prop::sample::Index, u8, prop::sample::Index, bool)]) -> Vec<u8> {
    const LIKELY: &[u8] = b"{}[],:\"\\0123456789-.eE \nabcdefu+/=\x00\x7f\xc3\xff";
    for (at, what, byte, likely) in edits {
        let at = at.index(bytes.len() + 1);
        let byte = if *likely { LIKELY[byte.index(LIKELY.len())] } else { byte.index(256) as u8 };
        match what % 3 {
            0 if at < bytes.len() => bytes[at] = byte,
            1 if at < bytes.len() => drop(bytes.remove(at)),
            _ => bytes.insert(at, byte),
        }
    }
    bytes
}

fn edits() -> impl Strategy<Value = Vec<(prop::sample::Index, u8, prop::sample::Index, bool)>> {
    prop::collection::vec(any::<(prop::sample::Index, u8, prop::sample::Index, bool)>(), 0..3)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_record_reads_alike_by_both_readers(made in records(), edits in edits()) {
        let bytes = edited(made.canonical().into_bytes(), &edits);
        let (quick, general) = record(&bytes);
        // With Ed25519 approvals alone there is nothing that only the general reader knows.
        prop_assert_eq!(quick, general.ok(), "{}", String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn a_payload_reads_alike_by_both_readers(made in payloads(), edits in edits()) {
        let bytes = edited(made.canonical().into_bytes(), &edits);
        let (quick, general) = payload(&bytes);
        prop_assert_eq!(quick, general.ok(), "{}", String::from_utf8_lossy(&bytes));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn what_is_sent_with_approvals_reads_alike_by_both_readers(
        made in payloads(),
        seeds in prop_oneof![prop::collection::vec(1u8..9, 0..4), Just(vec![1; SIGNERS_MAX + 1])],
        edits in edits(),
    ) {
        let payload = made.canonical();
        let approvals: Vec<_> =
            seeds.iter().map(|seed| approve(*seed, B3::of(payload.as_bytes())).canonical()).collect();
        let sent = format!(r#"{{"payload":{payload},"approvals":[{}]}}"#, approvals.join(","));
        let bytes = edited(sent.into_bytes(), &edits);
        let (quick, general) = with_approvals(&bytes);
        // Without an edit there is nothing that only the general reader knows.
        if quick.is_some() || edits.is_empty() {
            prop_assert_eq!(quick, general, "{}", String::from_utf8_lossy(&bytes));
        }
    }
}

#[test]
fn the_entries_of_a_log_are_read_quickly() {
    for (entry, proposal) in log_of(12).0.changes {
        assert_eq!(record(entry.bytes()).0.as_ref(), Some(entry.record()));
        assert_eq!(payload(proposal.bytes()).0.as_ref(), Some(proposal.payload()));
    }
}

#[test]
fn other_approvals_are_left_to_the_general_reader() {
    let (entry, _) = log_of(1).0.changes.remove(1);
    let b3 = entry.record().payload_b3;
    let hybrid = Approval { sig: hybrid_sig(9, b3), ..approve(9, b3) };
    let made = EntryRecord { approvals: vec![hybrid], ..entry.record().clone() };
    assert_eq!(record(made.canonical().as_bytes()), (None, Ok(made)));
}
