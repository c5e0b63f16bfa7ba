//! Hydration: the parts of a view are asked for at the same time and under one deadline, and become one answer.
//!
//! Each part waits in the fair queue and takes its permits as a request of its own would, charged to the same tenant:
//! a view is no way around a share, and none of its parts holds a permit while another waits for one.
//!
//! An answer with a tag is sent when all of it is there. One without begins when all that it cannot do without is there,
//! and goes on with each part that comes.

use super::plan::Plan;
use super::{Proxy, Snapshot};
use crate::config::{PartSettings, ViewSettings};
use crate::forward::Forward;
use crate::gate::Ticket;
use crate::ledger::Account;
use crate::meter::Meter;
use crate::routes::plain;
use crate::tenants::Caller;
use crate::upstream::{Charges, Upstream, metered};
use crate::views::Template;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use http::header::{
    ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, ETAG, EXPECT, HOST, HeaderMap,
    HeaderValue, RANGE, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::{Request, Response, StatusCode, Uri, header};
use http_body::{Body as HttpBody, Frame};
use ron_kernel::admission::deadline::Budget;
use ron_kernel::http::client::{Answer, Payload};
use ron_kernel::http::{Body, BodyError, ConnInfo};
use ron_kernel::metrics::{Counter, Family};
use ron_kernel::problem::{CorrId, Rejection, X_CORR_ID, push_json};
use ron_kernel::reason::Reason;
use serde::de::IgnoredAny;
use sha2::{Digest as _, Sha256};
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};

/// An answer up to this size is hashed where its request runs.
const HASHED_AT_ONCE: usize = 64 << 10;

/// A view with its upstreams.
pub(super) struct View {
    bytes_max: u64,
    /// Calls beyond one for each part.
    spare_calls: usize,
    /// Whether answers have a tag.
    tagged: bool,
    parts: Arc<[Part]>,
}

struct Part {
    name: String,
    required: bool,
    template: Template,
    upstream: Arc<Upstream>,
    upstream_name: String,
    /// How often it could be had, and could not.
    results: [Counter; 2],
}

/// Why there is no part.
struct Missing {
    /// The upstream's own status, or that of the refusal.
    status: u16,
    code: &'static str,
    /// What the client is told if it cannot do without.
    rejection: Box<Rejection>,
}

/// What all parts of one answer share. They may outlive the call that began them.
struct Hydration {
    proxy: Arc<Proxy>,
    snapshot: Arc<Snapshot>,
    parts: Arc<[Part]>,
    /// Of the view among the routes.
    index: usize,
    caller: Caller,
    client: Option<IpAddr>,
    /// The peer is a trusted proxy.
    trusted: bool,
    budget: Budget,
    conn: ConnInfo,
    corr: CorrId,
    headers: HeaderMap,
    account: Arc<Account>,
    /// What the parts may still hold.
    bytes_left: AtomicU64,
    calls_left: AtomicUsize,
}

/// A part, which is one JSON value.
type Found = Result<Bytes, Missing>;
type Asking = Pin<Box<dyn Future<Output = Found> + Send>>;

impl View {
    pub(super) fn new(
        settings: &ViewSettings,
        upstream: impl Fn(&str) -> Arc<Upstream>,
        results: &Arc<Family<Counter, 3>>,
    ) -> View {
        let part = |part: &PartSettings| Part {
            name: part.name.clone(),
            required: part.required,
            template: part.template(settings),
            upstream: upstream(&part.upstream),
            upstream_name: part.upstream.clone(),
            results: ["ok", "missing"].map(|result| results.with([&settings.path, &part.name, result])),
        };
        View {
            bytes_max: settings.max_bytes.0,
            spare_calls: settings.max_calls - settings.parts.len(),
            tagged: settings.etag,
            parts: settings.parts.iter().map(part).collect(),
        }
    }

    pub(super) fn first(&self) -> &Arc<Upstream> {
        &self.parts[0].upstream
    }

    /// What it is made of, for whoever asks.
    pub(super) fn part_names(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(|part| part.name.as_str())
    }
}

