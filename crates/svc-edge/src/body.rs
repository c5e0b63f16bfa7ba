//! An object as the body of an answer: a piece is read while the one before it is being sent.

use crate::address::Address;
use crate::cache::{Body as StoredBody, StoredHead};
use crate::cas::{Cas, Object, ReadError, Reader, Response, slice};
use crate::semantics::Piece;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use ron_kernel::http::{Body, BodyError, FileBody};
use ron_kernel::sync::Permit;
use std::collections::VecDeque;
use std::future::Future as _;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;
use tokio::task::JoinHandle;

/// A range of an object whose bytes or file are at hand; else the permit is given back. A plain socket takes more than a
/// few bytes from the file with less ado, also where they are in memory.
pub(crate) fn at_hand(
    cas: &Cas,
    object: &Object,
    range: &Range<u64>,
    permit: Permit,
) -> Result<Body, Permit> {
    let held = cas.held(object).map(|held| slice(&held, range));
    if (held.is_none() || FileBody::is_worthwhile(range.end - range.start))
        && let Some(file) = cas.held_file(object)
    {
        let body = FileBody::new(file, range.clone(), Some(permit));
        return Ok(Body::file(match held {
            Some(held) => body.with_bytes(held),
            None => body,
        }));
    }
    held.map(Body::full).ok_or(permit)
}

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

/// A stored response, of one object or several, from a place in it to another.
#[derive(Debug)]
struct Parts {
    cas: Arc<Cas>,
    /// What is to be read yet.
    stretches: VecDeque<(Address, Object, Range<u64>)>,
    /// That of the first of them, once it was opened.
    reader: Option<Reader>,
}

impl Parts {
    fn of(cas: &Arc<Cas>, found: &Response, range: &Range<u64>) -> Option<Parts> {
        let mut stretches = VecDeque::new();
        match found.asset.head.as_ref().map(StoredHead::body) {
            Some(StoredBody::Parts(parts)) => {
                for piece in parts.pieces(range.clone())? {
                    let (address, object) = found.parts.get(piece.part)?;
                    stretches.push_back((*address, object.clone(), piece.bytes));
                }
            }
            _ => {
                let (address, object) = found.parts.first()?;
                stretches.push_back((*address, object.clone(), range.clone()));
            }
        }
        Some(Parts { cas: cas.clone(), stretches, reader: None })
    }
}

impl Pieces for Parts {
    /// What comes next, which is what is asked for.
    fn read(&mut self, _next: &Range<u64>) -> Result<Bytes, ReadError> {
        let (address, object, range) = self.stretches.front_mut().ok_or(ReadError::Gone)?;
        let mut reader = match self.reader.take() {
            Some(reader) => reader,
            None => self.cas.reader(*address, object)?,
        };
        let bytes = reader.read(range).inspect_err(|error| {
            if matches!(error, ReadError::Corrupt) {
                self.cas.note_bad();
            }
        })?;
        if bytes.len() as u64 == object.len {
            self.cas.hold(object, &bytes);
        }
        if let Some(file) = reader.unchecked() {
            self.cas.hold_file(object, file);
        }
        range.start += bytes.len() as u64;
        if range.is_empty() {
            self.stretches.pop_front();
        } else {
            self.reader = Some(reader);
        }
        Ok(bytes)
    }
}

/// A range of a stored response as the body of an answer, of which the first bytes are read and checked.
pub(crate) async fn of_response(
    cas: &Arc<Cas>,
    found: &Response,
    range: Range<u64>,
    until: Instant,
    mut permit: Permit,
) -> Result<Body, ReadError> {
    let parts = Parts::of(cas, found, &range).ok_or(ReadError::Gone)?;
    let alone = match parts.stretches.as_slices() {
        ([(_, object, range)], []) => Some((object.clone(), range.clone())),
        _ => None,
    };
    if let Some((object, range)) = &alone {
        match at_hand(cas, object, range, permit) {
            Ok(body) => return Ok(body),
            Err(unused) => permit = unused,
        }
    }
    let read = tokio::time::timeout_at(until.into(), begin(parts, range.clone())).await;
    let read = read.map_err(|_late| ReadError::Io(std::io::ErrorKind::TimedOut.into()))?;
    let (parts, first) = read.map_err(|lost| ReadError::Io(std::io::Error::other(lost)))?;
    let (first, len) = (first?, range.end - range.start);
    if first.len() as u64 == len {
        return Ok(Body::full(first));
    }
    if let Some((object, range)) = &alone {
        // Checked as it is by now, it may go as a file.
        match at_hand(cas, object, range, permit) {
            Ok(body) => return Ok(body),
            Err(unused) => permit = unused,
        }
    }
    Ok(Body::stream(ObjectBody::new(parts, first, vec![Piece::Bytes(range)], len, permit)))
}
