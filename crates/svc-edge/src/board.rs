//! Which objects are being fetched, so that each is fetched once. It knows no runtime, and the `models` crate compiles
//! this file too.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Flights by the key of what they bring. Of each key one can be joined.
#[derive(Clone, Debug)]
pub struct Board<F>(HashMap<String, F>);

impl<F> Default for Board<F> {
    fn default() -> Self {
        Board(HashMap::new())
    }
}

impl<F: Clone> Board<F> {
    /// The flight for a key, and whether it is a new one, which the caller has to see off.
    pub fn join(&mut self, key: &str, new: impl FnOnce() -> F) -> (F, bool) {
        match self.0.entry(key.to_owned()) {
            Entry::Occupied(entry) => (entry.get().clone(), false),
            Entry::Vacant(entry) => (entry.insert(new()).clone(), true),
        }
    }

    /// Lets nobody join the flights of these keys any more: what they bring is out of date.
    pub fn part(&mut self, covers: impl Fn(&str) -> bool) {
        self.0.retain(|key, _| !covers(key));
    }

    /// Lets nobody join this flight any more; one that has taken its place stays.
    pub fn leave(&mut self, key: &str, is_it: impl FnOnce(&F) -> bool) {
        if self.0.get(key).is_some_and(is_it) {
            self.0.remove(key);
        }
    }

    /// The flights that can be joined.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &F)> {
        self.0.iter().map(|(key, flight)| (key.as_str(), flight))
    }
}
