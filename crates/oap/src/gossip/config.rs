//! What an engine is told about itself. Defaults are those of the product; those that are guesses say so.

use super::egress::{EgressLimits, WhenFull};
use super::history::HistoryLimits;
use crate::frame::{CHUNK, FRAME_MAX};
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Config {
    /// Peers that a message is pushed to, at most; the rest are told of it.
    pub relay_fanout: usize,
    /// Messages pushed to a peer at once, and each second; a rate of 0 is no limit.
    pub burst_budget_frames: u32,
    pub max_rps: u32,
    pub max_frame_bytes: u32,
    /// How far ahead a publisher's clock may be.
    pub skew: Duration,
    pub chunk_bytes: u32,
    pub max_message_bytes: usize,
    /// Hops that a message is pushed over.
    pub hop_limit: u8,
    pub seen_max: usize,
    pub history: HistoryLimits,
    /// Bytes that the histories of all topics may keep; a guess.
    pub history_bytes_max: usize,
    /// Topics that are carried; a guess.
    pub topics_max: usize,
    pub egress: EgressLimits,
    /// Messages that a peer is still to be told of; a guess.
    pub announce_max: usize,
    /// Messages that were announced and have not come; a guess.
    pub missing_max: usize,
    /// Bytes of messages that are coming in chunks; a guess.
    pub reassembly_bytes: usize,
    /// How often a topic's history is compared with that of a peer chosen by chance; a guess.
    pub digest_interval: Duration,
    /// How long nobody talks to a node that misbehaved.
    pub greylist: Duration,
    /// Whether messages are signed, and refused if they are not.
    pub signed: bool,
    /// For how long after a signature messages wait for others to be signed with, at most.
    pub gather: Duration,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            relay_fanout: 8,
            burst_budget_frames: 8,
            max_rps: 200,
            max_frame_bytes: FRAME_MAX,
            skew: Duration::from_secs(120),
            chunk_bytes: CHUNK as u32,
            max_message_bytes: 8 << 20,
            hop_limit: 16,
            seen_max: 65_536,
            history: HistoryLimits { count: 1024, bytes: 64 << 20, age: Duration::from_secs(600) },
            history_bytes_max: 256 << 20,
            topics_max: 1024,
            egress: EgressLimits { frames: 512, bytes: 4 << 20, when_full: WhenFull::RejectNew },
            announce_max: 4096,
            missing_max: 8192,
            reassembly_bytes: 32 << 20,
            digest_interval: Duration::from_secs(10),
            greylist: Duration::from_secs(600),
            signed: true,
            gather: Duration::ZERO,
        }
    }
}
