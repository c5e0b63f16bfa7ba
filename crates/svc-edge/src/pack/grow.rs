//! A PMTiles archive of tiles that come one by one in any order, each under the path that it is asked for by.
//!
//! Contents go to a temporary file at once; what stays in memory is 24 bytes a tile, and a bounded table by which a
//! content that comes again is known.

use super::convert::{ConvertError, compression, recoded};
use super::verify::{Progress, Watch};
use super::writer::{Layout, Writer};
use super::{Compression, Limits, Metadata, PackError, Tile, TileCoord, TileKind, TileSet, varint};
use bytes::Bytes;
use serde_json::value::RawValue;
use std::collections::{BTreeMap, HashMap};
use std::f64::consts::PI;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};

/// Tiles of one archive: 96 MiB of places.
pub const TILES_MAX: usize = 4 << 20;
/// Contents that are known again; beyond, one may lie twice in the temporary file, but not in the archive.
const KNOWN_MAX: usize = 1 << 20;
/// Layers of vector tiles that are named, and bytes of a name.
const LAYERS_MAX: usize = 256;
const LAYER_NAME_MAX: usize = 256;

/// Why no archive comes of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GrowError {
    #[error("there is no tile")]
    Nothing,
    #[error("{name} is of another type ({}) than the tiles before it ({})", kind.extensions()[0], before.extensions()[0])]
    Kinds { name: String, kind: TileKind, before: TileKind },
    #[error("several assets are the tile {0}")]
    Twice(TileCoord),
    #[error("there are more than {TILES_MAX} tiles")]
    TooMany,
    #[error("{name}: {error}")]
    Tile { name: String, error: PackError },
    #[error(transparent)]
    Convert(#[from] ConvertError),
    #[error("a temporary file: {0}")]
    Spill(#[from] io::Error),
}

/// What an archive consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grown {
    pub tiles: u64,
    pub contents: u64,
    pub kind: TileKind,
    pub min_zoom: u8,
    pub max_zoom: u8,
}

/// See the module. `S` is a temporary file, or memory.
#[derive(Debug)]
pub struct Grower<S: Read + Write + Seek> {
    spill: BufWriter<S>,
    end: u64,
    tiles: Vec<Place>,
    known: HashMap<blake3::Hash, (u64, u32)>,
    kind: Option<TileKind>,
    layers: BTreeMap<String, [u8; 2]>,
}

/// A tile, and where its content lies in the temporary file.
#[derive(Clone, Copy, Debug)]
struct Place {
    id: u64,
    offset: u64,
    length: u32,
}

/// The tile that a path ends with: `{z}/{x}/{y}`, with or without an extension. A query is no part of it.
pub fn tile_of(path: &str) -> Option<(TileCoord, Option<&str>)> {
    let path = path.split(['?', '\0']).next().unwrap_or(path);
    let mut parts = path.rsplitn(4, '/');
    let (last, x, z) = (parts.next()?, parts.next()?, parts.next()?);
    let (y, extension) = last.split_once('.').map_or((last, None), |(y, extension)| (y, Some(extension)));
    // In one way only: no sign, no leading zero.
    let number = |text: &str| {
        let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
        text.parse::<u32>().ok().filter(|_| plain)
    };
    let coord = TileCoord::new(u8::try_from(number(z)?).ok()?, number(x)?, number(y)?)?;
    Some((coord, extension))
}

impl<S: Read + Write + Seek> Grower<S> {
    /// An empty temporary file is needed.
    pub fn new(spill: S) -> Self {
        Self {
            spill: BufWriter::new(spill),
            end: 0,
            tiles: Vec::new(),
            known: HashMap::new(),
            kind: None,
            layers: BTreeMap::new(),
        }
    }

