//! A queue in three lanes, each shared by parties and, within a party, by flows: deficit round robin twice.
//!
//! On the way in the parties are peers, on the way out there is one; flows are topics.

use std::collections::{BTreeMap, VecDeque};

/// What a turn adds to an account, in bytes.
const QUANTUM: usize = 16 << 10;

/// Lanes, the first before all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    Control,
    Normal,
    Bulk,
}

impl Lane {
    pub const ALL: [Lane; 3] = [Lane::Control, Lane::Normal, Lane::Bulk];

    pub const fn name(self) -> &'static str {
        match self {
            Lane::Control => "control",
            Lane::Normal => "normal",
            Lane::Bulk => "bulk",
        }
    }
}

/// Items with their costs. Bounds are its owner's affair.
#[derive(Debug)]
pub struct FairLanes<T> {
    lanes: [Ring<Ring<VecDeque<Item<T>>>>; 3],
    parties: BTreeMap<u64, usize>,
    /// Items and bytes of each lane.
    sizes: [(usize, usize); 3],
    number: u64,
}

#[derive(Debug)]
struct Item<T> {
    number: u64,
    cost: usize,
    item: T,
}

/// An item on its way out.
#[derive(Debug, PartialEq, Eq)]
pub struct Taken<T> {
    pub lane: Lane,
    pub party: u64,
    pub cost: usize,
    pub item: T,
}

impl<T> Default for FairLanes<T> {
    fn default() -> FairLanes<T> {
        let lanes = [Ring::default(), Ring::default(), Ring::default()];
        FairLanes { lanes, parties: BTreeMap::new(), sizes: [(0, 0); 3], number: 0 }
    }
}

impl<T> FairLanes<T> {
    pub fn len(&self) -> usize {
        self.size_from(Lane::Control).0
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn bytes(&self) -> usize {
        self.size_from(Lane::Control).1
    }

    /// Items and bytes of a lane and those after it.
    pub fn size_from(&self, lane: Lane) -> (usize, usize) {
        self.sizes[lane as usize..].iter().fold((0, 0), |sum, size| (sum.0 + size.0, sum.1 + size.1))
    }

    /// Items of a party.
    pub fn of(&self, party: u64) -> usize {
        self.parties.get(&party).copied().unwrap_or(0)
    }

    pub fn push(&mut self, lane: Lane, party: u64, flow: u64, cost: usize, item: T) {
        self.number += 1;
        let item = Item { number: self.number, cost, item };
        self.lanes[lane as usize].entry(party).entry(flow).push_back(item);
        *self.parties.entry(party).or_default() += 1;
        let (count, bytes) = &mut self.sizes[lane as usize];
        *count += 1;
        *bytes += cost;
    }

    /// The next in turn.
    pub fn pop(&mut self) -> Option<Taken<T>> {
        let lane = *Lane::ALL.iter().find(|lane| !self.lanes[**lane as usize].is_empty())?;
        let (party, item) = self.lanes[lane as usize].take()?;
        Some(self.taken(lane, party, item))
    }

    /// The oldest of the lowest lane that has any, if that is this one or a lower.
    pub fn pop_oldest(&mut self, than: Lane) -> Option<Taken<T>> {
        let lane = *Lane::ALL.iter().rev().find(|lane| !self.lanes[**lane as usize].is_empty())?;
        if lane < than {
            return None;
        }
        let ring = &mut self.lanes[lane as usize];
        let fronts =
            ring.flows().filter_map(|(party, flow, items)| Some((items.front()?.number, party, flow)));
        let (_, party, flow) = fronts.min()?;
        let item = ring.remove(party, flow, VecDeque::pop_front)?;
        Some(self.taken(lane, party, item))
    }

    /// The newest item in the lowest lane of the party that has most, if that is more than `than`.
    pub fn pop_newest_of_largest(&mut self, than: usize) -> Option<Taken<T>> {
        let (party, _) =
            self.parties.iter().filter(|(_, count)| **count > than).max_by_key(|(_, count)| **count)?;
        self.pop_newest(*party)
    }

    /// The newest item in the lowest lane that a party has any in.
    pub fn pop_newest(&mut self, party: u64) -> Option<Taken<T>> {
        for lane in Lane::ALL.into_iter().rev() {
            let ring = &mut self.lanes[lane as usize];
            let of = ring.flows().filter(|(other, ..)| *other == party);
            let newest = of.filter_map(|(_, flow, items)| Some((items.back()?.number, flow))).max();
            if let Some((_, flow)) = newest {
                let item = ring.remove(party, flow, VecDeque::pop_back)?;
                return Some(self.taken(lane, party, item));
            }
        }
        None
    }

    fn taken(&mut self, lane: Lane, party: u64, item: Item<T>) -> Taken<T> {
        let (count, bytes) = &mut self.sizes[lane as usize];
        *count -= 1;
        *bytes -= item.cost;
        if let Some(count) = self.parties.get_mut(&party) {
            *count -= 1;
            if *count == 0 {
                self.parties.remove(&party);
            }
        }
        Taken { lane, party, cost: item.cost, item: item.item }
    }
}

/// Whatever takes turns: queues by key, each with an account. Only those that have something are kept.
#[derive(Debug)]
struct Ring<Q> {
    turns: VecDeque<u64>,
    queues: BTreeMap<u64, (usize, Q)>,
}

impl<Q> Default for Ring<Q> {
    fn default() -> Ring<Q> {
        Ring { turns: VecDeque::new(), queues: BTreeMap::new() }
    }
}

impl<Q: Default> Ring<Q> {
    fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    fn entry(&mut self, key: u64) -> &mut Q {
        let (_, queue) = self.queues.entry(key).or_insert_with(|| {
            self.turns.push_back(key);
            (0, Q::default())
        });
        queue
    }

