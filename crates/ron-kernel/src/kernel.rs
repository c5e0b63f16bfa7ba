//! One [`Kernel`] per process and one [`Service`] handle per service: the only way to spawn, wait, publish or
//! shut down.

use crate::admin::{Answering, LocalApi, LocalRoutes};
use crate::bus::{BUS_CAPACITY, KernelEvent, Subscription};
use crate::channel;
use crate::health::{Health, Severity, State};
use crate::http::Body;
use crate::inventory::{ChannelKind, ChannelSpec, Inventory, Policy};
use crate::metrics::{Counter, Family, Metrics};
use crate::problem::{CorrId, Rejection};
use crate::shutdown::{Phase, Shutdown};
use crate::takeover::Sockets;
use crate::task::Tasks;
use http::{Method, Request};
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{broadcast, watch};
use tokio::time::Instant;

/// How long, after the drain deadline, tasks may take to write their refusals before they are cut.
const ABORT_GRACE: Duration = Duration::from_millis(250);
/// Which part of a drain belongs to the services ahead alone. A stream that others would end must not take all of it.
const AHEAD_PART: u32 = 3;

/// What all services of a process share. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Kernel {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    metrics: Metrics,
    inventory: Inventory,
    health: Health,
    bus: broadcast::Sender<KernelEvent>,
    services: Mutex<Vec<Service>>,
    sockets: Sockets,
    /// What the services add to the admin plane.
    apis: Mutex<Vec<Arc<LocalApi>>>,
    routes: Mutex<Vec<Arc<LocalRoutes>>>,
    /// Whether a service that fails closed ends the process.
    exit_on_fatal: AtomicBool,
    /// Set when a service failed closed or someone asked for the end.
    ending: watch::Sender<Option<Ending>>,
    _ending_kept_open: watch::Receiver<Option<Ending>>,
}

/// Why the process should end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// A signal or `POST /admin/shutdown`.
    Asked,
    /// Another process has taken over the listeners.
    HandedOver,
    /// A service failed closed.
    Fatal(String),
}

/// What came of a drain.
#[derive(Debug, PartialEq, Eq)]
pub struct Drained {
    /// One name for each task that had to be aborted.
    pub stragglers: Vec<String>,
}

static ENDING: ChannelSpec = ChannelSpec {
    service: "kernel",
    name: "ending",
    kind: ChannelKind::Watch,
    capacity: 1,
    policy: Policy::Latest,
    producers: &["signals", "admin", "takeover", "supervisor"],
    consumers: &["main"],
};

