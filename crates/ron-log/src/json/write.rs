//! The writer: RFC 8785's form of each value.

use super::Json;
use std::fmt::Write as _;

pub(super) fn value(value: &Json<'_>, out: &mut String) {
    match value {
        Json::Null => out.push_str("null"),
        Json::Bool(true) => out.push_str("true"),
        Json::Bool(false) => out.push_str("false"),
        Json::Int(number) => {
            let _ = write!(out, "{number}");
        }
        Json::Float(number) => float(*number, out),
        Json::Text(string) => text(string, out),
        Json::List(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                self::value(item, out);
            }
            out.push(']');
        }
        Json::Object(members) => {
            out.push('{');
            for (index, (name, item)) in members.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                text(name, out);
                out.push(':');
                self::value(item, out);
            }
            out.push('}');
        }
    }
}

/// Writes a string as canonical JSON, quotes included.
pub fn write_text(string: &str, out: &mut String) {
    text(string, out);
}

pub(super) fn text(string: &str, out: &mut String) {
    out.push('"');
    // Most have nothing to escape, which many bytes at a time can be seen of.
    let special = |special: bool, byte: &u8| special | matches!(byte, 0..0x20 | b'"' | b'\\');
    if !string.as_bytes().chunks(64).any(|chunk| chunk.iter().fold(false, special)) {
        out.push_str(string);
        return out.push('"');
    }
    let mut from = 0;
    for (at, byte) in string.bytes().enumerate() {
        let short = match byte {
            b'"' => "\\\"",
            b'\\' => "\\\\",
            8 => "\\b",
            9 => "\\t",
            10 => "\\n",
            12 => "\\f",
            13 => "\\r",
            0..0x20 => "",
            _ => continue,
        };
        out.push_str(&string[from..at]);
        if short.is_empty() {
            let _ = write!(out, "\\u{byte:04x}");
        } else {
            out.push_str(short);
        }
        from = at + 1;
    }
    out.push_str(&string[from..]);
    out.push('"');
}

/// ECMAScript's form: the fewest digits that read back alike, placed by its rules.
fn float(number: f64, out: &mut String) {
    if number == 0.0 {
        return out.push('0');
    }
    let shortest = digits(number.abs());
    let (digits, exponent) = shortest.split_once('e').expect("Rust writes an exponent here");
    let digits = digits.replace('.', "");
    let exponent: i32 = exponent.parse().expect("Rust writes a whole exponent");
    if number < 0.0 {
        out.push('-');
    }
    let (count, point) = (digits.len() as i32, exponent + 1);
    if (count..=21).contains(&point) {
        out.push_str(&digits);
        out.extend(std::iter::repeat_n('0', (point - count) as usize));
    } else if (1..=21).contains(&point) {
        let (whole, rest) = digits.split_at(point as usize);
        let _ = write!(out, "{whole}.{rest}");
    } else if (-5..=0).contains(&point) {
        out.push_str("0.");
        out.extend(std::iter::repeat_n('0', -point as usize));
        out.push_str(&digits);
    } else {
        let (first, rest) = digits.split_at(1);
        out.push_str(first);
        if !rest.is_empty() {
            let _ = write!(out, ".{rest}");
        }
        let _ = write!(out, "e{exponent:+}");
    }
}

/// The fewest digits, with an exponent. Of several that are as few it is the nearest, and of two that are as near the even one,
/// which Rust's shortest form does not promise.
fn digits(number: f64) -> String {
    let shortest = format!("{number:e}");
    let mantissa = shortest.split('e').next().map_or(0, str::len);
    let nearest = format!("{number:.*e}", mantissa.saturating_sub("0.".len()));
    if nearest.parse() == Ok(number) { nearest } else { shortest }
}

#[cfg(test)]
mod tests {
    use super::super::Json;
    use super::float;

