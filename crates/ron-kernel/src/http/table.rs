//! Every connection's phase in one place.
//!
//! A connection notes what it is doing with two atomic stores; the sweeper reads them and gives orders. So a
//! request costs no timer, and the longest idle connection can be found when its place is needed.

use crate::coarse;
use crate::sync::{Permit, Permits};
use atomic_waker::AtomicWaker;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

/// Connections that can be told "too many connections" at one time, beyond the cap.
const RESERVE: usize = 16;
/// A connection still in its handshake or first head this long may be closed to make room.
const SLOW_START: Duration = Duration::from_millis(250);

/// How long, when a drain begins, a connection without a request may take to send one: its first, or the next after an
/// answer. A client that sends one after another would else lose one whenever a process ends.
const FIRST_WORD: Duration = Duration::from_millis(500);

/// How long a newcomer waits for the place of a connection that was told to give way.
const GIVING_WAY: Duration = Duration::from_millis(200);

/// What a connection is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// TLS or PROXY header.
    Handshake = 0,
    /// Reading the head of a request.
    Head = 1,
    /// Waiting for the next request.
    Idle = 2,
    /// At least one request is being answered.
    Busy = 3,
}

/// What a connection has been told to do. Later ones win.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Order {
    None = 0,
    /// Take no further request.
    Drain = 1,
    /// Close: idle too long, or its place is needed.
    Close = 2,
    /// The handshake or head took too long.
    TimedOut = 3,
    /// The drain deadline has passed.
    Abort = 4,
}

/// A connection as the table sees it.
#[derive(Debug)]
pub(crate) struct ConnState {
    phase: AtomicU8,
    since: AtomicU64,
    order: AtomicU8,
    waker: AtomicWaker,
    /// Method and path of the latest request, for naming stragglers.
    request: Mutex<Option<(http::Method, http::Uri)>>,
}

impl ConnState {
    pub(crate) fn set_phase(&self, phase: Phase) {
        self.since.store(coarse::millis(), Ordering::Relaxed);
        self.phase.store(phase as u8, Ordering::Release);
    }

    pub(crate) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Handshake,
            1 => Phase::Head,
            2 => Phase::Idle,
            _ => Phase::Busy,
        }
    }

    pub(crate) fn order(&self) -> Order {
        match self.order.load(Ordering::Acquire) {
            0 => Order::None,
            1 => Order::Drain,
            2 => Order::Close,
            3 => Order::TimedOut,
            _ => Order::Abort,
        }
    }

    /// Arranges for `waker` to be woken by the next order.
    pub(crate) fn watch(&self, waker: &Waker) {
        self.waker.register(waker);
    }

    /// Resolves when an order at least this strong was given. Cancel-safe.
    pub(crate) async fn ordered(&self, at_least: Order) -> Order {
        std::future::poll_fn(|cx| {
            self.watch(cx.waker());
            let order = self.order();
            if order >= at_least { std::task::Poll::Ready(order) } else { std::task::Poll::Pending }
        })
        .await
    }

    pub(crate) fn give(&self, order: Order) {
        self.order.fetch_max(order as u8, Ordering::AcqRel);
        self.waker.wake();
    }

    /// Its client may be about to send a request: the last was answered only just now.
    pub(crate) fn is_in_use(&self) -> bool {
        self.phase() == Phase::Idle && self.age() < FIRST_WORD
    }

    pub(crate) fn set_request(&self, method: &http::Method, uri: &http::Uri) {
        *self.request.lock().unwrap_or_else(PoisonError::into_inner) = Some((method.clone(), uri.clone()));
    }

    pub(crate) fn describe(&self) -> String {
        let request = self.request.lock().unwrap_or_else(PoisonError::into_inner);
        let age = self.age();
        match (&*request, self.phase()) {
            (Some((method, uri)), Phase::Busy) => format!("{method} {} for {age:?}", uri.path()),
            (_, phase) => format!("{phase:?} for {age:?}"),
        }
    }

    fn age(&self) -> Duration {
        Duration::from_millis(coarse::millis().saturating_sub(self.since.load(Ordering::Relaxed)))
    }
}

/// How long a connection may stay in a phase.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PhaseLimits {
    pub(crate) head: Duration,
    pub(crate) idle: Duration,
}

/// The order a connection has earned by its phase and age, if any.
fn verdict(phase: Phase, age: Duration, limits: PhaseLimits) -> Option<Order> {
    match phase {
        Phase::Handshake | Phase::Head => (age >= limits.head).then_some(Order::TimedOut),
        Phase::Idle => (age >= limits.idle).then_some(Order::Close),
        Phase::Busy => None,
    }
}

/// A place for one more connection.
#[derive(Debug)]
pub(crate) struct Place {
    _permit: Permit,
    /// Only to be told that there is none.
    pub(crate) reserve: bool,
}

