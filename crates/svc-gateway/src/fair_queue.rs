//! The fair queue: hierarchical deficit round robin over classes and tenants, one scheduler per upstream, all
//! under one bound. Pure: no clock, no lock, no task; time is passed in.
//!
//! A *lane* is an upstream's scheduler. In each round a class is paid by its weight and a tenant within its class by
//! its quantum; those who can pay are served one job at a time in turn, so that a round is not one burst after
//! another; when nobody can pay, the next round begins. What a job really cost is settled when it is done. A tenant
//! that is idle at the end of a round keeps nothing of it.
//!
//! The bound is shared: when it is reached, a newcomer whose tenant has its share is refused, and one whose tenant
//! has less takes the place of the newest job of the tenant furthest above its own.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

/// Classes, in the order of their weights in the settings.
pub const CLASSES: usize = 3;

/// Who a job belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant {
    pub class: u8,
    /// A configured tenant, or one of the buckets that unknown ones share.
    pub id: u32,
}

/// What a queue is told about itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    pub capacity: usize,
    /// Bytes that a turn adds per unit of quantum or weight.
    pub quantum_bytes: u64,
    pub weights: [u64; CLASSES],
}

/// A job on its way in.
#[derive(Debug)]
pub struct Entry<J> {
    pub lane: usize,
    pub tenant: Tenant,
    pub quantum: u64,
    pub cost: u64,
    pub deadline: Instant,
    pub job: J,
}

/// What became of a push.
#[derive(Debug, PartialEq, Eq)]
pub enum Pushed<J> {
    Queued,
    /// Queued in the place of this job, which is owed an answer.
    Displaced(J),
    /// The queue is full and the tenant has its share.
    Busy(J),
    /// At the rate at which the lane drains, the deadline would pass first; it could be met after this long.
    Hopeless(J, Duration),
}

/// A job on its way out.
#[derive(Debug, PartialEq, Eq)]
pub struct Popped<J> {
    pub tenant: Tenant,
    pub job: J,
    /// What it was charged, for [`FairQueue::finish`].
    pub cost: u64,
    /// Its deadline has passed: it is owed an answer but must not run, and was not charged.
    pub expired: bool,
}

/// Debts are forgiven past this, so that a deficit is bounded whatever a response costs.
const DEBT_MAX: i64 = 1 << 40;
/// Tenants of one class that are remembered within a round; past that the idle ones are forgotten early.
const FLOWS_MAX: usize = 4096;
/// The drain rate is measured over windows of at least this length.
const RATE_WINDOW: Duration = Duration::from_millis(100);

/// See the module.
#[derive(Debug)]
pub struct FairQueue<J> {
    shape: Shape,
    lanes: Vec<Lane<J>>,
    /// Tenants with queued jobs, over all lanes.
    held: HashMap<Tenant, Held>,
    /// Sum of the quanta of those tenants, by class.
    quanta: [u64; CLASSES],
    queued: usize,
    next_number: u64,
}

#[derive(Debug)]
struct Held {
    queued: usize,
    quantum: u64,
}

/// One upstream's scheduler.
#[derive(Debug)]
struct Lane<J> {
    classes: [Class<J>; CLASSES],
    /// Classes with queued jobs; the first has its turn.
    ring: VecDeque<u8>,
    queued: usize,
    rate: Rate,
}

#[derive(Debug)]
struct Class<J> {
    deficit: i64,
    flows: HashMap<u32, Flow<J>>,
    /// Tenants with queued jobs; the first is looked at next.
    ring: VecDeque<u32>,
    /// Tenants that have just become active and are served once before the round goes on.
    fresh: VecDeque<u32>,
    /// Who has been paid in this round: nobody is twice.
    paid: HashSet<u32>,
    running: usize,
}

#[derive(Debug)]
struct Flow<J> {
    jobs: VecDeque<Queued<J>>,
    deficit: i64,
    quantum: u64,
    queued_cost: u64,
    running: usize,
}

#[derive(Debug)]
struct Queued<J> {
    number: u64,
    cost: u64,
    deadline: Instant,
    job: J,
}

impl<J> FairQueue<J> {
    pub fn new(shape: Shape, lanes: usize) -> FairQueue<J> {
        FairQueue {
            shape,
            lanes: (0..lanes).map(|_| Lane::new()).collect(),
            held: HashMap::new(),
            quanta: [0; CLASSES],
            queued: 0,
            next_number: 0,
        }
    }

    /// Takes on new weights, bounds and lanes. Jobs stay where they are; lanes are only ever added.
    pub fn reshape(&mut self, shape: Shape, lanes: usize) {
        self.shape = shape;
        while self.lanes.len() < lanes {
            self.lanes.push(Lane::new());
        }
    }

