//! Keys of signers: public ones as text and as what checks a signature, private ones as what makes it.

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use fips204::ml_dsa_44;
use fips204::traits::{KeyGen as _, SerDes as _, Signer as _, Verifier as _};
use std::fmt;

/// Bytes of an ML-DSA-44 public key and signature.
pub const ML_DSA_44_KEY: usize = ml_dsa_44::PK_LEN;
pub const ML_DSA_44_SIG: usize = ml_dsa_44::SIG_LEN;

/// What a key signs with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    Ed25519,
    MlDsa44,
}

/// A public key: `ed25519:` or `ml-dsa-44:` and base64url without padding.
#[derive(Clone)]
pub enum PublicKey {
    Ed25519(ron_ed25519::Key),
    MlDsa44(Box<ml_dsa_44::PublicKey>),
}

/// A key's text says no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a key is `ed25519:` or `ml-dsa-44:` and base64url without padding")]
pub struct KeyError;

impl PublicKey {
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let (name, encoded) = text.split_once(':').ok_or(KeyError)?;
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(encoded).ok().ok_or(KeyError)?;
        match name {
            "ed25519" => Self::ed25519(&bytes),
            "ml-dsa-44" => {
                let bytes = <[u8; ML_DSA_44_KEY]>::try_from(bytes).ok().ok_or(KeyError)?;
                let key = ml_dsa_44::PublicKey::try_from_bytes(bytes).ok().ok_or(KeyError)?;
                Ok(Self::MlDsa44(Box::new(key)))
            }
            _ => Err(KeyError),
        }
    }

    /// A key of small order would accept signatures nobody made.
    pub(crate) fn ed25519(bytes: &[u8]) -> Result<Self, KeyError> {
        let bytes = <&[u8; 32]>::try_from(bytes).ok().ok_or(KeyError)?;
        let key = ed25519_dalek::VerifyingKey::from_bytes(bytes).ok().ok_or(KeyError)?;
        if key.is_weak() { Err(KeyError) } else { Ok(Self::Ed25519(key.into())) }
    }

    pub fn algorithm(&self) -> Algorithm {
        match self {
            Self::Ed25519(_) => Algorithm::Ed25519,
            Self::MlDsa44(_) => Algorithm::MlDsa44,
        }
    }

    pub(crate) fn verify(&self, message: &[u8], signature: &[u8]) -> bool {
        match self {
            Self::Ed25519(key) => {
                <&[u8; 64]>::try_from(signature).is_ok_and(|signature| key.verify(message, signature))
            }
            Self::MlDsa44(key) => <[u8; ML_DSA_44_SIG]>::try_from(signature)
                .is_ok_and(|signature| key.verify(message, &signature, &[])),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Ed25519(key) => key.as_bytes().to_vec(),
            Self::MlDsa44(key) => key.clone().into_bytes().to_vec(),
        }
    }
}

impl PartialEq for PublicKey {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Ed25519(a), Self::Ed25519(b)) => a == b,
            (Self::MlDsa44(_), Self::MlDsa44(_)) => self.bytes() == other.bytes(),
            _ => false,
        }
    }
}

impl Eq for PublicKey {}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Ed25519(_) => "ed25519",
            Self::MlDsa44(_) => "ml-dsa-44",
        };
        write!(f, "{name}:{}", BASE64_URL_SAFE_NO_PAD.encode(self.bytes()))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An ML-DSA-44 private key.
pub struct MlDsa44Key {
    public: Box<ml_dsa_44::PublicKey>,
    private: Box<ml_dsa_44::PrivateKey>,
}

impl MlDsa44Key {
    /// The key that 32 random bytes determine; they are all that needs to be kept.
    pub fn from_seed(seed: &[u8; 32]) -> Self {
        let (public, private) = ml_dsa_44::KG::keygen_from_seed(seed);
        Self { public: Box::new(public), private: Box::new(private) }
    }

    pub fn public(&self) -> PublicKey {
        PublicKey::MlDsa44(self.public.clone())
    }

    /// Without randomness, as the standard allows: who signs the same again makes the same signature, and a registry
    /// takes that for the same approval.
    pub(crate) fn sign(&self, message: &[u8]) -> Box<[u8; ML_DSA_44_SIG]> {
        let signed = self.private.try_sign_with_seed(&[0; 32], message, &[]);
        Box::new(signed.expect("a key that was made signs, under no context"))
    }
}

impl fmt::Debug for MlDsa44Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MlDsa44Key of {}", self.public())
    }
}

/// What a signer signs with: one key, or one of each algorithm.
#[derive(Debug)]
pub enum SigningKeys {
    Ed25519(ed25519_dalek::SigningKey),
    MlDsa44(MlDsa44Key),
    Hybrid(ed25519_dalek::SigningKey, MlDsa44Key),
}
