//! The keys of `[gateway]`.

use crate::routes::Routes;
use crate::views::Views;
use ron_kernel::admission::client_ip::TrustedProxies;
use ron_kernel::admission::deadline::Budget;
use ron_kernel::config::{Problems, Secret};
use ron_kernel::http::ServerLimits;
use ron_kernel::http::client::Address;
use ron_kernel::tls::{ClientTlsSettings, TlsSettings};
use ron_kernel::units::{Size, Span};
use ron_kernel::{choice, settings};
use ron_transport::PeerAddress;
use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const HEALTH_INTERVAL_MIN: Duration = Duration::from_millis(100);

settings! {
    /// The gateway.
    pub struct GatewaySettings {
        /// Whether `ron up` starts the gateway.
        enabled: bool = true => Restart;
        /// Whether the gateway of `ron up` leads to the node's own services too: `/edge/*` to the edge, `/registry/*`,
        /// `/checkpoint` and `/tile/*` to the registry. A route of the file with the same path, for every host, goes
        /// before. `ron run` does what the file says.
        front: bool = true => Hot;
        /// Address of the plain listener. Port 0 picks a free one.
        listen: SocketAddr = SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)) => Restart;
        /// A TLS listener beside the plain one.
        tls: Option<TlsSettings> = None => Restart;
        /// A Unix socket beside the plain listener.
        uds: Option<UdsSettings> = None => Restart;
        /// Connections open at one time, over all listeners. The longest idle one gives way to a newcomer.
        max_conns: usize = 4096 => Hot;
        /// Connections of one client address; trusted proxies are exempt.
        max_conns_per_ip: usize = 256 => Hot;
        /// Requests being answered at one time.
        max_inflight: usize = 512 => Hot;
        /// Bytes of bodies on their way through, over all tenants. When there are more, whoever holds more than its part
        /// begins no further request.
        buffer_bytes: Size = Size::mib(256) => Hot;
        /// For a handshake or a request head as a whole, and between two pieces of a body.
        read_timeout: Span = Span::secs(5) => Hot;
        /// Between two pieces of a response that the client takes.
        write_timeout: Span = Span::secs(5) => Hot;
        /// For a connection without a request, and for silence in a stream.
        idle_timeout: Span = Span::secs(60) => Hot;
        /// A request's budget where its route states none.
        request_timeout: Span = Span::secs(30) => Hot;
        /// Proxies whose `Forwarded`, `X-Forwarded-*` and PROXY headers are believed, as addresses or prefixes.
        trusted_proxies: Vec<String> = Vec::new() => Hot;
        /// Trusted proxies begin each connection with a PROXY header, version 1 or 2.
        proxy_protocol: bool = false => Hot;
        /// Not ready, after a start, until a server of each upstream has answered and the keys of JWTs are there. It may
        /// delay a start in a degraded environment; turned off, it waits no longer.
        strict_boot: bool = false => Hot;
        /// How long a process whose place another has taken (`ron run gateway --takeover`) lets its connections go on,
        /// instead of `node.drain_deadline`.
        takeover_drain: Span = Span::secs(600) => Hot;
        /// Sizes.
        limits: LimitSettings = LimitSettings::default() => Hot;
        /// One line for each request answered.
        access_log: AccessLogSettings = AccessLogSettings::default() => Hot;
        /// Who waits for how long when there is no room.
        fair_queue: FairQueueSettings = FairQueueSettings::default() => Hot;
        /// Customers, each with a share of its own.
        tenants: Vec<TenantSettings> = Vec::new() => Hot;
        /// How callers say who they are.
        auth: AuthSettings = AuthSettings::default() => Hot;
        /// Rates.
        quotas: QuotaSettings = QuotaSettings::default() => Hot;
        /// Topics of the overlay for HTTP clients.
        bridge: BridgeSettings = BridgeSettings::default() => Hot;
        /// Where requests can go.
        upstreams: Vec<UpstreamSettings> = Vec::new() => Hot;
        /// Which request goes where: host first, then the longest path.
        routes: Vec<RouteSettings> = Vec::new() => Hot;
        /// One answer made of several: a view goes before a route with a `*`.
        views: Vec<ViewSettings> = Vec::new() => Hot;
    }
}

