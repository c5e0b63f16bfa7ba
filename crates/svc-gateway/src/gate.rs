//! The door: a request runs at once if there is room, waits its fair turn if there is not, or is told why.
//!
//! Room is a permit of the gateway and one of the upstream. What waits is in the [`FairQueue`]; the scheduler
//! takes a job out only with both permits in hand and gives it to a worker, which hands the permits over to the
//! request's own task. No request waits for a queue to have space, and none is forgotten: a job that is dropped
//! anywhere on its way answers by being dropped.

use crate::fair_queue::{CLASSES, Entry, FairQueue, Popped, Pushed, Shape, Tenant};
use arc_swap::ArcSwap;
use ron_kernel::channel::{Receiver, Sender};
use ron_kernel::inventory::{Inventory, LockSpec, Probe};
use ron_kernel::lock::Lock;
use ron_kernel::metrics::Counter;
use ron_kernel::shutdown::Shutdown;
use ron_kernel::sync::{Permit, Permits};
use ron_kernel::task::TaskResult;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot};

pub(crate) static WORK_LOCK: LockSpec = LockSpec {
    service: "gateway",
    name: "state_meta",
    rank: 10,
    guards: "the fair queue; taken for a push, a pop or a settlement, never while permits are free and nobody waits",
};

/// How often the scheduler looks without being told, should a wake-up ever be lost to a restart.
const LOOK: Duration = Duration::from_millis(100);

/// A request waiting for its turn.
#[derive(Debug)]
pub(crate) struct Waiting {
    turn: oneshot::Sender<Turn>,
}

/// The end of a wait.
#[derive(Debug)]
enum Turn {
    Run(Charge, (Permit, Permit)),
    /// A tenant under its share took the place.
    Displaced,
    Expired,
}

/// What the queue charged for a job. However the job ends, dropping this settles it.
#[derive(Debug)]
struct Charge {
    gate: Arc<Gate>,
    lane: usize,
    tenant: Tenant,
    charged: u64,
    /// What it has really cost so far: nothing, until it runs.
    actual: AtomicU64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.gate.queue.lock().finish(
            self.lane,
            self.tenant,
            self.charged,
            self.actual.load(Ordering::Relaxed),
        );
    }
}

/// A job on its way from the scheduler to a worker, permits in hand.
#[derive(Debug)]
pub(crate) struct Dispatched {
    waiting: Waiting,
    turn: Turn,
}

/// Why a request may not run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The tenant has its share of a full queue.
    Busy,
    /// The deadline would pass first.
    Hopeless(Duration),
    /// The deadline passed while waiting.
    Expired,
    /// Dropped on the way: a full dispatch queue, or a worker that died.
    Lost,
}

/// What a request is admitted with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) lane: usize,
    pub(crate) tenant: Tenant,
    pub(crate) quantum: u64,
    pub(crate) cost: u64,
    pub(crate) deadline: Instant,
}

#[derive(Debug)]
pub(crate) struct Gate {
    queue: Lock<FairQueue<Waiting>>,
    queued: AtomicUsize,
    capacity: AtomicUsize,
    /// Permits of the upstreams, by lane; grown on reload, never shrunk.
    lanes: Lock<Vec<Arc<Permits>>>,
    inflight: Arc<Permits>,
    /// Requests being answered, by class.
    running: [AtomicUsize; CLASSES],
    /// Configured tenants: name and number.
    names: ArcSwap<HashMap<String, u32>>,
    wake: Notify,
}

impl Probe for Gate {
    fn depth(&self) -> usize {
        self.queued()
    }
}

pub(crate) static LANES_LOCK: LockSpec = LockSpec {
    service: "gateway",
    name: "routing_table",
    rank: 20,
    guards: "the upstreams' permits by lane, for the scheduler",
};

impl Gate {
    pub(crate) fn new(inventory: &Inventory, shape: Shape, inflight: usize) -> Arc<Gate> {
        Arc::new(Gate {
            queue: Lock::new(inventory, &WORK_LOCK, FairQueue::new(shape, 0)),
            queued: AtomicUsize::new(0),
            capacity: AtomicUsize::new(0),
            lanes: Lock::new(inventory, &LANES_LOCK, Vec::new()),
            inflight: Permits::new(inflight),
            running: std::array::from_fn(|_| AtomicUsize::new(0)),
            names: ArcSwap::default(),
            wake: Notify::new(),
        })
    }

