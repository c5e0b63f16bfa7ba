//! Who is calling: class, tenant and share, decided locally and in constant time.

use crate::auth::{Auth, challenge};
use crate::config::{ClassName, GatewaySettings, RouteAuth, RouteSettings, TenantSettings};
use crate::fair_queue::Tenant;
use crate::gate::Standing;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use ron_kernel::admission::client_ip::network_of;
use ron_kernel::config::Secret;
use ron_kernel::metrics::{Counter, Family};
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use ron_kernel::token::{Opened, Verifier, Wish};
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hash};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// What the gateway calls itself in capabilities.
const AUDIENCE: &str = "gateway";

/// Callers without a tenant of their own share this many per class, by address, so that one of them floods its own
/// bucket and not all the others'.
const BUCKETS: u32 = 64;

pub(crate) const CLASS_NAMES: [&str; 3] = ["anon", "authed", "internal"];

/// A caller as the fair queue and the quotas see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) tenant: Tenant,
    pub(crate) quantum: u64,
    /// Index of the configured tenant.
    pub(crate) configured: Option<usize>,
    /// What its credentials are counted as; none if it has none.
    pub(crate) capability: Option<u64>,
}

/// What is known of a client and of what it wants, beside its fields.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct From<'a> {
    /// `None`: over the Unix socket.
    pub(crate) client: Option<IpAddr>,
    /// Names in its certificate.
    pub(crate) names: &'a [Box<str>],
    /// It is a trusted proxy.
    pub(crate) trusted: bool,
    pub(crate) method: &'a str,
    pub(crate) path: &'a str,
    /// Seconds since 1970.
    pub(crate) now: u64,
}

/// Who good credentials belong to.
#[derive(Clone, Copy, Debug)]
struct Identity {
    /// Index of the configured tenant.
    configured: Option<usize>,
    capability: u64,
}

/// The tenants of one version of the configuration.
#[derive(Debug)]
pub(crate) struct Tenants {
    known: Vec<Known>,
    by_name: HashMap<String, usize>,
    next_number: u32,
    auth: Auth,
    by_key: HashMap<[u8; 32], usize>,
    by_header: Vec<(HeaderName, HeaderValue, usize)>,
    by_san: HashMap<String, usize>,
    /// By name, then by value.
    by_claim: HashMap<String, HashMap<String, usize>>,
    /// Standings of the buckets that strangers share.
    strangers: Vec<Arc<Standing>>,
    hasher: RandomState,
}

/// A configured tenant.
#[derive(Debug)]
struct Known {
    name: String,
    /// What queue and quotas know it by. It is given once and never to another, so that a reload which reorders the
    /// list hands nobody's queue or bucket to somebody else.
    number: u32,
    class: u8,
    quantum: u64,
    /// What its keys and certificates allow.
    scopes: Vec<String>,
    standing: Arc<Standing>,
}

