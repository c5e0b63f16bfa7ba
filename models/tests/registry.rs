//! Every order of proposals, approvals, commits, crashes and a rotation, on the production state of the log: one
//! artifact at a version, no revoked key counts, and whoever keeps trying commits in the end.

use ed25519_dalek::SigningKey;
use models::explore;
use ron_log::key::PublicKey;
use ron_log::{
    Approval, B3, CheckedApproval, ConflictRule, Entry, Key, Op, Payload, Proposal, Role, Signatures, Signer,
    SignerSet, State, TrustRoots, Verifier,
};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

const NOW: u64 = 1_000;
/// Who may approve before the rotation, and after; the first signer is revoked by it.
const BEFORE: [u8; 3] = [1, 2, 3];
const AFTER: [u8; 3] = [2, 3, 4];
const PROPOSALS_MAX: usize = 3;
/// Two who approve together: one of them revoked by the rotation, or one of them new with it.
const PAIRS: [u8; 2] = [0b00110, 0b10100];

/// What somebody wants: two want the same item to be different, and one wants other signers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Wish {
    One,
    Two,
    Rotate,
}

const WISHES: [Wish; 3] = [Wish::One, Wish::Two, Wish::Rotate];

#[derive(Clone, Copy, Debug)]
enum Action {
    /// Write a proposal on top of the durable head, if the wish has none that could still be committed.
    Propose(Wish),
    /// Two signers sign a proposal, whether that still counts or not.
    Approve(usize, u8),
    /// A writer decides, by what it believes to be the head.
    Decide(usize, usize),
    /// What a writer decided is written if it fits the durable head, and otherwise lost.
    Write(usize),
    /// A writer loses what it decided and reads the log anew.
    Crash(usize),
}

#[derive(Clone)]
struct Pending {
    wish: Wish,
    proposal: Rc<Proposal>,
    /// One bit for each signer.
    approvals: u8,
}

#[derive(Clone)]
struct Writer {
    view: Rc<State>,
    /// An entry on its way to the disk, and the proposal it is made of.
    decided: Option<(Rc<Entry>, usize)>,
}

/// The log, the pending proposals, and two writers of which one may be stale.
#[derive(Clone)]
struct World {
    log: Vec<(Rc<Entry>, Rc<Proposal>)>,
    durable: Rc<State>,
    pending: Vec<Pending>,
    writers: [Writer; 2],
}

type Print = (Vec<B3>, Vec<(B3, u8)>, [(B3, Option<B3>); 2]);

fn key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

fn set(seeds: [u8; 3]) -> SignerSet {
    let signer = |seed: u8| Signer {
        id: format!("s{seed}"),
        keys: vec![PublicKey::Ed25519(key(seed).verifying_key().into())],
        roles: vec![Role::Approve],
        not_after: None,
    };
    SignerSet::new(2, false, seeds.map(signer).into()).expect("a good set")
}

fn roots() -> TrustRoots {
    TrustRoots { log: "model.example/log".into(), signers: set(BEFORE) }
}

/// Signatures are dear and always the same.
#[derive(Default)]
struct Signed {
    made: RefCell<HashMap<(u8, B3), Approval>>,
    checked: RefCell<HashMap<(u8, B3, u64), Option<CheckedApproval>>>,
}

impl Signed {
    fn checked(&self, signer: u8, proposal: &Proposal, state: &State) -> Option<CheckedApproval> {
        let b3 = proposal.b3();
        let approval = self
            .made
            .borrow_mut()
            .entry((signer, b3))
            .or_insert_with(|| Approval::sign(&format!("s{signer}"), &key(signer), b3, NOW))
            .clone();
        let by = (signer, b3, state.signers_version());
        if let Some(known) = self.checked.borrow().get(&by) {
            return known.clone();
        }
        let proposed = State::proposed_signers(proposal.payload()).expect("a good set");
        let found = approval.check(b3, state.signers(), proposed.as_ref()).ok();
        self.checked.borrow_mut().insert(by, found.clone());
        found
    }
}

