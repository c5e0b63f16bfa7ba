//! Lanes, turns and bounds of the queues before and behind the engine.

use bytes::Bytes;
use oap::Frame;
use oap::frame::{APP_GOSSIP, FRAME_MAX, HEADER};
use oap::gossip::fair::FairLanes;
use oap::gossip::{Ceiling, Egress, EgressLimits, Incoming, Ingress, Lane, PeerId, Refused, WhenFull};
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
enum Step {
    Push { lane: Lane, party: u64, flow: u64, cost: usize },
    Pop,
    Oldest(Lane),
    NewestOfLargest(usize),
    Newest(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let lane = || prop::sample::select(Lane::ALL.to_vec());
    let step = prop_oneof![
        6 => (lane(), 0u64..4, 0u64..3, 1usize..60_000)
            .prop_map(|(lane, party, flow, cost)| Step::Push { lane, party, flow, cost }),
        4 => Just(Step::Pop),
        1 => lane().prop_map(Step::Oldest),
        1 => (0usize..4).prop_map(Step::NewestOfLargest),
        1 => (0u64..4).prop_map(Step::Newest),
    ];
    prop::collection::vec(step, 0..200)
}

/// An item as a plain list keeps it: lane, party, flow, cost and number.
type Plain = (Lane, u64, u64, usize, u64);

/// What may come out, by the definition alone; of several the queue chooses by turns.
fn allowed(list: &[Plain], step: &Step) -> Vec<u64> {
    let first_of_flow = |item: &&Plain| {
        !list.iter().any(|other| (other.0, other.1, other.2) == (item.0, item.1, item.2) && other.4 < item.4)
    };
    let numbers = |items: Vec<&Plain>| items.into_iter().map(|item| item.4).collect::<Vec<_>>();
    match step {
        Step::Push { .. } => vec![],
        Step::Pop => {
            let lane = list.iter().map(|item| item.0).min();
            numbers(list.iter().filter(|item| Some(item.0) == lane).filter(first_of_flow).collect())
        }
        Step::Oldest(than) => {
            let lane = list.iter().map(|item| item.0).max().filter(|lane| lane >= than);
            list.iter().filter(|item| Some(item.0) == lane).map(|item| item.4).min().into_iter().collect()
        }
        Step::NewestOfLargest(than) => {
            let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
            list.iter().for_each(|item| *counts.entry(item.1).or_default() += 1);
            let most = counts.values().copied().max().filter(|most| most > than);
            let largest = counts.iter().filter(|(_, count)| Some(**count) == most).map(|(party, _)| *party);
            largest.flat_map(|party| allowed(list, &Step::Newest(party))).collect()
        }
        Step::Newest(party) => {
            let of: Vec<&Plain> = list.iter().filter(|item| item.1 == *party).collect();
            let lane = of.iter().map(|item| item.0).max();
            of.iter().filter(|item| Some(item.0) == lane).map(|item| item.4).max().into_iter().collect()
        }
    }
}

proptest! {
    #[test]
    fn the_lanes_give_what_a_plain_list_allows(steps in steps()) {
        let mut queue = FairLanes::default();
        let mut list: Vec<Plain> = Vec::new();
        for (number, step) in steps.into_iter().enumerate() {
            let may = allowed(&list, &step);
            let taken = match step {
                Step::Push { lane, party, flow, cost } => {
                    queue.push(lane, party, flow, cost, number as u64);
                    list.push((lane, party, flow, cost, number as u64));
                    None
                }
                Step::Pop => queue.pop(),
                Step::Oldest(than) => queue.pop_oldest(than),
                Step::NewestOfLargest(than) => queue.pop_newest_of_largest(than),
                Step::Newest(party) => queue.pop_newest(party),
            };
            prop_assert_eq!(taken.is_some(), !may.is_empty());
            if let Some(taken) = taken {
                prop_assert!(may.contains(&taken.item), "{} of {:?}", taken.item, may);
                let at = list.iter().position(|item| item.4 == taken.item).expect("it was there");
                let (lane, party, _, cost, _) = list.remove(at);
                prop_assert_eq!((taken.lane, taken.party, taken.cost), (lane, party, cost));
            }
            prop_assert_eq!(queue.len(), list.len());
            prop_assert_eq!(queue.bytes(), list.iter().map(|item| item.3).sum::<usize>());
            for party in 0..4 {
                prop_assert_eq!(queue.of(party), list.iter().filter(|item| item.1 == party).count());
            }
        }
    }

    /// While all have something waiting, nobody is ahead of anybody by more than a quantum and one item,
    /// neither between parties nor between the flows of one.
    #[test]
    fn whoever_waits_gets_as_many_bytes_as_the_next(
        costs in prop::collection::vec(prop::collection::vec(1usize..100_000, 60), 4),
        flows in 1u64..3,
        pops in 1usize..60,
    ) {
        let mut queue = FairLanes::default();
        for (party, costs) in costs.iter().enumerate() {
            for (number, cost) in costs.iter().enumerate() {
                queue.push(Lane::Normal, party as u64, number as u64 % flows, *cost, number as u64 % flows);
            }
        }
        let mut got: BTreeMap<(u64, u64), usize> = BTreeMap::new();
        for _ in 0..pops {
            let taken = queue.pop().expect("there are more");
            *got.entry((taken.party, taken.item)).or_default() += taken.cost;
        }
        let spread = |sums: Vec<usize>| sums.iter().max().unwrap_or(&0) - sums.iter().min().unwrap_or(&0);
        let of = |party: u64| (0..flows).map(|flow| got.get(&(party, flow)).copied().unwrap_or(0)).collect::<Vec<_>>();
        let bound = 2 * ((16 << 10) + 100_000);
        prop_assert!(spread((0..4).map(|party| of(party).iter().sum()).collect()) <= bound);
        for party in 0..4 {
            prop_assert!(spread(of(party)) <= bound);
        }
    }

    /// The bounds of a queue and of all together hold whatever is done, and in the end all is given back.
    #[test]
    fn no_queue_to_a_peer_passes_its_bounds(
        steps in prop::collection::vec((0u8..4, 0u8..3, 0usize..3000, any::<bool>()), 0..200),
        drop_oldest: bool,
    ) {
        let when_full = if drop_oldest { WhenFull::DropOldest } else { WhenFull::RejectNew };
        let ceiling = Ceiling::new(12_000);
        let mut queues: Vec<Egress> = (0..2)
            .map(|_| Egress::new(EgressLimits { frames: 16, bytes: 9_000, when_full }, ceiling.clone()))
            .collect();
        let mut writing = [Vec::new(), Vec::new()];
        for (what, lane, size, which) in steps {
            let at = usize::from(which);
            let before = (queues[at].frames(), queues[at].bytes(), ceiling.used());
            match what {
                0 | 1 => {
                    let frame = frame(size);
                    let cost = frame.len();
                    let lane = Lane::ALL[usize::from(lane)];
                    match queues[at].push(lane, 1, frame) {
                        Ok(dropped) => {
                            let gone: usize = dropped.iter().map(|taken| taken.cost).sum();
                            prop_assert!(dropped.is_empty() || drop_oldest);
                            prop_assert!(dropped.iter().all(|taken| taken.lane >= lane));
                            prop_assert_eq!(queues[at].bytes(), before.1 + cost - gone);
                            prop_assert_eq!(queues[at].frames(), before.0 + 1 - dropped.len());
                        }
                        Err(why) if (queues[at].frames(), queues[at].bytes()) != (before.0, before.1) => {
                            prop_assert!(false, "{:?}, and others had to go for it", why);
                        }
                        Err(Refused::Ceiling) => prop_assert!(ceiling.used() + cost > 12_000),
                        Err(Refused::Full) => {
                            let held = queues[at].bytes() + cost > 7_875 || queues[at].frames() >= 14;
                            prop_assert!(held, "refused without need");
                        }
                    }
                }
                2 => queues[at].take(4, 2000, &mut writing[at]),
                _ => {
                    queues[at].written(&writing[at]);
                    writing[at].clear();
                }
            }
            prop_assert!(queues.iter().all(|queue| queue.frames() <= 16 && queue.bytes() <= 9_000));
            prop_assert_eq!(ceiling.used(), queues.iter().map(Egress::bytes).sum::<usize>());
        }
        queues.clear();
        prop_assert_eq!(ceiling.used(), 0);
    }
}

fn frame(size: usize) -> oap::Encoded {
    Frame::event(APP_GOSSIP, 0, vec![0; size]).encode(FRAME_MAX).expect("a frame")
}

#[test]
fn control_frames_find_room_where_messages_do_not() {
    let limits = EgressLimits { frames: 16, bytes: 1 << 20, when_full: WhenFull::RejectNew };
    let mut queue = Egress::new(limits, Ceiling::new(1 << 30));
    let pushed = (0..20).take_while(|_| queue.push(Lane::Bulk, 1, frame(10)).is_ok()).count();
    assert_eq!((pushed, queue.is_full()), (14, true));
    assert!(queue.push(Lane::Control, 1, frame(10)).is_ok());
    assert!(queue.push(Lane::Control, 1, frame(11)).is_ok());
    assert_eq!(queue.push(Lane::Control, 1, frame(10)), Err(Refused::Full));
    // What a writer has taken still counts until it is written.
    let mut batch = Vec::new();
    queue.take(1, usize::MAX, &mut batch);
    assert_eq!(batch[0].len(), HEADER + 10, "control goes first");
    assert_eq!(queue.push(Lane::Control, 1, frame(10)), Err(Refused::Full));
    queue.written(&batch);
    assert!(queue.push(Lane::Control, 1, frame(10)).is_ok());
}

fn incoming(peer: u64, kind: u8, size: usize) -> Incoming {
    let payload = Bytes::from([vec![kind], vec![0; size]].concat());
    Incoming { peer: PeerId(peer), corr: peer, payload }
}

#[test]
fn who_floods_makes_room_for_who_does_not() {
    let mut ingress = Ingress::new(8, 1 << 20, Ceiling::new(1 << 30));
    for _ in 0..8 {
        assert!(ingress.push(incoming(1, 1, 50)).expect("room").is_empty());
    }
    assert_eq!(ingress.push(incoming(1, 1, 50)), Err(Refused::Full));
    let displaced = ingress.push(incoming(2, 1, 50)).expect("room is made");
    assert_eq!(displaced.iter().map(|it| it.frame.peer).collect::<Vec<_>>(), [PeerId(1)]);
    for _ in 0..3 {
        ingress.push(incoming(2, 1, 50)).expect("room is made");
    }
    assert_eq!(ingress.push(incoming(2, 1, 50)), Err(Refused::Full), "both have their half");
    let order: Vec<u64> = std::iter::from_fn(|| ingress.pop()).map(|(_, it)| it.peer.0).collect();
    assert_eq!(order.iter().filter(|peer| **peer == 1).count(), 4);
    ingress.push(incoming(3, 3, 50)).expect("room");
    ingress.push(incoming(4, 7, 50)).expect("room");
    assert_eq!(ingress.pop().map(|(lane, it)| (lane, it.peer)), Some((Lane::Control, PeerId(4))));
    assert_eq!((ingress.forget(PeerId(3)), ingress.len()), (1, 0));
}

#[test]
fn a_large_frame_does_not_push_out_more_than_it_may() {
    let ceiling = Ceiling::new(1 << 30);
    let mut ingress = Ingress::new(100, 1000, ceiling.clone());
    for peer in 1..=3 {
        for _ in 0..2 {
            ingress.push(incoming(peer, 1, 100)).expect("room");
        }
    }
    // It would need the places of all the others.
    let answered = ingress.push(incoming(4, 1, 900));
    match answered {
        Err(Refused::Full) => {}
        other => assert!(other.expect("answered").iter().any(|it| it.frame.peer == PeerId(4))),
    }
    assert!(ingress.len() >= 3);
    drop(ingress);
    assert_eq!(ceiling.used(), 0);
}
