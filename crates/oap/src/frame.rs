//! One OAP/1 frame, and how it is written: a head of its own and a payload that any number of frames share.

use crate::error::FrameError;
use bytes::{BufMut as _, Bytes, BytesMut};
use std::fmt;
use std::ops::BitOr;

/// Bytes of a header.
pub const HEADER: usize = 38;
/// The largest frame there is.
pub const FRAME_MAX: u32 = 1 << 20;
/// The largest frame before a peer is known, and the smallest limit a peer may state.
pub const FRAME_MIN_MAX: u32 = 16 << 10;
/// What a stream is cut into.
pub const CHUNK: usize = 64 << 10;
pub const VERSION: u16 = 1;

/// Who a frame is for.
pub const APP_CONTROL: u16 = 0;
pub const APP_GOSSIP: u16 = 0x0100;
pub const APP_SERVICES: u16 = 0x0200;

/// Every status a response may carry.
pub const STATUSES: [u16; 12] = [200, 206, 400, 401, 403, 404, 409, 413, 429, 500, 503, 504];

/// A header's flags; the upper eight bits are never set.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Flags(u8);

impl Flags {
    pub const REQ: Flags = Flags(0x01);
    pub const RESP: Flags = Flags(0x02);
    pub const EVENT: Flags = Flags(0x04);
    pub const START: Flags = Flags(0x08);
    pub const END: Flags = Flags(0x10);
    pub const ACK_REQ: Flags = Flags(0x20);
    pub const COMP: Flags = Flags(0x40);
    pub const APP_E2E: Flags = Flags(0x80);

    const NAMES: [(Flags, &'static str); 8] = [
        (Flags::REQ, "REQ"),
        (Flags::RESP, "RESP"),
        (Flags::EVENT, "EVENT"),
        (Flags::START, "START"),
        (Flags::END, "END"),
        (Flags::ACK_REQ, "ACK_REQ"),
        (Flags::COMP, "COMP"),
        (Flags::APP_E2E, "APP_E2E"),
    ];

    pub fn from_bits(bits: u16) -> Result<Flags, FrameError> {
        u8::try_from(bits).ok().map(Flags).ok_or(FrameError::BadFlags(bits))
    }

    pub const fn bits(self) -> u16 {
        self.0 as u16
    }

    pub const fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    #[must_use]
    pub const fn without(self, other: Flags) -> Flags {
        Flags(self.0 & !other.0)
    }

    /// What the frame is; a frame is exactly one of the three.
    pub fn kind(self) -> Option<Kind> {
        match self.0 & 0x07 {
            0x01 => Some(Kind::Request),
            0x02 => Some(Kind::Response),
            0x04 => Some(Kind::Event),
            _ => None,
        }
    }
}

impl BitOr for Flags {
    type Output = Flags;

    fn bitor(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

impl fmt::Display for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = false;
        for (_, name) in Flags::NAMES.iter().filter(|(flag, _)| self.has(*flag)) {
            write!(f, "{}{name}", if rest { "|" } else { "" })?;
            rest = true;
        }
        if rest { Ok(()) } else { f.write_str("-") }
    }
}

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Request,
    Response,
    Event,
}

/// A frame. Its length is never kept: it follows from what is here.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Frame {
    pub flags: Flags,
    /// 0, or a response's status.
    pub code: u16,
    pub app: u16,
    pub tenant: u128,
    pub corr: u64,
    pub cap: Bytes,
    pub payload: Bytes,
}

/// Neither capability nor payload: they may be secret, and a log is not the place to find out.
impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} code={} app={:#06x} tenant={:#x} corr={} cap={} payload={}",
            self.flags,
            self.code,
            self.app,
            self.tenant,
            self.corr,
            self.cap.len(),
            self.payload.len()
        )
    }
}

impl Frame {
    pub fn request(app: u16, corr: u64, payload: impl Into<Bytes>) -> Frame {
        Frame { flags: Flags::REQ, app, corr, payload: payload.into(), ..Frame::default() }
    }

    pub fn response(app: u16, corr: u64, code: u16, payload: impl Into<Bytes>) -> Frame {
        Frame { flags: Flags::RESP, code, app, corr, payload: payload.into(), ..Frame::default() }
    }

    pub fn event(app: u16, corr: u64, payload: impl Into<Bytes>) -> Frame {
        Frame { flags: Flags::EVENT, app, corr, payload: payload.into(), ..Frame::default() }
    }

    /// Bytes on the wire, without a checksum.
    pub fn len(&self) -> usize {
        HEADER + self.cap.len() + self.payload.len()
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    /// The frame as it is written; refused if the rules refuse it or it is larger than `max`.
    pub fn encode(&self, max: u32) -> Result<Encoded, FrameError> {
        Encoded::new(self, &[], max)
    }

    /// What a decoder checks in a frame whose boundaries are good.
    pub(crate) fn check(&self) -> Result<(), FrameError> {
        let kind = self.flags.kind().ok_or(FrameError::Kind(self.flags.bits()))?;
        let good = match kind {
            Kind::Response => STATUSES.contains(&self.code),
            Kind::Request | Kind::Event => self.code == 0,
        };
        if !good {
            return Err(FrameError::Code(self.code));
        }
        if !self.cap.is_empty() && !self.flags.has(Flags::START) {
            return Err(FrameError::CapOnNonStart);
        }
        Ok(())
    }
}

/// A frame ready for a vectored write. A clone shares all bytes, so a frame for many peers is made once.
#[derive(Clone, PartialEq, Eq)]
pub struct Encoded {
    head: Bytes,
    payload: Bytes,
}

impl Encoded {
    /// A frame whose payload is a few bytes of its own, written with the header, and the frame's.
    pub(crate) fn new(frame: &Frame, prefix: &[u8], max: u32) -> Result<Encoded, FrameError> {
        frame.check()?;
        let len = frame.len() + prefix.len();
        let fits = u32::try_from(len).ok().filter(|len| *len <= max);
        let len = fits.ok_or(FrameError::TooLarge { len: len as u64, max })?;
        // A frame below the cap of 1 MiB whose capability does not fit in 16 bits is still refused.
        let cap_len = u16::try_from(frame.cap.len()).ok().ok_or(FrameError::CapBeyondFrame)?;
        let mut head = BytesMut::with_capacity(HEADER + frame.cap.len() + prefix.len());
        head.put_u32(len);
        head.put_u16(VERSION);
        head.put_u16(frame.flags.bits());
        head.put_u16(frame.code);
        head.put_u16(frame.app);
        head.put_u128(frame.tenant);
        head.put_u16(cap_len);
        head.put_u64(frame.corr);
        head.put_slice(&frame.cap);
        head.put_slice(prefix);
        Ok(Encoded { head: head.freeze(), payload: frame.payload.clone() })
    }

    /// What is written, in order; the second may be empty.
    pub fn parts(&self) -> [&Bytes; 2] {
        [&self.head, &self.payload]
    }

    pub fn len(&self) -> usize {
        self.head.len() + self.payload.len()
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    /// The four bytes that follow the frame where `crc32c` was agreed.
    pub fn checksum(&self) -> [u8; 4] {
        crc32c::crc32c_append(crc32c::crc32c(&self.head), &self.payload).to_be_bytes()
    }

    pub fn to_vec(&self) -> Vec<u8> {
        [&self.head[..], &self.payload[..]].concat()
    }
}

impl fmt::Debug for Encoded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}
