//! Capabilities: Biscuits that say what their bearer may do, checked locally, narrowed by anyone.

mod revocations;

pub use revocations::{Revocations, RevocationsError};

use crate::key::{PrivateKey, PublicKey};
use crate::reason::Reason;
use biscuit_auth::builder::{Algorithm, AuthorizerBuilder, BlockBuilder};
use biscuit_auth::error::{FailedCheck, Logic};
use biscuit_auth::{AuthorizerLimits, Biscuit, KeyPair, UnverifiedBiscuit, error};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The longest token that is looked at.
pub const TOKEN_BYTES_MAX: usize = 8 << 10;
/// Scopes of one token that are tried where no particular one is wanted.
const SCOPES_MAX: usize = 16;
/// Time one token's checks may take. Wall time, so long enough that a busy machine refuses no good token.
const CHECK_TIME: Duration = Duration::from_millis(500);

/// What a token is limited to. Scopes and tenant are granted when it is minted and narrowed when attenuated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    pub scopes: Vec<String>,
    pub tenant: Option<String>,
    pub audience: Option<String>,
    /// This path and what is below it.
    pub path_prefix: Option<String>,
    pub method: Option<String>,
    pub ttl: Option<Duration>,
}

/// What a bearer wants to do.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    pub scope: &'a str,
    pub method: &'a str,
    pub path: &'a str,
    /// What this service calls itself.
    pub audience: &'a str,
}

/// What a good token says of its bearer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bearer {
    pub tenant: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    #[error("the token cannot be made: {0}")]
    Make(error::Token),
    #[error("this is no token: {0}")]
    Parse(error::Token),
    #[error("{0} must be letters, digits and - _ . : / only")]
    Word(&'static str),
    #[error("the path must begin with / and has no *, such as /api for /api and everything below it")]
    Path,
    #[error("a token needs at least one scope: name what it allows, such as edge:write")]
    NoScope,
}

impl Grant {
    /// Everything goes into the token's program as text, so only plain words are let in.
    fn check_words(&self) -> Result<(), TokenError> {
        let known = |c: char| c.is_ascii_alphanumeric() || "-_.:/*".contains(c);
        let plain = |text: &str| !text.is_empty() && text.chars().all(known);
        let words = [
            ("a scope", self.scopes.iter().all(|scope| plain(scope))),
            ("the tenant", self.tenant.as_deref().is_none_or(plain)),
            ("the audience", self.audience.as_deref().is_none_or(plain)),
            ("the path", self.path_prefix.as_deref().is_none_or(plain)),
            ("the method", self.method.as_deref().is_none_or(plain)),
        ];
        if let Some((what, _)) = words.into_iter().find(|(_, good)| !good) {
            return Err(TokenError::Word(what));
        }
        let path = self.path_prefix.as_deref();
        let good = path.is_none_or(|path| path.starts_with('/') && !path.contains('*'));
        if good { Ok(()) } else { Err(TokenError::Path) }
    }

    /// The limits that hold for a minted and an attenuated token alike.
    fn caveats(&self, now: SystemTime) -> String {
        let mut code = String::new();
        if let Some(audience) = &self.audience {
            code += &format!("check if audience(\"{audience}\");\n");
        }
        if let Some(prefix) = &self.path_prefix {
            // Whole segments: who may go to /users/1 may not go to /users/10.
            let below = format!("{}/", prefix.trim_end_matches('/'));
            code += &format!("check if path($p), $p == \"{prefix}\" || $p.starts_with(\"{below}\");\n");
        }
        if let Some(method) = &self.method {
            code += &format!("check if method(\"{}\");\n", method.to_ascii_uppercase());
        }
        if let Some(ttl) = self.ttl {
            let until = now.duration_since(UNIX_EPOCH).unwrap_or_default() + ttl;
            code += &format!("{ENDS}{};\n", until.as_secs());
        }
        code
    }

    pub fn mint(&self, key: &PrivateKey, now: SystemTime) -> Result<String, TokenError> {
        self.check_words()?;
        if self.scopes.is_empty() {
            return Err(TokenError::NoScope);
        }
        let mut code: String = self.scopes.iter().map(|scope| format!("scope(\"{scope}\");\n")).collect();
        if let Some(tenant) = &self.tenant {
            code += &format!("tenant(\"{tenant}\");\n");
        }
        code += &self.caveats(now);
        let key = biscuit_auth::PrivateKey::from_bytes(&key.seed(), Algorithm::Ed25519)
            .map_err(|error| TokenError::Make(error.into()))?;
        let token = Biscuit::builder().code(code).and_then(|builder| builder.build(&KeyPair::from(&key)));
        token.and_then(|token| token.to_base64()).map_err(TokenError::Make)
    }

