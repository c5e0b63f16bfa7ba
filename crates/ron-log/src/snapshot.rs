//! Snapshots and pruning: the notes by which the log vouches for a state, and for what it let go.

use crate::checkpoint::hash;
use crate::hash::B3;
use crate::item::Key;
use crate::json::{Fields, Json, JsonError, Misfit, write_text};
use crate::note::{Note, NoteError, NoteKey};
use crate::signers::SignerSet;
use crate::state::{Head, Held, Items, State};
use crate::tile::decimal;
use crate::tree::Hash;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ed25519_dalek::SigningKey;
use std::fmt::Write as _;
use std::sync::Arc;

pub const STATE_SCHEMA: &str = "ron.registry.state/1";
const SNAPSHOT_HEADER: &str = "ron.registry.snapshot/1";
const PRUNE_HEADER: &str = "ron.registry.prune/1";
/// Bytes of a state that are given at a time, and one item more.
const PIECE: usize = 256 << 10;

/// Why bytes are no state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    #[error("{0}")]
    Json(#[from] JsonError),
    #[error("{0}")]
    Misfit(#[from] Misfit),
}

impl State {
    /// The state as it is kept and hashed; deleted items are in it, for the conflict rule.
    pub fn canonical(&self) -> String {
        let mut out = String::new();
        let Ok(()) = self.canonical_pieces(|piece| {
            out.push_str(piece);
            Ok::<(), std::convert::Infallible>(())
        });
        out
    }

    /// The same piece by piece, so that a large state need not be in memory twice.
    pub fn canonical_pieces<E>(&self, mut give: impl FnMut(&str) -> Result<(), E>) -> Result<(), E> {
        let mut out = format!(r#"{{"hash":"{}","items":["#, self.head.hash);
        for (index, (key, held)) in self.items.sorted().into_iter().enumerate() {
            out.push_str(if index > 0 { ",{" } else { "{" });
            if let Some(body) = &held.body {
                let _ = write!(out, r#""body":{body},"#);
            }
            out.push_str(r#""id":"#);
            write_text(&key.id, &mut out);
            out.push_str(r#","kind":"#);
            write_text(&key.kind, &mut out);
            let _ = write!(out, r#","version":{}}}"#, held.version);
            if out.len() >= PIECE {
                give(&out)?;
                out.clear();
            }
        }
        let (signers, version) = (self.signers_version, self.head.version);
        let _ =
            write!(out, r#"],"schema":"{STATE_SCHEMA}","signers_version":{signers},"version":{version}}}"#);
        give(&out)
    }

    /// Reads what [`State::canonical`] wrote.
    pub fn parse(bytes: &[u8]) -> Result<Self, StateError> {
        let json = Json::parse_canonical(bytes)?;
        let mut fields = Fields::of(&json, "state")?;
        if fields.text("schema")? != STATE_SCHEMA {
            return Err(Misfit { member: "schema", wants: "must be `ron.registry.state/1`" }.into());
        }
        let hash =
            B3::parse(fields.text("hash")?).ok_or(Misfit { member: "hash", wants: "must be a hash" })?;
        let head = Head { version: fields.whole("version")?, hash };
        let signers_version = fields.whole("signers_version")?;
        let (mut items, mut last) = (Items::default(), None::<Key>);
        for item in fields.list("items")? {
            let mut item = Fields::of(item, "item")?;
            let key = Key::new(item.text("kind")?, item.text("id")?)?;
            let version = item.whole("version")?;
            let body = item.optional("body").map(|body| Arc::from(body.canonical()));
            item.end("item")?;
            if version > head.version || last.is_some_and(|last| last >= key) {
                return Err(
                    Misfit { member: "items", wants: "must be in order, none newer than the state" }.into()
                );
            }
            last = Some(key.clone());
            items.put(key, Held { version, body });
        }
        fields.end("state")?;
        let set = items.get(&Key::signers()).filter(|held| held.version == signers_version);
        let set = set.and_then(|held| SignerSet::parse(held.body.as_deref()?).ok());
        let signers = set.ok_or(Misfit { member: "items", wants: "must hold the signer set in force" })?;
        Ok(Self { head, signers: Arc::new(signers), signers_version, items })
    }
}

/// Binds a state's hash to a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    pub log: String,
    pub version: u64,
    /// The entry's hash.
    pub hash: B3,
    /// The hash of the state's canonical bytes.
    pub state_b3: B3,
}

impl Snapshot {
    pub fn sign(&self, key: &SigningKey) -> Note {
        let Self { log, version, hash, state_b3 } = self;
        Note::sign(&format!("{SNAPSHOT_HEADER}\n{log}\n{version}\n{hash}\n{state_b3}\n"), log, key)
    }

    pub fn verify(note: &Note, log: &NoteKey) -> Result<Self, NoteError> {
        note.verify(log)?;
        Self::parse(&note.text).filter(|snapshot| snapshot.log == log.name).ok_or(NoteError::Malformed)
    }

    fn parse(text: &str) -> Option<Self> {
        let [log, version, hash, state_b3] = lines(text, SNAPSHOT_HEADER)?;
        let (hash, state_b3) = (B3::parse(hash)?, B3::parse(state_b3)?);
        Some(Self { log: log.to_owned(), version: decimal(version)?, hash, state_b3 })
    }
}

/// What retention removed, and the checkpoint that covers it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PruneManifest {
    pub log: String,
    /// The first version that is kept.
    pub min_version: u64,
    /// The covering checkpoint's size and root.
    pub size: u64,
    pub root: Hash,
    /// See [`PruneDigest`].
    pub digest: B3,
    pub pruned_at: u64,
}

impl PruneManifest {
    pub fn sign(&self, key: &SigningKey) -> Note {
        let Self { log, min_version, size, root, digest, pruned_at } = self;
        let root = BASE64_STANDARD.encode(root);
        let text = format!("{PRUNE_HEADER}\n{log}\n{min_version}\n{size}\n{root}\n{digest}\n{pruned_at}\n");
        Note::sign(&text, log, key)
    }

    pub fn verify(note: &Note, log: &NoteKey) -> Result<Self, NoteError> {
        note.verify(log)?;
        Self::parse(&note.text).filter(|manifest| manifest.log == log.name).ok_or(NoteError::Malformed)
    }

    /// What a note's text says, whoever signed it.
    pub fn parse(text: &str) -> Option<Self> {
        let [log, min_version, size, root, digest, pruned_at] = lines(text, PRUNE_HEADER)?;
        let (min_version, size) = (decimal(min_version)?, decimal(size)?);
        let (root, digest, pruned_at) = (hash(root)?, B3::parse(digest)?, decimal(pruned_at)?);
        let manifest = Self { log: log.to_owned(), min_version, size, root, digest, pruned_at };
        (min_version < size).then_some(manifest)
    }
}

/// The lines of a note's text after its header.
fn lines<'a, const N: usize>(text: &'a str, header: &str) -> Option<[&'a str; N]> {
    let rest = text.strip_prefix(header)?.strip_prefix('\n')?.strip_suffix('\n')?;
    rest.split('\n').collect::<Vec<_>>().try_into().ok()
}

/// The digest of what one pruning removed: the hashes of each entry and its payload, in order of version.
#[derive(Debug, Clone, Default)]
pub struct PruneDigest(blake3::Hasher);

impl PruneDigest {
    pub fn push(&mut self, entry: B3, payload: B3) {
        self.0.update(&entry.0);
        self.0.update(&payload.0);
    }

    pub fn finish(&self) -> B3 {
        B3(*self.0.finalize().as_bytes())
    }
}
