//! For tests only: the built binary as a process, origins that misbehave on request, and a small HTTP client.
//!
//! [`Node`] runs `ron` on port 0 in a folder of its own; [`Origin`] is a scripted upstream. Both are plain
//! threads and blocking sockets, so that what is tested and what tests it share no code.

mod client;
mod node;
mod origin;

pub use client::{Answer, Client, get, request};
pub use node::{Node, ron, ron_with};
pub use origin::{Origin, Script};
