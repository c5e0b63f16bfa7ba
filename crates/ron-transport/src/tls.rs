//! TLS 1.3 between nodes: mutual, by the nodes' keys, with a hybrid key exchange.

use crate::identity::{KeyVerifier, certified, node_of, raw, self_signed};
use oap::NodeId;
use ron_kernel::http::Io;
use ron_kernel::key::PrivateKey;
use ron_kernel::tls::{PostQuantum, TlsError, provider, read_certificates, read_roots};
use ron_kernel::{choice, settings};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, CertificateType};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{AlertDescription, ClientConfig, CommonState, Error, PeerIncompatible, ServerConfig, version};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio_rustls::{LazyConfigAcceptor, TlsConnector, TlsStream};

pub(crate) const ALPN: &[u8] = b"oap/1";
/// Names are not checked, but TLS wants one.
pub(crate) const NAME: &str = "node.invalid";
/// Bytes that TLS may hold before they are written. A batch is 64 KiB and a frame more, which is to leave in one write
/// and not in two; while there is nothing to write, nothing is held.
const UNWRITTEN: usize = 256 << 10;

choice! {
    /// Whether nodes speak TLS with each other.
    pub enum Mode {
        On = "on",
        /// Plain TCP: only on loopback addresses, or with `node.danger_ok`.
        Off = "off",
    }
}

choice! {
    /// How a node shows its key.
    pub enum Shown {
        /// In a certificate that it has signed itself, or that a CA has.
        Cert = "cert",
        /// As it is (RFC 7250), to peers that do so too; in a certificate to others.
        Rpk = "rpk",
    }
}

settings! {
    /// TLS between nodes.
    pub struct PeerTlsSettings {
        /// "off" is plain TCP, on loopback addresses only, unless `node.danger_ok`. Unix sockets are always plain.
        mode: Mode = Mode::On => Restart;
        /// How the node's key is shown.
        identity: Shown = Shown::Cert => Hot;
        /// CA file, PEM: peers must show a certificate of their key signed by it, besides being admitted. Empty: the key
        /// alone counts.
        ca: String = String::new() => Hot;
        /// Certificate chain of this node's key, PEM, that the peers' CA signed. Needed with `ca`.
        cert: String = String::new() => Hot;
        /// Hybrid post-quantum key exchange; "required" refuses peers without it.
        pq: PostQuantum = PostQuantum::Hybrid => Hot;
    }
}

impl PeerTlsSettings {
    /// The files whose change should lead to a reload.
    pub fn files(&self, base: &Path) -> Vec<PathBuf> {
        let named = [&self.ca, &self.cert];
        named.into_iter().filter(|name| !name.is_empty()).map(|name| base.join(name)).collect()
    }

    /// Contradictions that can be seen without files: the key and what is wrong with it.
    pub fn check(&self) -> Option<(&'static str, &'static str)> {
        if self.ca.is_empty() != self.cert.is_empty() {
            return Some((
                "cert",
                "goes with `ca`: give both, the CA's file and this node's certificate, or neither",
            ));
        }
        if !self.ca.is_empty() && self.identity == Shown::Rpk {
            return Some((
                "identity",
                "is \"rpk\", but a CA signs certificates, not bare keys; use \"cert\"",
            ));
        }
        if self.pq == PostQuantum::Required && self.mode == Mode::Off {
            return Some((
                "pq",
                "is \"required\", but mode = \"off\" exchanges no keys at all; use mode = \"on\"",
            ));
        }
        None
    }
}

