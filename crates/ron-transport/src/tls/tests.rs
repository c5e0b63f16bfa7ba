//! Who gets through a handshake with whom.

use super::*;
use ron_kernel::http::bind_tcp;
use std::net::{Ipv4Addr, SocketAddr};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

fn settings(identity: Shown, pq: PostQuantum) -> PeerTlsSettings {
    PeerTlsSettings { identity, pq, ..PeerTlsSettings::default() }
}

fn key() -> PrivateKey {
    PrivateKey::generate().unwrap()
}

fn node(key: &PrivateKey) -> NodeId {
    NodeId(key.public().0)
}

type Outcome = (Result<(Io, Proved), HandshakeError>, Result<(Io, Proved), HandshakeError>);

/// A listener's and a dialer's outcome.
async fn shake(listener: &Tls, dialer: &Tls, expected: NodeId, raw: bool) -> Outcome {
    let bound = bind_tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let address = bound.address();
    let accept = async {
        let (io, _) = bound.accept().await.unwrap();
        let accepted = listener.accept(io).await;
        // The dialer of TLS 1.3 is done before it hears of a refusal: a byte tells it that there was none.
        match accepted {
            Ok((mut io, proved)) => {
                io.write_all(b"!").await.map_err(HandshakeError::Io)?;
                Ok((io, proved))
            }
            refused => refused,
        }
    };
    let connect = async {
        let io = Io::from(TcpStream::connect(address).await.unwrap());
        let (mut io, proved) = dialer.connect(io, expected, raw).await?;
        io.read_exact(&mut [0]).await.map_err(|error| dialer.failed(error))?;
        Ok((io, proved))
    };
    tokio::join!(accept, connect)
}

#[tokio::test]
async fn each_side_learns_the_others_key() {
    let (a, b, base) = (key(), key(), Path::new(""));
    let plain = settings(Shown::Cert, PostQuantum::Hybrid);
    let (listener, dialer) = (Tls::load(&plain, &a, base).unwrap(), Tls::load(&plain, &b, base).unwrap());
    let (accepted, connected) = shake(&listener, &dialer, node(&a), false).await;
    let (accepted, connected) = (accepted.unwrap().1, connected.unwrap().1);
    assert_eq!(accepted, Proved { node: node(&b), post_quantum: Some(true), raw: false });
    assert_eq!(connected, Proved { node: node(&a), post_quantum: Some(true), raw: false });
}

#[tokio::test]
async fn bare_keys_are_used_if_both_sides_offer_them() {
    let (a, b, base) = (key(), key(), Path::new(""));
    let raw = settings(Shown::Rpk, PostQuantum::Off);
    let plain = settings(Shown::Cert, PostQuantum::Off);
    let (raw_a, raw_b) = (Tls::load(&raw, &a, base).unwrap(), Tls::load(&raw, &b, base).unwrap());
    let (accepted, connected) = shake(&raw_a, &raw_b, node(&a), true).await;
    assert_eq!(accepted.unwrap().1, Proved { node: node(&b), post_quantum: Some(false), raw: true });
    assert_eq!(connected.unwrap().1, Proved { node: node(&a), post_quantum: Some(false), raw: true });
    // A dialer with certificates meets a listener that would take either.
    let plain_b = Tls::load(&plain, &b, base).unwrap();
    let (accepted, connected) = shake(&raw_a, &plain_b, node(&a), false).await;
    assert!(!accepted.unwrap().1.raw && !connected.unwrap().1.raw);
    // A listener with certificates refuses the bare key, and the dialer comes again without.
    let plain_a = Tls::load(&plain, &a, base).unwrap();
    let (accepted, connected) = shake(&plain_a, &raw_b, node(&a), true).await;
    assert!(accepted.is_err());
    assert!(matches!(connected, Err(HandshakeError::Refused(_) | HandshakeError::Tls(_))), "{connected:?}");
    let (_, connected) = shake(&plain_a, &raw_b, node(&a), false).await;
    assert_eq!(connected.unwrap().1.node, node(&a));
}

#[tokio::test]
async fn whoever_answers_with_another_key_is_not_who_was_dialled() {
    let (a, b, base) = (key(), key(), Path::new(""));
    let plain = settings(Shown::Cert, PostQuantum::Hybrid);
    let (listener, dialer) = (Tls::load(&plain, &a, base).unwrap(), Tls::load(&plain, &b, base).unwrap());
    let (_, connected) = shake(&listener, &dialer, node(&b), false).await;
    let error = connected.unwrap_err();
    assert_eq!(error.reason(), "other_key");
    assert!(error.to_string().contains(&node(&a).to_string()), "{error}");
}

