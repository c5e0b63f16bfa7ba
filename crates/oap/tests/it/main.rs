//! The crate from outside: its document, its codec, its sessions and its gossip.

mod codec;
mod document;
mod engine;
mod messages;
mod promises;
mod queues;
mod session;

// Simulated networks, as the example of that name runs them.
#[path = "../../examples/sim/audit.rs"]
mod audit;
#[path = "../../examples/sim/events.rs"]
mod events;
#[path = "../../examples/sim/hostile.rs"]
mod hostile;
#[path = "../../examples/sim/net.rs"]
mod net;
#[path = "../../examples/sim/scenario.rs"]
mod scenario;
