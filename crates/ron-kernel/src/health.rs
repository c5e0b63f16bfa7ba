//! Truthful readiness: each service's state and every cause that is missing, in two scopes.

use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Seconds a caller is asked to wait before it looks at an unready node again.
const RETRY_AFTER: u64 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Starting,
    Ready,
    Draining,
    /// Failed closed: a permanent task kept failing.
    Failed,
}

/// How much a missing thing takes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Something is missing, nothing is refused.
    Degraded,
    /// Writes are shed; reads go on.
    WritesShed,
    /// Nothing is served.
    Unready,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    Read,
    Write,
}

#[derive(Debug)]
struct Entry {
    state: State,
    listeners_closed: bool,
    /// Cause to severity and how many raised it (several workers may be down at once).
    missing: BTreeMap<String, (Severity, usize)>,
    /// Cause to what is behind it, for people.
    why: BTreeMap<String, String>,
}

/// The readiness of all services of the process.
#[derive(Clone, Debug, Default)]
pub struct Health {
    services: Arc<Mutex<BTreeMap<&'static str, Entry>>>,
}

/// The answer of `/readyz`.
#[derive(Debug)]
pub struct Readiness {
    pub ready: bool,
    pub degraded: bool,
    pub missing: Vec<String>,
    pub services: BTreeMap<&'static str, &'static str>,
    /// What is behind a cause, where somebody has said so.
    pub why: BTreeMap<String, String>,
}

impl Readiness {
    pub fn to_json(&self) -> Value {
        let mut body = Map::new();
        body.insert("ready".into(), self.ready.into());
        body.insert("degraded".into(), self.degraded.into());
        body.insert("missing".into(), json!(self.missing));
        body.insert("services".into(), json!(self.services));
        if !self.why.is_empty() {
            body.insert("why".into(), json!(self.why));
        }
        if !self.ready {
            body.insert("retry_after".into(), RETRY_AFTER.into());
        }
        Value::Object(body)
    }

    /// Seconds for `Retry-After`, where one is due.
    pub fn retry_after(&self) -> Option<u64> {
        (!self.ready).then_some(RETRY_AFTER)
    }
}

impl Health {
    pub(crate) fn add(&self, service: &'static str) {
        let entry = Entry {
            state: State::Starting,
            listeners_closed: false,
            missing: BTreeMap::new(),
            why: BTreeMap::new(),
        };
        self.lock().insert(service, entry);
    }

    pub fn set_state(&self, service: &'static str, state: State) {
        if let Some(entry) = self.lock().get_mut(service) {
            // A service that failed closed stays failed, whatever its remaining tasks report.
            if entry.state != State::Failed {
                entry.state = state;
            }
        }
    }

    pub fn listeners_closed(&self, service: &'static str) {
        if let Some(entry) = self.lock().get_mut(service) {
            entry.listeners_closed = true;
        }
    }

    /// Says that something is missing; each call is taken back by one [`Health::restore`].
    pub fn lose(&self, service: &'static str, cause: &str, severity: Severity, why: Option<&str>) {
        if let Some(entry) = self.lock().get_mut(service) {
            let missing = entry.missing.entry(cause.to_owned()).or_insert((severity, 0));
            missing.0 = severity;
            missing.1 += 1;
            if let Some(why) = why {
                entry.why.insert(cause.to_owned(), why.to_owned());
            }
        }
    }

    pub fn restore(&self, service: &'static str, cause: &str) {
        if let Some(entry) = self.lock().get_mut(service)
            && let Some((_, count)) = entry.missing.get_mut(cause)
        {
            *count -= 1;
            if *count == 0 {
                entry.missing.remove(cause);
                entry.why.remove(cause);
            }
        }
    }

    /// Says what is behind a cause that is missing; it is forgotten with the cause.
    pub fn explain(&self, service: &'static str, cause: &str, why: &str) {
        if let Some(entry) = self.lock().get_mut(service)
            && entry.missing.contains_key(cause)
        {
            entry.why.insert(cause.to_owned(), why.to_owned());
        }
    }

