//! The content-addressed store: objects by the hash of their bytes, and names that lead to them.
//!
//! Start from [`Cas`]. One task, [`keep`], is the only one that changes anything: it moves files to their places,
//! commits the index, and only then are those who wait told. Readers look into the [`catalog`] and open files
//! themselves, checked against [`tree`]s by policy.

pub mod catalog;
mod disk;
mod fifo;
mod hot;
mod keep;
mod pending;
mod reader;
mod scrub;
pub mod tree;
mod upload;

pub use catalog::{Asset, Described, Epoch, Form, Names, Object, response_name};
pub use disk::DiskError;
pub(crate) use hot::HOT;
pub use keep::{NewName, NewResponse, Op, Put, Stored, keep};
pub use reader::{ReadError, Reader, Trust, slice};
pub use scrub::{Progress, scrub};
use upload::Arriving;
pub use upload::{Arrived, ArrivedBytes, Upload};

use crate::address::Address;
use crate::cache::StoredHead;
use crate::semantics::{Coding, Preconditions, Variant};
use arc_swap::ArcSwap;
use bytes::Bytes;
use catalog::{Catalog, Stamp};
use disk::Disk;
use hot::Hot;
use ron_kernel::channel::{self, Receiver, Sender};
use ron_kernel::http::{FileBody, SentFile};
use ron_kernel::inventory::{ChannelKind, ChannelSpec, LockSpec, Policy};
use ron_kernel::kernel::Service;
use ron_kernel::lock::Lock;
use ron_kernel::sync::{Limits, PushError};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::oneshot;

pub(crate) static CHANGES: ChannelSpec = ChannelSpec {
    service: "edge",
    name: "changes",
    kind: ChannelKind::Mpsc,
    capacity: 512,
    policy: Policy::RejectNew,
    producers: &["conn", "scrub", "worker", "fill"],
    consumers: &["keeper"],
};

pub(crate) static CATALOG: LockSpec = LockSpec {
    service: "edge",
    name: "state_meta",
    rank: 10,
    guards: "the catalog: what is stored, by address and by name",
};

/// What of the configuration can change while the store is open.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Bytes of all objects together.
    pub max_bytes: u64,
    /// Names that came from origins, whose fields are in memory.
    pub responses_max: usize,
    pub trust: Trust,
    /// Names and addresses of objects that stay.
    pub pins: Vec<String>,
}

/// Why the store cannot do what it is asked to.
#[derive(Debug, thiserror::Error)]
pub enum CasError {
    #[error("the queue of changes is full")]
    Busy,
    #[error("the store is closing")]
    Closing,
    #[error("there is no room")]
    Full,
    /// It is larger than all of the store, which is memory.
    #[error("the object is larger than the store")]
    Amnesia,
    #[error("a condition is not met")]
    Precondition,
    #[error("{0}")]
    Io(String),
}

impl From<io::Error> for CasError {
    fn from(error: io::Error) -> CasError {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        match error.kind() {
            StorageFull | QuotaExceeded | FileTooLarge => CasError::Full,
            _ => CasError::Io(error.to_string()),
        }
    }
}

/// What a name leads to.
#[derive(Debug)]
pub struct Found {
    pub asset: Arc<Asset>,
    /// Those that are there, identity first.
    pub variants: Vec<(Variant, Object)>,
}

/// A stored response of a site.
#[derive(Clone, Debug)]
pub struct Response {
    pub name: Arc<str>,
    pub asset: Arc<Asset>,
    pub parts: Vec<(Address, Object)>,
}

impl Response {
    /// `None` if some of its content is gone or bad.
    fn of(catalog: &Catalog, name: &Arc<str>, asset: &Arc<Asset>) -> Option<Response> {
        let part = |(_, address): &(Coding, Address)| {
            let object = catalog.object(address)?;
            let good = !object.condition.bad.load(Ordering::Relaxed);
            good.then(|| (*address, object.clone()))
        };
        asset.head.as_ref()?;
        let parts = asset.variants.iter().map(part).collect::<Option<Vec<_>>>()?;
        Some(Response { name: name.clone(), asset: asset.clone(), parts })
    }
}

