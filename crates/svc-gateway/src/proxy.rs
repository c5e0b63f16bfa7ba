//! The life of a request: free checks, quota, route, a permit, the upstream under what remains of the deadline.

mod explain;
mod plan;
mod status;
mod topics;
mod view;
mod watch;

pub(crate) use plan::{Names, Quota, Seen};

use crate::access_log::AccessLog;
use crate::auth::{Auth, UNKNOWN_KEY};
use crate::bridge::Topics;
use crate::config::{GatewaySettings, RouteSettings, ViewSettings};
use crate::decode::Decoded;
use crate::fair_queue::{Full, Shape};
use crate::forward::{Forward, response_map, upgrade_of, write_response};
use crate::gate::{Gate, Pass, Refused, Ticket};
use crate::gateway::WORK;
use crate::ledger::{Account, Room};
use crate::meter::{Limit, Meter, Quotas};
use crate::routes::Routes;
use crate::tenants::{CLASS_NAMES, Caller, Tenants};
use crate::upstream::{Charges, Failure, Loaded, Progress, Shared, Upload, Upstream, is_excused, metered};
use crate::views::Views;
use arc_swap::ArcSwap;
use http::header::{CONTENT_ENCODING, HeaderMap, HeaderName, HeaderValue, UPGRADE};
use http::{Method, Request, Response};
use plan::{Asked, Plan};
use ron_kernel::admission::bucket::{Rate, Verdict};
use ron_kernel::admission::client_ip::{TrustedProxies, network_of};
use ron_kernel::admission::deadline::Budget;
use ron_kernel::admission::decode::{DecodeError, DecodeLimits};
use ron_kernel::http::client::{Answer, CallError, Payload};
use ron_kernel::http::{
    Body, BodyError, ConnInfo, Fields, Handler, Peer, Tunnel, TurnedAway, last_hop, max_forwards,
    requests_family,
};
use ron_kernel::inventory::{Live, Policy, Probe, Row};
use ron_kernel::kernel::Service;
use ron_kernel::metrics::{Counter, Family, Histogram};
use ron_kernel::problem::{CorrId, Rejection, X_CORR_ID};
use ron_kernel::reason::{Reason, Rejections};
use ron_kernel::sync::Permits;
use ron_kernel::tls::{TlsClient, TlsError};
use std::collections::HashMap;
use std::future::Future;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use view::View;
use watch::Watch;

/// Request bodies being decoded at one time.
const DECODERS_MAX: usize = 32;
/// How TLS is spoken to the upstreams that want it, by name.
pub(crate) type UpstreamTls = HashMap<String, TlsClient>;

/// Reads the files that upstreams need. Blocks on file I/O.
pub(crate) fn upstream_tls(settings: &GatewaySettings, base: &Path) -> Result<UpstreamTls, TlsError> {
    let named = settings.upstreams.iter().filter(|upstream| upstream.uses_tls());
    named.map(|upstream| Ok((upstream.name.clone(), upstream.tls.load(base)?))).collect()
}

/// What the files hold that the configuration names.
#[derive(Debug)]
pub(crate) struct Material {
    pub(crate) tls: UpstreamTls,
    pub(crate) auth: Auth,
}

/// Everything that follows from one version of the configuration.
pub(crate) struct Snapshot {
    settings: GatewaySettings,
    routes: Routes,
    /// By route; of a view, its first part's.
    upstreams: Vec<Arc<Upstream>>,
    /// Where a view is asked for, and what follows. In `settings` views are routes, behind the others.
    view_paths: Views,
    views: Vec<View>,
    named: Vec<(String, Arc<Upstream>)>,
    global: Option<Rate>,
    per_ip: Option<Rate>,
    trusted: TrustedProxies,
    tenants: Tenants,
    /// What each tenant holds in buffers, and the others.
    accounts: Vec<Arc<Account>>,
    /// Whose each lane is, or was.
    lanes: Vec<Weak<Permits>>,
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Snapshot")
    }
}

/// The handler behind the gateway's listeners.
pub(crate) struct Proxy {
    /// Itself, for what goes on after a call.
    me: Weak<Proxy>,
    snapshot: Arc<ArcSwap<Snapshot>>,
    base: PathBuf,
    access_log: Arc<AccessLog>,
    /// What answers behind the bridge, if there is one.
    topics: Option<Topics>,
    gate: Arc<Gate>,
    /// Writes are shed.
    degraded: Arc<AtomicBool>,
    quotas: Arc<Quotas>,
    work: Arc<Row>,
    busy: Arc<Family<Counter, 3>>,
    shared: Shared,
    rejections: Rejections,
    requests: Arc<Family<Counter, 4>>,
    latency: Arc<Family<Histogram, 3>>,
    /// Decoders hold windows of many MiB each, so only so many run at a time.
    decoders: Arc<Permits>,
    rpc_timeouts: Counter,
    retries: Counter,
    #[cfg(feature = "otlp")]
    tracer: std::sync::OnceLock<ron_kernel::trace::Tracer>,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Proxy")
    }
}

