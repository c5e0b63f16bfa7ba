//! Building and running the gateway.

use crate::access_log::{ACCESS_LOG, AccessLog, Sink};
use crate::auth::{self, Auth};
use crate::boot;
use crate::bridge::{self, Bridge};
use crate::config::{GatewaySettings, SchedFull};
use crate::degraded::Hysteresis;
use crate::gate::{self, Gate, WORK_LOCK};
use crate::meter::COUNTERS;
use crate::proxy::{Material, Proxy, upstream_tls};
use crate::upstream::{BREAKER, IDLE, probe};
use http::Method;
use ron_kernel::bus::{KernelEvent, Next};
use ron_kernel::channel;
use ron_kernel::config::Prepared;
use ron_kernel::health::Severity;
use ron_kernel::http::{BindError, Server, server_tasks};
use ron_kernel::inventory::{ChannelKind, ChannelSpec, LockSpec, Policy, TaskSort, TaskSpec};
use ron_kernel::kernel::{Service, config_spec, events_spec, shutdown_spec};
use ron_kernel::node::DataDir;
use ron_kernel::sync::Limits;
use ron_kernel::task::TaskResult;
use ron_kernel::tls::{TlsError, TlsServer};
use ron_kernel::token::Verifier;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

const NAME: &str = "gateway";

/// Admission goes straight into it: a plain queue in front would let one tenant fill it.
pub(crate) static WORK: ChannelSpec = ChannelSpec {
    service: NAME,
    name: "work",
    kind: ChannelKind::Fair,
    capacity: 512,
    policy: Policy::RejectNew,
    producers: &["listener"],
    consumers: &["scheduler"],
};

/// What it holds has its permits already, so it stays short.
pub(crate) static SCHED: ChannelSpec = ChannelSpec {
    service: NAME,
    name: "sched",
    kind: ChannelKind::Mpsc,
    capacity: 512,
    policy: Policy::RejectNew,
    producers: &["scheduler"],
    consumers: &["worker"],
};

static SHUTDOWN: ChannelSpec = shutdown_spec(
    NAME,
    &["listener", "sweeper", "access_log", "housekeeping", "jwks", "bridge", "strict_boot"],
);
static EVENTS: ChannelSpec = events_spec(NAME, &["housekeeping"]);
static CONFIG: ChannelSpec = config_spec(NAME, &["housekeeping", "jwks"]);

/// The gateway's declarations, for the inventory and the document.
pub static CHANNELS: [&ChannelSpec; 8] =
    [&WORK, &SCHED, &ACCESS_LOG, &bridge::CALLS, &bridge::FEED, &EVENTS, &SHUTDOWN, &CONFIG];
pub static LOCKS: [&LockSpec; 4] = [&WORK_LOCK, &COUNTERS, &IDLE, &BREAKER];
pub const TASKS: [TaskSpec; 16] = {
    let [listener, sweeper, conn] = server_tasks(NAME);
    let does = "applies a new configuration, forgets the rates of addresses and credentials that owe nothing";
    [
        listener,
        sweeper,
        conn,
        TaskSpec {
            service: NAME,
            kind: "overload_watch",
            sort: TaskSort::Permanent,
            does: "sheds writes while the queue stays nearly full",
        },
        TaskSpec {
            service: NAME,
            kind: "scheduler",
            sort: TaskSort::Permanent,
            does: "takes jobs out of the fair queue when there are permits for them",
        },
        TaskSpec {
            service: NAME,
            kind: "worker",
            sort: TaskSort::Permanent,
            does: "hands permits to the requests whose turn it is",
        },
        TaskSpec {
            service: NAME,
            kind: "access_log",
            sort: TaskSort::Permanent,
            does: "writes a line for each request answered, until none can come any more",
        },
        TaskSpec { service: NAME, kind: "housekeeping", sort: TaskSort::Permanent, does },
        TaskSpec {
            service: NAME,
            kind: "jwks",
            sort: TaskSort::Permanent,
            does: "fetches the keys of JWTs ahead of need",
        },
        TaskSpec {
            service: NAME,
            kind: "bridge",
            sort: TaskSort::Permanent,
            does: "with `bridge.peer`: keeps a session with that overlay, and takes calls to it",
        },
        TaskSpec {
            service: NAME,
            kind: "strict_boot",
            sort: TaskSort::Permanent,
            does: "with `strict_boot`: says that the service is not ready until everything behind it has been seen",
        },
        TaskSpec {
            service: NAME,
            kind: "prober",
            sort: TaskSort::Permanent,
            does: "starts health checks and breaker probes, tells readiness which upstreams are down",
        },
        TaskSpec {
            service: NAME,
            kind: "health_check",
            sort: TaskSort::Scoped,
            does: "asks one server whether it is well",
        },
        TaskSpec {
            service: NAME,
            kind: "breaker_probe",
            sort: TaskSort::Scoped,
            does: "sees whether anybody is there behind an open breaker",
        },
        TaskSpec {
            service: NAME,
            kind: "upstream_conn",
            sort: TaskSort::Scoped,
            does: "drives one HTTP/2 connection to a server",
        },
        TaskSpec {
            service: NAME,
            kind: "upstream_stream",
            sort: TaskSort::Scoped,
            does: "moves one request body over such a connection",
        },
    ]
};

