//! Packs that are served: mounted at the start and when the configuration or a file changes, each under a name.
//!
//! Start from [`Packs`]. `table` says which generation of a pack is served, `mounted` is one generation, `checked` how
//! its bytes are checked, [`hash`] finds out their address, after mounting and in the background. `remote` is a pack on a
//! server, which [`reach`] mounts, and again when it is replaced there.

mod checked;
mod mounted;
mod remote;
mod table;

pub(crate) use checked::Damage;
pub(crate) use mounted::{Content, Mounted};
pub(crate) use remote::{READS, is_remote, said};
pub(crate) use table::Row;

use crate::cas::Trust;
use crate::config::{EdgeSettings, Mode, PackSettings};
use crate::fill::{Counters, Origin};
use crate::pack::cache::Kept;
use crate::pack::{DirectoryCache, Limits, PackError};
use crate::s3::{ObjectUrl, Store};
use arc_swap::ArcSwap;
use checked::{Hashing, Policy, Stamp};
use mounted::Shared;
use remote::Manner;
use ron_kernel::health::Severity;
use ron_kernel::inventory::LockSpec;
use ron_kernel::kernel::Service;
use ron_kernel::task::TaskResult;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use table::{Attempt, Table};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

pub(crate) static TILES: LockSpec = LockSpec {
    service: "edge",
    name: "pack_tiles",
    rank: 52,
    guards: "tiles of packs in memory; for a look or an insertion, never while reading",
};

/// Leaf directories in memory, of all packs.
const DIRECTORY_BYTES: usize = 32 << 20;
/// Tiles in memory, of all packs.
const TILE_BYTES: usize = 64 << 20;
/// How often it is looked whether packs on servers have been replaced; a guess. A read that finds out is not waited for.
const LOOK: Duration = Duration::from_secs(30);
/// After how long a server that failed is tried again at first; the pause doubles, up to that.
const RETRY: Duration = Duration::from_millis(500);
/// What readiness calls a pack that is refused or damaged.
const CAUSE: &str = "packs";

/// All packs. Readers never wait.
#[derive(Debug)]
pub(crate) struct Packs {
    table: ArcSwap<Table>,
    shared: Arc<Shared>,
    service: Service,
    /// How the servers of remote packs are asked, by the packs' names.
    manners: ArcSwap<BTreeMap<String, Manner>>,
    /// A remote pack was found to be replaced.
    replaced: Notify,
    /// How often the packs on servers were looked through.
    rounds: watch::Sender<u64>,
    /// Readiness was told that something is wrong.
    told: AtomicBool,
}

/// Files that were tried, to be put in place with the configuration that names them.
pub(crate) struct Attempts {
    packs: Vec<(PackSettings, Attempt)>,
    manners: BTreeMap<String, Manner>,
}

impl Packs {
    /// `folder` is where trees are kept; `None` for memory.
    pub(crate) fn new(service: &Service, folder: Option<PathBuf>, trust: Trust) -> Arc<Packs> {
        let inventory = service.inventory();
        let shared = Arc::new(Shared {
            directories: Arc::new(DirectoryCache::new(inventory, DIRECTORY_BYTES)),
            tiles: Kept::new(inventory, &TILES, TILE_BYTES),
            limits: Limits::default(),
            policy: Arc::new(Policy::new(trust)),
            folder,
            mounts: AtomicU64::new(0),
        });
        let packs = Arc::new(Packs {
            table: ArcSwap::default(),
            manners: ArcSwap::default(),
            replaced: Notify::new(),
            rounds: watch::Sender::new(0),
            shared,
            service: service.clone(),
            told: AtomicBool::new(false),
        });
        packs.expose();
        packs
    }

    fn expose(self: &Arc<Self>) {
        let seen = self.clone();
        let help = "Bytes of packs in memory.";
        self.service.metrics().computed("edge_pack_cache_bytes", help, "gauge", move |rows| {
            rows.row(&[("kind", "directories")], seen.shared.directories.bytes());
            rows.row(&[("kind", "tiles")], seen.shared.tiles.bytes());
        });
        let seen = self.clone();
        self.service.metrics().computed("edge_packs", "Packs, by their state.", "gauge", move |rows| {
            let table = seen.table.load();
            for state in STATES {
                rows.row(&[("state", state)], table.values().filter(|row| row.state() == state).count());
            }
        });
    }

