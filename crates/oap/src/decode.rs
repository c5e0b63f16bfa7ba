//! Frames out of a stream of bytes. Each byte is looked at once, memory follows what has come, and a payload is
//! a slice of what was read.

use crate::error::FrameError;
use crate::frame::{Flags, Frame, HEADER, VERSION};
use bytes::{Buf as _, Bytes, BytesMut};

/// The least and the most room that a read is given.
const READ_MIN: usize = 4 << 10;
const READ_MAX: usize = 64 << 10;
/// Bytes of a checksum.
const TRAILER: usize = 4;

/// What a decoder found: a frame, or a frame's address and why it is refused while the stream goes on.
#[derive(Debug, PartialEq, Eq)]
pub enum Decoded {
    Frame(Frame),
    Refused { frame: Frame, error: FrameError },
}

/// Reads frames. After an error it stays at that error: where the next frame begins is not known.
#[derive(Debug)]
pub struct Decoder {
    buffer: BytesMut,
    /// What the frame at the front of the buffer says about itself, once its header has come.
    head: Option<Head>,
    max: u32,
    checksum: bool,
    failed: Option<FrameError>,
    /// How much room the next read gets, and where the last one began.
    read: usize,
    mark: usize,
}

#[derive(Debug, Clone, Copy)]
struct Head {
    len: usize,
    cap_len: usize,
    flags: Flags,
    code: u16,
    app: u16,
    tenant: u128,
    corr: u64,
}

impl Decoder {
    /// A decoder that refuses frames of more than `max` bytes.
    pub fn new(max: u32) -> Decoder {
        let buffer = BytesMut::new();
        Decoder { buffer, head: None, max, checksum: false, failed: None, read: READ_MIN, mark: 0 }
    }

    /// What was agreed, from the next frame on.
    pub fn agree(&mut self, max: u32, checksum: bool) {
        (self.max, self.checksum) = (max, checksum);
    }

    /// Where to read into. The room grows while reads fill it and shrinks when they do not: a claimed length
    /// alone reserves nothing. With what has come it never passes the largest frame.
    pub fn space(&mut self) -> &mut BytesMut {
        let came = self.buffer.len().saturating_sub(self.mark);
        if came >= self.read {
            self.read = (self.read * 2).min(READ_MAX);
        } else if came < self.read / 4 {
            self.read = (self.read / 2).max(READ_MIN);
        }
        let trailer = if self.checksum { TRAILER } else { 0 };
        let left = (self.max as usize + trailer).saturating_sub(self.buffer.len());
        if self.buffer.capacity() - self.buffer.len() < (self.read / 2).min(left).max(1) {
            self.buffer.reserve(self.read.min(left).max(1));
        }
        self.mark = self.buffer.len();
        &mut self.buffer
    }

    /// Bytes that came some other way.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Whether a frame has begun and not ended.
    pub fn is_partial(&self) -> bool {
        self.failed.is_none() && !self.buffer.is_empty()
    }

    /// Gives back the memory of a connection that is quiet.
    pub fn relax(&mut self) {
        if self.buffer.is_empty() {
            self.buffer = BytesMut::new();
            self.read = READ_MIN;
            self.mark = 0;
        }
    }

    /// The next frame that has come whole.
    pub fn next_frame(&mut self) -> Result<Option<Decoded>, FrameError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let found = self.read_frame();
        if let Err(error) = found {
            self.failed = Some(error);
            self.buffer = BytesMut::new();
        }
        found
    }

    fn read_frame(&mut self) -> Result<Option<Decoded>, FrameError> {
        let head = match self.head {
            Some(head) => head,
            None => match self.read_head()? {
                Some(head) => *self.head.insert(head),
                None => return Ok(None),
            },
        };
        let trailer = if self.checksum { TRAILER } else { 0 };
        if self.buffer.len() < head.len + trailer {
            return Ok(None);
        }
        self.head = None;
        if self.checksum {
            let (frame, rest) = self.buffer.split_at(head.len);
            if crc32c::crc32c(frame).to_be_bytes() != rest[..TRAILER] {
                return Err(FrameError::Checksum);
            }
        }
        self.buffer.advance(HEADER);
        let cap = take(&mut self.buffer, head.cap_len);
        let payload = take(&mut self.buffer, head.len - HEADER - head.cap_len);
        self.buffer.advance(trailer);
        self.mark = self.mark.saturating_sub(head.len + trailer);
        let Head { flags, code, app, tenant, corr, .. } = head;
        let frame = Frame { flags, code, app, tenant, corr, cap, payload };
        Ok(Some(match frame.check() {
            Ok(()) => Decoded::Frame(frame),
            Err(error) => Decoded::Refused { frame, error },
        }))
    }

    /// The header, judged as soon as each part of it is here: before anything is buffered for the rest.
    fn read_head(&self) -> Result<Option<Head>, FrameError> {
        let mut bytes = &self.buffer[..self.buffer.len().min(HEADER)];
        let whole = bytes.len() == HEADER;
        let Some(len) = bytes.try_get_u32().ok() else { return Ok(None) };
        if (len as usize) < HEADER {
            return Err(FrameError::TooShort(len));
        }
        if len > self.max {
            return Err(FrameError::TooLarge { len: u64::from(len), max: self.max });
        }
        let Some(version) = bytes.try_get_u16().ok() else { return Ok(None) };
        if version != VERSION {
            return Err(FrameError::BadVersion(version));
        }
        let Some(flags) = bytes.try_get_u16().ok() else { return Ok(None) };
        let flags = Flags::from_bits(flags)?;
        if !whole {
            return Ok(None);
        }
        let (code, app, tenant) = (bytes.get_u16(), bytes.get_u16(), bytes.get_u128());
        let (cap_len, corr) = (usize::from(bytes.get_u16()), bytes.get_u64());
        if HEADER + cap_len > len as usize {
            return Err(FrameError::CapBeyondFrame);
        }
        Ok(Some(Head { len: len as usize, cap_len, flags, code, app, tenant, corr }))
    }
}

fn take(buffer: &mut BytesMut, len: usize) -> Bytes {
    if len == 0 { Bytes::new() } else { buffer.split_to(len).freeze() }
}
