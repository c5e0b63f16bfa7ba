//! Encodings of an object, made once when it is stored.

use crate::semantics::Coding;
use std::io::{self, Write as _};

/// Sizes that are worth it: below, the head of the answer weighs more; above, it takes too long to wait for.
pub(crate) const SIZES: std::ops::RangeInclusive<u64> = 512..=4 << 20;

/// The encodings that save at least a tenth. Blocks, and takes its time.
pub(crate) fn encodings(bytes: &[u8]) -> io::Result<Vec<(Coding, Vec<u8>)>> {
    let made = [
        (Coding::Gzip, gzip(bytes)?),
        (Coding::Brotli, brotli(bytes)?),
        (Coding::Zstd, zstd::bulk::compress(bytes, 12)?),
    ];
    Ok(made.into_iter().filter(|(_, encoded)| encoded.len() * 10 <= bytes.len() * 9).collect())
}

fn gzip(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes)?;
    encoder.finish()
}

fn brotli(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = brotli::CompressorWriter::new(Vec::new(), 64 << 10, 9, 22);
    encoder.write_all(bytes)?;
    encoder.flush()?;
    Ok(encoder.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ron_kernel::admission::decode;

    #[test]
    fn an_encoding_decodes_to_the_same_and_one_that_saves_nothing_is_not_kept() {
        let text = "the same again and again, ".repeat(200).into_bytes();
        let limits = decode::DecodeLimits { ratio_max: 1000, bytes_max: 1 << 20 };
        let made = encodings(&text).unwrap();
        assert_eq!(made.iter().map(|(coding, _)| *coding).collect::<Vec<_>>(), &Coding::ALL[1..]);
        for (coding, encoded) in made {
            let coding = match coding {
                Coding::Gzip => decode::Coding::Gzip,
                Coding::Brotli => decode::Coding::Brotli,
                _ => decode::Coding::Zstd,
            };
            let (mut guard, mut out) = (decode::DecodeGuard::new(&[coding], limits), Vec::new());
            guard.push(&encoded, &mut |piece| out.extend_from_slice(piece)).unwrap();
            guard.finish().unwrap();
            assert!(out == text && encoded.len() < text.len() / 10);
        }
        let noise: Vec<u8> = (0..40u32).flat_map(|n| *blake3::hash(&n.to_le_bytes()).as_bytes()).collect();
        assert_eq!(encodings(&noise).unwrap(), []);
    }
}