    pub fn len(&self) -> usize {
        self.queued
    }

    pub fn is_empty(&self) -> bool {
        self.queued == 0
    }

    pub fn lane_len(&self, lane: usize) -> usize {
        self.lanes.get(lane).map_or(0, |lane| lane.queued)
    }

    /// Queued jobs of a tenant and the places it is entitled to when the queue is full.
    pub fn held_and_share(&self, tenant: Tenant, quantum: u64) -> (usize, usize) {
        let held = self.held.get(&tenant).map_or(0, |held| held.queued);
        (held, self.share(tenant, quantum, &self.active_with(tenant, quantum)))
    }

    /// The quanta of the active tenants by class, as if this one were among them.
    fn active_with(&self, tenant: Tenant, quantum: u64) -> [u64; CLASSES] {
        let mut quanta = self.quanta;
        if !self.held.contains_key(&tenant) {
            quanta[usize::from(tenant.class)] += quantum;
        }
        quanta
    }

    /// Tenants with queued jobs, and how many.
    pub fn tenants(&self) -> impl Iterator<Item = (Tenant, usize)> + '_ {
        self.held.iter().map(|(tenant, held)| (*tenant, held.queued))
    }

    /// Bytes a class may still spend in this round, over all lanes.
    pub fn tokens(&self, class: u8) -> i64 {
        self.lanes.iter().map(|lane| lane.classes[usize::from(class)].deficit).sum()
    }

    /// The tenant's part of the capacity among the active ones, at least one place.
    fn share(&self, tenant: Tenant, quantum: u64, active: &[u64; CLASSES]) -> usize {
        let class = usize::from(tenant.class);
        let weights: u64 =
            (0..CLASSES).filter(|other| active[*other] > 0).map(|other| self.shape.weights[other]).sum();
        let wide = self.shape.capacity as u128 * u128::from(self.shape.weights[class]) * u128::from(quantum);
        let share = wide / (u128::from(weights) * u128::from(active[class])).max(1);
        usize::try_from(share).unwrap_or(usize::MAX).max(1)
    }

    /// Offers a job to the queue.
    pub fn push(&mut self, entry: Entry<J>, now: Instant) -> Pushed<J> {
        let wait = self.wait(entry.lane, entry.tenant, entry.quantum);
        if wait.is_some_and(|wait| now + wait > entry.deadline) {
            return Pushed::Hopeless(entry.job, wait.unwrap_or_default());
        }
        if self.queued < self.shape.capacity {
            self.enqueue(entry);
            return Pushed::Queued;
        }
        let (held, share) = self.held_and_share(entry.tenant, entry.quantum);
        if held >= share {
            return Pushed::Busy(entry.job);
        }
        match self.displace(entry.tenant, entry.quantum) {
            Some(displaced) => {
                self.enqueue(entry);
                Pushed::Displaced(displaced)
            }
            None => Pushed::Busy(entry.job),
        }
    }

    fn enqueue(&mut self, entry: Entry<J>) {
        let number = self.next_number;
        self.next_number += 1;
        self.queued += 1;
        let held = self.held.entry(entry.tenant).or_insert_with(|| {
            self.quanta[usize::from(entry.tenant.class)] += entry.quantum;
            Held { queued: 0, quantum: entry.quantum }
        });
        held.queued += 1;
        let queued = Queued { number, cost: entry.cost, deadline: entry.deadline, job: entry.job };
        self.lanes[entry.lane].enqueue(&self.shape, entry.tenant, entry.quantum, queued);
    }

    /// Takes away the newest job of the tenant furthest above its share, if there is one above.
    fn displace(&mut self, newcomer: Tenant, quantum: u64) -> Option<J> {
        let active = self.active_with(newcomer, quantum);
        let over = |(tenant, held): (&Tenant, &Held)| {
            let share = self.share(*tenant, held.quantum, &active);
            // Compared as fractions, held / share, without rounding.
            (held.queued > share && *tenant != newcomer).then_some((held.queued, share, *tenant))
        };
        let furthest = self
            .held
            .iter()
            .filter_map(over)
            .max_by(|a, b| (a.0 * b.1).cmp(&(b.0 * a.1)).then(a.2.cmp(&b.2)));
        let (_, _, victim) = furthest?;
        let newest = |lane: &Lane<J>| lane.newest(victim);
        let lane = (0..self.lanes.len()).max_by_key(|lane| newest(&self.lanes[*lane]))?;
        let job = self.lanes[lane].take_newest(victim)?;
        self.forget(victim);
        Some(job)
    }

    /// Takes out the jobs of a tenant that nobody waits for any more.
    pub fn remove(&mut self, lane: usize, tenant: Tenant, gone: impl Fn(&J) -> bool) {
        let Some(state) = self.lanes.get_mut(lane) else { return };
        for _ in 0..state.remove(tenant, gone) {
            self.forget(tenant);
        }
    }

    /// One job of the tenant has left the queue.
    fn forget(&mut self, tenant: Tenant) {
        self.queued -= 1;
        let Some(held) = self.held.get_mut(&tenant) else { return };
        held.queued -= 1;
        if held.queued == 0 {
            self.quanta[usize::from(tenant.class)] -= held.quantum;
            self.held.remove(&tenant);
        }
    }

    /// The next job of a lane. The caller has the permits to run it, and tells [`FairQueue::finish`] when it is done.
    pub fn pop(&mut self, lane: usize, now: Instant) -> Option<Popped<J>> {
        let (tenant, queued) = self.lanes.get_mut(lane)?.pop(&self.shape, now)?;
        self.forget(tenant);
        Some(Popped { tenant, expired: queued.deadline <= now, cost: queued.cost, job: queued.job })
    }

    /// A job that ran is done: what it really cost replaces what it was charged.
    pub fn finish(&mut self, lane: usize, tenant: Tenant, estimate: u64, actual: u64) {
        if let Some(lane) = self.lanes.get_mut(lane) {
            lane.finish(tenant, estimate, actual);
        }
    }

    /// How long a newcomer would wait behind its tenant's jobs at the lane's drain rate; `None` if nobody knows.
    pub fn wait(&self, lane: usize, tenant: Tenant, quantum: u64) -> Option<Duration> {
        let lane = self.lanes.get(lane)?;
        let class = &lane.classes[usize::from(tenant.class)];
        let ahead = class.flows.get(&tenant.id).map_or(0, |flow| flow.queued_cost);
        if ahead == 0 || lane.rate.per_second <= 0.0 {
            return None;
        }
        let weights: u64 = lane.ring.iter().map(|class| self.shape.weights[usize::from(*class)]).sum();
        let active = class.ring.iter().chain(&class.fresh);
        let quanta: u64 = active.filter_map(|id| class.flows.get(id)).map(|flow| flow.quantum).sum();
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let part = (self.shape.weights[usize::from(tenant.class)] * quantum) as f64
            / (weights.max(1) * quanta.max(1)) as f64;
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let seconds = ahead as f64 / (lane.rate.per_second * part);
        Duration::try_from_secs_f64(seconds).ok()
    }
}

