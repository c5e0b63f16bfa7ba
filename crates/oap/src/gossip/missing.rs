//! Messages that somebody announced and that have not come: who has them, who was asked, and when to go on.

use super::PeerId;
use super::message::{MessageId, Topic};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Announcers that are remembered for one message.
const ANNOUNCERS_MAX: usize = 8;
/// Messages that one peer may announce and not have given.
const PER_PEER_MAX: usize = 2048;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It may still be pushed.
    Waiting,
    Asked(PeerId),
    /// Its chunks are coming.
    Receiving(PeerId),
}

#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) topic: Topic,
    pub(super) size: u32,
    /// Learned from somebody's history: an old message, that says nothing about the tree.
    pub(super) history: bool,
    pub(super) announcers: Vec<PeerId>,
    pub(super) stage: Stage,
    pub(super) tries: u32,
    due: Duration,
    /// Who announced it first, and is counted for it.
    payer: PeerId,
}

#[derive(Debug)]
pub(super) struct Missing {
    max: usize,
    wanted: BTreeMap<MessageId, Wanted>,
    due: BTreeSet<(Duration, MessageId)>,
    /// Messages by the peer that announced them first.
    charged: BTreeMap<PeerId, usize>,
}

/// An announcement.
#[derive(Debug)]
pub(super) struct Heard {
    pub(super) id: MessageId,
    pub(super) topic: Topic,
    pub(super) size: u32,
    pub(super) history: bool,
    pub(super) peer: PeerId,
}

impl Missing {
    pub(super) fn new(max: usize) -> Missing {
        Missing { max, wanted: BTreeMap::new(), due: BTreeSet::new(), charged: BTreeMap::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.wanted.len()
    }

    pub(super) fn get(&self, id: MessageId) -> Option<&Wanted> {
        self.wanted.get(&id)
    }

    /// Notes who has a message. Says whether there was room for it.
    pub(super) fn hear(&mut self, heard: Heard, due: Duration) -> bool {
        if let Some(wanted) = self.wanted.get_mut(&heard.id) {
            if wanted.announcers.len() < ANNOUNCERS_MAX && !wanted.announcers.contains(&heard.peer) {
                wanted.announcers.push(heard.peer);
            }
            return true;
        }
        let charged = self.charged.get(&heard.peer).copied().unwrap_or(0);
        if self.wanted.len() >= self.max || charged >= PER_PEER_MAX {
            return false;
        }
        self.charged.insert(heard.peer, charged + 1);
        self.due.insert((due, heard.id));
        let Heard { id, topic, size, history, peer } = heard;
        let stage = Stage::Waiting;
        let announcers = vec![peer];
        let wanted = Wanted { topic, size, history, announcers, stage, tries: 0, due, payer: peer };
        self.wanted.insert(id, wanted);
        true
    }

    /// Goes on with a message at this time, in this stage.
    pub(super) fn set(&mut self, id: MessageId, stage: Stage, due: Duration) {
        if let Some(wanted) = self.wanted.get_mut(&id) {
            self.due.remove(&(wanted.due, id));
            self.due.insert((due, id));
            (wanted.stage, wanted.due) = (stage, due);
        }
    }

    /// The peer did not give it: the next one's turn.
    pub(super) fn give_up_on(&mut self, id: MessageId, peer: PeerId, for_good: bool) {
        if let Some(wanted) = self.wanted.get_mut(&id) {
            wanted.tries += 1;
            wanted.announcers.retain(|other| *other != peer);
            if !for_good {
                wanted.announcers.push(peer);
            }
        }
    }

    /// Whoever is not here any more has nothing to give.
    pub(super) fn keep_announcers(&mut self, id: MessageId, here: impl Fn(PeerId) -> bool) {
        if let Some(wanted) = self.wanted.get_mut(&id) {
            wanted.announcers.retain(|peer| here(*peer));
        }
    }

    pub(super) fn remove(&mut self, id: MessageId) -> Option<Wanted> {
        let wanted = self.wanted.remove(&id)?;
        self.due.remove(&(wanted.due, id));
        if let Some(count) = self.charged.get_mut(&wanted.payer) {
            *count -= 1;
            if *count == 0 {
                self.charged.remove(&wanted.payer);
            }
        }
        Some(wanted)
    }

    pub(super) fn next_due(&self) -> Option<(Duration, MessageId)> {
        self.due.first().copied()
    }

    /// The message with this number that a peer was asked for.
    pub(super) fn asked(&self, peer: PeerId, corr: u64) -> Option<MessageId> {
        let from = self.wanted.range(MessageId::first_of(corr)..).take_while(|(id, _)| id.corr() == corr);
        let mut asked = from.filter(|(_, it)| {
            let now = matches!(it.stage, Stage::Asked(of) | Stage::Receiving(of) if of == peer);
            // Or before, and the answer is late.
            now || it.tries > 0 && it.announcers.contains(&peer)
        });
        asked.next().map(|(id, _)| *id)
    }
}
