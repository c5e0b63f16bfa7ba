//! The bridge: topics of the overlay for HTTP clients, at `/overlay/topics/{topic}`, admitted like everything else.
//!
//! Its two routes lead to upstreams without servers; what answers behind them is the overlay of this process or,
//! over OAP/1, that of another node.

mod peer;
mod session;

pub(crate) use peer::{CALLS, FEED, declare, start};

use crate::config::{AuthMode, GatewaySettings, RouteSettings, UpstreamSettings};
use http::Request;
use oap::NodeId;
use ron_kernel::admin::Answering;
use ron_kernel::http::Body;
use ron_kernel::key::PrivateKey;
use ron_kernel::problem::CorrId;
use ron_transport::tls::SetupError;
use ron_transport::{Dialer, Mode, PeerAddress, PeerTlsSettings, Tls};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How long a peer may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// What comes before a topic.
pub(crate) const PREFIX: &str = "/overlay/topics/";
const PUBLISH: &str = "node.overlay";
/// What stays open has permits of its own, so that it takes none from publications.
const FOLLOW: &str = "node.feeds";

/// Answers `POST` and `GET` of a topic.
pub type Topics = Arc<dyn Fn(String, Request<Body>, CorrId) -> Answering + Send + Sync>;

/// Whose topics they are.
#[derive(Clone)]
pub enum Bridge {
    /// Those of this process.
    Here(Topics),
    /// Those of a peer, which knows this node by its key.
    Peer { dialer: Dialer, peer: PeerAddress, node: NodeId },
}

impl Bridge {
    /// That of a peer, spoken to under the rules of the overlay's TLS. Blocks on file I/O.
    pub fn to(
        peer: PeerAddress,
        tls: &PeerTlsSettings,
        handshake_timeout: Duration,
        key: &PrivateKey,
        base: &Path,
    ) -> Result<Bridge, SetupError> {
        let tls = match tls.mode {
            Mode::Off => None,
            Mode::On => Some(Arc::new(Tls::load(tls, key, base)?)),
        };
        let dialer = Dialer { tls, connect_timeout: CONNECT_TIMEOUT, handshake_timeout };
        let node = NodeId::parse(&key.public().to_string()).expect("a key is written as nodes are");
        Ok(Bridge::Peer { dialer, peer, node })
    }
}

impl std::fmt::Debug for Bridge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Bridge::Here(_) => f.write_str("Here"),
            Bridge::Peer { peer, .. } => write!(f, "Peer({peer})"),
        }
    }
}

impl GatewaySettings {
    /// The settings with the routes of the bridge, if it is on. A route of the file with the same path goes before.
    pub(crate) fn bridged(&self) -> GatewaySettings {
        let mut settings = self.clone();
        let path = format!("{PREFIX}*");
        if !self.bridge.enabled
            || self.routes.iter().any(|route| route.hosts.is_empty() && route.path == path)
        {
            return settings;
        }
        // What stays open leaves most permits to what is answered at once.
        let ways = [("POST", PUBLISH, "overlay:publish", 4), ("GET", FOLLOW, "overlay:subscribe", 8)];
        for (method, upstream, scope, part) in ways {
            settings.upstreams.push(UpstreamSettings {
                name: upstream.to_owned(),
                max_inflight: (self.max_inflight / part).max(1),
                ..UpstreamSettings::default()
            });
            // Where nobody says who they are, nobody could have a scope; validation has seen who can come.
            let scopes = if self.auth.mode == AuthMode::None { Vec::new() } else { vec![scope.to_owned()] };
            settings.routes.push(RouteSettings {
                path: path.clone(),
                methods: vec![method.to_owned()],
                upstream: upstream.to_owned(),
                scopes,
                decode: true,
                ..RouteSettings::default()
            });
        }
        settings
    }
}
