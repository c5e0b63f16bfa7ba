//! The vectors in `docs/oap-1.md`, read from the page itself.

use oap::frame::FRAME_MAX;
use oap::{Decoded, Decoder};

const PAGE: &str = include_str!("../../../../docs/oap-1.md");

/// The lines of a fenced block.
fn block(name: &str) -> Vec<&'static str> {
    let (_, rest) = PAGE.split_once(&format!("```{name}\n")).expect(name);
    rest.split_once("\n```").expect("a fence").0.lines().collect()
}

fn unhex(text: &str) -> Vec<u8> {
    assert!(text.len().is_multiple_of(2), "{text}");
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect(text)).collect()
}

fn decoder(name: &str) -> Decoder {
    let mut decoder = Decoder::new(FRAME_MAX);
    decoder.agree(FRAME_MAX, name.contains("with crc32c"));
    decoder
}

/// What comes of these bytes: a mark and how it reads.
fn read(name: &str, bytes: &[u8]) -> (char, String) {
    let mut decoder = decoder(name);
    decoder.push(bytes);
    let found = decoder.next_frame();
    match found {
        Err(error) => {
            assert!(error.is_fatal());
            ('!', error.code().to_owned())
        }
        Ok(Some(Decoded::Refused { error, .. })) => ('-', error.code().to_owned()),
        Ok(Some(Decoded::Frame(frame))) => match frame.clone().inflate() {
            Err(error) => ('-', error.code().to_owned()),
            Ok(_) => {
                assert!(!decoder.is_partial(), "{name} leaves something");
                ('+', format!("{frame:?}"))
            }
        },
        Ok(None) => ('?', "nothing yet".to_owned()),
    }
}

#[test]
fn the_frames_of_the_document_read_as_it_says() {
    let lines = block("oap-frames");
    let vectors: Vec<_> = lines.chunks(3).collect();
    assert!(vectors.len() >= 30, "{}", vectors.len());
    for vector in vectors {
        let [name, hex, what] = vector else { panic!("{vector:?}") };
        let bytes = unhex(hex);
        let expected = (name.chars().next().expect("a mark"), what.trim_start_matches("= ").to_owned());
        assert_eq!(read(name, &bytes), expected, "{name}");
        if expected.0 == '+' {
            let mut decoder = decoder(name);
            decoder.push(&bytes);
            let Ok(Some(Decoded::Frame(frame))) = decoder.next_frame() else {
                unreachable!("it read before")
            };
            let encoded = frame.encode(FRAME_MAX).expect("what reads is written");
            assert_eq!(encoded.to_vec(), bytes[..frame.len()], "{name}");
            if bytes.len() > frame.len() {
                assert_eq!(encoded.checksum(), bytes[frame.len()..], "{name}");
            }
        }
    }
}
