//! What readiness says of the registry that is followed: `registry_follow` and `registry_fork`, and why.

use ron_kernel::health::Severity;
use ron_kernel::kernel::Service;
use std::sync::{Mutex, MutexGuard, PoisonError};

const FOLLOW: &str = "registry_follow";
const FORK: &str = "registry_fork";

/// Tells readiness, each cause once.
#[derive(Debug)]
pub(super) struct Notice {
    service: Service,
    told: Mutex<Told>,
}

#[derive(Debug, Default)]
struct Told {
    /// Why nothing newer is known.
    contact: Option<String>,
    /// Why what is known is not in force.
    rejected: Option<String>,
    fork: Option<String>,
    follow_lost: bool,
    fork_lost: bool,
}

impl Notice {
    pub(super) fn new(service: &Service) -> Notice {
        Notice { service: service.clone(), told: Mutex::default() }
    }

    /// How it went to ask the registry; says whether that is news.
    pub(super) fn contact(&self, trouble: Option<String>) -> bool {
        let mut told = self.lock();
        let news = told.contact != trouble;
        told.contact = trouble;
        self.tell(&mut told);
        news
    }

    pub(super) fn rejected(&self, why: Option<String>) {
        let mut told = self.lock();
        told.rejected = why;
        self.tell(&mut told);
    }

    pub(super) fn fork(&self, why: Option<String>) {
        let mut told = self.lock();
        told.fork = why;
        self.tell(&mut told);
    }

    /// The trouble, as people read it.
    pub(super) fn trouble(&self) -> Option<String> {
        let told = self.lock();
        told.fork.clone().or_else(|| told.rejected.clone()).or_else(|| told.contact.clone())
    }

    fn tell(&self, told: &mut Told) {
        let follow = told.rejected.clone().or_else(|| told.contact.clone());
        self.cause(FOLLOW, follow, &mut told.follow_lost);
        self.cause(FORK, told.fork.clone(), &mut told.fork_lost);
    }

    fn cause(&self, cause: &str, why: Option<String>, lost: &mut bool) {
        match why {
            Some(why) => {
                if std::mem::replace(lost, true) {
                    self.service.explain(cause, &why);
                } else {
                    self.service.lose_because(cause, Severity::Degraded, &why);
                }
            }
            None => {
                if std::mem::replace(lost, false) {
                    self.service.restore(cause);
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
