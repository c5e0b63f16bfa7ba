//! `ron up` on one port: what its gateway leads to besides what the file says.

use crate::config::Config;
use ron_kernel::config::{Loaded, Problems};
use ron_kernel::units::Span;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use svc_gateway::config::{
    AuthMode, BreakerSettings, GatewaySettings, RetrySettings, RouteAuth, RouteSettings, TellDeadline,
    UpstreamSettings,
};

const EDGE: &str = "node.edge";
const REGISTRY: &str = "node.registry";
/// What stays open has permits of its own, so that it takes none from requests that are answered at once.
const STREAMS: &str = "node.streams";

/// The longest that an upload may take; it is ended sooner if it does not move.
const UPLOAD: Span = Span::secs(24 * 3600);
/// The longest that the registry lets a client wait for news or for a checkpoint, and some time to answer.
const LONG_POLL: Span = Span::secs(360);

/// Where the node's own services are to be reached.
#[derive(Clone, Copy, Debug, Default)]
pub struct Front {
    edge: Option<SocketAddr>,
    registry: Option<SocketAddr>,
    /// Whether topics of the overlay are bridged though nothing says so.
    bridge: bool,
}

impl Front {
    /// As the configuration has it. Which port a 0 stands for is known later.
    pub fn planned(loaded: &Loaded<Config>) -> Front {
        let config = &loaded.value;
        let said = loaded.origins.contains_key("gateway.bridge.enabled");
        Front {
            bridge: config.overlay.enabled && !said && may_bridge(config),
            edge: config.edge.enabled.then(|| reachable(config.edge.listen)),
            registry: config.registry.enabled.then(|| reachable(config.registry.listen)),
        }
    }

    /// As they have been bound: scheme and address of each of their listeners.
    pub(crate) fn bound(self, edge: &[(&str, String)], registry: &[(&str, String)]) -> Front {
        let plain = |listeners: &[(&str, String)]| {
            let (_, address) = listeners.iter().find(|(scheme, _)| *scheme == "http")?;
            address.parse().ok().map(reachable)
        };
        Front {
            edge: self.edge.and_then(|_| plain(edge)),
            registry: self.registry.and_then(|_| plain(registry)),
            ..self
        }
    }

    /// Whether the gateway leads anywhere by itself.
    pub(crate) fn leads(&self, config: &Config) -> bool {
        config.gateway.front && config.gateway.enabled && (self.edge.is_some() || self.registry.is_some())
    }

    /// The configuration with the gateway in front of the others, which trust it.
    pub fn applied(&self, config: &Config) -> Config {
        let mut config = config.clone();
        if !(config.gateway.front && config.gateway.enabled) {
            return config;
        }
        config.gateway.bridge.enabled |= self.bridge;
        let inflight = config.gateway.max_inflight;
        let mut routes = Vec::new();
        if let Some(at) = self.edge {
            trust(&mut config.edge.ingress.trusted_proxies, at.ip());
            config.gateway.upstreams.push(upstream(EDGE, at, inflight / 2));
            let (body, object) = (config.edge.ingress.body_bytes, config.edge.cas.max_put_bytes);
            let others = ["GET", "HEAD", "OPTIONS", "POST", "DELETE"];
            let route = RouteSettings { max_body_bytes: Some(body), ..route("/edge/*", EDGE, &others) };
            routes.push(route.clone());
            let methods = vec!["PUT".to_owned()];
            let (max_body_bytes, timeout) = (Some(object), Some(UPLOAD));
            routes.push(RouteSettings { methods, max_body_bytes, timeout, ..route });
        }
        if let Some(at) = self.registry {
            trust(&mut config.registry.limits.trusted_proxies, at.ip());
            config.gateway.upstreams.push(upstream(REGISTRY, at, inflight / 4));
            config.gateway.upstreams.push(upstream(STREAMS, at, inflight / 8));
            let max_body_bytes = Some(config.registry.limits.max_body_bytes);
            let paths = [("/registry/*", REGISTRY), ("/registry/stream", STREAMS), ("/registry/ws", STREAMS)];
            for (path, upstream) in
                paths.into_iter().chain([("/checkpoint", REGISTRY), ("/tile/*", REGISTRY)])
            {
                let timeout = Some(LONG_POLL);
                routes.push(RouteSettings { timeout, max_body_bytes, ..route(path, upstream, &[]) });
            }
        }
        let own = &config.gateway;
        let taken = |path: &str| {
            own.routes.iter().any(|route| route.hosts.is_empty() && route.path == path)
                || own.views.iter().any(|view| view.path == path)
        };
        routes.retain(|route| !taken(&route.path));
        config.gateway.routes.extend(routes);
        config
    }
}

