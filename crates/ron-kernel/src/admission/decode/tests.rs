//! Every coding decodes what it should and stops what it must.

use super::*;
use proptest::prelude::*;
use std::io::Write as _;

const LIMITS: DecodeLimits = DecodeLimits { ratio_max: 10, bytes_max: 8 << 20 };
const ALL: [Coding; 4] = [Coding::Gzip, Coding::Deflate, Coding::Brotli, Coding::Zstd];

fn encode(coding: Coding, data: &[u8]) -> Vec<u8> {
    match coding {
        Coding::Gzip => {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
            encoder.write_all(data).unwrap();
            encoder.finish().unwrap()
        }
        Coding::Deflate => {
            let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::default());
            encoder.write_all(data).unwrap();
            encoder.finish().unwrap()
        }
        Coding::Brotli => {
            let mut out = Vec::new();
            let params = brotli::enc::BrotliEncoderParams { quality: 5, ..Default::default() };
            brotli::BrotliCompress(&mut &data[..], &mut out, &params).unwrap();
            out
        }
        Coding::Zstd => zstd::stream::encode_all(data, 3).unwrap(),
    }
}

fn decode(
    codings: &[Coding],
    body: &[u8],
    chunk: usize,
    limits: DecodeLimits,
) -> Result<Vec<u8>, DecodeError> {
    let mut guard = DecodeGuard::new(codings, limits);
    let mut out = Vec::new();
    for piece in body.chunks(chunk.max(1)) {
        guard.push(piece, &mut |bytes| {
            assert!(bytes.len() <= STEP);
            out.extend_from_slice(bytes);
        })?;
    }
    guard.finish()?;
    assert_eq!(guard.output(), out.len() as u64);
    Ok(out)
}

/// Text that compresses, but not by ten.
fn text(len: usize) -> Vec<u8> {
    let mut state = 1u64;
    let word = |state: &mut u64| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 40).to_string()
    };
    let mut out = Vec::new();
    while out.len() < len {
        out.extend_from_slice(word(&mut state).as_bytes());
        out.push(b' ');
    }
    out.truncate(len);
    out
}

#[test]
fn every_coding_decodes_in_chunks_of_any_size() {
    let data = text(200_000);
    for coding in ALL {
        let body = encode(coding, &data);
        for chunk in [1, 7, 4096, usize::MAX] {
            assert_eq!(decode(&[coding], &body, chunk, LIMITS).as_ref(), Ok(&data), "{coding:?} by {chunk}");
        }
    }
}

#[test]
fn a_bomb_stops_at_the_ratio_in_every_coding_and_chunking() {
    let zeros = vec![0; 20 << 20];
    for coding in ALL {
        let body = encode(coding, &zeros);
        assert!(body.len() < 100_000);
        for chunk in [1, 100, usize::MAX] {
            assert_eq!(
                decode(&[coding], &body, chunk, LIMITS),
                Err(DecodeError::Ratio),
                "{coding:?} by {chunk}"
            );
        }
    }
}

#[test]
fn the_absolute_cap_holds_where_the_ratio_would_not() {
    let limits = DecodeLimits { ratio_max: 10_000_000, bytes_max: 1 << 20 };
    for coding in ALL {
        let body = encode(coding, &vec![0; 4 << 20]);
        let mut guard = DecodeGuard::new(&[coding], limits);
        let mut seen = 0;
        assert_eq!(guard.push(&body, &mut |bytes| seen += bytes.len()), Err(DecodeError::Cap), "{coding:?}");
        assert!(seen <= 1 << 20, "{coding:?} gave {seen} bytes");
    }
}

#[test]
fn bombs_within_bombs_are_caught_and_honest_nesting_works() {
    let data = text(50_000);
    let bombs = ALL.map(|inner| (inner, encode(inner, &vec![0; 30 << 20])));
    for outer in ALL {
        for (inner, bomb) in &bombs {
            let inner = *inner;
            let honest = encode(outer, &encode(inner, &data));
            assert_eq!(
                decode(&[inner, outer], &honest, 999, LIMITS).as_ref(),
                Ok(&data),
                "{inner:?} in {outer:?}"
            );
            let bomb = encode(outer, bomb);
            assert_eq!(
                decode(&[inner, outer], &bomb, 13, LIMITS),
                Err(DecodeError::Ratio),
                "{inner:?} in {outer:?}"
            );
        }
    }
}

#[test]
fn truncated_and_corrupt_bodies_are_told_apart_from_good_ones() {
    let data = text(30_000);
    for coding in ALL {
        let body = encode(coding, &data);
        assert_eq!(
            decode(&[coding], &body[..body.len() / 2], 512, LIMITS),
            Err(DecodeError::Truncated),
            "{coding:?}"
        );
        assert!(decode(&[coding], b"this is no compressed body at all", 512, LIMITS).is_err(), "{coding:?}");
    }
    let mut trailing = encode(Coding::Brotli, &data);
    trailing.push(0);
    assert_eq!(decode(&[Coding::Brotli], &trailing, 512, LIMITS), Err(DecodeError::Corrupt));
}

#[test]
fn gzip_members_one_after_another_are_one_body() {
    let body = [encode(Coding::Gzip, b"hello "), encode(Coding::Gzip, b"world")].concat();
    assert_eq!(decode(&[Coding::Gzip], &body, 3, LIMITS).unwrap(), b"hello world");
}

#[test]
fn codings_are_read_from_the_header_and_unknown_ones_refused() {
    let of = |value: &'static str| {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_ENCODING, http::HeaderValue::from_static(value));
        codings(&headers)
    };
    assert_eq!(of("gzip, BR"), Some(vec![Coding::Gzip, Coding::Brotli]));
    assert_eq!(of("identity"), Some(vec![]));
    assert_eq!(of("compress"), None);
    assert_eq!(of("gzip,gzip,gzip"), None);
}

proptest! {
    #[test]
    fn no_bytes_panic_or_pass_a_limit(
        body in proptest::collection::vec(any::<u8>(), 0..2000),
        coding in proptest::sample::select(&ALL[..]),
        chunk in 1usize..300,
    ) {
        let limits = DecodeLimits { ratio_max: 10, bytes_max: 10_000 };
        if let Ok(out) = decode(&[coding], &body, chunk, limits) {
            prop_assert!(out.len() <= 10_000);
        }
    }

    #[test]
    fn one_flipped_bit_never_panics(flip in 0usize..8000, coding in proptest::sample::select(&ALL[..])) {
        let mut body = encode(coding, &text(3000));
        let at = flip % (body.len() * 8);
        body[at / 8] ^= 1 << (at % 8);
        let _ = decode(&[coding], &body, 64, LIMITS);
    }
}
