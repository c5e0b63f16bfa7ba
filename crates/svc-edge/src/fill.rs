//! Live fill: objects that are not stored are fetched from their origins, each once however many want it.
//!
//! Start from [`Fill`]. A request that finds nothing joins a [`Flight`]; the first to want it also puts a job into the
//! `work` queue, from which workers take what they bring in. [`origin`] knows whom to ask and when again, `pump` moves
//! the bytes into the store and past whoever looks on.

mod asset;
pub(crate) mod flight;
mod negative;
pub(crate) mod origin;
mod pump;
mod response;

pub(crate) use asset::{AssetWork, FIELDS, NAME_MAX};
pub(crate) use flight::{Begun, Claim, Digests, FLIGHTS, FlightBody, Landed, News};
pub(crate) use negative::NEGATIVE;
pub(crate) use origin::{Ask, Asked, IDLE, Origin, Origins, Patience, host_of, via};
pub(crate) use response::{Exchanged, Passed, SiteWork, Storable, cleaned};

use crate::cas::{Cas, CasError};
use crate::serve::Snapshot;
use negative::Negative;
use pump::{Caps, Pumped, pump};
use ron_kernel::admission::decode::DecodeLimits;
use ron_kernel::channel::{self, Receiver, Sender};
use ron_kernel::inventory::{ChannelKind, ChannelSpec, Policy};
use ron_kernel::kernel::Service;
use ron_kernel::metrics::Counter;
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use ron_kernel::sync::{Limits, Permits, PushError};
use ron_kernel::task::TaskResult;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Flights, and what only one client gets of them.
pub(crate) type Flight = flight::Flight<Passed>;
pub(crate) type Flights = flight::Flights<Passed>;
pub(crate) type Pilot = flight::Pilot<Passed>;

/// Workers where the configuration names no number.
const WORKERS: usize = 64;
/// How often it is looked whether a drain has ended.
const DRAIN_LOOK: Duration = Duration::from_millis(20);
/// For how long after a refusal the service calls itself overloaded.
const SHED: Duration = Duration::from_millis(500);

pub(crate) static WORK: ChannelSpec = ChannelSpec {
    service: "edge",
    name: "work",
    kind: ChannelKind::Mpsc,
    capacity: 512,
    policy: Policy::RejectNew,
    producers: &["conn"],
    consumers: &["worker"],
};

/// Why an origin gave nothing that can be used. Everybody who waits is told the same.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    #[error("the origin may not be asked")]
    NotAllowed,
    #[error("the origin has nothing there")]
    Missing { gone: bool },
    #[error("the origin failed: {0}")]
    Upstream(String),
    #[error("the object is larger than allowed")]
    TooLarge,
    #[error("the object is larger than the memory for objects")]
    Amnesia,
    #[error("the answer decodes to more than allowed")]
    Decompress,
    #[error("the answer contradicts its own validators")]
    Validators,
    #[error("the origin did not answer in time")]
    Timeout,
    #[error("too many objects wait to be fetched")]
    Busy,
    #[error("the origin is asked too often")]
    RateLimit(u64),
    #[error("there is no room")]
    NoRoom,
    #[error("the store failed: {0}")]
    Store(String),
    #[error("the request's body could not be sent")]
    RequestBody { too_large: bool },
    #[error("the service is shutting down")]
    Draining,
    /// Whoever brought it in is gone; another may try.
    #[error("the fetch was interrupted")]
    Lost,
}

impl Failure {
    /// Whether another try may fare better.
    fn is_passing(&self) -> bool {
        matches!(self, Failure::Upstream(_) | Failure::Timeout)
    }

    /// Whether what is stored may stand in, if it is allowed to for a while after an error.
    pub(crate) fn is_error_of_origin(&self) -> bool {
        matches!(
            self,
            Failure::Upstream(_) | Failure::Timeout | Failure::Busy | Failure::RateLimit(_) | Failure::Lost
        )
    }

