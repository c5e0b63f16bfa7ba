//! OAP/1: its frames, sessions and gossip, as `docs/oap-1.md` has them.
//!
//! Modules in reading order: [`frame`] is what goes over the wire, [`decode`] and [`compress`] read it, [`error`]
//! says what is wrong with it; [`control`] and [`session`] are two nodes that talk; [`gossip`] is what many
//! nodes make of it; [`node`] and [`bucket`] are what the rest is made of.
//!
//! Nothing here opens a socket, reads a clock or makes random numbers: bytes, times and seeds are passed in, so
//! that a network of hundreds of nodes can be run, and run again, within a test.

pub mod bucket;
pub mod compress;
pub mod control;
pub mod decode;
pub mod error;
pub mod frame;
pub mod gossip;
pub mod node;
pub mod session;

pub use decode::{Decoded, Decoder};
pub use error::FrameError;
pub use frame::{Encoded, Flags, Frame, Kind};
pub use node::NodeId;
pub use session::Session;
