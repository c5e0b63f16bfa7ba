//! The one accept loop and the HTTP server behind every listener.
//!
//! Start from [`Server`] and [`Handler`]. [`h1`] holds the codecs; [`table`](self) keeps every connection's
//! phase so that one sweeper, not a timer per request, closes the idle and the slow.

mod body;
pub mod client;
mod fields;
mod file;
pub mod h1;
mod h2;
mod interim;
mod io;
mod last_hop;
pub(crate) mod listener;
mod proxy_protocol;
mod serve;
mod table;
mod timer;
mod tunnel;

pub use body::{Body, BodyError};
pub use fields::{Fields, Lines, Written};
pub use file::{FileBody, SentFile};
pub use interim::{Interim, InterimSender};
pub use io::{Duplex, Io};
pub use last_hop::{last_hop, max_forwards};
pub use listener::{BindError, Bound, Peer, bind_tcp, bind_unix};
pub use proxy_protocol::parse as parse_proxy_header;
pub use serve::{
    ConnInfo, Handler, Server, ServerLimits, TurnedAway, WritePatience, requests_family, server_tasks,
};
pub use timer::Timer;
pub use tunnel::{Tunnel, upgrade_of};
