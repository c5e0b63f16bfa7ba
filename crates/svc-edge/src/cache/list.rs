//! Comma-separated fields: members that respect quoted strings, and the numbers among them.

/// What a number of seconds too large for anyone's arithmetic means (RFC 9111 section 1.2.2).
pub const DELTA_MAX: u64 = 1 << 31;

/// The members of a list, trimmed, empty ones left out. A comma within a quoted string is part of it, and a
/// string that never ends takes the rest, so that nothing quoted is mistaken for a member.
pub fn members(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    members_or_empty(value).filter(|member| !member.is_empty())
}

/// The same with the empty ones.
pub fn members_or_empty(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(value);
    std::iter::from_fn(move || {
        let value = rest?;
        let end = unquoted_comma(value);
        rest = end.map(|at| &value[at + 1..]);
        Some(trim(end.map_or(value, |at| &value[..at])))
    })
}

fn unquoted_comma(value: &[u8]) -> Option<usize> {
    let (mut quoted, mut escaped) = (false, false);
    value.iter().position(|byte| {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b',' => return !quoted,
            _ => {}
        }
        false
    })
}

/// Without the optional whitespace around it: spaces and tabs, as RFC 9110 section 5.6.3 has it.
pub fn trim(value: &[u8]) -> &[u8] {
    let blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let start = value.iter().position(|byte| !blank(byte)).unwrap_or(value.len());
    let end = value.iter().rposition(|byte| !blank(byte)).map_or(start, |at| at + 1);
    &value[start..end]
}

/// A byte of a token (RFC 9110 section 5.6.2).
pub fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// The content of a quoted string, if the value is one and nothing else.
pub fn unquote(value: &[u8]) -> Option<Vec<u8>> {
    let inner = value.strip_prefix(b"\"")?;
    let mut out = Vec::with_capacity(inner.len());
    let mut bytes = inner.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => return bytes.next().is_none().then_some(out),
            b'\\' => out.push(*bytes.next()?),
            byte => out.push(*byte),
        }
    }
    None
}

/// A count of seconds, [`DELTA_MAX`] if it is larger.
pub fn delta_seconds(value: &[u8]) -> Option<u64> {
    let good = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    good.then(|| value.iter().fold(0, |sum: u64, digit| (sum * 10 + u64::from(digit - b'0')).min(DELTA_MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_comma_within_quotes_does_not_part_members() {
        let check = |value: &str, expected: &[&str]| {
            let found: Vec<_> =
                members(value.as_bytes()).map(|it| std::str::from_utf8(it).unwrap()).collect();
            assert_eq!(found, expected, "{value}");
        };
        check("", &[]);
        check(" , ,\t", &[]);
        check("a, b ,c", &["a", "b", "c"]);
        check(r#"a="x, y", b"#, &[r#"a="x, y""#, "b"]);
        check(r#"a="x\", y", b"#, &[r#"a="x\", y""#, "b"]);
        check(r#"a="x, b"#, &[r#"a="x, b"#]);
        check(r#"a\,b"#, &[r#"a\"#, "b"]);
    }

    #[test]
    fn a_quoted_string_is_nothing_but_one() {
        assert_eq!(unquote(br#""a\"b\\""#).as_deref(), Some(&br#"a"b\"#[..]));
        for bad in [r#"a"#, r#"""#, r#""a"#, r#""a" "#, r#""a"b"#, r#""a\"#, "'a'"] {
            assert_eq!(unquote(bad.as_bytes()), None, "{bad}");
        }
    }

    // RFC 9111 section 1.2.2.
    #[test]
    fn seconds_are_digits_and_saturate() {
        for (text, expected) in [
            ("0", Some(0)),
            ("003600", Some(3600)),
            ("2147483647", Some(2_147_483_647)),
            ("2147483649", Some(DELTA_MAX)),
            ("99999999999999999999999999", Some(DELTA_MAX)),
            ("", None),
            ("-1", None),
            ("+1", None),
            ("1.0", None),
            ("1s", None),
            (" 1", None),
        ] {
            assert_eq!(delta_seconds(text.as_bytes()), expected, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn members_are_all_of_the_value_but_commas_and_blanks(value in proptest::collection::vec(
            prop::sample::select(b"ab,\"\\ \t".to_vec()), 0..30)) {
            let kept = |bytes: &[u8]| -> Vec<u8> {
                bytes.iter().copied().filter(|byte| !b", \t".contains(byte)).collect()
            };
            let joined: Vec<u8> = members(&value).flat_map(|member| member.to_vec()).collect();
            prop_assert_eq!(kept(&joined), kept(&value));
        }
    }
}
