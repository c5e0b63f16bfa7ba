//! `Cache-Status` (RFC 9211): how the answer came about.

use http::header::{HeaderName, HeaderValue};

pub const CACHE_STATUS: HeaderName = HeaderName::from_static("cache-status");

/// Where an answer came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheStatus {
    /// It was stored.
    Hit,
    /// It was not, and nobody was asked for it.
    Miss,
}

impl CacheStatus {
    /// As `edge_cache_total` calls it.
    pub fn label(self) -> &'static str {
        match self {
            CacheStatus::Hit => "hit",
            CacheStatus::Miss => "miss",
        }
    }

    /// `fwd` is for requests that went on to an origin; one that did not says so in `detail`.
    pub fn value(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            CacheStatus::Hit => "ron-edge; hit",
            CacheStatus::Miss => "ron-edge; detail=miss",
        })
    }
}
