//! Building and running the edge.

use crate::cas::{self, CATALOG, CHANGES, Cas, DiskError, HOT};
use crate::config::{Backend, EdgeSettings, Fsync};
use crate::depot::{Depot, DepotError, FETCHES};
use crate::fill::{FLIGHTS, Fill, IDLE, NEGATIVE, Origins, WORK};
use crate::pack::{CONNECTION, DIRECTORIES};
use crate::packs::{self, Packs, READS, TILES};
use crate::serve::{COUNTERS, Edge as Serving, Stores};
use http::Method;
use ron_kernel::bus::{KernelEvent, Next};
use ron_kernel::channel;
use ron_kernel::config::Prepared;
use ron_kernel::health::Severity;
use ron_kernel::http::{BindError, Server, bind_tcp, server_tasks};
use ron_kernel::inventory::{ChannelSpec, LockSpec, TaskSort, TaskSpec};
use ron_kernel::kernel::{Service, config_spec, events_spec, shutdown_spec};
use ron_kernel::node::DataDir;
use ron_kernel::sync::Permits;
use ron_kernel::task::TaskResult;
use ron_kernel::tls::{TlsError, TlsServer};
use ron_kernel::token::Verifier;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::watch;

const NAME: &str = "edge";

static SHUTDOWN: ChannelSpec = shutdown_spec(
    NAME,
    &["listener", "sweeper", "keeper", "scrub", "worker", "packs", "depot", "housekeeping"],
);
static EVENTS: ChannelSpec = events_spec(NAME, &["housekeeping"]);
static CONFIG: ChannelSpec = config_spec(NAME, &["packs", "housekeeping"]);

/// The edge's declarations, for the inventory and the document.
pub static CHANNELS: [&ChannelSpec; 5] = [&WORK, &CHANGES, &EVENTS, &SHUTDOWN, &CONFIG];
pub static LOCKS: [&LockSpec; 11] = [
    &CATALOG,
    &HOT,
    &FLIGHTS,
    &NEGATIVE,
    &COUNTERS,
    &IDLE,
    &DIRECTORIES,
    &CONNECTION,
    &TILES,
    &READS,
    &FETCHES,
];
pub const TASKS: [TaskSpec; 10] = {
    let [listener, sweeper, conn] = server_tasks(NAME);
    [
        listener,
        sweeper,
        conn,
        TaskSpec {
            service: NAME,
            kind: "keeper",
            sort: TaskSort::Permanent,
            does: "makes every change of the store, and answers when it is durable",
        },
        TaskSpec {
            service: NAME,
            kind: "scrub",
            sort: TaskSort::Permanent,
            does: "reads every object now and then, to find bad bytes",
        },
        TaskSpec {
            service: NAME,
            kind: "worker",
            sort: TaskSort::Permanent,
            does: "asks origins for what is not stored, for one object at a time",
        },
        TaskSpec {
            service: NAME,
            kind: "fill",
            sort: TaskSort::Scoped,
            does: "brings in the body of an origin's answer, also when the client that began it has left",
        },
        TaskSpec {
            service: NAME,
            kind: "packs",
            sort: TaskSort::Permanent,
            does: "finds out the address of each pack that is mounted, so that its bytes can be checked; mounts packs on servers",
        },
        TaskSpec {
            service: NAME,
            kind: "depot",
            sort: TaskSort::Permanent,
            does: "looks whether the object store behind the local one is there, and tells readiness",
        },
        TaskSpec {
            service: NAME,
            kind: "housekeeping",
            sort: TaskSort::Permanent,
            does: "tells readiness of a full disk, damaged objects and missing workers, closes idle connections",
        },
    ]
};

/// How often it is looked how the store and the workers are.
const LOOK: Duration = Duration::from_millis(250);

