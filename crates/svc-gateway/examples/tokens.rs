//! What it costs to find out who is calling, by kind of credentials: microseconds for each check on one core.
//!
//! `cargo xtask bench gateway tokens` runs it; the figures go to standard output as one JSON object.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "an example that cannot go on says where")]

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _, RSA_PKCS1_SHA256, RsaKeyPair,
};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use ron_kernel::config::Secret;
use ron_kernel::key::PrivateKey;
use ron_kernel::token::{Grant, Verifier};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use svc_gateway::config::{AuthMode, AuthSettings, GatewaySettings, JwtSettings, TenantSettings};
use svc_gateway::fuzzing::Callers;

/// Each kind is measured in so many rounds, of which the median counts.
const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_millis(200);

fn main() {
    let dir = std::env::temp_dir().join(format!("ron-tokens-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let mut figures = Map::new();
    let mut measure = |name: &str, callers: &Callers, token: &str| {
        let micros = cost(callers, token, now);
        figures.insert(name.to_owned(), json!((micros * 100.0).round() / 100.0));
    };
    // What everything else is to be compared with: nobody is asked who is calling.
    let by_nothing = callers(AuthMode::None, None, Vec::new(), &dir, &Verifier::new(&[]));
    measure("none", &by_nothing, "key");
    let key = Secret(format!("sha256:{}", hex(&Sha256::digest("key"))));
    let tenant = TenantSettings { id: "acme".to_owned(), keys: vec![key], ..TenantSettings::default() };
    let by_key = callers(AuthMode::ApiKey, None, vec![tenant], &dir, &Verifier::new(&[]));
    measure("api_key", &by_key, "key");
    for (alg, (token, jwk)) in [("ES256", es256(now)), ("RS256", rs256(now)), ("EdDSA", eddsa(now))] {
        std::fs::write(dir.join("jwks.json"), json!({"keys": [jwk]}).to_string()).unwrap();
        let jwt = JwtSettings { jwks_file: "jwks.json".to_owned(), ..JwtSettings::default() };
        let by_jwt = callers(AuthMode::Jwt, Some(jwt), Vec::new(), &dir, &Verifier::new(&[]));
        measure(&format!("jwt_{alg}"), &by_jwt, &token);
    }
    let key = PrivateKey::generate().unwrap();
    let grant = |scope: &str| Grant {
        scopes: vec![scope.to_owned()],
        ttl: Some(Duration::from_secs(3600)),
        ..Grant::default()
    };
    let minted = grant("read").mint(&key, SystemTime::now()).unwrap();
    let narrowed = grant("read").attenuate(&minted, SystemTime::now()).unwrap();
    let verifier = Verifier::new(&[key.public()]);
    let by_capability = callers(AuthMode::Biscuit, None, Vec::new(), &dir, &verifier);
    measure("biscuit", &by_capability, &minted);
    measure("biscuit_narrowed", &by_capability, &narrowed);
    println!("{}", Value::Object(figures));
    let _ = std::fs::remove_dir_all(&dir);
}

/// Microseconds of one check.
fn cost(callers: &Callers, token: &str, now: u64) -> f64 {
    let value = HeaderValue::from_str(&format!("Bearer {token}")).unwrap();
    let headers = HeaderMap::from_iter([(AUTHORIZATION, value)]);
    assert!(callers.knows(&headers, now), "a good token is refused");
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let (begun, mut checks) = (Instant::now(), 0_u32);
            while begun.elapsed() < ROUND {
                for _ in 0..16 {
                    assert!(callers.knows(&headers, now));
                }
                checks += 16;
            }
            begun.elapsed().as_secs_f64() * 1e6 / f64::from(checks)
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

fn callers(
    mode: AuthMode,
    jwt: Option<JwtSettings>,
    tenants: Vec<TenantSettings>,
    dir: &Path,
    verifier: &Verifier,
) -> Callers {
    let auth = AuthSettings { mode, jwt, ..AuthSettings::default() };
    Callers::new(&GatewaySettings { auth, tenants, ..GatewaySettings::default() }, dir, verifier).unwrap()
}

fn es256(now: u64) -> (String, Value) {
    let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap();
    let (x, y) = pair.public_key().as_ref()[1..].split_at(32);
    let key = json!({"kty": "EC", "crv": "P-256", "kid": "k", "x": encode(x), "y": encode(y)});
    (token("ES256", now, |m| pair.sign(&SystemRandom::new(), m).unwrap().as_ref().to_vec()), key)
}

fn rs256(now: u64) -> (String, Value) {
    let pair = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
    // A DER sequence of modulus and exponent, which for 2048 bits stand where they always do.
    let public = pair.public_key().as_ref();
    let (n, e) = (encode(&public[9..265]), encode(&public[267..]));
    let sign = |message: &[u8]| {
        let mut signature = vec![0; pair.public_modulus_len()];
        pair.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), message, &mut signature).unwrap();
        signature
    };
    (token("RS256", now, sign), json!({"kty": "RSA", "kid": "k", "n": n, "e": e}))
}

fn eddsa(now: u64) -> (String, Value) {
    let pair = Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap();
    let key = json!({"kty": "OKP", "crv": "Ed25519", "kid": "k", "x": encode(pair.public_key())});
    (token("EdDSA", now, |m| pair.sign(m).as_ref().to_vec()), key)
}

fn token(alg: &str, now: u64, sign: impl Fn(&[u8]) -> Vec<u8>) -> String {
    let header = json!({"alg": alg, "kid": "k", "typ": "JWT"});
    let claims = json!({"iss": "https://issuer", "aud": "api", "sub": "joe", "exp": now + 3600, "scope": "read write"});
    let message = format!("{}.{}", encode(header.to_string()), encode(claims.to_string()));
    let signature = sign(message.as_bytes());
    format!("{message}.{}", encode(signature))
}

fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
