//! The Committer's work on one batch: check, judge, write once, show, answer. Blocks; one thread at a time.

#[cfg(test)]
mod tests;

use crate::checks::{self, Checked, Given, threads};
use crate::job::{Ask, Done, Job, Refusal, Reply};
use crate::pending::{Pending, Waiting, proposed};
use crate::shared::{Shared, Trouble, now_millis};
use crate::store::{Changes, Gone, LogWriter, RestoreError, Restored, StoreError};
use crate::view::{HeadInfo, View};
use ron_kernel::reason::Reason;
use ron_log::state::{Before, supersede};
use ron_log::tree::leaf_hash;
use ron_log::{
    Approval, B3, CheckedApproval, CommitError, ConflictRule, Entry, Judgement, Payload, Proposal, SignerSet,
    State, Tally, Tree, Unchecked, reachable,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use tokio::sync::oneshot;

/// Jobs whose signatures one thread checks: they take about as long as to begin another. More are shared out.
const ALONE: usize = 16;
/// Milliseconds that the clock may be behind the last entry.
const CLOCK_BEHIND_MAX: u64 = 300_000;
/// Of a proposal that has ended.
const PAST_END: &str = "it is past its end: propose it anew with a later `expires_at`";

/// Everything the Committer owns.
#[derive(Debug)]
pub(crate) struct Core {
    shared: Arc<Shared>,
    writer: LogWriter,
    state: State,
    tree: Tree,
    /// The last entry, and what its items were before.
    last: (HeadInfo, Before),
    pending: Pending,
}

/// A batch on its way.
#[derive(Debug, Default)]
struct Batch {
    changes: Changes,
    answers: Vec<Answer>,
    committed: Vec<HeadInfo>,
}

impl Batch {
    /// A proposal is pending no more. What the batch itself would have kept of it is not written.
    fn end(&mut self, id: B3, how: Option<(Gone, u64)>) {
        self.changes.proposals.retain(|(proposal, _, _)| proposal.b3() != id);
        self.changes.approvals.retain(|(of, _)| *of != id);
        self.changes.ended.push((id, how));
    }
}

#[derive(Debug)]
struct Answer {
    asked: Instant,
    /// What it commits, if it does.
    commits: Option<B3>,
    reply: Reply,
    to: oneshot::Sender<Reply>,
}

impl Core {
    /// Takes the log's writer and reads everything; `None` while the writer is with somebody else.
    pub(crate) fn restore(shared: &Arc<Shared>) -> Result<Option<Core>, RestoreError> {
        let Some(writer) = shared.store.log_writer() else { return Ok(None) };
        let Restored { state, tree, last } = shared.store.restore(&shared.roots, &shared.log_key)?;
        let reader = shared.store.reader()?;
        let mut pending = Pending::default();
        for id in reader.proposals()? {
            match reader.proposal(id) {
                Ok(kept) => kept.into_iter().for_each(|kept| pending.restore(kept, &state)),
                // It cannot be approved or committed; whoever proposed it may do so again.
                Err(error) if error.is_damage() => tracing::error!(%error, "a pending proposal is left out"),
                Err(error) => return Err(error.into()),
            }
        }
        pending.restore_gone(reader.all_gone()?);
        shared.pending.store(pending.len(), Ordering::Relaxed);
        let last = (head_after(&state, &last.0), last.1);
        let core = Core { shared: shared.clone(), writer, state, tree, last, pending };
        // What a failed flush left in the file may be gone after a power cut: nobody is shown it.
        if !matches!(shared.store.writable(), Err(StoreError::FlushFailed | StoreError::Stopped)) {
            // Also if readers have the same from a start: one state is enough.
            shared.publish(core.view());
        }
        Ok(Some(core))
    }

    fn view(&self) -> View {
        View { head: self.last.0, state: self.state.clone(), tree: self.tree.clone() }
    }

    /// Does a batch and answers everybody. An error means that the state must be read anew.
    pub(crate) fn run(&mut self, jobs: Vec<Job>) -> Result<(), StoreError> {
        let began = Instant::now();
        let mut claimed = Vec::with_capacity(jobs.len());
        for job in jobs.into_iter().filter(|job| job.claim.take()) {
            if job.deadline <= began {
                self.shared.numbers.commit_timeouts.inc();
                let late =
                    Refusal::new(Reason::Timeout, "the deadline passed in the queue; nothing was done");
                let _ = job.reply.send(Err(late));
            } else {
                claimed.push(job);
            }
        }
        // Looked at before anything is changed in memory that would have to be taken back.
        if let Err(error) = self.shared.store.writable() {
            for job in claimed {
                let _ = job.reply.send(Err(failure(&error, false)));
            }
            self.trouble(&error);
            return Ok(());
        }
        let now = now_millis();
        let mut checked = self.check(&claimed).into_iter();
        let mut batch = Batch::default();
        for job in claimed {
            let found: Vec<Checked> = checked.next().unwrap_or_default();
            let commits = job.ask.commits().map(|commits| commits.id());
            let reply = self.one(&mut batch, job.ask, found, now);
            batch.answers.push(Answer { asked: job.asked, commits, reply, to: job.reply });
        }
        self.expire(&mut batch, now);
        self.finish(batch)
    }

    /// Tells readiness what is wrong with the storage.
    fn trouble(&self, error: &StoreError) {
        match error {
            StoreError::Full => self.shared.troubles.set(Trouble::Full, true),
            StoreError::FlushFailed | StoreError::Stopped => self.shared.troubles.set(Trouble::Stopped, true),
            _ => {}
        }
    }

    /// Ends what is past its end, if anything is, and sees whether a full disk has room again.
    pub(crate) fn tick(&mut self) -> Result<(), StoreError> {
        let now = now_millis();
        if let Err(error) = self.shared.store.writable() {
            self.trouble(&error);
            return Ok(());
        }
        self.shared.troubles.set(Trouble::Full, false);
        if self.shared.store.is_stuck() {
            // Once more; should it fail again, all is read anew.
            self.shared.store.reader()?;
        }
        self.writer.settle(true);
        // Told to readiness; who commits meanwhile is told too.
        let _ = self.clock(now);
        if self.pending.ended(now).is_empty() {
            return Ok(());
        }
        let mut batch = Batch::default();
        self.expire(&mut batch, now);
        self.finish(batch)
    }

    /// Checks every approval of a batch, on several threads if there are many. One list per job.
    fn check(&self, jobs: &[Job]) -> Vec<Vec<Checked>> {
        // Who approves may mean what is proposed in the same batch.
        let mut new: HashMap<B3, &Arc<Proposal>> = HashMap::new();
        if jobs.iter().any(|job| matches!(job.ask, Ask::Approve { .. })) {
            for job in jobs {
                if let Ask::Propose { proposal, .. } = &job.ask {
                    new.insert(proposal.b3(), proposal);
                }
            }
        }
        let (signers, version) = (self.state.signers(), self.state.signers_version());
        let one = |job: &Job| match &job.ask {
            Ask::Propose { approvals, .. } => approvals.checked(&self.shared, version, signers),
            Ask::Approve { id, approval } => {
                let known = self.pending.get(*id).map(|waiting| &waiting.proposal);
                let set = known.or(new.get(id).copied()).and_then(|proposal| proposed(proposal));
                let unchecked = Unchecked { approval, payload_b3: *id, proposed: set.as_ref() };
                checks::check(&self.shared, &[unchecked], signers)
            }
            Ask::Commit { .. } | Ask::Withdraw { .. } | Ask::Supersede => Vec::new(),
        };
        let check = |jobs: &[Job]| -> Vec<Vec<Checked>> {
            let open: Vec<_> = jobs.iter().filter_map(|job| job.open(version)).collect();
            Given::check_all(&open, &self.shared, version, signers);
            jobs.iter().map(one).collect()
        };
        let cores = threads();
        let costs = |job: &&Job| matches!(job.ask, Ask::Approve { .. }) || job.open(version).is_some();
        if cores == 1 || jobs.iter().filter(costs).nth(ALONE).is_none() {
            return check(jobs);
        }
        std::thread::scope(|scope| {
            let part = |part| scope.spawn(move || check(part));
            #[expect(clippy::needless_collect, reason = "all begin before the first is waited for")]
            let running: Vec<_> = jobs.chunks(jobs.len().div_ceil(cores)).map(part).collect();
            running.into_iter().flat_map(|thread| thread.join().expect("a check does not panic")).collect()
        })
    }

    fn one(&mut self, batch: &mut Batch, ask: Ask, checked: Vec<Checked>, now: u64) -> Reply {
        match ask {
            Ask::Propose { proposal, commit, .. } => {
                let approvals = checked.into_iter().collect::<Result<Vec<_>, _>>()?;
                self.propose(batch, &proposal, approvals, commit, now)
            }
            Ask::Approve { id, approval } => {
                let checked = checked.into_iter().next();
                self.approve(batch, id, &approval, checked, now)
            }
            Ask::Commit { id } => {
                let is_new = self.pending.get(id).is_some();
                let done = self.commit(batch, id, now);
                if is_new {
                    self.count(&done);
                }
                done.map(Done::Committed)
            }
            Ask::Withdraw { id } => {
                if self.pending.remove(id).is_none() {
                    // First, for what was withdrawn once may have been committed since.
                    if let Some(HeadInfo { version, .. }) = self.found(batch, id)? {
                        let detail =
                            format!("it became version {version} and cannot be withdrawn; supersede it");
                        return Err(Refusal::new(Reason::Expired, detail));
                    }
                    return match self.gone(batch, id) {
                        Some(Gone::Withdrawn) => Ok(Done::Withdrawn),
                        other => Err(came_to_nothing(other)),
                    };
                }
                batch.end(id, Some((Gone::Withdrawn, now)));
                batch.changes.forgotten.extend(self.pending.note_gone(id));
                Ok(Done::Withdrawn)
            }
            Ask::Supersede => {
                let nonce =
                    [ron_kernel::random::u64().to_be_bytes(), ron_kernel::random::u64().to_be_bytes()];
                let nonce = nonce.as_flattened().try_into().expect("16 bytes");
                let ends_at = now.saturating_add(self.ttl());
                match supersede(&self.state, &self.last.1, nonce, ends_at) {
                    None => Err(Refusal::new(Reason::NotFound, "there is nothing before the genesis")),
                    Some(Err(bad)) => Err(Refusal::new(Reason::Malformed, bad.to_string())),
                    Some(Ok(proposal)) => self.propose(batch, &Arc::new(proposal), Vec::new(), false, now),
                }
            }
        }
    }

    fn ttl(&self) -> u64 {
        u64::try_from(self.shared.settings.load().limits.proposal_ttl.0.as_millis()).unwrap_or(u64::MAX)
    }

    fn propose(
        &mut self,
        batch: &mut Batch,
        proposal: &Arc<Proposal>,
        approvals: Vec<CheckedApproval>,
        commit: bool,
        now: u64,
    ) -> Reply {
        let (id, payload) = (proposal.b3(), proposal.payload());
        let known = self.pending.get(id);
        if known.is_none()
            && !self.state.never_had(payload)
            && let Some(info) = self.found(batch, id)?
        {
            let ends_at = payload.expires_at;
            let proposed = Done::Proposed { proposal: proposal.clone(), ends_at };
            return Ok(if commit { Done::Committed(info) } else { proposed });
        }
        if payload.expires_at < now {
            let detail = "its `expires_at` has passed: propose it anew with a later one";
            return Err(Refusal::new(Reason::Expired, detail));
        }
        if payload.signers_version != self.state.signers_version() {
            let now = self.state.signers_version();
            return Err(Refusal::new(Reason::PolicyChanged, format!("`signers_version` is {now} now")));
        }
        if payload.base_version > self.state.head().version {
            let (base, head) = (payload.base_version, self.state.head().version);
            let detail = format!("`base_version` is {base}, and the last version is {head}");
            return Err(Refusal::new(Reason::Malformed, detail));
        }
        if let Some(set) = proposed(proposal).filter(|_| known.is_none()) {
            self.can_follow(&set)?;
        }
        let ends_at =
            known.map_or(payload.expires_at.min(now.saturating_add(self.ttl())), |known| known.ends_at);
        let held = known.map_or(&[][..], |known| &known.approvals);
        let new = merge(held, approvals)?;
        let is_new = known.is_none();
        if commit {
            let all = held.iter().cloned().chain(new).collect();
            let waiting = Waiting { proposal: proposal.clone(), ends_at, approvals: all };
            let done = self.append(batch, &waiting, now);
            self.count(&done);
            if done.is_ok() && self.pending.remove(id).is_some() {
                batch.end(id, None);
            }
            return done.map(Done::Committed);
        }
        if is_new {
            let limit = self.shared.settings.load().limits.pending_max;
            if !self.pending.has_room(limit, proposal.bytes().len()) {
                self.expire(batch, now);
            }
            if !self.pending.has_room(limit, proposal.bytes().len()) {
                return Err(Refusal::new(Reason::Busy, "too many proposals are pending"));
            }
            let waiting = Waiting { proposal: proposal.clone(), ends_at, approvals: Vec::new() };
            self.pending.insert(waiting);
            batch.changes.proposals.push((proposal.clone(), now, ends_at));
        }
        let waiting = self.pending.get_mut(id).expect("it was found or inserted");
        for approval in new {
            batch.changes.approvals.push((id, approval.approval().clone()));
            waiting.approvals.push(approval);
        }
        // Whoever proposed it asked for no more; why it was not committed is told who asks for that.
        let _ = self.commit_if_met(batch, id, now);
        Ok(Done::Proposed { proposal: proposal.clone(), ends_at })
    }

    /// Refuses a signer set that could never take over, or that names somebody who would have nothing to do.
    fn can_follow(&self, set: &SignerSet) -> Result<(), Refusal> {
        if let Some(idle) = set.idle() {
            return Err(Refusal::new(Reason::Malformed, idle_signer(&idle.id)));
        }
        reachable(self.state.signers(), set).map_err(|unreachable| {
            let advice = "give each new key a new name, so that the old key approves by the old name and the new one by \
                          the new";
            Refusal::new(Reason::Malformed, format!("{unreachable}, and a name approves once: {advice}"))
        })
    }

    fn approve(
        &mut self,
        batch: &mut Batch,
        id: B3,
        approval: &Approval,
        checked: Option<Checked>,
        now: u64,
    ) -> Reply {
        let Some(waiting) = self.pending.get(id) else { return self.approved_before(batch, id, approval) };
        if waiting.ends_at < now {
            return Err(Refusal::new(Reason::Expired, PAST_END));
        }
        let held = waiting.approvals.iter().find(|held| held.approval().signer == approval.signer);
        match held {
            Some(held) if held.approval().sig == approval.sig => {}
            Some(_) => {
                let detail = format!("{} has approved with another signature", approval.signer);
                return Err(Refusal::new(Reason::DuplicateApproval, detail));
            }
            None => {
                let checked = checked.ok_or(Refusal::new(Reason::InvalidSig, "it was not checked"))??;
                // Whoever may not approve is told so now, not at the commit.
                let judged = self.state.judge(&waiting.proposal, std::slice::from_ref(&checked), now)?;
                if let Some((_, why)) = judged.set_aside.into_iter().next() {
                    return Err(why.into());
                }
                batch.changes.approvals.push((id, checked.approval().clone()));
                self.pending.get_mut(id).expect("found above").approvals.push(checked);
            }
        }
        let waiting = self.pending.get(id).expect("found above");
        let judged = self.state.judge(&waiting.proposal, &waiting.approvals, now)?;
        let (committed, not_committed) = match self.commit_if_met(batch, id, now) {
            Some(Ok(info)) => (Some(info), None),
            Some(Err(refusal)) => (None, Some(refusal)),
            None => (None, None),
        };
        let Tally { have, need, of } = judged.in_force;
        Ok(Done::Approved { have, need, of, met: judged.met(), committed, not_committed })
    }

    /// An approval of what is pending no more: one that the entry was made with is told the same again.
    fn approved_before(&self, batch: &Batch, id: B3, approval: &Approval) -> Reply {
        let info = self.settled(batch, id)?;
        let new = batch.changes.entries.iter().map(|(entry, _)| entry);
        let new = new.clone().find(|entry| entry.record().version == info.version).cloned();
        let entry = new.map_or_else(|| Ok(self.stored(info.version)?.0), Ok::<_, Refusal>)?;
        let approvals = &entry.record().approvals;
        if !approvals.iter().any(|kept| (&kept.signer, &kept.sig) == (&approval.signer, &approval.sig)) {
            let detail = format!("it became version {} already and needs no approval any more", info.version);
            return Err(Refusal::new(Reason::Expired, detail));
        }
        let (have, signers) = (approvals.len() as u64, self.state.signers());
        let (need, of) = (signers.threshold(), signers.approvers());
        Ok(Done::Approved { have, need, of, met: true, committed: Some(info), not_committed: None })
    }

    /// Commits what has its quorum, where that is wanted.
    fn commit_if_met(&mut self, batch: &mut Batch, id: B3, now: u64) -> Option<Result<HeadInfo, Refusal>> {
        if !self.shared.settings.load().auto_commit {
            return None;
        }
        let waiting = self.pending.get(id)?;
        let met =
            self.state.judge(&waiting.proposal, &waiting.approvals, now).is_ok_and(|judged| judged.met());
        if !met {
            return None;
        }
        let done = self.commit(batch, id, now);
        self.count(&done);
        Some(done)
    }

    fn count(&self, done: &Result<HeadInfo, Refusal>) {
        let result = match done {
            Ok(_) => "committed",
            Err(refusal) => refusal.reason.code(),
        };
        self.shared.numbers.updates.with([result]).inc();
        if result == Reason::ChainMismatch.code() {
            self.shared.numbers.cas_failed.inc();
        }
    }

    fn commit(&mut self, batch: &mut Batch, id: B3, now: u64) -> Result<HeadInfo, Refusal> {
        let Some(waiting) = self.pending.get(id).cloned() else { return self.settled(batch, id) };
        if waiting.ends_at < now {
            return Err(Refusal::new(Reason::Expired, PAST_END));
        }
        let info = self.append(batch, &waiting, now)?;
        self.pending.remove(id);
        batch.end(id, None);
        Ok(info)
    }

    /// Makes a proposal the next entry.
    fn append(&mut self, batch: &mut Batch, waiting: &Waiting, now: u64) -> Result<HeadInfo, Refusal> {
        let rule = if self.shared.settings.load().strict_head {
            ConflictRule::Strict
        } else {
            ConflictRule::Touched
        };
        let proposal = &waiting.proposal;
        self.clock(now)?;
        // Times in the log never go back, whatever the clock does.
        let committed_at = now.max(self.last.0.committed_at);
        let entry = self.state.commit(proposal, &waiting.approvals, committed_at, rule);
        let entry = entry.map_err(|error| self.not_now(error, waiting, rule))?;
        let before = self.state.apply(&entry, proposal.payload()).expect("the state made the entry");
        batch.changes.grow(&mut self.tree, leaf_hash(entry.bytes()));
        let info = info(&entry, proposal.payload());
        batch.committed.push(info);
        batch.changes.entries.push((entry, proposal.clone()));
        self.last = (info, before);
        Ok(info)
    }

    /// Refuses while the clock is far behind the log: by the log's time, which would count, nothing can be judged.
    fn clock(&self, now: u64) -> Result<(), Refusal> {
        let last = self.last.0.committed_at;
        let behind = last.saturating_sub(now) > CLOCK_BEHIND_MAX;
        self.shared.troubles.set(Trouble::Clock, behind);
        if behind {
            let detail = format!(
                "the log's time is {last}, and this node's clock says {now}: it must be set right before anything is \
                 committed"
            );
            return Err(Refusal::new(Reason::NotReady, detail));
        }
        Ok(())
    }

    /// Why a proposal cannot be committed, with what its proposer and approvers need to know.
    fn not_now(&self, error: CommitError, waiting: &Waiting, rule: ConflictRule) -> Refusal {
        match error {
            CommitError::ChainMismatch if rule == ConflictRule::Strict => {
                let (base, head) = (waiting.proposal.payload().base_version, self.state.head().version);
                let detail = format!(
                    "HEAD has moved: its base version is {base}, the last one {head} (registry.strict_head)"
                );
                Refusal::new(Reason::ChainMismatch, detail)
            }
            CommitError::QuorumFailed(judged) => {
                Refusal::new(Reason::QuorumFailed, lacking(&judged, &waiting.approvals))
            }
            error => error.into(),
        }
    }

    /// The entry a proposal became, in this batch or before.
    fn found(&self, batch: &Batch, id: B3) -> Result<Option<HeadInfo>, Refusal> {
        if let Some(info) = batch.committed.iter().find(|info| info.payload_b3 == id) {
            return Ok(Some(*info));
        }
        let version = self.shared.store.committed(id).map_err(unread)?;
        version
            .map(|version| self.stored(version).map(|(entry, proposal)| info(&entry, proposal.payload())))
            .transpose()
    }

    /// An entry of before this batch.
    fn stored(&self, version: u64) -> Result<(Entry, Proposal), Refusal> {
        let pair = self.shared.store.reader().and_then(|reader| reader.pair(version)).map_err(unread)?;
        let pair =
            pair.ok_or_else(|| Refusal::new(Reason::Pruned, format!("it became version {version}")))?;
        let entry = Entry::parse(pair.0).map_err(unread)?;
        Ok((entry, Proposal::parse_canonical(pair.1).map_err(unread)?))
    }

    /// What became of a proposal that is not pending.
    fn settled(&self, batch: &Batch, id: B3) -> Result<HeadInfo, Refusal> {
        self.found(batch, id)?.ok_or_else(|| came_to_nothing(self.gone(batch, id)))
    }

    /// How a proposal came to nothing, if it did.
    fn gone(&self, batch: &Batch, id: B3) -> Option<Gone> {
        let ended = batch.changes.ended.iter().rev().find(|(ended, _)| *ended == id);
        let stored = || self.shared.store.reader().and_then(|reader| reader.gone(id)).ok().flatten();
        ended.and_then(|(_, how)| *how).or_else(stored).map(|(how, _)| how)
    }

    fn expire(&mut self, batch: &mut Batch, now: u64) {
        for id in self.pending.ended(now) {
            self.pending.remove(id);
            batch.end(id, Some((Gone::Expired, now)));
            batch.changes.forgotten.extend(self.pending.note_gone(id));
        }
    }

    /// Writes, shows, answers; in this order.
    fn finish(&mut self, batch: Batch) -> Result<(), StoreError> {
        let Batch { changes, answers, committed } = batch;
        let written = if changes.is_empty() {
            Ok(())
        } else {
            // What readers were shown is what was durable last.
            self.writer.write(self.shared.head().head(), changes)
        };
        if let Err(error) = written {
            for answer in answers {
                let refusal = failure(&error, answer.commits.is_some());
                if let Some(id) = answer.commits.filter(|_| refusal.reason == Reason::CommitUnknown) {
                    self.shared.note_open(id);
                }
                let _ = answer.to.send(Err(refusal));
            }
            self.trouble(&error);
            return Err(error);
        }
        self.shared.pending.store(self.pending.len(), Ordering::Relaxed);
        // Taken apart once everybody has an answer.
        let mut before = None;
        if !committed.is_empty() {
            self.shared.numbers.batch_size.observe(committed.len() as u64);
            self.shared.note_recent(&committed);
            before = Some(self.shared.publish(self.view()));
        }
        for answer in answers {
            if answer.commits.is_some() && answer.reply.is_ok() {
                self.shared.numbers.commit_latency.observe(answer.asked.elapsed());
            }
            // Whoever gave up before this noted that the outcome is open.
            if answer.to.send(answer.reply).is_err()
                && let Some(id) = answer.commits
            {
                self.shared.forget_open(id);
            }
        }
        for info in committed {
            // Nobody listening is fine: it is a wake-up.
            let _ = self.shared.committed.send(info.head());
        }
        drop(before);
        self.writer.settle(false);
        Ok(())
    }
}

/// What is wrong with a signer that may not approve.
pub(crate) fn idle_signer(id: &str) -> String {
    format!(
        "the signer {id} may not approve, and the set gives nothing else to do: who may propose and commit is said by \
         capabilities (registry:propose, registry:commit); give it the role approve or leave it out"
    )
}

/// Head's members for the last entry of a state.
pub(crate) fn head_after(state: &State, last: &Entry) -> HeadInfo {
    let record = last.record();
    HeadInfo {
        version: state.head().version,
        hash: state.head().hash,
        payload_b3: record.payload_b3,
        signers_version: state.signers_version(),
        committed_at: record.committed_at,
    }
}

/// Head's members for an entry.
pub(crate) fn info(entry: &Entry, payload: &Payload) -> HeadInfo {
    let record = entry.record();
    let changes_signers = payload.ops.iter().any(|op| op.key.is_signers());
    HeadInfo {
        version: record.version,
        hash: entry.hash(),
        payload_b3: record.payload_b3,
        signers_version: if changes_signers { record.version } else { record.signers_version },
        committed_at: record.committed_at,
    }
}

/// The approvals that are new beside those held; another signature by the same signer is refused.
fn merge(held: &[CheckedApproval], given: Vec<CheckedApproval>) -> Result<Vec<CheckedApproval>, Refusal> {
    let mut new: Vec<CheckedApproval> = Vec::new();
    for approval in given {
        let signer = &approval.approval().signer;
        let known = held.iter().chain(&new).find(|known| known.approval().signer == *signer);
        match known {
            None => new.push(approval),
            Some(known) if known.approval().sig == approval.approval().sig => {}
            Some(_) => {
                let detail = format!("{signer} has approved with another signature");
                return Err(Refusal::new(Reason::DuplicateApproval, detail));
            }
        }
    }
    Ok(new)
}

/// Which set lacks how many approvals, and whose do not count and why.
fn lacking(judged: &Judgement, approvals: &[CheckedApproval]) -> String {
    let sets = [("the set in force", Some(judged.in_force)), ("the proposed set", judged.proposed)];
    let lacks = |(set, tally): (&str, Option<Tally>)| {
        let Tally { have, need, .. } = tally.filter(|tally| tally.have < tally.need)?;
        Some(format!("{set} lacks {} of {need} approvals", need - have))
    };
    let aside = judged.set_aside.iter().map(|(index, why)| {
        format!("the approval of {} does not count: {why}", approvals[*index].approval().signer)
    });
    sets.into_iter().filter_map(lacks).chain(aside).collect::<Vec<_>>().join("; ")
}

/// What is told of a proposal that is not pending and was not committed.
fn came_to_nothing(how: Option<Gone>) -> Refusal {
    match how {
        Some(Gone::Withdrawn) => Refusal::new(Reason::Expired, "it was withdrawn: propose it anew"),
        Some(Gone::Expired) => Refusal::new(Reason::Expired, PAST_END),
        None => Refusal::new(Reason::NotFound, "no such proposal is known"),
    }
}

/// What is told when something that is kept cannot be read.
fn unread(error: impl std::fmt::Display) -> Refusal {
    Refusal::new(Reason::Storage, error.to_string())
}

/// What a caller is told of a write that failed.
fn failure(error: &StoreError, commits: bool) -> Refusal {
    match error {
        StoreError::Full => Refusal::new(Reason::Storage, "no room is left; nothing was written"),
        StoreError::HeadMoved => Refusal::new(Reason::ChainMismatch, "HEAD has moved"),
        // Neither done nor not done: only a restart will tell.
        StoreError::FlushFailed | StoreError::Database(_) if commits => {
            Refusal::new(Reason::CommitUnknown, "the storage failed while it was written")
        }
        _ => Refusal::new(Reason::Storage, "the storage failed"),
    }
}
