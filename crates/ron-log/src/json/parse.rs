//! The reader: one pass over the bytes, no more memory than the values need.

use super::{Json, NUMBER_MAX, write};
use std::borrow::Cow;
use std::cmp::Ordering;

/// What is wrong with the bytes, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("byte {at}: {what}")]
pub struct JsonError {
    pub at: usize,
    pub what: &'static str,
}

pub(super) fn document(bytes: &[u8], canonical: bool, depth_max: usize) -> Result<Json<'_>, JsonError> {
    let text =
        std::str::from_utf8(bytes).map_err(|bad| JsonError { at: bad.valid_up_to(), what: "not UTF-8" })?;
    let mut reader = Reader::new(text, canonical, depth_max);
    let value = reader.value(0)?;
    reader.space();
    if reader.at == bytes.len() { Ok(value) } else { Err(reader.bad("more follows the value")) }
}

/// RFC 8785 orders members by their UTF-16 code units.
pub(super) fn order(a: &str, b: &str) -> Ordering {
    match a.bytes().zip(b.bytes()).find(|(a, b)| a != b) {
        None => a.len().cmp(&b.len()),
        // Below U+E000 bytes and units order alike; above, surrogates come first.
        Some((a, b)) if a < 0xee || b < 0xee => a.cmp(&b),
        Some(_) => a.encode_utf16().cmp(b.encode_utf16()),
    }
}

