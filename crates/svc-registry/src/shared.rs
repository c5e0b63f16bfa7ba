//! What the registry's tasks share: the store, what readers see, the newest checkpoint, and how well it is.

use crate::config::RegistrySettings;
use crate::guard::{Highest, Holds};
use crate::metrics::Numbers;
use crate::store::{Reader, Store, StoreError};
use crate::view::{HeadInfo, View};
use arc_swap::{ArcSwap, ArcSwapOption, Guard};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use ed25519_dalek::SigningKey;
use ron_kernel::bus::KernelEvent;
use ron_kernel::health::Severity;
use ron_kernel::inventory::LockSpec;
use ron_kernel::kernel::Service;
use ron_kernel::lock::Lock;
use ron_log::checkpoint::cosignature;
use ron_log::note::NoteSignature;
use ron_log::tree::Hash;
use ron_log::{B3, Checkpoint, Head, Note, NoteKey, TrustRoots};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, Semaphore, broadcast};

/// How often an idempotent read is tried, and the pause between.
const TRIES: u32 = 3;
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_CAP: Duration = Duration::from_secs(2);

/// Threads that reads may keep busy at one time; the rest of those that may block is left to others.
const READS_MAX: usize = 32;

/// Commits with an open outcome that are remembered.
const OPEN_MAX: usize = 1024;

/// Entries that streams find without asking the store.
const RECENT_MAX: usize = 1024;

pub(crate) static RECENT: LockSpec = LockSpec {
    service: "registry",
    name: "recent",
    rank: 20,
    guards: "the newest entries' heads, for streams; taken for a copy of a few",
};

pub(crate) static OPEN: LockSpec = LockSpec {
    service: "registry",
    name: "open",
    rank: 21,
    guards: "the ids of commits whose outcome nobody was told; taken for one of them",
};

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) service: Service,
    pub(crate) store: Store,
    pub(crate) roots: TrustRoots,
    /// The node's key, which signs for the log.
    pub(crate) signing: SigningKey,
    pub(crate) log_key: NoteKey,
    pub(crate) view: ArcSwap<View>,
    /// `GET /registry/head` as it is served.
    head_page: ArcSwap<Page>,
    /// The checkpoint that is served.
    pub(crate) checkpoint: ArcSwapOption<Signed>,
    /// The size of the newest checkpoint that is signed and stored; it may not be cosigned enough to be served.
    pub(crate) signed_size: AtomicU64,
    /// Told when there is a newer checkpoint, or the same with more cosignatures.
    pub(crate) checkpointed: Notify,
    /// Somebody waits for the next checkpoint.
    pub(crate) checkpoint_wanted: Notify,
    /// There is a newer checkpoint to be cosigned, other witnesses, or somebody waits for cosignatures.
    pub(crate) cosignatures_wanted: Notify,
    /// A wake-up; readers pull from the log.
    pub(crate) committed: broadcast::Sender<Head>,
    pub(crate) settings: ArcSwap<RegistrySettings>,
    pub(crate) numbers: Numbers,
    pub(crate) pending: AtomicUsize,
    /// Jobs of the batch that is being written, if one is.
    pub(crate) writing: AtomicUsize,
    /// First version kept.
    pub(crate) min_version: AtomicU64,
    /// The newest version that the deep verifier found good.
    pub(crate) verified: AtomicU64,
    pub(crate) troubles: Troubles,
    /// What forbids to sign and to write.
    pub(crate) holds: Holds,
    pub(crate) highest: Highest,
    /// A place on a thread for each read.
    reads: Arc<Semaphore>,
    /// The newest entries, for streams that are not far behind.
    recent: Lock<VecDeque<HeadInfo>>,
    /// Commits whose outcome was open when they were answered.
    open: Lock<VecDeque<B3>>,
    /// What is known to be damaged: writes are refused.
    damage: ArcSwapOption<String>,
}

