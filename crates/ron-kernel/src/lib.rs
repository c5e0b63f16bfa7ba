//! What every service of ron shares, written once: supervision, shutdown, bounded channels, the bus,
//! configuration, readiness, metrics, the accept loop, admission parts and TLS.
//!
//! Start from [`kernel::Kernel`] and [`kernel::Service`]; then read [`task`], [`channel`], [`http`]. The kernel
//! knows no service: it never names a route, a pack, a peer or an entry.

pub mod admin;
pub mod admission;
pub mod bus;
pub mod channel;
mod coarse;
pub mod config;
pub mod date;
pub mod fnv;
pub mod health;
pub mod http;
pub mod inventory;
pub mod kernel;
pub mod key;
pub mod lock;
pub mod metrics;
pub mod node;
pub mod observe;
pub mod problem;
pub mod process;
pub mod random;
pub mod reason;
pub mod shutdown;
pub mod sync;
pub mod takeover;
pub mod task;
pub mod tls;
pub mod token;
#[cfg(feature = "otlp")]
pub mod trace;
pub mod units;
