//! A pack's file, whose bytes are held against the pack's own address before anybody sees them.
//!
//! The address and the tree under it are known once the file was hashed, or from the last time that was done. Until
//! then, as always, the file must be the one that was mounted: whatever was changed in place is not read.

use crate::address::Address;
use crate::cas::Trust;
use crate::cas::tree::{CheckError, GROUP, TreeChecker, TreeHasher, outboard_len};
use crate::pack::ReadAt;
use bytes::{Bytes, BytesMut};
use rustix::io::{ReadWriteFlags, preadv2};
use std::fs::File;
use std::io::{self, BufWriter, IoSliceMut, Write as _};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Before the tree in its file stands the address.
const ADDRESS: u64 = 32;
/// The largest tree that is kept in memory, where no file may be written: that of a pack of 16 GiB.
pub(super) const MEMORY_MAX: u64 = 16 << 20;
/// Bytes that are hashed before others get a turn.
const STRETCH: u64 = 16 << 20;
const PIECE: usize = 1 << 20;

/// Why bytes of a pack are not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Damage {
    #[error("the bytes are not those of the pack's address")]
    Mismatch,
    #[error("the file was changed since it was mounted")]
    Changed,
}

impl From<Damage> for io::Error {
    fn from(damage: Damage) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, damage)
    }
}

impl Damage {
    pub(crate) fn of(error: &io::Error) -> Option<Damage> {
        error.get_ref()?.downcast_ref().copied()
    }
}

/// Tells whether a file is still the same, without its bytes. A file that only lost its name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

impl Stamp {
    pub(crate) fn of(path: &Path) -> io::Result<Stamp> {
        let meta = std::fs::metadata(path)?;
        if meta.is_file() { Ok(Stamp::new(&meta)) } else { Err(io::Error::other("it is not a file")) }
    }

    fn new(meta: &std::fs::Metadata) -> Stamp {
        let modified = (meta.mtime(), meta.mtime_nsec());
        Stamp { device: meta.dev(), inode: meta.ino(), len: meta.len(), modified }
    }

    pub(super) fn bytes(self) -> Vec<u8> {
        let (seconds, nanos) = self.modified;
        [self.device.to_le_bytes(), self.inode.to_le_bytes(), self.len.to_le_bytes()]
            .into_iter()
            .chain([seconds.to_le_bytes(), nanos.to_le_bytes()])
            .flatten()
            .collect()
    }

    /// What the tree's file is called.
    pub(super) fn key(self) -> String {
        blake3::hash(&self.bytes()).to_hex()[..32].to_owned()
    }
}

/// Which reads are checked, for all packs alike.
#[derive(Debug)]
pub(crate) struct Policy(AtomicU8);

impl Policy {
    pub(super) fn new(trust: Trust) -> Policy {
        let policy = Policy(AtomicU8::new(0));
        policy.set(trust);
        policy
    }

    pub(super) fn set(&self, trust: Trust) {
        let number = match trust {
            Trust::Always => 0,
            Trust::IfChecked => 1,
            Trust::Never => 2,
        };
        self.0.store(number, Ordering::Relaxed);
    }

    fn trust(&self) -> Trust {
        match self.0.load(Ordering::Relaxed) {
            0 => Trust::Always,
            1 => Trust::IfChecked,
            _ => Trust::Never,
        }
    }
}

/// See the module. Its calls block.
#[derive(Debug)]
pub(crate) struct CheckedFile {
    file: File,
    stamp: Stamp,
    policy: Arc<Policy>,
    tree: OnceLock<Tree>,
}

impl CheckedFile {
    /// Opens a file; its tree is known at once if `folder` has it.
    pub(super) fn open(path: &Path, policy: Arc<Policy>, folder: Option<&Path>) -> io::Result<CheckedFile> {
        // Whatever is not a file may never finish opening.
        Stamp::of(path)?;
        let file = File::open(path)?;
        let stamp = Stamp::new(&file.metadata()?);
        let tree = OnceLock::new();
        if let Some(known) = folder.and_then(|folder| Tree::load(&folder.join(stamp.key()), stamp.len)) {
            let _ = tree.set(known);
        }
        Ok(CheckedFile { file, stamp, policy, tree })
    }

    pub(crate) fn address(&self) -> Option<Address> {
        self.tree.get().map(|tree| tree.address)
    }

    pub(crate) fn stamp(&self) -> Stamp {
        self.stamp
    }

    pub(crate) fn is_unchanged(&self) -> io::Result<bool> {
        Ok(Stamp::new(&self.file.metadata()?) == self.stamp)
    }

