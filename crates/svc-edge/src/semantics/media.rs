//! What kind of thing a name stands for, and whether it is worth compressing.

const UNKNOWN: &str = "application/octet-stream";

/// By extension; the map formats among them.
const TYPES: [(&str, &str); 44] = [
    ("avif", "image/avif"),
    ("bin", UNKNOWN),
    ("css", "text/css; charset=utf-8"),
    ("csv", "text/csv; charset=utf-8"),
    ("gif", "image/gif"),
    ("geojson", "application/geo+json"),
    ("gz", "application/gzip"),
    ("htm", "text/html; charset=utf-8"),
    ("html", "text/html; charset=utf-8"),
    ("ico", "image/vnd.microsoft.icon"),
    ("jpeg", "image/jpeg"),
    ("jpg", "image/jpeg"),
    ("js", "text/javascript; charset=utf-8"),
    ("json", "application/json"),
    ("jxl", "image/jxl"),
    ("map", "application/json"),
    ("md", "text/markdown; charset=utf-8"),
    ("mjs", "text/javascript; charset=utf-8"),
    ("mlt", "application/vnd.maplibre-vector-tile"),
    ("mp3", "audio/mpeg"),
    ("mp4", "video/mp4"),
    ("mvt", "application/vnd.mapbox-vector-tile"),
    ("ogg", "audio/ogg"),
    ("otf", "font/otf"),
    ("pbf", "application/x-protobuf"),
    ("pdf", "application/pdf"),
    ("pmtiles", "application/vnd.pmtiles"),
    ("png", "image/png"),
    ("svg", "image/svg+xml"),
    ("tar", "application/x-tar"),
    ("tif", "image/tiff"),
    ("tiff", "image/tiff"),
    ("ttf", "font/ttf"),
    ("txt", "text/plain; charset=utf-8"),
    ("wasm", "application/wasm"),
    ("webm", "video/webm"),
    ("webmanifest", "application/manifest+json"),
    ("webp", "image/webp"),
    ("woff", "font/woff"),
    ("woff2", "font/woff2"),
    ("xhtml", "application/xhtml+xml"),
    ("xml", "application/xml"),
    ("zip", "application/zip"),
    ("zst", "application/zstd"),
];

/// The type that a name's extension stands for.
pub fn type_of(name: &str) -> &'static str {
    let file = name.rsplit('/').next().unwrap_or(name);
    let extension = file.rsplit_once('.').map_or("", |(_, extension)| extension);
    let known = TYPES.iter().find(|(known, _)| known.eq_ignore_ascii_case(extension));
    known.map_or(UNKNOWN, |(_, media)| media)
}

/// Whether content of this type gets shorter by compression.
pub fn is_compressible(media: &str) -> bool {
    let essence = media.split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    let structured = essence.ends_with("+json") || essence.ends_with("+xml");
    let named = matches!(
        essence.as_str(),
        "application/json"
            | "application/xml"
            | "application/javascript"
            | "application/wasm"
            | "application/x-protobuf"
            | "application/vnd.mapbox-vector-tile"
            | "application/vnd.maplibre-vector-tile"
            | "font/ttf"
            | "font/otf"
            | "image/vnd.microsoft.icon"
    );
    // An event stream is not stored whole and would have nothing to gain.
    structured || named || (essence.starts_with("text/") && essence != "text/event-stream")
}