    /// Mounts what a configuration names. A file that is mounted already stays so, and one on a server is left to
    /// [`reach`]. Blocks.
    pub(crate) fn attempt(&self, edge: &EdgeSettings, base: &Path) -> Attempts {
        let table = self.table.load();
        let mut manners = BTreeMap::new();
        let mut one = |settings: &PackSettings| {
            if is_remote(&settings.path) {
                let known = table.get(&settings.name).filter(|row| row.settings == *settings);
                let known = known.and_then(|row| row.serving.clone());
                let attempt = self.manner(settings, edge, base).and_then(|manner| {
                    // The object store may be another one by now, or asked with other keys.
                    let same = |mounted: &Arc<Mounted>| {
                        mounted.file.remote().is_some_and(|file| file.is_asked_like(&manner))
                    };
                    let known = known.filter(same);
                    manners.insert(settings.name.clone(), manner);
                    known.ok_or_else(|| "it has not been reached yet".to_owned())
                });
                return (settings.clone(), attempt);
            }
            let path = base.join(&settings.path);
            let row = table.get(&settings.name);
            let stamp = Stamp::of(&path);
            let mounted = row.and_then(|row| {
                let stamp = *stamp.as_ref().ok()?;
                [&row.serving, &row.candidate]
                    .into_iter()
                    .flatten()
                    .find(|mounted| mounted.is_of(stamp))
                    .cloned()
            });
            let attempt = match mounted {
                Some(mounted) => Ok(mounted),
                None => stamp
                    .map_err(PackError::from)
                    .and_then(|_| Mounted::open(&path, &self.shared))
                    .map(Arc::new),
            };
            (settings.clone(), attempt.map_err(|error| error.to_string()))
        };
        let packs = edge.packs.iter().map(&mut one).collect();
        Attempts { packs, manners }
    }

    /// How the server of a pack is asked, or why it is not.
    fn manner(&self, pack: &PackSettings, edge: &EdgeSettings, base: &Path) -> Result<Manner, String> {
        if edge.mode == Mode::Offline {
            return Err("edge.mode is \"offline\": no server is asked".to_owned());
        }
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let (origin, store) = if pack.is_object() {
            let url = ObjectUrl::parse(&pack.path).and_then(|object| object.locate(&edge.s3));
            let url = url.map_err(|bad| text(&bad))?;
            let store = Store::load(&edge.s3, base).map_err(|error| text(&error))?;
            (Origin::of_store(&self.service, &url, &edge.s3, base), Some(Arc::new(store)))
        } else {
            (Origin::of_pack(&self.service, pack, base), None)
        };
        let origin = origin.map_err(|error| text(&error))?;
        Ok(Manner {
            origin: Arc::new(origin.ok_or("its URL cannot be read")?),
            store,
            retry: edge.retry.clone(),
            deadline: edge.fill.deadline.0,
            stall: edge.fill.stall_timeout.0,
            counters: Counters::new(&self.service),
        })
    }

    /// Puts the mounts of a configuration in place. Requests in flight keep what they have.
    pub(crate) fn apply(&self, attempts: &Attempts, trust: Trust) {
        self.shared.policy.set(trust);
        self.manners.store(Arc::new(attempts.manners.clone()));
        let before = self.table.rcu(|table| table::configured(table, &attempts.packs));
        self.report(&before);
    }

    /// Says what has changed.
    fn report(&self, before: &Table) {
        let after = self.table.load();
        for (name, row) in after.iter() {
            let known = before.get(name);
            match &row.refused {
                Some(why) if known.is_none_or(|known| known.refused.as_ref() != Some(why)) => {
                    tracing::error!(pack = name, error = why, "the pack is refused");
                }
                _ => {}
            }
            let old = known.and_then(|known| known.serving.as_ref());
            match &row.serving {
                Some(new) if old.is_none_or(|old| !Arc::ptr_eq(old, new)) => {
                    tracing::info!(pack = name, generation = new.generation, "the pack is served");
                }
                _ => {}
            }
        }
        self.tell();
    }

