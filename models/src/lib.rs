//! The primitives of kernel, gateway, edge, registry and overlay, compiled against loom: not a copy but the production files themselves.
//!
//! The models are in `tests/`; loom runs each through every interleaving up to its bound, and [`explore`] walks
//! through every state that a sequence of steps can lead to.

#[path = "../../crates/svc-edge/src/board.rs"]
pub mod board;
#[path = "../../crates/svc-registry/src/claim.rs"]
pub mod claim;
#[path = "../../crates/oap/src/gossip/egress.rs"]
pub mod egress;
#[path = "../../crates/oap/src/gossip/fair.rs"]
pub mod fair;
#[path = "../../crates/svc-gateway/src/fair_queue.rs"]
pub mod fair_queue;
#[path = "../../crates/ron-kernel/src/sync/permit.rs"]
pub mod permit;
#[path = "../../crates/ron-kernel/src/sync/queue.rs"]
pub mod queue;
#[path = "../../crates/svc-gateway/src/waiters.rs"]
pub mod waiters;

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::hash::Hash;

/// Frames as they are: they are only carried.
mod frame {
    pub(crate) use oap::Encoded;
}

/// What these files take from the standard library, taken from loom.
mod platform {
    pub(super) use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
    pub(super) use loom::sync::{Mutex, MutexGuard};
}

/// Visits every state that can be reached, breadth first, and returns how many there are.
///
/// `step` applies an action and returns the next state, `None` if the action is not possible there, or what is wrong,
/// in which case the shortest way to it is shown. States of the same `print` are the same.
///
/// # Panics
/// If something is wrong, or there are more than `states_max` states.
pub fn explore<S: Clone, A: Copy + Debug, P: Hash + Eq + Clone>(
    first: S,
    actions: &[A],
    states_max: usize,
    print: impl Fn(&S) -> P,
    step: impl Fn(&S, A) -> Result<Option<S>, String>,
) -> usize {
    // For each print, how it was come by.
    let mut seen: HashMap<P, Option<(P, A)>> = HashMap::from([(print(&first), None)]);
    let mut ahead = VecDeque::from([first]);
    while let Some(state) = ahead.pop_front() {
        let here = print(&state);
        for action in actions {
            match step(&state, *action) {
                Ok(None) => {}
                Ok(Some(next)) => {
                    let there = print(&next);
                    if !seen.contains_key(&there) {
                        assert!(seen.len() < states_max, "more than {states_max} states");
                        seen.insert(there, Some((here.clone(), *action)));
                        ahead.push_back(next);
                    }
                }
                Err(wrong) => {
                    let mut way = vec![*action];
                    let mut at = &here;
                    while let Some((before, action)) = &seen[at] {
                        way.push(*action);
                        at = before;
                    }
                    way.reverse();
                    panic!("{wrong}, after {way:?}");
                }
            }
        }
    }
    seen.len()
}
