//! The restore guard: the log is never gone back behind what it once signed, or a witness or a mirror has seen of it.
//!
//! A log that was restored from something old would otherwise go on from there and sign a second history. While
//! anybody is known to have seen more, or something else, nothing is signed and every write is refused.

use crate::store::{Reader, RestoreError};
use arc_swap::{ArcSwap, ArcSwapOption};
use ron_kernel::health::Severity;
use ron_kernel::kernel::Service;
use ron_log::tile::Tile;
use ron_log::{Checkpoint, Note, NoteKey, Tree};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why nothing may be signed or written now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// Nobody knows yet what the witnesses or the mirrors have seen.
    Asking(Seer),
    /// Somebody has seen more of the log than there is.
    Behind { who: Seer, seen: u64, has: u64 },
    /// Somebody has seen another history of the log.
    Fork { who: Seer, seen: u64, has: u64 },
}

/// Who has seen a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Seer {
    /// All of them, before they were asked.
    Witnesses,
    /// This node, as its file says.
    Own,
    /// All of those, before they were asked.
    Mirrors,
    /// By the line of its key.
    Witness(String),
    /// By the address of its checkpoint.
    Mirror(String),
}

impl Seer {
    pub(crate) fn witness(key: &NoteKey) -> Seer {
        Seer::Witness(key.to_string())
    }

    fn name(&self) -> &str {
        match self {
            Seer::Witnesses => "witnesses",
            Seer::Mirrors => "mirrors",
            Seer::Own => "own_checkpoint",
            Seer::Witness(line) => line.split('+').next().unwrap_or_default(),
            // A server may have more than one.
            Seer::Mirror(url) => url.split_once("://").map_or(url, |(_, place)| place),
        }
    }
}

impl Hold {
    /// What readiness says.
    fn cause(&self) -> String {
        let told = |what: &str, who: &Seer, seen: &u64, has: &u64| {
            let sort = match who {
                Seer::Witness(_) => "witness_",
                Seer::Mirror(_) => "mirror_",
                Seer::Witnesses | Seer::Mirrors | Seer::Own => "",
            };
            format!("{what}_{sort}{}_saw_{seen}_has_{has}", who.name())
        };
        match self {
            Hold::Asking(who) => format!("asking_{}", who.name()),
            Hold::Behind { who, seen, has } => told("behind", who, seen, has),
            Hold::Fork { who, seen, has } => told("fork", who, seen, has),
        }
    }
}

impl std::fmt::Display for Hold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let who = |who: &Seer| match who {
            Seer::Witness(_) => format!("the witness {}", who.name()),
            Seer::Mirror(_) => format!("the mirror {}", who.name()),
            Seer::Own | Seer::Witnesses | Seer::Mirrors => "this node".to_owned(),
        };
        match self {
            Hold::Asking(who) => {
                write!(f, "the {} are being asked what they have seen of the log", who.name())
            }
            Hold::Behind { who: by, seen, has } => {
                write!(f, "{} has seen size {seen} of the log, which has {has}", who(by))
            }
            Hold::Fork { who: by, seen, has } => {
                write!(f, "{} has seen another history of size {seen} of the log, which has {has}", who(by))
            }
        }
    }
}

/// Everything that holds the log up, each by whom it concerns: one good answer does not outweigh another's bad one.
#[derive(Debug)]
pub(crate) struct Holds {
    service: Service,
    held: ArcSwap<BTreeMap<Seer, Hold>>,
}

impl Holds {
    pub(crate) fn new(service: &Service) -> Holds {
        Holds { service: service.clone(), held: ArcSwap::default() }
    }

