//! How nodes reach each other: TCP with TLS 1.3 under the nodes' own keys, Unix sockets, plain TCP where that is safe,
//! and QUIC with the feature `quic`.
//!
//! Start from [`Tls`], which proves who is at the other end, and [`Dialer`]; [`address`] is how peers and listeners
//! are written, [`identity`] how a key becomes a certificate, [`Writer`] the one thing that may write to a
//! connection, [`meet`] what two nodes do that dial each other, and [`Backoff`] how long to wait before the next try.
//!
//! Nothing here knows what is said over a connection, beyond that it is frames.

pub mod address;
pub mod backoff;
pub mod dial;
pub mod identity;
pub mod meet;
#[cfg(feature = "quic")]
pub mod quic;
pub mod tls;
pub mod writer;

pub use address::{Address, Listen, PeerAddress};
pub use backoff::Backoff;
pub use dial::Dialer;
pub use tls::{HandshakeError, Mode, PeerTlsSettings, Proved, Tls};
pub use writer::{WriteError, Writer, split};
