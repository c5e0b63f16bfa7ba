//! The chunked transfer coding, decoded as strictly as it is written.

use bytes::{Buf, Bytes, BytesMut};
use http::header::{HeaderMap, HeaderName, HeaderValue};

/// Longest size line, extensions included; nobody uses them.
const SIZE_LINE_MAX: usize = 256;
/// Longest trailer section.
const TRAILERS_MAX: usize = 8 << 10;
const TRAILER_FIELDS_MAX: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadChunk(pub &'static str);

/// What the decoder found.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece {
    Data(Bytes),
    /// The buffer holds nothing more to decode.
    More,
    /// The body is complete.
    End(Option<HeaderMap>),
}

#[derive(Debug, Default)]
pub struct ChunkDecoder {
    state: State,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Size,
    Data(u64),
    DataEnd,
    Trailers,
    Done,
}

impl ChunkDecoder {
    /// Takes the next piece off the front of the buffer.
    pub fn decode(&mut self, buffer: &mut BytesMut) -> Result<Piece, BadChunk> {
        loop {
            match self.state {
                State::Size => {
                    let Some(line) = take_line(buffer, SIZE_LINE_MAX)? else { return Ok(Piece::More) };
                    let size = parse_size(&line)?;
                    self.state = if size == 0 { State::Trailers } else { State::Data(size) };
                }
                State::Data(left) => {
                    if buffer.is_empty() {
                        return Ok(Piece::More);
                    }
                    let take = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
                    let data = buffer.split_to(take).freeze();
                    let left = left - take as u64;
                    self.state = if left == 0 { State::DataEnd } else { State::Data(left) };
                    return Ok(Piece::Data(data));
                }
                State::DataEnd => {
                    match (buffer.first(), buffer.get(1)) {
                        (Some(b'\r'), Some(b'\n')) => buffer.advance(2),
                        (None, _) | (Some(b'\r'), None) => return Ok(Piece::More),
                        _ => return Err(BadChunk("a chunk does not end in CR LF")),
                    }
                    self.state = State::Size;
                }
                State::Trailers => return self.trailers(buffer),
                State::Done => return Ok(Piece::End(None)),
            }
        }
    }

    pub fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Waits for the whole trailer section, then reads it.
    fn trailers(&mut self, buffer: &mut BytesMut) -> Result<Piece, BadChunk> {
        let end = if buffer.starts_with(b"\r\n") {
            Some(2)
        } else {
            memchr::memmem::find(buffer, b"\r\n\r\n").map(|at| at + 4)
        };
        let Some(end) = end else {
            return if buffer.len() > TRAILERS_MAX {
                Err(BadChunk("the trailers are too long"))
            } else {
                Ok(Piece::More)
            };
        };
        if end > TRAILERS_MAX {
            return Err(BadChunk("the trailers are too long"));
        }
        let section = buffer.split_to(end).freeze();
        self.state = State::Done;
        if end == 2 {
            return Ok(Piece::End(None));
        }
        let bare = memchr::memchr_iter(b'\n', &section).any(|at| at == 0 || section[at - 1] != b'\r');
        let mut slots = [httparse::EMPTY_HEADER; TRAILER_FIELDS_MAX];
        let parsed = match httparse::parse_headers(&section, &mut slots) {
            Ok(httparse::Status::Complete((_, parsed))) if !bare => parsed,
            _ => return Err(BadChunk("the trailers are malformed")),
        };
        let mut trailers = HeaderMap::with_capacity(parsed.len());
        for field in parsed {
            let name = HeaderName::from_bytes(field.name.as_bytes());
            let value = HeaderValue::from_bytes(field.value);
            let (Ok(name), Ok(value)) = (name, value) else {
                return Err(BadChunk("the trailers are malformed"));
            };
            trailers.append(name, value);
        }
        Ok(Piece::End(Some(trailers)))
    }
}

