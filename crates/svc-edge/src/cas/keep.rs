//! The one task that changes the store.

use super::catalog::{Asset, Catalog, Epoch, Names, Object, Removed};
use super::disk::Change;
use super::upload::{Arrived, ArrivedBytes};
use super::{Cas, CasError};
use crate::address::Address;
use crate::cache::{StoredHead, purge_keys};
use crate::semantics::{Coding, Outcome, Preconditions, Validators};
use http::Method;
use ron_kernel::channel::Receiver;
use ron_kernel::kernel::Service;
use ron_kernel::task::TaskResult;
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::oneshot;

/// Changes that are committed together.
const BATCH_MAX: usize = 64;
/// Names that the store can hold; they are in memory.
const NAMES_MAX: usize = 1_000_000;
/// Responses to one key of a site.
const ALIKE_MAX: usize = 32;
/// How often it is looked whether a drain has ended.
const DRAIN_LOOK: Duration = Duration::from_millis(20);

/// An object to be stored.
#[derive(Debug)]
pub struct Put {
    pub arrived: Arrived,
    /// `None`: it is stored by its address.
    pub name: Option<NewName>,
}

/// The name it gets.
#[derive(Debug)]
pub struct NewName {
    pub name: String,
    pub content_type: String,
    pub keys: Vec<String>,
    pub encoded: Vec<(Coding, Arrived)>,
    pub conditions: Preconditions,
    /// Where it comes from an origin.
    pub response: Option<NewResponse>,
}

/// What an origin said of it.
#[derive(Debug)]
pub struct NewResponse {
    pub head: StoredHead,
    /// Every part of it in order, the one that arrived among them.
    pub parts: Vec<Address>,
    /// Unix seconds.
    pub modified: u64,
    /// When its origin was asked: what was forgotten since stays forgotten.
    pub since: Epoch,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    pub address: Address,
    pub len: u64,
    /// The object, or the name, was not there before.
    pub new: bool,
}

/// A change, and who waits for it.
#[derive(Debug)]
pub enum Op {
    Put(Box<Put>, oneshot::Sender<Result<Stored, CasError>>),
    Forget(Names, Preconditions, oneshot::Sender<Result<usize, CasError>>),
    /// The origin has confirmed what it said before, with these fields now, or takes it back.
    Freshen(Arc<str>, Arc<Asset>, Option<Box<StoredHead>>, oneshot::Sender<Result<usize, CasError>>),
    /// Encodings of a named object were made.
    Encoded(String, Address, Vec<(Coding, Arrived)>),
    /// The scrub found a file that the index does not know.
    Adopt {
        address: Address,
        len: u64,
        stored: u64,
    },
    /// The scrub learnt a digest.
    Digest(Address, [u8; 32]),
    /// The scrub found no file.
    Lost(Address),
}

/// Keeps the store until nobody can want anything of it any more.
pub async fn keep(cas: Arc<Cas>, changes: Arc<Receiver<Op>>, service: Service) -> TaskResult {
    loop {
        let first = tokio::select! {
            biased;
            first = changes.recv() => first,
            () = drained(&service) => changes.try_recv(),
        };
        let Some(first) = first else { return Ok(()) };
        let mut batch = vec![first];
        while batch.len() < BATCH_MAX
            && let Some(next) = changes.try_recv()
        {
            batch.push(next);
        }
        let cas = cas.clone();
        // If this task ends here, the batch is carried through all the same.
        tokio::task::spawn_blocking(move || cas.carry_out(batch)).await?;
    }
}

/// Resolves when the service drains and no request is left.
async fn drained(service: &Service) {
    service.shutdown().draining().await;
    while service.tasks().live_scoped() > 0 {
        tokio::time::sleep(DRAIN_LOOK).await;
    }
}

/// What is owed to those who wait.
enum Owed {
    Stored(oneshot::Sender<Result<Stored, CasError>>, Stored),
    Forgotten(oneshot::Sender<Result<usize, CasError>>, usize),
}