settings! {
    /// A Unix socket.
    pub struct UdsSettings {
        /// Path of the socket. Its mode is 0600, or 0666 if `allow_uids` says who may connect.
        path: String = String::new() => RequiredRestart;
        /// User ids that may connect. Empty: this process's own.
        allow_uids: Vec<u64> = Vec::new() => Hot;
    }
}

settings! {
    /// Sizes.
    pub struct LimitSettings {
        /// Largest request body where its route states none.
        max_body_bytes: Size = Size::mib(1) => Hot;
        /// Decoded over encoded size of a body that a route decodes.
        decode_ratio_max: u64 = 10 => Hot;
        /// Largest decoded body.
        decode_abs_cap_bytes: Size = Size::mib(8) => Hot;
        /// Fields of a request head.
        max_headers: usize = 100 => Hot;
        /// Bytes of a request head; the request line may take a quarter of them.
        max_header_bytes: Size = Size::kib(32) => Hot;
    }
}

settings! {
    /// The bridge: `POST /overlay/topics/{topic}` publishes, `GET` streams what is published. They need the scopes
    /// `overlay:publish` and `overlay:subscribe`; with `auth.mode = "none"` only this machine may come, or whoever
    /// can, with `node.danger_ok`.
    pub struct BridgeSettings {
        /// On or off. `ron up` turns it on where nothing is said here, and this machine alone may come.
        enabled: bool = false => Restart;
        /// Whose topics: `ed25519:…@host:port`, a node that has this one among its `overlay.peers`, spoken to under the
        /// rules of `overlay.tls`. Empty: those of the overlay in this process.
        peer: String = String::new() => Restart;
    }
}

settings! {
    /// Rates, per second. 0: off.
    pub struct QuotaSettings {
        /// For all clients together.
        global_rps: u64 = 0 => Hot;
        /// For each client address; IPv6 by /64.
        per_ip_rps: u64 = 0 => Hot;
        /// Bytes per second of request and response bodies for each client address; IPv6 by /64. What a response
        /// really came to counts against the next requests.
        per_ip_bps: u64 = 0 => Hot;
        /// For each API key, certificate, subject of JWTs or minted capability; what was narrowed from a capability counts
        /// as that one.
        per_capability_rps: u64 = 0 => Hot;
        /// Seconds' worth of requests or bytes that may come at once.
        burst_factor: f64 = 2.0 => Hot;
    }
}

choice! {
    /// Form of a line.
    pub enum AccessLogFormat {
        /// `name=value` pairs.
        Text = "text",
        /// An object.
        Json = "json",
    }
}

settings! {
    /// The access log: a line for each request answered, refusals included. Lines that cannot be written in time are dropped and counted.
    pub struct AccessLogSettings {
        /// Off by default: it names clients and fills a disk, so that keeping one is a decision; metrics count everything anyway.
        enabled: bool = false => Hot;
        /// Form of a line in the file.
        format: AccessLogFormat = AccessLogFormat::Text => Hot;
        /// File that lines are appended to; opened anew at each reload, so that it can be moved away first. Empty: the node's own log, at level info and in its format.
        file: String = String::new() => Hot;
        /// Part of the requests that is logged, from 0 to 1.
        sample: f64 = 1.0 => Hot;
        /// Answers with at least this status are logged whatever `sample` says.
        always_status: u64 = 500 => Hot;
        /// Requests that took at least this long are logged whatever `sample` says. 0: none.
        always_slow: Span = Span::secs(1) => Hot;
    }
}

choice! {
    /// What a full dispatch queue does.
    pub enum SchedFull {
        /// The newcomer is answered 503.
        RejectNew = "reject_new",
        /// The oldest is answered 503.
        DropOldest = "drop_oldest",
    }
}