impl<J> Lane<J> {
    fn new() -> Lane<J> {
        Lane {
            classes: std::array::from_fn(|_| Class::new()),
            ring: VecDeque::new(),
            queued: 0,
            rate: Rate::default(),
        }
    }

    fn enqueue(&mut self, shape: &Shape, tenant: Tenant, quantum: u64, queued: Queued<J>) {
        let class = &mut self.classes[usize::from(tenant.class)];
        if class.is_idle() {
            // A class that becomes active is looked at first; what it may spend is not changed by that.
            self.ring.push_front(tenant.class);
        }
        self.queued += 1;
        class.enqueue(shape, tenant.id, quantum, queued);
    }

    fn newest(&self, tenant: Tenant) -> Option<u64> {
        let flow = self.classes[usize::from(tenant.class)].flows.get(&tenant.id)?;
        flow.jobs.back().map(|queued| queued.number)
    }

    fn take_newest(&mut self, tenant: Tenant) -> Option<J> {
        let class = &mut self.classes[usize::from(tenant.class)];
        let flow = class.flows.get_mut(&tenant.id)?;
        let queued = flow.jobs.pop_back()?;
        flow.queued_cost -= queued.cost;
        if flow.jobs.is_empty() {
            class.leave(tenant.id);
            self.retire(tenant.class);
        }
        self.queued -= 1;
        Some(queued.job)
    }

    fn remove(&mut self, tenant: Tenant, gone: impl Fn(&J) -> bool) -> usize {
        let class = &mut self.classes[usize::from(tenant.class)];
        let Some(flow) = class.flows.get_mut(&tenant.id) else { return 0 };
        let before = flow.jobs.len();
        flow.jobs.retain(|queued| !gone(&queued.job));
        flow.queued_cost = flow.jobs.iter().map(|queued| queued.cost).sum();
        let removed = before - flow.jobs.len();
        if removed > 0 && flow.jobs.is_empty() {
            class.leave(tenant.id);
            self.retire(tenant.class);
        }
        self.queued -= removed;
        removed
    }