/// What may be wrong with the storage for a while.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trouble {
    Full,
    Slow,
    /// A flush failed; only a restart mends it.
    Stopped,
    /// The state could not be read anew after a failed write.
    Lost,
    /// The clock is behind the log's time: nobody could say what has expired.
    Clock,
}

/// Tells readiness of troubles, each once.
#[derive(Debug)]
pub(crate) struct Troubles {
    service: Service,
    on: [AtomicBool; 5],
}

impl Troubles {
    pub(crate) fn set(&self, trouble: Trouble, on: bool) {
        if self.on[trouble as usize].swap(on, Ordering::AcqRel) == on {
            return;
        }
        let cause = match trouble {
            Trouble::Full => "storage_full",
            Trouble::Slow => "storage_slow",
            Trouble::Stopped => "storage_stopped",
            Trouble::Lost => "storage_lost",
            Trouble::Clock => "clock_behind",
        };
        if on {
            tracing::warn!(cause, "the registry sheds writes");
            self.service.lose(cause, Severity::WritesShed);
        } else {
            tracing::info!(cause, "is over");
            self.service.restore(cause);
        }
    }
}

/// Head as it is served.
#[derive(Debug)]
pub(crate) struct Page {
    head: HeadInfo,
    checkpoint: Option<Arc<Signed>>,
    /// The checkpoint's member.
    checkpoint_json: Arc<str>,
    pub(crate) json: Bytes,
    pub(crate) etag: String,
}

impl Page {
    fn new(head: HeadInfo, checkpoint: Option<Arc<Signed>>, before: Option<&Page>) -> Page {
        let same = before.filter(|before| is_same(before.checkpoint.as_ref(), checkpoint.as_ref()));
        let checkpoint_json = same.map_or_else(
            || checkpoint.as_ref().map_or(Value::Null, |signed| signed.json()).to_string().into(),
            |before| before.checkpoint_json.clone(),
        );
        let json = Bytes::from(head_json(&head, &checkpoint_json));
        let etag = etag(&json);
        Page { head, checkpoint, checkpoint_json, json, etag }
    }

    fn is_of(&self, head: &HeadInfo, checkpoint: Option<&Arc<Signed>>) -> bool {
        self.head == *head && is_same(self.checkpoint.as_ref(), checkpoint)
    }

    /// The same members for another entry.
    fn of(&self, entry: &HeadInfo) -> Bytes {
        if self.head == *entry { self.json.clone() } else { head_json(entry, &self.checkpoint_json).into() }
    }
}

fn is_same(one: Option<&Arc<Signed>>, other: Option<&Arc<Signed>>) -> bool {
    one.map(Arc::as_ptr) == other.map(Arc::as_ptr)
}

/// A signed checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Signed {
    pub(crate) size: u64,
    pub(crate) root: Hash,
    /// With the log's signature and the good ones of the witnesses, no other.
    pub(crate) note: Note,
    /// How many witnesses cosigned it.
    pub(crate) cosignatures: u64,
    /// Unix milliseconds.
    pub(crate) at: u64,
}

impl Signed {
    /// A stored note, if the log signed it. Of the other signatures only good ones by these witnesses are kept, one each.
    pub(crate) fn of(note: &[u8], log: &NoteKey, witnesses: &[NoteKey]) -> Option<Signed> {
        let mut note = Note::parse(note).ok()?;
        let Checkpoint { size, root, .. } = Checkpoint::verify(&note, log).ok()?;
        let lines = std::mem::take(&mut note.signatures);
        note.signatures
            .extend(lines.iter().find(|line| line.name == log.name && line.id == log.id()).cloned());
        let mut signed = Signed { size, root, note, cosignatures: 0, at: now_millis() };
        for witness in witnesses {
            if let Some(line) = cosignature(&signed.note.text, &lines, witness) {
                signed.add(line);
            }
        }
        Some(signed)
    }

    /// Adds a cosignature that was found good, of a witness that had not cosigned before.
    pub(crate) fn add(&mut self, line: NoteSignature) {
        self.note.signatures.push(line);
        self.cosignatures += 1;
    }

