//! The tenants of one class in one lane: who is served next.
//!
//! Rounds are numbered and nobody is paid one by one: what a tenant may spend follows from what it had when it was
//! last looked at and the rounds since. One that cannot pay waits under the round in which it can.

use super::{Shape, bounded, signed, step, turn_bytes};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Instant;

/// Idle tenants that are remembered; past that the longest idle is forgotten early, with what it owes.
const IDLE_MAX: usize = 4096;

#[derive(Clone, Debug)]
pub(super) struct Class<J> {
    flows: HashMap<u32, Flow<J>>,
    round: u64,
    /// Tenants that have just become active and are served once before the round goes on, by place.
    fresh: BTreeMap<u64, u32>,
    /// Tenants that can pay, by place: whoever joined or was served longest ago is next.
    ready: BTreeMap<u64, u32>,
    /// Tenants that cannot, by the round in which they can, and place.
    broke: BTreeSet<(u64, u64, u32)>,
    /// Tenants with neither jobs queued nor running, in the order in which they became so, each with a place that
    /// says whether it is the same idleness.
    idle: VecDeque<(u64, u32)>,
    next_place: u64,
    /// Sum of the quanta of the tenants with queued jobs.
    pub(super) quanta: u64,
    /// Jobs being run.
    pub(super) running: usize,
}

#[derive(Clone, Debug)]
struct Flow<J> {
    jobs: VecDeque<Queued<J>>,
    /// What it could spend in the round `paid`.
    deficit: i64,
    paid: u64,
    quantum: u64,
    queued_cost: u64,
    running: usize,
    at: At,
}

#[derive(Clone, Debug)]
pub(super) struct Queued<J> {
    pub(super) number: u64,
    pub(super) cost: u64,
    pub(super) deadline: Instant,
    pub(super) job: J,
}

/// Where a tenant stands, and under which place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Idle(u64),
    Fresh(u64),
    Ready(u64),
    Broke(u64, u64),
}

impl<J> Flow<J> {
    /// Pays for the rounds up to `round`.
    fn pay(&mut self, round: u64, turn: i64) {
        let rounds = i64::try_from(round.saturating_sub(self.paid)).unwrap_or(i64::MAX);
        self.deficit = self.deficit.saturating_add(turn.saturating_mul(rounds));
        self.paid = self.paid.max(round);
    }

    /// Brings an idle tenant up to the beginning of `round`: it has worked off what it owed, and saved nothing.
    fn rest(&mut self, round: u64, turn: i64) {
        if self.paid < round {
            self.pay(round - 1, turn);
            self.deficit = self.deficit.min(0);
        }
    }
}

