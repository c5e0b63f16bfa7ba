//! What is stored, in memory: objects by address, names of assets, and whose turn it is to go.

use super::fifo::{Candidate, Fifo, Frequency};
use super::hot::Slot;
use crate::address::Address;
use crate::cache::{StoredHead, UnixMillis};
use crate::semantics::Coding;
use arc_swap::ArcSwapOption;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::HeaderValue;
use ron_kernel::http::{SentFile, Written};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Purges that are remembered for as long as something may be under way that they concern.
const FORGOTTEN_MAX: usize = 1024;
/// Places in the queue of those who may have to go that need not be looked through.
const PLACES_SPARE: usize = 64;

/// What was seen of a file when its bytes were checked: if any of it changes, they are checked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    pub inode: u64,
    pub len: u64,
    pub modified: i128,
}

impl Stamp {
    pub fn of(file: &File) -> io::Result<Stamp> {
        let meta = rustix::fs::fstat(file)?;
        let modified = i128::from(meta.st_mtime) * 1_000_000_000 + i128::from(meta.st_mtime_nsec);
        Ok(Stamp { inode: meta.st_ino, len: u64::try_from(meta.st_size).unwrap_or(0), modified })
    }
}

/// What happens to an object while it is stored; shared with its readers.
#[derive(Debug, Default)]
pub struct Condition {
    pub frequency: Frequency,
    /// Its bytes were found wrong; it is not served until it has been stored again.
    pub bad: AtomicBool,
    /// Its bytes and its file, if it is wanted often.
    pub(super) hot_bytes: Slot<Bytes>,
    pub(super) hot_file: Slot<SentFile>,
    verified: Mutex<Option<Stamp>>,
    /// What every answer says of it, once that was put together.
    described: OnceLock<Described>,
    plain: ArcSwapOption<Plain>,
}

/// Fields that are the same in every answer with an object.
#[derive(Clone, Debug)]
pub struct Described {
    pub etag: HeaderValue,
    pub repr_digest: Option<HeaderValue>,
    /// For this Unix second.
    pub modified: (u64, HeaderValue),
}

/// What the fields of an answer with a whole object depend on besides the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form<'a> {
    /// In Unix seconds.
    pub modified: u64,
    pub coding: Coding,
    pub content_type: &'a str,
    pub negotiated: bool,
    pub immutable: bool,
}

/// The fields of such an answer, as HTTP/1.1 writes them.
#[derive(Debug)]
struct Plain {
    modified: u64,
    coding: Coding,
    content_type: Box<str>,
    negotiated: bool,
    immutable: bool,
    written: Arc<Written>,
}

impl Plain {
    fn form(&self) -> Form<'_> {
        let Plain { modified, coding, ref content_type, negotiated, immutable, .. } = *self;
        Form { modified, coding, content_type, negotiated, immutable }
    }
}

impl Condition {
    /// The fields of an answer of this form, made by `make` unless they are known: those of the name that was given last.
    pub fn written(&self, form: Form<'_>, make: impl FnOnce() -> Written) -> Arc<Written> {
        let known = self.plain.load();
        if let Some(known) = &*known
            && known.form() == form
        {
            return known.written.clone();
        }
        let written = Arc::new(make());
        if known.as_ref().is_none_or(|known| known.modified < form.modified) {
            let Form { modified, coding, content_type, negotiated, immutable } = form;
            let (content_type, written) = (content_type.into(), written.clone());
            let plain = Plain { modified, coding, content_type, negotiated, immutable, written };
            self.plain.store(Some(Arc::new(plain)));
        }
        written
    }

    /// The fields of an object, made by `make` unless they are known. What may still change is not kept.
    pub fn described(&self, make: impl FnOnce() -> Described) -> Described {
        if let Some(known) = self.described.get() {
            return known.clone();
        }
        let made = make();
        if made.repr_digest.is_some() {
            let _ = self.described.set(made.clone());
        }
        made
    }

    /// That of the same object with another file: how much it is wanted stays.
    pub fn renewed(&self) -> Condition {
        Condition { frequency: self.frequency.clone(), ..Condition::default() }
    }

