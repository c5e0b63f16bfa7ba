//! The task that drives the gossip engine. It waits for nobody but itself: calls and frames come in, queues are filled.

use crate::calls::{Call, Known};
use crate::link::{End, Link};
use crate::metrics::bucket;
use crate::pressure::{Fill, Pressure};
use crate::shared::{EGRESS, INGRESS_FRAMES, Shared};
use bytes::Bytes;
use oap::NodeId;
use oap::control::Goaway;
use oap::gossip::{
    Action, Cause, ConnectError, Delivery, Engine, Incoming, Lane, Now, Offence, PeerId, PublishError,
    Published, Queue, SharedEgress, Topic,
};
use ron_kernel::bus::KernelEvent;
use ron_kernel::health::Severity;
use ron_kernel::inventory::Live;
use ron_kernel::shutdown::Phase;
use ron_kernel::task::TaskResult;
use ron_transport::meet::newer_stays;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::oneshot;

/// Calls and frames of one round, after which other tasks get their turn.
const CALLS_AT_ONCE: usize = 128;
const FRAMES_AT_ONCE: usize = 64;
/// Deliveries of one round: whoever follows a topic has to get its turn before its queue is full.
const DELIVERIES_AT_ONCE: usize = 64;
/// How often pressure is judged and the numbers are told.
const LOOK: Duration = Duration::from_millis(50);
/// Nodes that are listed as greylisted.
const GREYLISTED_MAX: usize = 4096;
/// What readiness calls it.
const PRESSURE: &str = "pressure";

pub(crate) async fn gossip(shared: Arc<Shared>) -> TaskResult {
    let shutdown = shared.service.shutdown().clone();
    let mut gossip = Gossip::begin(&shared);
    let mut told = false;
    loop {
        let busy = gossip.round();
        let drains = shutdown.phase() >= Phase::Draining;
        if drains && !busy && !gossip.owes() {
            // All that had come is queued for whoever is to have it: the writers may finish.
            gossip.drain();
            if !told {
                told = true;
                tracing::debug!(peers = gossip.links.len(), "gossip drains");
            }
            if gossip.links.is_empty() || shutdown.phase() >= Phase::Aborting {
                gossip.look(true);
                gossip.say_unwritten();
                return Ok(());
            }
        }
        if busy {
            tokio::task::yield_now().await;
            continue;
        }
        let due = gossip.engine.due().min(gossip.look_due);
        tokio::select! {
            biased;
            () = shutdown.draining(), if !drains => {}
            () = shutdown.reached(Phase::Aborting), if drains => {}
            () = shared.wake.notified() => {}
            () = tokio::time::sleep_until(shared.instant(due)) => {}
        }
    }
}

struct Gossip {
    shared: Arc<Shared>,
    engine: Engine,
    links: BTreeMap<PeerId, (NodeId, Arc<Link>)>,
    greylisted: BTreeMap<NodeId, (Duration, Offence)>,
    pressure: Pressure,
    /// What has come and is next, the first of it last.
    frames: Vec<Incoming>,
    /// What is to be published in this round, and who waits to hear of it.
    collected: Vec<(Topic, Bytes)>,
    askers: Vec<oneshot::Sender<Result<Published, PublishError>>>,
    /// All of them wait for room.
    patient: bool,
    look_due: Duration,
    /// What of the ledger is in the queue's own counter already.
    dropped: u64,
    drains: bool,
}

impl Gossip {
    /// An engine that knows nobody yet; sessions of one that was before end, and come again.
    fn begin(shared: &Arc<Shared>) -> Gossip {
        let before: Vec<Arc<Link>> = {
            let mut index = shared.index.lock();
            index.nodes.clear();
            std::mem::take(&mut index.links).into_values().collect()
        };
        let last = shared.begin_anew();
        before.iter().for_each(|link| link.end(End::Restart));
        let now = shared.engine_now();
        let (seed, ceiling) = (ron_kernel::random::u64(), shared.ceiling.clone());
        let config = shared.settings.load().engine();
        let mut engine = Engine::new(config, shared.key.clone(), seed, ceiling, now);
        engine.number_peers_above(last);
        let followed: Vec<_> = shared.subscribers.lock().keys().cloned().collect();
        followed.iter().for_each(|topic| engine.follow(now, topic));
        Gossip {
            shared: shared.clone(),
            engine,
            links: BTreeMap::new(),
            greylisted: BTreeMap::new(),
            pressure: Pressure::default(),
            frames: Vec::new(),
            collected: Vec::new(),
            askers: Vec::new(),
            patient: false,
            look_due: now.mono,
            dropped: 0,
            drains: false,
        }
    }

