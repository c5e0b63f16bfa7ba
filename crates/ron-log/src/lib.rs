//! Every format and check of the registry: what is signed, hashed, chained, proved and exported.
//!
//! Start from [`State`]: it says what the items are, which proposal may become the next [`Entry`], and why not.
//! Modules in reading order: [`json`], [`hash`] and [`key`] are the encodings; [`item`], [`payload`],
//! [`approval`], [`signers`] and [`quorum`] say what is asked for and by whom; [`entry`], [`roots`] and
//! [`state`] are the chain; [`tree`] and [`tile`] are the Merkle tree; [`note`], [`checkpoint`] and [`snapshot`]
//! are what the log signs; [`proof`] is one file that shows all of it for one change; [`verify`] checks a whole
//! log, and [`export`] is a log in one file. [`witness`] and [`follow`] watch that a log has one history.
//!
//! Nothing here reads a clock, a file or a socket, or makes random numbers: times and bytes are passed in, so
//! an offline verifier needs this crate and nothing else of ours.

pub mod approval;
pub mod checkpoint;
pub mod entry;
pub mod export;
pub mod follow;
#[doc(hidden)]
pub mod fuzzing;
pub mod hash;
pub mod item;
pub mod json;
pub mod key;
pub mod note;
pub mod payload;
pub mod proof;
pub mod quorum;
mod reason;
pub mod roots;
pub mod signers;
pub mod snapshot;
pub mod state;
pub mod tile;
pub mod tree;
pub mod verify;
pub mod witness;

pub use approval::{Approval, ApprovalError, CheckedApproval, Unchecked, check_all};
pub use checkpoint::Checkpoint;
pub use entry::{Entry, EntryRecord};
pub use follow::{Evidence, Follower};
pub use hash::B3;
pub use item::Key;
pub use note::{Note, NoteKey};
pub use payload::{Op, Payload, Proposal};
pub use proof::ProofFile;
pub use quorum::{Judgement, Tally, reachable};
pub use reason::Reason;
pub use roots::TrustRoots;
pub use signers::{Role, Signer, SignerSet};
pub use snapshot::{PruneManifest, Snapshot};
pub use state::{CommitError, ConflictRule, Head, State};
pub use tree::Tree;
pub use verify::{Fault, FaultKind, Signatures, Verifier};
pub use witness::Witness;