    /// Whether a witness has cosigned.
    pub(crate) fn is_cosigned_by(&self, witness: &NoteKey) -> bool {
        self.note.signatures.iter().any(|line| line.name == witness.name && line.id == witness.id())
    }

    pub(crate) fn json(&self) -> Value {
        json!({"size": self.size, "root": BASE64_STANDARD.encode(self.root), "note": self.note.to_string()})
    }
}

/// All that [`Shared`] is made of and that cannot be made here.
pub(crate) struct Parts {
    pub(crate) service: Service,
    pub(crate) store: Store,
    pub(crate) roots: TrustRoots,
    pub(crate) signing: SigningKey,
    pub(crate) view: View,
    pub(crate) checkpoint: Option<Signed>,
    pub(crate) signed_size: u64,
    pub(crate) highest: Highest,
    pub(crate) min_version: u64,
    pub(crate) committed: broadcast::Sender<Head>,
    pub(crate) settings: RegistrySettings,
}

impl Shared {
    pub(crate) fn new(parts: Parts) -> Arc<Shared> {
        let Parts { service, store, roots, signing, view, checkpoint, .. } = parts;
        let Parts { signed_size, highest, min_version, committed, settings, .. } = parts;
        let log_key = NoteKey::ed25519(&roots.log, signing.verifying_key());
        let checkpoint = checkpoint.map(Arc::new);
        let page = Page::new(view.head, checkpoint.clone(), None);
        Arc::new(Shared {
            numbers: Numbers::new(&service),
            reads: Arc::new(Semaphore::new(READS_MAX)),
            recent: Lock::new(service.inventory(), &RECENT, VecDeque::new()),
            holds: Holds::new(&service),
            highest,
            open: Lock::new(service.inventory(), &OPEN, VecDeque::new()),
            troubles: Troubles { service: service.clone(), on: Default::default() },
            service,
            store,
            roots,
            signing,
            log_key,
            view: ArcSwap::from_pointee(view),
            head_page: ArcSwap::from_pointee(page),
            checkpoint: ArcSwapOption::new(checkpoint),
            signed_size: AtomicU64::new(signed_size),
            checkpointed: Notify::new(),
            checkpoint_wanted: Notify::new(),
            cosignatures_wanted: Notify::new(),
            committed,
            settings: ArcSwap::from_pointee(settings),
            pending: AtomicUsize::new(0),
            writing: AtomicUsize::new(0),
            min_version: AtomicU64::new(min_version),
            verified: AtomicU64::new(0),
            damage: ArcSwapOption::empty(),
        })
    }

    /// Shows readers a new state, and gives the former one.
    pub(crate) fn publish(&self, view: View) -> Arc<View> {
        self.view.swap(Arc::new(view))
    }

    /// Head's page, composed for the first who asks since it changed.
    pub(crate) fn head_page(&self) -> Guard<Arc<Page>> {
        // In this order: a checkpoint covers no more than the head that is shown with it.
        let (checkpoint, view, page) = (self.checkpoint.load(), self.view.load(), self.head_page.load());
        if page.is_of(&view.head, checkpoint.as_ref()) {
            return page;
        }
        let page = Arc::new(Page::new(view.head, checkpoint.clone(), Some(&**page)));
        self.head_page.store(page.clone());
        Guard::from_inner(page)
    }

    /// Head's members for an entry that was just committed. Unless the checkpoint is new, head's page is left to be composed
    /// for who asks for it.
    pub(crate) fn committed_page(&self, entry: &HeadInfo) -> Bytes {
        let (checkpoint, page) = (self.checkpoint.load(), self.head_page.load());
        if is_same(page.checkpoint.as_ref(), checkpoint.as_ref()) {
            page.of(entry)
        } else {
            self.head_page().of(entry)
        }
    }

    /// Notes what was committed, for the streams.
    pub(crate) fn note_recent(&self, committed: &[HeadInfo]) {
        let mut recent = self.recent.lock();
        recent.extend(committed);
        let over = recent.len().saturating_sub(RECENT_MAX);
        recent.drain(..over);
    }

