//! The circuit breaker: an upstream that keeps failing is left alone for a while, then tried with one request.
//!
//! Pure: time is passed in.

use std::time::{Duration, Instant};

/// The window is counted in this many parts.
const PARTS: usize = 10;
/// A rate over fewer answers says nothing.
const ANSWERS_MIN: u32 = 20;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Limits {
    /// Failures in a row.
    pub(crate) failures: u64,
    /// Failures over answers within the window.
    pub(crate) error_rate: f64,
    pub(crate) window: Duration,
    /// How long it stays open.
    pub(crate) open: Duration,
}

#[derive(Debug)]
pub(crate) struct Breaker {
    state: State,
    in_a_row: u64,
    /// Answers and failures of each part of the window, and which part of time it was.
    parts: [(u64, u32, u32); PARTS],
    begun: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed,
    Open {
        until: Instant,
    },
    /// One request is out to see how things are.
    HalfOpen,
}

/// How a request may go ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admitted {
    Normally,
    /// It is the one that finds out.
    AsProbe,
}

impl Breaker {
    pub(crate) fn new(now: Instant) -> Breaker {
        Breaker { state: State::Closed, in_a_row: 0, parts: [(0, 0, 0); PARTS], begun: now }
    }

    /// 0 closed, 1 half-open, 2 open.
    pub(crate) fn level(&self) -> u8 {
        match self.state {
            State::Closed => 0,
            State::HalfOpen => 1,
            State::Open { .. } => 2,
        }
    }

    /// Whether a request may go to the upstream; if not, how long it will take.
    pub(crate) fn admit(&mut self, now: Instant) -> Result<Admitted, Duration> {
        match self.state {
            State::Closed => Ok(Admitted::Normally),
            State::Open { until } if now < until => Err(until - now),
            State::Open { .. } => {
                self.state = State::HalfOpen;
                Ok(Admitted::AsProbe)
            }
            State::HalfOpen => Err(Duration::from_secs(1)),
        }
    }

    /// Notes how a request went. A probe that was given up is a failure: nobody found out.
    pub(crate) fn record(&mut self, admitted: Admitted, good: bool, limits: Limits, now: Instant) {
        if admitted == Admitted::AsProbe {
            if good {
                *self = Breaker::new(now);
            } else {
                self.state = State::Open { until: now + limits.open };
            }
            return;
        }
        self.in_a_row = if good { 0 } else { self.in_a_row + 1 };
        let (answers, failures) = self.count(good, limits.window, now);
        let often = answers >= ANSWERS_MIN && f64::from(failures) >= f64::from(answers) * limits.error_rate;
        if self.state == State::Closed && (self.in_a_row >= limits.failures || (often && !good)) {
            self.state = State::Open { until: now + limits.open };
        }
    }

    /// Adds to the window and sums it up.
    fn count(&mut self, good: bool, window: Duration, now: Instant) -> (u32, u32) {
        let part = (window / PARTS as u32).max(Duration::from_millis(1)).as_millis();
        let number = u64::try_from(now.duration_since(self.begun).as_millis() / part).unwrap_or(u64::MAX);
        let slot = &mut self.parts[usize::try_from(number % PARTS as u64).unwrap_or(0)];
        if slot.0 != number {
            *slot = (number, 0, 0);
        }
        slot.1 += 1;
        slot.2 += u32::from(!good);
        let recent = self.parts.iter().filter(|part| number - part.0.min(number) < PARTS as u64);
        recent.fold((0, 0), |sum, part| (sum.0 + part.1, sum.1 + part.2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        failures: 5,
        error_rate: 0.5,
        window: Duration::from_secs(10),
        open: Duration::from_secs(5),
    };

    fn go(breaker: &mut Breaker, good: bool, now: Instant) -> Result<Admitted, Duration> {
        let admitted = breaker.admit(now)?;
        breaker.record(admitted, good, LIMITS, now);
        Ok(admitted)
    }

    #[test]
    fn failures_in_a_row_open_it_and_a_probe_closes_it() {
        let start = Instant::now();
        let mut breaker = Breaker::new(start);
        for _ in 0..5 {
            assert_eq!(go(&mut breaker, false, start), Ok(Admitted::Normally));
        }
        assert_eq!(go(&mut breaker, true, start), Err(Duration::from_secs(5)));
        let later = start + Duration::from_secs(5);
        assert_eq!(go(&mut breaker, false, later), Ok(Admitted::AsProbe), "still ill");
        assert_eq!(breaker.level(), 2);
        let later = later + Duration::from_secs(5);
        assert_eq!(breaker.admit(later), Ok(Admitted::AsProbe));
        assert!(breaker.admit(later).is_err(), "one at a time");
        breaker.record(Admitted::AsProbe, true, LIMITS, later);
        assert_eq!((breaker.level(), go(&mut breaker, true, later)), (0, Ok(Admitted::Normally)));
    }

    #[test]
    fn a_high_rate_opens_it_though_some_succeed_and_old_failures_are_forgotten() {
        let start = Instant::now();
        let mut breaker = Breaker::new(start);
        let mut now = start;
        for n in 0..18 {
            now += Duration::from_millis(10);
            go(&mut breaker, n % 2 == 0, now).unwrap();
        }
        assert_eq!(breaker.level(), 0, "too few to say");
        now += Duration::from_secs(11);
        for _ in 0..30 {
            go(&mut breaker, true, now).unwrap();
        }
        go(&mut breaker, false, now).unwrap();
        assert_eq!(breaker.level(), 0, "the old ones do not count");
        for n in 0..200 {
            now += Duration::from_millis(10);
            if go(&mut breaker, n % 3 == 0, now).is_err() {
                return;
            }
        }
        panic!("two failures of three did not open it");
    }
}
