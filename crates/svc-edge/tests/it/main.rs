//! The crate from outside.

mod hostile;
mod oracle;
mod samples;
