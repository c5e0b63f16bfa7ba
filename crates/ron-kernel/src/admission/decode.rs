//! The decode guard: compressed bodies are decoded in small steps, real input and output are counted, and a
//! bomb stops at the cap with the memory it had.

use brotli_decompressor::{BrotliDecompressStream, BrotliResult, BrotliState, StandardAlloc};
use flate2::{Decompress, FlushDecompress, Status};
use http::header::{CONTENT_ENCODING, HeaderMap};
use zstd::stream::raw::{DParameter, InBuffer, Operation, OutBuffer};

/// Output is produced in pieces of this size.
const STEP: usize = 16 << 10;
/// Codings that may be stacked on one body.
const CODINGS_MAX: usize = 2;
/// Below this much output the ratio says nothing: a few dozen bytes of a tiny JSON text compress better than 10:1.
const RATIO_FLOOR: u64 = 4 << 10;
/// The largest zstd window accepted, 8 MiB, as browsers do.
const ZSTD_WINDOW_LOG: u32 = 23;

/// A content coding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    Gzip,
    Deflate,
    Brotli,
    Zstd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeLimits {
    /// Output over input.
    pub ratio_max: u64,
    /// Output in all.
    pub bytes_max: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("the body decodes to more than the cap")]
    Cap,
    #[error("the body decodes to more than the ratio allows")]
    Ratio,
    #[error("the body is not valid in its content coding")]
    Corrupt,
    #[error("the body ends in the middle of its content coding")]
    Truncated,
}

/// The codings of a body, outermost last; `None` if one is not supported or too many are stacked.
pub fn codings(headers: &HeaderMap) -> Option<Vec<Coding>> {
    let mut found = Vec::new();
    for value in headers.get_all(CONTENT_ENCODING) {
        for word in value.to_str().ok()?.split(',') {
            found.push(match word.trim().to_ascii_lowercase().as_str() {
                "identity" => continue,
                "gzip" | "x-gzip" => Coding::Gzip,
                "deflate" => Coding::Deflate,
                "br" => Coding::Brotli,
                "zstd" => Coding::Zstd,
                _ => return None,
            });
        }
    }
    (found.len() <= CODINGS_MAX).then_some(found)
}

/// Decodes one body under limits.
#[derive(Debug)]
pub struct DecodeGuard {
    /// In the order in which they are undone.
    stages: Vec<Stage>,
    limits: DecodeLimits,
    input: u64,
    output: u64,
}

impl DecodeGuard {
    pub fn new(codings: &[Coding], limits: DecodeLimits) -> DecodeGuard {
        let stages = codings.iter().rev().map(|coding| Stage::new(*coding)).collect();
        DecodeGuard { stages, limits, input: 0, output: 0 }
    }

    /// Decodes what it can of `input`, handing output to `sink` in pieces of at most 16 KiB.
    pub fn push(&mut self, input: &[u8], sink: &mut dyn FnMut(&[u8])) -> Result<(), DecodeError> {
        // A large piece is counted as it is consumed, so that its head is not judged by its tail.
        for piece in input.chunks(STEP) {
            self.input += piece.len() as u64;
            let mut count = Count { limits: self.limits, input: self.input, output: &mut self.output };
            run(&mut self.stages, piece, &mut count, sink)?;
        }
        Ok(())
    }

    /// Says whether the body was complete.
    pub fn finish(&self) -> Result<(), DecodeError> {
        let complete = self.stages.iter().all(|stage| stage.at_end);
        if complete { Ok(()) } else { Err(DecodeError::Truncated) }
    }

    pub fn output(&self) -> u64 {
        self.output
    }
}

struct Count<'a> {
    limits: DecodeLimits,
    input: u64,
    output: &'a mut u64,
}

/// Feeds the first stage and everything it gives to the next; the last one's output is counted and kept.
fn run(
    stages: &mut [Stage],
    input: &[u8],
    count: &mut Count<'_>,
    sink: &mut dyn FnMut(&[u8]),
) -> Result<(), DecodeError> {
    let Some((first, rest)) = stages.split_first_mut() else {
        *count.output += input.len() as u64;
        if *count.output > count.limits.bytes_max {
            return Err(DecodeError::Cap);
        }
        sink(input);
        return Ok(());
    };
    let mut buffer = [0; STEP];
    let mut input = input;
    loop {
        let (consumed, produced) = first.step(input, &mut buffer)?;
        input = &input[consumed..];
        first.output += produced as u64;
        // Every stage is held to the limits, so that a bomb within a bomb is caught where it goes off.
        if first.output > count.limits.bytes_max {
            return Err(DecodeError::Cap);
        }
        if first.output > RATIO_FLOOR.max(count.input.saturating_mul(count.limits.ratio_max)) {
            return Err(DecodeError::Ratio);
        }
        if rest.is_empty() {
            *count.output = first.output;
            if produced > 0 {
                sink(&buffer[..produced]);
            }
        } else if produced > 0 {
            run(rest, &buffer[..produced], count, sink)?;
        }
        if consumed == 0 && produced == 0 || input.is_empty() && produced < STEP {
            return if input.is_empty() { Ok(()) } else { Err(DecodeError::Corrupt) };
        }
    }
}

