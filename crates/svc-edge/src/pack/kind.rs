//! What tiles are made of: their type and their compression.

use super::Fault;
use bytes::Bytes;
use flate2::write::GzEncoder;
use ron_kernel::admission::decode::{Coding, DecodeGuard, DecodeLimits};
use std::io::{self, Write};

/// The type of all tiles of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileKind {
    Other,
    Mvt,
    Png,
    Jpeg,
    Webp,
    Avif,
    Mlt,
}

impl TileKind {
    /// By their number in a PMTiles header.
    pub const ALL: [Self; 7] =
        [Self::Other, Self::Mvt, Self::Png, Self::Jpeg, Self::Webp, Self::Avif, Self::Mlt];

    pub fn content_type(self) -> &'static str {
        match self {
            Self::Other => "application/octet-stream",
            Self::Mvt => "application/vnd.mapbox-vector-tile",
            Self::Png => "image/png",
            Self::Jpeg => "image/jpeg",
            Self::Webp => "image/webp",
            Self::Avif => "image/avif",
            Self::Mlt => "application/vnd.maplibre-vector-tile",
        }
    }

    /// What tiles of this type are called in a URL; the first is ours.
    pub fn extensions(self) -> &'static [&'static str] {
        match self {
            Self::Other => &["bin"],
            Self::Mvt => &["mvt", "pbf"],
            Self::Png => &["png"],
            Self::Jpeg => &["jpg", "jpeg"],
            Self::Webp => &["webp"],
            Self::Avif => &["avif"],
            Self::Mlt => &["mlt"],
        }
    }

    /// The type that the `format` of an MBTiles file names: an extension, or a media type.
    pub fn of_format(format: &str) -> Option<Self> {
        let format = format.trim().to_ascii_lowercase();
        let named = |kind: &Self| {
            kind.extensions().contains(&format.as_str()) || kind.content_type() == format.as_str()
        };
        match format.as_str() {
            "application/x-protobuf" | "application/vnd.mapbox-vector-tile+gzip" => Some(Self::Mvt),
            _ => Self::ALL.into_iter().skip(1).find(named),
        }
    }

    pub fn is_vector(self) -> bool {
        matches!(self, Self::Mvt | Self::Mlt)
    }

    /// The type of an image by its first bytes; vector tiles have none that are their own.
    pub fn of_image(tile: &[u8]) -> Option<Self> {
        let brand = |at: usize, name: &[u8]| tile.get(at..at + name.len()) == Some(name);
        if tile.starts_with(b"\x89PNG\r\n\x1a\n") {
            Some(Self::Png)
        } else if tile.starts_with(b"\xff\xd8\xff") {
            Some(Self::Jpeg)
        } else if tile.starts_with(b"RIFF") && brand(8, b"WEBP") {
            Some(Self::Webp)
        } else if brand(4, b"ftypavif") || brand(4, b"ftypavis") {
            Some(Self::Avif)
        } else {
            None
        }
    }

    /// Whether decoded bytes may be a tile of this type.
    pub fn fits(self, tile: &[u8]) -> bool {
        match self {
            Self::Other => true,
            Self::Mvt | Self::Mlt => Self::of_image(tile).is_none(),
            image => Self::of_image(tile) == Some(image),
        }
    }
}

/// How bytes of a pack are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// The pack does not say; the bytes are passed on as they are.
    Unknown,
    None,
    Gzip,
    Brotli,
    Zstd,
}

impl Compression {
    /// By their number in a PMTiles header.
    pub const ALL: [Self; 5] = [Self::Unknown, Self::None, Self::Gzip, Self::Brotli, Self::Zstd];

    pub fn content_encoding(self) -> Option<&'static str> {
        match self {
            Self::Unknown | Self::None => None,
            Self::Gzip => Some("gzip"),
            Self::Brotli => Some("br"),
            Self::Zstd => Some("zstd"),
        }
    }

    /// The compression that the first bytes show; brotli shows nothing.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        if bytes.starts_with(&[0x1f, 0x8b]) {
            Self::Gzip
        } else if bytes.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
            Self::Zstd
        } else {
            Self::None
        }
    }

    /// Undoes the compression, in memory that grows with the output and never beyond the cap.
    pub fn decode(self, bytes: Bytes, bytes_max: u64) -> Result<Bytes, Fault> {
        let coding = match self {
            Self::Unknown | Self::None => return Ok(bytes),
            Self::Gzip => Coding::Gzip,
            Self::Brotli => Coding::Brotli,
            Self::Zstd => Coding::Zstd,
        };
        let mut guard = DecodeGuard::new(&[coding], DecodeLimits { ratio_max: u64::MAX, bytes_max });
        let mut decoded = Vec::new();
        guard.push(&bytes, &mut |piece| decoded.extend_from_slice(piece))?;
        guard.finish()?;
        Ok(decoded.into())
    }

    /// Compresses; the same bytes always give the same result.
    pub fn encode(self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        match self {
            Self::Unknown | Self::None => Ok(bytes.to_vec()),
            Self::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::default());
                encoder.write_all(bytes)?;
                encoder.finish()
            }
            Self::Brotli => {
                let mut out = Vec::new();
                let params = brotli::enc::BrotliEncoderParams { quality: 5, ..Default::default() };
                brotli::BrotliCompress(&mut &*bytes, &mut out, &params)?;
                Ok(out)
            }
            Self::Zstd => zstd::bulk::compress(bytes, zstd::DEFAULT_COMPRESSION_LEVEL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_row_is_understood_in_the_spellings_that_occur() {
        let check = |format, kind| assert_eq!(TileKind::of_format(format), kind, "{format}");
        check("pbf", Some(TileKind::Mvt));
        check("PNG", Some(TileKind::Png));
        check(" jpeg", Some(TileKind::Jpeg));
        check("image/jpeg", Some(TileKind::Jpeg));
        check("application/x-protobuf", Some(TileKind::Mvt));
        check("mlt", Some(TileKind::Mlt));
        check("", None);
        check("tiff", None);
    }

    #[test]
    fn every_compression_gives_back_what_it_was_given_and_stops_at_the_cap() {
        let text = Bytes::from("a tile ".repeat(10_000));
        for compression in Compression::ALL.into_iter().skip(2) {
            let packed = Bytes::from(compression.encode(&text).unwrap());
            assert!(packed.len() < 1000);
            assert_eq!(compression.encode(&text).unwrap(), packed);
            assert_eq!(compression.decode(packed.clone(), 70_000).unwrap(), text);
            assert!(matches!(compression.decode(packed.clone(), 69_999), Err(Fault::Decode(_))));
            let cut = packed.slice(..packed.len() - 1);
            assert!(matches!(compression.decode(cut, 70_000), Err(Fault::Decode(_))));
            assert!(matches!(compression.decode(Bytes::new(), 70_000), Err(Fault::Decode(_))));
        }
        assert_eq!(Compression::None.decode(text.clone(), 0).unwrap(), text);
    }
}
