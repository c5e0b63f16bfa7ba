//! The object store behind the local one: what is put here is there before it is acknowledged, and what the local store
//! has let go is fetched from there, checked and kept again.
//!
//! Start from [`Depot`]. An object's key is its address, so that several nodes may share a bucket: none ever overwrites
//! or removes what another has put. Names are not there; they are the local store's.

use crate::address::Address;
use crate::cas::{Arrived, ArrivedBytes, Cas, Object, Put, Upload};
use crate::config::{EdgeSettings, RetrySettings};
use crate::fill::{Ask, Asked, Counters, Failure, Origin, Patience};
use crate::packs::said;
use crate::s3::{self, NoCredentials, ObjectUrl, Store};
use crate::serve::unix_millis;
use arc_swap::{ArcSwap, ArcSwapOption};
use bytes::{Bytes, BytesMut};
use http::Method;
use http::header::{CONTENT_LENGTH, HeaderMap, HeaderValue, IF_NONE_MATCH};
use ron_kernel::health::Severity;
use ron_kernel::http::client::Payload;
use ron_kernel::http::{Body, FileBody, SentFile};
use ron_kernel::inventory::LockSpec;
use ron_kernel::kernel::Service;
use ron_kernel::lock::Lock;
use ron_kernel::task::TaskResult;
use ron_kernel::tls::TlsError;
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

pub(crate) static FETCHES: LockSpec = LockSpec {
    service: "edge",
    name: "depot_fetches",
    rank: 56,
    guards: "which objects are being fetched from the object store; for a look, an insertion or a removal",
};

/// The largest object that a store takes in one request.
pub(crate) const OBJECT_MAX: u64 = 5 << 30;
/// What an upload is given time for beyond `fill.deadline`: so many bytes a second; a guess.
const RATE_MIN: u64 = 1 << 20;
/// What is gathered before it is written, off the runtime.
const STRETCH: usize = 256 << 10;
/// How often it is looked whether the store is there; a guess.
const LOOK: Duration = Duration::from_secs(30);
/// How soon after a failure; the pause doubles, up to that.
const RETRY: Duration = Duration::from_millis(500);
/// What readiness calls a store that is away.
const CAUSE: &str = "depot";
/// The object by which it is found out whether conditions are kept; it stays.
pub(crate) const PROBE: &str = "probe";

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DepotError {
    #[error(transparent)]
    Credentials(#[from] NoCredentials),
    #[error("{0}")]
    Bucket(#[from] s3::BadObject),
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Two nodes that put the same at the same time could not both be sure of it.
    #[error(
        "the store ignores If-None-Match: it overwrote an object that it should have refused to; use a store that keeps conditional writes"
    )]
    Unconditional,
}

/// How the bucket is asked.
#[derive(Debug)]
struct Bucket {
    origin: Origin,
    store: Store,
    retry: RetrySettings,
    deadline: Duration,
    stall: Duration,
    counters: Counters,
}

/// What goes out with a request.
struct Content {
    file: Arc<SentFile>,
    len: u64,
    sha256: [u8; 32],
}

/// An object on its way in, for all who wait.
#[derive(Debug, Default)]
struct Fetch {
    outcome: OnceLock<Result<(), Failure>>,
    landed: Notify,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Depot {
    service: Service,
    cas: Arc<Cas>,
    bucket: ArcSwap<Bucket>,
    /// Why nothing can be put, if so.
    trouble: ArcSwapOption<String>,
    /// Something failed, or the store is another one.
    look: Notify,
    fetches: Lock<HashMap<Address, Arc<Fetch>>>,
}

/// What of a configuration concerns it, read and ready to be put in place.
#[derive(Debug)]
pub(crate) struct Change(Arc<Bucket>);

impl Bucket {
    fn new(service: &Service, settings: &EdgeSettings, base: &Path) -> Result<Bucket, DepotError> {
        let first = ObjectUrl::parse(&settings.cas.first_key())?.locate(&settings.s3)?;
        let store = Store::load(&settings.s3, base)?;
        let origin = Origin::of_store(service, &first, &settings.s3, base)?.ok_or(s3::BadObject::Form)?;
        Ok(Bucket {
            origin,
            store,
            retry: settings.retry.clone(),
            deadline: settings.fill.deadline.0,
            stall: settings.fill.stall_timeout.0,
            counters: Counters::new(service),
        })
    }

