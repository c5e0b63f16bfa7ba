//! One request from its head to the last byte of its answer, for the access log.
//!
//! With the log off this is a few fields on the stack and no clock is read for it.

use super::plan::Seen;
use super::{Proxy, Snapshot, count_bytes};
use crate::access_log::{AccessLog, Head, Record};
use bytes::Bytes;
use http::header::HOST;
use http::{Request, Response, Version};
use http_body::{Body as HttpBody, Frame, SizeHint};
use ron_kernel::http::{Body, BodyError, ConnInfo, TurnedAway};
use ron_kernel::problem::CorrId;
use ron_kernel::reason::Reason;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant, SystemTime};

/// The status of a request whose client left before it was answered, as in the metrics.
const LEFT: u16 = 499;

/// What is found out about a request; dropped before its answer, it says that there was none.
pub(super) struct Watch {
    pub(super) seen: Seen,
    /// `None`: nobody wants to know.
    open: Option<Box<Open>>,
}

/// What a line will need.
struct Open {
    log: Arc<AccessLog>,
    snapshot: Arc<Snapshot>,
    head: Head,
    corr: CorrId,
    secure: bool,
    at: SystemTime,
    begun: Instant,
    bytes_in: Arc<AtomicU64>,
}

impl Watch {
    /// Begins to watch a request; its body is counted as it is read.
    pub(super) fn begin(
        log: &Arc<AccessLog>,
        snapshot: &Arc<Snapshot>,
        request: &mut Request<Body>,
        conn: &ConnInfo,
        corr: &CorrId,
        begun: Instant,
    ) -> Watch {
        let seen = Seen { client: conn.peer.ip(), ..Seen::default() };
        if !snapshot.settings.access_log.enabled {
            return Watch { seen, open: None };
        }
        let bytes_in = Arc::new(AtomicU64::new(0));
        if request.body().ready_len().is_none() {
            let body = std::mem::take(request.body_mut());
            *request.body_mut() = count_bytes(body, bytes_in.clone());
        }
        let head = Head {
            method: request.method().clone(),
            uri: request.uri().clone(),
            host: request.headers().get(HOST).cloned(),
            version: request.version(),
        };
        let open = Open {
            log: log.clone(),
            snapshot: snapshot.clone(),
            head,
            corr: corr.clone(),
            secure: conn.secure,
            at: SystemTime::now(),
            begun,
            bytes_in,
        };
        Watch { seen, open: Some(Box::new(open)) }
    }

    /// The answer is there; it is noted when its last byte has been handed over.
    pub(super) fn end(
        mut self,
        mut response: Response<Body>,
        reason: &'static str,
        now: Instant,
    ) -> Response<Body> {
        let Some(open) = self.open.take() else { return response };
        let answer = Answer { open, seen: self.seen, status: response.status().as_u16(), reason, at: now };
        match response.body().ready_len() {
            Some(length) => answer.note(length, true),
            None => {
                let body = std::mem::take(response.body_mut());
                let noted = |body| Noted { body, bytes: 0, complete: false, answer: Some(answer) };
                *response.body_mut() = body.wrapped(|body| Body::stream(noted(body)));
            }
        }
        response
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(open) = self.open.take() else { return };
        // Whoever drops the request has answered in its place, if there was somebody to answer.
        let (status, reason) = if std::thread::panicking() {
            (Reason::Internal.status(), Reason::Internal.code())
        } else if open.log.is_aborting() {
            (Reason::Draining.status(), Reason::Draining.code())
        } else {
            (LEFT, "")
        };
        Answer { open, seen: self.seen, status, reason, at: Instant::now() }.note(0, false);
    }
}

/// An answer on its way out.
struct Answer {
    open: Box<Open>,
    seen: Seen,
    status: u16,
    reason: &'static str,
    /// When its head was there.
    at: Instant,
}

