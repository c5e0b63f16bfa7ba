//! Dictionaries of structured fields (RFC 9651), read strictly: one error anywhere, and there is no dictionary.

use super::list::is_token_byte;

/// A bare item, as far as a cache can use one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bare {
    Integer(i64),
    Boolean(bool),
    String(String),
    /// Well-formed, but of a type that no directive has: decimal, token, bytes, date, display string, inner list.
    Other,
}

/// The members of a dictionary, in order; where a key is repeated, its last value. Parameters are read and
/// dropped.
///
/// `lines` are the field's lines, which together are one value (section 4.2).
pub fn dictionary<'a>(lines: impl Iterator<Item = &'a [u8]>) -> Option<Vec<(String, Bare)>> {
    let value = lines.collect::<Vec<_>>().join(&b", "[..]);
    let mut reader = Reader { rest: &value };
    let mut members: Vec<(String, Bare)> = Vec::new();
    reader.skip(b" ");
    while !reader.rest.is_empty() {
        let key = reader.key()?;
        let value = if reader.eat(b'=') {
            reader.item_or_inner_list()?
        } else {
            reader.parameters()?;
            Bare::Boolean(true)
        };
        match members.iter().position(|(known, _)| *known == key) {
            Some(at) => members[at].1 = value,
            None if members.len() < MEMBERS_MAX => members.push((key, value)),
            None => return None,
        }
        reader.skip(b" \t");
        if reader.rest.is_empty() {
            break;
        }
        if !reader.eat(b',') {
            return None;
        }
        reader.skip(b" \t");
        // A comma that nothing follows is an error.
        reader.peek()?;
    }
    Some(members)
}

