//! The kernel's primitives, compiled against loom: not a copy but the production files themselves.
//!
//! The models are in `tests/`; loom runs each through every interleaving up to its bound.

#[path = "../../crates/ron-kernel/src/sync/permit.rs"]
pub mod permit;
#[path = "../../crates/ron-kernel/src/sync/queue.rs"]
pub mod queue;

/// What `ron_kernel::sync` takes from the standard library, taken from loom.
mod platform {
    pub(super) use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
    pub(super) use loom::sync::{Mutex, MutexGuard};
}