impl Proxy {
    pub(crate) fn new(
        service: &Service,
        settings: &GatewaySettings,
        base: PathBuf,
        material: Material,
        access_log: Arc<AccessLog>,
        topics: Option<Topics>,
    ) -> Proxy {
        let gate = Gate::new(service.inventory(), shape_of(settings), settings.max_inflight);
        expose(service, &gate);
        let degraded = Arc::new(AtomicBool::new(false));
        let seen = degraded.clone();
        service.metrics().computed("gateway_degraded", "1 while writes are shed.", "gauge", move |rows| {
            rows.row(&[], u8::from(seen.load(Ordering::Relaxed)));
        });
        let probe: Arc<dyn Probe> = gate.clone();
        let capacity = settings.fair_queue.work_capacity;
        let live = Live::WhileUsed(Arc::downgrade(&probe));
        let work = service.inventory().register(&WORK, capacity, Policy::RejectNew, live);
        let shared = Shared {
            service: service.clone(),
            connect_timeouts: service.io_timeout("connect"),
            latency: service.metrics().family(
                "downstream_latency_seconds",
                "Time from a call to the head of its answer.",
                ["upstream"],
            ),
            served: service.metrics().family(
                "fq_served_cost_total",
                "Cost of what was served, by tenant.",
                ["tenant"],
            ),
            parts: service.metrics().family(
                "view_parts_total",
                "Parts of views, by whether they could be had.",
                ["view", "part", "result"],
            ),
            ledger: Arc::default(),
        };
        shared.ledger.set_limit(settings.buffer_bytes.0);
        let snapshot = Snapshot::new(settings, &base, material, None, &shared);
        gate.reshape(shape_of(settings), settings.max_inflight, snapshot.lanes());
        let snapshot = Arc::new(ArcSwap::from_pointee(snapshot));
        expose_snapshot(service, &snapshot);
        let busy = service.metrics().family(
            "busy_rejections_total",
            "Requests refused or displaced by a full queue.",
            ["service", "endpoint", "queue"],
        );
        Proxy {
            me: Weak::new(),
            snapshot,
            base,
            access_log,
            topics,
            gate,
            degraded,
            quotas: Quotas::new(service),
            work,
            busy,
            shared,
            rejections: Rejections::new(service),
            requests: requests_family(service),
            latency: service.metrics().family(
                "request_latency_seconds",
                "Time from a request's head to its response's head.",
                ["service", "route", "method"],
            ),
            decoders: Permits::new(DECODERS_MAX),
            rpc_timeouts: service.io_timeout("rpc"),
            retries: service.counter("backoff_retries_total", "Calls tried again.", "op", "rpc"),
            #[cfg(feature = "otlp")]
            tracer: std::sync::OnceLock::new(),
        }
    }

    /// The proxy where it is used, which knows where that is.
    pub(crate) fn shared(self) -> Arc<Proxy> {
        Arc::new_cyclic(|me| Proxy { me: me.clone(), ..self })
    }

    pub(crate) fn is_degraded(&self) -> bool {
        self.degraded.load(Ordering::Relaxed)
    }

    pub(crate) fn set_degraded(&self, on: bool) {
        self.degraded.store(on, Ordering::Relaxed);
    }

    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    #[cfg(feature = "otlp")]
    pub(crate) fn trace(&self, tracer: ron_kernel::trace::Tracer) {
        let _ = self.tracer.set(tracer);
    }

    /// Swaps in a new configuration; requests under way keep the one they began with.
    pub(crate) fn apply(&self, settings: &GatewaySettings, material: Material) {
        let former = self.snapshot.load();
        self.shared.ledger.set_limit(settings.buffer_bytes.0);
        let snapshot = Snapshot::new(settings, &self.base, material, Some(&former), &self.shared);
        self.gate.reshape(shape_of(settings), settings.max_inflight, snapshot.lanes());
        self.snapshot.store(Arc::new(snapshot));
    }

