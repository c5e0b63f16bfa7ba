//! Gossip: what is published anywhere reaches whoever follows it, everywhere.

pub mod message;
pub mod wire;