    /// Asks for what is in the bucket under a key, behind the prefix.
    async fn ask(
        &self,
        method: Method,
        key: &str,
        mut headers: HeaderMap,
        content: Option<&Content>,
    ) -> Result<Asked, Failure> {
        let path = &self.origin.url.path;
        let base = path.strip_suffix(PROBE).unwrap_or(path);
        let mut ask = Ask::get(&self.origin, format!("{base}{key}"), HeaderMap::new());
        let payload = content.map_or(s3::sign::EMPTY, |content| content.sha256);
        let now = Duration::from_millis(unix_millis());
        let signed = self.store.sign(&method, (&*ask.host, &*ask.target), &mut headers, payload, now);
        signed.map_err(|bad| Failure::Upstream(format!("the keys cannot be sent: {bad}")))?;
        let writes = method == Method::PUT;
        (ask.method, ask.headers) = (method, headers);
        let len = content.map_or(0, |content| content.len);
        ask.body = writes.then_some(Some(len));
        let until = Instant::now() + self.deadline + Duration::from_secs(len / RATE_MIN);
        let patience = Patience { until, stall: self.stall, retry: &self.retry, statuses: true };
        let body = || {
            let content = content.filter(|content| content.len > 0)?;
            Some(Body::file(FileBody::new(content.file.clone(), 0..content.len, None)))
        };
        self.origin.ask_with(&ask, &body, &patience, &self.counters).await
    }

    /// Puts something unless it is there; whether it was.
    async fn put_new(&self, key: &str, content: Option<&Content>) -> Result<bool, Failure> {
        let mut tried = 0;
        loop {
            let headers = HeaderMap::from_iter([(IF_NONE_MATCH, HeaderValue::from_static("*"))]);
            let Asked { answer, .. } = self.ask(Method::PUT, key, headers, content).await?;
            tried += 1;
            match answer.status.as_u16() {
                200..=299 => return Ok(false),
                412 => return Ok(true),
                // Somebody else puts the same at this moment, and may not come to an end.
                409 if tried < self.retry.tries => {
                    self.counters.retries.inc();
                    tokio::time::sleep(self.retry.max.0).await;
                }
                status => return Err(self.refused(status, answer.payload).await),
            }
        }
    }

    async fn refused(&self, status: u16, payload: Payload) -> Failure {
        let said = tokio::time::timeout(self.stall, said(payload)).await.unwrap_or_default();
        Failure::Upstream(s3::refusal(status, &said))
    }

    /// Whether the store is there, lets these keys write, and keeps conditions.
    async fn probe(&self) -> Result<bool, Failure> {
        Ok(self.put_new(PROBE, None).await? || self.put_new(PROBE, None).await?)
    }
}

impl Depot {
    /// Reads the keys and finds out whether the store is fit. One that is away may come back. Blocks, within the runtime.
    pub(crate) fn open(
        service: &Service,
        settings: &EdgeSettings,
        base: &Path,
        cas: &Arc<Cas>,
    ) -> Result<Arc<Depot>, DepotError> {
        let bucket = Bucket::new(service, settings, base)?;
        let probed =
            tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(bucket.probe()));
        let trouble = match probed {
            Ok(true) => None,
            Ok(false) => return Err(DepotError::Unconditional),
            Err(failure) => Some(Arc::new(failure.to_string())),
        };
        let depot = Arc::new(Depot {
            service: service.clone(),
            cas: cas.clone(),
            bucket: ArcSwap::from_pointee(bucket),
            trouble: ArcSwapOption::new(trouble),
            look: Notify::new(),
            fetches: Lock::new(service.inventory(), &FETCHES, HashMap::new()),
        });
        let watching = depot.clone();
        service.permanent("depot", 0, move || watch(watching.clone()));
        Ok(depot)
    }

