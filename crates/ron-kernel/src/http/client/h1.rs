//! One HTTP/1.1 connection to a server.

use super::{Answer, CallError, CallLimits, Outgoing, Payload, Remote, ResponseBody, Source};
use crate::http::body::{Body, BodyError};
use crate::http::fields::Fields;
use crate::http::h1::chunked::BadChunk;
use crate::http::h1::conn::poll_read_exact;
use crate::http::h1::decoder::{BodyDecoder, Decoded};
use crate::http::h1::head::{Framing, HeadLimits, HeadReader, ResponseHead};
use crate::http::io::Io;
use bytes::{Bytes, BytesMut};
use http::{HeaderName, StatusCode};
use http_body::{Body as _, Frame, SizeHint};
use std::io::IoSlice;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A server is trusted more than a client, but not without bound.
const HEAD_LIMITS: HeadLimits = HeadLimits { headers_max: 256, bytes_max: 128 << 10 };

#[derive(Debug)]
pub(super) struct ClientConn {
    io: Io,
    buffer: BytesMut,
    reused: bool,
    /// The rules of TLS that it was made under.
    pub(super) tls_version: usize,
}

impl ClientConn {
    pub(super) fn new(io: Io, tls_version: usize) -> ClientConn {
        ClientConn { io, buffer: BytesMut::new(), reused: false, tls_version }
    }

    /// Whether the server has neither closed the connection nor sent anything unasked.
    pub(super) fn is_quiet(&mut self) -> bool {
        let mut byte = [0];
        let mut cx = Context::from_waker(Waker::noop());
        Pin::new(&mut self.io).poll_read(&mut cx, &mut ReadBuf::new(&mut byte)).is_pending()
    }

    /// Sends the request and waits for the head of the answer; the upload goes on meanwhile.
    pub(super) async fn exchange(
        mut self,
        head: &dyn Outgoing,
        body: &mut Option<Body>,
        limits: CallLimits,
        remote: &Arc<Remote>,
    ) -> Result<Answer, CallError> {
        let mut upload = Upload::new(head, body.take().unwrap_or_default());
        let received = self.answer_head(head, &mut upload).await;
        let headless = received.is_err();
        let answered = match received {
            Ok(answered) => {
                let mut decoder = BodyDecoder::new(answered.framing);
                match self.first_piece(&mut decoder).await {
                    Ok(first) => Ok((answered, decoder, first)),
                    Err(error) => Err(error),
                }
            }
            Err(error) => Err(error),
        };
        match answered {
            Ok((answered, _, _)) if answered.status == StatusCode::SWITCHING_PROTOCOLS => {
                let (mut io, ahead) = (self.io, self.buffer.freeze());
                io.unread(ahead);
                let payload = Payload::Upgraded(io);
                let ResponseHead { status, version, fields, .. } = answered;
                Ok(Answer { status, version, fields: Fields::Lines(fields), payload })
            }
            Ok((answered, decoder, first)) => {
                Ok(self.answer(answered, decoder, first, upload, limits, remote))
            }
            Err(error) => {
                let idempotent = head.method().is_idempotent();
                let stale = headless
                    && matches!(error, CallError::Broken(_))
                    && self.reused
                    && self.buffer.is_empty();
                // Nothing of the body was taken: the next connection can have it whole.
                if !upload.body_begun {
                    *body = Some(upload.body);
                }
                Err(if stale && idempotent && body.is_some() { CallError::Stale } else { error })
            }
        }
    }

    async fn answer_head(
        &mut self,
        head: &dyn Outgoing,
        upload: &mut Upload,
    ) -> Result<ResponseHead, CallError> {
        let mut reader = HeadReader::default();
        std::future::poll_fn(|cx| {
            let upload_failed = match upload.poll(&mut self.io, cx) {
                Poll::Ready(Err(error)) => Some(error),
                Poll::Ready(Ok(())) | Poll::Pending => None,
            };
            loop {
                match reader.response(&mut self.buffer, HEAD_LIMITS, head.method()) {
                    Ok(Some(answered)) if answered.status == StatusCode::SWITCHING_PROTOCOLS => {
                        let unasked = || CallError::Malformed("it switches protocols unasked".to_owned());
                        return Poll::Ready(if head.upgrades() { Ok(answered) } else { Err(unasked()) });
                    }
                    Ok(Some(answered)) if answered.status.is_informational() => {
                        head.interim(answered.status, answered.fields.to_map());
                        continue;
                    }
                    Ok(Some(answered)) => return Poll::Ready(Ok(answered)),
                    Ok(None) => {}
                    Err(error) => return Poll::Ready(Err(CallError::Malformed(error.to_string()))),
                }
                match poll_read_exact(&mut self.io, &mut self.buffer, cx) {
                    Poll::Ready(Ok(read)) if read > 0 => {}
                    Poll::Ready(ended) => {
                        let reason =
                            ended.map_or_else(|error| error.to_string(), |_| "it was closed".to_owned());
                        return Poll::Ready(Err(CallError::Broken(reason)));
                    }
                    // A server may refuse an upload and say why: its answer counts more than the broken pipe.
                    Poll::Pending => {
                        return upload_failed.map_or(Poll::Pending, |error| Poll::Ready(Err(error)));
                    }
                }
            }
        })
        .await
    }