/// Every service declares these three alike.
pub const fn shutdown_spec(service: &'static str, consumers: &'static [&'static str]) -> ChannelSpec {
    ChannelSpec {
        service,
        name: "shutdown",
        kind: ChannelKind::Watch,
        capacity: 1,
        policy: Policy::Latest,
        producers: &["supervisor"],
        consumers,
    }
}

/// The row of the kernel's bus for a service that subscribes.
pub const fn events_spec(service: &'static str, consumers: &'static [&'static str]) -> ChannelSpec {
    ChannelSpec {
        service,
        name: "events",
        kind: ChannelKind::Broadcast,
        capacity: BUS_CAPACITY,
        policy: Policy::LossyBroadcast,
        producers: &["kernel"],
        consumers,
    }
}

/// The row of a service's configuration snapshot.
pub const fn config_spec(service: &'static str, consumers: &'static [&'static str]) -> ChannelSpec {
    ChannelSpec {
        service,
        name: "config",
        kind: ChannelKind::Watch,
        capacity: 1,
        policy: Policy::Latest,
        producers: &["config_watcher"],
        consumers,
    }
}

pub static KERNEL_SHUTDOWN: ChannelSpec =
    shutdown_spec("kernel", &["signals", "config_watcher", "takeover", "follower", "admin_listener"]);
pub static KERNEL_EVENTS: ChannelSpec = events_spec("kernel", &["event_log", "follower"]);

/// The kernel's own declarations, for the document.
pub static CHANNELS: [&ChannelSpec; 3] = [&ENDING, &KERNEL_SHUTDOWN, &KERNEL_EVENTS];

impl Kernel {
    #[expect(clippy::new_without_default, reason = "a kernel is a process-wide act, not a neutral value")]
    pub fn new() -> Kernel {
        let metrics = Metrics::default();
        let inventory = Inventory::new(metrics.clone());
        let health = Health::default();
        #[expect(clippy::disallowed_methods, reason = "registered below, once per service that subscribes")]
        let (bus, _) = broadcast::channel(BUS_CAPACITY);
        let (ending, kept) = channel::latest(&inventory, &ENDING, None);
        let inner = Inner {
            metrics,
            inventory,
            health,
            bus,
            services: Mutex::default(),
            sockets: Sockets::default(),
            apis: Mutex::default(),
            routes: Mutex::default(),
            exit_on_fatal: AtomicBool::new(true),
            ending,
            _ending_kept_open: kept,
        };
        let kernel = Kernel { inner: Arc::new(inner) };
        kernel.expose_readiness();
        kernel
    }

    fn expose_readiness(&self) {
        use crate::health::Scope;
        let health = self.inner.health.clone();
        self.inner.metrics.computed(
            "ready",
            "1 if the service is ready in this scope.",
            "gauge",
            move |rows| {
                for name in health.names() {
                    for (scope, label) in [(Scope::Write, "write"), (Scope::Read, "read")] {
                        let ready = health.readiness(Some(name), scope).is_some_and(|answer| answer.ready);
                        rows.row(&[("service", name), ("scope", label)], u8::from(ready));
                    }
                }
            },
        );
    }

    /// Adds a service, in state `starting`, with its own shutdown signal. Its channel rows are declared by the
    /// service itself; use [`Kernel::declared`] for those.
    pub fn service(&self, name: &'static str) -> Service {
        #[expect(clippy::disallowed_methods, reason = "registered by `Service::declare`")]
        let (phase, receiver) = watch::channel(Phase::Running);
        self.inner.health.add(name);
        let tasks = Tasks::new(name, &self.inner.metrics);
        let service = Service {
            name,
            kernel: self.clone(),
            phase: Arc::new(phase),
            shutdown: Shutdown::new(receiver),
            tasks,
        };
        self.inner.services.lock().unwrap_or_else(PoisonError::into_inner).push(service.clone());
        service
    }

    pub fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    pub fn inventory(&self) -> &Inventory {
        &self.inner.inventory
    }

    pub fn sockets(&self) -> &Sockets {
        &self.inner.sockets
    }

    pub fn health(&self) -> &Health {
        &self.inner.health
    }

    pub fn publish(&self, event: KernelEvent) {
        // Nobody listening is not an error: an event is news, not work.
        let _ = self.inner.bus.send(event);
    }

    pub fn services(&self) -> Vec<Service> {
        self.inner.services.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The command that a service hung into the admin plane under this path.
    pub(crate) fn local_api(&self, path: &str) -> Option<Arc<LocalApi>> {
        let apis = self.inner.apis.lock().unwrap_or_else(PoisonError::into_inner);
        apis.iter().find(|api| api.path == path).cloned()
    }

    /// The part of the admin plane that a service answers itself and that this path belongs to.
    pub(crate) fn local_routes(&self, path: &str) -> Option<Arc<LocalRoutes>> {
        let routes = self.inner.routes.lock().unwrap_or_else(PoisonError::into_inner);
        routes.iter().find(|routes| path.starts_with(routes.prefix)).cloned()
    }

    /// `node.on_fatal`: whether a service that fails closed ends the process or leaves it to the others.
    pub fn set_exit_on_fatal(&self, exit: bool) {
        self.inner.exit_on_fatal.store(exit, Ordering::SeqCst);
    }

    /// Asks for the end of the process; the first reason stands.
    pub fn end(&self, why: Ending) {
        self.inner.ending.send_if_modified(|current| {
            let first = current.is_none();
            current.get_or_insert(why);
            first
        });
    }

    /// Resolves when someone asked for the end.
    pub async fn ending(&self) -> Ending {
        let mut receiver = self.inner.ending.subscribe();
        let ending = receiver.wait_for(Option::is_some).await.map(|ending| ending.clone());
        ending.ok().flatten().unwrap_or(Ending::Asked)
    }

    /// Drains every service but those named `last`, then those; names and aborts what outlives the deadline.
    pub async fn drain(&self, deadline: Duration, last: &[&str]) -> Drained {
        self.drain_ahead(deadline, &[], last).await
    }

    /// The same, where what is under way in those named `ahead` needs the others: they get a part of the time alone.
    pub async fn drain_ahead(&self, deadline: Duration, ahead: &[&str], last: &[&str]) -> Drained {
        self.publish(KernelEvent::Shutdown);
        let until = Instant::now() + deadline;
        let (tail, first): (Vec<_>, Vec<_>) =
            self.services().into_iter().partition(|service| last.contains(&service.name));
        for service in &first {
            self.health().set_state(service.name, State::Draining);
        }
        let alone = Instant::now() + deadline / AHEAD_PART;
        let ahead: Vec<_> = first.iter().filter(|service| ahead.contains(&service.name)).collect();
        for service in &ahead {
            service.phase.send_replace(Phase::Draining);
        }
        for service in &ahead {
            let _ = tokio::time::timeout_at(alone, service.tasks.finished()).await;
        }
        let mut stragglers = drain_all(&first, until.saturating_duration_since(Instant::now())).await;
        stragglers.extend(drain_all(&tail, ABORT_GRACE).await);
        Drained { stragglers }
    }
}

async fn drain_all(services: &[Service], deadline: Duration) -> Vec<String> {
    for service in services {
        service.kernel.health().set_state(service.name, State::Draining);
    }
    for service in services {
        service.phase.send_replace(Phase::Draining);
    }
    let until = Instant::now() + deadline;
    for service in services {
        let _ = tokio::time::timeout_at(until, service.tasks.finished()).await;
    }
    let mut stragglers = Vec::new();
    for service in services.iter().filter(|service| service.tasks.live() > 0) {
        // Named before they are told: some end the moment they are.
        stragglers.extend(service.tasks.late(false));
        service.phase.send_replace(Phase::Aborting);
    }
    let until = Instant::now() + ABORT_GRACE;
    for service in services {
        let _ = tokio::time::timeout_at(until, service.tasks.finished()).await;
        stragglers.extend(service.tasks.late(true));
        service.tasks.abort_live();
        service.phase.send_replace(Phase::Stopped);
        // An aborted task ends at its next poll; a thread stuck in foreign code must not hold the exit up.
        let _ = tokio::time::timeout(ABORT_GRACE, service.tasks.finished()).await;
    }
    stragglers
}

/// One service's hold on the kernel. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Service {
    name: &'static str,
    kernel: Kernel,
    phase: Arc<watch::Sender<Phase>>,
    shutdown: Shutdown,
    tasks: Tasks,
}

/// Something that may be missing: readiness names it once however often that is noted, and no more once this is gone.
#[derive(Debug)]
pub struct Missing {
    service: Service,
    cause: &'static str,
    severity: Severity,
    is_lost: bool,
}

impl Missing {
    pub fn new(service: &Service, cause: &'static str, severity: Severity) -> Missing {
        Missing { service: service.clone(), cause, severity, is_lost: false }
    }

    pub fn note(&mut self, lost: bool) {
        if lost && !self.is_lost {
            self.service.lose(self.cause, self.severity);
        } else if !lost && self.is_lost {
            self.service.restore(self.cause);
        }
        self.is_lost = lost;
    }

    /// It is missing, and this is why.
    pub fn because(&mut self, why: &str) {
        if std::mem::replace(&mut self.is_lost, true) {
            self.service.explain(self.cause, why);
        } else {
            self.service.lose_because(self.cause, self.severity, why);
        }
    }
}

impl Drop for Missing {
    fn drop(&mut self) {
        self.note(false);
    }
}

impl Service {
    pub fn name(&self) -> &'static str {
        self.name
    }

    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    pub fn shutdown(&self) -> &Shutdown {
        &self.shutdown
    }

    pub fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    pub fn inventory(&self) -> &Inventory {
        &self.kernel.inner.inventory
    }

    pub fn metrics(&self) -> &Metrics {
        &self.kernel.inner.metrics
    }

    /// Hangs a command into the admin plane, behind its token. `answer` gets the request's body and must not block.
    pub fn local_api(
        &self,
        method: Method,
        path: &'static str,
        answer: impl Fn(&[u8]) -> Result<Value, Rejection> + Send + Sync + 'static,
    ) {
        self.hang_in(LocalApi { method, path, guarded: true, answer: Box::new(answer) });
    }

    /// Shows something to whoever reaches the admin plane, as readiness is shown: nothing secret.
    pub fn open_api(
        &self,
        path: &'static str,
        answer: impl Fn() -> Result<Value, Rejection> + Send + Sync + 'static,
    ) {
        let answer = Box::new(move |_: &[u8]| answer());
        self.hang_in(LocalApi { method: Method::GET, path, guarded: false, answer });
    }

    fn hang_in(&self, api: LocalApi) {
        self.kernel.inner.apis.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(api));
    }

    /// Hangs all paths that begin so into the admin plane, behind its token; `answer` reads and answers them itself.
    pub fn local_routes(
        &self,
        prefix: &'static str,
        answer: impl Fn(Request<Body>, CorrId) -> Answering + Send + Sync + 'static,
    ) {
        let routes = Arc::new(LocalRoutes { prefix, answer: Box::new(answer) });
        self.kernel.inner.routes.lock().unwrap_or_else(PoisonError::into_inner).push(routes);
    }

    /// Puts the service's shutdown signal and its view of the bus on the inventory.
    pub fn declare(&self, shutdown: &'static ChannelSpec, events: &'static ChannelSpec) {
        channel::watch_view(self.inventory(), shutdown);
        channel::broadcast_view(self.inventory(), events, BUS_CAPACITY, &self.kernel.inner.bus);
    }

    pub fn subscribe(&self, consumer: &'static str) -> Subscription {
        Subscription::new(self.metrics(), self.name, consumer, self.kernel.inner.bus.subscribe())
    }

    /// A counter family whose first label is the service: `name{service, label}`.
    pub fn counter(
        &self,
        name: &'static str,
        help: &'static str,
        label: &'static str,
        value: &str,
    ) -> Counter {
        let family: Arc<Family<Counter, 2>> = self.metrics().family(name, help, ["service", label]);
        family.with([self.name, value])
    }

    /// `io_timeouts_total{service,op}`.
    pub fn io_timeout(&self, op: &'static str) -> Counter {
        self.counter("io_timeouts_total", "Reads, writes, connects and calls that ran out of time.", "op", op)
    }

    /// Announces that the service serves.
    pub fn ready(&self) {
        self.kernel.health().set_state(self.name, State::Ready);
        self.kernel.publish(KernelEvent::Health { service: self.name, ok: true });
    }

    /// Says that something is missing until [`Service::restore`].
    pub fn lose(&self, cause: &str, severity: Severity) {
        self.lost(cause, severity, None);
    }

    /// The same, and what is behind it: nobody reads the one without the other.
    pub fn lose_because(&self, cause: &str, severity: Severity, why: &str) {
        self.lost(cause, severity, Some(why));
    }

    fn lost(&self, cause: &str, severity: Severity, why: Option<&str>) {
        self.kernel.health().lose(self.name, cause, severity, why);
        self.kernel.publish(KernelEvent::Health { service: self.name, ok: false });
    }

    /// Says what is behind a cause that is missing already, for whoever reads `/readyz`.
    pub fn explain(&self, cause: &str, why: &str) {
        self.kernel.health().explain(self.name, cause, why);
    }

    pub fn restore(&self, cause: &str) {
        self.kernel.health().restore(self.name, cause);
        let ok = self.kernel.health().is_ok(self.name);
        self.kernel.publish(KernelEvent::Health { service: self.name, ok });
    }

    /// The service cannot go on: it refuses everything, says so, and asks for the end of the process.
    pub fn fail_closed(&self, reason: String) {
        tracing::error!(service = self.name, reason, "service failed closed");
        self.kernel.health().set_state(self.name, State::Failed);
        self.kernel.publish(KernelEvent::ServiceCrashed { service: self.name, reason: reason.clone() });
        self.phase.send_if_modified(|phase| {
            let running = *phase == Phase::Running;
            *phase = (*phase).max(Phase::Draining);
            running
        });
        // Without its own tasks the process could neither be seen nor be told to end.
        if self.name == "kernel" || self.kernel.inner.exit_on_fatal.load(Ordering::SeqCst) {
            self.kernel.end(Ending::Fatal(format!("{}: {reason}", self.name)));
        }
    }
}
