//! The four states of a service's life and the one signal that moves it through them.

use tokio::sync::watch;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Running,
    /// Nothing new is taken; what is in flight or queued is finished.
    Draining,
    /// The deadline has passed: what has not begun to answer is refused, the rest is cut.
    Aborting,
    Stopped,
}

/// A service's view of the signal. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Shutdown {
    receiver: watch::Receiver<Phase>,
}

impl Shutdown {
    pub(crate) fn new(receiver: watch::Receiver<Phase>) -> Shutdown {
        Shutdown { receiver }
    }

    pub fn phase(&self) -> Phase {
        *self.receiver.borrow()
    }

    /// Resolves once the phase is reached or passed; never lost, however late it is asked. Cancel-safe.
    pub async fn reached(&self, phase: Phase) {
        let mut receiver = self.receiver.clone();
        // An error means the kernel itself is gone, which is as far as a shutdown can get.
        let _ = receiver.wait_for(|now| *now >= phase).await;
    }

    /// Resolves when the drain begins.
    pub async fn draining(&self) {
        self.reached(Phase::Draining).await;
    }
}