    /// Takes a class without queued jobs off the ring. With nobody left, nobody is owed anything.
    fn retire(&mut self, class: u8) {
        if self.classes[usize::from(class)].is_idle() {
            self.ring.retain(|other| *other != class);
        }
        if self.ring.is_empty() {
            for class in self.classes.iter_mut().filter(|class| class.running == 0) {
                class.deficit = 0;
            }
        }
    }

    fn pop(&mut self, shape: &Shape, now: Instant) -> Option<(Tenant, Queued<J>)> {
        loop {
            for _ in 0..self.ring.len() {
                let class = *self.ring.front()?;
                let state = &mut self.classes[usize::from(class)];
                let (id, cost) = state.candidate(shape);
                if signed(cost) <= state.deficit {
                    let queued = state.take(id);
                    if queued.deadline > now {
                        state.charge(id, cost);
                        self.rate.note(cost, now);
                    }
                    state.served(id);
                    self.queued -= 1;
                    self.ring.rotate_left(1);
                    self.retire(class);
                    if self.queued == 0 {
                        self.rate.pause();
                    }
                    return Some((Tenant { class, id }, queued));
                }
                self.ring.rotate_left(1);
            }
            if self.ring.is_empty() {
                return None;
            }
            self.next_round(shape);
        }
    }

    /// Nobody can pay: the active classes are paid as often as the first of them needs to be able to.
    fn next_round(&mut self, shape: &Shape) {
        let turn = |class: u8| turn_bytes(shape, shape.weights[usize::from(class)]);
        let mut rounds = i64::MAX;
        for class in &self.ring {
            let state = &mut self.classes[usize::from(*class)];
            let missing = signed(state.candidate(shape).1).saturating_sub(state.deficit);
            rounds = rounds.min(missing.saturating_add(turn(*class) - 1) / turn(*class));
        }
        for (class, state) in (0u8..).zip(&mut self.classes) {
            if self.ring.contains(&class) {
                state.deficit = state.deficit.saturating_add(turn(class).saturating_mul(rounds.max(1)));
            } else {
                state.deficit = state.deficit.min(0);
            }
        }
    }

    fn finish(&mut self, tenant: Tenant, estimate: u64, actual: u64) {
        let class = &mut self.classes[usize::from(tenant.class)];
        class.finish(tenant.id, estimate, actual);
        self.retire(tenant.class);
    }
}

fn turn_bytes(shape: &Shape, factor: u64) -> i64 {
    i64::try_from(shape.quantum_bytes.saturating_mul(factor)).unwrap_or(i64::MAX / 2).max(1)
}

fn signed(cost: u64) -> i64 {
    i64::try_from(cost).unwrap_or(i64::MAX)
}

impl<J> Class<J> {
    fn new() -> Class<J> {
        Class {
            deficit: 0,
            flows: HashMap::new(),
            ring: VecDeque::new(),
            fresh: VecDeque::new(),
            paid: HashSet::new(),
            running: 0,
        }
    }

    fn is_idle(&self) -> bool {
        self.ring.is_empty() && self.fresh.is_empty()
    }

    fn enqueue(&mut self, shape: &Shape, id: u32, quantum: u64, queued: Queued<J>) {
        let new = || Flow { jobs: VecDeque::new(), deficit: 0, quantum, queued_cost: 0, running: 0 };
        let flow = self.flows.entry(id).or_insert_with(new);
        flow.quantum = quantum;
        if flow.jobs.is_empty() {
            // The first time in this round it is paid like everybody, and served before the round goes on; one that
            // comes back has what it left, and one that owes waits until it does not.
            if self.paid.insert(id) {
                flow.deficit = flow.deficit.saturating_add(turn_bytes(shape, quantum));
                if flow.deficit > 0 {
                    self.fresh.push_back(id);
                } else {
                    self.ring.push_back(id);
                }
            } else {
                self.ring.push_back(id);
            }
        }
        flow.queued_cost += queued.cost;
        flow.jobs.push_back(queued);
    }

    /// Whose job is next, and what it costs. Stable until it is taken.
    fn candidate(&mut self, shape: &Shape) -> (u32, u64) {
        if let Some(id) = self.fresh.front() {
            return (*id, self.flows[id].jobs[0].cost);
        }
        loop {
            for _ in 0..self.ring.len() {
                let id = self.ring[0];
                let flow = &self.flows[&id];
                let cost = flow.jobs[0].cost;
                if signed(cost) <= flow.deficit {
                    return (id, cost);
                }
                self.ring.rotate_left(1);
            }
            self.next_round(shape);
        }
    }

