//! Any frame reads back however it arrives, and nothing makes the decoder hold what it should not.

use bytes::{BufMut as _, Bytes};
use oap::compress::RATIO_MAX;
use oap::frame::{FRAME_MAX, FRAME_MIN_MAX, HEADER, STATUSES};
use oap::{Decoded, Decoder, Flags, Frame, FrameError};
use proptest::prelude::*;

fn frames() -> impl Strategy<Value = Frame> {
    let bytes = |max| prop::collection::vec(any::<u8>(), 0..max).prop_map(Bytes::from);
    let address = (any::<u16>(), any::<u128>(), any::<u64>());
    (0u16..3, 0u16..32, prop::sample::select(STATUSES.to_vec()), address, bytes(40), bytes(3000)).prop_map(
        |(kind, rest, status, (app, tenant, corr), cap, payload)| {
            let flags = Flags::from_bits(1 << kind | rest << 3).expect("eight bits");
            let cap = if flags.has(Flags::START) { cap } else { Bytes::new() };
            let code = if kind == 1 { status } else { 0 };
            Frame { flags, code, app, tenant, corr, cap, payload }
        },
    )
}

/// Every frame in these pieces, until there is none or an error.
fn decode(pieces: &[&[u8]], checksum: bool) -> (Vec<Decoded>, Option<FrameError>) {
    let mut decoder = Decoder::new(FRAME_MAX);
    decoder.agree(FRAME_MAX, checksum);
    let mut found = Vec::new();
    for piece in pieces {
        // Half of them the way a socket gives them.
        if found.len() % 2 == 0 {
            decoder.push(piece);
        } else {
            decoder.space().put_slice(piece);
        }
        loop {
            match decoder.next_frame() {
                Ok(Some(decoded)) => found.push(decoded),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(decoder.next_frame(), Err(error), "after an error there is nothing more");
                    return (found, Some(error));
                }
            }
        }
    }
    (found, None)
}

fn stream(frames: &[Frame], checksum: bool) -> Vec<u8> {
    let mut bytes = Vec::new();
    for frame in frames {
        let encoded = frame.encode(FRAME_MAX).expect("a frame");
        assert_eq!(encoded.len(), frame.len());
        bytes.extend(encoded.to_vec());
        if checksum {
            bytes.extend(encoded.checksum());
        }
    }
    bytes
}

proptest! {
    #[test]
    fn frames_read_back_however_they_are_cut(
        frames in prop::collection::vec(frames(), 1..6),
        cuts in prop::collection::vec(1usize..4000, 1..20),
        checksum: bool,
    ) {
        let bytes = stream(&frames, checksum);
        let (mut pieces, mut rest) = (Vec::new(), &bytes[..]);
        for cut in cuts.iter().cycle() {
            if rest.is_empty() { break }
            let (piece, after) = rest.split_at((*cut).min(rest.len()));
            pieces.push(piece);
            rest = after;
        }
        let expected: Vec<_> = frames.into_iter().map(Decoded::Frame).collect();
        prop_assert_eq!(decode(&pieces, checksum), (expected, None));
    }

    /// One wrong byte gives other frames or an error, and with checksums always an error or silence.
    #[test]
    fn a_changed_byte_is_never_worse_than_an_error(
        frames in prop::collection::vec(frames(), 1..3),
        at: prop::sample::Index,
        change in 1u8..,
        checksum: bool,
    ) {
        let mut bytes = stream(&frames, checksum);
        let at = at.index(bytes.len());
        bytes[at] ^= change;
        let (found, error) = decode(&[&bytes], checksum);
        let longest = found.iter().map(|decoded| match decoded {
            Decoded::Frame(frame) | Decoded::Refused { frame, .. } => frame.len(),
        });
        prop_assert!(longest.sum::<usize>() <= bytes.len());
        prop_assert!(error.is_none_or(FrameError::is_fatal));
        if checksum {
            let good = frames.iter().zip(&found).take_while(|(frame, found)| **found == Decoded::Frame((*frame).clone()));
            prop_assert_eq!(good.count(), found.len(), "a frame that was never sent");
        }
    }

    #[test]
    fn what_is_compressed_inflates_to_itself(
        word in prop::collection::vec(any::<u8>(), 1..40),
        times in 0usize..200,
        noise in prop::collection::vec(any::<u8>(), 0..500),
    ) {
        let payload = Bytes::from([word.repeat(times), noise].concat());
        let plain = Frame::request(0x0200, 1, payload.clone());
        let small = plain.clone().deflate();
        prop_assert!(small.len() <= plain.len());
        if small.flags.has(Flags::COMP) {
            prop_assert!(payload.len() <= small.payload.len() * RATIO_MAX);
        }
        prop_assert_eq!(small.inflate(), Ok(plain));
    }
}

