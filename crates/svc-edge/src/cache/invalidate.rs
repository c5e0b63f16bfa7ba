//! What makes stored responses unusable: unsafe requests (RFC 9111 section 4.4) and purges.

use super::list::members;
use http::header::{CONTENT_LOCATION, LOCATION};
use http::uri::{Authority, Scheme};
use http::{HeaderMap, HeaderName, Method, StatusCode, Uri};

pub const SURROGATE_KEY: HeaderName = HeaderName::from_static("surrogate-key");
pub const CACHE_TAG: HeaderName = HeaderName::from_static("cache-tag");

/// Paths with queries, at the target's origin, whose stored responses are invalid after an exchange: the target
/// itself, and where `Location` and `Content-Location` point. `target` is absolute.
pub fn invalidated(
    method: &Method,
    target: &Uri,
    (status, response): (StatusCode, &HeaderMap),
) -> Vec<String> {
    // A method that nobody knows may change anything; an error changes nothing.
    if method.is_safe() || !(status.is_success() || status.is_redirection()) {
        return Vec::new();
    }
    let mut paths = vec![path_of(target)];
    for name in [LOCATION, CONTENT_LOCATION] {
        let reference = response.get(name).and_then(|value| value.to_str().ok());
        let path = reference.and_then(|reference| same_origin(target, reference));
        paths.extend(path.filter(|path| !paths.contains(path)));
    }
    paths
}

pub(super) fn path_of(uri: &Uri) -> String {
    uri.path_and_query().map_or("/", |it| it.as_str()).to_owned()
}

/// The path and query that a reference (RFC 3986 section 4.1) means, if it stays at the origin of its base.
pub(super) fn same_origin(base: &Uri, reference: &str) -> Option<String> {
    let reference = reference.split('#').next().unwrap_or_default();
    let path = match reference.find([':', '/', '?']).map(|at| &reference[at..]) {
        Some(rest) if rest.starts_with(':') => return absolute(base, reference),
        _ if reference.starts_with("//") => {
            return absolute(base, &format!("{}:{reference}", base.scheme_str()?));
        }
        _ if reference.is_empty() => return Some(path_of(base)),
        _ if reference.starts_with('/') => reference.to_owned(),
        _ if reference.starts_with('?') => format!("{}{reference}", base.path()),
        _ => format!("{}/{reference}", base.path().rsplit_once('/').map_or("", |(folder, _)| folder)),
    };
    let (path, query) = path.split_once('?').map_or((&*path, None), |(path, query)| (path, Some(query)));
    let path = without_dots(path);
    Some(query.map_or(path.clone(), |query| format!("{path}?{query}")))
}

fn absolute(base: &Uri, reference: &str) -> Option<String> {
    let uri: Uri = reference.parse().ok()?;
    let origin = |uri: &Uri| {
        let (scheme, authority) = (uri.scheme()?.clone(), uri.authority()?.clone());
        let default = if scheme == Scheme::HTTPS { 443 } else { 80 };
        let port = authority.port_u16().unwrap_or(default);
        Some((scheme, Authority::host(&authority).to_ascii_lowercase(), port))
    };
    if origin(base)? != origin(&uri)? {
        return None;
    }
    let path = without_dots(uri.path());
    Some(uri.query().map_or(path.clone(), |query| format!("{path}?{query}")))
}

/// RFC 3986 section 5.2.4, of a path that begins with a slash.
pub fn without_dots(path: &str) -> String {
    let mut out: Vec<&str> = Vec::new();
    let mut segments = path.split('/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        let last = segments.peek().is_none();
        match segment {
            "." | ".." => {
                if segment == ".." {
                    out.pop();
                }
                if last {
                    out.push("");
                }
            }
            segment => out.push(segment),
        }
    }
    format!("/{}", out.join("/"))
}

/// What an operator wants removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Purge {
    /// One path; with a query that one alone, without one whatever the query.
    Path(String),
    /// Everything whose path and query begin so.
    Prefix(String),
    /// Everything that names this key in `Surrogate-Key` or `Cache-Tag`.
    Key(String),
}

impl Purge {
    /// Whether a stored response with this path and query, and these fields, is meant.
    pub fn concerns(&self, path_and_query: &str, response: &HeaderMap) -> bool {
        match self {
            Self::Path(path) if path.contains('?') => path == path_and_query,
            Self::Path(path) => path_and_query.split('?').next() == Some(path),
            Self::Prefix(prefix) => path_and_query.starts_with(&**prefix),
            Self::Key(key) => surrogate_keys(response).any(|known| known == key.as_bytes()),
        }
    }
}

/// Keys of one response, and bytes of each: what has more cannot be purged by all of them, and is not stored.
pub(crate) const KEYS_MAX: usize = 256;
pub(crate) const KEY_MAX: usize = 1024;

/// The keys under which a response can be purged; none if they are too many, too long or no text.
pub(crate) fn purge_keys(response: &HeaderMap) -> Option<Vec<String>> {
    let text =
        |key: &[u8]| Some(std::str::from_utf8(key).ok().filter(|key| key.len() <= KEY_MAX)?.to_owned());
    let keys = surrogate_keys(response).take(KEYS_MAX + 1).map(text).collect::<Option<Vec<_>>>()?;
    (keys.len() <= KEYS_MAX).then_some(keys)
}

/// The keys under which an origin wants to purge a response: words of `Surrogate-Key`, members of `Cache-Tag`.
pub fn surrogate_keys(response: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let words = response.get_all(SURROGATE_KEY).iter();
    let words = words.flat_map(|line| line.as_bytes().split(|byte| matches!(byte, b' ' | b'\t')));
    let tags = response.get_all(CACHE_TAG).iter().flat_map(|line| members(line.as_bytes()));
    words.chain(tags).filter(|key| !key.is_empty())
}
