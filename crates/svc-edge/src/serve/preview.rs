//! A page that shows a pack on a map.
//!
//! The map is drawn by MapLibre GL JS, which `cargo xtask assets` puts where the build finds it. Without it everything
//! else works, and the page says what is missing.

use crate::packs::Content;
use crate::semantics::Coding;
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{CONTENT_SECURITY_POLICY, HeaderMap, HeaderValue};
use std::io::Write as _;
use std::sync::{Arc, LazyLock};

pub(super) const HTML: &str = "text/html; charset=utf-8";

include!(concat!(env!("OUT_DIR"), "/library.rs"));

/// Nothing but what this node sends, and no script in the page itself.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    img-src 'self' data: blob:; worker-src 'self' blob:; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'self'";

/// The page of a pack; its name is letters, digits, `-` and `_`.
pub(super) fn page(pack: &str) -> String {
    let text = if LIBRARY.is_empty() {
        include_str!("preview/missing.html")
    } else {
        include_str!("preview/page.html")
    };
    text.replace("{pack}", pack)
}

pub(super) fn protect(headers: &mut HeaderMap) {
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
}

/// A part of the page and its type. The first time takes a moment.
pub(super) fn part(file: &str) -> Option<(Arc<Content>, &'static str)> {
    static PARTS: LazyLock<Vec<(&str, Arc<Content>)>> = LazyLock::new(|| {
        let own = [
            ("preview.mjs", include_bytes!("preview/preview.mjs").as_slice()),
            ("preview.css", include_bytes!("preview/preview.css")),
        ];
        own.into_iter().chain(LIBRARY.iter().copied()).map(|(name, bytes)| (name, packed(bytes))).collect()
    });
    let content_type = match file.rsplit_once('.')?.1 {
        "css" => "text/css; charset=utf-8",
        "txt" => "text/plain; charset=utf-8",
        _ => "text/javascript; charset=utf-8",
    };
    PARTS.iter().find(|(name, _)| *name == file).map(|(_, content)| (content.clone(), content_type))
}

fn packed(bytes: &'static [u8]) -> Arc<Content> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    Arc::new(match encoder.write_all(bytes).and_then(|()| encoder.finish()) {
        Ok(packed) => Content::new(packed.into(), Coding::Gzip),
        Err(_memory_does_not_fail) => Content::new(Bytes::from_static(bytes), Coding::Identity),
    })
}
