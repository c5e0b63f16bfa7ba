//! For tests only: the built binary as a process, origins that misbehave on request, and clients.
//!
//! [`Node`] runs `ron` on port 0 in a folder of its own; [`Origin`] is a scripted upstream and [`Client`] asks one
//! thing at a time. These are plain threads and blocking sockets, so that what is tested and what tests it share no
//! code. [`Load`] and [`SlotOrigin`] are for thousands of requests a second, which threads cannot make; [`soak`] puts
//! everything together and lets it run.

mod client;
mod disk;
mod load;
mod node;
mod origin;
mod random;
mod slots;
mod soak;

pub use client::{Answer, Client, get, request};
pub use disk::SmallDisk;
pub use load::{Flow, Load, Outcome, Sample, percentile};
pub use node::{Node, api_key, command, ron, ron_with};
pub use origin::{Choice, Gate, Origin, Script, Stream};
pub use random::Random;
pub use slots::{Fault, SlotOrigin};
pub use soak::{Check, Plan, soak};