impl Tenants {
    /// Tenants that `former` knew keep their numbers and standing, and strangers their buckets.
    pub(crate) fn new(
        settings: &GatewaySettings,
        auth: Auth,
        former: Option<&Tenants>,
        served: &Family<Counter, 1>,
    ) -> Tenants {
        let mut next_number = former.map_or(0, |former| former.next_number);
        let mut known = |tenant: &TenantSettings| {
            let of_before = former.and_then(|former| Some(&former.known[*former.by_name.get(&tenant.id)?]));
            let (number, standing) = match of_before {
                Some(known) => (known.number, known.standing.clone()),
                None => {
                    // Numbers run out after four thousand million new names; the last is then shared.
                    next_number = (next_number + 1).min(u32::MAX - BUCKETS);
                    (next_number, Arc::new(Standing::new(served.with([&tenant.id]))))
                }
            };
            let (class, quantum) = (class_index(tenant.class), tenant.quantum);
            let (name, scopes) = (tenant.id.clone(), tenant.scopes.clone());
            Known { name, number, class, quantum, scopes, standing }
        };
        let known: Vec<Known> = settings.tenants.iter().map(&mut known).collect();
        let strangers = || {
            let served = served.with(["other"]);
            (0..BUCKETS).map(|_| Arc::new(Standing::new(served.clone()))).collect()
        };
        let keys = |(index, keys): (usize, &Vec<Secret>)| {
            keys.iter().filter_map(|key| parse_key(&key.0)).map(move |hash| (hash, index)).collect::<Vec<_>>()
        };
        let all = || settings.tenants.iter().enumerate();
        let mut by_claim: HashMap<String, HashMap<String, usize>> = HashMap::new();
        for (index, tenant) in all() {
            if let Some((name, value)) = parse_claim(&tenant.r#match.claim) {
                by_claim.entry(name.to_owned()).or_default().insert(value.to_owned(), index);
            }
        }
        Tenants {
            auth,
            by_key: all().flat_map(|(index, tenant)| keys((index, &tenant.keys))).collect(),
            by_header: all()
                .filter_map(|(index, tenant)| {
                    parse_header(&tenant.r#match.header).map(|(name, value)| (name, value, index))
                })
                .collect(),
            by_san: all()
                .filter(|(_, tenant)| !tenant.r#match.san.is_empty())
                .map(|(index, tenant)| (plain_name(&tenant.r#match.san), index))
                .collect(),
            by_claim,
            by_name: all().map(|(index, tenant)| (tenant.id.clone(), index)).collect(),
            known,
            next_number,
            strangers: former.map_or_else(strangers, |former| former.strangers.clone()),
            hasher: former.map_or_else(RandomState::new, |former| former.hasher.clone()),
        }
    }

    /// The caller of a request, or why it may not call.
    pub(crate) fn caller(
        &self,
        headers: &HeaderMap,
        route: &RouteSettings,
        from: From<'_>,
    ) -> Result<Caller, Rejection> {
        let identity = self.identify(headers, route, from)?;
        let configured = match identity {
            Some(identity) => identity.configured,
            None if from.trusted => {
                let named = self.by_header.iter().find(|(name, value, _)| headers.get(name) == Some(value));
                named.map(|(_, _, index)| *index)
            }
            None => None,
        };
        let (over, capability) = (class_of(&route.class), identity.map(|identity| identity.capability));
        Ok(match configured {
            Some(index) => {
                let Known { number: id, class, quantum, .. } = self.known[index];
                let tenant = Tenant { class: over.unwrap_or(class), id };
                Caller { tenant, quantum, configured, capability }
            }
            None => {
                // Over the Unix socket there is no address: that is this machine.
                let own = match (from.client, capability) {
                    (None, _) => 2,
                    (Some(_), Some(_)) => 1,
                    (Some(_), None) => 0,
                };
                let hash = capability.unwrap_or_else(|| self.hasher.hash_one(from.client.map(network_of)));
                #[expect(clippy::cast_possible_truncation, reason = "any bits of the hash will do")]
                let bucket = hash as u32 % BUCKETS;
                let tenant = Tenant { class: over.unwrap_or(own), id: u32::MAX - bucket };
                Caller { tenant, quantum: 1, configured: None, capability }
            }
        })
    }

    pub(crate) fn auth(&self) -> &Auth {
        &self.auth
    }

    pub(crate) fn standing(&self, caller: &Caller) -> &Arc<Standing> {
        match caller.configured {
            Some(index) => &self.known[index].standing,
            None => &self.strangers[(u32::MAX - caller.tenant.id) as usize],
        }
    }

    /// Waiting requests of each configured tenant, and of all others together.
    pub(crate) fn queued(&self) -> impl Iterator<Item = (&str, usize)> {
        let others = self.strangers.iter().map(|standing| standing.queued()).sum();
        let known = self.known.iter().map(|known| (known.name.as_str(), known.standing.queued()));
        known.chain([("other", others)])
    }

    /// How the queue knows a configured tenant whose route does not say otherwise, and its quantum.
    pub(crate) fn share_of(&self, index: usize) -> (Tenant, u64) {
        let Known { number: id, class, quantum, .. } = self.known[index];
        (Tenant { class, id }, quantum)
    }

    /// Whose the credentials are: a key or token, or else a certificate. `None` if there are none and none are needed.
    fn identify(
        &self,
        headers: &HeaderMap,
        route: &RouteSettings,
        from: From<'_>,
    ) -> Result<Option<Identity>, Rejection> {
        let looks = route.auth != RouteAuth::None;
        if looks && self.auth.are_several(headers) {
            return Err(Rejection::new(Reason::Malformed, "credentials are sent more than once"));
        }
        let sent = if looks { self.auth.sent(headers) } else { None };
        if let Some(sent) = sent {
            return self.prove(sent, route, from).map(Some);
        }
        let certified = from.names.iter().find_map(|name| Some((name, *self.by_san.get(&**name)?)));
        if let Some((name, index)) = certified {
            self.require_scopes(index, route)?;
            return Ok(Some(Identity { configured: Some(index), capability: self.number("name", name) }));
        }
        let needed = route.auth == RouteAuth::Required || !route.scopes.is_empty();
        match from.client {
            // Its user id is known, and may connect: that is who it is, and it says nothing of scopes.
            None if route.scopes.is_empty() => Ok(None),
            None => Err(forbidden(route)),
            Some(_) if needed => Err(challenge(Reason::Unauth, self.auth.wanted())),
            Some(_) => Ok(None),
        }
    }

    /// Whose a key or token is, if it is good and allows this.
    fn prove(&self, sent: &[u8], route: &RouteSettings, from: From<'_>) -> Result<Identity, Rejection> {
        match &self.auth {
            Auth::None | Auth::ApiKey => {
                // Looked up by hash: nothing about a key can be learned from the time it takes.
                let hash: [u8; 32] = Sha256::digest(sent).into();
                let found = self.by_key.get(&hash).copied();
                let index =
                    found.ok_or_else(|| challenge(Reason::TokenInvalid, "the API key is not known"))?;
                self.require_scopes(index, route)?;
                Ok(Identity { configured: Some(index), capability: self.number("key", hash) })
            }
            Auth::Jwt(jwt) => {
                let claims = jwt.check(sent, from.now)?;
                if !route.scopes.iter().all(|scope| claims.has_scope(scope)) {
                    return Err(forbidden(route));
                }
                let configured = self.claimed(|name, take| claims.words(name).for_each(|value| take(&value)));
                // A subject counts as one, however many tokens it gets.
                let capability = match claims.text("sub") {
                    Some(subject) => self.number("subject", (claims.text("iss"), subject)),
                    None => self.number("token", sent),
                };
                Ok(Identity { configured, capability })
            }
            Auth::Biscuit(verifier) => {
                let opened = admit(verifier, sent, route, from).map_err(|reason| match reason {
                    Reason::Forbidden => narrowed(route),
                    Reason::TokenExpired => challenge(reason, "the capability has expired"),
                    Reason::TokenAudience => challenge(reason, "the capability is for another service"),
                    Reason::TokenRevoked => challenge(reason, "the capability is revoked"),
                    _ => challenge(Reason::TokenInvalid, "this is no capability signed by a trusted key"),
                })?;
                let named = opened.tenant().ok().flatten();
                let configured = named.and_then(|name| self.by_name.get(&name).copied());
                Ok(Identity { configured, capability: self.number("capability", opened.origin()) })
            }
        }
    }

    /// The tenant of somebody who claims this: of several the one that is listed first, so that it is always the same.
    fn claimed(&self, values_of: impl Fn(&str, &mut dyn FnMut(&str))) -> Option<usize> {
        let mut first = None;
        for (name, known) in &self.by_claim {
            values_of(name, &mut |value| {
                let index = known.get(value).copied();
                first = first.into_iter().chain(index).min();
            });
        }
        first
    }

    /// A number for what somebody is known by.
    fn number(&self, kind: &str, name: impl Hash) -> u64 {
        self.hasher.hash_one((kind, name))
    }

    /// Whether a tenant's keys and certificates allow what the route wants.
    fn require_scopes(&self, index: usize, route: &RouteSettings) -> Result<(), Rejection> {
        let has = &self.known[index].scopes;
        if route.scopes.iter().all(|scope| has.contains(scope)) { Ok(()) } else { Err(forbidden(route)) }
    }
}

/// A capability that allows a request of this route.
fn admit(verifier: &Verifier, sent: &[u8], route: &RouteSettings, from: From<'_>) -> Result<Opened, Reason> {
    let token = std::str::from_utf8(sent).map_err(|_bad| Reason::TokenInvalid)?;
    let opened = verifier.open(token)?;
    let wish = Wish { scope: "", method: from.method, path: from.path, audience: AUDIENCE };
    opened.allows_all(&route.scopes, wish, UNIX_EPOCH + Duration::from_secs(from.now))?;
    Ok(opened)
}

fn forbidden(route: &RouteSettings) -> Rejection {
    let refused = "these credentials do not allow this here";
    let mut rejection = challenge(Reason::Forbidden, refused);
    if !route.scopes.is_empty() {
        rejection.detail = format!("{refused}: it needs the scope {}", route.scopes.join(" and ")).into();
    }
    rejection
}

/// A capability may have the scope and still be narrowed to something else.
fn narrowed(route: &RouteSettings) -> Rejection {
    let mut rejection = forbidden(route);
    let beside = if route.scopes.is_empty() { ':' } else { ',' };
    let how = "and must not be narrowed to another scope, method or path (`ron token inspect` shows to what)";
    rejection.detail = format!("{}{beside} {how}", rejection.detail).into();
    rejection
}

fn class_index(class: ClassName) -> u8 {
    match class {
        ClassName::Anon => 0,
        ClassName::Authed => 1,
        ClassName::Internal => 2,
    }
}

/// The class of that name.
pub(crate) fn class_of(name: &str) -> Option<u8> {
    CLASS_NAMES.iter().position(|known| *known == name).and_then(|index| u8::try_from(index).ok())
}

/// `sha256:` and 64 hexadecimal digits.
pub(crate) fn parse_key(text: &str) -> Option<[u8; 32]> {
    let digits = text.strip_prefix("sha256:").filter(|digits| digits.len() == 64 && digits.is_ascii())?;
    let mut hash = [0; 32];
    for (byte, pair) in hash.iter_mut().zip(digits.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(hash)
}

/// A host in lower case; a URI as it is, for its case matters.
fn plain_name(name: &str) -> String {
    if name.contains("://") { name.to_owned() } else { name.to_ascii_lowercase() }
}

/// `name=value` as a claim.
pub(crate) fn parse_claim(text: &str) -> Option<(&str, &str)> {
    text.split_once('=').filter(|(name, _)| !name.is_empty())
}

/// `name=value` as a header.
pub(crate) fn parse_header(text: &str) -> Option<(HeaderName, HeaderValue)> {
    let (name, value) = text.split_once('=')?;
    Some((HeaderName::from_bytes(name.as_bytes()).ok()?, HeaderValue::from_str(value).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::MatchSettings;
    use ron_kernel::key::PrivateKey;
    use ron_kernel::metrics::Metrics;
    use ron_kernel::token::{Grant, Revocations, inspect};
    use std::time::SystemTime;

    fn key_of(key: &str) -> String {
        let hash: [u8; 32] = Sha256::digest(key).into();
        format!("sha256:{}", hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    }

    fn served() -> Arc<Family<Counter, 1>> {
        Metrics::default().family("fq_served_cost_total", "", ["tenant"])
    }

    fn tenants() -> Tenants {
        tenants_with(Auth::ApiKey)
    }

    fn tenants_with(auth: Auth) -> Tenants {
        let acme = TenantSettings {
            id: "acme".into(),
            quantum: 3,
            keys: vec![Secret(key_of("k1"))],
            scopes: vec!["read".into(), "write".into()],
            ..TenantSettings::default()
        };
        let beta = TenantSettings {
            id: "beta".into(),
            class: ClassName::Internal,
            r#match: MatchSettings {
                header: "x-tenant=beta".into(),
                san: "spiffe://org/beta".into(),
                claim: String::new(),
            },
            ..TenantSettings::default()
        };
        let settings = GatewaySettings { tenants: vec![acme, beta], ..GatewaySettings::default() };
        Tenants::new(&settings, auth, None, &served())
    }

    fn ask(
        auth: RouteAuth,
        field: Option<(&'static str, &'static str)>,
        trusted: bool,
    ) -> Result<Caller, Reason> {
        let route = RouteSettings { auth, ..RouteSettings::default() };
        let mut headers = HeaderMap::new();
        if let Some((name, value)) = field {
            headers.insert(name, HeaderValue::from_static(value));
        }
        let from = From { client: "192.0.2.1".parse().ok(), trusted, ..From::default() };
        tenants().caller(&headers, &route, from).map_err(|rejection| rejection.reason)
    }

    #[test]
    fn keys_lead_to_tenants_and_wrong_ones_nowhere() {
        let acme = ask(RouteAuth::Required, Some(("x-api-key", "k1")), false).unwrap();
        assert_eq!((acme.tenant, acme.quantum), (Tenant { class: 1, id: 1 }, 3));
        let bearer = ask(RouteAuth::Optional, Some(("authorization", "Bearer k1")), false).unwrap();
        assert_eq!((bearer.tenant, bearer.configured), (acme.tenant, acme.configured));
        assert_eq!(ask(RouteAuth::Required, None, false), Err(Reason::Unauth));
        assert_eq!(ask(RouteAuth::Optional, Some(("x-api-key", "k2")), false), Err(Reason::TokenInvalid));
        assert_eq!(ask(RouteAuth::None, Some(("x-api-key", "k2")), false).unwrap().tenant.class, 0);
    }

    #[test]
    fn of_several_tenants_whose_claims_fit_it_is_the_first() {
        let tenant = |id: &str, claim: &str| TenantSettings {
            id: id.to_owned(),
            r#match: MatchSettings { claim: claim.to_owned(), ..MatchSettings::default() },
            ..TenantSettings::default()
        };
        let listed = [("z", "org=a"), ("y", "team=b"), ("x", "team=c"), ("w", "plan=d")];
        let tenants = listed.map(|(id, claim)| tenant(id, claim)).to_vec();
        let settings = GatewaySettings { tenants, ..GatewaySettings::default() };
        // As often as a map may come out in another order.
        for _ in 0..32 {
            let tenants = Tenants::new(&settings, Auth::None, None, &served());
            let of = |said: &[(&str, &str)]| {
                tenants.claimed(|name, take| {
                    said.iter().filter(|(known, _)| *known == name).for_each(|(_, value)| take(value));
                })
            };
            assert_eq!(of(&[("plan", "d"), ("team", "c"), ("team", "b")]), Some(1));
            assert_eq!(of(&[("team", "b"), ("org", "a"), ("plan", "d")]), Some(0));
            assert_eq!((of(&[("org", "b"), ("x", "a")]), of(&[])), (None, None));
        }
    }

    #[test]
    fn a_header_names_a_tenant_only_if_a_trusted_proxy_says_so() {
        let field = Some(("x-tenant", "beta"));
        assert_eq!(ask(RouteAuth::Optional, field, true).unwrap().tenant, Tenant { class: 2, id: 2 });
        assert_eq!(ask(RouteAuth::Optional, field, false).unwrap().configured, None);
    }

    #[test]
    fn a_certificate_is_as_good_as_a_key_and_a_key_goes_before_it() {
        let names = ["other.org".into(), "spiffe://org/beta".into()];
        let from = From { client: "192.0.2.1".parse().ok(), names: &names, ..From::default() };
        let route = RouteSettings { auth: RouteAuth::Required, ..RouteSettings::default() };
        let caller = |headers: &HeaderMap, from: From<'_>| tenants().caller(headers, &route, from).unwrap();
        assert_eq!(caller(&HeaderMap::new(), from).configured, Some(1));
        let mut key = HeaderMap::new();
        key.insert("x-api-key", HeaderValue::from_static("k1"));
        assert_eq!(caller(&key, from).configured, Some(0));
        let stranger = From { names: &names[..1], ..from };
        let refused = tenants().caller(&HeaderMap::new(), &route, stranger).unwrap_err();
        assert_eq!(refused.reason, Reason::Unauth);
    }

    #[test]
    fn scopes_are_needed_of_keys_and_certificates_and_nobody_has_them_without() {
        let route = |scopes: &[&str]| {
            let scopes = scopes.iter().map(|scope| (*scope).to_owned()).collect();
            RouteSettings { scopes, ..RouteSettings::default() }
        };
        let names = ["spiffe://org/beta".into()];
        let mut key = HeaderMap::new();
        key.insert("x-api-key", HeaderValue::from_static("k1"));
        let ask = |headers: &HeaderMap, scopes: &[&str], names: &[Box<str>], client: Option<&str>| {
            let client = client.map(|ip| ip.parse().unwrap());
            let from = From { client, names, ..From::default() };
            let caller = tenants().caller(headers, &route(scopes), from);
            caller.map(|caller| caller.configured).map_err(|rejection| rejection.reason)
        };
        let (none, remote) = (HeaderMap::new(), Some("192.0.2.1"));
        assert_eq!(ask(&key, &["read", "write"], &[], remote), Ok(Some(0)));
        assert_eq!(ask(&key, &["read", "admin"], &[], remote), Err(Reason::Forbidden));
        assert_eq!(ask(&none, &["read"], &names, remote), Err(Reason::Forbidden));
        assert_eq!(ask(&none, &["read"], &[], remote), Err(Reason::Unauth));
        assert_eq!(ask(&none, &["read"], &[], None), Err(Reason::Forbidden));
        assert_eq!(ask(&none, &[], &[], None), Ok(None), "a local user is known by its id");
    }

    #[test]
    fn a_capability_leads_to_its_tenant_and_each_of_its_limits_refuses() {
        let (signing, now) = (PrivateKey::generate().unwrap(), SystemTime::now());
        let seconds = now.duration_since(UNIX_EPOCH).unwrap().as_secs();
        let grant = Grant { scopes: vec!["read".into()], tenant: Some("acme".into()), ..Grant::default() };
        let good = grant.mint(&signing, now).unwrap();
        let lost = grant.mint(&signing, now).unwrap();
        let list = Revocations::parse(&inspect(&lost).unwrap()[0].id).unwrap();
        let verifier = Verifier::new(&[signing.public()]).without(Arc::new(list));
        let tenants = tenants_with(Auth::Biscuit(verifier));
        let route = RouteSettings { scopes: vec!["read".into()], ..RouteSettings::default() };
        let ask = |token: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("authorization", HeaderValue::try_from(format!("Bearer {token}")).unwrap());
            let client = "192.0.2.1".parse().ok();
            let from = From { client, method: "GET", path: "/a/b", now: seconds, ..From::default() };
            tenants.caller(&headers, &route, from).map_err(|rejection| rejection.reason)
        };
        let narrow = |limits: Grant| limits.attenuate(&good, now).unwrap();
        let caller = ask(&good).unwrap();
        assert_eq!((caller.configured, caller.tenant.class), (Some(0), 1));
        let narrowed = narrow(Grant { path_prefix: Some("/a/".into()), ..Grant::default() });
        assert_eq!(ask(&narrowed), Ok(caller), "it counts as the one it was narrowed from");
        let check = |limits: Grant, reason: Reason| assert_eq!(ask(&narrow(limits)), Err(reason));
        check(Grant { path_prefix: Some("/b".into()), ..Grant::default() }, Reason::Forbidden);
        check(Grant { method: Some("PUT".into()), ..Grant::default() }, Reason::Forbidden);
        check(Grant { tenant: Some("beta".into()), ..Grant::default() }, Reason::Forbidden);
        check(Grant { audience: Some("edge".into()), ..Grant::default() }, Reason::TokenAudience);
        check(Grant { ttl: Some(Duration::ZERO), ..Grant::default() }, Reason::TokenExpired);
        assert_eq!(ask(&lost), Err(Reason::TokenRevoked));
        assert_eq!(ask("x"), Err(Reason::TokenInvalid));
        let stranger = Grant { tenant: Some("nobody".into()), ..grant }.mint(&signing, now).unwrap();
        let caller = ask(&stranger).unwrap();
        assert_eq!((caller.configured, caller.tenant.class), (None, 1), "known, if not as a tenant");
    }

    #[test]
    fn a_number_belongs_to_a_name_for_good() {
        let named = |names: &[&str], former: Option<&Tenants>| {
            let tenant = |id: &&str| TenantSettings { id: (*id).into(), ..TenantSettings::default() };
            let tenants = names.iter().map(tenant).collect();
            let settings = GatewaySettings { tenants, ..GatewaySettings::default() };
            Tenants::new(&settings, Auth::None, former, &served())
        };
        let number = |tenants: &Tenants, name: &str| tenants.known[tenants.by_name[name]].number;
        let first = named(&["a", "b"], None);
        let second = named(&["new", "b", "a"], Some(&first));
        for name in ["a", "b"] {
            assert_eq!(number(&second, name), number(&first, name));
        }
        let third = named(&["b"], Some(&second));
        let fourth = named(&["a", "b"], Some(&third));
        assert_eq!(number(&fourth, "b"), number(&first, "b"));
        let numbers = ["a", "b", "new"].map(|name| number(&second, name));
        assert!(!numbers.contains(&number(&fourth, "a")), "what is gone is forgotten, not given again");
        assert_eq!(fourth.hasher.hash_one(7), first.hasher.hash_one(7), "strangers stay in their buckets");
    }

    /// In how many buckets strangers at these addresses are.
    fn buckets(tenants: &Tenants, addresses: impl Iterator<Item = IpAddr>) -> usize {
        let bucket = |ip: IpAddr| {
            let from = From { client: Some(ip), ..From::default() };
            tenants.caller(&HeaderMap::new(), &RouteSettings::default(), from).unwrap().tenant.id
        };
        addresses.map(bucket).collect::<std::collections::HashSet<u32>>().len()
    }

    #[test]
    fn strangers_share_a_bounded_number_of_buckets() {
        let tenants = tenants();
        let addresses = (0..5000u32).map(|n| IpAddr::from(n.to_be_bytes()));
        assert_eq!(buckets(&tenants, addresses), BUCKETS as usize);
        let local = tenants.caller(&HeaderMap::new(), &RouteSettings::default(), From::default()).unwrap();
        assert_eq!(local.tenant.class, 2, "the Unix socket is this machine");
    }

    #[test]
    fn strangers_of_one_network_are_in_one_bucket() {
        let (tenants, network) = (tenants(), 0x2001_0db8_0001_0002_u128 << 64);
        let ip = |bits: u128| IpAddr::from(bits.to_be_bytes());
        assert_eq!(buckets(&tenants, (0..1000).map(|host| ip(network | host << 50 | host))), 1);
        assert!(buckets(&tenants, (0..1000).map(|other| ip(network + (other << 64)))) > 32);
    }
}
