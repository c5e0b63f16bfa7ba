//! The life of a follower: asks, hears, checks, and hands on what it found good.

use super::keep::{Found, Keep, Kept};
use super::layers::Layers;
use super::set::Set;
use super::source::{AskError, HeadPage, Source, WAIT, WAIT_UNSIGNED};
use super::{Begun, trust_roots};
use crate::config::Config;
use anyhow::Context as _;
use arc_swap::{ArcSwap, ArcSwapOption};
use http::Method;
use ron_kernel::bus::{KernelEvent, Next};
use ron_kernel::config::Store;
use ron_kernel::inventory::{TaskSort, TaskSpec};
use ron_kernel::kernel::Service;
use ron_kernel::metrics::{Counter, Family};
use ron_kernel::node::{DataDir, FollowSettings};
use ron_kernel::process::Reloader;
use ron_kernel::task::TaskResult;
use ron_log::follow::{FollowError, Jump, Told};
use ron_log::{Checkpoint, Evidence, FaultKind, Follower, Note};
use serde_json::{Value, json};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use svc_overlay::{Handle, Topic};
use svc_registry::Registry;
use tokio::time::{Instant, sleep};

/// First and longest pause before a registry that failed is asked again.
const PAUSE: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];
/// After a head that was told for nothing, for so long no other is heeded; nor is an idle answer asked for again sooner.
const CALM: Duration = Duration::from_secs(1);
/// A subscription is listened to for so long at a time; it makes no difference.
const LISTEN: Duration = Duration::from_secs(3600);
/// Longest message that tells of a head.
const HEAD_MAX: usize = 1024;

/// Where the admin plane says how it is with the registry that is followed.
pub const STATUS: &str = "/node/follow";
/// Of it, what a registry asks that has this node as a mirror.
const CHECKPOINT: &str = "/node/follow/checkpoint";

pub static TASK: TaskSpec = TaskSpec {
    service: "kernel",
    kind: "follower",
    sort: TaskSort::Permanent,
    does: "follows a registry, checks what it governs, and has it taken over",
};

/// What of the node the follower works with.
#[derive(Debug)]
pub struct Parts<'a> {
    pub registry: Option<&'a Registry>,
    pub overlay: Option<Handle>,
    pub reloader: Arc<Reloader>,
    pub store: Arc<Store<Config>>,
}

/// What the task shares with whoever asks how it is.
#[derive(Debug)]
struct Following {
    service: Service,
    keep: Keep,
    layers: Arc<Layers>,
    reloader: Arc<Reloader>,
    store: Arc<Store<Config>>,
    follower: ArcSwap<Follower>,
    found: ArcSwapOption<Found>,
    /// The last answer was good.
    numbers: Numbers,
}

#[derive(Debug)]
struct Numbers {
    updates: Arc<Family<Counter, 1>>,
    heads: Arc<Family<Counter, 1>>,
    retries: Counter,
}

/// Begins to follow, if the configuration says so.
pub fn start(own: &Service, begun: Begun, data: &DataDir, parts: Parts<'_>) -> anyhow::Result<()> {
    let Begun { loaded, layers, keep, kept } = begun;
    let Some(follow) = loaded.value.node.follow else {
        own.local_api(Method::GET, STATUS, |_| Ok(json!({"follows": false})));
        return Ok(());
    };
    let url = match (parts.registry, follow.url.is_empty()) {
        (_, false) => follow.url.clone(),
        (Some(registry), true) => own_url(registry)?,
        (None, true) => {
            // The file may be meant for a process that has one too; what was kept is in force all the same.
            let why = "node.follow.url is empty, but no registry runs in this process: name one, such as https://host:8082";
            tracing::warn!("{why}");
            layers.notice.contact(Some(why.to_owned()));
            own.local_api(Method::GET, STATUS, move |_| Ok(json!({"follows": false, "trouble": why})));
            return Ok(());
        }
    };
    let source = Source::new(own, &url).map_err(|error| anyhow::anyhow!("node.follow.url: {error}"))?;
    let kept = match (kept, parts.registry) {
        (Some((_, kept)), _) => kept,
        (None, registry) => first(&keep, &follow, data, registry)?,
    };
    let Kept { follower, evidence, .. } = kept;
    let following = Arc::new(Following {
        service: own.clone(),
        keep,
        layers,
        reloader: parts.reloader,
        store: parts.store,
        follower: ArcSwap::from_pointee(follower),
        found: ArcSwapOption::new(evidence.map(Arc::new)),
        numbers: Numbers::new(own),
    });
    following.expose();
    let (heeds_bus, overlay) = (follow.url.is_empty(), parts.overlay);
    own.permanent(TASK.kind, 0, move || {
        let ears = Ears::new(&following, heeds_bus, overlay.as_ref());
        run(following.clone(), source.clone(), ears)
    });
    Ok(())
}