/// See the module.
#[derive(Debug)]
pub struct Cas {
    /// `None`: the store is memory.
    disk: Option<Arc<Disk>>,
    catalog: Lock<Catalog>,
    changes: Sender<Op>,
    hot_bytes: Hot<Bytes>,
    hot_files: Hot<SentFile>,
    /// Uploads may be as large together as the store.
    arriving: Arc<Arriving>,
    settings: ArcSwap<Settings>,
    /// Read by metrics, which take no lock.
    bytes: AtomicU64,
    /// The disk had no room when it was last tried.
    full: AtomicBool,
    /// Somebody found an object bad since this was last looked at.
    found_bad: AtomicBool,
    progress: Progress,
    /// A keeper that was killed may still be at work on a blocking thread when the next one begins.
    keeping: Mutex<()>,
}

/// An asset by its name.
#[derive(Clone, Debug)]
pub struct Listed {
    pub name: Arc<str>,
    pub asset: Arc<Asset>,
    pub address: Address,
    pub object: Object,
}

impl Cas {
    /// Opens the store in a folder, or in memory if there is none. Blocks. The receiver is [`keep`]'s.
    pub fn open(
        service: &Service,
        folder: Option<&Path>,
        sync: bool,
        settings: Settings,
    ) -> Result<(Arc<Cas>, Receiver<Op>), DiskError> {
        let mut catalog = Catalog::new(&settings.pins);
        let disk = folder.map(|root| Disk::open(root, sync, &mut catalog)).transpose()?.map(Arc::new);
        let limits = Limits::items(CHANGES.capacity);
        let (changes, receiver) = channel::queue(service.inventory(), &CHANGES, limits, Policy::RejectNew);
        let cas = Cas {
            disk,
            bytes: AtomicU64::new(catalog.bytes()),
            catalog: Lock::new(service.inventory(), &CATALOG, catalog),
            changes,
            hot_bytes: Hot::bytes(service.inventory()),
            hot_files: Hot::files(service.inventory()),
            arriving: Arc::default(),
            settings: ArcSwap::from_pointee(settings),
            full: AtomicBool::new(false),
            found_bad: AtomicBool::new(false),
            progress: Progress::default(),
            keeping: Mutex::new(()),
        };
        cas.arriving.max.store(cas.settings.load().max_bytes, Ordering::Relaxed);
        Ok((Arc::new(cas), receiver))
    }

    pub fn apply(&self, settings: Settings) {
        self.catalog.lock().set_pins(&settings.pins);
        self.arriving.max.store(settings.max_bytes, Ordering::Relaxed);
        self.settings.store(Arc::new(settings));
    }

    /// What a name stands for, and which of its variants are there and good. A bad identity is kept, to say so.
    pub fn asset(&self, name: &str) -> Option<Found> {
        let catalog = self.catalog.lock();
        let asset = catalog.asset(name)?.clone();
        let present = asset.variants.iter().enumerate().filter_map(|(index, (coding, address))| {
            let object = catalog.object(address)?;
            let usable = index == 0 || !object.condition.bad.load(Ordering::Relaxed);
            let variant = Variant { coding: *coding, address: *address, len: object.len };
            usable.then(|| (variant, object.clone()))
        });
        let variants: Vec<_> = present.collect();
        Some(Found { asset, variants })
    }

    /// One stored response.
    pub fn response(&self, name: &str) -> Option<Response> {
        let catalog = self.catalog.lock();
        let (name, asset) = catalog.starting(name).next().filter(|(found, _)| &***found == name)?;
        Response::of(&catalog, name, asset)
    }

