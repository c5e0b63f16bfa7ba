//! Gossip: what is published anywhere reaches whoever follows it, everywhere.
//!
//! Start from [`Engine`]: frames, publications and times in, deliveries out. [`Ingress`] stands before it and
//! shares its time among peers, an [`Egress`] behind it for each of them. [`wire`] and [`message`] are what peers
//! say to each other, [`fair`] is how lanes, peers and topics take turns, [`Ledger`] is what became of everything.

pub mod bundle;
pub mod config;
pub mod egress;
pub mod engine;
mod estimate;
pub mod fair;
mod history;
mod ids;
pub mod ingress;
pub mod ledger;
pub mod message;
mod missing;
mod peer;
pub mod random;
mod score;
mod seen;
pub mod signature;
pub mod wire;

pub use config::Config;
pub use egress::{Ceiling, Egress, EgressLimits, Queued, Refused, SharedEgress, WhenFull};
pub use engine::{Action, ConnectError, Delivery, Engine, Now, PeerInfo, PublishError, Published};
pub use fair::Lane;
pub use history::{HistoryLimits, Kept};
pub use ingress::{Displaced, Incoming, Ingress};
pub use ledger::{Cause, Ledger, Outcome, Queue};
pub use message::{Envelope, MessageId, Topic};
pub use score::Offence;

/// A peer that is connected; a node that comes back is another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PeerId(pub u64);

/// What the queues take from the standard library; the models take it from loom.
mod platform {
    pub(super) use std::sync::atomic::{AtomicUsize, Ordering};
    pub(super) use std::sync::{Mutex, MutexGuard};
}
