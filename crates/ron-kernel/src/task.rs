//! Supervised tasks.
//!
//! *Permanent* tasks are restarted with full-jitter backoff and, past a budget, fail their service closed.
//! *Scoped* tasks live as long as one connection or job: a panic in one is caught, counted and logged, and never
//! counts against the service. Every task is named, tracked and joined.

use crate::health::Severity;
use crate::kernel::Service;
use crate::lock::assert_none_held;
use crate::metrics::{Counter, Family, Metrics};
use crate::shutdown::Phase;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Restarts of one task within [`WINDOW`] that are forgiven; the next failure fails the service closed.
const RESTARTS_MAX: usize = 5;
const WINDOW: Duration = Duration::from_secs(60);
const BACKOFF_MIN: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(2);

pub type TaskError = Box<dyn std::error::Error + Send + Sync>;
pub type TaskResult = Result<(), TaskError>;

/// The tasks of one service.
#[derive(Clone, Debug)]
pub struct Tasks {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    service: &'static str,
    permanent: Mutex<Vec<Arc<Row>>>,
    live: Mutex<BTreeMap<u64, Live>>,
    count: AtomicUsize,
    next_id: AtomicU64,
    changed: Notify,
    spawned: Arc<Family<Counter, 2>>,
    aborted: Arc<Family<Counter, 2>>,
    canceled: Arc<Family<Counter, 2>>,
    panicked: Arc<Family<Counter, 2>>,
    restarts: Counter,
}

/// A task that has not ended.
struct Live {
    kind: &'static str,
    permanent: bool,
    describe: Box<dyn Fn() -> String + Send + Sync>,
    handle: Option<tokio::task::AbortHandle>,
}

impl std::fmt::Debug for Live {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.kind, (self.describe)())
    }
}

/// A permanent task as `/debug/tasks` shows it.
#[derive(Debug)]
struct Row {
    kind: &'static str,
    index: usize,
    status: Mutex<Status>,
    kill: Kill,
}

#[derive(Clone, Debug)]
struct Status {
    state: &'static str,
    restarts: u64,
    last_exit: Option<String>,
}

/// The chaos switch: the next poll of the task panics.
#[derive(Debug, Default)]
struct Kill {
    armed: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Tasks {
    pub(crate) fn new(service: &'static str, metrics: &Metrics) -> Tasks {
        let family = |name, help| metrics.family(name, help, ["service", "kind"]);
        let restarts: Arc<Family<Counter, 1>> =
            metrics.family("service_restarts_total", "Restarts of permanent tasks.", ["service"]);
        Tasks {
            inner: Arc::new(Inner {
                service,
                permanent: Mutex::default(),
                live: Mutex::default(),
                count: AtomicUsize::new(0),
                next_id: AtomicU64::new(0),
                changed: Notify::new(),
                spawned: family("tasks_spawned_total", "Tasks started."),
                aborted: family("tasks_aborted_total", "Tasks cut at the drain deadline."),
                canceled: family("tasks_canceled_total", "Tasks ended by shutdown."),
                panicked: family("tasks_panicked_total", "Tasks that panicked."),
                restarts: restarts.with([service]),
            }),
        }
    }

    /// Tasks that have not ended.
    pub fn live(&self) -> usize {
        self.inner.count.load(Ordering::SeqCst)
    }

    /// Tasks that serve one connection or job and have not ended.
    pub fn live_scoped(&self) -> usize {
        let live = self.inner.live.lock().unwrap_or_else(PoisonError::into_inner);
        live.values().filter(|task| !task.permanent).count()
    }

    /// Tasks of one kind that have not ended.
    pub(crate) fn live_of(&self, kind: &str) -> usize {
        let live = self.inner.live.lock().unwrap_or_else(PoisonError::into_inner);
        live.values().filter(|task| task.kind == kind).count()
    }

    /// Resolves when no task is left.
    pub(crate) async fn finished(&self) {
        loop {
            let changed = self.inner.changed.notified();
            if self.live() == 0 {
                return;
            }
            changed.await;
        }
    }

    /// Names what is still running past the deadline; permanent tasks end with what they serve, so they come later.
    pub(crate) fn late(&self, permanent: bool) -> Vec<String> {
        let live = self.inner.live.lock().unwrap_or_else(PoisonError::into_inner);
        live.values()
            .filter(|task| task.permanent == permanent)
            .map(|task| format!("{} {} {}", self.inner.service, task.kind, (task.describe)()))
            .collect()
    }

    /// Aborts what is still running and counts it.
    pub(crate) fn abort_live(&self) {
        let live = self.inner.live.lock().unwrap_or_else(PoisonError::into_inner);
        for task in live.values() {
            self.inner.aborted.with([self.inner.service, task.kind]).inc();
            if let Some(handle) = &task.handle {
                handle.abort();
            }
        }
    }

    /// Counts a task or request that shutdown ended.
    pub fn canceled(&self, kind: &str) {
        self.inner.canceled.with([self.inner.service, kind]).inc();
    }

    /// Counts one that was cut, where the cut is made by its own connection.
    pub fn aborted(&self, kind: &str) {
        self.inner.aborted.with([self.inner.service, kind]).inc();
    }

    /// Counts and logs a panic that was caught.
    pub fn panicked(&self, kind: &str, text: &str) {
        self.inner.panicked.with([self.inner.service, kind]).inc();
        tracing::error!(service = self.inner.service, kind, panic = text, "task panicked");
    }

    /// Rows for `GET /debug/tasks`.
    pub fn to_json(&self) -> Vec<Value> {
        let rows = self.inner.permanent.lock().unwrap_or_else(PoisonError::into_inner);
        rows.iter()
            .map(|row| {
                let status = row.status.lock().unwrap_or_else(PoisonError::into_inner).clone();
                json!({
                    "service": self.inner.service, "kind": row.kind, "index": row.index, "state": status.state,
                    "restarts": status.restarts, "last_exit": status.last_exit,
                })
            })
            .collect()
    }

    /// Makes a share of the running permanent tasks of a kind panic; returns how many.
    pub fn kill(&self, kind: &str, fraction: f64) -> usize {
        let rows = self.inner.permanent.lock().unwrap_or_else(PoisonError::into_inner);
        let running: Vec<_> = rows
            .iter()
            .filter(|row| row.kind == kind)
            .filter(|row| row.status.lock().unwrap_or_else(PoisonError::into_inner).state == "running")
            .collect();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of a small count"
        )]
        let count = (running.len() as f64 * fraction.clamp(0.0, 1.0)).ceil() as usize;
        for row in &running[..count] {
            row.kill.armed.store(true, Ordering::SeqCst);
            let waker = row.kill.waker.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
        count
    }

