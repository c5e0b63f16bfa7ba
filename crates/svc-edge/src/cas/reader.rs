//! An object on its way out: read piece by piece, each checked before anybody sees it.

use super::catalog::{Condition, Stamp};
use super::disk::Disk;
use super::tree::{CheckError, GROUP, TreeChecker, TreeHasher, outboard_len};
use super::upload::Temporary;
use crate::address::Address;
use bytes::Bytes;
use ron_kernel::http::SentFile;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What is read at a time; whole groups.
const PIECE: u64 = 4 * GROUP;
/// An object of at most this size is checked as a whole when it is first opened, so that from then on its file can go
/// out unread, whatever part of it is asked for.
const WHOLE: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The bytes on disk are not those of the address.
    #[error("the stored bytes are not those of the address")]
    Corrupt,
    #[error("the object is gone")]
    Gone,
    #[error(transparent)]
    Io(io::Error),
}

impl From<CheckError> for ReadError {
    fn from(error: CheckError) -> ReadError {
        match error {
            CheckError::Mismatch => ReadError::Corrupt,
            CheckError::Io(error) => error.into(),
        }
    }
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> ReadError {
        match error.kind() {
            // A file that ends too soon has lost bytes.
            io::ErrorKind::UnexpectedEof => ReadError::Corrupt,
            io::ErrorKind::NotFound => ReadError::Gone,
            _ => ReadError::Io(error),
        }
    }
}

#[derive(Debug)]
enum Source {
    Disk { file: Arc<SentFile>, outboard: Option<File>, stamp: Stamp },
    Memory(Bytes),
}

/// An open object. Its calls block.
#[derive(Debug)]
pub struct Reader {
    address: Address,
    pub len: u64,
    source: Source,
    condition: Arc<Condition>,
    /// `None`: its bytes are not checked.
    checker: Option<TreeChecker>,
    /// Bytes from the beginning that were checked without a gap.
    checked: u64,
}

impl Reader {
    pub fn memory(address: Address, bytes: Bytes, condition: Arc<Condition>) -> Reader {
        let len = bytes.len() as u64;
        Reader { address, len, source: Source::Memory(bytes), condition, checker: None, checked: 0 }
    }

    /// Opens an object's file. `trust` leaves out the check for one that was checked before and has not changed since.
    pub fn disk(
        disk: &Disk,
        address: Address,
        len: u64,
        condition: Arc<Condition>,
        trust: Trust,
    ) -> Result<Reader, ReadError> {
        // Of what came from an origin a power cut may leave the row alone; once that is known it is asked for again.
        let opened = File::open(disk.path_of(&address)).inspect_err(|error| {
            let missing = error.kind() == io::ErrorKind::NotFound;
            condition.bad.fetch_or(missing, Ordering::Relaxed);
        });
        let file = Arc::new(SentFile::from(opened?));
        let stamp = Stamp::of(&file)?;
        let trusted = trust.in_file(&condition, stamp);
        let mut reader = Reader {
            address,
            len,
            source: Source::Disk { file, outboard: None, stamp },
            condition,
            checker: None,
            checked: 0,
        };
        if stamp.len != len {
            return Err(reader.corrupt());
        }
        if !trusted {
            reader.checker = Some(TreeChecker::new(address, len));
            reader.open_outboard(disk)?;
            if trust == Trust::IfChecked && len <= WHOLE {
                let mut at = 0;
                while at < len {
                    at += reader.read(&(at..len))?.len() as u64;
                }
                reader.checker = None;
            }
        }
        Ok(reader)
    }

    fn open_outboard(&mut self, disk: &Disk) -> Result<(), ReadError> {
        let wanted = outboard_len(self.len);
        let Source::Disk { file, outboard, .. } = &mut self.source else { return Ok(()) };
        if wanted == 0 {
            return Ok(());
        }
        let path = disk.outboard_of(&self.address);
        let open =
            File::open(&path).ok().filter(|open| open.metadata().is_ok_and(|meta| meta.len() == wanted));
        if open.is_none() && make_outboard(disk, file, &path)? != self.address {
            return Err(self.corrupt());
        }
        *outboard = Some(match open {
            Some(open) => open,
            None => File::open(&path)?,
        });
        Ok(())
    }

