//! Tokens that are good in themselves and not believed any more.

use std::collections::HashSet;

/// A list of revoked tokens, read from a file of one id per line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Revocations {
    /// Of capabilities, by the id of any of their blocks: with a block goes everything that was narrowed from it.
    blocks: HashSet<Vec<u8>>,
    /// Of JWTs, by their `jti`.
    ids: HashSet<String>,
}

/// A line that is no id.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "line {line} is no id of a token: write the hexadecimal id that `ron token inspect` prints, or jti: and the id of a JWT"
)]
pub struct RevocationsError {
    line: usize,
}

impl Revocations {
    /// Empty lines and what follows a `#` are comments.
    pub fn parse(text: &str) -> Result<Revocations, RevocationsError> {
        let mut list = Revocations::default();
        for (index, line) in text.lines().enumerate() {
            let id = line.split('#').next().unwrap_or_default().trim();
            let wrong = RevocationsError { line: index + 1 };
            if id.is_empty() {
                continue;
            }
            match id.strip_prefix("jti:").map(str::trim) {
                Some("") => return Err(wrong),
                Some(jti) => drop(list.ids.insert(jti.to_owned())),
                None => drop(list.blocks.insert(from_hex(id).ok_or(wrong)?)),
            }
        }
        Ok(list)
    }

    pub(super) fn holds_block(&self, id: &[u8]) -> bool {
        self.blocks.contains(id)
    }

    /// Whether the JWT of that `jti` is revoked.
    pub fn holds_jti(&self, jti: &str) -> bool {
        self.ids.contains(jti)
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_holds_ids_and_comments_and_nothing_else() {
        let list = Revocations::parse("# lost\n\n00fF  # a phone\njti: a b\n").unwrap();
        assert!(list.holds_block(&[0, 255]) && list.holds_jti("a b"));
        assert!(!list.holds_block(&[0]) && !list.holds_jti("a"));
        for (text, line) in [("0", 1), ("00\nxyz", 2), ("jti:", 1), ("\n\né0", 3)] {
            assert_eq!(Revocations::parse(text), Err(RevocationsError { line }), "{text}");
        }
    }
}