    fn enter(
        &self,
        kind: &'static str,
        permanent: bool,
        describe: Box<dyn Fn() -> String + Send + Sync>,
    ) -> Entered {
        self.inner.spawned.with([self.inner.service, kind]).inc();
        // There from the beginning: an alarm sees the first only as a step up from none.
        self.inner.panicked.with([self.inner.service, kind]);
        let id = self.inner.next_id.fetch_add(1, Ordering::Relaxed);
        self.inner.count.fetch_add(1, Ordering::SeqCst);
        let live = Live { kind, permanent, describe, handle: None };
        self.inner.live.lock().unwrap_or_else(PoisonError::into_inner).insert(id, live);
        Entered { tasks: self.clone(), id }
    }
}

/// A task's membership among the living, ended by drop, however the task ends.
struct Entered {
    tasks: Tasks,
    id: u64,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let inner = &self.tasks.inner;
        inner.live.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
        inner.count.fetch_sub(1, Ordering::SeqCst);
        inner.changed.notify_waiters();
    }
}

impl Service {
    /// Starts a task that must always run. `make` builds it anew for each restart.
    ///
    /// After the drain began, its return is expected; before, a return is a failure like a panic or an error.
    pub fn permanent<F, Fut>(&self, kind: &'static str, index: usize, make: F)
    where
        F: FnMut() -> Fut + Send + 'static,
        Fut: Future<Output = TaskResult> + Send + 'static,
    {
        let status = Status { state: "running", restarts: 0, last_exit: None };
        let row = Arc::new(Row { kind, index, status: Mutex::new(status), kill: Kill::default() });
        self.tasks().inner.permanent.lock().unwrap_or_else(PoisonError::into_inner).push(row.clone());
        let service = self.clone();
        let describe = Box::new(move || format!("#{index}"));
        self.spawn_tracked(kind, true, describe, async move { supervise(service, row, make).await });
    }

    /// Starts a task that belongs to one connection, session or job. `describe` names it if it is late to end.
    pub fn scoped<Fut>(
        &self,
        kind: &'static str,
        describe: impl Fn() -> String + Send + Sync + 'static,
        future: Fut,
    ) where
        Fut: Future<Output = ()> + Send + 'static,
    {
        let tasks = self.tasks().clone();
        self.spawn_tracked(kind, false, Box::new(describe), async move {
            if let Err(panic) = Guarded::new(kind, future, None).await {
                tasks.panicked(kind, &panic);
            }
        });
    }

    fn spawn_tracked<Fut>(
        &self,
        kind: &'static str,
        permanent: bool,
        describe: Box<dyn Fn() -> String + Send + Sync>,
        future: Fut,
    ) where
        Fut: Future<Output = ()> + Send + 'static,
    {
        let entered = self.tasks().enter(kind, permanent, describe);
        let id = entered.id;
        #[expect(
            clippy::disallowed_methods,
            reason = "the one place where tasks are born: named, tracked, joined"
        )]
        let handle = tokio::spawn(async move {
            let _entered = entered;
            future.await;
        });
        let mut live = self.tasks().inner.live.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(task) = live.get_mut(&id) {
            task.handle = Some(handle.abort_handle());
        }
    }
}

