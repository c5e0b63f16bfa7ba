//! The registry: changes that a quorum has signed, kept in an append-only log that anyone can check.
//!
//! Start from [`Registry`]; then read `committer` and `core` for the life of a change, [`store`] for what is kept and
//! who may write it, `api` for HTTP, `checkpointor`, `witness`, `guard`, `retention` and `verifier` for what goes on
//! beside. Every format and check is `ron-log`'s; this crate adds storage, tasks and HTTP around it.

mod api;
pub mod cbor;
mod checkpointor;
mod checks;
pub mod claim;
mod committer;
pub mod config;
mod core;
#[cfg(test)]
mod fixture;
mod guard;
mod hand;
mod job;
mod metrics;
mod mirror;
mod pending;
mod publisher;
mod registry;
mod retention;
mod shared;
pub mod store;
mod verifier;
mod view;
mod witness;

/// What [`claim`] takes from the platform; the loom build has its own copy of this module.
mod platform {
    pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
}

pub use registry::{BuildError, CHANNELS, Identity, LOCKS, Registry, TASKS};
