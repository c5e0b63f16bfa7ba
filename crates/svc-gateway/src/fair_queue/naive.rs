//! The rules of the queue written down as plainly as can be: everybody is looked at every time, everybody is paid
//! in every round. What the real queue keeps in order or works out late must come to the same.

use super::super::{CLASSES, Full, Pushed, Shape, Tenant};
use std::collections::BTreeMap;
use std::time::Duration;

pub(super) struct Naive {
    pub(super) shape: Shape,
    pub(super) lanes: Vec<Lane>,
    next_number: u64,
}

#[derive(Default)]
pub(super) struct Lane {
    classes: [Class; CLASSES],
    ring: Vec<usize>,
}

#[derive(Default)]
struct Class {
    deficit: i64,
    flows: BTreeMap<u32, Flow>,
    next_place: u64,
    running: usize,
}

struct Flow {
    /// Number and cost.
    jobs: Vec<(u64, i64)>,
    deficit: i64,
    quantum: u64,
    /// Has been paid in this round.
    paid: bool,
    /// Is to be served once before the round goes on.
    fresh: bool,
    place: u64,
    running: usize,
}

impl Class {
    fn is_idle(&self) -> bool {
        self.flows.values().all(|flow| flow.jobs.is_empty())
    }

    fn end_round(&mut self, quantum_bytes: u64) {
        for flow in self.flows.values_mut() {
            let turn = (quantum_bytes * flow.quantum) as i64;
            if !flow.jobs.is_empty() {
                flow.deficit += turn;
                flow.paid = true;
            } else {
                flow.deficit = if flow.paid { flow.deficit } else { flow.deficit + turn }.min(0);
                flow.paid = false;
            }
        }
    }

    fn end_if_idle(&mut self, quantum_bytes: u64) {
        if self.is_idle() {
            self.end_round(quantum_bytes);
            self.flows.retain(|_, flow| flow.running > 0);
        }
    }

    fn candidate(&mut self, quantum_bytes: u64) -> (u32, i64) {
        loop {
            let active = || self.flows.iter().filter(|(_, flow)| !flow.jobs.is_empty());
            let fresh = active().filter(|(_, flow)| flow.fresh).min_by_key(|(_, flow)| flow.place);
            let able = active()
                .filter(|(_, flow)| flow.jobs[0].1 <= flow.deficit)
                .min_by_key(|(_, flow)| flow.place);
            if let Some((id, flow)) = fresh.or(able) {
                return (*id, flow.jobs[0].1);
            }
            self.end_round(quantum_bytes);
        }
    }
}

impl Naive {
    pub(super) fn new(shape: Shape, lanes: usize) -> Naive {
        Naive { shape, lanes: (0..lanes).map(|_| Lane::default()).collect(), next_number: 0 }
    }

    /// Every tenant with queued jobs: how many, and its quantum.
    pub(super) fn held(&self) -> BTreeMap<Tenant, (usize, u64)> {
        let mut held = BTreeMap::new();
        for (class, state) in self.lanes.iter().flat_map(|lane| lane.classes.iter().enumerate()) {
            for (id, flow) in state.flows.iter().filter(|(_, flow)| !flow.jobs.is_empty()) {
                let tenant = Tenant { class: class as u8, id: *id };
                let entry = held.entry(tenant).or_insert((0, flow.quantum));
                entry.0 += flow.jobs.len();
            }
        }
        held
    }

    fn share(&self, tenant: Tenant, held: &BTreeMap<Tenant, (usize, u64)>) -> usize {
        let quanta =
            |class: u8| held.iter().filter(|(t, _)| t.class == class).map(|(_, (_, q))| q).sum::<u64>();
        let weight = |class: u8| self.shape.weights[usize::from(class)];
        let weights: u64 = (0..3).filter(|class| quanta(*class) > 0).map(weight).sum();
        let share = self.shape.capacity as u64 * weight(tenant.class) * held[&tenant].1
            / (weights * quanta(tenant.class));
        (share as usize).max(1)
    }

    pub(super) fn push(&mut self, lane: usize, tenant: Tenant, quantum: u64, cost: u64) -> Pushed<u64> {
        let mut held = self.held();
        let queued: usize = held.values().map(|(queued, _)| queued).sum();
        let mut displaced = None;
        if queued >= self.shape.capacity {
            held.entry(tenant).or_insert((0, quantum)).1 = quantum;
            let share = self.share(tenant, &held);
            let full = |share| Full { share, wait: Duration::ZERO };
            let over = |(other, (queued, _)): (&Tenant, &(usize, u64))| {
                let share = self.share(*other, &held);
                (*queued > share).then_some((*other, *queued, share))
            };
            // Further over: more of what one is entitled to, which a rounded share would not tell.
            let quanta =
                |class: u8| held.iter().filter(|(t, _)| t.class == class).map(|(_, (_, q))| q).sum::<u64>();
            let part = |(other, queued, _): &(Tenant, usize, usize)| {
                let entitled = self.shape.weights[usize::from(other.class)] * held[other].1;
                (*queued as u64 * quanta(other.class), entitled)
            };
            let further = |a: &(Tenant, usize, usize), b: &(Tenant, usize, usize)| {
                let (pa, pb) = (part(a), part(b));
                (pa.0 * pb.1).cmp(&(pb.0 * pa.1)).then(a.0.cmp(&b.0))
            };
            let furthest = held.iter().filter_map(over).max_by(further);
            let Some((victim, _, victims)) = furthest.filter(|_| held[&tenant].0 < share) else {
                self.next_number += 1;
                return Pushed::Busy(self.next_number - 1, full(share));
            };
            let jobs = self.lanes.iter().enumerate().flat_map(|(lane, state)| {
                let flow = state.classes[usize::from(victim.class)].flows.get(&victim.id);
                flow.into_iter().flat_map(move |flow| flow.jobs.iter().map(move |job| (job.0, lane)))
            });
            let (newest, lane) = jobs.max().unwrap();
            assert!(self.remove(lane, victim, newest));
            displaced = Some((newest, full(victims)));
        }
        let number = self.next_number;
        self.next_number += 1;
        self.enqueue(lane, tenant, quantum, (number, cost as i64));
        match displaced {
            Some((job, full)) => Pushed::Displaced(number, job, full),
            None => Pushed::Queued(number),
        }
    }

