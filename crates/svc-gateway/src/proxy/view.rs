//! Hydration: the parts of a view are asked for at the same time and under one deadline, and become one answer.
//!
//! Each part waits in the fair queue and takes its permits as a request of its own would, charged to the same tenant:
//! a view is no way around a share, and none of its parts holds a permit while another waits for one.

use super::plan::Plan;
use super::{Proxy, Snapshot};
use crate::config::{PartSettings, ViewSettings};
use crate::forward::Forward;
use crate::gate::Ticket;
use crate::ledger::Account;
use crate::meter::Meter;
use crate::routes::plain;
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
use ron_kernel::http::client::{Answer, Payload};
use ron_kernel::http::{Body, BodyError, ConnInfo};
use ron_kernel::metrics::{Counter, Family};
use ron_kernel::problem::{CorrId, Rejection, X_CORR_ID, push_json};
use ron_kernel::reason::Reason;
use serde::de::IgnoredAny;
use sha2::{Digest as _, Sha256};
use std::fmt::Write as _;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::Poll;

/// An answer up to this size is hashed where its request runs.
const HASHED_AT_ONCE: usize = 64 << 10;

/// A view with its upstreams.
pub(super) struct View {
    bytes_max: u64,
    /// Calls beyond one for each part.
    spare_calls: usize,
    parts: Vec<Part>,
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

/// What all parts of one answer share.
struct Hydration<'a> {
    snapshot: &'a Snapshot,
    plan: &'a Plan<'a>,
    conn: &'a ConnInfo,
    corr: &'a CorrId,
    headers: HeaderMap,
    account: Arc<Account>,
    /// What the parts may still hold.
    bytes_left: AtomicU64,
    calls_left: AtomicUsize,
}

