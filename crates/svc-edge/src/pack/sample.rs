//! Packs for tests, measurements and newcomers: valid vector tiles drawn from a seed, the same on every machine.

use super::coord::TileCoord;
use super::header::{Geography, Header};
use super::writer::{Layout, WriteError, Writer};
use super::{Compression, Metadata, TileKind, varint};
use std::io::{Read, Seek, Write};

/// What to draw.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub seed: u64,
    pub max_zoom: u8,
    /// Of a hundred patches of four by four tiles, how many are sea: one content for all.
    pub sea_percent: u64,
    /// Of a hundred tiles on land, how many are missing.
    pub gap_percent: u64,
    /// Points of the longest line of a tile; a point takes two to four bytes.
    pub points_max: u64,
    pub compression: Compression,
    pub internal: Compression,
}

impl Default for Sample {
    fn default() -> Self {
        Self {
            seed: 1,
            max_zoom: 5,
            sea_percent: 60,
            gap_percent: 5,
            points_max: 60,
            compression: Compression::Gzip,
            internal: Compression::Gzip,
        }
    }
}

impl Sample {
    /// One tile, not compressed; none in a gap.
    pub fn tile(&self, coord: TileCoord) -> Option<Vec<u8>> {
        let place = |z: u8, x: u32, y: u32| u64::from(z) << 58 ^ u64::from(x) << 29 ^ u64::from(y);
        let mut patch = Draw(self.seed ^ place(coord.z(), coord.x() >> 2, coord.y() >> 2));
        if patch.below(100) < self.sea_percent {
            return Some(layer("sea", &[vec![4096, 0, 0, 4096]]));
        }
        let mut draw = Draw(!self.seed ^ place(coord.z(), coord.x(), coord.y()));
        if draw.below(100) < self.gap_percent {
            return None;
        }
        let lines: Vec<Vec<u64>> = (0..=draw.below(4))
            .map(|_| {
                (0..=draw.below(self.points_max.max(1)))
                    .flat_map(|_| [draw.below(300), draw.below(300)])
                    .collect()
            })
            .collect();
        Some(layer("land", &lines))
    }

    pub fn metadata(&self) -> Metadata {
        let json =
            br#"{"name":"Sample","description":"Drawn from a seed","attribution":"none","version":"1.0.0",
            "type":"baselayer","vector_layers":[{"id":"land","fields":{},"minzoom":0,"maxzoom":31},
            {"id":"sea","fields":{}}]}"#;
        Metadata::parse(json).expect("a constant")
    }

    /// Writes the pack; see [`Writer::new`] for the temporary files.
    pub fn write<S: Read + Write + Seek>(
        &self,
        contents: S,
        records: S,
        out: &mut dyn Write,
    ) -> Result<Header, WriteError> {
        let layout = Layout { kind: TileKind::Mvt, compression: self.compression, internal: self.internal };
        let mut writer = Writer::new(layout, contents, records);
        for coord in self.coords() {
            if let Some(tile) = self.tile(coord) {
                writer.push(coord, &self.compression.encode(&tile)?)?;
            }
        }
        writer.finish(&self.metadata(), Geography::default(), out)
    }

    /// All places down to the last zoom, in the order of their ids.
    pub fn coords(&self) -> impl Iterator<Item = TileCoord> + use<> {
        let max_zoom = self.max_zoom;
        (0..).map_while(TileCoord::of_id).take_while(move |coord| coord.z() <= max_zoom)
    }
}

/// A layer of lines, each a list of zigzag-coded steps.
fn layer(name: &str, lines: &[Vec<u64>]) -> Vec<u8> {
    let mut layer = Vec::new();
    field(&mut layer, 1, name.as_bytes());
    for steps in lines {
        // Move to the first point, then lines to all others.
        let (first, others) = steps.split_at(2);
        let mut geometry = vec![9];
        first.iter().for_each(|step| varint::push(&mut geometry, *step));
        if !others.is_empty() {
            varint::push(&mut geometry, others.len() as u64 / 2 * 8 + 2);
            others.iter().for_each(|step| varint::push(&mut geometry, *step));
        }
        // The type is a line, or a point where there is no second one.
        let mut feature = vec![3 << 3, if others.is_empty() { 1 } else { 2 }];
        field(&mut feature, 4, &geometry);
        field(&mut layer, 2, &feature);
    }
    // The extent is 4096 and the version 2.
    layer.extend_from_slice(&[5 << 3, 0x80, 0x20, 15 << 3, 2]);
    let mut tile = Vec::new();
    field(&mut tile, 3, &layer);
    tile
}

/// A protobuf field that holds bytes.
fn field(out: &mut Vec<u8>, number: u8, bytes: &[u8]) {
    out.push(number << 3 | 2);
    varint::push(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// SplitMix64: few lines, and good enough to draw a map.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % end
    }
}