/// What a batch comes to.
#[derive(Default)]
struct Outcomes {
    changes: Vec<Change>,
    folders: BTreeSet<PathBuf>,
    going: Vec<Address>,
    owed: Vec<Owed>,
    /// To those who brought what their origin has still: they do not wait for the disk.
    owed_early: Vec<Owed>,
}

impl Cas {
    fn carry_out(&self, batch: Vec<Op>) {
        let _keeping = self.keeping.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = Outcomes::default();
        for op in batch {
            match op {
                Op::Put(put, reply) => {
                    let early = put.name.as_ref().is_some_and(|name| name.response.is_some());
                    match self.put_one(*put, &mut out) {
                        Ok(stored) if early => out.owed_early.push(Owed::Stored(reply, stored)),
                        Ok(stored) => out.owed.push(Owed::Stored(reply, stored)),
                        Err(error) => drop(reply.send(Err(error))),
                    }
                }
                Op::Forget(names, conditions, reply) => match self.forget_some(&names, &conditions, &mut out)
                {
                    Ok(count) => out.owed.push(Owed::Forgotten(reply, count)),
                    Err(error) => drop(reply.send(Err(error))),
                },
                Op::Freshen(name, found, head, reply) => {
                    let changed = self.freshen_one(&name, &found, head.map(|head| *head), &mut out);
                    out.owed_early.push(Owed::Forgotten(reply, changed));
                }
                Op::Encoded(name, address, encoded) => self.encode_one(&name, address, encoded, &mut out),
                Op::Adopt { address, len, stored } => self.adopt(address, len, stored, &mut out),
                Op::Digest(address, sha256) => {
                    if let Some(object) = self.catalog.lock().object_mut(&address) {
                        object.sha256 = Some(sha256);
                        out.changes.push(Change::Object(address, object.clone()));
                    }
                }
                Op::Lost(address) => {
                    // It may have come back since; nobody but this task moves files, so that a look is enough.
                    if !self.has_file(&address) {
                        drop_object(&mut self.catalog.lock(), address, &mut out.changes);
                    }
                }
            }
        }
        self.bytes.store(self.catalog.lock().bytes(), Ordering::Relaxed);
        let early = std::mem::take(&mut out.owed_early);
        match self.note(&out.changes, &early) {
            Ok(()) => pay(early, &Ok(())),
            Err(error) => {
                tracing::warn!(%error, "what changes could not be written down");
                out.owed.extend(early);
            }
        }
        let durable = self.make_durable(&out);
        if let Err(error) = &durable {
            tracing::error!(%error, "a change of the store failed");
            if matches!(error, CasError::Full) {
                self.note_full();
            }
            self.start_over();
        }
        self.bytes.store(self.catalog.lock().bytes(), Ordering::Relaxed);
        if durable.is_ok() {
            self.unlink(&out.going);
        }
        pay(out.owed, &durable);
    }

    /// Writes down what is going to be in the index, if somebody is told of it before it is there.
    fn note(&self, changes: &[Change], early: &[Owed]) -> io::Result<()> {
        match &self.disk {
            Some(disk) if !early.is_empty() && !changes.is_empty() => disk.note(changes),
            _ => Ok(()),
        }
    }

    fn make_durable(&self, out: &Outcomes) -> Result<(), CasError> {
        let Some(disk) = &self.disk else { return Ok(()) };
        for change in &out.changes {
            match change {
                // What an origin has can be had again: its name has no file.
                Change::Name(_, asset) if asset.head.is_some() => {}
                Change::Name(name, asset) => disk.note_name(name, Some(asset))?,
                Change::NoName(name) => disk.note_name(name, None)?,
                Change::Object(..) | Change::NoObject(_) => {}
            }
        }
        disk.sync_folders(&out.folders)?;
        if out.changes.is_empty() {
            return Ok(());
        }
        disk.commit(&out.changes).map_err(|error| match error {
            super::DiskError::Index(redb::Error::Io(error)) | super::DiskError::Folder(_, error) => {
                error.into()
            }
            super::DiskError::Index(error) => CasError::Io(error.to_string()),
        })
    }

