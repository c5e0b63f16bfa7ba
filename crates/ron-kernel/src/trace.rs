//! Traces: W3C trace context in, a child out, and finished spans to a collector over OTLP/HTTP in JSON.
//!
//! Built with the feature `otlp` only. Spans wait in a bounded queue; when it is full, or the collector is away,
//! they are dropped and counted: a trace is never worth a request.

use crate::channel::{self, Receiver, Sender};
use crate::inventory::Policy;
use crate::kernel::Service;
use crate::metrics::Counter;
use crate::observe::SPANS;
use crate::random;
use crate::sync::Limits;
use crate::task::TaskResult;
use arc_swap::ArcSwap;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Spans sent in one call.
const BATCH: usize = 256;
/// How long spans are gathered.
const GATHER: Duration = Duration::from_millis(500);
/// How long the collector may take.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(3);

/// Which trace a request belongs to and which span of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Context {
    trace: u128,
    span: u64,
}

impl Context {
    /// The caller's context; anything malformed is as good as none (W3C Trace Context, 4.3).
    fn parse(headers: &HeaderMap) -> Option<Context> {
        let value = headers.get(TRACEPARENT)?.to_str().ok()?;
        let parts: Vec<&str> = value.split('-').collect();
        let [version, trace, span, flags] = parts[..] else { return None };
        let hex = |text: &str, len: usize| {
            text.len() == len && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        };
        if version != "00" || !hex(trace, 32) || !hex(span, 16) || !hex(flags, 2) {
            return None;
        }
        let context = Context {
            trace: u128::from_str_radix(trace, 16).ok()?,
            span: u64::from_str_radix(span, 16).ok()?,
        };
        (context.trace != 0 && context.span != 0).then_some(context)
    }
}

/// A request being traced.
#[derive(Debug)]
pub struct Span {
    name: &'static str,
    context: Context,
    parent: Option<u64>,
    begun: SystemTime,
    ended: SystemTime,
    attributes: Vec<(&'static str, String)>,
    failed: bool,
}

impl Span {
    /// What the next hop is told.
    pub fn traceparent(&self) -> HeaderValue {
        let text = format!("00-{:032x}-{:016x}-01", self.context.trace, self.context.span);
        HeaderValue::try_from(text).expect("hex digits and dashes are a valid header value")
    }

    pub fn attribute(&mut self, name: &'static str, value: impl Into<String>) {
        self.attributes.push((name, value.into()));
    }

    fn to_json(&self) -> Value {
        let nanos = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string();
        let attribute =
            |(name, value): &(&str, String)| json!({"key": name, "value": {"stringValue": value}});
        json!({
            "traceId": format!("{:032x}", self.context.trace),
            "spanId": format!("{:016x}", self.context.span),
            "parentSpanId": self.parent.map_or_else(String::new, |parent| format!("{parent:016x}")),
            "name": self.name,
            "kind": 2,
            "startTimeUnixNano": nanos(self.begun),
            "endTimeUnixNano": nanos(self.ended),
            "attributes": self.attributes.iter().map(attribute).collect::<Vec<_>>(),
            "status": {"code": if self.failed { 2 } else { 1 }},
        })
    }
}

/// Where finished spans go. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Tracer {
    sender: Sender<Span>,
    /// `host:port` of the collector; empty: tracing is off.
    collector: Arc<ArcSwap<String>>,
}

impl Tracer {
    /// Starts the exporter under the service `kernel`.
    pub fn start(service: &Service, collector: &str) -> Tracer {
        let limits = Limits::items(SPANS.capacity);
        let (sender, receiver) = channel::queue(service.inventory(), &SPANS, limits, Policy::RejectNew);
        let collector = Arc::new(ArcSwap::from_pointee(authority(collector)));
        let (running, receiver, target) = (service.clone(), Arc::new(receiver), collector.clone());
        service.permanent("trace_exporter", 0, move || {
            export(running.clone(), receiver.clone(), target.clone())
        });
        Tracer { sender, collector }
    }

