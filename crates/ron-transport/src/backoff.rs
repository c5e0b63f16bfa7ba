//! How long to wait before a node is dialled again. Pure: the random number is passed in.

use std::time::Duration;

/// The shortest wait; a peer that restarts is back within about this.
pub const MIN: Duration = Duration::from_millis(100);
/// The longest; a guess between a quick return and a network that is dialled for nothing.
pub const MAX: Duration = Duration::from_secs(5);

/// Full jitter under a ceiling that doubles with each failure.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// The wait after one more failure; `random` is uniform in 0..1.
    pub fn fail(&mut self, random: f64) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let ceiling = MIN.saturating_mul(1 << self.failures.min(16)).min(MAX);
        MIN + (ceiling - MIN).mul_f64(random.clamp(0.0, 1.0))
    }

    pub fn succeed(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn waits_grow_with_the_failures_and_stay_between_the_bounds(random in 0.0f64..1.0, failures in 1u32..80) {
            let mut backoff = Backoff::default();
            let mut ceiling = Duration::ZERO;
            for _ in 0..failures {
                let wait = backoff.fail(random);
                prop_assert!((MIN..=MAX).contains(&wait));
                let most = Backoff { failures: backoff.failures - 1 }.fail(1.0);
                prop_assert!(most >= ceiling && wait <= most);
                ceiling = most;
            }
            backoff.succeed();
            prop_assert!(backoff.fail(random) <= MIN * 2);
        }
    }
}
