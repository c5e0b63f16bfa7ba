//! What exists: every channel, lock and task kind is declared once, as a constant that its constructor takes.
//!
//! `/debug/channels`, the queue metrics and `docs/concurrency.md` are all read from these declarations, so none
//! of them can tell another story than the code.

use crate::metrics::{Counter, Metrics};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A channel as declared by the crate that owns it.
#[derive(Debug, PartialEq, Eq)]
pub struct ChannelSpec {
    pub service: &'static str,
    /// The seeds' name without `_tx` or `_rx`.
    pub name: &'static str,
    pub kind: ChannelKind,
    /// The default; a configured capacity is shown where it is made.
    pub capacity: usize,
    pub policy: Policy,
    pub producers: &'static [&'static str],
    pub consumers: &'static [&'static str],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChannelKind {
    Mpsc,
    Broadcast,
    Watch,
    Fair,
}

/// What a full channel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    RejectNew,
    DropOldest,
    LossyBroadcast,
    Latest,
    Collapse,
    Skip,
}

impl ChannelKind {
    pub fn as_str(self) -> &'static str {
        match self {
            ChannelKind::Mpsc => "mpsc",
            ChannelKind::Broadcast => "broadcast",
            ChannelKind::Watch => "watch",
            ChannelKind::Fair => "fair",
        }
    }
}

impl Policy {
    pub fn as_str(self) -> &'static str {
        match self {
            Policy::RejectNew => "reject_new",
            Policy::DropOldest => "drop_oldest",
            Policy::LossyBroadcast => "lossy_broadcast",
            Policy::Latest => "latest",
            Policy::Collapse => "collapse",
            Policy::Skip => "skip",
        }
    }
}

/// A lock as declared by its owner. Locks are nested in the order of their ranks only.
#[derive(Debug, PartialEq, Eq)]
pub struct LockSpec {
    pub service: &'static str,
    pub name: &'static str,
    pub rank: u8,
    /// What it guards, for the document.
    pub guards: &'static str,
}

/// A kind of task as declared by its owner.
#[derive(Debug, PartialEq, Eq)]
pub struct TaskSpec {
    pub service: &'static str,
    pub kind: &'static str,
    pub sort: TaskSort,
    pub does: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskSort {
    /// Restarted when it ends.
    Permanent,
    /// Lives as long as one connection, request or job.
    Scoped,
}

/// What a live channel can say of itself without disturbing its users.
pub trait Probe: Send + Sync {
    fn depth(&self) -> usize;
}

/// How the inventory holds on to a channel.
pub enum Live {
    /// Gone when its users are: a queue.
    WhileUsed(Weak<dyn Probe>),
    /// As long-lived as the process: a broadcast or a watch.
    Always(Box<dyn Probe>),
}

impl Live {
    fn depth(&self) -> Option<usize> {
        match self {
            Live::WhileUsed(probe) => probe.upgrade().map(|probe| probe.depth()),
            Live::Always(probe) => Some(probe.depth()),
        }
    }
}

/// One line of the inventory: a channel, or all channels of one name (one per peer).
pub struct Row {
    pub spec: &'static ChannelSpec,
    pub capacity: usize,
    pub policy: Policy,
    /// `queue_dropped_total` of this queue.
    pub dropped: Counter,
    live: Mutex<Vec<Live>>,
}

impl Row {
    fn depth_and_instances(&self) -> (usize, usize) {
        let live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        live.iter().filter_map(Live::depth).fold((0, 0), |(sum, count), depth| (sum + depth, count + 1))
    }
}

impl std::fmt::Debug for Live {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Live(depth {:?})", self.depth())
    }
}

impl std::fmt::Debug for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Row({}.{})", self.spec.service, self.spec.name)
    }
}

/// The channels and locks of this process.
#[derive(Clone, Debug)]
pub struct Inventory {
    rows: Arc<Mutex<Vec<Arc<Row>>>>,
    locks: Arc<Mutex<Vec<&'static LockSpec>>>,
    metrics: Metrics,
}

impl Inventory {
    pub fn new(metrics: Metrics) -> Inventory {
        let rows: Arc<Mutex<Vec<Arc<Row>>>> = Arc::default();
        let seen = rows.clone();
        metrics.computed("queue_depth", "Items waiting in a queue.", "gauge", move |out| {
            for row in seen.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                let labels = [("service", row.spec.service), ("queue", row.spec.name)];
                out.row(&labels, row.depth_and_instances().0);
            }
        });
        Inventory { rows, locks: Arc::default(), metrics }
    }

    /// Registers a live channel under its declaration; `capacity` and `policy` are the configured ones.
    pub fn register(
        &self,
        spec: &'static ChannelSpec,
        capacity: usize,
        policy: Policy,
        channel: Live,
    ) -> Arc<Row> {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let known = rows.iter().find(|row| row.spec == spec).cloned();
        let row = known.unwrap_or_else(|| {
            let family = self.metrics.family(
                "queue_dropped_total",
                "Items refused or displaced by a full queue.",
                ["service", "queue"],
            );
            let dropped = family.with([spec.service, spec.name]);
            let row = Arc::new(Row { spec, capacity, policy, dropped, live: Mutex::default() });
            rows.push(row.clone());
            row
        });
        let mut live = row.live.lock().unwrap_or_else(PoisonError::into_inner);
        live.retain(|channel| channel.depth().is_some());
        live.push(channel);
        drop(live);
        row
    }

    pub(crate) fn register_lock(&self, spec: &'static LockSpec) {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        if !locks.contains(&spec) {
            locks.push(spec);
        }
    }

    /// The body of `GET /debug/channels`.
    pub fn to_json(&self) -> Value {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let channels: Vec<Value> = rows
            .iter()
            .map(|row| {
                let (depth, instances) = row.depth_and_instances();
                json!({
                    "service": row.spec.service, "name": row.spec.name, "kind": row.spec.kind.as_str(),
                    "capacity": row.capacity, "policy": row.policy.as_str(),
                    "producers": row.spec.producers, "consumers": row.spec.consumers,
                    "instances": instances, "depth": depth, "dropped": row.dropped.value(),
                })
            })
            .collect();
        let locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        let locks: Vec<Value> = locks
            .iter()
            .map(|lock| json!({"service": lock.service, "name": lock.name, "rank": lock.rank, "guards": lock.guards}))
            .collect();
        json!({"channels": channels, "locks": locks})
    }
}
