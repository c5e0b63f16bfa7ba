//! What is known of a pack's tiles as a whole, and how clients are told: TileJSON 3.0.

use super::header::{Geography, Header};
use super::{Metadata, TileKind};
use serde::Serialize;
use serde_json::value::RawValue;

/// What a pack says of its tiles; whatever it does not say, or says wrongly, is none.
#[derive(Clone, Debug)]
pub struct TileSet {
    pub kind: TileKind,
    pub min_zoom: Option<u8>,
    pub max_zoom: Option<u8>,
    /// West, south, east, north in degrees.
    pub bounds: Option<[f64; 4]>,
    /// Longitude, latitude and zoom.
    pub center: Option<(f64, f64, u8)>,
    pub metadata: Metadata,
}

/// Longitudes and latitudes that make a box on Earth.
pub(super) fn is_box([west, south, east, north]: [f64; 4]) -> bool {
    is_place(west, south) && is_place(east, north) && west <= east && south <= north
}

pub(super) fn is_place(longitude: f64, latitude: f64) -> bool {
    longitude.abs() <= 180.0 && latitude.abs() <= 90.0
}

const DEGREE: f64 = 1e7;

impl TileSet {
    pub(super) fn of_header(header: &Header, metadata: Metadata) -> Self {
        let degrees = |part: i32| f64::from(part) / DEGREE;
        let bounds = header.geography.bounds.map(degrees);
        let [longitude, latitude] = header.geography.center.map(degrees);
        let center = (longitude, latitude, header.geography.center_zoom);
        Self {
            kind: header.kind,
            min_zoom: Some(header.min_zoom),
            max_zoom: Some(header.max_zoom),
            // Four zeros are what a writer leaves that does not know.
            bounds: Some(bounds).filter(|bounds| is_box(*bounds) && *bounds != [0.0; 4]),
            center: Some(center).filter(|_| is_place(longitude, latitude)),
            metadata,
        }
    }

    /// For the header of an archive.
    pub fn geography(&self) -> Geography {
        let parts = |degrees: f64| (degrees * DEGREE).round() as i32;
        let mut geography = Geography::default();
        if let Some(bounds) = self.bounds {
            geography.bounds = bounds.map(parts);
            let [west, south, east, north] = bounds;
            geography.center = [parts((west + east) / 2.0), parts((south + north) / 2.0)];
            geography.center_zoom = self.min_zoom.unwrap_or(0);
        }
        if let Some((longitude, latitude, zoom)) = self.center {
            geography.center = [parts(longitude), parts(latitude)];
            geography.center_zoom = zoom;
        }
        geography
    }

    /// The TileJSON document. `tiles` are URL templates; the generation changes whenever the pack is replaced, so that
    /// a client can tell.
    pub fn tile_json(&self, tiles: &[String], generation: &str) -> String {
        let no_layers = RawValue::from_string("[]".to_owned()).ok();
        let metadata = &self.metadata;
        let (lowest, highest) = (self.min_zoom.unwrap_or(0), self.max_zoom.unwrap_or(30));
        let document = Document {
            tilejson: "3.0.0",
            tiles,
            generation,
            scheme: "xyz",
            name: metadata.text("name"),
            description: metadata.text("description"),
            attribution: metadata.text("attribution"),
            legend: metadata.text("legend"),
            version: metadata.text("version").filter(|version| is_semantic(version)),
            encoding: metadata.text("encoding"),
            bounds: self.bounds,
            // A view that shows nothing is no use.
            center: self.center.map(|(x, y, zoom)| (x, y, zoom.max(lowest).min(highest))),
            minzoom: self.min_zoom,
            maxzoom: self.max_zoom,
            // Required of vector tiles, even where the pack does not know.
            vector_layers: metadata
                .vector_layers()
                .or(no_layers.as_deref())
                .filter(|_| self.kind.is_vector()),
        };
        serde_json::to_string(&document).expect("texts, finite numbers and JSON are JSON")
    }
}

/// Three numbers, as TileJSON wants a version to be.
fn is_semantic(version: &str) -> bool {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    version.split('.').count() == 3 && version.split('.').all(number)
}

#[derive(Serialize)]
struct Document<'a> {
    tilejson: &'static str,
    tiles: &'a [String],
    generation: &'a str,
    scheme: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attribution: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    legend: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    encoding: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bounds: Option<[f64; 4]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    center: Option<(f64, f64, u8)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    minzoom: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    maxzoom: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vector_layers: Option<&'a RawValue>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(kind: TileKind, metadata: &str) -> TileSet {
        let metadata = Metadata::parse(metadata.as_bytes()).unwrap();
        TileSet { kind, min_zoom: Some(2), max_zoom: Some(9), bounds: None, center: None, metadata }
    }

    fn check(set: &TileSet, expected: &str) {
        let urls = ["https://a/{z}/{x}/{y}".to_owned()];
        let text = set.tile_json(&urls, "7");
        let head = r#"{"tilejson":"3.0.0","tiles":["https://a/{z}/{x}/{y}"],"generation":"7","scheme":"xyz""#;
        assert_eq!(text, format!("{head}{expected}}}"));
    }

    #[test]
    fn a_client_is_told_what_is_known_and_nothing_else() {
        check(&set(TileKind::Png, "{}"), r#","minzoom":2,"maxzoom":9"#);
        check(&set(TileKind::Mvt, r#"{"version":"2"}"#), r#","minzoom":2,"maxzoom":9,"vector_layers":[]"#);
        let json = r#"{"name":"N","attribution":"A","version":"1.0.0","vector_layers":[{"id":"a","fields":{}}],"x":1}"#;
        let whole = TileSet {
            bounds: Some([-10.5, -20.0, 30.0, 40.0]),
            center: Some((1.0, 2.0, 0)),
            ..set(TileKind::Mvt, json)
        };
        let expected = concat!(
            r#","name":"N","attribution":"A","version":"1.0.0","bounds":[-10.5,-20.0,30.0,40.0],"#,
            r#""center":[1.0,2.0,2],"minzoom":2,"maxzoom":9,"vector_layers":[{"id":"a","fields":{}}]"#
        );
        check(&whole, expected);
        let crossed = TileSet {
            min_zoom: Some(9),
            max_zoom: Some(2),
            center: Some((1.0, 2.0, 5)),
            ..set(TileKind::Png, "{}")
        };
        check(&crossed, r#","center":[1.0,2.0,2],"minzoom":9,"maxzoom":2"#);
    }

    #[test]
    fn geography_survives_a_header() {
        let set = TileSet {
            bounds: Some([-10.5, -20.0, 30.0, 40.0]),
            center: Some((1.0, 2.0, 3)),
            ..set(TileKind::Png, "{}")
        };
        let geography = set.geography();
        assert_eq!(geography.bounds, [-105_000_000, -200_000_000, 300_000_000, 400_000_000]);
        assert_eq!((geography.center, geography.center_zoom), ([10_000_000, 20_000_000], 3));
        let without = TileSet { center: None, ..set }.geography();
        assert_eq!((without.center, without.center_zoom), ([97_500_000, 100_000_000], 2));
    }
}