    /// Adds what is stored under a path; false if that is no tile, or an empty one, which an archive cannot hold.
    pub fn add(&mut self, path: &str, content_type: &str, bytes: Bytes) -> Result<bool, GrowError> {
        let Some((coord, extension)) = tile_of(path) else { return Ok(false) };
        let bad = |error: PackError| GrowError::Tile { name: path.to_owned(), error };
        let (packed, limits) = (Compression::of_bytes(&bytes), Limits::default());
        let decoded = packed.decode(bytes, limits.decoded_bytes).map_err(|fault| bad(fault.into()))?;
        if decoded.is_empty() {
            return Ok(false);
        }
        let kind = kind_of(&decoded, content_type, extension);
        let before = *self.kind.get_or_insert(kind);
        if kind != before {
            return Err(GrowError::Kinds { name: path.to_owned(), kind, before });
        }
        if self.tiles.len() == TILES_MAX {
            return Err(GrowError::TooMany);
        }
        if kind == TileKind::Mvt {
            self.note_layers(coord.z(), &decoded);
        }
        let tile = Tile { bytes: decoded, compression: Compression::None };
        let content = recoded(tile, compression(kind), limits).map_err(bad)?;
        let hash = blake3::hash(&content);
        let (offset, length) = match self.known.get(&hash) {
            Some(place) => *place,
            None => {
                let length = u32::try_from(content.len()).map_err(io::Error::other)?;
                self.spill.write_all(&content)?;
                let place = (self.end, length);
                self.end += u64::from(length);
                if self.known.len() < KNOWN_MAX {
                    self.known.insert(hash, place);
                }
                place
            }
        };
        self.tiles.push(Place { id: coord.id(), offset, length });
        Ok(true)
    }

    pub fn tiles(&self) -> usize {
        self.tiles.len()
    }

    /// Writes the archive. Two temporary files as for [`Writer::new`].
    pub fn finish(
        mut self,
        name: &str,
        [contents, records]: [S; 2],
        out: &mut dyn Write,
        watch: Watch<'_>,
    ) -> Result<Grown, GrowError> {
        let kind = self.kind.filter(|_| !self.tiles.is_empty()).ok_or(GrowError::Nothing)?;
        self.tiles.sort_unstable_by_key(|tile| tile.id);
        if let Some(pair) = self.tiles.windows(2).find(|pair| pair[0].id == pair[1].id)
            && let Some(coord) = TileCoord::of_id(pair[0].id)
        {
            return Err(GrowError::Twice(coord));
        }
        let set = self.tile_set(name, kind);
        let layout = Layout { kind, compression: compression(kind), internal: Compression::Gzip };
        let mut writer = Writer::new(layout, contents, records);
        let spill = self.spill.into_inner().map_err(io::IntoInnerError::into_error)?;
        let (mut spill, mut at) = (BufReader::new(spill), None);
        let (mut content, total) = (Vec::new(), self.tiles.len() as u64);
        for (done, tile) in (1..).zip(&self.tiles) {
            if at != Some((tile.offset, tile.length)) {
                spill.seek(SeekFrom::Start(tile.offset))?;
                content.resize(tile.length as usize, 0);
                spill.read_exact(&mut content)?;
                at = Some((tile.offset, tile.length));
            }
            let Some(coord) = TileCoord::of_id(tile.id) else { continue };
            writer.push(coord, &content).map_err(ConvertError::from)?;
            if watch(Progress { done, total }).is_break() {
                return Err(ConvertError::Stopped.into());
            }
        }
        let header = writer.finish(&set.metadata, set.geography(), out).map_err(ConvertError::from)?;
        Ok(Grown {
            tiles: header.addressed,
            contents: header.contents,
            kind,
            min_zoom: header.min_zoom,
            max_zoom: header.max_zoom,
        })
    }

