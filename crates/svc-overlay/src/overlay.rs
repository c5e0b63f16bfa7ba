//! Building and running the overlay.

use crate::api::PREFIX;
use crate::calls::CALLS;
use crate::config::OverlaySettings;
use crate::dialer::dial;
use crate::gossip::gossip;
use crate::handle::{DELIVERIES, Handle};
use crate::link::{End, Link, REPLIES};
use crate::listener::{Door, INGRESS_WORK, listen, supervise};
use crate::metrics::expose;
use crate::shared::{EGRESS, FRAMES, HANDSHAKES, INGRESS, PEER_INDEX, SUBSCRIBERS, Shared};
use ed25519_dalek::SigningKey;
use oap::gossip::Topic;
use ron_kernel::bus::{KernelEvent, Next};
use ron_kernel::channel::{self, Receiver, Sender};
use ron_kernel::config::Prepared;
use ron_kernel::http::{BindError, bind_tcp, bind_unix};
use ron_kernel::inventory::{ChannelKind, ChannelSpec, LockSpec, Policy, TaskSort, TaskSpec};
use ron_kernel::kernel::{Service, events_spec, shutdown_spec};
use ron_kernel::key::PrivateKey;
use ron_kernel::node::DataDir;
use ron_kernel::sync::Limits;
use ron_kernel::task::TaskResult;
use ron_transport::tls::SetupError;
use ron_transport::{Listen, Mode, Tls};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const NAME: &str = "overlay";
/// Where the registry's new versions are told, as `{"version","b3"}`.
pub const HEAD_TOPIC: &str = "ron.registry.head";
/// Where signed checkpoints are told, each as its note.
pub const CHECKPOINT_TOPIC: &str = "ron.registry.checkpoint";

static CONFIG: ChannelSpec = ChannelSpec {
    service: NAME,
    name: "config",
    kind: ChannelKind::Mpsc,
    capacity: 16,
    policy: Policy::Collapse,
    producers: &["config_watcher"],
    consumers: &["config_reloader"],
};
static SHUTDOWN: ChannelSpec = shutdown_spec(
    NAME,
    &["listener", "conn_supervisor", "dialer", "conn", "reader", "gossip", "herald", "config_reloader"],
);
static EVENTS: ChannelSpec = events_spec(NAME, &["herald"]);

/// The overlay's declarations, for the inventory and the document.
pub static CHANNELS: [&ChannelSpec; 9] =
    [&INGRESS_WORK, &INGRESS, &EGRESS, &REPLIES, &CALLS, &DELIVERIES, &EVENTS, &SHUTDOWN, &CONFIG];
pub static LOCKS: [&LockSpec; 4] = [&PEER_INDEX, &SUBSCRIBERS, &FRAMES, &HANDSHAKES];

const fn task(kind: &'static str, sort: TaskSort, does: &'static str) -> TaskSpec {
    TaskSpec { service: NAME, kind, sort, does }
}