/// How often the fill of the queue is looked at, and what readiness calls it when it is too much.
const OVERLOAD_LOOK: Duration = Duration::from_millis(100);
const OVERLOAD: &str = "overload";

/// How often stale buckets are dropped.
const TRIM: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error("gateway: {0}")]
    Bind(String),
    #[error("gateway.tls: {0}")]
    Tls(String),
    #[error("{0}: {1}")]
    Auth(&'static str, String),
    #[error("gateway.access_log.file: {0:?} cannot be opened: {1}")]
    AccessLog(String, std::io::Error),
}

impl From<BindError> for BuildError {
    fn from(error: BindError) -> BuildError {
        BuildError::Bind(error.to_string())
    }
}

impl From<TlsError> for BuildError {
    fn from(error: TlsError) -> BuildError {
        BuildError::Tls(error.to_string())
    }
}

/// The gateway, bound and ready to serve.
#[derive(Debug)]
pub struct Gateway {
    service: Service,
    server: Arc<Server<Arc<Proxy>>>,
    config: watch::Sender<Arc<GatewaySettings>>,
    tls: Option<Arc<TlsServer>>,
    access_log: Arc<AccessLog>,
    addresses: Vec<(&'static str, String)>,
    data: DataDir,
}

impl Gateway {
    /// Binds every listener and reads every file; what can fail fails here. Call it inside the runtime.
    pub fn build(
        service: &Service,
        settings: &GatewaySettings,
        data: &DataDir,
        verifier: &Verifier,
        bridge: Option<Bridge>,
    ) -> Result<Gateway, BuildError> {
        service.declare(&SHUTDOWN, &EVENTS);
        let settings = &settings.bridged();
        bridge::declare(service);
        let topics = bridge.map(|bridge| match bridge {
            Bridge::Here(topics) => topics,
            Bridge::Peer { dialer, peer, node } => bridge::start(service, dialer, peer, node),
        });
        let (config, receiver) = channel::latest(service.inventory(), &CONFIG, Arc::new(settings.clone()));
        let plain = service.bind_tcp("http", settings.listen)?;
        let mut addresses = vec![("http", plain.address())];
        let mut tls = None;
        let mut listeners = vec![(plain, None)];
        if let Some(tls_settings) = &settings.tls {
            let server = TlsServer::new(tls_settings.load(data.path())?);
            let bound = service.bind_tcp("https", tls_settings.listen)?;
            addresses.push(("https", bound.address()));
            listeners.push((bound, Some(server.clone())));
            tls = Some(server);
        }
        if let Some(uds) = &settings.uds {
            let bound = service.bind_unix("uds", &data.join(&uds.path), !uds.allow_uids.is_empty())?;
            addresses.push(("uds", bound.address()));
            listeners.push((bound, None));
        }
        let material = read(service, settings, data, verifier, None)?;
        let access_log = AccessLog::start(service, open_sink(settings, data)?);
        let base = data.path().to_owned();
        let proxy = Proxy::new(service, settings, base, material, access_log.clone(), topics).shared();
        start_scheduling(service, settings, proxy.gate());
        let probing = (service.clone(), proxy.clone());
        service.permanent("prober", 0, move || probe(probing.0.clone(), probing.1.clone()));
        let refreshing = (service.clone(), proxy.clone(), receiver.clone());
        service.permanent("jwks", 0, move || {
            let (service, proxy, config) = refreshing.clone();
            auth::refresh(service, proxy, config)
        });
        let watching = (service.clone(), proxy.clone());
        service
            .permanent("overload_watch", 0, move || overload_watch(watching.0.clone(), watching.1.clone()));
        if settings.strict_boot {
            boot::begin(service, &proxy);
        }
        serve_operators(service, &proxy);
        let server = Server::new(service, proxy, settings.server_limits());
        for (bound, tls) in listeners {
            server.listen(bound, tls);
        }
        let keeping = (service.clone(), server.clone(), receiver);
        service.permanent("housekeeping", 0, move || {
            let (service, server, config) = keeping.clone();
            housekeeping(service, server, config)
        });
        let (service, data) = (service.clone(), data.clone());
        Ok(Gateway { service, server, config, tls, access_log, addresses, data })
    }