/// The registry of this process, by its plain listener.
fn own_url(registry: &Registry) -> anyhow::Result<String> {
    let mut plain = registry.addresses().iter().filter(|(scheme, _)| *scheme == "http");
    let address = plain.next().map(|(_, address)| address).context("the registry has no plain listener")?;
    let mut address: std::net::SocketAddr = address.parse().context("the registry's address")?;
    if address.ip().is_unspecified() {
        address.set_ip(if address.is_ipv4() {
            [127, 0, 0, 1].into()
        } else {
            std::net::Ipv6Addr::LOCALHOST.into()
        });
    }
    Ok(format!("http://{address}"))
}

/// The very first time, with the roots that the registry of this process has just made.
fn first(
    keep: &Keep,
    follow: &FollowSettings,
    data: &DataDir,
    registry: Option<&Registry>,
) -> anyhow::Result<Kept> {
    let path = data.join(&follow.trust_roots);
    let roots = match registry {
        // Under amnesia there is no file.
        Some(registry) if !path.exists() => registry.trust_roots().clone(),
        _ => trust_roots(&path, &follow.trust_roots_b3)?,
    };
    keep.read(&roots)
}

impl Numbers {
    fn new(service: &Service) -> Numbers {
        let metrics = service.metrics();
        let updates = metrics.family(
            "registry_follow_updates_total",
            "What became of what the followed registry governs.",
            ["result"],
        );
        for result in ["applied", "rejected", "refused"] {
            updates.with([result]);
        }
        let heads = metrics.family(
            "registry_follow_heads_total",
            "Newer heads of the followed registry, by how they were heard of first.",
            ["source"],
        );
        for source in ["poll", "bus", "gossip"] {
            heads.with([source]);
        }
        let retries = service.counter("backoff_retries_total", "Calls tried again.", "op", "follow");
        Numbers { updates, heads, retries }
    }
}

/// What came to the follower's ears.
#[derive(Debug)]
enum Heard {
    /// There may be a newer head: by whom, and which.
    Head(&'static str, u64),
    Checkpoint(Arc<str>),
}

/// Where news come from besides the registry itself.
#[derive(Debug)]
struct Ears {
    /// The bus, if the registry is of this process.
    bus: Option<ron_kernel::bus::Subscription>,
    heads: Option<svc_overlay::Subscription>,
    checkpoints: Option<svc_overlay::Subscription>,
}

impl Ears {
    fn new(following: &Following, heeds_bus: bool, overlay: Option<&Handle>) -> Ears {
        let topic = |name: &str| {
            let topic = Topic::parse(name)?;
            let subscribed = overlay?.subscribe(&topic);
            subscribed.inspect_err(|error| tracing::warn!(%error, name, "a topic is not followed")).ok()
        };
        Ears {
            bus: heeds_bus.then(|| following.service.subscribe("follower")),
            heads: topic(svc_overlay::HEAD_TOPIC),
            checkpoints: topic(svc_overlay::CHECKPOINT_TOPIC),
        }
    }