pub(super) struct Reader<'a> {
    pub(super) text: &'a str,
    pub(super) bytes: &'a [u8],
    pub(super) at: usize,
    canonical: bool,
    depth_max: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(text: &'a str, canonical: bool, depth_max: usize) -> Self {
        Self { text, bytes: text.as_bytes(), at: 0, canonical, depth_max }
    }

    fn bad(&self, what: &'static str) -> JsonError {
        JsonError { at: self.at, what }
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn space(&mut self) {
        if !self.canonical {
            while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
                self.at += 1;
            }
        }
    }

    fn eat(&mut self, byte: u8, what: &'static str) -> Result<(), JsonError> {
        self.space();
        if self.peek() == Some(byte) {
            self.at += 1;
            Ok(())
        } else {
            Err(self.bad(what))
        }
    }

    pub(super) fn value(&mut self, depth: usize) -> Result<Json<'a>, JsonError> {
        if depth == self.depth_max {
            return Err(self.bad("nested too deeply"));
        }
        self.space();
        match self.peek() {
            Some(b'{') => self.object(depth),
            Some(b'[') => self.list(depth),
            Some(b'"') => Ok(Json::Text(self.string()?)),
            Some(b't') => self.word("true", Json::Bool(true)),
            Some(b'f') => self.word("false", Json::Bool(false)),
            Some(b'n') => self.word("null", Json::Null),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => Err(self.bad("a value is expected")),
        }
    }

    fn word(&mut self, word: &str, value: Json<'a>) -> Result<Json<'a>, JsonError> {
        if self.bytes[self.at..].starts_with(word.as_bytes()) {
            self.at += word.len();
            Ok(value)
        } else {
            Err(self.bad("a value is expected"))
        }
    }

    fn list(&mut self, depth: usize) -> Result<Json<'a>, JsonError> {
        self.at += 1;
        let mut items = Vec::new();
        self.space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Json::List(items));
        }
        loop {
            items.push(self.value(depth + 1)?);
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => break self.at += 1,
                _ => return Err(self.bad("`,` or `]` is expected")),
            }
        }
        Ok(Json::List(items))
    }

    fn object(&mut self, depth: usize) -> Result<Json<'a>, JsonError> {
        self.at += 1;
        self.space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Json::Object(Vec::new()));
        }
        let mut members: Vec<(Cow<'a, str>, Json<'a>)> = Vec::with_capacity(8);
        loop {
            self.space();
            if self.peek() != Some(b'"') {
                return Err(self.bad("a member's name is expected"));
            }
            let name = self.string()?;
            if self.canonical && members.last().is_some_and(|(last, _)| order(last, &name) != Ordering::Less)
            {
                return Err(self.bad("members are not in canonical order"));
            }
            self.eat(b':', "`:` is expected")?;
            let value = self.value(depth + 1)?;
            members.push((name, value));
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => break self.at += 1,
                _ => return Err(self.bad("`,` or `}` is expected")),
            }
        }
        if !self.canonical {
            members.sort_by(|(a, _), (b, _)| order(a, b));
            if members.windows(2).any(|pair| pair[0].0 == pair[1].0) {
                return Err(self.bad("a member occurs twice"));
            }
        }
        Ok(Json::Object(members))
    }

    pub(super) fn string(&mut self) -> Result<Cow<'a, str>, JsonError> {
        self.at += 1;
        let start = self.at;
        let end = self.run()?;
        self.at += end;
        if self.bytes[self.at] == b'"' {
            self.at += 1;
            return Ok(Cow::Borrowed(&self.text[start..start + end]));
        }
        let mut out = self.text[start..self.at].to_owned();
        loop {
            let from = self.at;
            let rest = self.run()?;
            out.push_str(&self.text[from..from + rest]);
            self.at = from + rest + 1;
            match self.bytes[from + rest] {
                b'"' => break,
                _ => out.push(self.escape()?),
            }
        }
        if self.canonical {
            let mut again = String::new();
            write::text(&out, &mut again);
            if again[1..] != self.text[start..self.at] {
                return Err(self.bad("a string is not in canonical form"));
            }
        }
        Ok(Cow::Owned(out))
    }

    /// How many bytes stand for themselves before a string ends or something is escaped.
    fn run(&self) -> Result<usize, JsonError> {
        let rest = &self.bytes[self.at..];
        let length = memchr::memchr2(b'"', b'\\', rest).ok_or(self.bad("a string does not end"))?;
        let control = rest[..length].iter().fold(false, |found, byte| found | (*byte < 0x20));
        if control { Err(self.bad("a control character in a string")) } else { Ok(length) }
    }

    fn escape(&mut self) -> Result<char, JsonError> {
        let byte = self.peek().ok_or(self.bad("a string does not end"))?;
        self.at += 1;
        Ok(match byte {
            b'"' | b'\\' | b'/' => char::from(byte),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let unit = self.hex4()?;
                let code = if (0xd800..0xdc00).contains(&unit) {
                    if self.bytes.get(self.at..self.at + 2) != Some(b"\\u") {
                        return Err(self.bad("half of a surrogate pair"));
                    }
                    self.at += 2;
                    let low = self.hex4()?;
                    if !(0xdc00..0xe000).contains(&low) {
                        return Err(self.bad("half of a surrogate pair"));
                    }
                    0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00)
                } else {
                    unit
                };
                char::from_u32(code).ok_or(self.bad("half of a surrogate pair"))?
            }
            _ => return Err(self.bad("an escape that is not known")),
        })
    }

    fn hex4(&mut self) -> Result<u32, JsonError> {
        let digits = self.bytes.get(self.at..self.at + 4).ok_or(self.bad("four digits are expected"))?;
        let mut code = 0;
        for digit in digits {
            let value = char::from(*digit).to_digit(16).ok_or(self.bad("four digits are expected"))?;
            code = code << 4 | value;
        }
        self.at += 4;
        Ok(code)
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at == start { Err(self.bad("a digit is expected")) } else { Ok(()) }
    }

    fn number(&mut self) -> Result<Json<'a>, JsonError> {
        let start = self.at;
        self.at += usize::from(self.peek() == Some(b'-'));
        if self.peek() == Some(b'0') {
            self.at += 1;
            if matches!(self.peek(), Some(b'0'..=b'9')) {
                return Err(self.bad("a number begins with 0"));
            }
        } else {
            self.digits()?;
        }
        let whole = self.at;
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            self.at += usize::from(matches!(self.peek(), Some(b'+' | b'-')));
            self.digits()?;
        }
        let text = &self.text[start..self.at];
        let value = if self.at == whole && text != "-0" {
            match text.parse::<i64>() {
                Ok(number) if number.unsigned_abs() <= NUMBER_MAX => Json::Int(number),
                _ => return Err(self.bad("an integer beyond 2^53")),
            }
        } else {
            // Every float this large is an integer, and would be written as one.
            match text.parse::<f64>() {
                Ok(number) if number.abs() <= NUMBER_MAX as f64 => Json::Float(number),
                _ => return Err(self.bad("a number beyond 2^53")),
            }
        };
        if self.canonical && matches!(value, Json::Float(_)) && value.canonical() != text {
            return Err(self.bad("a number is not in canonical form"));
        }
        Ok(value)
    }
}
