//! The door: a request runs at once if there is room, waits its fair turn if there is not, or is told why.
//!
//! Room is a permit of the gateway and one of the upstream. What waits is in the [`FairQueue`]; the scheduler
//! takes a job out only with both permits in hand and gives it to a worker, which hands the permits over to the
//! request's own task. No request waits for a queue to have space, and none is forgotten: a job that is dropped
//! anywhere on its way answers by being dropped.
//!
//! The queue is one structure behind one lock, not shards: shares, displacement and order are over all tenants, and
//! shards would have to agree on them. Instead the lock is seldom wanted and soon given back. It is not taken while
//! there is room; what is done under it is a few searches in trees (the example `fair_queue_cost` shows a tenth of a
//! microsecond for a refusal and half of one for a job served and another let in, with one tenant or ten thousand),
//! with no wake-up, no answer and no drop of a job; the scheduler lets go of it after a handful of jobs; and in a
//! spike, when nearly every request is one too many, a tenant that was refused a moment ago is refused again from
//! atomics alone.

use crate::fair_queue::{CLASSES, Entry, FairQueue, Full, Popped, Pushed, Shape, Tenant};
use crate::meter::Meter;
use crate::waiters::Waiters;
use arc_swap::ArcSwap;
use ron_kernel::channel::{Receiver, Sender};
use ron_kernel::inventory::{Inventory, LockSpec, Probe};
use ron_kernel::lock::{Lock, LockGuard};
use ron_kernel::metrics::Counter;
use ron_kernel::shutdown::Shutdown;
use ron_kernel::sync::{Permit, Permits};
use ron_kernel::task::TaskResult;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot};

pub(crate) static WORK_LOCK: LockSpec = LockSpec {
    service: "gateway",
    name: "state_meta",
    rank: 10,
    guards: "the fair queue; taken for a push, a few pops or a settlement, never while permits are free and nobody waits",
};

/// How often the scheduler looks without being told, should a wake-up ever be lost to a restart.
const LOOK: Duration = Duration::from_millis(100);
/// Jobs that the scheduler takes out before it lets others have the lock.
const BATCH: usize = 32;
/// For how long a refusal by the full queue stands for the tenant's next requests.
const REFUSAL_AGE: Duration = Duration::from_millis(10);

/// What is known of a tenant beside the queue's lock. It stays with the tenant over reloads.
#[derive(Debug)]
pub(crate) struct Standing {
    /// Requests waiting their turn, by class.
    queued: [AtomicUsize; CLASSES],
    /// The last time the full queue refused it, by class: milliseconds of the gate's time in the upper half, then
    /// its share and the seconds to wait. 0: never.
    refused: [AtomicU64; CLASSES],
    /// `fq_served_cost_total`.
    served: Counter,
}

impl Standing {
    pub(crate) fn new(served: Counter) -> Standing {
        Standing { queued: Default::default(), refused: Default::default(), served }
    }

    pub(crate) fn queued(&self) -> usize {
        self.queued.iter().map(|queued| queued.load(Ordering::Relaxed)).sum()
    }

    fn note_refusal(&self, class: usize, full: Full, now: u32) {
        let seconds = full.wait.as_secs().saturating_add(u64::from(full.wait.subsec_nanos() > 0));
        if let (Ok(share), Ok(seconds)) = (u16::try_from(full.share), u16::try_from(seconds)) {
            let noted = u64::from(now) << 32 | u64::from(share) << 16 | u64::from(seconds);
            self.refused[class].store(noted, Ordering::Relaxed);
        }
    }

    /// The last refusal, if it is fresh and the tenant still has its share.
    fn stands_refused(&self, class: usize, now: u32) -> Option<Full> {
        let noted = self.refused[class].load(Ordering::Relaxed);
        #[expect(clippy::cast_possible_truncation, reason = "three fields in one word")]
        let (at, share, seconds) = ((noted >> 32) as u32, (noted >> 16) as u16, noted as u16);
        let fresh = noted > 0 && Duration::from_millis(now.wrapping_sub(at).into()) < REFUSAL_AGE;
        let full = Full { share: share.into(), wait: Duration::from_secs(seconds.into()) };
        (fresh && self.queued[class].load(Ordering::Relaxed) >= full.share).then_some(full)
    }
}

