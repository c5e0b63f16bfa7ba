//! The directories of a PMTiles archive: which tile ids are where.

use super::coord::IDS_END;
use super::header::{Header, Section};
use super::{Compression, Fault, varint};
use bytes::Bytes;
use std::ops::Range;

/// The largest directory, compressed or not. Writers keep them to some ten thousand entries of about six bytes.
pub const DIRECTORY_BYTES_MAX: u64 = 8 << 20;
/// Entries of one directory.
pub const ENTRIES_MAX: usize = 1 << 20;

/// A run of tiles with the same content, or a leaf directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The first tile id.
    pub id: u64,
    /// Where the bytes are within the tile section, or within the leaf section.
    pub offset: u64,
    pub length: u32,
    /// How many tiles; 0 means a leaf directory.
    pub run: u32,
}

impl Entry {
    pub fn section(&self) -> Section {
        Section { offset: self.offset, length: u64::from(self.length) }
    }

    fn end(&self) -> u64 {
        self.offset.saturating_add(u64::from(self.length))
    }
}

/// What a directory may speak of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    pub ids: Range<u64>,
    /// Bytes of the tile section.
    pub tile_bytes: u64,
    /// Bytes of the leaf section.
    pub leaf_bytes: u64,
}

impl Span {
    /// What the root directory may speak of.
    pub fn root(header: &Header) -> Self {
        Self { ids: 0..IDS_END, tile_bytes: header.tiles.length, leaf_bytes: header.leaves.length }
    }
}

/// A leaf directory as its parent names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Leaf {
    /// Within the leaf section.
    pub section: Section,
    /// Its tile ids begin here at the earliest,
    pub from: u64,
    /// and are all below this.
    pub until: u64,
}

/// What a directory says of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    Absent,
    /// Within the tile section.
    Tile(Section),
    Leaf(Leaf),
}

/// A directory that holds together: its ids ascend within what its parent says, and its bytes are where they may be.
#[derive(Debug, PartialEq, Eq)]
pub struct Directory {
    entries: Box<[Entry]>,
    until: u64,
}

impl Directory {
    /// Reads a directory as it stands in the file.
    pub fn decode(bytes: Bytes, compression: Compression, span: &Span) -> Result<Self, Fault> {
        if bytes.len() as u64 > DIRECTORY_BYTES_MAX {
            return Err(Fault::DirectoryCap);
        }
        Self::parse(&compression.decode(bytes, DIRECTORY_BYTES_MAX)?, span)
    }

    /// Reads a decompressed directory.
    pub fn parse(mut bytes: &[u8], span: &Span) -> Result<Self, Fault> {
        let count = usize::try_from(varint::take(&mut bytes).ok_or(Fault::Numbers)?).unwrap_or(usize::MAX);
        if count > ENTRIES_MAX {
            return Err(Fault::DirectoryCap);
        }
        if count == 0 {
            return Err(Fault::NoEntries);
        }
        // Each entry has four numbers, so this allocates no more than six times what was received.
        if count > bytes.len() / 4 {
            return Err(Fault::Numbers);
        }
        let mut entries = vec![Entry { id: 0, offset: 0, length: 0, run: 0 }; count].into_boxed_slice();
        parse_ids(&mut bytes, &mut entries, &span.ids)?;
        parse_places(&mut bytes, &mut entries)?;
        if !bytes.is_empty() {
            return Err(Fault::Numbers);
        }
        check_places(&entries, span)?;
        Ok(Self { entries, until: span.ids.end })
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The leaf directory that the entry at a place names, if it names one.
    pub fn leaf(&self, at: usize) -> Option<Leaf> {
        let entry = self.entries.get(at).filter(|entry| entry.run == 0)?;
        let until = self.entries.get(at + 1).map_or(self.until, |next| next.id);
        Some(Leaf { section: entry.section(), from: entry.id, until })
    }

    pub fn find(&self, id: u64) -> Found {
        let after = self.entries.partition_point(|entry| entry.id <= id);
        let Some(at) = after.checked_sub(1) else { return Found::Absent };
        let entry = &self.entries[at];
        match self.leaf(at) {
            Some(leaf) if id < leaf.until => Found::Leaf(leaf),
            None if id - entry.id < u64::from(entry.run) => Found::Tile(entry.section()),
            _ => Found::Absent,
        }
    }

    /// What it takes in memory.
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(&*self.entries)
    }

