//! One node: from configuration to a running process and back to an exit code.

use crate::config::Config;
use crate::demo::{self, Demo};
use crate::init::new_token;
use anyhow::Context as _;
use ron_kernel::admin::{self, Admin, Version};
use ron_kernel::config::{Loaded, Prepared, Problems, Sources, Store, attempt, load};
use ron_kernel::http::{Server, bind_tcp, bind_unix};
use ron_kernel::kernel::{Ending, KERNEL_EVENTS, KERNEL_SHUTDOWN, Kernel};
use ron_kernel::key::{PrivateKey, PublicKey, check_private, write_private};
use ron_kernel::node::{DataDir, OnFatal};
use ron_kernel::observe::Logs;
use ron_kernel::process::{self, Reloader, Signals};
use ron_kernel::token::Verifier;
use ron_kernel::units::Span;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use svc_edge::Edge;
use svc_gateway::Gateway;
use svc_overlay::Overlay;
use svc_overlay::config::OverlaySettings;
use svc_registry::{Identity, Registry};

/// The services there are.
pub const SERVICES: [&str; 4] = ["gateway", "edge", "overlay", "registry"];

const VERSION: Version = Version {
    name: "ron",
    version: env!("CARGO_PKG_VERSION"),
    git: env!("BUILD_COMMIT"),
    profile: if cfg!(debug_assertions) { "debug" } else { "release" },
    features: if cfg!(feature = "otlp") { &["otlp"] } else { &[] },
};

/// Which services to start.
#[derive(Clone, Debug)]
pub enum Which {
    /// `ron up`: every one that is enabled, and the demo upstream if the configuration names it.
    Enabled,
    /// `ron run`: these.
    Named(Vec<String>),
}

