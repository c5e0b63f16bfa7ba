//! `ron top`: a running node, live on a terminal.
//!
//! [`sample`] is what the admin plane said, [`model`] what follows from two looks, [`screen`] how that is shown and
//! what a key changes; these are pure. [`terminal`] draws and reads keys.

mod keys;
mod model;
mod sample;
mod screen;
mod terminal;

use crate::client::{Admin, Target};
use crate::commands::print;
use crate::{Usage, registry, said};
use anyhow::Context as _;
use keys::Keys;
use model::Model;
use ron_kernel::config::Problems;
use ron_kernel::units::Span;
use sample::{Behind, Metrics, Sample};
use screen::{Bar, Known, View, Wish};
use serde_json::Value;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use terminal::Terminal;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

/// How long a node may be silent within a look.
const SILENCE_MAX: Duration = Duration::from_secs(3);
/// How often one may look.
const INTERVALS: std::ops::RangeInclusive<Duration> = Duration::from_millis(200)..=Duration::from_secs(60);

pub(crate) fn run(target: &Target, interval: Span, once: bool) -> anyhow::Result<ExitCode> {
    let interval = interval.0;
    if !INTERVALS.contains(&interval) {
        return Err(Usage("--interval: expected a time between 200ms and 1m".to_owned()).into());
    }
    let terminal = if once || target.json { None } else { terminal::of_this_process() };
    let Some((input, output)) = terminal else { return look_twice(target, interval) };
    // What is wrong with the command itself does not mend by waiting.
    if let Err(error) = Admin::find(target)
        && (error.is::<Usage>() || error.is::<Problems>())
    {
        return Err(error);
    }
    let colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let terminal = Terminal::enter(input, output, colours).context("cannot use the terminal")?;
        terminal.restore_before_panics();
        Dashboard::new(target.clone(), interval, &terminal).run(&terminal).await
    });
    // A look at a node that does not answer must not hold the exit up.
    runtime.shutdown_background();
    ended.map(|()| ExitCode::SUCCESS)
}

/// Two looks, so that there are rates, and everything once.
fn look_twice(target: &Target, interval: Duration) -> anyhow::Result<ExitCode> {
    let begun = Instant::now();
    let (before, _) = look(target, begun)?;
    std::thread::sleep(interval);
    let (now, node) = look(target, begun)?;
    let model = Model::of(&now, Some(&before));
    print(&if target.json { model.to_json().to_string() } else { screen::plain(&model, &node) })
}

/// Asks everything once; blocks.
fn look(target: &Target, begun: Instant) -> anyhow::Result<(Sample, String)> {
    // Anew each time: a node that was started again has other addresses.
    let admin = Admin::find(target)?;
    let get = |path: &str| admin.fetch(path, SILENCE_MAX);
    let page = get("/metrics")?;
    let metrics = Metrics::parse(&String::from_utf8_lossy(&page.1));
    anyhow::ensure!(page.0 == 200 && !metrics.is_empty(), admin.stranger());
    let json = |path: &str| -> anyhow::Result<Value> {
        let (_, body) = get(path)?;
        serde_json::from_slice(&body).ok().with_context(|| admin.stranger())
    };
    let behind = |path: &str| get(path).map(|(status, body)| Behind::of(status, &body));
    let ready = json("/readyz")?;
    let head = if ready["services"]["registry"].is_null() {
        None
    } else {
        target.files().and_then(|config| registry::head_of(config, SILENCE_MAX))
    };
    let sample = Sample {
        at: begun.elapsed(),
        metrics,
        ready,
        version: json("/version")?,
        channels: json("/debug/channels")?,
        tasks: json("/debug/tasks")?,
        gateway: behind("/gateway/status")?,
        overlay: behind("/overlay/peers")?,
        head,
    };
    Ok((sample, admin.address().to_owned()))
}

/// What is on the screen, and what it is made of.
struct Dashboard {
    target: Target,
    interval: Duration,
    begun: Instant,
    view: View,
    node: String,
    last: Option<Sample>,
    shown: Result<Option<Model>, String>,
    answered: Instant,
    looking: Option<JoinHandle<anyhow::Result<(Sample, String)>>>,
    typing: Option<JoinHandle<Option<Vec<u8>>>>,
}

