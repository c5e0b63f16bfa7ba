//! Which request goes where: host first, then the longest path, then the method. Pure.

use crate::config::{RouteSettings, UpstreamSettings};
use http::Method;
use ron_kernel::config::Problems;
use ron_kernel::fnv::FnvMap;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

/// The routing table. Looking a path up costs one hash per segment that a route could have, however many there are.
#[derive(Debug, Default)]
pub struct Routes {
    /// By host name; the empty name is every host, `*.example.org` stands under `.example.org`.
    hosts: FnvMap<String, Paths>,
    /// Methods that some route names.
    named: HashSet<Method>,
}

#[derive(Debug, Default)]
struct Paths {
    exact: FnvMap<String, Vec<Candidate>>,
    /// By prefix without its `/*`; the empty prefix is `/*`.
    below: FnvMap<String, Vec<Candidate>>,
    /// Length of the longest such prefix: what is longer is not looked up, however many slashes a client sends.
    longest: usize,
}

/// A route of this host and path.
#[derive(Debug)]
struct Candidate {
    /// Its index in the settings.
    route: usize,
    /// Empty: every method.
    methods: Vec<Method>,
}

/// What became of a look-up.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// Index of the route in the settings.
    Route(usize),
    /// Routes lead here, but not with this method; these are allowed.
    Method(Vec<Method>),
    /// Every route names hosts, and none of them is this one.
    Host,
    Nothing,
}

/// Methods registered with IANA that a gateway can pass on: neither CONNECT nor PRI, which mean something to a
/// connection.
const METHODS: [&str; 37] = [
    "GET",
    "POST",
    "PUT",
    "HEAD",
    "DELETE",
    "PATCH",
    "OPTIONS",
    "TRACE",
    "ACL",
    "BASELINE-CONTROL",
    "BIND",
    "CHECKIN",
    "CHECKOUT",
    "COPY",
    "LABEL",
    "LINK",
    "LOCK",
    "MERGE",
    "MKACTIVITY",
    "MKCALENDAR",
    "MKCOL",
    "MKREDIRECTREF",
    "MKWORKSPACE",
    "MOVE",
    "ORDERPATCH",
    "PROPFIND",
    "PROPPATCH",
    "REBIND",
    "REPORT",
    "SEARCH",
    "UNBIND",
    "UNCHECKOUT",
    "UNLINK",
    "UNLOCK",
    "UPDATE",
    "UPDATEREDIRECTREF",
    "VERSION-CONTROL",
];

impl Routes {
    pub fn new(settings: &[RouteSettings]) -> Routes {
        let mut routes = Routes::default();
        for (index, route) in settings.iter().enumerate() {
            let methods = || route.methods.iter().filter_map(|m| Method::from_bytes(m.as_bytes()).ok());
            routes.named.extend(methods());
            for host in hosts_of(route) {
                let paths = routes.hosts.entry(host).or_default();
                let candidates = match route.path.strip_suffix("/*") {
                    Some(prefix) => {
                        paths.longest = paths.longest.max(prefix.len());
                        paths.below.entry(prefix.to_owned())
                    }
                    None => paths.exact.entry(route.path.clone()),
                };
                candidates.or_default().push(Candidate { route: index, methods: methods().collect() });
            }
        }
        routes
    }

    /// Whether a method is registered or some route names it.
    pub fn knows(&self, method: &Method) -> bool {
        METHODS.contains(&method.as_str()) || (self.named.contains(method) && method != Method::CONNECT)
    }

    /// Whether the host of a request matters at all.
    pub fn name_hosts(&self) -> bool {
        self.hosts.keys().any(|host| !host.is_empty())
    }

    /// Whether a route is for exactly this path, on any host.
    pub fn has_exact(&self, path: &str) -> bool {
        self.hosts.values().any(|paths| paths.exact.contains_key(path))
    }

    /// The route of a request. `host` is without its port and in lower case.
    pub fn find(&self, host: &str, path: &str, method: &Method) -> Found {
        let wildcard = host.find('.').map(|dot| &host[dot..]);
        let host = Some(host).filter(|host| !host.is_empty());
        let mut best = if self.hosts.is_empty() { Found::Nothing } else { Found::Host };
        for name in [host, wildcard, Some("")].into_iter().flatten() {
            let Some(paths) = self.hosts.get(name) else { continue };
            if best == Found::Host {
                best = Found::Nothing;
            }
            match paths.find(path, method) {
                Found::Route(route) => return Found::Route(route),
                // A less specific host may still take the request; if none does, this says why.
                Found::Method(allowed) if best == Found::Nothing => best = Found::Method(allowed),
                _ => {}
            }
        }
        best
    }

