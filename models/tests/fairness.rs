//! Every state of small fair queues, the production source of it: nobody starves, nothing is lost or doubled.
#![expect(clippy::unwrap_used, reason = "a model that cannot go on says where")]

use models::explore;
use models::fair_queue::{Entry, FairQueue, Pushed, Shape, Tenant};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// A job by its number; to the queue's print all jobs are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Job(u64);

impl From<Job> for i64 {
    fn from(_: Job) -> i64 {
        0
    }
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Push(usize, Tenant, u64),
    /// As the last, and from then on it is counted how often that job is passed, until it leaves.
    PushWatched(usize, Tenant, u64),
    Pop(usize),
    /// The oldest running job is done, and this is what it cost in multiples of what it was charged.
    Finish(u64),
    /// The client of the tenant's first or last job leaves.
    Leave(Tenant, bool),
}

#[derive(Clone)]
struct Inside {
    lane: usize,
    tenant: Tenant,
    job: Job,
    number: u64,
}

#[derive(Clone)]
struct State {
    queue: FairQueue<Job>,
    /// What must be in the queue, in the order it came.
    inside: Vec<Inside>,
    running: Vec<(usize, Tenant, u64)>,
    next: u64,
    /// A job, and how many of its lane were served before it since it came.
    watched: Option<(Job, i64)>,
}

struct Model {
    shape: Shape,
    lanes: usize,
    /// With their quanta.
    tenants: Vec<(Tenant, u64)>,
    costs: Vec<u64>,
    /// What a job may turn out to cost, in multiples of the estimate.
    actual: Vec<u64>,
    running_max: usize,
    leaving: bool,
    /// The most jobs that one was passed by so far.
    passed_most: Cell<i64>,
}

impl Model {
    fn quantum(&self, tenant: Tenant) -> u64 {
        self.tenants.iter().find(|(known, _)| *known == tenant).unwrap().1
    }

    fn actions(&self) -> Vec<Action> {
        let mut actions: Vec<Action> = self.actual.iter().map(|actual| Action::Finish(*actual)).collect();
        for lane in 0..self.lanes {
            actions.push(Action::Pop(lane));
            for (tenant, _) in &self.tenants {
                actions.extend(self.costs.iter().map(|cost| Action::Push(lane, *tenant, *cost)));
                actions.extend(self.costs.iter().map(|cost| Action::PushWatched(lane, *tenant, *cost)));
            }
        }
        if self.leaving {
            let both = |(tenant, _): &(Tenant, u64)| [true, false].map(|first| Action::Leave(*tenant, first));
            actions.extend(self.tenants.iter().flat_map(both));
        }
        actions
    }

    fn print(state: &State) -> Vec<i64> {
        let mut print = state.queue.print();
        let mut inside: Vec<&Inside> = state.inside.iter().collect();
        // Jobs of one tenant keep their order, whichever lane they are in: the newest is displaced first.
        inside.sort_by_key(|inside| (inside.tenant, inside.job.0));
        print.extend(inside.iter().map(|inside| inside.lane as i64));
        let watched =
            |(job, passed)| [inside.iter().position(|inside| inside.job == job).unwrap() as i64, passed];
        print.extend(state.watched.iter().copied().flat_map(watched));
        for (lane, tenant, cost) in &state.running {
            print.extend([*lane as i64, i64::from(tenant.class), i64::from(tenant.id), *cost as i64]);
        }
        print
    }

    fn step(&self, state: &State, action: Action, now: Instant) -> Result<Option<State>, String> {
        let mut next = state.clone();
        let possible = match action {
            Action::Push(lane, tenant, cost) => self.push(&mut next, lane, tenant, cost, now)?,
            Action::PushWatched(..) if next.watched.is_some() => false,
            Action::PushWatched(lane, tenant, cost) => {
                next.watched = Some((Job(next.next), 0));
                self.push(&mut next, lane, tenant, cost, now)?
            }
            Action::Pop(lane) => self.pop(&mut next, lane, now)?,
            Action::Finish(actual) => {
                let oldest = (!next.running.is_empty()).then(|| next.running.remove(0));
                if let Some((lane, tenant, cost)) = oldest {
                    next.queue.finish(lane, tenant, cost, actual * cost);
                }
                oldest.is_some()
            }
            Action::Leave(tenant, first) => {
                let mut all = next.inside.iter();
                let of = |inside: &&Inside| inside.tenant == tenant;
                let found = if first { all.find(of) } else { all.rfind(of) }.cloned();
                if let Some(Inside { lane, job, number, .. }) = found {
                    if next.queue.remove(lane, tenant, number) != Some(job) {
                        return Err("a job that waits cannot be taken back".into());
                    }
                    next.inside.retain(|inside| inside.job != job);
                }
                found.is_some()
            }
        };
        self.check(&next)?;
        // Once the watched job has left there is nothing to see that is not seen without watching.
        let seen = |(job, _): (Job, i64)| next.inside.iter().any(|inside| inside.job == job);
        Ok((possible && next.watched.is_none_or(seen)).then_some(next))
    }