/// All connections of a service.
#[derive(Debug)]
pub(crate) struct ConnTable {
    permits: Arc<Permits>,
    reserve: Arc<Permits>,
    conns: Mutex<HashMap<u64, Arc<ConnState>>>,
    per_ip: Mutex<HashMap<IpAddr, usize>>,
    open: AtomicUsize,
    /// Connections that have not yet sent a whole head.
    starting: AtomicUsize,
    next_id: AtomicU64,
}

impl ConnTable {
    pub(crate) fn new(max: usize) -> Arc<ConnTable> {
        Arc::new(ConnTable {
            permits: Permits::new(max),
            reserve: Permits::new(RESERVE),
            conns: Mutex::default(),
            per_ip: Mutex::default(),
            open: AtomicUsize::new(0),
            starting: AtomicUsize::new(0),
            next_id: AtomicU64::new(0),
        })
    }

    pub(crate) fn set_max(&self, max: usize) {
        self.permits.set_limit(max);
    }

    /// A place before the accept. If all are taken, a reserve place; if those are gone too, whichever comes first.
    pub(crate) async fn place(&self) -> Place {
        std::future::poll_fn(|cx| {
            if let Some(permit) = self.permits.try_take() {
                return std::task::Poll::Ready(Place { _permit: permit, reserve: false });
            }
            if let std::task::Poll::Ready(permit) = self.reserve.poll_take(cx) {
                return std::task::Poll::Ready(Place { _permit: permit, reserve: true });
            }
            self.permits.poll_take(cx).map(|permit| Place { _permit: permit, reserve: false })
        })
        .await
    }

    /// Trades a reserve place for a normal one that came free while the listener waited.
    pub(crate) fn upgrade(&self, place: Place) -> Place {
        if !place.reserve {
            return place;
        }
        self.permits.try_take().map_or(place, |permit| Place { _permit: permit, reserve: false })
    }

    /// A reserve place for a connection that turned out to be one too many for its address.
    pub(crate) fn reserve_place(&self) -> Option<Place> {
        self.reserve.try_take().map(|permit| Place { _permit: permit, reserve: true })
    }

    /// Enters a connection; it leaves when the entry is dropped. Makes room if this was the last place.
    pub(crate) fn enter(self: &Arc<ConnTable>, place: Place, ip: Option<IpAddr>) -> Entry {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let state = Arc::new(ConnState {
            phase: AtomicU8::new(Phase::Handshake as u8),
            since: AtomicU64::new(coarse::millis()),
            order: AtomicU8::new(Order::None as u8),
            waker: AtomicWaker::new(),
            request: Mutex::new(None),
        });
        self.lock().insert(id, state.clone());
        self.open.fetch_add(1, Ordering::Relaxed);
        let starting = self.starting.fetch_add(1, Ordering::Relaxed) + 1;
        let limit = self.permits.limit();
        // The last place is gone: an idle connection, or one slow to begin, gives way.
        let full = place.reserve || self.permits.used() >= limit;
        let slow = [Phase::Handshake, Phase::Head];
        let made_room = full
            && (self.close_longest(&[Phase::Idle], Duration::ZERO) || self.close_longest(&slow, SLOW_START));
        // Those that have not begun may not hold more than half of the places.
        let crowded = starting > limit.div_ceil(2) && !self.close_longest(&slow, SLOW_START);
        let fate = match (place.reserve, made_room, crowded) {
            (_, _, true) | (true, false, _) => Fate::Refused,
            (true, true, false) => Fate::Hoping,
            (false, _, false) => Fate::Stays,
        };
        Entry { table: self.clone(), state, id, ip, place, fate, started: false }
    }

    /// Counts a connection of this address; false if it has its share.
    pub(crate) fn admit_ip(&self, ip: IpAddr, max: usize) -> bool {
        let mut per_ip = self.per_ip.lock().unwrap_or_else(PoisonError::into_inner);
        let count = per_ip.entry(ip).or_insert(0);
        if *count >= max {
            return false;
        }
        *count += 1;
        true
    }

    /// Orders the connection longest in one of these phases to close; false if there is none old enough.
    fn close_longest(&self, phases: &[Phase], at_least: Duration) -> bool {
        let conns = self.lock();
        let candidates =
            conns.values().filter(|conn| phases.contains(&conn.phase()) && conn.order() < Order::Close);
        let longest =
            candidates.map(|conn| (conn.age(), conn)).filter(|(age, _)| *age >= at_least).max_by_key(|c| c.0);
        longest.inspect(|(_, conn)| conn.give(Order::Close)).is_some()
    }

    /// Gives every connection the order it has earned.
    pub(crate) fn sweep(&self, limits: PhaseLimits) {
        for conn in self.lock().values() {
            if let Some(order) = verdict(conn.phase(), conn.age(), limits) {
                conn.give(order);
            }
        }
    }

