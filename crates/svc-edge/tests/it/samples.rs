//! Packs to test with.

use bytes::Bytes;
use ron_kernel::inventory::Inventory;
use ron_kernel::metrics::Metrics;
use std::io::Cursor;
use std::sync::Arc;
use svc_edge::pack::directory::{Directory, Entry};
use svc_edge::pack::header::{Geography, Header, Section};
use svc_edge::pack::sample::Sample;
use svc_edge::pack::{Compression, DirectoryCache, Limits, PackError, Pmtiles, TileKind};

pub(crate) fn written(sample: &Sample) -> (Header, Bytes) {
    let mut out = Vec::new();
    let header = sample.write(Cursor::new(vec![]), Cursor::new(vec![]), &mut out).expect("memory takes it");
    (header, out.into())
}

pub(crate) fn opened(bytes: &Bytes) -> Result<Pmtiles<Bytes>, PackError> {
    Pmtiles::open(
        bytes.clone(),
        Limits::default(),
        Arc::new(DirectoryCache::new(&Inventory::new(Metrics::default()), 1 << 20)),
    )
}

pub(crate) fn entry(id: u64, run: u32, offset: u64, length: u32) -> Entry {
    Entry { id, offset, length, run }
}

/// A pack put together by hand, as no writer would: directories as they are given, in the order of the file.
pub(crate) struct Crafted {
    pub root: Vec<Entry>,
    /// Each as it stands in the file.
    pub leaves: Vec<Vec<u8>>,
    pub tiles: Vec<u8>,
    pub metadata: Vec<u8>,
    pub internal: Compression,
}

impl Crafted {
    pub(crate) fn new(root: Vec<Entry>) -> Self {
        let metadata = br#"{"vector_layers":[]}"#.to_vec();
        Self { root, leaves: vec![], tiles: vec![7; 1000], metadata, internal: Compression::None }
    }

    pub(crate) fn leaf(mut self, entries: &[Entry]) -> Self {
        self.leaves.push(self.internal.encode(&Directory::write(entries)).expect("memory takes it"));
        self
    }

    pub(crate) fn bytes(&self) -> Bytes {
        let root = self.internal.encode(&Directory::write(&self.root)).expect("memory takes it");
        let json = self.internal.encode(&self.metadata).expect("memory takes it");
        let leaves = self.leaves.concat();
        let mut end = 127;
        let mut section = |length: usize| {
            end += length as u64;
            Section { offset: end - length as u64, length: length as u64 }
        };
        let header = Header {
            root: section(root.len()),
            metadata: section(json.len()),
            leaves: section(leaves.len()),
            tiles: section(self.tiles.len()),
            addressed: 0,
            entries: 0,
            contents: 0,
            clustered: false,
            internal: self.internal,
            compression: Compression::None,
            kind: TileKind::Other,
            min_zoom: 0,
            max_zoom: 3,
            geography: Geography::default(),
        };
        [&header.to_bytes()[..], &root, &json, &leaves, &self.tiles].concat().into()
    }
}
