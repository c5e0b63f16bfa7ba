//! A shared HTTP cache (RFC 9111 and its relatives 9110, 9211, 9213, 5861 and 8246) without I/O or a clock.

mod answer;
pub mod date;
pub mod directives;
pub mod head;
mod invalidate;
pub mod list;
pub mod range;
mod reuse;
mod store;
pub mod structured;
mod validate;
pub mod validators;
pub mod vary;

pub use answer::{Answer, CACHE_STATUS, CacheStatus, answer};
pub use date::UnixMillis;
pub use head::{Body, Exchange, Freshness, Heuristic, Policy, StoredHead};
pub use invalidate::{CACHE_TAG, Purge, SURROGATE_KEY, invalidated, surrogate_keys};
pub use reuse::{Forward, Reason, Reuse, Verdict, decide, is_cacheable, select};
pub use store::{NotStored, Pending, judge};
pub use validate::{
    Freshened, Validated, combine, freshen, freshen_by_head, make_completion, make_conditional, revalidation,
    validated,
};

#[cfg(test)]
mod tests;
