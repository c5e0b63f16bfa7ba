//! Which object goes when there is no room: S3-FIFO.
//!
//! Newcomers pass through a small queue; who is asked for again there, or comes back soon after it had to go, gets into
//! the main one. Most objects are asked for once, and leave without having driven out anything of value.

use crate::address::Address;
use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicU8, Ordering};

/// Part of the room that is for newcomers.
const SMALL_PART: u64 = 10;
const FREQUENCY_MAX: u8 = 3;

/// How often an object was asked for of late, up to three.
#[derive(Debug, Default)]
pub struct Frequency(AtomicU8);

impl Clone for Frequency {
    fn clone(&self) -> Frequency {
        Frequency(AtomicU8::new(self.0.load(Ordering::Relaxed)))
    }
}

impl Frequency {
    pub fn note(&self) {
        let now = self.0.load(Ordering::Relaxed);
        if now < FREQUENCY_MAX {
            // Two at once may count as one: it is an estimate.
            self.0.store(now + 1, Ordering::Relaxed);
        }
    }
}

/// A place in a queue. `turn` tells an object that went and came back from its former self.
#[derive(Clone, Copy, Debug)]
struct Place {
    address: Address,
    turn: u64,
    len: u64,
}

/// What is known of an object that may have to go.
#[derive(Debug)]
pub(super) struct Candidate<'a> {
    pub(super) turn: u64,
    pub(super) frequency: &'a Frequency,
    pub(super) pinned: bool,
}

#[derive(Debug, Default)]
pub(super) struct Fifo {
    small: VecDeque<Place>,
    small_bytes: u64,
    main: VecDeque<Place>,
    ghosts: VecDeque<Address>,
    ghost_set: HashSet<Address>,
}

impl Fifo {
    pub(super) fn insert(&mut self, address: Address, turn: u64, len: u64) {
        let place = Place { address, turn, len };
        if self.ghost_set.remove(&address) {
            self.main.push_back(place);
        } else {
            self.small.push_back(place);
            self.small_bytes += len;
        }
    }

    /// How many places there are, also of objects that went otherwise.
    pub(super) fn places(&self) -> usize {
        self.small.len() + self.main.len()
    }

    /// Drops the places of objects that are not there any more.
    pub(super) fn retain(&mut self, is_there: impl Fn(&Address, u64) -> bool) {
        self.small.retain(|place| is_there(&place.address, place.turn));
        self.main.retain(|place| is_there(&place.address, place.turn));
        self.small_bytes = self.small.iter().map(|place| place.len).sum();
    }

    /// The next object to go; `None` if nothing may. `room` is that of all objects together, `known` finds those that
    /// are still there.
    pub(super) fn victim<'a>(
        &mut self,
        room: u64,
        known: impl Fn(&Address) -> Option<Candidate<'a>>,
    ) -> Option<Address> {
        // Each place is looked at once per count of its frequency, then everything is pinned.
        let mut looks = self.places() * (usize::from(FREQUENCY_MAX) + 2);
        // Those of the main queue that may not go, seen one after the other.
        let mut pinned = 0;
        while looks > 0 {
            looks -= 1;
            let crowded = self.small_bytes > room / SMALL_PART || pinned >= self.main.len();
            let from_small = crowded && !self.small.is_empty();
            let place = if from_small { self.small.pop_front() } else { self.main.pop_front() };
            let Some(place) = place else { continue };
            if from_small {
                self.small_bytes -= place.len;
            }
            let Some(candidate) = known(&place.address).filter(|found| found.turn == place.turn) else {
                continue;
            };
            pinned = if candidate.pinned && !from_small { pinned + 1 } else { 0 };
            let frequency = candidate.frequency.0.load(Ordering::Relaxed);
            let stays = if from_small { frequency > 1 } else { frequency > 0 };
            if candidate.pinned || stays {
                let left = if from_small { 0 } else { frequency.saturating_sub(1) };
                candidate.frequency.0.store(left, Ordering::Relaxed);
                self.main.push_back(place);
                continue;
            }
            self.remember(place.address);
            return Some(place.address);
        }
        None
    }

    /// Remembers who went, for as many as there are in the main queue.
    fn remember(&mut self, address: Address) {
        if self.ghost_set.insert(address) {
            self.ghosts.push_back(address);
        }
        while self.ghosts.len() > self.main.len() + self.small.len() + 16 {
            if let Some(oldest) = self.ghosts.pop_front() {
                self.ghost_set.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[derive(Default)]
    struct Toy {
        fifo: Fifo,
        held: HashMap<Address, (u64, Frequency, bool)>,
        turn: u64,
    }

    impl Toy {
        /// Asks for an object of length 1 in a room of 100; true if it was there.
        fn ask(&mut self, number: u32) -> bool {
            let address = Address::from(blake3::hash(&number.to_le_bytes()));
            if let Some((_, frequency, _)) = self.held.get(&address) {
                frequency.note();
                return true;
            }
            while self.held.len() >= 100 {
                let held = &self.held;
                let victim = self.fifo.victim(100, |address| {
                    let (turn, frequency, pinned) = held.get(address)?;
                    Some(Candidate { turn: *turn, frequency, pinned: *pinned })
                });
                self.held.remove(&victim.expect("not everything is pinned"));
            }
            self.turn += 1;
            self.held.insert(address, (self.turn, Frequency::default(), number == 7));
            self.fifo.insert(address, self.turn, 1);
            false
        }
    }

    #[test]
    fn a_scan_does_not_drive_out_what_is_asked_for_often_nor_what_is_pinned() {
        let mut toy = Toy::default();
        for _ in 0..4 {
            for number in 0..60 {
                toy.ask(number);
            }
        }
        for number in 1000..3000 {
            toy.ask(number);
        }
        let kept = (0..60).filter(|number| toy.ask(*number)).count();
        assert!(kept >= 55, "only {kept} of 60 survived a scan of 2000");
        for number in 5000..20_000 {
            toy.ask(number);
        }
        assert!(toy.ask(7), "the pinned one is there whatever came");
        assert!(toy.held.len() <= 100 && toy.fifo.ghosts.len() <= 120);
    }

    #[test]
    fn pinned_ones_in_the_main_queue_do_not_protect_the_small_one() {
        let (mut fifo, frequency) = (Fifo::default(), Frequency::default());
        fifo.main.push_back(Place { address: Address([1; 32]), turn: 1, len: 50 });
        fifo.insert(Address([2; 32]), 1, 5);
        let known =
            |address: &Address| Some(Candidate { turn: 1, frequency: &frequency, pinned: address.0[0] == 1 });
        assert_eq!(fifo.victim(100, known), Some(Address([2; 32])));
        assert_eq!(fifo.victim(100, known), None);
    }

    #[test]
    fn nothing_goes_if_all_are_pinned() {
        let (mut fifo, frequency) = (Fifo::default(), Frequency::default());
        fifo.insert(Address([1; 32]), 1, 10);
        let known = |_: &Address| Some(Candidate { turn: 1, frequency: &frequency, pinned: true });
        assert_eq!(fifo.victim(10, known), None);
    }
}
