//! Ed25519 keys in PKCS#8 PEM files that only their owner can read.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{DecodePrivateKey, EncodePrivateKey, KeypairBytes};
use std::fmt;
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::str::FromStr;

#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("{path}: cannot be read: {error}")]
    Read { path: String, error: std::io::Error },
    #[error("{path}: cannot be written: {error}")]
    Write { path: String, error: std::io::Error },
    #[error("{path}: others can read this private key (mode {mode:o}); run: chmod 600 {path}")]
    Mode { path: String, mode: u32 },
    #[error("{path}: is no Ed25519 key in PKCS#8 PEM; `ron key new --out FILE` makes one")]
    Format { path: String },
    #[error("a key could not be made: {0}")]
    Make(String),
}

/// A private key.
#[derive(Clone)]
pub struct PrivateKey(SigningKey);

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrivateKey of {}", self.public())
    }
}

impl PrivateKey {
    pub fn generate() -> Result<PrivateKey, KeyError> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(|error| KeyError::Make(error.to_string()))?;
        Ok(PrivateKey(SigningKey::from_bytes(&seed)))
    }

    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key().to_bytes())
    }

    pub fn seed(&self) -> [u8; 32] {
        self.0.to_bytes()
    }

    /// Reads a key file; refuses one that others can read.
    pub fn read(path: &Path) -> Result<PrivateKey, KeyError> {
        let name = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|error| KeyError::Read { path: name.clone(), error })?;
        // First whether it is one: another file's mode is nobody's business.
        let key = std::str::from_utf8(&bytes).ok().and_then(|text| SigningKey::from_pkcs8_pem(text).ok());
        let key = key.ok_or(KeyError::Format { path: name })?;
        check_private(path)?;
        Ok(PrivateKey(key))
    }

    /// Writes a new key file of mode 0600; an existing file is never overwritten.
    pub fn write_new(&self, path: &Path) -> Result<(), KeyError> {
        // Version 1, without the public key: the form that OpenSSL reads.
        let bytes = KeypairBytes { secret_key: self.0.to_bytes(), public_key: None };
        let pem = bytes.to_pkcs8_pem(LineEnding::LF).map_err(|error| KeyError::Make(error.to_string()))?;
        write_private(path, pem.as_bytes())
    }
}

/// A public key, written `ed25519:<base64url of 32 bytes>`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PublicKey(pub [u8; 32]);

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ed25519:{}", URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PublicKey {
    type Err = String;

    fn from_str(text: &str) -> Result<PublicKey, String> {
        let bytes = text.strip_prefix("ed25519:").and_then(|text| URL_SAFE_NO_PAD.decode(text).ok());
        let bytes = bytes.and_then(|bytes| <[u8; 32]>::try_from(bytes).ok());
        let on_curve = bytes.filter(|bytes| ed25519_dalek::VerifyingKey::from_bytes(bytes).is_ok());
        on_curve.map(PublicKey).ok_or_else(|| {
            format!(
                "{text:?} is no public key: expected ed25519: and 43 characters, as `ron key show` prints it"
            )
        })
    }
}

/// Refuses a private file that others can read.
pub fn check_private(path: &Path) -> Result<(), KeyError> {
    let name = path.display().to_string();
    let meta = std::fs::metadata(path).map_err(|error| KeyError::Read { path: name.clone(), error })?;
    let mode = meta.permissions().mode() & 0o777;
    if mode & 0o077 == 0 { Ok(()) } else { Err(KeyError::Mode { path: name, mode }) }
}

/// Writes a new file of mode 0600; an existing one is an error.
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<(), KeyError> {
    let write = || {
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|error| KeyError::Write { path: path.display().to_string(), error })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_survives_its_file_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("k.pem");
        let key = PrivateKey::generate().unwrap();
        key.write_new(&path).unwrap();
        assert_eq!(PrivateKey::read(&path).unwrap().public(), key.public());
        assert!(key.write_new(&path).unwrap_err().to_string().contains("exists"), "never overwritten");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(PrivateKey::read(&path).unwrap_err().to_string().contains("chmod 600"));
    }

    #[test]
    fn what_is_no_key_is_refused_with_advice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("k.pem");
        write_private(&path, b"hello").unwrap();
        assert!(PrivateKey::read(&path).unwrap_err().to_string().contains("ron key new"));
        assert!(
            PrivateKey::read(&dir.path().join("none")).unwrap_err().to_string().contains("cannot be read")
        );
    }

    #[test]
    fn public_keys_are_read_as_they_are_written() {
        let key = PrivateKey::generate().unwrap().public();
        assert_eq!(key.to_string().parse::<PublicKey>(), Ok(key));
        for bad in ["", "ed25519:", "ed25519:AAAA", "rsa:xyz", &key.to_string()[8..]] {
            assert!(bad.parse::<PublicKey>().is_err(), "{bad}");
        }
    }
}