    /// Bytes that need no check and no disk, for they are in the kernel's memory. It does not block.
    pub(super) fn read_now(&self, offset: u64, length: usize) -> Option<Bytes> {
        let range = offset..offset.checked_add(length as u64)?;
        let free = match self.policy.trust() {
            Trust::Always => true,
            Trust::IfChecked => range.end <= self.stamp.len && self.tree.get()?.has(&range),
            Trust::Never => false,
        };
        if !free {
            return None;
        }
        let mut bytes = vec![0; length];
        let read = preadv2(&self.file, &mut [IoSliceMut::new(&mut bytes)], offset, ReadWriteFlags::NOWAIT);
        (read == Ok(length) && self.is_unchanged().ok()?).then(|| bytes.into())
    }

    fn plain(&self, range: &Range<u64>) -> io::Result<Bytes> {
        let mut bytes = vec![0; usize::try_from(range.end - range.start).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut bytes, range.start)?;
        Ok(bytes.into())
    }

    fn checked(&self, tree: &Tree, range: &Range<u64>) -> io::Result<Bytes> {
        let mut checker = TreeChecker::new(tree.address, self.stamp.len);
        let mut out = BytesMut::with_capacity(usize::try_from(range.end - range.start).unwrap_or(0));
        for group in groups(range) {
            let start = group * GROUP;
            let bytes = self.plain(&(start..self.stamp.len.min(start + GROUP)))?;
            checker.check(group, &bytes, &mut |at, node| tree.nodes.read(at, node)).map_err(|error| {
                match error {
                    CheckError::Mismatch => Damage::Mismatch.into(),
                    CheckError::Io(error) => error,
                }
            })?;
            tree.note(group);
            let inside = |at: u64| usize::try_from(at.saturating_sub(start)).unwrap_or(usize::MAX);
            out.extend_from_slice(&bytes[inside(range.start)..inside(range.end).min(bytes.len())]);
        }
        Ok(out.freeze())
    }
}

impl ReadAt for CheckedFile {
    fn size(&self) -> u64 {
        self.stamp.len
    }

    fn read_at(&self, offset: u64, length: usize) -> io::Result<Bytes> {
        let end = offset.checked_add(length as u64).filter(|end| *end <= self.stamp.len);
        let range = offset..end.ok_or(io::ErrorKind::UnexpectedEof)?;
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let trust = self.policy.trust();
        let Some(tree) = self.tree.get().filter(|_| trust != Trust::Always) else {
            let bytes = self.plain(&range)?;
            // Looked at afterwards: what was read before the change is good.
            return if self.is_unchanged()? { Ok(bytes) } else { Err(Damage::Changed.into()) };
        };
        if trust == Trust::IfChecked && tree.has(&range) {
            let bytes = self.plain(&range)?;
            if self.is_unchanged()? {
                return Ok(bytes);
            }
        }
        self.checked(tree, &range)
    }
}

fn groups(range: &Range<u64>) -> Range<u64> {
    range.start / GROUP..range.end.div_ceil(GROUP)
}

/// A file's address and the tree under it.
#[derive(Debug)]
pub(crate) struct Tree {
    address: Address,
    nodes: Nodes,
    /// A bit for each group that was checked in this process.
    checked: Vec<AtomicU64>,
}

#[derive(Debug)]
enum Nodes {
    File(File),
    Memory(Vec<u8>),
}