    fn enqueue(&mut self, lane: usize, tenant: Tenant, quantum: u64, job: (u64, i64)) {
        let class = usize::from(tenant.class);
        let lane = &mut self.lanes[lane];
        let state = &mut lane.classes[class];
        if state.is_idle() {
            lane.ring.insert(0, class);
        }
        let new = || Flow {
            jobs: Vec::new(),
            deficit: 0,
            quantum,
            paid: false,
            fresh: false,
            place: 0,
            running: 0,
        };
        let flow = state.flows.entry(tenant.id).or_insert_with(new);
        flow.quantum = quantum;
        if flow.jobs.is_empty() {
            state.next_place += 1;
            flow.place = state.next_place;
            flow.fresh = false;
            if !flow.paid {
                flow.paid = true;
                flow.deficit += (self.shape.quantum_bytes * quantum) as i64;
                flow.fresh = flow.deficit > 0;
            }
        }
        flow.jobs.push(job);
    }

    pub(super) fn remove(&mut self, lane: usize, tenant: Tenant, number: u64) -> bool {
        let class = usize::from(tenant.class);
        let Some(flow) = self.lanes[lane].classes[class].flows.get_mut(&tenant.id) else { return false };
        let before = flow.jobs.len();
        flow.jobs.retain(|job| job.0 != number);
        let removed = flow.jobs.len() < before;
        if removed && flow.jobs.is_empty() {
            self.lanes[lane].classes[class].end_if_idle(self.shape.quantum_bytes);
        }
        if removed {
            self.retire(lane, class);
        }
        removed
    }

    fn retire(&mut self, lane: usize, class: usize) {
        let lane = &mut self.lanes[lane];
        if lane.classes[class].is_idle() {
            lane.ring.retain(|other| *other != class);
        }
        if lane.ring.is_empty() {
            for class in &mut lane.classes {
                class.deficit = if class.running == 0 { 0 } else { class.deficit.min(0) };
            }
        }
    }

    pub(super) fn pop(&mut self, lane: usize) -> Option<(Tenant, u64, u64)> {
        let bytes = self.shape.quantum_bytes;
        loop {
            for _ in 0..self.lanes[lane].ring.len() {
                let state = &mut self.lanes[lane];
                let class = state.ring[0];
                state.ring.rotate_left(1);
                let state = &mut state.classes[class];
                let (id, cost) = state.candidate(bytes);
                if cost > state.deficit {
                    continue;
                }
                state.deficit -= cost;
                state.running += 1;
                state.next_place += 1;
                let flow = state.flows.get_mut(&id).unwrap();
                (flow.place, flow.fresh) = (state.next_place, false);
                flow.deficit -= cost;
                flow.running += 1;
                let (number, _) = flow.jobs.remove(0);
                state.end_if_idle(bytes);
                self.retire(lane, class);
                return Some((Tenant { class: class as u8, id }, number, cost as u64));
            }
            let state = &mut self.lanes[lane];
            if state.ring.is_empty() {
                return None;
            }
            for (class, weight) in self.shape.weights.iter().enumerate() {
                let paid = state.classes[class].deficit + (bytes * weight) as i64;
                state.classes[class].deficit = if state.ring.contains(&class) { paid } else { paid.min(0) };
            }
        }
    }

    pub(super) fn finish(&mut self, lane: usize, tenant: Tenant, estimate: u64, actual: u64) {
        let state = &mut self.lanes[lane].classes[usize::from(tenant.class)];
        let more = actual.max(1) as i64 - estimate as i64;
        state.running -= 1;
        state.deficit -= more;
        let idle = state.is_idle();
        if let Some(flow) = state.flows.get_mut(&tenant.id) {
            flow.running -= 1;
            flow.deficit -= more;
            if flow.jobs.is_empty() && !flow.paid {
                flow.deficit = flow.deficit.min(0);
            }
            if flow.jobs.is_empty() && flow.running == 0 && idle {
                state.flows.remove(&tenant.id);
            }
        }
        self.retire(lane, usize::from(tenant.class));
    }

    pub(super) fn tokens(&self) -> [i64; CLASSES] {
        std::array::from_fn(|class| self.lanes.iter().map(|lane| lane.classes[class].deficit).sum())
    }
}
