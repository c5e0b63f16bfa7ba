//! PUT, DELETE and purges: changes of the store, for those who have a capability.

use super::{Edge, Snapshot, unix_millis, value};
use crate::address::Address;
use crate::cache::{KEY_MAX, KEYS_MAX, SURROGATE_KEY};
use crate::cas::{Arrived, Cas, CasError, Names, NewName, Put, Stored, Upload};
use crate::encode;
use crate::semantics::{CONTENT_DIGEST, Coding, Preconditions, is_compressible, sha256_of, type_of};
use bytes::BytesMut;
use http::header::{CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderMap, LOCATION};
use http::request::Parts;
use http::{Response, StatusCode};
use ron_kernel::admission::deadline::Budget;
use ron_kernel::admission::decode::codings;
use ron_kernel::http::{Body, BodyError};
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use ron_kernel::sync::Permit;
use serde_json::{Value, json};
use std::io;
use std::sync::Arc;

const WRITE: &str = "edge:write";
const PURGE: &str = "edge:purge";

/// What is gathered of an upload before it is written, off the runtime.
const STRETCH: usize = 256 << 10;
const CONTENT_TYPE_MAX: usize = 200;

impl Edge {
    pub(super) async fn put_object(
        &self,
        request: &Parts,
        body: Body,
        expected: Option<Address>,
        snapshot: &Snapshot,
        budget: Budget,
    ) -> Result<Response<Body>, Rejection> {
        self.authorize(request, WRITE, snapshot)?;
        let arrived = self.receive(request, body, expected, snapshot, budget).await?;
        self.deposit(&arrived).await?;
        let stored = self.cas.put(Put { arrived, name: None }).await;
        let stored = stored.map_err(|error| self.unchanged("/edge/cas", &error))?;
        let location = format!("/edge/cas/{}", stored.address);
        Ok(acknowledged(stored, &location))
    }

    pub(super) async fn put_asset(
        &self,
        request: &Parts,
        body: Body,
        name: String,
        snapshot: &Snapshot,
        budget: Budget,
    ) -> Result<Response<Body>, Rejection> {
        self.authorize(request, WRITE, snapshot)?;
        let headers = &request.headers;
        let content_type = content_type(headers, &name)?;
        let keys = keys(headers)?;
        let conditions = Preconditions::of(headers, unix_millis() / 1000);
        let location = request.uri.path().to_owned();
        let arrived = self.receive(request, body, None, snapshot, budget).await?;
        self.deposit(&arrived).await?;
        let (arrived, encoded) = if is_compressible(&content_type) && encode::SIZES.contains(&arrived.len) {
            self.encoded(arrived).await?
        } else {
            (arrived, Vec::new())
        };
        let name = NewName { name, content_type, keys, encoded, conditions, response: None };
        let put = Put { arrived, name: Some(name) };
        let stored = self.cas.put(put).await.map_err(|error| self.unchanged("/edge/assets", &error))?;
        Ok(acknowledged(stored, &location))
    }

    /// Takes an object in, as it comes, and checks it against what was said of it.
    async fn receive(
        &self,
        request: &Parts,
        mut body: Body,
        expected: Option<Address>,
        snapshot: &Snapshot,
        budget: Budget,
    ) -> Result<Arrived, Rejection> {
        let headers = &request.headers;
        if headers.contains_key(CONTENT_RANGE) {
            return Err(Rejection::new(Reason::Malformed, "a part of an object cannot be put"));
        }
        if codings(headers).is_none_or(|codings| !codings.is_empty()) {
            let detail = "objects are put as they are; encodings are made here";
            return Err(Rejection::new(Reason::UnsupportedEncoding, detail));
        }
        let digest = sha256_of(headers, &CONTENT_DIGEST)
            .map_err(|_bad| Rejection::new(Reason::Malformed, "Content-Digest cannot be read"))?;
        let cap = snapshot.settings.cas.max_put_bytes.0.min(self.object_max());
        if let Some(len) = body.exact_len() {
            if len > cap {
                return Err(Rejection::new(Reason::BodyCap, "the object is larger than allowed"));
            }
            self.cas.can_hold(len).map_err(|error| self.refused(&error))?;
        }
        let receiving = self.fill(&mut body, cap);
        let filled = match budget.client {
            // Without a deadline of its own an upload may take as long as it keeps moving.
            None => receiving.await,
            Some(until) => tokio::time::timeout_at(until.into(), receiving).await.unwrap_or_else(|_late| {
                self.read_timeouts.inc();
                Err(Rejection::new(Reason::Timeout, "the object did not arrive in time"))
            }),
        };
        let (upload, rest) = filled?;
        let (cas, sync) = (self.cas.clone(), self.cas.syncs());
        let arrived = self.blocking(move || begun(&cas, upload, &rest)?.finish(sync)).await?;
        let wrong = expected.is_some_and(|expected| expected != arrived.address)
            || digest.is_some_and(|digest| digest != arrived.sha256);
        if wrong {
            return Err(Rejection::new(
                Reason::DigestSent,
                "the content is not what its address or digest says",
            ));
        }
        Ok(arrived)
    }