    /// The responses to one key of a site whose content is all here and not known to be bad.
    pub fn responses(&self, key: &str) -> Vec<Response> {
        let catalog = self.catalog.lock();
        let prefix = response_name(key, "");
        catalog.starting(&prefix).filter_map(|(name, asset)| Response::of(&catalog, name, asset)).collect()
    }

    pub fn object(&self, address: &Address) -> Option<Object> {
        self.catalog.lock().object(address).cloned()
    }

    /// Assets whose names begin so, in order and behind another; those with all that belongs to them.
    pub fn list(&self, prefix: &str, after: Option<&str>, max: usize) -> Vec<Listed> {
        let catalog = self.catalog.lock();
        let assets = catalog.behind(prefix, after).filter_map(|(name, asset)| {
            let address = *asset.parts().next()?;
            let object = catalog.object(&address)?.clone();
            Some(Listed { name: name.clone(), asset: asset.clone(), address, object })
        });
        assets.take(max).collect()
    }

    /// All bytes of an object, which the caller knows to be small; `None` if they cannot be had. Blocks.
    pub fn whole(&self, address: Address, object: &Object) -> Option<Vec<u8>> {
        let mut reader = self.reader(address, object).ok()?;
        let mut out = Vec::new();
        while (out.len() as u64) < object.len {
            out.extend_from_slice(&reader.read(&(out.len() as u64..object.len)).ok()?);
        }
        Some(out)
    }

    /// Opens an object that the catalog showed. Blocks.
    pub fn reader(&self, address: Address, object: &Object) -> Result<Reader, ReadError> {
        self.reader_trusting(address, object, self.settings.load().trust)
    }

    /// All bytes of an object that are in memory already, unless they were found bad.
    pub fn held(&self, object: &Object) -> Option<Bytes> {
        let condition = &object.condition;
        if condition.bad.load(Ordering::Relaxed) {
            return None;
        }
        if let Some(bytes) = &object.bytes {
            return Some(bytes.clone());
        }
        condition.hot_bytes.get().map(|bytes| Bytes::clone(&bytes))
    }

    /// The file of an object that is open already, if its bytes need no check and were not found bad.
    pub fn held_file(&self, object: &Object) -> Option<Arc<SentFile>> {
        let condition = &object.condition;
        let file = condition.hot_file.get()?;
        let stamp = Stamp::of(&file).ok().filter(|stamp| stamp.len == object.len)?;
        let good = !condition.bad.load(Ordering::Relaxed);
        (good && self.settings.load().trust.in_file(condition, stamp)).then_some(file)
    }

    /// Keeps all bytes of an object, as they were read from its file, for the next who ask.
    pub fn hold(&self, object: &Object, bytes: &Bytes) {
        self.hot_bytes.keep(&object.condition, Arc::new(bytes.clone()), bytes.len() as u64);
    }

    /// Keeps the file of an object open, for the next who ask. One of which only a few bytes would ever go out is not
    /// worth it.
    pub fn hold_file(&self, object: &Object, file: &Arc<SentFile>) {
        if FileBody::is_worthwhile(object.len) {
            self.hot_files.keep(&object.condition, file.clone(), 1);
        }
    }

    fn reader_trusting(&self, address: Address, object: &Object, trust: Trust) -> Result<Reader, ReadError> {
        match (&self.disk, &object.bytes) {
            (Some(disk), _) => Reader::disk(disk, address, object.len, object.condition.clone(), trust),
            (None, Some(bytes)) => Ok(Reader::memory(address, bytes.clone(), object.condition.clone())),
            (None, None) => Err(ReadError::Gone),
        }
    }

    /// Begins to take an object in. Blocks.
    pub fn upload(&self) -> io::Result<Upload> {
        match &self.disk {
            Some(disk) => Upload::to_disk(&disk.temporary_folder(), &self.arriving),
            None => Ok(Upload::to_memory(&self.arriving)),
        }
    }