    /// Takes on a new shape, and the permits of every lane.
    pub(crate) fn reshape(
        &self,
        shape: Shape,
        inflight: usize,
        lanes: Vec<Arc<Permits>>,
        names: HashMap<String, u32>,
    ) {
        self.names.store(Arc::new(names));
        self.capacity.store(shape.capacity, Ordering::Relaxed);
        self.inflight.set_limit(inflight);
        self.queue.lock().reshape(shape, lanes.len());
        *self.lanes.lock() = lanes;
        self.wake.notify_one();
    }

    pub(crate) fn inflight(&self) -> &Arc<Permits> {
        &self.inflight
    }

    /// Waiting requests of each configured tenant, and of all others together.
    pub(crate) fn queued_by_tenant(&self) -> Vec<(String, usize)> {
        let mut counts: HashMap<u32, usize> = HashMap::new();
        for (tenant, queued) in self.look(|queue| queue.tenants().collect::<Vec<_>>()) {
            *counts.entry(tenant.id).or_default() += queued;
        }
        let names = self.names.load();
        let of = |(name, number): (&String, &u32)| (name.clone(), counts.remove(number).unwrap_or(0));
        let mut rows: Vec<(String, usize)> = names.iter().map(of).collect();
        rows.push(("other".to_owned(), counts.into_values().sum()));
        rows
    }

    pub(crate) fn running(&self, class: usize) -> usize {
        self.running[class].load(Ordering::Relaxed)
    }

    /// How full the queue is, from 0 to 1.
    pub(crate) fn fill(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a few hundred")]
        let (queued, capacity) = (self.queued() as f64, self.capacity.load(Ordering::Relaxed).max(1) as f64);
        queued / capacity
    }

    pub(crate) fn queued(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
    }

    /// Looks at the queue, for metrics and status.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&FairQueue<Waiting>) -> T) -> T {
        look(&self.queue.lock())
    }

    /// Lets a request in: at once, or when its turn comes.
    pub(crate) async fn enter(
        self: &Arc<Gate>,
        ticket: Ticket,
        upstream: &Arc<Permits>,
        served: Counter,
    ) -> Result<Pass, Refused> {
        if let Some(pass) = self.try_enter(ticket, upstream, served.clone()) {
            return Ok(pass);
        }
        let (turn, wait) = oneshot::channel();
        let mut place = Place { gate: self, ticket, queued: false };
        self.push(ticket, Waiting { turn })?;
        place.queued = true;
        self.wake.notify_one();
        let turn = tokio::time::timeout_at(ticket.deadline.into(), wait).await;
        match turn {
            Ok(Ok(Turn::Run(charge, permits))) => {
                place.queued = false;
                Ok(Pass::new(self, ticket, Some(charge), permits, served))
            }
            Ok(Ok(Turn::Displaced)) => {
                place.queued = false;
                Err(Refused::Busy)
            }
            Ok(Ok(Turn::Expired)) | Err(_) => Err(Refused::Expired),
            Ok(Err(_dropped)) => Err(Refused::Lost),
        }
    }

    /// With nobody waiting and both permits free there is nothing to be fair about.
    pub(crate) fn try_enter(
        self: &Arc<Gate>,
        ticket: Ticket,
        upstream: &Arc<Permits>,
        served: Counter,
    ) -> Option<Pass> {
        if self.queued.load(Ordering::Acquire) > 0 {
            return None;
        }
        let own = self.inflight.try_take()?;
        let theirs = upstream.try_take()?;
        Some(Pass::new(self, ticket, None, (own, theirs), served))
    }

    fn push(&self, ticket: Ticket, waiting: Waiting) -> Result<(), Refused> {
        let entry = Entry {
            lane: ticket.lane,
            tenant: ticket.tenant,
            quantum: ticket.quantum,
            cost: ticket.cost,
            deadline: ticket.deadline,
            job: waiting,
        };
        let pushed = {
            let mut queue = self.queue.lock();
            let pushed = queue.push(entry, Instant::now());
            self.queued.store(queue.len(), Ordering::Release);
            pushed
        };
        match pushed {
            Pushed::Queued => Ok(()),
            Pushed::Displaced(other) => {
                let _ = other.turn.send(Turn::Displaced);
                Ok(())
            }
            Pushed::Busy(_) => Err(Refused::Busy),
            Pushed::Hopeless(_, wait) => Err(Refused::Hopeless(wait)),
        }
    }

    /// Takes out what can run now, permits in hand.
    fn dispatch(self: &Arc<Gate>, out: &mut Vec<Dispatched>) {
        let lanes = self.lanes.lock().clone();
        let mut queue = self.queue.lock();
        let now = Instant::now();
        for (lane, upstream) in lanes.iter().enumerate() {
            while queue.lane_len(lane) > 0 {
                let Some(theirs) = upstream.try_take() else { break };
                let Some(own) = self.inflight.try_take() else { break };
                let Some(popped) = queue.pop(lane, now) else { break };
                let Popped { tenant, cost, expired, job } = popped;
                let turn = if expired {
                    Turn::Expired
                } else {
                    let charge =
                        Charge { gate: self.clone(), lane, tenant, charged: cost, actual: AtomicU64::new(0) };
                    Turn::Run(charge, (own, theirs))
                };
                out.push(Dispatched { waiting: job, turn });
            }
        }
        self.queued.store(queue.len(), Ordering::Release);
    }
}

