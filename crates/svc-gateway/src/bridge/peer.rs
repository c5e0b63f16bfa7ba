//! Topics of another node: requests of clients become calls of the one task that keeps a session with it.
//!
//! Callers give it their calls in a bounded queue and wait under their own deadlines; a feed whose client is too slow
//! is ended, and no other notices.

use super::Topics;
use super::session::Link;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body::{Body as HttpBody, Frame as BodyFrame};
use oap::NodeId;
use ron_kernel::admission::deadline::Budget;
use ron_kernel::channel::{self, Receiver, Sender};
use ron_kernel::http::{Body, BodyError, WritePatience};
use ron_kernel::inventory::{ChannelKind, ChannelSpec, Policy};
use ron_kernel::kernel::Service;
use ron_kernel::problem::{CorrId, Rejection, event_stream, json_response};
use ron_kernel::reason::Reason;
use ron_kernel::sync::Limits;
use ron_transport::{Dialer, PeerAddress};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::oneshot;

pub(crate) static CALLS: ChannelSpec = ChannelSpec {
    service: "gateway",
    name: "bridge_calls",
    kind: ChannelKind::Mpsc,
    capacity: 256,
    policy: Policy::RejectNew,
    producers: &["conn"],
    consumers: &["bridge"],
};

/// Pieces of one feed that its client has not taken.
pub(crate) static FEED: ChannelSpec = ChannelSpec {
    service: "gateway",
    name: "bridge_feed",
    kind: ChannelKind::Mpsc,
    capacity: 256,
    policy: Policy::RejectNew,
    producers: &["bridge"],
    consumers: &["conn"],
};

/// The longest that a publication may wait, whatever its client says.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// How long a client may take nothing of a feed.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why a call came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// There is no session.
    Down,
    /// It ended, and what became of the call is not known.
    Lost,
    /// As many calls are under way as the peer takes.
    Busy,
    /// The peer said so.
    Status(u16, String),
}

/// What a call is answered with.
pub(super) enum Answered {
    Published(Bytes),
    Following(Receiver<Bytes>),
}

pub(super) type Answer = oneshot::Sender<Result<Answered, Refused>>;

/// A request of a client.
pub(super) struct Call {
    pub(super) corr: u64,
    pub(super) head: Bytes,
    /// None: it follows.
    pub(super) payload: Option<Bytes>,
    pub(super) until: Instant,
    pub(super) answer: Answer,
}

/// Shows the rows of the queues also where there is none.
pub(crate) fn declare(service: &Service) {
    for spec in [&CALLS, &FEED] {
        drop(channel::queue::<()>(service.inventory(), spec, Limits::items(spec.capacity), spec.policy));
    }
}

/// Begins to keep a session with a peer; the answer asks it.
pub(crate) fn start(service: &Service, dialer: Dialer, peer: PeerAddress, node: NodeId) -> Topics {
    let (calls, asked) =
        channel::queue(service.inventory(), &CALLS, Limits::items(CALLS.capacity), CALLS.policy);
    let link = Link::new(service, dialer, peer, node, asked);
    service.permanent("bridge", 0, move || link.clone().run());
    Arc::new(move |topic, request, corr| {
        let calls = calls.clone();
        Box::pin(async move { ask(&calls, topic, request, &corr).await })
    })
}

/// Puts a request to the peer and waits for what it says.
async fn ask(
    calls: &Sender<Call>,
    topic: String,
    mut request: Request<Body>,
    corr: &CorrId,
) -> Result<Response<Body>, Rejection> {
    let now = Instant::now();
    let unix = || {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
    };
    let budget = Budget::of(request.headers(), WAIT_MAX, now, unix)
        .map_err(|bad| Rejection::new(Reason::Malformed, bad.to_string()))?;
    let follow = request.method() == Method::GET;
    let payload = if follow {
        None
    } else {
        let read = request.body_mut().collect(usize::MAX).await;
        Some(read.map_err(|_broken| Rejection::new(Reason::Malformed, "the body could not be read"))?)
    };
    let mut head =
        json!({"do": if follow { "follow" } else { "publish" }, "topic": topic, "corr": corr.as_str()});
    if let Some(own) = budget.client {
        let left = own.saturating_duration_since(now).as_millis();
        head["timeout_ms"] = u64::try_from(left).unwrap_or(u64::MAX).into();
    }
    let (answer, answered) = oneshot::channel();
    let head = Bytes::from(format!("{head}\n"));
    let call = Call { corr: number_of(corr.as_str()), head, payload, until: budget.until, answer };
    if calls.try_send(call).is_err() {
        return Err(Rejection::new(Reason::Shed, "too many calls wait for the overlay peer").retry_after(1));
    }
    match answered.await.unwrap_or(Err(Refused::Lost)) {
        Ok(Answered::Published(text)) => {
            let said: Value = serde_json::from_slice(&text).unwrap_or_default();
            let id = said["id"].as_str().ok_or_else(|| refusal(&Refused::Status(500, String::new())))?;
            Ok(json_response(StatusCode::ACCEPTED, &json!({"id": id}), corr))
        }
        Ok(Answered::Following(pieces)) => {
            let feed = Feed { pieces: Some(pieces), waiting: None };
            Ok(event_stream(feed, WritePatience(PATIENCE), corr))
        }
        Err(refused) => Err(refusal(&refused)),
    }
}