    /// What follows from the configuration in force.
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.load_full()
    }

    /// The upstreams in force, by name.
    pub(crate) fn upstreams(&self) -> Vec<(String, Arc<Upstream>)> {
        self.snapshot.load().named.clone()
    }

    /// Forgets what need not be remembered of rates.
    pub(crate) fn trim(&self, now: Instant) {
        self.quotas.trim(&self.snapshot.load().settings.quotas, now);
    }

    fn asked<'a>(&'a self, request: &'a Request<Body>, conn: &'a ConnInfo, begun: Instant) -> Asked<'a> {
        let (body_len, overloaded) = (request.body().exact_len(), self.overloaded());
        Asked { request, body_len, peer: conn.peer.ip(), names: &conn.names[..], begun, overloaded }
    }

    /// The queue, while writes are shed.
    fn overloaded(&self) -> Option<&Gate> {
        self.is_degraded().then_some(&*self.gate)
    }

    async fn answer(
        &self,
        request: Request<Body>,
        conn: &ConnInfo,
        corr: &CorrId,
        begun: Instant,
        snapshot: &Arc<Snapshot>,
        seen: &mut Seen,
    ) -> Result<Response<Body>, Rejection> {
        let mut take = |quota, rate| self.take(quota, rate, begun);
        let sender = snapshot.meet_quotas(&self.asked(&request, conn, begun), seen, &mut take)?;
        if let Some(answer) = for_ourselves(&request, corr) {
            return answer;
        }
        let mut planned = snapshot.plan(&self.asked(&request, conn, begun), sender, seen, &mut take);
        // The issuer may have signed with a key that is newer than the last fetch.
        let mut fetches = 2;
        while fetches > 0 && planned.as_ref().is_err_and(|refused| refused.detail == UNKNOWN_KEY) {
            let may_be_old = Box::pin(snapshot.auth().fetch_is_over()).await;
            fetches = if may_be_old { fetches - 1 } else { 0 };
            planned = snapshot.plan(&self.asked(&request, conn, begun), sender, seen, &mut take);
        }
        let plan = planned?;
        let Plan { index, route, caller, budget, request_cost, .. } = plan;
        let account = snapshot.account(&caller)?;
        if let Some(view) = snapshot.view(index) {
            seen.admitted = Some(Instant::now());
            return self.hydrate(request, conn, corr, snapshot, &plan, view).await;
        }
        let upstream = &snapshot.upstreams[index];
        let ticket = Ticket {
            lane: upstream.lane,
            tenant: caller.tenant,
            quantum: caller.quantum,
            cost: route.cost.saturating_mul(request_cost),
            deadline: budget.until,
        };
        let mut pass = self.enter(ticket, upstream, snapshot, &caller, route).await?;
        seen.admitted = Some(Instant::now());
        let upgrade = upgrade_of(&request);
        let (request, upload) = self.measured(request, snapshot, &plan, seen.client, &mut pass);
        let mut request = prepare_body(request, &plan, &snapshot.settings, &self.decoders)?;
        if request.body().exact_len() != Some(0) {
            request = request.map(|body| account.booked(body));
        }
        let trusted = plan.trusted;
        let passing = Passing { trusted, budget, pass, request_cost, upgrade, upload, account };
        if upstream.is_bridge() {
            return Box::pin(self.bridge(request, conn, corr, route, passing)).await;
        }
        // Boxed: a connection at rest, and a request that is refused, need none of its room.
        Box::pin(self.forward(request, conn, corr, snapshot, index, passing)).await
    }

    /// Lets a request in when it may call the upstream.
    async fn enter(
        &self,
        ticket: Ticket,
        upstream: &Upstream,
        snapshot: &Snapshot,
        caller: &Caller,
        route: &RouteSettings,
    ) -> Result<Pass, Rejection> {
        let standing = snapshot.tenants.standing(caller);
        let entered = if snapshot.settings.fair_queue.enabled {
            self.gate.enter(ticket, &upstream.permits, standing).await
        } else {
            self.gate.try_enter(ticket, &upstream.permits, standing).ok_or(Refused::Lost)
        };
        entered.map_err(|refused| self.not_admitted(refused, route))
    }

    /// Has the request's bytes counted: what was taken for its body is replaced in the end by what came of it.
    fn measured(
        &self,
        mut request: Request<Body>,
        snapshot: &Snapshot,
        plan: &Plan<'_>,
        client: Option<IpAddr>,
        pass: &mut Pass,
    ) -> (Request<Body>, Option<Arc<Progress>>) {
        let (tenant, ip) = (snapshot.tenant_bytes(plan.caller), snapshot.ip_bytes(client));
        let fixed = snapshot.settings.fair_queue.request_cost_bytes.0;
        let taken_for = plan.request_cost - fixed;
        let upload = (taken_for > 0).then(Arc::<Progress>::default);
        if let Some(progress) = upload.clone() {
            request = request.map(|body| Body::stream(Upload { body, progress }));
        }
        if upload.is_some() || tenant.is_some() || ip.is_some() {
            let body = upload.clone().map(|upload| (taken_for, upload));
            let (quotas, factor) = (self.quotas.clone(), plan.route.cost);
            pass.measure(Meter { quotas, tenant, ip, factor, fixed, body });
        }
        (request, upload)
    }

    /// Takes a request's part from a quota.
    fn take(&self, quota: Quota, rate: Rate, now: Instant) -> Result<(), Rejection> {
        match self.quotas.take(quota, rate, now) {
            Verdict::Empty { wait } => Err(over_quota(quota, rate, wait)),
            Verdict::Taken { .. } => Ok(()),
        }
    }

    /// What a caller is told that the gate did not let in, counted where the contract wants it counted.
    fn not_admitted(&self, refused: Refused, route: &RouteSettings) -> Rejection {
        match refused {
            Refused::Busy(Full { share, wait }) => {
                self.work.dropped.inc();
                self.busy.with(["gateway", &route.path, ""]).inc();
                let policy = format!("\"queue\";q={share}");
                let state = format!("\"queue\";r=0;t={}", seconds(wait));
                let rejection = Rejection::new(Reason::Busy, "your share of the queue is full")
                    .retry_after(seconds(wait));
                with_rate_limit(rejection, policy, state)
            }
            Refused::Hopeless(wait) => {
                let detail = "the answer could not be ready before its deadline";
                Rejection::new(Reason::Shed, detail).retry_after(seconds(wait))
            }
            Refused::Expired => {
                Rejection::new(Reason::Deadline, "the deadline passed while the request waited its turn")
            }
            Refused::Lost => Rejection::new(Reason::Shed, "there is no room for this request").retry_after(1),
        }
    }

    async fn forward(
        &self,
        request: Request<Body>,
        conn: &ConnInfo,
        corr: &CorrId,
        snapshot: &Snapshot,
        index: usize,
        passing: Passing,
    ) -> Result<Response<Body>, Rejection> {
        let route = &snapshot.settings.routes[index];
        let (parts, body) = request.into_parts();
        let body_len = body.exact_len();
        let mut body = Some(body);
        let head = Forward {
            request: &parts,
            conn,
            trusted: passing.trusted,
            corr,
            told: route.told(&passing.budget),
            strip_prefix: &route.strip_prefix,
            body_len,
            upgrade: passing.upgrade.clone(),
            upload: passing.upload.clone(),
            retries: None,
        };
        let silence = snapshot.settings.idle_timeout.0;
        let (answer, loaded) = self
            .call(&snapshot.upstreams[index], &head, &mut body, silence, passing.budget, &route.upstream)
            .await?;
        let Answer { status, version, fields, payload } = answer;
        let mut headers = HeaderMap::new();
        let (cost, factor) = (passing.request_cost, route.cost);
        let body = match payload {
            Payload::Whole(bytes) => {
                passing.pass.settle(factor.saturating_mul(cost + bytes.len() as u64));
                Body::full(bytes)
            }
            Payload::Stream(body) => {
                let (pass, account) = (passing.pass, passing.account);
                let timeouts = self.rpc_timeouts.clone();
                let charges = Charges { pass, cost, factor, account, timeouts, _loaded: loaded };
                metered(body, &fields, &passing.budget, charges)
            }
            // From here on it is a connection, not a request: `max_conns` bounds it.
            Payload::Upgraded(io) => {
                let protocol = fields.get(&UPGRADE).and_then(|value| HeaderValue::from_bytes(value).ok());
                headers.extend(protocol.map(|protocol| (UPGRADE, protocol)));
                Body::tunnel(Tunnel::new(io, silence))
            }
        };
        let body = match fields {
            // For a client of HTTP/1.1 they are not taken apart.
            Fields::Lines(lines) if conn.interim.is_some() => {
                body.behind(write_response(&lines, status, version, corr))
            }
            fields => {
                headers.extend(response_map(fields, status, version, corr));
                body
            }
        };
        let mut response = Response::new(body);
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        Ok(response)
    }
}