/// What section 3.2 asks for at least; it bounds the search for repeated keys.
const MEMBERS_MAX: usize = 1024;

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<u8> {
        self.rest.first().copied()
    }

    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*first)
    }

    fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        if found {
            self.rest = &self.rest[1..];
        }
        found
    }

    fn skip(&mut self, bytes: &[u8]) {
        self.take_while(|byte| bytes.contains(&byte));
    }

    fn take_while(&mut self, good: impl Fn(u8) -> bool) -> &'a [u8] {
        let end = self.rest.iter().position(|byte| !good(*byte)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken
    }

    /// Section 4.2.3.3.
    fn key(&mut self) -> Option<String> {
        self.peek().filter(|byte| byte.is_ascii_lowercase() || *byte == b'*')?;
        let good = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-.*".contains(&byte);
        String::from_utf8(self.take_while(good).to_vec()).ok()
    }

    /// Section 4.2.3.2.
    fn parameters(&mut self) -> Option<()> {
        while self.eat(b';') {
            self.skip(b" ");
            self.key()?;
            if self.eat(b'=') {
                self.bare_item()?;
            }
        }
        Some(())
    }

    fn item_or_inner_list(&mut self) -> Option<Bare> {
        let value = if self.eat(b'(') {
            self.inner_list()?;
            Bare::Other
        } else {
            self.bare_item()?
        };
        self.parameters()?;
        Some(value)
    }

    /// Section 4.2.1.2, after the opening parenthesis.
    fn inner_list(&mut self) -> Option<()> {
        loop {
            self.skip(b" ");
            if self.eat(b')') {
                return Some(());
            }
            self.bare_item()?;
            self.parameters()?;
            self.peek().filter(|byte| matches!(byte, b' ' | b')'))?;
        }
    }

    /// Section 4.2.3.1.
    fn bare_item(&mut self) -> Option<Bare> {
        match self.peek()? {
            b'-' | b'0'..=b'9' => self.number(),
            b'"' => self.string(),
            b'*' | b'A'..=b'Z' | b'a'..=b'z' => {
                self.take_while(|byte| is_token_byte(byte) || b":/".contains(&byte));
                Some(Bare::Other)
            }
            b':' => self.bytes(),
            b'?' => {
                self.next();
                match self.next()? {
                    b'0' => Some(Bare::Boolean(false)),
                    b'1' => Some(Bare::Boolean(true)),
                    _ => None,
                }
            }
            b'@' => {
                self.next();
                matches!(self.number()?, Bare::Integer(_)).then_some(Bare::Other)
            }
            b'%' => self.display_string(),
            _ => None,
        }
    }

    /// Section 4.2.4: fifteen digits, or twelve before the point and one to three behind it.
    fn number(&mut self) -> Option<Bare> {
        let negative = self.eat(b'-');
        let whole = self.take_while(|byte| byte.is_ascii_digit());
        if whole.is_empty() {
            return None;
        }
        if self.eat(b'.') {
            let fraction = self.take_while(|byte| byte.is_ascii_digit());
            return (whole.len() <= 12 && (1..=3).contains(&fraction.len())).then_some(Bare::Other);
        }
        let value: i64 = std::str::from_utf8(whole).ok().filter(|it| it.len() <= 15)?.parse().ok()?;
        Some(Bare::Integer(if negative { -value } else { value }))
    }

    /// Section 4.2.5.
    fn string(&mut self) -> Option<Bare> {
        self.next();
        let mut out = String::new();
        loop {
            match self.next()? {
                b'"' => return Some(Bare::String(out)),
                b'\\' => out.push(char::from(self.next().filter(|byte| matches!(byte, b'"' | b'\\'))?)),
                byte @ 0x20..=0x7e => out.push(char::from(byte)),
                _ => return None,
            }
        }
    }

    /// Section 4.2.7; the content is not decoded, only whether it could be.
    fn bytes(&mut self) -> Option<Bare> {
        self.next();
        let content = self.take_while(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte));
        let data = content.iter().position(|byte| *byte == b'=').unwrap_or(content.len());
        let padding = content.len() - data;
        // Padding may be left out (section 4.2.7), but not be wrong.
        let good = content[data..].iter().all(|byte| *byte == b'=')
            && data % 4 != 1
            && (padding == 0 || content.len().is_multiple_of(4) && padding <= 2);
        (good && self.eat(b':')).then_some(Bare::Other)
    }

    /// Section 4.2.10: percent-encoded UTF-8 with lower-case digits.
    fn display_string(&mut self) -> Option<Bare> {
        self.next();
        if !self.eat(b'"') {
            return None;
        }
        let mut out = Vec::new();
        loop {
            match self.next()? {
                b'"' => return std::str::from_utf8(&out).ok().map(|_| Bare::Other),
                b'%' => {
                    let mut digit = || {
                        let byte = self.next().filter(|byte| !byte.is_ascii_uppercase())?;
                        char::from(byte).to_digit(16)
                    };
                    let (high, low) = (digit()?, digit()?);
                    out.push(u8::try_from(high * 16 + low).ok()?);
                }
                byte @ 0x20..=0x7e => out.push(byte),
                _ => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<Vec<(String, Bare)>> {
        dictionary(std::iter::once(text.as_bytes()))
    }

    #[test]
    fn members_are_keys_with_values_of_every_type() {
        let check = |text: &str, expected: &[(&str, Bare)]| {
            let found = read(text).unwrap_or_else(|| panic!("{text} is a dictionary"));
            let found: Vec<_> = found.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
            assert_eq!(found, expected, "{text}");
        };
        check("", &[]);
        check("  ", &[]);
        check("a", &[("a", Bare::Boolean(true))]);
        check(
            "a=1, b=-2\t,\t c=?0",
            &[("a", Bare::Integer(1)), ("b", Bare::Integer(-2)), ("c", Bare::Boolean(false))],
        );
        check("a=999999999999999", &[("a", Bare::Integer(999_999_999_999_999))]);
        check(
            r#"a="x, \"y\"";p;q=1, b"#,
            &[("a", Bare::String(r#"x, "y""#.into())), ("b", Bare::Boolean(true))],
        );
        check("a;p=tok, a=2", &[("a", Bare::Integer(2))]);
        for other in [
            "1.5",
            "123456789012.123",
            "tok",
            "*t:/x",
            ":aGk=:",
            ":aGk:",
            "::",
            "@1659578233",
            "%\"f%c3%bc\"",
            "(1 \"a\";p  tok)",
            "()",
        ] {
            check(&format!("a={other}"), &[("a", Bare::Other)]);
        }
        let lines = [&b"a=1"[..], b"b=2"];
        assert_eq!(dictionary(lines.into_iter()).unwrap().len(), 2, "lines are one value");
    }

    #[test]
    fn one_error_and_there_is_no_dictionary() {
        for bad in [
            "max-age=10, &&&&&",
            "a=",
            "a =1",
            "a= 1",
            "a=1,",
            "a=1 b=2",
            ",a",
            "A=1",
            "a=1;P",
            "a=1000000000000000",
            "a=1.",
            "a=1.2345",
            "a=1234567890123.1",
            "a=-",
            "a=\"x",
            "a=\"\\x\"",
            "a=\"\u{fc}\"",
            "a=?2",
            "a=:a:",
            "a=:aGk==:",
            "a=:a=bc:",
            "a=:aGk=",
            "a=@1.5",
            "a=%\"%C3\"",
            "a=%\"%ff\"",
            "a=%x",
            "a=(1",
            "a=(1,2)",
            "a=(1\"x\")",
            "a=('x')",
            "\ta=1",
        ] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }
}
