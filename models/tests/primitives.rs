//! Producer, bounded queue, consumer, shutdown; and permits with a waiter.

use loom::future::block_on;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use models::permit::Permits;
use models::queue::{Limits, Overflow, Queue};
use std::future::{Future as _, poll_fn};
use std::sync::Arc;
use std::task::Poll;

/// Every interleaving with at most this many preemptions.
fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// An item that counts its drops, so that one dropped twice or never is seen.
struct Item(Arc<AtomicUsize>);

impl Drop for Item {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn one_producer_a_consumer_and_shutdown_lose_nothing_and_end() {
    check(|| {
        let drops = Arc::new(AtomicUsize::new(0));
        let queue = Queue::new(Limits::items(2), Overflow::RejectNew);
        let (sending, counted) = (queue.clone(), drops.clone());
        let producer = thread::spawn(move || {
            for _ in 0..3 {
                // Refused items come back to the producer and are dropped by it.
                drop(sending.push(Item(counted.clone()), 0));
            }
            sending.close();
        });
        let mut taken = 0;
        while let Some(item) = block_on(queue.pop()) {
            taken += 1;
            drop(item);
        }
        producer.join().unwrap();
        assert!(taken <= 3);
        assert_eq!(drops.load(Ordering::SeqCst), 3, "each item was dropped exactly once");
        assert_eq!(taken + queue.dropped() as usize, 3);
    });
}

#[test]
fn two_producers_never_pass_the_capacity() {
    check(|| {
        let queue = Queue::new(Limits::items(2), Overflow::RejectNew);
        let producers = [0, 1].map(|_| {
            let sending = queue.clone();
            thread::spawn(move || {
                let pushed = (0..2).filter(|n| sending.push(*n, 0).is_ok()).count();
                assert!(sending.depth() <= 2);
                pushed
            })
        });
        let pushed: usize = producers.into_iter().map(|producer| producer.join().unwrap()).sum();
        assert_eq!(pushed, 2, "exactly the capacity was taken, nobody consumed");
        queue.close();
        let drained = std::iter::from_fn(|| block_on(queue.pop())).count();
        assert_eq!(drained, 2, "at most the capacity is drained after shutdown");
    });
}

#[test]
fn two_producers_and_a_consumer_account_for_every_item() {
    check(|| {
        let queue = Queue::new(Limits::items(2), Overflow::DropOldest);
        let producers = [0, 1].map(|name| {
            let sending = queue.clone();
            thread::spawn(move || sending.push(name, 0).map_or(0, |displaced| displaced.len()))
        });
        let first = block_on(queue.pop());
        assert!(first.is_some(), "a push wakes the one who waits");
        let displaced: usize = producers.into_iter().map(|producer| producer.join().unwrap()).sum();
        queue.close();
        let rest = std::iter::from_fn(|| block_on(queue.pop())).count();
        assert_eq!(1 + rest + displaced, 2);
    });
}

#[test]
fn a_close_is_seen_by_everyone_who_waits() {
    check(|| {
        let queue: Arc<Queue<u8>> = Queue::new(Limits::items(2), Overflow::RejectNew);
        let waiters = [0, 1].map(|_| {
            let waiting = queue.clone();
            thread::spawn(move || block_on(waiting.pop()))
        });
        queue.close();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), None);
        }
        assert!(queue.push(1, 0).is_err(), "nothing is taken after the close");
    });
}

#[test]
fn a_wait_that_is_given_up_passes_its_wake_on() {
    check(|| {
        let queue = Queue::new(Limits::items(2), Overflow::RejectNew);
        let (giving_up, sending) = (queue.clone(), queue.clone());
        let fickle = thread::spawn(move || {
            // Waits once, then drops the wait whether or not it was woken.
            let mut wait = Box::pin(giving_up.pop());
            block_on(poll_fn(|cx| {
                let got = match wait.as_mut().poll(cx) {
                    Poll::Ready(item) => item,
                    Poll::Pending => None,
                };
                Poll::Ready(got)
            }))
        });
        let producer = thread::spawn(move || sending.push(7, 0).is_ok());
        let steady = {
            let waiting = queue.clone();
            thread::spawn(move || block_on(waiting.pop()))
        };
        assert!(producer.join().unwrap());
        let fickle = fickle.join().unwrap();
        queue.close();
        let steady = steady.join().unwrap();
        assert_eq!(
            fickle.is_some() as u8 + steady.is_some() as u8,
            1,
            "the item reached exactly one of them"
        );
    });
}

#[test]
fn permits_are_never_more_than_the_limit_and_a_waiter_gets_one() {
    check(|| {
        let pool = Permits::new(1);
        let other = pool.clone();
        let holder = thread::spawn(move || {
            let permit = other.try_take();
            assert!(other.used() <= 1);
            drop(permit);
        });
        let permit = block_on(poll_fn(|cx| pool.poll_take(cx)));
        assert_eq!(pool.used(), 1);
        drop(permit);
        holder.join().unwrap();
        assert_eq!(pool.used(), 0);
    });
}
