//! What happens in a network, one event after the other.

use crate::net::{Event, Link, Net, Node, Session, node_id};
use oap::frame::FRAME_MAX;
use oap::gossip::{Action, Cause, Engine, Incoming, Lane, Outcome, PeerId, Queue, Refused};
use oap::{Decoded, Decoder, Encoded};
use std::collections::BTreeSet;
use std::time::Duration;

impl Net {
    pub(crate) fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(((due, number), event)) = self.events.pop_first() {
            if due > end {
                self.events.insert((due, number), event);
                break;
            }
            self.now = due;
            self.step(event);
        }
        self.now = end;
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Arrive { from, to, session, frame } => {
                if self.groups[from] == self.groups[to] {
                    self.arrive(from, to, session, &frame);
                }
            }
            Event::Refusal { from, to, session, corr } => {
                let now = self.time(to);
                if let Some(node) = self.nodes[to].as_mut()
                    && let Some(known) = node.peers.get(&from).filter(|known| known.number == session)
                {
                    node.engine.refused(now, known.peer, corr);
                    self.serve(to);
                }
            }
            Event::Written { node, peer, session } => {
                if let Some(it) = self.nodes[node].as_mut()
                    && let Some(link) = it.links.get_mut(&peer).filter(|link| link.session == session)
                {
                    let written = std::mem::take(&mut link.writing);
                    link.egress.lock().written(&written);
                    self.write(node, peer);
                }
            }
            Event::Work { node, life } if self.lives[node] == life => self.work(node),
            Event::Tick { node, life } if self.lives[node] == life => {
                let now = self.time(node);
                if let Some(it) = self.nodes[node].as_mut() {
                    it.tick = Duration::MAX;
                    it.engine.tick(now);
                    self.serve(node);
                }
            }
            Event::Work { .. } | Event::Tick { .. } => {}
            Event::Dial { one, other } => self.dial(one, other),
            Event::Hangup { one, other, session } => {
                let has = |node: usize, peer: usize| {
                    let sessions = self.nodes[node].as_ref().map(|node| &node.peers);
                    sessions.and_then(|peers| peers.get(&peer)).is_some_and(|it| it.number == session)
                };
                // Only if they still cannot reach each other.
                if self.groups[one] != self.groups[other] || !has(one, other) || !has(other, one) {
                    self.hang_up(one, other, session);
                    self.hang_up(other, one, session);
                }
            }
            Event::Born { node } => self.begin(node),
        }
    }

    /// Opens a session between two nodes, unless they have one or cannot.
    fn dial(&mut self, one: usize, other: usize) {
        let session = |net: &Net, node: usize, peer: usize| {
            net.nodes[node].as_ref().and_then(|it| it.peers.get(&peer)).map(|it| it.number)
        };
        let (ours, theirs) = (session(self, one, other), session(self, other, one));
        let alive = self.nodes[one].is_some() && self.nodes[other].is_some();
        if !alive || self.groups[one] != self.groups[other] || ours.is_some() && ours == theirs {
            return;
        }
        // What is left of a session that the other side has lost.
        ours.into_iter().for_each(|session| self.hang_up(one, other, session));
        theirs.into_iter().for_each(|session| self.hang_up(other, one, session));
        self.sessions += 1;
        let (number, round_trip) = (self.sessions, self.delay(one, other) * 2);
        for (node, peer) in [(one, other), (other, one)] {
            let now = self.time(node);
            let Some(it) = self.nodes[node].as_mut() else { continue };
            let Ok((id, egress)) = it.engine.connect(now, node_id(peer), FRAME_MAX) else {
                self.hang_up(peer, node, number);
                break;
            };
            it.engine.prove(id);
            // As a session that has pinged a few times would say.
            (0..8).for_each(|_| it.engine.rtt(id, round_trip));
            it.peers.insert(peer, Session { peer: id, number });
            it.links.insert(id, Link { to: peer, session: number, egress, writing: Vec::new() });
        }
        self.serve(one);
        self.serve(other);
    }

    /// One side of a session is over.
    fn hang_up(&mut self, node: usize, peer: usize, session: u64) {
        let now = self.time(node);
        let Some(it) = self.nodes[node].as_mut() else { return };
        let Some(known) = it.peers.get(&peer).filter(|known| known.number == session).copied() else {
            return;
        };
        it.engine.disconnect(now, known.peer);
        it.forget(peer, known.peer);
        self.serve(node);
    }

    /// A frame comes to a node: through the codec into the queue before the engine, if there is room.
    pub(crate) fn arrive(&mut self, from: usize, to: usize, session: u64, frame: &Encoded) {
        let Some(node) = self.nodes[to].as_mut() else { return };
        let Some(known) = node.peers.get(&from).filter(|known| known.number == session) else { return };
        let mut decoder = Decoder::new(FRAME_MAX);
        decoder.push(&frame.to_vec());
        let Ok(Some(Decoded::Frame(frame))) = decoder.next_frame() else {
            panic!("a frame that does not read")
        };
        let happened =
            frame.corr ^ self.now.as_nanos() as u64 ^ (to as u64) << 48 ^ frame.payload.len() as u64;
        self.trace = (self.trace ^ happened).wrapping_mul(0x0100_0000_01b3).rotate_left(7);
        node.frames.came += 1;
        let (peer, corr) = (known.peer, frame.corr);
        let mut refused = Vec::new();
        match node.ingress.push(Incoming { peer, corr, payload: frame.payload }) {
            Ok(displaced) => {
                for it in displaced {
                    node.engine.ledger_mut().note_shed(Queue::Ingress, it.lane, Cause::Displaced, 1);
                    refused.push((it.frame.peer, it.frame.corr));
                }
            }
            Err(why) => {
                let cause = if why == Refused::Full { Cause::Full } else { Cause::Ceiling };
                node.engine.ledger_mut().note_shed(Queue::Ingress, Lane::Normal, cause, 1);
                refused.push((peer, corr));
            }
        }
        node.queued_max = node.queued_max.max(node.ceiling.used());
        if !std::mem::replace(&mut node.working, true) {
            let life = self.lives[to];
            self.at(self.now + self.shape.wire.work, Event::Work { node: to, life });
        }
        for (peer, corr) in refused {
            self.refuse(to, peer, corr);
        }
    }

    /// An engine has thought about a frame.
    fn work(&mut self, node: usize) {
        let now = self.time(node);
        let Some(it) = self.nodes[node].as_mut() else { return };
        if let Some((_, frame)) = it.ingress.pop() {
            let before = outcomes(&it.engine);
            it.engine.receive(now, frame.peer, frame.corr, &frame.payload);
            if frame.payload.first() == Some(&1) {
                it.frames.messages += 1;
                it.frames.outcomes += outcomes(&it.engine) - before;
            }
        }
        it.working = !it.ingress.is_empty();
        if it.working {
            let life = self.lives[node];
            self.at(self.now + self.shape.wire.work, Event::Work { node, life });
        }
        self.serve(node);
    }

    /// Tells a peer that a frame of its found no room.
    fn refuse(&mut self, node: usize, peer: PeerId, corr: u64) {
        let Some(link) = self.nodes[node].as_ref().and_then(|it| it.links.get(&peer)) else { return };
        let (to, session) = (link.to, link.session);
        let due = self.now + self.delay(node, to);
        self.at(due, Event::Refusal { from: node, to, session, corr });
    }

    /// Does what an engine wants done.
    pub(crate) fn serve(&mut self, node: usize) {
        let mut wake = BTreeSet::new();
        loop {
            let Some(it) = self.nodes[node].as_mut() else { return };
            match it.engine.poll() {
                None => break,
                Some(Action::Deliver(delivery)) => {
                    it.delivered.entry(delivery.id).or_insert((0, self.now)).0 += 1;
                }
                Some(Action::Wake(peer)) => drop(wake.insert(peer)),
                Some(Action::Refuse(peer, corr)) => self.refuse(node, peer, corr),
                Some(Action::Disconnect(peer, _)) => {
                    if let Some((to, session)) = it.links.get(&peer).map(|link| (link.to, link.session)) {
                        it.forget(to, peer);
                        self.hang_up(to, node, session);
                    }
                }
                Some(Action::Greylisted { node, offence, .. }) => {
                    it.greylisted.push((node, offence, self.now));
                }
            }
        }
        for peer in wake {
            self.write(node, peer);
        }
        let life = self.lives[node];
        let Some(it) = self.nodes[node].as_mut() else { return };
        it.queued_max = it.queued_max.max(it.ceiling.used());
        let due = it.engine.due().max(self.now);
        if due < it.tick {
            it.tick = due;
            self.at(due, Event::Tick { node, life });
        }
    }

    /// A writer takes what is queued and writes it as fast as wire and reader go, unless the reader does not.
    pub(crate) fn write(&mut self, node: usize, peer: PeerId) {
        let Some(it) = self.nodes[node].as_mut() else { return };
        let Some(link) = it.links.get_mut(&peer) else { return };
        let (to, session) = (link.to, link.session);
        if !link.writing.is_empty() || self.frozen.contains(&to) {
            return;
        }
        link.egress.lock().take(32, 64 << 10, &mut link.writing);
        let batch = link.writing.clone();
        if batch.is_empty() {
            return;
        }
        it.frames.written += batch.len() as u64;
        let bytes: usize = batch.iter().map(Encoded::len).sum();
        let wire = &self.shape.wire;
        let speed = self.slow.get(&to).copied().unwrap_or(wire.bytes_per_second);
        let (lost, doubled, late_us) = (wire.lost, wire.doubled, wire.late_ms * 1000);
        let written = self.now + Duration::from_nanos(bytes as u64 * 1_000_000_000 / speed);
        self.at(written, Event::Written { node, peer, session });
        let arrives = written + self.delay(node, to);
        for frame in batch {
            for _ in 0..1 + usize::from(self.random.below(1000) < doubled) {
                if self.random.below(1000) >= lost {
                    let due = arrives + Duration::from_micros(self.random.below(late_us + 1) as u64);
                    self.at(due, Event::Arrive { from: node, to, session, frame: frame.clone() });
                }
            }
        }
    }
}

impl Node {
    /// Drops what is left of a session that its engine has forgotten.
    fn forget(&mut self, place: usize, peer: PeerId) {
        self.peers.remove(&place);
        self.links.remove(&peer);
        self.frames.forgotten += self.ingress.forget(peer) as u64;
    }
}

/// Messages that the ledger has an outcome for.
fn outcomes(engine: &Engine) -> u64 {
    let all = [Outcome::Delivered, Outcome::Duplicate, Outcome::Invalid, Outcome::Expired, Outcome::Shed];
    all.iter().map(|outcome| engine.ledger().outcome(*outcome)).sum()
}
