//! The fair queue: hierarchical deficit round robin over classes and tenants, one scheduler per upstream, all
//! under one bound. Pure: no clock, no lock, no task; time is passed in.
//!
//! A *lane* is an upstream's scheduler. In each round a class is paid by its weight and a tenant within its class by
//! its quantum; those who can pay are served one job at a time in turn, so that a round is not one burst after
//! another; when nobody can pay, the next round begins. What a job really cost is settled when it is done. A tenant
//! that is idle at the end of a round keeps nothing of it; what it owes is worked off as the rounds go by.
//!
//! The bound is shared: when it is reached, a newcomer whose tenant has its share is refused, and one whose tenant
//! has less takes the place of the newest job of the tenant furthest above its own.
//!
//! Nothing here is done for all tenants at once: payments are made when they are asked about, who can pay in which
//! round and who has most of the queue are kept in order, and sums are kept as they change. So an operation costs
//! the logarithm of the tenants that wait, however many are known or idle.

#[path = "fair_queue/class.rs"]
mod class;
#[path = "fair_queue/lane.rs"]
mod lane;

use lane::Lane;
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
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
    /// Queued under this number.
    Queued(u64),
    /// Queued under this number in the place of another job, which is owed an answer.
    Displaced(u64, J, Full),
    /// The queue is full and the tenant has its share.
    Busy(J, Full),
    /// At the rate at which the lane drains, the deadline would pass first; it could be met after this long.
    Hopeless(J, Duration),
}

/// What a tenant is told of whom a full queue has no place for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Full {
    /// Places that the tenant is entitled to.
    pub share: usize,
    /// How long its jobs ahead will take, if anybody knows.
    pub wait: Duration,
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

/// See the module.
#[derive(Clone, Debug)]
pub struct FairQueue<J> {
    shape: Shape,
    lanes: Vec<Lane<J>>,
    /// Tenants with queued jobs, over all lanes.
    held: HashMap<Tenant, Held>,
    /// By class, those with at least two (nobody's share is less than one), by how much they have of it.
    loads: [BTreeSet<Load>; CLASSES],
    /// Sum of the quanta of the tenants with queued jobs, by class.
    quanta: [u64; CLASSES],
    /// Bytes that each class may still spend in this round, over all lanes.
    tokens: [i64; CLASSES],
    queued: usize,
    next_number: u64,
}

/// What a tenant has of the queue. Within a class, one is further above its share than another if it has more
/// jobs for each unit of its quantum.
#[derive(Clone, Copy, Debug)]
struct Load {
    queued: usize,
    quantum: u64,
    id: u32,
}

impl Ord for Load {
    fn cmp(&self, other: &Load) -> Ordering {
        let part = |a: &Load, b: &Load| a.queued as u128 * u128::from(b.quantum);
        part(self, other).cmp(&part(other, self)).then(self.id.cmp(&other.id))
    }
}

