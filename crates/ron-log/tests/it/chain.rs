//! The chain: genesis, records, conflicts, and undoing the last change.

use crate::fixture::{checked, commit, delete, payload, propose, put, roots};
use ron_log::state::supersede;
use ron_log::{B3, CommitError, ConflictRule, Entry, Key, Proposal, State, TrustRoots};

const NOW: u64 = 1_000_000;

fn item<'a>(state: &'a State, kind: &str, id: &str) -> Option<&'a str> {
    state.item(&Key::new(kind, id).expect("a key")).map(|(_, body)| &**body)
}

#[test]
fn the_genesis_is_the_same_however_the_roots_are_formatted() {
    let canonical = roots().canonical();
    let spaced = canonical.replace(",\"", ",\n  \"");
    let again = TrustRoots::parse(spaced.as_bytes()).expect("roots");
    assert_eq!(again, roots());
    assert_eq!(again.b3(), B3::of(canonical.as_bytes()));
    let (entry, proposal) = again.genesis();
    assert_eq!(entry, roots().genesis().0);
    assert_eq!(entry.record().prev.to_string(), format!("b3:{}", "0".repeat(64)));
    let text = std::str::from_utf8(proposal.bytes()).expect("text");
    assert!(
        text.starts_with(r#"{"base_version":0,"expires_at":0,"nonce":"00000000000000000000000000000000""#)
    );
    assert_eq!(State::genesis(&roots()).head().hash, entry.hash());
    assert!(TrustRoots::parse(canonical.replace("registry.example/log", "a b").as_bytes()).is_err());
}

#[test]
fn a_commit_extends_the_chain_and_reads_back() {
    let mut state = State::genesis(&roots());
    let before = state.head();
    let (entry, proposal) = commit(&mut state, vec![put("x-note", "a", r#"{"n":1}"#)], &[1, 2]);
    assert_eq!((entry.record().version, entry.record().prev), (1, before.hash));
    assert_eq!(entry.record().payload_bytes, proposal.bytes().len() as u64);
    assert_eq!(Entry::parse(entry.bytes().to_vec()).expect("canonical"), entry);
    assert_eq!(Proposal::parse_canonical(proposal.bytes().to_vec()).expect("canonical"), proposal);
    assert_eq!(item(&state, "x-note", "a"), Some(r#"{"n":1}"#));
    let spaced = String::from_utf8(entry.bytes().to_vec()).expect("text").replace(",", ", ");
    assert!(Entry::parse(spaced.into_bytes()).is_err(), "a record has one form");
    let (second, _) = commit(&mut state, vec![delete("x-note", "a")], &[1, 2, 3]);
    assert_eq!(second.record().prev, entry.hash());
    assert_eq!(second.record().approvals.len(), 3, "more than needed are all recorded");
    assert_eq!(item(&state, "x-note", "a"), None);
    assert!(state.apply(&entry, proposal.payload()).is_err(), "an entry fits one place");
}

#[test]
fn what_changed_after_the_base_is_a_mismatch() {
    let mut state = State::genesis(&roots());
    let stale = propose(&state, vec![put("x-note", "a", "1")]);
    let untouched = propose(&state, vec![put("x-note", "b", "1")]);
    let ahead = Proposal::new({
        let mut payload = payload(&state, vec![put("x-note", "c", "1")]);
        payload.base_version = 9;
        payload
    })
    .expect("a payload");
    commit(&mut state, vec![put("x-note", "a", "2")], &[1, 2]);
    commit(&mut state, vec![delete("x-note", "a")], &[1, 2]);
    let try_commit = |proposal: &Proposal, rule| {
        state.commit(proposal, &checked(&state, proposal, &[1, 2]), NOW, rule).map(|_| ())
    };
    assert_eq!(try_commit(&stale, ConflictRule::Touched), Err(CommitError::ChainMismatch));
    assert_eq!(try_commit(&untouched, ConflictRule::Touched), Ok(()));
    assert_eq!(try_commit(&untouched, ConflictRule::Strict), Err(CommitError::ChainMismatch));
    assert_eq!(try_commit(&ahead, ConflictRule::Touched), Err(CommitError::ChainMismatch));
    let late =
        state.commit(&untouched, &checked(&state, &untouched, &[1, 2]), 2_000_001, ConflictRule::Touched);
    assert_eq!(late, Err(CommitError::Expired));
}

#[test]
fn superseding_undoes_the_last_entry_by_another() {
    let mut state = State::genesis(&roots());
    assert!(supersede(&state, &vec![], [1; 16], 9).is_none(), "nothing precedes the genesis");
    commit(&mut state, vec![put("x-note", "a", "1")], &[1, 2]);
    let proposal = propose(&state, vec![put("x-note", "a", "2"), put("x-note", "b", "3")]);
    let approvals = checked(&state, &proposal, &[2, 3]);
    let entry = state.commit(&proposal, &approvals, NOW, ConflictRule::Strict).expect("a commit");
    let before = state.apply(&entry, proposal.payload()).expect("the next");
    let undo = supersede(&state, &before, [1; 16], 2_000_000).expect("an entry").expect("a payload");
    let approvals = checked(&state, &undo, &[1, 3]);
    let entry = state.commit(&undo, &approvals, NOW, ConflictRule::Strict).expect("a commit");
    state.apply(&entry, undo.payload()).expect("the next");
    assert_eq!((item(&state, "x-note", "a"), item(&state, "x-note", "b")), (Some("1"), None));
    assert_eq!(state.head().version, 3);
}

#[test]
fn a_payload_is_refused_for_what_its_schema_says() {
    let good = r#"{"schema":"ron.registry/1","base_version":0,"signers_version":0,"nonce":"00112233445566778899aabbccddeeff","ops":[OPS],"note":"n","expires_at":5}"#;
    let route = r#"{"op":"put","kind":"route","id":"r","body":{"path":"/a","upstream":"u","cost":2}}"#;
    let with = |ops: &str| Proposal::parse(good.replace("OPS", ops).as_bytes());
    with(route).expect("a route");
    with(r#"{"op":"put","kind":"upstream","id":"u","body":{"name":"u","servers":["http://a:1"],"retry":{"budget":0.1}}}"#)
        .expect("an upstream");
    for (bad, why) in [
        ("", "ops: must be 1 to 1024 operations"),
        (&*format!("{route},{route}"), "ops: must name an item once"),
        (r#"{"op":"put","kind":"route","id":"r","body":{"path":"/a"}}"#, "upstream: is missing"),
        (&route.replace("2}", "\"2\"}"), "cost: must be a whole number"),
        (&route.replace("2}", "2.0}"), "cost: must be a whole number"),
        (&route.replace("route", "rout"), "kind: must be a known kind or begin with `x-`"),
        (&route.replace("put", "patch"), "op: must be `put` or `delete`"),
        (r#"{"op":"put","kind":"x-a","id":"r"}"#, "body: is missing"),
        (r#"{"op":"delete","kind":"x-a","id":"r","body":1}"#, "op: has a member that is not known"),
        (r#"{"op":"delete","kind":"signers","id":"main"}"#, "op: must not delete the signer set"),
        (r#"{"op":"put","kind":"signers","id":"other","body":{}}"#, "id: must be `main` for the signer set"),
        (r#"{"op":"put","kind":"peer","id":"p","body":{"address":1}}"#, "address: must be a string"),
        (r#"{"op":"delete","kind":"x-a","id":""}"#, "id: must be 1 to 256 bytes without control characters"),
    ] {
        let which = if why.starts_with("ops: ") { "" } else { "ops[0]: " };
        assert_eq!(with(bad).expect_err(bad).to_string(), format!("{which}{why}"));
    }
    let route = good.replace("OPS", route);
    for (from, to) in [
        ("\"base_version\":0", "\"base_version\":0.0"),
        ("\"base_version\":0", "\"base_version\":-1"),
        ("\"base_version\":0", "\"base_version\":9007199254740992"),
        ("00112233445566778899aabbccddeeff", "00112233445566778899AABBCCDDEEFF"),
        ("ron.registry/1", "ron.registry/2"),
        ("\"note\":\"n\"", "\"note\":\"n\",\"note\":\"m\""),
        ("\"note\":\"n\"", "\"note\":\"n\",\"more\":1"),
    ] {
        assert!(route.contains(from) && Proposal::parse(route.replace(from, to).as_bytes()).is_err(), "{to}");
    }
    let long = route.replace("\"n\"", &format!("\"{}\"", "n".repeat(ron_log::payload::PAYLOAD_MAX)));
    assert_eq!(Proposal::parse(long.as_bytes()), Err(ron_log::payload::PayloadError::TooLarge));
}

#[test]
fn payloads_hashed_together_have_the_hashes_that_they_have_alone() {
    let state = State::genesis(&roots());
    let bodies =
        [10, 700, 800, 900, 1000, 1790, 1800, 1900, 5000].map(|len| format!("\"{}\"", "x".repeat(len)));
    let proposals: Vec<Proposal> =
        bodies.iter().cycle().take(40).map(|body| propose(&state, vec![put("x-note", "a", body)])).collect();
    assert_eq!(proposals[0].b3(), B3::of(proposals[0].bytes()), "one of them has it before");
    Proposal::hash_all(proposals.iter());
    assert!(proposals.iter().all(|proposal| proposal.b3() == B3::of(proposal.bytes())));
}