/// What of the file does not go together with the gateway in front.
pub(crate) fn check(config: &Config, problems: &mut Problems) {
    let gateway = &config.gateway;
    if gateway.bridge.enabled && !may_bridge(config) {
        problems.add(
            "gateway.bridge.enabled",
            "is on, gateway.auth.mode is \"none\", and others than this machine may come: anybody could publish; \
             ask for credentials, or set node.danger_ok = true if that is meant",
        );
    }
    let plain = config.overlay.tls.mode.as_str() == "off" && !config.node.danger_ok;
    if plain
        && gateway.bridge.enabled
        && let Ok(Some(peer)) = gateway.bridge.peer()
        && !peer.at.is_local()
    {
        problems.add(
            "gateway.bridge.peer",
            "is on another machine, and overlay.tls.mode is \"off\": anybody on the way could read and write; \
             turn it on, or set node.danger_ok = true if that is meant",
        );
    }
    if !(gateway.front && gateway.enabled) {
        return;
    }
    for (index, upstream) in gateway.upstreams.iter().enumerate() {
        if [EDGE, REGISTRY, STREAMS].contains(&upstream.name.as_str()) {
            let message = format!(
                "{:?} is what `ron up` calls a service of the node: choose another name, or set gateway.front = false",
                upstream.name
            );
            problems.add(format!("gateway.upstreams[{index}].name"), message);
        }
    }
    let open = config.registry.enabled && config.registry.auth == svc_registry::config::Auth::Open;
    if open && is_public(gateway) && !config.node.danger_ok {
        problems.add(
            "registry.auth",
            "is \"open\", and the gateway leads to it from an address that is not loopback: anybody could write; \
             set gateway.front = false, or node.danger_ok = true if that is meant",
        );
    }
}

/// Whether nobody comes to the overlay who may not.
fn may_bridge(config: &Config) -> bool {
    config.gateway.auth.mode != AuthMode::None || !is_public(&config.gateway) || config.node.danger_ok
}

/// Whether others than this machine may reach the gateway.
fn is_public(gateway: &GatewaySettings) -> bool {
    let mut listens = std::iter::once(gateway.listen).chain(gateway.tls.iter().map(|tls| tls.listen));
    listens.any(|listen| !listen.ip().is_loopback())
}

/// The address that a listener on this machine is reached at from this machine.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

/// Whoever calls an address of this machine calls from it.
fn trust(proxies: &mut Vec<String>, gateway: IpAddr) {
    let gateway = gateway.to_string();
    if !proxies.contains(&gateway) {
        proxies.push(gateway);
    }
}

fn upstream(name: &str, at: SocketAddr, inflight: usize) -> UpstreamSettings {
    UpstreamSettings {
        name: name.to_owned(),
        servers: vec![format!("http://{at}")],
        max_inflight: inflight.max(1),
        // What it refuses or cannot get from its own origins it has tried itself, and says nothing of the rest.
        retry: RetrySettings { tries: 1, ..RetrySettings::default() },
        breaker: BreakerSettings { failures: 0, ..BreakerSettings::default() },
        ..UpstreamSettings::default()
    }
}

