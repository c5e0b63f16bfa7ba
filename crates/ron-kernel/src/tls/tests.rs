//! Settings that work, settings that cannot, and handshakes under each key exchange policy.

use super::*;
use rustls::pki_types::ServerName;
use tokio::net::{TcpListener, TcpStream};

fn settings(pq: PostQuantum) -> TlsSettings {
    let (cert, key) = ("server.pem".to_owned(), "server.key".to_owned());
    TlsSettings { cert, key, pq, ..TlsSettings::default() }
}

fn client(dir: &Path, pq: PostQuantum) -> rustls::ClientConfig {
    let mut roots = RootCertStore::empty();
    for certificate in read_certificates(&dir.join("ca.pem")).unwrap() {
        roots.add(certificate).unwrap();
    }
    let builder = rustls::ClientConfig::builder_with_provider(Arc::new(provider(pq)));
    builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots).with_no_client_auth()
}

/// Shakes hands and names the key exchange group, or says why not.
async fn shake(dir: &Path, server: &TlsSettings, client: rustls::ClientConfig) -> Result<String, String> {
    let server = TlsServer::new(server.load(dir).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (accepted, _) = listener.accept().await.unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(client));
    let name = ServerName::try_from("localhost").unwrap();
    let (theirs, ours) = tokio::join!(connector.connect(name, stream), server.accept(Io::from(accepted)));
    let ours = ours.map_err(|error| error.to_string())?;
    theirs.map_err(|error| error.to_string())?;
    let group = ours.get_ref().1.negotiated_key_exchange_group().unwrap();
    Ok(format!("{:?}", group.name()))
}

#[tokio::test]
async fn the_key_exchange_follows_the_policy() {
    let dir = tempfile::tempdir().unwrap();
    write_dev_ca(dir.path()).unwrap();
    let at = dir.path();
    let shake = |server, theirs| async move { shake(at, &settings(server), client(at, theirs)).await };
    assert_eq!(shake(PostQuantum::Hybrid, PostQuantum::Hybrid).await.unwrap(), "X25519MLKEM768");
    assert_eq!(shake(PostQuantum::Hybrid, PostQuantum::Off).await.unwrap(), "X25519");
    assert_eq!(shake(PostQuantum::Off, PostQuantum::Hybrid).await.unwrap(), "X25519");
    assert!(shake(PostQuantum::Required, PostQuantum::Off).await.is_err());
}

#[tokio::test]
async fn a_client_without_a_certificate_is_refused_under_mtls() {
    let dir = tempfile::tempdir().unwrap();
    write_dev_ca(dir.path()).unwrap();
    let mutual = TlsSettings { client_ca: "ca.pem".to_owned(), ..settings(PostQuantum::Hybrid) };
    assert!(shake(dir.path(), &mutual, client(dir.path(), PostQuantum::Hybrid)).await.is_err());
}

#[test]
fn what_cannot_work_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    write_dev_ca(dir.path()).unwrap();
    let load = |settings: TlsSettings| settings.load(dir.path()).unwrap_err().to_string();
    assert!(
        load(TlsSettings { cert: "none.pem".into(), ..settings(PostQuantum::Hybrid) }).contains("none.pem")
    );
    assert!(
        load(TlsSettings { key: "client.key".into(), ..settings(PostQuantum::Hybrid) })
            .contains("do not work together")
    );
    assert!(
        load(TlsSettings { min: MinVersion::Tls12, ..settings(PostQuantum::Required) }).contains("hybrid")
    );
    let key = dir.path().join("server.key");
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    assert!(load(settings(PostQuantum::Hybrid)).contains("chmod 600"), "a key others can read");
}
