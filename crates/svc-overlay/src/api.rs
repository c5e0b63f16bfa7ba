//! The overlay over HTTP, on the admin plane and through the gateway: publish, follow, look at peers.

use crate::handle::{Handle, Next, PublishError, SubscribeError, Subscription};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body::{Body as HttpBody, Frame};
use oap::gossip::{Delivery, MessageId, Published, Topic};
use oap::session::Role;
use ron_kernel::admin::Answering;
use ron_kernel::admission::deadline::Budget;
use ron_kernel::http::{Body, BodyError, WritePatience};
use ron_kernel::problem::{CorrId, Rejection, event_stream, json_response};
use ron_kernel::reason::Reason;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

/// Where the overlay's part of the admin plane begins.
pub(crate) const PREFIX: &str = "/overlay/";
const TOPICS: &str = "/overlay/topics/";
/// Silence after which a stream shows a sign of life.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// How long a subscriber may take nothing.
const PATIENCE: Duration = Duration::from_secs(10);
/// What a body with a message in each line is.
const NDJSON: &str = "application/x-ndjson";
/// Messages of one request: the engine does nothing else while it publishes them.
const MESSAGES_MAX: usize = 128;
/// Messages that wait together are sent together, until they have so many bytes.
const PIECE: usize = 64 << 10;
/// The longest that a publisher may wait for room.
const WAIT_MAX: Duration = Duration::from_secs(60);

impl Handle {
    pub(crate) async fn answer(
        self,
        request: Request<Body>,
        corr: CorrId,
    ) -> Result<Response<Body>, Rejection> {
        let path = request.uri().path().to_owned();
        let read = matches!(*request.method(), Method::GET | Method::HEAD);
        if path == "/overlay/peers" {
            return if read { self.list(&corr).await } else { Err(other_method("GET")) };
        }
        let Some(name) = path.strip_prefix(TOPICS) else {
            return Err(Rejection::new(Reason::NotFound, "see /overlay/peers and /overlay/topics/{topic}"));
        };
        self.topic(name, request, &corr, Form::Operator).await
    }

    /// The same for users of the bridge: a topic is all that they may ask for.
    pub fn bridged(self, topic: String, request: Request<Body>, corr: CorrId) -> Answering {
        Box::pin(async move { self.topic(&topic, request, &corr, Form::Bridge).await })
    }

    async fn topic(
        &self,
        name: &str,
        request: Request<Body>,
        corr: &CorrId,
        form: Form,
    ) -> Result<Response<Body>, Rejection> {
        let topic = Topic::parse(name).ok_or_else(|| {
            Rejection::new(
                Reason::Malformed,
                "a topic is 1 to 128 of a-z, 0-9, dot, underscore, slash and dash",
            )
        })?;
        match *request.method() {
            Method::POST => self.post(&topic, request, corr, form).await,
            Method::GET => self.stream(&topic, corr, form),
            _ => Err(other_method("GET, POST")),
        }
    }

    async fn post(
        &self,
        topic: &Topic,
        mut request: Request<Body>,
        corr: &CorrId,
        form: Form,
    ) -> Result<Response<Body>, Rejection> {
        let now = Instant::now();
        let unix = || self.shared.engine_now().unix_ms;
        let budget = Budget::of(request.headers(), WAIT_MAX, now, unix)
            .map_err(|bad| Rejection::new(Reason::Malformed, bad.to_string()))?;
        let max = self.shared.settings.load().gossip.max_message_bytes.usize();
        let payload = request.body_mut().collect(max).await.map_err(|error| match error {
            BodyError::TooLarge => {
                Rejection::new(Reason::BodyCap, format!("a message may have at most {max} bytes"))
            }
            BodyError::ReadTimeout => Rejection::new(Reason::ReadTimeout, "the body did not arrive in time"),
            _ => Rejection::new(Reason::Malformed, "the body could not be read"),
        })?;
        // Who states no deadline does not wait for room.
        let deadline = budget.client.map_or(now, |asked| asked.min(budget.until)).into();
        // A bridge to another node hands on the message alone, so that none has this.
        let several = request.headers().get(CONTENT_TYPE).is_some_and(|kind| kind == NDJSON);
        if !several || form == Form::Bridge {
            let published = self.publish(topic, payload, deadline).await.map_err(rejection)?;
            return Ok(json_response(StatusCode::ACCEPTED, &Told::of(published, form), corr));
        }
        let payloads = lines(&payload)?;
        let done = self.publish_all(topic, &payloads, deadline).await;
        let accepted = done.iter().filter(|one| one.is_ok()).count();
        if let Some(error) = done.iter().find_map(|one| one.err()).filter(|_| accepted == 0) {
            return Err(rejection(error));
        }
        let of_each = |one: Result<Published, PublishError>| match one {
            Ok(published) => Told::of(published, form),
            Err(error) => Told { error: Some(rejection(error).reason.code()), ..Told::default() },
        };
        let messages = done.into_iter().map(of_each).collect();
        Ok(json_response(StatusCode::ACCEPTED, &ToldOfAll { accepted, messages }, corr))
    }

