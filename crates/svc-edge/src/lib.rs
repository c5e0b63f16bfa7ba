//! The asset edge: content-addressed objects over HTTP, with strong validators, ranges and stored encodings.
//!
//! Read [`semantics`] for what HTTP asks of an answer: it does no I/O and is given the clock; [`cas`] for how objects
//! are stored, found and checked.

pub mod address;
pub mod cas;
pub mod semantics;
