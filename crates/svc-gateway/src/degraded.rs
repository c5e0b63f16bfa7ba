//! Degraded mode: when the queue stays nearly full, writes are shed so that reads go on.
//!
//! It takes a while above the upper mark to begin and a while below the lower one to end, so it does not flap. The
//! latter is short enough for writes to be back within a second of the load's end.

use std::time::{Duration, Instant};

/// Fill of the queue at which trouble begins, and below which it is over.
const UPPER: f64 = 0.9;
const LOWER: f64 = 0.5;
/// How long the fill must stay above the upper mark, and below the lower one.
const BEGIN: Duration = Duration::from_secs(1);
const END: Duration = Duration::from_millis(500);

/// Whether writes are shed, as a function of fill and time.
#[derive(Debug, Default)]
pub(crate) struct Hysteresis {
    on: bool,
    /// Since when the fill has been beyond the mark that would change the state.
    since: Option<Instant>,
}

impl Hysteresis {
    /// Notes the fill, from 0 to 1; returns the new state if it changes.
    pub(crate) fn note(&mut self, fill: f64, now: Instant) -> Option<bool> {
        let beyond = if self.on { fill < LOWER } else { fill >= UPPER };
        if !beyond {
            self.since = None;
            return None;
        }
        let since = *self.since.get_or_insert(now);
        if now.duration_since(since) < if self.on { END } else { BEGIN } {
            return None;
        }
        self.since = None;
        self.on = !self.on;
        Some(self.on)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_takes_a_while_beyond_a_mark_and_does_not_flap() {
        let start = Instant::now();
        let mut state = Hysteresis::default();
        let mut changes = Vec::new();
        let fills = [
            (0, 1.0),
            (500, 1.0),
            (900, 0.7),
            (1000, 0.95),
            (1900, 1.0),
            (2000, 1.0),
            (2500, 0.6),
            (4000, 0.6),
            (5000, 0.4),
            (5400, 0.55),
            (6500, 0.1),
            (6900, 0.4),
            (7000, 0.0),
            (9000, 0.0),
        ];
        for (at, fill) in fills {
            if let Some(on) = state.note(fill, start + Duration::from_millis(at)) {
                changes.push((at, on));
            }
        }
        assert_eq!(changes, [(2000, true), (7000, false)]);
    }
}
