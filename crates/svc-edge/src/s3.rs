//! Objects in S3-compatible stores, without I/O: how they are named, where they are asked for, how that is signed, and
//! what a store's refusals mean.

mod credentials;
pub mod sign;

pub use credentials::{Credentials, NoCredentials};

use crate::config::S3Settings;
use crate::egress::{BadUrl, OriginUrl};
use http::header::InvalidHeaderValue;
use http::{HeaderMap, Method};
use sign::{Scope, Unsigned, encode, sign};
use std::path::Path;
use std::time::Duration;

const SCHEME: &str = "s3://";
/// The longest key that stores take, in bytes.
const KEY_MAX: usize = 1024;
const REGION_MAX: usize = 64;
/// The longest code of a refusal that is shown.
const CODE_MAX: usize = 64;

/// Whether a URL names an object of a store.
pub fn is_object(url: &str) -> bool {
    url.get(..SCHEME.len()).is_some_and(|scheme| scheme.eq_ignore_ascii_case(SCHEME))
}

/// Why an object cannot be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadObject {
    #[error("must be s3://BUCKET/KEY")]
    Form,
    #[error("has no bucket: 3 to 63 lower-case letters, digits, dots and hyphens between letters or digits")]
    Bucket,
    #[error("has no key: 1 to 1024 bytes without control characters, backslashes, empty or dot segments")]
    Key,
    #[error("is in a bucket that cannot stand in a host's name: set edge.s3.path_style = true")]
    Style,
    #[error("cannot be asked for: edge.s3.endpoint is no URL of a store: {0}")]
    Endpoint(BadUrl),
}

/// An object's name. The key is taken as it is written: nothing of it is decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectUrl {
    pub bucket: String,
    pub key: String,
}

impl ObjectUrl {
    pub fn parse(text: &str) -> Result<ObjectUrl, BadObject> {
        let rest = is_object(text).then(|| &text[SCHEME.len()..]).ok_or(BadObject::Form)?;
        let (bucket, key) = rest.split_once('/').ok_or(BadObject::Form)?;
        let end = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        let plain =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'-');
        let bytes = bucket.as_bytes();
        let good = (3..=63).contains(&bytes.len()) && bucket.bytes().all(plain);
        if !good || !end(bytes.first()) || !end(bytes.last()) || bucket.contains("..") {
            return Err(BadObject::Bucket);
        }
        let segment = |part: &str| !matches!(part, "" | "." | "..");
        let good = (1..=KEY_MAX).contains(&key.len()) && key.split('/').all(segment);
        if !good || key.chars().any(|char| char.is_control() || char == '\\') {
            return Err(BadObject::Key);
        }
        Ok(ObjectUrl { bucket: bucket.to_owned(), key: key.to_owned() })
    }

    /// The URL at which it is asked for.
    pub fn locate(&self, settings: &S3Settings) -> Result<String, BadObject> {
        let OriginUrl { authority, path } = settings.place().map_err(BadObject::Endpoint)?;
        let (scheme, field) = (if authority.secure { "https" } else { "http" }, authority.host_field());
        let (base, key) = (path.trim_end_matches('/'), encode(&self.key, true));
        if settings.path_style {
            return Ok(format!("{scheme}://{field}{base}/{}/{key}", self.bucket));
        }
        let named =
            authority.host.bytes().any(|byte| byte.is_ascii_alphabetic()) && !authority.host.starts_with('[');
        // A certificate for any name below a host's covers one label of it.
        if !named || self.bucket.contains('.') {
            return Err(BadObject::Style);
        }
        Ok(format!("{scheme}://{}.{field}{base}/{key}", self.bucket))
    }
}

impl S3Settings {
    /// Where the store is.
    pub(crate) fn place(&self) -> Result<OriginUrl, BadUrl> {
        match self.endpoint.as_str() {
            "" => OriginUrl::parse(&format!("https://s3.{}.amazonaws.com", self.region), false),
            endpoint => OriginUrl::parse(endpoint, self.allow_http),
        }
    }

    /// Whether the region can be one; it stands in what is signed, and in a host's name.
    pub(crate) fn has_region(&self) -> bool {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        (1..=REGION_MAX).contains(&self.region.len()) && self.region.bytes().all(plain)
    }
}

/// A store, and who asks it.
#[derive(Debug, PartialEq)]
pub struct Store {
    pub settings: S3Settings,
    credentials: Credentials,
}

impl Store {
    /// Reads the keys. Blocks.
    pub fn load(settings: &S3Settings, base: &Path) -> Result<Store, NoCredentials> {
        let credentials = Credentials::load(&settings.credentials_file, base)?;
        Ok(Store { settings: settings.clone(), credentials })
    }

    /// Signs a request to a host for a path, whose body has this SHA-256.
    pub fn sign(
        &self,
        method: &Method,
        (host, target): (&str, &str),
        headers: &mut HeaderMap,
        payload: [u8; 32],
        now: Duration,
    ) -> Result<(), InvalidHeaderValue> {
        let request = Unsigned { method, host, target, payload };
        let scope = Scope { region: &self.settings.region, service: "s3" };
        sign(request, headers, &self.credentials, scope, now)
    }
}

