//! Interim answers (1xx) on their way from a handler to its connection.

use atomic_waker::AtomicWaker;
use bytes::BytesMut;
use http::{HeaderMap, StatusCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

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
}

impl Interim {
    /// Passes an interim answer on, such as 103. Not for HTTP/1.0 clients, who do not know any.
    pub fn send(&self, status: StatusCode, headers: &HeaderMap) {
        let mut pending = self.lock();
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
        drop(pending);
        self.any.store(true, Ordering::Release);
        self.waker.wake();
    }

    pub(super) fn want_continue(&self) {
        self.continue_wanted.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// A new request begins.
    pub(super) fn reset(&self) {
        self.continue_wanted.store(false, Ordering::Relaxed);
        if self.any.swap(false, Ordering::Acquire) {
            self.lock().clear();
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
