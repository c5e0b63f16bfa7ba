//! A network of engines within one process: seeded, so that a run can be repeated to the last frame.
//!
//! What is simulated are wires and machines: delay, loss, order, speed, clocks, the time a frame takes, peers that
//! do not read and nodes that die. Frames are the real ones, through the real codec and both queues.

use bytes::Bytes;
use ed25519_dalek::SigningKey;
use oap::gossip::random::Random;
use oap::gossip::{
    Ceiling, Config, Engine, Ingress, MessageId, Now, Offence, PeerId, PublishError, Published, SharedEgress,
    Topic,
};
use oap::{Encoded, NodeId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// The calendar when a simulation begins.
pub(crate) const EPOCH_MS: u64 = 1_700_000_000_000;
/// How long a session lives over which nothing comes.
const IDLE: Duration = Duration::from_secs(15);
/// How soon a node knows that a peer has died.
const RESET: Duration = Duration::from_millis(100);
/// How long messages wait for others to be signed with.
pub(crate) const GATHER: Duration = Duration::from_millis(2);
/// What a node's queues may hold together.
pub(crate) const CEILING: usize = 256 << 20;
const INGRESS_BYTES: usize = 16 << 20;

/// What the wire does.
#[derive(Clone, Debug)]
pub(crate) struct Wire {
    pub(crate) delay_ms: (usize, usize),
    /// Of a thousand frames, how many are lost, doubled, or late by up to so many milliseconds more.
    pub(crate) lost: usize,
    pub(crate) doubled: usize,
    pub(crate) late_ms: usize,
    pub(crate) bytes_per_second: u64,
    /// How long an engine thinks about a frame.
    pub(crate) work: Duration,
}

impl Default for Wire {
    fn default() -> Wire {
        let work = Duration::from_micros(20);
        Wire { delay_ms: (5, 40), lost: 0, doubled: 0, late_ms: 0, bytes_per_second: 12_500_000, work }
    }
}

/// What a network is made of.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) nodes: usize,
    pub(crate) degree: usize,
    pub(crate) topics: usize,
    /// How far apart the calendars of two nodes may be.
    pub(crate) clocks_ms: usize,
    pub(crate) ingress: usize,
    pub(crate) config: Config,
    pub(crate) wire: Wire,
}

impl Default for Shape {
    fn default() -> Shape {
        let config = Config { gather: GATHER, ..Config::default() };
        let wire = Wire::default();
        Shape { nodes: 32, degree: 6, topics: 1, clocks_ms: 0, ingress: 512, config, wire }
    }
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) engine: Engine,
    pub(crate) ingress: Ingress,
    pub(crate) ceiling: Arc<Ceiling>,
    pub(crate) peers: BTreeMap<usize, Session>,
    pub(crate) links: BTreeMap<PeerId, Link>,
    pub(crate) delivered: BTreeMap<MessageId, (u32, Duration)>,
    pub(crate) greylisted: Vec<(NodeId, Offence, Duration)>,
    /// The most that its queues ever held.
    pub(crate) queued_max: usize,
    pub(crate) frames: Frames,
    pub(crate) tick: Duration,
    pub(crate) working: bool,
}

/// One of the sessions that two places in the network have had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Session {
    pub(crate) peer: PeerId,
    pub(crate) number: u64,
}

/// What the simulation itself has counted at a node, to compare its ledger with.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Frames {
    /// Taken by writers.
    pub(crate) written: u64,
    /// Came over a session that was open.
    pub(crate) came: u64,
    /// Waited for the engine when their session ended.
    pub(crate) forgotten: u64,
    /// Carried a message, and the outcomes that the ledger had for them.
    pub(crate) messages: u64,
    pub(crate) outcomes: u64,
}

#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) to: usize,
    pub(crate) session: u64,
    pub(crate) egress: SharedEgress,
    /// What the writer is writing.
    pub(crate) writing: Vec<Encoded>,
}

#[derive(Debug)]
pub(crate) enum Event {
    Arrive { from: usize, to: usize, session: u64, frame: Encoded },
    Refusal { from: usize, to: usize, session: u64, corr: u64 },
    Written { node: usize, peer: PeerId, session: u64 },
    Work { node: usize, life: u32 },
    Tick { node: usize, life: u32 },
    Dial { one: usize, other: usize },
    Hangup { one: usize, other: usize, session: u64 },
    Born { node: usize },
}