    /// Some of what is to do; says whether there may be more.
    fn round(&mut self) -> bool {
        let now = self.shared.engine_now();
        let mut calls = 0;
        while calls < CALLS_AT_ONCE
            && self.engine.waiting() < DELIVERIES_AT_ONCE
            && let Some(call) = self.shared.calls_end.try_recv()
        {
            calls += 1;
            self.call(now, call);
        }
        self.publish_collected(now);
        if self.frames.is_empty() {
            self.shared.take(FRAMES_AT_ONCE, &mut self.frames);
            self.frames.reverse();
        }
        let mut frames = 0;
        while self.engine.waiting() < DELIVERIES_AT_ONCE
            && let Some(frame) = self.frames.pop()
        {
            frames += 1;
            self.engine.receive(now, frame.peer, frame.corr, &frame.payload);
        }
        let full = calls == CALLS_AT_ONCE || frames == FRAMES_AT_ONCE;
        let busy = full || !self.frames.is_empty() || self.engine.waiting() >= DELIVERIES_AT_ONCE;
        if self.engine.due() <= now.mono {
            self.engine.tick(now);
        }
        while let Some(action) = self.engine.poll() {
            self.act(now, action);
        }
        self.look(false);
        busy
    }

    fn call(&mut self, now: Now, call: Call) {
        if !matches!(call, Call::Publish { .. }) {
            self.publish_collected(now);
        }
        match call {
            Call::Open { link, node, max_frame, answer } => {
                let opened = self.open(now, &link, node, max_frame);
                let peer = opened.as_ref().ok().map(|(peer, _)| *peer);
                if answer.send(opened).is_err()
                    && let Some(peer) = peer
                {
                    // The reader is gone, and will not say so again.
                    self.close(now, peer);
                }
            }
            Call::Close(peer) => self.close(now, peer),
            Call::Rtt(peer, sample) => self.engine.rtt(peer, sample),
            Call::Refused(peer, corr) => self.engine.refused(now, peer, corr),
            Call::Offend(peer, offence) => self.engine.offend(now, peer, offence),
            Call::Publish { topic, payload, patient, answer } => {
                self.patient = patient && (self.patient || self.collected.is_empty());
                self.collected.push((topic, payload));
                self.askers.push(answer);
            }
            Call::PublishAll { topic, payloads, patient, answer } => {
                let messages = payloads.into_iter().map(|payload| (topic.clone(), payload)).collect();
                let _ = answer.send(self.publish(now, messages, true, patient));
            }
            Call::Follow(topic) => self.engine.follow(now, &topic),
            Call::Unfollow(topic) => self.engine.unfollow(&topic),
            Call::Peers(answer) => {
                let greylisted = self.greylisted.iter().filter(|(_, (until, _))| *until > now.mono);
                let greylisted =
                    greylisted.map(|(node, (until, offence))| (*node, *until - now.mono, *offence));
                let known = Known { peers: self.engine.peers(now), greylisted: greylisted.collect() };
                let _ = answer.send(known);
            }
        }
    }

    /// Messages that came one by one and are published together: a signature for all of them costs as much as for one.
    fn publish_collected(&mut self, now: Now) {
        if self.collected.is_empty() {
            return;
        }
        let published = {
            let messages = std::mem::take(&mut self.collected);
            self.publish(now, messages, false, self.patient)
        };
        for (answer, published) in self.askers.drain(..).zip(published) {
            // Whoever asked may have given up; the message is published all the same.
            let _ = answer.send(published);
        }
    }

