//! Single-threaded behaviour; every interleaving is in the `models` crate.

use super::*;
use proptest::prelude::*;

#[test]
fn a_full_queue_hands_the_newcomer_back() {
    let queue = Queue::new(Limits::items(2), Overflow::RejectNew);
    queue.push(1, 0).unwrap();
    queue.push(2, 0).unwrap();
    assert_eq!(queue.push(3, 0), Err(PushError::Busy(Busy(3))));
    assert_eq!((queue.depth(), queue.dropped()), (2, 1));
    assert_eq!(queue.try_pop(), Some(1));
}

#[test]
fn bytes_bound_a_queue_that_has_room_for_items() {
    let queue = Queue::new(Limits { items: 10, bytes: 100 }, Overflow::RejectNew);
    queue.push("a", 60).unwrap();
    assert!(queue.push("b", 60).is_err());
    queue.push("c", 40).unwrap();
    assert_eq!(queue.bytes(), 100);
}

#[test]
fn drop_oldest_returns_every_item_it_displaced() {
    let queue = Queue::new(Limits { items: 10, bytes: 100 }, Overflow::DropOldest);
    for item in 0..4 {
        queue.push(item, 25).unwrap();
    }
    assert_eq!(queue.push(9, 60), Ok(vec![0, 1, 2]));
    assert_eq!(queue.push(10, 101), Err(PushError::Busy(Busy(10))), "larger than the whole queue");
    assert_eq!((queue.try_pop(), queue.try_pop(), queue.dropped()), (Some(3), Some(9), 4));
}

#[test]
fn collapse_keeps_the_latest() {
    let queue = Queue::new(Limits::items(2), Overflow::Collapse);
    for item in 0..5 {
        queue.push(item, 0).unwrap();
    }
    assert_eq!((queue.try_pop(), queue.try_pop(), queue.try_pop()), (Some(0), Some(4), None));
}

#[tokio::test]
async fn a_closed_queue_gives_what_it_holds_and_then_ends() {
    let queue = Queue::new(Limits::items(2), Overflow::RejectNew);
    queue.push(7, 0).unwrap();
    queue.close();
    assert_eq!(queue.push(8, 0), Err(PushError::Closed(8)));
    assert_eq!(queue.pop().await, Some(7));
    assert_eq!(queue.pop().await, None);
}

proptest! {
    #[test]
    fn no_sequence_of_pushes_and_pops_passes_a_bound_or_loses_an_item(
        steps in proptest::collection::vec((any::<bool>(), 0usize..40), 1..200),
        overflow in prop_oneof![Just(Overflow::RejectNew), Just(Overflow::DropOldest), Just(Overflow::Collapse)],
    ) {
        let queue = Queue::new(Limits { items: 5, bytes: 100 }, overflow);
        let (mut pushed, mut seen) = (0usize, 0usize);
        for (index, (push, bytes)) in steps.into_iter().enumerate() {
            if push {
                pushed += 1;
                match queue.push(index, bytes) {
                    Ok(displaced) => seen += displaced.len(),
                    Err(_) => seen += 1,
                }
            } else if queue.try_pop().is_some() {
                seen += 1;
            }
            prop_assert!(queue.depth() <= 5 && queue.bytes() <= 100);
        }
        while queue.try_pop().is_some() {
            seen += 1;
        }
        prop_assert_eq!(pushed, seen);
    }
}

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