/// Why TLS could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    #[error(transparent)]
    File(#[from] TlsError),
    #[error("cert: the certificate is of another key than this node's ({0}); ask the CA for one of that key")]
    OtherKey(String),
    #[error("the node's key cannot be used: {0}")]
    Key(#[from] Error),
    #[error("no certificate could be made of the node's key: {0}")]
    Certificate(#[from] rcgen::Error),
}

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    #[error("the connection broke: {0}")]
    Io(io::Error),
    #[error("the peer offers no post-quantum key exchange, and overlay.tls.pq = \"required\"")]
    PostQuantum,
    #[error("the peer's certificate is refused: {0}")]
    Certificate(Error),
    #[error("the peer does not speak oap/1")]
    Alpn,
    #[error("the peer is {found}, and {expected} was dialled")]
    OtherKey { expected: NodeId, found: NodeId },
    #[error("the peer refused: {0:?}")]
    Refused(AlertDescription),
    #[error("{0}")]
    Tls(Error),
}

impl HandshakeError {
    /// The short stable word in metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            HandshakeError::Io(_) => "closed",
            HandshakeError::PostQuantum => "pq",
            HandshakeError::Certificate(_) => "certificate",
            HandshakeError::Alpn => "alpn",
            HandshakeError::OtherKey { .. } => "other_key",
            HandshakeError::Refused(_) => "refused",
            HandshakeError::Tls(_) => "tls",
        }
    }
}

/// What a handshake has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proved {
    pub node: NodeId,
    /// Whether the key exchange was a hybrid one; none if that is not known.
    pub post_quantum: Option<bool>,
    /// Whether the key was shown as it is.
    pub raw: bool,
}

/// Both sides' configuration, for a key in certificates and for the bare key.
#[derive(Clone)]
pub struct Tls {
    certs: Pair,
    raw: Option<Pair>,
    pq: PostQuantum,
}

#[derive(Clone)]
struct Pair {
    server: Arc<ServerConfig>,
    client: TlsConnector,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Reads the files, relative to `base`, and builds both configurations. Blocks on file I/O.
    pub fn load(settings: &PeerTlsSettings, key: &PrivateKey, base: &Path) -> Result<Tls, SetupError> {
        let provider = Arc::new(provider(settings.pq));
        let (shown, ca) = if settings.ca.is_empty() {
            (vec![self_signed(key)?], None)
        } else {
            let shown = read_certificates(&base.join(&settings.cert))?;
            let own = NodeId(key.public().0);
            if shown.first().and_then(|first| node_of(first, false)) != Some(own) {
                return Err(SetupError::OtherKey(own.to_string()));
            }
            (shown, Some(Arc::new(read_roots(&base.join(&settings.ca))?)))
        };
        let verifier = |raw| Arc::new(KeyVerifier { provider: provider.clone(), ca: ca.clone(), raw });
        let certs = Pair::new(&verifier(false), certified(key, shown, &provider)?)?;
        let raw = match settings.identity {
            Shown::Cert => None,
            Shown::Rpk => Some(Pair::new(&verifier(true), certified(key, vec![raw(key)], &provider)?)?),
        };
        Ok(Tls { certs, raw, pq: settings.pq })
    }

    /// Whether bare keys are offered to whoever is dialled.
    pub fn offers_raw(&self) -> bool {
        self.raw.is_some()
    }