    /// Has it looked at once whether packs on servers have been replaced.
    pub(crate) fn look_again(&self) {
        self.replaced.notify_one();
    }

    /// The version of a pack that takes the place of one that was found to be replaced; none if the next two looks, of
    /// which the first may have begun before, find nothing better.
    pub(crate) async fn newer(&self, name: &str, than: &Arc<Mounted>) -> Option<Arc<Mounted>> {
        let mut rounds = self.rounds.subscribe();
        let newer = || self.table().get(name)?.serving.clone().filter(|now| !Arc::ptr_eq(now, than));
        for _ in 0..2 {
            if let Some(newer) = newer() {
                return Some(newer);
            }
            self.look_again();
            rounds.changed().await.ok()?;
        }
        newer()
    }

    /// Whether a pack is on a server, where it is looked for again and again.
    pub(crate) fn is_remote(&self, name: &str) -> bool {
        self.manners.load().contains_key(name)
    }

    /// Tries the packs on servers that are not mounted, or not any more as they are there now; whether all are. Blocks.
    fn reach_all(&self, runtime: &Handle) -> bool {
        let mut good = true;
        for (name, manner) in self.manners.load().iter() {
            let table = self.table.load();
            let Some(row) = table.get(name) else { continue };
            let remote = row.serving.as_ref().and_then(|mounted| mounted.file.remote());
            if row.refused.is_none() && remote.is_some_and(|remote| !remote.is_replaced()) {
                continue;
            }
            let attempt = Mounted::reach(manner.clone(), runtime, &self.shared).map(Arc::new);
            let attempt = attempt.map_err(|error| error.to_string());
            good &= attempt.is_ok();
            let before = self.table.rcu(|table| table::tried(table, &row.settings, &attempt));
            self.report(&before);
        }
        good
    }

    pub(crate) fn table(&self) -> Arc<Table> {
        self.table.load_full()
    }

    /// Notes that bytes of a pack are not what they were.
    pub(crate) fn note_damage(&self, mounted: &Mounted) {
        if !mounted.damaged.swap(true, Ordering::Relaxed) {
            tracing::error!(generation = mounted.generation, "bytes of a pack are not those of its address");
            self.tell();
        }
    }

    /// Tells readiness whether all packs are well.
    fn tell(&self) {
        let ill = self.table.load().values().any(|row| matches!(row.state(), "refused" | "damaged"));
        if self.told.swap(ill, Ordering::Relaxed) != ill {
            if ill {
                self.service.lose(CAUSE, Severity::Degraded);
            } else {
                self.service.restore(CAUSE);
            }
        }
    }

    /// A mount whose address nobody has looked for yet; those first that wait for it.
    fn unhashed(&self) -> Option<Arc<Mounted>> {
        let table = self.table.load();
        let candidates = table.values().filter_map(|row| row.candidate.as_ref());
        let serving = table.values().filter_map(|row| row.serving.as_ref());
        let wanted = |mounted: &&Arc<Mounted>| {
            let unknown = mounted.file.local().is_some_and(|file| file.address().is_none());
            unknown && mounted.unhashed.get().is_none()
        };
        candidates.chain(serving).find(wanted).cloned()
    }

    fn is_mounted(&self, mounted: &Arc<Mounted>) -> bool {
        let table = self.table.load();
        let mut all = table.values().flat_map(|row| [&row.serving, &row.candidate]).flatten();
        all.any(|other| Arc::ptr_eq(other, mounted))
    }

    fn settle(&self, mounted: &Arc<Mounted>, failed: Option<String>) {
        if let Some(why) = &failed {
            tracing::warn!(
                generation = mounted.generation,
                error = why,
                "the address of a pack is not known"
            );
            let _ = mounted.unhashed.set(why.clone());
        }
        self.table.rcu(|table| table::settled(table, mounted, failed.as_deref()));
        self.tell();
    }

