//! The queue to a peer: the engine and others fill it, one writer empties it, and the session may end at any time.
#![expect(clippy::unwrap_used, reason = "a model that cannot go on says where")]

use loom::sync::Notify;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use models::egress::{Ceiling, Egress, EgressLimits, Refused, SharedEgress, WhenFull};
use models::explore;
use models::fair::Lane;
use oap::{Encoded, Frame};
use std::collections::VecDeque;
use std::sync::Arc;

const FRAMES: usize = 2;

/// Every interleaving with at most this many preemptions.
fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

fn frame() -> Encoded {
    Frame::event(0x0100, 0, &b""[..]).encode(100).unwrap()
}

/// A queue of two frames, its writer's bell, and whether there is nothing more to come.
#[derive(Clone)]
struct Lanes {
    egress: SharedEgress,
    bell: Arc<Notify>,
    over: Arc<AtomicBool>,
}

impl Lanes {
    fn new(when_full: WhenFull, ceiling: &Arc<Ceiling>) -> Lanes {
        let limits = EgressLimits { frames: FRAMES, bytes: 1000, when_full };
        let egress = SharedEgress::new(Egress::new(limits, ceiling.clone()));
        Lanes { egress, bell: Arc::new(Notify::new()), over: Arc::new(AtomicBool::new(false)) }
    }

    /// Queues frames as the engine does. Says how many found a place, were refused, and were dropped for others.
    fn produce(&self, count: usize) -> (usize, usize, usize) {
        let (mut queued, mut refused, mut dropped) = (0, 0, 0);
        for _ in 0..count {
            match self.egress.push(Lane::Normal, 0, frame()) {
                Ok(found) => {
                    queued += 1;
                    dropped += found.dropped.len();
                    if found.wake {
                        self.bell.notify();
                    }
                }
                Err(Refused::Full) => refused += 1,
                Err(Refused::Ceiling) => panic!("the ceiling is far away"),
            }
        }
        (queued, refused, dropped)
    }

    /// Writes what comes until there is nothing more. Says how many frames it wrote.
    fn write(&self) -> usize {
        let (mut written, mut batch) = (0, Vec::new());
        loop {
            let over = self.over.load(Ordering::SeqCst);
            self.egress.lock().take(1, usize::MAX, &mut batch);
            if batch.is_empty() {
                if over {
                    return written;
                }
                self.bell.wait();
                continue;
            }
            assert!(self.egress.depth() <= FRAMES, "a frame keeps its place until it is written");
            written += batch.len();
            self.egress.lock().written(&batch);
            batch.clear();
        }
    }

    fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.bell.notify();
    }
}

fn two_producers(when_full: WhenFull) {
    check(move || {
        let ceiling = Ceiling::new(1 << 20);
        let lanes = Lanes::new(when_full, &ceiling);
        let producers = [2, 1].map(|count| {
            let lanes = lanes.clone();
            thread::spawn(move || lanes.produce(count))
        });
        let writing = lanes.clone();
        let writer = thread::spawn(move || writing.write());
        let [one, other] = producers.map(|thread| thread.join().unwrap());
        lanes.end();
        let written = writer.join().unwrap();
        let (queued, refused, dropped) = (one.0 + other.0, one.1 + other.1, one.2 + other.2);
        assert_eq!(queued + refused, 3);
        assert_eq!(queued, written + dropped, "each frame that found a place was written or dropped");
        assert_eq!((lanes.egress.depth(), ceiling.used()), (0, 0), "every place was given back");
        match when_full {
            WhenFull::RejectNew => assert_eq!(dropped, 0),
            // What the writer holds cannot be dropped, but it holds one at a time.
            WhenFull::DropOldest => assert_eq!(refused, 0),
        }
    });
}

#[test]
fn two_producers_and_a_writer_lose_no_frame_and_no_wake_up() {
    two_producers(WhenFull::RejectNew);
}

#[test]
fn frames_that_make_room_are_dropped_once_and_counted() {
    two_producers(WhenFull::DropOldest);
}

#[test]
fn a_session_that_ends_in_the_middle_leaves_nothing_behind() {
    check(|| {
        let ceiling = Ceiling::new(1 << 20);
        let lanes = Lanes::new(WhenFull::RejectNew, &ceiling);
        let writing = lanes.clone();
        let writer = thread::spawn(move || writing.write());
        // The engine queues, and forgets the peer.
        let (queued, refused, _) = lanes.produce(3);
        let cleared: u64 = lanes.egress.lock().clear().iter().map(|(_, count)| count).sum();
        lanes.end();
        drop(lanes);
        let written = writer.join().unwrap();
        assert_eq!((queued + refused, queued), (3, written + cleared as usize));
        assert_eq!(ceiling.used(), 0, "every place was given back");
    });
}

