//! A set of public keys as issuers publish it (RFC 7517). Pure.

use crate::config::JwtAlgorithm;
use aws_lc_rs::signature::{self, RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::Value;

/// The largest set that is read, and the most keys in it.
pub(crate) const SET_BYTES_MAX: usize = 256 << 10;
const KEYS_MAX: usize = 64;
/// Keys that are tried for a token which does not say whose it is: each try costs a signature's check.
const TRIES_MAX: usize = 4;

/// The keys that can be used for something.
#[derive(Debug)]
pub(crate) struct KeySet {
    keys: Vec<Key>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum KeySetError {
    #[error("it is no JSON object with a list of `keys`")]
    Form,
    #[error("it has more than {KEYS_MAX} keys or {} KiB", SET_BYTES_MAX >> 10)]
    Large,
    #[error(
        "it holds no public key for signatures of a supported kind (Ed25519, P-256, P-384, RSA of 2048 bits or more)"
    )]
    Unusable,
}

#[derive(Debug)]
struct Key {
    id: Option<String>,
    /// The only algorithm that it is for, if it says so.
    only: Option<JwtAlgorithm>,
    material: Material,
}

#[derive(Debug)]
enum Material {
    Ed25519(Vec<u8>),
    /// Uncompressed points.
    P256(Vec<u8>),
    P384(Vec<u8>),
    Rsa(RsaPublicKeyComponents<Vec<u8>>),
}

impl JwtAlgorithm {
    /// The algorithm of that name in a header. Neither `none` nor a shared secret is one.
    pub(crate) fn named(name: &str) -> Option<JwtAlgorithm> {
        Some(match name {
            // RFC 9864 calls it by its curve.
            "EdDSA" | "Ed25519" => JwtAlgorithm::EdDsa,
            "ES256" => JwtAlgorithm::Es256,
            "ES384" => JwtAlgorithm::Es384,
            "RS256" => JwtAlgorithm::Rs256,
            "RS384" => JwtAlgorithm::Rs384,
            "RS512" => JwtAlgorithm::Rs512,
            "PS256" => JwtAlgorithm::Ps256,
            "PS384" => JwtAlgorithm::Ps384,
            "PS512" => JwtAlgorithm::Ps512,
            _ => return None,
        })
    }

    fn rsa(self) -> Option<&'static RsaParameters> {
        Some(match self {
            JwtAlgorithm::Rs256 => &signature::RSA_PKCS1_2048_8192_SHA256,
            JwtAlgorithm::Rs384 => &signature::RSA_PKCS1_2048_8192_SHA384,
            JwtAlgorithm::Rs512 => &signature::RSA_PKCS1_2048_8192_SHA512,
            JwtAlgorithm::Ps256 => &signature::RSA_PSS_2048_8192_SHA256,
            JwtAlgorithm::Ps384 => &signature::RSA_PSS_2048_8192_SHA384,
            JwtAlgorithm::Ps512 => &signature::RSA_PSS_2048_8192_SHA512,
            _ => return None,
        })
    }
}

impl KeySet {
    /// Reads a set; keys that are of no use here are left out.
    pub(crate) fn parse(text: &[u8]) -> Result<KeySet, KeySetError> {
        if text.len() > SET_BYTES_MAX {
            return Err(KeySetError::Large);
        }
        let set: Value = serde_json::from_slice(text).map_err(|_bad| KeySetError::Form)?;
        let keys = set["keys"].as_array().ok_or(KeySetError::Form)?;
        if keys.len() > KEYS_MAX {
            return Err(KeySetError::Large);
        }
        let keys: Vec<Key> = keys.iter().filter_map(Key::parse).collect();
        if keys.is_empty() { Err(KeySetError::Unusable) } else { Ok(KeySet { keys }) }
    }

    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = Option<&str>> {
        self.keys.iter().map(|key| key.id.as_deref())
    }

    /// Whether a key of that id could check this algorithm; without an id, whether any could.
    pub(crate) fn knows(&self, id: Option<&str>, algorithm: JwtAlgorithm) -> bool {
        self.fitting(id, algorithm).next().is_some()
    }

    /// Whether a key of that id made the signature; without an id, whether one of the first few did.
    pub(crate) fn verifies(
        &self,
        id: Option<&str>,
        algorithm: JwtAlgorithm,
        message: &[u8],
        signature: &[u8],
    ) -> bool {
        self.fitting(id, algorithm)
            .take(TRIES_MAX)
            .any(|key| key.material.verifies(algorithm, message, signature))
    }

    fn fitting(&self, id: Option<&str>, algorithm: JwtAlgorithm) -> impl Iterator<Item = &Key> {
        self.keys.iter().filter(move |key| {
            let named = id.is_none_or(|id| key.id.as_deref() == Some(id));
            named && key.only.is_none_or(|only| only == algorithm) && key.material.fits(algorithm)
        })
    }
}

