//! Our reader, our writer and another implementation of the format say the same of every tile.

use crate::samples::{opened, written};
use bytes::Bytes;
use pmtiles::{AsyncBackend, AsyncPmTilesReader, BackendResponse, HashMapCache, PmtResult};
use std::io::Cursor;
use std::ops::ControlFlow;
use svc_edge::pack::grow::Grower;
use svc_edge::pack::sample::Sample;
use svc_edge::pack::{Compression, TileCoord};

struct Memory(Bytes);

impl AsyncBackend for Memory {
    async fn read(&self, offset: u64, length: usize) -> PmtResult<BackendResponse> {
        let offset = usize::try_from(offset).expect("64 bits");
        let end = self.0.len().min(offset + length);
        Ok(BackendResponse::new(self.0.slice(offset.min(end)..end)))
    }
}

/// Compares every place of the pyramid, and one zoom below it, where nothing is; `check` sees each tile decoded.
pub(crate) async fn compare(
    bytes: &Bytes,
    max_zoom: u8,
    check: &(dyn Fn(TileCoord, Option<&[u8]>) + Sync),
) -> u64 {
    let theirs = AsyncPmTilesReader::try_from_cached_source(Memory(bytes.clone()), HashMapCache::default());
    let theirs = theirs.await.expect("they open it");
    let ours = opened(bytes).expect("we open it");
    let mut found = 0;
    for coord in (Sample { max_zoom: max_zoom + 1, ..Sample::default() }).coords() {
        let id = pmtiles::TileId::new(coord.id()).expect("an id");
        let tile = ours.tile(coord).expect("we read it");
        assert_eq!(
            tile.as_ref().map(|tile| tile.bytes.clone()),
            theirs.get_tile(id).await.expect("they read it"),
            "{coord}"
        );
        let decoded = tile.map(|tile| tile.decoded(ours.limits()).expect("it decodes"));
        assert_eq!(decoded, theirs.get_tile_decompressed(id).await.expect("they read it"), "{coord}");
        check(coord, decoded.as_deref());
        found += u64::from(decoded.is_some());
    }
    let header = theirs.get_header();
    assert_eq!(header.n_addressed_tiles().map(u64::from), Some(found));
    let read = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("it is JSON");
    assert_eq!(read(&theirs.get_metadata().await.expect("they read it")), read(&ours.metadata().to_json()));
    found
}

async fn compare_sample(sample: &Sample, bytes: &Bytes) -> u64 {
    let check = |coord: TileCoord, tile: Option<&[u8]>| {
        let drawn = sample.tile(coord).filter(|_| coord.z() <= sample.max_zoom);
        assert_eq!(tile, drawn.as_deref(), "{coord}");
    };
    compare(bytes, sample.max_zoom, &check).await
}

#[tokio::test]
async fn every_tile_reads_alike_under_every_compression() {
    for compression in Compression::ALL.into_iter().skip(1) {
        for internal in Compression::ALL.into_iter().skip(1) {
            let sample = Sample { compression, internal, max_zoom: 4, ..Sample::default() };
            let (header, bytes) = written(&sample);
            assert_eq!(header.leaves.length, 0);
            assert_eq!(compare_sample(&sample, &bytes).await, header.addressed);
            assert_eq!(written(&sample).1, bytes, "the same tiles, the same file");
        }
    }
}

#[tokio::test]
async fn every_tile_reads_alike_in_leaf_directories() {
    for (internal, max_zoom) in [(Compression::None, 6), (Compression::Gzip, 7), (Compression::Zstd, 7)] {
        let compression = Compression::None;
        let sample =
            Sample { compression, internal, max_zoom, sea_percent: 20, points_max: 3, ..Sample::default() };
        let (header, bytes) = written(&sample);
        assert!(header.leaves.length > 0 && header.root.length < 16_257, "{header:?}");
        assert_eq!(compare_sample(&sample, &bytes).await, header.addressed);
    }
}

#[test]
fn a_hilbert_id_is_the_same_everywhere() {
    let mut id: u64 = 0;
    while let Some(coord) = TileCoord::of_id(id) {
        let theirs = pmtiles::TileId::from(pmtiles::TileCoord::new(coord.z(), coord.x(), coord.y()).unwrap());
        assert_eq!((theirs.value(), coord.id()), (id, id));
        id += id / 300 + 1;
    }
}

#[tokio::test]
async fn an_archive_that_grew_from_single_tiles_reads_alike() {
    let sample = Sample { max_zoom: 5, gap_percent: 20, ..Sample::default() };
    let mut grower = Grower::new(Cursor::<Vec<u8>>::default());
    // From the last to the first: they come in any order.
    let coords: Vec<TileCoord> = sample.coords().collect();
    for coord in coords.iter().rev() {
        if let Some(tile) = sample.tile(*coord) {
            assert!(grower.add(&format!("t/{coord}.mvt"), "", tile.into()).expect("a tile"));
        }
    }
    let (mut out, spill) = (Vec::new(), [Cursor::default(), Cursor::default()]);
    let grown = grower.finish("t", spill, &mut out, &mut |_| ControlFlow::Continue(())).expect("an archive");
    assert_eq!(compare_sample(&sample, &out.into()).await, grown.tiles);
}
