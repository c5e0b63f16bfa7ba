//! The crate from outside.

mod convert;
mod hostile;
mod mbtiles;
mod oracle;
mod samples;
mod verify;
