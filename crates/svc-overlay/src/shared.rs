//! What all tasks of the overlay share.

use crate::calls::{CALLS, Call, LOSSY_MAX};
use crate::config::{Admit, OverlaySettings};
use crate::link::Link;
use crate::metrics::Numbers;
use arc_swap::{ArcSwap, ArcSwapOption};
use ed25519_dalek::SigningKey;
use oap::NodeId;
use oap::gossip::{Ceiling, Delivery, Displaced, Incoming, Ingress, Ledger, Now, PeerId, Refused, Topic};
use ron_kernel::admission::bucket::{Keyed, Rate, Verdict};
use ron_kernel::channel::{self, Receiver, Sender};
use ron_kernel::inventory::{ChannelKind, ChannelSpec, Live, LockSpec, Policy, Probe, Row};
use ron_kernel::kernel::Service;
use ron_kernel::lock::Lock;
use ron_kernel::reason::{Reason, Rejections};
use ron_kernel::sync::{Limits, Permits};
use ron_transport::{Backoff, Tls};
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::Notify;

/// Frames that wait for the engine, and how many bytes they may have.
pub(crate) const INGRESS_FRAMES: usize = 512;
const INGRESS_BYTES: usize = 32 << 20;
/// The longest that a peer with too much before the engine is not read on.
const PAUSE: Duration = Duration::from_millis(20);
/// Connections that may be in their handshake, whatever `max_conns` is.
const SHAKING_MAX: usize = 256;
/// Addresses and nodes whose handshakes are counted.
const KEYS_MAX: usize = 16_384;

pub(crate) static INGRESS: ChannelSpec = ChannelSpec {
    service: "overlay",
    name: "gossip_ingress",
    kind: ChannelKind::Mpsc,
    capacity: INGRESS_FRAMES,
    policy: Policy::RejectNew,
    producers: &["reader"],
    consumers: &["gossip"],
};
pub(crate) static EGRESS: ChannelSpec = ChannelSpec {
    service: "overlay",
    name: "gossip_egress",
    kind: ChannelKind::Mpsc,
    capacity: crate::config::EGRESS_FRAMES,
    policy: Policy::RejectNew,
    producers: &["gossip"],
    consumers: &["writer"],
};

const fn lock(name: &'static str, rank: u8, guards: &'static str) -> LockSpec {
    LockSpec { service: "overlay", name, rank, guards }
}

pub(crate) static PEER_INDEX: LockSpec =
    lock("peer_index", 20, "open sessions by peer and by node, and dials");
pub(crate) static SUBSCRIBERS: LockSpec = lock("subscribers", 25, "local subscribers by topic");
pub(crate) static FRAMES: LockSpec = lock("gossip_ingress", 30, "frames that wait for the engine");
pub(crate) static HANDSHAKES: LockSpec =
    lock("metrics_buffer", 40, "handshakes lately, by address and by node");

/// Open sessions, and nodes to dial.
#[derive(Debug, Default)]
pub(crate) struct Index {
    pub(crate) links: BTreeMap<PeerId, Arc<Link>>,
    pub(crate) nodes: HashMap<NodeId, Arc<Link>>,
    pub(crate) dials: HashMap<NodeId, Dial>,
}

/// How dialling a node goes.
#[derive(Debug, Default)]
pub(crate) struct Dial {
    pub(crate) backoff: Backoff,
    pub(crate) due: Duration,
    /// A try, or the session that came of it, is under way.
    pub(crate) busy: bool,
    pub(crate) error: Option<String>,
}

/// A local subscriber's end.
#[derive(Debug)]
pub(crate) struct Subscriber {
    pub(crate) id: u64,
    pub(crate) queue: Sender<Delivery>,
    pub(crate) missed: Arc<AtomicU64>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) service: Service,
    pub(crate) settings: ArcSwap<OverlaySettings>,
    pub(crate) key: SigningKey,
    pub(crate) node: NodeId,
    pub(crate) tls: ArcSwapOption<Tls>,
    pub(crate) numbers: Numbers,
    rejections: Rejections,
    began: Instant,
    pub(crate) conns: Arc<Permits>,
    pub(crate) shaking: Arc<Permits>,
    by_ip: Keyed<IpAddr>,
    by_node: Keyed<NodeId>,
    pub(crate) index: Lock<Index>,
    pub(crate) subscribers: Lock<BTreeMap<Topic, Vec<Subscriber>>>,
    pub(crate) ceiling: Arc<Ceiling>,
    ingress: Lock<Ingress>,
    depth: Arc<Depth>,
    ingress_row: Arc<Row>,
    pub(crate) egress_row: Arc<Row>,
    pub(crate) calls: Sender<Call>,
    pub(crate) calls_end: Receiver<Call>,
    /// For the engine: there are frames or calls.
    pub(crate) wake: Notify,
    /// For readers: the engine has taken frames.
    took: Notify,
    /// For the dialer: a peer may be to dial.
    pub(crate) dial: Notify,
    /// For publishers that wait: a queue has room again.
    pub(crate) room: Notify,
    pub(crate) ledger: ArcSwap<Ledger>,
    pub(crate) pressed: AtomicBool,
    pub(crate) sessions: AtomicUsize,
    /// Engines there have been.
    engines: AtomicU64,
}

