//! The registry: changes that a quorum has signed, kept in an append-only log that anyone can check.
//!
//! Start from [`store`]: what is kept, and who may write it. Every format and check is `ron-log`'s; this crate
//! adds storage, tasks and HTTP around it.

pub mod store;
pub mod tiles;
