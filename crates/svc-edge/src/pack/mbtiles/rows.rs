//! The metadata table of an MBTiles file: names and values, both text, any of them missing or odd.

use super::super::TileKind;
use super::super::coord::ZOOM_MAX;
use super::super::metadata::Metadata;
use super::super::tile_set::{TileSet, is_box, is_place};
use serde_json::value::{RawValue, to_raw_value};

/// Rows that say what an archive's header says; they are no members of its metadata.
const OF_THE_HEADER: [&str; 6] = ["format", "minzoom", "maxzoom", "bounds", "center", "json"];

/// What the rows say. Of rows with the same name the first counts; a row's text beats the `json` row's member. The
/// type is none if no row names a known one.
pub fn read(rows: &[(String, String)]) -> (Option<TileKind>, TileSet) {
    let row = |name: &str| rows.iter().find(|(known, _)| known == name).map(|(_, value)| value.trim());
    let mut metadata = row("json").and_then(|json| Metadata::parse(json.as_bytes()).ok()).unwrap_or_default();
    for (name, value) in rows.iter().rev().filter(|(name, _)| !OF_THE_HEADER.contains(&name.as_str())) {
        if let Ok(value) = to_raw_value(value) {
            metadata.set(name, value);
        }
    }
    let numbers = |name: &str| -> Option<Vec<f64>> {
        row(name)?.split(',').map(|part| part.trim().parse().ok()).collect()
    };
    let zoom = |zoom: f64| (0.0..=f64::from(ZOOM_MAX)).contains(&zoom).then_some(zoom as u8);
    let bounds = numbers("bounds").and_then(|parts| parts.try_into().ok()).filter(|bounds| is_box(*bounds));
    let center = numbers("center").and_then(|parts| match parts[..] {
        [x, y] => Some((x, y, 0)),
        [x, y, z] => Some((x, y, zoom(z)?)),
        _ => None,
    });
    let one_zoom =
        |name: &str| numbers(name).filter(|parts| parts.len() == 1).and_then(|parts| zoom(parts[0]));
    let kind = row("format").and_then(TileKind::of_format);
    let set = TileSet {
        kind: kind.unwrap_or(TileKind::Other),
        min_zoom: one_zoom("minzoom"),
        max_zoom: one_zoom("maxzoom"),
        bounds,
        center: center.filter(|(x, y, _)| is_place(*x, *y)),
        metadata,
    };
    (kind, set)
}

/// The rows for a pack: texts each in their own, everything else in `json`.
pub fn write(set: &TileSet) -> Vec<(String, String)> {
    let mut rows = vec![];
    let mut row = |name: &str, value: String| rows.push((name.to_owned(), value));
    // The extension that MBTiles knows vector tiles by is not ours.
    let format = if set.kind == TileKind::Mvt { "pbf" } else { set.kind.extensions()[0] };
    row("format", format.to_owned());
    if let Some([west, south, east, north]) = set.bounds {
        row("bounds", format!("{west},{south},{east},{north}"));
    }
    if let Some((x, y, zoom)) = set.center {
        row("center", format!("{x},{y},{zoom}"));
    }
    for (name, zoom) in [("minzoom", set.min_zoom), ("maxzoom", set.max_zoom)] {
        zoom.into_iter().for_each(|zoom| row(name, zoom.to_string()));
    }
    // The specification wants a name.
    if set.metadata.member("name").is_none() {
        row("name", String::new());
    }
    let mut others = Metadata::default();
    for (name, value) in set.metadata.members().filter(|(name, _)| !OF_THE_HEADER.contains(name)) {
        match serde_json::from_str::<String>(value.get()) {
            Ok(text) => row(name, text),
            Err(_) => others.set(name, RawValue::to_owned(value)),
        }
    }
    if others.members().next().is_some() {
        row("json", others.to_json());
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn rows_are_read_and_written_alike() {
        let pairs = [
            ("format", "pbf"),
            ("bounds", "-10.5,-20,30,40"),
            ("center", "1,2,3"),
            ("minzoom", "0"),
            ("maxzoom", "14"),
            ("description", "of \"it\""),
            ("name", "World"),
            ("json", r#"{"tilestats":{"n":1},"vector_layers":[{"id":"a","fields":{}}]}"#),
        ];
        let (kind, set) = read(&rows(&pairs));
        assert_eq!((kind, set.min_zoom, set.max_zoom), (Some(TileKind::Mvt), Some(0), Some(14)));
        assert_eq!((set.bounds, set.center), (Some([-10.5, -20.0, 30.0, 40.0]), Some((1.0, 2.0, 3))));
        assert_eq!(set.metadata.text("description").as_deref(), Some("of \"it\""));
        assert!(set.metadata.vector_layers().is_some() && set.metadata.member("json").is_none());
        assert_eq!(write(&set), rows(&pairs));
    }

    #[test]
    fn odd_rows_say_nothing_and_good_ones_count() {
        let (kind, set) = read(&[]);
        assert_eq!(
            (kind, set.kind, set.min_zoom, set.bounds, set.center),
            (None, TileKind::Other, None, None, None)
        );
        let odd = rows(&[
            ("format", "tiff"),
            ("minzoom", " 3.0 "),
            ("maxzoom", "-1"),
            ("bounds", "10,0,-10,0"),
            ("center", "nan,0,1"),
            ("json", "{"),
            ("name", "first"),
            ("name", "second"),
        ]);
        let (kind, set) = read(&odd);
        assert_eq!(
            (kind, set.min_zoom, set.max_zoom, set.bounds, set.center),
            (None, Some(3), None, None, None)
        );
        assert_eq!(set.metadata.text("name").as_deref(), Some("first"));
        let check = |bounds: &str, good| {
            assert_eq!(read(&rows(&[("bounds", bounds)])).1.bounds.is_some(), good, "{bounds}");
        };
        check(" -180.0, -85 ,180,85", true);
        check("-180,-85,180", false);
        check("-180,-85,180,85,0", false);
        check("-180,-85,inf,85", false);
        check("-181,-85,180,85", false);
    }
}
