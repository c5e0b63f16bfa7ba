//! The admin plane: health, readiness, metrics, inventory, and the few commands that need the token.

use crate::health::Scope;
use crate::http::{Body, BodyError, ConnInfo, Handler, ServerLimits};
use crate::kernel::{Ending, Kernel, Service};
use crate::metrics::{Counter, Family};
use crate::problem::{CorrId, Rejection, X_CORR_ID, json_response};
use crate::process::Reloader;
use crate::reason::{Reason, Rejections};
use bytes::Bytes;
use http::header::{ALLOW, AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Method, Request, Response, StatusCode};
use serde_json::{Value, json};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// The longest command body.
const BODY_MAX: usize = 64 << 10;

/// What `/version` says.
#[derive(Clone, Copy, Debug)]
pub struct Version {
    pub name: &'static str,
    pub version: &'static str,
    pub git: &'static str,
    pub profile: &'static str,
    pub features: &'static [&'static str],
}

/// A command that a service hangs into the admin plane: JSON or nothing in, JSON out.
pub(crate) struct LocalApi {
    pub(crate) method: Method,
    pub(crate) path: &'static str,
    /// Whether the token must be sent.
    pub(crate) guarded: bool,
    pub(crate) answer: Answer,
}

/// From the body of the request to that of the response.
type Answer = Box<dyn Fn(&[u8]) -> Result<Value, Rejection> + Send + Sync>;

impl std::fmt::Debug for LocalApi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LocalApi({} {})", self.method, self.path)
    }
}

/// An answer that is on its way.
pub type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Rejection>> + Send>>;

/// A part of the admin plane that a service answers itself, behind the token.
pub(crate) struct LocalRoutes {
    pub(crate) prefix: &'static str,
    pub(crate) answer: Box<dyn Fn(Request<Body>, CorrId) -> Answering + Send + Sync>,
}

impl std::fmt::Debug for LocalRoutes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LocalRoutes({})", self.prefix)
    }
}

/// The handler of the admin listener.
pub struct Admin {
    kernel: Kernel,
    reloader: Arc<Reloader>,
    token: String,
    /// Asked at each request, since it can be reloaded.
    danger_ok: Box<dyn Fn() -> bool + Send + Sync>,
    version: Version,
    requests: Arc<Family<Counter, 4>>,
    rejections: Rejections,
}

impl std::fmt::Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Admin")
    }
}

/// The admin listener stands outside every limit of the services; these are its own.
pub fn limits() -> ServerLimits {
    ServerLimits {
        conns_max: 256,
        conns_per_ip_max: 256,
        headers_max: 100,
        header_bytes_max: 16 << 10,
        read_timeout: Duration::from_secs(5),
        write_timeout: Duration::from_secs(5),
        idle_timeout: Duration::from_secs(60),
        trusted_proxies: Default::default(),
        proxy_protocol: false,
    }
}

const PATHS: [(&str, Method); 9] = [
    ("/healthz", Method::GET),
    ("/readyz", Method::GET),
    ("/metrics", Method::GET),
    ("/version", Method::GET),
    ("/debug/channels", Method::GET),
    ("/debug/tasks", Method::GET),
    ("/debug/tasks/kill", Method::POST),
    ("/admin/shutdown", Method::POST),
    ("/admin/reload", Method::POST),
];

