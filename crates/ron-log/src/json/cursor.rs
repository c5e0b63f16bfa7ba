//! A second reader, for canonical documents whose every member is known beforehand: no tree is made of them.
//!
//! It knows no errors. Whatever does not stand where it is expected gives none, and then the general reader
//! says what is wrong, or that nothing is: this one may refuse what that one takes, never the other way round.

use super::parse::Reader;
use super::{DEPTH_MAX, Json, NUMBER_MAX};
use std::borrow::Cow;

pub(crate) struct Cursor<'a>(Reader<'a>);

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Option<Self> {
        Some(Self(Reader::new(std::str::from_utf8(bytes).ok()?, true, DEPTH_MAX)))
    }

    /// How many bytes were read.
    pub(crate) fn at(&self) -> usize {
        self.0.at
    }

    fn rest(&self) -> &'a [u8] {
        &self.0.bytes[self.0.at..]
    }

    /// These characters, next.
    pub(crate) fn literal(&mut self, text: &str) -> Option<()> {
        self.eat(text).then_some(())
    }

    /// These characters, if they are next.
    pub(crate) fn eat(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text.as_bytes());
        self.0.at += if found { text.len() } else { 0 };
        found
    }

    /// An integer that is not negative.
    pub(crate) fn whole(&mut self) -> Option<u64> {
        let rest = self.rest();
        let (mut number, mut length) = (0u64, 0);
        while let Some(digit @ b'0'..=b'9') = rest.get(length) {
            number = number.checked_mul(10)?.checked_add(u64::from(digit - b'0'))?;
            length += 1;
        }
        if length == 0 || (rest[0] == b'0' && length > 1) || number > NUMBER_MAX {
            return None;
        }
        self.0.at += length;
        Some(number)
    }

    /// A string, quotes included.
    pub(crate) fn text(&mut self) -> Option<Cow<'a, str>> {
        if self.rest().first() != Some(&b'"') {
            return None;
        }
        self.0.string().ok()
    }

    /// So many characters of a string that the caller knows the form of, and checks.
    pub(crate) fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let taken = self.rest().get(..length)?;
        self.0.at += length;
        Some(taken)
    }

    /// Any value, with what it was read from, which is its canonical form; `depth` is how many it stands in
    /// within its document.
    pub(crate) fn value(&mut self, depth: usize) -> Option<(Json<'a>, &'a str)> {
        let start = self.0.at;
        let value = self.0.value(depth).ok()?;
        Some((value, &self.0.text[start..self.0.at]))
    }

    pub(crate) fn end(&self) -> Option<()> {
        self.rest().is_empty().then_some(())
    }
}