    fn stream(&self, topic: &Topic, corr: &CorrId, form: Form) -> Result<Response<Body>, Rejection> {
        let subscription = self.subscribe(topic).map_err(|error| match error {
            SubscribeError::Busy => Rejection::new(Reason::Busy, error.to_string()),
            SubscribeError::Canceled => Rejection::new(Reason::Draining, error.to_string()),
        })?;
        // The first piece says that whatever is published from now on will come.
        let first = Some(Bytes::from_static(b": following\n\n"));
        let events = Deliveries { first, rest: Some(subscription), waiting: None, form };
        Ok(event_stream(events, WritePatience(PATIENCE), corr))
    }

    async fn list(&self, corr: &CorrId) -> Result<Response<Body>, Rejection> {
        let known = self.known().await;
        let known = known.ok_or_else(|| Rejection::new(Reason::Timeout, "the engine did not answer"))?;
        let (shared, now) = (&self.shared, self.shared.now());
        let settings = shared.settings.load();
        let listed: Vec<_> = settings.listed().collect();
        let index = shared.index.lock();
        let mut peers = Vec::new();
        for info in &known.peers {
            let Some(link) = index.links.get(&info.peer) else { continue };
            let since = link.opened.get().map_or(now, |opened| opened.since);
            peers.push(json!({
                "node": info.node.to_string(),
                "address": link.at,
                "state": "open",
                "direction": if link.role == Role::Dialer { "out" } else { "in" },
                "listed": listed.iter().any(|peer| peer.node == info.node),
                "ua": link.agreed.get().map(|agreed| agreed.ua.clone()),
                "tls": link.proved.is_some(),
                "post_quantum": link.proved.map_or(Some(false), |proved| proved.post_quantum),
                "crc32c": link.is_checked(),
                "raw_key": link.proved.is_some_and(|proved| proved.raw),
                "score": info.score,
                "rtt_us": u64::try_from(info.rtt.as_micros()).unwrap_or(u64::MAX),
                "eager_topics": info.eager,
                "follows": info.follows,
                "queued_frames": info.queued_frames,
                "queued_bytes": info.queued_bytes,
                "open_seconds": now.saturating_sub(since).as_secs(),
            }));
        }
        for peer in
            listed.iter().filter(|peer| !index.nodes.contains_key(&peer.node) && peer.node != shared.node)
        {
            let dial = index.dials.get(&peer.node);
            let state = if dial.is_some_and(|dial| dial.busy) { "dialling" } else { "waiting" };
            let error = dial.and_then(|dial| dial.error.clone());
            let failures = dial.map_or(0, |dial| dial.backoff.failures());
            peers.push(json!({
                "node": peer.node.to_string(), "address": peer.at.to_string(), "state": state, "listed": true,
                "error": error, "failures": failures,
            }));
        }
        drop(index);
        let greylisted = known.greylisted.iter().map(|(node, left, offence)| {
            json!({"node": node.to_string(), "seconds": left.as_secs(), "offence": offence.name()})
        });
        let greylisted: Vec<Value> = greylisted.collect();
        let address = if settings.advertise.is_empty() { &*self.listen } else { &settings.advertise };
        let own = json!({"node": shared.node.to_string(), "address": address});
        let body = json!({"self": own, "peers": peers, "greylisted": greylisted});
        Ok(json_response(StatusCode::OK, &body, corr))
    }
}

/// What a publisher is told of a message.
#[derive(Debug, Default, Serialize)]
struct Told {
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    queued: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lazy: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
}