impl Proxy {
    /// Calls the upstream, more than once if that is safe, worth it and paid for.
    async fn call(
        &self,
        upstream: &Upstream,
        head: &Forward<'_>,
        body: &mut Option<Body>,
        silence: Duration,
        budget: Budget,
        name: &str,
    ) -> Result<(Answer, Loaded), Rejection> {
        let request = head.request;
        let repeatable = request.method.is_idempotent() || request.headers.contains_key("idempotency-key");
        upstream.earn_retry();
        let mut tried = Vec::new();
        for attempt in 1.. {
            let mut watched = upstream.watch().map_err(|wait| {
                Rejection::new(Reason::BreakerOpen, "the upstream keeps failing").retry_after(seconds(wait))
            })?;
            if budget.is_over(Instant::now()) {
                return Err(Rejection::new(
                    Reason::Deadline,
                    "the deadline passed before the upstream was asked",
                ));
            }
            let called = upstream.call(head, body, silence, &mut tried);
            let Some(outcome) = before(budget.until, head.conn, called).await else {
                self.rpc_timeouts.inc();
                if head.upload.as_ref().is_some_and(|upload| upload.waits.load(Ordering::Relaxed)) {
                    return Err(Rejection::new(
                        Reason::Deadline,
                        "the request's body did not arrive in time",
                    ));
                }
                // A deadline of the client's own says nothing about the upstream: else anybody could open its breaker.
                if budget.client.is_none_or(|own| own > budget.until) {
                    watched.good = Some(false);
                    upstream.note_silence(tried.last());
                }
                return Err(Rejection::new(Reason::Deadline, "the upstream did not answer in time"));
            };
            let (failed, again) = match &outcome {
                Ok((answer, _)) => {
                    (answer.status.is_server_error(), matches!(answer.status.as_u16(), 502..=504))
                }
                // What the client did wrong is not held against the upstream, nor is a protocol that it does not know.
                Err(Failure::Call(error)) if is_excused(error, head) => {
                    return outcome.map_err(|failure| refusal(failure, name));
                }
                Err(Failure::NoServer) => (true, false),
                Err(_) => (true, true),
            };
            watched.good = Some(!failed);
            drop(watched);
            let may_repeat = again && repeatable && (body.is_some() || head.body_len == Some(0));
            let delay = (may_repeat && attempt < upstream.retry.tries)
                .then(|| backoff(upstream.retry.base.0, upstream.retry.cap.0, attempt))
                .filter(|delay| budget.remaining(Instant::now()) > *delay)
                .filter(|_| head.take_retry() && upstream.spend_retry());
            let Some(delay) = delay else {
                return outcome.map_err(|failure| refusal(failure, name));
            };
            drop(outcome);
            self.retries.inc();
            tokio::time::sleep(delay).await;
        }
        unreachable!("the loop ends by returning")
    }
}

