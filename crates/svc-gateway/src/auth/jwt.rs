//! JSON Web Tokens, checked locally (RFC 7519, and RFC 8725 for what not to believe). Pure: clock and keys come in.

use super::jwks::KeySet;
use crate::config::JwtAlgorithm;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ron_kernel::token::TOKEN_BYTES_MAX;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::slice::from_ref;

/// How far the issuer's clock may be from ours, in seconds.
const LEEWAY: u64 = 30;

/// What a token must be to be believed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rules {
    pub(crate) algorithms: Vec<JwtAlgorithm>,
    /// Empty: whoever has a key of the set.
    pub(crate) issuer: String,
    /// Empty: it may be for anybody.
    pub(crate) audience: String,
}

/// Why a token is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JwtError {
    /// It is no token, or says what may not be said.
    Malformed(&'static str),
    /// No key of the set is the one that it names.
    UnknownKey,
    Signature,
    Issuer,
    Expired,
    NotYet,
    Audience,
}

/// What a good token says.
#[derive(Debug)]
pub(crate) struct Claims(Map<String, Value>);

impl Claims {
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name)?.as_str()
    }

    /// What a claim says in one word; of a list, each of its words.
    pub(crate) fn words(&self, name: &str) -> impl Iterator<Item = Cow<'_, str>> {
        let claim = self.0.get(name);
        let list = claim.and_then(Value::as_array).map_or(claim.map_or(&[][..], from_ref), Vec::as_slice);
        list.iter().filter_map(|claim| match claim {
            Value::String(text) => Some(Cow::Borrowed(text.as_str())),
            Value::Bool(_) | Value::Number(_) => Some(Cow::Owned(claim.to_string())),
            _ => None,
        })
    }

    /// Whether it was given a scope: in `scope`, words between spaces, or in `scp`, words or a list.
    pub(crate) fn has_scope(&self, scope: &str) -> bool {
        ["scope", "scp"].into_iter().filter_map(|name| self.0.get(name)).any(|claim| match claim {
            Value::String(words) => words.split(' ').any(|word| word == scope),
            Value::Array(list) => list.iter().any(|word| word == scope),
            _ => false,
        })
    }

    /// A time in seconds; `None` if it is not stated, an error if it is no time.
    fn time(&self, name: &str) -> Result<Option<u64>, JwtError> {
        let wrong = JwtError::Malformed("exp and nbf must be numbers of seconds");
        match self.0.get(name) {
            None => Ok(None),
            // Fractions are allowed and do not matter; what is before 1970 is before now.
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
            Some(value) => Ok(Some(value.as_f64().ok_or(wrong)? as u64)),
        }
    }
}