pub const TASKS: [TaskSpec; 9] = [
    task("listener", TaskSort::Permanent, "takes a place, accepts, checks the address"),
    task("conn_supervisor", TaskSort::Permanent, "begins handshakes, as many at once as may be"),
    task("dialer", TaskSort::Permanent, "dials the listed peers that are not connected"),
    task("gossip", TaskSort::Permanent, "drives the gossip engine; alone decides who is a peer"),
    task("herald", TaskSort::Permanent, "tells the overlay what the registry committed and signed"),
    task("config_reloader", TaskSort::Permanent, "takes over a new configuration"),
    task("conn", TaskSort::Scoped, "one connection: handshake, reader, writer, and the account of it"),
    task("reader", TaskSort::Scoped, "reads one connection, and alone knows its session"),
    task("writer", TaskSort::Scoped, "alone writes to one connection"),
];

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    #[error("overlay.listen: {0}")]
    Bind(#[from] BindError),
    #[error("overlay.tls: {0}")]
    Tls(#[from] SetupError),
}

/// The overlay, bound and ready to serve.
#[derive(Debug)]
pub struct Overlay {
    handle: Handle,
    door: Arc<Door>,
    key: PrivateKey,
    data: DataDir,
    reload: Sender<Arc<OverlaySettings>>,
}

impl Overlay {
    /// Reads certificates and binds; what can fail fails here. Call it inside the runtime.
    pub fn build(
        service: &Service,
        settings: &OverlaySettings,
        data: &DataDir,
        key: &PrivateKey,
    ) -> Result<Overlay, BuildError> {
        service.declare(&SHUTDOWN, &EVENTS);
        let tls = load_tls(settings, key, data)?;
        let door = Arc::new(door(settings, data, tls.as_ref())?);
        let handle_at: Arc<str> = door.address().into();
        let shared = Shared::new(service, settings, SigningKey::from_bytes(&key.seed()), tls);
        let inventory = service.inventory();
        let (work, work_end) = channel::queue(
            inventory,
            &INGRESS_WORK,
            Limits::items(INGRESS_WORK.capacity),
            INGRESS_WORK.policy,
        );
        let (reload, reload_end) =
            channel::queue(inventory, &CONFIG, Limits::items(CONFIG.capacity), CONFIG.policy);
        // Rows without an instance yet are shown too.
        let (_, nobody) = Link::new(&shared, oap::session::Role::Listener, String::new(), None);
        drop(nobody);
        let limits = Limits::items(DELIVERIES.capacity);
        drop(channel::queue::<()>(inventory, &DELIVERIES, limits, DELIVERIES.policy));
        let handle = Handle { shared: shared.clone(), listen: handle_at };
        let (work, work_end) = (Arc::new(work), Arc::new(work_end));
        let (own, accepting) = (shared.clone(), door.clone());
        service.permanent("listener", 0, move || listen(own.clone(), accepting.clone(), work.clone()));
        let own = shared.clone();
        service.permanent("conn_supervisor", 0, move || supervise(own.clone(), work_end.clone()));
        let own = shared.clone();
        service.permanent("gossip", 0, move || gossip(own.clone()));
        let own = shared.clone();
        service.permanent("dialer", 0, move || dial(own.clone()));
        let own = handle.clone();
        service.permanent("herald", 0, move || tell(own.clone()));
        let (own, reload_end) = (shared.clone(), Arc::new(reload_end));
        service.permanent("config_reloader", 0, move || take_over(own.clone(), reload_end.clone()));
        let (active, read) = (shared.clone(), shared.clone());
        service.metrics().computed("sessions_active", "Open sessions.", "gauge", move |rows| {
            rows.row(&[], active.sessions.load(Ordering::Relaxed));
        });
        expose(service, move || read.ledger.load_full());
        let own = handle.clone();
        service.local_routes(PREFIX, move |request, corr| Box::pin(own.clone().answer(request, corr)));
        Ok(Overlay { handle, door, key: key.clone(), data: data.clone(), reload })
    }

    /// For users within the process.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Where peers dial, and this node's key.
    pub fn addresses(&self) -> [(&'static str, String); 2] {
        [("oap", self.handle.listen.to_string()), ("node", self.handle.shared.node.to_string())]
    }

    pub fn ready(&self) {
        self.handle.shared.service.ready();
    }

    /// Reads what the new configuration needs; the returned step then swaps it in and cannot fail.
    pub fn prepare(self: &Arc<Self>, settings: &OverlaySettings) -> Result<Prepared, BuildError> {
        let tls = load_tls(settings, &self.key, &self.data)?;
        let (overlay, settings) = (self.clone(), Arc::new(settings.clone()));
        Ok(Box::new(move || {
            if let Err(error) = overlay.door.renew(tls.as_ref()) {
                tracing::error!(%error, "QUIC goes on with the former keys");
            }
            overlay.handle.shared.tls.store(tls.map(Arc::new));
            // Collapsed if the reloader is behind: only the newest matters.
            drop(overlay.reload.try_send(settings));
        }))
    }
}

/// Binds what the configuration names.
fn door(settings: &OverlaySettings, data: &DataDir, tls: Option<&Tls>) -> Result<Door, BindError> {
    match (&settings.listen, tls) {
        (Listen::Tcp(address), _) => bind_tcp(*address).map(Door::Socket),
        (Listen::Unix(path), _) => bind_unix(&data.join(path), false).map(Door::Socket),
        #[cfg(feature = "quic")]
        (Listen::Quic(address), Some(tls)) => {
            let bound = ron_transport::quic::Quic::listen(*address, tls);
            bound.map(Door::Quic).map_err(|error| BindError::new(settings.listen.to_string(), error))
        }
        // Neither passes the configuration's check.
        (Listen::Quic(_), _) => {
            Err(BindError::new(settings.listen.to_string(), std::io::ErrorKind::Unsupported.into()))
        }
    }
}

fn load_tls(settings: &OverlaySettings, key: &PrivateKey, data: &DataDir) -> Result<Option<Tls>, SetupError> {
    match settings.tls.mode {
        Mode::Off => Ok(None),
        Mode::On => Tls::load(&settings.tls, key, data.path()).map(Some),
    }
}

/// Takes over what a reload changes, and ends sessions of nodes that may not be peers any more.
async fn take_over(shared: Arc<Shared>, reload: Arc<Receiver<Arc<OverlaySettings>>>) -> TaskResult {
    loop {
        let settings = tokio::select! {
            biased;
            () = shared.service.shutdown().draining() => return Ok(()),
            settings = reload.recv() => settings,
        };
        let Some(settings) = settings else { return Ok(()) };
        shared.apply(settings);
        shared.numbers.config_updates.inc();
        let sessions: Vec<_> =
            shared.index.lock().nodes.iter().map(|(node, link)| (*node, link.clone())).collect();
        for (node, link) in sessions.into_iter().filter(|(node, _)| !shared.admits(Some(*node))) {
            tracing::info!(node = node.to_string(), "not among overlay.peers any more");
            link.end(End::Policy);
        }
        shared.dial.notify_one();
    }
}

/// Publishes what the registry of this process commits and signs, and what was found signed against it.
async fn tell(handle: Handle) -> TaskResult {
    let shared = handle.shared.clone();
    let mut events = shared.service.subscribe("herald");
    let topic = |name: &str| Topic::parse(name).expect("a constant that is a topic");
    let (heads, checkpoints) = (topic(HEAD_TOPIC), topic(CHECKPOINT_TOPIC));
    loop {
        let next = tokio::select! {
            biased;
            () = shared.service.shutdown().draining() => return Ok(()),
            next = events.next() => next,
        };
        let (topic, news, told) = match next {
            Some(Next::Event(KernelEvent::RegistryUpdated { version, b3 })) => {
                (&heads, json!({"version": version, "b3": b3}).to_string(), version)
            }
            Some(Next::Event(KernelEvent::RegistryCheckpoint { size, note })) => {
                (&checkpoints, note.to_string(), size)
            }
            Some(_) => continue,
            None => return Ok(()),
        };
        // Who misses one hears of the next; the registry itself is the source of truth.
        let now = tokio::time::Instant::now();
        if let Err(error) = handle.publish(topic, news.into(), now).await {
            tracing::debug!(%error, told, topic = topic.as_str(), "the registry's news were not told");
        }
    }
}
