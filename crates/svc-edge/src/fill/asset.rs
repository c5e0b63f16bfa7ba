//! Bringing in an asset: asked for on nobody's behalf, stored under its name.

use super::response::length_of;
use super::{
    Ask, Asked, Begun, Caps, Digests, Failure, Fill, Landed, News, Origin, Patience, Pilot, Pumped, pump,
};
use crate::address::Address;
use crate::cache::validators::EntityTag;
use crate::cache::{Freshened, NotStored, Pending, StoredHead, freshen, judge, purge_keys, revalidation};
use crate::cas::{Arrived, Asset, CasError, Epoch, NewName, NewResponse, Put};
use crate::egress::{OriginUrl, REDIRECTS_MAX};
use crate::encode;
use crate::semantics::{CONTENT_DIGEST, Preconditions, REPR_DIGEST, is_compressible, sha256_of, type_of};
use crate::serve::{Snapshot, unix_millis};
use http::header::{
    ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, ETAG, HeaderMap, HeaderName,
    HeaderValue, LOCATION, VIA,
};
use http::{Method, StatusCode};
use ron_kernel::admission::decode::{Coding, codings};
use ron_kernel::sync::Permit;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// Longest path and query that are kept.
pub(crate) const NAME_MAX: usize = 4096;
const CONTENT_TYPE_MAX: usize = 200;

/// What every origin of assets is asked with, and so what their answers may vary by.
pub(crate) static FIELDS: LazyLock<HeaderMap> = LazyLock::new(|| {
    let fields = [
        (ACCEPT, "*/*"),
        // Encodings are made here, and an object's address is that of its plain bytes.
        (ACCEPT_ENCODING, "identity"),
        (VIA, "1.1 ron"),
    ];
    fields.into_iter().map(|(name, value)| (name, HeaderValue::from_static(value))).collect()
});

/// An asset to be brought in.
#[derive(Debug)]
pub(crate) struct AssetWork {
    pub(crate) origin: Arc<Origin>,
    /// Path and query at the origin.
    pub(crate) target: String,
    /// The name under which it is stored.
    pub(crate) name: String,
    /// What is stored, to be confirmed or replaced.
    pub(crate) stored: Option<Arc<Asset>>,
    /// When it was asked for.
    pub(crate) since: Epoch,
}

impl AssetWork {
    /// Whether its name is too long to be kept.
    fn is_long(&self) -> bool {
        self.name.len() > NAME_MAX
    }

    fn head(&self) -> Option<&StoredHead> {
        self.stored.as_ref()?.head.as_ref()
    }
}

/// What an origin answered.
enum Fetched {
    Confirmed(Box<Freshened>),
    New(Box<New>),
}

struct New {
    asked: Asked,
    headers: HeaderMap,
    codings: Vec<Coding>,
    judged: Result<Pending, NotStored>,
}

impl Fill {
    /// Does the work; the pilot's flight is told whatever comes of it. The place is given back when the answer begins.
    pub(super) async fn bring_asset(
        self: &Arc<Fill>,
        pilot: Pilot,
        work: AssetWork,
        snapshot: &Snapshot,
        until: Instant,
        place: Option<Permit>,
    ) {
        let flight = &pilot.flight;
        let fetched = self.fetch_asset(&work, snapshot, until).await;
        drop(place);
        match fetched {
            Err(failure) => flight.end(Err(failure)),
            Ok(Fetched::Confirmed(freshened)) => {
                let Freshened { head, keep } = *freshened;
                match self.renew(&work, keep.then_some(head)).await {
                    Ok(()) => flight.tell(News::Changed),
                    Err(failure) => flight.end(Err(failure)),
                }
            }
            Ok(Fetched::New(new)) => self.take_in(&pilot, &work, *new, Fill::caps(snapshot)).await,
        }
    }

    /// Notes what is to become of the asset that was found stored, if it still is.
    async fn renew(&self, work: &AssetWork, head: Option<StoredHead>) -> Result<(), Failure> {
        if let Some(found) = &work.stored {
            self.cas.freshen(work.name.as_str().into(), found.clone(), head).await?;
        }
        Ok(())
    }