fn route(path: &str, upstream: &str, methods: &[&str]) -> RouteSettings {
    RouteSettings {
        path: path.to_owned(),
        upstream: upstream.to_owned(),
        methods: methods.iter().map(|method| (*method).to_owned()).collect(),
        // The service looks at the capability itself; for the gateway it would be somebody else's.
        auth: RouteAuth::None,
        // It has deadlines of its own, and would hold whole downloads and streams to the gateway's.
        tell_deadline: TellDeadline::Client,
        ..RouteSettings::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use svc_gateway::config::ViewSettings;

    fn loaded(config: &Config) -> Loaded<Config> {
        Loaded { value: config.clone(), origins: BTreeMap::new(), file: None }
    }

    fn paths(config: &Config) -> Vec<&str> {
        config.gateway.routes.iter().map(|route| route.path.as_str()).collect()
    }

    #[test]
    fn every_path_of_the_services_leads_to_them_and_they_trust_the_gateway() {
        let mut config = Config::default();
        config.edge.listen = "0.0.0.0:81".parse().unwrap();
        config.registry.listen = "[::1]:82".parse().unwrap();
        config.gateway.max_inflight = 2;
        let applied = Front::planned(&loaded(&config)).applied(&config);
        let all = [
            "/edge/*",
            "/edge/*",
            "/registry/*",
            "/registry/stream",
            "/registry/ws",
            "/checkpoint",
            "/tile/*",
        ];
        assert_eq!(paths(&applied), all);
        let upstreams: Vec<_> =
            applied.gateway.upstreams.iter().map(|one| (&one.servers[0][..], one.max_inflight)).collect();
        assert_eq!(upstreams, [("http://127.0.0.1:81", 1), ("http://[::1]:82", 1), ("http://[::1]:82", 1)]);
        assert_eq!(applied.edge.ingress.trusted_proxies, ["127.0.0.1"]);
        assert_eq!(applied.registry.limits.trusted_proxies, ["::1"]);
        let mut problems = Problems::default();
        applied.gateway.validate(&mut problems);
        assert!(problems.is_empty(), "{problems}");
        let bound = Front::planned(&loaded(&config)).bound(&[("http", "0.0.0.0:4711".to_owned())], &[]);
        let applied = bound.applied(&config);
        assert_eq!(applied.gateway.upstreams[0].servers, ["http://127.0.0.1:4711"]);
        assert_eq!(applied.gateway.upstreams.len(), 1, "the registry does not run");
    }

    #[test]
    fn what_the_file_says_goes_before() {
        let mut config = Config::default();
        let named = |path: &str| RouteSettings { path: path.to_owned(), ..RouteSettings::default() };
        config.gateway.routes =
            vec![named("/edge/*"), RouteSettings { hosts: vec!["a.org".into()], ..named("/tile/*") }];
        config.gateway.views =
            vec![ViewSettings { path: "/checkpoint".to_owned(), ..ViewSettings::default() }];
        let applied = Front::planned(&loaded(&config)).applied(&config);
        assert_eq!(
            paths(&applied),
            ["/edge/*", "/tile/*", "/registry/*", "/registry/stream", "/registry/ws", "/tile/*"]
        );
        config.gateway.front = false;
        assert!(Front::planned(&loaded(&config)).applied(&config) == config);
        config.gateway.front = true;
        config.gateway.enabled = false;
        assert!(Front::planned(&loaded(&config)).applied(&config) == config, "nobody is in front");
    }

    #[test]
    fn a_clash_of_names_and_a_registry_that_anybody_could_write_are_problems() {
        let mut config = Config::default();
        let find = |config: &Config| {
            let mut problems = Problems::default();
            check(config, &mut problems);
            problems.list.into_iter().map(|problem| problem.path).collect::<Vec<_>>()
        };
        config.registry.auth = svc_registry::config::Auth::Open;
        assert_eq!(find(&config), Vec::<String>::new());
        config.gateway.listen = "0.0.0.0:80".parse().unwrap();
        config.gateway.upstreams =
            vec![UpstreamSettings { name: EDGE.to_owned(), ..UpstreamSettings::default() }];
        assert_eq!(find(&config), ["gateway.upstreams[0].name", "registry.auth"]);
        config.gateway.front = false;
        assert_eq!(find(&config), Vec::<String>::new());
    }
}
