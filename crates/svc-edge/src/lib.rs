//! The asset edge: content-addressed objects over HTTP, with strong validators, ranges and stored encodings.
//!
//! Start from [`Edge`]; then read [`semantics`] for what HTTP asks of an answer (it does no I/O and is given the
//! clock), [`cas`] for how objects are stored, found and checked, and `serve` for the life of a request. Nothing here
//! accepts a connection or spawns a task by itself: that is the kernel's.

pub mod address;
mod body;
pub mod cas;
pub mod config;
mod edge;
mod encode;
pub mod pack;
pub mod semantics;
mod serve;

pub use edge::{BuildError, CHANNELS, Edge, LOCKS, TASKS};
