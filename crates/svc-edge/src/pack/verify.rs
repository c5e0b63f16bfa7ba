//! Checks a whole pack: what a reader takes on trust until a tile is asked for, and what no reader looks at.

use super::directory::Entry;
use super::{Compression, Fault, MbTiles, PackError, Pmtiles, ReadAt, Tile, TileCoord, TileKind, TileSet};
use std::ops::ControlFlow;

/// Findings that are listed; the rest are counted.
pub const FINDINGS_MAX: usize = 100;
/// Findings after which nothing more can be said of a pack but that it is bad.
const GIVE_UP: u64 = 10_000;
/// Contents that are looked at: each takes 24 bytes of memory.
const CONTENTS_MAX: usize = 1 << 25;

/// Something wrong, and the first tile it concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    pub fault: Fault,
    pub tile: Option<TileCoord>,
}

/// Tiles up to which a pack needs no index.
const UNINDEXED_MAX: u64 = 10_000;

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// In the order found, at most [`FINDINGS_MAX`].
    pub findings: Vec<Finding>,
    /// All of them, listed or not.
    pub found: u64,
    /// Everything was looked at.
    pub complete: bool,
    /// Tiles that have an address.
    pub tiles: u64,
    /// Different contents, each decoded once.
    pub contents: u64,
}

impl Report {
    pub fn is_good(&self) -> bool {
        self.complete && self.found == 0
    }

    fn note(&mut self, fault: Fault, tile: Option<TileCoord>) -> ControlFlow<()> {
        self.found += 1;
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(Finding { fault, tile });
        }
        if self.found >= GIVE_UP { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// How far it is: parts of a total, in bytes or tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub done: u64,
    pub total: u64,
}

/// Told now and then; may say that enough is done.
pub type Watch<'a> = &'a mut dyn FnMut(Progress) -> ControlFlow<()>;

/// Checks a PMTiles archive: directories, order, clustering, counts, overlaps, and every content once.
pub fn verify_pmtiles<R: ReadAt>(pack: &Pmtiles<R>, watch: Watch<'_>) -> Report {
    let mut report = Report::default();
    let flow = check_pmtiles(pack, &mut report, watch);
    report.complete = flow.is_continue();
    report
}

fn check_pmtiles<R: ReadAt>(pack: &Pmtiles<R>, report: &mut Report, watch: Watch<'_>) -> ControlFlow<()> {
    let header = pack.header();
    check_statements(pack, report)?;
    let mut contents = Contents::new(header.tiles.offset);
    let (mut ids, mut entries) = (None, 0);
    pack.walk(&mut |step| match step {
        Ok(entry) => {
            entries += 1;
            report.tiles += u64::from(entry.run);
            let last = entry.id + u64::from(entry.run) - 1;
            ids = Some((ids.map_or(entry.id, |(first, _)| first), last));
            contents.add(entry, report)
        }
        Err((leaf, error)) => report.note(fault(&error), TileCoord::of_id(leaf.from)),
    })?;
    let contents = contents.finish(header.clustered, report)?;
    report.contents = contents.len() as u64;
    // What a bad leaf hides cannot be counted.
    if report.found == 0 {
        let zoom = |id| TileCoord::of_id(id).map_or(0, |coord: TileCoord| u64::from(coord.z()));
        let (first, last) = ids.unwrap_or_default();
        let counted = [
            ("tiles", header.addressed, report.tiles),
            ("entries", header.entries, entries),
            ("contents", header.contents, report.contents),
        ];
        let zooms = [
            ("lowest zoom", u64::from(header.min_zoom), zoom(first)),
            ("highest zoom", u64::from(header.max_zoom), zoom(last)),
        ];
        // A count of zero says that nobody counted.
        let counted = counted.into_iter().filter(|(_, stated, _)| *stated != 0);
        for (name, stated, found) in counted.chain(zooms).filter(|(_, stated, found)| stated != found) {
            report.note(Fault::Stated { name, stated, found }, None)?;
        }
    }
    let total = contents.iter().map(|content| u64::from(content.length)).sum();
    let mut done = 0;
    for content in contents {
        let tile = pack.read(content.section()).map(|bytes| Tile { bytes, compression: header.compression });
        let checked =
            tile.map_err(|error| fault(&error)).and_then(|tile| check_tile(tile, header.kind, pack.limits()));
        if let Err(fault) = checked {
            report.note(fault, TileCoord::of_id(content.id))?;
        }
        done += u64::from(content.length);
        watch(Progress { done, total })?;
    }
    ControlFlow::Continue(())
}

/// Checks an MBTiles file: the database, and every tile.
pub fn verify_mbtiles(pack: &MbTiles, watch: Watch<'_>) -> Report {
    let mut report = Report::default();
    report.complete = check_mbtiles(pack, &mut report, watch).is_continue();
    report
}

fn check_mbtiles(pack: &MbTiles, report: &mut Report, watch: Watch<'_>) -> ControlFlow<()> {
    if let Err(error) = pack.check_database() {
        report.note(fault(&error), None)?;
    }
    check_layers(pack.tile_set(), report)?;
    let (mut ids, strange) = match pack.ids() {
        Ok(found) => found,
        Err(error) => return report.note(fault(&error), None),
    };
    (0..strange).try_for_each(|_| report.note(Fault::Row, None))?;
    // Which of them is served, nobody knows.
    for rows in ids.chunk_by(|one, next| one == next).filter(|rows| rows.len() > 1) {
        report.note(Fault::Rows, TileCoord::of_id(rows[0]))?;
    }
    ids.dedup();
    let total = ids.len() as u64;
    report.tiles = total;
    // Each look-up goes through the whole table then.
    if !pack.is_indexed() && total > UNINDEXED_MAX {
        return report.note(Fault::Budget, None);
    }
    for (done, id) in (1..).zip(ids) {
        let Some(coord) = TileCoord::of_id(id) else { continue };
        let checked = match pack.tile(coord) {
            Ok(Some(tile)) => check_tile(tile, pack.tile_set().kind, pack.limits()),
            Ok(None) => Ok(()),
            Err(error) => Err(fault(&error)),
        };
        report.contents += 1;
        if let Err(fault) = checked {
            report.note(fault, Some(coord))?;
        }
        watch(Progress { done, total })?;
    }
    ControlFlow::Continue(())
}

fn fault(error: &PackError) -> Fault {
    match error {
        PackError::Invalid(fault) => *fault,
        PackError::Read(_) => Fault::Unreadable,
    }
}

fn check_tile(tile: Tile, kind: TileKind, limits: super::Limits) -> Result<(), Fault> {
    let decoded = tile.decoded(limits)?;
    if kind.fits(&decoded) { Ok(()) } else { Err(Fault::Content) }
}

/// What the header and the metadata say that nothing else depends on.
fn check_statements<R: ReadAt>(pack: &Pmtiles<R>, report: &mut Report) -> ControlFlow<()> {
    let header = pack.header();
    let [west, south, east, north] = header.geography.bounds;
    let [longitude, latitude] = header.geography.center;
    let on_earth = |longitude: i32, latitude: i32| {
        longitude.unsigned_abs() <= 1_800_000_000 && latitude.unsigned_abs() <= 900_000_000
    };
    let statements = [
        ("bounds", on_earth(west, south) && on_earth(east, north) && west <= east && south <= north),
        ("center", on_earth(longitude, latitude)),
        ("tile compression", header.compression != Compression::Unknown),
    ];
    for (name, good) in statements {
        if !good {
            report.note(Fault::Field(name), None)?;
        }
    }
    check_layers(pack.tile_set(), report)
}

fn check_layers(set: &TileSet, report: &mut Report) -> ControlFlow<()> {
    if set.kind == TileKind::Mvt && set.metadata.vector_layers().is_none() {
        return report.note(Fault::VectorLayers, None);
    }
    ControlFlow::Continue(())
}

/// A content of the tile section, and the first tile that has it.
type Content = Entry;

/// All contents that entries name.
struct Contents {
    /// Those that followed each other in the file, so in order.
    onward: Vec<Content>,
    /// The others.
    late: Vec<Content>,
    /// Where the next content of a clustered archive begins.
    end: u64,
    /// The first tile that is not where a clustered archive would have it.
    astray: Option<u64>,
}

impl Contents {
    fn new(start: u64) -> Self {
        Self { onward: Vec::new(), late: Vec::new(), end: start, astray: None }
    }

