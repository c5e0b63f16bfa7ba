//! What the engine knows of one peer.

use super::Config;
use super::egress::SharedEgress;
use super::estimate::Estimate;
use super::message::{MessageId, Topic};
use crate::bucket::Bucket;
use crate::node::NodeId;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// A peer's round trip before it was measured.
const RTT_GUESS: Duration = Duration::from_millis(50);
/// Bunched up by the network, a peer's frames may come at twice the rate and four times the burst at which it may
/// send them; control frames are small, and there are several to a message.
const RATE_SLACK: u32 = 2;
const BURST_SLACK: u32 = 4;
const CONTROL_RATE: u32 = 8;
const CONTROL_BURST: u32 = 1024;
/// What a peer sent while this node did not read, paused or cut off, comes all at once when it does. After as much
/// silence it is no excess; a session that is silent for longer than this ends.
const SILENCE_MIN: Duration = Duration::from_secs(1);
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// How long nothing is pushed to a peer that has no room: the first time, and at most.
const CHOKE_MIN: Duration = Duration::from_millis(50);
const CHOKE_MAX: Duration = Duration::from_secs(2);
/// Topics that a peer may follow by name.
const FOLLOWS_MAX: usize = 1024;

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) node: NodeId,
    /// Whether the transport has proved that it is this node.
    pub(super) proved: bool,
    pub(super) egress: SharedEgress,
    pub(super) max_frame: u32,
    pub(super) rtt: Estimate,
    /// What may be pushed to it, and what it may push and say unasked.
    pub(super) push: Bucket,
    pub(super) data: Bucket,
    pub(super) control: Bucket,
    /// When it said something last.
    heard: Duration,
    choked: Duration,
    choke: Duration,
    /// It is its queue here that had no room.
    full: bool,
    /// What it is to be told of, by topic and whether from history.
    pub(super) announce: BTreeMap<(Topic, bool), Vec<(MessageId, u32)>>,
    pub(super) announce_count: usize,
    pub(super) announce_due: Option<Duration>,
    /// How much it was told at once, the last time.
    pub(super) announced: usize,
    /// Messages that it was asked for and has not given.
    pub(super) asked: usize,
    pub(super) asked_bytes: usize,
    /// What it is asked for next.
    pub(super) to_ask: VecDeque<MessageId>,
    pub(super) transfers: usize,
    pub(super) follows: BTreeSet<Topic>,
}

impl Peer {
    pub(super) fn new(
        node: NodeId,
        max_frame: u32,
        egress: SharedEgress,
        config: &Config,
        now: Duration,
    ) -> Peer {
        let (rate, burst) = (config.max_rps, config.burst_budget_frames);
        Peer {
            node,
            proved: false,
            egress,
            max_frame: max_frame.min(config.max_frame_bytes),
            rtt: Estimate::guess(RTT_GUESS),
            push: Bucket::new(rate, burst, now),
            data: Bucket::new(rate.saturating_mul(RATE_SLACK), burst.saturating_mul(BURST_SLACK), now),
            control: Bucket::new(rate.saturating_mul(CONTROL_RATE), CONTROL_BURST, now),
            heard: now,
            choked: Duration::ZERO,
            choke: CHOKE_MIN,
            full: false,
            announce: BTreeMap::new(),
            announce_count: 0,
            announce_due: None,
            announced: 0,
            asked: 0,
            asked_bytes: 0,
            to_ask: VecDeque::new(),
            transfers: 0,
            follows: BTreeSet::new(),
        }
    }

    /// It says something: after a silence it may say all that it could have said meanwhile.
    pub(super) fn hear(&mut self, now: Duration, config: &Config) {
        let silence = now.saturating_sub(std::mem::replace(&mut self.heard, now));
        if silence >= SILENCE_MIN {
            let millis = u64::try_from(silence.min(SILENCE_MAX).as_millis()).unwrap_or(u64::MAX);
            let backlog = u64::from(config.max_rps) * millis / 1000;
            self.data.raise(backlog + u64::from(config.burst_budget_frames) * u64::from(BURST_SLACK));
            self.control.raise(backlog + u64::from(CONTROL_BURST));
        }
    }

    /// Whether nothing is pushed to it for now. A queue that is half empty again is reason enough to go on.
    pub(super) fn is_choked(&mut self, now: Duration) -> bool {
        if self.full && self.choked > now && self.egress.lock().is_half_empty() {
            (self.full, self.choked) = (false, now);
        }
        self.choked > now
    }

    /// It has no room, in its queue here or by its own account: nothing is pushed to it for a while, longer each time.
    pub(super) fn choke(&mut self, now: Duration, full: bool) {
        if self.is_choked(now) {
            self.full &= full;
            return;
        }
        let quiet = now.saturating_sub(self.choked) > CHOKE_MAX;
        self.choke = if quiet { CHOKE_MIN } else { (self.choke * 2).min(CHOKE_MAX) };
        (self.full, self.choked) = (full, now + self.choke);
    }

    pub(super) fn follow(&mut self, follows: bool, topic: Topic) {
        if !follows {
            self.follows.remove(&topic);
        } else if self.follows.len() < FOLLOWS_MAX {
            self.follows.insert(topic);
        }
    }
}
