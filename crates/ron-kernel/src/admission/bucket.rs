//! Token buckets, one or one per key, in maps that cannot grow without bound.

use crate::inventory::{Inventory, LockSpec};
use crate::lock::Lock;
use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hash};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use std::time::{Duration, Instant};

/// How fast tokens come back and how many may be saved up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    pub per_second: f64,
    pub burst: f64,
}

impl Rate {
    /// `None` if the limit is off (0). The burst is at least one token.
    pub fn new(per_second: u64, burst_factor: f64) -> Option<Rate> {
        #[expect(clippy::cast_precision_loss, reason = "rates are far below 2^53")]
        let per_second = per_second as f64;
        (per_second > 0.0).then(|| Rate { per_second, burst: (per_second * burst_factor).max(1.0) })
    }
}

/// What a bucket said.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// Taken; this many tokens are left.
    Taken { left: u64 },
    /// Not taken; this long until it could be.
    Empty { wait: Duration },
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

impl Bucket {
    fn full(rate: Rate, now: Instant) -> Bucket {
        Bucket { tokens: rate.burst, at: now }
    }

    fn refill(&mut self, rate: Rate, now: Instant) {
        let elapsed = now.saturating_duration_since(self.at).as_secs_f64();
        self.tokens = (self.tokens + elapsed * rate.per_second).min(rate.burst);
        self.at = self.at.max(now);
    }

    fn take(&mut self, cost: f64, rate: Rate, now: Instant) -> Verdict {
        self.refill(rate, now);
        // A cost above the burst could never be met: it needs a full bucket and leaves a debt.
        if self.tokens >= cost.min(rate.burst) {
            self.tokens -= cost;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "clamped, and far below 2^53"
            )]
            let left = self.tokens.max(0.0) as u64;
            return Verdict::Taken { left };
        }
        let missing = cost.min(rate.burst) - self.tokens;
        Verdict::Empty { wait: Duration::from_secs_f64(missing / rate.per_second) }
    }

    fn is_full(&self, rate: Rate, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.at).as_secs_f64();
        self.tokens + elapsed * rate.per_second >= rate.burst
    }
}

/// One bucket for everybody.
#[derive(Debug)]
pub struct Single {
    bucket: Lock<Option<Bucket>>,
}

impl Single {
    pub fn new(inventory: &Inventory, lock: &'static LockSpec) -> Single {
        Single { bucket: Lock::new(inventory, lock, None) }
    }

    pub fn take(&self, cost: f64, rate: Rate, now: Instant) -> Verdict {
        let mut bucket = self.bucket.lock();
        bucket.get_or_insert_with(|| Bucket::full(rate, now)).take(cost, rate, now)
    }
}

const SHARDS: usize = 16;
/// Buckets that are looked at to make room for one.
const LOOKED_AT: usize = 16;

/// A part of the keys. A hand goes round them, so that each is looked at in its turn and none by where its hash lies.
#[derive(Debug)]
struct Shard<K> {
    places: HashMap<K, usize>,
    ring: Vec<(K, Bucket)>,
    hand: usize,
}

/// The place to be given to another key: of a handful, so that a flood of keys cannot make this slow, one that loses
/// nothing, or the one longest untouched.
fn victim<K>(ring: &[(K, Bucket)], hand: usize, rate: Rate, now: Instant) -> Option<usize> {
    let looked_at = (0..LOOKED_AT.min(ring.len())).map(|step| (hand + step) % ring.len());
    let full = looked_at.clone().find(|place| ring[*place].1.is_full(rate, now));
    full.or_else(|| looked_at.min_by_key(|place| ring[*place].1.at))
}

/// A bucket per key. The map is sharded; a full shard drops a bucket that is full again (which loses nothing)
/// or, if all are in use, the one longest untouched among a few.
#[derive(Debug)]
pub struct Keyed<K> {
    shards: Vec<Lock<Shard<K>>>,
    hasher: RandomState,
    keys_per_shard: usize,
    /// Beside the locks, so that a scrape takes none.
    live: AtomicUsize,
    evicted: AtomicU64,
}

impl<K: Hash + Eq + Clone> Keyed<K> {
    pub fn new(inventory: &Inventory, lock: &'static LockSpec, keys_max: usize) -> Keyed<K> {
        Keyed {
            shards: (0..SHARDS)
                .map(|_| {
                    Lock::new(inventory, lock, Shard { places: HashMap::new(), ring: Vec::new(), hand: 0 })
                })
                .collect(),
            hasher: RandomState::new(),
            keys_per_shard: keys_max.div_ceil(SHARDS).max(1),
            live: AtomicUsize::new(0),
            evicted: AtomicU64::new(0),
        }
    }

    pub fn take(&self, key: &K, cost: f64, rate: Rate, now: Instant) -> Verdict {
        self.with(key, rate, now, |bucket| bucket.take(cost, rate, now))
    }

    /// Takes away what has been used already, whether it is there or not: what is missing must come back first.
    pub fn owe(&self, key: &K, cost: f64, rate: Rate, now: Instant) {
        self.with(key, rate, now, |bucket| {
            bucket.refill(rate, now);
            bucket.tokens -= cost;
        });
    }

    fn with<T>(&self, key: &K, rate: Rate, now: Instant, act: impl FnOnce(&mut Bucket) -> T) -> T {
        #[expect(clippy::cast_possible_truncation, reason = "any bits of the hash will do")]
        let shard = &self.shards[self.hasher.hash_one(key) as usize % SHARDS];
        let Shard { places, ring, hand } = &mut *shard.lock();
        if let Some(place) = places.get(key) {
            return act(&mut ring[*place].1);
        }
        let mut bucket = Bucket::full(rate, now);
        let done = act(&mut bucket);
        let full = ring.len() >= self.keys_per_shard;
        let place = match full.then(|| victim(ring, *hand, rate, now)).flatten() {
            Some(place) => {
                places.remove(&ring[place].0);
                ring[place] = (key.clone(), bucket);
                *hand = place + 1;
                self.evicted.fetch_add(1, Ordering::Relaxed);
                place
            }
            None => {
                ring.push((key.clone(), bucket));
                self.live.fetch_add(1, Ordering::Relaxed);
                ring.len() - 1
            }
        };
        places.insert(key.clone(), place);
        done
    }