/// What a store means by an answer that is none, and what to do about it.
pub fn refusal(status: u16, body: &[u8]) -> String {
    let code = code(body);
    let shown = code.as_deref().map_or_else(|| status.to_string(), |code| format!("{status} {code}"));
    let advice = match (status, code.as_deref().unwrap_or_default()) {
        (_, "RequestTimeTooSkewed") => "this machine's clock is wrong, or the store's is: set it",
        (_, "InvalidAccessKeyId" | "SignatureDoesNotMatch" | "InvalidToken") => {
            "it does not know these keys: see edge.s3.credentials_file, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        }
        (_, "ExpiredToken") => "the keys have expired: renew edge.s3.credentials_file, or AWS_SESSION_TOKEN",
        (_, "NoSuchBucket") => "it has no such bucket",
        (_, "AuthorizationHeaderMalformed" | "PermanentRedirect") | (301 | 307 | 308, _) => {
            "the bucket is elsewhere: see edge.s3.region and edge.s3.endpoint"
        }
        (403, _) => {
            "these keys may not do that; what is missing looks the same to keys that may not list the bucket"
        }
        (404, _) => "it has no such key",
        _ => return format!("the store answered {shown}"),
    };
    format!("the store answered {shown}: {advice}")
}

/// The code in the document that comes with a refusal; only what looks like one.
fn code(body: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(body);
    let (_, rest) = text.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    let good = (1..=CODE_MAX).contains(&code.len()) && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    good.then(|| code.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn settings(endpoint: &str, path_style: bool) -> S3Settings {
        S3Settings { endpoint: endpoint.to_owned(), path_style, ..S3Settings::default() }
    }

    #[test]
    fn an_object_is_asked_for_under_its_bucket_or_at_its_bucket_s_host() {
        let check = |url: &str, endpoint: &str, path_style: bool, expected: Result<&str, BadObject>| {
            let found =
                ObjectUrl::parse(url).and_then(|object| object.locate(&settings(endpoint, path_style)));
            assert_eq!(found.as_deref(), expected.as_ref().map(|url| *url), "{url} {endpoint}");
        };
        let amazon = "https://s3.us-east-1.amazonaws.com/tiles/planet.pmtiles";
        check("s3://tiles/planet.pmtiles", "", true, Ok(amazon));
        check("S3://tiles/a", "", false, Ok("https://tiles.s3.us-east-1.amazonaws.com/a"));
        check(
            "s3://tiles/a b/c%d+é",
            "https://m.org:9000/s3/",
            true,
            Ok("https://m.org:9000/s3/tiles/a%20b/c%25d%2B%C3%A9"),
        );
        check("s3://tiles/a", "https://m.org:9000/s3", false, Ok("https://tiles.m.org:9000/s3/a"));
        check("s3://my.tiles/a", "https://m.org", true, Ok("https://m.org/my.tiles/a"));
        check("s3://my.tiles/a", "https://m.org", false, Err(BadObject::Style));
        check("s3://tiles/a", "https://127.0.0.1", false, Err(BadObject::Style));
        check("s3://tiles/a", "https://[::1]:9000", false, Err(BadObject::Style));
        check("s3://tiles/a", "http://m.org", true, Err(BadObject::Endpoint(BadUrl::Scheme)));
        check("s3://tiles/a", "https://u@m.org", true, Err(BadObject::Endpoint(BadUrl::User)));
        let open = S3Settings { allow_http: true, ..settings("http://m.org", true) };
        assert_eq!(ObjectUrl::parse("s3://tiles/a").unwrap().locate(&open).unwrap(), "http://m.org/tiles/a");
    }

    #[test]
    fn what_is_no_object_is_refused() {
        let check =
            |url: &str, expected: BadObject| assert_eq!(ObjectUrl::parse(url), Err(expected), "{url}");
        for url in ["", "s3:", "s3:/tiles/a", "https://tiles/a", "s3://tiles", "\u{e9}\u{e9}\u{e9}"] {
            check(url, BadObject::Form);
        }
        for bucket in
            ["", "ab", "Tiles", "-tiles", "tiles.", "ti..les", "ti_les", "ti@les", "ti:les", &"a".repeat(64)]
        {
            check(&format!("s3://{bucket}/a"), BadObject::Bucket);
        }
        for key in ["", "/a", "a//b", "a/", ".", "a/../b", "a/./b", "a\\b", "a\nb", &"a".repeat(1025)] {
            check(&format!("s3://tiles/{key}"), BadObject::Key);
        }
    }

    proptest! {
        /// Whatever a key is: the URL made of it is read as that bucket's path, and no key leads to another's place.
        #[test]
        fn every_key_has_a_place_of_its_own(key in "\\PC{1,30}", other in "\\PC{1,30}") {
            let place = |key: &str| ObjectUrl::parse(&format!("s3://tiles/{key}")).ok()?.locate(&settings("https://m.org", true)).ok();
            if let Some(url) = place(&key) {
                let read = OriginUrl::parse(&url, false).unwrap();
                prop_assert!(read.path.starts_with("/tiles/"), "{}", read.path);
                prop_assert_eq!(place(&other) == Some(url), key == other);
            }
        }
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        let check = |status: u16, code: &str, expected: &str| {
            let body =
                format!("<?xml version=\"1.0\"?>\n<Error><Code>{code}</Code><Message>no</Message></Error>");
            let text = refusal(status, body.as_bytes());
            assert!(text.contains(expected), "{text}");
        };
        check(403, "RequestTimeTooSkewed", "clock");
        check(403, "SignatureDoesNotMatch", "403 SignatureDoesNotMatch: it does not know these keys");
        check(403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID");
        check(400, "ExpiredToken", "expired");
        check(403, "AccessDenied", "may not do that");
        check(404, "NoSuchBucket", "no such bucket");
        check(404, "NoSuchKey", "no such key");
        check(301, "PermanentRedirect", "region");
        check(500, "InternalError", "500 InternalError");
        check(500, "<script>", "the store answered 500");
        assert!(!refusal(500, b"<Code><script></Code>").contains("script"));
        assert_eq!(refusal(403, b"").split(':').next(), Some("the store answered 403"));
    }
}