settings! {
    /// The fair queue: deficit round robin over classes by weight, and over tenants within a class by quantum.
    pub struct FairQueueSettings {
        /// Off: a request that finds no room is refused at once.
        enabled: bool = true => Hot;
        /// What a tenant's turn adds, per unit of its quantum.
        quantum_bytes: Size = Size::kib(64) => Hot;
        /// The fixed part of a request's cost; its body and its response's come on top.
        request_cost_bytes: Size = Size::kib(4) => Hot;
        /// Requests that may wait, over all upstreams.
        work_capacity: usize = 512 => Restart;
        /// Requests on their way from the scheduler to a worker.
        sched_capacity: usize = 512 => Restart;
        /// What happens when there is no place on that way.
        sched_full: SchedFull = SchedFull::RejectNew => Restart;
        /// Tasks that hand out turns. 0: one per core, at most 8.
        workers: usize = 0 => Restart;
        /// Weights of the classes.
        weights: WeightSettings = WeightSettings::default() => Hot;
    }
}

settings! {
    /// Weights of the classes: shares of the work when there is more than can be done.
    pub struct WeightSettings {
        /// Callers who did not say who they are.
        anon: u64 = 1 => Hot;
        /// Callers who did.
        authed: u64 = 5 => Hot;
        /// Callers from this machine, over the Unix socket, and tenants of that class.
        internal: u64 = 10 => Hot;
    }
}

choice! {
    /// A class of callers.
    pub enum ClassName {
        Anon = "anon",
        Authed = "authed",
        Internal = "internal",
    }
}

settings! {
    /// A tenant.
    pub struct TenantSettings {
        /// Its name, in metrics and logs.
        id: String = String::new() => Required;
        /// Its class.
        class: ClassName = ClassName::Authed => Hot;
        /// Its share within the class, relative to the others'.
        quantum: u64 = 1 => Hot;
        /// Requests per second. 0: off.
        rps: u64 = 0 => Hot;
        /// Bytes per second of request and response bodies. What a response really came to counts against the next
        /// requests. 0: off.
        bps: u64 = 0 => Hot;
        /// API keys, as `sha256:` and the hash in hexadecimal (`printf KEY | sha256sum`).
        keys: Vec<Secret> = Vec::new() => Hot;
        /// Scopes that its keys and certificates give. JWTs and capabilities bring their own.
        scopes: Vec<String> = Vec::new() => Hot;
        /// Other ways to know the tenant.
        r#match: MatchSettings = MatchSettings::default() => Hot;
    }
}

settings! {
    /// Ways to know a tenant without a key.
    pub struct MatchSettings {
        /// A header as `name=value`; believed of trusted proxies only.
        header: String = String::new() => Hot;
        /// A name in the client's certificate: a host or a URI such as `spiffe://org/name`. Needs `tls.client_ca`.
        san: String = String::new() => Hot;
        /// A claim of a JWT as `name=value`; of a claim that is a list, one of its values. A capability names the tenant's `id`.
        claim: String = String::new() => Hot;
    }
}

choice! {
    /// How callers say who they are.
    pub enum AuthMode {
        /// They do not.
        None = "none",
        /// `X-Api-Key` or `Authorization: Bearer`, matched by hash against the tenants' keys.
        ApiKey = "api_key",
        /// A JWT as `Authorization: Bearer`, checked with the issuer's public keys.
        Jwt = "jwt",
        /// A capability as `Authorization: Bearer`, signed by one of `node.token_keys`.
        Biscuit = "biscuit",
    }
}

settings! {
    /// Identity. Whatever the mode, a client certificate that names a tenant is as good as a token, and over the Unix
    /// socket the peer's user id is who it is.
    pub struct AuthSettings {
        /// How callers say who they are: not at all; by an API key in `X-Api-Key` or `Authorization: Bearer`; by a JWT;
        /// by a capability (`ron token mint`).
        mode: AuthMode = AuthMode::None => Hot;
        /// Which JWTs are believed.
        jwt: Option<JwtSettings> = None => Hot;
        /// File of revoked tokens, one id per line: of capabilities as `ron token inspect` prints it, of JWTs `jti:` and
        /// their id. Read again when it changes. Empty: none.
        revocations: String = String::new() => Hot;
    }
}