    /// What clients are told: everything that there is lies within the bounds, and the centre is where it is deepest.
    fn tile_set(&self, name: &str, kind: TileKind) -> TileSet {
        let coords = || self.tiles.iter().filter_map(|tile| TileCoord::of_id(tile.id));
        let deepest = coords().next_back().map_or(0, TileCoord::z);
        let bounds = bounds(coords());
        let [west, south, east, north] = self::bounds(coords().filter(|coord| coord.z() == deepest));
        let mut metadata = Metadata::default();
        let mut set = |member: &str, value: &serde_json::Value| {
            if let Ok(value) = RawValue::from_string(value.to_string()) {
                metadata.set(member, value);
            }
        };
        set("name", &name.into());
        if kind.is_vector() {
            let layers = self.layers.iter().map(|(id, [min, max])| {
                serde_json::json!({"id": id, "fields": {}, "minzoom": min, "maxzoom": max})
            });
            set("vector_layers", &layers.collect());
        }
        TileSet {
            kind,
            min_zoom: coords().next().map(TileCoord::z),
            max_zoom: Some(deepest),
            bounds: Some(bounds),
            center: Some((f64::midpoint(west, east), f64::midpoint(south, north), deepest)),
            metadata,
        }
    }

    /// Notes the layers of a vector tile, as far as they can be read.
    fn note_layers(&mut self, zoom: u8, mut tile: &[u8]) {
        while let Some((number, layer)) = take_field(&mut tile) {
            let (3, Some(mut layer)) = (number, layer) else { continue };
            while let Some((number, text)) = take_field(&mut layer) {
                let name = text.filter(|text| number == 1 && text.len() <= LAYER_NAME_MAX);
                let Some(name) = name.and_then(|text| std::str::from_utf8(text).ok()) else { continue };
                if let Some([min, max]) = self.layers.get_mut(name) {
                    (*min, *max) = ((*min).min(zoom), (*max).max(zoom));
                } else if self.layers.len() < LAYERS_MAX {
                    self.layers.insert(name.to_owned(), [zoom, zoom]);
                }
            }
        }
    }
}

/// A field of a protobuf message, with its bytes if it has a length; none at the end, or where it is no message.
fn take_field<'a>(message: &mut &'a [u8]) -> Option<(u64, Option<&'a [u8]>)> {
    let key = varint::take(message)?;
    let skip = match key & 7 {
        0 => {
            varint::take(message)?;
            return Some((key >> 3, None));
        }
        1 => 8,
        2 => usize::try_from(varint::take(message)?).ok()?,
        5 => 4,
        _ => return None,
    };
    let (field, rest) = message.split_at_checked(skip)?;
    *message = rest;
    Some((key >> 3, (key & 7 == 2).then_some(field)))
}

/// Images show what they are; of others the media type or the extension tells.
fn kind_of(decoded: &[u8], content_type: &str, extension: Option<&str>) -> TileKind {
    let media = content_type.split(';').next().unwrap_or_default();
    let named = [Some(media), extension].into_iter().flatten().filter_map(TileKind::of_format);
    TileKind::of_image(decoded)
        .or_else(|| named.into_iter().find(|kind| kind.is_vector()))
        .unwrap_or(TileKind::Other)
}

/// West, south, east and north of all tiles, in degrees.
fn bounds(coords: impl Iterator<Item = TileCoord>) -> [f64; 4] {
    let longitude = |part: f64| part * 360.0 - 180.0;
    let latitude = |part: f64| (PI * (1.0 - 2.0 * part)).sinh().atan().to_degrees();
    coords.fold([180.0, 90.0, -180.0, -90.0], |[west, south, east, north]: [f64; 4], coord| {
        let side = f64::from(2u32).powi(i32::from(coord.z()));
        let (x, y) = (f64::from(coord.x()), f64::from(coord.y()));
        [
            west.min(longitude(x / side)),
            south.min(latitude((y + 1.0) / side)),
            east.max(longitude((x + 1.0) / side)),
            north.max(latitude(y / side)),
        ]
    })
}

#[cfg(test)]
mod tests {
    use super::super::{DirectoryCache, Pmtiles, sample::Sample, verify::verify_pmtiles};
    use super::*;
    use proptest::prelude::*;
    use ron_kernel::inventory::Inventory;
    use ron_kernel::metrics::Metrics;
    use std::io::Cursor;
    use std::ops::ControlFlow;
    use std::sync::Arc;

