//! One upstream's scheduler: classes by weight, and how fast it drains.

use super::class::{Class, Queued};
use super::{CLASSES, Shape, Tenant, bounded, signed, turn_bytes};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The drain rate is measured over windows of at least this length.
const RATE_WINDOW: Duration = Duration::from_millis(100);

#[derive(Clone, Debug)]
pub(super) struct Lane<J> {
    classes: [Class<J>; CLASSES],
    /// What each class may still spend in this round.
    deficits: [i64; CLASSES],
    /// Classes with queued jobs; the first has its turn.
    ring: VecDeque<u8>,
    pub(super) queued: usize,
    rate: Rate,
}

impl<J> Lane<J> {
    pub(super) fn new() -> Lane<J> {
        Lane {
            classes: std::array::from_fn(|_| Class::new()),
            deficits: [0; CLASSES],
            ring: VecDeque::new(),
            queued: 0,
            rate: Rate::default(),
        }
    }

    pub(super) fn reshape(&mut self, former: &Shape, shape: &Shape) {
        for class in &mut self.classes {
            class.reshape(former, shape);
        }
    }

    pub(super) fn tokens(&self) -> [i64; CLASSES] {
        self.deficits
    }

    pub(super) fn enqueue(&mut self, shape: &Shape, tenant: Tenant, quantum: u64, queued: Queued<J>) {
        let class = &mut self.classes[usize::from(tenant.class)];
        if class.is_idle() {
            // A class that becomes active is looked at first; what it may spend is not changed by that.
            self.ring.push_front(tenant.class);
        }
        self.queued += 1;
        class.enqueue(shape, tenant.id, quantum, queued);
    }

    pub(super) fn newest(&self, tenant: Tenant) -> Option<u64> {
        self.classes[usize::from(tenant.class)].newest(tenant.id)
    }

    pub(super) fn take_newest(&mut self, shape: &Shape, tenant: Tenant) -> Option<J> {
        let newest = self.newest(tenant)?;
        self.remove(shape, tenant, newest)
    }

    pub(super) fn remove(&mut self, shape: &Shape, tenant: Tenant, number: u64) -> Option<J> {
        let job = self.classes[usize::from(tenant.class)].remove(shape, tenant.id, number)?;
        self.queued -= 1;
        self.retire(tenant.class);
        Some(job)
    }

    /// Takes a class without queued jobs off the ring. With nobody left, nobody is owed anything.
    fn retire(&mut self, class: u8) {
        if !self.classes[usize::from(class)].is_idle() {
            return;
        }
        self.ring.retain(|other| *other != class);
        if self.ring.is_empty() {
            for (class, deficit) in self.classes.iter().zip(&mut self.deficits) {
                *deficit = if class.running == 0 { 0 } else { (*deficit).min(0) };
            }
        }
    }

    pub(super) fn pop(&mut self, shape: &Shape, now: Instant) -> Option<(Tenant, Queued<J>)> {
        loop {
            for _ in 0..self.ring.len() {
                let class = *self.ring.front()?;
                self.ring.rotate_left(1);
                let (state, deficit) =
                    (&mut self.classes[usize::from(class)], &mut self.deficits[usize::from(class)]);
                let (id, cost) = state.candidate();
                if signed(cost) <= *deficit {
                    let queued = state.take(shape, id, now);
                    if queued.deadline > now {
                        let turn = turn_bytes(shape, shape.weights[usize::from(class)]);
                        *deficit = bounded(deficit.saturating_sub(signed(cost)), turn);
                        self.rate.note(cost, now);
                    }
                    self.queued -= 1;
                    self.retire(class);
                    if self.queued == 0 {
                        self.rate.pause();
                    }
                    return Some((Tenant { class, id }, queued));
                }
            }
            if self.ring.is_empty() {
                return None;
            }
            self.next_round(shape);
        }
    }

    /// Nobody can pay: the classes are paid as often as the first of the active ones needs to be able to.
    fn next_round(&mut self, shape: &Shape) {
        let turn = |class: u8| turn_bytes(shape, shape.weights[usize::from(class)]);
        let mut rounds = i64::MAX;
        for class in &self.ring {
            let cost = self.classes[usize::from(*class)].candidate().1;
            let missing = signed(cost).saturating_sub(self.deficits[usize::from(*class)]);
            rounds = rounds.min(missing.saturating_add(turn(*class) - 1) / turn(*class));
        }
        for (class, deficit) in (0u8..).zip(&mut self.deficits) {
            let paid = deficit.saturating_add(turn(class).saturating_mul(rounds.max(1)));
            *deficit = if self.ring.contains(&class) { paid } else { paid.min(0) };
        }
    }

    pub(super) fn finish(&mut self, shape: &Shape, tenant: Tenant, estimate: u64, actual: u64) {
        let class = usize::from(tenant.class);
        let difference = i64::try_from(i128::from(actual) - i128::from(estimate)).unwrap_or(i64::MAX);
        let turn = turn_bytes(shape, shape.weights[class]);
        self.deficits[class] = bounded(self.deficits[class].saturating_sub(difference), turn);
        self.classes[class].finish(shape, tenant.id, difference);
        self.retire(tenant.class);
    }

    /// How long a newcomer would wait behind its tenant's jobs at the drain rate; `None` if nobody knows.
    pub(super) fn wait(&self, shape: &Shape, tenant: Tenant, quantum: u64) -> Option<Duration> {
        let class = &self.classes[usize::from(tenant.class)];
        let ahead = class.queued_cost(tenant.id);
        if ahead == 0 || self.rate.per_second <= 0.0 {
            return None;
        }
        let weights: u64 = self.ring.iter().map(|class| shape.weights[usize::from(*class)]).sum();
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let part = (shape.weights[usize::from(tenant.class)] * quantum) as f64
            / (weights.max(1) * class.quanta.max(1)) as f64;
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let seconds = ahead as f64 / (self.rate.per_second * part);
        Duration::try_from_secs_f64(seconds).ok()
    }
}

impl<J: Copy + Into<i64>> Lane<J> {
    /// See [`super::FairQueue::print`]. The rate is left out: it is about time.
    pub(super) fn print(&self, shape: &Shape, out: &mut Vec<i64>) {
        out.extend(self.ring.iter().map(|class| i64::from(*class)));
        for (class, deficit) in self.classes.iter().zip(self.deficits) {
            out.extend([-1, deficit]);
            class.print(shape, out);
        }
    }
}

#[cfg(test)]
impl<J> Lane<J> {
    /// Tenants remembered, and jobs running.
    pub(super) fn known(&self) -> (usize, usize) {
        let classes = || self.classes.iter();
        (classes().map(Class::known).sum(), classes().map(|class| class.running).sum())
    }
}

/// How fast a lane drains, in cost per second.
#[derive(Clone, Debug, Default)]
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
