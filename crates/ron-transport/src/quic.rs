//! QUIC: the nodes' TLS 1.3 over UDP. A connection carries one stream in each direction and nothing else.
//!
//! Keys are shown in certificates here, never bare: QUIC's listener must choose before it has seen what a dialer offers.

use crate::tls::{ALPN, HandshakeError, NAME, Proved, Tls, node_shown};
use oap::NodeId;
use quinn::crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig};
use quinn::{
    ClientConfig, Connecting, Connection, ConnectionError, Endpoint, EndpointConfig, Incoming, RecvStream,
    SendStream, ServerConfig, StoppedError, TokioRuntime, TransportConfig, VarInt,
};
use ron_kernel::http::{Duplex, Io};
use ron_kernel::tls::PostQuantum;
use rustls::pki_types::CertificateDer;
use rustls::{AlertDescription, Error};
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes that a peer may send ahead of what was read, on one connection: a frame and some.
const WINDOW: u32 = 2 << 20;
/// A connection on which nothing at all is heard is over; sessions say sooner that a peer is silent.
const SILENCE: Duration = Duration::from_secs(60);
/// What is expected of a network path before it is known.
const RTT: Duration = Duration::from_millis(50);

/// A socket that QUIC is spoken on, in both directions.
#[derive(Debug, Clone)]
pub struct Quic {
    endpoint: Endpoint,
}

impl Quic {
    /// Binds, and takes connections. Call it inside the runtime.
    pub fn listen(address: SocketAddr, tls: &Tls) -> io::Result<Quic> {
        let socket = UdpSocket::bind(address)?;
        let server = Some(server(tls)?);
        let endpoint = Endpoint::new(EndpointConfig::default(), server, socket, Arc::new(TokioRuntime))?;
        Ok(Quic { endpoint })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.endpoint.local_addr()
    }

    /// Takes further connections with these keys.
    pub fn renew(&self, tls: &Tls) -> io::Result<()> {
        self.endpoint.set_server_config(Some(server(tls)?));
        Ok(())
    }

    /// The next that wants to connect and has shown that it is where it says; none once the socket is closed.
    pub async fn accept(&self) -> Option<Arriving> {
        loop {
            let incoming = self.endpoint.accept().await?;
            if incoming.remote_address_validated() {
                return Some(Arriving(incoming));
            }
            // It must answer to a small packet first: nobody is made to shake hands in another's name.
            let _ = incoming.retry();
        }
    }
}

/// One that wants to connect.
#[derive(Debug)]
pub struct Arriving(Incoming);

impl Arriving {
    pub fn from(&self) -> SocketAddr {
        self.0.remote_address()
    }

    /// Sends it away.
    pub fn refuse(self) {
        self.0.refuse();
    }

    /// The listener's side of the handshake, until the dialer has begun its stream.
    pub async fn shake(self, tls: &Tls) -> Result<(Io, Proved), HandshakeError> {
        let failed = |error| failed(tls, error);
        let connection = self.0.accept().map_err(failed)?.await.map_err(failed)?;
        let proved = proved(tls, &connection)?;
        let (send, receive) = connection.accept_bi().await.map_err(failed)?;
        Ok((stream(connection, send, receive), proved))
    }
}

/// A dialer's side: connects from a socket of its own, and begins the stream.
pub async fn connect(to: SocketAddr, tls: &Tls, expected: NodeId) -> Result<(Io, Proved), HandshakeError> {
    let connecting = connecting(to, tls).map_err(HandshakeError::Io)?;
    let failed = |error| failed(tls, error);
    let connection = connecting.await.map_err(failed)?;
    let proved = proved(tls, &connection)?;
    if proved.node != expected {
        return Err(HandshakeError::OtherKey { expected, found: proved.node });
    }
    let (send, receive) = connection.open_bi().await.map_err(failed)?;
    Ok((stream(connection, send, receive), proved))
}