    /// Every problem of the routes, by key.
    pub fn check(routes: &[RouteSettings], upstreams: &[UpstreamSettings], problems: &mut Problems) {
        let mut seen: HashMap<(String, &str), Vec<usize>> = HashMap::new();
        for (index, route) in routes.iter().enumerate() {
            let at = format!("gateway.routes[{index}]");
            check_path(&route.path, &at, problems);
            if !upstreams.iter().any(|upstream| upstream.name == route.upstream) {
                let known: Vec<&str> = upstreams.iter().map(|upstream| upstream.name.as_str()).collect();
                let message =
                    format!("there is no upstream {:?}; known: {}", route.upstream, known.join(", "));
                problems.add(format!("{at}.upstream"), message);
            }
            for (number, host) in route.hosts.iter().enumerate() {
                let name = host.strip_prefix("*.").unwrap_or(host);
                let plain =
                    name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'));
                if name.is_empty() || !(plain || name.parse::<std::net::Ipv6Addr>().is_ok()) {
                    let advice =
                        "write a name without scheme or port, such as \"example.org\" or \"*.example.org\"";
                    problems.add(format!("{at}.hosts[{number}]"), format!("{host:?} is no host: {advice}"));
                }
            }
            for (method, text) in route.methods.iter().enumerate() {
                if text.to_ascii_uppercase() != *text || Method::from_bytes(text.as_bytes()).is_err() {
                    problems.add(
                        format!("{at}.methods[{method}]"),
                        format!("{text:?} is no method, such as \"GET\""),
                    );
                }
            }
            if !route.strip_prefix.is_empty() && !route.path.starts_with(&route.strip_prefix) {
                problems.add(format!("{at}.strip_prefix"), "is not the beginning of the route's path");
            }
            if route.timeout.is_some_and(|timeout| timeout.0.is_zero()) {
                problems.add(format!("{at}.timeout"), "must be more than 0");
            }
            for host in hosts_of(route) {
                let others = seen.entry((host, &route.path)).or_default();
                if let Some(other) = others.iter().find(|other| overlap(&routes[**other], route)) {
                    problems.add(
                        format!("{at}.path"),
                        format!("is taken by gateway.routes[{other}] for the same host and method"),
                    );
                }
                others.push(index);
            }
        }
    }
}

impl Paths {
    fn find(&self, path: &str, method: &Method) -> Found {
        let mut allowed = Vec::new();
        let exact = self.exact.get(path);
        let prefixes = std::iter::successors(Some(path), |path| path.rfind('/').map(|end| &path[..end]));
        let short = prefixes.skip_while(|prefix| prefix.len() > self.longest);
        let below = short.filter_map(|prefix| self.below.get(prefix));
        for candidates in exact.into_iter().chain(below) {
            for Candidate { route, methods } in candidates {
                if methods.is_empty() || methods.contains(method) {
                    return Found::Route(*route);
                }
                allowed.extend(methods.iter().cloned());
            }
            // The longest path decides: a shorter one does not take over what its methods refuse.
            if !allowed.is_empty() {
                return Found::Method(allowed);
            }
        }
        Found::Nothing
    }
}

fn hosts_of(route: &RouteSettings) -> Vec<String> {
    if route.hosts.is_empty() {
        return vec![String::new()];
    }
    let name = |host: &String| host.strip_prefix('*').unwrap_or(host).to_ascii_lowercase();
    route.hosts.iter().map(name).collect()
}

fn overlap(a: &RouteSettings, b: &RouteSettings) -> bool {
    a.methods.is_empty() || b.methods.is_empty() || a.methods.iter().any(|method| b.methods.contains(method))
}