    /// The next news. Cancel-safe.
    async fn next(&mut self) -> Heard {
        loop {
            tokio::select! {
                event = heard_on_bus(&mut self.bus) => if let Some(heard) = event { return heard },
                payload = heard_by_gossip(&mut self.heads) => {
                    let short = Some(payload).filter(|payload| payload.len() <= HEAD_MAX);
                    let json: Option<Value> = short.and_then(|payload| serde_json::from_slice(&payload).ok());
                    if let Some(version) = json.and_then(|json| json["version"].as_u64()) {
                        return Heard::Head("gossip", version);
                    }
                }
                payload = heard_by_gossip(&mut self.checkpoints) => {
                    if let Ok(note) = std::str::from_utf8(&payload) {
                        return Heard::Checkpoint(note.into());
                    }
                }
            }
        }
    }
}

async fn heard_on_bus(bus: &mut Option<ron_kernel::bus::Subscription>) -> Option<Heard> {
    let Some(events) = bus else { return std::future::pending().await };
    match events.next().await {
        Some(Next::Event(KernelEvent::RegistryUpdated { version, .. })) => Some(Heard::Head("bus", version)),
        Some(Next::Event(KernelEvent::RegistryCheckpoint { note, .. })) => Some(Heard::Checkpoint(note)),
        Some(Next::Event(_)) => None,
        // The registry itself is asked.
        Some(Next::Reconcile { .. }) => Some(Heard::Head("bus", u64::MAX)),
        None => {
            *bus = None;
            None
        }
    }
}

async fn heard_by_gossip(topic: &mut Option<svc_overlay::Subscription>) -> bytes::Bytes {
    while let Some(subscription) = topic {
        match subscription.next(LISTEN).await {
            Some(svc_overlay::Next::Delivery(delivery)) => return delivery.payload,
            // Of what was missed the registry knows.
            Some(_) => {}
            None => *topic = None,
        }
    }
    std::future::pending().await
}

/// What made the follower look, and what it saw already.
struct News {
    begun: Instant,
    by: &'static str,
    told: Option<Result<HeadPage, AskError>>,
}

/// How it goes with asking.
struct Pace {
    fails: u32,
    pause: Duration,
    /// The head is looked at without waiting for another.
    fresh: bool,
    /// From when on a head is heeded that somebody tells.
    heeds_from: Instant,
}

/// Runs until the drain, or until the log is found to have two histories.
async fn run(this: Arc<Following>, source: Source, mut ears: Ears) -> TaskResult {
    let mut pace = Pace { fails: 0, pause: Duration::ZERO, fresh: true, heeds_from: Instant::now() };
    while !this.stops() {
        let after = (!pace.fresh).then(|| this.waits());
        let Some(News { begun, by, told }) = this.news(&source, &mut ears, after, &pace).await else { break };
        let before = this.follower.load().head();
        let contact = async {
            let told = match told {
                Some(told) => told,
                None => source.head(None).await,
            };
            this.contact(&source, told.map_err(|error| unreachable(&error))?).await
        };
        let outcome = tokio::select! {
            biased;
            () = this.end() => break,
            outcome = contact => outcome,
        };
        let news = this.follower.load().head() != before;
        if news {
            this.numbers.heads.with([by]).inc();
        } else if by == "gossip" {
            pace.heeds_from = Instant::now() + CALM;
        }
        // Whatever went wrong, the head is looked at anew first: another may answer.
        pace.fresh = outcome.is_err();
        match outcome {
            Ok(()) => {
                // A registry that answers at once though it has nothing new is not asked again and again.
                let idle = !news && after.is_some() && begun.elapsed() < CALM;
                (pace.fails, pace.pause) = (0, if idle { CALM } else { Duration::ZERO });
                this.layers.notice.contact(None);
                this.layers.notice.fork(None);
            }
            Err(trouble) => {
                let longest = PAUSE[0].saturating_mul(1 << pace.fails.min(10)).min(PAUSE[1]);
                pace.pause = longest.mul_f64(ron_kernel::random::unit());
                pace.fails = pace.fails.saturating_add(1);
                this.numbers.retries.inc();
                this.trouble(trouble).await;
            }
        }
    }
    this.service.shutdown().draining().await;
    Ok(())
}

/// Why a contact led nowhere.
#[derive(Debug)]
enum Trouble {
    Unreachable(String),
    /// What it said is not believed.
    Refused(String),
    Contradicts(Box<Evidence>, bool),
    /// What was found could not be kept.
    Disk(String),
}

fn unreachable(error: &AskError) -> Trouble {
    Trouble::Unreachable(error.to_string())
}

impl From<FollowError> for Trouble {
    fn from(error: FollowError) -> Trouble {
        match error {
            FollowError::Fork(evidence) => Trouble::Contradicts(evidence, true),
            FollowError::Inconsistent(evidence) => Trouble::Contradicts(evidence, false),
            other => Trouble::Refused(other.to_string()),
        }
    }
}

impl Following {
    /// The log is known to have two histories: nothing of it is believed any more.
    fn stops(&self) -> bool {
        self.found.load().as_ref().is_some_and(|found| found.undeniable)
    }

