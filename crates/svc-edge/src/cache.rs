//! A shared HTTP cache (RFC 9111 and its relatives 9110, 9211, 9213, 5861 and 8246) as a state machine: heads go in,
//! decisions come out. It reads no clock, opens no socket and keeps no bytes; who calls it does all three.
//!
//! Start from [`decide`]: given a request and what is stored for its URI, it says whether a stored response
//! answers it, and what to ask of the origin if not. In the order of an exchange:
//!
//! 1. [`decide`] gives a [`Verdict`]; [`answer`] makes the answer of what may be reused.
//! 2. [`make_conditional`], [`revalidation`] and [`make_completion`] make the request to the origin.
//! 3. [`validated`] says what a conditional request's response means; [`freshen`], [`freshen_by_head`] and
//!    [`combine`] change what is stored by it.
//! 4. [`judge`] and [`judge_post`] say whether a response may be stored; its [`Pending`] becomes a [`StoredHead`] with
//!    the content.
//! 5. [`invalidated`] says what an unsafe request makes unusable, [`Purge`] what an operator wants gone.
//!
//! Beneath: [`date`], [`list`] and [`structured`] read values, [`directives`] what they say about caching,
//! [`validators`], [`vary`] and [`range`] what they say about representations; [`head`] keeps it all and
//! calculates with it; `codec` writes it down.

mod answer;
mod codec;
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
pub use codec::DecodeError;
pub use date::UnixMillis;
pub use head::{Body, Exchange, Freshness, Heuristic, Policy, StoredHead};
pub use invalidate::{CACHE_TAG, Purge, SURROGATE_KEY, invalidated, surrogate_keys, without_dots};
pub(crate) use invalidate::{KEY_MAX, KEYS_MAX, purge_keys};
pub use reuse::{Forward, Reason, Reuse, Verdict, decide, is_cacheable, select};
pub use store::{NotStored, Pending, judge, judge_post};
pub use validate::{
    Freshened, Validated, combine, freshen, freshen_by_head, make_completion, make_conditional, revalidation,
    validated,
};

#[cfg(test)]
mod tests;
