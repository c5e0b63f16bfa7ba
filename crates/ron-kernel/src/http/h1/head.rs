//! Heads of requests and responses: where they end, what they say, how their bodies are framed.
//!
//! Refused rather than guessed at: a bare LF, folded lines, space before a colon, both `Content-Length` and
//! `Transfer-Encoding`, more than one `Content-Length`, any transfer coding but `chunked`, a missing or second
//! `Host`.

use crate::http::fields::Lines;
use bytes::{Buf, Bytes, BytesMut};
use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING,
};
use http::{Method, StatusCode, Uri, Version};
use std::mem::MaybeUninit;

/// Headers parsed on the stack; a higher limit costs an allocation.
const HEADERS_INLINE: usize = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLimits {
    pub headers_max: usize,
    pub bytes_max: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    #[error("{0}")]
    Malformed(&'static str),
    #[error("the header section has too many fields or bytes")]
    TooLarge,
    #[error("the request target is too long")]
    UriTooLong,
    #[error("the expectation is not 100-continue")]
    Expectation,
    #[error("a request of HTTP/1.0 with a body must state its length")]
    LengthRequired,
}

/// Where the values of a field are found.
pub trait Values {
    fn values<'a>(&'a self, name: &'a HeaderName) -> impl Iterator<Item = &'a [u8]>;
}

impl Values for HeaderMap {
    fn values<'a>(&'a self, name: &'a HeaderName) -> impl Iterator<Item = &'a [u8]> {
        self.get_all(name).iter().map(HeaderValue::as_bytes)
    }
}

impl Values for Lines {
    fn values<'a>(&'a self, name: &'a HeaderName) -> impl Iterator<Item = &'a [u8]> {
        let wanted = name.as_str().as_bytes();
        self.iter().filter(move |(name, _)| name.eq_ignore_ascii_case(wanted)).map(|(_, value)| value)
    }
}

/// How long a body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    Length(u64),
    Chunked,
    /// Responses only: until the connection ends.
    UntilClose,
}

#[derive(Debug)]
pub struct RequestHead {
    pub method: Method,
    pub uri: Uri,
    pub version: Version,
    pub headers: HeaderMap,
    pub framing: Framing,
    pub keep_alive: bool,
    pub expect_continue: bool,
}

#[derive(Debug)]
pub struct ResponseHead {
    pub status: StatusCode,
    pub version: Version,
    pub fields: Lines,
    pub framing: Framing,
    pub keep_alive: bool,
    /// Only the connection's end can end the body, and yet the server means to keep it: it will not be the first to go.
    pub waits_for_us: bool,
}

/// Finds heads in a growing buffer without looking at a byte twice.
#[derive(Debug, Default)]
pub struct HeadReader {
    scanned: usize,
    /// Where the line being scanned begins.
    line_start: usize,
    lines: usize,
    /// The empty line before a request has been seen.
    skipped: bool,
}

impl HeadReader {
    /// Takes a request head off the front of the buffer, if it is complete.
    pub fn request(
        &mut self,
        buffer: &mut BytesMut,
        limits: HeadLimits,
    ) -> Result<Option<RequestHead>, HeadError> {
        if !self.skip_empty_line(buffer)? {
            return Ok(None);
        }
        match self.find_end(buffer, limits)? {
            Some(end) => parse_request(&buffer.split_to(end).freeze(), limits).map(Some),
            None => Ok(None),
        }
    }

    /// Takes a response head off the front of the buffer, if it is complete.
    pub fn response(
        &mut self,
        buffer: &mut BytesMut,
        limits: HeadLimits,
        method: &Method,
    ) -> Result<Option<ResponseHead>, HeadError> {
        if buffer.is_empty() {
            return Ok(None);
        }
        match self.find_end(buffer, limits)? {
            Some(end) => parse_response(&buffer.split_to(end).freeze(), limits, method).map(Some),
            None => Ok(None),
        }
    }

