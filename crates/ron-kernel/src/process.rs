//! The tasks of the process itself: signals, the configuration watcher, the log of bus events.

use crate::bus::{KernelEvent, Next};
use crate::config::{Change, Problems};
use crate::health::Severity;
use crate::inventory::{TaskSort, TaskSpec};
use crate::kernel::{Ending, Service};
use crate::metrics::{Counter, Family};
use crate::task::TaskResult;
use arc_swap::ArcSwap;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::SetOnce;

/// How often watched files are looked at; a change must look the same twice, so that none is read half-written.
const LOOK: Duration = Duration::from_millis(200);

/// Changes that one reload writes into the log, one by one.
const CHANGES_TOLD: usize = 200;
/// Problems that `/readyz` names; the log has all of them.
const PROBLEMS_TOLD: usize = 20;

pub static TASKS: [TaskSpec; 5] = [
    TaskSpec {
        service: "kernel",
        kind: "signals",
        sort: TaskSort::Permanent,
        does: "turns signals into shutdown and reload",
    },
    TaskSpec {
        service: "kernel",
        kind: "config_watcher",
        sort: TaskSort::Permanent,
        does: "reloads when a watched file changes",
    },
    TaskSpec {
        service: "kernel",
        kind: "takeover",
        sort: TaskSort::Permanent,
        does: "hands the listening sockets to the process that takes over; of a gateway alone",
    },
    TaskSpec { service: "kernel", kind: "reload", sort: TaskSort::Scoped, does: "reloads once, on SIGHUP" },
    TaskSpec {
        service: "kernel",
        kind: "event_log",
        sort: TaskSort::Permanent,
        does: "logs what passes on the bus",
    },
];

type ReloadFn = Box<dyn Fn() -> Result<(u64, Vec<Change>), Problems> + Send + Sync>;
type FilesFn = Box<dyn Fn() -> Vec<PathBuf> + Send + Sync>;

/// Reloads the configuration, whoever asks, and says how it went.
pub struct Reloader {
    service: Service,
    reload: ReloadFn,
    /// The files whose change leads to a reload.
    files: FilesFn,
    /// What they looked like when they were read last, or before.
    known: ArcSwap<Look>,
    results: Arc<Family<Counter, 2>>,
    failing: AtomicBool,
}

impl std::fmt::Debug for Reloader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reloader")
    }
}

impl Reloader {
    pub fn new(
        service: &Service,
        reload: impl Fn() -> Result<(u64, Vec<Change>), Problems> + Send + Sync + 'static,
        files: impl Fn() -> Vec<PathBuf> + Send + Sync + 'static,
    ) -> Arc<Reloader> {
        let results =
            service.metrics().family("config_reload_total", "Configuration reloads.", ["service", "result"]);
        for result in ["ok", "failed"] {
            results.with([service.name(), result]);
        }
        // Not first in the watcher's task, which may begin late: what changed before would never be seen.
        let known = ArcSwap::from_pointee(look(&files()));
        Arc::new(Reloader {
            service: service.clone(),
            reload: Box::new(reload),
            files: Box::new(files),
            known,
            results,
            failing: AtomicBool::new(false),
        })
    }

    /// Loads, validates and swaps, off the runtime. Returns the keys that changed.
    pub async fn reload(self: &Arc<Self>, source: &'static str) -> Result<Vec<String>, Problems> {
        let reloader = self.clone();
        let outcome = self.run(source, move || (reloader.reload)()).await;
        if let Err(problems) = &outcome {
            let told = problems.lines();
            let told = told[..told.len().min(PROBLEMS_TOLD)].join("; ");
            if self.failing.swap(true, Ordering::SeqCst) {
                self.service.explain("config_reload", &told);
            } else {
                self.service.lose_because("config_reload", Severity::Degraded, &told);
            }
        }
        outcome
    }

    /// The same in another way than from the files alone; what a failure means for readiness is the caller's to say.
    pub async fn run(
        self: &Arc<Self>,
        source: &'static str,
        reload: impl FnOnce() -> Result<(u64, Vec<Change>), Problems> + Send + 'static,
    ) -> Result<Vec<String>, Problems> {
        let outcome = tokio::task::spawn_blocking(reload).await;
        let outcome = outcome.unwrap_or_else(|panic| {
            let mut problems = Problems::default();
            problems.add("", format!("the reload failed: {panic}"));
            Err(problems)
        });
        let name = self.service.name();
        match outcome {
            Ok((version, changed)) => {
                self.results.with([name, "ok"]).inc();
                for change in changed.iter().take(CHANGES_TOLD) {
                    tracing::info!(source, version, %change, "configuration changed");
                }
                tracing::info!(source, version, changes = changed.len(), "configuration reloaded");
                if self.failing.swap(false, Ordering::SeqCst) {
                    self.service.restore("config_reload");
                }
                self.service.kernel().publish(KernelEvent::ConfigUpdated { version });
                Ok(changed.into_iter().map(|change| change.key).collect())
            }
            Err(problems) => {
                self.results.with([name, "failed"]).inc();
                for line in problems.lines() {
                    tracing::error!(
                        source,
                        problem = line,
                        "configuration not reloaded, the last good one stays"
                    );
                }
                Err(problems)
            }
        }
    }
}

/// The process's signals. From when they are caught, SIGTERM and SIGINT end the process in order and no longer kill it.
#[derive(Debug)]
pub struct Signals {
    /// Who acts on a SIGHUP; one that comes before there is anybody waits.
    reloader: Arc<SetOnce<Arc<Reloader>>>,
}

/// The streams of the signals that are caught.
struct Caught {
    term: Signal,
    int: Signal,
    hup: Signal,
}

