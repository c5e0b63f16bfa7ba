//! Bringing in a site's response: asked for on a client's behalf, stored for all whom it fits.

use super::{
    Ask, Asked, Begun, Caps, Digests, Failure, Fill, Flight, Landed, News, Origin, Pilot, Pumped, pump,
};
use crate::address::Address;
use crate::cache::{
    Exchange, Forward, NotStored, Pending, StoredHead, UnixMillis, Validated, combine, freshen, judge,
    make_completion, make_conditional, purge_keys, validated,
};
use crate::cas::{Arrived, Epoch, NewName, NewResponse, Put, Response, response_name};
use crate::semantics::Preconditions;
use crate::serve::{Snapshot, unix_millis};
use http::header::{
    CONNECTION, HeaderMap, HeaderName, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use http::{Method, StatusCode};
use ron_kernel::http::client::Payload;
use ron_kernel::http::{Fields, InterimSender};
use ron_kernel::problem::X_REASON;
use ron_kernel::sync::Permit;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// A response to be brought in.
#[derive(Clone, Debug)]
pub(crate) struct SiteWork {
    pub(crate) origin: Arc<Origin>,
    /// See [`response_name`].
    pub(crate) key: String,
    /// Path and query.
    pub(crate) target: String,
    /// The client's fields, by which it is known whom a response fits.
    pub(crate) client: HeaderMap,
    /// The same as the origin gets them.
    pub(crate) request: HeaderMap,
    pub(crate) stored: Vec<Response>,
    /// When it was asked for.
    pub(crate) since: Epoch,
    pub(crate) forward: Forward,
    pub(crate) interim: Option<InterimSender>,
}

/// An answer for one client alone.
#[derive(Debug)]
pub(crate) struct Passed {
    pub(crate) asked: Asked,
    pub(crate) headers: HeaderMap,
    pub(crate) why: NotStored,
}

/// What came of asking the origin.
#[derive(Debug)]
pub(crate) enum Exchanged {
    /// This stored response is good.
    Confirmed(Box<Response>),
    /// The origin failed, and something stored may stand in, as the verdict said.
    StandIn,
    /// To be stored.
    Storable(Box<Storable>),
    /// For the one who asked.
    Passed(Box<Passed>),
}

/// An answer that may be stored.
#[derive(Debug)]
pub(crate) struct Storable {
    pub(crate) asked: Asked,
    pub(crate) headers: HeaderMap,
    pub(crate) pending: Pending,
}

/// Removes what concerns one connection only.
pub(crate) fn cleaned(mut headers: HeaderMap) -> HeaderMap {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .collect();
    let fixed = [
        CONNECTION,
        KEEP_ALIVE,
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        PROXY_CONNECTION,
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        UPGRADE,
        X_REASON,
    ];
    for name in named.iter().chain(&fixed) {
        headers.remove(name);
    }
    headers
}

impl Fill {
    /// Does the work; the pilot's flight is told whatever comes of it. The place is given back when the answer begins.
    pub(super) async fn bring_response(
        self: &Arc<Fill>,
        pilot: Pilot,
        work: Arc<SiteWork>,
        snapshot: &Snapshot,
        until: Instant,
        place: Option<Permit>,
    ) {
        let flight = &pilot.flight;
        let exchanged = self.exchange(&work, snapshot, until).await;
        drop(place);
        match exchanged {
            Err(failure) => flight.end(Err(failure)),
            Ok(Exchanged::Confirmed(found)) => flight.tell(News::Confirmed(Arc::new(*found))),
            // Whoever waits knows by itself whether something stands in.
            Ok(Exchanged::StandIn) => {
                flight.end(Err(Failure::Upstream("it answered with an error".to_owned())))
            }
            Ok(Exchanged::Passed(passed)) => flight.leave(*passed),
            Ok(Exchanged::Storable(storable)) => {
                flight.announced(self.bring_storable(flight, &work, *storable, Fill::caps(snapshot))).await;
            }
        }
    }

    /// Asks the origin, and notes what its answer means for what is stored.
    pub(crate) async fn exchange(
        &self,
        work: &SiteWork,
        snapshot: &Snapshot,
        until: Instant,
    ) -> Result<Exchanged, Failure> {
        let heads: Vec<&StoredHead> = work.stored.iter().filter_map(|it| it.asset.head.as_ref()).collect();
        // What is missing is brought in before the answer begins, so it must not be long.
        let short = |len: u64| len <= snapshot.settings.fill.buffer_bytes.0;
        let worthwhile = |(_, missing): &(usize, Range<u64>)| {
            missing.end == u64::MAX || short(missing.end - missing.start)
        };
        let mut complete = work.forward.complete.clone().filter(worthwhile);
        let mut validate = work.forward.validate;
        loop {
            let mut sent = work.request.clone();
            if let Some(head) = validate.and_then(|at| heads.get(at)) {
                make_conditional(&mut sent, head);
            } else if let Some((at, range)) = &complete
                && let Some(head) = heads.get(*at)
            {
                make_completion(&mut sent, head, range);
            }
            let mut ask = Ask::get(&work.origin, work.target.clone(), sent.clone());
            ask.interim = work.interim.clone();
            let mut asked = work.origin.ask(&ask, &Fill::patience(snapshot, until), &self.counters).await?;
            let fields = std::mem::replace(&mut asked.answer.fields, Fields::Map(HeaderMap::new()));
            let (status, headers) = (asked.answer.status, fields.into_map());
            let (answer, now) = ((status, &headers), UnixMillis(unix_millis()));
            let (on, policy) = ((validate, work.forward.on_error), &work.origin.policy);
            match validated(answer, &work.client, &heads, on, policy, now) {
                Validated::Confirmed(confirmed) => {
                    let main = validate.filter(|at| confirmed.contains(at)).or(confirmed.first().copied());
                    let mut answer = None;
                    for at in confirmed {
                        let response =
                            self.confirm(&work.stored[at], &work.client, &headers, asked.exchange).await?;
                        if Some(at) == main {
                            answer = Some(response);
                        }
                    }
                    if let Some(response) = answer {
                        return Ok(Exchanged::Confirmed(Box::new(response)));
                    }
                    (validate, complete) = (None, None);
                }
                Validated::Unrelated => (validate, complete) = (None, None),
                Validated::StandIn(_) => return Ok(Exchanged::StandIn),
                Validated::Answer if complete.is_some() && is_about_range(status) => {
                    if status == StatusCode::PARTIAL_CONTENT && length_of(&asked).is_some_and(short) {
                        let found = self.complete(work, asked, &headers, snapshot).await?;
                        if let Some(response) = found {
                            return Ok(Exchanged::Confirmed(Box::new(response)));
                        }
                    }
                    // Nobody asked for that part: the client's own request has to be sent.
                    complete = None;
                }
                Validated::Answer => {
                    let request = (&Method::GET, &work.client);
                    let judged = judge(request, answer, asked.exchange, policy);
                    let cap = snapshot.settings.fill.max_object_bytes.0;
                    let too_large =
                        length_of(&asked).is_some_and(|len| len > cap || self.cas.can_hold(len).is_err());
                    return Ok(match judged {
                        Ok(pending) if !too_large => {
                            Exchanged::Storable(Box::new(Storable { asked, headers, pending }))
                        }
                        judged => {
                            let why = judged.err().unwrap_or(NotStored::Freshness);
                            Exchanged::Passed(Box::new(Passed { asked, headers, why }))
                        }
                    });
                }
            }
        }
    }

    /// Updates a stored response by a 304.
    async fn confirm(
        &self,
        stored: &Response,
        client: &HeaderMap,
        headers: &HeaderMap,
        exchange: Exchange,
    ) -> Result<Response, Failure> {
        let Some(head) = &stored.asset.head else { return Ok(stored.clone()) };
        let freshened = freshen(head, client, headers, exchange);
        // A full queue of changes costs an update, which the next 304 brings again.
        let kept = freshened.keep.then(|| freshened.head.clone());
        let _ = self.cas.freshen(stored.name.clone(), stored.asset.clone(), kept).await;
        let mut asset = crate::cas::Asset::clone(&stored.asset);
        asset.head = Some(freshened.head);
        Ok(Response { asset: Arc::new(asset), ..stored.clone() })
    }

    /// Takes in the part that was missing of a stored response; `None` if it does not fit.
    async fn complete(
        &self,
        work: &SiteWork,
        asked: Asked,
        headers: &HeaderMap,
        snapshot: &Snapshot,
    ) -> Result<Option<Response>, Failure> {
        let Some((at, _)) = &work.forward.complete else { return Ok(None) };
        let Asked { answer, exchange, permit } = asked;
        let unseen = Flight::new(String::new());
        let pumped =
            pump(&self.cas, &unseen, answer.payload, &[], Fill::caps(snapshot), &self.counters).await;
        drop(permit);
        let arrived = match pumped {
            Pumped::Whole(arrived) => arrived,
            Pumped::Broken(failure, _) | Pumped::Unstored(failure, _) => return Err(failure),
        };
        self.join(work, &work.stored[*at], arrived, headers, exchange).await
    }

    /// Joins a part to what is stored; `None` if they do not fit each other.
    async fn join(
        &self,
        work: &SiteWork,
        stored: &Response,
        arrived: Arrived,
        headers: &HeaderMap,
        exchange: Exchange,
    ) -> Result<Option<Response>, Failure> {
        let Some(head) = &stored.asset.head else { return Ok(None) };
        let Some((freshened, change)) = combine(head, &work.client, (headers, arrived.len), exchange) else {
            return Ok(None);
        };
        let mut parts: Vec<_> = stored.parts.iter().map(|(address, _)| *address).collect();
        for at in &change.removed {
            parts.remove(*at);
        }
        if let Some(at) = change.inserted {
            parts.insert(at, arrived.address);
        }
        let head = freshened.head;
        match change.inserted {
            None => {
                self.cas.freshen(stored.name.clone(), stored.asset.clone(), Some(head)).await?;
            }
            Some(_) => self.put((stored.name.to_string(), work.since), arrived, head, parts).await?,
        }
        let found = self.cas.response(&stored.name);
        Ok(found)
    }

    /// Brings a response in that may be stored.
    pub(crate) async fn bring_storable(
        &self,
        flight: &Flight,
        work: &SiteWork,
        storable: Storable,
        caps: Caps,
    ) {
        let Storable { asked, headers, pending } = storable;
        let partial = asked.answer.status == StatusCode::PARTIAL_CONTENT;
        let begun = Begun {
            status: asked.answer.status,
            headers: cleaned(headers.clone()),
            head: Some(pending.head().clone()),
            len: length_of(&asked),
        };
        flight.hold_back(News::Begun(Arc::new(begun)));
        let Asked { answer, exchange, permit } = asked;
        // What is too large to be stored still goes to who asked for it.
        let open = Caps { bytes_max: u64::MAX, unstored: true, ..caps };
        let pumped = pump(&self.cas, flight, answer.payload, &[], open, &self.counters).await;
        drop(permit);
        let (arrived, failure) = match pumped {
            Pumped::Whole(arrived) => (Some(arrived), None),
            Pumped::Unstored(failure, len) => {
                // That is our trouble and not the client's, who has asked for no address or digest.
                tracing::warn!(%failure, "a response is not stored");
                return flight.end(Ok(Landed { digests: None, len, stored: false }));
            }
            Pumped::Broken(failure, arrived) => (arrived, Some(failure)),
        };
        let landed = arrived.as_ref().map(|arrived| Landed {
            digests: Some(Digests { address: arrived.address, sha256: arrived.sha256 }),
            len: arrived.len,
            stored: false,
        });
        let stored = match arrived.filter(|arrived| arrived.len <= caps.bytes_max) {
            Some(arrived) => {
                let whole = failure.is_none();
                self.keep_response(work, arrived, &headers, pending, exchange, (whole, partial)).await
            }
            None => Ok(()),
        };
        if let Err(error) = &stored {
            tracing::debug!(%error, "a response is not stored");
        }
        flight.end(match (failure, landed) {
            (Some(failure), _) => Err(failure),
            (None, Some(landed)) => Ok(Landed { stored: stored.is_ok(), ..landed }),
            (None, None) => Err(Failure::Store("nothing arrived".to_owned())),
        });
    }

    /// Stores what arrived of a response, whole or not, joined with what is there of it.
    async fn keep_response(
        &self,
        work: &SiteWork,
        arrived: Arrived,
        headers: &HeaderMap,
        pending: Pending,
        exchange: Exchange,
        (whole, partial): (bool, bool),
    ) -> Result<(), Failure> {
        let len = arrived.len;
        let head = if whole { pending.complete(len) } else { pending.incomplete(len) };
        let Some(head) = head else {
            return Err(Failure::Upstream("its length is not what it says".to_owned()));
        };
        let name = response_name(&work.key, &which(&head));
        if partial {
            let same = self.cas.responses(&work.key).into_iter().find(|stored| {
                let known = stored.asset.head.as_ref();
                known.is_some_and(|known| {
                    head.replaces(known) && combine(known, &work.client, (headers, len), exchange).is_some()
                })
            });
            if let Some(stored) = same {
                return self.join(work, &stored, arrived, headers, exchange).await.map(|_| ());
            }
        }
        let parts = vec![arrived.address];
        self.put((name, work.since), arrived, head, parts).await
    }

    async fn put(
        &self,
        (name, since): (String, Epoch),
        arrived: Arrived,
        head: StoredHead,
        parts: Vec<Address>,
    ) -> Result<(), Failure> {
        let new = NewName {
            name,
            content_type: String::new(),
            keys: purge_keys(head.headers()).unwrap_or_default(),
            encoded: Vec::new(),
            conditions: Preconditions::default(),
            response: Some(NewResponse { head, parts, modified: 0, since }),
        };
        self.cas.put(Put { arrived, name: Some(new) }).await?;
        Ok(())
    }
}

/// What tells a response apart from others to the same key: whom it is for.
fn which(head: &StoredHead) -> String {
    let mut hasher = blake3::Hasher::new();
    for (name, value) in head.selecting().fields() {
        let value = value.as_ref().map_or(&b"\0"[..], |value| value.as_bytes());
        for piece in [name.as_str().as_bytes(), b"\n", value, b"\n"] {
            hasher.update(piece);
        }
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

/// Whether an answer says something only to whoever asked for a range.
fn is_about_range(status: StatusCode) -> bool {
    matches!(status, StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE)
}

/// The length of an answer's content, where it is known.
pub(super) fn length_of(asked: &Asked) -> Option<u64> {
    match &asked.answer.payload {
        Payload::Whole(bytes) => Some(bytes.len() as u64),
        Payload::Stream(stream) => http_body::Body::size_hint(stream).exact(),
        Payload::Upgraded(_) => None,
    }
}