    /// Brings in an answer that has begun.
    async fn take_in(self: &Arc<Fill>, pilot: &Pilot, work: &AssetWork, new: New, caps: Caps) {
        let (flight, New { asked, headers, codings, judged }) = (&pilot.flight, new);
        let len = length_of(&asked);
        if let Err(failure) = caps.check(&self.cas, len.unwrap_or(0)) {
            return flight.end(Err(failure));
        }
        let Asked { answer, permit, .. } = asked;
        let begun = Begun {
            status: StatusCode::OK,
            headers: headers.clone(),
            head: judged.as_ref().ok().map(|pending| pending.head().clone()),
            len: len.filter(|_| codings.is_empty()),
        };
        flight.hold_back(News::Begun(Arc::new(begun)));
        let pumped = pump(&self.cas, flight, answer.payload, &codings, caps, &self.counters).await;
        drop(permit);
        match pumped {
            Pumped::Broken(failure, _) => flight.end(Err(failure)),
            // That is our trouble and not the clients', who get it without a tag.
            Pumped::Unstored(failure, len) => {
                tracing::warn!(%failure, "a fetched object is not stored");
                flight.end(Ok(Landed { digests: None, len, stored: false }));
            }
            Pumped::Whole(arrived) if codings.is_empty() && contradicts(&headers, &arrived) => {
                flight.end(Err(Failure::Validators));
            }
            Pumped::Whole(arrived) => self.keep_asset(pilot, work, arrived, &headers, judged).await,
        }
    }

    /// Asks the origin, and wherever it sends us that we may go.
    async fn fetch_asset(
        &self,
        work: &AssetWork,
        snapshot: &Snapshot,
        until: Instant,
    ) -> Result<Fetched, Failure> {
        let mut request = work.head().map(revalidation).unwrap_or_default();
        request.extend(FIELDS.clone());
        let (mut origin, mut target) = (work.origin.clone(), work.target.clone());
        for _ in 0..=REDIRECTS_MAX {
            let ask = Ask::get(&origin, target.clone(), request.clone());
            let patience = Patience { statuses: true, ..Fill::patience(snapshot, until) };
            let asked = origin.ask(&ask, &patience, &self.counters).await?;
            match asked.answer.status.as_u16() {
                301 | 302 | 303 | 307 | 308 => {
                    let location =
                        asked.answer.fields.get(&LOCATION).and_then(|it| std::str::from_utf8(it).ok());
                    let location =
                        location.ok_or_else(|| Failure::Upstream("it redirects nowhere".to_owned()))?;
                    let (authority, next) = OriginUrl::redirect(&origin.url.authority, &target, location)
                        .map_err(|bad| {
                            tracing::warn!(%bad, "an origin's redirect is refused");
                            Failure::NotAllowed
                        })?;
                    let next_origin = snapshot.origins.allowed(&authority).ok_or_else(|| {
                        tracing::warn!(
                            host = authority.host,
                            "an origin redirects to a host that is not listed"
                        );
                        Failure::NotAllowed
                    })?;
                    (origin, target) = (next_origin.clone(), next);
                }
                _ => return self.read_answer(work, asked, &request).await,
            }
        }
        Err(Failure::Upstream("it redirects again and again".to_owned()))
    }

    async fn read_answer(
        &self,
        work: &AssetWork,
        mut asked: Asked,
        request: &HeaderMap,
    ) -> Result<Fetched, Failure> {
        let policy = &work.origin.policy;
        let status = asked.answer.status;
        let fields =
            std::mem::replace(&mut asked.answer.fields, ron_kernel::http::Fields::Map(HeaderMap::new()));
        let mut headers = fields.into_map();
        match (status.as_u16(), work.head()) {
            (200 | 203, _) => {}
            (304, Some(head)) => {
                let freshened = freshen(head, request, &headers, asked.exchange);
                return Ok(Fetched::Confirmed(Box::new(freshened)));
            }
            (404 | 410, _) => {
                let judged = judge((&Method::GET, request), (status, &headers), asked.exchange, policy);
                let gone = status == StatusCode::GONE;
                if let Ok(pending) = judged
                    && !work.is_long()
                    && !self.cas.was_forgotten(&work.name, work.since)
                {
                    let left = pending.head().freshness(policy, asked.exchange.received);
                    let left = Duration::from_millis(left.lifetime_ms.saturating_sub(left.age_ms));
                    self.negative.note(&work.name, gone, Instant::now(), left);
                }
                // It is not there any more, so it is not here either.
                let _ = self.renew(work, None).await;
                return Err(Failure::Missing { gone });
            }
            (status, _) => return Err(Failure::Upstream(format!("it answered {status}"))),
        }
        let codings = codings(&headers)
            .ok_or_else(|| Failure::Upstream("its answer is in an unknown content coding".to_owned()))?;
        if !codings.is_empty() {
            headers.remove(CONTENT_ENCODING);
            headers.remove(CONTENT_LENGTH);
        }
        let judged = match work.is_long() {
            true => Err(NotStored::Request),
            false => judge((&Method::GET, request), (status, &headers), asked.exchange, policy),
        };
        Ok(Fetched::New(Box::new(New { asked, headers, codings, judged })))
    }