    /// What has already come of the body, if anything. A body that is broken from the start is a failed call:
    /// nothing has been sent to the client yet, so it can still be told.
    async fn first_piece(&mut self, decoder: &mut BodyDecoder) -> Result<Option<Decoded>, CallError> {
        std::future::poll_fn(|cx| {
            let malformed = |bad: BadChunk| CallError::Malformed(bad.0.to_owned());
            match decoder.decode(&mut self.buffer).map_err(malformed)? {
                Decoded::More => {}
                decoded => return Poll::Ready(Ok(Some(decoded))),
            }
            match poll_read_exact(&mut self.io, &mut self.buffer, cx) {
                Poll::Pending => Poll::Ready(Ok(None)),
                Poll::Ready(Ok(read)) if read > 0 => {
                    match decoder.decode(&mut self.buffer).map_err(malformed)? {
                        Decoded::More => Poll::Ready(Ok(None)),
                        decoded => Poll::Ready(Ok(Some(decoded))),
                    }
                }
                Poll::Ready(Ok(_)) if decoder.end_of_input() => Poll::Ready(Ok(None)),
                Poll::Ready(_) => Poll::Ready(Err(CallError::Broken("it ended after its head".to_owned()))),
            }
        })
        .await
    }

    fn answer(
        mut self,
        head: ResponseHead,
        decoder: BodyDecoder,
        first: Option<Decoded>,
        upload: Upload,
        limits: CallLimits,
        remote: &Arc<Remote>,
    ) -> Answer {
        let keep = head.keep_alive && upload.done;
        // A short body that came with its head needs no stream, and its connection is free at once.
        let payload = if let Framing::Length(length) = head.framing
            && keep
            && decoder.is_done()
            && self.buffer.is_empty()
        {
            let bytes = match first {
                Some(Decoded::Data(bytes)) => bytes,
                _ => Bytes::new(),
            };
            debug_assert_eq!(bytes.len() as u64, length);
            self.reused = true;
            remote.keep(self);
            Payload::Whole(bytes)
        } else {
            let download = Download {
                conn: Some(self),
                decoder,
                first,
                upload,
                keep_alive: head.keep_alive,
                hangs_up: head.waits_for_us,
                remote: remote.clone(),
            };
            Payload::Stream(ResponseBody::new(Source::Http1(Box::new(download)), limits.silence))
        };
        Answer { status: head.status, version: head.version, fields: Fields::Lines(head.fields), payload }
    }
}

/// The request on its way out.
#[derive(Debug)]
struct Upload {
    out: BytesMut,
    data: Bytes,
    body: Body,
    chunked: bool,
    may_trail: fn(&HeaderName) -> bool,
    done: bool,
    body_begun: bool,
}

impl Upload {
    fn new(head: &dyn Outgoing, body: Body) -> Upload {
        let mut out = BytesMut::with_capacity(1024);
        head.write_http1(&mut out);
        Upload {
            out,
            data: Bytes::new(),
            body,
            chunked: head.chunked(),
            may_trail: head.trailers(),
            done: false,
            body_begun: false,
        }
    }

