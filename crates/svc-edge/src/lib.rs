//! The asset and tile edge: content-addressed objects and packs of map tiles over HTTP, with strong validators, ranges
//! and stored encodings.
//!
//! Start from [`Edge`]; then read [`semantics`] for what HTTP asks of an answer (it does no I/O and is given the
//! clock), [`cas`] for how objects are stored, found and checked, [`pack`] for the files that tiles come in,
//! `packs` for those that are mounted, and `serve` for the life of a request. Nothing here
//! accepts a connection or spawns a task by itself: that is the kernel's.

pub mod address;
mod body;
pub mod cas;
pub mod config;
mod edge;
mod encode;
pub mod pack;
mod packs;
pub mod semantics;
mod serve;

pub use edge::{BuildError, CHANNELS, Edge, LOCKS, TASKS};