/// A body that counts what is read of it.
fn count_bytes(body: Body, bytes: Arc<AtomicU64>) -> Body {
    body.map_data(move |piece| {
        bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
        Ok(piece)
    })
}

/// What a future comes to, unless the deadline passes first.
async fn before<T>(deadline: Instant, conn: &ConnInfo, future: impl Future<Output = T>) -> Option<T> {
    let Some(timer) = &conn.timer else {
        return tokio::time::timeout_at(deadline.into(), future).await.ok();
    };
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
        Poll::Pending => timer.poll_until(deadline, cx).map(|()| None),
    })
    .await
}

/// The n-th backoff: doubled each time, capped, and jittered by up to the first.
fn backoff(base: Duration, cap: Duration, attempt: u64) -> Duration {
    let doubled =
        base.saturating_mul(1u32.checked_shl(u32::try_from(attempt - 1).unwrap_or(31)).unwrap_or(u32::MAX));
    doubled.min(cap) + base.mul_f64(ron_kernel::random::unit())
}

/// What goes along with a request once it is admitted.
struct Passing {
    trusted: bool,
    budget: Budget,
    pass: Pass,
    request_cost: u64,
    /// The protocol that the client asks to change to.
    upgrade: Option<HeaderValue>,
    /// How its body is getting on, if it has one.
    upload: Option<Arc<Progress>>,
    account: Arc<Account>,
}