impl Proxy {
    /// Makes the one answer of a view.
    pub(super) async fn hydrate(
        &self,
        request: Request<Body>,
        conn: &ConnInfo,
        corr: &CorrId,
        snapshot: &Arc<Snapshot>,
        plan: &Plan<'_>,
        view: &View,
    ) -> Result<Response<Body>, Rejection> {
        let path = plain(request.uri().path()).unwrap_or_default();
        let values = snapshot.view_paths.find(&path).map(|(_, values)| values).unwrap_or_default();
        let gone = || Rejection::new(Reason::Draining, "the service is shutting down");
        let hydration = Arc::new(Hydration {
            proxy: self.me.upgrade().ok_or_else(gone)?,
            snapshot: snapshot.clone(),
            parts: view.parts.clone(),
            index: plan.index,
            caller: plan.caller,
            client: plan.client,
            trusted: plan.trusted,
            budget: plan.budget,
            // The connection's timer and its interim answers are for one call at a time.
            conn: ConnInfo { timer: None, interim: None, ..conn.clone() },
            corr: corr.clone(),
            headers: fields_for_parts(&request),
            account: snapshot.account(&plan.caller)?,
            bytes_left: AtomicU64::new(view.bytes_max),
            calls_left: AtomicUsize::new(view.spare_calls),
        });
        let mut coming = Coming::begin(hydration, &values);
        let mut response = Response::default();
        let json = (CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if view.tagged {
            poll_fn(|cx| coming.poll(cx, |left| left.is_empty())).await?;
            let body = coming.whole();
            let tag = tag_of(body.clone()).await;
            if tag.as_ref().is_some_and(|tag| is_known(request.headers(), tag)) {
                *response.status_mut() = StatusCode::NOT_MODIFIED;
            } else {
                response.headers_mut().extend([json]);
                *response.body_mut() = Body::full(body);
            }
            response.headers_mut().extend(tag.map(|tag| (ETAG, tag)));
        } else {
            let parts = view.parts.clone();
            poll_fn(|cx| coming.poll(cx, |left| left.iter().all(|(number, _)| !parts[*number].required)))
                .await?;
            response.headers_mut().extend([json]);
            *response.body_mut() = Body::stream(coming);
        }
        response.headers_mut().insert(X_CORR_ID, corr.value().clone());
        Ok(response)
    }
}

/// An answer on its way: what is still asked for, and what can be sent.
struct Coming {
    hydration: Arc<Hydration>,
    /// By number.
    asking: Vec<(usize, Asking)>,
    came: Vec<(usize, Found)>,
    /// Written, and not yet sent.
    pieces: VecDeque<Bytes>,
    errors: String,
    began: bool,
    ended: bool,
}

impl Coming {
    /// Asks for all parts at once.
    fn begin(hydration: Arc<Hydration>, values: &[&str]) -> Coming {
        let ask = |(number, part): (usize, &Part)| -> (usize, Asking) {
            (number, Box::pin(hydration.clone().ask_in_time(number, part.template.fill(values))))
        };
        let asking = hydration.parts.iter().enumerate().map(ask).collect();
        let (came, pieces, errors) = (Vec::new(), VecDeque::new(), String::new());
        Coming { hydration, asking, came, pieces, errors, began: false, ended: false }
    }

