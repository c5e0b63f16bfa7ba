//! The overlay over HTTP, on the admin plane and through the gateway: publish, follow, look at peers.

use crate::handle::{Handle, Next, PublishError, SubscribeError, Subscription};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http::header::{ALLOW, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body::{Body as HttpBody, Frame};
use oap::gossip::{Delivery, MessageId, Topic};
use oap::session::Role;
use ron_kernel::admin::Answering;
use ron_kernel::admission::deadline::Budget;
use ron_kernel::http::{Body, BodyError, WritePatience};
use ron_kernel::problem::{CorrId, Rejection, event_stream, json_response};
use ron_kernel::reason::Reason;
use serde_json::{Value, json};
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
            .map_err(|bad| Rejection::new(Reason::Malformed, format!("{} cannot be read", bad.0)))?;
        let max = self.shared.settings.load().gossip.max_message_bytes.usize();
        let payload = request.body_mut().collect(max).await.map_err(|error| match error {
            BodyError::TooLarge => {
                Rejection::new(Reason::BodyCap, format!("a message may have at most {max} bytes"))
            }
            BodyError::ReadTimeout => Rejection::new(Reason::ReadTimeout, "the body did not arrive in time"),
            _ => Rejection::new(Reason::Malformed, "the body could not be read"),
        })?;
        // Who states no deadline does not wait for room.
        let deadline = budget.client.map_or(now, |asked| asked.min(budget.until));
        let published = self.publish(topic, payload, deadline.into()).await.map_err(|error| match error {
            PublishError::TooLarge(_) => Rejection::new(Reason::BodyCap, error.to_string()),
            PublishError::Busy | PublishError::Backpressure => {
                Rejection::new(Reason::Busy, error.to_string())
            }
            PublishError::Timeout { .. } => Rejection::new(Reason::Timeout, error.to_string()),
            PublishError::Canceled => Rejection::new(Reason::Draining, error.to_string()),
        })?;
        let mut body = json!({"id": form.name(published.id)});
        if form == Form::Operator {
            body["queued"] = published.queued.into();
            body["lazy"] = published.lazy.into();
            body["refused"] = published.refused.into();
        }
        Ok(json_response(StatusCode::ACCEPTED, &body, corr))
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

/// A message as users see it.
fn shown(delivery: &Delivery, form: Form) -> Value {
    let mut body = json!({
        "id": form.name(delivery.id), "origin": delivery.origin.to_string(),
        "topic": delivery.topic.as_str(), "hops": delivery.hops,
    });
    let bytes = match form {
        Form::Operator => {
            body["seq"] = delivery.seq.into();
            body["time"] = delivery.time.into();
            "payload_base64"
        }
        Form::Bridge => "payload_b64",
    };
    match std::str::from_utf8(&delivery.payload) {
        Ok(text) => body["payload"] = text.into(),
        Err(_) => body[bytes] = BASE64_STANDARD.encode(&delivery.payload).into(),
    }
    body
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
        let text = match next {
            Next::Delivery(delivery) => {
                let (id, shown) = (this.form.name(delivery.id), shown(&delivery, this.form));
                format!("event: message\nid: {id}\ndata: {shown}\n\n")
            }
            Next::Lagged(missed) => format!("event: lagged\ndata: {}\n\n", json!({"missed": missed})),
            Next::Quiet => ":\n\n".to_owned(),
        };
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(text)))))
    }
}