    /// Where it listens: scheme and address.
    pub fn addresses(&self) -> &[(&'static str, String)] {
        &self.addresses
    }

    /// Traces every request from now on.
    #[cfg(feature = "otlp")]
    pub fn trace(&self, tracer: ron_kernel::trace::Tracer) {
        self.server.handler().trace(tracer);
    }

    pub fn ready(&self) {
        self.service.ready();
    }

    /// Reads what the new configuration needs; the returned step then swaps it in and cannot fail.
    pub fn prepare(
        self: &Arc<Self>,
        settings: &GatewaySettings,
        verifier: &Verifier,
    ) -> Result<Prepared, BuildError> {
        let tls = match (&self.tls, &settings.tls) {
            (Some(server), Some(settings)) => Some((server.clone(), settings.load(self.data.path())?)),
            _ => None,
        };
        let former = self.server.handler().snapshot();
        let material = read(&self.service, settings, &self.data, verifier, Some(former.auth()))?;
        let sink = open_sink(settings, &self.data)?;
        let (gateway, settings) = (self.clone(), settings.bridged());
        Ok(Box::new(move || {
            if let Some((server, config)) = tls {
                server.replace(config);
            }
            gateway.access_log.set_sink(sink);
            gateway.server.handler().apply(&settings, material);
            gateway.server.set_limits(settings.server_limits());
            gateway.config.send_replace(Arc::new(settings));
        }))
    }
}

/// Reads the files that the settings name.
fn read(
    service: &Service,
    settings: &GatewaySettings,
    data: &DataDir,
    verifier: &Verifier,
    former: Option<&Auth>,
) -> Result<Material, BuildError> {
    let keys = match former {
        Some(Auth::Jwt(jwt)) => Some(jwt.keys.clone()),
        _ => None,
    };
    let auth = Auth::load(service, &settings.auth, data.path(), verifier, keys)
        .map_err(|(key, error)| BuildError::Auth(key, error))?;
    Ok(Material { tls: upstream_tls(settings, data.path())?, auth })
}

fn open_sink(settings: &GatewaySettings, data: &DataDir) -> Result<Sink, BuildError> {
    let log = &settings.access_log;
    Sink::open(log, data.path()).map_err(|error| BuildError::AccessLog(log.file.clone(), error))
}

fn start_scheduling(service: &Service, settings: &GatewaySettings, gate: &Arc<Gate>) {
    let fair = &settings.fair_queue;
    let policy = match fair.sched_full {
        SchedFull::RejectNew => Policy::RejectNew,
        SchedFull::DropOldest => Policy::DropOldest,
    };
    let (sender, receiver) =
        channel::queue(service.inventory(), &SCHED, Limits::items(fair.sched_capacity), policy);
    let receiver = Arc::new(receiver);
    let (own, gate_of) = (service.clone(), gate.clone());
    service.permanent("scheduler", 0, move || {
        let tasks = own.tasks().clone();
        gate::schedule(gate_of.clone(), sender.clone(), own.shutdown().clone(), move || {
            tasks.live_scoped() == 0
        })
    });
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let workers = if fair.workers == 0 { cores.min(8) } else { fair.workers };
    for index in 0..workers {
        let receiver = receiver.clone();
        service.permanent("worker", index, move || gate::work(receiver.clone()));
    }
}

/// The gateway's part of the admin plane.
fn serve_operators(service: &Service, proxy: &Arc<Proxy>) {
    let seen = proxy.clone();
    service.local_api(Method::GET, "/gateway/status", move |_| Ok(seen.status()));
    let seen = proxy.clone();
    service.local_api(Method::GET, "/gateway/routes", move |_| Ok(seen.routes()));
    let seen = proxy.clone();
    service.local_api(Method::POST, "/gateway/explain", move |question| seen.explain(question));
}

/// Begins and ends degraded mode, and says so in readiness.
async fn overload_watch(service: Service, proxy: Arc<Proxy>) -> TaskResult {
    let mut state = Hysteresis::default();
    let _undo = Undo { service: service.clone(), proxy: proxy.clone() };
    loop {
        tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            () = tokio::time::sleep(OVERLOAD_LOOK) => {}
        }
        match state.note(proxy.gate().fill(), Instant::now()) {
            Some(true) => {
                tracing::warn!("overload: writes are shed");
                proxy.set_degraded(true);
                let why = "the queue of waiting requests stays full";
                service.lose_because(OVERLOAD, Severity::WritesShed, why);
            }
            Some(false) => {
                tracing::info!("overload is over");
                proxy.set_degraded(false);
                service.restore(OVERLOAD);
            }
            None => {}
        }
    }
}

/// Leaves nothing behind if the watch ends while the mode is on.
struct Undo {
    service: Service,
    proxy: Arc<Proxy>,
}

impl Drop for Undo {
    fn drop(&mut self) {
        if self.proxy.is_degraded() {
            self.proxy.set_degraded(false);
            self.service.restore(OVERLOAD);
        }
    }
}

/// Drops stale buckets, and after lag or news on the bus makes sure that the newest configuration is in force.
async fn housekeeping(
    service: Service,
    server: Arc<Server<Arc<Proxy>>>,
    mut config: watch::Receiver<Arc<GatewaySettings>>,
) -> TaskResult {
    let mut events = service.subscribe("housekeeping");
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
                tracing::info!(routes = settings.routes.len(), upstreams = settings.upstreams.len(), "gateway configuration in force");
            }
            () = tokio::time::sleep(TRIM) => server.handler().trim(Instant::now()),
        }
    }
}
