//! The asset edge: content-addressed objects over HTTP, with strong validators, ranges and stored encodings.
//!
//! Read [`semantics`] for what HTTP asks of an answer: it does no I/O and is given the clock.

pub mod address;
pub mod semantics;