/// Counts a waiting request in its tenant's standing for as long as it lives.
#[derive(Debug)]
struct Counted(Arc<Standing>, usize);

impl Counted {
    fn new(standing: &Arc<Standing>, class: usize) -> Counted {
        standing.queued[class].fetch_add(1, Ordering::Relaxed);
        Counted(standing.clone(), class)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.queued[self.1].fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request waiting for its turn.
#[derive(Debug)]
struct Waiting {
    turn: oneshot::Sender<Turn>,
    counted: Counted,
}

/// The end of a wait.
#[derive(Debug)]
enum Turn {
    Run(Leave),
    /// A tenant under its share took the place.
    Displaced(Full),
    Expired,
}

/// Leave to run: both permits, and what the queue charged for the job if it waited. However the job ends, dropping
/// this gives the permits back, settles what it cost and wakes the scheduler.
#[derive(Debug)]
struct Leave {
    gate: Arc<Gate>,
    permits: Option<(Permit, Permit)>,
    charge: Option<Charge>,
    /// What it has really cost so far; what it was charged, as long as nobody knows better. That goes for one whose
    /// client has left too: a turn is a turn, and whoever gives up all of its own must not hold up the others.
    actual: AtomicU64,
}

#[derive(Debug)]
struct Charge {
    lane: usize,
    tenant: Tenant,
    charged: u64,
}

impl Drop for Leave {
    fn drop(&mut self) {
        // The permits go last: while they are out, no other upstream is given this one's lane.
        if let Some(Charge { lane, tenant, charged }) = self.charge {
            let mut queue = self.gate.queue.lock();
            queue.finish(lane, tenant, charged, self.actual.load(Ordering::Relaxed));
            self.gate.publish(&queue);
        }
        self.permits = None;
        if self.gate.waiters.any() {
            self.gate.wake.notify_one();
        }
    }
}

/// A job on its way from the scheduler to a worker, permits in hand.
#[derive(Debug)]
pub(crate) struct Dispatched {
    to: oneshot::Sender<Turn>,
    turn: Turn,
}

/// Why a request may not run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The tenant has its share of a full queue.
    Busy(Full),
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
    waiters: Waiters,
    /// Bytes each class may still spend, as last left by who held the lock.
    tokens: [AtomicI64; CLASSES],
    capacity: AtomicUsize,
    /// Permits of the upstreams, by lane.
    lanes: ArcSwap<Vec<Arc<Permits>>>,
    /// The lane that the scheduler begins with, so that permits of the gateway go round among the upstreams.
    first_lane: AtomicUsize,
    inflight: Arc<Permits>,
    /// Requests being answered, by class.
    running: [AtomicUsize; CLASSES],
    wake: Notify,
    /// The gate's time runs from here.
    since: Instant,
}

impl Probe for Gate {
    fn depth(&self) -> usize {
        self.queued()
    }
}

impl Gate {
    pub(crate) fn new(inventory: &Inventory, shape: Shape, inflight: usize) -> Arc<Gate> {
        Arc::new(Gate {
            queue: Lock::new(inventory, &WORK_LOCK, FairQueue::new(shape, 0)),
            waiters: Waiters::default(),
            tokens: Default::default(),
            capacity: AtomicUsize::new(0),
            lanes: ArcSwap::default(),
            first_lane: AtomicUsize::new(0),
            inflight: Permits::new(inflight),
            running: Default::default(),
            wake: Notify::new(),
            since: Instant::now(),
        })
    }

    /// Takes on a new shape, and the permits of every lane.
    pub(crate) fn reshape(&self, shape: Shape, inflight: usize, lanes: Vec<Arc<Permits>>) {
        self.capacity.store(shape.capacity, Ordering::Relaxed);
        self.inflight.set_limit(inflight);
        self.queue.lock().reshape(shape, lanes.len());
        self.lanes.store(Arc::new(lanes));
        self.wake.notify_one();
    }

