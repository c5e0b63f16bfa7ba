//! Requests over a session: a client that takes no part in the gossip publishes and follows topics through this node.
//!
//! The reader owns it and polls it: what is asked comes from frames, what is answered leaves as frames, and nothing is
//! taken from an answer for which the writer has no room.

use crate::handle::Handle;
use crate::shared::Shared;
use bytes::{Bytes, BytesMut};
use http::{Method, Request};
use http_body::Body as _;
use oap::error::problem;
use oap::frame::{APP_SERVICES, CHUNK, Flags, Frame, HEADER, Kind, STATUSES};
use oap::session::Place;
use ron_kernel::admin::Answering;
use ron_kernel::admission::deadline::REQUEST_TIMEOUT;
use ron_kernel::http::Body;
use ron_kernel::problem::{CorrId, Rejection, X_CORR_ID};
use ron_kernel::reason::Reason;
use serde_json::Value;
use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Requests of one session that are coming or being answered.
const REQUESTS_MAX: usize = 256;
/// The longest first line of a request.
const HEAD_MAX: usize = 1024;
/// Frames that wait for the writer before more is taken from answers.
pub(crate) const UNWRITTEN_MAX: usize = 16;

/// The requests of one session.
pub(crate) struct Services {
    shared: Arc<Shared>,
    coming: BTreeMap<u64, Coming>,
    /// Bytes of the bodies that are coming.
    bytes: usize,
    served: Vec<Served>,
    /// Which answer is looked at first, so that each has its turn.
    turn: usize,
}

/// A message of which more follows.
struct Coming {
    head: Head,
    body: BytesMut,
}

/// The first line of a request.
struct Head {
    follow: bool,
    topic: String,
    /// How long the client waits, if it says.
    timeout_ms: Option<u64>,
    corr: Option<String>,
}

struct Served {
    corr: u64,
    begun: bool,
    step: Step,
}

enum Step {
    Asked(Answering),
    /// An answer, and what of its last piece has not been sent.
    Answer(Body, Bytes),
}

impl Services {
    pub(crate) fn new(shared: &Arc<Shared>) -> Services {
        let shared = shared.clone();
        Services { shared, coming: BTreeMap::new(), bytes: 0, served: Vec::new(), turn: 0 }
    }

    /// Takes a frame in; what it gives back is to be sent at once.
    pub(crate) fn take(&mut self, frame: Frame, place: Place) -> Option<Frame> {
        if frame.flags.kind() != Some(Kind::Request) {
            return None;
        }
        let corr = frame.corr;
        let taken = match place {
            Place::Whole | Place::First => self.begin(frame, place == Place::First),
            Place::Middle | Place::Last => match self.served.iter().position(|served| served.corr == corr) {
                // Whoever followed a topic has heard enough.
                Some(index) => {
                    let Served { begun, .. } = self.served.swap_remove(index);
                    let flags = if begun { Flags::RESP | Flags::END } else { Flags::RESP };
                    return Some(Frame { flags, ..Frame::response(APP_SERVICES, corr, 200, "") });
                }
                None => self.go_on(frame, place == Place::Last),
            },
        };
        taken.err().map(|rejection| {
            self.forget(corr);
            self.refused(corr, &rejection)
        })
    }

    /// A message that will never be whole.
    pub(crate) fn forget(&mut self, corr: u64) {
        if let Some(coming) = self.coming.remove(&corr) {
            self.bytes -= coming.body.len();
        }
        self.served.retain(|served| served.corr != corr);
    }

    fn begin(&mut self, frame: Frame, more: bool) -> Result<(), Rejection> {
        if self.coming.len() + self.served.len() >= REQUESTS_MAX {
            return Err(Rejection::new(Reason::Busy, "too many requests of this session are under way"));
        }
        let (head, body) = Head::parse(&frame.payload)
            .ok_or_else(|| Rejection::new(Reason::Malformed, "the request does not say what it wants"))?;
        if !more || head.follow {
            self.serve(frame.corr, head, body);
            return Ok(());
        }
        self.room_for(0, body.len())?;
        self.bytes += body.len();
        self.coming.insert(frame.corr, Coming { head, body: BytesMut::from(&body[..]) });
        Ok(())
    }

    fn go_on(&mut self, frame: Frame, last: bool) -> Result<(), Rejection> {
        let Some(before) = self.coming.get(&frame.corr).map(|coming| coming.body.len()) else {
            return Ok(());
        };
        self.room_for(before, frame.payload.len())?;
        self.bytes += frame.payload.len();
        if let Some(coming) = self.coming.get_mut(&frame.corr) {
            coming.body.extend_from_slice(&frame.payload);
        }
        if last && let Some(Coming { head, body }) = self.coming.remove(&frame.corr) {
            self.bytes -= body.len();
            self.serve(frame.corr, head, body.freeze());
        }
        Ok(())
    }

    /// What comes in pieces is held to the size of one message, also all of it together.
    fn room_for(&self, before: usize, more: usize) -> Result<(), Rejection> {
        let max = self.shared.settings.load().gossip.max_message_bytes.usize();
        if before + more > max {
            return Err(Rejection::new(Reason::BodyCap, format!("a message may have at most {max} bytes")));
        }
        if self.bytes + more > max {
            return Err(Rejection::new(Reason::Busy, "other messages of this session are still coming"));
        }
        Ok(())
    }