    /// After which version, and for how long, the registry is asked to wait.
    fn waits(&self) -> (u64, Duration) {
        let follower = self.follower.load();
        let signed = follower.newest().and_then(|note| Checkpoint::parse(&note.text)).map_or(0, |it| it.size);
        let wait = if signed < follower.tree().size() { WAIT_UNSIGNED } else { WAIT };
        (follower.head().version, wait)
    }

    /// Resolves when the process is to end. Other services drain first: that a registry in this process answers no more
    /// is no trouble then.
    async fn end(&self) {
        tokio::select! {
            _ = self.service.kernel().ending() => {}
            () = self.service.shutdown().draining() => {}
        }
    }

    /// Waits until there is something to look at; none at the end, or if the log is found to have two histories.
    async fn news(
        &self,
        source: &Source,
        ears: &mut Ears,
        after: Option<(u64, Duration)>,
        pace: &Pace,
    ) -> Option<News> {
        let mut asked = pin!(async {
            sleep(pace.pause).await;
            (Instant::now(), source.head(after).await)
        });
        loop {
            tokio::select! {
                biased;
                () = self.end() => return None,
                // Before what others say, so that none of them can keep the registry's own answer from being heard.
                (begun, told) = &mut asked => return Some(News { begun, by: "poll", told: Some(told) }),
                heard = ears.next() => match heard {
                    Heard::Head(by, version) => {
                        let newer = version > self.follower.load().head().version;
                        if newer && (by == "bus" || Instant::now() >= pace.heeds_from) {
                            return Some(News { begun: Instant::now(), by, told: None });
                        }
                    }
                    Heard::Checkpoint(note) => {
                        self.heard_checkpoint(&note).await;
                        if self.stops() {
                            return None;
                        }
                    }
                },
            }
        }
    }

    /// Takes what the registry has, given what it says of its head.
    async fn contact(&self, source: &Source, page: HeadPage) -> Result<(), Trouble> {
        let mut follower = Follower::clone(&self.follower.load());
        if follower.log().is_none() {
            follower.trust_log(&source.log_key().await.map_err(|error| unreachable(&error))?)?;
        }
        if let Some(note) = &page.checkpoint {
            follower.checkpoint(note)?;
        }
        let (own, said) = (follower.head().version, page.head.version);
        match follower.told(page.head) {
            Told::Same => {}
            Told::Ahead => follower = self.catch_up(source, follower, &page).await?,
            Told::Behind => {
                let why = format!("it is at version {said}, and version {own} of it was seen before");
                return Err(Trouble::Refused(why));
            }
            Told::Other => {
                let why = format!("it shows another version {own} than was seen before");
                return Err(Trouble::Refused(why));
            }
        }
        self.keep(follower).await
    }