    /// Whether an object of this length can be stored at all.
    pub fn can_hold(&self, len: u64) -> Result<(), CasError> {
        match len <= self.settings.load().max_bytes {
            true => Ok(()),
            false if self.disk.is_some() => Err(CasError::Full),
            false => Err(CasError::Amnesia),
        }
    }

    /// Whether what arrives must be on disk before it is acknowledged.
    pub fn syncs(&self) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.syncs())
    }

    /// Stores what arrived. When this returns it is durable.
    pub async fn put(&self, put: Put) -> Result<Stored, CasError> {
        let (reply, answer) = oneshot::channel();
        self.send(Op::Put(Box::new(put), reply), answer).await
    }

    /// What is asked of an origin from now on is not concerned by what was forgotten before.
    pub fn epoch(&self) -> Epoch {
        self.catalog.lock().epoch()
    }

    /// Whether a name was forgotten since.
    pub fn was_forgotten(&self, name: &str, since: Epoch) -> bool {
        self.catalog.lock().was_forgotten(name, &[], since)
    }

    /// Now, if a name was forgotten exactly once since: by the caller and nobody else.
    pub fn epoch_after_own(&self, name: &str, since: Epoch) -> Option<Epoch> {
        let catalog = self.catalog.lock();
        (catalog.times_forgotten(name, &[], since) == Some(1)).then(|| catalog.epoch())
    }

    /// Forgets names, and the objects that only they led to; returns how many names.
    pub async fn forget(&self, which: Names, conditions: Preconditions) -> Result<usize, CasError> {
        let (reply, answer) = oneshot::channel();
        self.catalog.lock().note_forgotten(which.clone());
        self.send(Op::Forget(which, conditions, reply), answer).await
    }

    /// Notes what an origin says now of what was found under a name: new fields, or with `None` that it may not be
    /// kept. Nothing happens if the name leads to something else by now.
    pub async fn freshen(
        &self,
        name: Arc<str>,
        found: Arc<Asset>,
        head: Option<StoredHead>,
    ) -> Result<usize, CasError> {
        let (reply, answer) = oneshot::channel();
        self.send(Op::Freshen(name, found, head.map(Box::new), reply), answer).await
    }

    /// Adds encodings to a name that still stands for this object. If the queue is full it goes without them.
    pub fn add_encodings(&self, name: String, address: Address, encoded: Vec<(Coding, Arrived)>) {
        // Encodings are a convenience, so nobody waits for them.
        let _ = self.changes.try_send(Op::Encoded(name, address, encoded));
    }

    async fn send<T: Send>(
        &self,
        op: Op,
        answer: oneshot::Receiver<Result<T, CasError>>,
    ) -> Result<T, CasError> {
        match self.changes.try_send(op) {
            Ok(_) => answer.await.unwrap_or(Err(CasError::Closing)),
            Err(PushError::Busy(_)) => Err(CasError::Busy),
            Err(PushError::Closed(_)) => Err(CasError::Closing),
        }
    }

    /// Bytes of all objects.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Notes that writing failed for want of room.
    pub fn note_full(&self) {
        self.full.store(true, Ordering::Relaxed);
    }

    /// Whether the disk is full. If it was, tries again. Blocks.
    pub fn is_full(&self) -> bool {
        if !self.full.load(Ordering::Relaxed) {
            return false;
        }
        let tried = self.upload().and_then(|mut upload| {
            upload.write(&[0; 256 << 10])?;
            upload.finish(true)
        });
        self.full.store(tried.is_err(), Ordering::Relaxed);
        tried.is_err()
    }

    /// Notes that a reader found an object bad.
    pub fn note_bad(&self) {
        self.found_bad.store(true, Ordering::Relaxed);
    }

    /// Whether an object is known to be bad.
    pub fn has_bad(&self) -> bool {
        if !self.found_bad.load(Ordering::Relaxed) {
            return false;
        }
        let bad = self.catalog.lock().has_bad();
        self.found_bad.store(bad, Ordering::Relaxed);
        bad
    }
}

#[cfg(test)]
mod tests;
