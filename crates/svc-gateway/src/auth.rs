//! What callers send to say who they are, and what is kept to check it: no check leaves the machine.

mod jwks;
mod jwt;
mod refresh;

pub(crate) use jwt::Claims;
pub(crate) use refresh::refresh;

use crate::config::{AuthMode, AuthSettings, JwtSettings};
use crate::upstream::IDLE;
use arc_swap::ArcSwapOption;
use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, WWW_AUTHENTICATE};
use jwks::KeySet;
use jwt::{JwtError, Rules};
use ron_kernel::config::Problems;
use ron_kernel::http::client::{Address, Remote};
use ron_kernel::kernel::Service;
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use ron_kernel::tls::TlsClient;
use ron_kernel::token::{Revocations, Verifier};
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, Semaphore};

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// A key of the configuration, and what is wrong with what it names.
type Wrong = (&'static str, String);

/// How the callers of one version of the configuration are checked.
#[derive(Debug)]
pub(crate) enum Auth {
    None,
    ApiKey,
    Jwt(Jwt),
    Biscuit(Verifier),
}

/// How JWTs are checked.
#[derive(Debug)]
pub(crate) struct Jwt {
    rules: Rules,
    revoked: Arc<Revocations>,
    pub(crate) keys: Arc<Keys>,
    /// How the issuer is reached, and how often.
    tls: Option<TlsClient>,
    refresh: Duration,
}

/// The issuer's keys. Those from a URL are kept over reloads.
#[derive(Debug)]
pub(crate) struct Keys {
    source: Option<Source>,
    /// The last good set; none until the first was fetched.
    set: ArcSwapOption<KeySet>,
    /// Told when a token names a key that is not in the set.
    missed: Notify,
    /// Told when a fetch is over, whatever it brought.
    fetched: Notify,
    /// Fetches begun, the last of them that is over, and the last that somebody waits for.
    begun: AtomicU64,
    over: AtomicU64,
    wanted: AtomicU64,
    /// From when on an unknown key leads to a fetch at once; nobody knows before the first fetch.
    fetches_from: ArcSwapOption<Instant>,
    /// Places for those who wait for such a fetch.
    places: Semaphore,
}

#[derive(Debug)]
struct Source {
    url: String,
    path: String,
    remote: Arc<Remote>,
}

/// What is said of a token whose key is not in the set.
pub(crate) const UNKNOWN_KEY: &str = "the key that signed the token is not known";
/// Requests that wait at one time for a fetch that an unknown key led to; others are refused at once.
const WAITING_MAX: usize = 1_024;
/// How long they wait.
const FETCH_PATIENCE: Duration = Duration::from_secs(5);
/// Within what time such a fetch must begin, or nobody waits for it.
const FETCH_SOON: Duration = Duration::from_secs(1);

impl Keys {
    fn new(source: Option<Source>, set: ArcSwapOption<KeySet>) -> Keys {
        Keys {
            source,
            set,
            missed: Notify::new(),
            fetched: Notify::new(),
            begun: AtomicU64::new(0),
            over: AtomicU64::new(0),
            wanted: AtomicU64::new(0),
            fetches_from: ArcSwapOption::empty(),
            places: Semaphore::new(WAITING_MAX),
        }
    }

    /// A key is not known: waits for the fetch that is under way, or else asks for one and waits if it begins soon.
    /// Says whether that was one which had begun before, and may have been answered before the key was there.
    async fn fetch_is_over(&self) -> bool {
        let begun = self.begun.load(Ordering::SeqCst);
        let under_way = begun > self.over.load(Ordering::SeqCst);
        let awaited = begun + u64::from(!under_way);
        if !under_way {
            self.wanted.fetch_max(awaited, Ordering::SeqCst);
            self.missed.notify_one();
            let soon = Instant::now() + FETCH_SOON;
            if self.fetches_from.load().as_ref().is_none_or(|from| **from > soon) {
                return false;
            }
        }
        let Ok(_place) = self.places.try_acquire() else { return false };
        let over = async {
            loop {
                let mut fetched = pin!(self.fetched.notified());
                fetched.as_mut().enable();
                if self.over.load(Ordering::SeqCst) >= awaited {
                    return;
                }
                fetched.await;
            }
        };
        // Whoever is not told in time is judged by the keys there are.
        let _ = tokio::time::timeout(FETCH_PATIENCE, over).await;
        under_way
    }

    /// Whether somebody waits for a fetch that has not begun.
    fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::SeqCst) > self.begun.load(Ordering::SeqCst)
    }

    pub(crate) fn count(&self) -> usize {
        self.set.load().as_ref().map_or(0, |set| set.len())
    }
}