#[test]
fn a_frame_of_the_largest_size_in_single_bytes_is_read_in_linear_time() {
    let frame = Frame::event(0x0100, 1, vec![7; FRAME_MAX as usize - HEADER]);
    let bytes = frame.encode(FRAME_MAX).expect("a frame").to_vec();
    let mut decoder = Decoder::new(FRAME_MAX);
    let mut moved = 0;
    for byte in &bytes {
        let space = decoder.space();
        let before = space.as_ptr();
        space.put_u8(*byte);
        // What has come is copied only when the room for it doubles.
        moved += if space.as_ptr() == before { 0 } else { space.len() };
        assert!(space.capacity() <= 2 * FRAME_MAX as usize);
        if let Some(decoded) = decoder.next_frame().expect("no error") {
            assert_eq!(decoded, Decoded::Frame(frame.clone()));
        }
    }
    assert!(!decoder.is_partial());
    assert!(moved <= 4 * bytes.len(), "{moved}");
}

#[test]
fn a_header_alone_costs_no_more_than_a_small_read() {
    let frame = Frame::event(0x0100, 1, vec![7; FRAME_MIN_MAX as usize - HEADER]);
    let bytes = frame.encode(FRAME_MAX).expect("a frame").to_vec();
    let mut decoder = Decoder::new(FRAME_MIN_MAX);
    decoder.space().put_slice(&bytes[..HEADER]);
    assert_eq!(decoder.next_frame(), Ok(None));
    assert!(decoder.space().capacity() <= 4 << 10);
    for byte in &bytes[HEADER..] {
        let space = decoder.space();
        space.put_u8(*byte);
        assert!(space.capacity() <= 16 << 10, "{}", space.capacity());
    }
    assert_eq!(decoder.next_frame(), Ok(Some(Decoded::Frame(frame))));
    decoder.relax();
    assert!(decoder.space().capacity() <= 4 << 10);
}

#[test]
fn the_payload_of_a_read_frame_is_what_was_read() {
    let frame = Frame::event(0x0100, 1, vec![7; 1000]);
    let mut decoder = Decoder::new(FRAME_MAX);
    decoder.space().put_slice(&frame.encode(FRAME_MAX).expect("a frame").to_vec());
    let from = decoder.space().as_ptr().wrapping_add(HEADER);
    let Ok(Some(Decoded::Frame(read))) = decoder.next_frame() else { panic!("a frame") };
    assert_eq!(read.payload.as_ptr(), from, "not a copy");
    let encoded = read.encode(FRAME_MAX).expect("a frame");
    assert_eq!(encoded.parts()[1].as_ptr(), from, "nor is what is passed on");
}

#[test]
fn what_a_peer_would_refuse_is_not_written() {
    let frame = Frame::event(0x0100, 1, vec![7; 100]);
    assert_eq!(frame.encode(137).expect_err("too large").code(), "frame_too_large");
    assert_eq!(
        Frame { cap: Bytes::from_static(b"c"), ..frame.clone() }.encode(FRAME_MAX),
        Err(FrameError::CapOnNonStart)
    );
    assert_eq!(Frame { code: 200, ..frame.clone() }.encode(FRAME_MAX), Err(FrameError::Code(200)));
    let long = Frame { flags: Flags::REQ | Flags::START, cap: vec![0; 65536].into(), ..frame };
    assert_eq!(long.encode(FRAME_MAX), Err(FrameError::CapBeyondFrame));
}

#[test]
fn a_bomb_stops_at_the_cap() {
    // 1 MiB and a little of what is not easily compressed to less than a tenth.
    let mut state = 1u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u8 & 0x0f
    })
    .take((1 << 20) + 1)
    .collect();
    let comp = |payload: Vec<u8>| Frame {
        flags: Flags::REQ | Flags::COMP,
        payload: payload.into(),
        ..Frame::default()
    };
    let over = comp(zstd::bulk::compress(&noise, 1).expect("compressed"));
    assert_eq!(over.inflate(), Err(FrameError::InflateTooLarge));
    let exact = comp(zstd::bulk::compress(&noise[1..], 1).expect("compressed"));
    assert_eq!(exact.inflate().expect("just fits").payload, noise[1..]);
    let bomb = comp(zstd::bulk::compress(&vec![0; 64 << 20], 1).expect("compressed"));
    assert_eq!(bomb.inflate(), Err(FrameError::InflateTooLarge));
}
