//! What the object store behind the local one is asked for on behalf of requests.

use super::{Edge, Snapshot, Source};
use crate::address::Address;
use crate::cache::CACHE_STATUS;
use crate::cas::{Arrived, Object};
use crate::depot::OBJECT_MAX;
use crate::fill::Failure;
use ron_kernel::admission::deadline::Budget;
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Edge {
    /// The largest object that can be put.
    pub(super) fn object_max(&self) -> u64 {
        if self.depot.is_some() { OBJECT_MAX } else { u64::MAX }
    }

    /// Has the object store keep what arrived, if there is one.
    pub(super) async fn deposit(&self, arrived: &Arrived) -> Result<(), Rejection> {
        let Some(depot) = &self.depot else { return Ok(()) };
        let kept = Box::pin(depot.keep(arrived)).await;
        kept.map_err(|_noted| {
            Rejection::new(Reason::Storage, "the object store does not take it now").retry_after(1)
        })
    }

    /// Whether an object is bad here and may be good in the object store.
    pub(super) fn is_replaceable(&self, object: &Object) -> bool {
        self.depot.is_some() && object.condition.bad.load(Ordering::Relaxed)
    }

    /// An object that is not stored here, if the object store has it.
    pub(super) async fn withdraw(
        &self,
        address: Address,
        snapshot: &Snapshot,
        budget: Budget,
    ) -> Result<Object, Rejection> {
        // No asset's name and no site's response has such a key.
        let key = format!("\0\0{address}");
        let fetched = match &self.depot {
            Some(depot) if self.fill.negative.at(&key, Instant::now()).is_none() => {
                let fetched = depot.fetch(address, budget.until).await;
                if let Err(Failure::Missing { gone }) = fetched {
                    let good_for = snapshot.settings.fill.negative_ttl.0;
                    self.fill.negative.note(&key, gone, Instant::now(), good_for);
                }
                fetched
            }
            _ => Err(Failure::Missing { gone: false }),
        };
        fetched.map_err(|failure| match failure {
            Failure::Missing { .. } => {
                self.count_cache(Source::Miss);
                let rejection = Rejection::new(Reason::NotFound, "it is not stored");
                rejection.header(CACHE_STATUS, Source::Miss.status().value())
            }
            Failure::Validators => {
                Rejection::new(Reason::DigestStored, "the object store has other bytes under this address")
            }
            Failure::Upstream(_) => {
                Rejection::new(Reason::Storage, "the object store does not give it now").retry_after(1)
            }
            Failure::Timeout => {
                self.read_timeouts.inc();
                Rejection::new(
                    Reason::Timeout,
                    "the object store did not give it in time; it is still fetched",
                )
            }
            other => other.rejection(),
        })
    }
}
