//! The fields of an answer on its way through, taken apart no further than somebody needs.
//!
//! A map of a dozen fields costs more than all else that is done with an answer, and a proxy looks at three or four of
//! them. So what came over HTTP/1.1 stays as it came, and goes to a client of HTTP/1.1 as lines.

use super::h1::head::Values as _;
use bytes::{Bytes, BytesMut};
use http::header::{HeaderMap, HeaderName, HeaderValue};

/// The fields of an answer, as the server sent them.
#[derive(Debug)]
pub enum Fields {
    Lines(Lines),
    Map(HeaderMap),
}

/// The fields of a head of HTTP/1.1, in its own bytes.
#[derive(Clone, Debug)]
pub struct Lines {
    head: Bytes,
    spans: Vec<Span>,
}

/// Where in a head a name begins and how long it is, and the same for its value.
#[derive(Clone, Copy, Debug)]
struct Span {
    name: (u32, u32),
    value: (u32, u32),
}

impl Lines {
    /// The parsed fields of `head`, which they are parts of.
    pub(crate) fn new(head: &Bytes, parsed: &[httparse::Header<'_>]) -> Lines {
        let begin = head.as_ptr() as usize;
        let place = |part: &[u8]| {
            #[expect(clippy::cast_possible_truncation, reason = "a head has at most some hundred KiB")]
            let (at, length) = (part.as_ptr().addr().wrapping_sub(begin) as u32, part.len() as u32);
            (at, length)
        };
        let spans = parsed
            .iter()
            .map(|field| Span { name: place(field.name.as_bytes()), value: place(field.value) })
            .collect();
        Lines { head: head.clone(), spans }
    }

    fn part(&self, (at, length): (u32, u32)) -> &[u8] {
        // An empty value may be anywhere.
        self.head.get(at as usize..(at + length) as usize).unwrap_or_default()
    }

    /// Names as they were written, and values.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.spans.iter().map(|span| (self.part(span.name), self.part(span.value)))
    }

    /// The same fields as a map.
    pub fn to_map(&self) -> HeaderMap {
        let mut headers = HeaderMap::with_capacity(self.spans.len() + 4);
        for span in &self.spans {
            let name = HeaderName::from_bytes(self.part(span.name));
            let value = HeaderValue::from_maybe_shared(self.head.slice_ref(self.part(span.value)));
            if let (Ok(name), Ok(value)) = (name, value) {
                headers.append(name, value);
            }
        }
        headers
    }
}

impl Fields {
    /// The first value of a field.
    pub fn get<'a>(&'a self, name: &'a HeaderName) -> Option<&'a [u8]> {
        match self {
            Fields::Lines(lines) => lines.values(name).next(),
            Fields::Map(map) => map.get(name).map(HeaderValue::as_bytes),
        }
    }

    /// As a map, in which an answer to HTTP/2 has its fields.
    pub fn into_map(self) -> HeaderMap {
        match self {
            Fields::Lines(lines) => lines.to_map(),
            Fields::Map(map) => map,
        }
    }
}

/// Fields written as HTTP/1.1 has them, ready to be sent.
#[derive(Debug, Default)]
pub struct Written {
    pub(crate) lines: BytesMut,
    pub(crate) length: Option<u64>,
    pub(crate) dated: bool,
}

impl Written {
    pub fn with_capacity(bytes: usize) -> Written {
        Written { lines: BytesMut::with_capacity(bytes), ..Written::default() }
    }

    pub fn lines(&self) -> &[u8] {
        &self.lines
    }

    /// Adds a field; the caller vouches that it is well formed.
    pub fn push(&mut self, name: &[u8], value: &[u8]) {
        match name.len() {
            4 if name.eq_ignore_ascii_case(b"date") => self.dated = true,
            14 if name.eq_ignore_ascii_case(b"content-length") => {
                self.length = std::str::from_utf8(value).ok().and_then(|digits| digits.parse().ok());
            }
            _ => {}
        }
        for piece in [name, b": ", value, b"\r\n"] {
            self.lines.extend_from_slice(piece);
        }
    }
}