impl Snapshot {
    fn new(
        settings: &GatewaySettings,
        base: &Path,
        Material { tls, auth }: Material,
        former: Option<&Snapshot>,
        shared: &Shared,
    ) -> Snapshot {
        let former_of = |name: &str| {
            former
                .and_then(|former| former.named.iter().find(|(known, _)| known == name))
                .map(|(_, upstream)| &**upstream)
        };
        // An upstream keeps its lane over reloads; a new one gets one that nobody has a permit of any more.
        let mut lanes = former.map_or_else(Vec::new, |former| former.lanes.clone());
        let mut named: Vec<(String, Arc<Upstream>)> = Vec::new();
        for upstream in &settings.upstreams {
            let known = former_of(&upstream.name);
            let free = || lanes.iter().position(|lane| lane.strong_count() == 0).unwrap_or(lanes.len());
            let lane = known.map_or_else(free, |known| known.lane);
            let made = Upstream::new(upstream, base, tls.get(&upstream.name), known, lane, shared);
            lanes.resize(lanes.len().max(lane + 1), Weak::new());
            lanes[lane] = Arc::downgrade(&made.permits);
            named.push((upstream.name.clone(), Arc::new(made)));
        }
        let by_name = |name: &str| {
            let found = named.iter().find(|(known, _)| *known == name);
            found.expect("validation refused routes and views without an upstream").1.clone()
        };
        let views: Vec<View> =
            settings.views.iter().map(|view| View::new(view, by_name, &shared.parts)).collect();
        let upstreams = settings.routes.iter().map(|route| by_name(&route.upstream));
        let upstreams = upstreams.chain(views.iter().map(|view| view.first().clone())).collect();
        let mut with_views = settings.clone();
        with_views.routes.extend(settings.views.iter().map(ViewSettings::as_route));
        let quotas = &settings.quotas;
        Snapshot {
            routes: Routes::new(&settings.routes),
            view_paths: Views::new(&settings.views),
            views,
            upstreams,
            global: Rate::new(quotas.global_rps, quotas.burst_factor),
            per_ip: Rate::new(quotas.per_ip_rps, quotas.burst_factor),
            named,
            tenants: Tenants::new(settings, auth, former.map(|former| &former.tenants), &shared.served),
            lanes,
            accounts: shared.ledger.accounts(
                settings.tenants.iter().map(|tenant| tenant.id.as_str()).chain(["other"]),
                former.map_or(&[], |former| &former.accounts),
            ),
            trusted: settings.server_limits().trusted_proxies,
            settings: with_views,
        }
    }

    /// What is decided about a view, by its number among the routes.
    fn view(&self, index: usize) -> Option<&View> {
        self.views.get(index.checked_sub(self.settings.routes.len() - self.views.len())?)
    }

    /// The caller's account, if it has room for another request.
    fn account(&self, caller: &Caller) -> Result<Arc<Account>, Rejection> {
        let account = &self.accounts[caller.configured.unwrap_or(self.settings.tenants.len())];
        match account.room(&self.accounts) {
            Room::Fine => Ok(account.clone()),
            Room::OverShare(share) => {
                let rejection = Rejection::new(Reason::Busy, "your share of the buffers is full");
                let (policy, state) = (format!("\"buffers\";q={share}"), "\"buffers\";r=0;t=1".to_owned());
                Err(with_rate_limit(rejection.retry_after(1), policy, state))
            }
            Room::Full => Err(Rejection::new(Reason::Shed, "the buffers are full").retry_after(1)),
        }
    }

    pub(crate) fn is_strict(&self) -> bool {
        self.settings.strict_boot
    }

    pub(crate) fn auth(&self) -> &Auth {
        self.tenants.auth()
    }

    fn ip_bytes(&self, client: Option<IpAddr>) -> Limit<IpAddr> {
        let quotas = &self.settings.quotas;
        Some((network_of(client?), Rate::new(quotas.per_ip_bps, quotas.burst_factor)?))
    }

    fn tenant_bytes(&self, caller: Caller) -> Limit<u32> {
        let bps = self.settings.tenants[caller.configured?].bps;
        Some((caller.tenant.id, Rate::new(bps, self.settings.quotas.burst_factor)?))
    }

    /// The upstreams' permits by lane. A lane whose upstream is gone keeps its place, and drains.
    fn lanes(&self) -> Vec<Arc<Permits>> {
        let mut lanes = vec![Permits::new(usize::MAX / 2); self.lanes.len()];
        for (_, upstream) in &self.named {
            lanes[upstream.lane] = upstream.permits.clone();
        }
        lanes
    }
}

impl Handler for Proxy {
    async fn call(&self, mut request: Request<Body>, conn: &ConnInfo) -> Response<Body> {
        #[cfg(feature = "otlp")]
        let span = self.begin_span(&mut request);
        let begun = Instant::now();
        let corr = CorrId::from_headers(request.headers());
        let method = label_of(request.method());
        let snapshot = self.snapshot.load_full();
        let allowed = match conn.peer {
            Peer::Unix { uid } => snapshot.settings.admits_uid(uid),
            Peer::Tcp(_) => true,
        };
        let mut watch = Watch::begin(&self.access_log, &snapshot, &mut request, conn, &corr, begun);
        let answered = if allowed {
            self.answer(request, conn, &corr, begun, &snapshot, &mut watch.seen).await
        } else {
            Err(Rejection::new(Reason::Forbidden, "this user may not use the socket"))
        };
        let (response, reason) = match answered {
            Ok(response) => (response, ""),
            Err(rejection) => {
                let reason = rejection.reason;
                self.rejections.count(reason);
                (rejection.into_response(&corr), reason.code())
            }
        };
        let route = watch.seen.route.map_or("none", |index| &snapshot.settings.routes[index].path);
        let status = response.status();
        self.requests.with(["gateway", route, method, status.as_str()]).inc();
        let now = Instant::now();
        let elapsed = now.duration_since(begun);
        self.latency.with(["gateway", route, method]).observe(elapsed);
        tracing::debug!(
            corr_id = corr.as_str(),
            route,
            method,
            status = status.as_u16(),
            reason,
            ?elapsed,
            "request"
        );
        #[cfg(feature = "otlp")]
        self.end_span(span, route, method, status);
        watch.end(response, reason, now)
    }