impl Caught {
    fn new() -> std::io::Result<Caught> {
        let (term, int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Caught { term, int, hup: signal(SignalKind::hangup())? })
    }
}

impl Signals {
    /// Catches the process's signals under the service `kernel`. Call it before anything is built and anybody is told
    /// where the process is: when this returns, a signal kills it no more, even if the task has not begun.
    pub fn catch(service: &Service) -> std::io::Result<Signals> {
        let mut first = Some(Caught::new()?);
        let (reloader, seen) = (Arc::new(SetOnce::new()), Arc::new(AtomicUsize::new(0)));
        let (tasks, reloading) = (service.clone(), reloader.clone());
        let make = move || signals(tasks.clone(), first.take(), reloading.clone(), seen.clone());
        service.permanent("signals", 0, make);
        Ok(Signals { reloader })
    }
}

/// Starts the process's other tasks under the service `kernel`, and has SIGHUP reload.
pub fn start(service: &Service, signals: &Signals, reloader: &Arc<Reloader>) {
    // It is set here alone, and once.
    let _ = signals.reloader.set(reloader.clone());
    let (tasks, watching) = (service.clone(), reloader.clone());
    service.permanent("config_watcher", 0, move || watch_files(tasks.clone(), watching.clone()));
    let tasks = service.clone();
    service.permanent("event_log", 0, move || log_events(tasks.clone()));
}

/// The signals to end since this was made, for a process whose tasks do not look for them any more.
#[derive(Debug)]
pub struct EndSignals([Signal; 2]);

impl EndSignals {
    pub fn new() -> std::io::Result<EndSignals> {
        Ok(EndSignals([signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?]))
    }

    /// Resolves when there was one. Cancel-safe.
    pub async fn told(&mut self) {
        let [term, int] = &mut self.0;
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
    }
}

async fn signals(
    service: Service,
    caught: Option<Caught>,
    reloader: Arc<SetOnce<Arc<Reloader>>>,
    seen: Arc<AtomicUsize>,
) -> TaskResult {
    let Caught { mut term, mut int, mut hup } = caught.map_or_else(Caught::new, Ok)?;
    let shutdown = service.shutdown().clone();
    loop {
        let hung_up = async {
            hup.recv().await;
            reloader.wait().await.clone()
        };
        let name = tokio::select! {
            biased;
            _ = term.recv() => "SIGTERM",
            _ = int.recv() => "SIGINT",
            // Dropped by the others only, after which nothing is reloaded any more.
            reloader = hung_up => {
                // In a task of its own, so that a reload that hangs does not swallow a SIGTERM.
                service.scoped("reload", || "SIGHUP".to_owned(), async move {
                    // A failure is logged, counted and shown by /readyz.
                    let _ = reloader.reload("SIGHUP").await;
                });
                continue;
            }
            () = shutdown.draining() => return Ok(()),
        };
        if seen.fetch_add(1, Ordering::SeqCst) > 0 {
            tracing::error!(signal = name, "second signal, exiting at once");
            #[expect(clippy::disallowed_methods, clippy::exit, reason = "the second signal means now")]
            std::process::exit(1);
        }
        tracing::info!(signal = name, "shutting down; a second signal exits at once");
        service.kernel().end(Ending::Asked);
    }
}

/// What is looked at to see whether a file changed; a symlink is followed.
type Look = Vec<Option<(u64, u64, i64, i64)>>;

fn look(files: &[PathBuf]) -> Look {
    let one = |path: &PathBuf| {
        let meta = std::fs::metadata(path).ok()?;
        // The time of change, so that a mended mode is seen as well as new bytes.
        Some((meta.ino(), meta.size(), meta.ctime(), meta.ctime_nsec()))
    };
    files.iter().map(one).collect()
}

async fn watch_files(service: Service, reloader: Arc<Reloader>) -> TaskResult {
    let looking = reloader.clone();
    let look_now = move || {
        let looking = looking.clone();
        tokio::task::spawn_blocking(move || look(&(looking.files)()))
    };
    let mut before = Look::clone(&reloader.known.load());
    loop {
        tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            () = tokio::time::sleep(LOOK) => {}
        }
        let now = look_now().await?;
        if now != **reloader.known.load() && now == before {
            reloader.known.store(Arc::new(now.clone()));
            let _ = reloader.reload("file change").await;
        }
        before = now;
    }
}

async fn log_events(service: Service) -> TaskResult {
    let mut events = service.subscribe("event_log");
    loop {
        tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            next = events.next() => match next {
                Some(Next::Event(event)) => tracing::debug!(?event, "bus"),
                // Missed lines are counted; the readiness page is the source of truth.
                Some(Next::Reconcile { .. }) => {}
                None => return Ok(()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Kernel;

    #[tokio::test]
    async fn a_file_that_changes_before_the_watcher_begins_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("watched");
        std::fs::write(&file, "old").unwrap();
        let kernel = Kernel::new();
        let service = kernel.service("kernel");
        let (reloads, watched) = (Arc::new(AtomicUsize::new(0)), file.clone());
        let count = reloads.clone();
        let reload = move || {
            count.fetch_add(1, Ordering::SeqCst);
            Ok((1, Vec::new()))
        };
        let reloader = Reloader::new(&service, reload, move || vec![watched.clone()]);
        std::fs::write(&file, "new and longer").unwrap();
        let seen = async {
            while reloads.load(Ordering::SeqCst) == 0 {
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::select! {
            ended = watch_files(service.clone(), reloader) => panic!("it ends: {ended:?}"),
            () = seen => {}
            () = tokio::time::sleep(Duration::from_secs(20)) => panic!("it was never read again"),
        }
    }
}