    /// Takes the catalog from the index again. Files that no row leads to are found by the next scrub.
    fn start_over(&self) {
        let Some(disk) = &self.disk else { return };
        let mut catalog = Catalog::new(&self.settings.load().pins);
        match disk.load(&mut catalog) {
            Ok(_) => {
                let mut current = self.catalog.lock();
                catalog.inherit(&mut current);
                *current = catalog;
            }
            Err(error) => tracing::error!(%error, "the index cannot be read"),
        }
    }

    fn unlink(&self, going: &[Address]) {
        let Some(disk) = &self.disk else { return };
        for address in going {
            // It may have come back within the batch.
            if self.catalog.lock().object(address).is_none() {
                disk.unlink(address);
            }
        }
    }

    fn put_one(&self, put: Put, out: &mut Outcomes) -> Result<Stored, CasError> {
        let Put { arrived, name } = put;
        let (address, len) = (arrived.address, arrived.len);
        let Some(new) = name else {
            let new = self.place(arrived, true, out)?;
            return Ok(Stored { address, len, new });
        };
        {
            let catalog = self.catalog.lock();
            meets(&new.conditions, catalog.asset(&new.name).map(|asset| &**asset))?;
            let current = catalog.asset(&new.name);
            if current.is_none() && catalog.names() >= NAMES_MAX {
                return Err(CasError::Full);
            }
            // What was put here is worth more than what an origin has.
            if let Some(response) = &new.response
                && (current.is_some_and(|current| current.head.is_none())
                    || catalog.was_forgotten(&new.name, &new.keys, response.since))
            {
                return Err(CasError::Precondition);
            }
        }
        if new.response.is_some() {
            self.make_place(&new.name, out);
        }
        self.place(arrived, false, out)?;
        let parts = new.response.as_ref().map_or_else(|| vec![address], |response| response.parts.clone());
        let mut variants: Vec<_> = parts.iter().map(|part| (Coding::Identity, *part)).collect();
        for (coding, encoded) in new.encoded {
            let encoded_address = encoded.address;
            // An encoding is a convenience: the object is stored without it if there is no room.
            if self.place(encoded, false, out).is_ok() {
                variants.push((coding, encoded_address));
            }
        }
        let mut catalog = self.catalog.lock();
        // Room for an encoding may have been made at the cost of what came before it.
        variants.retain(|(_, address)| catalog.object(address).is_some());
        let kept = variants.iter().filter(|(coding, _)| *coding == Coding::Identity).count();
        if kept < parts.len() {
            return Err(CasError::Full);
        }
        let modified = new.response.as_ref().map_or_else(now, |response| response.modified);
        let head = new.response.map(|response| response.head);
        let asset =
            Arc::new(Asset { content_type: new.content_type, modified, keys: new.keys, variants, head });
        let former = catalog.set_name(&new.name, asset.clone());
        out.changes.push(Change::Name(new.name.into(), asset));
        if let Some(former) = &former {
            drop_unused(&mut catalog, former, out);
        }
        Ok(Stored { address, len, new: former.is_none() })
    }

    /// Lets a response go for a new one where there are too many, of all or to one key.
    fn make_place(&self, name: &str, out: &mut Outcomes) {
        let mut catalog = self.catalog.lock();
        if catalog.asset(name).is_some() {
            return;
        }
        let responses_max = self.settings.load().responses_max;
        // What was put here by hand does not make place for what an origin has.
        while catalog.responses() >= responses_max
            && let Some((oldest, asset)) = catalog.oldest_response()
        {
            catalog.forget(&oldest);
            out.changes.push(Change::NoName(oldest));
            drop_unused(&mut catalog, &asset, out);
        }
        let Some(end) = name.rfind('\0').filter(|_| name.starts_with('\0')) else { return };
        let alike: Vec<_> =
            catalog.starting(&name[..=end]).map(|(name, asset)| (name.clone(), asset.clone())).collect();
        if alike.len() < ALIKE_MAX {
            return;
        }
        let received = |asset: &Asset| asset.head.as_ref().map(StoredHead::received);
        if let Some((oldest, asset)) = alike.iter().min_by_key(|(_, asset)| received(asset)) {
            catalog.forget(oldest);
            out.changes.push(Change::NoName(oldest.clone()));
            drop_unused(&mut catalog, asset, out);
        }
    }