choice! {
    /// A signature algorithm of JWTs.
    pub enum JwtAlgorithm {
        EdDsa = "EdDSA",
        Es256 = "ES256",
        Es384 = "ES384",
        Rs256 = "RS256",
        Rs384 = "RS384",
        Rs512 = "RS512",
        Ps256 = "PS256",
        Ps384 = "PS384",
        Ps512 = "PS512",
    }
}

settings! {
    /// JWTs: which are believed, and with whose keys they are checked.
    pub struct JwtSettings {
        /// File with the issuer's public keys, a JSON Web Key Set. Read again when it changes.
        jwks_file: String = String::new() => Hot;
        /// Where the issuer publishes them instead, `https://`, or `http://` on this machine. Fetched in the background; the
        /// last good set is kept.
        jwks_url: String = String::new() => Hot;
        /// What `iss` must be. Empty: it is not looked at.
        issuer: String = String::new() => Hot;
        /// What `aud` must hold. Empty: it is not looked at.
        audience: String = String::new() => Hot;
        /// Signature algorithms that are believed.
        algorithms: Vec<JwtAlgorithm> = vec![JwtAlgorithm::EdDsa, JwtAlgorithm::Es256, JwtAlgorithm::Rs256] => Hot;
        /// Time between two fetches. A token with an unknown key leads to one sooner: five may come at once, then one
        /// every 5 seconds.
        refresh: Span = Span::secs(600) => Hot;
        /// TLS towards `jwks_url`.
        tls: ClientTlsSettings = ClientTlsSettings::default() => Hot;
    }
}

choice! {
    /// Whether a route wants to know who is calling.
    pub enum RouteAuth {
        /// Nobody gets in without credentials.
        Required = "required",
        /// Credentials are checked if they are sent.
        Optional = "optional",
        /// Credentials are not looked at.
        None = "none",
    }
}

settings! {
    /// An upstream.
    pub struct UpstreamSettings {
        /// What routes call it.
        name: String = String::new() => Required;
        /// Its servers, as `http://host:port`, `https://host:port`, `h2c://host:port` (HTTP/2 without TLS) or
        /// `unix:path`. Under TLS the server chooses between HTTP/2 and HTTP/1.1.
        servers: Vec<String> = Vec::new() => Required;
        /// Which server takes a request.
        balance: Balance = Balance::P2c => Hot;
        /// Checks of each server. Left out: a server is judged by the requests it gets only.
        health: Option<HealthSettings> = None => Hot;
        /// TLS towards `https://` servers.
        tls: ClientTlsSettings = ClientTlsSettings::default() => Hot;
        /// Requests it may be working on at one time, over all its servers; more wait in the fair queue.
        max_inflight: usize = 256 => Hot;
        /// When to try again.
        retry: RetrySettings = RetrySettings::default() => Hot;
        /// When to leave it alone.
        breaker: BreakerSettings = BreakerSettings::default() => Hot;
        /// For opening a connection to one server.
        connect_timeout: Span = Span::secs(1) => Hot;
    }
}

choice! {
    /// Which server takes a request.
    pub enum Balance {
        /// The better of two picked at random, by load and latency.
        P2c = "p2c",
        /// One after the other.
        RoundRobin = "round_robin",
    }
}

settings! {
    /// Active health checks: two failures in a row take a server out, two successes bring it back.
    pub struct HealthSettings {
        /// Path that a healthy server answers with 2xx or 3xx.
        path: String = String::new() => Required;
        /// Time between two checks; an answer must come within it, and within 5 seconds.
        interval: Span = Span::secs(2) => Hot;
    }
}

settings! {
    /// Retries: of idempotent requests whose body has not begun to stream, if the backoff fits the deadline and the budget is not spent.
    pub struct RetrySettings {
        /// Tries in all; 1 is no retry.
        tries: u64 = 3 => Hot;
        /// First backoff; each further one is twice as long, plus up to this much at random.
        base: Span = Span::millis(50) => Hot;
        /// Longest backoff.
        cap: Span = Span::secs(2) => Hot;
        /// Retries over requests, so that a dying upstream is not hammered.
        budget: f64 = 0.1 => Hot;
    }
}