impl Told {
    fn of(published: Published, form: Form) -> Told {
        let Published { id, queued, lazy, refused } = published;
        let known = |count| (form == Form::Operator).then_some(count);
        Told {
            id: Some(form.name(id)),
            queued: known(queued),
            lazy: known(lazy),
            refused: known(refused),
            error: None,
        }
    }
}

/// The same of the messages of one request.
#[derive(Debug, Serialize)]
struct ToldOfAll {
    accepted: usize,
    messages: Vec<Told>,
}

/// A message of a request that has several.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line<'a> {
    #[serde(borrow)]
    payload: Option<Cow<'a, str>>,
    #[serde(borrow)]
    payload_base64: Option<Cow<'a, str>>,
}

/// The payloads of a body with a JSON object in each line.
fn lines(body: &[u8]) -> Result<Vec<Bytes>, Rejection> {
    let mut payloads = Vec::new();
    let ends = memchr::memchr_iter(b'\n', body).chain([body.len()]);
    let mut begins = 0;
    for (number, end) in ends.enumerate() {
        let line = &body[begins..end];
        begins = end + 1;
        if line.trim_ascii().is_empty() {
            continue;
        }
        let payload = match serde_json::from_slice(line) {
            Ok(Line { payload: Some(text), payload_base64: None }) => Some(text.into_owned().into_bytes()),
            Ok(Line { payload: None, payload_base64: Some(bytes) }) => BASE64_STANDARD.decode(&*bytes).ok(),
            _ => None,
        };
        let payload = payload.ok_or_else(|| {
            let wanted = r#"{"payload":"text"} or {"payload_base64":"…"}"#;
            Rejection::new(Reason::Malformed, format!("line {} is not {wanted}", number + 1))
        })?;
        if payloads.len() == MESSAGES_MAX {
            let much = format!("a request may have at most {MESSAGES_MAX} messages");
            return Err(Rejection::new(Reason::BodyCap, much));
        }
        payloads.push(payload.into());
    }
    if payloads.is_empty() {
        return Err(Rejection::new(Reason::Malformed, "there is no message in the body"));
    }
    Ok(payloads)
}

fn rejection(error: PublishError) -> Rejection {
    let reason = match error {
        PublishError::TooLarge(_) => Reason::BodyCap,
        PublishError::Busy | PublishError::Backpressure => Reason::Busy,
        PublishError::Timeout { .. } => Reason::Timeout,
        PublishError::Canceled => Reason::Draining,
    };
    Rejection::new(reason, error.to_string())
}

fn other_method(allowed: &'static str) -> Rejection {
    let allow = HeaderValue::from_static(allowed);
    Rejection::new(Reason::Method, "another method is needed here").header(ALLOW, allow)
}

/// How much is told, and in which words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// On the admin plane.
    Operator,
    /// Through the gateway, or over a session.
    Bridge,
}

impl Form {
    /// What a message is called.
    fn name(self, id: MessageId) -> String {
        match self {
            Form::Operator => id.to_string(),
            Form::Bridge => format!("b3:{id}"),
        }
    }
}

/// A message as users see it, written without a tree of values: a follower may get very many.
fn show(out: &mut Vec<u8>, delivery: &Delivery, form: Form) {
    let id = form.name(delivery.id);
    out.extend_from_slice(b"event: message\nid: ");
    out.extend_from_slice(id.as_bytes());
    out.extend_from_slice(b"\ndata: ");
    let Delivery { origin, seq, time, topic, payload, hops, .. } = delivery;
    let text = std::str::from_utf8(payload).ok();
    let base64 = text.is_none().then(|| BASE64_STANDARD.encode(payload));
    let (operator, bridge) = (form == Form::Operator, form == Form::Bridge);
    let shown = Shown {
        hops: *hops,
        id: &id,
        origin: &origin.to_string(),
        payload: text,
        payload_b64: base64.as_deref().filter(|_| bridge),
        payload_base64: base64.as_deref().filter(|_| operator),
        seq: operator.then_some(*seq),
        time: operator.then_some(*time),
        topic: topic.as_str(),
    };
    // Numbers and strings can always be written to memory.
    let _ = serde_json::to_writer(&mut *out, &shown);
    out.extend_from_slice(b"\n\n");
}

#[derive(Serialize)]
struct Shown<'a> {
    hops: u8,
    id: &'a str,
    origin: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_b64: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seq: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<u64>,
    topic: &'a str,
}