    /// One empty line before a request is forgiven (RFC 9112, 2.2); false while half of it is there.
    fn skip_empty_line(&mut self, buffer: &mut BytesMut) -> Result<bool, HeadError> {
        if self.skipped || self.scanned > 0 || buffer.first() != Some(&b'\r') {
            return Ok(true);
        }
        match buffer.get(1) {
            Some(b'\n') => {
                buffer.advance(2);
                self.skipped = true;
                Ok(true)
            }
            Some(_) => Err(HeadError::Malformed("a carriage return stands alone")),
            None => Ok(false),
        }
    }

    /// The length of the head, once its empty line has arrived.
    fn find_end(&mut self, buffer: &BytesMut, limits: HeadLimits) -> Result<Option<usize>, HeadError> {
        while let Some(at) = memchr::memchr(b'\n', &buffer[self.scanned..]) {
            let newline = self.scanned + at;
            if newline == 0 || buffer[newline - 1] != b'\r' {
                return Err(HeadError::Malformed("a line does not end in CR LF"));
            }
            let empty = newline - 1 == self.line_start;
            self.scanned = newline + 1;
            self.line_start = newline + 1;
            if empty {
                *self = HeadReader::default();
                let fits = newline < limits.bytes_max;
                return if fits { Ok(Some(newline + 1)) } else { Err(HeadError::TooLarge) };
            }
            self.lines += 1;
            if self.lines == 1 && newline > uri_max(limits) {
                return Err(HeadError::UriTooLong);
            }
            if self.lines > limits.headers_max + 1 {
                return Err(HeadError::TooLarge);
            }
        }
        self.scanned = buffer.len();
        if self.lines == 0 && buffer.len() > uri_max(limits) {
            return Err(HeadError::UriTooLong);
        }
        if buffer.len() > limits.bytes_max { Err(HeadError::TooLarge) } else { Ok(None) }
    }
}

/// A request line may take a quarter of the header section.
fn uri_max(limits: HeadLimits) -> usize {
    limits.bytes_max / 4
}

fn parse_request(head: &Bytes, limits: HeadLimits) -> Result<RequestHead, HeadError> {
    // Nearly every head fits on the stack, without a slot being touched before its field is there.
    let (mut inline, mut many) = ([const { MaybeUninit::uninit() }; HEADERS_INLINE], Vec::new());
    let mut parsed = httparse::Request::new(&mut []);
    let mut outcome = parsed.parse_with_uninit_headers(head, slots(&mut inline, limits));
    if outcome == Err(httparse::Error::TooManyHeaders) && limits.headers_max > HEADERS_INLINE {
        many.resize_with(limits.headers_max, MaybeUninit::uninit);
        parsed = httparse::Request::new(&mut []);
        outcome = parsed.parse_with_uninit_headers(head, &mut many);
    }
    match outcome {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Err(HeadError::Malformed("the head is incomplete")),
        Err(error) => return Err(malformed(error)),
    }
    let (Some(method), Some(target), Some(version)) = (parsed.method, parsed.path, parsed.version) else {
        return Err(HeadError::Malformed("the request line is incomplete"));
    };
    let method = Method::from_bytes(method.as_bytes())
        .map_err(|_bad| HeadError::Malformed("the method is no token"))?;
    let version = if version == 0 { Version::HTTP_10 } else { Version::HTTP_11 };
    if target.contains('#') {
        return Err(HeadError::Malformed("the request target holds a fragment"));
    }
    let uri = Uri::from_maybe_shared(head.slice_ref(target.as_bytes()))
        .map_err(|_bad| HeadError::Malformed("the request target is no valid URI"))?;
    let headers = header_map(head, parsed.headers)?;
    check_host(&headers, version)?;
    check_target(&uri)?;
    let framing = request_framing(&method, &headers, version)?;
    let keep_alive = keeps_alive(&headers, version);
    let expect_continue = expects_continue(&headers, version)?;
    Ok(RequestHead { method, uri, version, headers, framing, keep_alive, expect_continue })
}

