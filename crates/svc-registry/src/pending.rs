//! The proposals that wait for approval, in memory; the store has them too.

use crate::store::{Gone, Kept};
use ron_log::{B3, CheckedApproval, Proposal, SignerSet, State};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// Bytes of payloads that may be pending, whatever their number.
const BYTES_MAX: usize = 128 << 20;
/// Proposals that came to nothing and are remembered.
const GONE_MAX: usize = 10_000;

/// One proposal.
#[derive(Debug, Clone)]
pub(crate) struct Waiting {
    pub(crate) proposal: Arc<Proposal>,
    pub(crate) ends_at: u64,
    pub(crate) approvals: Vec<CheckedApproval>,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    waiting: HashMap<B3, Waiting>,
    ends: BTreeSet<(u64, B3)>,
    bytes: usize,
    /// Oldest first.
    gone: VecDeque<B3>,
}

impl Pending {
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn get(&self, id: B3) -> Option<&Waiting> {
        self.waiting.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: B3) -> Option<&mut Waiting> {
        self.waiting.get_mut(&id)
    }

    /// Whether one more of so many bytes may wait.
    pub(crate) fn has_room(&self, count_max: usize, bytes: usize) -> bool {
        self.waiting.len() < count_max && self.bytes + bytes <= BYTES_MAX
    }

    pub(crate) fn insert(&mut self, waiting: Waiting) {
        let id = waiting.proposal.b3();
        self.bytes += waiting.proposal.bytes().len();
        self.ends.insert((waiting.ends_at, id));
        self.gone.retain(|gone| *gone != id);
        self.waiting.insert(id, waiting);
    }

    pub(crate) fn remove(&mut self, id: B3) -> Option<Waiting> {
        let waiting = self.waiting.remove(&id)?;
        self.bytes -= waiting.proposal.bytes().len();
        self.ends.remove(&(waiting.ends_at, id));
        Some(waiting)
    }

    /// Notes one that came to nothing; gives the one that is forgotten for it.
    pub(crate) fn note_gone(&mut self, id: B3) -> Option<B3> {
        self.gone.push_back(id);
        if self.gone.len() > GONE_MAX { self.gone.pop_front() } else { None }
    }

    /// Those that are past their end.
    pub(crate) fn ended(&self, now: u64) -> Vec<B3> {
        self.ends.iter().take_while(|(end, _)| *end < now).map(|(_, id)| *id).collect()
    }

    /// Takes up what the store has: approvals are checked again, for nobody vouches for a disk.
    pub(crate) fn restore(&mut self, kept: Kept, state: &State) {
        let Ok(proposal) = Proposal::parse_canonical(kept.payload) else { return };
        let proposed = proposed(&proposal);
        let check = |approval: ron_log::Approval| {
            approval.check(proposal.b3(), state.signers(), proposed.as_ref()).ok()
        };
        let approvals = kept.approvals.into_iter().filter_map(check).collect();
        self.insert(Waiting { proposal: Arc::new(proposal), ends_at: kept.ends_at, approvals });
    }

    pub(crate) fn restore_gone(&mut self, mut gone: Vec<(u64, B3, Gone)>) {
        gone.sort_by_key(|(at, _, _)| *at);
        self.gone = gone.into_iter().map(|(_, id, _)| id).collect();
    }
}

/// The signer set a proposal would put in force.
pub(crate) fn proposed(proposal: &Proposal) -> Option<SignerSet> {
    State::proposed_signers(proposal.payload()).ok().flatten()
}