impl Nodes {
    fn read(&self, at: u64, node: &mut [u8]) -> io::Result<()> {
        match self {
            Nodes::File(file) => file.read_exact_at(node, ADDRESS + at),
            Nodes::Memory(bytes) => {
                let at = usize::try_from(at).map_err(io::Error::other)?;
                node.copy_from_slice(bytes.get(at..at + node.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
                Ok(())
            }
        }
    }
}

impl Tree {
    fn new(address: Address, nodes: Nodes, len: u64, checked: u64) -> Tree {
        let words = groups(&(0..len)).end.div_ceil(64);
        Tree { address, nodes, checked: (0..words).map(|_| AtomicU64::new(checked)).collect() }
    }

    fn load(path: &Path, len: u64) -> Option<Tree> {
        let file = File::open(path).ok()?;
        if file.metadata().ok()?.len() != ADDRESS + outboard_len(len) {
            return None;
        }
        let mut address = [0; ADDRESS as usize];
        file.read_exact_at(&mut address, 0).ok()?;
        Some(Tree::new(Address(address), Nodes::File(file), len, 0))
    }

    fn word(&self, group: u64) -> (&AtomicU64, u64) {
        // As many words were made as the file has groups; a group is of the file.
        (&self.checked[usize::try_from(group / 64).unwrap_or(usize::MAX)], 1 << (group % 64))
    }

    fn has(&self, range: &Range<u64>) -> bool {
        groups(range).all(|group| {
            let (word, bit) = self.word(group);
            word.load(Ordering::Relaxed) & bit != 0
        })
    }

    fn note(&self, group: u64) {
        let (word, bit) = self.word(group);
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Where the nodes go while a file is hashed.
#[derive(Debug)]
enum Out {
    File { writer: BufWriter<File>, temporary: PathBuf, path: PathBuf },
    Memory(Vec<u8>),
}

impl Out {
    fn write(&mut self, node: &[u8]) -> io::Result<()> {
        match self {
            Out::File { writer, .. } => writer.write_all(node),
            Out::Memory(bytes) => {
                bytes.extend_from_slice(node);
                Ok(())
            }
        }
    }
}

/// A file that is being hashed, a stretch at a time. Its calls block.
#[derive(Debug)]
pub(super) struct Hashing {
    file: Arc<CheckedFile>,
    at: u64,
    hasher: TreeHasher,
    out: Out,
    buffer: Vec<u8>,
}

impl Hashing {
    /// `None` if the tree would be larger than what is kept in memory, and no folder is there for it.
    pub(super) fn begin(file: Arc<CheckedFile>, folder: Option<&Path>) -> io::Result<Option<Hashing>> {
        let out = match folder {
            Some(folder) => {
                std::fs::create_dir_all(folder)?;
                let path = folder.join(file.stamp.key());
                let temporary = path.with_extension("new");
                let mut writer = BufWriter::new(File::create(&temporary)?);
                writer.write_all(&[0; ADDRESS as usize])?;
                Out::File { writer, temporary, path }
            }
            None if outboard_len(file.stamp.len) > MEMORY_MAX => return Ok(None),
            None => Out::Memory(Vec::new()),
        };
        let buffer = vec![0; PIECE];
        Ok(Some(Hashing { file, at: 0, hasher: TreeHasher::default(), out, buffer }))
    }

    /// Hashes on; true at the end of the file.
    pub(super) fn stretch(&mut self) -> io::Result<bool> {
        let end = self.file.stamp.len.min(self.at + STRETCH);
        while self.at < end {
            let length = usize::try_from(end - self.at).unwrap_or(PIECE).min(PIECE);
            let piece = &mut self.buffer[..length];
            self.file.file.read_exact_at(piece, self.at)?;
            self.hasher.update(piece, &mut |node| self.out.write(node))?;
            self.at += length as u64;
        }
        Ok(self.at == self.file.stamp.len)
    }

    /// Has the file know its address.
    pub(super) fn finish(mut self) -> io::Result<Address> {
        let address = self.hasher.finish(&mut |node| self.out.write(node))?;
        if !self.file.is_unchanged()? {
            return Err(Damage::Changed.into());
        }
        let nodes = match self.out {
            Out::Memory(bytes) => Nodes::Memory(bytes),
            Out::File { writer, temporary, path } => {
                let written = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
                written.write_all_at(&address.0, 0)?;
                written.sync_all()?;
                std::fs::rename(&temporary, &path)?;
                Nodes::File(File::open(&path)?)
            }
        };
        // All of it was read just now.
        let _ = self.file.tree.set(Tree::new(address, nodes, self.file.stamp.len, u64::MAX));
        Ok(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Seek as _;

    struct Fixture {
        dir: tempfile::TempDir,
        bytes: Vec<u8>,
        policy: Arc<Policy>,
    }

    impl Fixture {
        fn new(len: usize, trust: Trust) -> Fixture {
            let dir = tempfile::tempdir().unwrap();
            let bytes: Vec<u8> = (0..len).map(|at| (at.wrapping_mul(2_654_435_761) >> 9) as u8).collect();
            std::fs::write(dir.path().join("pack"), &bytes).unwrap();
            Fixture { dir, bytes, policy: Arc::new(Policy::new(trust)) }
        }

        fn open(&self) -> Arc<CheckedFile> {
            let folder = self.dir.path().join("trees");
            let path = self.dir.path().join("pack");
            Arc::new(CheckedFile::open(&path, self.policy.clone(), Some(&folder)).unwrap())
        }

        fn hash(&self, file: &Arc<CheckedFile>, folder: bool) -> io::Result<Address> {
            let folder = folder.then(|| self.dir.path().join("trees"));
            let mut hashing = Hashing::begin(file.clone(), folder.as_deref())?.unwrap();
            while !hashing.stretch()? {}
            hashing.finish()
        }

        /// Changes a byte and leaves no trace of it in the time of the last change.
        fn flip(&self, at: u64) {
            let path = self.dir.path().join("pack");
            let before = std::fs::metadata(&path).unwrap().modified().unwrap();
            let file = File::options().write(true).open(&path).unwrap();
            let old = self.bytes[usize::try_from(at).unwrap()];
            file.write_all_at(&[old ^ 1], at).unwrap();
            file.set_modified(before).unwrap();
        }
    }

    #[test]
    fn the_address_is_that_of_the_bytes_and_is_known_again_the_next_time() {
        for len in [1, 70_000, 64 << 10, 5 * (64 << 10) + 3] {
            let fixture = Fixture::new(len, Trust::Never);
            let file = fixture.open();
            assert_eq!(file.address(), None);
            let address = fixture.hash(&file, true).unwrap();
            assert_eq!(address, blake3::hash(&fixture.bytes).into());
            assert_eq!((file.address(), fixture.open().address()), (Some(address), Some(address)));
            let in_memory = Fixture::new(len, Trust::Never);
            let file = in_memory.open();
            assert_eq!(in_memory.hash(&file, false).unwrap(), address);
            assert_eq!(in_memory.open().address(), None, "nothing was written");
        }
    }

    #[test]
    fn a_flipped_bit_is_found_as_the_policy_says() {
        let fixture = Fixture::new(200_000, Trust::Never);
        let file = fixture.open();
        fixture.hash(&file, true).unwrap();
        let again = fixture.open();
        again.read_at(0, 10).unwrap();
        fixture.flip(5);
        let mismatch = |read: io::Result<Bytes>| Damage::of(&read.unwrap_err()) == Some(Damage::Mismatch);
        assert!(mismatch(again.read_at(0, 10)) && mismatch(file.read_at(100, 100_000)));
        assert_eq!(again.read_at(70_000, 100).unwrap()[..], fixture.bytes[70_000..70_100]);
        fixture.policy.set(Trust::IfChecked);
        assert!(mismatch(fixture.open().read_at(0, 10)), "the first time");
        assert!(again.read_at(0, 10).is_ok(), "it was checked once, and nothing says that it has changed");
        fixture.policy.set(Trust::Always);
        assert!(fixture.open().read_at(0, 10).is_ok());
    }

    #[test]
    fn what_is_read_without_waiting_is_checked_as_well() {
        let fixture = Fixture::new(200_000, Trust::IfChecked);
        let file = fixture.open();
        assert_eq!(file.read_now(100, 1000), None, "nobody has checked it");
        fixture.hash(&file, true).unwrap();
        // Not every file system can say what is in memory.
        if let Some(bytes) = file.read_now(100, 1000) {
            assert_eq!(bytes[..], fixture.bytes[100..1100]);
        }
        for beyond in [199_999, u64::MAX - 5] {
            assert_eq!(file.read_now(beyond, 10), None);
        }
        assert_eq!(fixture.open().read_now(100, 1000), None, "nobody has checked it in this process");
        fixture.policy.set(Trust::Never);
        assert_eq!(file.read_now(100, 1000), None);
        fixture.policy.set(Trust::IfChecked);
        let changed = File::options().write(true).open(fixture.dir.path().join("pack")).unwrap();
        changed.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(file.read_now(100, 1000), None);
    }

    #[test]
    fn what_was_changed_in_place_is_not_mixed_with_what_was_mounted() {
        let fixture = Fixture::new(200_000, Trust::IfChecked);
        let (known, unknown) = (fixture.open(), fixture.open());
        fixture.hash(&known, false).unwrap();
        let mut file = File::options().write(true).open(fixture.dir.path().join("pack")).unwrap();
        file.seek(io::SeekFrom::Start(100_000)).unwrap();
        file.write_all(b"other").unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        let damage =
            |file: &Arc<CheckedFile>, at| file.read_at(at, 10).map_err(|error| Damage::of(&error).unwrap());
        assert_eq!(damage(&unknown, 0), Err(Damage::Changed), "nobody can tell what was changed");
        assert_eq!(damage(&known, 0).unwrap()[..], fixture.bytes[..10], "these bytes are still right");
        assert_eq!(damage(&known, 100_000), Err(Damage::Mismatch));
        let failed = fixture.hash(&unknown, false).unwrap_err();
        assert_eq!(Damage::of(&failed), Some(Damage::Changed));
        file.set_len(50_000).unwrap();
        assert_eq!(known.read_at(60_000, 10).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn without_a_folder_a_tree_beyond_the_cap_is_not_made() {
        let fixture = Fixture::new(10, Trust::IfChecked);
        let file = File::options().write(true).open(fixture.dir.path().join("pack")).unwrap();
        // A hole takes no room.
        file.set_len((MEMORY_MAX / 64 + 2) * GROUP).unwrap();
        assert!(Hashing::begin(fixture.open(), None).unwrap().is_none());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn every_part_reads_as_the_file_has_it(start in 0usize..300_000, length in 0usize..150_000) {
            let fixture = Fixture::new(300_000, Trust::IfChecked);
            let file = fixture.open();
            fixture.hash(&file, true).unwrap();
            for file in [&file, &fixture.open(), &fixture.open()] {
                let read = file.read_at(start as u64, length);
                match fixture.bytes.get(start..start + length) {
                    Some(expected) => prop_assert_eq!(&read.unwrap()[..], expected),
                    None => prop_assert!(read.is_err()),
                }
            }
        }
    }
}