    fn freshen_one(
        &self,
        name: &Arc<str>,
        found: &Asset,
        head: Option<StoredHead>,
        out: &mut Outcomes,
    ) -> usize {
        let mut catalog = self.catalog.lock();
        // Another response may have come meanwhile, whose bytes these fields are not about. Encodings may have too.
        let same = |asset: &&Arc<Asset>| {
            asset.head.is_some() && asset.head == found.head && asset.parts().eq(found.parts())
        };
        let Some(asset) = catalog.asset(name).filter(same).cloned() else { return 0 };
        let Some(head) = head else {
            catalog.forget(name);
            out.changes.push(Change::NoName(name.clone()));
            drop_unused(&mut catalog, &asset, out);
            return 1;
        };
        let keys = purge_keys(head.headers()).unwrap_or_default();
        let asset = Arc::new(Asset { head: Some(head), keys, ..Asset::clone(&asset) });
        catalog.set_name(name, asset.clone());
        out.changes.push(Change::Name(name.clone(), asset));
        1
    }

    fn encode_one(&self, name: &str, address: Address, encoded: Vec<(Coding, Arrived)>, out: &mut Outcomes) {
        let is_current = |catalog: &Catalog| {
            catalog.asset(name).is_some_and(|asset| asset.variants == [(Coding::Identity, address)])
        };
        if !is_current(&self.catalog.lock()) {
            return;
        }
        let mut made = Vec::new();
        for (coding, encoded) in encoded {
            let at = encoded.address;
            if self.place(encoded, false, out).is_ok() {
                made.push((coding, at));
            }
        }
        let mut catalog = self.catalog.lock();
        made.retain(|(_, address)| catalog.object(address).is_some());
        // Room for them may have been made at the cost of the object itself.
        if is_current(&catalog)
            && let Some(asset) = catalog.asset(name)
        {
            let mut asset = Asset::clone(asset);
            asset.variants.extend(made);
            let asset = Arc::new(asset);
            catalog.set_name(name, asset.clone());
            out.changes.push(Change::Name(name.into(), asset));
        }
    }

    /// Puts an object into its place, unless it is there; true if it was not.
    fn place(&self, arrived: Arrived, direct: bool, out: &mut Outcomes) -> Result<bool, CasError> {
        let Arrived { address, sha256, len, bytes, synced, taken: _taken } = arrived;
        {
            let mut catalog = self.catalog.lock();
            if let Some(object) = catalog.object_mut(&address) {
                if direct && !object.direct || object.sha256.is_none() {
                    (object.direct, object.sha256) = (object.direct || direct, Some(sha256));
                    out.changes.push(Change::Object(address, object.clone()));
                }
                let bad = object.condition.bad.load(Ordering::Relaxed);
                drop(catalog);
                // What was acknowledged as durable stays so, unless there is nothing good there.
                if !synced && !bad && (self.disk.is_none() || self.has_file(&address)) {
                    return Ok(false);
                }
                // The bytes that came are known to be good, those on disk perhaps not: they take their place. Readers
                // have the file they opened, and their own opinion of it.
                self.publish(&address, (&bytes, synced), out)?;
                if let Some(object) = self.catalog.lock().object_mut(&address) {
                    object.condition = Arc::new(object.condition.renewed());
                }
                return Ok(false);
            }
            let mut going = Vec::new();
            if !catalog.make_room(len, self.settings.load().max_bytes, &mut going) {
                return Err(CasError::Full);
            }
            for victim in going {
                drop_object(&mut catalog, victim, &mut out.changes);
                out.going.push(victim);
            }
        }
        self.publish(&address, (&bytes, synced), out)?;
        let bytes = if let ArrivedBytes::Memory(bytes) = bytes { Some(bytes) } else { None };
        let object =
            Object { len, sha256: Some(sha256), direct, stored: now(), bytes, condition: Arc::default() };
        self.catalog.lock().add(address, object.clone());
        out.changes.push(Change::Object(address, object));
        Ok(true)
    }

