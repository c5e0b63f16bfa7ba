//! The access log: one line for each request answered, written by a task of its own.
//!
//! A request leaves a [`Record`] of cheap copies in a bounded queue; names are looked up and text is made where it is
//! written. When the writer cannot keep up, new lines are dropped and counted, and no request waits.

use crate::config::{AccessLogFormat, AccessLogSettings};
use crate::forward::host_name;
use crate::proxy::{Names, Seen, Snapshot};
use arc_swap::ArcSwap;
use http::header::HeaderValue;
use http::uri::Authority;
use http::{Method, Uri, Version};
use ron_kernel::channel::{self, Receiver, Sender};
use ron_kernel::date::timestamp;
use ron_kernel::inventory::{ChannelKind, ChannelSpec, Policy};
use ron_kernel::kernel::Service;
use ron_kernel::problem::{CorrId, push_json};
use ron_kernel::shutdown::{Phase, Shutdown};
use ron_kernel::sync::Limits;
use ron_kernel::task::TaskResult;
use std::fmt::{Display, Write as _};
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Lines that may wait to be written.
const CAPACITY: usize = 4096;
/// Lines written at one go.
const BATCH: usize = 512;
/// How long the writer lets lines gather before it looks again.
const GATHER: Duration = Duration::from_millis(5);
/// How often, during a drain, the writer looks whether more can come.
const LOOK: Duration = Duration::from_millis(10);

pub(crate) static ACCESS_LOG: ChannelSpec = ChannelSpec {
    service: "gateway",
    name: "access_log",
    kind: ChannelKind::Mpsc,
    capacity: CAPACITY,
    policy: Policy::RejectNew,
    producers: &["conn"],
    consumers: &["access_log"],
};

/// What was asked for, as far as it could be read.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) method: Method,
    pub(crate) uri: Uri,
    pub(crate) host: Option<HeaderValue>,
    pub(crate) version: Version,
}

/// A request and its answer.
#[derive(Debug)]
pub(crate) struct Record {
    /// When it came.
    pub(crate) at: SystemTime,
    pub(crate) corr: CorrId,
    pub(crate) head: Option<Head>,
    pub(crate) seen: Seen,
    /// What the indices in `seen` mean.
    pub(crate) snapshot: Arc<Snapshot>,
    pub(crate) secure: bool,
    pub(crate) status: u16,
    /// Empty: it was not refused.
    pub(crate) reason: &'static str,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    /// Until it had leave to run, or was refused.
    pub(crate) queued: Duration,
    /// From then to the head of the upstream's answer.
    pub(crate) upstream: Option<Duration>,
    pub(crate) total: Duration,
    /// The answer was given to its last byte.
    pub(crate) complete: bool,
}

/// Where the lines go; opened anew at each reload, so that a file that was moved away is let go.
#[derive(Debug)]
pub(crate) struct Sink {
    /// `None`: the node's own log.
    file: Option<Arc<File>>,
    format: AccessLogFormat,
}

impl Sink {
    /// A relative path is relative to `base`.
    pub(crate) fn open(settings: &AccessLogSettings, base: &Path) -> std::io::Result<Sink> {
        let wanted = settings.enabled && !settings.file.is_empty();
        let open = |name: &String| {
            // Lines name clients, so not everybody on the machine may read them.
            File::options().append(true).create(true).mode(0o640).open(base.join(name))
        };
        let file = wanted.then(|| open(&settings.file)).transpose()?.map(Arc::new);
        Ok(Sink { file, format: settings.format })
    }
}

#[derive(Debug)]
pub(crate) struct AccessLog {
    sender: Sender<Record>,
    sink: ArcSwap<Sink>,
    shutdown: Shutdown,
}

impl AccessLog {
    pub(crate) fn start(service: &Service, sink: Sink) -> Arc<AccessLog> {
        let (sender, receiver) =
            channel::queue(service.inventory(), &ACCESS_LOG, Limits::items(CAPACITY), Policy::RejectNew);
        let shutdown = service.shutdown().clone();
        let log = Arc::new(AccessLog { sender, sink: ArcSwap::from_pointee(sink), shutdown });
        let (own, writing, receiver) = (service.clone(), log.clone(), Arc::new(receiver));
        service.permanent("access_log", 0, move || write(own.clone(), writing.clone(), receiver.clone()));
        log
    }