    /// Tells everybody. Whoever has only just come is told to drain a little later: its first request is on its way.
    pub(crate) fn order_all(&self, order: Order) {
        for conn in self.lock().values() {
            let starting = matches!(conn.phase(), Phase::Handshake | Phase::Head) && conn.age() < FIRST_WORD;
            if order > Order::Drain || !starting {
                conn.give(order);
            }
        }
    }

    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<ConnState>>> {
        self.conns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's membership in the table.
#[derive(Debug)]
pub(crate) struct Entry {
    table: Arc<ConnTable>,
    pub(crate) state: Arc<ConnState>,
    id: u64,
    ip: Option<IpAddr>,
    place: Place,
    fate: Fate,
    started: bool,
}

/// What is to become of a newcomer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Stays,
    /// It came on a reserve place, but another connection was told to give way.
    Hoping,
    Refused,
}

impl Entry {
    /// Whether there is a place for the connection; waits a moment for one that is being freed.
    pub(crate) async fn may_stay(&mut self) -> bool {
        if self.fate == Fate::Hoping {
            let permits = self.table.permits.clone();
            let freed = std::future::poll_fn(|cx| permits.poll_take(cx));
            self.fate = match tokio::time::timeout(GIVING_WAY, freed).await {
                Ok(permit) => {
                    self.place = Place { _permit: permit, reserve: false };
                    Fate::Stays
                }
                Err(_elapsed) => Fate::Refused,
            };
        }
        self.fate == Fate::Stays
    }

    pub(crate) fn refuse(&mut self) {
        self.fate = Fate::Refused;
    }

    /// Counts the connection under the address that a PROXY header named; false if that has its share.
    pub(crate) fn count_ip(&mut self, ip: IpAddr, max: usize) -> bool {
        let admitted = self.table.admit_ip(ip, max);
        if admitted {
            self.ip = Some(ip);
        }
        admitted
    }

    /// The first head has been read: the connection is no longer one of those that may be slow on purpose.
    pub(crate) fn started(&mut self) {
        if !std::mem::replace(&mut self.started, true) {
            self.table.starting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.started();
        self.table.lock().remove(&self.id);
        self.table.open.fetch_sub(1, Ordering::Relaxed);
        if let Some(ip) = self.ip {
            let mut per_ip = self.table.per_ip.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(count) = per_ip.get_mut(&ip) {
                *count -= 1;
                if *count == 0 {
                    per_ip.remove(&ip);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(table: &Arc<ConnTable>) -> Place {
        Place { _permit: table.permits.try_take().unwrap(), reserve: false }
    }

    fn enter(table: &Arc<ConnTable>) -> Entry {
        table.enter(normal(table), None)
    }

    #[test]
    fn phases_earn_their_orders_by_age() {
        let limits = PhaseLimits { head: Duration::from_secs(5), idle: Duration::from_secs(60) };
        let at = |phase, secs| verdict(phase, Duration::from_secs(secs), limits);
        assert_eq!((at(Phase::Head, 4), at(Phase::Head, 5)), (None, Some(Order::TimedOut)));
        assert_eq!(at(Phase::Handshake, 5), Some(Order::TimedOut));
        assert_eq!((at(Phase::Idle, 59), at(Phase::Idle, 60)), (None, Some(Order::Close)));
        assert_eq!(at(Phase::Busy, 9999), None);
    }

    #[test]
    fn the_last_place_costs_the_longest_idle_connection_its_own() {
        let table = ConnTable::new(3);
        let (first, second) = (enter(&table), enter(&table));
        first.state.set_phase(Phase::Busy);
        second.state.set_phase(Phase::Idle);
        let _third = enter(&table);
        assert_eq!((first.state.order(), second.state.order()), (Order::None, Order::Close));
    }

    #[test]
    fn only_a_connection_that_was_answered_just_now_is_in_use() {
        let table = ConnTable::new(3);
        let entry = enter(&table);
        for (phase, in_use) in [(Phase::Head, false), (Phase::Busy, false), (Phase::Idle, true)] {
            entry.state.set_phase(phase);
            assert_eq!(entry.state.is_in_use(), in_use, "{phase:?}");
        }
        entry.state.since.fetch_sub(FIRST_WORD.as_millis() as u64, Ordering::Relaxed);
        assert!(!entry.state.is_in_use(), "it was answered a while ago");
    }

    #[tokio::test]
    async fn without_a_place_the_reserve_answers_and_then_one_waits() {
        let table = ConnTable::new(1);
        let held = enter(&table);
        held.state.set_phase(Phase::Busy);
        let mut reserve = Vec::new();
        for _ in 0..RESERVE {
            reserve.push(table.place().await);
        }
        assert!(reserve.iter().all(|place| place.reserve));
        assert!(tokio::time::timeout(Duration::from_millis(20), table.place()).await.is_err());
        drop(held);
        assert!(!table.place().await.reserve);
    }

    #[test]
    fn an_address_has_its_share_and_gets_it_back() {
        let table = ConnTable::new(9);
        let ip: IpAddr = "192.0.2.1".parse().unwrap();
        assert!(table.admit_ip(ip, 1));
        let entry = table.enter(normal(&table), Some(ip));
        assert!(!table.admit_ip(ip, 1));
        drop(entry);
        assert!(table.admit_ip(ip, 1));
        assert_eq!(table.open(), 0);
    }
}