impl Auth {
    /// See [`Keys::fetch_is_over`].
    pub(crate) async fn fetch_is_over(&self) -> bool {
        match self {
            Auth::Jwt(jwt) => jwt.keys.fetch_is_over().await,
            _ => false,
        }
    }

    /// Reads the files that the settings name. The keys of `former` are kept if they are from the same place.
    ///
    /// Blocks on file I/O; on failure says of which key, and why.
    pub(crate) fn load(
        service: &Service,
        settings: &AuthSettings,
        base: &Path,
        verifier: &Verifier,
        former: Option<Arc<Keys>>,
    ) -> Result<Auth, Wrong> {
        let revoked = Arc::new(read_revocations(settings, base)?);
        Ok(match (settings.mode, &settings.jwt) {
            (AuthMode::None, _) => Auth::None,
            (AuthMode::ApiKey, _) => Auth::ApiKey,
            (AuthMode::Biscuit, _) => Auth::Biscuit(verifier.clone().without(revoked)),
            (AuthMode::Jwt, None) => return Err(("gateway.auth.jwt", NO_JWT.to_owned())),
            (AuthMode::Jwt, Some(jwt)) => {
                let rules = Rules {
                    algorithms: jwt.algorithms.clone(),
                    issuer: jwt.issuer.clone(),
                    audience: jwt.audience.clone(),
                };
                let (keys, tls) = load_keys(service, jwt, base, former)?;
                Auth::Jwt(Jwt { rules, revoked, keys, tls, refresh: jwt.refresh.0 })
            }
        })
    }

    /// The credentials of a request.
    pub(crate) fn sent<'a>(&self, headers: &'a HeaderMap) -> Option<&'a [u8]> {
        let bearer = || {
            let (kind, token) = headers.get(AUTHORIZATION)?.as_bytes().split_at_checked(6)?;
            // A tab is as good as a space: whoever is behind might take it for one.
            let apart = token.first().is_some_and(u8::is_ascii_whitespace);
            (apart && kind.eq_ignore_ascii_case(b"bearer")).then(|| token.trim_ascii())
        };
        match self {
            Auth::None => None,
            Auth::ApiKey => headers.get(X_API_KEY).map(HeaderValue::as_bytes).or_else(bearer),
            Auth::Jwt(_) | Auth::Biscuit(_) => bearer(),
        }
    }

    /// Whether they are there more than once: the upstream might believe others than those that are checked here.
    pub(crate) fn are_several(&self, headers: &HeaderMap) -> bool {
        let several = |name: &HeaderName| headers.get_all(name).iter().nth(1).is_some();
        match self {
            Auth::None => false,
            Auth::ApiKey => several(&X_API_KEY) || several(&AUTHORIZATION),
            Auth::Jwt(_) | Auth::Biscuit(_) => several(&AUTHORIZATION),
        }
    }

    /// What to send.
    pub(crate) fn wanted(&self) -> &'static str {
        match self {
            Auth::None => "this needs a client certificate of a tenant",
            Auth::ApiKey => "send an API key as X-Api-Key or Authorization: Bearer",
            Auth::Jwt(_) => "send a JWT as Authorization: Bearer",
            Auth::Biscuit(_) => "send a capability as Authorization: Bearer",
        }
    }
}

impl Jwt {
    /// What a good token says; `now` is in seconds.
    pub(crate) fn check(&self, token: &[u8], now: u64) -> Result<Claims, Rejection> {
        let Some(set) = &*self.keys.set.load() else {
            let detail = "the keys that tokens are checked with are not known yet";
            return Err(Rejection::new(Reason::NotReady, detail).retry_after(1));
        };
        let token = std::str::from_utf8(token)
            .map_err(|_bad| challenge(Reason::TokenInvalid, "the token is no text"))?;
        let claims = self.rules.check(token, set, now).map_err(|error| self.refusal(error))?;
        if claims.text("jti").is_some_and(|id| self.revoked.holds_jti(id)) {
            return Err(challenge(Reason::TokenRevoked, "the token is revoked"));
        }
        Ok(claims)
    }

