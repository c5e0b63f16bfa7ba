//! A pack on another server or in an object store, read by ranges over HTTPS under the rules that hold for origins.
//!
//! What was mounted is one version of the file, by its entity tag: every read asks for that version, and bytes of
//! another are never taken. Those who want the same bytes at the same time share one request.

use super::checked::Damage;
use crate::config::RetrySettings;
use crate::egress::OriginUrl;
use crate::fill::{Ask, Asked, Counters, Failure, Origin, Patience};
use crate::pack::ReadAt;
use crate::s3::{self, Store};
use crate::serve::unix_millis;
use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_RANGE, ETAG, HeaderValue, IF_MATCH, RANGE};
use ron_kernel::http::Body;
use ron_kernel::http::client::Payload;
use ron_kernel::inventory::{Inventory, LockSpec};
use ron_kernel::lock::Lock;
use ron_kernel::sync::{Permit, Permits};
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

pub(crate) static READS: LockSpec = LockSpec {
    service: "edge",
    name: "pack_reads",
    rank: 54,
    guards: "which bytes of a remote pack are being asked for; for a look or an insertion, never while asking",
};

/// Reads of one pack that wait for its server at a time; each holds a thread.
const READS_MAX: usize = 64;
/// What is read of an object store's refusal, to say what it is about.
const REFUSAL_MAX: usize = 16 << 10;
/// The longest entity tag that is sent back.
const TAG_MAX: usize = 1024;

/// Whether a pack's path is a URL, and so not a file of this machine.
pub(crate) fn is_remote(path: &str) -> bool {
    path.contains("://")
}

/// How a server is asked.
#[derive(Clone, Debug)]
pub(crate) struct Manner {
    pub(crate) origin: Arc<Origin>,
    /// The object store that it is, and with whose keys requests are signed.
    pub(crate) store: Option<Arc<Store>>,
    pub(crate) retry: RetrySettings,
    /// For one read as a whole.
    pub(crate) deadline: Duration,
    pub(crate) stall: Duration,
    pub(crate) counters: Counters,
}

/// One version of a file on a server. Its calls block, and must not be made by the runtime's own threads.
#[derive(Debug)]
pub(crate) struct RemoteFile {
    manner: Manner,
    runtime: Handle,
    tag: HeaderValue,
    size: u64,
    reads: Lock<Reads>,
    places: Arc<Permits>,
}

/// What came of a read; several may want to know.
type Read = Result<Bytes, Fault>;

/// Reads that go on, by place and length.
type Reads = HashMap<(u64, usize), Arc<OnceLock<Read>>>;

/// Why bytes could not be had.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Fault {
    /// The file is another one by now.
    #[error("the file on the server is another one")]
    Changed,
    #[error("{0}")]
    Server(String),
    #[error("the server did not answer in time")]
    Late,
    #[error(
        "its address is not one that may be asked: allow_private, of the pack or of [edge.s3], allows those of private networks"
    )]
    NotAllowed,
}

impl From<Failure> for Fault {
    fn from(failure: Failure) -> Fault {
        match failure {
            Failure::Timeout => Fault::Late,
            Failure::NotAllowed => Fault::NotAllowed,
            other => Fault::Server(other.to_string()),
        }
    }
}

impl From<Fault> for io::Error {
    fn from(fault: Fault) -> io::Error {
        match fault {
            Fault::Changed => Damage::Changed.into(),
            Fault::Late => io::Error::new(io::ErrorKind::TimedOut, fault),
            other => io::Error::new(io::ErrorKind::ConnectionAborted, other),
        }
    }
}

/// What the server says of the part that it sent.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    tag: HeaderValue,
    start: u64,
    /// The last byte of it.
    end: u64,
    size: u64,
}

