//! The asset and tile edge: content-addressed objects and packs of map tiles over HTTP, filled from origins, and whole
//! sites through a cache.
//!
//! Start from [`Edge`]; then read [`semantics`] for what HTTP asks of an answer (it does no I/O and is given the
//! clock), [`cache`] for what a shared cache may do (the same holds), [`cas`] for how objects are stored, found and
//! checked, `fill` with [`board`] and [`egress`] for how they come from origins, [`pack`] for the files that tiles come in, `packs` for
//! those that are mounted, [`s3`] for those in an object store, and `serve` for the life of a request. Nothing here
//! accepts a connection or spawns a task by itself: that is the kernel's.

pub mod address;
pub mod board;
mod body;
pub mod cache;
pub mod cas;
pub mod config;
mod edge;
pub mod egress;
mod encode;
mod fill;
pub mod pack;
mod packs;
pub mod s3;
pub mod semantics;
mod serve;

pub use edge::{BuildError, CHANNELS, Edge, LOCKS, TASKS};