impl World {
    fn new() -> World {
        let durable = Rc::new(State::genesis(&roots()));
        let (entry, proposal) = roots().genesis();
        let writer = Writer { view: durable.clone(), decided: None };
        World {
            log: vec![(Rc::new(entry), Rc::new(proposal))],
            durable,
            pending: Vec::new(),
            writers: [writer.clone(), writer],
        }
    }

    fn print(&self) -> Print {
        let pending = self.pending.iter().map(|it| (it.proposal.b3(), it.approvals)).collect();
        let writer = |it: &Writer| (it.view.head().hash, it.decided.as_ref().map(|(entry, _)| entry.hash()));
        (
            self.log.iter().map(|(entry, _)| entry.hash()).collect(),
            pending,
            [writer(&self.writers[0]), writer(&self.writers[1])],
        )
    }

    fn is_committed(&self, wish: Wish) -> bool {
        let of = |b3: B3| self.pending.iter().any(|it| it.wish == wish && it.proposal.b3() == b3);
        self.log.iter().any(|(entry, _)| of(entry.record().payload_b3))
    }

    /// Whether the durable head still lets a proposal through, given approvals.
    fn is_open(&self, proposal: &Proposal) -> bool {
        proposal.payload().signers_version == self.durable.signers_version()
            && self.durable.check_conflict(proposal.payload(), ConflictRule::Touched).is_ok()
    }

    fn propose(&mut self, wish: Wish) -> bool {
        let has_one = self.pending.iter().any(|it| it.wish == wish && self.is_open(&it.proposal));
        if has_one || self.is_committed(wish) {
            return false;
        }
        let (key, body) = match wish {
            Wish::One => (Key::new("x-item", "a"), "1".to_owned()),
            Wish::Two => (Key::new("x-item", "a"), "2".to_owned()),
            Wish::Rotate => (Key::new("signers", "main"), set(AFTER).canonical()),
        };
        let payload = Payload {
            base_version: self.durable.head().version,
            signers_version: self.durable.signers_version(),
            nonce: [self.pending.len() as u8; 16],
            ops: vec![Op { key: key.expect("a key"), body: Some(body) }],
            note: String::new(),
            expires_at: NOW,
        };
        let proposal = Rc::new(Proposal::new(payload).expect("a good payload"));
        self.pending.push(Pending { wish, proposal, approvals: 0 });
        true
    }

    fn decide(&mut self, signed: &Signed, writer: usize, index: usize) -> bool {
        let Some(it) = self.pending.get(index) else { return false };
        let writer = &mut self.writers[writer];
        let signers = (1..=4u8).filter(|signer| it.approvals >> signer & 1 == 1);
        let approvals: Vec<_> =
            signers.filter_map(|signer| signed.checked(signer, &it.proposal, &writer.view)).collect();
        match writer.view.commit(&it.proposal, &approvals, NOW, ConflictRule::Touched) {
            Ok(entry) => {
                writer.decided = Some((Rc::new(entry), index));
                true
            }
            Err(_) => false,
        }
    }

    /// Compare and set: the production state takes only the entry that follows it.
    fn write(&mut self, writer: usize) -> Result<bool, String> {
        let Some((entry, index)) = self.writers[writer].decided.take() else { return Ok(false) };
        let proposal = self.pending[index].proposal.clone();
        let mut next = (*self.durable).clone();
        if next.apply(&entry, proposal.payload()).is_ok() {
            self.check(&entry, &proposal)?;
            self.durable = Rc::new(next);
            self.log.push((entry, proposal));
        }
        self.writers[writer].view = self.durable.clone();
        Ok(true)
    }

