//! Signatures of requests, by version 4 of Amazon's scheme, without I/O: the caller says what time it is.
//!
//! What is signed is the request as the server will see it, reduced to one form; the key is one for a day, a region
//! and a service, made from the secret by a chain of HMACs.

use super::credentials::Credentials;
use aws_lc_rs::hmac;
use http::Method;
use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use ron_kernel::date::timestamp;
use sha2::{Digest as _, Sha256};
use std::fmt::Write as _;
use std::time::Duration;

const ALGORITHM: &str = "AWS4-HMAC-SHA256";
const DATE: HeaderName = HeaderName::from_static("x-amz-date");
const CONTENT_SHA256: HeaderName = HeaderName::from_static("x-amz-content-sha256");
const SECURITY_TOKEN: HeaderName = HeaderName::from_static("x-amz-security-token");
/// The SHA-256 of nothing.
pub const EMPTY: [u8; 32] = [
    0xe3, 0xb0, 0xc4, 0x42, 0x98, 0xfc, 0x1c, 0x14, 0x9a, 0xfb, 0xf4, 0xc8, 0x99, 0x6f, 0xb9, 0x24, 0x27,
    0xae, 0x41, 0xe4, 0x64, 0x9b, 0x93, 0x4c, 0xa4, 0x95, 0x99, 0x1b, 0x78, 0x52, 0xb8, 0x55,
];

/// For whom a signature holds.
#[derive(Clone, Copy, Debug)]
pub struct Scope<'a> {
    pub region: &'a str,
    pub service: &'a str,
}

/// A request, but for its fields.
#[derive(Clone, Copy, Debug)]
pub struct Unsigned<'a> {
    pub method: &'a Method,
    /// As `Host` has it.
    pub host: &'a str,
    /// Path and query as they are sent, encoded already: by [`encode`], names of the query in order.
    pub target: &'a str,
    /// The SHA-256 of its body.
    pub payload: [u8; 32],
}

/// Adds the fields that make a request of an object store a signed one; those that are there already are signed too.
pub fn sign(
    request: Unsigned<'_>,
    headers: &mut HeaderMap,
    credentials: &Credentials,
    scope: Scope<'_>,
    now: Duration,
) -> Result<(), http::header::InvalidHeaderValue> {
    let at = moment(now);
    headers.insert(DATE, HeaderValue::try_from(&at)?);
    headers.insert(CONTENT_SHA256, HeaderValue::try_from(hex(&request.payload))?);
    if let Some(token) = &credentials.session_token {
        let mut token = HeaderValue::try_from(token)?;
        token.set_sensitive(true);
        headers.insert(SECURITY_TOKEN, token);
    }
    let mut value = HeaderValue::try_from(authorization(request, headers, credentials, scope, &at))?;
    value.set_sensitive(true);
    headers.insert(AUTHORIZATION, value);
    Ok(())
}

/// The value of `Authorization`.
fn authorization(
    request: Unsigned<'_>,
    headers: &HeaderMap,
    credentials: &Credentials,
    Scope { region, service }: Scope<'_>,
    at: &str,
) -> String {
    let (canonical, signed) = canonical(request, headers);
    let day = at.get(..8).unwrap_or_default();
    let scope = format!("{day}/{region}/{service}/aws4_request");
    let text = format!("{ALGORITHM}\n{at}\n{scope}\n{}", hex(&Sha256::digest(canonical)));
    let first = format!("AWS4{}", credentials.secret_key);
    let steps = [day, region, service, "aws4_request", &text];
    let signature = steps.iter().fold(first.into_bytes(), |key, step| {
        hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &key), step.as_bytes()).as_ref().to_vec()
    });
    let id = &credentials.access_key_id;
    format!("{ALGORITHM} Credential={id}/{scope}, SignedHeaders={signed}, Signature={}", hex(&signature))
}

/// The one form of a request, and the names of the fields in it.
fn canonical(request: Unsigned<'_>, headers: &HeaderMap) -> (String, String) {
    let (path, query) = request.target.split_once('?').unwrap_or((request.target, ""));
    let mut parts: Vec<String> = query
        .split('&')
        .filter(|part| !part.is_empty())
        .map(|part| if part.contains('=') { part.to_owned() } else { format!("{part}=") })
        .collect();
    parts.sort_unstable();
    let mut fields: Vec<(&str, String)> = headers
        .keys()
        .map(|name| {
            let values: Vec<String> = headers.get_all(name).iter().map(trimmed).collect();
            (name.as_str(), values.join(","))
        })
        .collect();
    fields.push(("host", request.host.to_owned()));
    fields.sort_unstable();
    let mut out = format!("{}\n{path}\n{}\n", request.method, parts.join("&"));
    for (name, value) in &fields {
        let _ = writeln!(out, "{name}:{value}");
    }
    let signed: Vec<&str> = fields.iter().map(|(name, _)| *name).collect();
    let signed = signed.join(";");
    let _ = write!(out, "\n{signed}\n{}", hex(&request.payload));
    (out, signed)
}

/// A field's value without blanks around it, and one where there are several within it.
fn trimmed(value: &HeaderValue) -> String {
    let text = String::from_utf8_lossy(value.as_bytes());
    text.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// A time since 1970 as `20130524T000000Z`.
fn moment(now: Duration) -> String {
    let plain = timestamp(now);
    let seconds = plain.split('.').next().unwrap_or_default();
    seconds.chars().filter(|char| !matches!(char, '-' | ':')).chain(['Z']).collect()
}

/// A key as it stands in a path, or, with slashes encoded too, a value as it stands in a query.
pub fn encode(text: &str, keep_slashes: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || keep_slashes && byte == b'/' {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

#[cfg(test)]
mod tests;