    pub(crate) fn rejection(&self) -> Rejection {
        let plain = |reason, detail: &'static str| Rejection::new(reason, detail);
        match self {
            Failure::NotAllowed => {
                plain(Reason::NotAllowed, "the origin, or where it leads, may not be asked")
            }
            Failure::Missing { gone: false } => plain(Reason::NotFound, "the origin has nothing there"),
            Failure::Missing { gone: true } => plain(Reason::Gone, "the origin has nothing there any more"),
            Failure::Upstream(_) => plain(Reason::Upstream, "the origin failed"),
            Failure::TooLarge => plain(Reason::Upstream, "the origin's object is larger than allowed"),
            Failure::Amnesia => plain(Reason::Amnesia, "the object is larger than the memory for objects"),
            Failure::Decompress => {
                plain(Reason::DecompressCap, "the origin's answer decodes to more than allowed")
            }
            Failure::Validators => {
                plain(Reason::EtagInvalid, "the origin's bytes are not what it says they are")
            }
            Failure::Timeout => plain(Reason::Timeout, "the origin did not answer in time"),
            Failure::Busy => plain(Reason::Busy, "too many objects wait to be fetched").retry_after(1),
            Failure::RateLimit(seconds) => {
                plain(Reason::RateLimit, "the origin may not be asked more often").retry_after(*seconds)
            }
            Failure::NoRoom => plain(Reason::NoRoom, "there is no room for the object"),
            Failure::Store(_) => plain(Reason::Internal, "the object could not be stored"),
            Failure::RequestBody { too_large: true } => {
                plain(Reason::BodyCap, "the body is larger than allowed")
            }
            Failure::RequestBody { too_large: false } => {
                plain(Reason::Malformed, "the request's body could not be read")
            }
            Failure::Draining => plain(Reason::Draining, "the service is shutting down"),
            Failure::Lost => plain(Reason::Upstream, "the fetch was interrupted"),
        }
    }
}

impl From<CasError> for Failure {
    fn from(error: CasError) -> Failure {
        match error {
            CasError::Busy => Failure::Busy,
            CasError::Closing => Failure::Draining,
            CasError::Full => Failure::NoRoom,
            CasError::Amnesia => Failure::Amnesia,
            CasError::Precondition => Failure::Store("a name is taken".to_owned()),
            CasError::Io(error) => Failure::Store(error),
        }
    }
}

/// What is counted about fills.
#[derive(Clone, Debug)]
pub(crate) struct Counters {
    pub(crate) timeouts: Counter,
    pub(crate) retries: Counter,
}

impl Counters {
    pub(crate) fn new(service: &Service) -> Counters {
        Counters {
            timeouts: service.io_timeout("fill"),
            retries: service.counter(
                "backoff_retries_total",
                "Tries after a failure that may pass.",
                "op",
                "live_fill",
            ),
        }
    }
}

/// Something to bring in.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) pilot: Pilot,
    pub(crate) work: Work,
    pub(crate) snapshot: Arc<Snapshot>,
    /// By when its answer must have begun.
    pub(crate) until: Instant,
}

#[derive(Debug)]
pub(crate) enum Work {
    Asset(Box<AssetWork>),
    Site(Arc<SiteWork>),
}

