//! The in-process bus: one lossy broadcast of [`KernelEvent`]s.
//!
//! A consumer that falls behind is told how many events it missed and must look at the source of truth; the
//! type of [`Subscription::next`] makes that impossible to overlook.

use crate::metrics::{Counter, Metrics};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast;
use tokio::time::Instant;

/// Capacity of the bus, as the seeds have it.
pub const BUS_CAPACITY: usize = 1024;

/// What services tell each other.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelEvent {
    Health {
        service: &'static str,
        ok: bool,
    },
    ConfigUpdated {
        version: u64,
    },
    ServiceCrashed {
        service: &'static str,
        reason: String,
    },
    Shutdown,
    RegistryUpdated {
        version: u64,
        b3: String,
    },
    /// A registry signed a checkpoint, of this process or one that is followed.
    RegistryCheckpoint {
        size: u64,
        /// The signed note.
        note: Arc<str>,
    },
    /// A node that we talk to gives reason to look at it.
    PeerTrouble {
        service: &'static str,
        peer: String,
        cause: &'static str,
    },
}

/// What a subscriber sees next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    Event(KernelEvent),
    /// This many events were missed: reconcile from the source of truth.
    Reconcile {
        missed: u64,
    },
}

/// One consumer's place on the bus.
#[derive(Debug)]
pub struct Subscription {
    consumer: &'static str,
    receiver: broadcast::Receiver<KernelEvent>,
    lagged: Counter,
    last_warning: Option<Instant>,
}

impl Subscription {
    pub(crate) fn new(
        metrics: &Metrics,
        service: &str,
        consumer: &'static str,
        receiver: broadcast::Receiver<KernelEvent>,
    ) -> Subscription {
        let family = metrics.family(
            "bus_lagged_total",
            "Bus events a consumer was too slow for.",
            ["service", "consumer"],
        );
        Subscription { consumer, receiver, lagged: family.with([service, consumer]), last_warning: None }
    }

    /// The next event, or the news that some were missed; `None` when the bus is gone. Cancel-safe.
    pub async fn next(&mut self) -> Option<Next> {
        match self.receiver.recv().await {
            Ok(event) => Some(Next::Event(event)),
            Err(broadcast::error::RecvError::Closed) => None,
            Err(broadcast::error::RecvError::Lagged(missed)) => {
                self.lagged.add(missed);
                let due = self.last_warning.is_none_or(|last| last.elapsed() >= Duration::from_secs(60));
                if due {
                    self.last_warning = Some(Instant::now());
                    tracing::warn!(consumer = self.consumer, missed, "bus consumer lags and will reconcile");
                }
                Some(Next::Reconcile { missed })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Kernel;

    #[tokio::test]
    async fn a_slow_consumer_is_told_what_it_missed_and_it_is_counted() {
        let kernel = Kernel::new();
        let service = kernel.service("t");
        let mut slow = service.subscribe("slow");
        for version in 0..BUS_CAPACITY as u64 + 10 {
            kernel.publish(KernelEvent::ConfigUpdated { version });
        }
        assert_eq!(slow.next().await, Some(Next::Reconcile { missed: 10 }));
        assert_eq!(slow.next().await, Some(Next::Event(KernelEvent::ConfigUpdated { version: 10 })));
        let page = kernel.metrics().scrape();
        assert!(page.contains("bus_lagged_total{service=\"t\",consumer=\"slow\"} 10"), "{page}");
    }
}