/// A message that its publisher was told is on its way.
#[derive(Clone, Debug)]
pub(crate) struct Accepted {
    pub(crate) id: MessageId,
    pub(crate) at: Duration,
    pub(crate) by: usize,
    /// Which life of its publisher's it was.
    pub(crate) life: u32,
    pub(crate) topic: usize,
    pub(crate) reach: Published,
}

#[derive(Debug)]
pub(crate) struct Net {
    pub(crate) now: Duration,
    pub(crate) shape: Shape,
    pub(crate) nodes: Vec<Option<Node>>,
    /// Counts the lives of each place in the network.
    pub(crate) lives: Vec<u32>,
    pub(crate) random: Random,
    pub(crate) accepted: Vec<Accepted>,
    pub(crate) topics: Vec<Topic>,
    /// Nodes that read nothing, and nodes that read so many bytes a second.
    pub(crate) frozen: BTreeSet<usize>,
    pub(crate) slow: BTreeMap<usize, u64>,
    /// Frames cross only within a group.
    pub(crate) groups: Vec<u8>,
    pub(crate) clocks: Vec<u64>,
    pub(crate) wiring: BTreeMap<(usize, usize), Duration>,
    pub(crate) sessions: u64,
    pub(crate) events: BTreeMap<(Duration, u64), Event>,
    pub(crate) number: u64,
    /// A hash of everything that happened.
    pub(crate) trace: u64,
}

pub(crate) fn key(node: usize) -> SigningKey {
    let mut seed = [0; 32];
    seed[..8].copy_from_slice(&(node as u64 + 1).to_le_bytes());
    SigningKey::from_bytes(&seed)
}

pub(crate) fn node_id(node: usize) -> NodeId {
    NodeId(key(node).verifying_key().to_bytes())
}

/// Everybody follows the first topic, and of each other two thirds of the nodes do; the rest only carry it.
pub(crate) fn follows(node: usize, topic: usize) -> bool {
    topic == 0 || !(node + topic).is_multiple_of(3)
}

impl Net {
    pub(crate) fn new(shape: Shape, seed: u64) -> Net {
        let mut random = Random::new(seed);
        let name = |number: usize| Topic::parse(&format!("sim/{number}")).expect("a topic");
        let mut net = Net {
            now: Duration::ZERO,
            nodes: (0..shape.nodes).map(|_| None).collect(),
            lives: vec![0; shape.nodes],
            accepted: Vec::new(),
            topics: (0..shape.topics).map(name).collect(),
            frozen: BTreeSet::new(),
            slow: BTreeMap::new(),
            groups: vec![0; shape.nodes],
            clocks: (0..shape.nodes).map(|_| random.below(shape.clocks_ms + 1) as u64).collect(),
            wiring: BTreeMap::new(),
            sessions: 0,
            events: BTreeMap::new(),
            number: 0,
            trace: 0,
            random,
            shape,
        };
        net.wire_up();
        (0..net.nodes.len()).for_each(|node| net.begin(node));
        net
    }

    /// A ring, so that all are connected, and chords by chance, up to a degree.
    fn wire_up(&mut self) {
        let count = self.nodes.len();
        let mut degrees = vec![0; count];
        let mut join = |net: &mut Net, one: usize, other: usize| {
            let (pair, most) = ((one.min(other), one.max(other)), net.shape.degree);
            let full = degrees[one] >= most || degrees[other] >= most;
            if one == other || full || net.wiring.contains_key(&pair) {
                return;
            }
            degrees[one] += 1;
            degrees[other] += 1;
            let (least, most) = net.shape.wire.delay_ms;
            let delay = Duration::from_millis((least + net.random.below(most - least + 1)) as u64);
            net.wiring.insert(pair, delay);
        };
        (0..count).for_each(|node| join(self, node, (node + 1) % count));
        for _ in 0..count * self.shape.degree {
            let (one, other) = (self.random.below(count), self.random.below(count));
            join(self, one, other);
        }
    }

    /// Whether the others can all reach each other without these.
    pub(crate) fn is_connected_without(&self, gone: &BTreeSet<usize>) -> bool {
        let rest = || (0..self.nodes.len()).filter(|node| !gone.contains(node));
        let mut reached: BTreeSet<usize> = rest().take(1).collect();
        let mut ahead: Vec<usize> = reached.iter().copied().collect();
        while let Some(node) = ahead.pop() {
            for (one, other) in self.wiring.keys().filter(|(one, other)| *one == node || *other == node) {
                let next = if *one == node { *other } else { *one };
                if !gone.contains(&next) && reached.insert(next) {
                    ahead.push(next);
                }
            }
        }
        reached.len() == rest().count()
    }

