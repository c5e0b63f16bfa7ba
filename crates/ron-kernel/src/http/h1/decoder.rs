//! A message body taken off the front of a buffer, whatever its framing.

use super::chunked::{BadChunk, ChunkDecoder, Piece};
use super::head::Framing;
use bytes::{Bytes, BytesMut};
use http::HeaderMap;

/// Bodies are read and passed on in pieces of at most this size.
const PIECE: usize = 64 << 10;

/// What is left of a body.
#[derive(Debug)]
pub enum BodyDecoder {
    Done,
    Length(u64),
    Chunked(ChunkDecoder),
    UntilClose,
}

/// What the decoder found.
#[derive(Debug, PartialEq, Eq)]
pub enum Decoded {
    Data(Bytes),
    Trailers(HeaderMap),
    /// More input is needed.
    More,
    End,
}

impl BodyDecoder {
    pub fn new(framing: Framing) -> BodyDecoder {
        match framing {
            Framing::Length(0) => BodyDecoder::Done,
            Framing::Length(length) => BodyDecoder::Length(length),
            Framing::Chunked => BodyDecoder::Chunked(ChunkDecoder::default()),
            Framing::UntilClose => BodyDecoder::UntilClose,
        }
    }

    pub fn decode(&mut self, buffer: &mut BytesMut) -> Result<Decoded, BadChunk> {
        match self {
            BodyDecoder::Done => Ok(Decoded::End),
            BodyDecoder::Length(_) | BodyDecoder::UntilClose if buffer.is_empty() => Ok(Decoded::More),
            BodyDecoder::UntilClose => Ok(Decoded::Data(buffer.split_to(buffer.len().min(PIECE)).freeze())),
            BodyDecoder::Length(left) => {
                let take = usize::try_from(*left).unwrap_or(usize::MAX).min(buffer.len()).min(PIECE);
                *left -= take as u64;
                if *left == 0 {
                    *self = BodyDecoder::Done;
                }
                Ok(Decoded::Data(buffer.split_to(take).freeze()))
            }
            BodyDecoder::Chunked(decoder) => Ok(match decoder.decode(buffer)? {
                Piece::Data(data) => Decoded::Data(data),
                Piece::More => Decoded::More,
                Piece::End(trailers) => {
                    *self = BodyDecoder::Done;
                    trailers.map_or(Decoded::End, Decoded::Trailers)
                }
            }),
        }
    }

    pub fn is_done(&self) -> bool {
        matches!(self, BodyDecoder::Done)
    }

    /// The input has ended: whether that is how the body may end.
    pub fn end_of_input(&mut self) -> bool {
        let fine = matches!(self, BodyDecoder::Done | BodyDecoder::UntilClose);
        *self = BodyDecoder::Done;
        fine
    }

    /// The bytes still to come, if that is known.
    pub fn left(&self) -> Option<u64> {
        match self {
            BodyDecoder::Done => Some(0),
            BodyDecoder::Length(left) => Some(*left),
            BodyDecoder::Chunked(_) | BodyDecoder::UntilClose => None,
        }
    }

    /// How much room to offer the next read.
    pub fn wanted(&self) -> usize {
        self.left().map_or(PIECE, |left| usize::try_from(left).unwrap_or(PIECE).clamp(1024, PIECE))
    }
}