    /// What must hold of each entry, by the definition alone.
    fn check(&self, entry: &Entry, proposal: &Proposal) -> Result<(), String> {
        let version = entry.record().version;
        if self.log.iter().any(|(other, _)| other.record().version == version) {
            return Err(format!("two artifacts at version {version}"));
        }
        if self.log.iter().any(|(_, other)| other.b3() == proposal.b3()) {
            return Err("one proposal became two artifacts".into());
        }
        let rotated = self.log[1..].iter().any(|(_, it)| it.payload().ops[0].key.is_signers());
        let rotates = proposal.payload().ops[0].key.is_signers();
        let names: HashSet<String> = entry.record().approvals.iter().map(|it| it.signer.clone()).collect();
        let count = |seeds: [u8; 3]| seeds.iter().filter(|seed| names.contains(&format!("s{seed}"))).count();
        let in_force = if rotated { AFTER } else { BEFORE };
        if rotated && names.contains("s1") {
            return Err("a revoked key is in the record".into());
        }
        if count(in_force) < 2 || (rotates && count(AFTER) < 2) {
            return Err(format!("too few approve: {names:?}"));
        }
        Ok(())
    }
}

fn step(world: &World, signed: &Signed, action: Action) -> Result<Option<World>, String> {
    let mut next = world.clone();
    let done = match action {
        Action::Propose(wish) => next.pending.len() < PROPOSALS_MAX && next.propose(wish),
        Action::Approve(index, pair) => match next.pending.get_mut(index) {
            Some(it) if it.approvals & pair != pair => {
                it.approvals |= pair;
                true
            }
            _ => false,
        },
        Action::Decide(writer, index) => {
            next.writers[writer].decided.is_none() && next.decide(signed, writer, index)
        }
        Action::Write(writer) => next.write(writer)?,
        Action::Crash(writer) => {
            next.writers[writer] = Writer { view: next.durable.clone(), decided: None };
            true
        }
    };
    Ok(done.then_some(next))
}

/// From here on everybody gets a turn again and again: every wish must come true. Whoever loses a race proposes
/// anew; a stale writer and old decisions are in the way, but not for ever.
fn fair(world: &World, signed: &Signed) -> Result<(), String> {
    let mut world = world.clone();
    for _round in 0..WISHES.len() + 1 {
        for wish in WISHES {
            world.propose(wish);
        }
        for it in &mut world.pending {
            it.approvals = 0b11110;
        }
        for index in 0..world.pending.len() {
            for writer in 0..2 {
                world.decide(signed, writer, index);
                world.write(writer)?;
            }
        }
        if WISHES.iter().all(|wish| world.is_committed(*wish)) {
            let mut verifier = Verifier::new(roots(), None, Signatures::Trust);
            world.log.iter().for_each(|(entry, it)| verifier.entry(entry.bytes(), it.bytes()));
            let faults = verifier.finish();
            return if faults.is_empty() { Ok(()) } else { Err(format!("the log: {faults:?}")) };
        }
    }
    Err("somebody who kept trying never commits".into())
}

#[test]
fn one_artifact_at_a_version_whatever_happens_and_every_wish_comes_true() {
    let mut actions = Vec::new();
    actions.extend(WISHES.map(Action::Propose));
    for index in 0..PROPOSALS_MAX {
        actions.extend(PAIRS.map(|pair| Action::Approve(index, pair)));
        actions.extend([0, 1].map(|writer| Action::Decide(writer, index)));
    }
    actions.extend([0, 1].map(Action::Write));
    actions.extend([0, 1].map(Action::Crash));
    let (signed, tried) = (Signed::default(), RefCell::new(HashSet::new()));
    let longest = Cell::new(0);
    let states = explore(World::new(), &actions, 5_000_000, World::print, |world, action| {
        let next = step(world, &signed, action)?;
        if let Some(next) = &next {
            longest.set(longest.get().max(next.log.len()));
            if tried.borrow_mut().insert(next.print()) {
                fair(next, &signed)?;
            }
        }
        Ok(next)
    });
    assert!(states > 10_000 && longest.get() >= 3, "{states} states, {} entries", longest.get());
}
