//! Counted permits with a limit that can change while permits are out.

use super::platform::{AtomicUsize, Mutex, Ordering};
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};

/// Set in the counter while someone waits, so that giving back and learning of a waiter are one step.
const WAITING: usize = 1 << (usize::BITS - 1);

/// A pool of permits. Taking one never blocks; only an accept loop may wait for one.
#[derive(Debug)]
pub struct Permits {
    /// Permits out, and [`WAITING`].
    state: AtomicUsize,
    limit: AtomicUsize,
    waiting: Mutex<VecDeque<Waker>>,
}

impl Permits {
    pub fn new(limit: usize) -> Arc<Permits> {
        Arc::new(Permits {
            state: AtomicUsize::new(0),
            limit: AtomicUsize::new(limit),
            waiting: Mutex::new(VecDeque::new()),
        })
    }

    /// Takes a permit, or says that none is free.
    pub fn try_take(self: &Arc<Permits>) -> Option<Permit> {
        let mut state = self.state.load(Ordering::Acquire);
        loop {
            if state & !WAITING >= self.limit.load(Ordering::Acquire) {
                return None;
            }
            match self.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(Permit { pool: self.clone() }),
                Err(now) => state = now,
            }
        }
    }

    /// Takes a permit or arranges to be woken when one may be free.
    pub fn poll_take(self: &Arc<Permits>, cx: &mut Context<'_>) -> Poll<Permit> {
        loop {
            if let Some(permit) = self.try_take() {
                return Poll::Ready(permit);
            }
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                waiting.push_back(cx.waker().clone());
            }
            // A permit given back before this step left no trace but the count: look at it again.
            let state = self.state.fetch_or(WAITING, Ordering::AcqRel);
            if state & !WAITING >= self.limit.load(Ordering::Acquire) {
                return Poll::Pending;
            }
        }
    }

    /// Changes the limit. Permits already out stay valid; new ones wait until enough came back.
    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Release);
        self.wake_all();
    }

    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    pub fn used(&self) -> usize {
        self.state.load(Ordering::Relaxed) & !WAITING
    }

    fn give_back(&self) {
        if self.state.fetch_sub(1, Ordering::AcqRel) & WAITING != 0 {
            self.wake_all();
        }
    }

    /// Everyone looks again: waiters are the few accept loops, and a woken one may have gone away.
    fn wake_all(&self) {
        let waiting = {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            self.state.fetch_and(!WAITING, Ordering::AcqRel);
            std::mem::take(&mut *waiting)
        };
        for waker in waiting {
            waker.wake();
        }
    }
}

/// One permit; dropping it gives it back.
#[derive(Debug)]
pub struct Permit {
    pool: Arc<Permits>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.pool.give_back();
    }
}
