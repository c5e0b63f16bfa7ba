//! Checkpoints: the tree's size and root, signed by the log and cosigned by witnesses.

use crate::note::{Note, NoteError, NoteKey, NoteSignature};
use crate::tile::decimal;
use crate::tree::Hash;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ed25519_dalek::{Signer as _, SigningKey};
use std::fmt::Write as _;

/// What a checkpoint says. There are no extension lines: the chain's hash is in the last leaf.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// The log's name.
    pub origin: String,
    pub size: u64,
    pub root: Hash,
}

impl Checkpoint {
    /// The text that is signed.
    pub fn text(&self) -> String {
        format!("{}\n{}\n{}\n", self.origin, self.size, BASE64_STANDARD.encode(self.root))
    }

    pub fn sign(&self, key: &SigningKey) -> Note {
        Note::sign(&self.text(), &self.origin, key)
    }

    /// Reads a note's text, whoever signed it.
    pub fn parse(text: &str) -> Option<Self> {
        let mut lines = text.strip_suffix('\n')?.split('\n');
        let (origin, size, root) = (lines.next()?, decimal(lines.next()?)?, lines.next()?);
        let root = hash(root)?;
        let checkpoint = Self { origin: origin.to_owned(), size, root };
        (lines.next().is_none() && !origin.is_empty()).then_some(checkpoint)
    }

    /// What a note says that the log's key signed; its name is the origin.
    pub fn verify(note: &Note, log: &NoteKey) -> Result<Self, NoteError> {
        note.verify(log)?;
        Self::parse(&note.text).filter(|checkpoint| checkpoint.origin == log.name).ok_or(NoteError::Malformed)
    }
}

/// One hash in base64.
pub(crate) fn hash(text: &str) -> Option<Hash> {
    BASE64_STANDARD.decode(text).ok()?.try_into().ok()
}

/// What a witness signs.
pub(crate) fn cosigned(text: &str, time: u64) -> String {
    format!("cosignature/v1\ntime {time}\n{text}")
}

/// A witness's statement that it saw a checkpoint at a time (Unix seconds) and that it continues what it saw.
pub fn cosign(text: &str, name: &str, key: &SigningKey, time: u64) -> NoteSignature {
    let id = NoteKey::cosignature(name, key.verifying_key()).id();
    let signature = key.sign(cosigned(text, time).as_bytes()).to_bytes();
    NoteSignature { name: name.to_owned(), id, bytes: [time.to_be_bytes().as_slice(), &signature].concat() }
}

/// How many of these witnesses cosigned; a wrong signature by one of them spoils the note.
pub fn cosignatures(note: &Note, witnesses: &[NoteKey]) -> Result<u64, NoteError> {
    let mut found = 0;
    for witness in witnesses {
        match note.verify(witness) {
            Ok(_) => found += 1,
            Err(NoteError::Unsigned(_)) => {}
            Err(bad) => return Err(bad),
        }
    }
    Ok(found)
}

/// Of a witness's answer, its cosignature of this very text. Lines by other keys are nobody's word and are ignored.
pub fn cosignature(text: &str, lines: &[NoteSignature], witness: &NoteKey) -> Option<NoteSignature> {
    let is_good = |line: &&NoteSignature| {
        let alone = Note { text: text.to_owned(), signatures: vec![(*line).clone()] };
        alone.verify(witness).is_ok()
    };
    lines.iter().find(is_good).cloned()
}

/// Most hashes of a consistency proof sent to a witness.
pub const PROOF_MAX: usize = 63;

/// The body of a witness's `add-checkpoint` (C2SP tlog-witness).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddCheckpoint {
    /// The size the witness last cosigned.
    pub old_size: u64,
    /// Consistency between that size and the checkpoint's.
    pub proof: Vec<Hash>,
    pub checkpoint: Note,
}

impl AddCheckpoint {
    pub fn body(&self) -> String {
        let mut out = format!("old {}\n", self.old_size);
        for hash in &self.proof {
            let _ = writeln!(out, "{}", BASE64_STANDARD.encode(hash));
        }
        let _ = write!(out, "\n{}", self.checkpoint);
        out
    }

    pub fn parse(body: &[u8]) -> Option<Self> {
        let (head, note) = std::str::from_utf8(body).ok()?.split_once("\n\n")?;
        let mut lines = head.split('\n');
        let old_size = decimal(lines.next()?.strip_prefix("old ")?)?;
        let proof = lines.take(PROOF_MAX + 1).map(hash).collect::<Option<Vec<_>>>()?;
        let checkpoint = Note::parse(note.as_bytes()).ok()?;
        (proof.len() <= PROOF_MAX).then_some(Self { old_size, proof, checkpoint })
    }
}