impl<J> Class<J> {
    pub(super) fn new() -> Class<J> {
        Class {
            flows: HashMap::new(),
            round: 1,
            fresh: BTreeMap::new(),
            ready: BTreeMap::new(),
            broke: BTreeSet::new(),
            idle: VecDeque::new(),
            next_place: 1,
            quanta: 0,
            running: 0,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.fresh.is_empty() && self.ready.is_empty() && self.broke.is_empty()
    }

    /// Turns are worth something else from now on.
    pub(super) fn reshape(&mut self, former: &Shape, shape: &Shape) {
        let ids: Vec<u32> = self.flows.keys().copied().collect();
        for id in ids {
            let flow = self.flows.get_mut(&id).expect("a key of the map");
            let turn = turn_bytes(former, flow.quantum);
            if flow.jobs.is_empty() {
                flow.rest(self.round, turn)
            } else {
                flow.pay(self.round, turn)
            }
            self.seat_again(shape, id);
        }
    }

    pub(super) fn enqueue(&mut self, shape: &Shape, id: u32, quantum: u64, queued: Queued<J>) {
        self.tidy(shape);
        let flow = self.flows.entry(id).or_insert_with(|| Flow {
            jobs: VecDeque::new(),
            deficit: 0,
            paid: self.round - 1,
            quantum,
            queued_cost: 0,
            running: 0,
            at: At::Idle(0),
        });
        flow.queued_cost += queued.cost;
        if !flow.jobs.is_empty() {
            flow.jobs.push_back(queued);
            if flow.quantum != quantum {
                flow.pay(self.round, turn_bytes(shape, flow.quantum));
                self.quanta = self.quanta + quantum - flow.quantum;
                flow.quantum = quantum;
                self.seat_again(shape, id);
            }
            return;
        }
        // The first time in this round it is paid like everybody, and served before the round goes on; one that
        // comes back has what it left, and one that owes waits until it does not.
        let first = flow.paid < self.round;
        flow.rest(self.round, turn_bytes(shape, flow.quantum));
        flow.quantum = quantum;
        flow.jobs.push_back(queued);
        flow.pay(self.round, turn_bytes(shape, quantum));
        self.quanta += quantum;
        let place = self.next_place();
        if first && self.flows[&id].deficit > 0 {
            self.fresh.insert(place, id);
            self.flow(id).at = At::Fresh(place);
        } else {
            self.seat(shape, id, place);
        }
    }

    fn flow(&mut self, id: u32) -> &mut Flow<J> {
        self.flows.get_mut(&id).expect("whoever has a place has a flow")
    }

    fn next_place(&mut self) -> u64 {
        self.next_place += 1;
        self.next_place
    }

    /// Gives a tenant with jobs its place among those who can pay or those who cannot.
    fn seat(&mut self, shape: &Shape, id: u32, place: u64) {
        let round = self.round;
        let flow = self.flow(id);
        let turn = turn_bytes(shape, flow.quantum);
        flow.pay(round, turn);
        let missing = signed(flow.jobs[0].cost).saturating_sub(flow.deficit);
        if missing <= 0 {
            flow.at = At::Ready(place);
            self.ready.insert(place, id);
        } else {
            let rounds = missing / turn + i64::from(missing % turn > 0);
            let able = round.saturating_add(rounds.unsigned_abs());
            flow.at = At::Broke(able, place);
            self.broke.insert((able, place, id));
        }
    }

    /// Takes a tenant off its place.
    fn unseat(&mut self, id: u32) {
        match self.flow(id).at {
            At::Fresh(place) => drop(self.fresh.remove(&place)),
            At::Ready(place) => drop(self.ready.remove(&place)),
            At::Broke(able, place) => drop(self.broke.remove(&(able, place, id))),
            At::Idle(_) => {}
        }
    }

    /// What a tenant has, or what its next job costs, has changed: it keeps its place, perhaps on the other side.
    fn seat_again(&mut self, shape: &Shape, id: u32) {
        if let At::Ready(place) | At::Broke(_, place) = self.flow(id).at {
            self.unseat(id);
            self.seat(shape, id, place);
        }
    }

    /// Whose job is next, and what it costs, in a class that is not idle.
    pub(super) fn candidate(&mut self) -> (u32, u64) {
        let first = self.fresh.first_key_value().or_else(|| self.ready.first_key_value());
        let id = if let Some((_, id)) = first { *id } else { self.next_round() };
        (id, self.flows[&id].jobs[0].cost)
    }

    /// Nobody can pay: on to the first round in which somebody can.
    fn next_round(&mut self) -> u32 {
        self.round = self.broke.first().expect("a class that is not idle has somebody in it").0;
        while let Some((able, place, id)) = self.broke.first().copied().filter(|first| first.0 <= self.round)
        {
            step(1);
            self.broke.remove(&(able, place, id));
            self.ready.insert(place, id);
            self.flow(id).at = At::Ready(place);
        }
        *self.ready.first_key_value().expect("somebody can pay now").1
    }

    /// Takes the candidate's job. If it goes to run, its tenant pays and its class has one more running.
    pub(super) fn take(&mut self, shape: &Shape, id: u32, now: Instant) -> Queued<J> {
        self.unseat(id);
        let round = self.round;
        let flow = self.flow(id);
        let turn = turn_bytes(shape, flow.quantum);
        flow.pay(round, turn);
        let queued = flow.jobs.pop_front().expect("the candidate has a job");
        flow.queued_cost -= queued.cost;
        if queued.deadline > now {
            flow.deficit = bounded(flow.deficit.saturating_sub(signed(queued.cost)), turn);
            flow.running += 1;
            self.running += 1;
        }
        let place = self.next_place();
        if self.flow(id).jobs.is_empty() {
            self.leave(id);
        } else {
            self.seat(shape, id, place);
        }
        queued
    }

    pub(super) fn newest(&self, id: u32) -> Option<u64> {
        self.flows.get(&id)?.jobs.back().map(|queued| queued.number)
    }

    pub(super) fn queued_cost(&self, id: u32) -> u64 {
        self.flows.get(&id).map_or(0, |flow| flow.queued_cost)
    }

    pub(super) fn remove(&mut self, shape: &Shape, id: u32, number: u64) -> Option<J> {
        let round = self.round;
        let flow = self.flows.get_mut(&id)?;
        let index = flow.jobs.binary_search_by_key(&number, |queued| queued.number).ok()?;
        flow.pay(round, turn_bytes(shape, flow.quantum));
        let queued = flow.jobs.remove(index)?;
        flow.queued_cost -= queued.cost;
        if flow.jobs.is_empty() {
            self.unseat(id);
            self.leave(id);
        } else if index == 0 {
            self.seat_again(shape, id);
        }
        Some(queued.job)
    }

    /// The tenant has nothing queued any more and no place. What it has not spent it keeps until the round ends.
    fn leave(&mut self, id: u32) {
        let place = self.next_place();
        let flow = self.flow(id);
        flow.at = At::Idle(place);
        let (quantum, running) = (flow.quantum, flow.running);
        self.quanta -= quantum;
        if running == 0 {
            self.idle.push_back((place, id));
        }
        if self.is_idle() {
            // Nobody waits: the round is over, and there is nobody to be fair to.
            self.round += 1;
            step(self.idle.len());
            for (place, id) in std::mem::take(&mut self.idle) {
                self.forget(place, id);
            }
        }
    }

    fn forget(&mut self, place: u64, id: u32) {
        if self.flows.get(&id).is_some_and(|flow| flow.at == At::Idle(place) && flow.running == 0) {
            self.flows.remove(&id);
        }
    }

    /// Forgets idle tenants that are as good as new, looking at no more than come.
    fn tidy(&mut self, shape: &Shape) {
        for _ in 0..2 {
            let Some((place, id)) = self.idle.pop_front() else { return };
            step(1);
            let Some(flow) = self.flows.get_mut(&id) else { continue };
            if flow.at != At::Idle(place) || flow.running > 0 {
                continue;
            }
            flow.rest(self.round, turn_bytes(shape, flow.quantum));
            let as_new = flow.paid < self.round && flow.deficit >= 0;
            if as_new || self.idle.len() >= IDLE_MAX {
                self.flows.remove(&id);
            } else {
                self.idle.push_back((place, id));
            }
        }
    }

    /// A job of the tenant is done and cost so much more than was charged.
    pub(super) fn finish(&mut self, shape: &Shape, id: u32, difference: i64) {
        self.running = self.running.saturating_sub(1);
        let (round, idle) = (self.round, self.is_idle());
        let Some(flow) = self.flows.get_mut(&id) else { return };
        flow.running = flow.running.saturating_sub(1);
        let turn = turn_bytes(shape, flow.quantum);
        let queued = !flow.jobs.is_empty();
        if queued {
            flow.pay(round, turn)
        } else {
            flow.rest(round, turn)
        }
        flow.deficit = bounded(flow.deficit.saturating_sub(difference), turn);
        if queued {
            self.seat_again(shape, id);
            return;
        }
        flow.rest(round, turn);
        if flow.running == 0 {
            let At::Idle(place) = flow.at else { return };
            if idle {
                self.flows.remove(&id);
            } else {
                self.idle.push_back((place, id));
            }
        }
    }

    #[cfg(test)]
    pub(super) fn known(&self) -> usize {
        self.flows.len()
    }
}

impl<J: Copy + Into<i64>> Class<J> {
    /// See [`super::FairQueue::print`]: in the order of their places, what each tenant has, and its jobs.
    pub(super) fn print(&self, shape: &Shape, out: &mut Vec<i64>) {
        let place = |at: At| match at {
            At::Fresh(place) => (0, place),
            At::Ready(place) | At::Broke(_, place) => (1, place),
            At::Idle(_) => (2, 0),
        };
        let mut flows: Vec<_> = self.flows.iter().collect();
        flows.sort_by_key(|(id, flow)| (place(flow.at), **id));
        for (id, flow) in flows {
            let turn = turn_bytes(shape, flow.quantum);
            let kind = place(flow.at).0;
            let paid = flow.paid == self.round;
            let rounds = i64::try_from(self.round - flow.paid).unwrap_or(i64::MAX);
            let deficit = match kind {
                2 if paid => flow.deficit,
                2 => flow.deficit.saturating_add(turn.saturating_mul(rounds - 1)).min(0),
                _ => flow.deficit.saturating_add(turn.saturating_mul(rounds)),
            };
            if kind < 2 || paid || flow.running > 0 || deficit < 0 {
                let running = i64::try_from(flow.running).unwrap_or(i64::MAX);
                out.extend([-2, i64::from(*id), kind, i64::from(paid), deficit, running]);
                out.extend(flow.jobs.iter().flat_map(|queued| [signed(queued.cost), queued.job.into()]));
            }
        }
    }
}
