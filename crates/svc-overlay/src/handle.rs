//! For users within the process: publish to a topic, follow a topic.

use crate::calls::{Call, Known, LOCAL_MAX};
use crate::gossip::full_buckets;
use crate::shared::{Shared, Subscriber};
use bytes::Bytes;
use oap::gossip::{Delivery, Published, Topic};
use ron_kernel::channel::{self, Receiver};
use ron_kernel::inventory::{ChannelKind, ChannelSpec, Policy};
use ron_kernel::shutdown::Phase;
use ron_kernel::sync::Limits;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout_at};

/// Messages that a subscriber may be behind, and their bytes beside those of the largest message.
pub(crate) static DELIVERIES: ChannelSpec = ChannelSpec {
    service: "overlay",
    name: "deliveries",
    kind: ChannelKind::Mpsc,
    capacity: 1024,
    policy: Policy::DropOldest,
    producers: &["gossip"],
    consumers: &["subscriber"],
};
const DELIVERY_BYTES: usize = 8 << 20;
/// Subscriptions of one process.
const SUBSCRIBERS_MAX: usize = 1024;
/// A publisher that waits looks again after this, even if no queue has said that it has room.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Why a message was not published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    #[error("a message of {0} bytes is too large")]
    TooLarge(usize),
    #[error("no peer has room for it")]
    Busy,
    #[error("no peer had room for it until the deadline")]
    Backpressure,
    #[error("{op} was not done in time")]
    Timeout { op: &'static str },
    #[error("the overlay is shutting down")]
    Canceled,
}

impl From<oap::gossip::PublishError> for PublishError {
    fn from(error: oap::gossip::PublishError) -> PublishError {
        match error {
            oap::gossip::PublishError::TooLarge(size) => PublishError::TooLarge(size),
            oap::gossip::PublishError::Busy => PublishError::Busy,
        }
    }
}

/// Why a topic cannot be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubscribeError {
    #[error("as many follow topics here as may")]
    Busy,
    #[error("the overlay is shutting down")]
    Canceled,
}

/// The overlay, to those who use it. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Handle {
    pub(crate) shared: Arc<Shared>,
    /// Where the overlay listens.
    pub(crate) listen: Arc<str>,
}

impl Handle {
    /// For one who asks for topics only.
    pub(crate) fn of(shared: &Arc<Shared>) -> Handle {
        Handle { shared: shared.clone(), listen: Arc::default() }
    }

    /// Publishes a message. Where no peer has room for it, waits for that until the deadline.
    pub async fn publish(
        &self,
        topic: &Topic,
        payload: Bytes,
        deadline: Instant,
    ) -> Result<Published, PublishError> {
        let begun = Instant::now();
        loop {
            let room = self.shared.room.notified();
            let (own, bytes) = (topic.clone(), payload.clone());
            let patient = is_patient(begun, deadline);
            let call = |answer| Call::Publish { topic: own, payload: bytes, patient, answer };
            match self.ask(deadline, call).await.and_then(|done| done.map_err(PublishError::from)) {
                Err(PublishError::Busy) => self.wait(begun, deadline, room).await?,
                done => return done,
            }
        }
    }

    /// Publishes messages in order, and says of each what became of it. Where no peer has room for one, waits for that
    /// until the deadline; from then on none is published any more.
    pub async fn publish_all(
        &self,
        topic: &Topic,
        payloads: &[Bytes],
        deadline: Instant,
    ) -> Vec<Result<Published, PublishError>> {
        let begun = Instant::now();
        let mut done = Vec::with_capacity(payloads.len());
        while done.len() < payloads.len() {
            let room = self.shared.room.notified();
            let (topic, rest) = (topic.clone(), payloads[done.len()..].to_vec());
            let patient = is_patient(begun, deadline);
            let call = |answer| Call::PublishAll { topic, payloads: rest, patient, answer };
            let failed = match self.ask(deadline, call).await {
                Ok(mut some) => {
                    let refused = some.pop_if(|last| *last == Err(oap::gossip::PublishError::Busy));
                    done.extend(some.into_iter().map(|one| one.map_err(PublishError::from)));
                    refused.map(|_| PublishError::Busy)
                }
                Err(error) => Some(error),
            };
            let over = match failed {
                Some(PublishError::Busy) => self.wait(begun, deadline, room).await.err(),
                failed => failed,
            };
            if let Some(error) = over {
                done.resize(payloads.len(), Err(error));
            }
        }
        done
    }

    /// Nobody has room: waits for some, unless the deadline has passed.
    async fn wait(
        &self,
        begun: Instant,
        deadline: Instant,
        room: tokio::sync::futures::Notified<'_>,
    ) -> Result<(), PublishError> {
        if Instant::now() < deadline {
            let _ = timeout_at(deadline.min(Instant::now() + LOOK_AGAIN), room).await;
            return Ok(());
        }
        // Once, however often there was a look for room.
        self.shared.busy("gossip_calls", 1);
        if begun >= deadline {
            return Err(PublishError::Busy);
        }
        for bucket in full_buckets(&self.shared) {
            self.shared.numbers.backpressure.with([bucket]).inc();
        }
        Err(PublishError::Backpressure)
    }

