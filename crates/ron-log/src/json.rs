//! JSON in the one form that is hashed and signed: RFC 8785, read strictly and written canonically.
//!
//! Two ways of reading share one parser. [`Json::parse`] takes what a client may write (spaces, any order of
//! members); [`Json::parse_canonical`] takes canonical bytes alone, so what it accepts need not be written
//! again to be compared. [`Cursor`] reads the two documents that a whole log consists of more quickly.

mod cursor;
mod parse;
mod write;

pub(crate) use cursor::Cursor;
pub use parse::JsonError;
pub use write::write_text;

use std::borrow::Cow;

/// Numbers stay below this, so that every JSON reader sees the same one.
pub const NUMBER_MAX: u64 = (1 << 53) - 1;

/// Values inside values; more is refused before it can exhaust a stack.
pub const DEPTH_MAX: usize = 32;

/// How many values a payload or a state may stand in itself, as in a page of the log.
const AROUND_MAX: usize = 4;

/// A JSON value. Members of an object are unique and in canonical order.
///
/// Its tag is a whole word: with one of a byte, every value that is handed on is copied in misaligned pieces,
/// which takes a third of the time of reading.
#[derive(Debug, Clone, PartialEq)]
#[repr(u64)]
pub enum Json<'a> {
    Null,
    Bool(bool),
    /// Written without fraction or exponent.
    Int(i64),
    /// Written with either; never where a schema wants an integer.
    Float(f64),
    Text(Cow<'a, str>),
    List(Vec<Json<'a>>),
    Object(Vec<(Cow<'a, str>, Json<'a>)>),
}

impl<'a> Json<'a> {
    /// Reads JSON as a client may write it.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, JsonError> {
        parse::document(bytes, false, DEPTH_MAX)
    }

    /// The same of a document that payloads or a state stand in, each of which may have all its levels there too.
    pub fn parse_around(bytes: &'a [u8]) -> Result<Self, JsonError> {
        parse::document(bytes, false, DEPTH_MAX + AROUND_MAX)
    }

    /// Reads canonical bytes and nothing else.
    pub fn parse_canonical(bytes: &'a [u8]) -> Result<Self, JsonError> {
        parse::document(bytes, true, DEPTH_MAX)
    }

    /// Its canonical form.
    pub fn canonical(&self) -> String {
        let mut out = String::with_capacity(128);
        write::value(self, &mut out);
        out
    }

    /// An object of these members, put in order; the caller names each once.
    pub fn object<const N: usize>(members: [(&'a str, Json<'a>); N]) -> Self {
        let mut members: Vec<_> =
            members.into_iter().map(|(name, value)| (Cow::Borrowed(name), value)).collect();
        members.sort_by(|(a, _), (b, _)| parse::order(a, b));
        Json::Object(members)
    }

    pub fn text(&self) -> Option<&str> {
        if let Json::Text(text) = self { Some(text) } else { None }
    }

    /// An integer that is not negative.
    pub fn whole(&self) -> Option<u64> {
        if let Json::Int(number) = self { u64::try_from(*number).ok() } else { None }
    }

    pub fn list(&self) -> Option<&[Json<'a>]> {
        if let Json::List(list) = self { Some(list) } else { None }
    }

    pub fn members(&self) -> Option<&[(Cow<'a, str>, Json<'a>)]> {
        if let Json::Object(members) = self { Some(members) } else { None }
    }

    pub fn member(&self, name: &str) -> Option<&Json<'a>> {
        self.members()?.iter().find(|(other, _)| other == name).map(|(_, value)| value)
    }
}

/// What is wrong with a document whose JSON is good: the member, and what it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{member}: {wants}")]
pub struct Misfit {
    pub member: &'static str,
    pub wants: &'static str,
}

/// The members of an object of known shape; each is asked for once, unknown ones are refused.
#[derive(Debug)]
pub(crate) struct Fields<'j, 'a> {
    members: &'j [(Cow<'a, str>, Json<'a>)],
    asked: usize,
}

impl<'j, 'a> Fields<'j, 'a> {
    pub(crate) fn of(value: &'j Json<'a>, what: &'static str) -> Result<Self, Misfit> {
        let members = value.members().ok_or(Misfit { member: what, wants: "must be an object" })?;
        Ok(Self { members, asked: 0 })
    }

    pub(crate) fn optional(&mut self, name: &str) -> Option<&'j Json<'a>> {
        let found = self.members.iter().find(|(other, _)| other == name).map(|(_, value)| value);
        self.asked += usize::from(found.is_some());
        found
    }

    pub(crate) fn any(&mut self, member: &'static str) -> Result<&'j Json<'a>, Misfit> {
        self.optional(member).ok_or(Misfit { member, wants: "is missing" })
    }

    pub(crate) fn text(&mut self, member: &'static str) -> Result<&'j str, Misfit> {
        self.any(member)?.text().ok_or(Misfit { member, wants: "must be a string" })
    }

    pub(crate) fn whole(&mut self, member: &'static str) -> Result<u64, Misfit> {
        self.any(member)?.whole().ok_or(Misfit { member, wants: "must be an integer from 0 to 2^53 - 1" })
    }

    pub(crate) fn list(&mut self, member: &'static str) -> Result<&'j [Json<'a>], Misfit> {
        self.any(member)?.list().ok_or(Misfit { member, wants: "must be a list" })
    }

    /// Nothing but what was asked for may be there.
    pub(crate) fn end(self, what: &'static str) -> Result<(), Misfit> {
        if self.asked == self.members.len() {
            Ok(())
        } else {
            Err(Misfit { member: what, wants: "has a member that is not known" })
        }
    }
}
