//! Following a log from outside: every entry checked from the trust roots on, never back, never aside.
//!
//! A [`Follower`] is fed what somebody says are the next entries and the log's signed checkpoints. It believes neither:
//! entries are checked as a verifier checks them, and each checkpoint is held against the entries and against every
//! other that was seen of its size. What contradicts is [`Evidence`]. What is refused changes nothing.

use crate::checkpoint::{Checkpoint, hash};
use crate::entry::EntryRecord;
use crate::hash::B3;
use crate::json::{Json, write_text};
use crate::note::{Note, NoteError, NoteKey};
use crate::roots::TrustRoots;
use crate::snapshot::Snapshot;
use crate::state::{Head, State};
use crate::tree::{Hash, Tree, leaf_hash, verify_consistency};
use crate::verify::{Fault, Signatures, Verifier};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Signed checkpoints that are remembered, the newest.
pub const SEEN_MAX: usize = 64;
/// Sizes whose roots are remembered, the newest: a checkpoint of one of them can be compared.
pub const ROOTS_MAX: usize = 1024;

const SCHEMA: &str = "ron.registry.follower/1";

/// Where a follower is, and everything it needs to go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Follower {
    roots: TrustRoots,
    /// The log's key, once it is known; from then on no other is believed.
    log: Option<NoteKey>,
    state: State,
    tree: Tree,
    /// Who approved the versions that items in force come from. Those from before a snapshot are not there.
    approved: BTreeMap<u64, Vec<String>>,
    seen: BTreeMap<u64, (Hash, Note)>,
    roots_at: BTreeMap<u64, Hash>,
}

/// What a head that somebody tells is to a follower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// There is more than was seen.
    Ahead,
    /// It is the one that was seen last.
    Same,
    /// More was seen already.
    Behind,
    /// Another entry was seen at this version.
    Other,
}

/// Why what was fed is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FollowError {
    #[error("{0}")]
    Entry(Fault),
    /// Its notes, or a note and the entries that were checked: nobody can deny it.
    #[error("{0}")]
    Fork(Box<Evidence>),
    /// The proof that was given with it does not hold; a better one might.
    #[error("{0}")]
    Inconsistent(Box<Evidence>),
    #[error("a signed note: {0}")]
    Note(#[from] NoteError),
    #[error("the log is signed with another key than before")]
    OtherKey,
    #[error("the state that the log offers in place of its first entries: {0}")]
    Snapshot(&'static str),
}

/// What a log signed and cannot have meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Evidence {
    /// What it had signed before; none if its entries alone contradict.
    pub before: Option<Note>,
    pub now: Note,
}

/// Why a kept position is not taken up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeptError {
    #[error("is damaged")]
    Damaged,
    #[error("is of other trust roots")]
    OtherRoots,
}

/// What stands for entries that are kept no more.
#[derive(Debug, Clone)]
pub struct Jump<'a> {
    pub checkpoint: &'a Note,
    pub snapshot: &'a Note,
    /// The state that the snapshot binds.
    pub state: &'a [u8],
    /// The tree up to and with the snapshot's version.
    pub tree: Tree,
    /// That the checkpoint's tree continues the follower's, and the snapshot's.
    pub from_own: &'a [Hash],
    pub from_snapshot: &'a [Hash],
}

impl Follower {
    /// At the genesis, which the roots determine.
    pub fn new(roots: TrustRoots) -> Self {
        let mut tree = Tree::default();
        tree.append(leaf_hash(roots.genesis().0.bytes()), |_, _, _| {});
        let (state, roots_at) = (State::genesis(&roots), BTreeMap::from([(tree.size(), tree.root())]));
        Self { roots, log: None, state, tree, approved: BTreeMap::new(), seen: BTreeMap::new(), roots_at }
    }

    pub fn head(&self) -> Head {
        self.state.head()
    }

    pub fn state(&self) -> &State {
        &self.state
    }

    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    pub fn log(&self) -> Option<&NoteKey> {
        self.log.as_ref()
    }

