//! How a pack's bytes are reached.

use bytes::Bytes;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

/// Bytes at a place. A pack checks a place against the size before it asks, and caps the length.
pub trait ReadAt: Send + Sync {
    /// Bytes in all, as they were when it was opened.
    fn size(&self) -> u64;

    /// Exactly as many bytes as asked for; fewer are an error.
    fn read_at(&self, offset: u64, length: usize) -> io::Result<Bytes>;
}

/// A file, read at positions and never mapped: one that is cut short while in use gives an error, not a signal.
#[derive(Debug)]
pub struct PackFile {
    file: File,
    size: u64,
}

impl PackFile {
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::new(File::open(path)?)
    }

    pub fn new(file: File) -> io::Result<Self> {
        let size = file.metadata()?.len();
        Ok(Self { file, size })
    }
}

impl ReadAt for PackFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, length: usize) -> io::Result<Bytes> {
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, offset)?;
        Ok(bytes.into())
    }
}

impl ReadAt for Bytes {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_at(&self, offset: u64, length: usize) -> io::Result<Bytes> {
        let start = usize::try_from(offset).ok().filter(|start| *start <= self.len());
        match start.filter(|start| length <= self.len() - start) {
            Some(start) => Ok(self.slice(start..start + length)),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl<R: ReadAt + ?Sized> ReadAt for Arc<R> {
    fn size(&self) -> u64 {
        (**self).size()
    }

    fn read_at(&self, offset: u64, length: usize) -> io::Result<Bytes> {
        (**self).read_at(offset, length)
    }
}