    /// Ready when this holds of what is still asked for, or with the refusal of a part that was needed and could not be
    /// had; then the others are left.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        enough: impl Fn(&[(usize, Asking)]) -> bool,
    ) -> Poll<Result<(), Rejection>> {
        let mut at = 0;
        while let Some((number, asked)) = self.asking.get_mut(at) {
            let Poll::Ready(found) = asked.as_mut().poll(cx) else {
                at += 1;
                continue;
            };
            let (number, part) = (*number, &self.hydration.parts[*number]);
            drop(self.asking.swap_remove(at));
            match found {
                Err(missing) if part.required => {
                    return Poll::Ready(Err(missing.rejection.member("part", &part.name)));
                }
                found => self.came.push((number, found)),
            }
        }
        if enough(&self.asking) { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    /// Writes what came, and the end if nothing is left to come.
    fn write(&mut self) {
        for (number, found) in std::mem::take(&mut self.came) {
            let part = &self.hydration.parts[number];
            let mut name = if std::mem::replace(&mut self.began, true) { "," } else { "{" }.to_owned();
            push_json(&mut name, &part.name);
            name.push(':');
            match found {
                Ok(json) => self.pieces.extend([Bytes::from(name), json.slice_ref(json.trim_ascii())]),
                Err(Missing { status, code, rejection }) => {
                    // What the gate refuses is counted as such, even if there is an answer without it.
                    if matches!(rejection.reason, Reason::Busy | Reason::Shed) {
                        self.hydration.proxy.rejections.count(rejection.reason);
                    }
                    self.pieces.push_back(Bytes::from(name + "null"));
                    self.errors.push_str(if self.errors.is_empty() { "" } else { "," });
                    self.errors.push_str("{\"part\":");
                    push_json(&mut self.errors, &part.name);
                    let _ = write!(self.errors, ",\"status\":{status},\"code\":\"{code}\"}}");
                }
            }
        }
        if self.asking.is_empty() && !std::mem::replace(&mut self.ended, true) {
            self.pieces.push_back(Bytes::from(format!(",\"errors\":[{}]}}", self.errors)));
        }
    }

    /// All of it, each part where the configuration has it.
    fn whole(mut self) -> Bytes {
        self.came.sort_by_key(|(number, _)| *number);
        self.write();
        let pieces: Vec<Bytes> = self.pieces.into();
        self.hydration.account.book(Bytes::from(pieces.concat()))
    }
}

impl HttpBody for Coming {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if this.pieces.is_empty() && !this.ended {
            // Nothing that is left can refuse the answer.
            let _ = this.poll(cx, <[_]>::is_empty);
            this.write();
        }
        match this.pieces.pop_front() {
            Some(piece) => Poll::Ready(Some(Ok(Frame::data(piece)))),
            None if this.ended => Poll::Ready(None),
            None => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended && self.pieces.is_empty()
    }
}

/// The tag of an answer: another one for each that differs in a byte. None in a process that ends.
async fn tag_of(body: Bytes) -> Option<HeaderValue> {
    let large = body.len() > HASHED_AT_ONCE;
    let digest = move || -> [u8; 32] { Sha256::digest(&body).into() };
    let digest = if large { tokio::task::spawn_blocking(digest).await.ok()? } else { digest() };
    HeaderValue::from_str(&format!("\"{}\"", URL_SAFE_NO_PAD.encode(&digest[..16]))).ok()
}

/// Whether the client says that it has the answer with this tag.
fn is_known(headers: &HeaderMap, tag: &HeaderValue) -> bool {
    let known = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    known
        .flat_map(|list| list.split(','))
        .map(str::trim)
        .any(|known| known == "*" || known.strip_prefix("W/").unwrap_or(known).as_bytes() == tag.as_bytes())
}

impl Hydration {
    async fn ask_in_time(self: Arc<Self>, number: usize, path: String) -> Found {
        let part = &self.parts[number];
        let asked = tokio::time::timeout_at(self.budget.until.into(), self.ask(part, path)).await;
        let found = asked.unwrap_or_else(|_elapsed| {
            self.proxy.rpc_timeouts.inc();
            Err(Rejection::new(Reason::Deadline, "it was not there in time").into())
        });
        part.results[usize::from(found.is_err())].inc();
        found
    }

    async fn ask(&self, part: &Part, path: String) -> Found {
        let Hydration { proxy, snapshot, caller, budget, .. } = self;
        let route = &snapshot.settings.routes[self.index];
        let (factor, fixed) = (route.cost, snapshot.settings.fair_queue.request_cost_bytes.0);
        let ticket = Ticket {
            lane: part.upstream.lane,
            tenant: caller.tenant,
            quantum: caller.quantum,
            cost: factor.saturating_mul(fixed),
            deadline: budget.until,
        };
        let mut pass = proxy.enter(ticket, &part.upstream, snapshot, caller, route).await?;
        let (tenant, ip) = (snapshot.tenant_bytes(*caller), snapshot.ip_bytes(self.client));
        if tenant.is_some() || ip.is_some() {
            pass.measure(Meter { quotas: proxy.quotas.clone(), tenant, ip, factor, fixed, body: None });
        }
        let parts = self.request(&path)?;
        let head = Forward {
            request: &parts,
            conn: &self.conn,
            trusted: self.trusted,
            corr: &self.corr,
            told: Some(budget.until),
            strip_prefix: "",
            body_len: Some(0),
            upgrade: None,
            upload: None,
            retries: Some(&self.calls_left),
        };
        let silence = snapshot.settings.idle_timeout.0;
        let mut body = Some(Body::default());
        let called = proxy.call(&part.upstream, &head, &mut body, silence, *budget, &part.upstream_name);
        let (Answer { status, fields, payload, .. }, loaded) = called.await?;
        if !status.is_success() {
            let rejection = Rejection::new(Reason::UpstreamError, format!("the upstream answered {status}"));
            return Err(Missing { status: status.as_u16(), ..rejection.into() });
        }
        let body = match payload {
            Payload::Whole(bytes) => {
                pass.settle(factor.saturating_mul(fixed + bytes.len() as u64));
                Body::full(bytes)
            }
            Payload::Stream(body) => {
                let (account, timeouts) = (self.account.clone(), proxy.rpc_timeouts.clone());
                let charges = Charges { pass, cost: fixed, factor, account, timeouts, _loaded: loaded };
                metered(body, &fields, budget, charges)
            }
            Payload::Upgraded(_) => return Err(broken("the upstream changed the protocol")),
        };
        let encoded = fields.get(&CONTENT_ENCODING).is_some_and(|coding| coding != b"identity");
        let bytes = self.gather(body).await?;
        let is_json = !encoded
            && std::str::from_utf8(&bytes).is_ok_and(|text| serde_json::from_str::<IgnoredAny>(text).is_ok());
        if is_json {
            return Ok(bytes);
        }
        let rejection = Rejection::new(Reason::UpstreamError, "the upstream did not answer with JSON");
        Err(Missing { code: "not_json", ..rejection.into() })
    }

    /// A `GET` of a part's path with the client's fields.
    fn request(&self, path: &str) -> Result<Parts, Missing> {
        let mut request = Request::new(());
        *request.uri_mut() = path.parse::<Uri>().map_err(|_bad| broken("its path cannot be written"))?;
        *request.headers_mut() = self.headers.clone();
        Ok(request.into_parts().0)
    }

    /// A whole body, if the parts together stay within their bound.
    async fn gather(&self, mut body: Body) -> Found {
        let mut pieces = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| match error {
                BodyError::Deadline => {
                    Missing::from(Rejection::new(Reason::Deadline, "it was not there in time"))
                }
                _ => broken("the upstream broke off its answer"),
            })?;
            let Ok(piece) = frame.into_data() else { continue };
            let take = |left: u64| left.checked_sub(piece.len() as u64);
            if self.bytes_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
                let detail = "the parts together are larger than the view's max_bytes";
                let rejection = Rejection::new(Reason::UpstreamError, detail);
                return Err(Missing { code: "too_large", ..rejection.into() });
            }
            pieces.push(piece);
        }
        Ok(match &mut pieces[..] {
            [whole] => std::mem::take(whole),
            pieces => self.account.book(Bytes::from(pieces.concat())),
        })
    }
}

