//! The primitives every hand-over between tasks stands on: a bounded [`Queue`] and counted [`Permits`].
//!
//! They know no runtime and no socket, so the `models` crate compiles these very files against loom.

mod permit;
mod queue;

pub use permit::{Permit, Permits};
pub use queue::{Busy, Limits, Overflow, Pop, PushError, Queue};

/// What the primitives take from the platform; the loom build has its own copy of this module.
mod platform {
    pub(super) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
    pub(super) use std::sync::{Mutex, MutexGuard};
}

#[cfg(test)]
mod tests;