async fn supervise<F, Fut>(service: Service, row: Arc<Row>, mut make: F)
where
    F: FnMut() -> Fut + Send,
    Fut: Future<Output = TaskResult> + Send,
{
    let mut failures: VecDeque<Instant> = VecDeque::new();
    loop {
        set(&row, |status| status.state = "running");
        let outcome = Guarded::new(row.kind, make(), Some(row.clone())).await;
        let died = !matches!(outcome, Ok(Ok(())));
        let exit = match outcome {
            Ok(Ok(())) => "returned".to_owned(),
            Ok(Err(error)) => format!("error: {error}"),
            Err(panic) => {
                service.tasks().panicked(row.kind, &panic);
                format!("panic: {panic}")
            }
        };
        let now = Instant::now();
        failures.retain(|at| now.duration_since(*at) < WINDOW);
        match service.shutdown().phase() {
            Phase::Running => {}
            // Queues still drain: whoever dies meanwhile is needed again, and at once.
            Phase::Draining if died && failures.len() < RESTARTS_MAX => {
                failures.push_back(now);
                service.tasks().inner.restarts.inc();
                set(&row, |status| {
                    status.restarts += 1;
                    status.last_exit = Some(exit);
                });
                continue;
            }
            _ => {
                service.tasks().canceled(row.kind);
                set(&row, |status| (status.state, status.last_exit) = ("stopped", Some(exit.clone())));
                return;
            }
        }
        if failures.len() >= RESTARTS_MAX {
            set(&row, |status| (status.state, status.last_exit) = ("failed", Some(exit.clone())));
            service.fail_closed(format!(
                "task {} #{} failed {} times in a minute, last: {exit}",
                row.kind,
                row.index,
                failures.len() + 1
            ));
            return;
        }
        failures.push_back(now);
        let delay = backoff(failures.len());
        tracing::warn!(
            service = service.name(),
            kind = row.kind,
            index = row.index,
            exit,
            ?delay,
            "task restarts"
        );
        rest(&service, &row, exit, delay).await;
    }
}

/// Waits out the backoff, saying meanwhile that the task is missing. A drain ends it: the task may be needed for it.
async fn rest(service: &Service, row: &Row, exit: String, delay: Duration) {
    set(row, |status| {
        (status.state, status.last_exit) = ("backoff", Some(exit));
        status.restarts += 1;
    });
    service.tasks().inner.restarts.inc();
    service.lose(row.kind, Severity::WritesShed);
    tokio::select! {
        biased;
        () = service.shutdown().draining() => {}
        () = tokio::time::sleep(delay) => {}
    }
    service.restore(row.kind);
}

fn set(row: &Row, change: impl FnOnce(&mut Status)) {
    change(&mut row.status.lock().unwrap_or_else(PoisonError::into_inner));
}

/// Full jitter: anywhere between the minimum and the doubled, capped ceiling.
fn backoff(failures: usize) -> Duration {
    let ceiling = BACKOFF_MIN.saturating_mul(1 << failures.min(10)).min(BACKOFF_MAX);
    BACKOFF_MIN + ceiling.saturating_sub(BACKOFF_MIN).mul_f64(crate::random::unit())
}

/// Polls a future so that a panic becomes a value, the kill switch works and no ranked lock survives a poll.
struct Guarded<F: Future> {
    kind: &'static str,
    future: Pin<Box<F>>,
    row: Option<Arc<Row>>,
}

impl<F: Future> Guarded<F> {
    fn new(kind: &'static str, future: F, row: Option<Arc<Row>>) -> Guarded<F> {
        Guarded { kind, future: Box::pin(future), row }
    }
}

impl<F: Future> Future for Guarded<F> {
    type Output = Result<F::Output, String>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let polled = catch_unwind(AssertUnwindSafe(|| {
            if let Some(row) = &this.row {
                *row.kill.waker.lock().unwrap_or_else(PoisonError::into_inner) = Some(cx.waker().clone());
                assert!(!row.kill.armed.swap(false, Ordering::SeqCst), "killed by request");
            }
            let polled = this.future.as_mut().poll(cx);
            assert_none_held(this.kind);
            polled
        }));
        match polled {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Err(panic) => Poll::Ready(Err(panic_text(panic.as_ref()))),
        }
    }
}

/// The message of a caught panic.
pub fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests;