impl Dashboard {
    fn new(target: Target, interval: Duration, terminal: &Terminal) -> Dashboard {
        let (width, height) = terminal.size();
        let begun = Instant::now();
        Dashboard {
            target,
            interval,
            begun,
            view: View::new(width, height),
            node: String::new(),
            last: None,
            shown: Ok(None),
            answered: begun,
            looking: None,
            typing: None,
        }
    }

    /// Until a key or a signal ends it, or the terminal is gone.
    async fn run(mut self, terminal: &Terminal) -> anyhow::Result<()> {
        let mut ends = Ends::catch()?;
        let mut resized = signal(SignalKind::window_change())?;
        let mut tick = tokio::time::interval(self.interval);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut keys = Keys::default();
        loop {
            terminal.draw(&self.screen())?;
            self.typing.get_or_insert_with(|| tokio::task::spawn_blocking(terminal.typing()));
            tokio::select! {
                biased;
                () = ends.any() => return Ok(()),
                typed = finished(&mut self.typing) => {
                    let Some(typed) = typed? else { return Ok(()) };
                    self.typing = None;
                    for key in keys.push(&typed) {
                        match self.view.press(key, known(&self.shown)) {
                            Wish::Nothing => {}
                            Wish::Redraw => terminal.clear()?,
                            Wish::Suspend => terminal.suspend()?,
                            Wish::Quit => return Ok(()),
                        }
                    }
                    (self.view.width, self.view.height) = terminal.size();
                }
                _ = resized.recv() => (self.view.width, self.view.height) = terminal.size(),
                looked = finished(&mut self.looking) => self.take(looked?),
                _ = tick.tick() => {
                    let (target, begun) = (self.target.clone(), self.begun);
                    self.looking.get_or_insert_with(|| tokio::task::spawn_blocking(move || look(&target, begun)));
                }
            }
        }
    }

    fn screen(&self) -> Vec<screen::Line> {
        let silent = Some(self.answered.elapsed());
        let silent = silent.filter(|silent| *silent > self.interval * 3 + SILENCE_MAX);
        let bar = Bar { node: &self.node, interval: self.interval, silent };
        screen::screen(known(&self.shown), &self.view, &bar)
    }

    fn take(&mut self, looked: anyhow::Result<(Sample, String)>) {
        self.looking = None;
        match looked {
            Ok((sample, node)) => {
                // Another node's counts are nothing to compare with.
                let before = self.last.take().filter(|_| node == self.node);
                self.shown = Ok(Some(Model::of(&sample, before.as_ref())));
                (self.last, self.node, self.answered) = (Some(sample), node, Instant::now());
            }
            Err(error) => (self.last, self.shown) = (None, Err(said(&error))),
        }
    }
}

fn known(shown: &Result<Option<Model>, String>) -> Known<'_> {
    match shown {
        Ok(None) => Known::Waiting,
        Ok(Some(model)) => Known::Shown(model),
        Err(error) => Known::Lost(error),
    }
}

/// The end of what is under way; without it there is none.
async fn finished<T>(under_way: &mut Option<JoinHandle<T>>) -> anyhow::Result<T> {
    match under_way {
        Some(under_way) => under_way.await.context("a thread of the dashboard failed"),
        None => std::future::pending().await,
    }
}

/// The signals that end it as `q` does.
struct Ends([Signal; 4]);

impl Ends {
    fn catch() -> std::io::Result<Ends> {
        let kinds =
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup(), SignalKind::quit()];
        let [a, b, c, d] = kinds.map(signal);
        Ok(Ends([a?, b?, c?, d?]))
    }

    async fn any(&mut self) {
        let [a, b, c, d] = &mut self.0;
        tokio::select! { _ = a.recv() => {}, _ = b.recv() => {}, _ = c.recv() => {}, _ = d.recv() => {} }
    }
}
