//! Origins: whom to ask for what, within which limits, and when again.

use super::{Counters, Failure};
use crate::cache::{Exchange, Heuristic, Policy, UnixMillis};
use crate::config::{EdgeSettings, PackSettings, RetrySettings, S3Settings, client_tls};
use crate::egress::{Authority, OriginUrl, is_public, normal_host};
use crate::semantics::encode_path;
use crate::serve::{COUNTERS, unix_millis};
use bytes::BytesMut;
use http::header::{CONTENT_LENGTH, HOST, HeaderMap, HeaderValue, TRANSFER_ENCODING};
use http::{Method, Request, StatusCode, Uri, Version};
use ron_kernel::admission::bucket::{Rate, Single, Verdict};
use ron_kernel::http::client::{Answer, CallError, CallLimits, Outgoing, Remote};
use ron_kernel::http::{Body, BodyError, InterimSender};
use ron_kernel::inventory::LockSpec;
use ron_kernel::kernel::Service;
use ron_kernel::random;
use ron_kernel::sync::{Permit, Permits};
use ron_kernel::tls::{TlsClient, TlsError};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) static IDLE: LockSpec = LockSpec {
    service: "edge",
    name: "origin_idle",
    rank: 40,
    guards: "the connections kept to one origin; taken alone, for a push or a pop",
};

/// RFC 9111 section 4.2.2.
const HEURISTIC_PERCENT: u32 = 10;
/// Requests at a time to the server of one pack.
const PACK_INFLIGHT: usize = 64;
/// Part of the time that is kept for further tries.
const RESERVE_PART: u32 = 4;

/// One origin.
#[derive(Debug)]
pub(crate) struct Origin {
    pub(crate) url: OriginUrl,
    pub(crate) policy: Policy,
    remote: Arc<Remote>,
    /// How TLS is spoken to it and how many requests it gets at once, from when it is put to use.
    tls: Option<TlsClient>,
    max_inflight: usize,
    allow_private: bool,
    permits: Arc<Permits>,
    bucket: Arc<Single>,
    rate: Option<Rate>,
}

/// What of an origin's settings concerns asking it.
struct Rules<'a> {
    url: &'a str,
    allow_http: bool,
    allow_private: bool,
    ca_file: &'a str,
    max_inflight: usize,
    rps: u64,
    policy: Policy,
}

/// Everybody who may be asked.
#[derive(Debug, Default)]
pub(crate) struct Origins {
    /// By prefix, the longest first.
    assets: Vec<(String, Arc<Origin>)>,
    sites: Vec<(Vec<String>, Arc<Origin>)>,
}

