//! A pack file of either format, told apart by its first bytes.

use super::verify::{Report, Watch, verify_mbtiles, verify_pmtiles};
use super::{
    DirectoryCache, Fault, Limits, MbTiles, PackError, PackFile, Pmtiles, ReadAt, Tile, TileCoord, TileSet,
};
use std::path::Path;
use std::sync::Arc;

/// A mounted pack file. All of it blocks on the disk.
#[derive(Debug)]
pub enum Pack<R = PackFile> {
    Pmtiles(Pmtiles<R>),
    MbTiles(MbTiles),
}

impl Pack {
    /// Mounts a file; `connections` are how many look-ups of an MBTiles file go on at a time.
    pub fn open(
        path: &Path,
        limits: Limits,
        cache: Arc<DirectoryCache>,
        connections: usize,
    ) -> Result<Self, PackError> {
        Self::of(PackFile::open(path)?, path, limits, cache, connections)
    }
}

impl<R: ReadAt> Pack<R> {
    /// Mounts a file that is open already; SQLite opens it again by its path.
    pub fn of(
        source: R,
        path: &Path,
        limits: Limits,
        cache: Arc<DirectoryCache>,
        connections: usize,
    ) -> Result<Self, PackError> {
        match Pmtiles::open(source, limits, cache.clone()) {
            Ok(pack) => Ok(Self::Pmtiles(pack)),
            Err(PackError::Invalid(Fault::NotAPack)) => {
                Ok(Self::MbTiles(MbTiles::open(path, limits, connections, cache.inventory())?))
            }
            Err(error) => Err(error),
        }
    }

    pub fn tile(&self, coord: TileCoord) -> Result<Option<Tile>, PackError> {
        match self {
            Self::Pmtiles(pack) => pack.tile(coord),
            Self::MbTiles(pack) => pack.tile(coord),
        }
    }

    pub fn tile_set(&self) -> &TileSet {
        match self {
            Self::Pmtiles(pack) => pack.tile_set(),
            Self::MbTiles(pack) => pack.tile_set(),
        }
    }

    /// Looks at everything.
    pub fn verify(&self, watch: Watch<'_>) -> Report {
        match self {
            Self::Pmtiles(pack) => verify_pmtiles(pack, watch),
            Self::MbTiles(pack) => verify_mbtiles(pack, watch),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::Sample;
    use super::*;
    use ron_kernel::inventory::Inventory;
    use ron_kernel::metrics::Metrics;
    use std::ops::ControlFlow;

    #[test]
    fn a_file_is_what_its_first_bytes_say() {
        let dir = tempfile::tempdir().unwrap();
        let open = |name| {
            let cache = DirectoryCache::new(&Inventory::new(Metrics::default()), 1000);
            Pack::open(&dir.path().join(name), Limits::default(), Arc::new(cache), 1)
        };
        let mut out = std::fs::File::create(dir.path().join("a.mbtiles")).unwrap();
        let spill = || tempfile::tempfile().unwrap();
        Sample::default().write(spill(), spill(), &mut out).unwrap();
        let archive = open("a.mbtiles").unwrap();
        let Pack::Pmtiles(inner) = &archive else { panic!("{archive:?}") };
        super::super::convert::to_mbtiles(inner, &dir.path().join("b.pmtiles"), &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
        let database = open("b.pmtiles").unwrap();
        assert!(matches!(database, Pack::MbTiles(_)));
        let coord = TileCoord::new(3, 1, 2).unwrap();
        assert_eq!(database.tile(coord).unwrap(), archive.tile(coord).unwrap());
        assert_eq!(database.tile_set().tile_json(&[], ""), archive.tile_set().tile_json(&[], ""));
        for pack in [&archive, &database] {
            assert!(pack.verify(&mut |_| ControlFlow::Continue(())).is_good());
        }
        std::fs::write(dir.path().join("c"), "neither").unwrap();
        assert!(matches!(open("c"), Err(PackError::Invalid(Fault::NotAPack))));
    }
}