    fn serve(&mut self, corr: u64, head: Head, body: Bytes) {
        let id = head.corr.and_then(|text| text.parse().ok());
        let id = CorrId::of(id.as_ref());
        let mut request = Request::new(Body::full(body));
        *request.method_mut() = if head.follow { Method::GET } else { Method::POST };
        if let Some(value) = head.timeout_ms.and_then(|millis| format!("{millis}ms").parse().ok()) {
            request.headers_mut().insert(REQUEST_TIMEOUT, value);
        }
        tracing::debug!(corr, corr_id = id.as_str(), topic = head.topic, "a request over a session");
        request.headers_mut().insert(X_CORR_ID, id.value().clone());
        let asked = Handle::of(&self.shared).bridged(head.topic, request, id);
        self.served.push(Served { corr, begun: false, step: Step::Asked(asked) });
    }

    fn refused(&self, corr: u64, rejection: &Rejection) -> Frame {
        self.shared.reject(rejection.reason);
        let status = status_of(rejection.reason.status());
        let body = problem(status, rejection.reason.code(), &rejection.detail);
        Frame::response(APP_SERVICES, corr, status, body)
    }

    /// The next frame of an answer, if there is one, of at most so many bytes.
    pub(crate) fn poll_next(&mut self, max_frame: u32, cx: &mut Context<'_>) -> Poll<Frame> {
        let most = CHUNK.min(max_frame as usize - HEADER);
        for step in 0..self.served.len() {
            let index = (self.turn + step) % self.served.len();
            let Poll::Ready((frame, over)) = self.poll_one(index, most, cx) else { continue };
            if over {
                self.served.swap_remove(index);
            }
            self.turn = index + 1;
            return Poll::Ready(frame);
        }
        Poll::Pending
    }

    /// A frame of one answer, and whether it is the last.
    fn poll_one(&mut self, index: usize, most: usize, cx: &mut Context<'_>) -> Poll<(Frame, bool)> {
        let served = &mut self.served[index];
        let corr = served.corr;
        if let Step::Asked(asked) = &mut served.step {
            let Poll::Ready(answered) = asked.as_mut().poll(cx) else { return Poll::Pending };
            match answered {
                Ok(response) => served.step = Step::Answer(response.into_body(), Bytes::new()),
                Err(rejection) => return Poll::Ready((self.refused(corr, &rejection), true)),
            }
        }
        let Step::Answer(body, rest) = &mut served.step else { return Poll::Pending };
        while rest.is_empty() {
            match Pin::new(&mut *body).poll_frame(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(frame))) => *rest = frame.into_data().unwrap_or_default(),
                Poll::Ready(Some(Err(_broken))) => {
                    let body = problem(500, "internal", "the answer broke off");
                    return Poll::Ready((Frame::response(APP_SERVICES, corr, 500, body), true));
                }
                Poll::Ready(None) => {
                    let flags = if served.begun { Flags::RESP | Flags::END } else { Flags::RESP };
                    let frame = Frame { flags, ..Frame::response(APP_SERVICES, corr, 200, "") };
                    return Poll::Ready((frame, true));
                }
            }
        }
        let piece = rest.split_to(rest.len().min(most));
        let flags = if served.begun { Flags::RESP } else { Flags::RESP | Flags::START };
        served.begun = true;
        Poll::Ready((Frame { flags, ..Frame::response(APP_SERVICES, corr, 200, piece) }, false))
    }
}

impl std::fmt::Debug for Services {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Services({} coming, {} served)", self.coming.len(), self.served.len())
    }
}

impl Head {
    /// A line of JSON, and what follows it.
    fn parse(payload: &Bytes) -> Option<(Head, Bytes)> {
        let end = payload.iter().take(HEAD_MAX + 1).position(|byte| *byte == b'\n')?;
        let object: Value = serde_json::from_slice(&payload[..end]).ok()?;
        let follow = match object["do"].as_str()? {
            "publish" => false,
            "follow" => true,
            _ => return None,
        };
        let head = Head {
            follow,
            topic: object["topic"].as_str()?.to_owned(),
            timeout_ms: object["timeout_ms"].as_u64(),
            corr: object["corr"].as_str().map(str::to_owned),
        };
        Some((head, payload.slice(end + 1..)))
    }
}

/// The nearest status that a frame can carry.
fn status_of(http: u16) -> u16 {
    match http {
        known if STATUSES.contains(&known) => known,
        408 => 504,
        500.. => 503,
        _ => 400,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_a_line_and_the_rest_is_the_message() {
        let text =
            Bytes::from_static(b"{\"do\":\"publish\",\"topic\":\"a/b\",\"timeout_ms\":7,\"x\":1}\nbody\n");
        let (head, body) = Head::parse(&text).unwrap();
        assert_eq!((head.follow, &*head.topic, head.timeout_ms, head.corr), (false, "a/b", Some(7), None));
        assert_eq!(body, "body\n");
        let long = format!("{{\"do\":\"follow\",\"topic\":\"{}\"}}\n", "a".repeat(HEAD_MAX));
        for bad in [
            "",
            "\n",
            "{}\n",
            "{\"do\":\"eat\",\"topic\":\"a\"}\n",
            "{\"do\":\"follow\",\"topic\":\"a\"}",
            &long,
        ] {
            assert!(Head::parse(&Bytes::from(bad.to_owned())).is_none(), "{bad:?}");
        }
    }

    #[test]
    fn every_refusal_has_a_status_that_a_frame_can_carry() {
        for reason in Reason::ALL {
            let status = status_of(reason.status());
            assert!(STATUSES.contains(&status) && status >= 400, "{}", reason.code());
        }
        assert_eq!([405, 408, 413, 429, 502, 507].map(status_of), [400, 504, 413, 429, 503, 503]);
    }
}
