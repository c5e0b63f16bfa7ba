//! Checking approvals: while another batch is being written those that wait are checked ahead, on threads of their own.

use crate::shared::Shared;
use ron_log::approval::Sig;
use ron_log::{Approval, ApprovalError, CheckedApproval, Proposal, SignerSet, Unchecked, check_all};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

/// Threads that check at once, at most.
const THREADS_MAX: usize = 8;
/// What may wait to be checked ahead.
const AHEAD_MAX: usize = 512;
/// Proposals whose approvals are checked ahead together: enough for the gain, few enough that they are soon done.
const TOGETHER: usize = 32;
/// Into how many parts a batch is taken apart for that, at least.
const PARTS: usize = 2;

pub(crate) type Checked = Result<CheckedApproval, ApprovalError>;

/// How many threads check signatures. Asked once: the answer lies in files.
pub(crate) fn threads() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    *THREADS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX))
}

/// Checks approvals, and says how long each took; those that were checked together took the same.
pub(crate) fn check(shared: &Shared, given: &[Unchecked<'_>], signers: &SignerSet) -> Vec<Checked> {
    let mut checked = Vec::with_capacity(given.len());
    for alike in given.chunk_by(|a, b| algorithm(a.approval) == algorithm(b.approval)) {
        let began = Instant::now();
        checked.extend(check_all(alike, signers));
        let (algorithm, each) = (algorithm(alike[0].approval), began.elapsed() / alike.len() as u32);
        alike.iter().for_each(|_| shared.numbers.verify.with([algorithm]).observe(each));
    }
    checked
}

fn algorithm(approval: &Approval) -> &'static str {
    match approval.sig {
        Sig::Ed25519(_) => "ed25519",
        Sig::MlDsa44(_) => "ml-dsa-44",
        Sig::Hybrid(..) => "ed25519+ml-dsa-44",
    }
}

/// The approvals that came with a proposal, each checked once as long as the signers stay the same.
#[derive(Debug)]
pub(crate) struct Given {
    proposal: Arc<Proposal>,
    proposed: Option<SignerSet>,
    approvals: Vec<Approval>,
    /// The version of the signers it was checked against, and what came out.
    checked: OnceLock<(u64, Vec<Checked>)>,
}

impl Given {
    pub(crate) fn new(proposal: &Arc<Proposal>, approvals: Vec<Approval>) -> Arc<Given> {
        let proposed = crate::pending::proposed(proposal);
        Arc::new(Given { proposal: proposal.clone(), proposed, approvals, checked: OnceLock::new() })
    }

    /// Whether it has to be checked by the signers of a version.
    pub(crate) fn is_open(&self, version: u64) -> bool {
        self.checked.get().is_none_or(|(by, _)| *by != version)
    }

    /// What came out, by the signers of a version.
    pub(crate) fn checked(&self, shared: &Shared, version: u64, signers: &SignerSet) -> Vec<Checked> {
        match self.checked.get() {
            Some((by, checked)) if *by == version => checked.clone(),
            _ => check(shared, &self.unchecked().collect::<Vec<_>>(), signers),
        }
    }

    /// Checks those that are open together, unless somebody is done with one meanwhile.
    pub(crate) fn check_all(given: &[&Arc<Given>], shared: &Shared, version: u64, signers: &SignerSet) {
        let open: Vec<_> = given.iter().filter(|given| given.checked.get().is_none()).collect();
        Proposal::hash_all(open.iter().map(|given| &*given.proposal));
        let unchecked: Vec<_> = open.iter().flat_map(|given| given.unchecked()).collect();
        let mut checked = check(shared, &unchecked, signers).into_iter();
        for given in open {
            let own = checked.by_ref().take(given.approvals.len()).collect();
            // Who was first found the same.
            let _ = given.checked.set((version, own));
        }
    }

    fn unchecked(&self) -> impl Iterator<Item = Unchecked<'_>> {
        let (payload_b3, proposed) = (self.proposal.b3(), self.proposed.as_ref());
        self.approvals.iter().map(move |approval| Unchecked { approval, payload_b3, proposed })
    }
}