/// How many frames wait, beside the lock that the hot path takes.
#[derive(Debug, Default)]
struct Depth(AtomicUsize);

impl Probe for Depth {
    fn depth(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Shared {
    pub(crate) fn new(
        service: &Service,
        settings: &OverlaySettings,
        key: SigningKey,
        tls: Option<Tls>,
    ) -> Arc<Shared> {
        let inventory = service.inventory();
        let ceiling = Ceiling::new(settings.queue_bytes.usize());
        let depth = Arc::new(Depth::default());
        let probe: Weak<Depth> = Arc::downgrade(&depth);
        let ingress_row =
            inventory.register(&INGRESS, INGRESS.capacity, INGRESS.policy, Live::WhileUsed(probe));
        // The row is there from the beginning; each session then adds itself.
        let nobody: Weak<Depth> = Weak::new();
        let policy = match settings.gossip.egress_full {
            crate::config::EgressFull::RejectNew => Policy::RejectNew,
            crate::config::EgressFull::DropOldest => Policy::DropOldest,
        };
        let egress_row = inventory.register(&EGRESS, EGRESS.capacity, policy, Live::WhileUsed(nobody));
        let capacity = CALLS.capacity.max(settings.max_conns * 2 + LOSSY_MAX * 2);
        let (calls, calls_end) = channel::queue(inventory, &CALLS, Limits::items(capacity), CALLS.policy);
        let ingress = Ingress::new(INGRESS_FRAMES, INGRESS_BYTES, ceiling.clone());
        Arc::new(Shared {
            settings: ArcSwap::from_pointee(settings.clone()),
            node: NodeId(key.verifying_key().to_bytes()),
            key,
            tls: ArcSwapOption::from_pointee(tls),
            numbers: Numbers::new(service),
            rejections: Rejections::new(service),
            began: Instant::now(),
            conns: Permits::new(settings.max_conns),
            shaking: Permits::new(shaking_max(settings)),
            by_ip: Keyed::new(inventory, &HANDSHAKES, KEYS_MAX),
            by_node: Keyed::new(inventory, &HANDSHAKES, KEYS_MAX),
            index: Lock::new(inventory, &PEER_INDEX, Index::default()),
            subscribers: Lock::new(inventory, &SUBSCRIBERS, BTreeMap::new()),
            ceiling,
            ingress: Lock::new(inventory, &FRAMES, ingress),
            depth,
            ingress_row,
            egress_row,
            calls,
            calls_end,
            wake: Notify::new(),
            took: Notify::new(),
            dial: Notify::new(),
            room: Notify::new(),
            ledger: ArcSwap::default(),
            pressed: AtomicBool::new(false),
            sessions: AtomicUsize::new(0),
            engines: AtomicU64::new(0),
            service: service.clone(),
        })
    }

    pub(crate) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    pub(crate) fn instant(&self, at: Duration) -> tokio::time::Instant {
        (self.began + at).into()
    }

    pub(crate) fn engine_now(&self) -> Now {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Now { mono: self.now(), unix_ms: u64::try_from(unix.as_millis()).unwrap_or(u64::MAX) }
    }

    /// Whether a connection from this address may begin a handshake.
    pub(crate) fn may_shake(&self, ip: IpAddr) -> bool {
        self.takes(&self.by_ip, &ron_kernel::admission::client_ip::network_of(ip))
    }

    /// Whether this node may open one more session.
    pub(crate) fn may_open(&self, node: NodeId) -> bool {
        self.takes(&self.by_node, &node)
    }

    fn takes<K: Hash + Eq + Clone>(&self, buckets: &Keyed<K>, key: &K) -> bool {
        let rate = Rate::new(self.settings.load().handshakes_per_ip, 1.0);
        rate.is_none_or(|rate| matches!(buckets.take(key, 1.0, rate, Instant::now()), Verdict::Taken { .. }))
    }

    /// Whether a node may be a peer; one that does not say who it is may not, unless everybody may.
    pub(crate) fn admits(&self, node: Option<NodeId>) -> bool {
        let settings = self.settings.load();
        settings.admit == Admit::Any
            || node.is_some_and(|node| settings.listed().any(|peer| peer.node == node))
    }

    /// Counts a refusal.
    pub(crate) fn reject(&self, reason: Reason) {
        self.rejections.count(reason);
    }

    /// Takes over what a reload may change.
    pub(crate) fn apply(&self, settings: Arc<OverlaySettings>) {
        self.conns.set_limit(settings.max_conns);
        self.shaking.set_limit(shaking_max(&settings));
        self.settings.store(settings);
    }

    /// Asks the engine what it may also not hear.
    pub(crate) fn hint(&self, call: Call) {
        if self.calls.depth() < LOSSY_MAX {
            self.call(call);
        }
    }

    /// Asks the engine; false if it is gone, or has no room.
    pub(crate) fn call(&self, call: Call) -> bool {
        let taken = self.calls.try_send(call).is_ok();
        self.wake.notify_one();
        taken
    }

    /// Queues frames for the engine. Whatever finds no room is answered 429, whosever it is.
    pub(crate) fn receive(&self, link: &Link, frames: &mut Vec<Incoming>) {
        let mut refused: Vec<(PeerId, u64)> = Vec::new();
        {
            let mut ingress = self.ingress.lock();
            for frame in frames.drain(..) {
                let (peer, corr) = (frame.peer, frame.corr);
                match ingress.push(frame) {
                    Ok(displaced) => {
                        let of = |it: Displaced| (it.frame.peer, it.frame.corr);
                        refused.extend(displaced.into_iter().map(of));
                    }
                    Err(Refused::Full | Refused::Ceiling) => refused.push((peer, corr)),
                }
            }
            self.depth.0.store(ingress.len(), Ordering::Relaxed);
        }
        self.wake.notify_one();
        if refused.is_empty() {
            return;
        }
        self.ingress_row.dropped.add(refused.len() as u64);
        for (peer, corr) in refused {
            self.busy("gossip_ingress", 1);
            if link.opened.get().is_some_and(|opened| opened.peer == peer) {
                link.refuse(self, corr);
            } else if let Some(other) = self.link(peer) {
                other.refuse(self, corr);
            }
        }
    }

    /// Takes frames that are next in turn, at most so many.
    pub(crate) fn take(&self, most: usize, out: &mut Vec<Incoming>) {
        let mut ingress = self.ingress.lock();
        while out.len() < most {
            let Some((_, frame)) = ingress.pop() else { break };
            out.push(frame);
        }
        self.depth.0.store(ingress.len(), Ordering::Relaxed);
        drop(ingress);
        if !out.is_empty() {
            self.took.notify_waiters();
        }
    }

    /// Waits for the engine while a peer has its share of frames before it, for a moment at most: what is read on in
    /// one go while the engine waits for its turn would find no room, and the peer would be told to slow down. One that
    /// sends more than the engine can do finds none all the same.
    pub(crate) async fn pause(&self, peer: PeerId) {
        let share = (INGRESS_FRAMES / 2 / self.sessions.load(Ordering::Relaxed).max(1)).clamp(8, 128);
        if self.waiting() < share {
            return;
        }
        let until = tokio::time::Instant::now() + PAUSE;
        let mut paused = false;
        loop {
            let took = self.took.notified();
            if self.ingress.lock().of(peer) < share {
                return;
            }
            if !std::mem::replace(&mut paused, true) {
                self.numbers.paused.inc();
            }
            if tokio::time::timeout_at(until, took).await.is_err() {
                return;
            }
        }
    }

    /// Throws away all that waits, which an engine that is no more was to have; says above which number the peers
    /// of the next begin.
    pub(crate) fn begin_anew(&self) -> u64 {
        let mut ingress = self.ingress.lock();
        while ingress.pop().is_some() {}
        self.depth.0.store(0, Ordering::Relaxed);
        self.engines.fetch_add(1, Ordering::Relaxed) << 40
    }

    /// Throws away what a peer still has waiting.
    pub(crate) fn forget(&self, peer: PeerId) -> usize {
        let mut ingress = self.ingress.lock();
        let count = ingress.forget(peer);
        self.depth.0.store(ingress.len(), Ordering::Relaxed);
        count
    }

    pub(crate) fn waiting(&self) -> usize {
        self.depth.depth()
    }

    pub(crate) fn link(&self, peer: PeerId) -> Option<Arc<Link>> {
        self.index.lock().links.get(&peer).cloned()
    }

    /// Work that a full queue did not take.
    pub(crate) fn busy(&self, queue: &str, count: u64) {
        self.numbers.busy.with([self.service.name(), "", queue]).add(count);
        for _ in 0..count {
            self.rejections.count(Reason::Busy);
        }
    }
}

fn shaking_max(settings: &OverlaySettings) -> usize {
    (settings.max_conns / 2).clamp(1, SHAKING_MAX)
}