    /// Stores what arrived, if it may be, and tells everybody.
    async fn keep_asset(
        self: &Arc<Fill>,
        pilot: &Pilot,
        work: &AssetWork,
        arrived: Arrived,
        headers: &HeaderMap,
        judged: Result<Pending, NotStored>,
    ) {
        let name = work.name.as_str();
        let (address, sha256, len) = (arrived.address, arrived.sha256, arrived.len);
        let mut landed = Landed { digests: Some(Digests { address, sha256 }), len, stored: false };
        let head = judged.ok().and_then(|pending| pending.complete(len));
        let Some(head) = head else { return pilot.flight.end(Ok(landed)) };
        let content_type = content_type(headers, name);
        let modified = head.validators().modified.and_then(|at| u64::try_from(at).ok());
        let response = NewResponse {
            head,
            parts: vec![address],
            modified: modified.unwrap_or(unix_millis() / 1000),
            since: work.since,
        };
        let worth_encoding = is_compressible(&content_type) && encode::SIZES.contains(&len);
        let new = NewName {
            name: name.to_owned(),
            content_type,
            keys: purge_keys(headers).unwrap_or_default(),
            encoded: Vec::new(),
            conditions: Preconditions::default(),
            response: Some(response),
        };
        match self.cas.put(Put { arrived, name: Some(new) }).await {
            Ok(_) => landed.stored = true,
            // Those who wait get it all the same.
            Err(CasError::Precondition) => tracing::debug!(name, "a fetched object was purged meanwhile"),
            Err(error) => tracing::warn!(%error, "a fetched object is not stored"),
        }
        // Who comes from now on finds it in the store, or is not to have it.
        pilot.leave();
        pilot.flight.end(Ok(landed));
        if worth_encoding
            && landed.stored
            && let Some(bytes) = pilot.flight.bytes()
        {
            self.add_encodings(name.to_owned(), address, bytes).await;
        }
    }

    /// Makes the encodings of a stored asset, if a core is free for it.
    async fn add_encodings(&self, name: String, address: Address, bytes: bytes::Bytes) {
        let Some(permit) = self.encoders.try_take() else { return };
        let cas = self.cas.clone();
        let made = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let mut made = Vec::new();
            for (coding, encoded) in encode::encodings(&bytes)? {
                let mut upload = cas.upload()?;
                upload.write(&encoded)?;
                made.push((coding, upload.finish(false)?));
            }
            cas.add_encodings(name, address, made);
            Ok::<_, std::io::Error>(())
        });
        if let Ok(Err(error)) = made.await {
            tracing::debug!(%error, "encodings were not made");
        }
    }
}

/// Whether an origin says of its bytes what they are not.
fn contradicts(headers: &HeaderMap, arrived: &Arrived) -> bool {
    let tag = headers.get(ETAG).and_then(|value| EntityTag::of(value.as_bytes())).filter(|tag| !tag.weak);
    let text = tag.and_then(|tag| std::str::from_utf8(tag.opaque).ok());
    let address = text.and_then(Address::parse);
    let digest = |name: &HeaderName| match sha256_of(headers, name) {
        Ok(stated) => stated.is_some_and(|stated| stated != arrived.sha256),
        Err(_unreadable) => false,
    };
    address.is_some_and(|address| address != arrived.address)
        || [CONTENT_DIGEST, REPR_DIGEST].iter().any(digest)
}

fn content_type(headers: &HeaderMap, name: &str) -> String {
    let sent = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let path = name.split('\0').next().unwrap_or(name);
    sent.filter(|text| text.len() <= CONTENT_TYPE_MAX && text.contains('/'))
        .unwrap_or(type_of(path))
        .to_owned()
}
