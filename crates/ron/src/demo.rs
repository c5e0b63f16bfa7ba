//! The upstream that `ron up` brings along, so that the first `curl` gets an answer.

use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Request, Response};
use ron_kernel::http::{Body, ConnInfo, Handler};
use serde_json::json;

/// Where it listens, relative to the data folder, and how the configuration names it.
pub(crate) const SOCKET: &str = "demo.sock";

/// Largest body it sends back.
const ECHO_MAX: usize = 1 << 20;

pub(crate) struct Demo;

impl Handler for Demo {
    async fn call(&self, mut request: Request<Body>, _: &ConnInfo) -> Response<Body> {
        let echoed = request.body_mut().collect(ECHO_MAX).await;
        let said =
            |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
        let body = json!({
            "hello": "this is the demo upstream behind your gateway",
            "method": request.method().as_str(),
            "path": request.uri().path(),
            "body": echoed.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default(),
            "forwarded": said("forwarded"),
            "corr_id": said("x-corr-id"),
        });
        let mut response = Response::new(Body::full(format!("{body}\n")));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response
    }
}