    pub fn is_verified(&self, stamp: Stamp) -> bool {
        *self.verified.lock().unwrap_or_else(PoisonError::into_inner) == Some(stamp)
    }

    pub fn set_verified(&self, stamp: Stamp) {
        *self.verified.lock().unwrap_or_else(PoisonError::into_inner) = Some(stamp);
    }
}

/// An object.
#[derive(Clone, Debug)]
pub struct Object {
    pub len: u64,
    /// Not known of an object that was found on disk, until it is scrubbed.
    pub sha256: Option<[u8; 32]>,
    /// Stored by its address: it stays when no name leads to it.
    pub direct: bool,
    /// Unix seconds.
    pub stored: u64,
    /// The bytes, if the store is memory.
    pub bytes: Option<Bytes>,
    pub condition: Arc<Condition>,
}

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asset {
    pub content_type: String,
    /// Unix seconds.
    pub modified: u64,
    /// Surrogate keys, by which it can be purged together with others.
    pub keys: Vec<String>,
    /// Identity first; the others may go before it. Of a response that is here in parts, each part.
    pub variants: Vec<(Coding, Address)>,
    /// What its origin said of it, if it came from one.
    pub head: Option<StoredHead>,
}

impl Asset {
    /// Its bytes as they are, without encodings.
    pub fn parts(&self) -> impl Iterator<Item = &Address> {
        self.variants.iter().filter(|(coding, _)| *coding == Coding::Identity).map(|(_, address)| address)
    }

    pub fn to_json(&self, name: &str) -> Value {
        let variants: serde_json::Map<_, _> = self
            .variants
            .iter()
            .map(|(coding, address)| (coding.name().to_owned(), address.to_string().into()))
            .collect();
        let mut record = json!({"name": name, "type": self.content_type, "modified": self.modified, "keys": self.keys, "variants": variants});
        if let Some(head) = &self.head {
            record["head"] = STANDARD.encode(head.encode()).into();
            record["parts"] = self.parts().map(ToString::to_string).collect();
        }
        record
    }

    /// The name and what it stands for; `None` if this is no such record.
    pub fn from_json(bytes: &[u8]) -> Option<(String, Asset)> {
        let record: Value = serde_json::from_slice(bytes).ok()?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let variants = record["variants"].as_object()?;
        let mut variants = variants
            .iter()
            .map(|(coding, address)| Some((Coding::parse(coding)?, Address::parse(address.as_str()?)?)))
            .collect::<Option<Vec<_>>>()?;
        let mut head = None;
        if let Some(encoded) = record["head"].as_str() {
            head = Some(StoredHead::decode(&STANDARD.decode(encoded).ok()?).ok()?);
            variants.retain(|(coding, _)| *coding != Coding::Identity);
            for part in record["parts"].as_array()? {
                variants.push((Coding::Identity, Address::parse(part.as_str()?)?));
            }
        }
        // Parts keep their order.
        variants.sort_by_key(|(coding, _)| *coding);
        let keys = record["keys"].as_array()?.iter().map(text).collect::<Option<_>>()?;
        let asset = Asset {
            content_type: text(&record["type"])?,
            modified: record["modified"].as_u64()?,
            keys,
            variants,
            head,
        };
        let complete = asset.variants.first().is_some_and(|(coding, _)| *coding == Coding::Identity);
        complete.then_some((text(&record["name"])?, asset))
    }
}

/// The names that an object which went took with it, and those that can do without it.
#[derive(Debug)]
pub struct Removed {
    pub gone: Vec<Arc<str>>,
    pub changed: Vec<(Arc<str>, Arc<Asset>)>,
}

/// Which names are meant.
#[derive(Clone, Debug)]
pub enum Names {
    /// One asset.
    Asset(String),
    /// A path without its first slash, of an asset or at any site; without a query, whatever the query.
    Path(String),
    /// The beginning of paths, likewise.
    Prefix(String),
    /// A surrogate key.
    Key(String),
    /// Every response to one key of a site.
    Response(String),
}