    /// A listener's side.
    pub async fn accept(&self, io: Io) -> Result<(Io, Proved), HandshakeError> {
        let failed = |error| self.failed(error);
        let start = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), io).await.map_err(failed)?;
        let hello = start.client_hello();
        let takes = |types: Option<&[CertificateType]>| {
            types.is_some_and(|types| types.contains(&CertificateType::RawPublicKey))
        };
        let both = takes(hello.server_cert_types()) && takes(hello.client_cert_types());
        let raw = self.raw.as_ref().filter(|_| both);
        let config = raw.unwrap_or(&self.certs).server.clone();
        let mut stream = start.into_stream(config).await.map_err(failed)?;
        stream.get_mut().1.set_buffer_limit(Some(UNWRITTEN));
        let proved = proved(stream.get_ref().1, raw.is_some())?;
        Ok((Io::from(TlsStream::from(stream)), proved))
    }

    /// A dialer's side; `raw` offers the bare key and nothing else.
    pub async fn connect(&self, io: Io, expected: NodeId, raw: bool) -> Result<(Io, Proved), HandshakeError> {
        let pair = self.raw.as_ref().filter(|_| raw);
        let name = ServerName::try_from(NAME).expect("a constant that is a name");
        let connector = &pair.unwrap_or(&self.certs).client;
        let mut stream = connector.connect(name, io).await.map_err(|error| self.failed(error))?;
        stream.get_mut().1.set_buffer_limit(Some(UNWRITTEN));
        let proved = proved(stream.get_ref().1, pair.is_some())?;
        if proved.node != expected {
            return Err(HandshakeError::OtherKey { expected, found: proved.node });
        }
        Ok((Io::from(TlsStream::from(stream)), proved))
    }

    #[cfg(feature = "quic")]
    pub(crate) fn server(&self) -> Arc<ServerConfig> {
        self.certs.server.clone()
    }

    #[cfg(feature = "quic")]
    pub(crate) fn client(&self) -> Arc<ClientConfig> {
        self.certs.client.config().clone()
    }

    #[cfg(feature = "quic")]
    pub(crate) fn pq(&self) -> PostQuantum {
        self.pq
    }

    fn failed(&self, error: io::Error) -> HandshakeError {
        let Some(why) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) else {
            return HandshakeError::Io(error);
        };
        let required = self.pq == PostQuantum::Required;
        match why {
            Error::PeerIncompatible(PeerIncompatible::NoKxGroupsInCommon) if required => {
                HandshakeError::PostQuantum
            }
            // A listener without the one group that we offer has no other way to say so.
            Error::AlertReceived(AlertDescription::HandshakeFailure) if required => {
                HandshakeError::PostQuantum
            }
            Error::AlertReceived(alert) => HandshakeError::Refused(*alert),
            Error::InvalidCertificate(_) | Error::NoCertificatesPresented => {
                HandshakeError::Certificate(why.clone())
            }
            Error::NoApplicationProtocol => HandshakeError::Alpn,
            why => HandshakeError::Tls(why.clone()),
        }
    }
}

impl Pair {
    fn new(verifier: &Arc<KeyVerifier>, key: Arc<CertifiedKey>) -> Result<Pair, Error> {
        let builder = ServerConfig::builder_with_provider(verifier.provider.clone())
            .with_protocol_versions(&[&version::TLS13])?
            .with_client_cert_verifier(verifier.clone());
        let mut server = if verifier.raw {
            builder.with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(key.clone())))
        } else {
            builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(CertifiedKey::clone(&key))))
        };
        server.alpn_protocols = vec![ALPN.to_vec()];
        // Sessions are few and long: each begins with a whole handshake.
        server.send_tls13_tickets = 0;
        let builder = ClientConfig::builder_with_provider(verifier.provider.clone())
            .with_protocol_versions(&[&version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(verifier.clone());
        let mut client = if verifier.raw {
            builder.with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(key)))
        } else {
            builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(CertifiedKey::clone(&key))))
        };
        client.alpn_protocols = vec![ALPN.to_vec()];
        client.enable_sni = false;
        client.resumption = Resumption::disabled();
        Ok(Pair { server: Arc::new(server), client: Arc::new(client).into() })
    }
}

/// The key that the other end has shown.
pub(crate) fn node_shown(shown: Option<&CertificateDer<'_>>, raw: bool) -> Result<NodeId, HandshakeError> {
    let node = shown.and_then(|shown| node_of(shown, raw));
    node.ok_or(HandshakeError::Certificate(Error::NoCertificatesPresented))
}

fn proved(state: &CommonState, raw: bool) -> Result<Proved, HandshakeError> {
    if state.alpn_protocol() != Some(ALPN) {
        return Err(HandshakeError::Alpn);
    }
    let node = node_shown(state.peer_certificates().and_then(|shown| shown.first()), raw)?;
    let group = state.negotiated_key_exchange_group().map(|group| group.name());
    Ok(Proved { node, post_quantum: Some(group == Some(rustls::NamedGroup::X25519MLKEM768)), raw })
}

#[cfg(test)]
mod tests;