/// A line without its CR LF, if it is complete.
fn take_line(buffer: &mut BytesMut, max: usize) -> Result<Option<Bytes>, BadChunk> {
    let window = &buffer[..buffer.len().min(max)];
    match memchr::memchr(b'\n', window) {
        Some(at) if at > 0 && window[at - 1] == b'\r' => {
            let line = buffer.split_to(at + 1).freeze();
            Ok(Some(line.slice(..at - 1)))
        }
        Some(_) => Err(BadChunk("a chunk size does not end in CR LF")),
        None if buffer.len() >= max => Err(BadChunk("a chunk size line is too long")),
        None => Ok(None),
    }
}

/// Hex digits, then nothing or an extension.
fn parse_size(line: &[u8]) -> Result<u64, BadChunk> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    if !(1..=15).contains(&digits) {
        return Err(BadChunk("a chunk size is no hexadecimal number"));
    }
    let rest = &line[digits..];
    let extension = rest.first().is_none_or(|byte| *byte == b';');
    if !extension || rest.iter().any(|byte| byte.is_ascii_control() && *byte != b'\t') {
        return Err(BadChunk("a chunk size is followed by something else"));
    }
    Ok(line[..digits]
        .iter()
        .fold(0, |sum, digit| sum * 16 + u64::from((*digit as char).to_digit(16).unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(parts: &[&[u8]]) -> Result<(Vec<u8>, Option<HeaderMap>), BadChunk> {
        let (mut decoder, mut buffer, mut out) = (ChunkDecoder::default(), BytesMut::new(), Vec::new());
        for part in parts {
            buffer.extend_from_slice(part);
            loop {
                match decoder.decode(&mut buffer)? {
                    Piece::Data(data) => out.extend_from_slice(&data),
                    Piece::More => break,
                    Piece::End(trailers) => return Ok((out, trailers)),
                }
            }
        }
        Err(BadChunk("incomplete"))
    }

    #[test]
    fn chunks_extensions_and_trailers_are_read() {
        let (body, trailers) = decode(&[b"5;x=y\r\nhello\r\n6\r\n world\r\n0\r\nX-Sum: 1\r\n\r\n"]).unwrap();
        assert_eq!((&body[..], &trailers.unwrap()["x-sum"]), (&b"hello world"[..], &"1".parse().unwrap()));
    }

    #[test]
    fn malformed_chunks_are_refused() {
        for bad in [
            &b"\r\n"[..],
            b"g\r\n",
            b"-1\r\n",
            b"+1\r\n",
            b"0x1\r\n",
            b" 1\r\n",
            b"1 \r\na\r\n0\r\n\r\n",
            b"1\na\n",
            b"1\r\nab\r\n",
            b"1\r\na\n0\r\n\r\n",
            b"fffffffffffffffff\r\n",
            b"1;a\x00\r\na\r\n0\r\n\r\n",
            b"0\r\nX : y\r\n\r\n",
            b"0\r\nX: y\nZ: w\r\n\r\n",
        ] {
            let error = decode(&[bad]).unwrap_err();
            assert_ne!(error.0, "incomplete", "{bad:?}");
        }
        assert!(decode(&[&[b'0'; 300]]).is_err());
        assert!(decode(&[b"0\r\n", &[b'a'; 9000]]).is_err());
    }

    proptest! {
        #[test]
        fn any_body_survives_any_cutting(
            body in proptest::collection::vec(any::<u8>(), 0..500),
            chunk in 1usize..80,
            cut in 1usize..40,
        ) {
            let mut wire = Vec::new();
            for piece in body.chunks(chunk) {
                wire.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
                wire.extend_from_slice(piece);
                wire.extend_from_slice(b"\r\n");
            }
            wire.extend_from_slice(b"0\r\n\r\n");
            let parts: Vec<&[u8]> = wire.chunks(cut).collect();
            prop_assert_eq!(decode(&parts), Ok((body, None)));
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode(&[&bytes]);
        }
    }
}
