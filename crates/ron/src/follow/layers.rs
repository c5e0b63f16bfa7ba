//! Which governed set is in force beside the file: the newest, the last good one, or none.

use super::notice::Notice;
use super::set::Set;
use arc_swap::ArcSwap;
use ron_kernel::config::{Loaded, Problems, Setting, Sources, Validate, attempt};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Why the newest set is not in force.
#[derive(Clone, Debug)]
pub struct Rejected {
    pub version: u64,
    /// One line for each problem.
    pub problems: Vec<String>,
}

/// What the follower found, and what became of it.
#[derive(Clone, Debug, Default)]
pub struct Sets {
    pub newest: Arc<Set>,
    /// The last that was valid together with the file.
    pub good: Arc<Set>,
    pub in_force: Arc<Set>,
    pub rejected: Option<Rejected>,
}

/// The governed layer. One change at a time; readers of the configuration never come here.
#[derive(Debug)]
pub struct Layers {
    pub(super) notice: Notice,
    sets: Mutex<Sets>,
    /// The set that is read with the file next.
    chosen: ArcSwap<Set>,
}

impl Sets {
    /// What to try, best first: each set once, and at last the file alone.
    fn candidates(&self) -> Vec<Arc<Set>> {
        let mut all = vec![self.newest.clone(), self.good.clone(), Arc::default()];
        all.dedup();
        all
    }

    /// One of the candidates was valid; if it is not the newest, here is why that was not.
    fn took(&mut self, set: Arc<Set>, refused: Option<Problems>) {
        self.rejected =
            refused.map(|problems| Rejected { version: self.newest.version, problems: problems.lines() });
        if self.rejected.is_none() {
            self.good = set.clone();
        }
        self.in_force = set;
    }
}

impl Layers {
    /// The file alone, until somebody governs.
    pub(super) fn new(notice: Notice) -> Layers {
        Layers { notice, sets: Mutex::default(), chosen: ArcSwap::default() }
    }

    /// Reads the configuration with the best of the kept sets that goes with the file. The file alone must be valid.
    pub(super) fn begin<C: Setting + Validate + Default>(
        notice: Notice,
        sources: &Sources,
        newest: Set,
        good: Set,
    ) -> Result<(Loaded<C>, Layers), Problems> {
        let mut sets = Sets { newest: Arc::new(newest), good: Arc::new(good), ..Sets::default() };
        let mut refused = None;
        for set in sets.candidates() {
            let (loaded, problems) = attempt::<C>(&Sources { added: set.added(), ..sources.clone() });
            if problems.is_empty() {
                sets.took(set.clone(), refused);
                let layers = Layers { notice, chosen: ArcSwap::new(set), sets: Mutex::new(sets) };
                layers.tell(&layers.lock());
                return Ok((loaded, layers));
            }
            // What the file alone has to be blamed for is not the registry's fault.
            if set.is_empty() {
                return Err(problems);
            }
            refused.get_or_insert(problems);
        }
        unreachable!("the last candidate is the file alone")
    }

    pub fn chosen(&self) -> Arc<Set> {
        self.chosen.load_full()
    }

    pub fn sets(&self) -> Sets {
        self.lock().clone()
    }

    /// Reads the file again, with the best set that goes with it. Reads files: call it off the runtime.
    pub fn reload<T>(&self, mut again: impl FnMut() -> Result<T, Problems>) -> Result<T, Problems> {
        let mut sets = self.lock();
        let mut refused = None;
        let mut last = Problems::default();
        for set in sets.candidates() {
            self.chosen.store(set.clone());
            match again() {
                Ok(done) => {
                    sets.took(set, refused);
                    self.tell(&sets);
                    return Ok(done);
                }
                Err(problems) => {
                    last = problems.clone();
                    refused.get_or_insert(problems);
                }
            }
        }
        self.chosen.store(sets.in_force.clone());
        Err(last)
    }

    /// Takes a newer set, or keeps what is in force and remembers why.
    pub(super) fn govern<T>(
        &self,
        newest: Set,
        again: impl FnOnce() -> Result<T, Problems>,
    ) -> Result<T, Problems> {
        let mut sets = self.lock();
        sets.newest = Arc::new(newest);
        let newest = sets.newest.clone();
        self.chosen.store(newest.clone());
        let outcome = again();
        match &outcome {
            Ok(_) => sets.took(newest, None),
            Err(problems) => {
                self.chosen.store(sets.in_force.clone());
                let in_force = sets.in_force.clone();
                sets.took(in_force, Some(problems.clone()));
            }
        }
        self.tell(&sets);
        outcome
    }

    /// Readiness says what was rejected, and the first reason; the log and `ron config show` have them all.
    fn tell(&self, sets: &Sets) {
        let why = sets.rejected.as_ref().map(|rejected| {
            let more = match rejected.problems.len() {
                0 | 1 => String::new(),
                count => format!(" (and {} more)", count - 1),
            };
            let first = rejected.problems.first().map_or("", String::as_str);
            format!("version {} is rejected: {first}{more}", rejected.version)
        });
        self.notice.rejected(why);
    }

    fn lock(&self) -> MutexGuard<'_, Sets> {
        self.sets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
