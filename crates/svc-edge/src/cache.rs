//! A shared HTTP cache (RFC 9111 and its relatives 9110, 9211, 9213, 5861 and 8246) without I/O or a clock.

pub mod date;
pub mod directives;
pub mod list;
pub mod range;
pub mod structured;
pub mod validators;
pub mod vary;
