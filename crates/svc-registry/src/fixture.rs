//! For tests: three signers of whom two must approve, and a registry in memory.

use crate::checks::Given;
use crate::config::RegistrySettings;
use crate::core::{Core, head_after};
use crate::guard::Highest;
use crate::job::{Ask, Job, Reply};
use crate::shared::{Parts, Shared};
use crate::store::{Restored, Store};
use crate::view::View;
use ed25519_dalek::SigningKey;
use ron_kernel::channel::{self, Receiver, Sender};
use ron_kernel::inventory::{ChannelKind, ChannelSpec, Policy};
use ron_kernel::kernel::Kernel;
use ron_kernel::sync::Limits;
use ron_log::{Approval, B3, Head, Key, NoteKey, Op, Payload, Proposal, Role, Signer, SignerSet, TrustRoots};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{broadcast, oneshot};

pub(crate) fn key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

pub(crate) fn signer(seed: u8) -> Signer {
    let public = ron_log::key::PublicKey::Ed25519(key(seed).verifying_key().into());
    Signer { id: format!("s{seed}"), keys: vec![public], roles: vec![Role::Approve], not_after: None }
}

pub(crate) fn roots() -> TrustRoots {
    let signers = SignerSet::new(2, false, (1..=3).map(signer).collect()).unwrap();
    TrustRoots { log: "test.example/log".into(), signers }
}

pub(crate) fn log_key() -> NoteKey {
    NoteKey::ed25519(&roots().log, key(9).verifying_key())
}

/// A proposal that puts one item.
pub(crate) fn put(base: u64, id: &str, nonce: u8) -> Arc<Proposal> {
    let op = Op { key: Key::new("x-n", id).unwrap(), body: Some(format!("{{\"n\":{nonce}}}")) };
    change(base, 0, op, nonce)
}

pub(crate) fn change(base: u64, signers_version: u64, op: Op, nonce: u8) -> Arc<Proposal> {
    let payload = Payload {
        base_version: base,
        signers_version,
        nonce: [nonce; 16],
        ops: vec![op],
        note: String::new(),
        expires_at: crate::shared::now_millis() + 3_600_000,
    };
    Arc::new(Proposal::new(payload).unwrap())
}

pub(crate) fn approval(seed: u8, id: B3) -> Approval {
    Approval::sign(&format!("s{seed}"), &key(seed), id, 1)
}

/// A registry without its tasks.
pub(crate) struct Fixture {
    pub(crate) shared: Arc<Shared>,
    pub(crate) committed: broadcast::Receiver<Head>,
    pub(crate) core: Core,
}

impl Fixture {
    pub(crate) fn new(settings: RegistrySettings) -> Fixture {
        Fixture::over(Store::in_memory(&roots()).unwrap(), settings)
    }

    pub(crate) fn over(store: Store, settings: RegistrySettings) -> Fixture {
        #[expect(clippy::disallowed_methods, reason = "a test is no service")]
        let (sender, committed) = broadcast::channel(16);
        let Restored { state, tree, last, .. } = store.restore(&roots(), &log_key()).unwrap();
        let shared = Shared::new(Parts {
            service: Kernel::new().service("registry"),
            store,
            roots: roots(),
            signing: key(9),
            view: View { head: head_after(&state, &last.0), state, tree },
            checkpoint: None,
            signed_size: 0,
            highest: Highest::in_memory(),
            min_version: 0,
            committed: sender,
            settings,
        });
        let core = Core::restore(&shared).unwrap().unwrap();
        Fixture { shared, committed, core }
    }

    /// Asks several things in one batch.
    pub(crate) fn batch(&mut self, asks: Vec<Ask>) -> Vec<Reply> {
        let (jobs, replies): (Vec<_>, Vec<_>) = asks.into_iter().map(job).unzip();
        let _ = self.core.run(jobs);
        replies.into_iter().map(|mut reply| reply.try_recv().unwrap()).collect()
    }

    pub(crate) fn ask(&mut self, ask: Ask) -> Reply {
        self.batch(vec![ask]).remove(0)
    }

    /// Proposes, approves and commits in one step.
    pub(crate) fn commit(&mut self, proposal: &Arc<Proposal>) -> Reply {
        let approvals = vec![approval(1, proposal.b3()), approval(2, proposal.b3())];
        let approvals = Given::new(proposal, approvals);
        self.ask(Ask::Propose { proposal: proposal.clone(), approvals, commit: true })
    }

    /// Commits so many entries.
    pub(crate) fn grow(&mut self, count: u64) {
        for n in 0..count {
            let base = self.shared.head().version;
            self.commit(&put(base, &format!("{}", (base + 1) % 5), (n % 250) as u8)).unwrap();
        }
    }
}

/// A job and where its answer comes.
pub(crate) fn job(ask: Ask) -> (Job, oneshot::Receiver<Reply>) {
    let (reply, answer) = oneshot::channel();
    let asked = Instant::now();
    (Job { ask, asked, deadline: asked + Duration::from_secs(60), claim: Arc::default(), reply }, answer)
}

/// What retention is told by.
pub(crate) fn commands(shared: &Shared) -> (Sender<()>, Arc<Receiver<()>>) {
    static COMMANDS: ChannelSpec = ChannelSpec {
        service: "registry",
        name: "test",
        kind: ChannelKind::Mpsc,
        capacity: 8,
        policy: Policy::Skip,
        producers: &[],
        consumers: &[],
    };
    let inventory = shared.service.inventory();
    let (sender, receiver) = channel::queue(inventory, &COMMANDS, Limits::items(8), Policy::Skip);
    (sender, Arc::new(receiver))
}

/// Waits for something that another task does.
pub(crate) async fn until(holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it never held");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