    /// Removes the trees of packs that are gone.
    fn sweep(&self) -> std::io::Result<()> {
        let Some(folder) = &self.shared.folder else { return Ok(()) };
        if !folder.exists() {
            return Ok(());
        }
        let table = self.table.load();
        let all = table.values().flat_map(|row| [&row.serving, &row.candidate]).flatten();
        let keys: Vec<String> = all.filter_map(|mounted| Some(mounted.file.local()?.stamp().key())).collect();
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            if !keys.iter().any(|key| entry.file_name() == key.as_str()) {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

/// What a row can be.
const STATES: [&str; 4] = ["serving", "checking", "refused", "damaged"];

impl Row {
    /// What operators and the catalogue call it.
    pub(crate) fn state(&self) -> &'static str {
        let damaged = |mounted: &Arc<Mounted>| mounted.damaged.load(Ordering::Relaxed);
        match (&self.serving, &self.candidate) {
            _ if self.refused.is_some() => "refused",
            (Some(serving), _) if damaged(serving) => "damaged",
            (_, Some(_)) => "checking",
            _ => "serving",
        }
    }
}

/// Finds out the address of each pack that is mounted, one after the other, and again after a change of configuration.
pub(crate) async fn hash<T: Send + Sync>(
    packs: Arc<Packs>,
    service: Service,
    mut config: watch::Receiver<T>,
) -> TaskResult {
    loop {
        config.borrow_and_update();
        let hashing = async {
            let sweeping = packs.clone();
            if let Err(error) = tokio::task::spawn_blocking(move || sweeping.sweep()).await? {
                tracing::warn!(%error, "trees of packs that are gone cannot be removed");
            }
            while let Some(mounted) = packs.unhashed() {
                let failed = hash_one(&packs, &mounted).await?;
                packs.settle(&mounted, failed);
            }
            Ok::<(), tokio::task::JoinError>(())
        };
        tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            done = hashing => done?,
        }
        tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            changed = config.changed() => changed?,
        }
    }
}

/// Mounts the packs that are on servers, and again when they have been replaced or the configuration has changed.
pub(crate) async fn reach<T: Send + Sync>(
    packs: Arc<Packs>,
    service: Service,
    mut config: watch::Receiver<T>,
) -> TaskResult {
    let mut pause = RETRY;
    loop {
        config.borrow_and_update();
        let (reaching, runtime) = (packs.clone(), Handle::current());
        let reaching = tokio::task::spawn_blocking(move || reaching.reach_all(&runtime));
        let good = tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            good = reaching => good?,
        };
        packs.rounds.send_modify(|round| *round += 1);
        let wait = if good { LOOK } else { pause };
        pause = if good { RETRY } else { (2 * pause).min(LOOK) };
        tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            changed = config.changed() => changed?,
            () = packs.replaced.notified() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// Says why it cannot be done, if so.
async fn hash_one(
    packs: &Arc<Packs>,
    mounted: &Arc<Mounted>,
) -> Result<Option<String>, tokio::task::JoinError> {
    let folder = packs.shared.folder.clone();
    let Some(file) = mounted.file.local().cloned() else { return Ok(None) };
    let begun = tokio::task::spawn_blocking(move || Hashing::begin(file, folder.as_deref())).await?;
    let mut hashing = match begun {
        Ok(Some(hashing)) => hashing,
        Ok(None) => return Ok(Some("it is too large to be checked without a folder to write to".to_owned())),
        Err(error) => return Ok(Some(error.to_string())),
    };
    loop {
        if !packs.is_mounted(mounted) {
            return Ok(Some("it is not mounted any more".to_owned()));
        }
        let begun = Instant::now();
        let stretch = tokio::task::spawn_blocking(move || {
            let done = hashing.stretch()?;
            if done { hashing.finish().map(|_| None) } else { Ok(Some(hashing)) }
        });
        match stretch.await? {
            Ok(None) => return Ok(None),
            Ok(Some(more)) => hashing = more,
            Err(error) => return Ok(Some(error.to_string())),
        }
        // Half of the time is for others.
        tokio::time::sleep(begun.elapsed()).await;
    }
}
