//! The registry's own numbers.

use ron_kernel::kernel::Service;
use ron_kernel::metrics::{Counter, Counts, Family, Histogram};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Numbers {
    pub(crate) cas_failed: Counter,
    pub(crate) commit_latency: Histogram,
    pub(crate) batch_size: Counts,
    pub(crate) storage_backoff: Arc<Family<Counter, 1>>,
    pub(crate) retries: Counter,
    pub(crate) witness_retries: Counter,
    pub(crate) updates: Arc<Family<Counter, 1>>,
    pub(crate) recoveries: Arc<Family<Counter, 1>>,
    pub(crate) verify: Arc<Family<Histogram, 1>>,
    pub(crate) lagged: Counter,
    pub(crate) commit_timeouts: Counter,
    pub(crate) reloaded: Arc<Family<Counter, 1>>,
    pub(crate) reload_failed: Arc<Family<Counter, 1>>,
}

impl Numbers {
    pub(crate) fn new(service: &Service) -> Numbers {
        let metrics = service.metrics();
        let plain = |name, help| metrics.family::<Counter, 0>(name, help, []).with([]);
        Numbers {
            cas_failed: plain(
                "commit_cas_fail_total",
                "Commits that found HEAD moved, or what they touch changed.",
            ),
            commit_latency: metrics
                .family("commit_latency_seconds", "Time from a commit's request to its being durable.", [])
                .with([]),
            batch_size: metrics.family("commit_batch_size", "Entries of one durable write.", []).with([]),
            storage_backoff: metrics.family(
                "storage_backoff_total",
                "Reads of the store that were tried again after a pause.",
                ["op"],
            ),
            retries: service.counter("backoff_retries_total", "Calls tried again.", "op", "storage"),
            witness_retries: service.counter("backoff_retries_total", "Calls tried again.", "op", "witness"),
            updates: metrics.family(
                "registry_updates_total",
                "Commits asked for, by what came of them.",
                ["result"],
            ),
            recoveries: metrics.family(
                "registry_recoveries_total",
                "Times the registry was read anew from its store, by why.",
                ["kind"],
            ),
            verify: metrics.family(
                "approval_verify_seconds",
                "Time to check one approval's signature.",
                ["alg"],
            ),
            lagged: plain("stream_lagged_total", "Streams that were told that they lag."),
            commit_timeouts: service.io_timeout("commit"),
            reloaded: metrics.family(
                "registry_reload_success_total",
                "Configurations taken over, by where they came from.",
                ["source"],
            ),
            reload_failed: metrics.family(
                "registry_reload_fail_total",
                "Configurations that could not be taken over, by why.",
                ["reason"],
            ),
        }
    }
}
