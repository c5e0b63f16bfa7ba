//! The overlay's own numbers.

use oap::NodeId;
use oap::gossip::{Ledger, Outcome};
use ron_kernel::kernel::Service;
use ron_kernel::metrics::{Counter, Counts, Family, Histogram};
use std::sync::Arc;

/// Every code of `frame_reject_total`, shown from the beginning.
const REJECTS: [&str; 9] = [
    "frame_too_large",
    "malformed",
    "bad_version",
    "bad_flags",
    "cap_on_non_start",
    "sequence",
    "unknown_app",
    "busy",
    "draining",
];

#[derive(Debug)]
pub(crate) struct Numbers {
    pub(crate) opened: Counter,
    pub(crate) closed: Arc<Family<Counter, 1>>,
    pub(crate) rejects: Arc<Family<Counter, 1>>,
    pub(crate) failures: Arc<Family<Counter, 1>>,
    pub(crate) handshake_timeouts: Counter,
    pub(crate) backpressure: Arc<Family<Counter, 1>>,
    pub(crate) hops: Counts,
    pub(crate) delivery: Histogram,
    pub(crate) config_updates: Counter,
    pub(crate) lagged: Counter,
    pub(crate) paused: Counter,
    pub(crate) closed_door: Counter,
    pub(crate) read_timeouts: Counter,
    pub(crate) write_timeouts: Counter,
    pub(crate) connect_timeouts: Counter,
    pub(crate) handshake_io_timeouts: Counter,
    pub(crate) redials: Counter,
    pub(crate) busy: Arc<Family<Counter, 3>>,
}

impl Numbers {
    pub(crate) fn new(service: &Service) -> Numbers {
        let metrics = service.metrics();
        let plain = |name, help| metrics.family::<Counter, 0>(name, help, []).with([]);
        let rejects: Arc<Family<Counter, 1>> = metrics.family(
            "frame_reject_total",
            "Frames refused, by the code that was answered.",
            ["reason"],
        );
        REJECTS.iter().for_each(|reason| drop(rejects.with([reason])));
        Numbers {
            opened: plain("session_open_total", "Sessions opened."),
            closed: metrics.family("session_close_total", "Sessions that ended, by why.", ["reason"]),
            rejects,
            failures: metrics.family(
                "handshake_failures_total",
                "Connections that did not become a session, by why.",
                ["reason"],
            ),
            handshake_timeouts: plain("handshake_timeouts_total", "Handshakes that took too long."),
            backpressure: metrics.family(
                "backpressure_events_total",
                "Publications that waited for room until their deadline, by the first hex digit of the full peer's hash.",
                ["peer_bucket"],
            ),
            hops: metrics.family("delivery_hops", "Hops that messages came over.", []).with([]),
            delivery: metrics
                .family("delivery_seconds", "Time from publication, by the publisher's clock.", [])
                .with([]),
            config_updates: plain("config_update_total", "Configurations taken over by the overlay."),
            lagged: plain("subscriber_lagged_total", "Messages that a local subscriber was too slow for."),
            paused: plain(
                "reads_paused_total",
                "Times that a peer was not read on at once, since its frames waited for the engine.",
            ),
            closed_door: plain(
                "accepts_paused_total",
                "Times that new connections were left waiting, since max_conns were open.",
            ),
            read_timeouts: service.io_timeout("read"),
            write_timeouts: service.io_timeout("write"),
            connect_timeouts: service.io_timeout("connect"),
            handshake_io_timeouts: service.io_timeout("handshake"),
            redials: service.counter("backoff_retries_total", "Calls tried again.", "op", "connect"),
            busy: metrics.family(
                "busy_rejections_total",
                "Work refused because a queue or a share was full.",
                ["service", "endpoint", "queue"],
            ),
        }
    }

    /// A frame that was refused with this code.
    pub(crate) fn reject(&self, code: &str) {
        self.rejects.with([code]).inc();
    }
}

/// What is known of gossip since the beginning, for computed metrics.
pub(crate) fn expose(service: &Service, ledger: impl Fn() -> Arc<Ledger> + Send + Sync + Clone + 'static) {
    let metrics = service.metrics();
    let read = ledger.clone();
    metrics.computed("gossip_frames_total", "Gossip frames, by direction.", "counter", move |rows| {
        let ledger = read();
        rows.row(&[("dir", "rx")], ledger.frames_in);
        rows.row(&[("dir", "tx")], ledger.frames_out);
    });
    let read = ledger.clone();
    let help = "Messages that came, by what became of them.";
    metrics.computed("gossip_messages_total", help, "counter", move |rows| {
        let ledger = read();
        for outcome in
            [Outcome::Delivered, Outcome::Duplicate, Outcome::Invalid, Outcome::Expired, Outcome::Shed]
        {
            rows.row(&[("result", outcome.name())], ledger.outcome(outcome));
        }
    });
    let read = ledger.clone();
    let help = "Duplicates for each message that was new.";
    metrics.computed("gossip_duplicate_ratio", help, "gauge", move |rows| {
        let ledger = read();
        let (new, again) = (ledger.outcome(Outcome::Delivered), ledger.outcome(Outcome::Duplicate));
        #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
        rows.row(&[], if new == 0 { 0.0 } else { again as f64 / new as f64 });
    });
    let help = "Frames and announcements that were shed, by queue, lane and cause.";
    metrics.computed("gossip_shed_total", help, "counter", move |rows| {
        for (queue, lane, cause, count) in ledger().shed() {
            rows.row(&[("queue", queue.name()), ("lane", lane.name()), ("cause", cause.name())], count);
        }
    });
}

/// The first hex digit of a node's hash: few enough to be a label.
pub(crate) fn bucket(node: NodeId) -> &'static str {
    const DIGITS: [&str; 16] =
        ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "a", "b", "c", "d", "e", "f"];
    DIGITS[usize::from(blake3::hash(&node.0).as_bytes()[0] >> 4)]
}