    /// Reads a body to its end; what is returned beside the upload is yet to be written.
    async fn fill(&self, body: &mut Body, cap: u64) -> Result<(Option<Upload>, BytesMut), Rejection> {
        let (mut upload, mut held, mut len) = (None, BytesMut::new(), 0);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| match error {
                BodyError::ReadTimeout => {
                    Rejection::new(Reason::ReadTimeout, "the object did not arrive in time")
                }
                _ => Rejection::new(Reason::Malformed, "the object could not be read to its end"),
            })?;
            let Ok(data) = frame.into_data() else { continue };
            len += data.len() as u64;
            if len > cap {
                return Err(Rejection::new(Reason::BodyCap, "the object is larger than allowed"));
            }
            held.extend_from_slice(&data);
            if held.len() >= STRETCH {
                self.cas.can_hold(len).map_err(|error| self.refused(&error))?;
                let (cas, stretch) = (self.cas.clone(), held.split());
                let written = self.blocking(move || begun(&cas, upload, &stretch)).await?;
                upload = Some(written);
            }
        }
        self.cas.can_hold(len).map_err(|error| self.refused(&error))?;
        Ok((upload, held))
    }

    /// Makes the encodings of an object, if a core is free for it.
    async fn encoded(&self, arrived: Arrived) -> Result<(Arrived, Vec<(Coding, Arrived)>), Rejection> {
        let Some(permit) = self.fill.encoders.try_take() else { return Ok((arrived, Vec::new())) };
        let (cas, sync) = (self.cas.clone(), self.cas.syncs());
        self.blocking(move || {
            let _permit: Permit = permit;
            let bytes = arrived.read()?;
            let mut made = Vec::new();
            for (coding, encoded) in encode::encodings(&bytes)? {
                let mut upload = cas.upload()?;
                upload.write(&encoded)?;
                made.push((coding, upload.finish(sync)?));
            }
            Ok((arrived, made))
        })
        .await
    }

    pub(super) async fn delete(
        &self,
        request: &Parts,
        name: String,
        snapshot: &Snapshot,
        budget: Budget,
    ) -> Result<Response<Body>, Rejection> {
        self.authorize(request, PURGE, snapshot)?;
        let conditions = Preconditions::of(&request.headers, unix_millis() / 1000);
        let which = Names::Asset(self.asset_key(name, request.uri.query()));
        match self.forget("/edge/assets", which, conditions, budget).await? {
            0 => Err(Rejection::new(Reason::NotFound, "it is not stored")),
            _ => {
                let mut response = Response::new(Body::default());
                *response.status_mut() = StatusCode::NO_CONTENT;
                Ok(response)
            }
        }
    }

    pub(super) async fn purge(
        &self,
        request: &Parts,
        mut body: Body,
        snapshot: &Snapshot,
        budget: Budget,
    ) -> Result<Response<Body>, Rejection> {
        self.authorize(request, PURGE, snapshot)?;
        let reading = body.collect(snapshot.settings.ingress.body_bytes.usize());
        let read = tokio::time::timeout_at(budget.until.into(), reading).await;
        let bytes = match read {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(BodyError::TooLarge)) => {
                return Err(Rejection::new(Reason::BodyCap, "the body is larger than allowed"));
            }
            Ok(Err(BodyError::ReadTimeout)) | Err(_) => {
                return Err(Rejection::new(Reason::ReadTimeout, "the body did not arrive in time"));
            }
            Ok(Err(_)) => return Err(Rejection::new(Reason::Malformed, "the body could not be read")),
        };
        let which = which(&bytes).ok_or_else(|| {
            Rejection::new(Reason::Malformed, "expected an object with one of path, prefix or key")
        })?;
        let removed = self.forget("/edge/purge", which, Preconditions::default(), budget).await?;
        Ok(json_answer(StatusCode::OK, &json!({"removed": removed})))
    }

    async fn forget(
        &self,
        endpoint: &'static str,
        which: Names,
        conditions: Preconditions,
        budget: Budget,
    ) -> Result<usize, Rejection> {
        self.fill.flights.part(&which);
        let forgetting = self.cas.forget(which, conditions);
        let forgotten = tokio::time::timeout_at(budget.until.into(), forgetting).await;
        self.fill.negative.forget_all();
        match forgotten {
            Ok(forgotten) => forgotten.map_err(|error| self.unchanged(endpoint, &error)),
            Err(_late) => {
                self.read_timeouts.inc();
                Err(Rejection::new(Reason::Timeout, "the change was not made in time; it may still be"))
            }
        }
    }

    /// Does something with files, off the runtime.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, Rejection> {
        match tokio::task::spawn_blocking(work).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(error)) => {
                let error = CasError::from(error);
                if matches!(error, CasError::Full) {
                    self.cas.note_full();
                }
                Err(self.refused(&error))
            }
            Err(lost) => Err(self.refused(&CasError::Io(lost.to_string()))),
        }
    }

    /// The same where a change found no place in the queue.
    fn unchanged(&self, endpoint: &'static str, error: &CasError) -> Rejection {
        if matches!(error, CasError::Busy) {
            self.busy.with(["edge", endpoint, "changes"]).inc();
        }
        self.refused(error)
    }

    /// What a client is told when the store cannot do it.
    fn refused(&self, error: &CasError) -> Rejection {
        match error {
            CasError::Busy => Rejection::new(Reason::Busy, "too many changes wait to be made").retry_after(1),
            CasError::Closing => Rejection::new(Reason::Draining, "the store is closing"),
            CasError::Full => Rejection::new(Reason::NoRoom, "there is no room for the object"),
            CasError::Amnesia => {
                Rejection::new(Reason::Amnesia, "the object is larger than the memory for objects")
            }
            CasError::Precondition => {
                Rejection::new(Reason::Precondition, "a condition of the request is not met")
            }
            CasError::Io(error) => {
                tracing::error!(error, "the store failed");
                Rejection::new(Reason::Internal, "the object could not be stored")
            }
        }
    }
}