    /// Drops every bucket that is full again; for a housekeeping task.
    pub fn trim(&self, rate: Rate, now: Instant) {
        for shard in &self.shards {
            let Shard { places, ring, hand } = &mut *shard.lock();
            let before = ring.len();
            ring.retain(|(_, bucket)| !bucket.is_full(rate, now));
            ring.shrink_to_fit();
            *places = ring.iter().enumerate().map(|(place, (key, _))| (key.clone(), place)).collect();
            *hand = 0;
            self.live.fetch_sub(before - ring.len(), Ordering::Relaxed);
        }
    }

    /// How many keys are remembered.
    pub fn len(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many keys were forgotten to make room for others.
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;
    use proptest::prelude::*;

    static LOCK: LockSpec = LockSpec { service: "t", name: "buckets", rank: 1, guards: "" };

    fn single() -> Single {
        Single::new(&Inventory::new(Metrics::default()), &LOCK)
    }

    #[test]
    fn a_burst_is_taken_and_then_the_wait_is_exact() {
        let (single, now, rate) = (single(), Instant::now(), Rate::new(10, 2.0).unwrap());
        for left in (0..20).rev() {
            assert_eq!(single.take(1.0, rate, now), Verdict::Taken { left });
        }
        assert_eq!(single.take(1.0, rate, now), Verdict::Empty { wait: Duration::from_millis(100) });
        let later = now + Duration::from_millis(100);
        assert_eq!(single.take(1.0, rate, later), Verdict::Taken { left: 0 });
    }

    #[test]
    fn zero_is_off_and_a_cost_above_the_burst_is_paid_later() {
        assert_eq!(Rate::new(0, 2.0), None);
        let (single, now, rate) = (single(), Instant::now(), Rate::new(10, 1.0).unwrap());
        assert!(matches!(single.take(50.0, rate, now), Verdict::Taken { .. }));
        let Verdict::Empty { wait } = single.take(1.0, rate, now) else {
            panic!("a debt must be waited for")
        };
        assert_eq!(wait, Duration::from_millis(4100));
    }

    #[test]
    fn what_is_owed_must_come_back_before_anything_is_given() {
        let inventory = Inventory::new(Metrics::default());
        let (keyed, rate, now) =
            (Keyed::new(&inventory, &LOCK, 16), Rate::new(100, 2.0).unwrap(), Instant::now());
        keyed.owe(&7, 150.0, rate, now);
        assert!(matches!(keyed.take(&7, 0.0, rate, now), Verdict::Taken { left: 50 }));
        keyed.owe(&7, 350.0, rate, now);
        assert_eq!(keyed.take(&7, 0.0, rate, now), Verdict::Empty { wait: Duration::from_secs(3) });
        assert!(matches!(keyed.take(&7, 0.0, rate, now + Duration::from_secs(3)), Verdict::Taken { .. }));
    }

    /// A million addresses in ten seconds, and one among them that asks ten times as often as it may.
    #[test]
    fn a_million_keys_do_not_grow_the_map_nor_lend_anybody_a_rate() {
        const KEYS_MAX: usize = 65_536;
        let keyed = Keyed::new(&Inventory::new(Metrics::default()), &LOCK, KEYS_MAX);
        let (rate, start) = (Rate::new(100, 1.0).unwrap(), Instant::now());
        let room = |keyed: &Keyed<u32>| {
            keyed.shards.iter().map(|shard| shard.lock().places.capacity()).sum::<usize>()
        };
        let (mut taken, mut largest) = (0.0, 0);
        for step in 0..1_000_000u32 {
            let now = start + Duration::from_micros(10) * step;
            keyed.take(&(step + 1), 1.0, rate, now);
            if step % 100 == 0 && matches!(keyed.take(&0, 1.0, rate, now), Verdict::Taken { .. }) {
                taken += 1.0;
            }
            if step % 10_000 == 0 {
                largest = largest.max(room(&keyed));
            }
        }
        assert!(keyed.len() <= KEYS_MAX && keyed.evicted() >= 900_000, "{} {}", keyed.len(), keyed.evicted());
        // A map in which keys come and go needs that much.
        assert!(largest <= 4 * KEYS_MAX, "{largest} places were held");
        let allowed = 100.0 + 10.0 * 100.0;
        assert!((0.95 * allowed..=1.05 * allowed).contains(&taken), "{taken} of {allowed}");
        keyed.trim(rate, start + Duration::from_secs(60));
        assert!(keyed.is_empty() && room(&keyed) == 0, "nothing is left of it");
    }

    proptest! {
        #[test]
        fn no_schedule_gets_more_than_rate_times_time_plus_burst(gaps in proptest::collection::vec(0u64..50, 1..300)) {
            let (single, rate) = (single(), Rate::new(100, 0.5).unwrap());
            let start = Instant::now();
            let (mut now, mut taken) = (start, 0.0);
            for gap in gaps {
                now += Duration::from_millis(gap);
                if matches!(single.take(1.0, rate, now), Verdict::Taken { .. }) {
                    taken += 1.0;
                }
                let allowed = rate.burst + (now - start).as_secs_f64() * rate.per_second;
                prop_assert!(taken <= allowed + 1e-6);
            }
        }
    }
}