    fn refusal(&self, error: JwtError) -> Rejection {
        let (reason, detail) = match error {
            JwtError::Malformed(why) => (Reason::TokenInvalid, why),
            JwtError::UnknownKey => (Reason::TokenInvalid, UNKNOWN_KEY),
            JwtError::Signature => (Reason::TokenInvalid, "the token's signature is not good"),
            JwtError::Issuer => (Reason::TokenInvalid, "the token is of another issuer"),
            JwtError::NotYet => (Reason::TokenInvalid, "the token is not valid yet"),
            JwtError::Expired => (Reason::TokenExpired, "the token has expired"),
            JwtError::Audience => (Reason::TokenAudience, "the token is for another audience"),
        };
        challenge(reason, detail)
    }
}

/// A refusal that says how to do better.
pub(crate) fn challenge(reason: Reason, detail: &'static str) -> Rejection {
    let challenge = match reason {
        Reason::Unauth => "Bearer",
        Reason::Forbidden => "Bearer error=\"insufficient_scope\"",
        _ => "Bearer error=\"invalid_token\"",
    };
    Rejection::new(reason, detail).header(WWW_AUTHENTICATE, HeaderValue::from_static(challenge))
}

/// Whether a text passes as a JWT that this set of keys signed, at second 0.
pub(crate) fn is_signed(set: &[u8], token: &str) -> bool {
    let jwt = JwtSettings::default();
    let rules = Rules { algorithms: jwt.algorithms, issuer: jwt.issuer, audience: jwt.audience };
    KeySet::parse(set).is_ok_and(|set| rules.check(token, &set, 0).is_ok())
}

const NO_JWT: &str = "mode is \"jwt\", so this must say where the keys are: jwks_file or jwks_url";

impl AuthSettings {
    pub(crate) fn validate(&self, problems: &mut Problems) {
        let at = "gateway.auth.jwt";
        let Some(jwt) = &self.jwt else {
            if self.mode == AuthMode::Jwt {
                problems.add(at, NO_JWT);
            }
            return;
        };
        if jwt.jwks_file.is_empty() == jwt.jwks_url.is_empty() {
            problems.add(at, "needs one of jwks_file and jwks_url");
        }
        if jwt.algorithms.is_empty() {
            problems.add(format!("{at}.algorithms"), "must name at least one");
        }
        if jwt.refresh.0 < REFRESH_MIN {
            problems.add(format!("{at}.refresh"), "must be at least 1s");
        }
        if !jwt.jwks_url.is_empty()
            && let Err(error) = parse_url(&jwt.jwks_url)
        {
            problems.add(format!("{at}.jwks_url"), error);
        }
    }

    /// Problems with the files; reads them, connects nowhere.
    pub(crate) fn validate_files(&self, base: &Path, problems: &mut Problems) {
        if let Err((key, error)) = read_revocations(self, base) {
            problems.add(key, error);
        }
        let Some(jwt) = &self.jwt else { return };
        if !jwt.jwks_file.is_empty()
            && let Err((key, error)) = read_set(jwt, base)
        {
            problems.add(key, error);
        }
        if jwt.jwks_url.starts_with("https://") {
            jwt.tls.check(base, "gateway.auth.jwt.tls", problems);
        }
    }
}

const REFRESH_MIN: Duration = Duration::from_secs(1);

fn read_revocations(settings: &AuthSettings, base: &Path) -> Result<Revocations, Wrong> {
    let (key, name) = ("gateway.auth.revocations", &settings.revocations);
    if name.is_empty() {
        return Ok(Revocations::default());
    }
    let text = std::fs::read_to_string(base.join(name))
        .map_err(|error| (key, format!("{name:?} cannot be read: {error}")))?;
    Revocations::parse(&text).map_err(|error| (key, format!("{name:?}: {error}")))
}

fn read_set(jwt: &JwtSettings, base: &Path) -> Result<KeySet, Wrong> {
    let (key, name) = ("gateway.auth.jwt.jwks_file", &jwt.jwks_file);
    let text =
        std::fs::read(base.join(name)).map_err(|error| (key, format!("{name:?} cannot be read: {error}")))?;
    KeySet::parse(&text).map_err(|error| (key, format!("{name:?} is no key set: {error}")))
}

