//! The Bus Publisher: tells the process of each commit. However slow, it delays nobody.

use crate::shared::Shared;
use arc_swap::ArcSwapOption;
use ron_kernel::bus::KernelEvent;
use ron_kernel::task::TaskResult;
use ron_log::Head;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::broadcast::error::RecvError;

/// Until when the publisher does nothing: what an operator may do to see that nobody waits for it.
#[derive(Debug, Default)]
pub(crate) struct Stall(ArcSwapOption<Instant>);

impl Stall {
    pub(crate) fn begin(&self, by: Duration) {
        self.0.store(Some(Arc::new(Instant::now() + by)));
    }

    async fn over(&self) {
        if let Some(until) = self.0.load_full() {
            tokio::time::sleep_until((*until).into()).await;
        }
    }
}

pub(crate) async fn publish(shared: Arc<Shared>, stall: Arc<Stall>) -> TaskResult {
    let mut committed = shared.committed.subscribe();
    let family = shared.service.metrics().family::<ron_kernel::metrics::Counter, 2>(
        "bus_lagged_total",
        "Bus events a consumer was too slow for.",
        ["service", "consumer"],
    );
    let lagged = family.with([shared.service.name(), "publisher"]);
    loop {
        let head = tokio::select! {
            biased;
            () = shared.service.shutdown().draining() => return Ok(()),
            received = async { stall.over().await; committed.recv().await } => match received {
                Ok(head) => head,
                Err(RecvError::Closed) => return Ok(()),
                Err(RecvError::Lagged(missed)) => {
                    lagged.add(missed);
                    // Whoever listens wants the newest; the log has the rest.
                    shared.head().head()
                }
            },
        };
        let Head { version, hash } = head;
        shared.service.kernel().publish(KernelEvent::RegistryUpdated { version, b3: hash.to_string() });
    }
}