    /// The answer for one service, or for all of them; `None` if there is no such service.
    pub fn readiness(&self, only: Option<&str>, scope: Scope) -> Option<Readiness> {
        let services = self.lock();
        let mut answer = Readiness {
            ready: true,
            degraded: false,
            missing: Vec::new(),
            services: BTreeMap::new(),
            why: BTreeMap::new(),
        };
        let mut found = false;
        for (name, entry) in services.iter() {
            if only.is_some_and(|only| only != *name) {
                continue;
            }
            found = true;
            let worst = entry.missing.values().map(|(severity, _)| *severity).max();
            let refuses = match entry.state {
                State::Starting | State::Failed => true,
                State::Draining => scope == Scope::Write || entry.listeners_closed,
                State::Ready => match worst {
                    Some(Severity::Unready) => true,
                    Some(Severity::WritesShed) => scope == Scope::Write,
                    Some(Severity::Degraded) | None => false,
                },
            };
            answer.ready &= !refuses;
            answer.degraded |= worst.is_some() || entry.state != State::Ready;
            // The process itself is no service: its causes stand without a name, its state is not listed.
            let is_kernel = *name == "kernel";
            let full = |cause: &str| if is_kernel { cause.to_owned() } else { format!("{name}.{cause}") };
            answer.missing.extend(entry.missing.keys().map(|cause| full(cause)));
            answer.why.extend(entry.why.iter().map(|(cause, why)| (full(cause), why.clone())));
            if let Some(cause) = match entry.state {
                State::Starting => Some("starting"),
                State::Draining => Some("draining"),
                State::Failed => Some("failed"),
                State::Ready => None,
            } {
                answer.missing.push(full(cause));
            }
            if !is_kernel {
                answer.services.insert(name, describe(entry.state, worst));
            }
        }
        (found || only.is_none()).then_some(answer)
    }

    pub fn is_ok(&self, service: &str) -> bool {
        self.readiness(Some(service), Scope::Write).is_some_and(|answer| answer.ready)
    }

    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.lock().keys().copied().collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<&'static str, Entry>> {
        self.services.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn describe(state: State, worst: Option<Severity>) -> &'static str {
    match (state, worst) {
        (State::Starting, _) => "starting",
        (State::Draining, _) => "draining",
        (State::Failed, _) => "failed",
        (State::Ready, Some(_)) => "degraded",
        (State::Ready, None) => "ready",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(health: &Health, scope: Scope, ready: bool, degraded: bool, missing: &[&str]) {
        let answer = health.readiness(None, scope).unwrap();
        assert_eq!(
            (answer.ready, answer.degraded, answer.missing),
            (ready, degraded, missing.iter().map(|s| (*s).to_owned()).collect()),
            "{scope:?}"
        );
    }

    #[test]
    fn the_four_cases_of_the_contract_hold_in_both_scopes() {
        let health = Health::default();
        health.add("a");
        check(&health, Scope::Write, false, true, &["a.starting"]);
        check(&health, Scope::Read, false, true, &["a.starting"]);
        health.set_state("a", State::Ready);
        check(&health, Scope::Write, true, false, &[]);
        health.lose("a", "worker", Severity::WritesShed, None);
        health.lose("a", "worker", Severity::WritesShed, None);
        check(&health, Scope::Write, false, true, &["a.worker"]);
        check(&health, Scope::Read, true, true, &["a.worker"]);
        health.restore("a", "worker");
        check(&health, Scope::Write, false, true, &["a.worker"]);
        health.restore("a", "worker");
        health.lose("a", "jwks", Severity::Degraded, None);
        check(&health, Scope::Write, true, true, &["a.jwks"]);
        health.restore("a", "jwks");
        health.set_state("a", State::Draining);
        check(&health, Scope::Write, false, true, &["a.draining"]);
        check(&health, Scope::Read, true, true, &["a.draining"]);
        health.listeners_closed("a");
        check(&health, Scope::Read, false, true, &["a.draining"]);
        health.set_state("a", State::Failed);
        health.set_state("a", State::Ready);
        check(&health, Scope::Read, false, true, &["a.failed"]);
    }

    #[test]
    fn what_is_behind_a_cause_is_told_for_as_long_as_it_lasts() {
        let health = Health::default();
        health.add("kernel");
        health.set_state("kernel", State::Ready);
        health.explain("kernel", "x", "nothing is missing");
        let why = || health.readiness(None, Scope::Write).unwrap().to_json()["why"].clone();
        assert_eq!(why(), Value::Null);
        health.lose("kernel", "x", Severity::Degraded, None);
        health.explain("kernel", "x", "one");
        health.explain("kernel", "x", "two");
        assert_eq!(why(), json!({"x": "two"}));
        health.restore("kernel", "x");
        health.lose("kernel", "x", Severity::Degraded, None);
        assert_eq!(why(), Value::Null, "the next time may have another reason");
        health.restore("kernel", "x");
        health.lose("kernel", "x", Severity::Degraded, Some("three"));
        assert_eq!(why(), json!({"x": "three"}));
    }

    #[test]
    fn one_service_can_be_asked_for_alone() {
        let health = Health::default();
        health.add("a");
        health.add("b");
        health.set_state("a", State::Ready);
        assert!(health.readiness(Some("a"), Scope::Write).unwrap().ready);
        assert!(!health.readiness(None, Scope::Write).unwrap().ready);
        assert!(health.readiness(Some("c"), Scope::Write).is_none());
    }
}