pub(crate) fn check_path(path: &str, at: &str, problems: &mut Problems) {
    let body = path.strip_suffix("/*").unwrap_or(path);
    if !path.starts_with('/') {
        problems.add(format!("{at}.path"), format!("{path:?} does not begin with /"));
    } else if body.contains('*') || body.contains(['?', '#']) {
        problems.add(
            format!("{at}.path"),
            format!("{path:?} may hold a * only as its last segment, and no ? or #"),
        );
    } else if body.parse::<http::uri::PathAndQuery>().is_err() && !body.is_empty() {
        problems.add(
            format!("{at}.path"),
            format!("{path:?} holds characters that no path has; write them as %XX"),
        );
    } else if has_dot_segment(body) {
        problems.add(format!("{at}.path"), format!("{path:?} holds a dot segment"));
    }
}

/// The path with every escape of a character that needs none undone, so that `/%61` is found where `/a` is; `None`
/// if an escape is malformed.
pub fn plain(path: &str) -> Option<Cow<'_, str>> {
    if !path.contains('%') {
        return Some(Cow::Borrowed(path));
    }
    let mut out = String::with_capacity(path.len());
    let mut parts = path.split('%');
    out.push_str(parts.next()?);
    for part in parts {
        let hex = part.get(..2).filter(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
        let byte = u8::from_str_radix(hex, 16).ok()?;
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push('%');
            out.push_str(hex);
        }
        out.push_str(&part[2..]);
    }
    Some(Cow::Owned(out))
}

/// The bytes that a part of a path stands for. What is no escape stands for itself.
pub(crate) fn unescaped(text: &str) -> impl Iterator<Item = u8> {
    let mut rest = text.as_bytes();
    std::iter::from_fn(move || {
        let (first, after) = rest.split_first()?;
        let digits = after.get(..2).and_then(|hex| std::str::from_utf8(hex).ok()).filter(|_| *first == b'%');
        let byte = digits.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        rest = if byte.is_some() { &after[2..] } else { after };
        Some(byte.unwrap_or(*first))
    })
}

