//! OAP/1: its frames, sessions and gossip, as `docs/oap-1.md` has them.
//!
//! Modules in reading order: [`frame`] is what goes over the wire, [`decode`] and [`compress`] read it, [`error`]
//! says what is wrong with it.
//!
//! Nothing here opens a socket, reads a clock or makes random numbers: bytes, times and seeds are passed in, so
//! that a network of hundreds of nodes can be run, and run again, within a test.

pub mod compress;
pub mod decode;
pub mod error;
pub mod frame;

pub use decode::{Decoded, Decoder};
pub use error::FrameError;
pub use frame::{Encoded, Flags, Frame, Kind};