    /// Who approved a version that an item in force comes from; none if that was before a snapshot.
    pub fn approvers(&self, version: u64) -> Option<&[String]> {
        self.approved.get(&version).map(Vec::as_slice)
    }

    /// The newest checkpoint seen.
    pub fn newest(&self) -> Option<&Note> {
        self.seen.last_key_value().map(|(_, (_, note))| note)
    }

    /// Takes the log's key, if none is known yet.
    pub fn trust_log(&mut self, key: &NoteKey) -> Result<(), FollowError> {
        match &self.log {
            Some(known) if known == key => Ok(()),
            None if key.name == self.roots.log => {
                self.log = Some(key.clone());
                Ok(())
            }
            _ => Err(FollowError::OtherKey),
        }
    }

    pub fn told(&self, head: Head) -> Told {
        let own = self.head();
        match head.version.cmp(&own.version) {
            std::cmp::Ordering::Greater => Told::Ahead,
            std::cmp::Ordering::Less => Told::Behind,
            std::cmp::Ordering::Equal if head.hash == own.hash => Told::Same,
            std::cmp::Ordering::Equal => Told::Other,
        }
    }

    /// Takes the next entries, records and payloads in order: all of them, or none.
    pub fn extend(&mut self, entries: &[(Vec<u8>, Vec<u8>)]) -> Result<(), FollowError> {
        let (roots, state, tree) = (self.roots.clone(), self.state.clone(), self.tree.clone());
        let mut verifier = Verifier::resume(roots, None, Signatures::Check, state, tree);
        let (mut approved, mut passed) = (Vec::new(), Vec::new());
        for (record, payload) in entries {
            let version = verifier.next_version();
            verifier.entry(record, payload);
            if let Some(fault) = verifier.faults().first() {
                return Err(FollowError::Entry(fault.clone()));
            }
            let (size, root) = (verifier.tree().size(), verifier.tree().root());
            if let Some((signed, note)) = self.seen.get(&size)
                && *signed != root
            {
                return Err(FollowError::Fork(self.against(note, size)));
            }
            passed.push((size, root));
            let parsed = EntryRecord::parse(record).expect("a verifier has read it");
            approved.push((version, parsed.approvals.into_iter().map(|approval| approval.signer).collect()));
        }
        (self.state, self.tree) = verifier.into_parts().expect("it was resumed with a state");
        self.approved.extend(approved);
        self.forget_unused();
        self.roots_at.extend(passed);
        while self.roots_at.len() > ROOTS_MAX {
            self.roots_at.pop_first();
        }
        Ok(())
    }

    /// Holds a checkpoint against what is known. One that is ahead of the entries is compared when they come.
    pub fn checkpoint(&mut self, note: &Note) -> Result<(), FollowError> {
        let log = self.log.as_ref().ok_or_else(|| NoteError::Unsigned(self.roots.log.clone()))?;
        let Checkpoint { size, root, .. } = Checkpoint::verify(note, log)?;
        if let Some((known, before)) = self.seen.get(&size) {
            if *known == root {
                return Ok(());
            }
            let (before, now) = (Some(before.clone()), note.clone());
            return Err(FollowError::Fork(Box::new(Evidence { before, now })));
        }
        if self.roots_at.get(&size).is_some_and(|own| *own != root) {
            return Err(FollowError::Fork(self.against(note, size)));
        }
        // Witnesses' lines are theirs to show; what the log itself signed is all that counts here.
        let own = |line: &&crate::note::NoteSignature| line.name == log.name && line.id == log.id();
        let signatures = note.signatures.iter().filter(own).take(1).cloned().collect();
        self.seen.insert(size, (root, Note { text: note.text.clone(), signatures }));
        while self.seen.len() > SEEN_MAX {
            self.seen.pop_first();
        }
        Ok(())
    }