    pub(crate) fn inflight(&self) -> &Arc<Permits> {
        &self.inflight
    }

    /// The places each of these is entitled to when the queue is full, for an operator who asks.
    pub(crate) fn shares(&self, tenants: impl Iterator<Item = (Tenant, u64)>) -> Vec<usize> {
        let queue = self.queue.lock();
        tenants.map(|(tenant, quantum)| queue.held_and_share(tenant, quantum).1).collect()
    }

    /// Whether a tenant has much waiting: more than half of what it is entitled to.
    pub(crate) fn presses(&self, tenant: Tenant, quantum: u64) -> bool {
        let (held, share) = self.queue.lock().held_and_share(tenant, quantum);
        held > share / 2
    }

    pub(crate) fn running(&self, class: usize) -> usize {
        self.running[class].load(Ordering::Relaxed)
    }

    pub(crate) fn tokens(&self, class: usize) -> i64 {
        self.tokens[class].load(Ordering::Relaxed)
    }

    /// How full the queue is, from 0 to 1.
    pub(crate) fn fill(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a few hundred")]
        let (queued, capacity) = (self.queued() as f64, self.capacity.load(Ordering::Relaxed).max(1) as f64);
        queued / capacity
    }

    pub(crate) fn queued(&self) -> usize {
        self.waiters.count()
    }

    /// States beside the lock what whoever holds it leaves behind.
    fn publish(&self, queue: &FairQueue<Waiting>) {
        for (stated, tokens) in self.tokens.iter().zip(queue.tokens()) {
            stated.store(tokens, Ordering::Relaxed);
        }
        self.waiters.publish(queue.len());
    }

