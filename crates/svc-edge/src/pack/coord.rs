//! Where a tile is: zoom, column and row, and the number that PMTiles gives it along a Hilbert curve.

/// The deepest zoom: its last tile is the last that a tile id can name.
pub const ZOOM_MAX: u8 = 31;

/// One past the last tile id.
pub const IDS_END: u64 = first_id(ZOOM_MAX) + (1 << (2 * ZOOM_MAX));

/// A tile that exists: the column and the row are less than two to the power of the zoom. Rows count from the north.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TileCoord {
    z: u8,
    x: u32,
    y: u32,
}

/// The first tile id of a zoom: how many tiles all zooms above it have.
const fn first_id(z: u8) -> u64 {
    // The sum of 4^n for n < z.
    ((1 << (2 * z)) - 1) / 3
}

impl TileCoord {
    pub fn new(z: u8, x: u32, y: u32) -> Option<Self> {
        let good = z <= ZOOM_MAX && u64::from(x.max(y)) < 1 << z;
        good.then_some(Self { z, x, y })
    }

    pub fn z(self) -> u8 {
        self.z
    }

    pub fn x(self) -> u32 {
        self.x
    }

    pub fn y(self) -> u32 {
        self.y
    }

    /// The row as TMS and so MBTiles count it: from the south.
    pub fn tms_row(self) -> u32 {
        ((1 << self.z) - 1 - u64::from(self.y)) as u32
    }

    /// The tile of a TMS row.
    pub fn from_tms(z: u8, x: u32, row: u32) -> Option<Self> {
        // Turning a row over twice gives it back.
        let turned = Self::new(z, x, row)?.tms_row();
        Some(Self { z, x, y: turned })
    }

    /// Its place along the Hilbert curve of its zoom, behind all lower zooms.
    pub fn id(self) -> u64 {
        let (mut x, mut y, mut along) = (u64::from(self.x), u64::from(self.y), 0);
        for level in (0..self.z).rev() {
            let half = 1 << level;
            let (east, south) = (x >> level, y >> level);
            along = along << 2 | ((3 * east) ^ south);
            (x, y) = turn(half, x & (half - 1), y & (half - 1), east, south);
        }
        first_id(self.z) + along
    }

    /// The tile of an id; none beyond the last one.
    pub fn of_id(id: u64) -> Option<Self> {
        if id >= IDS_END {
            return None;
        }
        // The zoom is half the position of the highest bit of 3 * id + 1, which is 4^z at the first id.
        let z = ((3 * u128::from(id) + 1).ilog2() / 2) as u8;
        let (mut rest, mut x, mut y) = (id - first_id(z), 0, 0);
        for level in 0..z {
            let half = 1 << level;
            let east = rest >> 1 & 1;
            let south = (rest ^ east) & 1;
            (x, y) = turn(half, x, y, east, south);
            x |= east << level;
            y |= south << level;
            rest >>= 2;
        }
        Some(Self { z, x: x as u32, y: y as u32 })
    }
}

/// Within a quarter, the curve is turned or mirrored; doing it twice undoes it.
fn turn(half: u64, x: u64, y: u64, east: u64, south: u64) -> (u64, u64) {
    match (east, south) {
        (0, 0) => (y, x),
        (1, 0) => (half - 1 - y, half - 1 - x),
        _ => (x, y),
    }
}

impl std::fmt::Display for TileCoord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}", self.z, self.x, self.y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The curve by its definition: four copies of the smaller one, the first and last of them mirrored.
    fn naive_curve(z: u8) -> Vec<(u32, u32)> {
        if z == 0 {
            return vec![(0, 0)];
        }
        let (inner, half) = (naive_curve(z - 1), 1 << (z - 1));
        let first = inner.iter().map(|(x, y)| (*y, *x));
        let second = inner.iter().map(|(x, y)| (*x, *y + half));
        let third = inner.iter().map(|(x, y)| (*x + half, *y + half));
        let last = inner.iter().map(|(x, y)| (2 * half - 1 - *y, half - 1 - *x));
        first.chain(second).chain(third).chain(last).collect()
    }

    #[test]
    fn ids_follow_the_hilbert_curve_zoom_by_zoom() {
        let mut id = 0;
        for z in 0..=8 {
            for (x, y) in naive_curve(z) {
                let tile = TileCoord::new(z, x, y).unwrap();
                assert_eq!((tile.id(), TileCoord::of_id(id)), (id, Some(tile)));
                id += 1;
            }
        }
    }

    #[test]
    fn the_specification_s_values_come_out() {
        let check = |z, x, y, id| {
            let tile = TileCoord::new(z, x, y).unwrap();
            assert_eq!((tile.id(), TileCoord::of_id(id)), (id, Some(tile)));
        };
        check(0, 0, 0, 0);
        check(1, 0, 0, 1);
        check(1, 0, 1, 2);
        check(1, 1, 1, 3);
        check(1, 1, 0, 4);
        check(2, 0, 0, 5);
        check(12, 3423, 1763, 19_078_479);
        check(31, (1 << 31) - 1, 0, IDS_END - 1);
    }

    #[test]
    fn what_does_not_exist_has_no_coordinates() {
        assert_eq!(TileCoord::of_id(IDS_END), None);
        assert_eq!(TileCoord::of_id(u64::MAX), None);
        assert_eq!(TileCoord::new(0, 1, 0), None);
        assert_eq!(TileCoord::new(4, 0, 16), None);
        assert_eq!(TileCoord::new(32, 0, 0), None);
        assert_eq!(TileCoord::from_tms(31, 0, 1 << 31), None);
    }

    proptest! {
        #[test]
        fn ids_and_coordinates_name_the_same_tiles(id in 0..IDS_END) {
            let tile = TileCoord::of_id(id).unwrap();
            prop_assert_eq!(tile.id(), id);
            prop_assert_eq!(TileCoord::from_tms(tile.z(), tile.x(), tile.tms_row()), Some(tile));
            // The curve never jumps.
            if let Some(next) = TileCoord::of_id(id + 1).filter(|next| next.z() == tile.z()) {
                prop_assert_eq!(tile.x().abs_diff(next.x()) + tile.y().abs_diff(next.y()), 1);
            }
        }
    }
}
