//! Doors for the fuzz targets: what the gateway writes, asked for with plain types.

use crate::auth;
use crate::forward::{self, Forward};
use crate::proxy::{Quota, over_quota};
use bytes::BytesMut;
use http::header::HeaderMap;
use http::{Request, Response, StatusCode, Version};
use ron_kernel::admission::bucket::Rate;
use ron_kernel::http::client::Outgoing as _;
use ron_kernel::http::{Body, ConnInfo, Fields, Lines, Peer, Written};
use ron_kernel::problem::CorrId;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The head that the upstream gets of a request from `peer`.
pub fn upstream_head(
    request: Request<Body>,
    peer: SocketAddr,
    trusted: bool,
    body_len: Option<u64>,
) -> BytesMut {
    let (conn, corr) = (ConnInfo::new(Peer::Tcp(peer), trusted), CorrId::from_headers(request.headers()));
    let forward = Forward {
        request: &request.into_parts().0,
        conn: &conn,
        trusted,
        corr: &corr,
        told: Some(Instant::now() + Duration::from_secs(1)),
        strip_prefix: "",
        body_len,
        upgrade: None,
        upload: None,
        retries: None,
    };
    let mut out = BytesMut::new();
    forward.write_http1(&mut out);
    out
}

/// The fields of a response for a client: as a map, and as lines.
pub fn client_fields(lines: &Lines, status: StatusCode, version: Version) -> (HeaderMap, Written) {
    let corr = CorrId::new();
    let written = forward::write_response(lines, status, version, &corr);
    (forward::response_map(Fields::Lines(lines.clone()), status, version, &corr), written)
}

/// What a client is told whose bucket of this rate is empty for so long.
pub fn refusal(per_second: u64, burst_factor: f64, wait: Duration) -> Option<Response<Body>> {
    let rate = Rate::new(per_second, burst_factor)?;
    Some(over_quota(Quota::Tenant(0), rate, wait).into_response(&CorrId::new()))
}

/// Whether a text passes as a JWT that this set of keys signed, at second 0.
pub fn jwt(set: &[u8], token: &str) -> bool {
    auth::is_signed(set, token)
}