/// Whether a path could mean another one to the upstream: `.` or `..` as a segment, plain or encoded.
pub fn has_dot_segment(path: &str) -> bool {
    if !path.contains('.') && !path.contains('%') {
        return false;
    }
    let plain = path.to_ascii_lowercase().replace("%2e", ".").replace("%2f", "/").replace("%5c", "/");
    plain.split(['/', '\\']).any(|segment| segment == "." || segment == "..")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn route(path: &str, hosts: &[&str], methods: &[&str]) -> RouteSettings {
        let own = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
        RouteSettings {
            path: path.into(),
            hosts: own(hosts),
            methods: own(methods),
            upstream: "u".into(),
            ..RouteSettings::default()
        }
    }

    fn table() -> Routes {
        Routes::new(&[
            route("/*", &[], &[]),
            route("/api/*", &[], &[]),
            route("/api/v2/*", &[], &["GET"]),
            route("/api/exact", &[], &[]),
            route("/*", &["a.org"], &[]),
            route("/*", &["*.b.org"], &[]),
            route("/only/*", &["c.org"], &["POST"]),
        ])
    }

    #[test]
    fn the_longest_path_of_the_most_specific_host_wins() {
        let routes = table();
        let find = |host, path| routes.find(host, path, &Method::GET);
        assert_eq!(find("x", "/"), Found::Route(0));
        assert_eq!(find("x", "/apix"), Found::Route(0));
        assert_eq!(find("x", "/api"), Found::Route(1));
        assert_eq!(find("x", "/api/"), Found::Route(1));
        assert_eq!(find("x", "/api/v2/z"), Found::Route(2));
        assert_eq!(find("x", "/api/exact"), Found::Route(3));
        assert_eq!(find("x", "/api/exact/more"), Found::Route(1));
        assert_eq!(find("a.org", "/api/v2"), Found::Route(4));
        assert_eq!(find("w.b.org", "/api"), Found::Route(5));
        assert_eq!(find("b.org", "/q"), Found::Route(0));
    }

    #[test]
    fn a_method_that_is_not_allowed_is_told_apart_from_no_route() {
        let routes = table();
        assert_eq!(routes.find("x", "/api/v2/z", &Method::POST), Found::Method(vec![Method::GET]));
        assert_eq!(routes.find("c.org", "/only/z", &Method::POST), Found::Route(6));
        let none = Routes::new(&[route("/a", &[], &[])]);
        assert_eq!(none.find("x", "/b", &Method::GET), Found::Nothing);
    }

    #[test]
    fn a_host_that_no_route_is_for_is_told_apart_from_a_path() {
        let hosted = Routes::new(&[route("/a", &["a.org"], &[]), route("/b", &["*.b.org"], &["POST"])]);
        assert_eq!(hosted.find("c.org", "/a", &Method::GET), Found::Host);
        assert_eq!(hosted.find("a.org", "/b", &Method::GET), Found::Nothing);
        assert_eq!(hosted.find("x.b.org", "/b", &Method::GET), Found::Method(vec![Method::POST]));
        assert_eq!(hosted.find("b.org", "/b", &Method::POST), Found::Host);
        let any = Routes::new(&[route("/a", &["a.org"], &[]), route("/b", &[], &[])]);
        assert_eq!(
            any.find("c.org", "/a", &Method::GET),
            Found::Nothing,
            "the other route is for every host"
        );
        assert_eq!(Routes::new(&[]).find("c.org", "/", &Method::GET), Found::Nothing);
    }

    #[test]
    fn a_path_of_slashes_costs_no_more_than_another() {
        let (routes, path) = (table(), "/".repeat(8192));
        let begun = std::time::Instant::now();
        for _ in 0..200 {
            assert_eq!(routes.find("x", &path, &Method::GET), Found::Route(0));
        }
        // Every prefix hashed anew would be thirty million steps for each.
        assert!(begun.elapsed() < std::time::Duration::from_secs(3), "{:?}", begun.elapsed());
    }

    #[test]
    fn methods_are_known_if_registered_or_named() {
        let routes = Routes::new(&[route("/", &[], &["PURGE", "CONNECT"])]);
        let knows = |text: &str| routes.knows(&Method::from_bytes(text.as_bytes()).unwrap());
        for known in ["GET", "PATCH", "PROPFIND", "VERSION-CONTROL", "PURGE"] {
            assert!(knows(known), "{known}");
        }
        for unknown in ["get", "BREW", "PRI", "CONNECT"] {
            assert!(!knows(unknown), "{unknown}");
        }
    }

    #[test]
    fn routes_that_clash_or_lead_nowhere_are_problems() {
        let upstreams = [UpstreamSettings { name: "u".into(), ..UpstreamSettings::default() }];
        let mut bad = route("/x", &[], &[]);
        bad.upstream = "v".into();
        let list = [
            route("/a/*", &[], &["GET"]),
            route("/a/*", &[], &["POST"]),
            route("/a/*", &[], &[]),
            bad,
            route("b", &[], &[]),
            route("/c/*/d", &[], &[]),
            route("/d", &[], &["get"]),
            route("/e/../f", &[], &[]),
        ];
        let mut problems = Problems::default();
        Routes::check(&list, &upstreams, &mut problems);
        let paths: Vec<&str> = problems.list.iter().map(|problem| problem.path.as_str()).collect();
        assert_eq!(
            paths,
            [
                "gateway.routes[2].path",
                "gateway.routes[3].upstream",
                "gateway.routes[4].path",
                "gateway.routes[5].path",
                "gateway.routes[6].methods[0]",
                "gateway.routes[7].path",
            ]
        );
    }

    #[test]
    fn dot_segments_are_seen_through_their_disguises() {
        for bad in
            ["/a/../b", "/..", "/a/./b", "/%2e%2E/b", "/a/.%2e", "/a\\..\\b", "/a/..%2fb", "/a%5C..%5cb"]
        {
            assert!(has_dot_segment(bad), "{bad}");
        }
        for good in ["/a/b", "/a/...", "/.well-known/x", "/a..b", "/%2f"] {
            assert!(!has_dot_segment(good), "{good}");
        }
    }

    #[test]
    fn an_escape_that_is_not_needed_changes_nothing() {
        for (path, expected) in
            [("/%75pload", "/upload"), ("/a%2Fb", "/a%2Fb"), ("/%C3%A4", "/%C3%A4"), ("/%7e%41", "/~A")]
        {
            assert_eq!(plain(path).as_deref(), Some(expected));
        }
        for malformed in ["/%", "/%4", "/%zz", "/%%361", "/%+1"] {
            assert_eq!(plain(malformed), None, "{malformed}");
        }
    }

    proptest! {
        #[test]
        fn a_catch_all_catches_all_and_nothing_panics(path in "/[ -~]{0,60}", host in "[a-z.]{0,20}") {
            let found = table().find(&host, &path, &Method::GET);
            prop_assert!(matches!(found, Found::Route(_)));
        }
    }
}
