//! The frames of gossip: what the payload of a frame of application 0x0100 says.

use super::fair::Lane;
use super::message::{ENVELOPE_MAX, Envelope, MessageId, Topic};
use crate::error::FrameError;
use crate::frame::{APP_GOSSIP, Encoded, Frame, HEADER};
use bytes::{Buf as _, BufMut as _, Bytes};

/// Ids in one frame at most.
pub const IDS_MAX: usize = 1024;
/// Topics in one frame at most.
pub const TOPICS_MAX: usize = 256;
/// What a message's frame has besides the payload, at most.
pub const OVERHEAD: usize = HEADER + 2 + ENVELOPE_MAX;
/// The like of a chunk's frame.
pub const CHUNK_OVERHEAD: usize = HEADER + 35;
/// The smallest chunk, so that a message has few; the last one of a message may be smaller.
pub const CHUNK_MIN: u32 = 4 << 10;

/// One gossip frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gossip {
    /// A message, pushed or asked for.
    Message {
        hops: u8,
        envelope: Envelope,
        payload: Bytes,
    },
    /// What a message is that comes in chunks, because somebody asked for it.
    Manifest {
        hops: u8,
        id: MessageId,
        size: u32,
        chunk: u32,
        envelope: Envelope,
    },
    Chunk {
        id: MessageId,
        index: u16,
        bytes: Bytes,
    },
    /// Messages that the sender has: of late, or from its history.
    IHave {
        history: bool,
        topic: Topic,
        entries: Vec<(MessageId, u32)>,
    },
    IWant {
        ids: Vec<MessageId>,
    },
    /// Push to me from now on, and send me these.
    Graft {
        topic: Topic,
        ids: Vec<MessageId>,
    },
    /// Do not push to me: announce.
    Prune {
        topic: Topic,
    },
    /// Topics that somebody at the sender follows, or no longer.
    Topics(Vec<(bool, Topic)>),
    /// What the sender's history of a topic amounts to between two times.
    Digest {
        round: u8,
        topic: Topic,
        window: Window,
        count: u32,
        hash: [u8; 32],
    },
    /// Chunks of a message, from this one on.
    WantChunks {
        id: MessageId,
        first: u16,
        count: u16,
    },
}

/// Times of publication, in Unix milliseconds, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub since: u64,
    pub until: u64,
}

impl Gossip {
    /// Reads a frame's payload. What does not say exactly one thing says nothing.
    pub fn parse(payload: &Bytes) -> Option<Gossip> {
        let mut bytes = payload.clone();
        let read = match bytes.try_get_u8().ok()? {
            1 => Gossip::Message {
                hops: bytes.try_get_u8().ok()?,
                envelope: Envelope::read(&mut bytes)?,
                payload: std::mem::take(&mut bytes),
            },
            2 => Gossip::Manifest {
                hops: bytes.try_get_u8().ok()?,
                id: MessageId::read(&mut bytes)?,
                size: bytes.try_get_u32().ok()?,
                chunk: bytes.try_get_u32().ok().filter(|chunk| *chunk >= CHUNK_MIN)?,
                envelope: Envelope::read(&mut bytes)?,
            },
            3 => Gossip::Chunk {
                id: MessageId::read(&mut bytes)?,
                index: bytes.try_get_u16().ok()?,
                bytes: std::mem::take(&mut bytes),
            },
            4 => {
                let history = flag(bytes.try_get_u8().ok()?)?;
                let topic = Topic::read(&mut bytes)?;
                let entries = list(&mut bytes, 36, |entry| Some((MessageId::read(entry)?, entry.get_u32())))?;
                Gossip::IHave { history, topic, entries }
            }
            5 => Gossip::IWant { ids: list(&mut bytes, 32, MessageId::read)? },
            6 => {
                Gossip::Graft { topic: Topic::read(&mut bytes)?, ids: list(&mut bytes, 32, MessageId::read)? }
            }
            7 => Gossip::Prune { topic: Topic::read(&mut bytes)? },
            8 => {
                let mut topics = Vec::new();
                while bytes.has_remaining() && topics.len() < TOPICS_MAX {
                    topics.push((flag(bytes.get_u8())?, Topic::read(&mut bytes)?));
                }
                Gossip::Topics(topics)
            }
            9 => Gossip::Digest {
                round: bytes.try_get_u8().ok()?,
                topic: Topic::read(&mut bytes)?,
                window: Window { since: bytes.try_get_u64().ok()?, until: bytes.try_get_u64().ok()? },
                count: bytes.try_get_u32().ok()?,
                hash: MessageId::read(&mut bytes)?.0,
            },
            10 => Gossip::WantChunks {
                id: MessageId::read(&mut bytes)?,
                first: bytes.try_get_u16().ok()?,
                count: bytes.try_get_u16().ok()?,
            },
            _ => return None,
        };
        (!bytes.has_remaining()).then_some(read)
    }

