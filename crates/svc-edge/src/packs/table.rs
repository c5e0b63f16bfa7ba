//! Which generation of each pack is served: pure steps from one table to the next.
//!
//! A generation is served until there is a better one: a file that is refused, or whose address is still being found
//! out, never takes the place of one that is good.

use super::mounted::Mounted;
use crate::address::Address;
use crate::config::PackSettings;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a step needs to know of a mount; tests have one without a file.
pub(super) trait Mount {
    /// The address of its bytes, once it is known.
    fn address(&self) -> Option<Address>;
}

impl Mount for Mounted {
    fn address(&self) -> Option<Address> {
        self.file.address()
    }
}

/// A pack of the configuration.
#[derive(Debug)]
pub(crate) struct Row<M = Mounted> {
    pub(crate) settings: PackSettings,
    pub(crate) serving: Option<Arc<M>>,
    /// Mounted, and served once it is known to have the address that it must have.
    pub(crate) candidate: Option<Arc<M>>,
    /// Why the file that is there now is not served.
    pub(crate) refused: Option<String>,
}

impl<M> Clone for Row<M> {
    fn clone(&self) -> Self {
        Row {
            settings: self.settings.clone(),
            serving: self.serving.clone(),
            candidate: self.candidate.clone(),
            refused: self.refused.clone(),
        }
    }
}

/// All packs, by their names.
pub(crate) type Table<M = Mounted> = BTreeMap<String, Row<M>>;

/// What came of mounting the file that a pack has now.
pub(super) type Attempt<M = Mounted> = Result<Arc<M>, String>;

/// The table of another configuration, whose files were all tried.
pub(super) fn configured<M: Mount>(table: &Table<M>, attempts: &[(PackSettings, Attempt<M>)]) -> Table<M> {
    let row = |(settings, attempt): &(PackSettings, Attempt<M>)| {
        let serving = table.get(&settings.name).and_then(|row| row.serving.clone());
        let settings = settings.clone();
        let name = settings.name.clone();
        let row = match attempt {
            Ok(mount) => judged(settings, serving, mount),
            Err(why) => Row { settings, serving, candidate: None, refused: Some(why.clone()) },
        };
        (name, row)
    };
    attempts.iter().map(row).collect()
}

/// The table once a pack was tried by itself; the same if it is not configured any more.
pub(super) fn tried<M: Mount>(table: &Table<M>, settings: &PackSettings, attempt: &Attempt<M>) -> Table<M> {
    let mut table = table.clone();
    if let Some(row) = table.get_mut(&settings.name).filter(|row| row.settings == *settings) {
        let serving = row.serving.take();
        *row = match attempt {
            Ok(mount) => judged(settings.clone(), serving, mount),
            Err(why) => {
                Row { settings: settings.clone(), serving, candidate: None, refused: Some(why.clone()) }
            }
        };
    }
    table
}

/// The table once the address of a mount is known, or known not to come.
pub(super) fn settled<M: Mount>(table: &Table<M>, mount: &Arc<M>, failed: Option<&str>) -> Table<M> {
    let row = |(name, row): (&String, &Row<M>)| {
        let waits = row.candidate.as_ref().is_some_and(|candidate| Arc::ptr_eq(candidate, mount));
        let row = match failed {
            _ if !waits => row.clone(),
            None => judged(row.settings.clone(), row.serving.clone(), mount),
            Some(why) => Row { candidate: None, refused: Some(why.to_owned()), ..row.clone() },
        };
        (name.clone(), row)
    };
    table.iter().map(row).collect()
}