    const PNG: &[u8] = b"\x89PNG\r\n\x1a\n and so on";

    fn grow(tiles: &[(&str, &str, Vec<u8>)]) -> Result<(Pmtiles<Bytes>, Grown), GrowError> {
        let mut grower = Grower::new(Cursor::<Vec<u8>>::default());
        for (path, content_type, bytes) in tiles {
            grower.add(path, content_type, bytes.clone().into())?;
        }
        let mut out = Vec::new();
        let spill = [Cursor::default(), Cursor::default()];
        let grown = grower.finish("a name", spill, &mut out, &mut |_| ControlFlow::Continue(()))?;
        let cache = Arc::new(DirectoryCache::new(&Inventory::new(Metrics::default()), 1 << 20));
        let pack = Pmtiles::open(Bytes::from(out), Limits::default(), cache).unwrap();
        let report = verify_pmtiles(&pack, &mut |_| ControlFlow::Continue(()));
        assert!(report.is_good(), "{report:?}");
        Ok((pack, grown))
    }

    #[test]
    fn a_path_ends_with_a_tile_in_one_way() {
        let tile = |z, x, y| TileCoord::new(z, x, y).unwrap();
        assert_eq!(tile_of("tiles/3/1/2.png"), Some((tile(3, 1, 2), Some("png"))));
        assert_eq!(tile_of("0/0/0"), Some((tile(0, 0, 0), None)));
        assert_eq!(tile_of("a/b/31/5/6.vector.pbf?key=1"), Some((tile(31, 5, 6), Some("vector.pbf"))));
        assert_eq!(tile_of("a/3/1/2.png\0v=1/2"), Some((tile(3, 1, 2), Some("png"))));
        for none in ["", "1/2", "a/1/2/x.png", "1/2/0.png", "1/01/0", "1/+1/0", "32/0/0", "1/0/1@2x.png"] {
            assert_eq!(tile_of(none), None, "{none}");
        }
    }

    #[test]
    fn images_become_an_archive_of_images_whatever_they_are_called() {
        let tile = |path, bytes: &[u8]| (path, "application/octet-stream", bytes.to_vec());
        let other = [PNG, b"!"].concat();
        let tiles =
            [tile("t/1/1/0", PNG), tile("t/1/0/0", PNG), tile("t/0/0/0.bin", &other), tile("t/x", b"")];
        let (pack, grown) = grow(&tiles).unwrap();
        assert_eq!(grown, Grown { tiles: 3, contents: 2, kind: TileKind::Png, min_zoom: 0, max_zoom: 1 });
        let found = pack.tile(TileCoord::new(0, 0, 0).unwrap()).unwrap().unwrap();
        assert_eq!((&found.bytes[..], found.compression), (&other[..], Compression::None));
        assert_eq!(pack.tile(TileCoord::new(1, 1, 1).unwrap()).unwrap(), None);
        assert_eq!(pack.tile_set().metadata.text("name").as_deref(), Some("a name"));
        assert!(pack.header().clustered);
    }

    #[test]
    fn bounds_hold_all_tiles_and_the_centre_is_where_they_are_deepest() {
        let (pack, _) = grow(&[("2/3/1", "", PNG.to_vec()), ("1/1/0", "", PNG.to_vec())]).unwrap();
        let [west, south, east, north] = pack.tile_set().bounds.unwrap();
        assert!(west.abs() < 1e-6 && south.abs() < 1e-6, "{west} {south}");
        assert!((east - 180.0).abs() < 1e-6 && (north - 85.051_128_7).abs() < 1e-6, "{east} {north}");
        let (longitude, latitude, zoom) = pack.tile_set().center.unwrap();
        assert!((longitude - 135.0).abs() < 1e-6 && (latitude - 33.256_63).abs() < 1e-4 && zoom == 2);
    }

