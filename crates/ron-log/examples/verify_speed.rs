//! How fast a log is checked: `cargo run --release -p ron-log --example verify_speed [ENTRIES]`.

#![expect(clippy::print_stdout, reason = "a command that prints its measurements")]

use ed25519_dalek::SigningKey;
use ron_log::key::PublicKey;
use ron_log::{
    Approval, ConflictRule, Entry, Key, Op, Payload, Proposal, Role, Signatures, Signer, SignerSet, State,
    TrustRoots, Verifier,
};
use std::time::Duration;

fn main() {
    let count: u64 =
        std::env::args().nth(1).map_or(100_000, |text| text.parse().expect("a number of entries"));
    let keys = [1, 2, 3].map(|seed| SigningKey::from_bytes(&[seed; 32]));
    let signer = |(index, key): (usize, &SigningKey)| Signer {
        id: format!("signer-{index}"),
        keys: vec![PublicKey::Ed25519(key.verifying_key().into())],
        roles: vec![Role::Approve],
        not_after: None,
    };
    let signers = SignerSet::new(2, false, keys.iter().enumerate().map(signer).collect()).expect("a set");
    let roots = TrustRoots { log: "bench.example/log".into(), signers };
    let log = build(&roots, &keys, count);
    let bytes: usize = log.iter().map(|(entry, payload)| entry.bytes().len() + payload.bytes().len()).sum();
    println!("{count} entries of {} bytes with 2 approvals of 3", bytes as u64 / count);
    for (signatures, part, rounds) in
        [(Signatures::Trust, log.len(), 5), (Signatures::Check, log.len() / 20, 1)]
    {
        let mut rates: Vec<f64> = (0..rounds)
            .map(|_| {
                let mut verifier = Verifier::new(roots.clone(), None, signatures);
                let begun = cpu_time();
                log[..part]
                    .iter()
                    .for_each(|(entry, payload)| verifier.entry(entry.bytes(), payload.bytes()));
                let took = cpu_time() - begun;
                assert_eq!(verifier.finish(), []);
                part as f64 / took.as_secs_f64()
            })
            .collect();
        rates.sort_by(f64::total_cmp);
        let (median, best) = (rates[rounds / 2], rates[rounds - 1]);
        println!("{signatures:?} signatures: {median:.0} entries per second of one core (best {best:.0})");
    }
}

/// Time this thread has run, so that a busy machine does not count.
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts a thread's time");
    Duration::from_nanos(text.split(' ').next().and_then(|nanos| nanos.parse().ok()).expect("nanoseconds"))
}

fn build(roots: &TrustRoots, keys: &[SigningKey; 3], count: u64) -> Vec<(Entry, Proposal)> {
    let mut state = State::genesis(roots);
    let mut log = vec![roots.genesis()];
    for number in 0..count {
        let body =
            format!(r#"{{"cost":2,"hosts":["h{number}.example"],"path":"/a/{number}/*","upstream":"main"}}"#);
        let key = Key::new("route", &format!("r{}", number % 5000)).expect("a key");
        let proposal = Proposal::new(Payload {
            base_version: number,
            signers_version: 0,
            nonce: u128::from(number).to_be_bytes(),
            ops: vec![Op { key, body: Some(body) }],
            note: "change a route".into(),
            expires_at: 2_000_000_000_000,
        })
        .expect("a payload");
        let check = |(index, key): (usize, &SigningKey)| {
            Approval::sign(&format!("signer-{index}"), key, proposal.b3(), 1_700_000_000_000)
                .check(proposal.b3(), state.signers(), None)
                .expect("a good approval")
        };
        let approvals: Vec<_> = keys.iter().enumerate().take(2).map(check).collect();
        let entry =
            state.commit(&proposal, &approvals, 1_700_000_000_000, ConflictRule::Touched).expect("a commit");
        state.apply(&entry, proposal.payload()).expect("the next entry");
        log.push((entry, proposal));
    }
    log
}
