//! The engine: one node's part in carrying messages. It waits for nobody; what finds no room is refused,
//! announced later, or counted as shed.

mod catch_up;
mod chunks;
mod gather;
mod pull;
mod receive;
mod tree;

use super::bundle::Units;
use super::egress::{Ceiling, Egress, Refused, SharedEgress};
use super::fair::Lane;
use super::history::{History, Kept, millis};
use super::ids::Named;
use super::ledger::{Cause, Ledger, Outcome, Queue};
use super::message::{Envelope, MessageId, Mixing, Topic};
use super::missing::Missing;
use super::peer::Peer;
use super::random::Random;
use super::score::{Offence, Scores};
use super::seen::{First, Seen};
use super::signature::{Author, Origins};
use super::wire::{Gossip, TOPICS_MAX, flow};
use super::{Config, PeerId};
use crate::control::Goaway;
use crate::frame::{Encoded, FRAME_MIN_MAX};
use crate::node::NodeId;
use bytes::Bytes;
use chunks::Transfer;
use ed25519_dalek::SigningKey;
use gather::Gathered;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tree::TopicState;

/// How often what is old is looked for.
const SWEEP: Duration = Duration::from_secs(1);
/// Smaller payloads are copied when they are kept, or each would keep the whole read it came with.
const COPY_BELOW: usize = 16 << 10;
/// Topics that are compared with a new peer at once.
const GREETED: usize = 128;

/// How long after an announcement, or an answer, peers are given to ask; a guess.
const OWED: Duration = Duration::from_millis(500);

/// What time it is: since some beginning, and by the calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    pub mono: Duration,
    pub unix_ms: u64,
}

/// Something for the engine's owner to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// A message for whoever follows its topic here.
    Deliver(Delivery),
    /// A peer's queue was empty and is not any more.
    Wake(PeerId),
    /// Answer 429 `busy` in application 0x0100 under this number.
    Refuse(PeerId, u64),
    /// End the session; the engine has forgotten the peer.
    Disconnect(PeerId, Goaway),
    Greylisted {
        node: NodeId,
        until: Duration,
        offence: Offence,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    pub id: MessageId,
    pub origin: NodeId,
    pub seq: u64,
    pub time: u64,
    pub topic: Topic,
    pub payload: Bytes,
    pub hops: u8,
}

/// What became of a publication: peers that it is pushed to, that are told of it, and that it found no room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    pub id: MessageId,
    pub queued: usize,
    pub lazy: usize,
    pub refused: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PublishError {
    #[error("a message of {0} bytes is too large")]
    TooLarge(usize),
    #[error("no peer has room for it")]
    Busy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    #[error("the node is greylisted")]
    Greylisted { until: Duration },
    #[error("the node is connected already")]
    Connected(PeerId),
    #[error("the node is this one")]
    Myself,
}

/// A peer as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    pub peer: PeerId,
    pub node: NodeId,
    pub score: i64,
    pub rtt: Duration,
    /// Topics for which messages are pushed to it.
    pub eager: usize,
    pub queued_frames: usize,
    pub queued_bytes: usize,
    pub follows: usize,
}

#[derive(Debug)]
pub struct Engine {
    config: Config,
    author: Author,
    node: NodeId,
    random: Random,
    seq: u64,
    peers: BTreeMap<PeerId, Peer>,
    nodes: BTreeMap<NodeId, PeerId>,
    last_peer: u64,
    topics: BTreeMap<Topic, TopicState>,
    /// Topics that somebody here follows.
    follows: BTreeSet<Topic>,
    origins: Origins,
    seen: Seen,
    history: History,
    missing: Missing,
    transfers: BTreeMap<MessageId, Transfer>,
    scores: Scores,
    ledger: Ledger,
    ceiling: Arc<Ceiling>,
    announce_due: BTreeSet<(Duration, PeerId)>,
    digest_due: BTreeSet<(Duration, Topic)>,
    sweep_due: Duration,
    gathered: Gathered,
    /// When peers were last told of, or given, what none of them was pushed.
    owed: Option<Duration>,
    actions: VecDeque<Action>,
}

impl Engine {
    pub fn new(config: Config, key: SigningKey, seed: u64, ceiling: Arc<Ceiling>, now: Now) -> Engine {
        let mixing = Mixing(Random::new(!seed).number());
        Engine {
            node: NodeId(key.verifying_key().to_bytes()),
            author: Author::new(&key),
            random: Random::new(seed),
            seq: 0,
            peers: BTreeMap::new(),
            nodes: BTreeMap::new(),
            last_peer: 0,
            topics: BTreeMap::new(),
            follows: BTreeSet::new(),
            origins: Origins::default(),
            seen: Seen::new(config.seen_max, mixing),
            history: History::new(config.history, config.history_bytes_max, mixing),
            missing: Missing::new(config.missing_max),
            transfers: BTreeMap::new(),
            scores: Scores::default(),
            ledger: Ledger::default(),
            ceiling,
            announce_due: BTreeSet::new(),
            digest_due: BTreeSet::new(),
            sweep_due: now.mono + SWEEP,
            gathered: Gathered::default(),
            owed: None,
            actions: VecDeque::new(),
            config,
        }
    }

