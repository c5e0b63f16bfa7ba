//! What a follower keeps for its next start: its position, the last good set, evidence. In memory alone under amnesia.

use super::set::Set;
use anyhow::Context as _;
use ron_kernel::node::DataDir;
use ron_log::follow::KeptError;
use ron_log::{Evidence, Follower, Note, TrustRoots};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

/// Its folder, within the node's data.
const FOLDER: &str = "follow";
const POSITION: &str = "position";
const GOOD: &str = "good";
const EVIDENCE: &str = "evidence.json";

/// Where things are kept; nowhere under amnesia.
#[derive(Clone, Debug)]
pub(super) struct Keep {
    dir: Option<PathBuf>,
}

/// What was kept.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) follower: Follower,
    pub(super) good: Set,
    pub(super) evidence: Option<Found>,
}

/// Evidence against a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub evidence: Evidence,
    /// The verifier line of the log's key, with which anybody can check the notes.
    pub log_key: String,
    /// Nobody can deny it: the log is followed no more.
    pub undeniable: bool,
}

impl Found {
    pub fn json(&self) -> Value {
        let notes: Vec<String> = self.evidence.notes().map(ToString::to_string).collect();
        let (what, undeniable) = (self.evidence.to_string(), self.undeniable);
        json!({"what": what, "log_key": self.log_key, "undeniable": undeniable, "notes": notes})
    }

    pub fn parse(json: &Value) -> Option<Found> {
        let note = |note: &Value| Note::parse(note.as_str()?.as_bytes()).ok();
        let mut notes = json["notes"].as_array()?.iter().map(note).collect::<Option<Vec<_>>>()?;
        let now = notes.pop()?;
        let evidence = Evidence { before: notes.pop(), now };
        let (log_key, undeniable) = (json["log_key"].as_str()?.to_owned(), json["undeniable"].as_bool()?);
        Some(Found { evidence, log_key, undeniable })
    }
}

impl Keep {
    pub(super) fn new(data: &DataDir, amnesia: bool) -> Keep {
        Keep { dir: (!amnesia).then(|| data.join(FOLDER)) }
    }

    /// Reads what was kept. A position of other trust roots is an error; one that is damaged is begun anew.
    pub(super) fn read(&self, roots: &TrustRoots) -> anyhow::Result<Kept> {
        let follower = match self.file(POSITION)? {
            None => Follower::new(roots.clone()),
            Some((path, text)) => match Follower::parse(&text, roots) {
                Ok(follower) => follower,
                Err(KeptError::OtherRoots) => anyhow::bail!(
                    "node.follow: {} is of other trust roots than node.follow.trust_roots: put those back, or remove the folder {} to follow another registry",
                    path.display(),
                    path.parent().unwrap_or(&path).display()
                ),
                Err(damaged) => {
                    tracing::warn!(file = %path.display(), "{damaged}; the registry is followed from the beginning");
                    Follower::new(roots.clone())
                }
            },
        };
        let good = self.file(GOOD)?.and_then(|(path, text)| {
            let set = Set::parse(&text);
            if set.is_none() {
                tracing::warn!(file = %path.display(), "is damaged; there is no last good set");
            }
            set
        });
        let evidence = match self.file(EVIDENCE)? {
            None => None,
            Some((path, text)) => {
                let found = serde_json::from_str(&text).ok().as_ref().and_then(Found::parse);
                let advice = "look at it, and remove it if it is to be forgotten";
                Some(found.with_context(|| format!("{} cannot be read: {advice}", path.display()))?)
            }
        };
        Ok(Kept { follower, good: good.unwrap_or_default(), evidence })
    }

    /// Makes the position durable, before anything is done by it.
    pub(super) fn position(&self, follower: &Follower) -> std::io::Result<()> {
        self.write(POSITION, &follower.text())
    }

    pub(super) fn good(&self, set: &Set) -> std::io::Result<()> {
        self.write(GOOD, &set.text())
    }

    pub(super) fn evidence(&self, found: &Found) -> std::io::Result<()> {
        self.write(EVIDENCE, &format!("{:#}\n", found.json()))
    }

    fn file(&self, name: &str) -> anyhow::Result<Option<(PathBuf, String)>> {
        let Some(path) = self.dir.as_ref().map(|dir| dir.join(name)) else { return Ok(None) };
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some((path, text))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("{} cannot be read", path.display())),
        }
    }

    /// Replaces a file so that the old one or the new one is there, whatever happens.
    fn write(&self, name: &str, text: &str) -> std::io::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        std::fs::create_dir_all(dir)?;
        // A process that takes another's place follows beside it for a while.
        let temporary = dir.join(format!(".{name}.{}", std::process::id()));
        let mut file = File::create(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_data()?;
        std::fs::rename(&temporary, dir.join(name))?;
        File::open(dir)?.sync_all()
    }
}

/// The trust roots of a file, if it is the one that was pinned.
pub(super) fn trust_roots(path: &Path, pinned: &str) -> anyhow::Result<TrustRoots> {
    let bytes = std::fs::read(path).with_context(|| {
        format!("node.follow.trust_roots: {} cannot be read; `ron registry genesis` makes such a file, and the registry's operators have theirs", path.display())
    })?;
    let roots = TrustRoots::parse(&bytes)
        .with_context(|| format!("node.follow.trust_roots: {} holds no trust roots", path.display()))?;
    let found = roots.b3().to_string();
    anyhow::ensure!(
        pinned.is_empty() || pinned == found,
        "node.follow.trust_roots: the hash of {} is {found}, and trust_roots_b3 pins {pinned}",
        path.display()
    );
    Ok(roots)
}
