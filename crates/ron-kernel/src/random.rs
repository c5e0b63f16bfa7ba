//! Randomness for jitter and identifiers. Nothing here is a secret; keys come from the operating system.

use std::cell::Cell;

thread_local! {
    static STATE: Cell<u64> = Cell::new(seed());
}

fn seed() -> u64 {
    let mut bytes = [0; 8];
    // Without entropy the jitter is merely predictable.
    let _ = getrandom::fill(&mut bytes);
    u64::from_ne_bytes(bytes)
}

/// Starts this thread's sequence anew, so that a test can be replayed.
pub fn reseed(seed: u64) {
    STATE.set(seed);
}

/// A fast generator (`SplitMix64`), one per thread.
pub fn u64() -> u64 {
    STATE.with(|state| {
        let next = state.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        state.set(next);
        let mixed = (next ^ (next >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    })
}

/// Uniform in `0.0..1.0`.
pub fn unit() -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit a double exactly")]
    let fraction = (u64() >> 11) as f64 / (1u64 << 53) as f64;
    fraction
}