    fn publish(
        &mut self,
        now: Now,
        messages: Vec<(Topic, Bytes)>,
        until_busy: bool,
        patient: bool,
    ) -> Vec<Result<Published, PublishError>> {
        let published = self.engine.publish_all(now, messages, until_busy, patient);
        let busy = published.iter().filter(|one| **one == Err(PublishError::Busy)).count();
        // Who waits is not refused.
        if busy > 0 && !patient {
            self.shared.busy(EGRESS.name, busy as u64);
        }
        published
    }

    fn open(
        &mut self,
        now: Now,
        link: &Arc<Link>,
        node: NodeId,
        max_frame: u32,
    ) -> Result<(PeerId, SharedEgress), End> {
        if self.drains {
            return Err(End::Draining);
        }
        let older = self.shared.index.lock().nodes.get(&node).cloned();
        if let Some(older) = older {
            if !newer_stays(self.shared.node, node, older.role, link.role) {
                return Err(End::Duplicate);
            }
            older.end(End::Duplicate);
            let of_it = self.links.iter().find(|(_, (_, known))| Arc::ptr_eq(known, &older));
            if let Some(peer) = of_it.map(|(peer, _)| *peer) {
                self.close(now, peer);
            }
        }
        let (peer, egress) = self.engine.connect(now, node, max_frame).map_err(|error| match error {
            ConnectError::Greylisted { .. } => End::Greylisted,
            ConnectError::Connected(_) => End::Duplicate,
            ConnectError::Myself => End::Policy,
        })?;
        if link.proved.is_some() {
            self.engine.prove(peer);
        }
        self.links.insert(peer, (node, link.clone()));
        let mut index = self.shared.index.lock();
        index.links.insert(peer, link.clone());
        index.nodes.insert(node, link.clone());
        drop(index);
        let row = &self.shared.egress_row;
        let probe: Weak<Link> = Arc::downgrade(link);
        self.shared.service.inventory().register(&EGRESS, row.capacity, row.policy, Live::WhileUsed(probe));
        tracing::info!(node = node.to_string(), at = link.at, "session open");
        Ok((peer, egress))
    }

    fn close(&mut self, now: Now, peer: PeerId) {
        let Some(link) = self.forget(peer) else { return };
        self.engine.disconnect(now, peer);
        tracing::debug!(at = link.at, "peer gone");
    }

    /// Takes a peer out of all lists; a node may have another session by now.
    fn forget(&mut self, peer: PeerId) -> Option<Arc<Link>> {
        let (node, link) = self.links.remove(&peer)?;
        let mut index = self.shared.index.lock();
        index.links.remove(&peer);
        if index.nodes.get(&node).is_some_and(|known| Arc::ptr_eq(known, &link)) {
            index.nodes.remove(&node);
        }
        drop(index);
        let left = self.shared.forget(peer) as u64;
        self.engine.ledger_mut().note_shed(Queue::Ingress, Lane::Normal, Cause::Gone, left);
        self.shared.dial.notify_one();
        Some(link)
    }

    fn act(&mut self, now: Now, action: Action) {
        match action {
            Action::Deliver(delivery) => self.deliver(now, delivery),
            Action::Wake(peer) => {
                if let Some((_, link)) = self.links.get(&peer) {
                    link.wake.notify_one();
                }
            }
            Action::Refuse(peer, corr) => {
                if let Some((_, link)) = self.links.get(&peer) {
                    link.refuse(&self.shared, corr);
                }
            }
            Action::Disconnect(peer, reason) => {
                if let Some(link) = self.forget(peer) {
                    link.end(if reason == Goaway::Policy { End::Greylisted } else { End::Limit });
                }
            }
            Action::Greylisted { node, until, offence } => {
                tracing::warn!(node = node.to_string(), offence = offence.name(), "a node is greylisted");
                self.trouble(node, "greylisted");
                self.greylisted.retain(|_, (until, _)| *until > now.mono);
                if self.greylisted.len() < GREYLISTED_MAX {
                    self.greylisted.insert(node, (until, offence));
                }
            }
        }
    }

