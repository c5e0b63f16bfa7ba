//! TLS for listeners and towards servers: rustls, certificates that reload without dropping a connection, mTLS, hybrid key exchange.

mod client;
mod dev_ca;

pub use client::{ClientTlsSettings, TlsClient};
pub use dev_ca::write_dev_ca;

use crate::config::Problems;
use crate::http::Io;
use crate::key::{KeyError, check_private};
use crate::{choice, settings};
use arc_swap::ArcSwap;
use rustls::crypto::{CryptoProvider, SupportedKxGroup, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, version};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio_rustls::server::TlsStream;

choice! {
    /// The lowest version of TLS that is spoken.
    pub enum MinVersion {
        Tls12 = "1.2",
        Tls13 = "1.3",
    }
}

choice! {
    /// Key exchange that also resists quantum computers (X25519MLKEM768).
    pub enum PostQuantum {
        /// Not offered.
        Off = "off",
        /// Preferred, others allowed.
        Hybrid = "hybrid",
        /// Nothing else is accepted.
        Required = "required",
    }
}

settings! {
    /// A TLS listener.
    pub struct TlsSettings {
        /// Address of the TLS listener. Port 0 picks a free one.
        listen: SocketAddr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0)) => Restart;
        /// Certificate chain, PEM. Read again when it changes.
        cert: String = String::new() => Required;
        /// Private key, PEM, readable by its owner only. Read again when it changes.
        key: String = String::new() => Required;
        /// CA file, PEM: clients must show a certificate signed by it. Empty: clients need none.
        client_ca: String = String::new() => Hot;
        /// Lowest version spoken.
        min: MinVersion = MinVersion::Tls13 => Hot;
        /// Hybrid post-quantum key exchange.
        pq: PostQuantum = PostQuantum::Hybrid => Hot;
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error(
        "{path}: cannot be read as PEM certificates: {reason}; `ron init DIR --tls` makes a development set"
    )]
    Certificate { path: String, reason: String },
    #[error("{path}: cannot be read as a PEM private key: {reason}")]
    Key { path: String, reason: String },
    #[error(transparent)]
    Private(#[from] KeyError),
    #[error("certificate and key do not work together: {0}")]
    Mismatch(rustls::Error),
    #[error("min = \"1.2\" cannot be combined with pq = \"required\": TLS 1.2 has no hybrid key exchange")]
    Versions,
    #[error("this system has no CA certificates ({0}); install them or name a `ca` file")]
    NoRoots(String),
    #[error("{0:?} is no name that a certificate can be for")]
    Name(String),
}

/// The current TLS configuration of a listener.
#[derive(Debug)]
pub struct TlsServer {
    config: ArcSwap<ServerConfig>,
}

impl TlsServer {
    pub fn new(config: Arc<ServerConfig>) -> Arc<TlsServer> {
        Arc::new(TlsServer { config: ArcSwap::new(config) })
    }

    /// New connections use the new configuration; open ones keep theirs.
    pub fn replace(&self, config: Arc<ServerConfig>) {
        self.config.store(config);
    }

    pub(crate) async fn accept(&self, io: Io) -> std::io::Result<TlsStream<Io>> {
        tokio_rustls::TlsAcceptor::from(self.config.load_full()).accept(io).await
    }
}

/// The hosts, in lower case, and the URIs that a certificate is for.
pub(crate) fn names_of(certificate: &CertificateDer<'_>) -> Box<[Box<str>]> {
    let Ok(certificate) = webpki::EndEntityCert::try_from(certificate) else { return Box::default() };
    let hosts = certificate.valid_dns_names().map(str::to_ascii_lowercase);
    hosts.chain(certificate.valid_uri_names().map(str::to_owned)).map(Box::from).collect()
}

impl TlsSettings {
    /// The files whose change should lead to a reload.
    pub fn files(&self, base: &Path) -> Vec<PathBuf> {
        let named = [&self.cert, &self.key, &self.client_ca];
        named.into_iter().filter(|name| !name.is_empty()).map(|name| base.join(name)).collect()
    }