    pub(crate) fn time(&self, node: usize) -> Now {
        let unix_ms = EPOCH_MS + self.clocks[node] + self.now.as_millis() as u64;
        Now { mono: self.now, unix_ms }
    }

    pub(crate) fn delay(&self, one: usize, other: usize) -> Duration {
        self.wiring.get(&(one.min(other), one.max(other))).copied().unwrap_or_default()
    }

    pub(crate) fn at(&mut self, due: Duration, event: Event) {
        self.number += 1;
        self.events.insert((due, self.number), event);
    }

    /// A node begins a life and dials everybody it is wired to.
    pub(crate) fn begin(&mut self, node: usize) {
        self.lives[node] += 1;
        let ceiling = Ceiling::new(CEILING);
        let (seed, now) = (self.random.number(), self.time(node));
        let mut engine = Engine::new(self.shape.config.clone(), key(node), seed, ceiling.clone(), now);
        for (_, topic) in self.topics.iter().enumerate().filter(|(number, _)| follows(node, *number)) {
            engine.follow(now, topic);
        }
        self.nodes[node] = Some(Node {
            engine,
            ingress: Ingress::new(self.shape.ingress, INGRESS_BYTES, ceiling.clone()),
            ceiling,
            peers: BTreeMap::new(),
            links: BTreeMap::new(),
            delivered: BTreeMap::new(),
            greylisted: Vec::new(),
            queued_max: 0,
            frames: Frames::default(),
            tick: Duration::MAX,
            working: false,
        });
        let wired: Vec<_> =
            self.wiring.keys().copied().filter(|(one, other)| *one == node || *other == node).collect();
        for (one, other) in wired {
            let wait = Duration::from_millis(self.random.below(100) as u64);
            self.at(self.now + wait, Event::Dial { one, other });
        }
        self.serve(node);
    }

    pub(crate) fn kill(&mut self, node: usize, back_after: Duration) {
        if let Some(gone) = self.nodes[node].take() {
            for (other, session) in gone.peers {
                let hangup = Event::Hangup { one: node, other, session: session.number };
                self.at(self.now + RESET, hangup);
            }
            self.at(self.now + back_after, Event::Born { node });
        }
    }

    /// Splits the network; sessions across it die after a while, and are dialled again once it is whole.
    pub(crate) fn split(&mut self, group: impl Fn(usize) -> u8) {
        self.groups = (0..self.nodes.len()).map(group).collect();
        let wiring: Vec<_> = self.wiring.keys().copied().collect();
        for (one, other) in wiring {
            let session = self.nodes[one].as_ref().and_then(|node| node.peers.get(&other)).copied();
            match session {
                Some(session) if self.groups[one] != self.groups[other] => {
                    let hangup = Event::Hangup { one, other, session: session.number };
                    self.at(self.now + IDLE, hangup);
                }
                _ => self.at(self.now + Duration::from_millis(500), Event::Dial { one, other }),
            }
        }
    }

    /// From now on a node reads nothing.
    pub(crate) fn freeze(&mut self, node: usize) {
        self.frozen.insert(node);
    }

    /// From now on a node reads so many bytes a second.
    pub(crate) fn slow_down(&mut self, node: usize, bytes_per_second: u64) {
        self.slow.insert(node, bytes_per_second);
    }

    /// Everybody reads as fast as the wire goes.
    pub(crate) fn thaw(&mut self) {
        self.slow.clear();
        self.frozen.clear();
        for node in 0..self.nodes.len() {
            let peers: Vec<PeerId> =
                self.nodes[node].iter().flat_map(|it| it.links.keys().copied()).collect();
            for peer in peers {
                self.write(node, peer);
            }
        }
    }

    pub(crate) fn publish(
        &mut self,
        node: usize,
        topic: usize,
        payload: impl Into<Bytes>,
    ) -> Result<Published, PublishError> {
        let now = self.time(node);
        let Some(it) = self.nodes[node].as_mut() else { return Err(PublishError::Busy) };
        let published = it.engine.publish(now, &self.topics[topic], payload.into());
        if let Ok(reach) = published {
            let (at, life) = (self.now, self.lives[node]);
            self.accepted.push(Accepted { id: reach.id, at, by: node, life, topic, reach });
        }
        self.serve(node);
        published
    }

    /// A frame out of nowhere, as from a peer that is no engine, if the two have a session.
    pub(crate) fn inject(&mut self, from: usize, to: usize, frame: &Encoded) {
        let session = self.nodes[to].as_ref().and_then(|node| node.peers.get(&from)).copied();
        if let Some(session) = session {
            self.arrive(from, to, session.number, frame);
        }
    }
}