fn load_keys(
    service: &Service,
    jwt: &JwtSettings,
    base: &Path,
    former: Option<Arc<Keys>>,
) -> Result<(Arc<Keys>, Option<TlsClient>), Wrong> {
    if jwt.jwks_url.is_empty() {
        let set = ArcSwapOption::from_pointee(read_set(jwt, base)?);
        return Ok((Arc::new(Keys::new(None, set)), None));
    }
    let (address, path) = parse_url(&jwt.jwks_url).map_err(|error| ("gateway.auth.jwt.jwks_url", error))?;
    let tls = if address.is_https() {
        let loaded = jwt.tls.load(base);
        Some(loaded.map_err(|error| ("gateway.auth.jwt.tls", error.to_string()))?)
    } else {
        None
    };
    let same = |keys: &Arc<Keys>| keys.source.as_ref().is_some_and(|source| source.url == jwt.jwks_url);
    let keys = former.filter(same).unwrap_or_else(|| {
        let remote = Remote::new(service, &IDLE, address);
        let source = Some(Source { url: jwt.jwks_url.clone(), path, remote });
        Arc::new(Keys::new(source, ArcSwapOption::empty()))
    });
    Ok((keys, tls))
}

/// The server of a URL, and the path there.
fn parse_url(text: &str) -> Result<(Address, String), String> {
    let wrong = || format!("{text:?} is no URL such as https://issuer.example/keys.json");
    let uri: http::Uri = text.parse().map_err(|_bad| wrong())?;
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else { return Err(wrong()) };
    if !["http", "https"].contains(&scheme) {
        return Err(wrong());
    }
    let address: Address = format!("{scheme}://{authority}").parse().map_err(|_bad| wrong())?;
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    let local = host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
    if scheme == "http" && !local {
        return Err(
            "keys fetched in the clear could be anybody's: use https://, or a server on this machine"
                .to_owned(),
        );
    }
    Ok((address, uri.path_and_query().map_or("/", |path| path.as_str()).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_fetched_over_tls_or_from_this_machine() {
        let (address, path) = parse_url("https://issuer.example/a/keys?x=1").unwrap();
        assert_eq!(
            (address.to_string().as_str(), path.as_str()),
            ("https://issuer.example:443", "/a/keys?x=1")
        );
        for good in ["http://127.0.0.1:1/", "http://[::1]:1/", "http://localhost/k"] {
            assert!(parse_url(good).is_ok(), "{good}");
        }
        for bad in ["", "keys.json", "ftp://a/b", "http://issuer.example/", "https://"] {
            assert!(parse_url(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn credentials_are_found_where_their_kind_is_sent() {
        let with = |name: &'static str, value: &'static str| {
            HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_static(value))])
        };
        let (key, bearer) = (with("x-api-key", "k"), with("authorization", "bEARER  t "));
        let capability = Auth::Biscuit(Verifier::new(&[]));
        assert_eq!((Auth::ApiKey.sent(&key), Auth::ApiKey.sent(&bearer)), (Some(&b"k"[..]), Some(&b"t"[..])));
        assert_eq!((capability.sent(&key), capability.sent(&bearer)), (None, Some(&b"t"[..])));
        assert_eq!((Auth::None.sent(&key), Auth::None.sent(&bearer)), (None, None));
        for other in ["Basic dTpw", "Bearer", "Bearert", ""] {
            assert_eq!(Auth::ApiKey.sent(&with("authorization", other)), None, "{other}");
        }
        assert_eq!(capability.sent(&with("authorization", "Bearer\tt")), Some(&b"t"[..]));
        let mut twice = bearer.clone();
        twice.append(AUTHORIZATION, HeaderValue::from_static("Basic dTpw"));
        assert_eq!((capability.are_several(&bearer), capability.are_several(&twice)), (false, true));
        assert_eq!((Auth::ApiKey.are_several(&twice), Auth::None.are_several(&twice)), (true, false));
        let mut keys = key.clone();
        keys.append(X_API_KEY, HeaderValue::from_static("k"));
        assert_eq!((Auth::ApiKey.are_several(&keys), capability.are_several(&keys)), (true, false));
    }
}
