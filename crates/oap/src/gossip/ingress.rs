//! Gossip frames that have come and wait for the engine: peers share the places and the turns.

use super::PeerId;
use super::egress::{Ceiling, Refused};
use super::fair::{FairLanes, Lane};
use super::wire::peek;
use crate::frame::HEADER;
use bytes::Bytes;
use std::sync::Arc;

/// A frame that has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incoming {
    pub peer: PeerId,
    pub corr: u64,
    pub payload: Bytes,
}

/// A frame that had to go for another's sake, or at its peer's end.
#[derive(Debug, PartialEq, Eq)]
pub struct Displaced {
    pub lane: Lane,
    pub frame: Incoming,
}

#[derive(Debug)]
pub struct Ingress {
    lanes: FairLanes<Incoming>,
    frames: usize,
    bytes: usize,
    ceiling: Arc<Ceiling>,
}

impl Ingress {
    pub fn new(frames: usize, bytes: usize, ceiling: Arc<Ceiling>) -> Ingress {
        Ingress { lanes: FairLanes::default(), frames, bytes, ceiling }
    }

    pub fn len(&self) -> usize {
        self.lanes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    pub fn bytes(&self) -> usize {
        self.lanes.bytes()
    }

    /// Frames of one peer.
    pub fn of(&self, peer: PeerId) -> usize {
        self.lanes.of(peer.0)
    }

    /// Queues a frame. When there is no room, a peer that has fewer frames here than another takes that one's
    /// newest place, and the frame that stood there comes back; whoever has most is refused. Either way somebody
    /// is owed a 429.
    pub fn push(&mut self, frame: Incoming) -> Result<Vec<Displaced>, Refused> {
        let cost = HEADER + frame.payload.len();
        let (lane, topic) = peek(&frame.payload);
        let mut displaced = Vec::new();
        while self.lanes.len() >= self.frames || self.lanes.bytes() + cost > self.bytes {
            let than = self.lanes.of(frame.peer.0) + 1;
            let Some(taken) = self.lanes.pop_newest_of_largest(than) else {
                // What made room so far was in vain, but its senders are told all the same.
                return if displaced.is_empty() {
                    Err(Refused::Full)
                } else {
                    Ok(with(displaced, lane, frame))
                };
            };
            self.ceiling.give(taken.cost);
            displaced.push(Displaced { lane: taken.lane, frame: taken.item });
        }
        if !self.ceiling.take(cost) {
            return if displaced.is_empty() {
                Err(Refused::Ceiling)
            } else {
                Ok(with(displaced, lane, frame))
            };
        }
        self.lanes.push(lane, frame.peer.0, topic, cost, frame);
        Ok(displaced)
    }

    /// The next in turn.
    pub fn pop(&mut self) -> Option<(Lane, Incoming)> {
        let taken = self.lanes.pop()?;
        self.ceiling.give(taken.cost);
        Some((taken.lane, taken.item))
    }

    /// Takes out all that a peer has here.
    pub fn forget(&mut self, peer: PeerId) -> usize {
        let mut count = 0;
        while let Some(taken) = self.lanes.pop_newest(peer.0) {
            self.ceiling.give(taken.cost);
            count += 1;
        }
        count
    }
}

impl Drop for Ingress {
    fn drop(&mut self) {
        self.ceiling.give(self.lanes.bytes());
    }
}

fn with(mut displaced: Vec<Displaced>, lane: Lane, frame: Incoming) -> Vec<Displaced> {
    displaced.push(Displaced { lane, frame });
    displaced
}
