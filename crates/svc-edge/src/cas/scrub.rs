//! Reads everything now and then, so that a bad byte is found before somebody wants it.

use super::keep::Op;
use super::{Cas, Object, ReadError, Reader, Trust};
use crate::address::Address;
use ron_kernel::kernel::Service;
use ron_kernel::task::TaskResult;
use sha2::{Digest as _, Sha256};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Bytes that are read before others get a turn.
const STRETCH: u64 = 16 << 20;

/// How far the scrub is, for metrics and operators.
#[derive(Debug, Default)]
pub struct Progress {
    wanted: Notify,
    pub running: AtomicBool,
    total: AtomicU64,
    done: AtomicU64,
    /// Objects that were read in this pass, and those of them that were bad.
    pub objects: AtomicU64,
    pub bad: AtomicU64,
    /// Passes that came to their end.
    pub passes: AtomicU64,
}

impl Progress {
    /// Part of the bytes that has been read in this pass, or in the last one: 0 before the first.
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn ratio(&self) -> f64 {
        let (done, total) = (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed));
        match (total, self.passes.load(Ordering::Relaxed)) {
            (0, 0) => 0.0,
            (0, _) => 1.0,
            _ => (done as f64 / total as f64).min(1.0),
        }
    }

    /// Has a pass begin now, unless one runs.
    pub fn begin(&self) {
        self.wanted.notify_one();
    }
}

/// Scrubs at intervals, and when it is asked to.
pub async fn scrub(cas: Arc<Cas>, service: Service, interval: impl Fn() -> Duration + Send) -> TaskResult {
    let mut last = Instant::now();
    loop {
        let due = interval().saturating_sub(last.elapsed());
        tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            () = cas.progress.wanted.notified() => {}
            // Looked at again soon: the interval can change.
            () = tokio::time::sleep(due.min(Duration::from_secs(5))) => {
                if last.elapsed() < interval() {
                    continue;
                }
            }
        }
        last = Instant::now();
        tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            () = cas.pass() => {}
        }
    }
}

/// Clears the sign that a pass runs, however it ends.
struct Running<'a>(&'a AtomicBool);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Cas {
    async fn pass(self: &Arc<Self>) {
        let progress = &self.progress;
        progress.running.store(true, Ordering::Relaxed);
        let _running = Running(&progress.running);
        let addresses = self.catalog.lock().addresses();
        progress.total.store(self.bytes(), Ordering::Relaxed);
        for counter in [&progress.done, &progress.objects, &progress.bad] {
            counter.store(0, Ordering::Relaxed);
        }
        for address in addresses {
            self.scrub_one(address).await;
        }
        let cas = self.clone();
        if let Ok(Err(error)) = tokio::task::spawn_blocking(move || cas.look_for_orphans()).await {
            tracing::warn!(%error, "the folder of the store cannot be walked");
        }
        progress.done.store(progress.total.load(Ordering::Relaxed), Ordering::Relaxed);
        progress.passes.fetch_add(1, Ordering::Relaxed);
        let (objects, bad) = (progress.objects.load(Ordering::Relaxed), progress.bad.load(Ordering::Relaxed));
        tracing::info!(objects, bad, "scrub ended");
    }

    async fn scrub_one(self: &Arc<Self>, address: Address) {
        let Some(object) = self.object(&address) else { return };
        let progress = &self.progress;
        let mut sha256 = object.sha256.is_none().then(Sha256::new);
        let (mut reader, mut at): (Option<Reader>, u64) = (None, 0);
        let outcome: Result<Option<Sha256>, ReadError> = loop {
            let begun = Instant::now();
            let (cas, seen) = (self.clone(), object.clone());
            let stretch = tokio::task::spawn_blocking(move || {
                let mut reader = match reader {
                    Some(reader) => reader,
                    None => cas.reader_trusting(address, &seen, Trust::Never)?,
                };
                let end = reader.len.min(at + STRETCH);
                while at < end {
                    let bytes = reader.read(&(at..end))?;
                    at += bytes.len() as u64;
                    if let Some(sha256) = &mut sha256 {
                        sha256.update(&bytes);
                    }
                }
                Ok::<_, ReadError>((reader, at, sha256))
            });
            match stretch.await {
                Ok(Ok((open, now, digest))) => {
                    progress.done.fetch_add(now - at, Ordering::Relaxed);
                    if now >= open.len {
                        break Ok(digest);
                    }
                    (at, sha256, reader) = (now, digest, Some(open));
                }
                Ok(Err(error)) => break Err(error),
                // The blocking thread panicked, or the runtime ends: neither says anything about the object.
                Err(_lost) => return,
            }
            // Half of the time is for others.
            tokio::time::sleep(begun.elapsed()).await;
        };
        progress.objects.fetch_add(1, Ordering::Relaxed);
        // A full queue keeps nobody waiting: the next pass finds the same again.
        match outcome {
            Ok(sha256) => {
                object.condition.bad.store(false, Ordering::Relaxed);
                if let Some(sha256) = sha256 {
                    let _ = self.changes.try_send(Op::Digest(address, sha256.finalize().into()));
                }
            }
            Err(ReadError::Corrupt) => {
                progress.bad.fetch_add(1, Ordering::Relaxed);
                self.note_bad();
            }
            Err(ReadError::Gone) => {
                let same = |now: &Object| Arc::ptr_eq(&now.condition, &object.condition);
                if !self.object(&address).as_ref().is_some_and(same) {
                    // It had to go, or came again, while this looked.
                    return;
                }
                progress.bad.fetch_add(1, Ordering::Relaxed);
                tracing::error!(object = %address, "the object's file is gone");
                let _ = self.changes.try_send(Op::Lost(address));
            }
            Err(ReadError::Io(error)) => {
                tracing::warn!(object = %address, %error, "an object cannot be read")
            }
        }
    }

    /// Files that came to their place just before a crash, and that no row of the index leads to.
    fn look_for_orphans(&self) -> std::io::Result<()> {
        let Some(disk) = &self.disk else { return Ok(()) };
        disk.each_object(&mut |address, len, stored| {
            if self.object(&address).is_none() {
                let _ = self.changes.try_send(Op::Adopt { address, len, stored });
            }
            Ok(())
        })
    }
}