/// What becomes of a mount that is good as far as its structure goes.
fn judged<M: Mount>(settings: PackSettings, serving: Option<Arc<M>>, mount: &Arc<M>) -> Row<M> {
    let refused = None;
    match (Address::parse(&settings.b3), mount.address()) {
        (Some(pinned), Some(found)) if pinned != found => {
            // The very file that is served may be the one that is not wanted any more.
            let serving = serving.filter(|serving| !Arc::ptr_eq(serving, mount));
            let refused = Some(format!("its address is {found}, not the one that edge.packs names"));
            Row { settings, serving, candidate: None, refused }
        }
        (Some(_), None) => Row { settings, serving, candidate: Some(mount.clone()), refused },
        (Some(_), Some(_)) | (None, _) => {
            Row { settings, serving: Some(mount.clone()), candidate: None, refused }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::OnceLock;

    #[derive(Debug, Default)]
    struct File(OnceLock<Address>);

    impl Mount for File {
        fn address(&self) -> Option<Address> {
            self.0.get().copied()
        }
    }

    fn pack(b3: &str) -> PackSettings {
        let (name, path) = ("a".to_owned(), "a.pmtiles".to_owned());
        PackSettings { name, path, b3: b3.to_owned(), ..PackSettings::default() }
    }

    fn known(byte: u8) -> Arc<File> {
        Arc::new(File(OnceLock::from(Address([byte; 32]))))
    }

    /// What the one row of a table says: serving, candidate, refused.
    fn check(table: &Table<File>, serving: Option<&Arc<File>>, candidate: Option<&Arc<File>>, refused: bool) {
        let row = &table["a"];
        let is = |one: &Option<Arc<File>>, other: Option<&Arc<File>>| match (one, other) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        };
        assert!(is(&row.serving, serving), "serving: {row:?}");
        assert!(is(&row.candidate, candidate), "candidate: {row:?}");
        assert_eq!(row.refused.is_some(), refused, "{row:?}");
    }

    #[test]
    fn a_bad_file_does_not_take_the_place_of_a_good_one() {
        let (one, two) = (Arc::new(File::default()), Arc::new(File::default()));
        let table = configured(&Table::new(), &[(pack(""), Ok(one.clone()))]);
        check(&table, Some(&one), None, false);
        let table = configured(&table, &[(pack(""), Err("no".to_owned()))]);
        check(&table, Some(&one), None, true);
        let table = configured(&table, &[(pack(""), Ok(two.clone()))]);
        check(&table, Some(&two), None, false);
        assert!(configured(&table, &[]).is_empty(), "a pack that is not configured is gone");
        check(&configured(&Table::new(), &[(pack(""), Err("no".to_owned()))]), None, None, true);
    }

    #[test]
    fn a_pack_that_is_tried_again_changes_its_own_row_alone() {
        let (one, two) = (Arc::new(File::default()), Arc::new(File::default()));
        let other = PackSettings { name: "b".to_owned(), ..pack("") };
        let refused = || Err("it has not been reached yet".to_owned());
        let table = configured(&Table::new(), &[(pack(""), refused()), (other, refused())]);
        let table = tried(&table, &pack(""), &Ok(one.clone()));
        check(&table, Some(&one), None, false);
        assert!(table["b"].serving.is_none() && table["b"].refused.is_some());
        let table = tried(&table, &pack(""), &Err("it is down".to_owned()));
        check(&table, Some(&one), None, true);
        let table = tried(&table, &pack(""), &Ok(two.clone()));
        check(&table, Some(&two), None, false);
        let moved = PackSettings { path: "elsewhere".to_owned(), ..pack("") };
        check(&tried(&table, &moved, &Ok(one)), Some(&two), None, false);
    }

    #[test]
    fn a_pinned_pack_is_served_when_its_address_is_found_to_be_right() {
        let pinned = pack(&Address([7; 32]).to_string());
        let (old, new) = (known(1), Arc::new(File::default()));
        let first = configured(&Table::new(), &[(pack(""), Ok(old.clone()))]);
        let waiting = configured(&first, &[(pinned.clone(), Ok(new.clone()))]);
        check(&waiting, Some(&old), Some(&new), false);
        check(&settled(&waiting, &old, None), Some(&old), Some(&new), false);
        check(&settled(&waiting, &new, Some("it cannot be read")), Some(&old), None, true);
        new.0.set(Address([7; 32])).unwrap();
        check(&settled(&waiting, &new, None), Some(&new), None, false);
        check(
            &settled(&configured(&first, &[(pinned.clone(), Ok(known(8)))]), &new, None),
            Some(&old),
            None,
            true,
        );
        check(&configured(&first, &[(pinned, Ok(old.clone()))]), None, None, true);
    }
}
