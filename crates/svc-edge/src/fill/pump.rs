//! Bytes from an origin into the store, seen by everybody who waits for them.

use super::{Counters, Failure, Flight};
use crate::cas::{Arrived, Cas, CasError, Upload};
use bytes::{Bytes, BytesMut};
use http_body::{Body as _, Frame};
use ron_kernel::admission::decode::{Coding, DecodeError, DecodeGuard, DecodeLimits};
use ron_kernel::http::client::Payload;
use ron_kernel::http::{Body, BodyError};
use std::fs::File;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// What is gathered before it is written, off the runtime.
const STRETCH: usize = 256 << 10;

/// The bounds of one object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caps {
    pub(crate) bytes_max: u64,
    /// So many bytes stay in memory for those who look on.
    pub(crate) keep: u64,
    pub(crate) stall: Duration,
    pub(crate) decode: DecodeLimits,
    /// Whether what is larger than the store goes to who asked for it all the same.
    pub(crate) unstored: bool,
}

impl Caps {
    /// Whether an object of this length can be taken in.
    pub(super) fn check(&self, cas: &Cas, len: u64) -> Result<(), Failure> {
        if len > self.bytes_max {
            return Err(Failure::TooLarge);
        }
        Ok(cas.can_hold(len)?)
    }
}

/// What came.
#[derive(Debug)]
pub(crate) enum Pumped {
    Whole(Arrived),
    /// It came to its end, but the store did not take it.
    Unstored(Failure, u64),
    /// It broke off; what had come until then, if it is worth anything.
    Broken(Failure, Option<Arrived>),
}

/// Moves a payload to its end. The caller tells the flight how it ended, once that is durable.
pub(crate) async fn pump(
    cas: &Arc<Cas>,
    flight: &Flight,
    payload: Payload,
    codings: &[Coding],
    caps: Caps,
    counters: &Counters,
) -> Pumped {
    let body = match payload {
        Payload::Whole(bytes) => Body::full(bytes),
        Payload::Stream(stream) => Body::stream(stream),
        Payload::Upgraded(_) => {
            return Pumped::Broken(Failure::Upstream("it changed the protocol".to_owned()), None);
        }
    };
    let decoder = (!codings.is_empty()).then(|| DecodeGuard::new(codings, caps.decode));
    let mut inflow = Inflow {
        cas,
        flight,
        caps,
        upload: None,
        file: None,
        held: BytesMut::new(),
        len: 0,
        decoder,
        lost: None,
    };
    let moved = inflow.run(body, counters).await;
    if let Some(failure) = inflow.lost.take() {
        return match moved {
            Ok(()) => Pumped::Unstored(failure, inflow.len),
            Err(failure) => Pumped::Broken(failure, None),
        };
    }
    let (cas, upload, rest) = (cas.clone(), inflow.upload.take(), inflow.held.split());
    let worth = moved.is_ok() || inflow.len > 0 && inflow.decoder.is_none();
    let arrived = if worth {
        blocking(&cas.clone(), move || {
            let mut upload = upload.map_or_else(|| cas.upload(), Ok)?;
            upload.write(&rest)?;
            // What an origin has can be had again, so the disk is not waited for: what a power cut leaves of it is
            // found out when it is read.
            upload.finish(false)
        })
        .await
        .map(Some)
    } else {
        Ok(None)
    };
    match (moved, arrived) {
        (Ok(()), Ok(Some(arrived))) => Pumped::Whole(arrived),
        (Ok(()), Ok(None)) => Pumped::Broken(Failure::Store("nothing was written".to_owned()), None),
        (Ok(()), Err(failure)) => Pumped::Unstored(failure, inflow.len),
        (Err(failure), arrived) => Pumped::Broken(failure, arrived.ok().flatten()),
    }
}

struct Inflow<'a> {
    cas: &'a Arc<Cas>,
    flight: &'a Flight,
    caps: Caps,
    upload: Option<Upload>,
    file: Option<Arc<File>>,
    held: BytesMut,
    len: u64,
    decoder: Option<DecodeGuard>,
    /// Why the store does not take it. It goes on for those who read along.
    lost: Option<Failure>,
}