    /// Milliseconds of the gate's time.
    fn millis(&self, now: Instant) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "only differences matter")]
        let millis = now.saturating_duration_since(self.since).as_millis() as u32;
        millis
    }

    /// Lets a request in: at once, or when its turn comes.
    pub(crate) async fn enter(
        self: &Arc<Gate>,
        ticket: Ticket,
        upstream: &Arc<Permits>,
        standing: &Arc<Standing>,
    ) -> Result<Pass, Refused> {
        if let Some(pass) = self.try_enter(ticket, upstream, standing) {
            return Ok(pass);
        }
        let (now, class) = (Instant::now(), usize::from(ticket.tenant.class));
        if self.queued() >= self.capacity.load(Ordering::Relaxed)
            && let Some(full) = standing.stands_refused(class, self.millis(now))
        {
            return Err(Refused::Busy(full));
        }
        let (to, wait) = oneshot::channel();
        let waiting = Waiting { turn: to, counted: Counted::new(standing, class) };
        let number = self.push(ticket, waiting, now).inspect_err(|refused| {
            if let Refused::Busy(full) = refused {
                standing.note_refusal(class, *full, self.millis(now));
            }
        })?;
        let mut place = Place { gate: self, ticket, number: Some(number) };
        self.wake.notify_one();
        let turn = tokio::time::timeout_at(ticket.deadline.into(), wait).await;
        if turn.is_ok() {
            place.number = None;
        }
        match turn {
            Ok(Ok(Turn::Run(leave))) => Ok(Pass::new(leave, ticket, standing)),
            Ok(Ok(Turn::Displaced(full))) => Err(Refused::Busy(full)),
            Ok(Ok(Turn::Expired)) | Err(_) => Err(Refused::Expired),
            Ok(Err(_dropped)) => Err(Refused::Lost),
        }
    }

    /// With nobody waiting and both permits free there is nothing to be fair about.
    pub(crate) fn try_enter(
        self: &Arc<Gate>,
        ticket: Ticket,
        upstream: &Arc<Permits>,
        standing: &Arc<Standing>,
    ) -> Option<Pass> {
        if self.queued() > 0 {
            return None;
        }
        let own = self.inflight.try_take()?;
        let Some(theirs) = upstream.try_take() else {
            drop(own);
            // The scheduler may have missed it just now.
            if self.waiters.any() {
                self.wake.notify_one();
            }
            return None;
        };
        let permits = Some((own, theirs));
        let leave = Leave { gate: self.clone(), permits, charge: None, actual: AtomicU64::new(0) };
        Some(Pass::new(leave, ticket, standing))
    }

    fn push(&self, ticket: Ticket, waiting: Waiting, now: Instant) -> Result<u64, Refused> {
        let Ticket { lane, tenant, quantum, cost, deadline } = ticket;
        let entry = Entry { lane, tenant, quantum, cost, deadline, job: waiting };
        let pushed = {
            let mut queue = self.queue.lock();
            let pushed = queue.push(entry, now);
            self.publish(&queue);
            pushed
        };
        match pushed {
            Pushed::Queued(number) => Ok(number),
            Pushed::Displaced(number, other, full) => {
                let _ = other.turn.send(Turn::Displaced(full));
                Ok(number)
            }
            Pushed::Busy(_, full) => Err(Refused::Busy(full)),
            Pushed::Hopeless(_, wait) => Err(Refused::Hopeless(wait)),
        }
    }

    /// Takes out what can run now, permits in hand, one job from each upstream in turn. Says whether there may be
    /// more.
    fn dispatch(self: &Arc<Gate>, out: &mut Vec<Dispatched>) -> bool {
        let lanes = self.lanes.load();
        let (now, first) = (Instant::now(), self.first_lane.fetch_add(1, Ordering::Relaxed));
        let mut queue = self.queue.lock();
        self.publish(&queue);
        let mut idle = 0;
        for turn in 0.. {
            if idle == lanes.len() || out.len() >= BATCH {
                break;
            }
            let lane = first.wrapping_add(turn) % lanes.len();
            idle = if self.dispatch_one(&mut queue, lane, &lanes[lane], now, out) { 0 } else { idle + 1 };
        }
        self.publish(&queue);
        idle < lanes.len()
    }

    fn dispatch_one(
        self: &Arc<Gate>,
        queue: &mut LockGuard<'_, FairQueue<Waiting>>,
        lane: usize,
        upstream: &Arc<Permits>,
        now: Instant,
        out: &mut Vec<Dispatched>,
    ) -> bool {
        if queue.lane_len(lane) == 0 {
            return false;
        }
        let Some(theirs) = upstream.try_take() else { return false };
        let Some(own) = self.inflight.try_take() else { return false };
        let mut permits = Some((own, theirs));
        while let Some(Popped { tenant, cost, expired, job }) = queue.pop(lane, now) {
            let Waiting { turn: to, counted } = job;
            drop(counted);
            if expired {
                out.push(Dispatched { to, turn: Turn::Expired });
                continue;
            }
            let charge = Some(Charge { lane, tenant, charged: cost });
            let leave =
                Leave { gate: self.clone(), permits: permits.take(), charge, actual: AtomicU64::new(cost) };
            out.push(Dispatched { to, turn: Turn::Run(leave) });
            return true;
        }
        false
    }
}

/// A place in the queue; given up when the wait is, so that a client that left holds nobody up.
struct Place<'a> {
    gate: &'a Gate,
    ticket: Ticket,
    /// `None` once it has left the queue.
    number: Option<u64>,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let removed = {
            let mut queue = self.gate.queue.lock();
            let removed = queue.remove(self.ticket.lane, self.ticket.tenant, number);
            self.gate.publish(&queue);
            removed
        };
        drop(removed);
    }
}

/// A request that runs. Dropping it ends its leave.
#[derive(Debug)]
pub(crate) struct Pass {
    leave: Leave,
    /// Knows what the request really came to, where that is not what it was taken for.
    meter: Option<Box<Meter>>,
    class: usize,
    standing: Arc<Standing>,
}

impl Pass {
    fn new(leave: Leave, ticket: Ticket, standing: &Arc<Standing>) -> Pass {
        let class = usize::from(ticket.tenant.class);
        leave.gate.running[class].fetch_add(1, Ordering::Relaxed);
        leave.actual.store(ticket.cost, Ordering::Relaxed);
        Pass { leave, meter: None, class, standing: standing.clone() }
    }

    pub(crate) fn measure(&mut self, meter: Meter) {
        self.meter = Some(Box::new(meter));
    }

