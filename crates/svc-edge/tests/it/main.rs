//! The crate from outside.

mod hostile;
mod mbtiles;
mod oracle;
mod samples;
mod verify;