impl Answer {
    fn note(self, bytes_out: u64, complete: bool) {
        let Answer { open, seen, status, reason, at } = self;
        let Open { log, snapshot, head, corr, secure, at: came, begun, bytes_in } = *open;
        let record = Record {
            at: came,
            corr,
            head: Some(head),
            seen,
            snapshot: snapshot.clone(),
            secure,
            status,
            reason,
            bytes_in: bytes_in.load(Ordering::Relaxed),
            bytes_out,
            queued: seen.admitted.unwrap_or(at).saturating_duration_since(begun),
            upstream: seen.admitted.map(|admitted| at.saturating_duration_since(admitted)),
            total: begun.elapsed(),
            complete,
        };
        log.note(&snapshot.settings.access_log, record);
    }
}

impl Proxy {
    /// Notes what was refused before it became a request.
    pub(super) fn note_refused(&self, refused: &TurnedAway<'_>) {
        let snapshot = self.snapshot.load_full();
        if !snapshot.settings.access_log.enabled {
            return;
        }
        let head = refused.request.map(|(method, uri)| Head {
            method: method.clone(),
            uri: uri.clone(),
            host: None,
            // HTTP/1.1 refuses only what it could not read.
            version: Version::HTTP_2,
        });
        let record = Record {
            at: SystemTime::now(),
            corr: refused.corr.clone(),
            head,
            seen: Seen { client: refused.conn.peer.ip(), ..Seen::default() },
            snapshot: snapshot.clone(),
            secure: refused.conn.secure,
            status: refused.reason.status(),
            reason: refused.reason.code(),
            bytes_in: 0,
            bytes_out: 0,
            queued: Duration::ZERO,
            upstream: None,
            total: Duration::ZERO,
            complete: true,
        };
        self.access_log.note(&snapshot.settings.access_log, record);
    }
}

/// A response body that is noted when it ends, however it ends.
struct Noted {
    body: Body,
    bytes: u64,
    complete: bool,
    answer: Option<Answer>,
}

impl HttpBody for Noted {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => {
                self.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
                // With the last piece of a known length nobody asks for the end.
                self.complete = self.body.exact_len() == Some(0);
            }
            Some(Err(_)) => self.complete = false,
            None => self.complete = true,
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take() {
            answer.note(self.bytes, self.complete);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access_log::Sink;
    use crate::auth::Auth;
    use crate::config::{AccessLogFormat, AccessLogSettings, GatewaySettings};
    use crate::proxy::{Material, UpstreamTls};
    use ron_kernel::http::Peer;
    use ron_kernel::kernel::Kernel;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[tokio::test]
    async fn a_request_whose_handler_panics_has_a_line_that_says_so() {
        let (dir, service) = (tempfile::tempdir().unwrap(), Kernel::new().service("gateway"));
        let access_log = AccessLogSettings {
            enabled: true,
            format: AccessLogFormat::Json,
            file: "access.log".into(),
            ..AccessLogSettings::default()
        };
        let settings = GatewaySettings { access_log, ..GatewaySettings::default() };
        let log = AccessLog::start(&service, Sink::open(&settings.access_log, dir.path()).unwrap());
        let material = Material { tls: UpstreamTls::default(), auth: Auth::None };
        let proxy = Proxy::new(&service, &settings, dir.path().into(), material, log, None);
        let snapshot = proxy.snapshot.load_full();
        let conn = ConnInfo::new(Peer::Unix { uid: 0 }, false);
        for panics in [true, false] {
            let left = catch_unwind(AssertUnwindSafe(|| {
                let mut request = Request::new(Body::default());
                let (corr, now) = (CorrId::new(), Instant::now());
                let _watch = Watch::begin(&proxy.access_log, &snapshot, &mut request, &conn, &corr, now);
                assert!(!panics, "as a handler might");
            }));
            assert_eq!(left.is_err(), panics);
        }
        let path = dir.path().join("access.log");
        let text = tokio::time::timeout(Duration::from_secs(10), async {
            loop {
                match std::fs::read_to_string(&path) {
                    Ok(text) if text.lines().count() == 2 => return text,
                    _ => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            }
        });
        let text = text.await.unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains("\"status\":500,\"reason\":\"internal\""), "{text}");
        assert!(lines[1].contains("\"status\":499,\"reason\":null"), "who leaves is told apart: {text}");
    }
}
