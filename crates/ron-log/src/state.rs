//! What the log adds up to: the items in force, who may change them, and the one next entry that fits.

mod items;

use crate::approval::CheckedApproval;
use crate::entry::{Entry, EntryRecord};
use crate::hash::B3;
use crate::item::Key;
use crate::payload::{Op, Payload, PayloadError, Proposal};
use crate::quorum::{DuplicateApproval, Judgement};
use crate::roots::TrustRoots;
use crate::signers::{SignerSet, SignersError};
pub(crate) use items::Items;
use std::sync::Arc;

/// The last entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    pub version: u64,
    pub hash: B3,
}

/// The items after an entry. Cloning is cheap, and what is changed afterwards is not changed in the clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    pub(crate) head: Head,
    pub(crate) signers: Arc<SignerSet>,
    pub(crate) signers_version: u64,
    pub(crate) items: Items,
}

/// An item, or the memory of a deleted one: the conflict rule must know when it went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The version that last changed it.
    pub version: u64,
    /// Its body in canonical form; none once deleted.
    pub body: Option<Arc<str>>,
}

/// When a commit is too late.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConflictRule {
    /// Something it touches changed after its base version.
    Touched,
    /// The head moved at all.
    Strict,
}

/// Why a proposal cannot become the next entry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    #[error("what it touches changed after its base version")]
    ChainMismatch,
    #[error("the signer set changed after it was written")]
    PolicyChanged,
    #[error("it is past its end")]
    Expired,
    #[error(transparent)]
    DuplicateApproval(#[from] DuplicateApproval),
    #[error("too few approvals count")]
    QuorumFailed(Box<Judgement>),
    #[error("the proposed signer set: {0}")]
    Signers(#[from] SignersError),
}

/// An entry that is not the next one of this state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not the entry that follows this state")]
pub struct NotNext;

/// What an entry's items were before it; enough to undo it.
pub type Before = Vec<(Key, Option<Arc<str>>)>;

impl State {
    /// The state after entry 0.
    pub fn genesis(roots: &TrustRoots) -> Self {
        let (entry, proposal) = roots.genesis();
        let mut state = Self {
            head: Head { version: 0, hash: B3::ZERO },
            signers: Arc::new(roots.signers.clone()),
            signers_version: 0,
            items: Items::default(),
        };
        state.put(0, proposal.payload());
        state.head.hash = entry.hash();
        state
    }

    pub fn head(&self) -> Head {
        self.head
    }

    /// The set in force.
    pub fn signers(&self) -> &Arc<SignerSet> {
        &self.signers
    }

    /// The version that last changed the set.
    pub fn signers_version(&self) -> u64 {
        self.signers_version
    }

    /// An item with the version that last changed it.
    pub fn item(&self, key: &Key) -> Option<(u64, &Arc<str>)> {
        let held = self.items.get(key)?;
        Some((held.version, held.body.as_ref()?))
    }

    /// Every item in force, in no order.
    pub fn items(&self) -> impl Iterator<Item = (&Key, u64, &Arc<str>)> {
        self.items.iter().filter_map(|(key, held)| Some((key, held.version, held.body.as_ref()?)))
    }

    /// The same of one kind or of all, by kind and id.
    pub fn sorted(&self, kind: Option<&str>) -> Vec<(&Key, u64, &Arc<str>)> {
        let mut items: Vec<_> =
            self.items().filter(|(key, ..)| kind.is_none_or(|kind| key.kind == kind)).collect();
        items.sort_unstable_by_key(|(key, ..)| *key);
        items
    }

    /// The version that last changed an item, deleted ones included.
    pub fn last_changed(&self, key: &Key) -> Option<u64> {
        Some(self.items.get(key)?.version)
    }

    /// Whether an earlier entry's payload left in it what it must have, unless a later one changed that again.
    pub fn has(&self, version: u64, payload: &Payload) -> bool {
        let has = |op: &Op| match self.items.get(&op.key) {
            Some(held) if held.version == version => held.body.as_deref() == op.body.as_deref(),
            Some(held) => held.version > version,
            None => false,
        };
        payload.ops.iter().all(has)
    }

    /// The signer set a payload proposes, if it changes that.
    pub fn proposed_signers(payload: &Payload) -> Result<Option<SignerSet>, SignersError> {
        payload.signers_body().map(SignerSet::parse).transpose()
    }

    /// What a payload's approvals come to under the set in force.
    pub fn judge(
        &self,
        proposal: &Proposal,
        approvals: &[CheckedApproval],
        at: u64,
    ) -> Result<Judgement, CommitError> {
        let payload = proposal.payload();
        if payload.signers_version != self.signers_version {
            return Err(CommitError::PolicyChanged);
        }
        let proposed = Self::proposed_signers(payload)?;
        Ok(Judgement::of(proposal.b3(), approvals, &self.signers, proposed.as_ref(), at)?)
    }

    /// The conflict rule alone.
    pub fn check_conflict(&self, payload: &Payload, rule: ConflictRule) -> Result<(), CommitError> {
        let touched = || payload.ops.iter().filter_map(|op| self.last_changed(&op.key)).max();
        let late = match rule {
            ConflictRule::Strict => payload.base_version != self.head.version,
            ConflictRule::Touched => is_late(payload.base_version, self.head, touched()),
        };
        if late { Err(CommitError::ChainMismatch) } else { Ok(()) }
    }

    /// Whether no entry after the genesis can have had this payload: one that had would have changed all that it touches
    /// after its base version.
    pub fn never_had(&self, payload: &Payload) -> bool {
        self.check_conflict(payload, ConflictRule::Touched).is_ok()
    }

    /// The entry a proposal becomes if it is committed now.
    pub fn commit(
        &self,
        proposal: &Proposal,
        approvals: &[CheckedApproval],
        committed_at: u64,
        rule: ConflictRule,
    ) -> Result<Entry, CommitError> {
        let payload = proposal.payload();
        if committed_at > payload.expires_at {
            return Err(CommitError::Expired);
        }
        let judged = self.judge(proposal, approvals, committed_at)?;
        self.check_conflict(payload, rule)?;
        if !judged.met() {
            return Err(CommitError::QuorumFailed(Box::new(judged)));
        }
        let record = |kept: &[usize]| EntryRecord {
            version: self.head.version + 1,
            prev: self.head.hash,
            payload_b3: proposal.b3(),
            payload_bytes: proposal.bytes().len() as u64,
            signers_version: self.signers_version,
            approvals: kept.iter().map(|index| approvals[*index].approval().clone()).collect(),
            committed_at,
        };
        // Where more approve than a record can hold: the set's own rule says that its quorum fits.
        let made =
            Entry::of_checked(record(&judged.counted)).or_else(|| Entry::of_checked(record(&judged.enough)));
        Ok(made.expect("a quorum fits a record"))
    }

    /// Moves on to an entry that [`State::commit`] made or a verifier checked.
    pub fn apply(&mut self, entry: &Entry, payload: &Payload) -> Result<Before, NotNext> {
        let record = entry.record();
        if record.version != self.head.version + 1 || record.prev != self.head.hash {
            return Err(NotNext);
        }
        let before = self.put(record.version, payload);
        self.head = Head { version: record.version, hash: entry.hash() };
        Ok(before)
    }

    /// Goes on from an entry whatever is wrong with it, so that a verifier can name every fault. Gives the
    /// newest version of what it touches: to look that up apart would cost as much as all else here.
    pub(crate) fn advance(&mut self, head: Head, payload: Option<Payload>) -> Option<u64> {
        self.head = head;
        let payload = payload?;
        self.put_signers(head.version, &payload);
        let put = |Op { key, body }: Op| {
            let held = Held { version: head.version, body: body.map(Arc::from) };
            self.items.put(key, held).map(|before| before.version)
        };
        payload.ops.into_iter().map(put).max().flatten()
    }

    fn put_signers(&mut self, version: u64, payload: &Payload) {
        if let Some(body) = payload.signers_body() {
            self.signers = Arc::new(SignerSet::parse(body).expect("a payload's signer set was checked"));
            self.signers_version = version;
        }
    }

    fn put(&mut self, version: u64, payload: &Payload) -> Before {
        self.put_signers(version, payload);
        let change = |op: &Op| {
            let held = Held { version, body: op.body.as_deref().map(Arc::from) };
            let before = self.items.put(op.key.clone(), held);
            (op.key.clone(), before.and_then(|held| held.body))
        };
        payload.ops.iter().map(change).collect()
    }
}

/// Whether what is touched changed after a base version, or the base is of a head that is not there.
pub(crate) fn is_late(base_version: u64, head: Head, touched: Option<u64>) -> bool {
    touched.is_some_and(|version| version > base_version) || base_version > head.version
}

/// A payload that undoes the entry a state ends in, given what its items were before; it needs approval like
/// any other. None for the genesis, which nothing precedes.
pub fn supersede(
    state: &State,
    before: &Before,
    nonce: [u8; 16],
    expires_at: u64,
) -> Option<Result<Proposal, PayloadError>> {
    let Head { version, .. } = state.head();
    if version == 0 {
        return None;
    }
    let op = |(key, body): &(Key, Option<Arc<str>>)| Op {
        key: key.clone(),
        body: body.as_deref().map(str::to_owned),
    };
    Some(Proposal::new(Payload {
        base_version: version,
        signers_version: state.signers_version(),
        nonce,
        ops: before.iter().map(op).collect(),
        note: format!("supersede {version}"),
        expires_at,
    }))
}
