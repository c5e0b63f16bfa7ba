//! Gossip: what is published anywhere reaches whoever follows it, everywhere.
//!
//! [`wire`] and [`message`] are what peers say to each other, [`fair`] is how lanes, peers and topics take turns;
//! [`Ingress`] holds what has come, an [`Egress`] for each peer what goes.

pub mod egress;
pub mod fair;
pub mod ingress;
pub mod message;
pub mod wire;

pub use egress::{Ceiling, Egress, EgressLimits, Refused, WhenFull};
pub use fair::Lane;
pub use ingress::{Displaced, Incoming, Ingress};
pub use message::{Envelope, MessageId, Topic};

/// A peer that is connected; a node that comes back is another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PeerId(pub u64);
