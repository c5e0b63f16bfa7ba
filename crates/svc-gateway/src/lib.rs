//! The HTTP gateway: admits or refuses early, routes, and proxies under a deadline.
//!
//! Start from [`Gateway`]; then read [`proxy`] for the life of a request, [`routes`] for how it finds its
//! upstream, [`upstream`] for the connections behind it. Nothing here accepts a connection or spawns a task by
//! itself: that is the kernel's.

mod access_log;
mod auth;
mod boot;
mod breaker;
pub mod bridge;
pub mod config;
mod decode;
mod degraded;
pub mod fair_queue;
mod forward;
#[doc(hidden)]
pub mod fuzzing;
mod gate;
mod gateway;
mod ledger;
mod meter;
mod proxy;
pub mod routes;
mod tenants;
mod upstream;
mod views;
pub mod waiters;

/// What [`waiters`] takes from the platform; the loom build has its own copy of this module.
mod platform {
    pub(crate) use std::sync::atomic::{AtomicUsize, Ordering, fence};
}

pub use gateway::{CHANNELS, Gateway, LOCKS, TASKS};