impl Origins {
    /// Reads the CA files. Connections, limits and their state are kept of those that were there before, and changed
    /// only by [`Origins::put_to_use`].
    pub(crate) fn new(
        service: &Service,
        settings: &EdgeSettings,
        base: &Path,
        former: &Origins,
    ) -> Result<Origins, TlsError> {
        let negative_ttl = settings.fill.negative_ttl.0;
        let mut origins = Origins::default();
        for it in &settings.origins {
            let policy =
                Policy { ttl: Some(it.ttl.0), negative_ttl, client_directives: false, ..Policy::default() };
            let rules = Rules {
                url: &it.url,
                allow_http: false,
                allow_private: it.allow_private,
                ca_file: &it.ca_file,
                max_inflight: it.max_inflight,
                rps: it.rps,
                policy,
            };
            let known =
                former.assets.iter().find(|(prefix, _)| *prefix == it.prefix).map(|(_, known)| &**known);
            if let Some(origin) = Origin::new(service, rules, base, known)? {
                origins.assets.push((it.prefix.clone(), Arc::new(origin)));
            }
        }
        origins.assets.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.len()));
        for it in &settings.sites {
            let heuristic = Some(Heuristic { percent: HEURISTIC_PERCENT, max: it.heuristic_max.0 });
            let heuristic = heuristic.filter(|it| !it.max.is_zero());
            let policy = Policy {
                negative_ttl,
                heuristic,
                cautious_age: it.cautious_age,
                accept_changed_tag: it.accept_changed_tag,
                ..Policy::default()
            };
            let rules = Rules {
                url: &it.origin,
                allow_http: it.allow_http,
                allow_private: it.allow_private,
                ca_file: &it.ca_file,
                max_inflight: it.max_inflight,
                rps: it.rps,
                policy,
            };
            let known = former.sites.iter().find(|(hosts, _)| *hosts == it.hosts).map(|(_, known)| &**known);
            if let Some(origin) = Origin::new(service, rules, base, known)? {
                origins.sites.push((it.hosts.clone(), Arc::new(origin)));
            }
        }
        Ok(origins)
    }

    /// The origin of an asset, and its path there. `name` has no slash before it, as prefixes have, and is decoded.
    pub(crate) fn of_asset(&self, name: &str) -> Option<(&Arc<Origin>, String)> {
        let behind = |prefix: &str| name.strip_prefix(prefix.strip_prefix('/')?);
        let (rest, origin) =
            self.assets.iter().find_map(|(prefix, origin)| Some((behind(prefix)?, origin)))?;
        let base = &origin.url.path;
        let slash = if base.ends_with('/') || rest.starts_with('/') { "" } else { "/" };
        let base = if rest.starts_with('/') { base.trim_end_matches('/') } else { base };
        Some((origin, format!("{base}{slash}{}", encode_path(rest))))
    }

    /// The origin of a host that a request names, with or without a port.
    pub(crate) fn of_host(&self, host: &str) -> Option<&Arc<Origin>> {
        let exact = self.sites.iter().find(|(hosts, _)| hosts.iter().any(|known| known == host));
        let any = || self.sites.iter().find(|(hosts, _)| hosts.iter().any(|known| known == "*"));
        exact.or_else(any).map(|(_, origin)| origin)
    }

    /// The origin that stands for a host which a redirect names.
    pub(crate) fn allowed(&self, authority: &Authority) -> Option<&Arc<Origin>> {
        self.assets.iter().map(|(_, origin)| origin).find(|origin| origin.url.authority == *authority)
    }

    /// Lets their rules hold, also for what they have in common with those that were there before.
    pub(crate) fn put_to_use(&self) {
        let assets = self.assets.iter().map(|(_, origin)| origin);
        for origin in assets.chain(self.sites.iter().map(|(_, origin)| origin)) {
            origin.remote.set_tls(origin.tls.clone());
            origin.permits.set_limit(origin.max_inflight);
        }
    }

    /// Closes connections that have been idle for too long.
    pub(crate) fn tidy(&self, now: Instant) {
        for (_, origin) in &self.assets {
            origin.remote.tidy(now);
        }
        for (_, origin) in &self.sites {
            origin.remote.tidy(now);
        }
    }
}

/// The host that a request is for, in its normal form, without a port.
pub(crate) fn host_of(request: &http::request::Parts) -> Option<String> {
    let authority = request.uri.authority().map(|authority| authority.as_str());
    let text = authority.or_else(|| request.headers.get(HOST)?.to_str().ok())?;
    let end = match text.rfind(':') {
        Some(colon) if !text[colon..].contains(']') => colon,
        _ => text.len(),
    };
    normal_host(&text[..end])
}

impl Origin {
    /// `None` for a URL that the check of the configuration refuses.
    fn new(
        service: &Service,
        rules: Rules<'_>,
        base: &Path,
        former: Option<&Origin>,
    ) -> Result<Option<Origin>, TlsError> {
        let Ok(url) = OriginUrl::parse(rules.url, rules.allow_http) else { return Ok(None) };
        let tls: Option<TlsClient> = match url.authority.secure {
            true => Some(client_tls(rules.ca_file).load(base)?),
            false => None,
        };
        let same = |former: &&Origin| {
            former.url.authority == url.authority && former.allow_private == rules.allow_private
        };
        let former = former.filter(same);
        let may_connect = if rules.allow_private { |_any| true } else { is_public };
        let remote = former.map_or_else(
            || Remote::guarded(service, &IDLE, url.authority.address(), may_connect),
            |former| former.remote.clone(),
        );
        let permits =
            former.map_or_else(|| Permits::new(rules.max_inflight), |former| former.permits.clone());
        let bucket = former.map_or_else(
            || Arc::new(Single::new(service.inventory(), &COUNTERS)),
            |former| former.bucket.clone(),
        );
        Ok(Some(Origin {
            url,
            policy: rules.policy,
            remote,
            tls,
            max_inflight: rules.max_inflight,
            allow_private: rules.allow_private,
            permits,
            bucket,
            rate: Rate::new(rules.rps, 1.0),
        }))
    }