settings! {
    /// The circuit breaker: failures are 5xx answers, broken calls and timeouts.
    pub struct BreakerSettings {
        /// Failures in a row that open it, or that leave one of several servers out for a while. 0: nothing opens it, for
        /// an upstream that answers 5xx on behalf of others.
        failures: u64 = 5 => Hot;
        /// Failures over answers within the window that open it.
        error_rate: f64 = 0.5 => Hot;
        /// The window of the rate.
        window: Span = Span::secs(10) => Hot;
        /// How long it stays open before a probe in the background sees whether anybody is there; then one request
        /// at a time is let through.
        open: Span = Span::secs(5) => Hot;
    }
}

choice! {
    /// What an upstream is told of a request's deadline.
    pub enum TellDeadline {
        /// What remains of the request's budget.
        Budget = "budget",
        /// What remains of a deadline that the client itself stated, and nothing if it stated none.
        Client = "client",
    }
}

settings! {
    /// A route.
    pub struct RouteSettings {
        /// `/a/b` is exactly that; `/a/*` is `/a` and everything below it.
        path: String = String::new() => Required;
        /// Host names, `*.example.org` for one level. Empty: every host.
        hosts: Vec<String> = Vec::new() => Hot;
        /// Methods. Empty: every method.
        methods: Vec<String> = Vec::new() => Hot;
        /// Name of the upstream.
        upstream: String = String::new() => Required;
        /// Budget of a request. Left out: `request_timeout`.
        timeout: Option<Span> = None => Hot;
        /// What the upstream is told in `Request-Timeout`: what remains of the `budget`, or of the deadline that the
        /// `client` itself stated. The second is for an upstream that holds a whole answer to what it is told, however
        /// long that answer is.
        tell_deadline: TellDeadline = TellDeadline::Budget => Hot;
        /// Taken off the front of the path before it is passed on.
        strip_prefix: String = String::new() => Hot;
        /// Largest request body. Left out: `limits.max_body_bytes`.
        max_body_bytes: Option<Size> = None => Hot;
        /// Whether callers must say who they are.
        auth: RouteAuth = RouteAuth::Optional => Hot;
        /// Factor for what its requests cost in the fair queue.
        cost: u64 = 1 => Hot;
        /// Class of all its requests, over what the caller's would be. Empty: the caller's.
        class: String = String::new() => Hot;
        /// Scopes that the caller's credentials must have, all of them.
        scopes: Vec<String> = Vec::new() => Hot;
        /// Decode compressed request bodies, under the limits, before they are passed on.
        decode: bool = false => Hot;
    }
}

settings! {
    /// A view: one request of a client, several calls behind it at the same time, one JSON object as the answer.
    pub struct ViewSettings {
        /// Path with `{name}` for segments that are values. For GET and HEAD.
        path: String = String::new() => Required;
        /// Budget of all of it.
        timeout: Span = Span::secs(2) => Hot;
        /// Largest sum of the parts.
        max_bytes: Size = Size::mib(1) => Hot;
        /// Calls that one answer may take, retries included.
        max_calls: usize = 8 => Hot;
        /// Whether callers must say who they are.
        auth: RouteAuth = RouteAuth::Optional => Hot;
        /// Scopes that the caller's credentials must have, all of them.
        scopes: Vec<String> = Vec::new() => Hot;
        /// Class of all its requests, over what the caller's would be. Empty: the caller's.
        class: String = String::new() => Hot;
        /// Factor for what its calls cost in the fair queue.
        cost: u64 = 1 => Hot;
        /// Whether an answer has a strong tag, for which all of it must be there before it is sent. Off: it is sent as soon
        /// as all required parts are there, and goes on with each other part as it comes.
        etag: bool = true => Hot;
        /// What it is made of.
        parts: Vec<PartSettings> = Vec::new() => Required;
    }
}

settings! {
    /// A part of a view.
    pub struct PartSettings {
        /// Member of the answer that it becomes; not `errors`, which says what is missing.
        name: String = String::new() => Required;
        /// Name of the upstream that is asked.
        upstream: String = String::new() => Required;
        /// Path and query that it is asked for; `{name}` is replaced by the value in the view's path.
        path: String = String::new() => Required;
        /// Without it there is no answer. Else it is `null` if it cannot be had.
        required: bool = false => Hot;
    }
}