fn parse_response(head: &Bytes, limits: HeadLimits, method: &Method) -> Result<ResponseHead, HeadError> {
    let (mut inline, mut many) = ([const { MaybeUninit::uninit() }; HEADERS_INLINE], Vec::new());
    let (config, mut parsed) = (httparse::ParserConfig::default(), httparse::Response::new(&mut []));
    let slots = slots(&mut inline, limits);
    let mut outcome = config.parse_response_with_uninit_headers(&mut parsed, head, slots);
    if outcome == Err(httparse::Error::TooManyHeaders) && limits.headers_max > HEADERS_INLINE {
        many.resize_with(limits.headers_max, MaybeUninit::uninit);
        parsed = httparse::Response::new(&mut []);
        outcome = config.parse_response_with_uninit_headers(&mut parsed, head, &mut many);
    }
    match outcome {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Err(HeadError::Malformed("the head is incomplete")),
        Err(error) => return Err(malformed(error)),
    }
    let status = parsed.code.and_then(|code| StatusCode::from_u16(code).ok());
    let status = status.ok_or(HeadError::Malformed("the status is no valid code"))?;
    let version = if parsed.version == Some(0) { Version::HTTP_10 } else { Version::HTTP_11 };
    let fields = Lines::new(head, parsed.headers);
    let framing = response_framing(&fields, status, method)?;
    let persists = keeps_alive(&fields, version);
    let keep_alive = persists && framing != Framing::UntilClose;
    let waits_for_us = persists && framing == Framing::UntilClose && is_nameless_coding(&fields);
    Ok(ResponseHead { status, version, fields, framing, keep_alive, waits_for_us })
}

/// As many of the inline slots as the limits allow.
fn slots<T>(inline: &mut [T], limits: HeadLimits) -> &mut [T] {
    let count = limits.headers_max.min(inline.len());
    &mut inline[..count]
}

fn malformed(error: httparse::Error) -> HeadError {
    match error {
        httparse::Error::TooManyHeaders => HeadError::TooLarge,
        httparse::Error::HeaderName => HeadError::Malformed("a field name is malformed"),
        httparse::Error::HeaderValue => HeadError::Malformed("a field value holds a forbidden character"),
        httparse::Error::Version => HeadError::Malformed("the version is not HTTP/1.0 or HTTP/1.1"),
        httparse::Error::Token => HeadError::Malformed("the first line is malformed"),
        _ => HeadError::Malformed("the head is malformed"),
    }
}

/// The fields as a map whose values share the head's memory.
fn header_map(head: &Bytes, parsed: &[httparse::Header<'_>]) -> Result<HeaderMap, HeadError> {
    // Room for what a proxy adds, so that the map is not laid out anew for it.
    let mut headers = HeaderMap::with_capacity(parsed.len() + 4);
    for field in parsed {
        let name = HeaderName::from_bytes(field.name.as_bytes())
            .map_err(|_bad| HeadError::Malformed("a field name is malformed"))?;
        let value = HeaderValue::from_maybe_shared(head.slice_ref(field.value))
            .map_err(|_bad| HeadError::Malformed("a field value holds a forbidden character"))?;
        headers.append(name, value);
    }
    Ok(headers)
}

/// An absolute target names a host of the web and nobody's password.
pub(crate) fn check_target(uri: &Uri) -> Result<(), HeadError> {
    let scheme = uri.scheme_str().is_none_or(|scheme| matches!(scheme, "http" | "https"));
    let authority = uri.authority().is_none_or(|authority| is_host(authority.as_str().as_bytes()));
    if scheme && authority {
        Ok(())
    } else {
        Err(HeadError::Malformed("the request target is not of the web"))
    }
}

fn check_host(headers: &HeaderMap, version: Version) -> Result<(), HeadError> {
    let mut hosts = headers.get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (Some(_), Some(_)) => Err(HeadError::Malformed("there is more than one Host")),
        (None, _) if version == Version::HTTP_11 => Err(HeadError::Malformed("there is no Host")),
        (Some(host), None) if !is_host(host.as_bytes()) => Err(HeadError::Malformed("Host is no host")),
        _ => Ok(()),
    }
}

/// Characters of a host and port; no user, no quotes, nothing that could end a field it is copied into.
pub(crate) fn is_host(text: &[u8]) -> bool {
    text.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:[]%".contains(byte))
}