impl Work {
    fn target(&self) -> &str {
        match self {
            Work::Asset(work) => &work.target,
            Work::Site(work) => &work.target,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Fill {
    pub(crate) service: Service,
    pub(crate) cas: Arc<Cas>,
    pub(crate) flights: Arc<Flights>,
    pub(crate) negative: Negative,
    pub(crate) counters: Counters,
    /// Encoding takes a core each, so only so many objects are encoded at a time; the others go without.
    pub(crate) encoders: Arc<Permits>,
    work: Sender<Job>,
    /// Objects whose answers have not begun yet. Workers wait for a place here and not for an origin.
    asking: Arc<Permits>,
    workers: usize,
    /// Those that are running.
    alive: AtomicUsize,
    /// When a job was last refused, in milliseconds after `begun`, and one more.
    refused: AtomicU64,
    begun: Instant,
}

impl Fill {
    pub(crate) fn new(
        service: &Service,
        cas: &Arc<Cas>,
        encoders: &Arc<Permits>,
        settings: &crate::config::FillSettings,
    ) -> (Arc<Fill>, Receiver<Job>) {
        let limits = Limits::items(settings.work_capacity);
        let (work, jobs) = channel::queue(service.inventory(), &WORK, limits, Policy::RejectNew);
        let fill = Fill {
            service: service.clone(),
            cas: cas.clone(),
            flights: Arc::new(Flights::new(service.inventory())),
            negative: Negative::new(service.inventory()),
            counters: Counters::new(service),
            encoders: encoders.clone(),
            work,
            asking: Permits::new(settings.work_capacity),
            workers: if settings.workers == 0 { WORKERS } else { settings.workers },
            alive: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
            begun: Instant::now(),
        };
        (Arc::new(fill), jobs)
    }

    /// Starts the workers.
    pub(crate) fn run(self: &Arc<Fill>, jobs: Receiver<Job>) {
        let jobs = Arc::new(jobs);
        for index in 0..self.workers {
            let (fill, jobs) = (self.clone(), jobs.clone());
            self.service.permanent("worker", index, move || work(fill.clone(), jobs.clone()));
        }
    }

    /// Hands a job to the workers. If they have too much to do, everybody who waits for it is told.
    pub(crate) fn submit(&self, job: Job) -> Result<(), Failure> {
        let (job, failure) = match self.work.try_send(job) {
            Ok(_) => return Ok(()),
            Err(PushError::Busy(busy)) => {
                let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
                self.refused.store(now.saturating_add(1), Ordering::Relaxed);
                (busy.0, Failure::Busy)
            }
            Err(PushError::Closed(job)) => (job, Failure::Draining),
        };
        job.pilot.flight.end(Err(failure.clone()));
        Err(failure)
    }

    /// Whether objects are refused, or would be soon: jobs were turned away, or workers are missing.
    pub(crate) fn is_short(&self) -> bool {
        let refused = self.refused.load(Ordering::Relaxed);
        let since = self.begun.elapsed().saturating_sub(Duration::from_millis(refused.saturating_sub(1)));
        refused > 0 && since < SHED || self.alive.load(Ordering::Relaxed) < self.workers
    }

    pub(crate) fn caps(snapshot: &Snapshot) -> Caps {
        let (fill, ingress) = (&snapshot.settings.fill, &snapshot.settings.ingress);
        Caps {
            bytes_max: fill.max_object_bytes.0,
            keep: fill.buffer_bytes.0,
            stall: fill.stall_timeout.0,
            decode: DecodeLimits {
                ratio_max: ingress.decompress_max_ratio,
                bytes_max: ingress.decompress_abs_bytes.0,
            },
            unstored: false,
        }
    }

    pub(crate) fn patience(snapshot: &Snapshot, until: Instant) -> Patience<'_> {
        let settings = &snapshot.settings;
        Patience { until, stall: settings.fill.stall_timeout.0, retry: &settings.retry, statuses: false }
    }
}

/// Counts a worker for as long as it runs.
struct Alive<'a>(&'a AtomicUsize);

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Takes jobs until nobody can want anything any more, and has each done by a task of its own, whose pilot tells those
/// who wait however it ends.
async fn work(fill: Arc<Fill>, jobs: Arc<Receiver<Job>>) -> TaskResult {
    fill.alive.fetch_add(1, Ordering::Relaxed);
    let _alive = Alive(&fill.alive);
    loop {
        let place = tokio::select! {
            biased;
            place = std::future::poll_fn(|cx| fill.asking.poll_take(cx)) => Some(place),
            () = drained(&fill.service) => None,
        };
        let job = tokio::select! {
            biased;
            job = jobs.recv() => job,
            () = drained(&fill.service) => jobs.try_recv(),
        };
        let Some(Job { pilot, work, snapshot, until }) = job else { return Ok(()) };
        if Instant::now() >= until {
            pilot.flight.end(Err(Failure::Timeout));
            continue;
        }
        // How long an answer takes is its origin's affair, whose own permits bound them: the worker goes on.
        let (fill, target) = (fill.clone(), work.target().to_owned());
        fill.service.clone().scoped("fill", move || target.clone(), async move {
            match work {
                Work::Asset(work) => fill.bring_asset(pilot, *work, &snapshot, until, place).await,
                Work::Site(work) => fill.bring_response(pilot, work, &snapshot, until, place).await,
            }
        });
    }
}

/// Resolves when the service drains and no request is left.
async fn drained(service: &Service) {
    service.shutdown().draining().await;
    while service.tasks().live_scoped() > 0 {
        tokio::time::sleep(DRAIN_LOOK).await;
    }
}