impl PartialOrd for Load {
    fn partial_cmp(&self, other: &Load) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Load {
    fn eq(&self, other: &Load) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Load {}

#[derive(Clone, Debug)]
struct Held {
    queued: usize,
    quantum: u64,
}

impl<J> FairQueue<J> {
    pub fn new(shape: Shape, lanes: usize) -> FairQueue<J> {
        FairQueue {
            shape,
            lanes: (0..lanes).map(|_| Lane::new()).collect(),
            held: HashMap::new(),
            loads: std::array::from_fn(|_| BTreeSet::new()),
            quanta: [0; CLASSES],
            tokens: [0; CLASSES],
            queued: 0,
            next_number: 0,
        }
    }

    /// Takes on new weights, bounds and lanes. Jobs stay where they are; lanes are only ever added.
    pub fn reshape(&mut self, shape: Shape, lanes: usize) {
        if shape.quantum_bytes != self.shape.quantum_bytes {
            for lane in &mut self.lanes {
                lane.reshape(&self.shape, &shape);
            }
        }
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

    /// Bytes that each class may still spend in this round, over all lanes.
    pub fn tokens(&self) -> [i64; CLASSES] {
        self.tokens
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
        let late = |wait: &Duration| now.checked_add(*wait).is_none_or(|at| at > entry.deadline);
        if let Some(wait) = wait.filter(late) {
            // With more than its share waiting it is its own jobs that it would wait for.
            let (held, share) = self.held_and_share(entry.tenant, entry.quantum);
            let own = held > share;
            return if own {
                Pushed::Busy(entry.job, Full { share, wait })
            } else {
                Pushed::Hopeless(entry.job, wait)
            };
        }
        if self.queued < self.shape.capacity {
            return Pushed::Queued(self.enqueue(entry));
        }
        let (held, share) = self.held_and_share(entry.tenant, entry.quantum);
        let displaced = if held < share { self.displace(entry.tenant, entry.quantum) } else { None };
        match displaced {
            Some((job, full)) => Pushed::Displaced(self.enqueue(entry), job, full),
            None => Pushed::Busy(entry.job, Full { share, wait: wait.unwrap_or_default() }),
        }
    }

    fn enqueue(&mut self, entry: Entry<J>) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        self.queued += 1;
        self.hold(entry.tenant, Some(entry.quantum), |queued| queued + 1);
        let queued =
            class::Queued { number, cost: entry.cost.max(1), deadline: entry.deadline, job: entry.job };
        self.lanes[entry.lane].enqueue(&self.shape, entry.tenant, entry.quantum, queued);
        number
    }

    /// Changes what a tenant holds, and perhaps its quantum, and keeps sums and order in step.
    fn hold(&mut self, tenant: Tenant, quantum: Option<u64>, change: impl FnOnce(usize) -> usize) {
        let class = usize::from(tenant.class);
        let held = self.held.entry(tenant).or_insert(Held { queued: 0, quantum: 0 });
        let before = Load { queued: held.queued, quantum: held.quantum, id: tenant.id };
        let after =
            Load { queued: change(before.queued), quantum: quantum.unwrap_or(before.quantum), ..before };
        (held.queued, held.quantum) = (after.queued, after.quantum);
        if before.queued > 1 {
            self.loads[class].remove(&before);
        }
        if after.queued > 1 {
            self.loads[class].insert(after);
        }
        self.quanta[class] += after.quantum;
        self.quanta[class] -= before.quantum;
        if after.queued == 0 {
            self.quanta[class] -= after.quantum;
            self.held.remove(&tenant);
        }
    }

    /// Takes away the newest job of the tenant furthest above its share, if there is one above.
    fn displace(&mut self, newcomer: Tenant, quantum: u64) -> Option<(J, Full)> {
        let active = self.active_with(newcomer, quantum);
        // What a tenant has over what it is entitled to, as a fraction, but for what is common to all.
        let part = |class: usize, load: &Load| {
            let has = (load.queued as u128).saturating_mul(u128::from(active[class]));
            (has, u128::from(self.shape.weights[class]).saturating_mul(u128::from(load.quantum)))
        };
        let furthest = (0..CLASSES).filter_map(|class| Some((class, *self.loads[class].last()?)));
        let furthest = furthest.max_by(|(a, load_a), (b, load_b)| {
            let (a, b) = (part(*a, load_a), part(*b, load_b));
            a.0.saturating_mul(b.1).cmp(&b.0.saturating_mul(a.1))
        });
        let (class, load) = furthest?;
        let victim = Tenant { class: u8::try_from(class).ok()?, id: load.id };
        let share = self.share(victim, load.quantum, &active);
        if load.queued <= share {
            return None;
        }
        step(self.lanes.len());
        let newest = |lane: &usize| self.lanes[*lane].newest(victim);
        let lane = (0..self.lanes.len()).filter(|lane| self.lanes[*lane].queued > 0).max_by_key(newest)?;
        let job = self.on_lane(lane, |lane, shape| lane.take_newest(shape, victim))??;
        self.forget(victim);
        let wait = self.wait(lane, victim, load.quantum).unwrap_or_default();
        Some((job, Full { share, wait }))
    }

    /// Takes out a job that nobody waits for any more.
    pub fn remove(&mut self, lane: usize, tenant: Tenant, number: u64) -> Option<J> {
        let job = self.on_lane(lane, |lane, shape| lane.remove(shape, tenant, number))??;
        self.forget(tenant);
        Some(job)
    }

    /// One job of the tenant has left the queue.
    fn forget(&mut self, tenant: Tenant) {
        self.queued -= 1;
        self.hold(tenant, None, |queued| queued - 1);
    }

    /// The next job of a lane. The caller has the permits to run it, and tells [`FairQueue::finish`] when it is done.
    pub fn pop(&mut self, lane: usize, now: Instant) -> Option<Popped<J>> {
        let (tenant, queued) = self.on_lane(lane, |lane, shape| lane.pop(shape, now))??;
        self.forget(tenant);
        Some(Popped { tenant, expired: queued.deadline <= now, cost: queued.cost, job: queued.job })
    }

    /// A job that ran is done: what it really cost replaces what it was charged. Something it must cost, or one whose
    /// jobs all came to nothing could hold up everybody else for good.
    pub fn finish(&mut self, lane: usize, tenant: Tenant, estimate: u64, actual: u64) {
        self.on_lane(lane, |lane, shape| lane.finish(shape, tenant, estimate, actual.max(1)));
    }

    /// Does something to a lane and keeps the sum of tokens in step.
    fn on_lane<T>(&mut self, lane: usize, act: impl FnOnce(&mut Lane<J>, &Shape) -> T) -> Option<T> {
        let lane = self.lanes.get_mut(lane)?;
        let before = lane.tokens();
        let done = act(lane, &self.shape);
        for ((sum, before), after) in self.tokens.iter_mut().zip(before).zip(lane.tokens()) {
            *sum = sum.saturating_add(after.saturating_sub(before));
        }
        Some(done)
    }

    /// How long a newcomer would wait behind its tenant's jobs at the lane's drain rate; `None` if nobody knows.
    pub fn wait(&self, lane: usize, tenant: Tenant, quantum: u64) -> Option<Duration> {
        self.lanes.get(lane)?.wait(&self.shape, tenant, quantum)
    }
}

impl<J: Copy + Into<i64>> FairQueue<J> {
    /// All that what happens next depends on, without names that only ever grow: two queues of the same print
    /// behave alike. For the state models, which must know where they have been.
    pub fn print(&self) -> Vec<i64> {
        let mut print = Vec::new();
        for lane in &self.lanes {
            lane.print(&self.shape, &mut print);
        }
        print
    }
}

fn turn_bytes(shape: &Shape, factor: u64) -> i64 {
    i64::try_from(shape.quantum_bytes.saturating_mul(factor)).unwrap_or(i64::MAX / 2).max(1)
}

fn signed(cost: u64) -> i64 {
    i64::try_from(cost).unwrap_or(i64::MAX)
}

/// A deficit after a charge or a settlement. Past so many turns debt is forgiven and credit is lost, so that one
/// answer, however long, shuts nobody out for good.
fn bounded(deficit: i64, turn: i64) -> i64 {
    let most = turn.saturating_mul(DEFICIT_TURNS);
    deficit.clamp(-most, most)
}

/// With the default quantum this is 64 MiB.
const DEFICIT_TURNS: i64 = 1024;

/// Notes that so many tenants or lanes were looked at one by one, for the tests that bound it.
#[inline]
fn step(count: usize) {
    #[cfg(test)]
    tests::STEPS.set(tests::STEPS.get() + count);
    let _ = count;
}

#[cfg(test)]
#[path = "fair_queue/tests.rs"]
mod tests;