    fn add(&mut self, entry: Entry, report: &mut Report) -> ControlFlow<()> {
        if self.onward.len() + self.late.len() == CONTENTS_MAX {
            let _ = report.note(Fault::TooMany, TileCoord::of_id(entry.id));
            return ControlFlow::Break(());
        }
        if entry.offset >= self.end {
            if entry.offset > self.end {
                self.astray.get_or_insert(entry.id);
            }
            self.end = entry.offset + u64::from(entry.length);
            self.onward.push(entry);
            return ControlFlow::Continue(());
        }
        let before = self.onward.binary_search_by_key(&entry.offset, |content| content.offset);
        if before.is_ok_and(|at| self.onward[at].length == entry.length) {
            return ControlFlow::Continue(());
        }
        self.astray.get_or_insert(entry.id);
        self.late.push(entry);
        ControlFlow::Continue(())
    }

    /// Each content once, in the order of the file.
    fn finish(self, clustered: bool, report: &mut Report) -> ControlFlow<(), Vec<Content>> {
        if let Some(id) = self.astray.filter(|_| clustered) {
            report.note(Fault::Clustered, TileCoord::of_id(id))?;
        }
        let mut all = self.onward;
        if !self.late.is_empty() {
            all.extend(self.late);
            all.sort_unstable_by_key(|content| (content.offset, content.length, content.id));
            all.dedup_by_key(|content| content.section());
            for pair in all.windows(2) {
                if pair[1].offset - pair[0].offset < u64::from(pair[0].length) {
                    report.note(Fault::EntriesOverlap, TileCoord::of_id(pair[1].id))?;
                }
            }
        }
        ControlFlow::Continue(all)
    }
}