    /// Gives turns until the first in line can pay what its next item costs.
    fn turn(&mut self, cost: impl Fn(&mut Q) -> Option<usize>) -> Option<usize> {
        loop {
            let (account, queue) = self.queues.get_mut(self.turns.front()?)?;
            let cost = cost(queue)?;
            if *account >= cost {
                return Some(cost);
            }
            self.turns.rotate_left(1);
            if let Some((account, _)) = self.queues.get_mut(self.turns.front()?) {
                *account += QUANTUM;
            }
        }
    }

    /// Takes from the first in line and charges it; an account without a queue is closed.
    fn charge<R>(
        &mut self,
        cost: usize,
        take: impl FnOnce(&mut Q) -> Option<R>,
        empty: fn(&Q) -> bool,
    ) -> Option<(u64, R)> {
        let key = *self.turns.front()?;
        let (account, queue) = self.queues.get_mut(&key)?;
        *account = account.saturating_sub(cost);
        let taken = take(queue)?;
        if empty(queue) {
            self.queues.remove(&key);
            self.turns.pop_front();
        }
        Some((key, taken))
    }

    fn drop_if(&mut self, key: u64, empty: fn(&Q) -> bool) {
        if self.queues.get(&key).is_some_and(|(_, queue)| empty(queue)) {
            self.queues.remove(&key);
            self.turns.retain(|other| *other != key);
        }
    }
}

impl<T> Ring<Ring<VecDeque<Item<T>>>> {
    fn take(&mut self) -> Option<(u64, Item<T>)> {
        let front = |items: &mut VecDeque<Item<T>>| items.front().map(|item| item.cost);
        let cost = self.turn(|flows| flows.turn(front))?;
        let take = |flows: &mut Ring<VecDeque<Item<T>>>| {
            flows.charge(cost, VecDeque::pop_front, VecDeque::is_empty).map(|(_, item)| item)
        };
        self.charge(cost, take, Ring::is_empty)
    }

    fn flows(&self) -> impl Iterator<Item = (u64, u64, &VecDeque<Item<T>>)> {
        self.queues.iter().flat_map(|(party, (_, flows))| {
            flows.queues.iter().map(|(flow, (_, items))| (*party, *flow, items))
        })
    }

    fn remove(
        &mut self,
        party: u64,
        flow: u64,
        pop: fn(&mut VecDeque<Item<T>>) -> Option<Item<T>>,
    ) -> Option<Item<T>> {
        let (_, flows) = self.queues.get_mut(&party)?;
        let (_, items) = flows.queues.get_mut(&flow)?;
        let item = pop(items);
        flows.drop_if(flow, VecDeque::is_empty);
        self.drop_if(party, Ring::is_empty);
        item
    }
}