    /// Nobody can pay: everybody active is paid as often as the first of them needs, and the idle are forgotten.
    fn next_round(&mut self, shape: &Shape) {
        let needed = |id: &u32| {
            let (flow, turn) = (&self.flows[id], turn_bytes(shape, self.flows[id].quantum));
            signed(flow.jobs[0].cost).saturating_sub(flow.deficit).saturating_add(turn - 1) / turn
        };
        let rounds = self.ring.iter().map(needed).min().unwrap_or(1).max(1);
        self.paid.clear();
        self.flows.retain(|_, flow| !flow.jobs.is_empty() || flow.running > 0);
        for (id, flow) in &mut self.flows {
            if flow.jobs.is_empty() {
                flow.deficit = flow.deficit.min(0);
            } else {
                self.paid.insert(*id);
                let turn = turn_bytes(shape, flow.quantum);
                flow.deficit = flow.deficit.saturating_add(turn.saturating_mul(rounds));
            }
        }
    }

    fn take(&mut self, id: u32) -> Queued<J> {
        let flow = self.flows.get_mut(&id).expect("the candidate has a flow");
        let queued = flow.jobs.pop_front().expect("the candidate has a job");
        flow.queued_cost -= queued.cost;
        queued
    }

    /// A job goes to run: its cost is taken from tenant and class.
    fn charge(&mut self, id: u32, cost: u64) {
        let cost = i64::try_from(cost).unwrap_or(i64::MAX);
        self.deficit = self.deficit.saturating_sub(cost).max(-DEBT_MAX);
        self.running += 1;
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.deficit = flow.deficit.saturating_sub(cost).max(-DEBT_MAX);
            flow.running += 1;
        }
    }

    /// After a job was taken: its tenant goes to the end of the ring, or leaves it.
    fn served(&mut self, id: u32) {
        if self.fresh.front() == Some(&id) {
            self.fresh.pop_front();
            self.ring.push_back(id);
        } else if self.ring.front() == Some(&id) {
            self.ring.rotate_left(1);
        }
        if self.flows.get(&id).is_none_or(|flow| flow.jobs.is_empty()) {
            self.leave(id);
        }
    }

    /// The tenant has nothing queued any more. What it has not spent it keeps until the round ends.
    fn leave(&mut self, id: u32) {
        self.fresh.retain(|other| *other != id);
        self.ring.retain(|other| *other != id);
        let forgotten = self.flows.len() > FLOWS_MAX;
        if self.is_idle() || forgotten {
            self.paid.clear();
            self.flows.retain(|_, flow| !flow.jobs.is_empty() || flow.running > 0);
            for flow in self.flows.values_mut().filter(|flow| flow.jobs.is_empty()) {
                flow.deficit = flow.deficit.min(0);
            }
        }
    }

    fn finish(&mut self, id: u32, estimate: u64, actual: u64) {
        let difference = i64::try_from(i128::from(actual) - i128::from(estimate)).unwrap_or(i64::MAX);
        self.running = self.running.saturating_sub(1);
        self.deficit = self.deficit.saturating_sub(difference).clamp(-DEBT_MAX, DEBT_MAX);
        let Some(flow) = self.flows.get_mut(&id) else { return };
        flow.running = flow.running.saturating_sub(1);
        flow.deficit = flow.deficit.saturating_sub(difference).clamp(-DEBT_MAX, DEBT_MAX);
        // Idle, with nobody else in its round to be fair to.
        if flow.running == 0 && flow.jobs.is_empty() && self.is_idle() {
            self.flows.remove(&id);
        }
    }
}

/// How fast a lane drains, in cost per second.
#[derive(Debug, Default)]
struct Rate {
    per_second: f64,
    window: Option<(Instant, u64)>,
}

impl Rate {
    fn note(&mut self, cost: u64, now: Instant) {
        let Some((since, so_far)) = &mut self.window else {
            self.window = Some((now, cost));
            return;
        };
        let elapsed = now.saturating_duration_since(*since);
        if elapsed >= RATE_WINDOW {
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            let measured = *so_far as f64 / elapsed.as_secs_f64();
            self.per_second =
                if self.per_second == 0.0 { measured } else { self.per_second * 0.7 + measured * 0.3 };
            self.window = Some((now, cost));
        } else {
            *so_far += cost;
        }
    }

    /// An empty lane says nothing about its rate.
    fn pause(&mut self) {
        self.window = None;
    }
}

#[cfg(test)]
mod tests;
