//! The asset and tile edge.

pub mod pack;
