//! Who is calling: class, tenant and share, decided locally and in constant time.

use crate::config::{AuthMode, ClassName, GatewaySettings, RouteAuth, RouteSettings, TenantSettings};
use crate::fair_queue::Tenant;
use crate::gate::Standing;
use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, WWW_AUTHENTICATE};
use ron_kernel::admission::client_ip::network_of;
use ron_kernel::metrics::{Counter, Family};
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::Arc;

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

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
}

/// What the connection says of its client.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct From<'a> {
    /// `None`: over the Unix socket.
    pub(crate) client: Option<IpAddr>,
    /// Names in its certificate.
    pub(crate) names: &'a [Box<str>],
    /// It is a trusted proxy.
    pub(crate) trusted: bool,
}

/// The tenants of one version of the configuration.
#[derive(Debug)]
pub(crate) struct Tenants {
    known: Vec<Known>,
    by_name: HashMap<String, usize>,
    next_number: u32,
    mode: AuthMode,
    by_key: HashMap<[u8; 32], usize>,
    by_header: Vec<(HeaderName, HeaderValue, usize)>,
    by_san: HashMap<String, usize>,
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
    standing: Arc<Standing>,
}

impl Tenants {
    /// Tenants that `former` knew keep their numbers and standing, and strangers their buckets.
    pub(crate) fn new(
        settings: &GatewaySettings,
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
            Known { name: tenant.id.clone(), number, class, quantum, standing }
        };
        let known: Vec<Known> = settings.tenants.iter().map(&mut known).collect();
        let strangers = || {
            let served = served.with(["other"]);
            (0..BUCKETS).map(|_| Arc::new(Standing::new(served.clone()))).collect()
        };
        let keys = |(index, keys): (usize, &Vec<String>)| {
            keys.iter().filter_map(|key| parse_key(key)).map(move |hash| (hash, index)).collect::<Vec<_>>()
        };
        let all = || settings.tenants.iter().enumerate();
        Tenants {
            mode: settings.auth.mode,
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
        let From { client, names, trusted } = from;
        let certified = || names.iter().find_map(|name| self.by_san.get(&**name)).copied();
        let configured = match self.credentials(headers, route, certified)? {
            Some(index) => Some(index),
            None if trusted => {
                let named = self.by_header.iter().find(|(name, value, _)| headers.get(name) == Some(value));
                named.map(|(_, _, index)| *index)
            }
            None => None,
        };
        let over = class_of(&route.class);
        Ok(match configured {
            Some(index) => {
                let Known { number: id, class, quantum, .. } = self.known[index];
                Caller { tenant: Tenant { class: over.unwrap_or(class), id }, quantum, configured }
            }
            None => {
                // Over the Unix socket there is no address: that is this machine.
                let class = over.unwrap_or(if client.is_none() { 2 } else { 0 });
                #[expect(clippy::cast_possible_truncation, reason = "any bits of the hash will do")]
                let bucket = self.hasher.hash_one(client.map(network_of)) as u32 % BUCKETS;
                Caller { tenant: Tenant { class, id: u32::MAX - bucket }, quantum: 1, configured: None }
            }
        })
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

    /// The tenant that the credentials belong to: a key, or else a certificate. `None` if there are none and none are
    /// needed.
    fn credentials(
        &self,
        headers: &HeaderMap,
        route: &RouteSettings,
        certified: impl Fn() -> Option<usize>,
    ) -> Result<Option<usize>, Rejection> {
        if self.mode == AuthMode::None || route.auth == RouteAuth::None {
            return Ok(certified());
        }
        let challenge =
            |rejection: Rejection| rejection.header(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        let bearer = headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        let Some(key) = headers.get(X_API_KEY).map(HeaderValue::as_bytes).or(bearer) else {
            let certified = certified();
            return if certified.is_none() && route.auth == RouteAuth::Required {
                Err(challenge(Rejection::new(
                    Reason::Unauth,
                    "send an API key as X-Api-Key or Authorization: Bearer",
                )))
            } else {
                Ok(certified)
            };
        };
        // Looked up by hash: nothing about a key can be learned from the time it takes.
        let hash: [u8; 32] = Sha256::digest(key).into();
        match self.by_key.get(&hash) {
            Some(index) => Ok(Some(*index)),
            None => Err(challenge(Rejection::new(Reason::TokenInvalid, "the API key is not known"))),
        }
    }
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

/// `name=value` as a header.
pub(crate) fn parse_header(text: &str) -> Option<(HeaderName, HeaderValue)> {
    let (name, value) = text.split_once('=')?;
    Some((HeaderName::from_bytes(name.as_bytes()).ok()?, HeaderValue::from_str(value).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{AuthSettings, MatchSettings};
    use ron_kernel::metrics::Metrics;

    fn key_of(key: &str) -> String {
        let hash: [u8; 32] = Sha256::digest(key).into();
        format!("sha256:{}", hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    }

    fn served() -> Arc<Family<Counter, 1>> {
        Metrics::default().family("fq_served_cost_total", "", ["tenant"])
    }

    fn tenants() -> Tenants {
        let acme = TenantSettings {
            id: "acme".into(),
            quantum: 3,
            keys: vec![key_of("k1")],
            ..TenantSettings::default()
        };
        let beta = TenantSettings {
            id: "beta".into(),
            class: ClassName::Internal,
            r#match: MatchSettings { header: "x-tenant=beta".into(), san: "spiffe://org/beta".into() },
            ..TenantSettings::default()
        };
        let auth = AuthSettings { mode: AuthMode::ApiKey };
        let settings = GatewaySettings { tenants: vec![acme, beta], auth, ..GatewaySettings::default() };
        Tenants::new(&settings, None, &served())
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
        let from = From { client: "192.0.2.1".parse().ok(), trusted, names: &[] };
        tenants().caller(&headers, &route, from).map_err(|rejection| rejection.reason)
    }

    #[test]
    fn keys_lead_to_tenants_and_wrong_ones_nowhere() {
        let acme = ask(RouteAuth::Required, Some(("x-api-key", "k1")), false).unwrap();
        assert_eq!((acme.tenant, acme.quantum), (Tenant { class: 1, id: 1 }, 3));
        assert_eq!(ask(RouteAuth::Optional, Some(("authorization", "Bearer k1")), false), Ok(acme));
        assert_eq!(ask(RouteAuth::Required, None, false), Err(Reason::Unauth));
        assert_eq!(ask(RouteAuth::Optional, Some(("x-api-key", "k2")), false), Err(Reason::TokenInvalid));
        assert_eq!(ask(RouteAuth::None, Some(("x-api-key", "k2")), false).unwrap().tenant.class, 0);
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
        let from = From { client: "192.0.2.1".parse().ok(), names: &names, trusted: false };
        let route = RouteSettings { auth: RouteAuth::Required, ..RouteSettings::default() };
        let caller = |headers: &HeaderMap, from: From<'_>| tenants().caller(headers, &route, from).unwrap();
        assert_eq!(caller(&HeaderMap::new(), from).configured, Some(1));
        let mut key = HeaderMap::new();
        key.insert(X_API_KEY, HeaderValue::from_static("k1"));
        assert_eq!(caller(&key, from).configured, Some(0));
        let stranger = From { names: &names[..1], ..from };
        let refused = tenants().caller(&HeaderMap::new(), &route, stranger).unwrap_err();
        assert_eq!(refused.reason, Reason::Unauth);
    }

    #[test]
    fn a_number_belongs_to_a_name_for_good() {
        let named = |names: &[&str], former: Option<&Tenants>| {
            let tenant = |id: &&str| TenantSettings { id: (*id).into(), ..TenantSettings::default() };
            let tenants = names.iter().map(tenant).collect();
            Tenants::new(&GatewaySettings { tenants, ..GatewaySettings::default() }, former, &served())
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