    /// Peers get numbers above this one, so that those of an engine that was before mean nobody here.
    pub fn number_peers_above(&mut self, last: u64) {
        self.last_peer = last;
    }

    pub fn node(&self) -> NodeId {
        self.node
    }

    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// For queues that stand before the engine and shed on its behalf.
    pub fn ledger_mut(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    /// How much there is to do.
    pub fn waiting(&self) -> usize {
        self.actions.len()
    }

    /// What to do next.
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// A session with this node is open; frames for it are in the queue that comes back.
    pub fn connect(
        &mut self,
        now: Now,
        node: NodeId,
        max_frame: u32,
    ) -> Result<(PeerId, SharedEgress), ConnectError> {
        if node == self.node {
            return Err(ConnectError::Myself);
        }
        if let Some(until) = self.greylisted(node, now) {
            return Err(ConnectError::Greylisted { until });
        }
        if let Some(peer) = self.nodes.get(&node) {
            return Err(ConnectError::Connected(*peer));
        }
        self.last_peer += 1;
        let peer = PeerId(self.last_peer);
        let egress = SharedEgress::new(Egress::new(self.config.egress, self.ceiling.clone()));
        let max_frame = max_frame.max(FRAME_MIN_MAX);
        self.peers.insert(peer, Peer::new(node, max_frame, egress.clone(), &self.config, now.mono));
        self.nodes.insert(node, peer);
        self.greet(now, peer);
        Ok((peer, egress))
    }

    /// The transport has proved that a peer is the node it says: what it publishes itself needs no other proof here.
    pub fn prove(&mut self, peer: PeerId) {
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.proved = true;
        }
    }

    /// The session is over.
    pub fn disconnect(&mut self, now: Now, peer: PeerId) {
        let Some(gone) = self.peers.remove(&peer) else { return };
        self.nodes.remove(&gone.node);
        if let Some(due) = gone.announce_due {
            self.announce_due.remove(&(due, peer));
        }
        self.ledger.note_shed(Queue::Announce, Lane::Control, Cause::Gone, gone.announce_count as u64);
        for (lane, count) in gone.egress.lock().clear() {
            self.ledger.note_shed(Queue::Egress, lane, Cause::Gone, count);
        }
        self.transfers.retain(|_, transfer| transfer.source != peer);
        self.heal(now, peer);
    }

