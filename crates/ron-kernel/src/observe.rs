//! Logs: text on a terminal, JSON elsewhere, never a secret or a body.

use crate::config::Problems;
use crate::inventory::{ChannelKind, ChannelSpec, Policy, TaskSort, TaskSpec};
use crate::{choice, settings};
use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::format::{Format, Full, Json, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Finished spans on their way to the collector; with the feature `otlp`.
pub static SPANS: ChannelSpec = ChannelSpec {
    service: "kernel",
    name: "spans",
    kind: ChannelKind::Mpsc,
    capacity: 2048,
    policy: Policy::RejectNew,
    producers: &["conn"],
    consumers: &["trace_exporter"],
};

pub static TRACE_EXPORTER: TaskSpec = TaskSpec {
    service: "kernel",
    kind: "trace_exporter",
    sort: TaskSort::Permanent,
    does: "sends finished spans to the collector (feature `otlp`)",
};

choice! {
    /// How a log line is written.
    pub enum LogFormat {
        /// Text on a terminal, JSON elsewhere.
        Auto = "auto",
        Text = "text",
        Json = "json",
    }
}

choice! {
    /// The least important line that is written.
    pub enum LogLevel {
        Error = "error",
        Warn = "warn",
        Info = "info",
        Debug = "debug",
        Trace = "trace",
    }
}

settings! {
    /// Logs and traces.
    pub struct LogSettings {
        /// Form of a line; `auto` is text on a terminal and JSON elsewhere.
        format: LogFormat = LogFormat::Auto => Hot;
        /// Least important line written.
        level: LogLevel = LogLevel::Info => Hot;
        /// Collector for traces, such as `http://127.0.0.1:4318` (OTLP over HTTP). Empty: off. Needs a build with the feature `otlp`.
        otlp: String = String::new() => Hot;
    }
}

impl LogSettings {
    pub fn validate(&self, problems: &mut Problems) {
        if self.otlp.is_empty() {
            return;
        }
        if !cfg!(feature = "otlp") {
            problems.add("log.otlp", "this binary is built without traces: build it with `--features otlp`");
        } else if !self.otlp.starts_with("http://") {
            problems.add("log.otlp", format!("{:?} is no collector: write http://host:port", self.otlp));
        }
    }
}

impl LogLevel {
    fn filter(self) -> LevelFilter {
        match self {
            LogLevel::Error => LevelFilter::ERROR,
            LogLevel::Warn => LevelFilter::WARN,
            LogLevel::Info => LevelFilter::INFO,
            LogLevel::Debug => LevelFilter::DEBUG,
            LogLevel::Trace => LevelFilter::TRACE,
        }
    }
}

type LevelHandle = reload::Handle<LevelFilter, tracing_subscriber::Registry>;

/// What of the logs can be changed while the process runs.
#[derive(Clone, Debug)]
pub struct Logs {
    level: Arc<OnceLock<LevelHandle>>,
    json: Arc<AtomicBool>,
}

impl Logs {
    /// Starts to write logs to standard error. Does nothing if this process already has a subscriber.
    pub fn start(settings: &LogSettings) -> Logs {
        let (filter, handle) = reload::Layer::new(settings.level.filter());
        let json = Arc::new(AtomicBool::new(settings.format.is_json()));
        let format = Switch {
            json: json.clone(),
            as_text: Format::default().with_target(false).with_ansi(std::io::stderr().is_terminal()),
            as_json: Format::default().json().with_target(false).flatten_event(true),
        };
        let layer = tracing_subscriber::fmt::layer().event_format(format).with_writer(std::io::stderr);
        let level = OnceLock::new();
        if tracing_subscriber::registry().with(filter).with(layer).try_init().is_ok() {
            let _ = level.set(handle);
            // A panic is a line of the log like any other; who caught it says which task it was.
            std::panic::set_hook(Box::new(|panic| {
                let place = panic.location().map(ToString::to_string).unwrap_or_default();
                tracing::error!(place, panic = crate::task::panic_text(panic.payload()), "panic");
            }));
        }
        Logs { level: Arc::new(level), json }
    }

    pub fn apply(&self, settings: &LogSettings) {
        self.json.store(settings.format.is_json(), Ordering::Relaxed);
        if let Some(handle) = self.level.get() {
            let _ = handle.reload(settings.level.filter());
        }
    }
}

impl LogFormat {
    fn is_json(self) -> bool {
        match self {
            LogFormat::Json => true,
            LogFormat::Text => false,
            LogFormat::Auto => !std::io::stderr().is_terminal(),
        }
    }
}

/// Writes a line in the form that is asked for at that moment.
struct Switch {
    json: Arc<AtomicBool>,
    as_text: Format<Full>,
    as_json: Format<Json>,
}

impl<S, N> FormatEvent<S, N> for Switch
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        writer: Writer<'_>,
        event: &tracing::Event<'_>,
    ) -> std::fmt::Result {
        if self.json.load(Ordering::Relaxed) {
            self.as_json.format_event(context, writer, event)
        } else {
            self.as_text.format_event(context, writer, event)
        }
    }
}
