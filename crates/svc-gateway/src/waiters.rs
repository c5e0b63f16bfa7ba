//! How many wait, so that who frees a permit knows whether to wake the scheduler.
//!
//! Between "a permit is free" and "somebody waits" a wake-up could be lost: who frees looks for waiters after giving
//! the permit back, who waits looks for a permit after it has been counted, and each could see the other's past. A
//! fence on both sides, in [`Waiters::publish`] and [`Waiters::any`], rules that out. It knows no runtime, so the
//! `models` crate compiles this file against loom.

use super::platform::{AtomicUsize, Ordering, fence};

#[derive(Debug, Default)]
pub struct Waiters(AtomicUsize);

impl Waiters {
    /// States how many wait; by whoever holds the queue's lock. Permits looked for after this are not from before.
    pub fn publish(&self, count: usize) {
        self.0.store(count, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    pub fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    /// Whether somebody waits, asked after a permit was given back.
    pub fn any(&self) -> bool {
        fence(Ordering::SeqCst);
        self.count() > 0
    }
}