impl From<Rejection> for Missing {
    fn from(rejection: Rejection) -> Missing {
        let (status, code) = (rejection.reason.status(), rejection.reason.code());
        Missing { status, code, rejection: Box::new(rejection) }
    }
}

fn broken(detail: &'static str) -> Missing {
    Rejection::new(Reason::UpstreamError, detail).into()
}

/// The client's fields without what is about its own request's body, conditions and form.
fn fields_for_parts(request: &Request<Body>) -> HeaderMap {
    let mut headers = request.headers().clone();
    let own = [
        CONTENT_LENGTH,
        CONTENT_TYPE,
        CONTENT_ENCODING,
        TRANSFER_ENCODING,
        TRAILER,
        TE,
        EXPECT,
        UPGRADE,
        RANGE,
    ];
    let conditions = [
        header::IF_MATCH,
        header::IF_NONE_MATCH,
        header::IF_MODIFIED_SINCE,
        header::IF_UNMODIFIED_SINCE,
        header::IF_RANGE,
    ];
    for name in own.into_iter().chain(conditions) {
        headers.remove(name);
    }
    headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    // In HTTP/2 the host is part of the target, which each part has its own of.
    if let Some(host) = request.uri().authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok()) {
        headers.insert(HOST, host);
    }
    headers
}
