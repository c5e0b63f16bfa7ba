//! A stretch of a file as a body: over a plain socket its bytes never pass through this process.
//!
//! What is not in the system's memory yet is read on a blocking thread, so that no disk holds the runtime up.

use super::BodyError;
use crate::coarse;
use crate::sync::Permit;
use bytes::Bytes;
use http_body::Frame;
use rustix::io::{ReadWriteFlags, preadv2};
use std::fs::File;
use std::future::Future as _;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use tokio::task::JoinHandle;

/// What goes from a file to a socket at a time, so that one connection does not keep the others waiting.
const WINDOW: u64 = 512 << 10;
/// What is read at a time where bytes must pass through here.
const PIECE: u64 = 64 << 10;
/// A few bytes leave sooner in one write with what goes before them, if they have to be read,
const SMALL: u64 = 16 << 10;
/// and so do twice as many that are in memory: measured, the system's own copy pays from there on.
const SMALL_HELD: u64 = 32 << 10;

/// Milliseconds for which what was seen in the system's memory counts as being there.
const SEEN: u64 = 100;

/// A file that may be sent many times.
#[derive(Debug)]
pub struct SentFile {
    file: File,
    /// When its first piece was last seen in the system's memory.
    seen: AtomicU64,
}

impl From<File> for SentFile {
    fn from(file: File) -> SentFile {
        SentFile { file, seen: AtomicU64::new(0) }
    }
}

impl std::ops::Deref for SentFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl SentFile {
    fn is_held(&self, at: u64) -> bool {
        let read = preadv2(&self.file, &mut [IoSliceMut::new(&mut [0])], at, ReadWriteFlags::NOWAIT);
        // What the file has no more is found out by sending it.
        read.is_ok()
    }

    /// The same of the last byte of a stretch within the first piece, which is not looked at with every answer.
    fn was_held(&self, last: u64) -> bool {
        let now = coarse::millis();
        if now.saturating_sub(self.seen.load(Ordering::Relaxed)) <= SEEN {
            return true;
        }
        let held = self.is_held(last);
        if held {
            self.seen.store(now, Ordering::Relaxed);
        }
        held
    }
}

/// See the module. Whoever makes it is sure of the bytes: nobody looks at them any more.
pub struct FileBody {
    file: Arc<SentFile>,
    left: Range<u64>,
    /// All that is left, if it is in memory too.
    bytes: Option<Bytes>,
    reading: Option<JoinHandle<io::Result<Bytes>>>,
    /// Taken for as long as the body lives.
    _permit: Option<Permit>,
}

impl FileBody {
    /// The range must be within the file; a file that turns out to be shorter breaks the body off.
    pub fn new(file: Arc<SentFile>, range: Range<u64>, permit: Option<Permit>) -> FileBody {
        FileBody { file, left: range, bytes: None, reading: None, _permit: permit }
    }

    /// The same with the bytes of its range at hand, for clients that the file cannot be sent to as it is.
    #[must_use]
    pub fn with_bytes(self, bytes: Bytes) -> FileBody {
        let fits = bytes.len() as u64 == self.left();
        FileBody { bytes: fits.then_some(bytes), ..self }
    }

    /// Whether so many bytes are better sent from a file than written from memory.
    pub fn is_worthwhile(length: u64) -> bool {
        length > SMALL_HELD
    }

    pub(crate) fn left(&self) -> u64 {
        self.left.end - self.left.start
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn offset(&self) -> u64 {
        self.left.start
    }

    pub(crate) fn advance(&mut self, sent: u64) {
        self.left.start += sent.min(self.left());
        self.bytes = None;
    }

    /// How much of what is next lies in memory, as far as its ends tell, of a short stretch the last; `None` if it has to
    /// be read first, or is so little that it may as well be.
    pub(crate) fn at_hand(&self) -> Option<u64> {
        let window = self.left().min(WINDOW);
        let last = self.left.start + window.checked_sub(1).filter(|_| window > SMALL)?;
        let is_held = || match window {
            _ if last < PIECE => self.file.was_held(last),
            ..=PIECE => self.file.is_held(last),
            _ => self.file.is_held(last) && self.file.is_held(self.left.start),
        };
        (self.reading.is_none() && is_held()).then_some(window)
    }

    pub(crate) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let length = usize::try_from(self.left().min(PIECE)).unwrap_or(0);
        if length == 0 {
            return Poll::Ready(None);
        }
        if let Some(bytes) = self.bytes.take() {
            self.advance(bytes.len() as u64);
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        let bytes = match &mut self.reading {
            None => match read_now(&self.file, self.left.start, length) {
                Some(bytes) => bytes,
                None => {
                    let (file, at) = (self.file.clone(), self.left.start);
                    self.reading = Some(tokio::task::spawn_blocking(move || {
                        let mut bytes = vec![0; length];
                        file.read_exact_at(&mut bytes, at)?;
                        Ok(bytes.into())
                    }));
                    return self.poll_frame(cx);
                }
            },
            Some(reading) => {
                let read = ready!(Pin::new(reading).poll(cx));
                self.reading = None;
                let read = read.map_err(|lost| BodyError::Upstream(lost.to_string()))?;
                read.map_err(|error| BodyError::Upstream(error.to_string()))?
            }
        };
        self.advance(bytes.len() as u64);
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }
}

/// Bytes of a file, all of them, if no disk has to be asked.
fn read_now(file: &File, at: u64, length: usize) -> Option<Bytes> {
    let mut bytes = vec![0; length];
    let read = preadv2(file, &mut [IoSliceMut::new(&mut bytes)], at, ReadWriteFlags::NOWAIT);
    (read == Ok(length)).then(|| bytes.into())
}

impl std::fmt::Debug for FileBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FileBody({:?})", self.left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_in_memory_is_looked_for_again_a_little_later() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1000).unwrap();
        let readable = SentFile::from(file.reopen().unwrap());
        assert!(readable.was_held(999) && readable.seen.load(Ordering::Relaxed) > 0);
        // One that cannot be read stands for one whose bytes are not there.
        let file = SentFile::from(File::options().write(true).open(file.path()).unwrap());
        assert!(!file.was_held(999) && file.seen.load(Ordering::Relaxed) == 0);
        let now = coarse::millis();
        // Not to depend on how fast this runs, it was seen in what is to come.
        for (seen, held) in [(now + 60_000, true), (now - SEEN - 1, false)] {
            file.seen.store(seen, Ordering::Relaxed);
            assert_eq!(file.was_held(999), held, "seen at {seen}, now {now}");
        }
    }
}
