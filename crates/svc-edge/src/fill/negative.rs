//! That an origin has nothing somewhere, remembered for a while.

use ron_kernel::inventory::{Inventory, LockSpec};
use ron_kernel::lock::Lock;
use std::collections::HashMap;
use std::time::{Duration, Instant};

pub(crate) static NEGATIVE: LockSpec =
    LockSpec { service: "edge", name: "negative", rank: 26, guards: "where origins have nothing" };

/// Places that are remembered.
const PLACES_MAX: usize = 10_000;

#[derive(Debug)]
pub(crate) struct Negative {
    places: Lock<HashMap<String, (Instant, bool)>>,
}

impl Negative {
    pub(super) fn new(inventory: &Inventory) -> Negative {
        Negative { places: Lock::new(inventory, &NEGATIVE, HashMap::new()) }
    }

    /// Whether there is nothing, and if so, whether it is gone for good.
    pub(crate) fn at(&self, key: &str, now: Instant) -> Option<bool> {
        self.places.lock().get(key).filter(|(until, _)| *until > now).map(|(_, gone)| *gone)
    }

    pub(crate) fn note(&self, key: &str, gone: bool, now: Instant, good_for: Duration) {
        let Some(until) = now.checked_add(good_for) else { return };
        let mut places = self.places.lock();
        if places.len() >= PLACES_MAX {
            places.retain(|_, (until, _)| *until > now);
        }
        // Forgetting costs a question, remembering too much costs memory.
        if places.len() >= PLACES_MAX {
            places.clear();
        }
        places.insert(key.to_owned(), (until, gone));
    }

    pub(crate) fn forget_all(&self) {
        self.places.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ron_kernel::metrics::Metrics;

    #[test]
    fn nothing_is_remembered_for_its_time_and_never_too_much() {
        let negative = Negative::new(&Inventory::new(Metrics::default()));
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        negative.note("a", true, now, second);
        assert_eq!((negative.at("a", now), negative.at("b", now)), (Some(true), None));
        assert_eq!(negative.at("a", now + second), None);
        for number in 0..3 * PLACES_MAX {
            negative.note(&number.to_string(), false, now, second);
            assert!(negative.places.lock().len() <= PLACES_MAX);
        }
        negative.forget_all();
        assert_eq!(negative.at("1", now), None);
    }
}