/// A place in the queue; given up when the wait is, so that a client that left holds nobody up.
struct Place<'a> {
    gate: &'a Gate,
    ticket: Ticket,
    queued: bool,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.queued {
            let mut queue = self.gate.queue.lock();
            queue.remove(self.ticket.lane, self.ticket.tenant, |waiting| waiting.turn.is_closed());
            self.gate.queued.store(queue.len(), Ordering::Release);
        }
    }
}

/// Leave to run. Dropping it gives the permits back, settles the cost and wakes the scheduler.
#[derive(Debug)]
pub(crate) struct Pass {
    gate: Arc<Gate>,
    class: usize,
    /// What the queue charged; `None` if the request did not wait.
    charge: Option<Charge>,
    /// What it has really cost so far.
    cost: AtomicU64,
    permits: Option<(Permit, Permit)>,
    /// The tenant's `fq_served_cost_total`.
    served: Counter,
}

impl Pass {
    fn new(
        gate: &Arc<Gate>,
        ticket: Ticket,
        charge: Option<Charge>,
        permits: (Permit, Permit),
        served: Counter,
    ) -> Pass {
        let class = usize::from(ticket.tenant.class);
        gate.running[class].fetch_add(1, Ordering::Relaxed);
        let cost = AtomicU64::new(ticket.cost);
        Pass { gate: gate.clone(), class, charge, cost, permits: Some(permits), served }
    }

    /// Says what the request has really cost.
    pub(crate) fn settle(&self, cost: u64) {
        self.cost.store(cost, Ordering::Relaxed);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.permits = None;
        self.gate.running[self.class].fetch_sub(1, Ordering::Relaxed);
        let cost = self.cost.load(Ordering::Relaxed);
        self.served.add(cost);
        if let Some(charge) = self.charge.take() {
            charge.actual.store(cost, Ordering::Relaxed);
        }
        if self.gate.queued.load(Ordering::Acquire) > 0 {
            self.gate.wake.notify_one();
        }
    }
}

/// The scheduler: whenever there may be room, takes jobs out in fair order and gives them to the workers.
pub(crate) async fn schedule(gate: Arc<Gate>, sched: Sender<Dispatched>, shutdown: Shutdown) -> TaskResult {
    let mut batch = Vec::new();
    loop {
        tokio::select! {
            biased;
            // What is queued still drains.
            () = shutdown.draining(), if gate.queued() == 0 => return Ok(()),
            () = gate.wake.notified() => {}
            () = tokio::time::sleep(LOOK), if gate.queued() > 0 => {}
        }
        gate.dispatch(&mut batch);
        for job in batch.drain(..) {
            // A job that finds no place is dropped, and so is one displaced: each is answered by that.
            drop(sched.try_send(job));
        }
    }
}

/// A worker: hands permits over to the requests whose turn it is, until the scheduler is gone and nothing is left.
pub(crate) async fn work(gate: Arc<Gate>, sched: Arc<Receiver<Dispatched>>) -> TaskResult {
    while let Some(Dispatched { waiting, turn }) = sched.recv().await {
        // If the client has left meanwhile, the turn comes back and is dropped: nothing ran, nothing is owed.
        if waiting.turn.send(turn).is_err() {
            gate.wake.notify_one();
        }
    }
    Ok(())
}
