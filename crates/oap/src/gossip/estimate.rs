//! How long something usually takes, and how long to wait before it is late.

use std::time::Duration;

/// Mean and mean deviation, smoothed as round trips are in TCP.
#[derive(Clone, Copy, Debug)]
pub(super) struct Estimate {
    mean: Duration,
    deviation: Duration,
    any: bool,
}

impl Estimate {
    /// An estimate before the first sample.
    pub(super) fn guess(mean: Duration) -> Estimate {
        Estimate { mean, deviation: mean / 2, any: false }
    }

    pub(super) fn add(&mut self, sample: Duration) {
        if self.any {
            let off = self.mean.abs_diff(sample);
            self.deviation = (self.deviation * 3 + off) / 4;
            self.mean = (self.mean * 7 + sample) / 8;
        } else {
            *self = Estimate { mean: sample, deviation: sample / 2, any: true };
        }
    }

    pub(super) fn mean(&self) -> Duration {
        self.mean
    }

    /// When it is late.
    pub(super) fn limit(&self) -> Duration {
        self.mean + self.deviation * 4
    }
}