impl Part {
    /// Reads the head of an answer.
    fn of(status: u16, headers: &HeaderMap) -> Result<Part, Fault> {
        let bad = |what: &str| Err(Fault::Server(what.to_owned()));
        match status {
            206 => {}
            412 => return Err(Fault::Changed),
            200 => return bad("the server does not send parts of files (it answered 200 to a range)"),
            301..=308 => return bad("the server redirects: name the file's own address"),
            416 => return bad("the server says that the file is shorter than a pack"),
            status => return bad(&format!("the server answered {status}")),
        }
        let coded = headers.get(CONTENT_ENCODING).is_some_and(|coding| coding != "identity");
        if coded {
            return bad("the server compresses parts of the file on their way");
        }
        let tag = headers.get(ETAG).filter(|tag| tag.as_bytes().starts_with(b"\"") && tag.len() <= TAG_MAX);
        let Some(tag) = tag.cloned() else {
            return bad("the server gives the file no strong ETag, without which versions could be mixed");
        };
        let range = headers.get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
        let numbers = range.and_then(|range| {
            let (part, size) = range.strip_prefix("bytes ")?.split_once('/')?;
            let (start, end) = part.split_once('-')?;
            Some((start.parse().ok()?, end.parse().ok()?, size.parse().ok()?))
        });
        match numbers {
            Some((start, end, size)) if start <= end && end < size => Ok(Part { tag, start, end, size }),
            _ => bad("the server does not say which part of the file it sent"),
        }
    }
}

impl Manner {
    /// Asks for a part of the file, of one version if that is known, and for as many bytes as it has of it.
    async fn ask(&self, at: u64, length: usize, tag: Option<&HeaderValue>) -> Result<(Part, Bytes), Fault> {
        let last = at.saturating_add(length as u64).saturating_sub(1);
        let mut headers = HeaderMap::new();
        let value = |text: String| HeaderValue::try_from(text).map_err(|bad| Fault::Server(bad.to_string()));
        headers.insert(RANGE, value(format!("bytes={at}-{last}"))?);
        if let Some(tag) = tag {
            headers.insert(IF_MATCH, tag.clone());
        }
        let OriginUrl { path, .. } = &self.origin.url;
        let mut ask = Ask::get(&self.origin, path.clone(), headers);
        if let Some(store) = &self.store {
            let now = Duration::from_millis(unix_millis());
            let signed = store.sign(&ask.method, &ask.host, &ask.target, &mut ask.headers, now);
            signed.map_err(|bad| Fault::Server(format!("the object store's keys cannot be sent: {bad}")))?;
        }
        // Not signed: there are stores whose own front changes it on the way.
        ask.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let until = Instant::now() + self.deadline;
        let patience = Patience { until, stall: self.stall, retry: &self.retry, statuses: true };
        let Asked { answer, permit, .. } = self.origin.ask(&ask, &patience, &self.counters).await?;
        let status = answer.status.as_u16();
        if self.store.is_some() && !matches!(status, 200 | 206 | 412 | 416) {
            let refused = tokio::time::timeout_at(until.into(), said(answer.payload)).await;
            let said = refused.unwrap_or_default();
            return Err(Fault::Server(s3::refusal(status, &said)));
        }
        let part = Part::of(status, &answer.fields.into_map())?;
        // A server that knows no If-Match sends what it has, and says what that is.
        if tag.is_some_and(|tag| *tag != part.tag) {
            return Err(Fault::Changed);
        }
        if part.start != at || part.end > last {
            return Err(Fault::Server("the server sent another part than it was asked for".to_owned()));
        }
        let expected = usize::try_from(part.end - part.start + 1).unwrap_or(usize::MAX);
        let body = collect(answer.payload, expected);
        let body = tokio::time::timeout_at(until.into(), body).await.map_err(|_late| {
            self.counters.timeouts.inc();
            Fault::Late
        })?;
        drop(permit);
        Ok((part, body?))
    }
}

/// What an object store says with its refusal, if that is short; without it there is still the status.
async fn said(payload: Payload) -> Bytes {
    match payload {
        Payload::Whole(bytes) => bytes,
        Payload::Stream(stream) => Body::stream(stream).collect(REFUSAL_MAX).await.unwrap_or_default(),
        Payload::Upgraded(_) => Bytes::new(),
    }
}