    #[test]
    fn vector_tiles_are_compressed_once_and_their_layers_named() {
        let sample = Sample::default();
        let coords = (0..200).filter_map(TileCoord::of_id);
        let tiles: Vec<(TileCoord, Vec<u8>)> =
            coords.filter_map(|coord| Some((coord, sample.tile(coord)?))).collect();
        // Of every other one the origin sent what it has compressed, and did not say so.
        let named: Vec<(String, Vec<u8>)> = tiles
            .iter()
            .enumerate()
            .map(|(index, (coord, bytes))| {
                let packed = Compression::Gzip.encode(bytes).unwrap();
                (format!("v/{coord}.pbf"), if index % 2 == 0 { packed } else { bytes.clone() })
            })
            .collect();
        let named: Vec<(&str, &str, Vec<u8>)> = named
            .iter()
            .rev()
            .map(|(path, bytes)| (&**path, "application/x-protobuf", bytes.clone()))
            .collect();
        let (pack, grown) = grow(&named).unwrap();
        assert_eq!((grown.tiles, grown.kind), (tiles.len() as u64, TileKind::Mvt));
        assert!(grown.contents <= grown.tiles);
        for (coord, bytes) in &tiles {
            let found = pack.tile(*coord).unwrap().unwrap();
            assert_eq!(found.compression, Compression::Gzip);
            assert_eq!(found.decoded(Limits::default()).unwrap(), *bytes, "{coord}");
        }
        let layers = pack.tile_set().metadata.vector_layers().unwrap().get();
        assert!(layers.contains("\"id\":"), "{layers}");
    }

    #[test]
    fn what_cannot_be_one_archive_is_refused_by_name() {
        assert!(matches!(grow(&[]), Err(GrowError::Nothing)));
        assert!(matches!(grow(&[("a/b", "image/png", PNG.to_vec())]), Err(GrowError::Nothing)));
        let jpeg = ("b/1/0/0", "image/jpeg", b"\xff\xd8\xff...".to_vec());
        let mixed = grow(&[("a/1/0/0", "image/png", PNG.to_vec()), jpeg]).unwrap_err();
        assert_eq!(mixed.to_string(), "b/1/0/0 is of another type (jpg) than the tiles before it (png)");
        let twice = grow(&[("a/1/0/0", "", PNG.to_vec()), ("b/1/0/0.png", "", PNG.to_vec())]).unwrap_err();
        assert_eq!(twice.to_string(), "several assets are the tile 1/0/0");
        let bomb = Compression::Gzip.encode(&vec![0; 40 << 20]).unwrap();
        assert!(matches!(grow(&[("1/0/0.pbf", "", bomb)]), Err(GrowError::Tile { .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_tiles_in_any_order_come_back_as_they_were(
            tiles in proptest::collection::hash_map(0u64..5000, (0u8..6, 1usize..300), 1..80),
        ) {
            let content = |(byte, length): (u8, usize)| [PNG, &vec![byte; length]].concat();
            let named: Vec<(String, Vec<u8>)> = tiles.iter().map(|(id, of)| {
                (TileCoord::of_id(*id).unwrap().to_string(), content(*of))
            }).collect();
            let named: Vec<(&str, &str, Vec<u8>)> =
                named.iter().map(|(path, bytes)| (&**path, "image/png", bytes.clone())).collect();
            let (pack, grown) = grow(&named).unwrap();
            prop_assert_eq!(grown.tiles, tiles.len() as u64);
            for (id, of) in &tiles {
                let found = pack.tile(TileCoord::of_id(*id).unwrap()).unwrap().unwrap();
                prop_assert_eq!(&found.bytes[..], &content(*of)[..]);
            }
        }

        #[test]
        fn bytes_that_are_no_message_harm_nothing(bytes: Vec<u8>) {
            Grower::new(Cursor::<Vec<u8>>::default()).note_layers(0, &bytes);
        }
    }
}
