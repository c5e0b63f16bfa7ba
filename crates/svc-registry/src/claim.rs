//! Settles whether a job was begun or its caller gave up first, so that "it was not done" is never a guess.
//!
//! It knows no runtime, so the `models` crate compiles this file against loom.

use super::platform::{AtomicUsize, Ordering};

const WAITING: usize = 0;
const TAKEN: usize = 1;
const GIVEN_UP: usize = 2;

/// See the module.
#[derive(Debug, Default)]
pub struct Claim(AtomicUsize);

impl Claim {
    /// The Committer begins; false if the caller has given up.
    pub fn take(&self) -> bool {
        self.0.compare_exchange(WAITING, TAKEN, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The caller gives up; false if the Committer has begun, so that the outcome is open.
    pub fn give_up(&self) -> bool {
        self.0.compare_exchange(WAITING, GIVEN_UP, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}