    #[cfg(test)]
    pub(crate) fn forget_recent(&self) {
        self.recent.lock().clear();
    }

    /// Up to so many of the newest entries from a version on; none if they do not reach back so far.
    pub(crate) fn recent(&self, from: u64, count: usize) -> Vec<HeadInfo> {
        let recent = self.recent.lock();
        let Some(first) = recent.front().map(|info| info.version).filter(|first| *first <= from) else {
            return Vec::new();
        };
        let skip = usize::try_from(from - first).unwrap_or(usize::MAX);
        recent.iter().skip(skip).take(count).copied().collect()
    }

    /// Nobody knows yet what became of a commit.
    pub(crate) fn note_open(&self, id: B3) {
        let mut open = self.open.lock();
        if !open.contains(&id) {
            open.push_back(id);
        }
        if open.len() > OPEN_MAX {
            open.pop_front();
        }
    }

    /// Now it is known.
    pub(crate) fn forget_open(&self, id: B3) {
        self.open.lock().retain(|open| *open != id);
    }

    /// The store was read anew: what is not in it did not happen, and will not.
    pub(crate) fn forget_all_open(&self) {
        self.open.lock().clear();
    }

    /// How it stands with a commit of which the store knows nothing, if its outcome is open.
    pub(crate) fn open(&self, id: B3) -> Option<&'static str> {
        let undecided = self.damage().is_some() || self.store.disk().flush_failed();
        let state = if undecided { "unknown" } else { "pending" };
        self.open.lock().contains(&id).then_some(state)
    }

    /// Serves a checkpoint from now on.
    pub(crate) fn publish_checkpoint(&self, signed: Signed) {
        let (size, note) = (signed.size, signed.note.to_string().into());
        self.service.kernel().publish(KernelEvent::RegistryCheckpoint { size, note });
        self.checkpoint.store(Some(Arc::new(signed)));
        self.checkpointed.notify_waiters();
    }

    pub(crate) fn head(&self) -> HeadInfo {
        self.view.load().head
    }

    pub(crate) fn min_version(&self) -> u64 {
        self.min_version.load(Ordering::Acquire)
    }

    /// Something that was stored is not what it was: nothing is written on top of it any more.
    pub(crate) fn damaged(&self, version: u64, what: &str) {
        if self.stop_writes(format!("version {version} is damaged"), &format!("corrupt_version_{version}")) {
            tracing::error!(version, what, "the registry's store is damaged: writes are refused");
        } else {
            // Whoever reads it again finds the same.
            tracing::debug!(version, what, "the registry's store is damaged");
        }
    }

    /// Work on the store panicked, as it does over a page that makes no sense: that is damage too.
    pub(crate) fn panicked(&self, work: &str, panic: &str) {
        tracing::error!(work, panic, "the registry's store makes no sense: writes are refused");
        self.stop_writes(format!("{work} failed: the store is damaged"), "corrupt_store");
    }

    /// True if it is the first reason to.
    fn stop_writes(&self, text: String, cause: &str) -> bool {
        let is_first = self.damage.compare_and_swap(&None::<Arc<String>>, Some(Arc::new(text))).is_none();
        if is_first {
            self.service.lose(cause, Severity::WritesShed);
        }
        is_first
    }

    pub(crate) fn damage(&self) -> Option<Arc<String>> {
        self.damage.load_full()
    }

    /// Reads on a thread that may block, once one is free for that.
    pub(crate) async fn reading<T: Send + 'static>(
        &self,
        read: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, tokio::task::JoinError> {
        let place = self.reads.clone().acquire_owned().await.expect("nobody closes it");
        // The place is kept until the work ends, also when nobody waits for it any more.
        tokio::task::spawn_blocking(move || {
            let done = read();
            drop(place);
            done
        })
        .await
    }

    /// Reads the store on a thread that may block; a failure is tried again after a pause, a few times.
    pub(crate) async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        op: &'static str,
        read: impl Fn(&Reader) -> Result<T, StoreError> + Send + Sync + 'static,
    ) -> Result<T, StoreError> {
        let read = Arc::new(read);
        let mut pause = PAUSE_MIN;
        for tried in 1.. {
            let (store, read) = (self.store.clone(), read.clone());
            let done = self.reading(move || read(&store.good_reader()?)).await;
            match done {
                Ok(Err(StoreError::Database(error))) if tried < TRIES => {
                    tracing::warn!(op, %error, "the registry's store could not be read; once more");
                    self.numbers.storage_backoff.with([op]).inc();
                    self.numbers.retries.inc();
                    tokio::time::sleep(pause.mul_f64(1.0 + ron_kernel::random::unit())).await;
                    pause = (pause * 2).min(PAUSE_CAP);
                }
                Ok(done) => return done,
                // A page that cannot be made sense of may panic below; the deep verifier says whether it is damage.
                Err(panic) => return Err(StoreError::Damaged(panic.to_string())),
            }
        }
        unreachable!("the last try returns")
    }
}

