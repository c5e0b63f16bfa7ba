//! A certificate authority for development: one command, and `curl --cacert` works.

use crate::key::{KeyError, write_private};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use std::path::Path;

/// Writes `ca.pem`, `server.pem`, `server.key`, `client.pem` and `client.key` into `dir`, for localhost.
///
/// The CA's own key is thrown away: nobody can sign more certificates with it, so trusting it is harmless.
pub fn write_dev_ca(dir: &Path) -> Result<(), KeyError> {
    let files =
        make(&["localhost", "127.0.0.1", "::1"]).map_err(|error| KeyError::Make(error.to_string()))?;
    let io = |path: &Path, error: std::io::Error| KeyError::Write { path: path.display().to_string(), error };
    std::fs::create_dir_all(dir).map_err(|error| io(dir, error))?;
    for (name, text, private) in files {
        let path = dir.join(name);
        if private {
            write_private(&path, text.as_bytes())?;
        } else {
            std::fs::write(&path, text).map_err(|error| io(&path, error))?;
        }
    }
    Ok(())
}

fn make(names: &[&str]) -> Result<[(&'static str, String, bool); 5], rcgen::Error> {
    let ca_key = KeyPair::generate()?;
    let mut ca = CertificateParams::default();
    ca.distinguished_name.push(DnType::CommonName, "ron development CA");
    ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let ca_cert = ca.self_signed(&ca_key)?;
    let issuer = Issuer::from_params(&ca, &ca_key);
    let leaf = |name: &str, names: &[&str], usage: ExtendedKeyUsagePurpose| {
        let key = KeyPair::generate()?;
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![usage];
        params.use_authority_key_identifier_extension = true;
        Ok::<_, rcgen::Error>((params.signed_by(&key, &issuer)?.pem(), key.serialize_pem()))
    };
    let (server, server_key) = leaf("localhost", names, ExtendedKeyUsagePurpose::ServerAuth)?;
    let (client, client_key) = leaf("client", &["client"], ExtendedKeyUsagePurpose::ClientAuth)?;
    Ok([
        ("ca.pem", ca_cert.pem(), false),
        ("server.pem", server, false),
        ("server.key", server_key, true),
        ("client.pem", client, false),
        ("client.key", client_key, true),
    ])
}
