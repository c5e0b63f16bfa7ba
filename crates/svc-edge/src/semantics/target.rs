//! From a request's path to a name, in one way only.

/// Why a path is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadPath {
    Escape,
    Dots,
    Byte,
    Empty,
    Long,
}

/// The longest name.
const NAME_MAX: usize = 1024;

impl BadPath {
    pub fn detail(self) -> &'static str {
        match self {
            BadPath::Escape => "the path has an escape that is none",
            BadPath::Dots => "the path has a dot segment",
            BadPath::Byte => "the path has a byte that no name has",
            BadPath::Empty => "the path names nothing",
            BadPath::Long => "the path is too long",
        }
    }
}

/// Decodes a path once. What it yields has no dot segment, control character or backslash, and is UTF-8, so that it is
/// never read a second way by anything behind.
pub fn decode_path(path: &str) -> Result<String, BadPath> {
    let mut out = Vec::with_capacity(path.len());
    let mut bytes = path.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || char::from(bytes.next()?).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        match (digit(), digit()) {
            (Some(high), Some(low)) => out.push(high << 4 | low),
            _ => return Err(BadPath::Escape),
        }
    }
    let name = String::from_utf8(out).map_err(|_not_utf8| BadPath::Byte)?;
    if name.chars().any(|c| c.is_control() || c == '\\') {
        return Err(BadPath::Byte);
    }
    if name.split('/').any(|segment| matches!(segment, "." | "..")) {
        return Err(BadPath::Dots);
    }
    if name.is_empty() {
        return Err(BadPath::Empty);
    }
    if name.len() > NAME_MAX { Err(BadPath::Long) } else { Ok(name) }
}

/// A path as a URL has it, from a name that was decoded.
pub fn encode_path(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@/".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}