/// The pieces of a part, which are one JSON value.
type Found = Result<Bytes, Missing>;
type Asking<'a> = Pin<Box<dyn Future<Output = Found> + Send + 'a>>;

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
        snapshot: &Snapshot,
        plan: &Plan<'_>,
        view: &View,
    ) -> Result<Response<Body>, Rejection> {
        let path = plain(request.uri().path()).unwrap_or_default();
        let values = snapshot.view_paths.find(&path).map(|(_, values)| values).unwrap_or_default();
        // The connection's timer and its interim answers are for one call at a time.
        let conn = ConnInfo { timer: None, interim: None, ..conn.clone() };
        let hydration = Hydration {
            snapshot,
            plan,
            conn: &conn,
            corr,
            headers: fields_for_parts(&request),
            account: snapshot.account(&plan.caller)?,
            bytes_left: AtomicU64::new(view.bytes_max),
            calls_left: AtomicUsize::new(view.spare_calls),
        };
        let asking = view.parts.iter().map(|part| {
            let path = part.template.fill(&values);
            let asked: Asking<'_> = Box::pin(self.ask_in_time(&hydration, part, path));
            asked
        });
        let found = all_or_required(&view.parts, asking.collect()).await?;
        let body = hydration.account.book(Bytes::from(self.assemble(&view.parts, &found)));
        let tag = tag_of(body.clone()).await;
        let mut response = Response::default();
        if tag.as_ref().is_some_and(|tag| is_known(request.headers(), tag)) {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
        } else {
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            *response.body_mut() = Body::full(body);
        }
        let headers = response.headers_mut();
        headers.extend(tag.map(|tag| (ETAG, tag)));
        headers.insert(X_CORR_ID, corr.value().clone());
        Ok(response)
    }

    async fn ask_in_time(&self, hydration: &Hydration<'_>, part: &Part, path: String) -> Found {
        let until = hydration.plan.budget.until;
        let asked = tokio::time::timeout_at(until.into(), self.ask(hydration, part, path)).await;
        let found = asked.unwrap_or_else(|_elapsed| {
            self.rpc_timeouts.inc();
            Err(Rejection::new(Reason::Deadline, "it was not there in time").into())
        });
        part.results[usize::from(found.is_err())].inc();
        found
    }

    async fn ask(&self, hydration: &Hydration<'_>, part: &Part, path: String) -> Found {
        let Hydration { snapshot, plan, .. } = hydration;
        let fixed = snapshot.settings.fair_queue.request_cost_bytes.0;
        let (factor, caller) = (plan.route.cost, plan.caller);
        let ticket = Ticket {
            lane: part.upstream.lane,
            tenant: caller.tenant,
            quantum: caller.quantum,
            cost: factor.saturating_mul(fixed),
            deadline: plan.budget.until,
        };
        let mut pass = self.enter(ticket, &part.upstream, snapshot, plan).await?;
        let (tenant, ip) = (snapshot.tenant_bytes(caller), snapshot.ip_bytes(plan.client));
        if tenant.is_some() || ip.is_some() {
            pass.measure(Meter { quotas: self.quotas.clone(), tenant, ip, factor, fixed, body: None });
        }
        let parts = hydration.request(&path)?;
        let head = Forward {
            request: &parts,
            conn: hydration.conn,
            trusted: plan.trusted,
            corr: hydration.corr,
            told: Some(plan.budget.until),
            strip_prefix: "",
            body_len: Some(0),
            upgrade: None,
            upload: None,
            retries: Some(&hydration.calls_left),
        };
        let silence = snapshot.settings.idle_timeout.0;
        let mut body = Some(Body::default());
        let called = self.call(&part.upstream, &head, &mut body, silence, plan.budget, &part.upstream_name);
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
                let (account, timeouts) = (hydration.account.clone(), self.rpc_timeouts.clone());
                let charges = Charges { pass, cost: fixed, factor, account, timeouts, _loaded: loaded };
                metered(body, &fields, &plan.budget, charges)
            }
            Payload::Upgraded(_) => return Err(broken("the upstream changed the protocol")),
        };
        let encoded = fields.get(&CONTENT_ENCODING).is_some_and(|coding| coding != b"identity");
        let bytes = hydration.gather(body).await?;
        let is_json = !encoded
            && std::str::from_utf8(&bytes).is_ok_and(|text| serde_json::from_str::<IgnoredAny>(text).is_ok());
        if is_json {
            return Ok(bytes);
        }
        let rejection = Rejection::new(Reason::UpstreamError, "the upstream did not answer with JSON");
        Err(Missing { code: "not_json", ..rejection.into() })
    }

    /// The answer: each part, then what is missing.
    fn assemble(&self, parts: &[Part], found: &[Found]) -> Vec<u8> {
        let held: usize = found.iter().filter_map(|found| found.as_ref().ok()).map(Bytes::len).sum();
        let mut out = Vec::with_capacity(held + 64 * (parts.len() + 1));
        let mut errors = String::new();
        let mut separator = "{";
        for (part, found) in parts.iter().zip(found) {
            let mut name = separator.to_owned();
            push_json(&mut name, &part.name);
            out.extend_from_slice(name.as_bytes());
            out.push(b':');
            separator = ",";
            match found {
                Ok(json) => out.extend_from_slice(json.trim_ascii()),
                Err(Missing { status, code, rejection }) => {
                    // What the gate refuses is counted as such, even if there is an answer without it.
                    if matches!(rejection.reason, Reason::Busy | Reason::Shed) {
                        self.rejections.count(rejection.reason);
                    }
                    out.extend_from_slice(b"null");
                    errors.push_str(if errors.is_empty() { "" } else { "," });
                    errors.push_str("{\"part\":");
                    push_json(&mut errors, &part.name);
                    let _ = write!(errors, ",\"status\":{status},\"code\":\"{code}\"}}");
                }
            }
        }
        out.extend_from_slice(format!(",\"errors\":[{errors}]}}").as_bytes());
        out
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

/// What the parts came to, or the refusal of the first that was needed and could not be had; then the others are left.
async fn all_or_required(parts: &[Part], mut asking: Vec<Asking<'_>>) -> Result<Vec<Found>, Rejection> {
    let mut found: Vec<Option<Found>> = parts.iter().map(|_| None).collect();
    std::future::poll_fn(move |cx| {
        for ((part, asked), slot) in parts.iter().zip(&mut asking).zip(&mut found) {
            if slot.is_none()
                && let Poll::Ready(came) = asked.as_mut().poll(cx)
            {
                match came {
                    Err(missing) if part.required => {
                        return Poll::Ready(Err(missing.rejection.member("part", &part.name)));
                    }
                    came => *slot = Some(came),
                }
            }
        }
        if found.iter().all(Option::is_some) {
            Poll::Ready(Ok(found.iter_mut().filter_map(Option::take).collect()))
        } else {
            Poll::Pending
        }
    })
    .await
}

impl Hydration<'_> {
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