fn connecting(to: SocketAddr, tls: &Tls) -> io::Result<Connecting> {
    let any: SocketAddr =
        if to.is_ipv4() { (Ipv4Addr::UNSPECIFIED, 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
    let crypto = QuicClientConfig::try_from(tls.client()).map_err(io::Error::other)?;
    let mut client = ClientConfig::new(Arc::new(crypto));
    client.transport_config(transport());
    let begun = Endpoint::client(any)?.connect_with(client, to, NAME);
    begun.map_err(io::Error::other)
}

fn server(tls: &Tls) -> io::Result<ServerConfig> {
    let crypto = QuicServerConfig::try_from(tls.server()).map_err(io::Error::other)?;
    let mut server = ServerConfig::with_crypto(Arc::new(crypto));
    server.transport_config(transport());
    // A session is of one address; who moves dials again.
    server.migration(false);
    Ok(server)
}

/// One stream, bounded both ways, and nothing beside it.
fn transport() -> Arc<TransportConfig> {
    let mut transport = TransportConfig::default();
    transport
        .max_concurrent_bidi_streams(VarInt::from_u32(1))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(None)
        .stream_receive_window(VarInt::from_u32(WINDOW))
        .receive_window(VarInt::from_u32(WINDOW))
        .send_window(u64::from(WINDOW))
        .initial_rtt(RTT)
        .max_idle_timeout(SILENCE.try_into().ok());
    Arc::new(transport)
}

fn proved(tls: &Tls, connection: &Connection) -> Result<Proved, HandshakeError> {
    let data = connection.handshake_data().and_then(|data| data.downcast::<HandshakeData>().ok());
    if data.and_then(|data| data.protocol).as_deref() != Some(ALPN) {
        return Err(HandshakeError::Alpn);
    }
    let shown = connection.peer_identity().and_then(|shown| shown.downcast::<Vec<CertificateDer<'_>>>().ok());
    let node = node_shown(shown.as_ref().and_then(|shown| shown.first()), false)?;
    // QUIC does not tell which exchange was agreed on: it is known where no other may be.
    Ok(Proved { node, post_quantum: (tls.pq() == PostQuantum::Required).then_some(true), raw: false })
}

fn failed(tls: &Tls, error: ConnectionError) -> HandshakeError {
    // TLS's alerts are told as 0x100 and the alert's number.
    let alert = |code: u64| {
        code.checked_sub(0x100).and_then(|alert| u8::try_from(alert).ok()).map(AlertDescription::from)
    };
    let (alert, said, ours) = match &error {
        ConnectionError::TransportError(found) => (alert(u64::from(found.code)), found.reason.clone(), true),
        ConnectionError::ConnectionClosed(told) => {
            (alert(u64::from(told.error_code)), String::from_utf8_lossy(&told.reason).into_owned(), false)
        }
        _ => (None, String::new(), false),
    };
    match alert {
        None => HandshakeError::Io(error.into()),
        Some(AlertDescription::HandshakeFailure) if tls.pq() == PostQuantum::Required => {
            HandshakeError::PostQuantum
        }
        Some(AlertDescription::NoApplicationProtocol) => HandshakeError::Alpn,
        Some(alert) if !ours => HandshakeError::Refused(alert),
        Some(
            AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::CertificateRequired
            | AlertDescription::UnknownCA,
        ) => HandshakeError::Certificate(Error::General(said)),
        Some(_) => HandshakeError::Tls(Error::General(said)),
    }
}

fn stream(connection: Connection, send: SendStream, receive: RecvStream) -> Io {
    let stream: Box<dyn Duplex> = Box::new(Stream { send, receive, ending: None, _connection: connection });
    Io::from(stream)
}

/// Waits until the other end has all that was sent.
type Ending = Pin<Box<dyn Future<Output = Result<Option<VarInt>, StoppedError>> + Send + Sync>>;

/// The one stream of a connection.
struct Stream {
    send: SendStream,
    receive: RecvStream,
    ending: Option<Ending>,
    /// Closed when it is dropped.
    _connection: Connection,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("quic::Stream")
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        AsyncRead::poll_read(Pin::new(&mut self.receive), cx, out)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        AsyncWrite::poll_write(Pin::new(&mut self.send), cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // What was taken is on its way.
        Poll::Ready(Ok(()))
    }

    /// A connection that is dropped forgets what the other end has not acknowledged, so that this waits for it.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.ending.is_none() {
            // It cannot be finished twice, and whether it was reset shows below.
            let _ = self.send.finish();
            self.ending = Some(Box::pin(self.send.stopped()));
        }
        let Some(ending) = &mut self.ending else { return Poll::Ready(Ok(())) };
        // A peer that is gone needs nothing more.
        let _ = ready!(ending.as_mut().poll(cx));
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests;
