//! How the tree and the entries are served: tiles of 256 hashes and bundles of 256 records (C2SP tlog-tiles).

use crate::entry::RECORD_MAX;

/// Hashes of a full tile, records of a full bundle.
pub const TILE_WIDTH: u64 = 256;

/// Names a hash tile: level, place within the level, and how many hashes it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tile {
    pub level: u8,
    pub index: u64,
    /// 256 unless it is the partial one at the right edge.
    pub width: u16,
}

/// What a path under `/tile/` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TilePath {
    Hashes(Tile),
    /// Records; the tile of level 0 that they hash to.
    Entries(Tile),
}

impl Tile {
    /// The tile at a place in the tree of a size; none where that tree has no hash.
    pub fn of(level: u8, index: u64, size: u64) -> Option<Self> {
        let hashes = size.checked_shr(8 * u32::from(level)).unwrap_or(0);
        let width = hashes.checked_sub(index.checked_mul(TILE_WIDTH)?)?.min(TILE_WIDTH);
        (width > 0).then_some(Self { level, index, width: width as u16 })
    }

    /// Where its hashes begin within their level.
    pub fn start(&self) -> u64 {
        self.index * TILE_WIDTH
    }
}

impl TilePath {
    /// Reads what follows `/tile/`, in the one form the specification gives each tile.
    pub fn parse(path: &str) -> Option<Self> {
        let (level, rest) = path.split_once('/')?;
        let entries = level == "entries";
        let level = if entries { 0 } else { decimal(level).filter(|level| *level <= 63)? as u8 };
        let (number, width) = match rest.split_once(".p/") {
            None => (rest, TILE_WIDTH),
            Some((number, width)) => {
                (number, decimal(width).filter(|width| (1..TILE_WIDTH).contains(width))?)
            }
        };
        let mut index: u64 = 0;
        let count = number.split('/').count();
        for (place, part) in number.split('/').enumerate() {
            let digits = if place + 1 < count { part.strip_prefix('x')? } else { part };
            if digits.len() != 3 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                return None;
            }
            if count > 1 && place == 0 && digits == "000" {
                return None;
            }
            index = index.checked_mul(1000)?.checked_add(digits.parse().ok()?)?;
        }
        // Nothing that large can be addressed by a version.
        if index > crate::json::NUMBER_MAX / TILE_WIDTH {
            return None;
        }
        let tile = Tile { level, index, width: width as u16 };
        Some(if entries { Self::Entries(tile) } else { Self::Hashes(tile) })
    }
}

impl std::fmt::Display for TilePath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tile = match self {
            Self::Hashes(tile) => {
                write!(f, "{}", tile.level)?;
                tile
            }
            Self::Entries(tile) => {
                f.write_str("entries")?;
                tile
            }
        };
        let mut groups = vec![tile.index % 1000];
        let mut rest = tile.index / 1000;
        while rest > 0 {
            groups.push(rest % 1000);
            rest /= 1000;
        }
        for group in groups.iter().skip(1).rev() {
            write!(f, "/x{group:03}")?;
        }
        write!(f, "/{:03}", groups[0])?;
        if u64::from(tile.width) < TILE_WIDTH { write!(f, ".p/{}", tile.width) } else { Ok(()) }
    }
}

/// A decimal without leading zeros.
pub(crate) fn decimal(text: &str) -> Option<u64> {
    let good = !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_digit())
        && (text == "0" || !text.starts_with('0'));
    text.parse().ok().filter(|_| good)
}

/// Appends a record to a bundle.
pub fn push_record(bundle: &mut Vec<u8>, record: &[u8]) {
    debug_assert!(record.len() <= RECORD_MAX, "an entry checked its size");
    bundle.extend_from_slice(&(record.len() as u16).to_be_bytes());
    bundle.extend_from_slice(record);
}

/// Bytes that are no bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a bundle is 1 to 256 records, each after its length")]
pub struct BundleError;

/// The records of a bundle.
pub fn records(bundle: &[u8]) -> Result<Vec<&[u8]>, BundleError> {
    let (mut rest, mut found) = (bundle, Vec::new());
    while !rest.is_empty() {
        let (length, after) = rest.split_first_chunk::<2>().ok_or(BundleError)?;
        let (record, after) =
            after.split_at_checked(usize::from(u16::from_be_bytes(*length))).ok_or(BundleError)?;
        found.push(record);
        rest = after;
    }
    if (1..=TILE_WIDTH as usize).contains(&found.len()) { Ok(found) } else { Err(BundleError) }
}