    #[test]
    fn numbers_are_written_as_ecmascript_does() {
        // The samples of RFC 8785, and numbers half way between two forms.
        for (bits, expected) in [
            (0x8000_0000_0000_0000, "0"),
            (0x0000_0000_0000_0001, "5e-324"),
            (0x8000_0000_0000_0001, "-5e-324"),
            (0x7fef_ffff_ffff_ffff, "1.7976931348623157e+308"),
            (0xffef_ffff_ffff_ffff, "-1.7976931348623157e+308"),
            (0x4340_0000_0000_0000, "9007199254740992"),
            (0xc340_0000_0000_0000, "-9007199254740992"),
            (0x4430_0000_0000_0000, "295147905179352830000"),
            (0x44b5_2d02_c7e1_4af5, "9.999999999999997e+22"),
            (0x44b5_2d02_c7e1_4af6, "1e+23"),
            (0x44b5_2d02_c7e1_4af7, "1.0000000000000001e+23"),
            (0x444b_1ae4_d6e2_ef4e, "999999999999999700000"),
            (0x444b_1ae4_d6e2_ef4f, "999999999999999900000"),
            (0x444b_1ae4_d6e2_ef50, "1e+21"),
            (0x3eb0_c6f7_a0b5_ed8c, "9.999999999999997e-7"),
            (0x3eb0_c6f7_a0b5_ed8d, "0.000001"),
            (0x41b3_de43_5555_5553, "333333333.3333332"),
            (0x41b3_de43_5555_5554, "333333333.33333325"),
            (0x41b3_de43_5555_5555, "333333333.3333333"),
            (0x41b3_de43_5555_5556, "333333333.3333334"),
            (0x41b3_de43_5555_5557, "333333333.33333343"),
            (0xbecb_f647_612f_3696, "-0.0000033333333333333333"),
            (0x4314_3ff3_c1cb_0959, "1424953923781206.2"),
            (0x4314_3ff3_c1cb_095b, "1424953923781206.8"),
            (0x4024_0000_0000_0000, "10"),
        ] {
            let mut written = String::new();
            float(f64::from_bits(bits), &mut written);
            assert_eq!(written, expected, "{bits:x}");
        }
    }

    fn check(input: &str, expected: &str) {
        assert_eq!(Json::parse(input.as_bytes()).expect(input).canonical(), expected);
        let strict = Json::parse_canonical(input.as_bytes());
        assert_eq!(strict.is_ok(), input == expected, "{input}: {strict:?}");
        Json::parse_canonical(expected.as_bytes()).expect("what we write is canonical");
    }

    #[test]
    fn values_are_written_as_rfc_8785_says() {
        check(r#"{"b":1,"a":[true, null]}"#, r#"{"a":[true,null],"b":1}"#);
        check(
            "[1.0,-0,1e2,0.1,1e-7,1.5e-9,333333333.33333329]",
            "[1,0,100,0.1,1e-7,1.5e-9,333333333.3333333]",
        );
        check("[0.000001,0.0000123]", "[0.000001,0.0000123]");
        check(r#""\u20ac$\u000f\nA'B\"\\\/\ud83d\ude02""#, "\"€$\\u000f\\nA'B\\\"\\\\/😂\"");
        // By UTF-16 units the surrogates of the emoji come before U+FB33; by code points they would not.
        check(
            "{\"\u{fb33}\":1,\"\u{1f602}\":2,\"\u{80}\":3,\"1\":4,\"\\r\":5}",
            "{\"\\r\":5,\"1\":4,\"\u{80}\":3,\"\u{1f602}\":2,\"\u{fb33}\":1}",
        );
        check(r#"{"a":9007199254740991}"#, r#"{"a":9007199254740991}"#);
    }

    #[test]
    fn what_two_readers_could_see_differently_is_refused() {
        let deep = "[".repeat(40) + &"]".repeat(40);
        for bad in [
            r#"{"a":1,"a":2}"#,
            r#"{"a":1,"\u0061":2}"#,
            "9007199254740992",
            "-9007199254740992",
            "1e16",
            "123456789012345678901234567890",
            r#""\ud800""#,
            r#""\ud800\u0041""#,
            r#""\udc00""#,
            "\"\u{1}\"",
            "01",
            "1.",
            ".5",
            "+1",
            "[1,]",
            "{\"a\":1,}",
            "{} {}",
            "nul",
            "\"a",
            "\"\\x\"",
            "",
            "NaN",
            &deep,
        ] {
            assert!(Json::parse(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(Json::parse(b"\"\xff\"").is_err());
    }
}
