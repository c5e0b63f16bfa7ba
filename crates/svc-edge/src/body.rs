//! An object as the body of an answer: a piece is read while the one before it is being sent.

use crate::cas::{Cas, ReadError, Reader};
use crate::semantics::Piece;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use ron_kernel::http::BodyError;
use ron_kernel::sync::Permit;
use std::collections::VecDeque;
use std::future::Future as _;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::task::JoinHandle;

/// Where the bytes of a body come from. Its calls block.
pub(crate) trait Pieces: Send + Unpin + 'static {
    /// The next bytes of a range that is within the object: at least one, and not many.
    fn read(&mut self, range: &Range<u64>) -> Result<Bytes, ReadError>;
}

/// An object of the store, which is told of what is wrong.
#[derive(Debug)]
pub(crate) struct Stored(pub(crate) Arc<Cas>, pub(crate) Reader);

impl Pieces for Stored {
    fn read(&mut self, range: &Range<u64>) -> Result<Bytes, ReadError> {
        self.1.read(range).inspect_err(|error| {
            if matches!(error, ReadError::Corrupt) {
                self.0.note_bad();
            }
        })
    }
}

/// A read that goes on, on a blocking thread.
type Reading<R> = JoinHandle<(R, Result<Bytes, ReadError>)>;

/// See the module. At any time it holds two pieces at most, whatever the size of the object.
#[derive(Debug)]
pub(crate) struct ObjectBody<R> {
    /// What was read before the answer began.
    first: Option<Bytes>,
    pieces: VecDeque<Piece>,
    reader: Option<R>,
    reading: Option<Reading<R>>,
    left: u64,
    _permit: Permit,
}

/// Reads the next bytes of a range.
fn begin<R: Pieces>(mut reader: R, range: Range<u64>) -> Reading<R> {
    tokio::task::spawn_blocking(move || {
        let read = reader.read(&range);
        (reader, read)
    })
}

impl<R: Pieces> ObjectBody<R> {
    /// `first` are the first bytes of the first range among the pieces, which are read already.
    pub(crate) fn new(reader: R, first: Bytes, pieces: Vec<Piece>, left: u64, permit: Permit) -> Self {
        let mut pieces = VecDeque::from(pieces);
        if let Some(Piece::Bytes(range)) = pieces.iter_mut().find(|piece| matches!(piece, Piece::Bytes(_))) {
            range.start += first.len() as u64;
        }
        ObjectBody { first: Some(first), pieces, reader: Some(reader), reading: None, left, _permit: permit }
    }

    /// What goes out next without reading, if anything does.
    fn at_hand(&mut self) -> Option<Bytes> {
        match self.pieces.front() {
            Some(Piece::Text(_)) => match self.pieces.pop_front() {
                Some(Piece::Text(text)) => Some(text),
                _ => None,
            },
            Some(Piece::Bytes(_)) => self.first.take(),
            None => None,
        }
    }

    /// Begins to read on, if nothing is being read and something is left.
    fn read_ahead(&mut self) {
        while let Some(Piece::Bytes(range)) = self.pieces.front()
            && range.is_empty()
            && self.first.is_none()
        {
            self.pieces.pop_front();
        }
        if let (Some(Piece::Bytes(range)), None) = (self.pieces.front(), &self.first)
            && let Some(reader) = self.reader.take()
        {
            self.reading = Some(begin(reader, range.clone()));
        }
    }
}

impl<R: Pieces> HttpBody for ObjectBody<R> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let bytes = match this.at_hand() {
            Some(bytes) => bytes,
            None => {
                this.read_ahead();
                let Some(reading) = &mut this.reading else {
                    return match this.at_hand() {
                        Some(bytes) => {
                            this.left -= bytes.len() as u64;
                            Poll::Ready(Some(Ok(Frame::data(bytes))))
                        }
                        None => Poll::Ready(None),
                    };
                };
                let read = ready!(Pin::new(reading).poll(cx));
                this.reading = None;
                let (reader, read) = read.map_err(|lost| BodyError::Upstream(lost.to_string()))?;
                this.reader = Some(reader);
                // The stream is cut: a client must not take half an object for a whole one.
                let bytes = read.map_err(|error| BodyError::Upstream(error.to_string()))?;
                if let Some(Piece::Bytes(range)) = this.pieces.front_mut() {
                    range.start += bytes.len() as u64;
                }
                bytes
            }
        };
        this.left -= bytes.len() as u64;
        this.read_ahead();
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}
