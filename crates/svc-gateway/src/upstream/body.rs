//! Bodies on their way through: what they cost, when they must have ended, and who is waited for.

use super::Loaded;
use crate::forward::may_trail;
use crate::gate::Pass;
use crate::ledger::Account;
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http_body::{Body as HttpBody, Frame, SizeHint};
use ron_kernel::admission::deadline::Budget;
use ron_kernel::http::client::{ResponseBody, retain};
use ron_kernel::http::{Body, BodyError, Fields};
use ron_kernel::metrics::Counter;
use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;
use tokio::time::Sleep;

/// An answer of at most this length is held to its budget to the last byte.
const SHORT: u64 = 1 << 20;

/// What a response is charged to; the request's permits are held with it.
pub(crate) struct Charges {
    pub(crate) pass: Pass,
    /// What request and response have cost so far, and the factor for both.
    pub(crate) cost: u64,
    pub(crate) factor: u64,
    pub(crate) account: Arc<Account>,
    /// Counts answers that came too late.
    pub(crate) timeouts: Counter,
    pub(crate) _loaded: Loaded,
}

/// See the module.
struct Metered {
    body: ResponseBody,
    until: Option<Pin<Box<Sleep>>>,
    charges: Charges,
}

/// The body of an answer with these fields, charged as it passes and held to its deadline on both sides.
pub(crate) fn metered(body: ResponseBody, fields: &Fields, budget: &Budget, charges: Charges) -> Body {
    let until = until(fields, budget);
    let timer = until.map(|until| Box::pin(tokio::time::sleep_until(until.into())));
    Body::stream(Metered { body, until: timer, charges }).ending_by(until)
}

/// When the whole response must be there: a short one within its budget, any within the client's own deadline.
fn until(fields: &Fields, budget: &Budget) -> Option<Instant> {
    let field = |name| fields.get(name).and_then(|value| std::str::from_utf8(value).ok());
    let short = field(&CONTENT_LENGTH)
        .and_then(|length| length.parse::<u64>().ok())
        .is_some_and(|length| length <= SHORT);
    let stream = field(&CONTENT_TYPE)
        .is_some_and(|kind| kind.starts_with("text/event-stream") || kind.starts_with("application/grpc"));
    if short && !stream { Some(budget.until) } else { budget.client }
}

impl HttpBody for Metered {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if let Some(until) = &mut this.until
            && until.as_mut().poll(cx).is_ready()
        {
            this.charges.timeouts.inc();
            return Poll::Ready(Some(Err(BodyError::Deadline)));
        }
        let polled = Pin::new(&mut this.body).poll_frame(cx);
        let Poll::Ready(Some(Ok(frame))) = polled else { return polled };
        let charges = &mut this.charges;
        let frame = frame.map_data(|data| {
            charges.cost += data.len() as u64;
            charges.pass.settle(charges.factor.saturating_mul(charges.cost));
            charges.account.book(data)
        });
        Poll::Ready(Some(Ok(match frame.into_trailers() {
            Ok(mut trailers) => {
                retain(&mut trailers, may_trail);
                Frame::trailers(trailers)
            }
            Err(frame) => frame,
        })))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// How an upload is getting on.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Bytes that came.
    pub(crate) came: AtomicU64,
    /// Whoever passes it on waits for the client.
    pub(crate) waits: AtomicBool,
}

/// A request body that says how it is getting on.
pub(crate) struct Upload {
    pub(crate) body: Body,
    pub(crate) progress: Arc<Progress>,
}

impl HttpBody for Upload {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        self.progress.waits.store(polled.is_pending(), Ordering::Relaxed);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(piece) = frame.data_ref()
        {
            self.progress.came.fetch_add(piece.len() as u64, Ordering::Relaxed);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