    /// Narrows a token. No key is needed, and nothing can be widened.
    pub fn attenuate(&self, token: &str, now: SystemTime) -> Result<String, TokenError> {
        self.check_words()?;
        let parsed = UnverifiedBiscuit::from_base64(token).map_err(TokenError::Parse)?;
        let mut code = self.caveats(now);
        if !self.scopes.is_empty() {
            let set: Vec<String> = self.scopes.iter().map(|scope| format!("\"{scope}\"")).collect();
            code += &format!("check if need($s), {{{}}}.contains($s);\n", set.join(", "));
        }
        if let Some(tenant) = &self.tenant {
            code += &format!("check if tenant(\"{tenant}\");\n");
        }
        let block = BlockBuilder::new().code(code).map_err(TokenError::Make)?;
        parsed.append(block).and_then(|token| token.to_base64()).map_err(TokenError::Make)
    }
}

/// How a limit on time begins.
const ENDS: &str = "check if now($t), $t < ";

/// One block of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// What it says.
    pub source: String,
    /// By which it is revoked, in hexadecimal.
    pub id: String,
}

impl Block {
    /// The second, in Unix time, from which it is not good any more, if it says one.
    pub fn ends_at(&self) -> Option<u64> {
        let end = |line: &str| line.trim().strip_prefix(ENDS)?.trim_end_matches(';').parse().ok();
        self.source.lines().filter_map(end).min()
    }
}

/// What a token says, block by block, without checking its signature.
pub fn inspect(token: &str) -> Result<Vec<Block>, TokenError> {
    let parsed = UnverifiedBiscuit::from_base64(token).map_err(TokenError::Parse)?;
    let hex = |id: Vec<u8>| id.iter().map(|byte| format!("{byte:02x}")).collect();
    let ids = parsed.revocation_identifiers().into_iter().map(hex);
    let blocks = (0..parsed.block_count()).map(|index| parsed.print_block_source(index));
    blocks.zip(ids).map(|(source, id)| Ok(Block { source: source.map_err(TokenError::Parse)?, id })).collect()
}

/// The keys whose tokens are believed, and the tokens that are not believed all the same.
#[derive(Clone, Debug)]
pub struct Verifier {
    roots: Vec<biscuit_auth::PublicKey>,
    revoked: Arc<Revocations>,
}

impl Verifier {
    pub fn new(roots: &[PublicKey]) -> Verifier {
        let convert = |key: &PublicKey| biscuit_auth::PublicKey::from_bytes(&key.0, Algorithm::Ed25519).ok();
        Verifier { roots: roots.iter().filter_map(convert).collect(), revoked: Arc::default() }
    }

    /// The same, but for these tokens.
    #[must_use]
    pub fn without(self, revoked: Arc<Revocations>) -> Verifier {
        Verifier { revoked, ..self }
    }

    /// Checks the signature only: which root signed the token.
    pub fn is_signed(&self, token: &str) -> bool {
        self.parse(token).is_some()
    }

    fn parse(&self, token: &str) -> Option<Biscuit> {
        if token.len() > TOKEN_BYTES_MAX {
            return None;
        }
        self.roots.iter().find_map(|root| Biscuit::from_base64(token, *root).ok())
    }

    /// Reads a token that a trusted key signed and nobody revoked.
    pub fn open(&self, token: &str) -> Result<Opened, Reason> {
        let token = self.parse(token).ok_or(Reason::TokenInvalid)?;
        if token.revocation_identifiers().iter().any(|id| self.revoked.holds_block(id)) {
            return Err(Reason::TokenRevoked);
        }
        Ok(Opened { token })
    }

    /// Decides whether the bearer may do what it wishes.
    pub fn authorize(&self, token: &str, wish: Wish<'_>, now: SystemTime) -> Result<Bearer, Reason> {
        let opened = self.open(token)?;
        opened.allows(wish, now)?;
        Ok(Bearer { tenant: opened.tenant()? })
    }
}

/// A token whose signatures are good; what it allows depends on what is asked.
#[derive(Debug)]
pub struct Opened {
    token: Biscuit,
}

impl Opened {
    /// Whether its limits admit the wish.
    pub fn allows(&self, wish: Wish<'_>, now: SystemTime) -> Result<(), Reason> {
        let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let literal = |text: &str| serde_json::Value::from(text).to_string();
        let code = format!(
            "now({seconds}); need({}); method({}); path({}); audience({});\nallow if need($s), scope($s);",
            literal(wish.scope),
            literal(wish.method),
            literal(wish.path),
            literal(wish.audience)
        );
        let mut authorizer = AuthorizerBuilder::new()
            .code(code)
            .and_then(|builder| builder.set_limits(limits()).build(&self.token))
            .map_err(|_not_a_program| Reason::TokenInvalid)?;
        authorizer.authorize().map(drop).map_err(|error| refusal(&error))
    }