#[tokio::test]
async fn a_peer_without_post_quantum_is_refused_where_that_is_required_and_it_says_so() {
    let (a, b, base) = (key(), key(), Path::new(""));
    let required = settings(Shown::Cert, PostQuantum::Required);
    let off = settings(Shown::Cert, PostQuantum::Off);
    let (strict, old) = (Tls::load(&required, &a, base).unwrap(), Tls::load(&off, &b, base).unwrap());
    let (accepted, connected) = shake(&strict, &old, node(&a), false).await;
    assert!(matches!(accepted, Err(HandshakeError::PostQuantum)), "{accepted:?}");
    assert_eq!(connected.unwrap_err().reason(), "refused");
    let (_, connected) = shake(&old, &strict, node(&b), false).await;
    assert!(connected.unwrap_err().to_string().contains("post-quantum"));
    let hybrid = Tls::load(&settings(Shown::Cert, PostQuantum::Hybrid), &b, base).unwrap();
    let (accepted, _) = shake(&strict, &hybrid, node(&a), false).await;
    assert_eq!(accepted.unwrap().1.post_quantum, Some(true));
}

#[tokio::test]
async fn another_protocol_is_refused() {
    let (a, b, base) = (key(), key(), Path::new(""));
    let plain = settings(Shown::Cert, PostQuantum::Hybrid);
    let listener = Tls::load(&plain, &a, base).unwrap();
    for alpn in [vec![], vec![b"h2".to_vec()]] {
        let mut dialer = Tls::load(&plain, &b, base).unwrap();
        let mut config = ClientConfig::clone(dialer.certs.client.config());
        config.alpn_protocols = alpn;
        dialer.certs.client = Arc::new(config).into();
        let (accepted, _) = shake(&listener, &dialer, node(&a), false).await;
        assert!(matches!(accepted, Err(HandshakeError::Alpn)), "{accepted:?}");
    }
}

/// A CA's folder: `ca.pem`, and for each key `N.pem` that the CA signed.
fn with_ca(keys: &[&PrivateKey]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let mut ca = rcgen::CertificateParams::default();
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    std::fs::write(dir.path().join("ca.pem"), ca.self_signed(&ca_key).unwrap().pem()).unwrap();
    let issuer = rcgen::Issuer::new(ca, ca_key);
    for (index, key) in keys.iter().enumerate() {
        let pair = rcgen::KeyPair::from_pkcs8_der_and_sign_algo(&pkcs8(key), &rcgen::PKCS_ED25519).unwrap();
        let signed = rcgen::CertificateParams::default().signed_by(&pair, &issuer).unwrap();
        std::fs::write(dir.path().join(format!("{index}.pem")), signed.pem()).unwrap();
    }
    dir
}

use crate::identity::pkcs8;

#[tokio::test]
async fn with_a_ca_only_keys_that_it_has_signed_get_through() {
    let (a, b) = (key(), key());
    let dir = with_ca(&[&a, &b]);
    let of = |cert: &str| PeerTlsSettings {
        ca: "ca.pem".to_owned(),
        cert: cert.to_owned(),
        ..PeerTlsSettings::default()
    };
    let listener = Tls::load(&of("0.pem"), &a, dir.path()).unwrap();
    let dialer = Tls::load(&of("1.pem"), &b, dir.path()).unwrap();
    let (accepted, connected) = shake(&listener, &dialer, node(&a), false).await;
    assert_eq!((accepted.unwrap().1.node, connected.unwrap().1.node), (node(&b), node(&a)));
    let stranger = Tls::load(&PeerTlsSettings::default(), &b, dir.path()).unwrap();
    let (accepted, _) = shake(&listener, &stranger, node(&a), false).await;
    assert!(matches!(accepted, Err(HandshakeError::Certificate(_))), "{accepted:?}");
    let (_, connected) = shake(&stranger, &dialer, node(&b), false).await;
    assert!(matches!(connected, Err(HandshakeError::Certificate(_))), "{connected:?}");
    let wrong = Tls::load(&of("0.pem"), &b, dir.path()).unwrap_err();
    assert!(wrong.to_string().contains("another key"), "{wrong}");
}

#[test]
fn contradictions_are_found_without_files() {
    assert_eq!(PeerTlsSettings::default().check(), None);
    let half = PeerTlsSettings { ca: "ca.pem".to_owned(), ..PeerTlsSettings::default() };
    assert_eq!(half.check().unwrap().0, "cert");
    let bare = PeerTlsSettings { cert: "n.pem".to_owned(), identity: Shown::Rpk, ..half };
    assert_eq!(bare.check().unwrap().0, "identity");
}
