//! Counted permits with a limit that can change while permits are out.

use super::platform::{AtomicUsize, Mutex, Ordering};
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};

/// A pool of permits. Taking one never blocks; only an accept loop may wait for one.
#[derive(Debug)]
pub struct Permits {
    used: AtomicUsize,
    limit: AtomicUsize,
    waiters: AtomicUsize,
    waiting: Mutex<VecDeque<Waker>>,
}

impl Permits {
    pub fn new(limit: usize) -> Arc<Permits> {
        Arc::new(Permits {
            used: AtomicUsize::new(0),
            limit: AtomicUsize::new(limit),
            waiters: AtomicUsize::new(0),
            waiting: Mutex::new(VecDeque::new()),
        })
    }

    /// Takes a permit, or says that none is free.
    pub fn try_take(self: &Arc<Permits>) -> Option<Permit> {
        let mut used = self.used.load(Ordering::SeqCst);
        loop {
            if used >= self.limit.load(Ordering::SeqCst) {
                return None;
            }
            match self.used.compare_exchange_weak(used, used + 1, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Some(Permit { pool: self.clone() }),
                Err(now) => used = now,
            }
        }
    }

    /// Takes a permit or arranges to be woken when one may be free.
    pub fn poll_take(self: &Arc<Permits>, cx: &mut Context<'_>) -> Poll<Permit> {
        if let Some(permit) = self.try_take() {
            return Poll::Ready(permit);
        }
        {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                waiting.push_back(cx.waker().clone());
            }
            self.waiters.store(waiting.len(), Ordering::SeqCst);
        }
        // A permit given back between the first look and the registration woke nobody: look again.
        match self.try_take() {
            Some(permit) => Poll::Ready(permit),
            None => Poll::Pending,
        }
    }

    /// Changes the limit. Permits already out stay valid; new ones wait until enough came back.
    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::SeqCst);
        self.wake_all();
    }

    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    fn give_back(&self) {
        self.used.fetch_sub(1, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            self.wake_all();
        }
    }

    /// Everyone looks again: waiters are the few accept loops, and a woken one may have gone away.
    fn wake_all(&self) {
        let waiting = {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            self.waiters.store(0, Ordering::SeqCst);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_are_counted_and_come_back() {
        let pool = Permits::new(2);
        let first = pool.try_take().unwrap();
        let _second = pool.try_take().unwrap();
        assert!(pool.try_take().is_none());
        drop(first);
        assert!(pool.try_take().is_some());
    }

    #[test]
    fn a_lowered_limit_holds_until_enough_permits_came_back() {
        let pool = Permits::new(3);
        let held: Vec<_> = (0..3).map(|_| pool.try_take().unwrap()).collect();
        pool.set_limit(1);
        drop(held);
        let _one = pool.try_take().unwrap();
        assert!(pool.try_take().is_none());
    }

    #[tokio::test]
    async fn a_waiter_gets_the_permit_that_is_given_back() {
        let pool = Permits::new(1);
        let held = pool.try_take().unwrap();
        let wait = std::future::poll_fn(|cx| pool.poll_take(cx));
        let (_, ()) = tokio::join!(wait, async { drop(held) });
        assert_eq!(pool.used(), 0, "the permit taken by the waiter was dropped with the join");
    }
}