    /// The server of a pack, which is asked for that alone.
    pub(crate) fn of_pack(
        service: &Service,
        pack: &PackSettings,
        base: &Path,
    ) -> Result<Option<Origin>, TlsError> {
        let rules = Rules {
            url: &pack.path,
            allow_http: false,
            allow_private: pack.allow_private,
            ca_file: &pack.ca_file,
            max_inflight: PACK_INFLIGHT,
            rps: 0,
            policy: Policy::default(),
        };
        Origin::alone(service, rules, base)
    }

    /// The object store, asked at this URL alone.
    pub(crate) fn of_store(
        service: &Service,
        url: &str,
        store: &S3Settings,
        base: &Path,
    ) -> Result<Option<Origin>, TlsError> {
        let rules = Rules {
            url,
            allow_http: store.allow_http,
            allow_private: store.allow_private,
            ca_file: &store.ca_file,
            max_inflight: PACK_INFLIGHT,
            rps: 0,
            policy: Policy::default(),
        };
        Origin::alone(service, rules, base)
    }

    /// One that is in no list, and put to use at once.
    fn alone(service: &Service, rules: Rules<'_>, base: &Path) -> Result<Option<Origin>, TlsError> {
        let origin = Origin::new(service, rules, base, None)?;
        if let Some(origin) = &origin {
            origin.remote.set_tls(origin.tls.clone());
        }
        Ok(origin)
    }

    /// A place among the requests to it.
    async fn admit(&self, until: Instant) -> Result<Permit, Failure> {
        if let Some(rate) = self.rate
            && let Verdict::Empty { wait } = self.bucket.take(1.0, rate, Instant::now())
        {
            return Err(Failure::RateLimit(wait.as_secs() + 1));
        }
        let free = std::future::poll_fn(|cx| self.permits.poll_take(cx));
        tokio::time::timeout_at(until.into(), free).await.map_err(|_late| Failure::Timeout)
    }

    /// Sends a request without a body, again if it fails and there is time; returns the answer when its head is there.
    pub(crate) async fn ask(
        &self,
        ask: &Ask,
        patience: &Patience<'_>,
        counters: &Counters,
    ) -> Result<Asked, Failure> {
        self.ask_with(ask, &|| None, patience, counters).await
    }

    /// The same with a body, which is made anew for each try.
    pub(crate) async fn ask_with(
        &self,
        ask: &Ask,
        body: &(dyn Fn() -> Option<Body> + Sync),
        patience: &Patience<'_>,
        counters: &Counters,
    ) -> Result<Asked, Failure> {
        let tries = u32::try_from(patience.retry.tries).unwrap_or(u32::MAX).max(1);
        let mut permit = self.admit(patience.until).await?;
        for tried in 0.. {
            let last = tried + 1 >= tries;
            let asked = self.ask_once(ask, &mut body(), permit, patience, tries - tried, counters).await;
            match &asked {
                Ok(asked) if last || !patience.statuses || !is_passing(asked.answer.status) => {}
                Err(failure) if last || !failure.is_passing() => {}
                _ => {
                    let pause = pause(patience.retry, tried, random::unit());
                    if Instant::now() + pause < patience.until {
                        counters.retries.inc();
                        drop(asked);
                        tokio::time::sleep(pause).await;
                        permit = self.admit(patience.until).await?;
                        continue;
                    }
                }
            }
            return asked;
        }
        Err(Failure::Timeout)
    }

