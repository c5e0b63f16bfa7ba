//! The reasons a change is refused for, by the names the service answers with.

/// One name per way to fail; the error enums of the operations map onto these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    Malformed,
    ChainMismatch,
    DuplicateApproval,
    InvalidSig,
    RevokedKey,
    QuorumFailed,
    PolicyChanged,
    Expired,
}

impl Reason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::ChainMismatch => "chain_mismatch",
            Self::DuplicateApproval => "duplicate_approval",
            Self::InvalidSig => "invalid_sig",
            Self::RevokedKey => "revoked_key",
            Self::QuorumFailed => "quorum_failed",
            Self::PolicyChanged => "policy_changed",
            Self::Expired => "expired",
        }
    }
}

impl crate::ApprovalError {
    pub fn reason(&self) -> Reason {
        match self {
            Self::InvalidSig => Reason::InvalidSig,
            Self::RevokedKey => Reason::RevokedKey,
            Self::Expired => Reason::Expired,
            Self::RoleMissing => Reason::QuorumFailed,
        }
    }
}

impl crate::CommitError {
    pub fn reason(&self) -> Reason {
        match self {
            Self::Signers(_) => Reason::Malformed,
            Self::ChainMismatch => Reason::ChainMismatch,
            Self::DuplicateApproval(_) => Reason::DuplicateApproval,
            Self::QuorumFailed(_) => Reason::QuorumFailed,
            Self::PolicyChanged => Reason::PolicyChanged,
            Self::Expired => Reason::Expired,
        }
    }
}
