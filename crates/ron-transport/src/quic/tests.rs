//! Who gets through over QUIC, and that what was sent before a close arrives.

use super::*;
use crate::tls::PeerTlsSettings;
use ron_kernel::key::PrivateKey;
use std::path::Path;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

fn tls(key: &PrivateKey, pq: PostQuantum) -> Tls {
    Tls::load(&PeerTlsSettings { pq, ..PeerTlsSettings::default() }, key, Path::new("")).unwrap()
}

fn key() -> (PrivateKey, NodeId) {
    let key = PrivateKey::generate().unwrap();
    let node = NodeId(key.public().0);
    (key, node)
}

fn listen(tls: &Tls) -> Quic {
    Quic::listen((Ipv4Addr::LOCALHOST, 0).into(), tls).unwrap()
}

#[tokio::test]
async fn each_side_learns_the_others_key_and_all_that_was_sent_arrives() {
    let ((a, node_a), (b, node_b)) = (key(), key());
    for pq in [PostQuantum::Off, PostQuantum::Hybrid, PostQuantum::Required] {
        let (tls_a, tls_b) = (tls(&a, pq), tls(&b, pq));
        let quic = listen(&tls_a);
        let sent = vec![7; 3 << 20];
        let accept = async {
            let arriving = quic.accept().await.unwrap();
            assert!(arriving.from().ip().is_loopback());
            let (mut io, proved) = arriving.shake(&tls_a).await.unwrap();
            let mut all = Vec::new();
            io.read_to_end(&mut all).await.unwrap();
            io.write_all(&all).await.unwrap();
            io.shutdown().await.unwrap();
            proved
        };
        let dial = async {
            let (mut io, proved) = connect(quic.address().unwrap(), &tls_b, node_a).await.unwrap();
            io.write_all(&sent).await.unwrap();
            let (mut read, mut write) = tokio::io::split(io);
            let (closed, all) = tokio::join!(write.shutdown(), async {
                let mut all = Vec::new();
                read.read_to_end(&mut all).await.unwrap();
                all
            });
            closed.unwrap();
            assert!(all == sent);
            proved
        };
        let (accepted, dialled) = tokio::join!(accept, dial);
        let post_quantum = (pq == PostQuantum::Required).then_some(true);
        assert_eq!(accepted, Proved { node: node_b, post_quantum, raw: false });
        assert_eq!(dialled, Proved { node: node_a, post_quantum, raw: false });
    }
}

#[tokio::test]
async fn another_key_and_a_weaker_exchange_are_named() {
    let ((a, _), (b, node_b)) = (key(), key());
    let outcome = async |ours: &Tls, theirs: &Tls| {
        let quic = listen(ours);
        let accept = async {
            let (mut io, _) = quic.accept().await.unwrap().shake(ours).await?;
            io.read_to_end(&mut Vec::new()).await.map_err(HandshakeError::Io)
        };
        let dial = async { connect(quic.address().unwrap(), theirs, node_b).await };
        let (accepted, dialled) = tokio::join!(accept, dial);
        (accepted.map_err(|error| error.reason()), dialled.map(drop).map_err(|error| error.reason()))
    };
    let (hybrid_a, hybrid_b) = (tls(&a, PostQuantum::Hybrid), tls(&b, PostQuantum::Hybrid));
    assert_eq!(outcome(&hybrid_a, &hybrid_b).await, (Err("closed"), Err("other_key")));
    let (required, off) = (tls(&a, PostQuantum::Required), tls(&b, PostQuantum::Off));
    assert_eq!(outcome(&required, &off).await, (Err("pq"), Err("refused")));
    assert_eq!(outcome(&off, &required).await.1, Err("pq"));
}

#[tokio::test]
async fn one_that_is_refused_or_finds_nobody_is_told() {
    let ((a, node_a), (b, _)) = (key(), key());
    let (tls_a, tls_b) = (tls(&a, PostQuantum::Off), tls(&b, PostQuantum::Off));
    let quic = listen(&tls_a);
    let refuse = async { quic.accept().await.unwrap().refuse() };
    let (refused, ()) = tokio::join!(connect(quic.address().unwrap(), &tls_b, node_a), refuse);
    assert_eq!(refused.unwrap_err().reason(), "closed");
    quic.renew(&tls_b).unwrap();
    let renewed = connect(quic.address().unwrap(), &tls_a, node_a);
    let accept = async { quic.accept().await.unwrap().shake(&tls_b).await.map(drop) };
    let (renewed, _) = tokio::join!(renewed, accept);
    assert_eq!(renewed.unwrap_err().reason(), "other_key", "it has the new key");
}