    /// Sends a request once.
    pub(crate) async fn send(
        &self,
        ask: &Ask,
        body: Option<Body>,
        patience: &Patience<'_>,
        counters: &Counters,
    ) -> Result<Asked, Failure> {
        let permit = self.admit(patience.until).await?;
        self.ask_once(ask, &mut { body }, permit, patience, 1, counters).await
    }

    async fn ask_once(
        &self,
        ask: &Ask,
        body: &mut Option<Body>,
        permit: Permit,
        patience: &Patience<'_>,
        tries_left: u32,
        counters: &Counters,
    ) -> Result<Asked, Failure> {
        let now = Instant::now();
        let left = patience.until.saturating_duration_since(now);
        if left.is_zero() {
            return Err(Failure::Timeout);
        }
        let (connect_timeout, budget) = shares(left, tries_left);
        let limits = CallLimits { connect_timeout, silence: patience.stall };
        let requested = UnixMillis(unix_millis());
        let called = tokio::time::timeout(budget, self.remote.call(ask, body, limits)).await;
        let answer = match called {
            Ok(Ok(answer)) => answer,
            Ok(Err(CallError::Refused)) => {
                tracing::warn!(origin = %self.remote.address, "its name leads to an address that is not allowed");
                return Err(Failure::NotAllowed);
            }
            Ok(Err(CallError::ConnectTimeout)) | Err(_) => {
                counters.timeouts.inc();
                return Err(Failure::Timeout);
            }
            Ok(Err(CallError::RequestBody(error))) => {
                return Err(Failure::RequestBody { too_large: matches!(error, BodyError::TooLarge) });
            }
            Ok(Err(error)) => {
                tracing::debug!(origin = %self.remote.address, %error, "origin failed");
                return Err(Failure::Upstream(error.to_string()));
            }
        };
        let exchange = Exchange { requested, received: UnixMillis(unix_millis()) };
        Ok(Asked { answer, exchange, permit })
    }
}

/// How long an origin is waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience<'a> {
    pub(crate) until: Instant,
    pub(crate) stall: Duration,
    pub(crate) retry: &'a RetrySettings,
    /// Whether an answer may be a reason to ask again, and not only that there is none.
    pub(crate) statuses: bool,
}

/// An answer that has begun.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) answer: Answer,
    pub(crate) exchange: Exchange,
    /// The place among the requests to the origin, for as long as the answer is under way.
    pub(crate) permit: Permit,
}

/// Statuses that may be others a moment later.
fn is_passing(status: StatusCode) -> bool {
    matches!(status.as_u16(), 502..=504)
}

/// How long a try may take to connect, and in all. One that hangs leaves time for the others; but an origin that is
/// merely slow, as most are that take long, gets most of the time there is.
fn shares(left: Duration, tries_left: u32) -> (Duration, Duration) {
    let reserve = if tries_left > 1 { left / RESERVE_PART } else { Duration::ZERO };
    (left / tries_left.max(1), left - reserve)
}

/// How long to wait before the try after this one; `chance` is between 0 and 1.
fn pause(retry: &RetrySettings, tried: u32, chance: f64) -> Duration {
    let doubled = retry.base.0.checked_mul(1u32.checked_shl(tried).unwrap_or(u32::MAX));
    let jitter = if retry.jitter { retry.base.0.mul_f64(chance) } else { Duration::ZERO };
    doubled.unwrap_or(retry.max.0).min(retry.max.0) + jitter
}

/// A request to an origin.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) method: Method,
    /// As `Host` has it.
    pub(crate) host: String,
    /// Path and query.
    pub(crate) target: String,
    pub(crate) headers: HeaderMap,
    /// What is known of its body's length; `None` if there is none.
    pub(crate) body: Option<Option<u64>>,
    /// Where interim answers go.
    pub(crate) interim: Option<InterimSender>,
    /// The protocol that the client wants to change to.
    pub(crate) upgrade: Option<HeaderValue>,
}