impl ViewSettings {
    /// The view as a route: what is decided before anybody is called is decided in the same way.
    pub(crate) fn as_route(&self) -> RouteSettings {
        let upstreams: Vec<&str> = self.parts.iter().map(|part| part.upstream.as_str()).collect();
        RouteSettings {
            path: self.path.clone(),
            methods: vec!["GET".to_owned(), "HEAD".to_owned()],
            upstream: upstreams.join("+"),
            timeout: Some(self.timeout),
            auth: self.auth,
            scopes: self.scopes.clone(),
            class: self.class.clone(),
            cost: self.cost,
            ..RouteSettings::default()
        }
    }
}

impl BridgeSettings {
    /// The peer, if there is one.
    pub fn peer(&self) -> Result<Option<PeerAddress>, String> {
        if self.peer.is_empty() { Ok(None) } else { self.peer.parse().map(Some) }
    }
}

impl RouteSettings {
    /// The deadline that the upstream is told.
    pub(crate) fn told(&self, budget: &Budget) -> Option<Instant> {
        match self.tell_deadline {
            TellDeadline::Budget => Some(budget.until),
            TellDeadline::Client => budget.client,
        }
    }
}

impl UpstreamSettings {
    pub(crate) fn uses_tls(&self) -> bool {
        self.servers.iter().any(|server| server.starts_with("https:"))
    }
}

impl GatewaySettings {
    pub fn validate(&self, problems: &mut Problems) {
        TrustedProxies::check(&self.trusted_proxies, "gateway.trusted_proxies", problems);
        let positive = [
            ("max_conns", self.max_conns),
            ("max_conns_per_ip", self.max_conns_per_ip),
            ("max_inflight", self.max_inflight),
            ("limits.max_headers", self.limits.max_headers),
        ];
        for (key, _) in positive.into_iter().filter(|(_, value)| *value == 0) {
            problems.add(format!("gateway.{key}"), "must be at least 1");
        }
        if self.limits.max_header_bytes.0 < 1024 {
            problems.add("gateway.limits.max_header_bytes", "must be at least 1KiB");
        }
        if self.quotas.burst_factor <= 0.0 {
            problems.add("gateway.quotas.burst_factor", "must be more than 0");
        }
        if self.limits.decode_ratio_max == 0 {
            problems.add("gateway.limits.decode_ratio_max", "must be at least 1");
        }
        if let Some(uds) = &self.uds
            && !(1..=100).contains(&uds.path.len())
        {
            problems.add("gateway.uds.path", "must have 1 to 100 characters");
        }
        if self.proxy_protocol && self.trusted_proxies.is_empty() {
            problems.add(
                "gateway.proxy_protocol",
                "is on, but trusted_proxies is empty: nobody may send the header",
            );
        }
        let timeouts = [
            ("read_timeout", self.read_timeout),
            ("write_timeout", self.write_timeout),
            ("idle_timeout", self.idle_timeout),
            ("request_timeout", self.request_timeout),
        ];
        for (key, _) in timeouts.into_iter().filter(|(_, value)| value.0.is_zero()) {
            problems.add(format!("gateway.{key}"), "must be more than 0");
        }
        if !(0.0..=1.0).contains(&self.access_log.sample) {
            problems.add("gateway.access_log.sample", "must be between 0 and 1");
        }
        if let Err(error) = self.bridge.peer()
            && self.bridge.enabled
        {
            problems.add("gateway.bridge.peer", error);
        }
        self.auth.validate(problems);
        self.validate_claims(problems);
        self.validate_fairness(problems);
        self.validate_upstreams(problems);
        Routes::check(&self.routes, &self.upstreams, problems);
        let upstreams = self.upstreams.iter().map(|upstream| upstream.name.as_str()).collect();
        Views::check(&self.views, &self.routes, &upstreams, problems);
    }

