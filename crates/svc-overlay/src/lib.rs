//! The overlay: sessions with other nodes, and gossip over them.
//!
//! Start from [`Overlay`] and, for whoever publishes or follows something within the process, [`Handle`]. A
//! connection's life is in `listener` or `dialer`, then `conn`, `reader` and `writer`; `link` is what they share.
//! `gossip` drives the engine of `oap`, which decides everything and waits for nobody; `calls` is what it is asked.
//! `pressure` judges readiness, `api` is HTTP on the admin plane, `services` the same over a session.
//!
//! There is no discovery here: peers come from the configuration, which a registry may have a part in.

mod api;
mod calls;
pub mod config;
mod conn;
mod dialer;
mod gossip;
mod handle;
mod link;
mod listener;
mod metrics;
mod overlay;
mod pressure;
mod reader;
mod services;
mod shared;
#[cfg(test)]
mod tests;
mod writer;

pub use handle::{Handle, Next, PublishError, SubscribeError, Subscription};
pub use oap::gossip::{Delivery, Published, Topic};
pub use overlay::{BuildError, CHANNELS, CHECKPOINT_TOPIC, HEAD_TOPIC, LOCKS, Overlay, TASKS};
pub use ron_transport::PeerAddress;