/// The upload with these bytes added; begun if it was not.
fn begun(cas: &Arc<Cas>, upload: Option<Upload>, bytes: &[u8]) -> io::Result<Upload> {
    let mut upload = match upload {
        Some(upload) => upload,
        None => cas.upload()?,
    };
    upload.write(bytes)?;
    Ok(upload)
}

fn acknowledged(stored: Stored, location: &str) -> Response<Body> {
    let status = if stored.new { StatusCode::CREATED } else { StatusCode::OK };
    let body = json!({"b3": stored.address.to_string(), "size": stored.len});
    let mut response = json_answer(status, &body);
    response.headers_mut().insert(LOCATION, value(location));
    response.headers_mut().insert(ETAG, value(stored.address.etag()));
    response
}

fn json_answer(status: StatusCode, body: &Value) -> Response<Body> {
    let mut response = Response::new(Body::full(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, value("application/json"));
    response
}

/// The type that was sent, or that of the name.
fn content_type(headers: &HeaderMap, name: &str) -> Result<String, Rejection> {
    let Some(sent) = headers.get(CONTENT_TYPE) else { return Ok(type_of(name).to_owned()) };
    let good = |text: &&str| text.len() <= CONTENT_TYPE_MAX && text.contains('/');
    let text = sent.to_str().ok().filter(good);
    text.map(str::to_owned).ok_or_else(|| Rejection::new(Reason::Malformed, "Content-Type cannot be read"))
}

/// The surrogate keys, by which the asset can be purged.
fn keys(headers: &HeaderMap) -> Result<Vec<String>, Rejection> {
    let bad = || {
        let detail = format!("Surrogate-Key takes {KEYS_MAX} keys of up to {KEY_MAX} bytes each");
        Rejection::new(Reason::Malformed, detail)
    };
    let mut keys = Vec::new();
    for value in headers.get_all(SURROGATE_KEY) {
        keys.extend(value.to_str().map_err(|_not_ascii| bad())?.split_ascii_whitespace().map(str::to_owned));
    }
    let good = keys.len() <= KEYS_MAX && keys.iter().all(|key| key.len() <= KEY_MAX);
    if good { Ok(keys) } else { Err(bad()) }
}

/// Which names a purge means. A path may be written as in the URL or from behind `/edge/assets`.
fn which(body: &[u8]) -> Option<Names> {
    let Value::Object(fields) = serde_json::from_slice(body).ok()? else { return None };
    let [(field, Value::String(text))] = fields.iter().collect::<Vec<_>>()[..] else { return None };
    let name = || {
        let rest = text.strip_prefix("/edge/assets/").unwrap_or(text);
        rest.strip_prefix('/').unwrap_or(rest).to_owned()
    };
    match field.as_str() {
        "path" if !text.is_empty() => Some(Names::Path(name())),
        "prefix" => Some(Names::Prefix(name())),
        "key" => Some(Names::Key(text.clone())),
        _ => None,
    }
}