    /// Whether the tree of a checkpoint continues the one that was followed, by a proof that is the log's to give. A
    /// log that cannot show how its own checkpoints go together has two histories.
    pub fn continued(&self, note: &Note, path: &[Hash]) -> Result<(), FollowError> {
        let log = self.log.as_ref().ok_or_else(|| NoteError::Unsigned(self.roots.log.clone()))?;
        let checkpoint = Checkpoint::verify(note, log)?;
        let (size, root) = (self.tree.size(), self.tree.root());
        if verify_consistency(size, checkpoint.size, path, &root, &checkpoint.root) {
            return Ok(());
        }
        Err(FollowError::Inconsistent(self.against(note, size)))
    }

    /// What a checkpoint of another history stands against: the one seen nearest to a size.
    fn against(&self, note: &Note, size: u64) -> Box<Evidence> {
        let above = self.seen.range(size..).map(|(_, (_, seen))| seen).find(|seen| seen.text != note.text);
        let below = || self.seen.range(..size).next_back().map(|(_, (_, seen))| seen);
        let before = above.or_else(below).cloned();
        Box::new(Evidence { before, now: note.clone() })
    }

    /// Goes on from a state that the log signed, where the entries up to it are kept no more. That it is the same log
    /// is proved by the tree; what was approved before is known by the log's signature alone.
    pub fn jump(&mut self, jump: Jump<'_>) -> Result<(), FollowError> {
        let mut next = self.clone();
        next.checkpoint(jump.checkpoint)?;
        let log = next.log.as_ref().ok_or_else(|| NoteError::Unsigned(next.roots.log.clone()))?;
        let checkpoint = Checkpoint::verify(jump.checkpoint, log)?;
        let snapshot = Snapshot::verify(jump.snapshot, log)?;
        next.continued(jump.checkpoint, jump.from_own)?;
        let wrong = |what| Err(FollowError::Snapshot(what));
        let (size, root) = (jump.tree.size(), jump.tree.root());
        if snapshot.version + 1 != size || snapshot.version <= self.head().version {
            return wrong("is not of a later version");
        }
        if !verify_consistency(size, checkpoint.size, jump.from_snapshot, &root, &checkpoint.root) {
            return wrong("is not of the tree that is signed");
        }
        let Ok(state) = State::parse(jump.state) else { return wrong("cannot be read") };
        let head = Head { version: snapshot.version, hash: snapshot.hash };
        if B3::of(jump.state) != snapshot.state_b3 || state.head() != head {
            return wrong("is not the one that is signed");
        }
        (next.state, next.tree) = (state, jump.tree);
        next.roots_at = BTreeMap::from([(size, root)]);
        next.forget_unused();
        *self = next;
        Ok(())
    }

    fn forget_unused(&mut self) {
        let used: std::collections::BTreeSet<u64> =
            self.state.items().map(|(_, version, _)| version).collect();
        self.approved.retain(|version, _| used.contains(version));
    }

