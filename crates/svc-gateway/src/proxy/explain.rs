//! What would become of a request, without making it: `POST /gateway/explain`.

use super::plan::{Asked, Plan, Quota, Seen};
use super::{Proxy, Snapshot};
use http::header::{CONTENT_LENGTH, HOST, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{HeaderMap, Method, Request, Uri};
use ron_kernel::admission::bucket::Rate;
use ron_kernel::http::Body;
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use serde_json::{Value, json};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

impl Proxy {
    /// Decides on the request that the JSON describes. Nothing is taken from any bucket and nobody is called.
    pub(crate) fn explain(&self, question: &[u8]) -> Result<Value, Rejection> {
        let question = Question::parse(question)?;
        let snapshot = self.snapshot.load();
        let mut seen = Seen::default();
        let mut quotas = Vec::new();
        let begun = Instant::now();
        let Question { request, body_len, peer } = &question;
        let peer = Some(*peer);
        let asked =
            Asked { request, body_len: *body_len, peer, names: &[], begun, overloaded: self.overloaded() };
        let mut note = |quota, rate| {
            quotas.push((quota, rate));
            Ok(())
        };
        let planned = snapshot
            .meet_quotas(&asked, &mut seen, &mut note)
            .and_then(|sender| snapshot.plan(&asked, sender, &mut seen, &mut note));
        let mut answer = snapshot.describe(&seen, &quotas);
        match planned {
            Ok(plan) => {
                answer["admitted"] = true.into();
                answer["deadline_ms"] = millis(&plan, begun).into();
                answer["max_body_bytes"] = plan.cap.into();
                answer["cost"] = plan.route.cost.saturating_mul(plan.request_cost).into();
                if let Some(view) = snapshot.view(plan.index) {
                    answer["parts"] = view.part_names().collect::<Vec<_>>().into();
                }
                answer["breaker"] = snapshot.upstreams[plan.index].breaker_state().into();
            }
            Err(refused) => {
                answer["admitted"] = false.into();
                answer["status"] = refused.reason.status().into();
                answer["reason"] = refused.reason.code().into();
                answer["detail"] = refused.detail.into();
            }
        }
        Ok(answer)
    }
}

/// What remains of the request's time when it begins, in whole milliseconds.
fn millis(plan: &Plan<'_>, begun: Instant) -> u64 {
    u64::try_from(plan.budget.remaining(begun).as_millis()).unwrap_or(u64::MAX)
}

impl Snapshot {
    /// What was found out on the way, whether it ended well or not.
    fn describe(&self, seen: &Seen, quotas: &[(Quota, Rate)]) -> Value {
        let names = self.names(seen);
        let quotas = quotas.iter().map(|(quota, rate)| {
            json!({"name": quota.name(), "reason": quota.reason().code(), "per_second": rate.per_second, "burst": rate.burst})
        });
        json!({
            "client": seen.client,
            "route": seen.route.map(|index| json!({"index": index, "path": names.route})),
            "upstream": names.upstream,
            "class": names.class,
            "tenant": names.tenant,
            "quotas": quotas.collect::<Vec<_>>(),
        })
    }
}

/// The request asked about.
struct Question {
    request: Request<Body>,
    body_len: Option<u64>,
    peer: IpAddr,
}

impl Question {
    /// `{"method", "url", "headers"}`, and `"client"`, the address that it comes from, if it matters.
    fn parse(text: &[u8]) -> Result<Question, Rejection> {
        let wrong = |detail: &'static str| Rejection::new(Reason::Malformed, detail);
        let value: Value = serde_json::from_slice(text).map_err(|_bad| wrong("the body is no JSON"))?;
        let (Some(method), Some(url)) = (value["method"].as_str(), value["url"].as_str()) else {
            return Err(wrong("expected {\"method\", \"url\", \"headers\"}"));
        };
        let method = Method::from_bytes(method.as_bytes())
            .map_err(|_bad| wrong("the method holds a character that no method has"))?;
        let url: Uri =
            url.parse().map_err(|_bad| wrong("the url is no URL, such as http://example.org/path"))?;
        if url.path_and_query().is_none() {
            return Err(wrong("the url has no path"));
        }
        let headers = headers_of(&value["headers"]).ok_or_else(|| {
            wrong("headers must be an object of strings, or of lists of strings, with valid names")
        })?;
        let peer = match &value["client"] {
            Value::Null => IpAddr::from(Ipv4Addr::LOCALHOST),
            client => client
                .as_str()
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| wrong("the client is no IP address"))?,
        };
        let stated = headers.get(CONTENT_LENGTH).map(|value| value.to_str().ok()?.parse::<u64>().ok());
        let body_len = match stated {
            Some(length) => Some(length.ok_or_else(|| wrong("the Content-Length is no number"))?),
            None => (!headers.contains_key(TRANSFER_ENCODING)).then_some(0),
        };
        let mut request = Request::new(Body::default());
        *request.method_mut() = method;
        *request.headers_mut() = headers;
        // As a client would send it: the host in its own field, the target without it.
        if let Some(host) = url.authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok()) {
            request.headers_mut().entry(HOST).or_insert(host);
        }
        let target = url.path_and_query().map_or("/", |target| target.as_str());
        *request.uri_mut() = target.parse().map_err(|_bad| wrong("the url's path is malformed"))?;
        Ok(Question { request, body_len, peer })
    }
}

/// Headers from JSON: `{"name": "value"}` or `{"name": ["value", …]}`.
fn headers_of(value: &Value) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    let fields = match value {
        Value::Null => return Some(headers),
        value => value.as_object()?,
    };
    for (name, value) in fields {
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        for value in values {
            headers.append(&name, HeaderValue::from_str(value.as_str()?).ok()?);
        }
    }
    Some(headers)
}
