//! An object on its way in: written to a temporary file and hashed at the same time.

use super::tree::TreeHasher;
use crate::address::Address;
use bytes::{Bytes, BytesMut};
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A file that goes when it is dropped, unless it was moved to its place.
#[derive(Debug)]
pub struct Temporary {
    pub path: PathBuf,
}

impl Temporary {
    pub fn new(folder: &Path) -> Temporary {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        Temporary { path: folder.join(format!("{}-{number}", std::process::id())) }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // One call that does not wait for the disk. What a crash leaves is swept at the next start.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Bytes on their way in, over all uploads, and how many there may be.
#[derive(Debug, Default)]
pub struct Arriving {
    bytes: AtomicU64,
    pub max: AtomicU64,
}

/// What one upload takes of it, until it is published or dropped.
#[derive(Debug)]
pub struct Taken {
    arriving: Arc<Arriving>,
    bytes: u64,
}

impl Taken {
    fn more(&mut self, bytes: u64) -> io::Result<()> {
        self.bytes += bytes;
        let all = self.arriving.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let fits = all <= self.arriving.max.load(Ordering::Relaxed);
        if fits { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.arriving.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[derive(Debug)]
enum Sink {
    Disk { folder: PathBuf, file: File, temporary: Temporary, outboard: Option<(BufWriter<File>, Temporary)> },
    Memory(BytesMut),
}

/// See the module. Its calls block.
#[derive(Debug)]
pub struct Upload {
    sink: Sink,
    tree: TreeHasher,
    sha256: Sha256,
    /// What came so far.
    pub len: u64,
    taken: Taken,
}

/// What an upload came to.
#[derive(Debug)]
pub struct Arrived {
    pub address: Address,
    pub sha256: [u8; 32],
    pub len: u64,
    pub bytes: ArrivedBytes,
    /// The disk has it, and would after a power cut.
    pub synced: bool,
    pub taken: Taken,
}

/// Where the bytes are until they are published.
#[derive(Debug)]
pub enum ArrivedBytes {
    Disk { file: Temporary, outboard: Option<Temporary> },
    Memory(Bytes),
}

impl Arrived {
    /// All of its bytes, for one that is known to be small.
    pub fn read(&self) -> io::Result<Bytes> {
        match &self.bytes {
            ArrivedBytes::Disk { file, .. } => std::fs::read(&file.path).map(Bytes::from),
            ArrivedBytes::Memory(bytes) => Ok(bytes.clone()),
        }
    }
}

impl Upload {
    /// Into a temporary file of this folder.
    pub fn to_disk(folder: &Path, arriving: &Arc<Arriving>) -> io::Result<Upload> {
        let temporary = Temporary::new(folder);
        let file = File::create_new(&temporary.path)?;
        let sink = Sink::Disk { folder: folder.to_owned(), file, temporary, outboard: None };
        Ok(Upload::to(sink, arriving))
    }

    pub fn to_memory(arriving: &Arc<Arriving>) -> Upload {
        Upload::to(Sink::Memory(BytesMut::new()), arriving)
    }

    fn to(sink: Sink, arriving: &Arc<Arriving>) -> Upload {
        let taken = Taken { arriving: arriving.clone(), bytes: 0 };
        Upload { sink, tree: TreeHasher::default(), sha256: Sha256::new(), len: 0, taken }
    }

    pub fn write(&mut self, data: &[u8]) -> io::Result<()> {
        self.len += data.len() as u64;
        self.taken.more(data.len() as u64)?;
        self.sha256.update(data);
        match &mut self.sink {
            Sink::Disk { folder, file, outboard, .. } => {
                file.write_all(data)?;
                self.tree.update(data, &mut |node| write_node(folder, outboard, node))
            }
            Sink::Memory(held) => {
                held.extend_from_slice(data);
                self.tree.update(data, &mut |_| Ok(()))
            }
        }
    }

    /// Another way to read what has been written so far, if that is a file.
    pub fn reader(&self) -> io::Result<Option<File>> {
        match &self.sink {
            Sink::Disk { temporary, .. } => File::open(&temporary.path).map(Some),
            Sink::Memory(_) => Ok(None),
        }
    }

    /// The end of it; `sync` waits until the disk has it.
    pub fn finish(self, sync: bool) -> io::Result<Arrived> {
        let (address, bytes) = match self.sink {
            Sink::Disk { folder, file, temporary, mut outboard } => {
                let address = self.tree.finish(&mut |node| write_node(&folder, &mut outboard, node))?;
                if sync {
                    file.sync_all()?;
                }
                let outboard = match outboard {
                    None => None,
                    Some((writer, temporary)) => {
                        let file = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
                        if sync {
                            file.sync_all()?;
                        }
                        Some(temporary)
                    }
                };
                (address, ArrivedBytes::Disk { file: temporary, outboard })
            }
            Sink::Memory(held) => (self.tree.finish(&mut |_| Ok(()))?, ArrivedBytes::Memory(held.freeze())),
        };
        let (len, taken) = (self.len, self.taken);
        Ok(Arrived { address, sha256: self.sha256.finalize().into(), len, bytes, synced: sync, taken })
    }
}

/// Adds a node to the outboard, which only an object of more than one group has.
fn write_node(
    folder: &Path,
    outboard: &mut Option<(BufWriter<File>, Temporary)>,
    node: &[u8],
) -> io::Result<()> {
    let (writer, _) = match outboard {
        Some(open) => open,
        None => {
            let temporary = Temporary::new(folder);
            let file = File::create_new(&temporary.path)?;
            outboard.insert((BufWriter::new(file), temporary))
        }
    };
    writer.write_all(node)
}