/// The number that stands for a correlation id: itself if it is one, else of its hash. 0 is none.
fn number_of(corr: &str) -> u64 {
    let hash = || {
        let digest: [u8; 32] = Sha256::digest(corr).into();
        u64::from_be_bytes(digest[..8].try_into().expect("eight of thirty-two"))
    };
    corr.parse().unwrap_or_else(|_not_a_number| hash()).max(1)
}

/// What an HTTP client is told.
fn refusal(refused: &Refused) -> Rejection {
    let said = |reason, detail: &str, fallback: &'static str| {
        if detail.is_empty() {
            Rejection::new(reason, fallback)
        } else {
            Rejection::new(reason, detail.to_owned())
        }
    };
    match refused {
        Refused::Down => {
            Rejection::new(Reason::NoUpstream, "the overlay peer cannot be reached").retry_after(1)
        }
        Refused::Lost => Rejection::new(
            Reason::UpstreamError,
            "the connection to the overlay peer broke; whether the message was published is not known",
        ),
        Refused::Busy => {
            Rejection::new(Reason::Busy, "the overlay peer takes no more calls now").retry_after(1)
        }
        Refused::Status(400, detail) => {
            said(Reason::Malformed, detail, "the overlay peer could not read this")
        }
        Refused::Status(413, detail) => said(Reason::BodyCap, detail, "the message is larger than allowed"),
        Refused::Status(429, detail) => said(Reason::Busy, detail, "no peer has room for it").retry_after(1),
        Refused::Status(503, detail) => {
            said(Reason::NoUpstream, detail, "the overlay peer is shutting down").retry_after(1)
        }
        Refused::Status(504, detail) => said(Reason::Deadline, detail, "it was not done in time"),
        // What is wrong between this node and its peer is no fault of the client, nor its business.
        Refused::Status(..) => Rejection::new(Reason::UpstreamError, "the overlay peer refused"),
    }
}

type NextPiece = Pin<Box<dyn Future<Output = (Option<Bytes>, Receiver<Bytes>)> + Send>>;

/// A feed on its way to its client.
struct Feed {
    pieces: Option<Receiver<Bytes>>,
    waiting: Option<NextPiece>,
}

impl HttpBody for Feed {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<BodyFrame<Bytes>, BodyError>>> {
        if let Some(pieces) = self.pieces.take() {
            self.waiting = Some(Box::pin(async move { (pieces.recv().await, pieces) }));
        }
        let Some(waiting) = &mut self.waiting else { return Poll::Ready(None) };
        let (piece, pieces) = ready!(waiting.as_mut().poll(cx));
        self.waiting = None;
        let Some(piece) = piece else { return Poll::Ready(None) };
        self.pieces = Some(pieces);
        Poll::Ready(Some(Ok(BodyFrame::data(piece))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_correlation_id_has_a_number_which_is_never_none() {
        assert_eq!((number_of("77"), number_of("0")), (77, 1));
        let hashed = number_of("018f3a-request");
        assert!(hashed > 1 && hashed == number_of("018f3a-request") && hashed != number_of("another"));
    }

    #[test]
    fn what_a_peer_says_is_told_in_the_words_of_http() {
        let told = |refused| {
            let rejection = refusal(&refused);
            (rejection.reason.status(), rejection.reason.code())
        };
        let status = |code| told(Refused::Status(code, "why".to_owned()));
        assert_eq!(status(400), (400, "malformed"));
        assert_eq!([401, 403, 404, 409, 500].map(status), [(502, "upstream_error"); 5]);
        assert_eq!(status(413), (413, "body_cap"));
        assert_eq!(status(429), (429, "busy"));
        assert_eq!(status(503), (503, "no_upstream"));
        assert_eq!(status(504), (504, "deadline"));
        assert_eq!(
            (told(Refused::Down), told(Refused::Lost)),
            ((503, "no_upstream"), (502, "upstream_error"))
        );
        assert_eq!(told(Refused::Busy), (429, "busy"));
    }
}