impl Inflow<'_> {
    async fn run(&mut self, mut body: Body, counters: &Counters) -> Result<(), Failure> {
        loop {
            let Some(frame) = self.next_frame(&mut body, counters).await? else { break };
            let Ok(data) = frame.into_data() else { continue };
            let data = match &mut self.decoder {
                None => data,
                Some(decoder) => {
                    let mut out = BytesMut::new();
                    decoder.push(&data, &mut |piece| out.extend_from_slice(piece)).map_err(|error| {
                        tracing::warn!(%error, "an origin's answer cannot be decoded");
                        match error {
                            DecodeError::Cap | DecodeError::Ratio => Failure::Decompress,
                            error => Failure::Upstream(error.to_string()),
                        }
                    })?;
                    out.freeze()
                }
            };
            self.len += data.len() as u64;
            if self.lost.is_none()
                && let Err(failure) = self.caps.check(self.cas, self.len)
            {
                self.lose(failure)?;
            }
            if self.lost.is_none() {
                self.held.extend_from_slice(&data);
            }
            self.flight.push(data);
            if self.len >= STRETCH as u64 {
                self.flight.announce();
            }
            if self.held.len() >= STRETCH
                && let Err(failure) = self.write().await
            {
                self.lose(failure)?;
            }
            if let Some(failure) = &self.lost {
                let relieved = self.flight.relieve(self.caps.keep);
                if tokio::time::timeout(self.caps.stall, relieved).await.is_err() {
                    return Err(failure.clone());
                }
            }
        }
        match &self.decoder {
            Some(decoder) => decoder.finish().map_err(|error| Failure::Upstream(error.to_string())),
            None => Ok(()),
        }
    }

    /// The next frame. An answer that does not come all at once is announced to those who wait for it.
    async fn next_frame(
        &self,
        body: &mut Body,
        counters: &Counters,
    ) -> Result<Option<Frame<Bytes>>, Failure> {
        let silent = || {
            counters.timeouts.inc();
            Failure::Upstream("it fell silent".to_owned())
        };
        let now = std::future::poll_fn(|cx| match Pin::new(&mut *body).poll_frame(cx) {
            Poll::Ready(frame) => Poll::Ready(Some(frame)),
            Poll::Pending => Poll::Ready(None),
        });
        let frame = match now.await {
            Some(frame) => frame,
            None => {
                self.flight.announce();
                tokio::time::timeout(self.caps.stall, body.frame()).await.map_err(|_late| silent())?
            }
        };
        frame.transpose().map_err(|error| match error {
            BodyError::ReadTimeout => silent(),
            error => Failure::Upstream(error.to_string()),
        })
    }

    /// Goes on without the store, if that is worth anything.
    fn lose(&mut self, failure: Failure) -> Result<(), Failure> {
        let bound = matches!(failure, Failure::TooLarge)
            || matches!(failure, Failure::Amnesia) && !self.caps.unstored;
        if bound {
            return Err(failure);
        }
        tracing::warn!(%failure, "what an origin sends is not stored");
        (self.held, self.upload) = (BytesMut::new(), None);
        self.lost = Some(failure);
        Ok(())
    }

    async fn write(&mut self) -> Result<(), Failure> {
        let (cas, upload, stretch) = (self.cas.clone(), self.upload.take(), self.held.split());
        let first = self.file.is_none();
        let (upload, file) = blocking(self.cas, move || {
            let mut upload = upload.map_or_else(|| cas.upload(), Ok)?;
            upload.write(&stretch)?;
            let file = if first { upload.reader()? } else { None };
            Ok((upload, file))
        })
        .await?;
        self.file = file.map(Arc::new).or(self.file.take());
        if let Some(file) = &self.file {
            self.flight.spill(file, upload.len, self.caps.keep);
        }
        self.upload = Some(upload);
        Ok(())
    }
}

async fn blocking<T: Send + 'static>(
    cas: &Arc<Cas>,
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| {
            let error = CasError::from(error);
            if matches!(error, CasError::Full) {
                cas.note_full();
            }
            error.into()
        }),
        Err(lost) => Err(Failure::Store(lost.to_string())),
    }
}