/// A wait for what a subscriber gets next.
type Waiting = Pin<Box<dyn Future<Output = (Option<Next>, Subscription)> + Send>>;

/// Messages as server-sent events.
struct Deliveries {
    first: Option<Bytes>,
    rest: Option<Subscription>,
    waiting: Option<Waiting>,
    form: Form,
}

impl HttpBody for Deliveries {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if let Some(first) = this.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        if let Some(mut subscription) = this.rest.take() {
            this.waiting = Some(Box::pin(async move { (subscription.next(HEARTBEAT).await, subscription) }));
        }
        let Some(waiting) = &mut this.waiting else { return Poll::Ready(None) };
        let (next, subscription) = ready!(waiting.as_mut().poll(cx));
        this.waiting = None;
        let Some(next) = next else { return Poll::Ready(None) };
        this.rest = Some(subscription);
        let mut out = Vec::new();
        let mut more = Some(next);
        while let Some(next) = more {
            match next {
                Next::Delivery(delivery) => show(&mut out, &delivery, this.form),
                Next::Lagged(missed) => {
                    let told = format!("event: lagged\ndata: {}\n\n", json!({"missed": missed}));
                    out.extend_from_slice(told.as_bytes());
                }
                Next::Quiet => out.extend_from_slice(b":\n\n"),
            }
            // What waits already goes along, in one write.
            let room = out.len() < PIECE;
            more = this.rest.as_mut().filter(|_| room).and_then(Subscription::try_next);
        }
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(out)))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oap::NodeId;

    #[test]
    fn a_body_of_lines_is_as_many_messages_or_says_which_line_is_none() {
        let body = "{\"payload\":\"a\\nb\"}\n\r\n{\"payload_base64\":\"/w==\"}\n{\"payload\":\"\"}";
        assert_eq!(lines(body.as_bytes()).unwrap(), [&b"a\nb"[..], b"\xff", b""]);
        for (body, reason, said) in [
            ("", Reason::Malformed, "no message"),
            ("{\"payload\":\"a\"}\nb", Reason::Malformed, "line 2 "),
            ("{}", Reason::Malformed, "line 1 "),
            ("{\"payload_base64\":\"?\"}", Reason::Malformed, "line 1 "),
            ("{\"payload\":\"\",\"payload_base64\":\"\"}", Reason::Malformed, "line 1 "),
            (&"{\"payload\":\"\"}\n".repeat(MESSAGES_MAX + 1), Reason::BodyCap, "at most 128"),
        ] {
            let refused = lines(body.as_bytes()).unwrap_err();
            assert_eq!(refused.reason, reason);
            assert!(refused.detail.contains(said), "{}", refused.detail);
        }
    }

    #[test]
    fn a_message_is_shown_as_one_event_with_its_payload_as_text_or_in_base64() {
        let mut delivery = Delivery {
            id: MessageId([1; 32]),
            origin: NodeId([2; 32]),
            seq: 3,
            time: 4,
            topic: Topic::parse("a/b").unwrap(),
            payload: Bytes::from_static(b"two\nlines, \"quoted\""),
            hops: 5,
        };
        let shown = |delivery: &Delivery, form: Form| {
            let mut out = Vec::new();
            show(&mut out, delivery, form);
            let text = String::from_utf8(out).unwrap();
            let (head, data) = text.strip_suffix("\n\n").unwrap().split_once("\ndata: ").unwrap();
            assert_eq!(head, format!("event: message\nid: {}", form.name(delivery.id)));
            serde_json::from_str::<Value>(data).unwrap()
        };
        let (id, origin) = (delivery.id.to_string(), delivery.origin.to_string());
        let all = json!({"id": id, "origin": origin, "seq": 3, "time": 4, "topic": "a/b", "hops": 5,
            "payload": "two\nlines, \"quoted\""});
        assert_eq!(shown(&delivery, Form::Operator), all);
        delivery.payload = Bytes::from_static(b"\xff");
        let bridged = json!({"id": format!("b3:{id}"), "origin": origin, "topic": "a/b", "hops": 5,
            "payload_b64": "/w=="});
        assert_eq!(shown(&delivery, Form::Bridge), bridged);
        assert_eq!(shown(&delivery, Form::Operator)["payload_base64"], "/w==");
    }
}