    /// Whether they admit it with every one of these scopes; without any, with some scope that the token has.
    pub fn allows_all(&self, scopes: &[String], wish: Wish<'_>, now: SystemTime) -> Result<(), Reason> {
        if !scopes.is_empty() {
            return scopes.iter().try_for_each(|scope| self.allows(Wish { scope, ..wish }, now));
        }
        let mut refused = Reason::Forbidden;
        for scope in self.facts("data($s) <- scope($s)")?.iter().take(SCOPES_MAX) {
            match self.allows(Wish { scope, ..wish }, now) {
                Ok(()) => return Ok(()),
                Err(reason) => refused = reason,
            }
        }
        Err(refused)
    }

    /// Whose it is, as its minter said.
    pub fn tenant(&self) -> Result<Option<String>, Reason> {
        Ok(self.facts("data($t) <- tenant($t)")?.into_iter().next())
    }

    /// What it was minted as: the same for all that were narrowed from it, however many those are.
    pub fn origin(&self) -> Vec<u8> {
        self.token.revocation_identifiers().into_iter().next().unwrap_or_default()
    }

    /// What the minter's own block states.
    fn facts(&self, rule: &str) -> Result<Vec<String>, Reason> {
        let authorizer = AuthorizerBuilder::new().set_limits(limits()).build(&self.token);
        let facts: Vec<(String,)> = authorizer
            .and_then(|mut authorizer| authorizer.query(rule))
            .map_err(|_limit| Reason::TokenInvalid)?;
        Ok(facts.into_iter().map(|(fact,)| fact).collect())
    }
}

fn limits() -> AuthorizerLimits {
    AuthorizerLimits { max_facts: 200, max_iterations: 20, max_time: CHECK_TIME }
}