#[derive(Debug)]
struct Stage {
    engine: Engine,
    output: u64,
    /// The stream may end here.
    at_end: bool,
}

type Brotli = BrotliState<StandardAlloc, StandardAlloc, StandardAlloc>;

enum Engine {
    Gzip(Decompress),
    Deflate(Decompress),
    Brotli(Box<Brotli>),
    Zstd(Box<zstd::stream::raw::Decoder<'static>>),
    /// An engine that cannot be made decodes nothing.
    Broken,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Engine::Gzip(_) => "gzip",
            Engine::Deflate(_) => "deflate",
            Engine::Brotli(_) => "br",
            Engine::Zstd(_) => "zstd",
            Engine::Broken => "broken",
        })
    }
}

impl Stage {
    fn new(coding: Coding) -> Stage {
        let engine = match coding {
            Coding::Gzip => Engine::Gzip(Decompress::new_gzip(15)),
            Coding::Deflate => Engine::Deflate(Decompress::new(true)),
            Coding::Brotli => Engine::Brotli(Box::new(new_brotli())),
            Coding::Zstd => new_zstd().map_or(Engine::Broken, |decoder| Engine::Zstd(Box::new(decoder))),
        };
        Stage { engine, output: 0, at_end: false }
    }

    /// Decodes as much as fits; returns what was consumed and produced.
    fn step(&mut self, input: &[u8], buffer: &mut [u8]) -> Result<(usize, usize), DecodeError> {
        match &mut self.engine {
            Engine::Gzip(_) | Engine::Deflate(_) => self.inflate(input, buffer),
            Engine::Brotli(state) => {
                if self.at_end {
                    return if input.is_empty() { Ok((0, 0)) } else { Err(DecodeError::Corrupt) };
                }
                let (mut left, mut consumed, mut room, mut produced, mut total) =
                    (input.len(), 0, buffer.len(), 0, 0);
                let result = BrotliDecompressStream(
                    &mut left,
                    &mut consumed,
                    input,
                    &mut room,
                    &mut produced,
                    buffer,
                    &mut total,
                    state,
                );
                self.at_end = matches!(result, BrotliResult::ResultSuccess);
                match result {
                    BrotliResult::ResultFailure => Err(DecodeError::Corrupt),
                    _ => Ok((consumed, produced)),
                }
            }
            Engine::Zstd(decoder) => {
                let (mut from, mut to) = (InBuffer::around(input), OutBuffer::around(buffer));
                let hint = decoder.run(&mut from, &mut to).map_err(|_not_zstd| DecodeError::Corrupt)?;
                if from.pos() > 0 || to.pos() > 0 {
                    self.at_end = hint == 0;
                }
                Ok((from.pos(), to.pos()))
            }
            Engine::Broken => Err(DecodeError::Corrupt),
        }
    }

    fn inflate(&mut self, input: &[u8], buffer: &mut [u8]) -> Result<(usize, usize), DecodeError> {
        // Gzip allows members one after another; the next one begins with a fresh engine.
        if self.at_end && !input.is_empty() {
            match &mut self.engine {
                Engine::Gzip(engine) => *engine = Decompress::new_gzip(15),
                _ => return Err(DecodeError::Corrupt),
            }
            self.at_end = false;
        }
        let (Engine::Gzip(engine) | Engine::Deflate(engine)) = &mut self.engine else {
            return Err(DecodeError::Corrupt);
        };
        let (before_in, before_out) = (engine.total_in(), engine.total_out());
        let status = engine.decompress(input, buffer, FlushDecompress::None);
        let moved = |now: u64, before: u64| usize::try_from(now - before).unwrap_or(usize::MAX);
        let step = (moved(engine.total_in(), before_in), moved(engine.total_out(), before_out));
        match status {
            Ok(Status::StreamEnd) => self.at_end = true,
            Ok(Status::Ok | Status::BufError) => {}
            Err(_) => return Err(DecodeError::Corrupt),
        }
        Ok(step)
    }
}

fn new_brotli() -> Brotli {
    BrotliState::new(StandardAlloc::default(), StandardAlloc::default(), StandardAlloc::default())
}

fn new_zstd() -> Option<zstd::stream::raw::Decoder<'static>> {
    let mut decoder = zstd::stream::raw::Decoder::new().ok()?;
    decoder.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_LOG)).ok()?;
    Some(decoder)
}

#[cfg(test)]
mod tests;
