//! The crate from outside: what may become an entry, and what must not.

mod chain;
mod fixture;
mod follow;
mod notes;
mod proof_file;
mod properties;
mod quick;
mod quorum;
mod tree;
mod vectors;
mod whole_log;
