//! A request body that is decoded on its way to the upstream, under the guard.

use bytes::{Bytes, BytesMut};
use http_body::{Body as HttpBody, Frame};
use ron_kernel::admission::decode::{Coding, DecodeGuard, DecodeLimits};
use ron_kernel::http::{Body, BodyError};
use ron_kernel::sync::Permit;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

/// Decodes piece by piece; nothing waits longer than the piece it came in.
pub(crate) struct Decoded {
    body: Body,
    guard: DecodeGuard,
    ended: bool,
    _permit: Permit,
}

impl Decoded {
    pub(crate) fn new(body: Body, codings: &[Coding], limits: DecodeLimits, permit: Permit) -> Decoded {
        Decoded { body, guard: DecodeGuard::new(codings, limits), ended: false, _permit: permit }
    }
}

impl HttpBody for Decoded {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        loop {
            let Some(frame) = ready!(Pin::new(&mut self.body).poll_frame(cx)) else {
                self.ended = true;
                return Poll::Ready(self.guard.finish().err().map(|error| Err(error.into())));
            };
            let Ok(data) = frame?.into_data() else { continue };
            let mut out = BytesMut::new();
            if let Err(error) = self.guard.push(&data, &mut |piece| out.extend_from_slice(piece)) {
                self.ended = true;
                return Poll::Ready(Some(Err(error.into())));
            }
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(out.freeze()))));
            }
        }
    }
}
