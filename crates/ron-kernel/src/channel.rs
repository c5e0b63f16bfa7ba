//! The one family of constructors for channels.
//!
//! Each takes a [`ChannelSpec`], registers what it made in the [`Inventory`], and returns ends that cannot wait
//! for space: a full channel answers with a typed [`Busy`] or by its stated policy.

use crate::inventory::{ChannelKind, ChannelSpec, Inventory, Live, Policy, Probe, Row};
use crate::sync::{Busy, Limits, Overflow, PushError, Queue};
use std::sync::{Arc, Weak};
use tokio::sync::{broadcast, watch};

impl<T: Send> Probe for Queue<T> {
    fn depth(&self) -> usize {
        Queue::depth(self)
    }
}

/// The sending end of a bounded queue. The queue closes when the last one is dropped.
#[derive(Debug)]
pub struct Sender<T> {
    queue: Arc<Closing<T>>,
    row: Arc<Row>,
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Sender<T> {
        Sender { queue: self.queue.clone(), row: self.row.clone() }
    }
}

/// Closes the queue when its end of it is gone.
#[derive(Debug)]
struct Closing<T>(Arc<Queue<T>>);

impl<T> Drop for Closing<T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The receiving end of a bounded queue.
#[derive(Debug)]
pub struct Receiver<T> {
    queue: Arc<Closing<T>>,
}

/// Makes a bounded queue under its declaration.
pub fn queue<T: Send + 'static>(
    inventory: &Inventory,
    spec: &'static ChannelSpec,
    limits: Limits,
    policy: Policy,
) -> (Sender<T>, Receiver<T>) {
    let overflow = match policy {
        Policy::DropOldest => Overflow::DropOldest,
        Policy::Collapse => Overflow::Collapse,
        Policy::RejectNew | Policy::Skip | Policy::Latest | Policy::LossyBroadcast => Overflow::RejectNew,
    };
    let queue = Queue::new(limits, overflow);
    let probe: Weak<Queue<T>> = Arc::downgrade(&queue);
    let row = inventory.register(spec, limits.items, policy, Live::WhileUsed(probe));
    (Sender { queue: Arc::new(Closing(queue.clone())), row }, Receiver { queue: Arc::new(Closing(queue)) })
}

impl<T> Sender<T> {
    /// Sends, or says at once that it cannot. The items returned had to make room and are owed an answer.
    pub fn try_send(&self, item: T) -> Result<Vec<T>, PushError<T>> {
        self.try_send_sized(item, 0)
    }

    /// As [`Sender::try_send`], for a queue that is bounded in bytes too.
    pub fn try_send_sized(&self, item: T, bytes: usize) -> Result<Vec<T>, PushError<T>> {
        let sent = self.queue.0.push(item, bytes);
        match &sent {
            Ok(displaced) if displaced.is_empty() => {}
            Ok(displaced) => self.row.dropped.add(displaced.len() as u64),
            Err(PushError::Busy(Busy(_))) => self.row.dropped.inc(),
            Err(PushError::Closed(_)) => {}
        }
        sent
    }

    /// No further send succeeds; the receiver still gets what is queued.
    pub fn close(&self) {
        self.queue.0.close();
    }

    pub fn depth(&self) -> usize {
        self.queue.0.depth()
    }
}

impl<T> Receiver<T> {
    /// The next item; `None` once the queue is closed and empty. Cancel-safe.
    pub async fn recv(&self) -> Option<T>
    where
        T: Send,
    {
        self.queue.0.pop().await
    }

    pub fn try_recv(&self) -> Option<T> {
        self.queue.0.try_pop()
    }
}

/// A value of which only the latest matters.
pub fn latest<T: Send + Sync + 'static>(
    inventory: &Inventory,
    spec: &'static ChannelSpec,
    initial: T,
) -> (watch::Sender<T>, watch::Receiver<T>) {
    debug_assert_eq!(spec.kind, ChannelKind::Watch);
    #[expect(clippy::disallowed_methods, reason = "this is the constructor that registers it")]
    let (sender, receiver) = watch::channel(initial);
    watch_view(inventory, spec);
    (sender, receiver)
}

