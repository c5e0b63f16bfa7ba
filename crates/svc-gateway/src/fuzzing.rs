//! Doors for the fuzz targets: what the gateway writes, asked for with plain types.

use crate::forward::{self, Forward};
use crate::proxy;
use bytes::BytesMut;
use http::header::HeaderMap;
use http::{Request, Response};
use ron_kernel::admission::bucket::Rate;
use ron_kernel::http::{Body, ConnInfo, Peer};
use ron_kernel::problem::CorrId;
use ron_kernel::reason::Reason;
use std::net::SocketAddr;
use std::time::Duration;

/// The head that the upstream gets of a request from `peer`.
pub fn upstream_head(
    request: &Request<Body>,
    peer: SocketAddr,
    trusted: bool,
    body_len: Option<u64>,
) -> BytesMut {
    let (conn, corr) =
        (ConnInfo { peer: Peer::Tcp(peer), secure: trusted }, CorrId::from_headers(request.headers()));
    let forward = Forward {
        conn: &conn,
        client: Some(peer.ip()),
        trusted,
        corr: &corr,
        remaining: Duration::from_secs(1),
        strip_prefix: "",
        body_len,
        has_body: false,
    };
    forward::request_head(request, &forward)
}

/// Takes out of a response what is not for the client.
pub fn clean_response(headers: &mut HeaderMap) {
    forward::clean_response(headers);
}

/// What a client is told whose bucket of this rate is empty for so long.
pub fn over_quota(per_second: u64, burst_factor: f64, wait: Duration) -> Option<Response<Body>> {
    let rate = Rate::new(per_second, burst_factor)?;
    Some(proxy::over_quota(Reason::QuotaTenant, "tenant", rate, wait).into_response(&CorrId::new()))
}