    /// The bytes of a directory of these entries, not compressed.
    pub fn write(entries: &[Entry]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(entries.len() * 6 + 10);
        varint::push(&mut bytes, entries.len() as u64);
        let mut last = 0;
        for entry in entries {
            varint::push(&mut bytes, entry.id - last);
            last = entry.id;
        }
        entries.iter().for_each(|entry| varint::push(&mut bytes, u64::from(entry.run)));
        entries.iter().for_each(|entry| varint::push(&mut bytes, u64::from(entry.length)));
        let mut next = None;
        for entry in entries {
            // Zero says that it follows the one before.
            varint::push(&mut bytes, if next == Some(entry.offset) { 0 } else { entry.offset + 1 });
            next = Some(entry.end());
        }
        bytes
    }
}

fn parse_ids(bytes: &mut &[u8], entries: &mut [Entry], ids: &Range<u64>) -> Result<(), Fault> {
    let mut last = 0u64;
    for entry in &mut *entries {
        last = varint::take(bytes).and_then(|delta| last.checked_add(delta)).ok_or(Fault::Numbers)?;
        entry.id = last;
        if !ids.contains(&last) {
            return Err(Fault::Span);
        }
    }
    // The first id that the next entry may have.
    let mut free = 0;
    for entry in &mut *entries {
        entry.run = varint::take(bytes).and_then(|run| run.try_into().ok()).ok_or(Fault::Numbers)?;
        if entry.id < free {
            return Err(Fault::Order);
        }
        free = entry.id + u64::from(entry.run.max(1));
    }
    if free > ids.end { Err(Fault::Span) } else { Ok(()) }
}

fn parse_places(bytes: &mut &[u8], entries: &mut [Entry]) -> Result<(), Fault> {
    for entry in &mut *entries {
        entry.length = varint::take(bytes).and_then(|length| length.try_into().ok()).ok_or(Fault::Numbers)?;
        if entry.length == 0 {
            return Err(Fault::EmptyEntry);
        }
    }
    let mut next = None;
    for entry in &mut *entries {
        entry.offset = match varint::take(bytes).ok_or(Fault::Numbers)? {
            0 => next.ok_or(Fault::Numbers)?,
            offset => offset - 1,
        };
        next = entry.section().end();
    }
    Ok(())
}

/// Two entries have the same bytes or none in common; the same leaf directory is named once.
fn check_places(entries: &[Entry], span: &Span) -> Result<(), Fault> {
    let outside = |entry: &Entry| {
        let length = if entry.run == 0 { span.leaf_bytes } else { span.tile_bytes };
        entry.section().end().is_none_or(|end| end > length)
    };
    if entries.iter().any(outside) {
        return Err(Fault::EntryOutside);
    }
    let apart = |pair: &[Entry]| (pair[0].run == 0) == (pair[1].run == 0) && pair[0].end() <= pair[1].offset;
    // Mostly each entry follows the one before, and there is nothing to sort.
    if entries.windows(2).all(apart) {
        return Ok(());
    }
    let mut order: Vec<u32> = (0..entries.len() as u32).collect();
    let key = |at: &u32| {
        let entry = &entries[*at as usize];
        (entry.run == 0, entry.offset, entry.length)
    };
    order.sort_unstable_by_key(key);
    for pair in order.windows(2) {
        let ((leaf, offset, length), next) = (key(&pair[0]), key(&pair[1]));
        let shared = leaf == next.0 && next.1 - offset < u64::from(length);
        let same = !leaf && (leaf, offset, length) == next;
        if shared && !same {
            return Err(Fault::EntriesOverlap);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