    /// The next bytes of a range that is within the object: at least one, at most a few groups.
    pub fn read(&mut self, range: &Range<u64>) -> Result<Bytes, ReadError> {
        let until = range.end.min((range.start / PIECE + 1) * PIECE);
        let (file, outboard, stamp) = match &self.source {
            Source::Memory(bytes) => return Ok(slice(bytes, range)),
            Source::Disk { file, outboard, stamp } => (file, outboard.as_ref(), *stamp),
        };
        let Some(checker) = &mut self.checker else {
            return read_at(file, range.start..until).map_err(ReadError::from);
        };
        let start = range.start / GROUP * GROUP;
        let whole = start..until.div_ceil(GROUP).saturating_mul(GROUP).min(self.len);
        let mut outcome = read_at(file, whole.clone()).map_err(ReadError::from);
        if let Ok(bytes) = &outcome {
            let mut node = |at: u64, buffer: &mut [u8]| match outboard {
                Some(outboard) => outboard.read_exact_at(buffer, at),
                None => Err(io::ErrorKind::UnexpectedEof.into()),
            };
            let groups = (start / GROUP..).zip(bytes.chunks(usize::try_from(GROUP).unwrap_or(usize::MAX)));
            for (group, bytes) in groups {
                if let Err(error) = checker.check(group, bytes, &mut node) {
                    outcome = Err(error.into());
                    break;
                }
            }
        }
        match outcome {
            Ok(bytes) => {
                if start <= self.checked {
                    self.checked = self.checked.max(whole.end);
                }
                if self.checked == self.len {
                    self.condition.set_verified(stamp);
                }
                Ok(slice(&bytes, &(range.start - start..until - start)))
            }
            Err(ReadError::Corrupt) => Err(self.corrupt()),
            Err(other) => Err(other),
        }
    }

    /// The file, if its bytes need no check.
    pub fn unchecked(&self) -> Option<&Arc<SentFile>> {
        match &self.source {
            Source::Disk { file, .. } if self.checker.is_none() => Some(file),
            _ => None,
        }
    }

    fn corrupt(&self) -> ReadError {
        self.condition.bad.store(true, Ordering::Relaxed);
        tracing::error!(object = %self.address, "the stored bytes are not those of the address");
        ReadError::Corrupt
    }
}

/// Which objects need no check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    Always,
    IfChecked,
    Never,
}

impl Trust {
    /// Whether a file's bytes need no check, as the file is now.
    pub(super) fn in_file(self, condition: &Condition, stamp: Stamp) -> bool {
        match self {
            Trust::Always => true,
            Trust::IfChecked => condition.is_verified(stamp),
            Trust::Never => false,
        }
    }
}

/// These of an object's bytes, as far as there are any.
pub fn slice(bytes: &Bytes, range: &Range<u64>) -> Bytes {
    let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
    bytes.slice(index(range.start)..index(range.end))
}

fn read_at(file: &File, range: Range<u64>) -> io::Result<Bytes> {
    let mut buffer = vec![0; usize::try_from(range.end - range.start).map_err(io::Error::other)?];
    file.read_exact_at(&mut buffer, range.start)?;
    Ok(buffer.into())
}

/// Makes an outboard that is missing, by reading the whole object; returns the address that it really has.
fn make_outboard(disk: &Disk, file: &File, path: &std::path::Path) -> Result<Address, ReadError> {
    let temporary = Temporary::new(&disk.temporary_folder());
    let mut out = io::BufWriter::new(File::create_new(&temporary.path)?);
    let mut emit = |node: &[u8]| out.write_all(node);
    let (mut tree, mut buffer, mut input) = (TreeHasher::default(), vec![0; 1 << 20], file);
    loop {
        let read = input.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        tree.update(&buffer[..read], &mut emit)?;
    }
    let address = tree.finish(&mut emit)?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    std::fs::rename(&temporary.path, path)?;
    Ok(address)
}
