//! Whether enough of the right signers approve a payload.

use crate::approval::{ApprovalError, CheckedApproval};
use crate::hash::B3;
use crate::signers::SignerSet;

/// Approvals counted in one set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tally {
    pub have: u64,
    /// The set's threshold.
    pub need: u64,
    /// How many may approve.
    pub of: u64,
}

/// What a list of approvals comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judgement {
    /// Places in the list of those that count somewhere, in the order of their signers' names.
    pub counted: Vec<usize>,
    /// Of those, the first that make up the quorum.
    pub enough: Vec<usize>,
    /// The others, and why; they are left out of the record.
    pub set_aside: Vec<(usize, ApprovalError)>,
    pub in_force: Tally,
    /// Where the payload changes the signer set: the new set's.
    pub proposed: Option<Tally>,
}

/// A list of approvals that no quorum can be judged by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("two approvals by one signer")]
pub struct DuplicateApproval;

impl Judgement {
    /// Judges approvals of a payload at a time. A change of the signer set needs the old quorum and the new.
    pub fn of(
        payload_b3: B3,
        approvals: &[CheckedApproval],
        in_force: &SignerSet,
        proposed: Option<&SignerSet>,
        at: u64,
    ) -> Result<Self, DuplicateApproval> {
        let mut order: Vec<usize> = (0..approvals.len()).collect();
        let name = |index: usize| approvals[index].approval().signer.as_str();
        order.sort_by(|a, b| name(*a).cmp(name(*b)));
        if order.windows(2).any(|pair| name(pair[0]) == name(pair[1])) {
            return Err(DuplicateApproval);
        }
        let empty = |set: &SignerSet| Tally { have: 0, need: set.threshold(), of: set.approvers() };
        let mut judged = Self {
            counted: Vec::with_capacity(approvals.len()),
            enough: Vec::new(),
            set_aside: Vec::new(),
            in_force: empty(in_force),
            proposed: proposed.map(empty),
        };
        for index in order {
            let approval = &approvals[index];
            let of = |set| {
                if approval.payload_b3() == payload_b3 {
                    approval.counts_in(set, at)
                } else {
                    Err(ApprovalError::InvalidSig)
                }
            };
            let (old, new) = (of(in_force), proposed.map(of));
            let needed = |tally: &Tally, counts: bool| counts && tally.have < tally.need;
            let new_counts = new == Some(Ok(()));
            if needed(&judged.in_force, old.is_ok())
                || judged.proposed.as_ref().is_some_and(|tally| needed(tally, new_counts))
            {
                judged.enough.push(index);
            }
            judged.in_force.have += u64::from(old.is_ok());
            if let Some(tally) = &mut judged.proposed {
                tally.have += u64::from(new_counts);
            }
            match old {
                Err(why) if !new_counts => judged.set_aside.push((index, why)),
                _ => judged.counted.push(index),
            }
        }
        Ok(judged)
    }

    pub fn met(&self) -> bool {
        self.in_force.have >= self.in_force.need && self.proposed.is_none_or(|tally| tally.have >= tally.need)
    }
}

/// No approvals can meet the quorums of the set in force and of the proposed one. Each name approves once, with the
/// keys of one set, so these, who are to have other keys under the same name, count in one set alone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no approvals can meet both quorums, for {} would have other keys under the same name", .names.join(", "))]
pub struct Unreachable {
    pub names: Vec<String>,
}

/// Whether a change from one set to another can be approved at all.
pub fn reachable(in_force: &SignerSet, proposed: &SignerSet) -> Result<(), Unreachable> {
    let (mut old, mut new, mut names) = (0, 0, Vec::new());
    for signer in in_force.signers().iter().filter(|signer| signer.is_approver()) {
        match proposed.signer(&signer.id).filter(|newer| newer.is_approver()) {
            Some(newer) if newer.keys == signer.keys => (old, new) = (old + 1, new + 1),
            Some(_) => names.push(signer.id.clone()),
            None => old += 1,
        }
    }
    let known = |id: &str| in_force.signer(id).is_some_and(|signer| signer.is_approver());
    new +=
        proposed.signers().iter().filter(|signer| signer.is_approver() && !known(&signer.id)).count() as u64;
    let lacking = in_force.threshold().saturating_sub(old) + proposed.threshold().saturating_sub(new);
    if lacking <= names.len() as u64 { Ok(()) } else { Err(Unreachable { names }) }
}
