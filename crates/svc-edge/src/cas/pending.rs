//! What is going to be in the index, as a small file: a process that is killed before it is there finds it here.
//!
//! The file is not synced and only ever written over, so that it may be half of one: it begins with the hash of what it
//! says and the length of that. It is not cut either, which would wait for a disk that still writes the note before.

use super::catalog::Asset;
use super::disk::{self, Change};
use crate::address::Address;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::io::{self, Read as _};
use std::sync::Arc;

/// Changes that become the index's commit of this number.
pub(super) fn encode(number: u64, changes: &[Change]) -> Vec<u8> {
    let row = |change: &Change| match change {
        Change::Object(address, object) => {
            json!({"address": address.to_string(), "row": STANDARD.encode(disk::encode(object))})
        }
        Change::NoObject(address) => json!({"address": address.to_string()}),
        Change::Name(name, asset) => json!({"name": &**name, "asset": asset.to_json(name).to_string()}),
        Change::NoName(name) => json!({"name": &**name}),
    };
    let rows: Vec<Value> = changes.iter().map(row).collect();
    let text = json!({"number": number, "changes": rows}).to_string();
    let (hash, len) = (blake3::hash(text.as_bytes()), text.len() as u64);
    [hash.as_bytes().as_slice(), &len.to_be_bytes(), text.as_bytes()].concat()
}

/// More than the changes of a batch come to.
const LONGEST: u64 = 64 << 20;

/// The same from a file, of which no more is read than a note can be.
pub(super) fn read(file: impl io::Read) -> Option<(u64, Vec<Change>)> {
    let mut note = Vec::new();
    file.take(LONGEST).read_to_end(&mut note).ok()?;
    decode(&note)
}

/// The number and the changes; `None` if this is not all of it.
pub(super) fn decode(note: &[u8]) -> Option<(u64, Vec<Change>)> {
    let (hash, rest) = note.split_first_chunk::<32>()?;
    let (len, rest) = rest.split_first_chunk::<8>()?;
    // Beyond it there may be the rest of a longer note.
    let text = rest.get(..usize::try_from(u64::from_be_bytes(*len)).ok()?)?;
    if blake3::hash(text) != blake3::Hash::from(*hash) {
        return None;
    }
    let note: Value = serde_json::from_slice(text).ok()?;
    let change = |row: &Value| {
        if let Some(address) = row["address"].as_str() {
            let address = Address::parse(address)?;
            let Some(row) = row["row"].as_str() else { return Some(Change::NoObject(address)) };
            let (address, object) = disk::decode(&address.0, &STANDARD.decode(row).ok()?)?;
            return Some(Change::Object(address, object));
        }
        let name: Arc<str> = row["name"].as_str()?.into();
        let Some(asset) = row["asset"].as_str() else { return Some(Change::NoName(name)) };
        Some(Change::Name(name, Arc::new(Asset::from_json(asset.as_bytes())?.1)))
    };
    let changes = note["changes"].as_array()?.iter().map(change).collect::<Option<_>>()?;
    Some((note["number"].as_u64()?, changes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cas::Object;
    use crate::semantics::Coding;

    #[test]
    fn a_note_is_read_as_it_was_written_or_not_at_all() {
        let address = Address([7; 32]);
        let object = Object {
            len: 5,
            sha256: Some([9; 32]),
            direct: false,
            stored: 11,
            bytes: None,
            condition: Arc::default(),
        };
        let asset = Asset {
            content_type: "text/plain".to_owned(),
            modified: 13,
            keys: vec!["k".to_owned()],
            variants: vec![(Coding::Identity, address)],
            head: None,
        };
        let changes = [
            Change::Object(address, object),
            Change::Name("\0a\0b".into(), Arc::new(asset.clone())),
            Change::NoObject(Address([8; 32])),
            Change::NoName("gone".into()),
        ];
        let note = encode(17, &changes);
        let (number, read) = decode(&note).unwrap();
        assert_eq!(number, 17);
        let [
            Change::Object(at, object),
            Change::Name(name, named),
            Change::NoObject(no_object),
            Change::NoName(no_name),
        ] = &read[..]
        else {
            panic!("{read:?}");
        };
        assert_eq!((*at, object.len, object.sha256, object.stored), (address, 5, Some([9; 32]), 11));
        assert_eq!((&**name, &**named), ("\0a\0b", &asset));
        assert_eq!((*no_object, &**no_name), (Address([8; 32]), "gone"));
        for cut in 0..note.len() {
            assert!(decode(&note[..cut]).is_none(), "{cut}");
        }
        for at in [0, 31, 32, 39, 40, note.len() - 1] {
            let mut flipped = note.clone();
            flipped[at] ^= 1;
            assert!(decode(&flipped).is_none(), "{at}");
        }
        assert!(super::read(note.as_slice().chain(io::repeat(0))).is_some(), "however long the file is");
        let over_a_longer_one = [note.as_slice(), b"rest"].concat();
        assert_eq!(decode(&over_a_longer_one).map(|(number, _)| number), Some(17));
    }
}
