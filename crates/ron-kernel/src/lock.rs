//! Named, ranked locks.
//!
//! In debug builds a lock taken out of rank order panics where it happens, and so does a task that is still
//! holding one when its poll ends (the supervisor asks after every poll).

use crate::inventory::{Inventory, LockSpec};
use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

thread_local! {
    /// The locks this thread holds, in the order taken. Debug builds only.
    static HELD: RefCell<Vec<&'static LockSpec>> = const { RefCell::new(Vec::new()) };
}

/// A mutex that knows its place.
#[derive(Debug)]
pub struct Lock<T> {
    spec: &'static LockSpec,
    value: Mutex<T>,
}

impl<T> Lock<T> {
    pub fn new(inventory: &Inventory, spec: &'static LockSpec, value: T) -> Lock<T> {
        inventory.register_lock(spec);
        Lock { spec, value: Mutex::new(value) }
    }

    /// Waits for the lock. The guard is not `Send`, so it cannot live in a task across an `.await`.
    pub fn lock(&self) -> LockGuard<'_, T> {
        if cfg!(debug_assertions) {
            HELD.with_borrow_mut(|held| {
                if let Some(last) = held.iter().find(|other| other.rank >= self.spec.rank) {
                    panic!(
                        "lock order: {}.{} (rank {}) taken while {}.{} (rank {}) is held",
                        self.spec.service, self.spec.name, self.spec.rank, last.service, last.name, last.rank
                    );
                }
                held.push(self.spec);
            });
        }
        let guard = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        LockGuard { spec: self.spec, guard }
    }
}

/// Access to what a [`Lock`] guards.
#[derive(Debug)]
pub struct LockGuard<'a, T> {
    spec: &'static LockSpec,
    guard: MutexGuard<'a, T>,
}

impl<T> Deref for LockGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for LockGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T> Drop for LockGuard<'_, T> {
    fn drop(&mut self) {
        if cfg!(debug_assertions) {
            HELD.with_borrow_mut(|held| held.retain(|other| !std::ptr::eq(*other, self.spec)));
        }
    }
}

/// Panics, in debug builds, if this thread holds a ranked lock: a guard outlived the poll that took it.
pub(crate) fn assert_none_held(task: &str) {
    if cfg!(debug_assertions) {
        HELD.with_borrow_mut(|held| {
            let leaked = std::mem::take(held);
            assert!(leaked.is_empty(), "task {task} kept a lock across a poll: {}", leaked[0].name);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    static OUTER: LockSpec = LockSpec { service: "t", name: "outer", rank: 1, guards: "" };
    static INNER: LockSpec = LockSpec { service: "t", name: "inner", rank: 2, guards: "" };

    #[test]
    fn locks_nest_in_rank_order_only() {
        let inventory = Inventory::new(Metrics::default());
        let (outer, inner) = (Lock::new(&inventory, &OUTER, 1), Lock::new(&inventory, &INNER, 2));
        {
            let first = outer.lock();
            assert_eq!(*first + *inner.lock(), 3);
        }
        let wrong = catch_unwind(AssertUnwindSafe(|| {
            let _second = inner.lock();
            let _first = outer.lock();
        }));
        let text = *wrong.unwrap_err().downcast::<String>().unwrap();
        assert!(text.contains("t.outer (rank 1) taken while t.inner (rank 2)"), "{text}");
        assert_eq!(*outer.lock(), 1, "the failed attempt left nothing behind");
        assert_eq!(inventory.to_json()["locks"][1]["name"], "inner");
    }

    #[test]
    fn a_guard_that_outlives_its_poll_is_found() {
        let inventory = Inventory::new(Metrics::default());
        let lock = Lock::new(&inventory, &OUTER, ());
        let _guard = lock.lock();
        assert!(catch_unwind(|| assert_none_held("worker")).is_err());
    }
}
