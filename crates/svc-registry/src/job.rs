//! What is asked of the Committer, and what it answers.

use crate::checks::Given;
use crate::claim::Claim;
use crate::view::HeadInfo;
use ron_kernel::reason::Reason;
use ron_log::{Approval, B3, Proposal};
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// One request to the Committer.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) ask: Ask,
    pub(crate) asked: Instant,
    /// Nobody waits for the answer after this.
    pub(crate) deadline: Instant,
    pub(crate) claim: Arc<Claim>,
    pub(crate) reply: oneshot::Sender<Reply>,
}

impl Job {
    /// The approvals that came with it, if they have to be checked by the signers of a version.
    pub(crate) fn open(&self, version: u64) -> Option<&Arc<Given>> {
        match &self.ask {
            Ask::Propose { approvals, .. } => Some(approvals).filter(|given| given.is_open(version)),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub(crate) enum Ask {
    Propose {
        proposal: Arc<Proposal>,
        approvals: Arc<Given>,
        commit: bool,
    },
    Approve {
        id: B3,
        approval: Approval,
    },
    Commit {
        id: B3,
    },
    Withdraw {
        id: B3,
    },
    /// A proposal that undoes HEAD's effect.
    Supersede,
}

impl Ask {
    /// The proposal that it is to commit.
    pub(crate) fn commits(&self) -> Option<Commits> {
        match self {
            Ask::Propose { proposal, commit: true, .. } => Some(Commits::Proposal(proposal.clone())),
            Ask::Commit { id } => Some(Commits::Id(*id)),
            _ => None,
        }
    }
}

/// A proposal that is to be committed. Its id is made with those of others, unless it is wanted before.
#[derive(Debug)]
pub(crate) enum Commits {
    Proposal(Arc<Proposal>),
    Id(B3),
}

impl Commits {
    pub(crate) fn id(&self) -> B3 {
        match self {
            Commits::Proposal(proposal) => proposal.b3(),
            Commits::Id(id) => *id,
        }
    }
}

pub(crate) type Reply = Result<Done, Refusal>;

/// What was done, and is durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Done {
    Proposed {
        proposal: Arc<Proposal>,
        ends_at: u64,
    },
    Approved {
        have: u64,
        need: u64,
        of: u64,
        met: bool,
        /// What it became, where the quorum alone commits; or why it did not.
        committed: Option<HeadInfo>,
        not_committed: Option<Refusal>,
    },
    Committed(HeadInfo),
    Withdrawn,
}

/// Why not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    pub(crate) detail: Cow<'static, str>,
}

impl Refusal {
    pub(crate) fn new(reason: Reason, detail: impl Into<Cow<'static, str>>) -> Refusal {
        Refusal { reason, detail: detail.into() }
    }
}

impl From<ron_log::CommitError> for Refusal {
    fn from(error: ron_log::CommitError) -> Refusal {
        Refusal { reason: reason_of(error.reason()), detail: error.to_string().into() }
    }
}

impl From<ron_log::ApprovalError> for Refusal {
    fn from(error: ron_log::ApprovalError) -> Refusal {
        Refusal { reason: reason_of(error.reason()), detail: error.to_string().into() }
    }
}

fn reason_of(reason: ron_log::Reason) -> Reason {
    match reason {
        ron_log::Reason::Malformed => Reason::Malformed,
        ron_log::Reason::ChainMismatch => Reason::ChainMismatch,
        ron_log::Reason::DuplicateApproval => Reason::DuplicateApproval,
        ron_log::Reason::InvalidSig => Reason::InvalidSig,
        ron_log::Reason::RevokedKey => Reason::RevokedKey,
        ron_log::Reason::QuorumFailed => Reason::QuorumFailed,
        ron_log::Reason::PolicyChanged => Reason::PolicyChanged,
        ron_log::Reason::Expired => Reason::Expired,
    }
}