    /// Says what one of them has seen; nothing if it is well. Each has one task that speaks for it.
    pub(crate) fn set(&self, who: &Seer, hold: Option<Hold>) {
        let before = self.held.load().get(who).cloned();
        if before == hold {
            return;
        }
        self.held.rcu(|held| {
            let mut held = BTreeMap::clone(held);
            match &hold {
                Some(hold) => held.insert(who.clone(), hold.clone()),
                None => held.remove(who),
            };
            held
        });
        if let Some(hold) = &hold {
            tracing::warn!(%hold, "nothing is signed, and writes are refused");
            self.service.lose(&hold.cause(), Severity::WritesShed);
        }
        if let Some(before) = before {
            tracing::info!(hold = %before, "is over");
            self.service.restore(&before.cause());
        }
    }

    /// Forgets witnesses that are not asked any more.
    pub(crate) fn keep(&self, witnesses: &[NoteKey]) {
        let kept: Vec<Seer> = witnesses.iter().map(Seer::witness).collect();
        for who in self.held.load_full().keys() {
            if matches!(who, Seer::Witness(_)) && !kept.contains(who) {
                self.set(who, None);
            }
        }
    }

    pub(crate) fn any(&self) -> bool {
        !self.held.load().is_empty()
    }

    /// What to tell whoever wants to write; what was seen comes before what is only asked.
    pub(crate) fn said(&self) -> Option<String> {
        self.held.load().values().last().map(ToString::to_string)
    }
}

/// Whether a log of a size, as it is stored, continues what somebody has seen of it.
pub(crate) fn judge(
    reader: &Reader,
    has: u64,
    who: Seer,
    seen_by: &Checkpoint,
) -> Result<Option<Hold>, RestoreError> {
    let seen = seen_by.size;
    if seen > has {
        return Ok(Some(Hold::Behind { who, seen, has }));
    }
    let then = Tree::from_tiles(seen, |tile: Tile| reader.sure_tile(tile));
    let then =
        then.map_err(|bad| RestoreError::Damaged { version: seen.saturating_sub(1), what: bad.to_string() })?;
    Ok((then.root() != seen_by.root).then_some(Hold::Fork { who, seen, has }))
}

/// The highest checkpoint this node ever signed, in a file beside the store's folder: what restores the folder does
/// not take it back.
#[derive(Debug)]
pub(crate) struct Highest {
    /// None under amnesia.
    file: Option<PathBuf>,
    fsync: bool,
    signed: ArcSwapOption<Checkpoint>,
}

impl Highest {
    pub(crate) fn in_memory() -> Highest {
        Highest { file: None, fsync: false, signed: ArcSwapOption::empty() }
    }