    pub(crate) fn set_sink(&self, sink: Sink) {
        self.sink.store(Arc::new(sink));
    }

    /// Whether a request that was dropped now was cut by the shutdown.
    pub(crate) fn is_aborting(&self) -> bool {
        self.shutdown.phase() >= Phase::Aborting
    }

    /// Notes a request, unless the rules let it pass unsaid.
    pub(crate) fn note(&self, settings: &AccessLogSettings, record: Record) {
        if settings.wants(record.status, record.total, ron_kernel::random::unit) {
            // A full queue has counted it.
            let _ = self.sender.try_send(record);
        }
    }
}

impl AccessLogSettings {
    /// Errors and slow requests always; of the others a part.
    fn wants(&self, status: u16, total: Duration, chance: impl FnOnce() -> f64) -> bool {
        let slow = !self.always_slow.0.is_zero() && total >= self.always_slow.0;
        u64::from(status) >= self.always_status || slow || self.sample >= 1.0 || chance() < self.sample
    }
}

/// Writes lines until the service has ended and no more can come.
async fn write(service: Service, log: Arc<AccessLog>, receiver: Arc<Receiver<Record>>) -> TaskResult {
    let mut failing = false;
    loop {
        let first = tokio::select! {
            biased;
            first = receiver.recv() => first,
            () = last_look(&service) => receiver.try_recv(),
        };
        let Some(first) = first else { return Ok(()) };
        let sink = log.sink.load_full();
        let rest = std::iter::from_fn(|| receiver.try_recv()).take(BATCH - 1);
        let records = std::iter::once(first).chain(rest);
        if let Some(file) = sink.file.clone() {
            let mut text = String::with_capacity(16 << 10);
            records.for_each(|record| record.line().write(sink.format, &mut text));
            let written = tokio::task::spawn_blocking(move || (&*file).write_all(text.as_bytes())).await?;
            if let Err(error) = &written
                && !failing
            {
                // Once, not per line: the log that is told may lie on the same disk.
                tracing::error!(%error, "the access log cannot be written");
            }
            failing = written.is_err();
        } else {
            records.for_each(|record| record.line().trace());
        }
        // A wake-up and a write for each line would cost more than the lines do.
        if log.sender.depth() < BATCH {
            tokio::time::sleep(GATHER).await;
        }
    }
}

/// Resolves when the service drains and nothing is left that could be answered.
async fn last_look(service: &Service) {
    service.shutdown().draining().await;
    while service.tasks().live_scoped() > 0 {
        tokio::time::sleep(LOOK).await;
    }
}

/// A line being written, field by field, in either form.
struct Fields<'a> {
    out: &'a mut String,
    json: bool,
    /// What stands before the next field.
    before: &'static str,
}

impl Fields<'_> {
    fn name(&mut self, name: &str) {
        self.out.push_str(self.before);
        self.before = if self.json { "," } else { " " };
        let _ = if self.json { write!(self.out, "\"{name}\":") } else { write!(self.out, "{name}=") };
    }

    fn text(&mut self, name: &str, value: Option<&str>) {
        self.name(name);
        match value {
            Some(text) if self.json || !is_plain(text) => push_json(self.out, text),
            Some(text) => self.out.push_str(text),
            None => self.out.push_str(if self.json { "null" } else { "-" }),
        }
    }

    /// Numbers and flags, which no form quotes.
    fn plain(&mut self, name: &str, value: impl Display) {
        self.name(name);
        let _ = write!(self.out, "{value}");
    }

    fn millis(&mut self, name: &str, time: Option<Duration>) {
        match time {
            Some(time) => {
                let micros = time.as_micros();
                self.plain(name, format_args!("{}.{:03}", micros / 1000, micros % 1000));
            }
            None => self.text(name, None),
        }
    }
}

/// A record with everything named.
struct Line<'a> {
    record: &'a Record,
    client: Option<String>,
    method: Option<&'a str>,
    host: Option<String>,
    path: Option<&'a str>,
    names: Names<'a>,
    reason: Option<&'a str>,
    protocol: Option<&'a str>,
}

