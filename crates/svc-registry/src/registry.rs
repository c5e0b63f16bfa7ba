//! Building and running the registry.

use crate::api::{Api, COUNTERS};
use crate::checkpointor::checkpoint;
use crate::checks::Ahead;
use crate::committer::{Intake, commit};
use crate::config::RegistrySettings;
use crate::core::{head_after, idle_signer};
use crate::guard::{Highest, Hold, Seer};
use crate::job::Job;
use crate::mirror::{MIRROR_IDLE, watch};
use crate::publisher::{Stall, publish};
use crate::retention::retain;
use crate::shared::{OPEN, Parts, RECENT, Shared, Signed, now_millis};
use crate::store::{OpenError, RestoreError, Restored, Store, StoreError, reading};
use crate::verifier::verify;
use crate::view::View;
use crate::witness::{WITNESS_IDLE, collect, keys};
use http::Method;
use ron_kernel::channel::{self, Receiver, Sender};
use ron_kernel::config::Prepared;
use ron_kernel::http::{BindError, Server, bind_tcp, server_tasks};
use ron_kernel::inventory::{ChannelKind, ChannelSpec, LockSpec, Policy, TaskSort, TaskSpec};
use ron_kernel::kernel::{Service, events_spec, shutdown_spec};
use ron_kernel::key::{PrivateKey, PublicKey};
use ron_kernel::node::DataDir;
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use ron_kernel::sync::Limits;
use ron_kernel::task::TaskResult;
use ron_kernel::tls::{TlsError, TlsServer};
use ron_kernel::token::Verifier;
use ron_kernel::units::Span;
use ron_log::note::NoteError;
use ron_log::{Entry, Note, NoteKey, Role, Signer, SignerSet, TrustRoots};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const NAME: &str = "registry";
/// Bytes of payloads that may wait for the Committer, whatever their number.
const QUEUE_BYTES: usize = 64 << 20;
/// The log's name where nobody gave it one.
const LOG: &str = "ron.local/registry";

const fn queue(
    name: &'static str,
    capacity: usize,
    policy: Policy,
    from: &'static [&'static str],
    to: &'static [&'static str],
) -> ChannelSpec {
    ChannelSpec {
        service: NAME,
        name,
        kind: ChannelKind::Mpsc,
        capacity,
        policy,
        producers: from,
        consumers: to,
    }
}

static PROPOSALS: ChannelSpec = queue("proposals", 512, Policy::RejectNew, &["listener"], &["committer"]);
static APPROVALS: ChannelSpec = queue("approvals", 512, Policy::RejectNew, &["listener"], &["committer"]);
static CFG_RELOAD: ChannelSpec =
    queue("cfg_reload", 16, Policy::Collapse, &["config_watcher"], &["config_reloader"]);
static RETENTION_CMD: ChannelSpec =
    queue("retention_cmd", 8, Policy::Skip, &["checkpointor"], &["retention"]);
static COMMITTED: ChannelSpec = ChannelSpec {
    service: NAME,
    name: "committed",
    kind: ChannelKind::Broadcast,
    capacity: 1024,
    policy: Policy::LossyBroadcast,
    producers: &["committer"],
    consumers: &["publisher", "deep_verifier", "checkpointor", "conn"],
};
static SHUTDOWN: ChannelSpec = shutdown_spec(
    NAME,
    &[
        "listener",
        "sweeper",
        "committer",
        "publisher",
        "checkpointor",
        "cosigner",
        "mirrors",
        "retention",
        "deep_verifier",
        "config_reloader",
    ],
);
static EVENTS: ChannelSpec = events_spec(NAME, &["config_reloader"]);

/// The registry's declarations, for the inventory and the document.
pub static CHANNELS: [&ChannelSpec; 7] =
    [&PROPOSALS, &APPROVALS, &COMMITTED, &EVENTS, &SHUTDOWN, &CFG_RELOAD, &RETENTION_CMD];
pub static LOCKS: [&LockSpec; 5] = [&RECENT, &OPEN, &COUNTERS, &WITNESS_IDLE, &MIRROR_IDLE];

