//! The parts of admission that gateway, edge and registry share. Each is pure: the clock is passed in.

pub mod bucket;
pub mod client_ip;
pub mod deadline;
pub mod decode;