    /// Reads the file that belongs to a store's folder.
    pub(crate) fn open(dir: &Path, log: &NoteKey, fsync: bool) -> Result<Highest, String> {
        let file = dir.with_added_extension("signed");
        let signed = match std::fs::read(&file) {
            Ok(bytes) => {
                let checkpoint = Note::parse(&bytes).and_then(|note| Checkpoint::verify(&note, log));
                Some(Arc::new(checkpoint.map_err(|bad| {
                    let advice = "remove it only if this node is to begin another log";
                    format!("{} is no checkpoint of this log: {bad}; {advice}", file.display())
                })?))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(format!("{}: {error}", file.display())),
        };
        // Where it cannot be written nothing could ever be signed: better said now.
        let probe = file.with_added_extension("new");
        let tried = File::create(&probe).and_then(|_| std::fs::remove_file(&probe));
        tried.map_err(|error| format!("{} must be writable, beside the folder: {error}", file.display()))?;
        Ok(Highest { file: Some(file), fsync, signed: ArcSwapOption::new(signed) })
    }

    /// Whether a log of a size, as it is stored, continues what was signed.
    pub(crate) fn judge(&self, reader: &Reader, has: u64) -> Result<Option<Hold>, RestoreError> {
        let Some(signed) = self.signed.load_full() else { return Ok(None) };
        judge(reader, has, Seer::Own, &signed)
    }

    /// Makes it durable that this is about to be signed, before the signature leaves.
    pub(crate) fn note(&self, checkpoint: &Checkpoint, note: &Note) -> std::io::Result<()> {
        if let Some(file) = &self.file {
            let temporary = file.with_added_extension("new");
            let mut new = File::create(&temporary)?;
            new.write_all(note.to_string().as_bytes())?;
            if self.fsync {
                new.sync_data()?;
            }
            std::fs::rename(&temporary, file)?;
            if self.fsync {
                let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
                File::open(folder.unwrap_or(Path::new(".")))?.sync_all()?;
            }
        }
        self.signed.store(Some(Arc::new(checkpoint.clone())));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpointor::{MakeError, make};
    use crate::config::RegistrySettings;
    use crate::fixture::{Fixture, key, log_key, put};
    use ron_kernel::health::Scope;
    use ron_kernel::kernel::Kernel;

    #[test]
    fn each_hold_is_told_and_ends_by_itself_alone() {
        let service = Kernel::new().service("registry");
        service.ready();
        let (holds, health) = (Holds::new(&service), service.kernel().health());
        let witness = |name: &str| NoteKey::cosignature(name, key(1).verifying_key());
        let (a, b) = (Seer::witness(&witness("a.example")), Seer::witness(&witness("b.example")));
        let behind = |who: &Seer| Some(Hold::Behind { who: who.clone(), seen: 9, has: 4 });
        holds.set(&Seer::Witnesses, Some(Hold::Asking(Seer::Witnesses)));
        holds.set(&a, behind(&a));
        holds.set(&b, behind(&b));
        holds.set(&b, behind(&b));
        holds.set(&Seer::Witnesses, None);
        holds.set(&b, Some(Hold::Fork { who: b.clone(), seen: 4, has: 4 }));
        let missing = || health.readiness(Some("registry"), Scope::Write).unwrap().missing;
        let told =
            ["registry.behind_witness_a.example_saw_9_has_4", "registry.fork_witness_b.example_saw_4_has_4"];
        assert_eq!(missing(), told);
        holds.set(&b, None);
        assert_eq!(missing(), &told[..1]);
        assert_eq!(holds.said().unwrap(), "the witness a.example has seen size 9 of the log, which has 4");
        holds.keep(&[witness("b.example")]);
        assert!(!holds.any() && missing().is_empty());
    }

    #[test]
    fn nothing_is_signed_below_or_beside_what_this_node_signed_before() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("reg");
        let open = || Highest::open(&folder, &log_key(), true).unwrap();
        let mut first = Fixture::new(RegistrySettings::default());
        first.grow(3);
        let (signed, _) = make(&first.shared, None).unwrap();
        let checkpoint = Checkpoint::verify(&signed.note, &log_key()).unwrap();
        open().note(&checkpoint, &signed.note).unwrap();
        // The same log goes on; one that is shorter or another does not.
        let judge = |registry: &Fixture| {
            let reader = registry.shared.store.reader().unwrap();
            open().judge(&reader, registry.shared.view.load().tree.size()).unwrap()
        };
        assert_eq!(judge(&first), None);
        first.grow(2);
        assert_eq!(judge(&first), None);
        let mut other = Fixture::new(RegistrySettings::default());
        other.commit(&put(0, "other", 99)).unwrap();
        assert_eq!(judge(&other), Some(Hold::Behind { who: Seer::Own, seen: 4, has: 2 }));
        other.shared.highest.note(&checkpoint, &signed.note).unwrap();
        assert!(matches!(make(&other.shared, None), Err(MakeError::Held(Hold::Behind { .. }))));
        other.grow(5);
        assert_eq!(judge(&other), Some(Hold::Fork { who: Seer::Own, seen: 4, has: 7 }));
        assert!(matches!(make(&other.shared, None), Err(MakeError::Held(Hold::Fork { .. }))));
        assert!(other.shared.store.reader().unwrap().checkpoint().unwrap().is_none(), "nothing was signed");
        std::fs::write(dir.path().join("reg.signed"), "spoiled").unwrap();
        assert!(Highest::open(&folder, &log_key(), true).unwrap_err().contains("no checkpoint of this log"));
    }
}
