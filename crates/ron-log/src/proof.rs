//! The proof file (C2SP tlog-proof): one file that shows, offline, that a change was approved, logged and seen.
//!
//! The file's `extra` carries the record, the payload and, for each signer set since the roots, the way to it,
//! so that the checker needs the trust roots, the log's key and nothing else. None of `extra` is believed
//! before the tree and the chain of signer sets say so.

use crate::checkpoint::{Checkpoint, cosignatures, hash};
use crate::entry::{Entry, EntryError};
use crate::note::{Note, NoteError, NoteKey};
use crate::payload::{PayloadError, Proposal};
use crate::quorum::Judgement;
use crate::roots::TrustRoots;
use crate::signers::SignerSet;
use crate::state::State;
use crate::tile::decimal;
use crate::tree::{Hash, leaf_hash, verify_inclusion};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use std::fmt::Write as _;
use std::sync::Arc;

const HEADER: &str = "c2sp.org/tlog-proof@v1";
const EXTRA_HEADER: &[u8] = b"ron.registry.proof/1\n";

/// Largest proof file that is read.
pub const PROOF_FILE_MAX: usize = 64 << 20;

/// A logged change with the path from it to a root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inclusion {
    pub entry: Entry,
    pub proposal: Proposal,
    pub path: Vec<Hash>,
}

/// What a `.tlog-proof` file holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProofFile {
    /// The change that is proved.
    pub subject: Inclusion,
    /// Earlier changes of the signer set after the genesis, oldest first.
    pub rotations: Vec<Inclusion>,
    /// Cosigned or not.
    pub checkpoint: Note,
}

