//! Logs: text on a terminal, JSON elsewhere, never a secret or a body.

use crate::config::Problems;
use crate::inventory::{ChannelKind, ChannelSpec, Policy, TaskSort, TaskSpec};
use crate::{choice, settings};
use std::io::IsTerminal as _;
use std::sync::{Arc, OnceLock};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt as _;
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
        format: LogFormat = LogFormat::Auto => Restart;
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

/// The level can be changed while the process runs.
#[derive(Clone, Debug)]
pub struct Logs {
    level: Arc<OnceLock<LevelHandle>>,
}

impl Logs {
    /// Starts to write logs to standard error. Does nothing if this process already has a subscriber.
    pub fn start(settings: &LogSettings) -> Logs {
        let json = match settings.format {
            LogFormat::Json => true,
            LogFormat::Text => false,
            LogFormat::Auto => !std::io::stderr().is_terminal(),
        };
        let (filter, handle) = reload::Layer::new(settings.level.filter());
        let registry = tracing_subscriber::registry().with(filter);
        let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
        let started = if json {
            registry.with(layer.json().flatten_event(true)).try_init()
        } else {
            registry.with(layer.with_ansi(std::io::stderr().is_terminal())).try_init()
        };
        let level = OnceLock::new();
        if started.is_ok() {
            let _ = level.set(handle);
        }
        Logs { level: Arc::new(level) }
    }

    pub fn set_level(&self, level: LogLevel) {
        if let Some(handle) = self.level.get() {
            let _ = handle.reload(level.filter());
        }
    }
}