/// Head's members.
fn head_json(head: &HeadInfo, checkpoint: &str) -> String {
    let HeadInfo { version, hash, payload_b3, signers_version, committed_at } = head;
    format!(
        "{{\"checkpoint\":{checkpoint},\"committed_at\":{committed_at},\"hash\":\"{hash}\",\"payload_b3\":\"{payload_b3}\",\
         \"signers_version\":{signers_version},\"version\":{version}}}"
    )
}

/// A strong validator of a body.
pub(crate) fn etag(body: &[u8]) -> String {
    format!("\"{}\"", &B3::of(body).to_string()[3..35])
}

/// The wall clock.
pub(crate) fn now_millis() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpointor::make;
    use crate::fixture::Fixture;

    #[tokio::test]
    async fn a_read_that_fails_is_tried_again_a_few_times_and_counted() {
        let registry = Fixture::new(RegistrySettings::default());
        let tries = Arc::new(AtomicUsize::new(0));
        let (seen, busy) = (tries.clone(), || std::io::Error::other("the disk is busy"));
        let failing = move |good_after: usize| {
            let seen = seen.clone();
            move |_: &Reader| match seen.fetch_add(1, Ordering::Relaxed) {
                tried if tried < good_after => Err(StoreError::Database(Box::new(redb::Error::Io(busy())))),
                tried => Ok(tried),
            }
        };
        assert_eq!(registry.shared.read("head", failing(2)).await.unwrap(), 2);
        let counted = registry.shared.numbers.storage_backoff.with(["head"]);
        assert_eq!(counted.value(), 2);
        let gave_up = registry.shared.read("head", failing(100)).await;
        assert!(matches!(gave_up, Err(StoreError::Database(_))));
        assert_eq!((counted.value(), tries.load(Ordering::Relaxed)), (4, 6));
    }

    #[test]
    fn heads_page_has_the_newest_of_both_whoever_was_last() {
        let mut registry = Fixture::new(RegistrySettings::default());
        registry.grow(1);
        let (shared, signed) = (&registry.shared, make(&registry.shared, None).unwrap().0);
        let view = View::clone(&shared.view.load());
        let rounds = 300;
        for round in 0..rounds {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let head = HeadInfo { version: round, ..view.head };
                    shared.publish(View { head, ..view.clone() });
                });
                scope.spawn(|| shared.publish_checkpoint(Signed { size: round, ..signed.clone() }));
            });
            let page = shared.head_page();
            let value: Value = serde_json::from_slice(&page.json).unwrap();
            let shown = (&value["version"], &value["checkpoint"]["size"]);
            assert_eq!(shown, (&json!(round), &json!(round)));
            assert_eq!((value.to_string().as_bytes(), &*page.etag), (&*page.json, &*etag(&page.json)));
            let other = HeadInfo { version: 7, ..view.head };
            let other: Value = serde_json::from_slice(&page.of(&other)).unwrap();
            assert_eq!((&other["version"], &other["checkpoint"]), (&json!(7), &value["checkpoint"]));
        }
    }
}