/// Why a proof file proves nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProofFileError {
    #[error("not a proof file of this kind")]
    Malformed,
    #[error("the record: {0}")]
    Entry(#[from] EntryError),
    #[error("the payload: {0}")]
    Payload(#[from] PayloadError),
    #[error("the checkpoint: {0}")]
    Checkpoint(#[from] NoteError),
    #[error("too few of the given witnesses have cosigned")]
    Unwitnessed,
    #[error("version {0} is not in the tree of the checkpoint")]
    NotIncluded(u64),
    #[error("version {0} does not follow from the trust roots")]
    NotApproved(u64),
}

impl ProofFile {
    /// The file's text.
    pub fn text(&self) -> String {
        let mut extra = EXTRA_HEADER.to_vec();
        let mut part = |bytes: &[u8]| {
            extra.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
            extra.extend_from_slice(bytes);
        };
        part(self.subject.entry.bytes());
        part(self.subject.proposal.bytes());
        for rotation in &self.rotations {
            part(rotation.entry.bytes());
            part(rotation.proposal.bytes());
            part(rotation.path.as_flattened());
        }
        let index = self.subject.entry.record().version;
        let mut out = format!("{HEADER}\nextra {}\nindex {index}\n", BASE64_STANDARD.encode(extra));
        for hash in &self.subject.path {
            let _ = writeln!(out, "{}", BASE64_STANDARD.encode(hash));
        }
        let _ = write!(out, "\n{}", self.checkpoint);
        out
    }

    pub fn parse(bytes: &[u8]) -> Result<Self, ProofFileError> {
        let bad = ProofFileError::Malformed;
        if bytes.len() > PROOF_FILE_MAX {
            return Err(bad);
        }
        let text = std::str::from_utf8(bytes).ok().ok_or(bad.clone())?;
        let (head, note) = text.split_once("\n\n").ok_or(bad.clone())?;
        let mut lines = head.split('\n');
        let mut line = |prefix: &str| lines.next().and_then(|line| line.strip_prefix(prefix));
        let extra = line(HEADER).filter(|rest| rest.is_empty()).and_then(|_| line("extra "));
        let extra = extra.and_then(|text| BASE64_STANDARD.decode(text).ok()).ok_or(bad.clone())?;
        let index = line("index ").and_then(decimal).ok_or(bad.clone())?;
        let path = lines.map(hash).collect::<Option<Vec<_>>>().ok_or(bad.clone())?;
        let mut parts = parts(&extra).ok_or(bad.clone())?.into_iter();
        let mut change = |path: Option<Vec<Hash>>| {
            let (Some(entry), Some(payload)) = (parts.next(), parts.next()) else { return Ok(None) };
            let (entry, proposal) =
                (Entry::parse(entry.to_vec())?, Proposal::parse_canonical(payload.to_vec())?);
            let path = match path {
                Some(path) => path,
                None => {
                    let (hashes, rest) = parts.next().ok_or(ProofFileError::Malformed)?.as_chunks();
                    if rest.is_empty() { hashes.to_vec() } else { return Err(ProofFileError::Malformed) }
                }
            };
            Ok(Some(Inclusion { entry, proposal, path }))
        };
        let subject = change(Some(path))?.ok_or(bad.clone())?;
        let mut rotations = Vec::new();
        while let Some(rotation) = change(None)? {
            rotations.push(rotation);
        }
        let file = Self { subject, rotations, checkpoint: Note::parse(note.as_bytes())? };
        if file.subject.entry.record().version != index || file.text().as_bytes() != bytes {
            return Err(bad);
        }
        Ok(file)
    }

    /// Checks everything: the log's signature, cosignatures of at least `quorum` of the witnesses, that every
    /// change is in the tree, and that each was approved under the signer set that the one before left.
    pub fn verify(
        &self,
        roots: &TrustRoots,
        log: &NoteKey,
        witnesses: &[NoteKey],
        quorum: u64,
    ) -> Result<Checkpoint, ProofFileError> {
        let checkpoint = Checkpoint::verify(&self.checkpoint, log)?;
        if checkpoint.origin != roots.log {
            return Err(NoteError::Malformed.into());
        }
        if cosignatures(&self.checkpoint, witnesses)? < quorum {
            return Err(ProofFileError::Unwitnessed);
        }
        let (mut signers, mut signers_version) = (Arc::new(roots.signers.clone()), 0);
        for change in self.rotations.iter().chain([&self.subject]) {
            let version = change.entry.record().version;
            let leaf = leaf_hash(change.entry.bytes());
            if !verify_inclusion(&leaf, version, checkpoint.size, &change.path, &checkpoint.root) {
                return Err(ProofFileError::NotIncluded(version));
            }
            let next = change.approved(&signers, signers_version, roots);
            let next = next.ok_or(ProofFileError::NotApproved(version))?;
            if let Some(next) = next {
                (signers, signers_version) = (Arc::new(next), version);
            }
        }
        Ok(checkpoint)
    }
}

impl Inclusion {
    /// Whether the change was approved by the set in force; with the set it leaves, if it is another.
    fn approved(
        &self,
        signers: &SignerSet,
        signers_version: u64,
        roots: &TrustRoots,
    ) -> Option<Option<SignerSet>> {
        let (record, payload) = (self.entry.record(), self.proposal.payload());
        if record.version == 0 {
            return (self.entry == roots.genesis().0 && self.proposal == roots.genesis().1).then_some(None);
        }
        let bound = record.payload_b3 == self.proposal.b3()
            && record.payload_bytes == self.proposal.bytes().len() as u64
            && record.signers_version == signers_version
            && payload.signers_version == signers_version
            && record.version > signers_version
            && record.committed_at <= payload.expires_at;
        let proposed = State::proposed_signers(payload).ok().filter(|_| bound)?;
        let mut approvals = Vec::with_capacity(record.approvals.len());
        for approval in &record.approvals {
            approvals.push(approval.clone().check(record.payload_b3, signers, proposed.as_ref()).ok()?);
        }
        let judged =
            Judgement::of(record.payload_b3, &approvals, signers, proposed.as_ref(), record.committed_at)
                .ok()?;
        (judged.met() && judged.set_aside.is_empty()).then_some(proposed)
    }
}

fn parts(extra: &[u8]) -> Option<Vec<&[u8]>> {
    let (mut rest, mut found) = (extra.strip_prefix(EXTRA_HEADER)?, Vec::new());
    while !rest.is_empty() {
        let (length, after) = rest.split_first_chunk::<4>()?;
        let (part, after) = after.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        found.push(part);
        rest = after;
    }
    Some(found)
}