#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error("edge: {0}")]
    Bind(#[from] BindError),
    #[error("edge.tls: {0}")]
    Tls(#[from] TlsError),
    #[error("edge.cas.dir: {0}")]
    Store(#[from] DiskError),
    #[error("edge.cas.backend: {0}")]
    Depot(#[from] DepotError),
    #[error("edge.origins or edge.sites: {0}")]
    Origin(TlsError),
}

/// The edge, bound and ready to serve.
#[derive(Debug)]
pub struct Edge {
    service: Service,
    server: Arc<Server<Arc<Serving>>>,
    cas: Arc<Cas>,
    fill: Arc<Fill>,
    packs: Arc<Packs>,
    depot: Option<Arc<Depot>>,
    in_memory: bool,
    config: watch::Sender<Arc<EdgeSettings>>,
    tls: Option<Arc<TlsServer>>,
    addresses: Vec<(&'static str, String)>,
    data: DataDir,
}

impl Edge {
    /// Binds every listener and opens the store; what can fail fails here. Call it inside the runtime.
    pub fn build(
        service: &Service,
        settings: &EdgeSettings,
        data: &DataDir,
        amnesia: bool,
        verifier: Verifier,
    ) -> Result<Edge, BuildError> {
        service.declare(&SHUTDOWN, &EVENTS);
        let (config, receiver) = channel::latest(service.inventory(), &CONFIG, Arc::new(settings.clone()));
        let plain = bind_tcp(settings.listen)?;
        let mut addresses = vec![("http", plain.address())];
        let mut listeners = vec![(plain, None)];
        let mut tls = None;
        if let Some(tls_settings) = &settings.tls {
            let server = TlsServer::new(tls_settings.load(data.path())?);
            let bound = bind_tcp(tls_settings.listen)?;
            addresses.push(("https", bound.address()));
            listeners.push((bound, Some(server.clone())));
            tls = Some(server);
        }
        let in_memory = settings.in_memory(amnesia);
        let folder = (!in_memory).then(|| data.join(&settings.cas.dir));
        let sync = settings.cas.fsync == Fsync::Always;
        let (cas, changes) = Cas::open(service, folder.as_deref(), sync, settings.store(in_memory))?;
        let packs = Packs::new(service, folder.map(|folder| folder.join("packs")), settings.trust());
        packs.apply(&packs.attempt(settings, data.path()), settings.trust());
        let (reaching, own, changed) = (packs.clone(), service.clone(), receiver.clone());
        service.permanent("packs", 1, move || packs::reach(reaching.clone(), own.clone(), changed.clone()));
        let (hashing, own, changed) = (packs.clone(), service.clone(), receiver.clone());
        service.permanent("packs", 0, move || packs::hash(hashing.clone(), own.clone(), changed.clone()));
        let encoders = Permits::new(std::thread::available_parallelism().map_or(1, usize::from));
        let (fill, jobs) = Fill::new(service, &cas, &encoders, &settings.fill);
        let origins =
            Origins::new(service, settings, data.path(), &Origins::default()).map_err(BuildError::Origin)?;
        let depot = (settings.cas.backend == Backend::S3 && !amnesia)
            .then(|| Depot::open(service, settings, data.path(), &cas))
            .transpose()?;
        let stores = Stores { fill: fill.clone(), packs: packs.clone(), depot: depot.clone() };
        let serving = Arc::new(Serving::new(service, settings, stores, origins, verifier));
        fill.run(jobs);
        let (keeping, changes, own) = (cas.clone(), Arc::new(changes), service.clone());
        service.permanent("keeper", 0, move || cas::keep(keeping.clone(), changes.clone(), own.clone()));
        let (scrubbing, own, seen) = (cas.clone(), service.clone(), serving.clone());
        service.permanent("scrub", 0, move || {
            let seen = seen.clone();
            cas::scrub(scrubbing.clone(), own.clone(), move || seen.snapshot().settings.cas.scrub_interval.0)
        });
        serve_operators(service, &cas);
        let server = Server::new(service, serving, settings.server_limits());
        for (bound, tls) in listeners {
            server.listen(bound, tls);
        }
        let keeping = (service.clone(), fill.clone(), server.clone(), receiver);
        service.permanent("housekeeping", 0, move || {
            let (service, fill, server, config) = keeping.clone();
            housekeeping(service, fill, server, config)
        });
        let (service, data) = (service.clone(), data.clone());
        Ok(Edge { service, server, cas, fill, packs, depot, in_memory, config, tls, addresses, data })
    }

    /// Where it listens: scheme and address.
    pub fn addresses(&self) -> &[(&'static str, String)] {
        &self.addresses
    }

    pub fn ready(&self) {
        self.service.ready();
    }

    /// Reads what the new configuration needs; the returned step then swaps it in and cannot fail.
    pub fn prepare(
        self: &Arc<Self>,
        settings: &EdgeSettings,
        verifier: Verifier,
    ) -> Result<Prepared, BuildError> {
        let tls = match (&self.tls, &settings.tls) {
            (Some(server), Some(settings)) => Some((server.clone(), settings.load(self.data.path())?)),
            _ => None,
        };
        let former = self.server.handler().snapshot();
        let origins = Origins::new(&self.fill.service, settings, self.data.path(), &former.origins)
            .map_err(BuildError::Origin)?;
        let packs = self.packs.attempt(settings, self.data.path());
        let depot = self.depot.as_ref();
        let depot = depot.map(|depot| depot.prepare(settings, self.data.path())).transpose()?;
        let (edge, settings) = (self.clone(), settings.clone());
        Ok(Box::new(move || {
            if let Some((server, config)) = tls {
                server.replace(config);
            }
            edge.packs.apply(&packs, settings.trust());
            if let (Some(depot), Some(change)) = (&edge.depot, &depot) {
                depot.apply(change);
            }
            edge.cas.apply(settings.store(edge.in_memory));
            edge.server.handler().apply(&settings, origins, verifier);
            edge.server.set_limits(settings.server_limits());
            edge.config.send_replace(Arc::new(settings));
        }))
    }
}

/// The edge's part of the admin plane.
fn serve_operators(service: &Service, cas: &Arc<Cas>) {
    let seen = cas.clone();
    service.local_api(Method::GET, "/edge/status", move |_| {
        let progress = seen.progress();
        let number = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        Ok(json!({
            "bytes": seen.bytes(),
            "scrub": {
                "running": progress.running.load(Ordering::Relaxed),
                "ratio": progress.ratio(),
                "objects": number(&progress.objects),
                "bad": number(&progress.bad),
                "passes": number(&progress.passes),
            },
        }))
    });
    let seen = cas.clone();
    service.local_api(Method::POST, "/edge/scrub", move |_| {
        let progress = seen.progress();
        let answer = json!({
            "passes": progress.passes.load(Ordering::Relaxed),
            "running": progress.running.load(Ordering::Relaxed),
        });
        progress.begin();
        Ok(answer)
    });
}

/// What readiness was told is missing; taken back when the task that told it ends.
struct Missing {
    service: Service,
    told: [(&'static str, Severity, bool); 3],
}

impl Missing {
    fn tell(&mut self, now: [bool; 3]) {
        for ((cause, severity, told), now) in self.told.iter_mut().zip(now) {
            if now && !*told {
                tracing::warn!(cause, "the edge is not well");
                self.service.lose(cause, *severity);
            } else if !now && *told {
                tracing::info!(cause, "the edge is well again");
                self.service.restore(cause);
            }
            *told = now;
        }
    }
}

impl Drop for Missing {
    fn drop(&mut self) {
        self.tell([false; 3]);
    }
}

async fn housekeeping(
    service: Service,
    fill: Arc<Fill>,
    server: Arc<Server<Arc<Serving>>>,
    mut config: watch::Receiver<Arc<EdgeSettings>>,
) -> TaskResult {
    let mut events = service.subscribe("housekeeping");
    let told = [
        ("storage", Severity::WritesShed, false),
        ("corruption", Severity::Degraded, false),
        ("fill", Severity::WritesShed, false),
    ];
    let mut missing = Missing { service: service.clone(), told };
    loop {
        tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            next = events.next() => match next {
                Some(Next::Event(KernelEvent::ServiceCrashed { service, reason })) => {
                    tracing::warn!(crashed = service, reason, "another service of this node is gone");
                }
                Some(Next::Reconcile { .. }) => server.set_limits(config.borrow().server_limits()),
                Some(Next::Event(_)) => {}
                None => return Ok(()),
            },
            changed = config.changed() => {
                changed?;
                let settings = config.borrow_and_update().clone();
                tracing::info!(mode = settings.mode.as_str(), "edge configuration in force");
            }
            () = tokio::time::sleep(LOOK) => {
                let cas = fill.cas.clone();
                let [full, bad] = tokio::task::spawn_blocking(move || [cas.is_full(), cas.has_bad()]).await?;
                missing.tell([full, bad, fill.is_short()]);
                server.handler().snapshot().origins.tidy(Instant::now());
            }
        }
    }
}