    async fn catch_up(
        &self,
        source: &Source,
        mut follower: Follower,
        page: &HeadPage,
    ) -> Result<Follower, Trouble> {
        while follower.head().version < page.head.version {
            let next = follower.head().version + 1;
            let entries = match source.entries(next).await {
                Ok(entries) if entries.is_empty() => {
                    return Err(Trouble::Refused(format!("it does not give version {next}, which it has")));
                }
                Ok(entries) => entries,
                Err(AskError::Pruned) => {
                    follower = jump(source, follower).await?;
                    continue;
                }
                Err(error) => return Err(unreachable(&error)),
            };
            let mut tried = follower.clone();
            let checked = tokio::task::spawn_blocking(move || tried.extend(&entries).map(|()| tried)).await;
            match checked.map_err(|panic| Trouble::Refused(panic.to_string()))? {
                Ok(checked) => follower = checked,
                Err(FollowError::Entry(fault)) if fault.kind == FaultKind::Chain => {
                    self.compare(source, &follower, page).await?;
                    return Err(FollowError::Entry(fault).into());
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(follower)
    }

    /// The entries do not continue what was seen. Does the log sign for that?
    async fn compare(&self, source: &Source, follower: &Follower, page: &HeadPage) -> Result<(), Trouble> {
        let Some(note) = &page.checkpoint else { return Ok(()) };
        let (size, own) = (Checkpoint::parse(&note.text).map_or(0, |it| it.size), follower.tree().size());
        if size <= own {
            return Ok(());
        }
        let path = source.consistency(own, size).await.map_err(|error| unreachable(&error))?;
        Ok(follower.continued(note, &path)?)
    }

    /// Makes what was found durable, and then has it taken over.
    async fn keep(&self, follower: Follower) -> Result<(), Trouble> {
        if follower != **self.follower.load() {
            let (keep, kept) = (self.keep.clone(), Arc::new(follower));
            let writing = kept.clone();
            let written = tokio::task::spawn_blocking(move || keep.position(&writing)).await;
            let written = written.map_err(std::io::Error::other).flatten();
            written.map_err(|error| Trouble::Disk(format!("the position cannot be kept: {error}")))?;
            self.follower.store(kept);
        }
        let newest = Set::of(&self.follower.load());
        if newest == *self.layers.sets().newest {
            return Ok(());
        }
        let (layers, store, set) = (self.layers.clone(), self.store.clone(), newest.clone());
        let version = newest.version;
        let taken = self.reloader.run("registry", move || layers.govern(set, || store.reload())).await;
        match taken {
            Ok(_) => {
                self.numbers.updates.with(["applied"]).inc();
                tracing::info!(version, items = newest.len(), "the registry's set is in force");
                let keep = self.keep.clone();
                let written = tokio::task::spawn_blocking(move || keep.good(&newest)).await;
                let written = written.map_err(std::io::Error::other).flatten();
                written.map_err(|error| Trouble::Disk(format!("the set cannot be kept: {error}")))
            }
            Err(problems) => {
                self.numbers.updates.with(["rejected"]).inc();
                let count = problems.list.len();
                tracing::error!(
                    version,
                    problems = count,
                    "the registry's set is rejected, the last good one stays"
                );
                Ok(())
            }
        }
    }

    /// Holds a checkpoint that somebody else saw against what is known. Of another log's it is nobody's fault.
    async fn heard_checkpoint(&self, note: &str) {
        let (current, note) = (self.follower.load_full(), Note::parse(note.as_bytes()));
        let (Some(log), Ok(note)) = (current.log(), note) else { return };
        // Looked at first: anybody can say anything, and what is known is large.
        if let Err(error) = Checkpoint::verify(&note, log) {
            tracing::debug!(%error, "a checkpoint that was heard of is not of the log that is followed");
            return;
        }
        let mut follower = Follower::clone(&current);
        let judged = match follower.checkpoint(&note) {
            Ok(()) => self.keep(follower).await,
            Err(error) => Err(error.into()),
        };
        if let Err(trouble) = judged {
            self.trouble(trouble).await;
        }
    }

    async fn trouble(&self, trouble: Trouble) {
        let text = match trouble {
            Trouble::Unreachable(why) => format!("the registry cannot be asked: {why}"),
            Trouble::Refused(why) => {
                self.numbers.updates.with(["refused"]).inc();
                format!("the registry is not believed: {why}")
            }
            Trouble::Disk(why) => why,
            Trouble::Contradicts(evidence, undeniable) => {
                self.numbers.updates.with(["refused"]).inc();
                let text = evidence.to_string();
                self.convict(*evidence, undeniable).await;
                text
            }
        };
        if self.layers.notice.contact(Some(text.clone())) {
            tracing::warn!(reason = text, "the registry is not followed now; what is in force stays");
        }
    }

    /// Keeps evidence, and shows it to everybody: each who has seen the one note or the other can judge for himself.
    async fn convict(&self, evidence: Evidence, undeniable: bool) {
        let log_key = self.follower.load().log().map(ToString::to_string).unwrap_or_default();
        let found = Arc::new(Found { evidence, log_key, undeniable });
        if self.found.load().as_ref().is_some_and(|known| **known == *found) {
            self.layers.notice.fork(Some(found.evidence.to_string()));
            return;
        }
        tracing::error!(what = %found.evidence, undeniable, "the registry has two histories; `ron registry evidence` shows both");
        self.layers.notice.fork(Some(found.evidence.to_string()));
        self.found.store(Some(found.clone()));
        for note in found.evidence.notes() {
            let size = Checkpoint::parse(&note.text).map_or(0, |checkpoint| checkpoint.size);
            let note = note.to_string().into();
            self.service.kernel().publish(KernelEvent::RegistryCheckpoint { size, note });
        }
        let keep = self.keep.clone();
        let written = tokio::task::spawn_blocking(move || keep.evidence(&found)).await;
        if let Err(error) = written.map_err(std::io::Error::other).flatten() {
            tracing::error!(%error, "the evidence could not be written");
        }
    }

    /// Numbers, and the answer of `GET /node/follow`.
    fn expose(self: &Arc<Self>) {
        if let Some(found) = self.found.load().as_ref().filter(|found| found.undeniable) {
            self.layers.notice.fork(Some(found.evidence.to_string()));
        }
        let this = self.clone();
        let version = move || this.follower.load().head().version;
        let help = "Version up to which the followed registry was checked.";
        self.service.metrics().computed("registry_follow_version", help, "gauge", move |rows| {
            rows.row(&[], version());
        });
        let this = self.clone();
        let shown = this.clone();
        self.service.open_api(CHECKPOINT, move || Ok(shown.checkpoint()));
        self.service.local_api(Method::GET, STATUS, move |_| Ok(this.json()));
    }

    /// The newest checkpoint that was checked, which is everybody's to see.
    fn checkpoint(&self) -> Value {
        let follower = self.follower.load();
        let note = follower.newest().map(ToString::to_string);
        let size = follower.newest().and_then(|note| Checkpoint::parse(&note.text)).map(|it| it.size);
        json!({"checkpoint": size, "note": note})
    }

    fn json(&self) -> Value {
        let (follower, sets) = (self.follower.load_full(), self.layers.sets());
        let head = follower.head();
        let rejected =
            sets.rejected.map(|rejected| json!({"version": rejected.version, "problems": rejected.problems}));
        let Value::Object(checkpoint) = self.checkpoint() else { unreachable!("it is an object") };
        let mut said = json!({
            "follows": true, "version": head.version, "hash": head.hash.to_string(), "log_key": follower.log().map(ToString::to_string),
            "in_force": {"version": sets.in_force.version, "items": sets.in_force.len()},
            "rejected": rejected, "trouble": self.layers.notice.trouble(),
            "evidence": self.found.load().as_ref().map(|found| found.json()),
        });
        said.as_object_mut().expect("made above").extend(checkpoint);
        said
    }
}

/// Goes on from the newest state that the log signed.
async fn jump(source: &Source, mut follower: Follower) -> Result<Follower, Trouble> {
    let page = source.snapshot(follower.tree().size()).await.map_err(|error| unreachable(&error))?;
    let checked = tokio::task::spawn_blocking(move || {
        let jump = Jump {
            checkpoint: &page.checkpoint,
            snapshot: &page.snapshot,
            state: &page.state,
            tree: page.tree,
            from_own: &page.from_own,
            from_snapshot: &page.from_snapshot,
        };
        follower.jump(jump).map(|()| follower)
    });
    let follower = checked.await.map_err(|panic| Trouble::Refused(panic.to_string()))??;
    let version = follower.head().version;
    tracing::warn!(version, "entries are kept no more: the registry is followed from a state that it signed");
    Ok(follower)
}