impl Key {
    /// `None` if it is of no use: not for signatures, of another kind, or too weak.
    fn parse(key: &Value) -> Option<Key> {
        let text = |name: &str| key[name].as_str();
        let bytes = |name: &str| URL_SAFE_NO_PAD.decode(text(name)?.trim_end_matches('=')).ok();
        if text("use").is_some_and(|purpose| purpose != "sig") {
            return None;
        }
        let only = match text("alg") {
            Some(name) => Some(JwtAlgorithm::named(name)?),
            None => None,
        };
        let point = |length: usize| {
            let (x, y) = (bytes("x")?, bytes("y")?);
            (x.len() == length && y.len() == length).then(|| [&[4][..], &x, &y].concat())
        };
        let material = match (text("kty")?, text("crv")) {
            ("OKP", Some("Ed25519")) => Material::Ed25519(bytes("x").filter(|x| x.len() == 32)?),
            ("EC", Some("P-256")) => Material::P256(point(32)?),
            ("EC", Some("P-384")) => Material::P384(point(48)?),
            ("RSA", _) => {
                let (n, e) = (bytes("n")?, bytes("e")?);
                let n = n.into_iter().skip_while(|byte| *byte == 0).collect::<Vec<u8>>();
                if !(256..=1024).contains(&n.len()) || !(1..=8).contains(&e.len()) {
                    return None;
                }
                Material::Rsa(RsaPublicKeyComponents { n, e })
            }
            _ => return None,
        };
        Some(Key { id: text("kid").map(str::to_owned), only, material })
    }
}

impl Material {
    fn fits(&self, algorithm: JwtAlgorithm) -> bool {
        match self {
            Material::Ed25519(_) => algorithm == JwtAlgorithm::EdDsa,
            Material::P256(_) => algorithm == JwtAlgorithm::Es256,
            Material::P384(_) => algorithm == JwtAlgorithm::Es384,
            Material::Rsa(_) => algorithm.rsa().is_some(),
        }
    }

    fn verifies(&self, algorithm: JwtAlgorithm, message: &[u8], signature: &[u8]) -> bool {
        let good =
            match self {
                Material::Ed25519(key) => {
                    UnparsedPublicKey::new(&signature::ED25519, key).verify(message, signature)
                }
                Material::P256(key) => UnparsedPublicKey::new(&signature::ECDSA_P256_SHA256_FIXED, key)
                    .verify(message, signature),
                Material::P384(key) => UnparsedPublicKey::new(&signature::ECDSA_P384_SHA384_FIXED, key)
                    .verify(message, signature),
                Material::Rsa(key) => match algorithm.rsa() {
                    Some(parameters) => key.verify(parameters, message, signature),
                    None => return false,
                },
            };
        good.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_of_no_use_are_left_out_and_a_set_without_others_is_refused() {
        let x = URL_SAFE_NO_PAD.encode([1; 32]);
        let good = json!({"kty": "OKP", "crv": "Ed25519", "kid": "a", "x": x});
        let with = |name: &str, value: Value| {
            let mut key = good.clone();
            key[name] = value;
            key
        };
        let useless = [
            json!({"kty": "oct", "k": "c2VjcmV0"}),
            with("use", json!("enc")),
            with("alg", json!("HS256")),
            with("x", json!(URL_SAFE_NO_PAD.encode([1; 31]))),
            json!({"kty": "EC", "crv": "P-256", "x": x}),
            json!({"kty": "RSA", "n": URL_SAFE_NO_PAD.encode([255; 128]), "e": "AQAB"}),
            json!("no key at all"),
        ];
        let parse = |keys: &[Value]| KeySet::parse(json!({"keys": keys}).to_string().as_bytes());
        assert_eq!(parse(&useless).unwrap_err(), KeySetError::Unusable);
        let set = parse(&[&useless[..], std::slice::from_ref(&good)].concat()).unwrap();
        assert_eq!(set.len(), 1);
        assert!(set.knows(Some("a"), JwtAlgorithm::EdDsa) && set.knows(None, JwtAlgorithm::EdDsa));
        assert!(!set.knows(Some("b"), JwtAlgorithm::EdDsa) && !set.knows(Some("a"), JwtAlgorithm::Es256));
        assert_eq!(parse(&vec![good; KEYS_MAX + 1]).unwrap_err(), KeySetError::Large);
        assert_eq!(KeySet::parse(&vec![b' '; SET_BYTES_MAX + 1]).unwrap_err(), KeySetError::Large);
        for text in ["", "[]", "{}", "{\"keys\":{}}"] {
            assert_eq!(KeySet::parse(text.as_bytes()).unwrap_err(), KeySetError::Form, "{text}");
        }
    }
}