/// A body of just this length.
async fn collect(payload: Payload, length: usize) -> Result<Bytes, Fault> {
    let broken = |why: &str| Fault::Server(format!("the server broke off its answer: {why}"));
    let bytes = match payload {
        Payload::Whole(bytes) => bytes,
        Payload::Stream(stream) => {
            let (mut body, mut bytes) = (Body::stream(stream), BytesMut::new());
            while let Some(frame) = body.frame().await {
                if let Ok(data) = frame.map_err(|error| broken(&error.to_string()))?.into_data() {
                    if bytes.len() + data.len() > length {
                        return Err(broken("it is longer than it says"));
                    }
                    bytes.extend_from_slice(&data);
                }
            }
            bytes.freeze()
        }
        Payload::Upgraded(_) => return Err(broken("it changed the protocol")),
    };
    if bytes.len() == length { Ok(bytes) } else { Err(broken("it is shorter than it says")) }
}

impl RemoteFile {
    /// Finds out which version of the file there is. Blocks.
    pub(crate) fn open(manner: Manner, runtime: &Handle, inventory: &Inventory) -> Result<RemoteFile, Fault> {
        let (part, _) = runtime.block_on(manner.ask(0, 1, None))?;
        Ok(RemoteFile {
            manner,
            runtime: runtime.clone(),
            tag: part.tag,
            size: part.size,
            reads: Lock::new(inventory, &READS, HashMap::new()),
            places: Permits::new(READS_MAX),
        })
    }

    /// What tells this version from others.
    pub(crate) fn tag(&self) -> &[u8] {
        self.tag.as_bytes()
    }

    /// A place among those who read; none if too many do.
    pub(crate) fn place(&self) -> Option<Permit> {
        self.places.try_take()
    }

    /// Whether it is read from the same place in the same way.
    pub(crate) fn is_asked_like(&self, manner: &Manner) -> bool {
        self.manner.origin.url == manner.origin.url && self.manner.store == manner.store
    }

    /// Whether the server has another version by now; `false` if it does not say. Blocks.
    pub(crate) fn is_replaced(&self) -> bool {
        let asked = self.runtime.block_on(self.manner.ask(0, 1, Some(&self.tag)));
        matches!(asked, Err(Fault::Changed))
    }
}

impl ReadAt for RemoteFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, length: usize) -> io::Result<Bytes> {
        if length == 0 {
            return Ok(Bytes::new());
        }
        let key = (offset, length);
        let slot = self.reads.lock().entry(key).or_default().clone();
        let read = slot.get_or_init(|| {
            let (part, bytes) = self.runtime.block_on(self.manner.ask(offset, length, Some(&self.tag)))?;
            if bytes.len() == length && part.size == self.size { Ok(bytes) } else { Err(Fault::Changed) }
        });
        // Whoever comes from now on asks anew, whatever came of it.
        let mut reads = self.reads.lock();
        if reads.get(&key).is_some_and(|known| Arc::ptr_eq(known, &slot)) {
            reads.remove(&key);
        }
        drop(reads);
        read.clone().map_err(io::Error::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(&'static str, &str)]) -> HeaderMap {
        let field = |(name, value): &(&'static str, &str)| {
            (http::HeaderName::from_static(name), HeaderValue::try_from(*value).unwrap())
        };
        fields.iter().map(field).collect()
    }

    #[test]
    fn only_a_part_of_a_version_that_has_a_name_is_taken() {
        let good = [("etag", "\"a\""), ("content-range", "bytes 5-9/100")];
        let part = Part::of(206, &headers(&good)).unwrap();
        assert_eq!(part, Part { tag: HeaderValue::from_static("\"a\""), start: 5, end: 9, size: 100 });
        assert!(matches!(Part::of(412, &headers(&good)), Err(Fault::Changed)));
        let refused = |status, fields: &[(&'static str, &str)], why: &str| {
            let fault = Part::of(status, &headers(fields)).unwrap_err().to_string();
            assert!(fault.contains(why), "{fault}");
        };
        refused(200, &good, "does not send parts");
        refused(302, &good, "redirects");
        refused(404, &good, "404");
        refused(206, &[("etag", "W/\"a\""), good[1]], "no strong ETag");
        refused(206, &[good[1]], "no strong ETag");
        refused(206, &[good[0]], "which part");
        for odd in ["bytes 9-5/100", "bytes 5-100/100", "bytes 5-9/*", "bytes */100", "5-9/100", "bytes 5-9"]
        {
            refused(206, &[good[0], ("content-range", odd)], "which part");
        }
        refused(206, &[good[0], good[1], ("content-encoding", "gzip")], "compresses");
    }
}