    fn refused(&self, refused: &TurnedAway<'_>) {
        self.note_refused(refused);
    }
}

#[cfg(feature = "otlp")]
impl Proxy {
    /// Begins a span and tells the upstream that it is the parent.
    fn begin_span(&self, request: &mut Request<Body>) -> Option<ron_kernel::trace::Span> {
        let span = self.tracer.get().and_then(|tracer| tracer.begin("request", request.headers()));
        if let Some(span) = &span {
            request.headers_mut().insert(ron_kernel::trace::TRACEPARENT, span.traceparent());
        }
        span
    }

    fn end_span(
        &self,
        span: Option<ron_kernel::trace::Span>,
        route: &str,
        method: &str,
        status: http::StatusCode,
    ) {
        if let (Some(mut span), Some(tracer)) = (span, self.tracer.get()) {
            span.attribute("http.route", route);
            span.attribute("http.request.method", method);
            span.attribute("http.response.status_code", status.as_str());
            tracer.end(span, status.is_server_error());
        }
    }
}

impl GatewaySettings {
    fn admits_uid(&self, uid: u32) -> bool {
        let allowed = self.uds.as_ref().map_or(&[][..], |uds| &uds.allow_uids[..]);
        allowed.is_empty() || allowed.contains(&u64::from(uid))
    }
}

/// Whole seconds, at least one.
fn seconds(wait: Duration) -> u64 {
    wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).max(1)
}

pub(crate) fn over_quota(quota: Quota, rate: Rate, wait: Duration) -> Rejection {
    let (seconds, name) = (seconds(wait), quota.name());
    let stated = format!("\"{name}\";q={}{};w=1", rate.per_second, quota.unit());
    let rejection = Rejection::new(quota.reason(), "too much; slow down").retry_after(seconds);
    with_rate_limit(rejection, stated, format!("\"{name}\";r=0;t={seconds}"))
}

/// The fields of draft-ietf-httpapi-ratelimit-headers.
fn with_rate_limit(rejection: Rejection, policy: String, state: String) -> Rejection {
    let value = |text: String| {
        HeaderValue::try_from(text).expect("quotes, letters and digits are a valid header value")
    };
    rejection
        .header(HeaderName::from_static("ratelimit-policy"), value(policy))
        .header(HeaderName::from_static("ratelimit"), value(state))
}

fn shape_of(settings: &GatewaySettings) -> Shape {
    let fair = &settings.fair_queue;
    Shape {
        capacity: fair.work_capacity,
        quantum_bytes: fair.quantum_bytes.0,
        weights: [fair.weights.anon, fair.weights.authed, fair.weights.internal],
    }
}

/// Gauges that are read when scraped.
fn expose(service: &Service, gate: &Arc<Gate>) {
    let (seen, name) = (gate.clone(), service.name());
    service.metrics().computed("inflight_requests", "Requests being answered.", "gauge", move |rows| {
        rows.row(&[("service", name)], seen.inflight().used());
    });
    let seen = gate.clone();
    service.metrics().computed(
        "fq_tokens",
        "Bytes a class may still spend in this round.",
        "gauge",
        move |rows| {
            for (class, name) in CLASS_NAMES.iter().enumerate() {
                rows.row(&[("class", name)], seen.tokens(class));
            }
        },
    );
    let seen = gate.clone();
    service.metrics().computed("fq_inflight", "Requests being answered, by class.", "gauge", move |rows| {
        for (class, name) in CLASS_NAMES.iter().enumerate() {
            rows.row(&[("class", name)], seen.running(class));
        }
    });
}

/// Gauges that follow the configuration.
fn expose_snapshot(service: &Service, snapshot: &Arc<ArcSwap<Snapshot>>) {
    let (seen, help) = (snapshot.clone(), "Requests waiting their turn, by tenant.");
    service.metrics().computed("fq_queued", help, "gauge", move |rows| {
        for (tenant, queued) in seen.load().tenants.queued() {
            rows.row(&[("tenant", tenant)], queued);
        }
    });
    let (seen, name) = (snapshot.clone(), service.name());
    service.metrics().computed("jwks_keys", "Keys that JWTs are checked with.", "gauge", move |rows| {
        if let Auth::Jwt(jwt) = seen.load().auth() {
            rows.row(&[("service", name)], jwt.keys.count());
        }
    });
    let seen = snapshot.clone();
    let help = "0 closed, 1 half-open, 2 open.";
    service.metrics().computed("breaker_state", help, "gauge", move |rows| {
        for (name, upstream) in &seen.load().named {
            rows.row(&[("upstream", name)], upstream.breaker_level());
        }
    });
    let seen = snapshot.clone();
    let help = "Bytes of bodies read from one side and not yet taken by the other.";
    service.metrics().computed("buffered_bytes", help, "gauge", move |rows| {
        for account in &seen.load().accounts {
            rows.row(&[("tenant", &account.tenant)], account.held());
        }
    });
}