    /// What must outlive the process; the hash in front finds whatever befalls it.
    pub fn text(&self) -> String {
        let mut body = format!(r#"{{"schema":"{SCHEMA}","roots_b3":"{}""#, self.roots.b3());
        if let Some(log) = &self.log {
            body.push_str(r#","log_key":"#);
            write_text(&log.to_string(), &mut body);
        }
        let list = |items: Vec<String>| items.join(",");
        let peaks = self.tree.peaks().iter().map(|peak| format!("\"{}\"", BASE64_STANDARD.encode(peak)));
        let _ = write!(body, r#","size":{},"peaks":[{}]"#, self.tree.size(), list(peaks.collect()));
        let named = |(version, names): (&u64, &Vec<String>)| {
            let names: Vec<String> = names.iter().map(|name| format!("\"{name}\"")).collect();
            format!(r#"{{"version":{version},"by":[{}]}}"#, names.join(","))
        };
        let _ = write!(body, r#","approved":[{}]"#, list(self.approved.iter().map(named).collect()));
        let seen = self.seen.values().map(|(_, note)| {
            let mut text = String::new();
            write_text(&note.to_string(), &mut text);
            text
        });
        let _ = write!(body, r#","seen":[{}]"#, list(seen.collect()));
        let root = |(size, root): (&u64, &Hash)| {
            format!(r#"{{"size":{size},"root":"{}"}}"#, BASE64_STANDARD.encode(root))
        };
        let _ = write!(body, r#","roots":[{}]"#, list(self.roots_at.iter().map(root).collect()));
        let _ = write!(body, r#","state":{}}}"#, self.state.canonical());
        format!("{}\n{body}\n", B3::of(body.as_bytes()))
    }

    /// Reads what [`Follower::text`] wrote.
    pub fn parse(text: &str, roots: &TrustRoots) -> Result<Self, KeptError> {
        let (b3, body) = text.split_once('\n').ok_or(KeptError::Damaged)?;
        let body = body.strip_suffix('\n').ok_or(KeptError::Damaged)?;
        if B3::parse(b3) != Some(B3::of(body.as_bytes())) {
            return Err(KeptError::Damaged);
        }
        let json = Json::parse_around(body.as_bytes()).ok().ok_or(KeptError::Damaged)?;
        if json.member("roots_b3").and_then(Json::text) != Some(&roots.b3().to_string()) {
            return Err(KeptError::OtherRoots);
        }
        Self::of_json(&json, roots).ok_or(KeptError::Damaged)
    }

    fn of_json(json: &Json<'_>, roots: &TrustRoots) -> Option<Self> {
        let list = |name: &str| json.member(name)?.list();
        let (whole, text) = (
            |json: &Json<'_>, name: &str| json.member(name)?.whole(),
            |json: &Json<'_>| json.text().map(str::to_owned),
        );
        if json.member("schema")?.text()? != SCHEMA {
            return None;
        }
        let log = match json.member("log_key") {
            Some(line) => Some(NoteKey::parse(line.text()?)?),
            None => None,
        };
        let peaks = list("peaks")?.iter().map(|peak| hash(peak.text()?)).collect::<Option<Vec<_>>>()?;
        let mut follower = Self::new(roots.clone());
        follower.tree = Tree::from_peaks(whole(json, "size")?, peaks)?;
        follower.state = State::parse(json.member("state")?.canonical().as_bytes()).ok()?;
        follower.log = log;
        for entry in list("approved")? {
            let by = entry.member("by")?.list()?.iter().map(text).collect::<Option<Vec<_>>>()?;
            follower.approved.insert(whole(entry, "version")?, by);
        }
        for note in list("seen")? {
            let note = Note::parse(note.text()?.as_bytes()).ok()?;
            let Checkpoint { size, root, .. } = Checkpoint::parse(&note.text)?;
            follower.seen.insert(size, (root, note));
        }
        follower.roots_at.clear();
        for entry in list("roots")? {
            follower.roots_at.insert(whole(entry, "size")?, hash(entry.member("root")?.text()?)?);
        }
        (follower.tree.size() == follower.head().version + 1).then_some(follower)
    }
}

impl Evidence {
    /// Both notes are of one size: they alone prove it, to anybody who has the log's key.
    pub fn is_proof(&self) -> bool {
        let size = |note: &Note| Checkpoint::parse(&note.text).map(|checkpoint| checkpoint.size);
        self.before
            .as_ref()
            .is_some_and(|before| size(before) == size(&self.now) && before.text != self.now.text)
    }

    /// The notes, the older first.
    pub fn notes(&self) -> impl Iterator<Item = &Note> {
        self.before.iter().chain([&self.now])
    }
}

impl std::fmt::Display for Evidence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let size = |note: &Note| Checkpoint::parse(&note.text).map_or(0, |checkpoint| checkpoint.size);
        let now = size(&self.now);
        match &self.before {
            Some(_) if self.is_proof() => write!(f, "the log signed two histories of size {now}"),
            Some(before) => {
                let before = size(before);
                write!(
                    f,
                    "the log signed a history of size {now} that does not go with that of size {before}"
                )
            }
            None => write!(f, "the log signed a history of size {now} that is not that of its entries"),
        }
    }
}