    /// Reads what another configuration needs.
    pub(crate) fn prepare(&self, settings: &EdgeSettings, base: &Path) -> Result<Change, DepotError> {
        Bucket::new(&self.service, settings, base).map(Arc::new).map(Change)
    }

    pub(crate) fn apply(&self, change: &Change) {
        self.bucket.store(change.0.clone());
        self.look.notify_one();
    }

    /// Has the store keep what arrived; when this returns it has it.
    pub(crate) async fn keep(&self, arrived: &Arrived) -> Result<(), Failure> {
        if let Some(trouble) = &*self.trouble.load() {
            return Err(Failure::Upstream(trouble.to_string()));
        }
        let ArrivedBytes::Disk { file, .. } = &arrived.bytes else { return Ok(()) };
        let path = file.path.clone();
        let opened = tokio::task::spawn_blocking(move || File::open(path)).await;
        let file = opened.map_err(std::io::Error::other).and_then(|opened| opened);
        let file = Arc::new(file.map_err(|error| Failure::Store(error.to_string()))?.into());
        let content = Content { file, len: arrived.len, sha256: arrived.sha256 };
        let kept = self.bucket.load_full().put_new(&key_of(&arrived.address), Some(&content)).await;
        kept.map(drop).inspect_err(|failure| self.note(failure))
    }

    /// Notes that the store failed, until it is known to do better.
    fn note(&self, failure: &Failure) {
        tracing::warn!(%failure, "the object store failed");
        self.trouble.store(Some(Arc::new(failure.to_string())));
        self.look.notify_one();
    }

    /// Tells readiness how it is; whether there is trouble.
    fn tell(&self, told: &mut Told<'_>) -> bool {
        let trouble = self.trouble.load_full();
        told.tell(trouble.as_ref().map(|why| why.as_str()));
        trouble.is_some()
    }

    /// Fetches what the local store does not have; however many want it, once. It goes on when they have left.
    pub(crate) async fn fetch(self: &Arc<Self>, address: Address, until: Instant) -> Result<Object, Failure> {
        let (fetch, first) = {
            let mut fetches = self.fetches.lock();
            match fetches.get(&address) {
                Some(fetch) => (fetch.clone(), false),
                None => (fetches.entry(address).or_default().clone(), true),
            }
        };
        let landed = fetch.landed.notified();
        tokio::pin!(landed);
        landed.as_mut().enable();
        if first {
            let landing = Landing { depot: self.clone(), address, fetch: fetch.clone() };
            self.service.scoped("fill", move || address.to_string(), async move {
                let brought = landing.depot.bring(address).await;
                let _ = landing.fetch.outcome.set(brought);
            });
        }
        if fetch.outcome.get().is_none() {
            tokio::time::timeout_at(until.into(), landed).await.map_err(|_late| Failure::Timeout)?;
        }
        if let Some(Err(failure)) = fetch.outcome.get() {
            return Err(failure.clone());
        }
        // It may have had to go again at once.
        self.cas.object(&address).ok_or(Failure::NoRoom)
    }

    async fn bring(&self, address: Address) -> Result<(), Failure> {
        let bucket = self.bucket.load_full();
        let asked = bucket.ask(Method::GET, &key_of(&address), HeaderMap::new(), None).await;
        let Asked { answer, permit, .. } = asked.inspect_err(|failure| self.note(failure))?;
        match answer.status.as_u16() {
            200 => {}
            404 => {
                let failure = bucket.refused(404, answer.payload).await;
                // Without its bucket nothing is known of an object.
                let unknown = failure.to_string().contains("NoSuchBucket");
                return Err(if unknown { failure } else { Failure::Missing { gone: false } });
            }
            status => return Err(bucket.refused(status, answer.payload).await),
        }
        let fields = answer.fields.into_map();
        let len = fields.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        self.cas.can_hold(len.unwrap_or(0))?;
        let arrived = self.take_in(answer.payload).await?;
        drop(permit);
        if arrived.address != address {
            tracing::error!(object = %address, found = %arrived.address, "the object store has other bytes under an address");
            return Err(Failure::Validators);
        }
        self.cas.put(Put { arrived, name: None }).await?;
        Ok(())
    }