impl Names {
    /// Whether a name is meant that stands for something with these surrogate keys.
    pub fn cover(&self, name: &str, keys: &[String]) -> bool {
        match self {
            Names::Asset(meant) => name == meant,
            Names::Path(path) => {
                let site = name.strip_prefix("\0/").and_then(|rest| rest.split('\0').next());
                let asset =
                    || name.split_once('\0').map_or_else(|| name.to_owned(), |(a, b)| format!("{a}?{b}"));
                let target = site.map_or_else(asset, str::to_owned);
                let bare = target.split('?').next().unwrap_or_default();
                target == *path || !path.contains('?') && bare == path
            }
            Names::Prefix(prefix) => name.strip_prefix("\0/").unwrap_or(name).starts_with(prefix.as_str()),
            Names::Key(key) => keys.contains(key),
            Names::Response(key) => name.starts_with(&response_name(key, "")),
        }
    }
}

/// A moment between purges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Epoch(u64);

/// The name of a site's response. No asset's name has the character that it begins with.
///
/// `key` is the path with its query, then the site; `which` tells responses to different requests apart.
pub fn response_name(key: &str, which: &str) -> String {
    format!("\0{key}\0{which}")
}

/// See the module.
#[derive(Debug, Default)]
pub struct Catalog {
    objects: HashMap<Address, (u64, Object)>,
    assets: BTreeMap<Arc<str>, Arc<Asset>>,
    /// Which names use an object.
    users: HashMap<Address, HashSet<Arc<str>>>,
    fifo: Fifo,
    turns: u64,
    bytes: u64,
    /// Names that came from origins, by when they were last confirmed.
    responses: BTreeSet<(UnixMillis, Arc<str>)>,
    pinned: HashSet<String>,
    /// What was forgotten of late, the newest last, and how often anything was.
    forgotten: VecDeque<Names>,
    epoch: Epoch,
}

impl Catalog {
    pub fn new(pins: &[String]) -> Catalog {
        Catalog { pinned: pins.iter().cloned().collect(), ..Catalog::default() }
    }

    pub fn set_pins(&mut self, pins: &[String]) {
        self.pinned = pins.iter().cloned().collect();
    }

    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Notes that these names are to be forgotten, whoever is about to bring them in.
    pub fn note_forgotten(&mut self, which: Names) {
        self.epoch.0 += 1;
        self.forgotten.push_back(which);
        if self.forgotten.len() > FORGOTTEN_MAX {
            self.forgotten.pop_front();
        }
    }

    /// Whether a name was forgotten since; also where that is too long ago to be known.
    pub fn was_forgotten(&self, name: &str, keys: &[String], since: Epoch) -> bool {
        self.times_forgotten(name, keys, since) != Some(0)
    }

    /// How often a name was forgotten since, unless that is too long ago to be known.
    pub fn times_forgotten(&self, name: &str, keys: &[String], since: Epoch) -> Option<usize> {
        let passed = usize::try_from(self.epoch.0.saturating_sub(since.0)).unwrap_or(usize::MAX);
        let noted = self.forgotten.iter().rev().take(passed);
        (passed <= self.forgotten.len()).then(|| noted.filter(|names| names.cover(name, keys)).count())
    }

    #[cfg(test)]
    pub(super) fn places(&self) -> usize {
        self.fifo.places()
    }

    /// Takes over what no index knows.
    pub fn inherit(&mut self, former: &mut Catalog) {
        self.forgotten = std::mem::take(&mut former.forgotten);
        self.epoch = former.epoch;
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn names(&self) -> usize {
        self.assets.len()
    }

    pub fn responses(&self) -> usize {
        self.responses.len()
    }

    /// What came from an origin and was not confirmed for longest; never what is pinned.
    pub fn oldest_response(&self) -> Option<(Arc<str>, Arc<Asset>)> {
        let (_, name) = self.responses.iter().find(|(_, name)| !self.pinned.contains(&**name))?;
        Some((name.clone(), self.assets.get(name)?.clone()))
    }

    /// The names that begin so, in order.
    pub fn starting<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a Arc<str>, &'a Arc<Asset>)> {
        let from = self.assets.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        from.take_while(move |(name, _)| name.starts_with(prefix))
    }