    /// Every problem with the files, by key; reads them, opens no port.
    pub fn check(&self, base: &Path, at: &str, problems: &mut Problems) {
        let before = problems.list.len();
        for (key, name) in [("cert", &self.cert), ("client_ca", &self.client_ca)] {
            if !name.is_empty()
                && let Err(error) = read_certificates(&base.join(name))
            {
                problems.add(format!("{at}.{key}"), error.to_string());
            }
        }
        if !self.key.is_empty()
            && let Err(error) = read_key(&base.join(&self.key))
        {
            problems.add(format!("{at}.key"), error.to_string());
        }
        // Only what is each right can be wrong together.
        if problems.list.len() == before
            && !self.cert.is_empty()
            && let Err(error) = self.load(base)
        {
            problems.add(at, error.to_string());
        }
    }

    /// Reads the files and builds the configuration. Paths are relative to `base`. Blocks on file I/O.
    pub fn load(&self, base: &Path) -> Result<Arc<ServerConfig>, TlsError> {
        if self.min == MinVersion::Tls12 && self.pq == PostQuantum::Required {
            return Err(TlsError::Versions);
        }
        let certificates = read_certificates(&base.join(&self.cert))?;
        let key = read_key(&base.join(&self.key))?;
        let provider = Arc::new(provider(self.pq));
        let versions: &[_] = if self.min == MinVersion::Tls12 {
            &[&version::TLS13, &version::TLS12]
        } else {
            &[&version::TLS13]
        };
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)
            .map_err(TlsError::Mismatch)?;
        let builder = if self.client_ca.is_empty() {
            builder.with_no_client_auth()
        } else {
            let path = base.join(&self.client_ca);
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(read_roots(&path)?), provider);
            let wrong = |error: rustls::server::VerifierBuilderError| TlsError::Certificate {
                path: path.display().to_string(),
                reason: error.to_string(),
            };
            builder.with_client_cert_verifier(verifier.build().map_err(wrong)?)
        };
        let mut config = builder.with_single_cert(certificates, key).map_err(TlsError::Mismatch)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    check_private(path)?;
    PrivateKeyDer::from_pem_file(path)
        .map_err(|error| TlsError::Key { path: path.display().to_string(), reason: error.to_string() })
}

/// The certificates of a CA file, as roots.
pub fn read_roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in read_certificates(path)? {
        roots.add(certificate).map_err(|error| TlsError::Certificate {
            path: path.display().to_string(),
            reason: error.to_string(),
        })?;
    }
    Ok(roots)
}

/// The certificates of a PEM file.
pub fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |reason: String| TlsError::Certificate { path: path.display().to_string(), reason };
    let certificates: Result<Vec<_>, _> =
        CertificateDer::pem_file_iter(path).map_err(|error| wrong(error.to_string()))?.collect();
    let certificates = certificates.map_err(|error| wrong(error.to_string()))?;
    if certificates.is_empty() {
        Err(wrong("there is no certificate in it".to_owned()))
    } else {
        Ok(certificates)
    }
}

/// The cryptography, with the key exchange groups that the policy allows.
pub fn provider(pq: PostQuantum) -> CryptoProvider {
    let classical: [&'static dyn SupportedKxGroup; 3] =
        [aws_lc_rs::kx_group::X25519, aws_lc_rs::kx_group::SECP256R1, aws_lc_rs::kx_group::SECP384R1];
    let hybrid: [&'static dyn SupportedKxGroup; 1] = [aws_lc_rs::kx_group::X25519MLKEM768];
    let mut provider = aws_lc_rs::default_provider();
    provider.kx_groups = match pq {
        PostQuantum::Off => classical.to_vec(),
        PostQuantum::Hybrid => hybrid.into_iter().chain(classical).collect(),
        PostQuantum::Required => hybrid.to_vec(),
    };
    provider
}

#[cfg(test)]
mod tests;
