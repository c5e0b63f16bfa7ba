//! Which stored encoding is sent (RFC 9110, section 12.5.3).

use super::Variant;

/// A content coding that is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Coding {
    Identity,
    Gzip,
    Brotli,
    Zstd,
}

impl Coding {
    pub const ALL: [Coding; 4] = [Coding::Identity, Coding::Gzip, Coding::Brotli, Coding::Zstd];

    /// As `Content-Encoding` and `Accept-Encoding` call it.
    pub fn name(self) -> &'static str {
        match self {
            Coding::Identity => "identity",
            Coding::Gzip => "gzip",
            Coding::Brotli => "br",
            Coding::Zstd => "zstd",
        }
    }

    pub fn parse(name: &str) -> Option<Coding> {
        let name = if name.eq_ignore_ascii_case("x-gzip") { "gzip" } else { name };
        Coding::ALL.into_iter().find(|coding| coding.name().eq_ignore_ascii_case(name))
    }
}

/// The variant that the client likes best, and of those it likes alike the shortest; `None` if it takes none of them.
/// Without the field it gets what is not encoded, though it would have to take anything.
pub fn negotiate<'a>(accepted: impl Iterator<Item = &'a [u8]>, variants: &[Variant]) -> Option<Variant> {
    let mut sent = false;
    let mut weights = [None; 4];
    let mut others = None;
    for value in accepted {
        sent = true;
        for member in std::str::from_utf8(value).unwrap_or("").split(',') {
            let mut parts = member.split(';').map(|part| part.trim_matches([' ', '\t']));
            let name = parts.next().unwrap_or("");
            let Some(weight) = weight(parts) else { continue };
            if name == "*" {
                others = Some(weight);
            } else if let Some(coding) = Coding::parse(name) {
                weights[coding as usize] = Some(weight);
            }
        }
    }
    let liked = |variant: &&Variant| match (weights[variant.coding as usize].or(others), variant.coding) {
        (Some(0), _) => None,
        (Some(weight), _) => Some(weight),
        // Not mentioned, it is acceptable, and liked less than anything that is mentioned.
        (None, Coding::Identity) => Some(0),
        (None, _) if !sent => Some(0),
        (None, _) => None,
    };
    let plain = |variant: &&Variant| u8::from(!sent && variant.coding != Coding::Identity);
    let best = variants.iter().filter_map(|variant| Some((liked(&variant)?, variant)));
    best.min_by_key(|(weight, variant)| (plain(variant), 1000 - weight, variant.len, variant.coding))
        .map(|(_, variant)| *variant)
}

/// The `q` of a member in thousandths; `None` if its parameters cannot be read.
fn weight<'a>(mut parameters: impl Iterator<Item = &'a str>) -> Option<u16> {
    let Some(parameter) = parameters.next() else { return Some(1000) };
    if parameters.next().is_some() {
        return None;
    }
    let value = parameter.strip_prefix("q=").or_else(|| parameter.strip_prefix("Q="))?;
    let (whole, fraction) = value.split_once('.').unwrap_or((value, ""));
    if fraction.len() > 3 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let thousandths: u16 = format!("{fraction:0<3}").parse().ok()?;
    match whole {
        "0" => Some(thousandths),
        "1" if thousandths == 0 => Some(1000),
        _ => None,
    }
}