    /// The names of assets, not of responses of sites, that begin so and come behind another.
    pub fn behind<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
    ) -> impl Iterator<Item = (&'a Arc<str>, &'a Arc<Asset>)> {
        let first = Bound::Included(prefix.max("\u{1}"));
        let from = after.filter(|after| *after >= prefix).map_or(first, Bound::Excluded);
        let from = self.assets.range::<str, _>((from, Bound::Unbounded));
        from.take_while(move |(name, _)| name.starts_with(prefix))
    }

    pub fn object(&self, address: &Address) -> Option<&Object> {
        self.objects.get(address).map(|(_, object)| object)
    }

    pub fn object_mut(&mut self, address: &Address) -> Option<&mut Object> {
        self.objects.get_mut(address).map(|(_, object)| object)
    }

    pub fn asset(&self, name: &str) -> Option<&Arc<Asset>> {
        self.assets.get(name)
    }

    /// Every object, in the order of their files.
    pub fn addresses(&self) -> Vec<Address> {
        let mut all: Vec<Address> = self.objects.keys().copied().collect();
        all.sort_unstable();
        all
    }

    pub fn has_bad(&self) -> bool {
        self.objects.values().any(|(_, object)| object.condition.bad.load(Ordering::Relaxed))
    }

    /// Adds an object that was not there.
    pub fn add(&mut self, address: Address, object: Object) {
        self.turns += 1;
        self.bytes += object.len;
        self.fifo.insert(address, self.turns, object.len);
        let former = self.objects.insert(address, (self.turns, object));
        debug_assert!(former.is_none(), "{address} was there already");
        // What went without having been a victim has left its place in the queue.
        if self.fifo.places() > 2 * self.objects.len() + PLACES_SPARE {
            let objects = &self.objects;
            self.fifo.retain(|address, turn| objects.get(address).is_some_and(|(known, _)| *known == turn));
        }
    }

    /// Chooses who goes so that `len` more bytes fit; false if they cannot. Nobody goes yet.
    pub fn make_room(&mut self, len: u64, room: u64, going: &mut Vec<Address>) -> bool {
        let mut freed = 0;
        while (self.bytes + len).saturating_sub(freed) > room {
            let (objects, users, pinned) = (&self.objects, &self.users, &self.pinned);
            let known = |address: &Address| {
                let (turn, object) = objects.get(address)?;
                let named =
                    || users.get(address).is_some_and(|names| names.iter().any(|n| pinned.contains(&**n)));
                let pinned = !pinned.is_empty() && (pinned.contains(&address.to_string()) || named());
                Some(Candidate { turn: *turn, frequency: &object.condition.frequency, pinned })
            };
            let Some(victim) = self.fifo.victim(room, known) else {
                // Nobody goes after all: they queue again.
                for address in going.drain(..) {
                    if let Some((turn, object)) = self.objects.get(&address) {
                        self.fifo.insert(address, *turn, object.len);
                    }
                }
                return false;
            };
            freed += self.object(&victim).map_or(0, |object| object.len);
            going.push(victim);
        }
        true
    }

    /// Takes an object out, and the names that cannot do without it.
    pub fn remove(&mut self, address: &Address) -> Removed {
        if let Some((_, object)) = self.objects.remove(address) {
            self.bytes -= object.len;
        }
        let (mut gone, mut changed) = (Vec::new(), Vec::new());
        for name in self.users.remove(address).unwrap_or_default() {
            let Some(asset) = self.assets.get(&name) else { continue };
            if asset.variants.contains(&(Coding::Identity, *address)) {
                self.forget(&name);
                gone.push(name);
            } else {
                let mut less = Asset::clone(asset);
                less.variants.retain(|(_, other)| other != address);
                let less = Arc::new(less);
                self.assets.insert(name.clone(), less.clone());
                changed.push((name, less));
            }
        }
        Removed { gone, changed }
    }

    /// Gives a name to objects that are there; returns what it stood for.
    pub fn set_name(&mut self, name: &str, asset: Arc<Asset>) -> Option<Arc<Asset>> {
        let former = self.forget(name);
        let name: Arc<str> = name.into();
        for (_, address) in &asset.variants {
            self.users.entry(*address).or_default().insert(name.clone());
        }
        if let Some(head) = &asset.head {
            self.responses.insert((head.received(), name.clone()));
        }
        self.assets.insert(name, asset);
        former
    }

    pub fn forget(&mut self, name: &str) -> Option<Arc<Asset>> {
        let (name, asset) = self.assets.remove_entry(name)?;
        if let Some(head) = &asset.head {
            self.responses.remove(&(head.received(), name.clone()));
        }
        for (_, address) in &asset.variants {
            if let Some(users) = self.users.get_mut(address) {
                users.remove(&name);
                if users.is_empty() {
                    self.users.remove(address);
                }
            }
        }
        Some(asset)
    }

    /// Whether nothing needs an object any more.
    pub fn is_unused(&self, address: &Address) -> bool {
        !self.users.contains_key(address) && self.object(address).is_some_and(|object| !object.direct)
    }

    /// The names that are meant.
    pub fn select(&self, which: &Names) -> Vec<Arc<str>> {
        match which {
            Names::Asset(name) => {
                self.assets.get_key_value(name.as_str()).map(|(name, _)| name.clone()).into_iter().collect()
            }
            Names::Path(path) => {
                let (bare, query) = path.split_once('?').map_or((path.as_str(), None), |(a, b)| (a, Some(b)));
                let mut found = self.select(&Names::Asset(path.clone()));
                let with_query = format!("{bare}\0{}", query.unwrap_or_default());
                // No asset is without a name, and those of sites begin as the query of such a one would.
                let exact = |name: &str| !bare.is_empty() && (query.is_none() || name == with_query);
                let queried = self.starting(&with_query).map(|(name, _)| name).filter(|name| exact(name));
                found.extend(queried.cloned());
                for end in if query.is_some() { &["\0"][..] } else { &["\0", "?"] } {
                    found.extend(self.starting(&format!("\0/{path}{end}")).map(|(name, _)| name.clone()));
                }
                found
            }
            Names::Prefix(prefix) => {
                let site = format!("\0/{prefix}");
                let sites = self.starting(&site).map(|(name, _)| name);
                let all = !prefix.is_empty();
                let assets = self.starting(prefix).map(|(name, _)| name);
                sites.chain(assets.filter(|name| all || !name.starts_with('\0'))).cloned().collect()
            }
            Names::Response(key) => {
                self.starting(&response_name(key, "")).map(|(name, _)| name.clone()).collect()
            }
            Names::Key(key) => {
                let has = |asset: &Asset| asset.keys.iter().any(|known| known == key);
                self.assets.iter().filter(|(_, asset)| has(asset)).map(|(name, _)| name.clone()).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_the_newest_name_are_written_once_and_no_name_gets_anothers() {
        let condition = Condition::default();
        let form = |modified, content_type| Form {
            modified,
            coding: Coding::Identity,
            content_type,
            negotiated: true,
            immutable: false,
        };
        let written = |form: Form<'_>, kept: bool| {
            let mut made = false;
            let written = condition.written(form, || {
                made = true;
                let mut written = Written::default();
                written.push(b"content-type", form.content_type.as_bytes());
                written
            });
            let lines = format!("content-type: {}\r\n", form.content_type);
            assert_eq!((written.lines(), made), (lines.as_bytes(), !kept), "{form:?}");
        };
        written(form(1, "text/plain"), false);
        written(form(1, "text/plain"), true);
        written(form(1, "text/html"), false);
        written(Form { immutable: true, ..form(1, "text/plain") }, false);
        written(Form { coding: Coding::Gzip, ..form(1, "text/plain") }, false);
        written(form(1, "text/plain"), true);
        written(form(2, "text/html"), false);
        written(form(2, "text/html"), true);
        written(form(1, "text/plain"), false);
        written(form(2, "text/html"), true);
    }
}