    /// Changes the collector; empty turns tracing off.
    pub fn set_collector(&self, collector: &str) {
        self.collector.store(Arc::new(authority(collector)));
    }

    /// Begins a span for a request, as a child of the caller's if it has one; `None` while tracing is off.
    pub fn begin(&self, name: &'static str, headers: &HeaderMap) -> Option<Span> {
        if self.collector.load().is_empty() {
            return None;
        }
        let caller = Context::parse(headers);
        let fresh = || u128::from(random::u64()) << 64 | u128::from(random::u64() | 1);
        let context =
            Context { trace: caller.map_or_else(fresh, |caller| caller.trace), span: random::u64() | 1 };
        let now = SystemTime::now();
        let parent = caller.map(|caller| caller.span);
        Some(Span { name, context, parent, begun: now, ended: now, attributes: Vec::new(), failed: false })
    }

    pub fn end(&self, mut span: Span, failed: bool) {
        span.ended = SystemTime::now();
        span.failed = failed;
        // A full queue drops the span and counts it.
        let _ = self.sender.try_send(span);
    }
}

/// `host:port` of an `http://` URL, 4318 if it names no port.
fn authority(url: &str) -> String {
    let text = url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/');
    if text.is_empty() || text.contains(':') { text.to_owned() } else { format!("{text}:4318") }
}

async fn export(
    service: Service,
    receiver: Arc<Receiver<Span>>,
    collector: Arc<ArcSwap<String>>,
) -> TaskResult {
    let lost = service.counter(
        "trace_spans_lost_total",
        "Spans that did not reach the collector.",
        "cause",
        "export",
    );
    let mut batch = Vec::new();
    loop {
        let draining = tokio::select! {
            biased;
            () = service.shutdown().draining() => true,
            span = receiver.recv() => {
                batch.extend(span);
                tokio::time::sleep(GATHER).await;
                false
            }
        };
        while batch.len() < BATCH
            && let Some(span) = receiver.try_recv()
        {
            batch.push(span);
        }
        send(&mut batch, &collector.load(), &lost).await;
        if draining {
            return Ok(());
        }
    }
}

async fn send(batch: &mut Vec<Span>, collector: &str, lost: &Counter) {
    let spans: Vec<Value> = batch.iter().map(Span::to_json).collect();
    batch.clear();
    if spans.is_empty() {
        return;
    }
    let count = spans.len() as u64;
    let name = json!({"key": "service.name", "value": {"stringValue": "ron"}});
    let body = json!({"resourceSpans": [{
        "resource": {"attributes": [name]},
        "scopeSpans": [{"scope": {"name": "ron"}, "spans": spans}],
    }]});
    let sent = tokio::time::timeout(EXPORT_TIMEOUT, post(collector, &body.to_string())).await;
    if !matches!(sent, Ok(Ok(true))) {
        lost.add(count);
        tracing::debug!(collector, ?sent, "spans lost");
    }
}

/// Posts to the collector; whether it took the spans.
async fn post(collector: &str, body: &str) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect(collector).await?;
    let head = format!(
        "POST /v1/traces HTTP/1.1\r\nHost: {collector}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    let mut status = [0; 12];
    stream.read_exact(&mut status).await?;
    Ok(status.starts_with(b"HTTP/1.1 2"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(value: &'static str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, HeaderValue::from_static(value));
        headers
    }

    #[test]
    fn a_callers_context_is_continued_and_a_malformed_one_ignored() {
        let good = headers("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
        let context = Context::parse(&good).unwrap();
        assert_eq!(
            (context.trace, context.span),
            (0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c, 0xb7ad_6b71_6920_3331)
        );
        for bad in [
            "",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        ] {
            assert_eq!(Context::parse(&headers(bad)), None, "{bad}");
        }
    }

    #[test]
    fn the_collector_is_named_with_or_without_a_port() {
        assert_eq!(authority("http://c:99/"), "c:99");
        assert_eq!(authority("http://c"), "c:4318");
        assert_eq!(authority(""), "");
    }
}