    fn publish(
        &self,
        address: &Address,
        bytes: (&ArrivedBytes, bool),
        out: &mut Outcomes,
    ) -> Result<(), CasError> {
        let Some(disk) = &self.disk else { return Ok(()) };
        disk.publish(address, bytes, &mut out.folders).map_err(|error| {
            tracing::error!(%error, "an object could not be put into its place");
            CasError::from(error)
        })
    }

    fn has_file(&self, address: &Address) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.has_file(address))
    }

    fn adopt(&self, address: Address, len: u64, stored: u64, out: &mut Outcomes) {
        // What was seen may have been on its way out.
        if !self.has_file(&address) {
            return;
        }
        let mut catalog = self.catalog.lock();
        let room = self.settings.load().max_bytes.saturating_sub(catalog.bytes());
        if catalog.object(&address).is_some() {
            return;
        }
        if len > room {
            // Nobody was promised it, and others would have to go for it.
            out.going.push(address);
            return;
        }
        let object =
            Object { len, sha256: None, direct: true, stored, bytes: None, condition: Arc::default() };
        catalog.add(address, object.clone());
        out.changes.push(Change::Object(address, object));
    }

    fn forget_some(
        &self,
        which: &Names,
        conditions: &Preconditions,
        out: &mut Outcomes,
    ) -> Result<usize, CasError> {
        let mut catalog = self.catalog.lock();
        if let Names::Asset(name) = which {
            meets(conditions, catalog.asset(name).map(|asset| &**asset))?;
        }
        let names = catalog.select(which);
        for name in &names {
            if let Some(asset) = catalog.forget(name) {
                out.changes.push(Change::NoName(name.clone()));
                drop_unused(&mut catalog, &asset, out);
            }
        }
        Ok(names.len())
    }
}

/// Tells those who wait what came of it.
fn pay(owed: Vec<Owed>, outcome: &Result<(), CasError>) {
    // Whoever waited and left does not want to know.
    for owed in owed {
        match (owed, outcome) {
            (Owed::Stored(reply, stored), Ok(())) => drop(reply.send(Ok(stored))),
            (Owed::Forgotten(reply, count), Ok(())) => drop(reply.send(Ok(count))),
            (Owed::Stored(reply, _), Err(error)) => drop(reply.send(Err(error.again()))),
            (Owed::Forgotten(reply, _), Err(error)) => drop(reply.send(Err(error.again()))),
        }
    }
}

impl CasError {
    /// The same for the next of those who wait for one batch.
    fn again(&self) -> CasError {
        match self {
            CasError::Full => CasError::Full,
            other => CasError::Io(other.to_string()),
        }
    }
}

/// Takes an object out, and with it the names that stood for it.
fn drop_object(catalog: &mut Catalog, address: Address, changes: &mut Vec<Change>) {
    let Removed { gone, changed } = catalog.remove(&address);
    changes.push(Change::NoObject(address));
    changes.extend(gone.into_iter().map(Change::NoName));
    changes.extend(changed.into_iter().map(|(name, asset)| Change::Name(name, asset)));
}

/// Takes out the objects of an asset that nothing needs any more.
fn drop_unused(catalog: &mut Catalog, former: &Asset, out: &mut Outcomes) {
    for (_, address) in &former.variants {
        if catalog.is_unused(address) {
            drop_object(catalog, *address, &mut out.changes);
            out.going.push(*address);
        }
    }
}

fn meets(conditions: &Preconditions, current: Option<&Asset>) -> Result<(), CasError> {
    let tags: Vec<String> =
        current.iter().flat_map(|asset| &asset.variants).map(|(_, address)| address.etag()).collect();
    let etags: Vec<&str> = tags.iter().map(String::as_str).collect();
    let validators = current.map(|asset| Validators { etags: &etags, modified: Some(asset.modified) });
    match conditions.evaluate(&Method::PUT, validators) {
        Outcome::Proceed => Ok(()),
        Outcome::NotModified | Outcome::Failed => Err(CasError::Precondition),
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