impl Record {
    fn line(&self) -> Line<'_> {
        let head = self.head.as_ref();
        let names = self.snapshot.names(&self.seen);
        let host = |head: &Head| {
            let field = head.host.as_ref().and_then(|value| value.to_str().ok());
            host_name(head.uri.authority().map(Authority::as_str).or(field).unwrap_or(""))
        };
        let protocol = |head: &Head| match head.version {
            Version::HTTP_10 => "HTTP/1.0",
            Version::HTTP_2 => "HTTP/2",
            _ => "HTTP/1.1",
        };
        Line {
            record: self,
            client: self.seen.client.map(|ip| ip.to_string()),
            method: head.map(|head| head.method.as_str()),
            host: head.map(host),
            // Without the query, which may hold secrets.
            path: head.map(|head| head.uri.path()),
            names: Names { upstream: names.upstream.filter(|_| self.upstream.is_some()), ..names },
            reason: Some(self.reason).filter(|reason| !reason.is_empty()),
            protocol: head.map(protocol),
        }
    }
}

impl Line<'_> {
    /// As a line of the file.
    fn write(&self, format: AccessLogFormat, out: &mut String) {
        let record = self.record;
        let json = format == AccessLogFormat::Json;
        let mut line = Fields { out, json, before: if json { "{" } else { "" } };
        let at = timestamp(record.at.duration_since(UNIX_EPOCH).unwrap_or_default());
        line.text("time", Some(&at));
        line.text("corr_id", Some(record.corr.as_str()));
        line.text("client", self.client.as_deref());
        line.text("method", self.method);
        line.text("host", self.host.as_deref());
        line.text("path", self.path);
        line.text("route", self.names.route);
        line.text("tenant", self.names.tenant);
        line.text("class", self.names.class);
        line.plain("status", record.status);
        line.text("reason", self.reason);
        line.plain("bytes_in", record.bytes_in);
        line.plain("bytes_out", record.bytes_out);
        line.millis("queue_ms", Some(record.queued));
        line.text("upstream", self.names.upstream);
        line.millis("upstream_ms", record.upstream);
        line.millis("total_ms", Some(record.total));
        line.text("protocol", self.protocol);
        line.plain("tls", record.secure);
        line.plain("complete", record.complete);
        out.push_str(if json { "}\n" } else { "\n" });
    }

    /// As an event of the node's log, which has a time and a format of its own.
    fn trace(&self) {
        let record = self.record;
        tracing::info!(
            target: "access",
            corr_id = record.corr.as_str(),
            client = self.client,
            method = self.method,
            host = self.host,
            path = self.path,
            route = self.names.route,
            tenant = self.names.tenant,
            class = self.names.class,
            status = record.status,
            reason = self.reason,
            bytes_in = record.bytes_in,
            bytes_out = record.bytes_out,
            queue_ms = record.queued.as_secs_f64() * 1000.0,
            upstream = self.names.upstream,
            upstream_ms = record.upstream.map(|time| time.as_secs_f64() * 1000.0),
            total_ms = record.total.as_secs_f64() * 1000.0,
            protocol = self.protocol,
            tls = record.secure,
            complete = record.complete,
            "access"
        );
    }
}

/// Whether a text can stand in a line without quotes.
fn is_plain(text: &str) -> bool {
    !text.is_empty()
        && text != "-"
        && text.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"\\=".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ron_kernel::units::Span;

    #[test]
    fn errors_and_slow_requests_are_always_told_and_the_rest_by_chance() {
        let rules = AccessLogSettings { sample: 0.25, ..AccessLogSettings::default() };
        let wants = |status, millis, chance| rules.wants(status, Duration::from_millis(millis), || chance);
        assert!(wants(200, 1, 0.2) && !wants(200, 1, 0.3));
        assert!(wants(500, 1, 0.9) && wants(503, 1, 0.9) && !wants(499, 1, 0.9));
        assert!(wants(200, 1000, 0.9) && !wants(200, 999, 0.9));
        let never_slow = AccessLogSettings { always_slow: Span::secs(0), ..rules };
        assert!(!never_slow.wants(200, Duration::from_secs(9), || 0.9));
        let all = AccessLogSettings { sample: 1.0, ..AccessLogSettings::default() };
        assert!(all.wants(200, Duration::ZERO, || unreachable!("nothing is left to chance")));
    }

    #[test]
    fn what_could_break_a_line_is_quoted() {
        for plain in ["a", "/a/b?c", "10.0.0.1", "GET"] {
            assert!(is_plain(plain), "{plain}");
        }
        for other in ["", "-", "a b", "a=b", "a\"b", "a\nb", "ä", "a\\"] {
            assert!(!is_plain(other), "{other}");
        }
    }
}