    /// Says what the request has really cost.
    pub(crate) fn settle(&self, cost: u64) {
        self.leave.actual.store(cost, Ordering::Relaxed);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.leave.gate.running[self.class].fetch_sub(1, Ordering::Relaxed);
        if let Some(meter) = &self.meter {
            self.settle(meter.settle(self.leave.actual.load(Ordering::Relaxed)));
        }
        self.standing.served.add(self.leave.actual.load(Ordering::Relaxed));
    }
}

/// The scheduler: whenever there may be room, takes jobs out in fair order and gives them to the workers.
/// In a drain it goes on until `idle` says that no request can come any more.
pub(crate) async fn schedule(
    gate: Arc<Gate>,
    sched: Sender<Dispatched>,
    shutdown: Shutdown,
    idle: impl Fn() -> bool,
) -> TaskResult {
    let (mut batch, mut draining) = (Vec::with_capacity(BATCH), false);
    loop {
        tokio::select! {
            biased;
            () = gate.wake.notified() => {}
            () = tokio::time::sleep(LOOK), if gate.queued() > 0 || draining => {}
            () = shutdown.draining(), if !draining => draining = true,
        }
        if draining && gate.queued() == 0 && idle() {
            return Ok(());
        }
        loop {
            let more = gate.dispatch(&mut batch);
            for job in batch.drain(..) {
                // A job that finds no place is dropped, and so is one displaced: each is answered by that.
                drop(sched.try_send(job));
            }
            if !more {
                break;
            }
        }
    }
}