/// Threads that check ahead. To wake one costs as much as a check, so what there is much of is handed over together.
#[derive(Debug)]
pub(crate) struct Ahead {
    /// Nobody's, once it is answered.
    gathered: Mutex<Vec<Weak<Given>>>,
    to: SyncSender<Vec<Weak<Given>>>,
}

impl Ahead {
    /// One core is left to whoever writes.
    pub(crate) fn new(shared: &Arc<Shared>) -> std::io::Result<Ahead> {
        let (to, waiting) = sync_channel::<Vec<Weak<Given>>>(AHEAD_MAX / TOGETHER);
        let waiting = Arc::new(Mutex::new(waiting));
        for _ in 0..threads().saturating_sub(1).max(1) {
            let (shared, waiting) = (shared.clone(), waiting.clone());
            let next = move || waiting.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
            let work = move || {
                while let Some(given) = next() {
                    let view = shared.view.load_full();
                    let given: Vec<_> = given.iter().filter_map(Weak::upgrade).collect();
                    let given: Vec<_> = given.iter().collect();
                    Given::check_all(&given, &shared, view.head.signers_version, view.state.signers());
                }
            };
            std::thread::Builder::new().name("checker".to_owned()).spawn(work)?;
        }
        Ok(Ahead { gathered: Mutex::default(), to })
    }

    /// Has approvals checked while a batch of so many jobs is being written: the next will not be much smaller. Those that
    /// find no place, and those that nothing more comes to join, are checked by the Committer.
    pub(crate) fn check(&self, given: &Arc<Given>, batch: usize) {
        let mut gathered = self.gathered.lock().unwrap_or_else(PoisonError::into_inner);
        gathered.push(Arc::downgrade(given));
        if gathered.len() >= (batch / PARTS).clamp(1, TOGETHER) {
            let together = std::mem::take(&mut *gathered);
            drop(gathered);
            let _ = self.to.try_send(together);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RegistrySettings;
    use crate::fixture::{Fixture, approval, key, put, roots, until};
    use ron_log::key::PublicKey;
    use ron_log::{Role, Signer};

    #[tokio::test]
    async fn while_much_is_written_much_is_checked_together() {
        let registry = Fixture::new(RegistrySettings::default());
        let ahead = Ahead::new(&registry.shared).unwrap();
        let given = |nonce: usize| {
            let nonce = nonce as u8;
            let proposal = Arc::new(put(0, "a", nonce));
            Given::new(&proposal, vec![approval(1, proposal.b3())])
        };
        let (given, alone): (Vec<_>, _) = ((1..=TOGETHER).map(given).collect(), given(0));
        given[1..].iter().for_each(|given| ahead.check(given, 512));
        assert_eq!(ahead.gathered.lock().unwrap().len(), TOGETHER - 1);
        ahead.check(&given[0], 512);
        until(|| given.iter().all(|given| given.checked.get().is_some())).await;
        ahead.check(&alone, 2 * PARTS - 1);
        until(|| alone.checked.get().is_some()).await;
    }

    #[tokio::test]
    async fn what_was_checked_ahead_is_not_checked_again_unless_the_signers_changed() {
        let registry = Fixture::new(RegistrySettings::default());
        let shared = &registry.shared;
        let proposal = Arc::new(put(0, "a", 1));
        let approvals = vec![approval(1, proposal.b3()), approval(7, proposal.b3())];
        let given = Given::new(&proposal, approvals);
        Ahead::new(shared).unwrap().check(&given, 1);
        until(|| given.checked.get().is_some()).await;
        let checks = || shared.numbers.verify.with(["ed25519"]).count();
        assert_eq!(checks(), 2);
        assert!(!given.is_open(0) && given.is_open(1));
        let found = given.checked(shared, 0, &roots().signers);
        assert!(found[0].is_ok() && found[1].is_err());
        assert_eq!(checks(), 2, "once");
        let signer = |seed: u8| Signer {
            id: format!("s{seed}"),
            keys: vec![PublicKey::Ed25519(key(seed + 1).verifying_key().into())],
            roles: vec![Role::Approve],
            not_after: None,
        };
        let others = SignerSet::new(2, false, vec![signer(1), signer(2), signer(3)]).unwrap();
        assert!(given.checked(shared, 1, &others).iter().all(Result::is_err), "other keys by the same names");
        assert_eq!(checks(), 4);
    }
}