    /// A round trip to a peer, as its session measured it.
    pub fn rtt(&mut self, peer: PeerId, sample: Duration) {
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.rtt.add(sample);
        }
    }

    /// Until when a node is greylisted, if it is.
    pub fn greylisted(&self, node: NodeId, now: Now) -> Option<Duration> {
        self.scores.greylisted(node, now.mono)
    }

    /// A peer broke the rules where the engine does not see it.
    pub fn offend(&mut self, now: Now, peer: PeerId, offence: Offence) {
        let Some(node) = self.peers.get(&peer).map(|peer| peer.node) else { return };
        let Some(until) = self.scores.offend(node, offence, now.mono, self.config.greylist) else { return };
        self.actions.push_back(Action::Greylisted { node, until, offence });
        self.actions.push_back(Action::Disconnect(peer, Goaway::Policy));
        self.disconnect(now, peer);
    }

    /// Somebody here follows a topic from now on.
    pub fn follow(&mut self, now: Now, topic: &Topic) {
        if self.follows.insert(topic.clone()) {
            self.tell_all(&Gossip::Topics(vec![(true, topic.clone())]));
            self.touch(now, topic);
        }
    }

    /// Nobody here follows it any more.
    pub fn unfollow(&mut self, topic: &Topic) {
        if self.follows.remove(topic) {
            self.tell_all(&Gossip::Topics(vec![(false, topic.clone())]));
        }
    }

    pub fn publish(&mut self, now: Now, topic: &Topic, payload: Bytes) -> Result<Published, PublishError> {
        let one = vec![(topic.clone(), payload)];
        self.publish_all(now, one, false, false).pop().unwrap_or(Err(PublishError::Busy))
    }

    /// Publishes several messages, which are signed together, and with others if those come soon. With `until_busy` what
    /// follows one that nobody had room for is not tried, and has no result; they are of one topic then. Who is patient
    /// tries again later, and is told that there is no room while there is still some for who is not.
    pub fn publish_all(
        &mut self,
        now: Now,
        messages: Vec<(Topic, Bytes)>,
        until_busy: bool,
        patient: bool,
    ) -> Vec<Result<Published, PublishError>> {
        let made = self.make(now, messages, patient);
        if self.may_gather(now, &made) {
            let gathered = made.into_iter().map(|kept| kept.map(|kept| self.gather(now, kept))).collect();
            if self.gathered.is_enough() {
                self.sign_gathered(now);
            }
            return gathered;
        }
        self.sign_gathered(now);
        let (mut units, room) = (Units::default(), self.bundle_room());
        let places: Vec<_> =
            made.into_iter().map(|kept| kept.map(|kept| (kept.id, units.add(kept, room)))).collect();
        let mut sent = Vec::with_capacity(units.len());
        for kept in self.signed(now, units) {
            let held_up = patient && self.is_pressed(&kept.envelope.topic, kept.payload.len());
            sent.push(if held_up { Err(PublishError::Busy) } else { self.send_out(now, kept) });
            if until_busy && sent.last() == Some(&Err(PublishError::Busy)) {
                break;
            }
        }
        let of_each = |place: Result<(MessageId, usize), PublishError>| match place {
            Ok((id, unit)) => sent.get(unit).map(|sent| sent.map(|sent| Published { id, ..sent })),
            Err(error) => Some(Err(error)),
        };
        let mut done: Vec<_> = places.into_iter().map_while(of_each).collect();
        if until_busy && let Some(busy) = done.iter().position(|one| *one == Err(PublishError::Busy)) {
            done.truncate(busy + 1);
        }
        done
    }

    fn make(
        &mut self,
        now: Now,
        messages: Vec<(Topic, Bytes)>,
        patient: bool,
    ) -> Vec<Result<Kept, PublishError>> {
        let number = |(topic, payload): (Topic, Bytes)| {
            // Before anything is made that would have to be made again.
            if patient && self.is_pressed(&topic, payload.len()) {
                return Err(PublishError::Busy);
            }
            if payload.len() > self.config.max_message_bytes {
                return Err(PublishError::TooLarge(payload.len()));
            }
            self.seq = (self.seq + 1).max(now.unix_ms.saturating_mul(1000));
            let (origin, seq, time) = (self.node, self.seq, now.unix_ms);
            let envelope = Envelope { origin, seq, time, topic, bundle: false, signature: None };
            // Ids are made of all together.
            Ok(Kept { id: MessageId([0; 32]), envelope, payload, hops: 0, checked: true, count: 1 })
        };
        let mut made: Vec<_> = messages.into_iter().map(number).collect();
        let named: Vec<Named<'_>> =
            made.iter().flatten().map(|kept| Named::of(&kept.envelope, &kept.payload)).collect();
        let ids = Named::ids(&named);
        made.iter_mut().flatten().zip(ids).for_each(|(kept, id)| kept.id = id);
        made
    }

    fn send_out(&mut self, now: Now, kept: Kept) -> Result<Published, PublishError> {
        self.touch(now, &kept.envelope.topic);
        let reach = self.relay(now, &kept, None, false);
        if reach.queued + reach.lazy == 0 && reach.refused > 0 {
            return Err(PublishError::Busy);
        }
        self.note_owed(now, reach);
        let id = kept.id;
        self.keep(kept, First { from: None, asked: false });
        Ok(Published { id, ..reach })
    }

    /// A message of this node's that was pushed to nobody is lost with it, unless somebody asks for it.
    fn note_owed(&mut self, now: Now, reach: Published) {
        if reach.queued == 0 && reach.lazy > 0 {
            self.owed = Some(now.mono);
        }
    }

    /// Whether a node that is to end should wait: peers may be about to ask for what nobody else has.
    pub fn owes(&self, now: Now) -> bool {
        let untold = || self.peers.values().any(|peer| peer.announce_count > 0);
        self.owed.is_some_and(|owed| now.mono < owed + OWED || untold())
    }

    /// When to call [`Engine::tick`] even if nothing comes.
    pub fn due(&self) -> Duration {
        let missing = self.missing.next_due().map(|(due, _)| due);
        let announce = self.announce_due.first().map(|(due, _)| *due);
        let digest = self.digest_due.first().map(|(due, _)| *due);
        let gathered = self.gathered.due();
        [missing, announce, digest, gathered].into_iter().flatten().fold(self.sweep_due, Duration::min)
    }

    /// Does what is due.
    pub fn tick(&mut self, now: Now) {
        if self.gathered.due().is_some_and(|due| due <= now.mono) {
            self.sign_gathered(now);
        }
        self.ask_due(now);
        while let Some((due, peer)) = self.announce_due.first().copied().filter(|(due, _)| *due <= now.mono) {
            self.announce_due.remove(&(due, peer));
            self.announce_now(now, peer);
        }
        while let Some((_, topic)) = self.digest_due.first().cloned().filter(|(due, _)| *due <= now.mono) {
            self.compare(now, &topic);
        }
        if now.mono >= self.sweep_due {
            self.sweep_due = now.mono + SWEEP;
            self.history.expire(now.unix_ms);
            self.seen.expire(self.oldest(now));
            self.scores.sweep(now.mono);
            self.sweep_topics(now);
        }
    }

    /// The messages of a topic that are kept, the oldest first.
    pub fn history<'a>(&'a self, topic: &Topic) -> impl Iterator<Item = &'a Kept> {
        self.history.of(topic)
    }

    pub fn peers(&self, now: Now) -> Vec<PeerInfo> {
        let info = |(id, peer): (&PeerId, &Peer)| {
            let egress = peer.egress.lock();
            PeerInfo {
                peer: *id,
                node: peer.node,
                score: self.scores.score(peer.node, now.mono),
                rtt: peer.rtt.mean(),
                eager: self.topics.values().filter(|topic| topic.eager.contains(id)).count(),
                queued_frames: egress.frames(),
                queued_bytes: egress.bytes(),
                follows: peer.follows.len(),
            }
        };
        self.peers.iter().map(info).collect()
    }

    /// Peers whose queues are full, and all of them: what readiness is judged by.
    pub fn full_peers(&self) -> (usize, usize) {
        let full = self.peers.values().filter(|peer| peer.egress.lock().is_full()).count();
        (full, self.peers.len())
    }

    /// Bytes that are kept, messages that are remembered, and messages that are missed.
    pub fn kept(&self) -> (usize, usize, usize) {
        (self.history.bytes(), self.seen.len(), self.missing.len())
    }

    /// Remembers a checked message and hands it to whoever follows its topic.
    fn keep(&mut self, mut kept: Kept, first: First) {
        if kept.payload.len() < COPY_BELOW {
            kept.payload = Bytes::copy_from_slice(&kept.payload);
        }
        self.seen.insert(kept.id, &kept.envelope, first);
        if self.follows.contains(&kept.envelope.topic) {
            let Envelope { origin, time, ref topic, .. } = kept.envelope;
            for (id, seq, payload) in kept.messages() {
                let (topic, hops) = (topic.clone(), kept.hops);
                let delivery = Delivery { id, origin, seq, time, topic, payload, hops };
                self.actions.push_back(Action::Deliver(delivery));
            }
        }
        if first.from.is_some() {
            self.ledger.note_all(Outcome::Delivered, kept.count);
        }
        self.history.insert(kept);
    }

    /// The time of the oldest message that is still taken.
    fn oldest(&self, now: Now) -> u64 {
        now.unix_ms.saturating_sub(millis(self.config.history.age + self.config.skew))
    }

    /// Queues a frame for a peer; what it pushes out, or its own refusal, is counted.
    fn send(&mut self, peer: PeerId, lane: Lane, topic: u64, frame: Encoded) -> bool {
        let Some(to) = self.peers.get(&peer) else { return false };
        match to.egress.push(lane, topic, frame) {
            Ok(queued) => {
                for frame in queued.dropped {
                    self.ledger.note_shed(Queue::Egress, frame.lane, Cause::Dropped, 1);
                }
                self.ledger.frames_out += 1;
                if queued.wake {
                    self.actions.push_back(Action::Wake(peer));
                }
                true
            }
            Err(refused) => {
                let cause = if refused == Refused::Full { Cause::Full } else { Cause::Ceiling };
                self.ledger.note_shed(Queue::Egress, lane, cause, 1);
                false
            }
        }
    }

    /// Queues a frame about a topic in the control lane.
    fn tell(&mut self, peer: PeerId, gossip: &Gossip) -> bool {
        let Some(max) = self.peers.get(&peer).map(|peer| peer.max_frame) else { return false };
        gossip.encode(max).is_ok_and(|frame| self.send(peer, Lane::Control, flow(&[]), frame))
    }

    fn tell_all(&mut self, gossip: &Gossip) {
        let peers: Vec<PeerId> = self.peers.keys().copied().collect();
        for peer in peers {
            self.tell(peer, gossip);
        }
    }

    /// Tells a new peer what is followed here, and what is kept.
    fn greet(&mut self, now: Now, peer: PeerId) {
        let follows: Vec<(bool, Topic)> = self.follows.iter().map(|topic| (true, topic.clone())).collect();
        for part in follows.chunks(TOPICS_MAX / 4) {
            self.tell(peer, &Gossip::Topics(part.to_vec()));
        }
        self.join_trees(peer);
        let topics: Vec<Topic> = self.topics.keys().cloned().collect();
        for (number, topic) in topics.iter().enumerate() {
            // The rest come up by themselves; a queue full of these would be of no use to anybody.
            if number < GREETED {
                self.digest(now, peer, topic, 0, now.unix_ms);
            }
            self.expect_digest_soon(now, topic);
        }
    }
}
