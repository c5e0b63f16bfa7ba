//! A stretch of a file as a body: over a plain socket its bytes never pass through this process.
//!
//! What is not in the system's memory yet is read on a blocking thread, so that no disk holds the runtime up.

use super::BodyError;
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

/// See the module. Whoever makes it is sure of the bytes: nobody looks at them any more.
pub struct FileBody {
    file: Arc<File>,
    left: Range<u64>,
    /// All that is left, if it is in memory too.
    bytes: Option<Bytes>,
    reading: Option<JoinHandle<io::Result<Bytes>>>,
    /// What lives for as long as the body does.
    _kept: Box<dyn Send>,
}

impl FileBody {
    /// The range must be within the file; a file that turns out to be shorter breaks the body off.
    pub fn new(file: Arc<File>, range: Range<u64>, kept: impl Send + 'static) -> FileBody {
        FileBody { file, left: range, bytes: None, reading: None, _kept: Box::new(kept) }
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
        let begins = || window <= PIECE || self.is_held(self.left.start);
        let held = self.reading.is_none() && self.is_held(last) && begins();
        held.then_some(window)
    }

    fn is_held(&self, at: u64) -> bool {
        let read = preadv2(&self.file, &mut [IoSliceMut::new(&mut [0])], at, ReadWriteFlags::NOWAIT);
        // What the file has no more is found out by sending it.
        read.is_ok()
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