    /// Writes on; ready when the whole request is out.
    fn poll(&mut self, io: &mut Io, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        let broken = |error: std::io::Error| CallError::Broken(error.to_string());
        while !self.done {
            while !self.out.is_empty() || !self.data.is_empty() {
                let slices = [IoSlice::new(&self.out), IoSlice::new(&self.data)];
                let written = ready!(Pin::new(&mut *io).poll_write_vectored(cx, &slices)).map_err(broken)?;
                if written == 0 {
                    return Poll::Ready(Err(CallError::Broken("it takes no more bytes".to_owned())));
                }
                let from_out = written.min(self.out.len());
                let _ = self.out.split_to(from_out);
                let _ = self.data.split_to(written - from_out);
            }
            let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else {
                // What a TLS layer below has not sent yet goes out before anything is waited for.
                let _ = Pin::new(&mut *io).poll_flush(cx).map_err(broken)?;
                return Poll::Pending;
            };
            match frame {
                Some(Ok(frame)) => self.push(frame),
                Some(Err(error)) => return Poll::Ready(Err(CallError::RequestBody(error))),
                None => {
                    if std::mem::take(&mut self.chunked) {
                        self.out.extend_from_slice(if self.body_begun {
                            b"\r\n0\r\n\r\n"
                        } else {
                            b"0\r\n\r\n"
                        });
                        continue;
                    }
                    ready!(Pin::new(&mut *io).poll_flush(cx)).map_err(broken)?;
                    self.done = true;
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    fn push(&mut self, frame: Frame<Bytes>) {
        match frame.into_data() {
            Ok(data) if data.is_empty() => {}
            Ok(data) => {
                if self.chunked {
                    let line_end = if self.body_begun { "\r\n" } else { "" };
                    self.out.extend_from_slice(format!("{line_end}{:x}\r\n", data.len()).as_bytes());
                }
                self.body_begun = true;
                self.data = data;
            }
            Err(frame) => {
                let Ok(trailers) = frame.into_trailers() else { return };
                if std::mem::take(&mut self.chunked) {
                    self.out.extend_from_slice(if self.body_begun { b"\r\n0\r\n" } else { b"0\r\n" });
                    for (name, value) in trailers.iter().filter(|(name, _)| (self.may_trail)(name)) {
                        self.out.extend_from_slice(name.as_str().as_bytes());
                        self.out.extend_from_slice(b": ");
                        self.out.extend_from_slice(value.as_bytes());
                        self.out.extend_from_slice(b"\r\n");
                    }
                    self.out.extend_from_slice(b"\r\n");
                }
            }
        }
    }
}

/// A response body as it streams; its connection is kept when it ends well.
#[derive(Debug)]
pub(super) struct Download {
    conn: Option<ClientConn>,
    decoder: BodyDecoder,
    /// What came with the head.
    first: Option<Decoded>,
    upload: Upload,
    keep_alive: bool,
    /// The server is told that nothing more will be asked, so that it ends the body.
    hangs_up: bool,
    remote: Arc<Remote>,
}

impl Download {
    fn end(&mut self) {
        if let Some(mut conn) = self.conn.take()
            && self.keep_alive
            && self.upload.done
            && conn.buffer.is_empty()
        {
            conn.reused = true;
            self.remote.keep(conn);
        }
    }

    pub(super) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some(conn) = &mut self.conn else { return Poll::Ready(None) };
        if !self.upload.done
            && let Poll::Ready(Err(error)) = self.upload.poll(&mut conn.io, cx)
        {
            // The server answered and takes no more: its answer still counts, its connection does not.
            tracing::debug!(%error, "upload given up");
            (self.upload.done, self.keep_alive) = (true, false);
        }
        if self.hangs_up && self.upload.done && Pin::new(&mut conn.io).poll_shutdown(cx).is_ready() {
            self.hangs_up = false;
        }
        loop {
            let decoded = match self.first.take() {
                Some(first) => Ok(first),
                None => self.decoder.decode(&mut conn.buffer),
            };
            match decoded {
                Ok(Decoded::Data(data)) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                Ok(Decoded::Trailers(trailers)) => return Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
                Ok(Decoded::End) => {
                    self.end();
                    return Poll::Ready(None);
                }
                Ok(Decoded::More) => {}
                Err(bad) => return Poll::Ready(Some(Err(BodyError::Malformed(bad.0)))),
            }
            conn.buffer.reserve(self.decoder.wanted());
            match ready!(tokio_util::io::poll_read_buf(Pin::new(&mut conn.io), cx, &mut conn.buffer)) {
                Ok(read) if read > 0 => {}
                Ok(_) if self.decoder.end_of_input() => self.keep_alive = false,
                // Cut short, or reset: never to be taken for a whole answer.
                _ => {
                    self.conn = None;
                    return Poll::Ready(Some(Err(BodyError::Upstream("it ended in the middle".to_owned()))));
                }
            }
        }
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        let ahead = if let Some(Decoded::Data(data)) = &self.first { data.len() as u64 } else { 0 };
        self.decoder.left().map_or_else(SizeHint::default, |left| SizeHint::with_exact(left + ahead))
    }
}
