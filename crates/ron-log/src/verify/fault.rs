//! What can be wrong with a log, and with which version.

use crate::approval::ApprovalError;
use crate::entry::EntryError;
use crate::hash::B3;
use crate::note::NoteError;
use crate::payload::PayloadError;
use crate::snapshot::StateError;
use crate::tile::{Tile, TilePath};

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("version {version}: {kind}")]
pub struct Fault {
    pub version: u64,
    pub kind: FaultKind,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FaultKind {
    #[error("the first entry is not the one the trust roots determine")]
    Genesis,
    #[error("the entry is missing")]
    Missing,
    #[error("the record: {0}")]
    Record(EntryError),
    #[error("the payload: {0}")]
    Payload(PayloadError),
    #[error("the record says version {0}")]
    Version(u64),
    #[error("it does not name the hash of the entry before")]
    Chain,
    #[error("the payload is not the one the record names")]
    PayloadHash,
    #[error("it was judged under another signer set than the one in force")]
    Policy,
    #[error("it was committed after its end")]
    Expired,
    #[error("it touches what changed after its base version")]
    Conflict,
    #[error("the approval by {0}: {1}")]
    Approval(String, ApprovalError),
    #[error("too few approvals count")]
    Quorum,
    #[error("tile/{} differs from the entries", TilePath::Hashes(*.0))]
    Tile(Tile),
    #[error("a signed note: {0}")]
    Note(#[from] NoteError),
    #[error("the checkpoint has another root than the entries")]
    Root,
    #[error("two checkpoints of one size have different roots")]
    Fork,
    #[error("a checkpoint comes after the tree has passed its size")]
    LateCheckpoint,
    #[error("a checkpoint covers this version, which is not there")]
    Truncated,
    #[error("no checkpoint is cosigned by enough of the given witnesses")]
    Unwitnessed,
    #[error("from here on no checkpoint of the log's key covers the entries")]
    Unsigned,
    #[error("the snapshot's state: {0}")]
    State(StateError),
    #[error("the snapshot is not the state at its version")]
    SnapshotState,
    #[error("the snapshot is not of the version before the first entry kept")]
    SnapshotVersion,
    #[error("the log is said to begin here, and no prune manifest says so")]
    Manifest,
    #[error("the record is not the one of the tree")]
    Leaf,
    #[error("HEAD names another entry")]
    Head,
    #[error("the pending proposal {0} is not what was proposed")]
    Pending(B3),
    #[error("a page of the store is not what was written")]
    Page,
    #[error("the export: {0}")]
    Export(&'static str),
}
