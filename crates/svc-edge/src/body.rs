//! An object as the body of an answer: a piece is read while the one before it is being sent.

use crate::address::Address;
use crate::cache::{Body as StoredBody, StoredHead};
use crate::cas::{Cas, Object, ReadError, Reader, Response};
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

/// A part of an object, to be read.
type Stretch = (Address, Object, Range<u64>);

/// What was read of one, and how to go on with it.
type ReadOn = Result<(Option<Reader>, Bytes), ReadError>;

/// A stored response as the body of an answer, of one object or several one after the other.
#[derive(Debug)]
pub(crate) struct PartsBody {
    cas: Arc<Cas>,
    first: Option<Bytes>,
    stretches: VecDeque<Stretch>,
    reading: Option<JoinHandle<ReadOn>>,
    reader: Option<Reader>,
    left: u64,
    permit: Permit,
}

impl PartsBody {
    /// Reads the first bytes of a range of a response, and checks them.
    pub(crate) async fn open(
        cas: &Arc<Cas>,
        found: &Response,
        range: Range<u64>,
        until: Instant,
        permit: Permit,
    ) -> Result<Body, ReadError> {
        let mut stretches = VecDeque::new();
        match found.asset.head.as_ref().map(StoredHead::body) {
            Some(StoredBody::Parts(parts)) => {
                for piece in parts.pieces(range.clone()).ok_or(ReadError::Gone)? {
                    let (address, object) = found.parts.get(piece.part).ok_or(ReadError::Gone)?;
                    stretches.push_back((*address, object.clone(), piece.bytes));
                }
            }
            _ => {
                let (address, object) = found.parts.first().ok_or(ReadError::Gone)?;
                stretches.push_back((*address, object.clone(), range.clone()));
            }
        }
        if let [(_, object, range)] = stretches.make_contiguous()
            && let Some(held) = cas.held(object)
        {
            let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(held.len());
            return Ok(Body::full(held.slice(index(range.start)..index(range.end))));
        }
        if let [(_, object, range)] = stretches.make_contiguous()
            && let Some(file) = cas.held_file(object)
        {
            return Ok(Body::file(FileBody::new(file, range.clone(), permit)));
        }
        let mut body = PartsBody {
            cas: cas.clone(),
            first: None,
            stretches,
            reading: None,
            reader: None,
            left: range.end - range.start,
            permit,
        };
        body.read_ahead();
        let Some(reading) = body.reading.take() else { return Err(ReadError::Gone) };
        let read = tokio::time::timeout_at(until.into(), reading).await;
        let read = read.map_err(|_late| ReadError::Io(std::io::ErrorKind::TimedOut.into()))?;
        let (reader, bytes) = read.map_err(|lost| ReadError::Io(std::io::Error::other(lost)))??;
        if let Some((_, object, _)) = body.stretches.front()
            && bytes.len() as u64 == object.len
        {
            cas.hold(object, &bytes);
        }
        let file = reader.as_ref().and_then(Reader::unchecked);
        if let (Some((_, object, _)), Some(file)) = (body.stretches.front(), file) {
            cas.hold_file(object, file);
        }
        if bytes.len() as u64 == body.left {
            return Ok(Body::full(bytes));
        }
        if let ([(_, _, range)], Some(file)) = (&*body.stretches.make_contiguous(), file) {
            return Ok(Body::file(FileBody::new(file.clone(), range.clone(), body.permit)));
        }
        body.advance(reader, &bytes);
        body.first = Some(bytes);
        Ok(Body::stream(body))
    }

    /// Begins to read on.
    fn read_ahead(&mut self) {
        let Some((address, object, range)) = self.stretches.front().cloned() else { return };
        let (cas, reader) = (self.cas.clone(), self.reader.take());
        self.reading = Some(tokio::task::spawn_blocking(move || {
            let mut reader = match reader {
                Some(reader) => reader,
                None => cas.reader(address, &object)?,
            };
            let bytes = reader.read(&range)?;
            Ok((Some(reader), bytes))
        }));
    }

    /// Notes what was read.
    fn advance(&mut self, reader: Option<Reader>, bytes: &Bytes) {
        self.reader = reader;
        if let Some((_, _, range)) = self.stretches.front_mut() {
            range.start += bytes.len() as u64;
            if range.start >= range.end {
                self.stretches.pop_front();
                self.reader = None;
            }
        }
    }
}

impl HttpBody for PartsBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let bytes = match this.first.take() {
            Some(bytes) => bytes,
            None => {
                if this.reading.is_none() {
                    this.read_ahead();
                }
                let Some(reading) = &mut this.reading else { return Poll::Ready(None) };
                let read = ready!(Pin::new(reading).poll(cx));
                this.reading = None;
                let read = read.map_err(|lost| BodyError::Upstream(lost.to_string()))?;
                let (reader, bytes) = read.map_err(|error| {
                    if matches!(error, ReadError::Corrupt) {
                        this.cas.note_bad();
                    }
                    // The stream is cut: a client must not take half a response for a whole one.
                    BodyError::Upstream(error.to_string())
                })?;
                this.advance(reader, &bytes);
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