impl Rules {
    /// Checks a token at this second.
    pub(crate) fn check(&self, token: &str, keys: &KeySet, now: u64) -> Result<Claims, JwtError> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(JwtError::Malformed("the token is too long"));
        }
        let malformed = JwtError::Malformed("a token is three parts of base64url with dots between them");
        let (message, signature) = token.rsplit_once('.').ok_or(malformed)?;
        let (header, payload) = message.split_once('.').ok_or(malformed)?;
        let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).map_err(|_bad| malformed);
        let object = |part: &str| {
            serde_json::from_slice::<Map<String, Value>>(&decode(part)?).map_err(|_bad| malformed)
        };
        let (header, signature) = (object(header)?, decode(signature)?);
        let text = |name: &str| header.get(name).and_then(Value::as_str);
        let algorithm = text("alg").and_then(JwtAlgorithm::named);
        let algorithm = algorithm.filter(|algorithm| self.algorithms.contains(algorithm));
        let algorithm =
            algorithm.ok_or(JwtError::Malformed("the token's algorithm is not one of those configured"))?;
        if header.contains_key("crit") {
            return Err(JwtError::Malformed("the token has a critical extension that is not known here"));
        }
        let id = text("kid");
        if !keys.knows(id, algorithm) {
            return Err(JwtError::UnknownKey);
        }
        if !keys.verifies(id, algorithm, message.as_bytes(), &signature) {
            return Err(JwtError::Signature);
        }
        let claims = Claims(object(payload)?);
        self.check_claims(&claims, now)?;
        Ok(claims)
    }

    fn check_claims(&self, claims: &Claims, now: u64) -> Result<(), JwtError> {
        if !self.issuer.is_empty() && claims.text("iss") != Some(&self.issuer) {
            return Err(JwtError::Issuer);
        }
        let expires = claims.time("exp")?.ok_or(JwtError::Malformed("the token never expires"))?;
        if expires.saturating_add(LEEWAY) <= now {
            return Err(JwtError::Expired);
        }
        if claims.time("nbf")?.is_some_and(|begins| begins > now.saturating_add(LEEWAY)) {
            return Err(JwtError::NotYet);
        }
        if !self.audience.is_empty() && !claims.words("aud").any(|word| word == self.audience) {
            return Err(JwtError::Audience);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aws_lc_rs::rand::SystemRandom;
    use aws_lc_rs::rsa::KeySize;
    use aws_lc_rs::signature::{
        ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair,
        EcdsaSigningAlgorithm, Ed25519KeyPair, KeyPair as _, RSA_PKCS1_SHA256, RSA_PSS_SHA256, RsaEncoding,
        RsaKeyPair,
    };
    use proptest::prelude::*;
    use serde_json::json;

    const NOW: u64 = 1_800_000_000;

    fn encode(bytes: impl AsRef<[u8]>) -> String {
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// A token made by `sign`.
    fn token(header: &Value, claims: &Value, sign: impl Fn(&[u8]) -> Vec<u8>) -> String {
        let message = format!("{}.{}", encode(header.to_string()), encode(claims.to_string()));
        let signature = sign(message.as_bytes());
        format!("{message}.{}", encode(signature))
    }

    fn set(keys: &Value) -> KeySet {
        KeySet::parse(json!({"keys": keys}).to_string().as_bytes()).unwrap()
    }

    fn ed25519(seed: u8) -> (Ed25519KeyPair, Value) {
        let pair = Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap();
        let x = encode(pair.public_key());
        let key = json!({"kty": "OKP", "crv": "Ed25519", "kid": format!("k{seed}"), "x": x});
        (pair, key)
    }

    fn rules() -> Rules {
        Rules {
            algorithms: vec![
                JwtAlgorithm::EdDsa,
                JwtAlgorithm::Es256,
                JwtAlgorithm::Es384,
                JwtAlgorithm::Rs256,
                JwtAlgorithm::Ps256,
            ],
            issuer: "https://issuer".into(),
            audience: "api".into(),
        }
    }

    fn claims() -> Value {
        json!({"iss": "https://issuer", "aud": ["x", "api"], "exp": NOW + 60, "sub": "joe"})
    }

    /// The good claims with one of them changed.
    fn with(name: &str, value: Value) -> Value {
        let mut claims = claims();
        claims[name] = value;
        claims
    }

    fn check_claims(claims: &Value) -> Result<(), JwtError> {
        let (pair, key) = ed25519(1);
        let token = token(&json!({"alg": "EdDSA", "kid": "k1"}), claims, |m| pair.sign(m).as_ref().into());
        rules().check(&token, &set(&json!([key])), NOW).map(drop)
    }

    #[test]
    fn every_algorithm_verifies_and_is_the_only_one_for_its_key() {
        let random = SystemRandom::new();
        let ecdsa = |algorithm: &'static EcdsaSigningAlgorithm, crv: &str, length: usize| {
            let pair = EcdsaKeyPair::generate(algorithm).unwrap();
            let point = pair.public_key().as_ref()[1..].to_vec();
            let (x, y) = point.split_at(length);
            let key = json!({"kty": "EC", "crv": crv, "kid": crv, "x": encode(x), "y": encode(y)});
            (pair, key)
        };
        let (p256, p256_key) = ecdsa(&ECDSA_P256_SHA256_FIXED_SIGNING, "P-256", 32);
        let (p384, p384_key) = ecdsa(&ECDSA_P384_SHA384_FIXED_SIGNING, "P-384", 48);
        let rsa = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
        // A DER sequence of modulus and exponent, which for 2048 bits stand where they always do.
        let public = rsa.public_key().as_ref();
        let (n, e) = (encode(&public[9..265]), encode(&public[267..]));
        let rsa_key = json!({"kty": "RSA", "kid": "rsa", "n": n, "e": e});
        let by_rsa = |encoding: &'static dyn RsaEncoding, message: &[u8]| {
            let mut signature = vec![0; rsa.public_modulus_len()];
            rsa.sign(encoding, &random, message, &mut signature).unwrap();
            signature
        };
        let (ed, ed_key) = ed25519(1);
        let keys = set(&json!([p256_key, p384_key, rsa_key, ed_key]));
        let check = |alg: &str, kid: &str, sign: &dyn Fn(&[u8]) -> Vec<u8>| {
            let good = token(&json!({"alg": alg, "kid": kid}), &claims(), sign);
            assert_eq!(rules().check(&good, &keys, NOW).unwrap().text("sub"), Some("joe"), "{alg}");
            let nameless = token(&json!({"alg": alg}), &claims(), sign);
            assert!(rules().check(&nameless, &keys, NOW).is_ok(), "{alg} without a key's name");
            let forged = token(&json!({"alg": alg, "kid": kid}), &claims(), |m| sign(&[m, b"x"].concat()));
            assert_eq!(rules().check(&forged, &keys, NOW).unwrap_err(), JwtError::Signature, "{alg}");
            for other in ["EdDSA", "ES256", "ES384", "RS256", "PS256"].into_iter().filter(|o| *o != alg) {
                let confused = token(&json!({"alg": other, "kid": kid}), &claims(), sign);
                assert!(rules().check(&confused, &keys, NOW).is_err(), "{alg} passed as {other}");
            }
        };
        check("EdDSA", "k1", &|m| ed.sign(m).as_ref().to_vec());
        check("ES256", "P-256", &|m| p256.sign(&random, m).unwrap().as_ref().to_vec());
        check("ES384", "P-384", &|m| p384.sign(&random, m).unwrap().as_ref().to_vec());
        check("RS256", "rsa", &|m| by_rsa(&RSA_PKCS1_SHA256, m));
        check("PS256", "rsa", &|m| by_rsa(&RSA_PSS_SHA256, m));
    }

    #[test]
    fn an_algorithm_that_is_not_pinned_is_refused_whatever_the_key() {
        let (pair, key) = ed25519(1);
        let (keys, sign) = (set(&json!([key])), |m: &[u8]| pair.sign(m).as_ref().to_vec());
        let refused = |header: Value| {
            let error = rules().check(&token(&header, &claims(), sign), &keys, NOW).unwrap_err();
            assert!(matches!(error, JwtError::Malformed(_)), "{header}: {error:?}");
        };
        for alg in ["none", "HS256", "RS512", "", "eddsa"] {
            refused(json!({"alg": alg, "kid": "k1"}));
        }
        refused(json!({"kid": "k1"}));
        refused(json!({"alg": "EdDSA", "kid": "k1", "crit": ["b64"], "b64": false}));
        let unsigned = format!("{}.{}.", encode("{\"alg\":\"none\"}"), encode(claims().to_string()));
        assert!(rules().check(&unsigned, &keys, NOW).is_err());
    }

    #[test]
    fn every_claim_that_is_wrong_has_its_own_error() {
        assert_eq!(check_claims(&claims()), Ok(()));
        assert_eq!(check_claims(&with("aud", json!("api"))), Ok(()));
        assert_eq!(check_claims(&with("exp", json!(NOW - LEEWAY + 1))), Ok(()), "clocks differ a little");
        assert_eq!(check_claims(&with("nbf", json!(NOW + LEEWAY))), Ok(()));
        assert_eq!(check_claims(&with("exp", json!(NOW - LEEWAY))), Err(JwtError::Expired));
        assert_eq!(check_claims(&with("exp", json!(-1.5))), Err(JwtError::Expired));
        assert_eq!(check_claims(&with("nbf", json!(NOW + LEEWAY + 1))), Err(JwtError::NotYet));
        assert_eq!(check_claims(&with("iss", json!("https://other"))), Err(JwtError::Issuer));
        assert_eq!(check_claims(&with("aud", json!(["x"]))), Err(JwtError::Audience));
        assert_eq!(check_claims(&with("aud", Value::Null)), Err(JwtError::Audience));
        for (name, value) in [("exp", Value::Null), ("exp", json!("soon")), ("nbf", json!([]))] {
            assert!(matches!(check_claims(&with(name, value)), Err(JwtError::Malformed(_))), "{name}");
        }
    }

    #[test]
    fn a_key_that_is_not_in_the_set_is_told_from_a_bad_signature() {
        let (pair, _) = ed25519(2);
        let (_, key) = ed25519(1);
        let keys = set(&json!([key]));
        let by = |kid: &str| {
            let token =
                token(&json!({"alg": "EdDSA", "kid": kid}), &claims(), |m| pair.sign(m).as_ref().into());
            rules().check(&token, &keys, NOW).unwrap_err()
        };
        assert_eq!((by("k2"), by("k1")), (JwtError::UnknownKey, JwtError::Signature));
    }

    #[test]
    fn claims_are_compared_as_words_and_scopes_found_in_either_form() {
        let of = |value: Value| Claims(value.as_object().unwrap().clone());
        let claims = of(json!({"org": "acme", "n": 7, "admin": true, "groups": ["a", "b"], "o": {"a": 1}}));
        let words = |name: &str| claims.words(name).collect::<Vec<_>>().join(" ");
        for (name, expected) in
            [("org", "acme"), ("n", "7"), ("admin", "true"), ("groups", "a b"), ("o", ""), ("none", "")]
        {
            assert_eq!(words(name), expected, "{name}");
        }
        for scoped in [json!({"scope": "x read"}), json!({"scp": ["read"]}), json!({"scp": "read"})] {
            assert!(of(scoped.clone()).has_scope("read"), "{scoped}");
            assert!(!of(scoped.clone()).has_scope("rea"), "{scoped}");
        }
    }

    proptest! {
        /// No change of a good token is believed, and nothing panics.
        #[test]
        fn a_changed_token_is_not_believed(at in 0usize..300, byte in 32u8..127) {
            let (pair, key) = ed25519(1);
            let header = json!({"alg": "EdDSA", "kid": "k1"});
            let good = token(&header, &claims(), |m| pair.sign(m).as_ref().into());
            let mut bytes = good.clone().into_bytes();
            let at = at % bytes.len();
            bytes[at] = byte;
            let changed = String::from_utf8(bytes).unwrap();
            let believed = rules().check(&changed, &set(&json!([key])), NOW).is_ok();
            prop_assert_eq!(believed, changed == good);
        }

        #[test]
        fn nothing_that_is_sent_panics(text in "[ -~]{0,80}", dots in "[A-Za-z0-9_.-]{0,200}") {
            let (_, key) = ed25519(1);
            let keys = set(&json!([key]));
            prop_assert!(rules().check(&text, &keys, NOW).is_err());
            prop_assert!(rules().check(&dots, &keys, NOW).is_err());
        }
    }
}