/// Which caveat refused, so that the client is told what to mend.
fn refusal(error: &error::Token) -> Reason {
    let error::Token::FailedLogic(Logic::Unauthorized { checks, .. } | Logic::NoMatchingPolicy { checks }) =
        error
    else {
        return Reason::TokenInvalid;
    };
    let rules: Vec<&str> = checks
        .iter()
        .map(|check| match check {
            FailedCheck::Block(check) => check.rule.as_str(),
            FailedCheck::Authorizer(check) => check.rule.as_str(),
        })
        .collect();
    if rules.iter().any(|rule| rule.contains("now(")) {
        Reason::TokenExpired
    } else if rules.iter().any(|rule| rule.contains("audience(")) {
        Reason::TokenAudience
    } else {
        Reason::Forbidden
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(scope: &str) -> Wish<'_> {
        Wish { scope, method: "PUT", path: "/edge/cas", audience: "edge" }
    }

    fn setup() -> (PrivateKey, Verifier, SystemTime) {
        let key = PrivateKey::generate().unwrap();
        let verifier = Verifier::new(&[key.public()]);
        (key, verifier, SystemTime::now())
    }

    fn grant(scopes: &[&str]) -> Grant {
        Grant { scopes: scopes.iter().map(|s| (*s).to_owned()).collect(), ..Grant::default() }
    }

    #[test]
    fn a_scope_is_needed_and_suffices() {
        let (key, verifier, now) = setup();
        let token = Grant { tenant: Some("acme".into()), ..grant(&["edge:write"]) }.mint(&key, now).unwrap();
        let bearer = verifier.authorize(&token, wish("edge:write"), now).unwrap();
        assert_eq!(bearer.tenant.as_deref(), Some("acme"));
        assert_eq!(verifier.authorize(&token, wish("edge:purge"), now), Err(Reason::Forbidden));
        let stranger = Verifier::new(&[PrivateKey::generate().unwrap().public()]);
        assert_eq!(stranger.authorize(&token, wish("edge:write"), now), Err(Reason::TokenInvalid));
        assert_eq!(verifier.authorize("nonsense", wish("edge:write"), now), Err(Reason::TokenInvalid));
        assert_eq!(verifier.authorize(&"A".repeat(9000), wish("edge:write"), now), Err(Reason::TokenInvalid));
    }

    #[test]
    fn every_caveat_refuses_with_its_own_reason() {
        let (key, verifier, now) = setup();
        let check = |grant: Grant, expected: Reason| {
            let token = grant.mint(&key, now).unwrap();
            assert_eq!(verifier.authorize(&token, wish("s"), now + Duration::from_secs(61)), Err(expected));
        };
        check(Grant { ttl: Some(Duration::from_secs(60)), ..grant(&["s"]) }, Reason::TokenExpired);
        check(Grant { audience: Some("registry".into()), ..grant(&["s"]) }, Reason::TokenAudience);
        check(Grant { path_prefix: Some("/other".into()), ..grant(&["s"]) }, Reason::Forbidden);
        check(Grant { method: Some("get".into()), ..grant(&["s"]) }, Reason::Forbidden);
        let all = Grant {
            audience: Some("edge".into()),
            path_prefix: Some("/edge/".into()),
            method: Some("put".into()),
            ttl: Some(Duration::from_secs(60)),
            ..grant(&["s"])
        };
        assert!(verifier.authorize(&all.mint(&key, now).unwrap(), wish("s"), now).is_ok());
    }

    #[test]
    fn a_path_means_whole_segments() {
        let (key, verifier, now) = setup();
        let check = |prefix: &str, path: &str, allowed: bool| {
            let grant = Grant { path_prefix: Some(prefix.into()), ..grant(&["s"]) };
            let token = grant.mint(&key, now).unwrap();
            let authorized = verifier.authorize(&token, Wish { path, ..wish("s") }, now);
            assert_eq!(authorized.is_ok(), allowed, "{prefix} {path}");
        };
        check("/users/1", "/users/1", true);
        check("/users/1", "/users/1/orders", true);
        check("/users/1", "/users/10", false);
        check("/users/", "/users/1", true);
        check("/users/", "/users", false);
        check("/", "/anything", true);
        for prefix in ["users", "/users/*"] {
            let made = Grant { path_prefix: Some(prefix.into()), ..grant(&["s"]) }.mint(&key, now);
            assert!(matches!(made, Err(TokenError::Path)), "{prefix:?}");
        }
    }

    #[test]
    fn attenuation_narrows_and_never_widens() {
        let (key, verifier, now) = setup();
        let token = grant(&["a", "b"]).mint(&key, now).unwrap();
        let narrowed = grant(&["a", "c"]).attenuate(&token, now).unwrap();
        assert!(verifier.authorize(&narrowed, wish("a"), now).is_ok());
        assert_eq!(verifier.authorize(&narrowed, wish("b"), now), Err(Reason::Forbidden));
        assert_eq!(verifier.authorize(&narrowed, wish("c"), now), Err(Reason::Forbidden));
        assert_eq!(inspect(&narrowed).unwrap().len(), 2);
    }

    #[test]
    fn several_scopes_are_all_needed_and_none_in_particular_means_any() {
        let (key, verifier, now) = setup();
        let token = grant(&["a", "b"]).mint(&key, now).unwrap();
        let narrowed = grant(&["b"]).attenuate(&token, now).unwrap();
        let check = |token: &str, scopes: &[&str]| {
            let scopes: Vec<String> = scopes.iter().map(|scope| (*scope).to_owned()).collect();
            verifier.open(token).unwrap().allows_all(&scopes, wish(""), now)
        };
        assert_eq!(check(&token, &["a", "b"]), Ok(()));
        assert_eq!(check(&token, &["a", "c"]), Err(Reason::Forbidden));
        assert_eq!(check(&narrowed, &["b", "a"]), Err(Reason::Forbidden));
        assert_eq!((check(&token, &[]), check(&narrowed, &[])), (Ok(()), Ok(())));
        let elsewhere = Grant { path_prefix: Some("/x".into()), ..Grant::default() };
        assert_eq!(check(&elsewhere.attenuate(&token, now).unwrap(), &[]), Err(Reason::Forbidden));
    }

    #[test]
    fn a_revoked_block_takes_along_what_was_narrowed_from_it_and_nothing_else() {
        let (key, verifier, now) = setup();
        let token = grant(&["a"]).mint(&key, now).unwrap();
        let narrowed = grant(&["a"]).attenuate(&token, now).unwrap();
        let [minted, block] = &inspect(&narrowed).unwrap()[..] else { panic!("two blocks") };
        let without = |id: &str| {
            let list = Arc::new(Revocations::parse(id).unwrap());
            let verifier = verifier.clone().without(list);
            [&token, &narrowed].map(|token| verifier.authorize(token, wish("a"), now).err())
        };
        assert_eq!(without(&minted.id), [Some(Reason::TokenRevoked); 2]);
        assert_eq!(without(&block.id), [None, Some(Reason::TokenRevoked)]);
        let open = |token: &str| verifier.open(token).unwrap().origin();
        assert_eq!(open(&token), open(&narrowed), "a narrowed token counts as the one it came from");
    }

    #[test]
    fn a_block_cannot_grant_itself_a_scope_or_smuggle_a_program() {
        let (key, verifier, now) = setup();
        let token = grant(&["a"]).mint(&key, now).unwrap();
        let block = BlockBuilder::new().code("scope(\"b\");").unwrap();
        let forged =
            UnverifiedBiscuit::from_base64(&token).unwrap().append(block).unwrap().to_base64().unwrap();
        assert_eq!(verifier.authorize(&forged, wish("b"), now), Err(Reason::Forbidden));
        let smuggled = grant(&["a\"); scope(\"b"]).mint(&key, now).unwrap_err();
        assert!(smuggled.to_string().contains("a scope"), "{smuggled}");
    }
}