    /// The frame; `max` is what was agreed with whoever gets it.
    pub fn encode(&self, max: u32) -> Result<Encoded, FrameError> {
        let corr = match self {
            Gossip::Message { envelope, payload, .. } => envelope.id(payload).corr(),
            Gossip::Manifest { id, .. } | Gossip::Chunk { id, .. } => id.corr(),
            _ => 0,
        };
        self.encode_as(corr, max)
    }

    /// The frame under a number that is known already: a message's id takes time to find.
    pub(super) fn encode_as(&self, corr: u64, max: u32) -> Result<Encoded, FrameError> {
        let enveloped = matches!(self, Gossip::Message { .. } | Gossip::Manifest { .. });
        let mut out = Vec::with_capacity(if enveloped { OVERHEAD } else { 64 });
        let mut tail = Bytes::new();
        match self {
            Gossip::Message { hops, envelope, payload } => {
                out.put_slice(&[1, *hops]);
                envelope.write(&mut out);
                tail = payload.clone();
            }
            Gossip::Manifest { hops, id, size, chunk, envelope } => {
                out.put_slice(&[2, *hops]);
                out.put_slice(&id.0);
                out.put_u32(*size);
                out.put_u32(*chunk);
                envelope.write(&mut out);
            }
            Gossip::Chunk { id, index, bytes } => {
                out.put_u8(3);
                out.put_slice(&id.0);
                out.put_u16(*index);
                tail = bytes.clone();
            }
            Gossip::IHave { history, topic, entries } => {
                out.put_slice(&[4, u8::from(*history)]);
                topic.write(&mut out);
                for (id, size) in entries {
                    out.put_slice(&id.0);
                    out.put_u32(*size);
                }
            }
            Gossip::IWant { ids } => {
                out.put_u8(5);
                ids.iter().for_each(|id| out.put_slice(&id.0));
            }
            Gossip::Graft { topic, ids } => {
                out.put_u8(6);
                topic.write(&mut out);
                ids.iter().for_each(|id| out.put_slice(&id.0));
            }
            Gossip::Prune { topic } => {
                out.put_u8(7);
                topic.write(&mut out);
            }
            Gossip::Topics(topics) => {
                out.put_u8(8);
                for (follows, topic) in topics {
                    out.put_u8(u8::from(*follows));
                    topic.write(&mut out);
                }
            }
            Gossip::Digest { round, topic, window, count, hash } => {
                out.put_slice(&[9, *round]);
                topic.write(&mut out);
                out.put_u64(window.since);
                out.put_u64(window.until);
                out.put_u32(*count);
                out.put_slice(hash);
            }
            Gossip::WantChunks { id, first, count } => {
                out.put_u8(10);
                out.put_slice(&id.0);
                out.put_u16(*first);
                out.put_u16(*count);
            }
        }
        Encoded::new(&Frame::event(APP_GOSSIP, corr, tail), &out, max)
    }
}

/// The lane of a frame and a number for its topic, from a look at its first bytes.
pub(super) fn peek(payload: &[u8]) -> (Lane, u64) {
    let lane = match payload.first() {
        Some(1) => Lane::Normal,
        Some(2 | 3) => Lane::Bulk,
        _ => Lane::Control,
    };
    let topic = if lane == Lane::Normal { payload.get(50..).unwrap_or(&[]) } else { &[] };
    let topic = topic.split_first().and_then(|(len, rest)| rest.get(..usize::from(*len)));
    (lane, flow(topic.unwrap_or(&[])))
}

/// A number for a topic. Two topics that share one share a place in the round, nothing else.
pub(super) fn flow(topic: &[u8]) -> u64 {
    topic
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

fn flag(byte: u8) -> Option<bool> {
    (byte < 2).then_some(byte == 1)
}

/// All that is left, as entries of one size.
fn list<T>(bytes: &mut Bytes, size: usize, mut read: impl FnMut(&mut Bytes) -> Option<T>) -> Option<Vec<T>> {
    let count = bytes.len() / size;
    if count > IDS_MAX || !bytes.len().is_multiple_of(size) {
        return None;
    }
    (0..count).map(|_| read(bytes)).collect()
}
