//! Durations and sizes as people write them: `250ms`, `1MiB`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A duration written `250ms`, `5s`, `2m`, `1h` or `30d`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

/// A number of bytes written `512B`, `64KiB`, `1MiB` or `10GiB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl Span {
    pub const fn millis(ms: u64) -> Span {
        Span(Duration::from_millis(ms))
    }

    pub const fn secs(secs: u64) -> Span {
        Span(Duration::from_secs(secs))
    }
}

impl Size {
    pub const fn kib(n: u64) -> Size {
        Size(n << 10)
    }

    pub const fn mib(n: u64) -> Size {
        Size(n << 20)
    }

    pub fn usize(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

const TIME_UNITS: [(&str, u64); 5] =
    [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];
const SIZE_UNITS: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// Splits `12abc` into 12 and `abc` and multiplies by the unit.
fn parse(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let factor = units.iter().find(|(name, _)| *name == unit)?.1;
    number.parse::<u64>().ok()?.checked_mul(factor)
}

/// The largest unit that divides the value exactly.
fn write(f: &mut fmt::Formatter<'_>, value: u64, units: &[(&str, u64)]) -> fmt::Result {
    let fitting = units.iter().find(|(_, factor)| value != 0 && value.is_multiple_of(*factor));
    let (name, factor) = fitting.copied().unwrap_or(units[units.len() - 1]);
    write!(f, "{}{name}", value / factor)
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Span, String> {
        if text == "0" {
            return Ok(Span(Duration::ZERO));
        }
        parse(text, &TIME_UNITS).map(|ms| Span(Duration::from_millis(ms))).ok_or_else(|| {
            format!(
                "{text:?} is no duration: write a number and ms, s, m, h or d, such as \"250ms\" or \"5s\""
            )
        })
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        parse(text, &SIZE_UNITS).map(Size).ok_or_else(|| {
            format!("{text:?} is no size: write a whole number and B, KiB, MiB or GiB, such as \"64KiB\"")
        })
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write(f, u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX), &TIME_UNITS)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write(f, self.0, &SIZE_UNITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_and_written_alike() {
        for text in ["250ms", "5s", "2m", "1h", "30d", "1500ms", "0ms"] {
            assert_eq!(text.parse::<Span>().unwrap().to_string(), text);
        }
        for text in ["512B", "64KiB", "1MiB", "10GiB", "1025B", "0B"] {
            assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_value_is_refused_with_advice() {
        for text in ["5 parsecs", "s", "", "-1s", "1.5s", "99999999999999999999s"] {
            assert!(text.parse::<Span>().unwrap_err().contains("write a number"), "{text}");
        }
        for text in ["1MB", "1 MiB", "KiB", "18446744073709551615GiB"] {
            assert!(text.parse::<Size>().unwrap_err().contains("KiB"), "{text}");
        }
    }
}