    /// Asks the engine to publish, if it takes anything from here.
    async fn ask<T>(
        &self,
        deadline: Instant,
        call: impl FnOnce(oneshot::Sender<T>) -> Call,
    ) -> Result<T, PublishError> {
        let shared = &self.shared;
        if shared.service.shutdown().phase() != Phase::Running {
            return Err(PublishError::Canceled);
        }
        // Local publications are refused first.
        if shared.pressed.load(Ordering::SeqCst) || shared.calls.depth() >= LOCAL_MAX {
            return Err(PublishError::Busy);
        }
        let (answer, answered) = oneshot::channel();
        if !shared.call(call(answer)) {
            return Err(PublishError::Busy);
        }
        // Also one who does not wait for room waits for the engine, which is never far.
        let until = deadline.max(Instant::now() + ENGINE);
        match timeout_at(until, answered).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(_gone)) => Err(PublishError::Canceled),
            Err(_elapsed) => Err(PublishError::Timeout { op: "publish" }),
        }
    }

    /// Follows a topic from now on.
    pub fn subscribe(&self, topic: &Topic) -> Result<Subscription, SubscribeError> {
        let shared = &self.shared;
        if shared.service.shutdown().phase() != Phase::Running {
            return Err(SubscribeError::Canceled);
        }
        let bytes = DELIVERY_BYTES + shared.settings.load().gossip.max_message_bytes.usize();
        let limits = Limits { items: DELIVERIES.capacity, bytes };
        let (queue, deliveries) =
            channel::queue(shared.service.inventory(), &DELIVERIES, limits, DELIVERIES.policy);
        let (id, missed) = (ron_kernel::random::u64(), Arc::new(AtomicU64::new(0)));
        {
            let mut subscribers = shared.subscribers.lock();
            if subscribers.values().map(Vec::len).sum::<usize>() >= SUBSCRIBERS_MAX {
                return Err(SubscribeError::Busy);
            }
            let subscriber = Subscriber { id, queue, missed: missed.clone() };
            subscribers.entry(topic.clone()).or_default().push(subscriber);
        }
        let subscription =
            Subscription { shared: shared.clone(), topic: topic.clone(), id, deliveries, missed };
        if shared.call(Call::Follow(topic.clone())) { Ok(subscription) } else { Err(SubscribeError::Busy) }
    }

    /// What the engine knows of nodes.
    pub(crate) async fn known(&self) -> Option<Known> {
        let (answer, answered) = oneshot::channel();
        if !self.shared.call(Call::Peers(answer)) {
            return None;
        }
        timeout_at(Instant::now() + ENGINE, answered).await.ok()?.ok()
    }
}

/// Whether one who waits leaves room to others: for half of its time, and then it takes what there is.
fn is_patient(begun: Instant, deadline: Instant) -> bool {
    begun.elapsed() < deadline.saturating_duration_since(begun) / 2
}

/// How long the engine may take to answer.
const ENGINE: Duration = Duration::from_secs(5);

/// A topic that is followed, until this is dropped.
#[derive(Debug)]
pub struct Subscription {
    shared: Arc<Shared>,
    topic: Topic,
    id: u64,
    deliveries: Receiver<Delivery>,
    missed: Arc<AtomicU64>,
}

/// What a subscriber gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    Delivery(Delivery),
    /// It was too slow for so many, which came before what comes next.
    Lagged(u64),
    /// Nothing came for the time that it would wait.
    Quiet,
}

impl Subscription {
    /// The next message; `None` when the overlay shuts down. Cancel-safe.
    pub async fn next(&mut self, wait: Duration) -> Option<Next> {
        let missed = self.missed.swap(0, Ordering::Relaxed);
        if missed > 0 {
            return Some(Next::Lagged(missed));
        }
        tokio::select! {
            biased;
            delivery = self.deliveries.recv() => delivery.map(Next::Delivery),
            () = self.shared.service.shutdown().draining() => None,
            () = sleep(wait) => Some(Next::Quiet),
        }
    }

    /// The next message if it has come already.
    pub(crate) fn try_next(&mut self) -> Option<Next> {
        match self.missed.swap(0, Ordering::Relaxed) {
            0 => self.deliveries.try_recv().map(Next::Delivery),
            missed => Some(Next::Lagged(missed)),
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut subscribers = self.shared.subscribers.lock();
        if let Some(of_topic) = subscribers.get_mut(&self.topic) {
            of_topic.retain(|subscriber| subscriber.id != self.id);
            if of_topic.is_empty() {
                subscribers.remove(&self.topic);
                drop(subscribers);
                // If the engine does not hear it, it goes on to deliver to nobody.
                self.shared.hint(Call::Unfollow(self.topic.clone()));
            }
        }
    }
}
