//! Interim answers (1xx) on their way from a handler to its connection.

use atomic_waker::AtomicWaker;
use bytes::BytesMut;
use http::{HeaderMap, StatusCode};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Interim answers not yet written; what comes beyond is dropped, as a client may do with any of them.
const PENDING_BYTES_MAX: usize = 64 << 10;

/// What an HTTP/1.1 connection says to its client before the answer proper.
#[derive(Debug, Default)]
pub struct Interim {
    pending: Mutex<BytesMut>,
    /// Something is pending: a look at it takes no lock.
    any: AtomicBool,
    /// The body wants to be read and the client waits for `100 Continue`.
    continue_wanted: AtomicBool,
    pub(super) waker: AtomicWaker,
    /// How many requests have begun on the connection; changed and compared under the lock.
    turn: AtomicU64,
}

/// Where interim answers to one request go, for whoever may outlive it: those to a later one are not its business.
#[derive(Clone, Debug)]
pub struct InterimSender {
    interim: Arc<Interim>,
    turn: u64,
}

impl InterimSender {
    /// Passes an interim answer on, unless its request is over.
    pub fn send(&self, status: StatusCode, headers: &HeaderMap) {
        self.interim.send_at(Some(self.turn), status, headers);
    }
}

impl Interim {
    /// For the request that is being answered now.
    pub fn sender(self: &Arc<Self>) -> InterimSender {
        InterimSender { interim: self.clone(), turn: self.turn.load(Ordering::Acquire) }
    }

    /// Passes an interim answer on, such as 103. Not for HTTP/1.0 clients, who do not know any.
    pub fn send(&self, status: StatusCode, headers: &HeaderMap) {
        self.send_at(None, status, headers);
    }

    fn send_at(&self, turn: Option<u64>, status: StatusCode, headers: &HeaderMap) {
        let mut pending = self.lock();
        if turn.is_some_and(|turn| turn != self.turn.load(Ordering::Relaxed)) {
            return;
        }
        let length: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
        if pending.len() + length > PENDING_BYTES_MAX {
            return;
        }
        let reason = status.canonical_reason().unwrap_or("");
        pending.extend_from_slice(format!("HTTP/1.1 {} {reason}\r\n", status.as_str()).as_bytes());
        for (name, value) in headers {
            pending.extend_from_slice(name.as_str().as_bytes());
            pending.extend_from_slice(b": ");
            pending.extend_from_slice(value.as_bytes());
            pending.extend_from_slice(b"\r\n");
        }
        pending.extend_from_slice(b"\r\n");
        self.any.store(true, Ordering::Release);
        drop(pending);
        self.waker.wake();
    }

    pub(super) fn want_continue(&self) {
        self.continue_wanted.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// A new request begins.
    pub(super) fn reset(&self) {
        self.continue_wanted.store(false, Ordering::Relaxed);
        let mut pending = self.lock();
        self.turn.fetch_add(1, Ordering::Release);
        if self.any.swap(false, Ordering::Acquire) {
            pending.clear();
        }
    }

    /// Moves what is pending behind `out`.
    pub(super) fn take(&self, out: &mut BytesMut) {
        if self.any.swap(false, Ordering::Acquire) {
            out.unsplit(self.lock().split());
        }
    }

    /// Likewise, and `100 Continue` if it is wanted.
    pub(super) fn take_all(&self, out: &mut BytesMut) {
        self.take(out);
        if self.continue_wanted.swap(false, Ordering::AcqRel) {
            out.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
        }
    }

    fn lock(&self) -> MutexGuard<'_, BytesMut> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interim_answer_that_comes_late_is_not_taken_for_one_to_the_next_request() {
        let interim = Arc::new(Interim::default());
        let said = |sender: &InterimSender| {
            sender.send(StatusCode::EARLY_HINTS, &HeaderMap::new());
            let mut out = BytesMut::new();
            interim.take(&mut out);
            out.starts_with(b"HTTP/1.1 103 ")
        };
        let first = interim.sender();
        assert!(said(&first));
        first.send(StatusCode::EARLY_HINTS, &HeaderMap::new());
        interim.reset();
        assert!(!said(&first), "nor is what was still pending");
        assert!(said(&interim.sender()));
    }
}
