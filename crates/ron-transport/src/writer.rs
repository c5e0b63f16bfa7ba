//! The one writer of a connection: frames in batches, small ones copied together, large ones as they are.

use bytes::{Buf as _, Bytes, BytesMut};
use oap::Encoded;
use ron_kernel::http::Io;
use std::collections::VecDeque;
use std::io::IoSlice;
use std::time::Duration;
use tokio::io::{AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf};

/// Parts below this are copied: that costs less than a slice of their own.
const COPY_BELOW: usize = 2 << 10;
/// Slices of one call to the system.
const SLICES: usize = 32;
/// Room for copies that a quiet connection keeps.
const KEEP: usize = 4 << 10;

/// Why a batch is not on its way; the connection is of no use any more, since a part of a frame may be.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("the peer did not take it in time")]
    Timeout,
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Owns the half of a connection that is written to. It cannot be cloned, and [`split`] gives it once.
#[derive(Debug)]
pub struct Writer<W = WriteHalf<Io>> {
    io: W,
    copies: BytesMut,
    parts: VecDeque<Bytes>,
}

/// A connection's two halves.
pub fn split(io: Io) -> (ReadHalf<Io>, Writer) {
    let (read, write) = tokio::io::split(io);
    (read, Writer::new(write))
}

impl<W: AsyncWrite + Unpin> Writer<W> {
    pub fn new(io: W) -> Writer<W> {
        Writer { io, copies: BytesMut::new(), parts: VecDeque::new() }
    }

    /// Adds a frame, and its checksum if one was agreed on, to the next batch.
    pub fn push(&mut self, frame: &Encoded, checked: bool) {
        for part in frame.parts() {
            if part.len() < COPY_BELOW {
                self.copies.extend_from_slice(part);
            } else {
                self.end_copies();
                self.parts.push_back(part.clone());
            }
        }
        if checked {
            self.copies.extend_from_slice(&frame.checksum());
        }
    }

    /// Writes the batch. Not cancel-safe: after an error or a drop the connection must be closed.
    pub async fn flush(&mut self, timeout: Duration) -> Result<(), WriteError> {
        self.end_copies();
        let written = tokio::time::timeout(timeout, self.write()).await;
        match written {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(error.into()),
            Err(_elapsed) => Err(WriteError::Timeout),
        }
    }

    /// Says that nothing more comes.
    pub async fn close(mut self, timeout: Duration) -> Result<(), WriteError> {
        match tokio::time::timeout(timeout, self.io.shutdown()).await {
            Ok(closed) => closed.map_err(WriteError::from),
            Err(_elapsed) => Err(WriteError::Timeout),
        }
    }

    /// Gives back memory that a quiet connection does not need.
    pub fn relax(&mut self) {
        if self.parts.is_empty() {
            self.parts = VecDeque::new();
            self.copies = BytesMut::new();
        }
    }

    fn end_copies(&mut self) {
        if !self.copies.is_empty() {
            self.parts.push_back(self.copies.split().freeze());
            self.copies.reserve(KEEP);
        }
    }

    async fn write(&mut self) -> std::io::Result<()> {
        while !self.parts.is_empty() {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let mut count = 0;
            for (slice, part) in slices.iter_mut().zip(&self.parts) {
                *slice = IoSlice::new(part);
                count += 1;
            }
            let mut written = self.io.write_vectored(&slices[..count]).await?;
            if written == 0 {
                return Err(std::io::ErrorKind::WriteZero.into());
            }
            while let Some(part) = self.parts.front_mut().filter(|_| written > 0) {
                let of_it = written.min(part.len());
                part.advance(of_it);
                written -= of_it;
                if part.is_empty() {
                    self.parts.pop_front();
                }
            }
        }
        self.io.flush().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oap::{Decoded, Decoder, Frame};
    use proptest::prelude::*;
    use tokio::io::AsyncReadExt as _;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
    }

    proptest! {
        #[test]
        fn frames_arrive_as_they_were_pushed_whatever_their_sizes_and_batches(
            sizes in proptest::collection::vec((0usize..6000, any::<bool>()), 1..40),
            room in 1usize..5000,
            checked: bool,
        ) {
            let frames: Vec<Frame> = sizes.iter().enumerate()
                .map(|(index, (size, _))| Frame::event(0x0100, index as u64, vec![index as u8; *size]))
                .collect();
            let (ours, mut theirs) = tokio::io::duplex(room);
            let read = runtime().block_on(async {
                let mut writer = Writer::new(ours);
                let write = async {
                    for (frame, (_, flush)) in frames.iter().zip(&sizes) {
                        writer.push(&frame.encode(1 << 20).unwrap(), checked);
                        if *flush {
                            writer.flush(Duration::from_secs(5)).await.unwrap();
                        }
                    }
                    writer.flush(Duration::from_secs(5)).await.unwrap();
                    writer.relax();
                    writer.close(Duration::from_secs(5)).await.unwrap();
                };
                let mut bytes = Vec::new();
                let (_, read) = tokio::join!(write, theirs.read_to_end(&mut bytes));
                read.unwrap();
                bytes
            });
            let mut decoder = Decoder::new(1 << 20);
            decoder.agree(1 << 20, checked);
            decoder.push(&read);
            for frame in frames {
                prop_assert_eq!(decoder.next_frame(), Ok(Some(Decoded::Frame(frame))));
            }
            prop_assert_eq!(decoder.next_frame(), Ok(None));
        }
    }

    #[test]
    fn a_peer_that_does_not_read_is_given_up_after_the_timeout() {
        runtime().block_on(async {
            let (ours, _theirs) = tokio::io::duplex(64);
            let mut writer = Writer::new(ours);
            writer.push(&Frame::event(0x0100, 1, vec![0; 100]).encode(1 << 20).unwrap(), false);
            assert!(matches!(writer.flush(Duration::from_secs(5)).await, Err(WriteError::Timeout)));
        });
    }
}
