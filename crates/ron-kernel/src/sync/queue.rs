//! A queue bounded in items and in bytes, with a stated answer to "full".
//!
//! Producers never wait: they push or are told. Consumers wait for an item or for the close. Depth is an
//! atomic beside the lock, so a gauge can be read without touching what the hot path takes.

use super::platform::{AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};

/// What a queue may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub items: usize,
    pub bytes: usize,
}

impl Limits {
    /// Bounded by count only.
    pub fn items(items: usize) -> Limits {
        Limits { items, bytes: usize::MAX }
    }
}

/// What happens to a push that finds the queue full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// The newcomer is handed back.
    RejectNew,
    /// The oldest items make room and are handed to the producer, which owes them an answer.
    DropOldest,
    /// The newest queued item is replaced by the newcomer: only the latest matters.
    Collapse,
}

/// The queue is full. The item was not taken.
#[derive(Debug, PartialEq, Eq)]
pub struct Busy<T>(pub T);

/// Why a push was not taken.
#[derive(Debug, PartialEq, Eq)]
pub enum PushError<T> {
    Busy(Busy<T>),
    Closed(T),
}

/// The queue itself; share it by `Arc`. Any number of producers and consumers.
#[derive(Debug)]
pub struct Queue<T> {
    state: Mutex<State<T>>,
    depth: AtomicUsize,
    bytes: AtomicUsize,
    dropped: AtomicU64,
    limits: Limits,
    overflow: Overflow,
}

#[derive(Debug)]
struct State<T> {
    items: VecDeque<(T, usize)>,
    bytes: usize,
    closed: bool,
    /// Consumers asleep, in the order they came.
    waiting: VecDeque<(u64, Waker)>,
    next_waiter: u64,
}

impl<T> Queue<T> {
    pub fn new(limits: Limits, overflow: Overflow) -> Arc<Queue<T>> {
        Arc::new(Queue {
            state: Mutex::new(State {
                items: VecDeque::new(),
                bytes: 0,
                closed: false,
                waiting: VecDeque::new(),
                next_waiter: 0,
            }),
            depth: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            dropped: AtomicU64::new(0),
            limits,
            overflow,
        })
    }

    /// Pushes an item that weighs `bytes`. On success returns the items that had to make room, oldest first.
    pub fn push(&self, item: T, bytes: usize) -> Result<Vec<T>, PushError<T>> {
        let mut displaced = Vec::new();
        let wake = {
            let mut state = self.lock();
            if state.closed {
                return Err(PushError::Closed(item));
            }
            if !state.fits(self.limits, bytes) && !self.make_room(&mut state, bytes, &mut displaced) {
                self.dropped.fetch_add(1, Ordering::Relaxed);
                return Err(PushError::Busy(Busy(item)));
            }
            state.items.push_back((item, bytes));
            state.bytes += bytes;
            self.publish(&state);
            state.waiting.pop_front()
        };
        self.dropped.fetch_add(displaced.len() as u64, Ordering::Relaxed);
        if let Some((_, waker)) = wake {
            waker.wake();
        }
        Ok(displaced)
    }

    /// Applies the overflow policy; false when the newcomer has to go.
    fn make_room(&self, state: &mut State<T>, bytes: usize, displaced: &mut Vec<T>) -> bool {
        if bytes > self.limits.bytes || self.limits.items == 0 {
            return false;
        }
        while !state.fits(self.limits, bytes) {
            let victim = match self.overflow {
                Overflow::RejectNew => return false,
                Overflow::DropOldest => state.items.pop_front(),
                Overflow::Collapse => state.items.pop_back(),
            };
            let Some((old, weight)) = victim else { return false };
            state.bytes -= weight;
            displaced.push(old);
        }
        true
    }

    /// Takes the oldest item if there is one.
    pub fn try_pop(&self) -> Option<T> {
        let mut state = self.lock();
        let (item, bytes) = state.items.pop_front()?;
        state.bytes -= bytes;
        self.publish(&state);
        Some(item)
    }

    /// Waits for an item; `None` once the queue is closed and empty. Cancel-safe: a dropped wait takes nothing.
    pub fn pop(&self) -> Pop<'_, T> {
        Pop { queue: self, waiter: None }
    }

    /// No further push succeeds; what is queued can still be taken.
    pub fn close(&self) {
        let waiting = {
            let mut state = self.lock();
            state.closed = true;
            std::mem::take(&mut state.waiting)
        };
        for (_, waker) in waiting {
            waker.wake();
        }
    }

    pub fn depth(&self) -> usize {
        self.depth.load(Ordering::Relaxed)
    }

    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Items refused or displaced since the start.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    fn publish(&self, state: &State<T>) {
        self.depth.store(state.items.len(), Ordering::Relaxed);
        self.bytes.store(state.bytes, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // A panic while the lock is held can only come from an allocation failure; the state stays whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> State<T> {
    fn fits(&self, limits: Limits, bytes: usize) -> bool {
        self.items.len() < limits.items && self.bytes.saturating_add(bytes) <= limits.bytes
    }
}

/// A consumer's wait, made by [`Queue::pop`].
#[derive(Debug)]
pub struct Pop<'a, T> {
    queue: &'a Queue<T>,
    /// Our place among the waiting, once we had to sleep.
    waiter: Option<u64>,
}

impl<T> Future for Pop<'_, T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let queue = self.queue;
        let mut state = queue.lock();
        if let Some((item, bytes)) = state.items.pop_front() {
            state.bytes -= bytes;
            queue.publish(&state);
            if let Some(id) = self.waiter.take() {
                state.waiting.retain(|(other, _)| *other != id);
            }
            return Poll::Ready(Some(item));
        }
        if state.closed {
            self.waiter = None;
            return Poll::Ready(None);
        }
        let asleep = self.waiter.and_then(|id| state.waiting.iter_mut().find(|(other, _)| *other == id));
        if let Some((_, waker)) = asleep {
            waker.clone_from(cx.waker());
        } else {
            let id = state.next_waiter;
            state.next_waiter += 1;
            state.waiting.push_back((id, cx.waker().clone()));
            drop(state);
            self.waiter = Some(id);
        }
        Poll::Pending
    }
}

impl<T> Drop for Pop<'_, T> {
    fn drop(&mut self) {
        let Some(id) = self.waiter else { return };
        let pass_on = {
            let mut state = self.queue.lock();
            let before = state.waiting.len();
            state.waiting.retain(|(other, _)| *other != id);
            // Woken but never polled again: the item that woke us belongs to the next in line.
            if state.waiting.len() == before && !state.items.is_empty() {
                state.waiting.pop_front()
            } else {
                None
            }
        };
        if let Some((_, waker)) = pass_on {
            waker.wake();
        }
    }
}
