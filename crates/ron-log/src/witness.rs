//! A witness's side of C2SP tlog-witness: what it has seen of each log, and whether a checkpoint continues it.
//!
//! [`Witness::check`] only judges. Who keeps the witness must make [`Witness::text`] durable, as it is after
//! [`Witness::note`], before the cosignature leaves, and let no second request in between.

use crate::checkpoint::{AddCheckpoint, Checkpoint, hash};
use crate::note::NoteKey;
use crate::tile::decimal;
use crate::tree::{Hash, Tree, verify_consistency};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use std::collections::BTreeMap;

const HEADER: &str = "ron.witness/1";

/// What a witness knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Witness {
    /// Which logs it watches; one log may have several keys.
    pub logs: Vec<NoteKey>,
    /// Of each log by its origin, the last checkpoint it cosigned; also of logs it watches no more.
    seen: BTreeMap<String, (u64, Hash)>,
}

/// A checkpoint that may be cosigned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Continued {
    pub checkpoint: Checkpoint,
    /// What a cosignature signs: the checkpoint's text, extension lines included.
    pub text: String,
}

/// Why a checkpoint is not cosigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddError {
    #[error("not the body of an add-checkpoint request")]
    Malformed,
    #[error("this log is not watched here")]
    UnknownLog,
    #[error("no key that is trusted for this log has signed the checkpoint")]
    Unsigned,
    /// The request does not begin where the witness is.
    #[error("the last checkpoint cosigned has size {size}")]
    Stale { size: u64 },
    #[error("another root of this size, {size}, is cosigned already")]
    Fork { size: u64 },
    #[error("the proof does not show that the checkpoint continues the last one")]
    Inconsistent,
}

impl Witness {
    /// One that has seen nothing yet.
    pub fn new(logs: Vec<NoteKey>) -> Self {
        Self { logs, seen: BTreeMap::new() }
    }

    /// Reads what [`Witness::text`] wrote.
    pub fn parse(text: &str, logs: Vec<NoteKey>) -> Option<Self> {
        let lines = text.strip_prefix(HEADER)?.strip_prefix('\n')?;
        let mut seen = BTreeMap::new();
        for line in lines.split_terminator('\n') {
            let mut words = line.split(' ');
            let (origin, size, root) = (words.next()?, decimal(words.next()?)?, hash(words.next()?)?);
            if words.next().is_some() || seen.insert(origin.to_owned(), (size, root)).is_some() {
                return None;
            }
        }
        let witness = Self { logs, seen };
        (witness.text() == text).then_some(witness)
    }

    /// What must outlive the process. An origin is the name of a key, so it has no spaces.
    pub fn text(&self) -> String {
        let line = |(origin, (size, root)): (&String, &(u64, Hash))| {
            format!("{origin} {size} {}\n", BASE64_STANDARD.encode(root))
        };
        format!("{HEADER}\n{}", self.seen.iter().map(line).collect::<String>())
    }

    /// Judges the body of an `add-checkpoint` request.
    pub fn check(&self, body: &[u8]) -> Result<Continued, AddError> {
        let request = AddCheckpoint::parse(body).ok_or(AddError::Malformed)?;
        let text = &request.checkpoint.text;
        // Of other logs' checkpoints there may be more lines; they are signed, but are nothing to a witness.
        let known: String = text.split_inclusive('\n').take(3).collect();
        let checkpoint = Checkpoint::parse(&known).ok_or(AddError::Malformed)?;
        let mut keys = self.logs.iter().filter(|key| key.name == checkpoint.origin).peekable();
        if keys.peek().is_none() {
            return Err(AddError::UnknownLog);
        }
        if !keys.any(|key| request.checkpoint.verify(key).is_ok()) {
            return Err(AddError::Unsigned);
        }
        if request.old_size > checkpoint.size {
            return Err(AddError::Malformed);
        }
        let (size, root) =
            self.seen.get(&checkpoint.origin).copied().unwrap_or_else(|| (0, Tree::default().root()));
        if request.old_size != size {
            return Err(AddError::Stale { size });
        }
        if checkpoint.size == size && checkpoint.root != root {
            return Err(AddError::Fork { size });
        }
        if !verify_consistency(size, checkpoint.size, &request.proof, &root, &checkpoint.root) {
            return Err(AddError::Inconsistent);
        }
        Ok(Continued { checkpoint, text: text.clone() })
    }

    /// Remembers a checkpoint that [`Witness::check`] found good.
    pub fn note(&mut self, continued: &Continued) {
        let Checkpoint { origin, size, root } = &continued.checkpoint;
        self.seen.insert(origin.clone(), (*size, *root));
    }
}
