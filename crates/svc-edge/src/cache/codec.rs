//! Stored heads as bytes, for the index: one version byte, then numbers in base 128 and strings with their length.

use super::date::UnixMillis;
use super::head::{Body, StoredHead};
use super::range::Parts;
use super::vary::Selecting;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

const VERSION: u8 = 1;
const INVALID: u64 = 1;
const PARTS: u64 = 2;
const UNCLEAR_AGE: u64 = 4;

/// Bytes that are no stored head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    #[error("a stored head of version {0}, which is unknown")]
    Version(u8),
    #[error("not a stored head")]
    Malformed,
}

impl StoredHead {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        let in_parts = matches!(self.body(), Body::Parts(_));
        let flags = [(self.is_invalid(), INVALID), (in_parts, PARTS), (self.unclear_age, UNCLEAR_AGE)];
        let flags = flags.iter().filter(|(set, _)| *set).map(|(_, flag)| flag).sum();
        let fixed = [u64::from(self.status().as_u16()), flags, self.received().0, self.initial_age_ms()];
        fixed.iter().for_each(|number| push_number(&mut out, *number));
        match self.body() {
            Body::Whole { len } => push_number(&mut out, *len),
            Body::Parts(parts) => {
                push_optional(&mut out, parts.complete());
                push_number(&mut out, parts.parts().len() as u64);
                for part in parts.parts() {
                    push_number(&mut out, part.start);
                    push_number(&mut out, part.end - part.start);
                }
            }
        }
        push_number(&mut out, self.selecting().fields().len() as u64);
        for (name, value) in self.selecting().fields() {
            push_bytes(&mut out, name.as_str().as_bytes());
            push_optional(&mut out, value.as_ref().map(|value| value.len() as u64));
            out.extend_from_slice(value.as_ref().map_or(&[], |value| value.as_bytes()));
        }
        push_number(&mut out, self.headers().len() as u64);
        for (name, value) in self.headers() {
            push_bytes(&mut out, name.as_str().as_bytes());
            push_bytes(&mut out, value.as_bytes());
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        match bytes.split_first() {
            Some((&VERSION, rest)) => Reader { rest }.head().ok_or(DecodeError::Malformed),
            Some((version, _)) => Err(DecodeError::Version(*version)),
            None => Err(DecodeError::Malformed),
        }
    }
}

fn push_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// One more than the number; zero is none.
fn push_optional(out: &mut Vec<u8>, number: Option<u64>) {
    push_number(out, number.map_or(0, |number| number.saturating_add(1)));
}

fn push_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    push_number(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn head(mut self) -> Option<StoredHead> {
        let status = StatusCode::from_u16(u16::try_from(self.number()?).ok()?).ok()?;
        let flags = self.number().filter(|flags| *flags <= INVALID | PARTS | UNCLEAR_AGE)?;
        let (received, initial_age_ms) = (UnixMillis(self.number()?), self.number()?);
        let body = if flags & PARTS == 0 { Body::Whole { len: self.number()? } } else { self.parts()? };
        let mut fields = Vec::new();
        for _ in 0..self.count()? {
            let name = self.name()?;
            let value = match self.optional()? {
                None => None,
                Some(length) => Some(HeaderValue::from_bytes(self.take(length)?).ok()?),
            };
            fields.push((name, value));
        }
        let selecting = Selecting::from_fields(fields)?;
        let mut headers = HeaderMap::new();
        for _ in 0..self.count()? {
            let (name, value) = (self.name()?, HeaderValue::from_bytes(self.bytes()?).ok()?);
            headers.try_append(name, value).ok()?;
        }
        if !self.rest.is_empty() {
            return None;
        }
        let mut head = StoredHead::restore(status, headers, selecting, received, initial_age_ms, body);
        if flags & INVALID != 0 {
            head.invalidate();
        }
        head.unclear_age = flags & UNCLEAR_AGE != 0;
        Some(head)
    }

    fn parts(&mut self) -> Option<Body> {
        let complete = self.optional()?;
        let mut parts = Vec::new();
        for _ in 0..self.count()? {
            let start = self.number()?;
            parts.push(start..start.checked_add(self.number()?)?);
        }
        Parts::from_parts(parts, complete).map(Body::Parts)
    }

    /// In the shortest form only, so that a number is written in one way.
    fn number(&mut self) -> Option<u64> {
        let mut number = 0u64;
        for place in 0..10 {
            let (byte, rest) = self.rest.split_first()?;
            self.rest = rest;
            let bits = u64::from(byte & 0x7f);
            if place == 9 && bits > 1 {
                return None;
            }
            number |= bits << (7 * place);
            if byte & 0x80 == 0 {
                return (*byte != 0 || place == 0).then_some(number);
            }
        }
        None
    }

    fn optional(&mut self) -> Option<Option<u64>> {
        self.number().map(|number| number.checked_sub(1))
    }

    /// A number of things of two bytes or more, so no more than there can be.
    fn count(&mut self) -> Option<u64> {
        self.number().filter(|count| *count <= self.rest.len() as u64 / 2)
    }

    fn take(&mut self, length: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(usize::try_from(length).ok()?)?;
        self.rest = rest;
        Some(taken)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.number()?;
        self.take(length)
    }

    fn name(&mut self) -> Option<HeaderName> {
        HeaderName::from_lowercase(self.bytes()?).ok()
    }
}
