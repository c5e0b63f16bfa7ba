//! Messages that do not fit in a frame: a manifest, then chunks, a few at a time.

use super::{COPY_BELOW, Engine, Now};
use crate::Encoded;
use crate::gossip::PeerId;
use crate::gossip::fair::Lane;
use crate::gossip::history::Kept;
use crate::gossip::message::{Envelope, MessageId};
use crate::gossip::missing::Stage;
use crate::gossip::score::Offence;
use crate::gossip::seen::Known;
use crate::gossip::wire::{CHUNK_MIN, CHUNK_OVERHEAD, Gossip, flow};
use bytes::{Bytes, BytesMut};
use std::collections::BTreeMap;
use std::time::Duration;

/// Chunks that are asked for at once.
const WINDOW: u16 = 16;
/// Messages that one peer may send in chunks at once.
const PER_PEER_MAX: usize = 4;
/// Times that the same peer is asked again for chunks that did not come.
const STALLS: u32 = 4;
/// How long chunks are waited for besides a round trip, and a message that has no room yet.
const CHUNKS_WAIT: Duration = Duration::from_millis(500);

/// A message that is coming in chunks.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) source: PeerId,
    envelope: Envelope,
    hops: u8,
    size: usize,
    chunk: usize,
    chunks: BTreeMap<u16, Bytes>,
    /// The end of what was asked for.
    asked: u16,
    stalls: u32,
}

impl Transfer {
    /// Chunks of the whole message.
    fn count(&self) -> usize {
        self.size.div_ceil(self.chunk)
    }

    fn length(&self, index: u16) -> usize {
        self.chunk.min(self.size.saturating_sub(usize::from(index) * self.chunk))
    }

    fn first_missing(&self) -> u16 {
        let have = self.chunks.keys().zip(0u16..).take_while(|(index, expected)| **index == *expected);
        // There are at most as many chunks as an index can say.
        have.count() as u16
    }
}

impl Engine {
    /// What a manifest says, and whether it is asked for, signed and within bounds; only then is anything kept.
    pub(super) fn manifest(
        &mut self,
        now: Now,
        from: PeerId,
        hops: u8,
        id: MessageId,
        (size, chunk): (u32, u32),
        envelope: Envelope,
    ) {
        let asked = self.missing.get(id).filter(|wanted| wanted.stage == Stage::Asked(from));
        let Some(wanted) = asked else {
            // Late, or never asked for: either way nothing follows it.
            return self.offend(now, from, Offence::Replayed);
        };
        let fits = wanted.size == size && (size as usize).div_ceil(chunk as usize) <= usize::from(u16::MAX);
        if !fits || wanted.topic != envelope.topic {
            return self.invalid(now, from, Offence::Invalid);
        }
        if !self.is_timely(now, from, &envelope, true) || self.seen.knows(id, &envelope) != Known::New {
            return;
        }
        if self.config.signed && !self.origins.signed(&envelope, id) {
            self.missing.give_up_on(id, from, true);
            return self.invalid(now, from, Offence::Unsigned);
        }
        let coming: usize = self.transfers.values().map(|transfer| transfer.size).sum();
        let Some(peer) = self.peers.get_mut(&from) else { return };
        let full = coming + size as usize > self.config.reassembly_bytes || peer.transfers >= PER_PEER_MAX;
        if full {
            // Asked again later, for there is nothing wrong with it.
            let due = now.mono + CHUNKS_WAIT;
            return self.missing.set(id, Stage::Asked(from), due);
        }
        peer.transfers += 1;
        let (size, chunk) = (size as usize, chunk as usize);
        let chunks = BTreeMap::new();
        let transfer = Transfer { source: from, envelope, hops, size, chunk, chunks, asked: 0, stalls: 0 };
        self.transfers.insert(id, transfer);
        self.ask_chunks(now, id);
    }

    pub(super) fn chunk(&mut self, now: Now, from: PeerId, id: MessageId, index: u16, bytes: Bytes) {
        let Some(transfer) = self.transfers.get_mut(&id).filter(|transfer| transfer.source == from) else {
            // The second copy of a chunk that was asked for twice is nobody's fault.
            if !self.seen.has(id) {
                self.offend(now, from, Offence::Replayed);
            }
            return;
        };
        if index >= transfer.asked || bytes.len() != transfer.length(index) {
            return self.invalid(now, from, Offence::Invalid);
        }
        let small = bytes.len() < COPY_BELOW;
        transfer.chunks.insert(index, if small { Bytes::copy_from_slice(&bytes) } else { bytes });
        transfer.stalls = 0;
        let have = transfer.first_missing();
        if usize::from(have) == transfer.count() {
            return self.assemble(now, from, id);
        }
        if have == transfer.asked {
            return self.ask_chunks(now, id);
        }
        let due = now.mono + self.chunks_wait(from);
        self.missing.set(id, Stage::Receiving(from), due);
    }