/// `Content-Length`, if there is exactly one and it is nothing but digits.
fn content_length(headers: &impl Values) -> Result<Option<u64>, HeadError> {
    let mut values = headers.values(&CONTENT_LENGTH);
    let Some(digits) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(HeadError::Malformed("there is more than one Content-Length"));
    }
    if digits.is_empty() || digits.len() > 18 || !digits.iter().all(u8::is_ascii_digit) {
        return Err(HeadError::Malformed("Content-Length is no number"));
    }
    Ok(Some(digits.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'))))
}

/// Whether the body is chunked; any other transfer coding is refused.
fn is_chunked(headers: &impl Values) -> Result<bool, HeadError> {
    let mut values = headers.values(&TRANSFER_ENCODING);
    match (values.next(), values.next()) {
        (None, _) => Ok(false),
        (Some(value), None) if value.eq_ignore_ascii_case(b"chunked") => Ok(true),
        _ => Err(HeadError::Malformed("the transfer coding is not exactly chunked")),
    }
}

fn request_framing(method: &Method, headers: &HeaderMap, version: Version) -> Result<Framing, HeadError> {
    let (chunked, length) = (is_chunked(headers)?, content_length(headers)?);
    match (chunked, length) {
        (true, Some(_)) => Err(HeadError::Malformed("both Content-Length and Transfer-Encoding are present")),
        (true, None) if version == Version::HTTP_10 => {
            Err(HeadError::Malformed("HTTP/1.0 has no Transfer-Encoding"))
        }
        (true, None) => Ok(Framing::Chunked),
        // In HTTP/1.1 this means that there is no body; before, that one follows and nobody knows where it ends.
        (false, None)
            if version == Version::HTTP_10 && [Method::POST, Method::PUT, Method::PATCH].contains(method) =>
        {
            Err(HeadError::LengthRequired)
        }
        (false, length) => Ok(Framing::Length(length.unwrap_or(0))),
    }
}

fn response_framing(headers: &Lines, status: StatusCode, method: &Method) -> Result<Framing, HeadError> {
    let bodiless =
        status.is_informational() || matches!(status.as_u16(), 204 | 304) || method == Method::HEAD;
    let coded = headers.values(&TRANSFER_ENCODING).next().is_some();
    let nameless = is_nameless_coding(headers);
    let (chunked, length) = (!nameless && is_chunked(headers)?, content_length(headers)?);
    if bodiless {
        return Ok(Framing::Length(0));
    }
    match (chunked, length) {
        (_, Some(_)) if coded => {
            Err(HeadError::Malformed("both Content-Length and Transfer-Encoding are present"))
        }
        (true, _) => Ok(Framing::Chunked),
        (false, Some(length)) => Ok(Framing::Length(length)),
        (false, None) => Ok(Framing::UntilClose),
    }
}

/// Whether a response's one transfer coding is none that exists. Nobody asked for it, so nothing can have been done to
/// the bytes; as with every coding but `chunked`, they end with the connection (RFC 9112 section 6.3).
fn is_nameless_coding(headers: &Lines) -> bool {
    const REAL: [&str; 7] = ["chunked", "compress", "deflate", "gzip", "identity", "x-compress", "x-gzip"];
    let mut values = headers.values(&TRANSFER_ENCODING);
    let (Some(value), None) = (values.next(), values.next()) else { return false };
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'-';
    !value.is_empty()
        && value.iter().all(plain)
        && !REAL.iter().any(|real| value.eq_ignore_ascii_case(real.as_bytes()))
}

/// Whether `Connection` lists the word.
fn connection_has(headers: &impl Values, word: &str) -> bool {
    let is_it = |item: &[u8]| item.trim_ascii().eq_ignore_ascii_case(word.as_bytes());
    headers.values(&CONNECTION).any(|value| value.split(|byte| *byte == b',').any(is_it))
}

fn keeps_alive(headers: &impl Values, version: Version) -> bool {
    if version == Version::HTTP_10 {
        connection_has(headers, "keep-alive")
    } else {
        !connection_has(headers, "close")
    }
}

fn expects_continue(headers: &HeaderMap, version: Version) -> Result<bool, HeadError> {
    match headers.get(EXPECT) {
        Some(value) if value.as_bytes().eq_ignore_ascii_case(b"100-continue") => {
            Ok(version == Version::HTTP_11)
        }
        Some(_) => Err(HeadError::Expectation),
        None => Ok(false),
    }
}

#[cfg(test)]
mod tests;
