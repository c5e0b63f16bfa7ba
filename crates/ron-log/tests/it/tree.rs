//! The Merkle tree against RFC 6962's definition, and its tiles.

use ron_log::tile::{Tile, TilePath, push_record, records};
use ron_log::tree::{
    Hash, Tree, consistency, inclusion, leaf_hash, node_hash, verify_consistency, verify_inclusion,
};
use std::collections::BTreeMap;
use std::convert::Infallible;

/// MTH of RFC 6962, section 2.1, word for word.
fn root_of(leaves: &[Hash]) -> Hash {
    match leaves {
        [] => Tree::default().root(),
        [one] => *one,
        more => {
            let mut split = 1;
            while split * 2 < more.len() {
                split *= 2;
            }
            node_hash(&root_of(&more[..split]), &root_of(&more[split..]))
        }
    }
}

fn leaf(number: u64) -> Hash {
    leaf_hash(&number.to_be_bytes())
}

#[derive(Default)]
struct Stored(BTreeMap<(u8, u64), Vec<u8>>);

impl Stored {
    fn tree(size: u64) -> (Self, Tree) {
        let (mut stored, mut tree) = (Self::default(), Tree::default());
        for number in 0..size {
            tree.append(leaf(number), |level, place, hash| {
                let tile = stored.0.entry((level, place / 256)).or_default();
                assert_eq!(tile.len() as u64, place % 256 * 32, "hashes come in order");
                tile.extend_from_slice(hash);
            });
        }
        (stored, tree)
    }

    fn read(&self, tile: Tile) -> Result<Vec<u8>, Infallible> {
        Ok(self.0[&(tile.level, tile.index)].clone())
    }
}

#[test]
fn roots_are_those_of_the_reference_implementation() {
    let inputs: [&[u8]; 8] = [
        b"",
        b"\x00",
        b"\x10",
        b"\x20\x21",
        b"\x30\x31",
        b"\x40\x41\x42\x43",
        b"\x50\x51\x52\x53\x54\x55\x56\x57",
        b"\x60\x61\x62\x63\x64\x65\x66\x67\x68\x69\x6a\x6b\x6c\x6d\x6e\x6f",
    ];
    let expected = [
        "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
        "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
        "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
        "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
        "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
    ];
    let mut tree = Tree::default();
    for (input, expected) in inputs.iter().zip(expected) {
        tree.append(leaf_hash(input), |_, _, _| {});
        let text: String = tree.root().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(text, expected);
    }
}

#[test]
fn every_small_proof_verifies_and_no_other_does() {
    let (stored, _) = Stored::tree(24);
    let leaves: Vec<Hash> = (0..24).map(leaf).collect();
    let roots: Vec<Hash> = (0..=24).map(|size| root_of(&leaves[..size])).collect();
    for size in 1..=24u64 {
        let tree = Tree::from_tiles(size, |tile| stored.read(tile)).expect("tiles");
        assert_eq!((tree.size(), tree.root()), (size, roots[size as usize]));
        for index in 0..size {
            let path = inclusion(index, size, |tile| stored.read(tile)).expect("a path");
            let root = &roots[size as usize];
            assert!(verify_inclusion(&leaf(index), index, size, &path, root));
            assert!(!verify_inclusion(&leaf(index + 1), index, size, &path, root));
            for other in (0..=size).filter(|other| *other != index) {
                assert!(!verify_inclusion(&leaf(index), other, size, &path, root), "{index} {other} {size}");
            }
            assert!(!verify_inclusion(
                &leaf(index),
                index,
                size,
                &[path.clone(), vec![*root]].concat(),
                root
            ));
            assert!(path.is_empty() || !verify_inclusion(&leaf(index), index, size, &path[1..], root));
        }
        for from in 0..=size {
            let path = consistency(from, size, |tile| stored.read(tile)).expect("a path");
            let (old, new) = (&roots[from as usize], &roots[size as usize]);
            assert!(verify_consistency(from, size, &path, old, new), "{from} {size}");
            if from > 0 && from < size {
                assert!(!verify_consistency(from, size, &path, new, new));
                assert!(!verify_consistency(from, size, &path, old, old));
                assert!(!verify_consistency(from, size, &path[1..], old, new));
                assert!(!verify_consistency(from, size, &[path.clone(), vec![*old]].concat(), old, new));
                assert!(!verify_consistency(from + 1, size, &path, old, new) || from + 1 == size);
            }
        }
    }
    assert!(inclusion(3, 3, |tile| stored.read(tile)).is_err());
    assert!(consistency(4, 3, |tile| stored.read(tile)).is_err());
}

#[test]
fn proofs_span_tiles_of_several_levels() {
    let size = 66_000;
    let (stored, tree) = Stored::tree(size);
    assert_eq!(stored.0.keys().map(|(level, _)| *level).max(), Some(2));
    let again = Tree::from_tiles(size, |tile| stored.read(tile)).expect("tiles");
    assert_eq!(again, tree);
    for index in [0, 255, 256, 40_000, 65_535, 65_536, 65_999] {
        let path = inclusion(index, size, |tile| stored.read(tile)).expect("a path");
        assert!(verify_inclusion(&leaf(index), index, size, &path, &tree.root()));
    }
    for from in [1, 256, 1000, 65_536, 65_999] {
        let path = consistency(from, size, |tile| stored.read(tile)).expect("a path");
        let old = Tree::from_tiles(from, |tile| stored.read(tile)).expect("tiles").root();
        assert!(verify_consistency(from, size, &path, &old, &tree.root()));
    }
}

#[test]
fn a_tree_has_the_tiles_its_specification_gives_it() {
    let widths = |level, index| Tile::of(level, index, 70_000).map(|tile| tile.width);
    assert_eq!([widths(0, 272), widths(0, 273), widths(0, 274)], [Some(256), Some(112), None]);
    assert_eq!([widths(1, 0), widths(1, 1), widths(1, 2)], [Some(256), Some(17), None]);
    assert_eq!([widths(2, 0), widths(2, 1), widths(3, 0), widths(63, 0)], [Some(1), None, None, None]);
    for path in
        ["0/x001/x234/067", "1/067", "entries/000", "0/273.p/112", "63/x001/000", "entries/x001/000.p/1"]
    {
        assert_eq!(TilePath::parse(path).expect(path).to_string(), path);
    }
    for path in [
        "",
        "0",
        "0/",
        "64/000",
        "00/000",
        "0/67",
        "0/0067",
        "0/x000/067",
        "0/001/067",
        "0/x001",
        "0/067.p/256",
        "0/067.p/0",
        "0/067.p/01",
        "0/067.p/",
        "-1/000",
        "data/000",
        "0/x999/x999/x999/x999/x999/x999/999",
    ] {
        assert_eq!(TilePath::parse(path), None, "{path}");
    }
}

#[test]
fn a_bundle_holds_up_to_256_records() {
    let mut bundle = Vec::new();
    let written: Vec<Vec<u8>> = (0..256usize).map(|length| vec![7; length * 3]).collect();
    written.iter().for_each(|record| push_record(&mut bundle, record));
    assert_eq!(records(&bundle).expect("a bundle"), written);
    assert!(records(&bundle[..bundle.len() - 1]).is_err());
    push_record(&mut bundle, b"one more");
    assert!(records(&bundle).is_err() && records(b"").is_err() && records(b"\0").is_err());
}