/// Registers a watch that already exists: a service's shutdown signal.
pub(crate) fn watch_view(inventory: &Inventory, spec: &'static ChannelSpec) {
    inventory.register(spec, 1, Policy::Latest, Live::Always(Box::new(Idle)));
}

/// A broadcast in which a slow receiver loses the oldest and is told how many.
pub fn broadcast<T: Clone + Send + 'static>(
    inventory: &Inventory,
    spec: &'static ChannelSpec,
    capacity: usize,
) -> broadcast::Sender<T> {
    debug_assert_eq!(spec.kind, ChannelKind::Broadcast);
    #[expect(clippy::disallowed_methods, reason = "this is the constructor that registers it")]
    let (sender, _) = broadcast::channel(capacity);
    broadcast_view(inventory, spec, capacity, &sender);
    sender
}

/// Registers one more view of a broadcast that already exists: the kernel's bus has a row per service.
pub fn broadcast_view<T: Clone + Send + 'static>(
    inventory: &Inventory,
    spec: &'static ChannelSpec,
    capacity: usize,
    sender: &broadcast::Sender<T>,
) {
    let live = Live::Always(Box::new(Broadcast(sender.clone())));
    inventory.register(spec, capacity, Policy::LossyBroadcast, live);
}

/// A watch holds exactly one value, always.
struct Idle;

impl Probe for Idle {
    fn depth(&self) -> usize {
        0
    }
}

struct Broadcast<T>(broadcast::Sender<T>);

impl<T: Send> Probe for Broadcast<T> {
    fn depth(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;

    static WORK: ChannelSpec = ChannelSpec {
        service: "t",
        name: "work",
        kind: ChannelKind::Mpsc,
        capacity: 2,
        policy: Policy::RejectNew,
        producers: &["listener"],
        consumers: &["worker"],
    };

    #[tokio::test]
    async fn a_full_channel_is_busy_and_counted_and_closes_with_its_last_sender() {
        let metrics = Metrics::default();
        let inventory = Inventory::new(metrics.clone());
        let (sender, receiver) = queue(&inventory, &WORK, Limits::items(2), Policy::RejectNew);
        let second = sender.clone();
        sender.try_send(1).unwrap();
        second.try_send(2).unwrap();
        assert!(matches!(sender.try_send(3), Err(PushError::Busy(Busy(3)))));
        let row = &inventory.to_json()["channels"][0];
        assert_eq!((&row["depth"], &row["dropped"], &row["instances"]), (&2.into(), &1.into(), &1.into()));
        let page = metrics.scrape();
        assert!(page.contains("queue_depth{service=\"t\",queue=\"work\"} 2"), "{page}");
        assert!(page.contains("queue_dropped_total{service=\"t\",queue=\"work\"} 1"), "{page}");
        drop((sender, second));
        assert_eq!(
            (receiver.recv().await, receiver.recv().await, receiver.recv().await),
            (Some(1), Some(2), None)
        );
    }

    #[test]
    fn queues_of_one_name_are_one_row_with_instances() {
        let inventory = Inventory::new(Metrics::default());
        let (first, _first_end) = queue::<u8>(&inventory, &WORK, Limits::items(2), Policy::RejectNew);
        let (second, second_end) = queue::<u8>(&inventory, &WORK, Limits::items(2), Policy::RejectNew);
        first.try_send(1).unwrap();
        second.try_send(1).unwrap();
        let row = inventory.to_json()["channels"][0].clone();
        assert_eq!((&row["depth"], &row["instances"]), (&2.into(), &2.into()));
        drop((second, second_end));
        let row = inventory.to_json()["channels"][0].clone();
        assert_eq!((&row["depth"], &row["instances"]), (&1.into(), &1.into()));
    }

    #[test]
    fn a_send_to_a_receiver_that_is_gone_says_closed() {
        let inventory = Inventory::new(Metrics::default());
        let (sender, receiver) = queue(&inventory, &WORK, Limits::items(2), Policy::RejectNew);
        drop(receiver);
        assert_eq!(sender.try_send(1), Err(PushError::Closed(1)));
    }
}
