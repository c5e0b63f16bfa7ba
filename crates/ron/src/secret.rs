//! Private keys in files: Ed25519 as everywhere in a node, and ML-DSA-44 for signers, in the PKCS#8 of RFC 9881.

use crate::Usage;
use anyhow::Context as _;
use clap::ValueEnum;
use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{ObjectIdentifier, PrivateKeyInfo, SecretDocument};
use ron_kernel::key::{KeyError, PrivateKey, check_private, write_private};
use ron_log::key::{MlDsa44Key, SigningKeys};
use std::path::{Path, PathBuf};

const ML_DSA_44: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.16.840.1.101.3.4.3.17");
/// All of a key's file but the seed at its end, in DER.
const BEFORE_SEED: [u8; 22] = [
    0x30, 0x34, 0x02, 0x01, 0x00, 0x30, 0x0b, 0x06, 0x09, 0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x03,
    0x11, 0x04, 0x22, 0x80, 0x20,
];
/// The key within: the seed alone, or the seed and the key it expands to, as OpenSSL writes both.
const SEED_ALONE: [u8; 2] = [0x80, 0x20];
const SEED_AND_KEY: [u8; 6] = [0x30, 0x82, 0x0a, 0x26, 0x04, 0x20];

/// What a key signs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Algorithm {
    #[value(name = "ed25519")]
    Ed25519,
    /// Post-quantum, for signers of a registry only.
    #[value(name = "ml-dsa-44")]
    MlDsa44,
}

/// A private key.
pub(crate) enum Secret {
    Ed25519(PrivateKey),
    /// By what determines it.
    MlDsa44([u8; 32]),
}

impl Secret {
    pub(crate) fn generate(algorithm: Algorithm) -> anyhow::Result<Secret> {
        // Both are made of 32 random bytes.
        let key = PrivateKey::generate()?;
        Ok(match algorithm {
            Algorithm::Ed25519 => Secret::Ed25519(key),
            Algorithm::MlDsa44 => Secret::MlDsa44(key.seed()),
        })
    }

    /// Reads a key file; refuses one that others can read.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Secret> {
        match PrivateKey::read(path) {
            Ok(key) => Ok(Secret::Ed25519(key)),
            Err(KeyError::Format { .. }) => {
                let seed = std::fs::read_to_string(path).ok().and_then(|text| seed(&text));
                let what = "is no Ed25519 or ML-DSA-44 key in PKCS#8 PEM; `ron key new --out FILE` makes one";
                let seed = seed.with_context(|| format!("{}: {what}", path.display()))?;
                check_private(path)?;
                Ok(Secret::MlDsa44(seed))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Writes a new key file of mode 0600; an existing file is never overwritten.
    pub(crate) fn write_new(&self, path: &Path) -> anyhow::Result<()> {
        match self {
            Secret::Ed25519(key) => Ok(key.write_new(path)?),
            Secret::MlDsa44(seed) => {
                let der = SecretDocument::try_from([&BEFORE_SEED[..], seed].concat());
                let pem = der.and_then(|der| der.to_pem("PRIVATE KEY", LineEnding::LF));
                let pem = pem.map_err(|error| anyhow::anyhow!("a key could not be made: {error}"))?;
                Ok(write_private(path, pem.as_bytes())?)
            }
        }
    }

    /// Its public half, as text.
    pub(crate) fn public(&self) -> String {
        match self {
            Secret::Ed25519(key) => key.public().to_string(),
            Secret::MlDsa44(seed) => MlDsa44Key::from_seed(seed).public().to_string(),
        }
    }
}

/// The seed of an ML-DSA-44 key.
fn seed(pem: &str) -> Option<[u8; 32]> {
    let (_, der) = SecretDocument::from_pem(pem).ok()?;
    let key = PrivateKeyInfo::try_from(der.as_bytes()).ok().filter(|key| key.algorithm.oid == ML_DSA_44)?;
    let alone = key.private_key.strip_prefix(&SEED_ALONE).filter(|seed| seed.len() == 32);
    let first = alone.or_else(|| key.private_key.strip_prefix(&SEED_AND_KEY));
    first.and_then(<[u8]>::first_chunk).copied()
}

/// What a signer signs with: the key of one file, or those of two.
pub(crate) fn signing_keys(files: &[PathBuf]) -> anyhow::Result<SigningKeys> {
    let ed = |key: &PrivateKey| SigningKey::from_bytes(&key.seed());
    let keys = files.iter().map(|file| Secret::read(file)).collect::<Result<Vec<_>, _>>()?;
    Ok(match keys.as_slice() {
        [Secret::Ed25519(key)] => SigningKeys::Ed25519(ed(key)),
        [Secret::MlDsa44(seed)] => SigningKeys::MlDsa44(MlDsa44Key::from_seed(seed)),
        [Secret::Ed25519(a), Secret::MlDsa44(b)] | [Secret::MlDsa44(b), Secret::Ed25519(a)] => {
            SigningKeys::Hybrid(ed(a), MlDsa44Key::from_seed(b))
        }
        _ => {
            let wants = "a signer has one key, or one of each algorithm";
            return Err(Usage(format!("--key was given {} times: {wants}", keys.len())).into());
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_post_quantum_key_survives_its_file_whoever_wrote_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("k.pem");
        let key = Secret::generate(Algorithm::MlDsa44).unwrap();
        key.write_new(&path).unwrap();
        assert_eq!(Secret::read(&path).unwrap().public(), key.public());
        assert!(key.write_new(&path).is_err(), "never overwritten");
        // With the expanded key behind the seed.
        let Secret::MlDsa44(seed) = key else { unreachable!("as it was asked for") };
        let mut der = vec![0x30, 0x82, 0x0a, 0x3e, 0x02, 0x01, 0x00];
        der.extend(&BEFORE_SEED[5..18]);
        der.extend([0x04, 0x82, 0x0a, 0x2a]);
        der.extend(SEED_AND_KEY);
        der.extend(seed);
        der.extend([0x04, 0x82, 0x0a, 0x00]);
        der.extend([7; 2560]);
        let pem = SecretDocument::try_from(der).unwrap().to_pem("PRIVATE KEY", LineEnding::LF).unwrap();
        std::fs::write(&path, pem.as_bytes()).unwrap();
        assert_eq!(Secret::read(&path).unwrap().public(), Secret::MlDsa44(seed).public());
        std::fs::write(&path, "hello").unwrap();
        let refused = Secret::read(&path).err().unwrap().to_string();
        assert!(refused.contains("is no Ed25519 or ML-DSA-44 key"), "{refused}");
    }
}
