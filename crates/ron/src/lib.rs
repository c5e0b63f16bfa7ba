//! The pieces of the `ron` binary that its tests use too: the whole configuration and the wiring of a node.
//!
//! There is little logic here: a command reads its arguments, calls a crate, prints. Start from [`node::run`]. What no
//! service could do alone is in [`follow`]: a registry that governs the configuration of all of them.

pub mod config;
mod demo;
pub mod documents;
pub mod follow;
pub mod front;
pub mod init;
pub mod node;
