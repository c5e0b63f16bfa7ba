//! What is to become of a request, decided from its head and one version of the configuration.
//!
//! The real path and `explain` both ask here, so that what is explained is what happens. They differ in what they
//! do when a quota is met: one takes from its bucket, the other notes that it applies.

use super::{Snapshot, unix_millis};
use crate::config::RouteSettings;
use crate::forward::host_of;
use crate::gate::Gate;
use crate::routes::{Found, has_dot_segment, plain};
use crate::tenants::{CLASS_NAMES, Caller, From};
use http::header::{ALLOW, HeaderValue};
use http::{Method, Request};
use ron_kernel::admission::bucket::Rate;
use ron_kernel::admission::deadline::Budget;
use ron_kernel::admission::decode::{self, Coding};
use ron_kernel::http::Body;
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use std::net::IpAddr;
use std::time::Instant;

/// A request, as far as the decision looks at it.
pub(super) struct Asked<'a> {
    pub(super) request: &'a Request<Body>,
    /// `None`: not known beforehand.
    pub(super) body_len: Option<u64>,
    /// `None`: over the Unix socket.
    pub(super) peer: Option<IpAddr>,
    /// Names in the client's certificate.
    pub(super) names: &'a [Box<str>],
    pub(super) begun: Instant,
    /// The queue, while writes are shed.
    pub(super) overloaded: Option<&'a Gate>,
}

/// What has been found out about a request, be it refused later or not.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) client: Option<IpAddr>,
    /// Index of the route.
    pub(super) route: Option<usize>,
    pub(super) caller: Option<Caller>,
    /// When it had leave to run.
    pub(super) admitted: Option<Instant>,
}

/// What that is called.
pub(crate) struct Names<'a> {
    pub(crate) route: Option<&'a str>,
    pub(crate) upstream: Option<&'a str>,
    pub(crate) tenant: Option<&'a str>,
    pub(crate) class: Option<&'a str>,
}

/// Where a request comes from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sender {
    pub(super) client: Option<IpAddr>,
    /// The peer is a trusted proxy.
    pub(super) trusted: bool,
}

/// A request that may go to the gate.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    pub(super) index: usize,
    pub(super) client: Option<IpAddr>,
    pub(super) route: &'a RouteSettings,
    /// The peer is a trusted proxy.
    pub(super) trusted: bool,
    /// Largest body.
    pub(super) cap: u64,
    /// What the body is to be decoded from.
    pub(super) codings: Vec<Coding>,
    pub(super) budget: Budget,
    pub(super) caller: Caller,
    /// What it costs without its response, before the route's factor.
    pub(super) request_cost: u64,
}

/// A rate that a request counts against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Quota {
    Ip(IpAddr),
    Global,
    /// Of credentials, by number.
    Capability(u64),
    /// By number.
    Tenant(u32),
    /// Of its network.
    IpBytes(IpAddr),
    TenantBytes(u32),
}

impl Quota {
    /// What clients are told it is called.
    pub(super) fn name(self) -> &'static str {
        match self {
            Quota::Ip(_) => "ip",
            Quota::Global => "global",
            Quota::Capability(_) => "capability",
            Quota::Tenant(_) => "tenant",
            Quota::IpBytes(_) => "ip_bytes",
            Quota::TenantBytes(_) => "tenant_bytes",
        }
    }

    pub(super) fn reason(self) -> Reason {
        match self {
            Quota::Ip(_) | Quota::IpBytes(_) => Reason::QuotaIp,
            Quota::Global => Reason::QuotaGlobal,
            Quota::Capability(_) => Reason::QuotaCapability,
            Quota::Tenant(_) | Quota::TenantBytes(_) => Reason::QuotaTenant,
        }
    }

    /// What it is in, as a parameter of the policy; none for requests.
    pub(super) fn unit(self) -> &'static str {
        match self {
            Quota::IpBytes(_) | Quota::TenantBytes(_) => ";qu=\"content-bytes\"",
            _ => "",
        }
    }
}

