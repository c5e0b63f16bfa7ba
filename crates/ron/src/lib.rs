//! The pieces of the `ron` binary that its tests use too: the whole configuration and the wiring of a node.
//!
//! There is no logic here: a command reads its arguments, calls a crate, prints. Start from [`node::run`].

pub mod config;
mod demo;
pub mod documents;
pub mod front;
pub mod init;
pub mod node;
