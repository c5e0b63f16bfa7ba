//! A connection that has changed its protocol: bytes in both directions, whatever they mean.

use super::io::Io;
use bytes::{Buf, BytesMut};
use http::header::{CONNECTION, HeaderMap, HeaderValue, UPGRADE};
use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// Bytes read at a time.
const PIECE: usize = 16 << 10;

/// The far side of a connection whose answer is 101.
#[derive(Debug)]
pub struct Tunnel {
    io: Io,
    /// Longest silence in both directions.
    silence: Duration,
}

impl Tunnel {
    pub fn new(io: Io, silence: Duration) -> Tunnel {
        Tunnel { io, silence }
    }
}

/// The protocol that a request without a body, of HTTP/1.1, asks to change to, if it may: HTTP by another name would
/// slip past every rule there is.
pub fn upgrade_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let protocol = headers.get(UPGRADE)?;
    let text = protocol.to_str().ok()?.to_ascii_lowercase();
    let is_http = text.split(',').any(|one| {
        let name = one.trim().split('/').next().unwrap_or("");
        name.is_empty() || ["h2c", "h2", "http", "tls"].contains(&name)
    });
    let words = |line: &HeaderValue| {
        line.as_bytes()
            .split(|byte| *byte == b',')
            .any(|word| word.trim_ascii().eq_ignore_ascii_case(b"upgrade"))
    };
    (!is_http && headers.get_all(CONNECTION).iter().any(words)).then(|| protocol.clone())
}

/// How a tunnel ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// Both sides closed, one broke, or neither had anything to say for too long.
    Closed,
    /// One side did not take what the other had sent.
    WriteTimeout,
}

/// A tunnel at work.
#[derive(Debug)]
pub(super) struct Pump {
    tunnel: Tunnel,
    write_timeout: Duration,
    out: OneWay,
    back: OneWay,
    progress: Instant,
    timer: Pin<Box<Sleep>>,
}

/// One direction. It holds bytes only while their receiver does not take them, so a silent tunnel costs none.
#[derive(Debug, Default)]
struct OneWay {
    pending: BytesMut,
    ended: bool,
    shut: bool,
}

impl Pump {
    pub(super) fn new(tunnel: Tunnel, write_timeout: Duration) -> Pump {
        let timer = Box::pin(tokio::time::sleep(tunnel.silence));
        let progress = Instant::now();
        Pump { tunnel, write_timeout, out: OneWay::default(), back: OneWay::default(), progress, timer }
    }

    /// Moves what can be moved.
    pub(super) fn poll(&mut self, near: &mut Io, cx: &mut Context<'_>) -> Poll<Ended> {
        let out = self.out.poll(near, &mut self.tunnel.io, cx);
        let back = self.back.poll(&mut self.tunnel.io, near, cx);
        let (Ok(out), Ok(back)) = (out, back) else { return Poll::Ready(Ended::Closed) };
        if self.out.shut && self.back.shut {
            return Poll::Ready(Ended::Closed);
        }
        if out || back {
            self.progress = Instant::now();
        }
        let stuck = !self.out.pending.is_empty() || !self.back.pending.is_empty();
        let patience = if stuck { self.write_timeout } else { self.tunnel.silence };
        let until = tokio::time::Instant::from_std(self.progress + patience);
        if self.timer.deadline() != until {
            self.timer.as_mut().reset(until);
        }
        ready!(self.timer.as_mut().poll(cx));
        Poll::Ready(if stuck { Ended::WriteTimeout } else { Ended::Closed })
    }
}

impl OneWay {
    /// Moves bytes until a side has to be waited for; says whether any were moved.
    fn poll(&mut self, from: &mut Io, to: &mut Io, cx: &mut Context<'_>) -> std::io::Result<bool> {
        let mut moved = false;
        loop {
            while !self.pending.is_empty() {
                let Poll::Ready(written) = Pin::new(&mut *to).poll_write(cx, &self.pending) else {
                    return Ok(moved);
                };
                match written? {
                    0 => return Err(std::io::ErrorKind::WriteZero.into()),
                    written => self.pending.advance(written),
                }
                moved = true;
            }
            self.pending = BytesMut::new();
            if self.ended {
                if !self.shut && Pin::new(&mut *to).poll_shutdown(cx)?.is_ready() {
                    self.shut = true;
                }
                return Ok(moved);
            }
            let mut piece = [0; PIECE];
            let mut read = ReadBuf::new(&mut piece);
            if Pin::new(&mut *from).poll_read(cx, &mut read)?.is_pending() {
                // What a TLS layer below has not sent yet goes out before anything is waited for.
                let _ = Pin::new(&mut *to).poll_flush(cx)?;
                return Ok(moved);
            }
            if read.filled().is_empty() {
                self.ended = true;
                continue;
            }
            moved = true;
            match Pin::new(&mut *to).poll_write(cx, read.filled())? {
                Poll::Ready(0) => return Err(std::io::ErrorKind::WriteZero.into()),
                Poll::Ready(written) => self.pending.extend_from_slice(&read.filled()[written..]),
                Poll::Pending => self.pending.extend_from_slice(read.filled()),
            }
        }
    }
}
