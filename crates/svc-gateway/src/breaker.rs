//! The circuit breaker: an upstream that keeps failing is left alone for a while, then probed in the background, then
//! tried with one request.
//!
//! Pure: time is passed in.

use std::time::{Duration, Instant};

/// The window is counted in this many parts.
const PARTS: usize = 10;
/// A rate over fewer answers says nothing.
const ANSWERS_MIN: u32 = 20;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Limits {
    /// Failures in a row; with 0 it never opens.
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
    /// A probe is out, in the background; requests are still refused.
    Probing,
    /// The probe found somebody: one request at a time is let through to see.
    Trial {
        busy: bool,
    },
}

/// How a request may go ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admitted {
    Normally,
    /// It is the one that finds out.
    OnTrial,
}

/// What a request is told while another one finds out.
const TRIAL_WAIT: Duration = Duration::from_secs(1);

impl Breaker {
    pub(crate) fn new(now: Instant) -> Breaker {
        Breaker { state: State::Closed, in_a_row: 0, parts: [(0, 0, 0); PARTS], begun: now }
    }

    /// 0 closed, 1 half-open, 2 open.
    pub(crate) fn level(&self) -> u8 {
        match self.state {
            State::Closed => 0,
            State::Probing | State::Trial { .. } => 1,
            State::Open { .. } => 2,
        }
    }

    /// Whether a request may go to the upstream; if not, how long it will take.
    pub(crate) fn admit(&mut self, now: Instant) -> Result<Admitted, Duration> {
        match self.state {
            State::Closed => Ok(Admitted::Normally),
            State::Open { until } => Err(until.saturating_duration_since(now)),
            State::Trial { busy: false } => {
                self.state = State::Trial { busy: true };
                Ok(Admitted::OnTrial)
            }
            State::Probing | State::Trial { busy: true } => Err(TRIAL_WAIT),
        }
    }

    /// Whether it is time for a probe; if so, one must be made, and [`Breaker::probed`] told.
    pub(crate) fn begin_probe(&mut self, now: Instant) -> bool {
        let due = matches!(self.state, State::Open { until } if until <= now);
        if due {
            self.state = State::Probing;
        }
        due
    }

    /// Notes what a probe found.
    pub(crate) fn probed(&mut self, good: bool, limits: Limits, now: Instant) {
        if self.state == State::Probing {
            self.state =
                if good { State::Trial { busy: false } } else { State::Open { until: now + limits.open } };
        }
    }

    /// Notes how a request went; `None` if nothing can be said, because the client left.
    pub(crate) fn record(&mut self, admitted: Admitted, good: Option<bool>, limits: Limits, now: Instant) {
        match (admitted, good) {
            (Admitted::OnTrial, Some(true)) => *self = Breaker::new(now),
            (Admitted::OnTrial, Some(false)) => self.state = State::Open { until: now + limits.open },
            (Admitted::OnTrial, None) => self.state = State::Trial { busy: false },
            (Admitted::Normally, None) => {}
            (Admitted::Normally, Some(good)) => {
                self.in_a_row = if good { 0 } else { self.in_a_row + 1 };
                let (answers, failures) = self.count(good, limits.window, now);
                let often =
                    answers >= ANSWERS_MIN && f64::from(failures) >= f64::from(answers) * limits.error_rate;
                let bad = self.in_a_row >= limits.failures || (often && !good);
                if self.state == State::Closed && limits.failures > 0 && bad {
                    self.state = State::Open { until: now + limits.open };
                }
            }
        }
    }

    /// What was counted so far says nothing of the upstream as it is from now on.
    pub(crate) fn forget(&mut self, now: Instant) {
        if self.state == State::Closed {
            *self = Breaker::new(now);
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
        breaker.record(admitted, Some(good), LIMITS, now);
        Ok(admitted)
    }

    #[test]
    fn one_that_is_turned_off_never_opens() {
        let (mut breaker, now) = (Breaker::new(Instant::now()), Instant::now());
        for _ in 0..1000 {
            breaker.record(Admitted::Normally, Some(false), Limits { failures: 0, ..LIMITS }, now);
        }
        assert_eq!((breaker.level(), breaker.admit(now)), (0, Ok(Admitted::Normally)));
    }

    #[test]
    fn failures_in_a_row_open_it_and_a_probe_and_a_trial_close_it() {
        let start = Instant::now();
        let mut breaker = Breaker::new(start);
        for _ in 0..5 {
            assert_eq!(go(&mut breaker, false, start), Ok(Admitted::Normally));
        }
        assert_eq!(go(&mut breaker, true, start), Err(Duration::from_secs(5)));
        assert!(!breaker.begin_probe(start), "too early");
        let mut later = start + Duration::from_secs(5);
        assert!(breaker.admit(later).is_err(), "no request is sent where nobody may be");
        assert!(breaker.begin_probe(later) && !breaker.begin_probe(later), "one probe at a time");
        assert_eq!((breaker.level(), breaker.admit(later)), (1, Err(TRIAL_WAIT)));
        breaker.probed(false, LIMITS, later);
        assert_eq!(breaker.level(), 2, "still gone");
        later += Duration::from_secs(5);
        assert!(breaker.begin_probe(later));
        breaker.probed(true, LIMITS, later);
        assert_eq!(go(&mut breaker, false, later), Ok(Admitted::OnTrial), "there, but still ill");
        assert_eq!(breaker.level(), 2);
        later += Duration::from_secs(5);
        assert!(breaker.begin_probe(later));
        breaker.probed(true, LIMITS, later);
        assert_eq!(breaker.admit(later), Ok(Admitted::OnTrial));
        assert_eq!(breaker.admit(later), Err(TRIAL_WAIT), "one at a time");
        breaker.record(Admitted::OnTrial, None, LIMITS, later);
        assert_eq!(breaker.admit(later), Ok(Admitted::OnTrial), "a client that left found nothing out");
        breaker.record(Admitted::OnTrial, Some(true), LIMITS, later);
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