const fn permanent(kind: &'static str, does: &'static str) -> TaskSpec {
    TaskSpec { service: NAME, kind, sort: TaskSort::Permanent, does }
}

pub const TASKS: [TaskSpec; 12] = {
    let [listener, sweeper, conn] = server_tasks(NAME);
    [
        listener,
        sweeper,
        conn,
        permanent("committer", "writes batches of proposals, approvals and commits; alone moves HEAD"),
        permanent("publisher", "tells the bus of each commit"),
        permanent("checkpointor", "reads back, signs checkpoints and snapshots"),
        permanent(
            "cosigner",
            "asks witnesses what they saw, collects their cosignatures, serves what has enough",
        ),
        permanent("mirrors", "asks mirrors what they saw of the log"),
        permanent("retention", "lets go of what a checkpoint covers, in small batches"),
        permanent("deep_verifier", "checks the whole log again, a slice at a time"),
        permanent("config_reloader", "takes over a new configuration"),
        TaskSpec {
            service: NAME,
            kind: "websocket",
            sort: TaskSort::Scoped,
            does: "feeds one stream over WebSocket",
        },
    ]
};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    #[error("registry: {0}")]
    Bind(#[from] BindError),
    #[error("registry.tls: {0}")]
    Tls(#[from] TlsError),
    #[error("registry.dir: {0}")]
    Open(#[from] OpenError),
    #[error("registry.dir: {0}")]
    Restore(#[from] RestoreError),
    #[error("registry.dir: {0}")]
    Store(#[from] StoreError),
    #[error(
        "registry.dir: the log there is signed with another key than this node's ({0}): put the node.key back that it \
         was made with, or give registry.dir a new folder"
    )]
    OtherKey(String),
    #[error("registry.trust_roots: {0}")]
    Roots(String),
    #[error("registry.dir: {0}")]
    Highest(String),
    #[error("registry: a thread could not be started: {0}")]
    Thread(std::io::Error),
}

/// What of the node the registry needs.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Signs for the log.
    pub key: PrivateKey,
    /// Whose capabilities are believed.
    pub token_keys: Vec<PublicKey>,
    /// Nothing is written.
    pub amnesia: bool,
    /// Trust roots are made if there are none: this node alone approves.
    pub make_roots: bool,
}

/// The registry, bound and ready to serve.
#[derive(Debug)]
pub struct Registry {
    service: Service,
    shared: Arc<Shared>,
    server: Arc<Server<Arc<Api>>>,
    reload: Sender<Arc<RegistrySettings>>,
    tls: Option<Arc<TlsServer>>,
    addresses: Vec<(&'static str, String)>,
    data: DataDir,
}

impl Registry {
    /// Opens the store, reads what it holds, binds every listener; what can fail fails here. Call it inside the runtime.
    pub fn build(
        service: &Service,
        settings: &RegistrySettings,
        data: &DataDir,
        identity: &Identity,
    ) -> Result<Registry, BuildError> {
        service.declare(&SHUTDOWN, &EVENTS);
        let roots = trust_roots(settings, data, identity)?;
        let dir = data.join(&settings.dir);
        let shared = reading(&dir, || {
            let store = if identity.amnesia {
                Store::in_memory(&roots)?
            } else {
                Store::open(&dir, &roots, settings.fsync)?
            };
            share(service, settings, store, &dir, roots, identity)
        })?;
        let mut listeners = vec![(bind_tcp(settings.listen)?, None)];
        let mut addresses = vec![("http", listeners[0].0.address())];
        let mut tls = None;
        if let Some(tls_settings) = &settings.tls {
            let server = TlsServer::new(tls_settings.load(data.path())?);
            let bound = bind_tcp(tls_settings.listen)?;
            addresses.push(("https", bound.address()));
            listeners.push((bound, Some(server.clone())));
            tls = Some(server);
        }
        let inventory = service.inventory();
        let limits = |items| Limits { items, bytes: QUEUE_BYTES };
        let channels = &settings.channels;
        let (proposals, proposals_end) =
            channel::queue::<Job>(inventory, &PROPOSALS, limits(channels.proposals), Policy::RejectNew);
        let (approvals, approvals_end) =
            channel::queue::<Job>(inventory, &APPROVALS, limits(channels.approvals), Policy::RejectNew);
        let intake = Intake { proposals: Arc::new(proposals_end), approvals: Arc::new(approvals_end) };
        let tokens = Verifier::new(&identity.token_keys);
        let ahead = Ahead::new(&shared).map_err(BuildError::Thread)?;
        let api = Arc::new(Api::new(&shared, proposals, approvals, ahead, tokens));
        let server = Server::new(service, api, settings.server_limits());
        let (reload, reload_end) =
            channel::queue(inventory, &CFG_RELOAD, Limits::items(16), Policy::Collapse);
        start_tasks(&shared, intake, Arc::new(reload_end));
        for (bound, tls) in listeners {
            server.listen(bound, tls);
        }
        expose(&shared);
        Ok(Registry { service: service.clone(), shared, server, reload, tls, addresses, data: data.clone() })
    }

    /// Where it listens: scheme and address.
    pub fn addresses(&self) -> &[(&'static str, String)] {
        &self.addresses
    }

    /// Who may approve from the beginning on.
    pub fn trust_roots(&self) -> &TrustRoots {
        &self.shared.roots
    }

    pub fn ready(&self) {
        self.service.ready();
    }

    /// A new configuration was refused, here or elsewhere: the one in force stays.
    pub fn keep_configuration(&self) {
        self.shared.numbers.reload_failed.with(["refused"]).inc();
        tracing::warn!("the registry keeps its configuration");
    }

    /// Reads what the new configuration needs; the returned step then swaps it in and cannot fail.
    pub fn prepare(
        self: &Arc<Self>,
        settings: &RegistrySettings,
        token_keys: &[PublicKey],
    ) -> Result<Prepared, BuildError> {
        let tls = match (&self.tls, &settings.tls) {
            (Some(server), Some(settings)) => Some((server.clone(), settings.load(self.data.path())?)),
            _ => None,
        };
        let (registry, settings, tokens) = (self.clone(), settings.clone(), Verifier::new(token_keys));
        Ok(Box::new(move || {
            if let Some((server, config)) = tls {
                server.replace(config);
            }
            registry.server.handler().apply(&settings, tokens);
            registry.server.set_limits(settings.server_limits());
            // Collapsed if the reloader is behind: only the newest matters.
            drop(registry.reload.try_send(Arc::new(settings)));
        }))
    }
}

/// The trust roots: the file's, or where that is allowed new ones under which this node alone approves.
fn trust_roots(
    settings: &RegistrySettings,
    data: &DataDir,
    identity: &Identity,
) -> Result<TrustRoots, BuildError> {
    let path = data.join(&settings.trust_roots);
    let roots = match std::fs::read(&path) {
        Ok(bytes) => TrustRoots::parse(&bytes)
            .map_err(|bad| BuildError::Roots(format!("{} holds no trust roots: {bad}", path.display())))?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && identity.make_roots => {
            let roots = own_roots(&identity.key);
            if !identity.amnesia {
                let written = std::fs::write(&path, format!("{}\n", roots.canonical()));
                written.map_err(|error| BuildError::Roots(format!("{}: {error}", path.display())))?;
            }
            roots
        }
        Err(error) => {
            let advice = "`ron registry genesis` makes them";
            return Err(BuildError::Roots(format!("{} cannot be read: {error}; {advice}", path.display())));
        }
    };
    if let Some(idle) = roots.signers.idle() {
        return Err(BuildError::Roots(format!("{}: {}", path.display(), idle_signer(&idle.id))));
    }
    let (found, pinned) = (roots.b3().to_string(), &settings.trust_roots_b3);
    if !pinned.is_empty() && *pinned != found {
        return Err(BuildError::Roots(format!(
            "the file's hash is {found}, and trust_roots_b3 pins {pinned}"
        )));
    }
    Ok(roots)
}

fn own_roots(key: &PrivateKey) -> TrustRoots {
    let public =
        ron_log::key::PublicKey::parse(&key.public().to_string()).expect("a key of our own is a key");
    let roles = vec![Role::Approve];
    let signer = Signer { id: "node".to_owned(), keys: vec![public], roles, not_after: None };
    let signers = SignerSet::new(1, false, vec![signer]).expect("one of one is a majority");
    TrustRoots { log: LOG.to_owned(), signers }
}

/// Reads the store; where it is damaged, what can be relied on all the same is served and nothing is written. Nothing is
/// written either if the log is not what was signed, or as long as nobody knows what the witnesses saw of it.
fn share(
    service: &Service,
    settings: &RegistrySettings,
    store: Store,
    dir: &Path,
    roots: TrustRoots,
    identity: &Identity,
) -> Result<Arc<Shared>, BuildError> {
    let signing = ed25519_dalek::SigningKey::from_bytes(&identity.key.seed());
    let log_key = NoteKey::ed25519(&roots.log, signing.verifying_key());
    if signed_by_another(&store, &log_key)? {
        return Err(BuildError::OtherKey(identity.key.public().to_string()));
    }
    let ((state, tree, last), damage) = match store.restore(&roots, &log_key) {
        Ok(Restored { state, tree, last }) => ((state, tree, last.0), None),
        Err(RestoreError::Damaged { version, what }) => {
            (store.restore_despite(version, &roots, &log_key)?, Some((version, what)))
        }
        Err(error) => return Err(error.into()),
    };
    let view = View { head: head_after(&state, &last), state, tree };
    let highest = if identity.amnesia {
        Highest::in_memory()
    } else {
        Highest::open(dir, &log_key, settings.fsync).map_err(BuildError::Highest)?
    };
    let reader = store.reader()?;
    let (witnesses, quorum) = (keys(&settings.witness), settings.witness.quorum);
    let checkpoint = reader.newest_checkpoint(|note| {
        Signed::of(note, &log_key, &witnesses).filter(|signed| signed.cosignatures >= quorum)
    })?;
    // A checkpoint has no time of its own; it is not older than the last entry it covers.
    let checkpoint = checkpoint.map(|signed| {
        let last = reader.entry(signed.size.saturating_sub(1)).ok().flatten();
        let last = last.and_then(|record| Entry::parse(record).ok());
        let at = last.map(|entry| entry.record().committed_at).filter(|at| *at > 0);
        Signed { at: at.unwrap_or(signed.at), ..signed }
    });
    let signed_size = reader.checkpoint()?.map_or(0, |(size, _)| size);
    let min_version = reader.min_version()?;
    let held = if damage.is_none() { highest.judge(&reader, view.tree.size())? } else { None };
    drop(reader);
    let committed = channel::broadcast(service.inventory(), &COMMITTED, settings.channels.committed);
    let (service, settings) = (service.clone(), settings.clone());
    let parts = Parts {
        service,
        store,
        roots,
        signing,
        view,
        checkpoint,
        signed_size,
        highest,
        min_version,
        committed,
        settings,
    };
    let shared = Shared::new(parts);
    if let Some((version, what)) = damage {
        shared.damaged(version, &what);
    }
    shared.holds.set(&Seer::Own, held);
    if !witnesses.is_empty() {
        shared.holds.set(&Seer::Witnesses, Some(Hold::Asking(Seer::Witnesses)));
    }
    if !shared.settings.load().mirrors.is_empty() {
        shared.holds.set(&Seer::Mirrors, Some(Hold::Asking(Seer::Mirrors)));
    }
    Ok(shared)
}

/// Whether the log was signed, and nothing of it with this key. That is no damage, and must not look like it.
fn signed_by_another(store: &Store, log_key: &NoteKey) -> Result<bool, StoreError> {
    let reader = store.reader()?;
    let snapshot = reader.snapshot_note(u64::MAX)?.map(|(_, note)| note);
    let notes = reader.checkpoint()?.map(|(_, note)| note).into_iter().chain(snapshot);
    let mut others = notes.map(|note| {
        let note = Note::parse(&note);
        note.is_ok_and(|note| matches!(note.verify(log_key), Err(NoteError::Unsigned(_))))
    });
    Ok(others.next().is_some_and(|first| first && others.all(|other| other)))
}

fn start_tasks(shared: &Arc<Shared>, intake: Intake, reload: Arc<Receiver<Arc<RegistrySettings>>>) {
    let service = &shared.service;
    let (retention, commands) =
        channel::queue(service.inventory(), &RETENTION_CMD, Limits::items(8), Policy::Skip);
    let commands = Arc::new(commands);
    let own = shared.clone();
    service.permanent("committer", 0, move || commit(own.clone(), intake.clone()));
    let (own, stall) = (shared.clone(), Arc::new(Stall::default()));
    let stalled = stall.clone();
    service.permanent("publisher", 0, move || publish(own.clone(), stalled.clone()));
    let own = shared.clone();
    service.permanent("checkpointor", 0, move || checkpoint(own.clone(), retention.clone()));
    let own = shared.clone();
    service.permanent("cosigner", 0, move || collect(own.clone()));
    let own = shared.clone();
    service.permanent("mirrors", 0, move || watch(own.clone()));
    let own = shared.clone();
    service.permanent("retention", 0, move || retain(own.clone(), commands.clone()));
    let own = shared.clone();
    service.permanent("deep_verifier", 0, move || verify(own.clone()));
    let own = shared.clone();
    service.permanent("config_reloader", 0, move || take_over(own.clone(), reload.clone()));
    let store = shared.store.clone();
    service.local_api(Method::POST, "/debug/registry/stall", move |body| {
        let bad =
            || Rejection::new(Reason::Malformed, "expected {\"task\":\"publisher|storage\",\"for\":\"5s\"}");
        let body: serde_json::Value = serde_json::from_slice(body).map_err(|_bad| bad())?;
        let span = body["for"].as_str().and_then(|text| text.parse::<Span>().ok()).ok_or_else(bad)?;
        match body["task"].as_str() {
            Some("publisher") => stall.begin(span.0),
            Some("storage") => store.stall(span.0),
            _ => return Err(bad()),
        }
        Ok(serde_json::json!({"stalled": body["task"]}))
    });
}

/// Counts what was taken over, and sees to it after lag on the bus that nothing is missed.
async fn take_over(shared: Arc<Shared>, reload: Arc<Receiver<Arc<RegistrySettings>>>) -> TaskResult {
    let mut events = shared.service.subscribe("config_reloader");
    loop {
        tokio::select! {
            biased;
            () = shared.service.shutdown().draining() => return Ok(()),
            settings = reload.recv() => {
                if settings.is_none() {
                    return Ok(());
                }
                shared.numbers.reloaded.with(["config"]).inc();
                // A new interval, policy or witness counts from now on.
                shared.checkpoint_wanted.notify_one();
                shared.cosignatures_wanted.notify_one();
                tracing::info!("registry configuration in force");
            }
            event = events.next() => if event.is_none() { return Ok(()) },
        }
    }
}

/// Gauges, read when they are scraped.
fn expose(shared: &Arc<Shared>) {
    let metrics = shared.service.metrics();
    let gauge = |name, help, value: fn(&Shared) -> u64| {
        let shared = shared.clone();
        metrics.computed(name, help, "gauge", move |rows| rows.row(&[], value(&shared)));
    };
    gauge("registry_pending_proposals", "Proposals that wait for approval.", |shared| {
        shared.pending.load(Ordering::Relaxed) as u64
    });
    gauge("registry_head_version", "The version of the last entry.", |shared| shared.head().version);
    gauge("registry_checkpoint_age_seconds", "Age of the newest checkpoint.", |shared| {
        let at = shared.checkpoint.load().as_ref().map(|signed| signed.at);
        at.map_or(0, |at| now_millis().saturating_sub(at) / 1000)
    });
    gauge("registry_verified_version", "The newest version that the deep verifier found good.", |shared| {
        shared.verified.load(Ordering::Relaxed)
    });
}
