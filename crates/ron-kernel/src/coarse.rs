//! The time to a few milliseconds: a tenth of what the exact time costs, for what is noted with every request.

use rustix::time::{ClockId, clock_gettime};

/// Milliseconds since the system started.
pub(crate) fn millis() -> u64 {
    of(ClockId::MonotonicCoarse)
}

/// Milliseconds of Unix time.
pub(crate) fn unix_millis() -> u64 {
    of(ClockId::RealtimeCoarse)
}

fn of(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    u64::try_from(now.tv_sec * 1000 + now.tv_nsec / 1_000_000).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

    #[test]
    fn it_keeps_up_with_the_exact_time() {
        const GRAIN: u128 = 20;
        let (whole, before, within) = (Instant::now(), millis(), Instant::now());
        std::thread::sleep(Duration::from_millis(50));
        let (within, after, whole) = (within.elapsed(), millis(), whole.elapsed());
        let passed = u128::from(after - before);
        assert!(passed + GRAIN >= within.as_millis() && passed <= whole.as_millis() + GRAIN, "{passed} ms");
        let exact = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
        let (before, now, after) = (exact(), u128::from(unix_millis()), exact());
        assert!((before - GRAIN..=after).contains(&now), "{now} is not from {before} to {after}");
    }
}