    fn validate_fairness(&self, problems: &mut Problems) {
        let fair = &self.fair_queue;
        let positive = [
            ("fair_queue.quantum_bytes", fair.quantum_bytes.0),
            ("fair_queue.request_cost_bytes", fair.request_cost_bytes.0),
            ("fair_queue.work_capacity", fair.work_capacity as u64),
            ("fair_queue.sched_capacity", fair.sched_capacity as u64),
            ("fair_queue.weights.anon", fair.weights.anon),
            ("fair_queue.weights.authed", fair.weights.authed),
            ("fair_queue.weights.internal", fair.weights.internal),
        ];
        for (key, _) in positive.into_iter().filter(|(_, value)| *value == 0) {
            problems.add(format!("gateway.{key}"), "must be more than 0");
        }
        let (mut ids, mut keys) = (HashSet::from(["other"]), HashMap::new());
        for (index, tenant) in self.tenants.iter().enumerate() {
            let at = format!("gateway.tenants[{index}]");
            if !ids.insert(tenant.id.as_str()) {
                problems.add(format!("{at}.id"), format!("{:?} is taken", tenant.id));
            }
            if tenant.quantum == 0 {
                problems.add(format!("{at}.quantum"), "must be at least 1");
            }
            let header = &tenant.r#match.header;
            if !header.is_empty() && crate::tenants::parse_header(header).is_none() {
                problems.add(format!("{at}.match.header"), format!("{header:?} is not name=value"));
            }
            if !tenant.r#match.san.is_empty() && self.tls.as_ref().is_none_or(|tls| tls.client_ca.is_empty())
            {
                problems.add(
                    format!("{at}.match.san"),
                    "clients are asked for no certificate: set gateway.tls.client_ca",
                );
            }
            for (number, text) in tenant.keys.iter().enumerate() {
                let at = format!("{at}.keys[{number}]");
                match crate::tenants::parse_key(&text.0) {
                    None => problems.add(at, "expected sha256: and 64 hexadecimal digits"),
                    Some(hash) => {
                        if let Some(other) = keys.insert(hash, &tenant.id) {
                            problems.add(at, format!("is a key of tenant {other:?} too"));
                        }
                    }
                }
            }
        }
        let routes = self.routes.iter().cloned().map(|route| ("routes", route)).enumerate();
        let views = self.views.iter().map(|view| ("views", view.as_route())).enumerate();
        for (index, (list, route)) in routes.chain(views) {
            let at = format!("gateway.{list}[{index}]");
            if crate::tenants::class_of(&route.class).is_none() && !route.class.is_empty() {
                problems.add(format!("{at}.class"), "is not one of anon, authed, internal");
            }
            if route.cost == 0 {
                problems.add(format!("{at}.cost"), "must be at least 1");
            }
            self.validate_access(&at, route.auth, &route.scopes, problems);
        }
    }