    /// Writes and hashes a body as it comes.
    async fn take_in(&self, payload: Payload) -> Result<Arrived, Failure> {
        let mut body = match payload {
            Payload::Whole(bytes) => Body::full(bytes),
            Payload::Stream(stream) => Body::stream(stream),
            Payload::Upgraded(_) => return Err(Failure::Upstream("it changed the protocol".to_owned())),
        };
        let (mut upload, mut held, mut len) = (None, BytesMut::new(), 0);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Failure::Upstream(error.to_string()))?;
            let Ok(data) = frame.into_data() else { continue };
            len += data.len() as u64;
            self.cas.can_hold(len)?;
            held.extend_from_slice(&data);
            if held.len() >= STRETCH {
                upload = Some(self.write(upload, held.split().freeze()).await?);
            }
        }
        let upload = self.write(upload, held.freeze()).await?;
        // The store has it: what a power cut leaves of it here is found out when it is read.
        blocking(move || upload.finish(false)).await
    }

    async fn write(&self, upload: Option<Upload>, bytes: Bytes) -> Result<Upload, Failure> {
        let cas = self.cas.clone();
        blocking(move || {
            let mut upload = upload.map_or_else(|| cas.upload(), Ok)?;
            upload.write(&bytes)?;
            Ok(upload)
        })
        .await
    }
}

/// Tells those who wait that a fetch has ended, also if it was aborted.
struct Landing {
    depot: Arc<Depot>,
    address: Address,
    fetch: Arc<Fetch>,
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.depot.fetches.lock().remove(&self.address);
        let _ = self.fetch.outcome.set(Err(Failure::Lost));
        self.fetch.landed.notify_waiters();
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| crate::cas::CasError::from(error).into()),
        Err(lost) => Err(Failure::Store(lost.to_string())),
    }
}

/// The key of an object, behind what stands before all of them.
fn key_of(address: &Address) -> String {
    let hex = address.hex();
    format!("b3/{}/{}/{hex}", &hex[..2], &hex[2..4])
}

/// What readiness was told; taken back when the task that told it ends.
struct Told<'a> {
    service: &'a Service,
    away: bool,
}

impl Told<'_> {
    fn tell(&mut self, trouble: Option<&str>) {
        match (trouble, self.away) {
            (Some(why), false) => self.service.lose_because(CAUSE, Severity::WritesShed, why),
            (Some(why), true) => self.service.explain(CAUSE, why),
            (None, true) => {
                tracing::info!("the object store is well again");
                self.service.restore(CAUSE);
            }
            (None, false) => {}
        }
        self.away = trouble.is_some();
    }
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if self.away {
            self.service.restore(CAUSE);
        }
    }
}

/// Looks now and then whether the store is there, soon after something failed.
async fn watch(depot: Arc<Depot>) -> TaskResult {
    let service = depot.service.clone();
    let (mut told, mut pause) = (Told { service: &service, away: false }, RETRY);
    loop {
        let trouble = depot.tell(&mut told);
        let wait = if trouble { pause } else { LOOK };
        pause = if trouble { (2 * pause).min(LOOK) } else { RETRY };
        tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            () = depot.look.notified() => {}
            () = tokio::time::sleep(wait) => {}
        }
        // Somebody found it out already, and asking may take a while.
        depot.tell(&mut told);
        let bucket = depot.bucket.load_full();
        let probed = tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            probed = bucket.probe() => probed,
        };
        let trouble = match probed {
            Ok(true) => None,
            Ok(false) => Some(DepotError::Unconditional.to_string()),
            Err(failure) => Some(failure.to_string()),
        };
        depot.trouble.store(trouble.map(Arc::new));
    }
}
