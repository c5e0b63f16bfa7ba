//! The crate from outside.

mod convert;
mod hostile;
mod mbtiles;
mod oracle;
mod others;
mod samples;
mod verify;