/// Runs a node until it is told to end.
pub fn run(sources: Sources, which: &Which) -> anyhow::Result<ExitCode> {
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
        let node = Node::start(sources, which, logs)?;
        if matches!(which, Which::Enabled) {
            greet(&node.addresses, node.demo, &node.data);
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
    /// Held for as long as the node owns its data folder.
    _lock: Option<File>,
}

impl Node {
    /// Builds and starts everything; what can fail fails here.
    pub fn start(sources: Sources, which: &Which, logs: Logs) -> anyhow::Result<Node> {
        let loaded = load::<Config>(&sources)?;
        let (data, config) = (data_dir(&loaded), loaded.value.clone());
        let kernel = Kernel::new();
        kernel.set_exit_on_fatal(config.node.on_fatal == OnFatal::Exit);
        let own = kernel.service("kernel");
        own.declare(&KERNEL_SHUTDOWN, &KERNEL_EVENTS);
        // First, so that whatever is begun below is ended in order.
        let signals = Signals::catch(&own).context("cannot catch signals")?;
        let lock = if config.node.amnesia { None } else { Some(lock(&data)?) };
        let key = node_key(&config, &data)?;
        let token = admin_token(&config, &data)?;
        let observed = Observed {
            logs,
            #[cfg(feature = "otlp")]
            tracer: ron_kernel::trace::Tracer::start(&own, &config.log.otlp),
        };
        let runs = |name: &str, enabled: bool| match which {
            Which::Enabled => enabled,
            Which::Named(names) => names.iter().any(|named| named == name),
        };
        let running = runs("gateway", config.gateway.enabled);
        let demo = matches!(which, Which::Enabled) && running && names_demo(&config) && !config.node.amnesia;
        if demo {
            let service = kernel.service("demo");
            Server::new(&service, Demo, admin::limits())
                .listen(bind_unix(&data.join(demo::SOCKET), false)?, None);
            service.ready();
        }
        let gateway = if running { Some(start_gateway(&kernel, &config, &data, &observed)?) } else { None };
        let edge = if runs("edge", config.edge.enabled) {
            let (service, amnesia) = (kernel.service("edge"), config.node.amnesia);
            let verifier = Verifier::new(&token_keys(&config, &key));
            Some(Arc::new(Edge::build(&service, &config.edge, &data, amnesia, verifier)?))
        } else {
            None
        };
        let registry = if runs("registry", config.registry.enabled) {
            let make_roots = matches!(which, Which::Enabled) || config.node.amnesia;
            let (key, amnesia) = (key.clone(), config.node.amnesia);
            let identity = Identity { token_keys: token_keys(&config, &key), key, amnesia, make_roots };
            let service = kernel.service("registry");
            Some(Arc::new(Registry::build(&service, &config.registry, &data, &identity)?))
        } else {
            None
        };
        let overlay = if runs("overlay", config.overlay.enabled) {
            let settings = overlay_settings(&loaded, which);
            Some(Arc::new(Overlay::build(&kernel.service("overlay"), &settings, &data, &key)?))
        } else {
            None
        };
        let services = Services { gateway, edge, overlay, registry, key: key.clone(), which: which.clone() };
        let (reloader, store) = reloader(&own, sources, loaded, services.clone(), observed);
        let bound = bind_tcp(config.admin.listen).context("admin")?;
        let mut addresses = json!({"pid": std::process::id(), "admin": bound.address()});
        let current = store.clone();
        let danger_ok = move || current.current().value.node.danger_ok;
        let handler = Admin::new(&own, reloader.clone(), token.clone(), VERSION, danger_ok);
        Server::new(&own, handler, admin::limits()).listen(bound, None);
        process::start(&own, &signals, &reloader);
        own.ready();
        services.ready(&mut addresses);
        announce(&config, &data, &addresses, &token)?;
        tracing::info!(node = %key.public(), addresses = addresses.to_string(), "ready");
        Ok(Node { kernel, addresses, token, store, data, demo, _lock: lock })
    }

    /// Serves until it is told to end, drains, and says with which code to exit.
    pub async fn run(self) -> ExitCode {
        let ending = self.kernel.ending().await;
        let node = self.store.current().value.node.clone();
        let drained = self.kernel.drain(node.drain_deadline.0, &["demo", "kernel"]).await;
        for straggler in &drained.stragglers {
            tracing::warn!(straggler, "aborted at the drain deadline");
        }
        if !node.amnesia {
            let _ = std::fs::remove_file(self.data.join("addresses.json"));
        }
        match ending {
            Ending::Asked => {
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

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({})", self.addresses)
    }
}

#[cfg_attr(not(feature = "otlp"), expect(unused_variables, reason = "traces are a feature"))]
fn start_gateway(
    kernel: &Kernel,
    config: &Config,
    data: &DataDir,
    observed: &Observed,
) -> anyhow::Result<Arc<Gateway>> {
    let gateway = Gateway::build(&kernel.service("gateway"), &config.gateway, data)?;
    #[cfg(feature = "otlp")]
    gateway.trace(observed.tracer.clone());
    Ok(Arc::new(gateway))
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
}

impl Services {
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
        let (config, mut swaps) = (&newer.value, Vec::new());
        let failed = |key: &str, error: String| {
            let mut problems = newer.problems();
            problems.add(key, error);
            problems
        };
        if let Some(gateway) = &self.gateway {
            let swap = gateway.prepare(&config.gateway);
            swaps.push(swap.map_err(|error| failed("gateway", error.to_string()))?);
        }
        if let Some(edge) = &self.edge {
            let swap = edge.prepare(&config.edge, Verifier::new(&token_keys(config, &self.key)));
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
    own: &ron_kernel::kernel::Service,
    sources: Sources,
    loaded: Loaded<Config>,
    services: Services,
    observed: Observed,
) -> (Arc<Reloader>, Arc<Store<Config>>) {
    let file: Option<PathBuf> = sources.file.as_ref().map(|(path, _)| path.clone());
    let again = move || {
        let mut sources = sources.clone();
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
        reloading.reload().inspect_err(refused)
    };
    (Reloader::new(own, reload, files), store)
}

fn names_demo(config: &Config) -> bool {
    let named = format!("unix:{}", demo::SOCKET);
    config.gateway.upstreams.iter().any(|upstream| upstream.servers.contains(&named))
}

/// One process per data folder.
fn lock(data: &DataDir) -> anyhow::Result<File> {
    std::fs::create_dir_all(data.path())
        .with_context(|| format!("cannot make the folder {}", data.path().display()))?;
    let path = data.join("ron.lock");
    let open = File::options().read(true).write(true).create(true).truncate(false).open(&path);
    let mut file = open.with_context(|| format!("cannot open {}", path.display()))?;
    if file.try_lock().is_err() {
        let mut pid = String::new();
        let _ = file.read_to_string(&mut pid);
        anyhow::bail!(
            "{} is in use by another ron (process {}): stop it, or choose another folder with --data DIR",
            data.path().display(),
            pid.trim()
        );
    }
    file.set_len(0)?;
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
    data.write_atomically("addresses.json", addresses.to_string().as_bytes())
        .context("cannot write addresses.json")
}

/// What a newcomer sees.
fn greet(addresses: &Value, demo: bool, data: &DataDir) {
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
    if let Some(edge) = addresses["edge"]["http"].as_str() {
        text += &format!("  edge     http://{edge}\n");
        tries += &format!("  curl http://{edge}/edge/packs\n");
    }
    if let Some(registry) = addresses["registry"]["http"].as_str() {
        text += &format!("  registry http://{registry}\n");
        tries += &format!("  curl http://{registry}/registry/head\n");
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