/// The queue as everybody else compiles it, since its states are walked through outside of loom.
mod plain {
    pub(super) use oap::gossip::{Ceiling, Egress, EgressLimits, Lane, WhenFull};
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Push(plain::Lane, usize),
    Take,
    Written,
}

/// How a state was come by, and the sizes that must be in each lane and with the writer.
#[derive(Clone, Default)]
struct State {
    steps: Vec<Action>,
    lanes: [VecDeque<usize>; 3],
    held: Vec<usize>,
}

struct Model {
    limits: plain::EgressLimits,
    ceiling: Arc<plain::Ceiling>,
}

impl Model {
    /// The queue of a state, and the frames that its writer holds.
    fn again(&self, steps: &[Action]) -> (plain::Egress, Vec<Encoded>) {
        let (mut egress, mut held) = (plain::Egress::new(self.limits, self.ceiling.clone()), Vec::new());
        for step in steps {
            match step {
                Action::Push(lane, size) => drop(egress.push(*lane, 0, of_size(*size))),
                Action::Take => egress.take(1, usize::MAX, &mut held),
                Action::Written => {
                    egress.written(&held);
                    held.clear();
                }
            }
        }
        (egress, held)
    }

    fn step(&self, state: &State, action: Action) -> Result<Option<State>, String> {
        let mut next = state.clone();
        let (mut egress, mut held) = self.again(&state.steps);
        next.steps.push(action);
        match action {
            Action::Push(lane, size) => match egress.push(lane, 0, of_size(size)) {
                Ok(dropped) => {
                    for gone in dropped {
                        let lowest = next.lanes.iter_mut().rev().find(|lane| !lane.is_empty());
                        let oldest = lowest.and_then(VecDeque::pop_front);
                        if oldest != Some(gone.cost) || gone.lane < lane {
                            return Err(format!("{gone:?} made room for {lane:?}"));
                        }
                    }
                    next.lanes[lane as usize].push_back(size);
                }
                Err(_) if egress.frames() + 1 > self.limits.frames => return Ok(None),
                Err(_) if egress.bytes() + size > self.limits.bytes * 7 / 8 => return Ok(None),
                Err(why) => return Err(format!("{why:?} though there is room")),
            },
            Action::Take => {
                let Some(first) = next.lanes.iter_mut().find(|lane| !lane.is_empty()) else {
                    return Ok(None);
                };
                let size = first.pop_front().unwrap_or(0);
                next.held.push(size);
                egress.take(1, usize::MAX, &mut held);
                if held.last().map(Encoded::len) != Some(size) {
                    return Err(format!("{held:?} was taken, not {size}"));
                }
            }
            Action::Written if held.is_empty() => return Ok(None),
            Action::Written => {
                egress.written(&held);
                held.clear();
                next.held.clear();
            }
        }
        let inside: usize = next.lanes.iter().flatten().chain(&next.held).sum();
        let frames = next.lanes.iter().map(VecDeque::len).sum::<usize>() + next.held.len();
        let within = frames <= self.limits.frames && inside <= self.limits.bytes;
        if !within || (egress.frames(), egress.bytes(), self.ceiling.used()) != (frames, inside, inside) {
            return Err(format!("{egress:?} has {} bytes taken", self.ceiling.used()));
        }
        // A writer that goes on empties it.
        for _ in 0..=frames {
            egress.written(&held);
            held.clear();
            egress.take(1, usize::MAX, &mut held);
        }
        if egress.frames() > 0 || self.ceiling.used() > 0 {
            return Err(format!("{egress:?} does not drain"));
        }
        Ok(Some(next))
    }
}

/// A frame that is so large on the wire.
fn of_size(size: usize) -> Encoded {
    Frame::event(0x0100, 0, vec![0; size - 38]).encode(1000).unwrap()
}

#[test]
fn lanes_keep_to_their_bounds_and_drain_from_every_state() {
    for when_full in [plain::WhenFull::RejectNew, plain::WhenFull::DropOldest] {
        let limits = plain::EgressLimits { frames: 6, bytes: 640, when_full };
        let model = Model { limits, ceiling: plain::Ceiling::new(usize::MAX) };
        let mut actions = vec![Action::Take, Action::Written];
        for lane in plain::Lane::ALL {
            actions.extend([50, 170].map(|size| Action::Push(lane, size)));
        }
        let print = |state: &State| (state.lanes.clone(), state.held.clone());
        let states =
            explore(State::default(), &actions, 200_000, print, |state, action| model.step(state, action));
        assert!(states > 1000, "{states}");
    }
}
