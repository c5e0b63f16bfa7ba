//! The live configuration: validated as a whole, swapped atomically, kept when a newer one is wrong.

use super::load::{Change, Loaded};
use super::setting::Setting;
use super::tree::Problems;
use arc_swap::ArcSwap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// What remains to be done once every service accepted the new configuration; it cannot fail.
pub type Prepared = Box<dyn FnOnce() + Send>;

/// What could be read and what is wrong with it; an error if there was nothing to read.
type Load<C> = Box<dyn Fn() -> Result<(Loaded<C>, Problems), Problems> + Send + Sync>;
type Prepare<C> = Box<dyn Fn(&Loaded<C>) -> Result<Prepared, Problems> + Send + Sync>;

/// Holds the last good configuration and knows how to get a newer one.
pub struct Store<C> {
    current: ArcSwap<Loaded<C>>,
    load: Load<C>,
    prepare: Prepare<C>,
    /// One reload at a time; never taken by a reader.
    reloading: Mutex<u64>,
}

impl<C: Setting> Store<C> {
    pub fn new(
        first: Loaded<C>,
        load: impl Fn() -> Result<(Loaded<C>, Problems), Problems> + Send + Sync + 'static,
        prepare: impl Fn(&Loaded<C>) -> Result<Prepared, Problems> + Send + Sync + 'static,
    ) -> Store<C> {
        let current = ArcSwap::from_pointee(first);
        Store { current, load: Box::new(load), prepare: Box::new(prepare), reloading: Mutex::new(0) }
    }

    pub fn current(&self) -> Arc<Loaded<C>> {
        self.current.load_full()
    }

    /// Loads, checks and swaps; returns the new version and what changed. On failure nothing did.
    ///
    /// Reads files: call it off the runtime.
    pub fn reload(&self) -> Result<(u64, Vec<Change>), Problems> {
        let mut version = self.reloading.lock().unwrap_or_else(PoisonError::into_inner);
        let (newer, mut problems) = (self.load)()?;
        let changes = self.current.load().changes(&newer.value);
        // Where something is wrong a key may be missing for that reason; only what is stated anew has changed.
        let sound = problems.is_empty();
        let stated = |key: &str| sound || (newer.origins.contains_key(key) && !problems.taints(key));
        let restart: Vec<&String> = changes
            .iter()
            .filter(|change| change.restart && stated(&change.key))
            .map(|change| &change.key)
            .collect();
        for key in restart {
            problems.add(
                key,
                "changed, but takes effect only at a restart: restart the process, or change it back",
            );
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        let prepared = (self.prepare)(&newer)?;
        self.current.store(Arc::new(newer));
        prepared();
        *version += 1;
        Ok((*version, changes))
    }
}

impl<C> fmt::Debug for Store<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Store")
    }
}
