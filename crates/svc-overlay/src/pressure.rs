//! When the overlay says that it is under pressure, and when that is over. Pure: fill and time are passed in.

use std::time::Duration;

/// How long a state must last before it counts.
const LASTS: Duration = Duration::from_secs(1);

/// How full things are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fill {
    /// Frames in the ingress queue, and its capacity.
    pub(crate) ingress: (usize, usize),
    /// Peers whose egress is full, and all of them.
    pub(crate) peers: (usize, usize),
}

impl Fill {
    fn is_high(self) -> bool {
        self.ingress.0 * 10 > self.ingress.1 * 9
    }

    fn are_most_full(self) -> bool {
        self.peers.0 * 2 > self.peers.1
    }

    fn is_low(self) -> bool {
        self.ingress.0 * 2 < self.ingress.1 && (self.peers.0 == 0 || self.peers.0 * 2 < self.peers.1)
    }
}

/// Two thresholds and two waits, so that readiness does not flutter.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pressure {
    pressed: bool,
    high_since: Option<Duration>,
    low_since: Option<Duration>,
}

impl Pressure {
    /// Judges what was measured; says whether there is pressure now.
    pub(crate) fn judge(&mut self, fill: Fill, now: Duration) -> bool {
        let since = |holds: bool, since: Option<Duration>| holds.then(|| since.unwrap_or(now));
        self.high_since = since(fill.is_high(), self.high_since);
        self.low_since = since(fill.is_low(), self.low_since);
        let lasted = |since: Option<Duration>| since.is_some_and(|since| now - since >= LASTS);
        self.pressed = if self.pressed {
            !lasted(self.low_since)
        } else {
            fill.are_most_full() || lasted(self.high_since)
        };
        self.pressed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fill(ingress: usize, full: usize, peers: usize) -> Fill {
        Fill { ingress: (ingress, 512), peers: (full, peers) }
    }

    fn at(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn a_full_ingress_counts_after_a_second_and_is_over_a_second_after_it_is_half_empty() {
        let mut pressure = Pressure::default();
        assert!(!pressure.judge(fill(500, 0, 3), at(0.0)));
        assert!(!pressure.judge(fill(500, 0, 3), at(0.9)));
        assert!(!pressure.judge(fill(400, 0, 3), at(0.95)));
        assert!(!pressure.judge(fill(500, 0, 3), at(1.0)));
        assert!(pressure.judge(fill(500, 0, 3), at(2.0)));
        assert!(pressure.judge(fill(300, 0, 3), at(9.0)));
        assert!(pressure.judge(fill(100, 0, 3), at(10.0)));
        assert!(!pressure.judge(fill(100, 0, 3), at(11.0)));
    }

    #[test]
    fn more_than_half_of_the_peers_full_counts_at_once() {
        let mut pressure = Pressure::default();
        assert!(!pressure.judge(fill(0, 1, 2), at(0.0)));
        assert!(pressure.judge(fill(0, 2, 3), at(0.1)));
        assert!(pressure.judge(fill(0, 0, 3), at(0.2)));
        assert!(!pressure.judge(fill(0, 0, 3), at(1.2)));
    }

    proptest! {
        #[test]
        fn it_never_ends_while_something_is_more_than_half_full(
            steps in proptest::collection::vec((0usize..=512, 0usize..=4, 0u64..2000), 1..100)
        ) {
            let (mut pressure, mut now, mut pressed) = (Pressure::default(), Duration::ZERO, false);
            for (ingress, full, wait) in steps {
                now += Duration::from_millis(wait);
                let fill = fill(ingress, full, 4);
                let after = pressure.judge(fill, now);
                prop_assert!(!pressed || after || fill.is_low());
                prop_assert!(after || !fill.are_most_full());
                pressed = after;
            }
        }
    }
}