    fn push(
        &self,
        state: &mut State,
        lane: usize,
        tenant: Tenant,
        cost: u64,
        now: Instant,
    ) -> Result<bool, String> {
        let (quantum, job) = (self.quantum(tenant), Job(state.next));
        let (held, share) = state.queue.held_and_share(tenant, quantum);
        let full = state.queue.len() == self.shape.capacity;
        let deadline = now + Duration::from_secs(1);
        let number = match state.queue.push(Entry { lane, tenant, quantum, cost, deadline, job }, now) {
            Pushed::Queued(number) if !full => number,
            Pushed::Displaced(number, other, _) if full && held < share => {
                let Some(at) = state.inside.iter().position(|inside| inside.job == other) else {
                    return Err(format!("{other:?} was displaced but did not wait"));
                };
                let victim = state.inside.remove(at);
                let newer = state.inside[at..].iter().any(|inside| inside.tenant == victim.tenant);
                if newer || victim.tenant == tenant {
                    return Err(format!("{other:?} of {:?} is not the one to be displaced", victim.tenant));
                }
                number
            }
            Pushed::Busy(same, _) if full && same == job => return Ok(false),
            other => return Err(format!("{other:?} with {held} of {share}")),
        };
        state.next += 1;
        state.inside.push(Inside { lane, tenant, job, number });
        Ok(true)
    }

    fn pop(&self, state: &mut State, lane: usize, now: Instant) -> Result<bool, String> {
        if state.running.len() >= self.running_max {
            return Ok(false);
        }
        let waiting = state.inside.iter().any(|inside| inside.lane == lane);
        let Some(popped) = state.queue.pop(lane, now) else {
            return if waiting { Err("a job waits, but none comes".into()) } else { Ok(false) };
        };
        let mine = |inside: &Inside| inside.lane == lane && inside.tenant == popped.tenant;
        let oldest = state.inside.iter().position(mine);
        let Some(at) = oldest.filter(|at| state.inside[*at].job == popped.job) else {
            return Err(format!("{popped:?} is not the tenant's oldest in this lane"));
        };
        state.inside.remove(at);
        if let Some((job, passed)) = &mut state.watched
            && state.inside.iter().any(|inside| inside.job == *job && inside.lane == lane)
        {
            *passed += 1;
            self.passed_most.set(self.passed_most.get().max(*passed));
        }
        state.running.push((lane, popped.tenant, popped.cost));
        Ok(true)
    }

    fn check(&self, state: &State) -> Result<(), String> {
        let length = state.queue.len();
        if length > self.shape.capacity || length != state.inside.len() {
            return Err(format!("{length} jobs in the queue, {} were let in", state.inside.len()));
        }
        let idle = FairQueue::<Job>::new(self.shape.clone(), self.lanes).print();
        if length == 0 && state.running.is_empty() && state.queue.print() != idle {
            return Err("something is kept of those who are gone".into());
        }
        Ok(())
    }

    /// Walks through all states and returns the most jobs that one is ever passed by.
    ///
    /// Every deficit and the number of jobs that passed the watched one are part of a state, so there are finitely
    /// many states only if all of these are bounded.
    fn explore(&self) -> i64 {
        let (now, begun) = (Instant::now(), Instant::now());
        let queue = FairQueue::new(self.shape.clone(), self.lanes);
        let first = State { queue, inside: Vec::new(), running: Vec::new(), next: 0, watched: None };
        let step = |state: &State, action| self.step(state, action, now);
        let states = explore(first, &self.actions(), 500_000, Model::print, step);
        eprintln!("{states} states in {:?}, passed by {}", begun.elapsed(), self.passed_most.get());
        self.passed_most.get()
    }
}

fn tenant(class: u8, id: u32) -> Tenant {
    Tenant { class, id }
}

fn two_tenants(capacity: usize, costs: &[u64], actual: &[u64]) -> Model {
    Model {
        shape: Shape { capacity, quantum_bytes: 2, weights: [1; 3] },
        lanes: 1,
        tenants: vec![(tenant(1, 1), 1), (tenant(1, 2), 2)],
        costs: costs.to_vec(),
        actual: actual.to_vec(),
        running_max: 1,
        leaving: false,
        passed_most: Cell::new(0),
    }
}

#[test]
fn nobody_starves_whatever_jobs_turn_out_to_cost_and_whoever_leaves() {
    assert!(Model { leaving: true, ..two_tenants(3, &[2], &[0, 1, 2]) }.explore() <= 25);
}

#[test]
fn nobody_starves_when_jobs_differ_in_size() {
    assert!(two_tenants(3, &[1, 3], &[1]).explore() <= 18);
    assert!(two_tenants(4, &[3], &[1]).explore() <= 11);
}

#[test]
fn nobody_starves_when_two_jobs_run_at_a_time() {
    assert!(Model { running_max: 2, ..two_tenants(3, &[2], &[0, 1]) }.explore() <= 10);
}

#[test]
fn nobody_starves_in_two_classes_of_two_tenants_each() {
    let model = Model {
        shape: Shape { capacity: 3, quantum_bytes: 2, weights: [1, 2, 3] },
        tenants: vec![(tenant(0, 1), 1), (tenant(0, 2), 1), (tenant(1, 1), 1), (tenant(1, 3), 2)],
        ..two_tenants(3, &[2], &[1])
    };
    assert!(model.explore() <= 14);
}

#[test]
fn nobody_starves_in_two_lanes_under_one_bound() {
    let model = Model {
        shape: Shape { capacity: 3, quantum_bytes: 1, weights: [1, 2, 3] },
        lanes: 2,
        tenants: vec![(tenant(0, 1), 1), (tenant(1, 2), 1)],
        ..two_tenants(3, &[1], &[1])
    };
    assert!(model.explore() <= 7);
}