impl Admin {
    pub fn new(
        service: &Service,
        reloader: Arc<Reloader>,
        token: String,
        version: Version,
        danger_ok: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Admin {
        Admin {
            kernel: service.kernel().clone(),
            reloader,
            token,
            danger_ok: Box::new(danger_ok),
            version,
            requests: crate::http::requests_family(service),
            rejections: Rejections::new(service),
        }
    }

    async fn answer(&self, request: Request<Body>, corr: &CorrId) -> Result<Response<Body>, Rejection> {
        let path = request.uri().path();
        if let Some(routes) = self.kernel.local_routes(path) {
            self.check_token(&request)?;
            return (routes.answer)(request, corr.clone()).await;
        }
        let method = if request.method() == Method::HEAD { &Method::GET } else { request.method() };
        let Some((path, allowed, api)) = self.known(path) else { return Err(nothing_here()) };
        if *method != allowed {
            let allow = HeaderValue::from_str(allowed.as_str()).expect("a method is a valid header value");
            return Err(Rejection::new(Reason::Method, "another method is needed here").header(ALLOW, allow));
        }
        if let Some(api) = api {
            // What is for experiments only is not there for anybody else.
            if api.path.starts_with("/debug/") && !(self.has_token(&request) && (self.danger_ok)()) {
                return Err(nothing_here());
            }
            if api.guarded {
                self.check_token(&request)?;
            }
            let body = read(request).await?;
            return Ok(json_response(StatusCode::OK, &(api.answer)(&body)?, corr));
        }
        match path {
            "/healthz" => Ok(json_response(StatusCode::OK, &json!({"alive": true}), corr)),
            "/readyz" => self.readyz(request.uri().query().unwrap_or(""), corr),
            "/metrics" => Ok(text(self.kernel.metrics().scrape(), corr)),
            "/version" => Ok(json_response(StatusCode::OK, &self.version(), corr)),
            "/debug/channels" => Ok(json_response(StatusCode::OK, &self.kernel.inventory().to_json(), corr)),
            "/debug/tasks" => {
                let tasks: Vec<Value> =
                    self.kernel.services().iter().flat_map(|service| service.tasks().to_json()).collect();
                Ok(json_response(StatusCode::OK, &json!({"tasks": tasks}), corr))
            }
            "/debug/tasks/kill" => self.kill(request, corr).await,
            "/admin/shutdown" => {
                self.check_token(&request)?;
                tracing::info!(corr_id = corr.as_str(), "shutting down, asked by the admin plane");
                self.kernel.end(Ending::Asked);
                Ok(json_response(StatusCode::ACCEPTED, &json!({"draining": true}), corr))
            }
            _ => {
                self.check_token(&request)?;
                self.reload(corr).await
            }
        }
    }

    /// A path that leads somewhere: its name, its method, and the service's command if it is one.
    fn known(&self, path: &str) -> Option<(&'static str, Method, Option<Arc<LocalApi>>)> {
        if let Some((known, method)) = PATHS.iter().find(|(known, _)| *known == path) {
            return Some((known, method.clone(), None));
        }
        let api = self.kernel.local_api(path)?;
        Some((api.path, api.method.clone(), Some(api)))
    }

    fn readyz(&self, query: &str, corr: &CorrId) -> Result<Response<Body>, Rejection> {
        let mut scope = Scope::Write;
        let mut service = None;
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("scope", "read")) => scope = Scope::Read,
                Some(("scope", "write")) => scope = Scope::Write,
                Some(("service", name)) => service = Some(name),
                _ => {
                    return Err(Rejection::new(
                        Reason::Malformed,
                        "expected scope=read, scope=write or service=NAME",
                    ));
                }
            }
        }
        let Some(answer) = self.kernel.health().readiness(service, scope) else {
            return Err(Rejection::new(Reason::NotFound, "no such service runs in this process"));
        };
        let status = if answer.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let mut response = json_response(status, &answer.to_json(), corr);
        if let Some(seconds) = answer.retry_after() {
            response.headers_mut().insert(RETRY_AFTER, seconds.into());
        }
        Ok(response)
    }

    fn version(&self) -> Value {
        let Version { name, version, git, profile, features } = self.version;
        json!({"name": name, "version": version, "git": git, "profile": profile, "features": features})
    }

    fn has_token(&self, request: &Request<Body>) -> bool {
        let given =
            request.headers().get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        given.is_some_and(|given| same(given, self.token.as_bytes()))
    }

    fn check_token(&self, request: &Request<Body>) -> Result<(), Rejection> {
        if self.has_token(request) {
            return Ok(());
        }
        let challenge = HeaderValue::from_static("Bearer");
        let refused = Rejection::new(Reason::Unauth, "send the admin token as Authorization: Bearer");
        Err(refused.header(WWW_AUTHENTICATE, challenge))
    }

    async fn kill(&self, request: Request<Body>, corr: &CorrId) -> Result<Response<Body>, Rejection> {
        if !self.has_token(&request) || !(self.danger_ok)() {
            return Err(nothing_here());
        }
        let malformed = |detail: &'static str| Rejection::new(Reason::Malformed, detail);
        let body = read(request).await?;
        let body: Value = serde_json::from_slice(&body).map_err(|_bad| malformed("the body is no JSON"))?;
        let (Some(service), Some(kind), Some(fraction)) =
            (body["service"].as_str(), body["kind"].as_str(), body["fraction"].as_f64())
        else {
            return Err(malformed("expected {\"service\", \"kind\", \"fraction\"}"));
        };
        let services = self.kernel.services();
        let service = services.iter().find(|known| known.name() == service);
        let service = service
            .ok_or_else(|| Rejection::new(Reason::NotFound, "no such service runs in this process"))?;
        Ok(json_response(StatusCode::OK, &json!({"killed": service.tasks().kill(kind, fraction)}), corr))
    }

    async fn reload(&self, corr: &CorrId) -> Result<Response<Body>, Rejection> {
        match self.reloader.reload("admin").await {
            Ok(changed) => Ok(json_response(StatusCode::OK, &json!({"changed": changed}), corr)),
            Err(problems) => {
                let refused = Rejection::new(Reason::Invalid, "the configuration was not reloaded");
                let mut body: Value = serde_json::from_str(&refused.body(corr)).unwrap_or_default();
                body["problems"] = problems.lines().into();
                let mut response = refused.into_response(corr);
                *response.body_mut() = Body::full(body.to_string());
                Ok(response)
            }
        }
    }
}

