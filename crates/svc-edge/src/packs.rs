//! Packs that are served: mounted at the start and when the configuration or a file changes, each under a name.
//!
//! Start from [`Packs`]. `table` says which generation of a pack is served, `mounted` is one generation, `checked` how
//! its bytes are checked, [`hash`] finds out their address, after mounting and in the background.

mod checked;
mod mounted;
mod table;

pub(crate) use checked::Damage;
pub(crate) use mounted::{Content, Mounted};
pub(crate) use table::Row;

use crate::cas::Trust;
use crate::config::PackSettings;
use crate::pack::cache::Kept;
use crate::pack::{DirectoryCache, Limits, PackError};
use arc_swap::ArcSwap;
use checked::{Hashing, Policy, Stamp};
use mounted::Shared;
use ron_kernel::health::Severity;
use ron_kernel::inventory::LockSpec;
use ron_kernel::kernel::Service;
use ron_kernel::task::TaskResult;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;
use table::{Attempt, Table};
use tokio::sync::watch;

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
/// What readiness calls a pack that is refused or damaged.
const CAUSE: &str = "packs";

/// All packs. Readers never wait.
#[derive(Debug)]
pub(crate) struct Packs {
    table: ArcSwap<Table>,
    shared: Arc<Shared>,
    service: Service,
    /// Readiness was told that something is wrong.
    told: AtomicBool,
}

/// Files that were tried, to be put in place with the configuration that names them.
pub(crate) struct Attempts(Vec<(PackSettings, Attempt)>);

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

    /// Mounts what a configuration names. A file that is mounted already stays so. Blocks.
    pub(crate) fn attempt(&self, packs: &[PackSettings], base: &Path) -> Attempts {
        let table = self.table.load();
        let one = |settings: &PackSettings| {
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
        Attempts(packs.iter().map(one).collect())
    }

    /// Puts the mounts of a configuration in place. Requests in flight keep what they have.
    pub(crate) fn apply(&self, attempts: &Attempts, trust: Trust) {
        self.shared.policy.set(trust);
        let before = self.table.rcu(|table| table::configured(table, &attempts.0));
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
        let wanted =
            |mounted: &&Arc<Mounted>| mounted.file.address().is_none() && mounted.unhashed.get().is_none();
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
        let keys: Vec<String> = all.map(|mounted| mounted.file.stamp().key()).collect();
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

/// Says why it cannot be done, if so.
async fn hash_one(
    packs: &Arc<Packs>,
    mounted: &Arc<Mounted>,
) -> Result<Option<String>, tokio::task::JoinError> {
    let (file, folder) = (mounted.file.clone(), packs.shared.folder.clone());
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
