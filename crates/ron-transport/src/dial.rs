//! Reaching a peer.

use crate::address::{Address, PeerAddress};
use crate::tls::{HandshakeError, Proved, Tls};
#[cfg(feature = "quic")]
use oap::NodeId;
use ron_kernel::http::Io;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

/// Why a peer could not be reached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DialError {
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    #[error("cannot connect: no answer in time")]
    ConnectTimeout,
    #[error("the handshake took too long")]
    HandshakeTimeout,
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
}

/// Dials peers; without TLS whoever answers is believed to be who it says.
#[derive(Clone, Debug)]
pub struct Dialer {
    pub tls: Option<Arc<Tls>>,
    pub connect_timeout: Duration,
    pub handshake_timeout: Duration,
}

impl Dialer {
    /// A connection to a peer and, with TLS, the proof that it is that peer.
    pub async fn dial(&self, peer: &PeerAddress) -> Result<(Io, Option<Proved>), DialError> {
        #[cfg(feature = "quic")]
        if let Address::Quic(host, port) = &peer.at {
            return self.quic(host, *port, peer.node).await;
        }
        let io = self.connect(&peer.at).await?;
        let Some(tls) = self.tls.as_ref().filter(|_| !matches!(peer.at, Address::Unix(_))) else {
            return Ok((io, None));
        };
        let raw = tls.offers_raw();
        match self.secure(tls, io, peer, raw).await {
            // A peer that knows certificates only has refused the bare key; the key itself is checked either way.
            Err(DialError::Handshake(HandshakeError::Refused(_) | HandshakeError::Tls(_))) if raw => {
                let io = self.connect(&peer.at).await?;
                self.secure(tls, io, peer, false).await
            }
            secured => secured,
        }
    }

    #[cfg(feature = "quic")]
    async fn quic(&self, host: &str, port: u16, node: NodeId) -> Result<(Io, Option<Proved>), DialError> {
        let no_tls = || DialError::Connect(io::Error::other("QUIC needs overlay.tls.mode = \"on\""));
        let tls = self.tls.as_ref().ok_or_else(no_tls)?;
        let found = timeout(self.connect_timeout, tokio::net::lookup_host((host, port))).await;
        let mut found = found.map_err(|_elapsed| DialError::ConnectTimeout)?.map_err(DialError::Connect)?;
        let none = || DialError::Connect(io::Error::other("the name has no address"));
        let to = found.next().ok_or_else(none)?;
        let shaken = timeout(self.handshake_timeout, crate::quic::connect(to, tls, node)).await;
        let (io, proved) = shaken.map_err(|_elapsed| DialError::HandshakeTimeout)??;
        Ok((io, Some(proved)))
    }

    async fn secure(
        &self,
        tls: &Tls,
        io: Io,
        peer: &PeerAddress,
        raw: bool,
    ) -> Result<(Io, Option<Proved>), DialError> {
        let shaken = timeout(self.handshake_timeout, tls.connect(io, peer.node, raw)).await;
        let (io, proved) = shaken.map_err(|_elapsed| DialError::HandshakeTimeout)??;
        Ok((io, Some(proved)))
    }

    async fn connect(&self, at: &Address) -> Result<Io, DialError> {
        let connect = async {
            match at {
                Address::Tcp(host, port) => {
                    let stream = TcpStream::connect((host.as_str(), *port)).await?;
                    // Small frames must not wait for an acknowledgement; a failure only costs latency.
                    let _ = stream.set_nodelay(true);
                    Ok(Io::from(stream))
                }
                Address::Unix(path) => UnixStream::connect(path).await.map(Io::from),
                // Read only where the build has it, and then dialled above.
                Address::Quic(..) => Err(io::ErrorKind::Unsupported.into()),
            }
        };
        match timeout(self.connect_timeout, connect).await {
            Ok(connected) => connected.map_err(DialError::Connect),
            Err(_elapsed) => Err(DialError::ConnectTimeout),
        }
    }
}
