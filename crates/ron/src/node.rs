//! One node: from configuration to a running process and back to an exit code.

use crate::config::Config;
use crate::demo::{self, Demo};
use crate::follow::{self, Layers};
use crate::front::Front;
use crate::init::new_token;
use anyhow::Context as _;
use ron_kernel::admin::{self, Admin, Version};
use ron_kernel::config::{Loaded, Prepared, Problems, Sources, Store, attempt, load};
use ron_kernel::http::{Server, bind_unix};
use ron_kernel::kernel::{Ending, KERNEL_EVENTS, KERNEL_SHUTDOWN, Kernel, Service};
use ron_kernel::key::{PrivateKey, PublicKey, check_private, write_private};
use ron_kernel::node::{DataDir, OnFatal};
use ron_kernel::observe::Logs;
use ron_kernel::process::{self, EndSignals, Reloader, Signals};
use ron_kernel::takeover::{self, Handed, TakeoverError, Taking};
use ron_kernel::token::Verifier;
use ron_kernel::units::Span;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{ErrorKind, Read as _, Seek as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use svc_edge::Edge;
use svc_gateway::Gateway;
use svc_gateway::bridge::Bridge;
use svc_overlay::Overlay;
use svc_overlay::config::OverlaySettings;
use svc_registry::{Identity, Registry};

/// The services there are.
pub const SERVICES: [&str; 4] = ["gateway", "edge", "overlay", "registry"];

/// What was chosen when it was built.
const FEATURES: &[&str] = match (cfg!(feature = "otlp"), cfg!(feature = "quic")) {
    (true, true) => &["otlp", "quic"],
    (true, false) => &["otlp"],
    (false, true) => &["quic"],
    (false, false) => &[],
};

const VERSION: Version = Version {
    name: "ron",
    version: env!("CARGO_PKG_VERSION"),
    git: env!("BUILD_COMMIT"),
    profile: if cfg!(debug_assertions) { "debug" } else { "release" },
    features: FEATURES,
};

/// Which services to start.
#[derive(Clone, Debug)]
pub enum Which {
    /// `ron up`: every one that is enabled, and the demo upstream if the configuration names it.
    Enabled,
    /// `ron run`: these.
    Named(Vec<String>),
}

impl Which {
    /// Only a gateway keeps nothing that two processes could not have at the same time.
    fn is_gateway_alone(&self) -> bool {
        matches!(self, Which::Named(names) if *names == ["gateway"])
    }
}

/// Runs a node until it is told to end.
pub fn run(sources: Sources, which: &Which, takeover: bool) -> anyhow::Result<ExitCode> {
    let loaded = load::<Config>(&sources)?;
    let logs = Logs::start(&loaded.value.log);
    raise_file_limit();
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if loaded.value.node.worker_threads > 0 {
        builder.worker_threads(loaded.value.node.worker_threads);
    }
    let runtime =
        builder.max_blocking_threads(64).enable_all().build().context("cannot start the runtime")?;
    let code = runtime.block_on(async {
        let node = Node::start(sources, which, takeover, logs)?;
        // Whoever reads the one line of a node without files wants nothing else.
        if matches!(which, Which::Enabled) && !loaded.value.node.amnesia {
            let fronts = node.front.leads(&loaded.value);
            greet(&node.addresses, node.demo, fronts, &node.data);
        }
        Ok(node.run().await)
    });
    // A blocking call that never returns must not hold the exit up.
    runtime.shutdown_background();
    code
}

fn data_dir(loaded: &Loaded<Config>) -> DataDir {
    DataDir::of(&loaded.value.node, loaded.file.as_deref())
}

/// A node that serves. Several may run in one process, each with a kernel of its own.
pub struct Node {
    pub kernel: Kernel,
    /// As in `addresses.json`.
    pub addresses: Value,
    pub token: String,
    store: Arc<Store<Config>>,
    data: DataDir,
    /// Whether the demo upstream runs.
    demo: bool,
    front: Front,
    /// Held for as long as the node owns its data folder.
    _lock: Option<Arc<File>>,
}

impl Node {
    /// Builds and starts everything; what can fail fails here.
    ///
    /// With `takeover`, the place of the process that runs on the same data folder is taken.
    pub fn start(sources: Sources, which: &Which, takeover: bool, logs: Logs) -> anyhow::Result<Node> {
        let file = load::<Config>(&sources)?;
        let data = data_dir(&file);
        let kernel = Kernel::new();
        let own = kernel.service("kernel");
        let begun = follow::begin(&own, &sources, file, &data)?;
        let (loaded, config) = (begun.loaded.clone(), begun.loaded.value.clone());
        kernel.set_exit_on_fatal(config.node.on_fatal == OnFatal::Exit);
        own.declare(&KERNEL_SHUTDOWN, &KERNEL_EVENTS);
        // First, so that whatever is begun below is ended in order.
        let signals = Signals::catch(&own).context("cannot catch signals")?;
        let mut place = if takeover { Place::take(&data)? } else { Place::default() };
        kernel.sockets().inherit(place.handed);
        let lock = if config.node.amnesia { None } else { Some(Arc::new(lock(&data, place.lock.take())?)) };
        let key = node_key(&config, &data)?;
        let token = admin_token(&config, &data)?;
        let observed = Observed {
            logs,
            #[cfg(feature = "otlp")]
            tracer: ron_kernel::trace::Tracer::start(&own, &config.log.otlp),
        };
        let services = Services::build(&kernel, &loaded, &data, &key, which, &observed)?;
        let demo = matches!(which, Which::Enabled)
            && services.gateway.is_some()
            && names_demo(&config)
            && !config.node.amnesia;
        if demo {
            start_demo(&kernel, &data)?;
        }
        let front = services.front;
        let layers = begun.layers.clone();
        let (reloader, store) = reloader(&own, sources, loaded, layers, services.clone(), observed);
        let bound = own.bind_tcp("admin", config.admin.listen).context("admin")?;
        let mut addresses = json!({"pid": std::process::id(), "admin": bound.address()});
        let current = store.clone();
        let danger_ok = move || current.current().value.node.danger_ok;
        let handler = Admin::new(&own, reloader.clone(), token.clone(), VERSION, danger_ok);
        Server::new(&own, handler, admin::limits()).listen(bound, None);
        process::start(&own, &signals, &reloader);
        let parts = follow::Parts {
            registry: services.registry.as_deref(),
            overlay: services.overlay.as_ref().map(|overlay| overlay.handle().clone()),
            reloader: reloader.clone(),
            store: store.clone(),
        };
        follow::start(&own, begun, &data, parts)?;
        own.ready();
        services.ready(&mut addresses);
        announce(&config, &data, &addresses, &token)?;
        kernel.sockets().forget_inherited();
        if let Some(taking) = place.taking
            && let Err(error) = taking.ready()
        {
            tracing::warn!(%error, "the process before this one may still run");
        }
        if let (Some(lock), true) = (&lock, which.is_gateway_alone()) {
            offer_takeover(&own, &data, place.own, lock.clone())?;
        }
        tracing::info!(node = %key.public(), addresses = addresses.to_string(), "ready");
        Ok(Node { kernel, addresses, token, store, data, demo, front, _lock: lock })
    }

    /// Serves until it is told to end, drains, and says with which code to exit.
    pub async fn run(self) -> ExitCode {
        // From the start, so that none is missed between the one who looks for them and the other.
        let signals = EndSignals::new();
        let ending = self.kernel.ending().await;
        if let (Ending::HandedOver, Ok(signals)) = (&ending, signals) {
            return self.end_handed_over(signals).await;
        }
        let config = self.store.current().value.clone();
        // What the gateway has admitted for the others must still find them.
        let ahead: &[&str] = if self.front.leads(&config) { &["gateway"] } else { &[] };
        let node = config.node;
        let drained = self.kernel.drain_ahead(node.drain_deadline.0, ahead, &["demo", "kernel"]).await;
        for straggler in &drained.stragglers {
            tracing::warn!(straggler, "aborted at the drain deadline");
        }
        if !node.amnesia {
            for file in ["addresses.json", takeover::SOCKET] {
                let _ = std::fs::remove_file(self.data.join(file));
            }
        }
        match ending {
            Ending::Asked | Ending::HandedOver => {
                tracing::info!(stragglers = drained.stragglers.len(), "stopped");
                ExitCode::SUCCESS
            }
            Ending::Fatal(reason) => {
                tracing::error!(reason, "stopped: a service failed");
                ExitCode::FAILURE
            }
        }
    }
}

impl Node {
    /// Lets what is under way end; what is in the data folder is another's by now.
    async fn end_handed_over(self, mut signals: EndSignals) -> ExitCode {
        let deadline = self.store.current().value.gateway.takeover_drain.0;
        // The admin listener goes at once, so that only the newcomer is asked how things are.
        let drained = tokio::select! {
            drained = self.kernel.drain(deadline, &[]) => drained.stragglers,
            () = signals.told() => vec!["all, as it was told to end".to_owned()],
        };
        tracing::info!(stragglers = drained.join(", "), "stopped after a takeover");
        ExitCode::SUCCESS
    }
}

fn start_registry(
    kernel: &Kernel,
    config: &Config,
    data: &DataDir,
    key: &PrivateKey,
    which: &Which,
) -> anyhow::Result<Arc<Registry>> {
    let amnesia = config.node.amnesia;
    let make_roots = matches!(which, Which::Enabled) || amnesia;
    let identity = Identity { token_keys: token_keys(config, key), key: key.clone(), amnesia, make_roots };
    Ok(Arc::new(Registry::build(&kernel.service("registry"), &config.registry, data, &identity)?))
}

/// What a process gets from the one whose place it takes.
#[derive(Default)]
struct Place {
    taking: Option<Taking>,
    lock: Option<OwnedFd>,
    /// The socket on which the next one will ask.
    own: Option<OwnedFd>,
    handed: Handed,
}

impl Place {
    fn take(data: &DataDir) -> anyhow::Result<Place> {
        let asked = takeover::ask(&data.join(takeover::SOCKET), &["gateway".to_owned()]);
        // A process that runs more than a gateway has no such socket.
        if let (Err(TakeoverError::Nobody(_)), Some(pid)) = (&asked, holder(data)) {
            anyhow::bail!(
                "process {pid} runs in {} and does not hand over: only a gateway alone (`ron run gateway`) does; \
                 stop it and start without --takeover",
                data.path().display()
            );
        }
        let (taking, mut handed) = asked?;
        let (lock, own) = (handed.take(takeover::LOCK), handed.take(takeover::OWN));
        Ok(Place { taking: Some(taking), lock, own, handed })
    }
}

/// From now on another process can take this one's place.
fn offer_takeover(
    own: &Service,
    data: &DataDir,
    handed: Option<OwnedFd>,
    lock: Arc<File>,
) -> anyhow::Result<()> {
    let path = data.join(takeover::SOCKET);
    let bind = || -> std::io::Result<UnixListener> {
        let listener = match handed {
            Some(fd) => UnixListener::from(fd),
            None => {
                // The folder is locked, so whatever lies there is of a process that is gone.
                let _ = std::fs::remove_file(&path);
                let listener = UnixListener::bind(&path)?;
                std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
                listener
            }
        };
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    let listener = bind().with_context(|| format!("cannot listen on {}", path.display()))?;
    let spare = Arc::new(listener.try_clone()?);
    let listener = Arc::new(tokio::net::UnixListener::from_std(listener)?);
    let kernel = own.kernel().clone();
    let offer = Arc::new(move |services: &[String]| {
        if services != ["gateway"] {
            return Err("this process runs the gateway alone".to_owned());
        }
        let all = || -> std::io::Result<Vec<(String, OwnedFd)>> {
            let mut all = kernel.sockets().offer()?;
            all.push((takeover::LOCK.to_owned(), lock.try_clone()?.into()));
            all.push((takeover::OWN.to_owned(), spare.try_clone()?.into()));
            Ok(all)
        };
        all().map_err(|error| error.to_string())
    });
    let service = own.clone();
    own.permanent("takeover", 0, move || takeover::serve(service.clone(), listener.clone(), offer.clone()));
    Ok(())
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({})", self.addresses)
    }
}

fn start_demo(kernel: &Kernel, data: &DataDir) -> anyhow::Result<()> {
    let service = kernel.service("demo");
    let bound = bind_unix(&data.join(demo::SOCKET), false)?;
    Server::new(&service, Demo, admin::limits()).listen(bound, None);
    service.ready();
    Ok(())
}

#[cfg_attr(not(feature = "otlp"), expect(unused_variables, reason = "traces are a feature"))]
fn start_gateway(
    kernel: &Kernel,
    config: &Config,
    data: &DataDir,
    verifier: &Verifier,
    bridge: Option<Bridge>,
    observed: &Observed,
) -> anyhow::Result<Arc<Gateway>> {
    let gateway = Gateway::build(&kernel.service("gateway"), &config.gateway, data, verifier, bridge)?;
    #[cfg(feature = "otlp")]
    gateway.trace(observed.tracer.clone());
    Ok(Arc::new(gateway))
}

/// Whose topics the gateway leads to, if it does.
fn bridge(
    config: &Config,
    data: &DataDir,
    key: &PrivateKey,
    overlay: Option<&Arc<Overlay>>,
) -> anyhow::Result<Option<Bridge>> {
    let settings = &config.gateway.bridge;
    if !settings.enabled {
        return Ok(None);
    }
    let Some(peer) = settings.peer().map_err(anyhow::Error::msg)? else {
        let overlay = overlay.context(
            "gateway.bridge.peer: is empty, and no overlay runs in this process: name a node as ed25519:…@host:port",
        )?;
        let handle = overlay.handle().clone();
        return Ok(Some(Bridge::Here(Arc::new(move |topic, request, corr| {
            handle.clone().bridged(topic, request, corr)
        }))));
    };
    let (tls, timeout) = (&config.overlay.tls, config.overlay.handshake_timeout.0);
    Ok(Some(Bridge::to(peer, tls, timeout, key, data.path()).context("overlay.tls")?))
}

/// The services that run.
#[derive(Clone)]
struct Services {
    gateway: Option<Arc<Gateway>>,
    edge: Option<Arc<Edge>>,
    overlay: Option<Arc<Overlay>>,
    registry: Option<Arc<Registry>>,
    key: PrivateKey,
    which: Which,
    front: Front,
}

impl Services {
    /// Builds those that are to run, the gateway behind all that it may lead to.
    fn build(
        kernel: &Kernel,
        loaded: &Loaded<Config>,
        data: &DataDir,
        key: &PrivateKey,
        which: &Which,
        observed: &Observed,
    ) -> anyhow::Result<Services> {
        let config = &loaded.value;
        let runs = |name: &str, enabled: bool| match which {
            Which::Enabled => enabled,
            Which::Named(names) => names.iter().any(|named| named == name),
        };
        let verifier = Verifier::new(&token_keys(config, key));
        let front = if matches!(which, Which::Enabled) { Front::planned(loaded) } else { Front::default() };
        let fronted = front.applied(config);
        let edge = if runs("edge", config.edge.enabled) {
            let (service, amnesia) = (kernel.service("edge"), config.node.amnesia);
            Some(Arc::new(Edge::build(&service, &fronted.edge, data, amnesia, verifier.clone())?))
        } else {
            None
        };
        let registry = if runs("registry", config.registry.enabled) {
            Some(start_registry(kernel, &fronted, data, key, which)?)
        } else {
            None
        };
        let overlay = if runs("overlay", config.overlay.enabled) {
            let settings = overlay_settings(loaded, which);
            Some(Arc::new(Overlay::build(&kernel.service("overlay"), &settings, data, key)?))
        } else {
            None
        };
        let front = front.bound(
            edge.as_ref().map_or(&[], |edge| edge.addresses()),
            registry.as_ref().map_or(&[], |registry| registry.addresses()),
        );
        let gateway = if runs("gateway", config.gateway.enabled) {
            let config = front.applied(config);
            let bridge = bridge(&config, data, key, overlay.as_ref())?;
            Some(start_gateway(kernel, &config, data, &verifier, bridge, observed)?)
        } else {
            None
        };
        Ok(Services { gateway, edge, overlay, registry, key: key.clone(), which: which.clone(), front })
    }

    /// Says that each is ready, and where it listens.
    fn ready(&self, addresses: &mut Value) {
        let listed = |of: &[(&'static str, String)]| {
            let of = of.iter().map(|(scheme, address)| ((*scheme).to_owned(), json!(address)));
            Value::Object(of.collect::<Map<_, _>>())
        };
        if let Some(gateway) = &self.gateway {
            addresses["gateway"] = listed(gateway.addresses());
            gateway.ready();
        }
        if let Some(edge) = &self.edge {
            addresses["edge"] = listed(edge.addresses());
            edge.ready();
        }
        if let Some(overlay) = &self.overlay {
            addresses["overlay"] = listed(&overlay.addresses());
            overlay.ready();
        }
        if let Some(registry) = &self.registry {
            addresses["registry"] = listed(registry.addresses());
            registry.ready();
        }
    }

    /// Has each service read what the new configuration needs.
    fn prepare(&self, newer: &Loaded<Config>) -> Result<Vec<Prepared>, Problems> {
        let (config, mut swaps) = (&self.front.applied(&newer.value), Vec::new());
        let verifier = Verifier::new(&token_keys(config, &self.key));
        let failed = |key: &str, error: String| {
            let mut problems = newer.problems();
            problems.add(key, error);
            problems
        };
        if let Some(gateway) = &self.gateway {
            let swap = gateway.prepare(&config.gateway, &verifier);
            swaps.push(swap.map_err(|error| failed("gateway", error.to_string()))?);
        }
        if let Some(edge) = &self.edge {
            let swap = edge.prepare(&config.edge, verifier);
            swaps.push(swap.map_err(|error| failed("edge", error.to_string()))?);
        }
        if let Some(overlay) = &self.overlay {
            let swap = overlay.prepare(&overlay_settings(newer, &self.which));
            swaps.push(swap.map_err(|error| failed("overlay", error.to_string()))?);
        }
        if let Some(registry) = &self.registry {
            let swap = registry.prepare(&config.registry, &token_keys(config, &self.key));
            swaps.push(swap.map_err(|error| failed("registry", error.to_string()))?);
        }
        Ok(swaps)
    }
}

/// Servers that `ron run` starts on their own bear silence longer, unless the file says otherwise.
fn overlay_settings(loaded: &Loaded<Config>, which: &Which) -> OverlaySettings {
    let mut settings = loaded.value.overlay.clone();
    if matches!(which, Which::Named(_)) && !loaded.origins.contains_key("overlay.timeouts.idle") {
        settings.timeouts.idle = Span::secs(30);
    }
    settings
}

/// Whose capabilities are believed: those configured, else the node's own key.
fn token_keys(config: &Config, key: &PrivateKey) -> Vec<PublicKey> {
    let given: Vec<PublicKey> = config.node.token_keys.iter().filter_map(|text| text.parse().ok()).collect();
    if given.is_empty() { vec![key.public()] } else { given }
}

/// What of logs and traces a reload can change.
#[derive(Clone)]
struct Observed {
    logs: Logs,
    #[cfg(feature = "otlp")]
    tracer: ron_kernel::trace::Tracer,
}

/// The configuration's keeper, and who reloads it.
fn reloader(
    own: &Service,
    sources: Sources,
    loaded: Loaded<Config>,
    layers: Arc<Layers>,
    services: Services,
    observed: Observed,
) -> (Arc<Reloader>, Arc<Store<Config>>) {
    let file: Option<PathBuf> = sources.file.as_ref().map(|(path, _)| path.clone());
    let governed = layers.clone();
    let again = move || {
        let mut sources = Sources { added: governed.chosen().added(), ..sources.clone() };
        if let Some(path) = &file {
            sources.read_file(path)?;
        }
        Ok(attempt::<Config>(&sources))
    };
    let (kernel, registry) = (own.kernel().clone(), services.registry.clone());
    let prepare = move |newer: &Loaded<Config>| -> Result<Prepared, Problems> {
        let config = newer.value.clone();
        let swaps = services.prepare(newer)?;
        let (observed, kernel) = (observed.clone(), kernel.clone());
        Ok(Box::new(move || {
            observed.logs.apply(&config.log);
            #[cfg(feature = "otlp")]
            observed.tracer.set_collector(&config.log.otlp);
            kernel.set_exit_on_fatal(config.node.on_fatal == OnFatal::Exit);
            for swap in swaps {
                swap();
            }
        }))
    };
    let store = Arc::new(Store::new(loaded, again, prepare));
    let (reloading, watching) = (store.clone(), store.clone());
    let files = move || {
        let current = watching.current();
        let data = data_dir(&current);
        let files = current.value.gateway.files(data.path());
        let files = files.into_iter().chain(current.value.edge.files(data.path()));
        let files = files.chain(current.value.overlay.files(data.path()));
        let files = files.chain(current.value.registry.files(data.path()));
        current.file.iter().cloned().chain(files).collect()
    };
    let reload = move || {
        let refused = |_: &Problems| registry.iter().for_each(|registry| registry.keep_configuration());
        layers.reload(|| reloading.reload()).inspect_err(refused)
    };
    (Reloader::new(own, reload, files), store)
}

fn names_demo(config: &Config) -> bool {
    let named = format!("unix:{}", demo::SOCKET);
    config.gateway.upstreams.iter().any(|upstream| upstream.servers.contains(&named))
}

/// The process that has a data folder, if there is one.
fn holder(data: &DataDir) -> Option<String> {
    let mut file = File::open(data.join("ron.lock")).ok()?;
    file.try_lock_shared().err()?;
    let mut pid = String::new();
    file.read_to_string(&mut pid).ok()?;
    Some(pid.trim().to_owned())
}

/// One process per data folder.
fn lock(data: &DataDir, handed: Option<OwnedFd>) -> anyhow::Result<File> {
    std::fs::create_dir_all(data.path())
        .with_context(|| format!("cannot make the folder {}", data.path().display()))?;
    let path = data.join("ron.lock");
    let open = File::options().read(true).write(true).create(true).truncate(false).open(&path);
    let mut file = open.with_context(|| format!("cannot open {}", path.display()))?;
    // A lock that was handed over is held already, and by us once its former holder is gone.
    if let Some(handed) = handed {
        file = File::from(handed);
    } else if file.try_lock().is_err() {
        let mut pid = String::new();
        let _ = file.read_to_string(&mut pid);
        anyhow::bail!(
            "{} is in use by another ron (process {}): stop it, or choose another folder with --data DIR",
            data.path().display(),
            pid.trim()
        );
    }
    file.set_len(0)?;
    file.rewind()?;
    write!(file, "{}", std::process::id())?;
    Ok(file)
}

/// The node's key: read if it is there, else made; under amnesia in memory only.
fn node_key(config: &Config, data: &DataDir) -> anyhow::Result<PrivateKey> {
    let path = data.join(&config.node.key_file);
    if path.exists() {
        return PrivateKey::read(&path).context("node.key_file");
    }
    let key = PrivateKey::generate()?;
    if !config.node.amnesia {
        key.write_new(&path).context("node.key_file")?;
    }
    Ok(key)
}

/// The admin token: the environment's, the file's, or a new one.
fn admin_token(config: &Config, data: &DataDir) -> anyhow::Result<String> {
    if let Ok(token) = std::env::var("RON_ADMIN__TOKEN") {
        return Ok(token);
    }
    let path = data.join(&config.admin.token_file);
    if path.exists() {
        check_private(&path).context("admin.token_file")?;
        let token =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let token = token.trim().to_owned();
        anyhow::ensure!(!token.is_empty(), "{} is empty: remove it, and a new token is made", path.display());
        return Ok(token);
    }
    let token = new_token()?;
    if !config.node.amnesia {
        write_private(&path, token.as_bytes()).context("admin.token_file")?;
    }
    Ok(token)
}

/// Tells where the node is: in `addresses.json`, or under amnesia in one line with the token.
fn announce(config: &Config, data: &DataDir, addresses: &Value, token: &str) -> anyhow::Result<()> {
    if config.node.amnesia {
        let mut line = addresses.clone();
        line["admin_token"] = token.into();
        writeln!(std::io::stdout(), "{line}")?;
        return Ok(());
    }
    match data.write_atomically("addresses.json", addresses.to_string().as_bytes()) {
        Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
            // What can be read is of use without it.
            tracing::error!(%error, "addresses.json is not written: commands find this node by --url alone");
            Ok(())
        }
        written => written.context("cannot write addresses.json"),
    }
}

/// What a newcomer sees.
fn greet(addresses: &Value, demo: bool, fronts: bool, data: &DataDir) {
    let admin = addresses["admin"].as_str().unwrap_or_default();
    let mut tries = String::new();
    let mut text = format!(
        "\nron is ready. Everything it keeps is in {}.\n\n  admin    http://{admin}\n",
        data.path().display()
    );
    if let Some(gateway) = addresses["gateway"]["http"].as_str() {
        text += &format!("  gateway  http://{gateway}\n");
        if let Some(https) = addresses["gateway"]["https"].as_str() {
            text += &format!("           https://{https}\n");
        }
        if demo {
            tries += &format!("  curl http://{gateway}/hello\n");
        }
    }
    // One port for everything, where the gateway is in front.
    let front = addresses["gateway"]["http"].as_str().filter(|_| fronts);
    if let Some(edge) = addresses["edge"]["http"].as_str() {
        text += &format!("  edge     http://{edge}\n");
        tries += &format!("  curl http://{}/edge/packs\n", front.unwrap_or(edge));
    }
    if let Some(registry) = addresses["registry"]["http"].as_str() {
        text += &format!("  registry http://{registry}\n");
        tries += &format!("  curl http://{}/registry/head\n", front.unwrap_or(registry));
    }
    if let (Some(oap), Some(node)) =
        (addresses["overlay"]["oap"].as_str(), addresses["overlay"]["node"].as_str())
    {
        text += &format!("  overlay  {node}@{oap}\n");
    }
    // Three are enough.
    if tries.lines().count() < 3 {
        tries += &format!("  curl http://{admin}/readyz\n");
    }
    text += &format!("\nTry:\n{tries}\nCtrl-C stops it.\n");
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Thousands of connections need as many descriptors; the soft limit is often 1024.
fn raise_file_limit() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        use rustix::process::{Resource, getrlimit, setrlimit};
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = limit.maximum;
        let _ = setrlimit(Resource::Nofile, limit);
    });
}