/// A worker: hands permits over to the requests whose turn it is, until the scheduler is gone and nothing is left.
pub(crate) async fn work(sched: Arc<Receiver<Dispatched>>) -> TaskResult {
    while let Some(Dispatched { to, turn }) = sched.recv().await {
        // If the client has left meanwhile, the turn comes back and is dropped: its permits are free again.
        drop(to.send(turn));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::SCHED;
    use ron_kernel::channel::queue;
    use ron_kernel::inventory::Policy;
    use ron_kernel::kernel::Kernel;
    use ron_kernel::metrics::Metrics;
    use ron_kernel::sync::Limits;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};
    use tokio::sync::oneshot::error::TryRecvError;

    fn ticket(id: u32) -> Ticket {
        let deadline = Instant::now() + Duration::from_secs(60);
        Ticket { lane: 0, tenant: Tenant { class: 1, id }, quantum: 1, cost: 100, deadline }
    }

    /// A gate whose upstream is at its cap and whose queue of four is full of one tenant's jobs.
    fn full() -> (Arc<Gate>, Arc<Permits>, Arc<Standing>, Vec<oneshot::Receiver<Turn>>) {
        let shape = Shape { capacity: 4, quantum_bytes: 1000, weights: [1, 5, 10] };
        let gate = Gate::new(&Inventory::new(Metrics::default()), shape.clone(), 8);
        let (upstream, standing) = (Permits::new(0), Arc::new(Standing::new(Counter::default())));
        gate.reshape(shape, 8, vec![upstream.clone()]);
        let fill = |_| {
            let (turn, wait) = oneshot::channel();
            let waiting = Waiting { turn, counted: Counted::new(&standing, 1) };
            gate.push(ticket(1), waiting, Instant::now()).unwrap();
            wait
        };
        let waits = (0..4).map(fill).collect();
        (gate, upstream, standing, waits)
    }

    fn refusal(gate: &Arc<Gate>, upstream: &Arc<Permits>, standing: &Arc<Standing>) -> Refused {
        let mut entering = pin!(gate.enter(ticket(1), upstream, standing));
        match entering.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Err(refused)) => refused,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn while_somebody_holds_the_lock_gauges_are_read_and_the_refused_refused_again() {
        let (gate, upstream, standing, _waits) = full();
        let busy = Refused::Busy(Full { share: 4, wait: Duration::ZERO });
        assert_eq!(refusal(&gate, &upstream, &standing), busy);
        // Taking it again on this thread would panic.
        let held = gate.queue.lock();
        let again = || {
            let noted = Instant::now();
            standing.note_refusal(1, Full { share: 4, wait: Duration::ZERO }, gate.millis(noted));
            let refused = catch_unwind(AssertUnwindSafe(|| refusal(&gate, &upstream, &standing)));
            // On a machine that lets this thread wait, what was noted may be too old by then.
            (noted.elapsed() < REFUSAL_AGE / 2).then_some(refused.ok())
        };
        assert_eq!((0..1000).find_map(|_| again()), Some(Some(busy)));
        assert_eq!((gate.depth(), standing.queued(), gate.tokens(1), gate.running(1)), (4, 4, 0, 0));
        drop(held);
        assert_eq!(
            standing.stands_refused(1, gate.millis(Instant::now() + REFUSAL_AGE * 2)),
            None,
            "it ages"
        );
    }

    #[test]
    fn a_turn_that_nobody_takes_gives_its_permits_back_and_wakes_the_scheduler() {
        let (gate, upstream, standing, mut waits) = full();
        upstream.set_limit(1);
        let mut out = Vec::new();
        gate.dispatch(&mut out);
        assert_eq!((out.len(), standing.queued(), upstream.used(), gate.inflight.used()), (1, 3, 1, 1));
        let Dispatched { to, turn } = out.pop().unwrap();
        assert!(to.send(turn).is_ok());
        let woken = || pin!(gate.wake.notified()).poll(&mut Context::from_waker(Waker::noop())).is_ready();
        assert!(woken() && !woken(), "all wake-ups so far are used up");
        // The client leaves with its turn in hand.
        waits.remove(0);
        assert_eq!((upstream.used(), gate.inflight.used(), woken()), (0, 0, true));
        assert_eq!(gate.queue.lock().tokens(), [0, 4900, 0], "a turn is paid for");
    }

    #[tokio::test]
    async fn a_turn_that_finds_no_way_to_the_workers_is_lost_the_newest_or_the_oldest() {
        for (policy, kept) in [(Policy::RejectNew, 0), (Policy::DropOldest, 3)] {
            let (gate, upstream, _standing, mut waits) = full();
            upstream.set_limit(4);
            let service = Kernel::new().service("gateway");
            let (sender, receiver) = queue(service.inventory(), &SCHED, Limits::items(1), policy);
            let mut scheduling = pin!(schedule(gate.clone(), sender, service.shutdown().clone(), || true));
            let mut poll = || scheduling.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            gate.wake.notify_one();
            assert!(poll().is_pending());
            let lost = waits.iter_mut().map(|wait| matches!(wait.try_recv(), Err(TryRecvError::Closed)));
            assert_eq!(lost.collect::<Vec<_>>(), [0, 1, 2, 3].map(|place| place != kept), "{policy:?}");
            assert_eq!((upstream.used(), gate.inflight.used()), (1, 1), "what is lost holds nothing");
            drop(receiver.try_recv());
            assert_eq!((upstream.used(), gate.queued()), (0, 0));
        }
    }

    #[test]
    fn permits_of_the_gateway_go_round_among_the_upstreams() {
        let shape = Shape { capacity: 100, quantum_bytes: 1000, weights: [1, 5, 10] };
        let gate = Gate::new(&Inventory::new(Metrics::default()), shape.clone(), 1);
        gate.reshape(shape, 1, (0..3).map(|_| Permits::new(9)).collect());
        let standing = Arc::new(Standing::new(Counter::default()));
        let mut served = [0; 3];
        let _waits: Vec<_> = (0..60)
            .map(|n| {
                let (turn, wait) = oneshot::channel();
                let waiting = Waiting { turn, counted: Counted::new(&standing, 1) };
                gate.push(Ticket { lane: n % 3, ..ticket(1) }, waiting, Instant::now()).unwrap();
                wait
            })
            .collect();
        for _ in 0..30 {
            let mut out = Vec::new();
            gate.dispatch(&mut out);
            assert_eq!(out.len(), 1);
            for job in out {
                let Turn::Run(leave) = &job.turn else { panic!("{job:?}") };
                served[leave.charge.as_ref().unwrap().lane] += 1;
            }
        }
        assert_eq!(served, [10; 3]);
    }
}