impl Ask {
    pub(crate) fn get(origin: &Origin, target: String, headers: HeaderMap) -> Ask {
        let host = origin.url.authority.host_field();
        Ask { method: Method::GET, host, target, headers, body: None, interim: None, upgrade: None }
    }
}

impl Outgoing for Ask {
    fn method(&self) -> &Method {
        &self.method
    }

    fn write_http1(&self, out: &mut BytesMut) {
        let mut put = |pieces: &[&[u8]]| pieces.iter().for_each(|piece| out.extend_from_slice(piece));
        put(&[self.method.as_str().as_bytes(), b" ", self.target.as_bytes(), b" HTTP/1.1\r\n"]);
        put(&[b"host: ", self.host.as_bytes(), b"\r\n"]);
        for (name, value) in &self.headers {
            put(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"]);
        }
        if let Some(protocol) = &self.upgrade {
            put(&[b"connection: upgrade\r\nupgrade: ", protocol.as_bytes(), b"\r\n"]);
        }
        match self.body {
            None => {}
            Some(Some(length)) => {
                put(&[CONTENT_LENGTH.as_str().as_bytes(), b": ", length.to_string().as_bytes(), b"\r\n"]);
            }
            Some(None) => put(&[TRANSFER_ENCODING.as_str().as_bytes(), b": chunked\r\n"]),
        }
        put(&[b"\r\n"]);
    }

    fn http2(&self, scheme: &str, authority: &str) -> Request<()> {
        let uri = Uri::builder().scheme(scheme).path_and_query(self.target.as_str());
        let host = if self.host.is_empty() { authority } else { &self.host };
        let mut request = Request::new(());
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = uri.authority(host).build().unwrap_or_default();
        *request.headers_mut() = self.headers.clone();
        if let Some(Some(length)) = self.body {
            request.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        request
    }

    fn chunked(&self) -> bool {
        self.body == Some(None)
    }

    fn upgrades(&self) -> bool {
        self.upgrade.is_some()
    }

    fn interim(&self, status: StatusCode, headers: HeaderMap) {
        if let Some(interim) = &self.interim
            && status != StatusCode::CONTINUE
        {
            interim.send(status, &headers);
        }
    }
}

/// Our element of `Via` behind a message that came in this version of HTTP.
pub(crate) fn via(version: Version) -> HeaderValue {
    HeaderValue::from_static(match version {
        Version::HTTP_10 => "1.0 ron",
        Version::HTTP_11 => "1.1 ron",
        _ => "2 ron",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use ron_kernel::kernel::Kernel;
    use ron_kernel::units::Span;

    #[test]
    fn pauses_double_up_to_a_limit_and_jitter_adds_less_than_the_first() {
        let retry = RetrySettings { jitter: false, ..RetrySettings::default() };
        let plain: Vec<u128> = (0..7).map(|tried| pause(&retry, tried, 0.9).as_millis()).collect();
        assert_eq!(plain, [50, 100, 200, 400, 800, 800, 800]);
        assert_eq!(pause(&retry, u32::MAX, 0.0), Duration::from_millis(800));
        let jittered = RetrySettings::default();
        assert_eq!(pause(&jittered, 0, 0.5), Duration::from_millis(75));
    }

    #[test]
    fn a_slow_origin_gets_most_of_the_time_and_a_dead_one_only_its_share() {
        let second = Duration::from_secs(1);
        assert_eq!(shares(4 * second, 3), (4 * second / 3, 3 * second));
        assert_eq!(shares(4 * second, 1), (4 * second, 4 * second));
        let (_, first) = shares(5 * second, 3);
        let (_, next) = shares(5 * second - first, 2);
        let (_, last) = shares(5 * second - first - next, 1);
        assert!(first > 2 * second && last > Duration::from_millis(200), "{first:?} {next:?} {last:?}");
    }

    proptest! {
        #[test]
        fn a_pause_is_never_longer_than_its_parts(base in 0u64..5000, max in 0u64..5000, tried in 0u32..99, chance in 0.0..1.0f64) {
            let retry = RetrySettings { base: Span::millis(base), max: Span::millis(max), ..RetrySettings::default() };
            prop_assert!(pause(&retry, tried, chance) <= Duration::from_millis(max + base));
        }
    }

    #[test]
    fn an_asset_belongs_to_the_longest_prefix_and_a_host_to_its_site() {
        let service = Kernel::new().service("edge");
        let mut settings = EdgeSettings::default();
        for (prefix, url) in
            [("/", "http://x"), ("/img/", "http://a/"), ("/img/big/", "http://b/large"), ("/v", "http://c")]
        {
            let url = OriginUrl::parse(url, true).unwrap();
            let origin = crate::config::OriginSettings { prefix: prefix.to_owned(), ..Default::default() };
            settings.origins.push(crate::config::OriginSettings {
                url: url.authority.host.clone() + &url.path,
                ..origin
            });
        }
        // Plain HTTP is for sites alone, and those need no CA file.
        assert!(
            Origins::new(&service, &settings, Path::new("."), &Origins::default()).unwrap().assets.is_empty()
        );
        settings.origins.clear();
        for (hosts, origin) in [(vec!["a.org"], "http://a"), (vec!["*"], "http://b:81")] {
            settings.sites.push(crate::config::SiteSettings {
                hosts: hosts.into_iter().map(str::to_owned).collect(),
                origin: origin.to_owned(),
                allow_http: true,
                ..Default::default()
            });
        }
        let origins = Origins::new(&service, &settings, Path::new("."), &Origins::default()).unwrap();
        let host = |name: &str| origins.of_host(name).unwrap().url.authority.host_field();
        assert_eq!((host("a.org"), host("other")), ("a".to_owned(), "b:81".to_owned()));
        let again = Origins::new(&service, &settings, Path::new("."), &origins).unwrap();
        let remote = |origins: &Origins| origins.of_host("a.org").unwrap().remote.clone();
        assert!(Arc::ptr_eq(&remote(&origins), &remote(&again)), "kept over a reload");
        settings.sites[0].max_inflight = 3;
        let limit = |origins: &Origins| origins.of_host("a.org").unwrap().permits.limit();
        let before = limit(&origins);
        let fewer = Origins::new(&service, &settings, Path::new("."), &origins).unwrap();
        assert_eq!(limit(&origins), before, "a configuration that is not used changes nothing");
        fewer.put_to_use();
        assert_eq!(limit(&origins), 3);
        settings.sites[0].allow_private = true;
        let other = Origins::new(&service, &settings, Path::new("."), &origins).unwrap();
        assert!(!Arc::ptr_eq(&remote(&origins), &remote(&other)), "other rules, other connections");
    }

    #[test]
    fn the_rest_of_a_path_stands_behind_the_origins_own() {
        let origin = |url: &str| {
            let service = Kernel::new().service("edge");
            let rules = Rules {
                url,
                allow_http: true,
                allow_private: false,
                ca_file: "",
                max_inflight: 1,
                rps: 0,
                policy: Policy::default(),
            };
            Arc::new(Origin::new(&service, rules, Path::new("."), None).unwrap().unwrap())
        };
        let check = |prefix: &str, url: &str, name: &str, expected: Option<&str>| {
            let origins = Origins { assets: vec![(prefix.to_owned(), origin(url))], sites: Vec::new() };
            assert_eq!(
                origins.of_asset(name).map(|(_, target)| target).as_deref(),
                expected,
                "{prefix} {url} {name}"
            );
        };
        check("/img/", "http://a/", "img/a.png", Some("/a.png"));
        check("/img/", "http://a/b/", "img/c/d e?%\u{fc}", Some("/b/c/d%20e%3F%25%C3%BC"));
        check("/img", "http://a/b", "img/c", Some("/b/c"));
        check("/img/", "http://a/b", "img/c", Some("/b/c"));
        check("/", "http://a", "img/c", Some("/img/c"));
        check("/img/", "http://a/", "imgs/a", None);
    }
}