impl Snapshot {
    pub(crate) fn names(&self, seen: &Seen) -> Names<'_> {
        let route = seen.route.map(|index| &self.settings.routes[index]);
        let tenant = |caller: Caller| {
            caller.configured.map_or("other", |index| self.settings.tenants[index].id.as_str())
        };
        Names {
            route: route.map(|route| route.path.as_str()),
            upstream: route.map(|route| route.upstream.as_str()),
            tenant: seen.caller.map(tenant),
            class: seen.caller.map(|caller| CLASS_NAMES[usize::from(caller.tenant.class)]),
        }
    }

    /// What every request counts against, before anything else is looked at; `quota` is asked for each rate.
    pub(super) fn meet_quotas(
        &self,
        asked: &Asked<'_>,
        seen: &mut Seen,
        quota: &mut impl FnMut(Quota, Rate) -> Result<(), Rejection>,
    ) -> Result<Sender, Rejection> {
        let trusted = asked.peer.is_some_and(|ip| self.trusted.trusts(ip));
        let client = asked.peer.map(|ip| self.trusted.client(ip, asked.request.headers()));
        seen.client = client;
        // The client's own share first: what it is refused must not be taken from everybody's.
        if let (Some(rate), Some(ip)) = (self.per_ip, client) {
            quota(Quota::Ip(ip), rate)?;
        }
        if let Some((ip, rate)) = self.ip_bytes(client) {
            quota(Quota::IpBytes(ip), rate)?;
        }
        if let Some(rate) = self.global {
            quota(Quota::Global, rate)?;
        }
        Ok(Sender { client, trusted })
    }

    /// Decides on a request; `quota` is asked for each further rate that it meets.
    pub(super) fn plan(
        &self,
        asked: &Asked<'_>,
        Sender { client, trusted }: Sender,
        seen: &mut Seen,
        quota: &mut impl FnMut(Quota, Rate) -> Result<(), Rejection>,
    ) -> Result<Plan<'_>, Rejection> {
        let (settings, request) = (&self.settings, asked.request);
        let headers = request.headers();
        let index = self.route(request)?;
        seen.route = Some(index);
        let route = &settings.routes[index];
        let cap = route.max_body_bytes.unwrap_or(settings.limits.max_body_bytes).0;
        if asked.body_len.is_some_and(|length| length > cap) {
            return Err(Rejection::new(Reason::BodyCap, format!("the body may have at most {cap} bytes")));
        }
        let timeout = route.timeout.unwrap_or(settings.request_timeout).0;
        let budget = Budget::of(headers, timeout, asked.begun, unix_millis)
            .map_err(|bad| Rejection::new(Reason::Malformed, bad.to_string()))?;
        if budget.is_over(asked.begun) {
            return Err(Rejection::new(Reason::Deadline, "the deadline had passed when the request came"));
        }
        let codings = if route.decode { decode::codings(headers) } else { Some(Vec::new()) };
        let detail = "expected gzip, deflate, br or zstd, at most 2 of them";
        let codings = codings.ok_or_else(|| Rejection::new(Reason::UnsupportedEncoding, detail))?;
        let (method, path, now) = (request.method().as_str(), request.uri().path(), unix_millis() / 1000);
        let from = From { client, names: asked.names, trusted, method, path, now };
        let caller = self.tenants.caller(headers, route, from)?;
        seen.caller = Some(caller);
        if let Some(capability) = caller.capability
            && let Some(rate) = Rate::new(settings.quotas.per_capability_rps, settings.quotas.burst_factor)
        {
            quota(Quota::Capability(capability), rate)?;
        }
        if let Some((tenant, rate)) = self.tenant_bytes(caller) {
            quota(Quota::TenantBytes(tenant), rate)?;
        }
        if let Some(tenant) = caller.configured
            && let Some(rate) = Rate::new(settings.tenants[tenant].rps, settings.quotas.burst_factor)
        {
            quota(Quota::Tenant(caller.tenant.id), rate)?;
        }
        // Whoever fills the queue, others have their share of it.
        let presses = |gate: &Gate| gate.presses(caller.tenant, caller.quantum);
        if !request.method().is_safe() && asked.overloaded.is_some_and(presses) {
            let detail =
                "the gateway is over its capacity: of who has many requests waiting it answers reads only";
            return Err(Rejection::new(Reason::Degraded, detail).retry_after(2));
        }
        let request_cost = settings.fair_queue.request_cost_bytes.0 + asked.body_len.unwrap_or(cap / 4);
        Ok(Plan { index, client, route, trusted, cap, codings, budget, caller, request_cost })
    }

    fn route(&self, request: &Request<Body>) -> Result<usize, Rejection> {
        let path = request.uri().path();
        if request.method() == Method::CONNECT || !path.starts_with('/') {
            return Err(Rejection::new(Reason::MethodUnknown, "this gateway does not tunnel"));
        }
        if !self.routes.knows(request.method()) {
            return Err(Rejection::new(
                Reason::MethodUnknown,
                "the method is neither registered nor configured",
            ));
        }
        let Some(plain) = plain(path) else {
            return Err(Rejection::new(Reason::Malformed, "the path holds a malformed escape"));
        };
        if has_dot_segment(path) {
            return Err(Rejection::new(Reason::Malformed, "the path holds a dot segment"));
        }
        if let Some((view, _)) = self.view_paths.find(&plain).filter(|_| !self.routes.has_exact(&plain)) {
            let allowed = [Method::GET, Method::HEAD];
            if allowed.contains(request.method()) {
                return Ok(self.settings.routes.len() - self.views.len() + view);
            }
            return Err(not_allowed(&allowed));
        }
        let host = if self.routes.name_hosts() { host_of(request) } else { String::new() };
        match self.routes.find(&host, &plain, request.method()) {
            Found::Route(index) => Ok(index),
            Found::Method(allowed) => Err(not_allowed(&allowed)),
            Found::Host => Err(Rejection::new(Reason::Host, "no route is for this host")),
            Found::Nothing => Err(Rejection::new(Reason::NoRoute, "no route leads here")),
        }
    }
}

fn not_allowed(allowed: &[Method]) -> Rejection {
    let list: Vec<&str> = allowed.iter().map(Method::as_str).collect();
    let allow = HeaderValue::from_str(&list.join(", ")).expect("methods are valid header values");
    Rejection::new(Reason::Method, "the method is not allowed here").header(ALLOW, allow)
}
