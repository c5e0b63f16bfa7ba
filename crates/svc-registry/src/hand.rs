//! A thread of one's own for work that blocks, so that it waits for nobody else's.

use ron_kernel::task::panic_text;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{SyncSender, sync_channel};
use tokio::sync::oneshot;

type Work = Box<dyn FnOnce() + Send>;

/// Does one piece of work at a time, so that handing over the next never waits.
#[derive(Debug)]
pub(crate) struct Hand(SyncSender<Work>);

impl Hand {
    pub(crate) fn new(name: &str) -> std::io::Result<Hand> {
        Hand::with_niceness(name, 0)
    }

    /// For work that has time: whatever else there is to do goes first.
    pub(crate) fn in_the_background(name: &str) -> std::io::Result<Hand> {
        Hand::with_niceness(name, 19)
    }

    fn with_niceness(name: &str, niceness: i32) -> std::io::Result<Hand> {
        let (hand, given) = sync_channel::<Work>(1);
        let work = move || {
            // Of this thread alone. Where that is not to be had, the work is done all the same.
            if niceness > 0 && rustix::process::setpriority_process(None, niceness).is_err() {
                tracing::debug!("a thread could not be given a lower priority");
            }
            given.into_iter().for_each(|work| work());
        };
        std::thread::Builder::new().name(name.to_owned()).spawn(work)?;
        Ok(Hand(hand))
    }

    /// What the work gives, or what it said when it panicked.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let (done, result) = oneshot::channel();
        let given = self.0.send(Box::new(move || {
            // Nobody is told if the task was ended meanwhile: the next one reads anew.
            let _ = done.send(catch_unwind(AssertUnwindSafe(work)));
        }));
        given.map_err(|gone| gone.to_string())?;
        match result.await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(panic)) => Err(panic_text(panic.as_ref())),
            Err(gone) => Err(gone.to_string()),
        }
    }

    /// Begins a piece of work that must not panic, and of which nobody waits for the end.
    pub(crate) fn begin(&self, work: impl FnOnce() + Send + 'static) {
        // The thread lives as long as this.
        let _ = self.0.send(Box::new(work));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_has_time_is_done_at_the_lowest_priority_and_nothing_else_is() {
        let niceness = || rustix::process::getpriority_process(None).unwrap();
        let usual = niceness();
        let background = Hand::in_the_background("background").unwrap();
        assert_eq!(background.run(niceness).await, Ok(19));
        assert_eq!(Hand::new("usual").unwrap().run(niceness).await, Ok(usual));
        assert_eq!(niceness(), usual);
    }
}
