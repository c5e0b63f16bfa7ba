//! Doors for the fuzz targets and for measurements: parts of the gateway, asked for with plain types.

use crate::auth::{self, Auth};
use crate::config::{AuthMode, GatewaySettings, RouteAuth, RouteSettings};
use crate::forward::{self, Forward};
use crate::proxy::{Quota, over_quota};
use crate::tenants::{From, Tenants};
use bytes::BytesMut;
use http::header::HeaderMap;
use http::{Request, Response, StatusCode, Version};
use ron_kernel::admission::bucket::Rate;
use ron_kernel::http::client::Outgoing as _;
use ron_kernel::http::{Body, ConnInfo, Fields, Lines, Peer, Written};
use ron_kernel::kernel::Kernel;
use ron_kernel::problem::CorrId;
use ron_kernel::token::Verifier;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
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

/// Who may call under these settings.
#[derive(Debug)]
pub struct Callers {
    tenants: Tenants,
    /// Asks who is calling, unless the settings have nobody say so.
    route: RouteSettings,
}

impl Callers {
    /// Reads the files that the settings name.
    pub fn new(settings: &GatewaySettings, base: &Path, verifier: &Verifier) -> Result<Callers, String> {
        let service = Kernel::new().service("gateway");
        let auth = Auth::load(&service, &settings.auth, base, verifier, None).map_err(|(_, error)| error)?;
        let served = service.metrics().family("fq_served_cost_total", "", ["tenant"]);
        let nobody = settings.auth.mode == AuthMode::None;
        let asks = if nobody { RouteAuth::None } else { RouteAuth::Required };
        let route = RouteSettings { auth: asks, ..RouteSettings::default() };
        Ok(Callers { tenants: Tenants::new(settings, auth, None, &served), route })
    }

    /// Whether these fields say who is calling, at this second.
    pub fn knows(&self, headers: &HeaderMap, now: u64) -> bool {
        let client = Some(Ipv4Addr::LOCALHOST.into());
        let from = From { client, method: "GET", path: "/", now, ..From::default() };
        self.tenants.caller(headers, &self.route, from).is_ok()
    }
}

/// Whether a text passes as a JWT that this set of keys signed, at second 0.
pub fn jwt(set: &[u8], token: &str) -> bool {
    auth::is_signed(set, token)
}
