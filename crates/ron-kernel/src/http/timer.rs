//! One timer for all requests of a connection.
//!
//! A request's deadline is nearly always far away and hardly ever reached, so setting a timer for each and taking it
//! back costs more than it brings. This one stays set from request to request: when it rings for a deadline that has
//! been replaced by a later one, it is set again.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Instant;
use tokio::time::Sleep;

/// See the module. Polled by the connection's own task only; the lock is never waited for.
#[derive(Debug, Default)]
pub struct Timer(Mutex<Option<Pin<Box<Sleep>>>>);

impl Timer {
    /// Ready once the deadline has passed.
    pub fn poll_until(&self, deadline: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let deadline = tokio::time::Instant::from_std(deadline);
        let mut slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sleep = slot.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        if sleep.deadline() > deadline {
            sleep.as_mut().reset(deadline);
        }
        loop {
            let rung_for = sleep.deadline();
            ready!(sleep.as_mut().poll(cx));
            if rung_for >= deadline {
                // The next request must not find it rung.
                *slot = None;
                return Poll::Ready(());
            }
            sleep.as_mut().reset(deadline);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// How long a deadline of this many seconds is waited for.
    async fn wait(timer: &Timer, seconds: u64) -> u64 {
        let begun = tokio::time::Instant::now();
        let deadline = (begun + Duration::from_secs(seconds)).into_std();
        std::future::poll_fn(|cx| timer.poll_until(deadline, cx)).await;
        begun.elapsed().as_secs()
    }

    #[tokio::test(start_paused = true)]
    async fn it_rings_for_the_deadline_asked_for_whatever_was_asked_before() {
        let timer = Timer::default();
        let abandoned = tokio::time::timeout(Duration::from_secs(1), wait(&timer, 30)).await;
        assert!(abandoned.is_err());
        assert_eq!(wait(&timer, 5).await, 5, "sooner than the one before");
        assert_eq!(wait(&timer, 3).await, 3, "after it has rung");
        let abandoned = tokio::time::timeout(Duration::from_secs(1), wait(&timer, 2)).await;
        assert!(abandoned.is_err());
        assert_eq!(wait(&timer, 40).await, 40, "later than the one before");
    }
}