    fn assemble(&mut self, now: Now, from: PeerId, id: MessageId) {
        let Some(transfer) = self.transfer_over(id) else { return };
        let mut payload = BytesMut::with_capacity(transfer.size);
        transfer.chunks.values().for_each(|chunk| payload.extend_from_slice(chunk));
        let (envelope, payload) = (transfer.envelope, payload.freeze());
        if envelope.id(&payload) != id {
            self.missing.give_up_on(id, from, true);
            self.missing.set(id, Stage::Waiting, now.mono);
            return self.invalid(now, from, Offence::Invalid);
        }
        let count = match self.count(&envelope, &payload) {
            Ok(count) => count,
            Err(offence) => {
                // Signed as it is, it will be no better from anybody else.
                let wanted = self.missing.remove(id);
                wanted.iter().for_each(|wanted| self.not_asked(now, wanted));
                return self.invalid(now, from, offence);
            }
        };
        let hops = transfer.hops.saturating_add(1);
        self.accept(now, from, Kept { id, envelope, payload, hops, checked: true, count });
    }

    /// Asks for the next chunks, from the first that is missing on.
    fn ask_chunks(&mut self, now: Now, id: MessageId) {
        let Some(transfer) = self.transfers.get_mut(&id) else { return };
        let first = transfer.first_missing();
        let end = (usize::from(first) + usize::from(WINDOW)).min(transfer.count());
        // The end is at most the count, which an index can say.
        transfer.asked = transfer.asked.max(end as u16);
        let (peer, count) = (transfer.source, end as u16 - first);
        let due = now.mono + self.chunks_wait(peer);
        self.missing.set(id, Stage::Receiving(peer), due);
        self.tell(peer, &Gossip::WantChunks { id, first, count });
    }

    /// Chunks did not come: says whether they were asked for again.
    pub(super) fn chunks_again(&mut self, now: Now, id: MessageId) -> bool {
        let Some(transfer) = self.transfers.get_mut(&id) else { return false };
        transfer.stalls += 1;
        let again = transfer.stalls <= STALLS && self.peers.contains_key(&transfer.source);
        if again {
            self.ask_chunks(now, id);
        }
        again
    }

    fn chunks_wait(&self, peer: PeerId) -> Duration {
        self.peers.get(&peer).map_or(Duration::ZERO, |peer| peer.rtt.limit()) + CHUNKS_WAIT
    }

    pub(super) fn transfer_over(&mut self, id: MessageId) -> Option<Transfer> {
        let transfer = self.transfers.remove(&id)?;
        if let Some(peer) = self.peers.get_mut(&transfer.source) {
            peer.transfers = peer.transfers.saturating_sub(1);
        }
        Some(transfer)
    }

    /// How a message is cut for a peer.
    fn chunk_for(&self, to: PeerId) -> usize {
        let max = self.peers.get(&to).map_or(0, |peer| peer.max_frame as usize);
        max.saturating_sub(CHUNK_OVERHEAD).min(self.config.chunk_bytes as usize).max(CHUNK_MIN as usize)
    }

    pub(super) fn encode_manifest(&self, kept: &Kept, to: PeerId) -> Option<Encoded> {
        let Kept { id, envelope, payload, hops, .. } = kept.clone();
        let (size, chunk) = (payload.len() as u32, self.chunk_for(to) as u32);
        Gossip::Manifest { hops, id, size, chunk, envelope }.encode(self.peers.get(&to)?.max_frame).ok()
    }

    pub(super) fn give_chunks(&mut self, now: Now, to: PeerId, id: MessageId, first: u16, count: u16) {
        self.owed = self.owed.map(|_| now.mono);
        // Whoever was given the manifest was given what is checked.
        let Some(kept) = self.history.get(id).filter(|kept| kept.checked).cloned() else { return };
        let (chunk, max) = (self.chunk_for(to), self.peers.get(&to).map_or(0, |peer| peer.max_frame));
        let topic = flow(kept.envelope.topic.as_str().as_bytes());
        for index in first..first.saturating_add(count.min(WINDOW)) {
            let start = usize::from(index) * chunk;
            if start >= kept.payload.len() {
                return;
            }
            let bytes = kept.payload.slice(start..kept.payload.len().min(start + chunk));
            let frame = Gossip::Chunk { id, index, bytes }.encode(max);
            if !frame.is_ok_and(|frame| self.send(to, Lane::Bulk, topic, frame)) {
                return;
            }
        }
    }
}