    /// Who may use a route, and whether that is anybody.
    fn validate_access(&self, at: &str, auth: RouteAuth, scopes: &[String], problems: &mut Problems) {
        let nobody = self.auth.mode == AuthMode::None
            && self.uds.is_none()
            && self.tenants.iter().all(|tenant| tenant.r#match.san.is_empty());
        if auth == RouteAuth::Required && nobody {
            let message = "is required, but gateway.auth.mode is \"none\" and no tenant has a certificate: nobody could get in";
            problems.add(format!("{at}.auth"), message);
        }
        if auth == RouteAuth::None && !scopes.is_empty() {
            problems.add(
                format!("{at}.scopes"),
                "are wanted, but auth is \"none\": credentials are not looked at",
            );
        }
        if scopes.iter().any(String::is_empty) {
            problems.add(format!("{at}.scopes"), "must not be empty words");
        }
    }

    fn validate_claims(&self, problems: &mut Problems) {
        let mut known: HashMap<&str, &str> = HashMap::new();
        let tenants = self.tenants.iter().enumerate();
        for (index, tenant) in tenants.filter(|(_, tenant)| !tenant.r#match.claim.is_empty()) {
            let (at, claim) = (format!("gateway.tenants[{index}].match.claim"), &tenant.r#match.claim);
            if crate::tenants::parse_claim(claim).is_none() {
                problems.add(&at, format!("{claim:?} is not name=value"));
            }
            if self.auth.mode != AuthMode::Jwt {
                problems.add(&at, "is of a JWT, but gateway.auth.mode is not \"jwt\"");
            }
            if let Some(other) = known.insert(claim, &tenant.id) {
                problems.add(&at, format!("is the claim of tenant {other:?} too"));
            }
        }
    }

    fn validate_upstreams(&self, problems: &mut Problems) {
        for (index, upstream) in self.upstreams.iter().enumerate() {
            let at = format!("gateway.upstreams[{index}]");
            if self.upstreams[..index].iter().any(|other| other.name == upstream.name) {
                problems
                    .add(format!("{at}.name"), format!("{:?} is the name of two upstreams", upstream.name));
            }
            if upstream.retry.tries == 0 {
                problems.add(format!("{at}.retry.tries"), "must be at least 1: the first try counts");
            }
            if !(0.0..=1.0).contains(&upstream.retry.budget) {
                problems.add(format!("{at}.retry.budget"), "must be between 0 and 1");
            }
            if !(upstream.breaker.error_rate > 0.0 && upstream.breaker.error_rate <= 1.0) {
                problems.add(format!("{at}.breaker.error_rate"), "must be more than 0 and at most 1");
            }
            if upstream.max_inflight == 0 {
                problems.add(format!("{at}.max_inflight"), "must be at least 1");
            }
            if upstream.servers.is_empty() {
                problems.add(format!("{at}.servers"), "needs at least one server");
            }
            for (server, text) in upstream.servers.iter().enumerate() {
                if let Err(error) = text.parse::<Address>() {
                    problems.add(format!("{at}.servers[{server}]"), error);
                }
                if upstream.servers[..server].contains(text) {
                    problems.add(format!("{at}.servers[{server}]"), "is listed twice");
                }
            }
            if let Some(health) = &upstream.health {
                if !health.path.starts_with('/') || health.path.parse::<http::Uri>().is_err() {
                    problems.add(format!("{at}.health.path"), "is no path: it begins with /");
                }
                if health.interval.0 < HEALTH_INTERVAL_MIN {
                    problems.add(format!("{at}.health.interval"), "must be at least 100ms");
                }
            }
        }
    }

    /// Problems with the files that upstreams and credentials need.
    pub fn validate_files(&self, base: &Path, problems: &mut Problems) {
        self.auth.validate_files(base, problems);
        for (index, upstream) in self.upstreams.iter().enumerate().filter(|(_, upstream)| upstream.uses_tls())
        {
            upstream.tls.check(base, &format!("gateway.upstreams[{index}].tls"), problems);
        }
    }

    /// The files whose change should lead to a reload.
    pub fn files(&self, base: &Path) -> Vec<PathBuf> {
        let tls = self.tls.iter().flat_map(|tls| tls.files(base));
        let upstreams = self.upstreams.iter().filter(|upstream| upstream.uses_tls());
        let upstreams = upstreams.flat_map(|upstream| upstream.tls.files(base));
        let jwt = self.auth.jwt.iter();
        let named = jwt.clone().map(|jwt| &jwt.jwks_file).chain([&self.auth.revocations]);
        let named = named.filter(|name| !name.is_empty()).map(|name| base.join(name));
        tls.chain(upstreams).chain(jwt.flat_map(|jwt| jwt.tls.files(base))).chain(named).collect()
    }

    /// What the kernel's server is told.
    pub fn server_limits(&self) -> ServerLimits {
        ServerLimits {
            conns_max: self.max_conns,
            conns_per_ip_max: self.max_conns_per_ip,
            headers_max: self.limits.max_headers,
            header_bytes_max: self.limits.max_header_bytes.usize(),
            read_timeout: self.read_timeout.0,
            write_timeout: self.write_timeout.0,
            idle_timeout: self.idle_timeout.0,
            trusted_proxies: TrustedProxies::read(&self.trusted_proxies),
            proxy_protocol: self.proxy_protocol,
        }
    }
}
