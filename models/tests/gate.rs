//! The gate's protocol: from the fair queue over the dispatch queue to a worker, with tasks that die and a drain.
//!
//! The fair queue is the production source; the tasks around it are written down here as steps.
#![expect(clippy::unwrap_used, reason = "a model that cannot go on says where")]

use models::explore;
use models::fair_queue::{Entry, FairQueue, Pushed, Shape, Tenant};
use models::permit::Permits;
use models::waiters::Waiters;
use std::sync::Arc;
use std::time::{Duration, Instant};

const JOBS: u8 = 4;
const SCHED: usize = 1;
const PERMITS: usize = 2;
const TENANT: Tenant = Tenant { class: 0, id: 1 };

#[derive(Clone, Copy, Debug)]
enum Action {
    Arrive,
    /// The scheduler takes one out, with a permit, and sends it on.
    Dispatch,
    /// A worker takes one from the dispatch queue and hands it its permit.
    Hand,
    /// The first job that runs is done.
    Finish,
    /// The client of this job leaves, or its deadline passes.
    Leave(u8),
    KillScheduler,
    KillWorker,
    Restart,
    Drain,
    /// The drain deadline: whoever was not answered is now, by its own connection.
    Deadline,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Outside,
    Queue(u64),
    Sched,
    Running,
    Answered,
}

#[derive(Clone)]
struct State {
    queue: FairQueue<i64>,
    sched: Vec<u8>,
    jobs: [At; JOBS as usize],
    free: usize,
    scheduler: bool,
    worker: bool,
    draining: bool,
}

impl State {
    fn answer(&mut self, job: u8) -> Result<(), String> {
        let at = &mut self.jobs[usize::from(job)];
        if *at == At::Answered {
            return Err(format!("job {job} is answered twice"));
        }
        *at = At::Answered;
        Ok(())
    }

    fn first(&self, wanted: impl Fn(At) -> bool) -> Option<u8> {
        (0..JOBS).find(|job| wanted(self.jobs[usize::from(*job)]))
    }
}

impl State {
    fn arrive(&mut self, now: Instant) -> Result<bool, String> {
        let Some(job) = self.first(|at| at == At::Outside) else { return Ok(false) };
        let deadline = now + Duration::from_secs(1);
        let entry = Entry { lane: 0, tenant: TENANT, quantum: 1, cost: 1, deadline, job: i64::from(job) };
        match self.queue.push(entry, now) {
            Pushed::Queued(number) => self.jobs[usize::from(job)] = At::Queue(number),
            Pushed::Busy(..) => self.answer(job)?,
            other => return Err(format!("{other:?}")),
        }
        Ok(true)
    }

    fn dispatch(&mut self, now: Instant) -> Result<bool, String> {
        let Some(popped) = self.queue.pop(0, now) else { return Ok(false) };
        let job = u8::try_from(popped.job).unwrap();
        if self.sched.len() < SCHED {
            self.free -= 1;
            self.sched.push(job);
            self.jobs[usize::from(job)] = At::Sched;
        } else {
            // Dropped, which answers it, gives its permit back and settles it.
            self.answer(job)?;
            self.queue.finish(0, TENANT, 1, 1);
        }
        Ok(true)
    }

    fn hand(&mut self) -> bool {
        let job = self.sched.remove(0);
        if self.jobs[usize::from(job)] == At::Sched {
            self.jobs[usize::from(job)] = At::Running;
        } else {
            self.free += 1;
            self.queue.finish(0, TENANT, 1, 1);
        }
        true
    }

    fn finish(&mut self) -> Result<bool, String> {
        let Some(job) = self.first(|at| at == At::Running) else { return Ok(false) };
        self.answer(job)?;
        self.free += 1;
        self.queue.finish(0, TENANT, 1, 1);
        Ok(true)
    }

    fn leave(&mut self, job: u8) -> Result<bool, String> {
        let at = self.jobs[usize::from(job)];
        if let At::Queue(number) = at
            && self.queue.remove(0, TENANT, number) != Some(i64::from(job))
        {
            return Err(format!("job {job} waits nowhere"));
        }
        let waits = matches!(at, At::Queue(_) | At::Sched);
        if waits {
            self.answer(job)?;
        }
        Ok(waits)
    }

    fn deadline(&mut self) -> Result<(), String> {
        for job in 0..JOBS {
            self.leave(job)?;
            if self.jobs[usize::from(job)] == At::Running {
                self.answer(job)?;
            }
        }
        let answered = |at: &At| matches!(at, At::Answered | At::Outside);
        if self.queue.is_empty() && self.jobs.iter().all(answered) {
            Ok(())
        } else {
            Err("somebody waits who will never be answered".into())
        }
    }
}