    /// Hands a message to whoever follows its topic here; one that is behind loses its oldest, and is told.
    fn deliver(&self, now: Now, delivery: Delivery) {
        let numbers = &self.shared.numbers;
        numbers.hops.observe(u64::from(delivery.hops));
        numbers.delivery.observe(Duration::from_millis(now.unix_ms.saturating_sub(delivery.time)));
        let subscribers = self.shared.subscribers.lock();
        for subscriber in subscribers.get(&delivery.topic).into_iter().flatten() {
            let size = delivery.payload.len();
            if let Ok(displaced) = subscriber.queue.try_send_sized(delivery.clone(), size) {
                subscriber.missed.fetch_add(displaced.len() as u64, Ordering::Relaxed);
                numbers.lagged.add(displaced.len() as u64);
            }
        }
    }

    /// Judges pressure and tells the numbers, from time to time.
    fn look(&mut self, now_please: bool) {
        let now = self.shared.now();
        if now < self.look_due && !now_please {
            return;
        }
        self.look_due = now + LOOK;
        let full = self.links.values().filter(|(_, link)| link.is_full(&self.shared)).count();
        let peers = (full, self.links.len());
        let fill = Fill { ingress: (self.shared.waiting(), INGRESS_FRAMES), peers };
        let pressed = self.pressure.judge(fill, now);
        if pressed != self.shared.pressed.swap(pressed, Ordering::SeqCst) {
            tracing::warn!(pressed, full_peers = peers.0, peers = peers.1, "overlay pressure");
            if pressed {
                self.shared.service.lose(PRESSURE, Severity::WritesShed);
            } else {
                self.shared.service.restore(PRESSURE);
            }
        }
        if peers.0 > 0 {
            self.name_slow();
        }
        let ledger = self.engine.ledger();
        let full = [Cause::Full, Cause::Ceiling, Cause::Dropped];
        let of_egress = |(queue, _, cause, _): &(Queue, Lane, Cause, u64)| {
            *queue == Queue::Egress && full.contains(cause)
        };
        let dropped: u64 = ledger.shed().filter(of_egress).map(|(.., count)| count).sum();
        self.shared.egress_row.dropped.add(dropped - self.dropped);
        self.shared.busy(EGRESS.name, dropped - self.dropped);
        self.dropped = dropped;
        if **self.shared.ledger.load() != *ledger {
            self.shared.ledger.store(Arc::new(ledger.clone()));
        }
    }

    /// Says once of each session that its peer does not keep up.
    fn name_slow(&self) {
        for (_, link) in self.links.values() {
            let Some(opened) = link.opened.get() else { continue };
            if link.is_full(&self.shared) && !link.slow.swap(true, Ordering::Relaxed) {
                let node = opened.node.to_string();
                tracing::warn!(node, at = link.at, "a peer does not keep up; its frames are shed");
                self.trouble(opened.node, "slow");
            }
        }
    }

    fn trouble(&self, node: NodeId, cause: &'static str) {
        let (service, peer) = (self.shared.service.name(), node.to_string());
        self.shared.service.kernel().publish(KernelEvent::PeerTrouble { service, peer, cause });
    }

    /// Whether peers may still ask for what they were only told of; what waits to be signed goes out first.
    fn owes(&mut self) -> bool {
        let now = self.shared.engine_now();
        self.engine.sign_gathered(now);
        while let Some(action) = self.engine.poll() {
            self.act(now, action);
        }
        let time = self.shared.service.shutdown().phase() < Phase::Aborting;
        time && !self.links.is_empty() && self.engine.owes(now)
    }

    /// Nothing more comes for the writers: they write what they have, and close.
    fn drain(&mut self) {
        self.drains = true;
        self.links.values().for_each(|(_, link)| link.drain());
    }

    /// The time for that is over: what has not been written by now is not.
    fn say_unwritten(&self) {
        for (_, link) in self.links.values() {
            let Some(opened) = link.opened.get() else { continue };
            let egress = opened.egress.lock();
            let (frames, bytes) = (egress.frames(), egress.bytes());
            if frames > 0 {
                tracing::warn!(peer = link.at, frames, bytes, "not written before the drain deadline");
            }
        }
    }
}

/// Buckets of the peers that are full, for whoever waited for one in vain.
pub(crate) fn full_buckets(shared: &Shared) -> Vec<&'static str> {
    let index = shared.index.lock();
    let full = index.links.values().filter(|link| link.is_full(shared));
    full.filter_map(|link| link.opened.get()).map(|opened| bucket(opened.node)).collect()
}