/// The answer to a request that is for the gateway itself and not for what is behind it: `OPTIONS *`, and the last hop
/// of a request that counts them.
fn for_ourselves(request: &Request<Body>, corr: &CorrId) -> Option<Result<Response<Body>, Rejection>> {
    let options = request.method() == Method::OPTIONS;
    let last = max_forwards(request.method(), request.headers()) == Some(0);
    if !(last || options && request.uri().path() == "*") {
        return None;
    }
    let mut answer = last_hop(request.method());
    if let Ok(response) = &mut answer {
        response.headers_mut().insert(X_CORR_ID, corr.value().clone());
    }
    Some(answer)
}

/// Caps the body and, where the route says so, decodes it.
fn prepare_body(
    mut request: Request<Body>,
    plan: &Plan<'_>,
    settings: &GatewaySettings,
    decoders: &Arc<Permits>,
) -> Result<Request<Body>, Rejection> {
    let body = std::mem::take(request.body_mut());
    let known = body.exact_len().is_some();
    let body = if known { body } else { body.capped(plan.cap) };
    *request.body_mut() = if plan.codings.is_empty() {
        body
    } else {
        let Some(permit) = decoders.try_take() else {
            return Err(Rejection::new(Reason::Shed, "too many bodies are being decoded").retry_after(1));
        };
        request.headers_mut().remove(CONTENT_ENCODING);
        let limits = DecodeLimits {
            ratio_max: settings.limits.decode_ratio_max,
            bytes_max: settings.limits.decode_abs_cap_bytes.0,
        };
        Body::stream(Decoded::new(body, &plan.codings, limits, permit))
    };
    Ok(request)
}

/// What the client is told when a call fails; what exactly failed stays in the log.
fn refusal(failure: Failure, upstream: &str) -> Rejection {
    let error = match failure {
        Failure::Call(error) => error,
        Failure::NoServer => {
            return Rejection::new(Reason::NoUpstream, "no server of this upstream is healthy")
                .retry_after(2);
        }
    };
    let body_refusal = |error: &BodyError| match error {
        BodyError::TooLarge => (Reason::BodyCap, "the body is larger than allowed"),
        BodyError::ReadTimeout => (Reason::ReadTimeout, "the body did not arrive in time"),
        BodyError::Decode(DecodeError::Cap) => {
            (Reason::DecodedCap, "the decoded body is larger than allowed")
        }
        BodyError::Decode(DecodeError::Ratio) => {
            (Reason::DecodedRatio, "the body decodes to too many times its size")
        }
        _ => (Reason::Malformed, "the body could not be read"),
    };
    let (reason, detail) = match &error {
        CallError::RequestBody(error) => body_refusal(error),
        CallError::Connect(_) | CallError::ConnectTimeout => {
            (Reason::UpstreamError, "the upstream could not be reached")
        }
        _ => (Reason::UpstreamError, "the upstream did not answer properly"),
    };
    if reason == Reason::UpstreamError {
        tracing::warn!(upstream, %error, "upstream call failed");
    }
    Rejection::new(reason, detail)
}

/// Unknown methods share a label.
fn label_of(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "DELETE" => "DELETE",
        "PATCH" => "PATCH",
        "OPTIONS" => "OPTIONS",
        _ => "other",
    }
}

fn unix_millis() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backoff_doubles_up_to_its_cap_and_is_spread_by_its_base() {
        let (base, cap) = (Duration::from_millis(50), Duration::from_secs(2));
        for (attempt, least) in
            [(1, 50), (2, 100), (3, 200), (6, 1600), (7, 2000), (40, 2000), (u64::MAX, 2000)]
        {
            let least = Duration::from_millis(least);
            let delays: Vec<Duration> = (0..100).map(|_| backoff(base, cap, attempt)).collect();
            assert!(
                delays.iter().all(|delay| (least..=least + base).contains(delay)),
                "{attempt}: {delays:?}"
            );
            assert!(delays.iter().any(|delay| *delay != delays[0]), "all at once is what it is to prevent");
        }
    }
}
