//! TLS towards servers that we call.

use super::{PostQuantum, TlsError, provider, read_certificates, read_key, read_roots};
use crate::config::Problems;
use crate::http::Io;
use crate::settings;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio_rustls::{TlsConnector, TlsStream};

settings! {
    /// TLS towards `https://` servers. Their certificates are always checked.
    pub struct ClientTlsSettings {
        /// CA file, PEM, that certificates are checked against. Empty: the system's CA certificates.
        ca: String = String::new() => Hot;
        /// Certificate chain, PEM, for servers that ask who is calling. Empty: none is shown.
        cert: String = String::new() => Hot;
        /// Private key of `cert`, PEM, readable by its owner only.
        key: String = String::new() => Hot;
        /// Name that certificates must be for. Empty: the host in the server's address.
        server_name: String = String::new() => Hot;
    }
}

/// How to speak TLS to the servers of one set of settings.
#[derive(Clone)]
pub struct TlsClient {
    any: TlsConnector,
    only_http1: TlsConnector,
    name: Option<ServerName<'static>>,
    /// What certificates are checked against, and what is shown of ourselves.
    roots: Arc<RootCertStore>,
    shown: Arc<[CertificateDer<'static>]>,
}

impl std::fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsClient")
    }
}

impl ClientTlsSettings {
    /// The files whose change should lead to a reload.
    pub fn files(&self, base: &Path) -> Vec<PathBuf> {
        let named = [&self.ca, &self.cert, &self.key];
        named.into_iter().filter(|name| !name.is_empty()).map(|name| base.join(name)).collect()
    }

    /// What is wrong with the files; reads them, connects nowhere.
    pub fn check(&self, base: &Path, at: &str, problems: &mut Problems) {
        if self.cert.is_empty() != self.key.is_empty() {
            problems.add(at, "cert and key must both be given, or neither");
        } else if let Err(error) = self.load(base) {
            problems.add(at, error.to_string());
        }
    }

    /// Reads the files. Paths are relative to `base`. Blocks on file I/O.
    pub fn load(&self, base: &Path) -> Result<TlsClient, TlsError> {
        let roots = if self.ca.is_empty() { system_roots()? } else { read_roots(&base.join(&self.ca))? };
        let roots = Arc::new(roots);
        let builder = ClientConfig::builder_with_provider(Arc::new(provider(PostQuantum::Hybrid)))
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Mismatch)?
            .with_root_certificates(roots.clone());
        let mut shown = Vec::new();
        let mut any = if self.cert.is_empty() {
            builder.with_no_client_auth()
        } else {
            shown = read_certificates(&base.join(&self.cert))?;
            let key = read_key(&base.join(&self.key))?;
            builder.with_client_auth_cert(shown.clone(), key).map_err(TlsError::Mismatch)?
        };
        let name = if self.server_name.is_empty() { None } else { Some(name_of(&self.server_name)?) };
        let mut only_http1 = any.clone();
        only_http1.alpn_protocols = vec![b"http/1.1".to_vec()];
        any.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let (any, only_http1) = (TlsConnector::from(Arc::new(any)), Arc::new(only_http1).into());
        Ok(TlsClient { any, only_http1, name, roots, shown: shown.into() })
    }
}

fn name_of(host: &str) -> Result<ServerName<'static>, TlsError> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    ServerName::try_from(bare.to_owned()).map_err(|_invalid| TlsError::Name(host.to_owned()))
}

fn system_roots() -> Result<RootCertStore, TlsError> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let why = found.errors.first().map_or_else(|| "none found".to_owned(), ToString::to_string);
        return Err(TlsError::NoRoots(why));
    }
    Ok(roots)
}

impl TlsClient {
    /// Whether a connection made by the one could have been made by the other. The key follows from its certificate.
    pub fn is_same(&self, other: &TlsClient) -> bool {
        self.name == other.name && self.shown == other.shown && self.roots.roots == other.roots.roots
    }

    /// Shakes hands with a server; says whether it chose HTTP/2.
    pub async fn connect(&self, io: Io, host: &str, only_http1: bool) -> std::io::Result<(Io, bool)> {
        let name = match &self.name {
            Some(name) => name.clone(),
            None => name_of(host).map_err(std::io::Error::other)?,
        };
        let connector = if only_http1 { &self.only_http1 } else { &self.any };
        let stream = connector.connect(name, io).await?;
        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        Ok((Io::from(TlsStream::from(stream)), is_http2))
    }
}
