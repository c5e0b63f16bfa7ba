//! CBOR (RFC 8949) for the JSON values that the registry speaks: definite lengths, text keys, no tags.

use serde_json::{Map, Number, Value};

/// Values inside values.
const DEPTH_MAX: usize = 32;

/// Bytes that are no such value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CborError(&'static str);

/// Reads one value and nothing after it.
pub fn decode(bytes: &[u8]) -> Result<Value, CborError> {
    let mut reader = Reader { rest: bytes };
    let value = reader.value(0)?;
    if reader.rest.is_empty() { Ok(value) } else { Err(CborError("more follows the value")) }
}

pub fn encode(value: &Value) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    write(value, &mut out);
    out
}

fn head(out: &mut Vec<u8>, major: u8, number: u64) {
    let major = major << 5;
    match number {
        0..24 => out.push(major | number as u8),
        24..0x100 => out.extend([major | 24, number as u8]),
        0x100..0x1_0000 => {
            out.push(major | 25);
            out.extend((number as u16).to_be_bytes());
        }
        0x1_0000..0x1_0000_0000 => {
            out.push(major | 26);
            out.extend((number as u32).to_be_bytes());
        }
        _ => {
            out.push(major | 27);
            out.extend(number.to_be_bytes());
        }
    }
}

fn write(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Null => out.push(0xf6),
        Value::Bool(flag) => out.push(0xf4 | u8::from(*flag)),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => head(out, 0, number),
            (None, Some(number)) => head(out, 1, !number as u64),
            (None, None) => {
                out.push(0xfb);
                out.extend(number.as_f64().unwrap_or(f64::NAN).to_be_bytes());
            }
        },
        Value::String(text) => {
            head(out, 3, text.len() as u64);
            out.extend(text.as_bytes());
        }
        Value::Array(list) => {
            head(out, 4, list.len() as u64);
            list.iter().for_each(|value| write(value, out));
        }
        Value::Object(members) => {
            head(out, 5, members.len() as u64);
            for (name, value) in members {
                head(out, 3, name.len() as u64);
                out.extend(name.as_bytes());
                write(value, out);
            }
        }
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], CborError> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(CborError("it ends too early"))?;
        self.rest = rest;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], CborError> {
        Ok(self.take(N)?.try_into().expect("as many as were taken"))
    }

    fn text(&mut self, length: u64) -> Result<&'a str, CborError> {
        let length = usize::try_from(length).ok().ok_or(CborError("it ends too early"))?;
        std::str::from_utf8(self.take(length)?).ok().ok_or(CborError("a text is not UTF-8"))
    }

    fn value(&mut self, depth: usize) -> Result<Value, CborError> {
        if depth > DEPTH_MAX {
            return Err(CborError("values are nested too deeply"));
        }
        let first = self.take(1)?[0];
        let (major, info) = (first >> 5, first & 31);
        if major == 7 {
            return self.simple(info);
        }
        let argument = match info {
            0..24 => u64::from(info),
            24 => u64::from(self.take(1)?[0]),
            25 => u64::from(u16::from_be_bytes(self.number()?)),
            26 => u64::from(u32::from_be_bytes(self.number()?)),
            27 => u64::from_be_bytes(self.number()?),
            _ => return Err(CborError("a length must be definite")),
        };
        match major {
            0 => Ok(argument.into()),
            1 => {
                let number = i64::try_from(argument).ok().ok_or(CborError("a number is too small"))?;
                Ok((!number).into())
            }
            3 => Ok(self.text(argument)?.into()),
            4 => (0..argument).map(|_| self.value(depth + 1)).collect(),
            5 => {
                let mut members = Map::new();
                for _ in 0..argument {
                    let Value::String(name) = self.value(depth + 1)? else {
                        return Err(CborError("the name of a member must be a text"));
                    };
                    let value = self.value(depth + 1)?;
                    if members.insert(name, value).is_some() {
                        return Err(CborError("a member occurs twice"));
                    }
                }
                Ok(Value::Object(members))
            }
            _ => Err(CborError("byte strings and tags have no place in JSON")),
        }
    }

    fn simple(&mut self, info: u8) -> Result<Value, CborError> {
        let float = match info {
            20 => return Ok(Value::Bool(false)),
            21 => return Ok(Value::Bool(true)),
            22 => return Ok(Value::Null),
            25 => half(u16::from_be_bytes(self.number()?)),
            26 => f64::from(f32::from_be_bytes(self.number()?)),
            27 => f64::from_be_bytes(self.number()?),
            _ => return Err(CborError("a simple value that JSON does not have")),
        };
        Number::from_f64(float).map(Value::Number).ok_or(CborError("a number is not finite"))
    }
}

/// A number of sixteen bits: a sign, five bits of the exponent, ten of the fraction.
fn half(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let size = match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (fraction + 1024.0) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_written_is_read_back() {
        let value = json!({
            "a": [null, true, false, 0, 23, 24, 255, 256, 65_536, 4_294_967_296_u64, -1, -25, 1.5, "é\"\n"],
            "b": {"c": {}, "d": []},
        });
        assert_eq!(decode(&encode(&value)), Ok(value));
        assert_eq!(
            encode(&json!({"a": 1, "b": [2, 3]})),
            [0xa2, 0x61, 0x61, 1, 0x61, 0x62, 0x82, 2, 3],
            "RFC 8949"
        );
    }

    #[test]
    fn numbers_of_every_width_are_read() {
        for (bytes, number) in [
            (&[0xf9, 0x3e, 0x00][..], 1.5),
            (&[0xf9, 0xc4, 0x00], -4.0),
            (&[0xf9, 0x7b, 0xff], 65_504.0),
            (&[0xf9, 0x00, 0x01], 5.960464477539063e-8),
            (&[0xf9, 0x04, 0x00], 0.00006103515625),
            (&[0xfa, 0x47, 0xc3, 0x50, 0x00], 100_000.0),
            (&[0xfb, 0x40, 0x2d, 0x80, 0x4e, 0x7d, 0x48, 0x12, 0x50], 14.750598826453967),
        ] {
            assert_eq!(decode(bytes), Ok(json!(number)), "{bytes:?}");
        }
    }

    #[test]
    fn what_json_cannot_say_is_refused() {
        let deep = [vec![0x81; 40], vec![0]].concat();
        for bad in [
            &[][..],
            &[0x01, 0x01],
            &[0x9f, 0xff],
            &[0x41, 0],
            &[0xc0, 0],
            &[0xa1, 1, 1],
            &[0xa2, 0x61, 0x61, 1, 0x61, 0x61, 2],
            &[0xf9, 0x7c, 0],
            &[0xf9, 0x7e, 0],
            &[0xf8, 32],
            &[0xfb, 0x7f, 0xf0, 0, 0, 0, 0, 0, 0],
            &[0x62, 0xff, 0xff],
            &[0x9b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
            &deep,
        ] {
            assert!(decode(bad).is_err(), "{bad:?}");
        }
    }
}