fn step(state: &State, action: Action, now: Instant) -> Result<Option<State>, String> {
    let mut next = state.clone();
    let possible = match action {
        Action::Arrive => !next.draining && next.arrive(now)?,
        Action::Dispatch => next.scheduler && next.free > 0 && next.dispatch(now)?,
        Action::Hand => next.worker && !next.sched.is_empty() && next.hand(),
        Action::Finish => next.finish()?,
        Action::Leave(job) => next.leave(job)?,
        Action::KillScheduler => std::mem::replace(&mut next.scheduler, false),
        Action::KillWorker => std::mem::replace(&mut next.worker, false),
        Action::Restart => {
            let dead = !next.scheduler || !next.worker;
            (next.scheduler, next.worker) = (true, true);
            dead
        }
        Action::Drain => !std::mem::replace(&mut next.draining, true),
        Action::Deadline => {
            if next.draining {
                next.deadline()?;
            }
            return Ok(None);
        }
    };
    check(&next)?;
    Ok(possible.then_some(next))
}

fn check(state: &State) -> Result<(), String> {
    let at = |wanted: fn(&At) -> bool| state.jobs.iter().filter(|at| wanted(at)).count();
    let queued = at(|at| matches!(at, At::Queue(_)));
    if queued != state.queue.len() {
        return Err(format!("{queued} wait, {} are queued", state.queue.len()));
    }
    if state.free + state.sched.len() + at(|at| *at == At::Running) != PERMITS {
        return Err("a permit is lost or doubled".into());
    }
    // Nothing but the deaths of tasks can keep a job from going on.
    let (now, alive) = (Instant::now(), state.scheduler && state.worker);
    if alive && at(|at| !matches!(at, At::Outside | At::Answered)) > 0 {
        let on = [Action::Dispatch, Action::Hand, Action::Finish];
        if on.iter().all(|action| !moves(state, *action, now)) {
            return Err("somebody waits, and nothing goes on".into());
        }
    }
    Ok(())
}

/// Whether the action could happen, without looking further.
fn moves(state: &State, action: Action, now: Instant) -> bool {
    match action {
        Action::Dispatch => state.free > 0 && state.queue.clone().pop(0, now).is_some(),
        Action::Hand => !state.sched.is_empty(),
        _ => state.first(|at| at == At::Running).is_some(),
    }
}

#[test]
fn whoever_dies_every_job_is_answered_once_and_by_the_drain_deadline() {
    let now = Instant::now();
    let shape = Shape { capacity: 3, quantum_bytes: 1, weights: [1; 3] };
    let first = State {
        queue: FairQueue::new(shape, 1),
        sched: Vec::new(),
        jobs: [At::Outside; JOBS as usize],
        free: PERMITS,
        scheduler: true,
        worker: true,
        draining: false,
    };
    let mut actions = vec![Action::Arrive, Action::Dispatch, Action::Hand, Action::Finish, Action::Restart];
    actions.extend([Action::KillScheduler, Action::KillWorker, Action::Drain, Action::Deadline]);
    actions.extend((0..JOBS).map(Action::Leave));
    let print = |state: &State| {
        let jobs: Vec<u8> = state
            .jobs
            .iter()
            .map(|at| match at {
                At::Outside => 0,
                At::Queue(_) => 1,
                At::Sched => 2,
                At::Running => 3,
                At::Answered => 4,
            })
            .collect();
        let flags = [state.scheduler, state.worker, state.draining];
        (state.queue.print(), state.sched.clone(), jobs, flags)
    };
    let states = explore(first, &actions, 500_000, print, |state, action| step(state, action, now));
    assert!(states > 1000, "{states}");
}

/// Who frees a permit and who begins to wait see each other, whichever comes first: otherwise the scheduler sleeps
/// on, which loom reports as a deadlock.
#[test]
fn no_wake_up_is_lost_between_a_permit_and_a_waiter() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let (permits, waiters) = (Permits::new(1), Arc::new(Waiters::default()));
        let queue = Arc::new(loom::sync::Mutex::new(0usize));
        let wake = Arc::new(loom::sync::Notify::new());
        let held = permits.try_take().unwrap();
        let (seen, waker) = (waiters.clone(), wake.clone());
        let runs = loom::thread::spawn(move || {
            drop(held);
            if seen.any() {
                waker.notify();
            }
        });
        let (pool, seen, waker, pushed) = (permits.clone(), waiters.clone(), wake.clone(), queue.clone());
        let enters = loom::thread::spawn(move || {
            if seen.count() == 0 && pool.try_take().is_some() {
                return false;
            }
            let mut queue = pushed.lock().unwrap();
            *queue += 1;
            seen.publish(*queue);
            drop(queue);
            waker.notify();
            true
        });
        // The scheduler, if the newcomer had to wait.
        if enters.join().unwrap() {
            loop {
                wake.wait();
                let mut queue = queue.lock().unwrap();
                waiters.publish(*queue);
                if *queue > 0 && permits.try_take().is_some() {
                    *queue -= 1;
                    waiters.publish(*queue);
                    break;
                }
            }
        }
        runs.join().unwrap();
        assert_eq!(waiters.count(), 0);
    });
}
