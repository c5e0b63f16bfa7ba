//! COMP: a payload as one zstd frame, inflated in small steps under two limits.

use crate::error::FrameError;
use crate::frame::{FRAME_MAX, Flags, Frame};
use bytes::{Bytes, BytesMut};
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation as _, OutBuffer};

/// What a payload may inflate to: so many bytes, and so many for each that came.
pub const INFLATED_MAX: usize = FRAME_MAX as usize;
pub const RATIO_MAX: usize = 10;
const STEP: usize = 16 << 10;
/// A window larger than what may come out of it is a waste that the peer would choose.
const WINDOW_LOG_MAX: u32 = 20;
/// The level costs little time; those who want more compress in their application.
const LEVEL: i32 = 1;

impl Frame {
    /// The frame with its payload inflated, if it is compressed.
    pub fn inflate(mut self) -> Result<Frame, FrameError> {
        if self.flags.has(Flags::COMP) {
            self.payload = inflate(&self.payload)?;
            self.flags = self.flags.without(Flags::COMP);
        }
        Ok(self)
    }

    /// The frame with its payload compressed, or as it is where that saves nothing or a peer would refuse it.
    #[must_use]
    pub fn deflate(mut self) -> Frame {
        let (plain, tried) = (self.payload.len(), zstd::bulk::compress(&self.payload, LEVEL));
        if let Ok(small) = tried
            && !self.flags.has(Flags::COMP)
            && small.len() < plain
            && plain <= INFLATED_MAX.min(small.len() * RATIO_MAX)
        {
            self.payload = small.into();
            self.flags = self.flags | Flags::COMP;
        }
        self
    }
}

fn inflate(input: &[u8]) -> Result<Bytes, FrameError> {
    let max = INFLATED_MAX.min(input.len().saturating_mul(RATIO_MAX));
    let mut decoder = Decoder::new().ok().ok_or(FrameError::Inflate)?;
    decoder.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX)).ok().ok_or(FrameError::Inflate)?;
    let (mut input, mut out, mut step) = (InBuffer::around(input), BytesMut::new(), vec![0; STEP]);
    loop {
        let mut room = OutBuffer::around(&mut step[..]);
        let hint = decoder.run(&mut input, &mut room).ok().ok_or(FrameError::Inflate)?;
        let made = room.pos();
        if out.len() + made > max {
            return Err(FrameError::InflateTooLarge);
        }
        out.extend_from_slice(&step[..made]);
        let used_up = input.pos() == input.src.len();
        match hint {
            // The one zstd frame has ended: what follows it is nobody's.
            0 if used_up => return Ok(out.freeze()),
            0 => return Err(FrameError::Inflate),
            _ if used_up && made < STEP => return Err(FrameError::Inflate),
            _ => {}
        }
    }
}