impl Handler for Admin {
    async fn call(&self, request: Request<Body>, _: &ConnInfo) -> Response<Body> {
        let corr = CorrId::from_headers(request.headers());
        let known = self.known(request.uri().path());
        let routes = self.kernel.local_routes(request.uri().path()).map(|routes| routes.prefix);
        let route = known.as_ref().map(|(path, _, _)| *path).or(routes).unwrap_or("none");
        let method = known.as_ref().map_or("none", |(_, method, _)| method.as_str()).to_owned();
        let response = match self.answer(request, &corr).await {
            Ok(response) => response,
            Err(rejection) => {
                self.rejections.count(rejection.reason);
                rejection.into_response(&corr)
            }
        };
        self.requests.with(["kernel", route, &method, response.status().as_str()]).inc();
        response
    }
}

/// The body of a command.
async fn read(mut request: Request<Body>) -> Result<Bytes, Rejection> {
    request.body_mut().collect(BODY_MAX).await.map_err(|error| match error {
        BodyError::TooLarge => {
            Rejection::new(Reason::BodyCap, format!("the body may have at most {BODY_MAX} bytes"))
        }
        BodyError::ReadTimeout => Rejection::new(Reason::ReadTimeout, "the body did not arrive in time"),
        _ => Rejection::new(Reason::Malformed, "the body could not be read"),
    })
}

fn nothing_here() -> Rejection {
    Rejection::new(
        Reason::NotFound,
        "see /healthz, /readyz, /metrics, /version, /debug/channels, /debug/tasks",
    )
}

fn text(page: String, corr: &CorrId) -> Response<Body> {
    let mut response = Response::new(Body::full(page));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response.headers_mut().insert(X_CORR_ID, corr.value().clone());
    response
}

/// Compares in a time that depends on the lengths only.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}
