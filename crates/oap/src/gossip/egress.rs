//! What waits to be written to one peer: three lanes, bounded in frames and in bytes, under one ceiling for all
//! peers. A frame takes its place when it is queued and gives it back when it is written.

use super::fair::{FairLanes, Lane, Taken};
use super::platform::{AtomicUsize, Mutex, MutexGuard, Ordering};
use crate::frame::Encoded;
use std::sync::{Arc, PoisonError};

/// The part of the frames and bytes that only control frames may use, so that a tree can be mended when no
/// message gets through any more.
const RESERVE: usize = 8;
/// The one party on the way out.
const PEER: u64 = 0;

/// Bytes that all queues of a process may hold together.
#[derive(Debug)]
pub struct Ceiling {
    max: usize,
    used: AtomicUsize,
}

impl Ceiling {
    pub fn new(max: usize) -> Arc<Ceiling> {
        Arc::new(Ceiling { max, used: AtomicUsize::new(0) })
    }

    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    pub(super) fn take(&self, bytes: usize) -> bool {
        let more = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.max);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    pub(super) fn give(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// What a full queue does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    RejectNew,
    /// The oldest frame of the lowest lane makes room.
    DropOldest,
}

#[derive(Clone, Copy, Debug)]
pub struct EgressLimits {
    pub frames: usize,
    pub bytes: usize,
    pub when_full: WhenFull,
}

/// Why a queue has no place for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    Full,
    /// All queues of the process together are.
    Ceiling,
}

#[derive(Debug)]
pub struct Egress {
    lanes: FairLanes<Encoded>,
    limits: EgressLimits,
    ceiling: Arc<Ceiling>,
    /// Frames and bytes that a writer has taken and not yet written.
    held: (usize, usize),
    /// How many frames there are, for whoever must not wait for the queue.
    depth: Arc<AtomicUsize>,
}

impl Egress {
    pub fn new(limits: EgressLimits, ceiling: Arc<Ceiling>) -> Egress {
        let depth = Arc::new(AtomicUsize::new(0));
        Egress { lanes: FairLanes::default(), limits, ceiling, held: (0, 0), depth }
    }

    pub fn frames(&self) -> usize {
        self.lanes.len() + self.held.0
    }

    pub fn bytes(&self) -> usize {
        self.lanes.bytes() + self.held.1
    }

    /// Whether nothing waits for the writer.
    pub fn is_idle(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Whether a message of any size would be refused.
    pub fn is_full(&self) -> bool {
        !self.has_room(Lane::Normal, 1)
    }

    /// Whether as much could be queued as is.
    pub fn is_half_empty(&self) -> bool {
        self.frames() <= self.limits.frames / 2 && self.bytes() <= self.limits.bytes / 2
    }

    /// Queues a frame, and says what had to go for it; nothing goes for a frame that is refused.
    pub fn push(&mut self, lane: Lane, topic: u64, frame: Encoded) -> Result<Vec<Taken<Encoded>>, Refused> {
        let cost = frame.len();
        let may_go = match self.limits.when_full {
            WhenFull::RejectNew => (0, 0),
            WhenFull::DropOldest => self.lanes.size_from(lane),
        };
        if !self.would_fit(lane, cost, may_go) {
            return Err(Refused::Full);
        }
        if !self.ceiling.take(cost) {
            return Err(Refused::Ceiling);
        }
        let mut dropped = Vec::new();
        while !self.has_room(lane, cost) {
            let Some(oldest) = self.lanes.pop_oldest(lane) else { break };
            self.ceiling.give(oldest.cost);
            dropped.push(oldest);
        }
        self.lanes.push(lane, PEER, topic, cost, frame);
        self.publish();
        Ok(dropped)
    }

    /// Takes frames for one write, at least one if there is any; their places stay taken.
    pub fn take(&mut self, frames_max: usize, bytes_max: usize, batch: &mut Vec<Encoded>) {
        let (mut frames, mut bytes) = (0, 0);
        while frames == 0 || frames < frames_max && bytes < bytes_max {
            let Some(taken) = self.lanes.pop() else { break };
            frames += 1;
            bytes += taken.cost;
            batch.push(taken.item);
        }
        self.held = (self.held.0 + frames, self.held.1 + bytes);
    }

    /// Gives back the places of frames that were written.
    pub fn written(&mut self, batch: &[Encoded]) {
        let bytes = batch.iter().map(Encoded::len).sum::<usize>().min(self.held.1);
        self.held = (self.held.0.saturating_sub(batch.len()), self.held.1 - bytes);
        self.ceiling.give(bytes);
        self.publish();
    }

    /// Empties the queue of a session that is over, and says how much of which lane was in it.
    pub fn clear(&mut self) -> [(Lane, u64); 3] {
        let mut counts = Lane::ALL.map(|lane| (lane, 0));
        while let Some(taken) = self.lanes.pop() {
            self.ceiling.give(taken.cost);
            counts[taken.lane as usize].1 += 1;
        }
        self.publish();
        counts
    }

    fn publish(&self) {
        self.depth.store(self.frames(), Ordering::Relaxed);
    }

    /// Whether a frame of so many bytes finds a place without another losing its own.
    pub fn has_room(&self, lane: Lane, cost: usize) -> bool {
        self.would_fit(lane, cost, (0, 0))
    }

    /// Whether a frame would find a place if so many frames and bytes were gone.
    fn would_fit(&self, lane: Lane, cost: usize, gone: (usize, usize)) -> bool {
        let EgressLimits { frames, bytes, .. } = self.limits;
        let reserve = if lane == Lane::Control { 0 } else { 1 };
        self.frames() - gone.0 < frames - reserve * (frames / RESERVE)
            && self.bytes() - gone.1 + cost <= bytes - reserve * (bytes / RESERVE)
    }
}

impl Drop for Egress {
    fn drop(&mut self) {
        self.ceiling.give(self.bytes());
    }
}

/// The queue to a peer, which the engine fills and the peer's writer empties.
#[derive(Clone, Debug)]
pub struct SharedEgress {
    queue: Arc<Mutex<Egress>>,
    depth: Arc<AtomicUsize>,
}

/// A frame found its place.
#[derive(Debug)]
pub struct Queued {
    /// What had to go for it.
    pub dropped: Vec<Taken<Encoded>>,
    /// Nothing waited before, so that the writer may be asleep: wake it.
    pub wake: bool,
}

impl SharedEgress {
    pub fn new(egress: Egress) -> SharedEgress {
        SharedEgress { depth: egress.depth.clone(), queue: Arc::new(Mutex::new(egress)) }
    }

    /// Frames that are queued or being written; takes no lock.
    pub fn depth(&self) -> usize {
        self.depth.load(Ordering::Relaxed)
    }

    pub fn push(&self, lane: Lane, topic: u64, frame: Encoded) -> Result<Queued, Refused> {
        let mut egress = self.lock();
        let wake = egress.is_idle();
        egress.push(lane, topic, frame).map(|dropped| Queued { dropped, wake })
    }

    /// Nothing done under this lock waits or panics half-way.
    pub fn lock(&self) -> MutexGuard<'_, Egress> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
