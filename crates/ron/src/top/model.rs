//! From two looks to what is shown: rates by difference, rows in order. Pure.

use super::sample::{Behind, Sample, Series};
use crate::table::{list, text};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// A count, and how fast it grew between two looks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rate {
    pub(crate) total: f64,
    /// None at the first look.
    pub(crate) per_second: Option<f64>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Model {
    pub(crate) version: String,
    pub(crate) ready: bool,
    pub(crate) degraded: bool,
    pub(crate) missing: Vec<String>,
    pub(crate) services: Vec<Service>,
    pub(crate) queues: Vec<Queue>,
    pub(crate) refusals: Vec<Refusal>,
    pub(crate) routes: Vec<Route>,
    pub(crate) tasks: Vec<Tasks>,
    pub(crate) tenants: Vec<Tenant>,
    pub(crate) upstreams: Vec<Upstream>,
    pub(crate) peers: Vec<Peer>,
    /// Lines of a service that are neither of a queue nor of a request: name, value, rate.
    pub(crate) overlay: Vec<Fact>,
    pub(crate) registry: Vec<Fact>,
    pub(crate) edge: Vec<Fact>,
    /// Whether something is not shown for want of the admin token.
    pub(crate) token_wanted: bool,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Service {
    pub(crate) name: String,
    pub(crate) state: String,
    pub(crate) requests: Rate,
    pub(crate) refused: Rate,
    pub(crate) inflight: Option<f64>,
    pub(crate) waiting: f64,
    pub(crate) connections: Option<f64>,
    /// Of the requests since the look before, in seconds.
    pub(crate) p50: Option<f64>,
    pub(crate) p99: Option<f64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Queue {
    pub(crate) service: String,
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) policy: String,
    pub(crate) instances: f64,
    pub(crate) depth: f64,
    pub(crate) capacity: f64,
    pub(crate) dropped: Rate,
}

#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) service: String,
    pub(crate) reason: String,
    pub(crate) count: Rate,
}

#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) service: String,
    pub(crate) route: String,
    pub(crate) method: String,
    pub(crate) status: String,
    pub(crate) count: Rate,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Tasks {
    pub(crate) service: String,
    pub(crate) kind: String,
    pub(crate) running: u64,
    pub(crate) others: u64,
    pub(crate) restarts: u64,
    pub(crate) last_exit: String,
}

#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    pub(crate) id: String,
    pub(crate) class: String,
    pub(crate) quantum: String,
    pub(crate) queued: f64,
    pub(crate) share: f64,
    pub(crate) served: Rate,
}

#[derive(Clone, Debug)]
pub(crate) struct Upstream {
    pub(crate) name: String,
    pub(crate) breaker: String,
    pub(crate) inflight: f64,
    pub(crate) max_inflight: f64,
    pub(crate) healthy: usize,
    pub(crate) servers: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) node: String,
    pub(crate) address: String,
    pub(crate) state: String,
    pub(crate) direction: String,
    pub(crate) rtt_us: Option<f64>,
    pub(crate) queued: Option<f64>,
    pub(crate) error: String,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fact {
    pub(crate) name: &'static str,
    pub(crate) value: String,
    pub(crate) per_second: Option<f64>,
}

/// Two looks at one node.
struct Looks<'a> {
    now: &'a Sample,
    before: Option<&'a Sample>,
}

impl Model {
    pub(crate) fn of(now: &Sample, before: Option<&Sample>) -> Model {
        let looks = Looks { now, before };
        let version = &now.version;
        Model {
            version: text(&version["version"]),
            ready: now.ready["ready"] == true,
            degraded: now.ready["degraded"] == true,
            missing: list(&now.ready["missing"]).iter().map(text).collect(),
            services: looks.services(),
            queues: looks.queues(),
            refusals: looks.refusals(),
            routes: looks.routes(),
            tasks: tasks(&now.tasks),
            tenants: looks.tenants(),
            upstreams: now.gateway.said().map(upstreams).unwrap_or_default(),
            peers: now.overlay.said().map(peers).unwrap_or_default(),
            overlay: looks.overlay(),
            registry: looks.registry(),
            edge: looks.edge(),
            token_wanted: [&now.gateway, &now.overlay].iter().any(|part| matches!(part, Behind::Refused)),
        }
    }

    /// The same for programs.
    pub(crate) fn to_json(&self) -> Value {
        let rate = |rate: &Rate| json!({"total": rate.total, "per_second": rate.per_second});
        let facts = |facts: &[Fact]| -> Value {
            let said = |fact: &Fact| {
                (fact.name.to_owned(), json!({"value": fact.value, "per_second": fact.per_second}))
            };
            Value::Object(facts.iter().map(said).collect())
        };
        json!({
            "version": self.version, "ready": self.ready, "degraded": self.degraded, "missing": self.missing,
            "services": self.services.iter().map(|row| json!({
                "service": row.name, "state": row.state, "requests": rate(&row.requests), "refused": rate(&row.refused),
                "inflight": row.inflight, "waiting": row.waiting, "connections": row.connections,
                "p50_seconds": row.p50, "p99_seconds": row.p99,
            })).collect::<Vec<_>>(),
            "queues": self.queues.iter().map(|row| json!({
                "service": row.service, "name": row.name, "kind": row.kind, "policy": row.policy,
                "instances": row.instances, "depth": row.depth, "capacity": row.capacity, "dropped": rate(&row.dropped),
            })).collect::<Vec<_>>(),
            "refusals": self.refusals.iter().map(|row| json!({
                "service": row.service, "reason": row.reason, "count": rate(&row.count),
            })).collect::<Vec<_>>(),
            "routes": self.routes.iter().map(|row| json!({
                "service": row.service, "route": row.route, "method": row.method, "status": row.status,
                "count": rate(&row.count),
            })).collect::<Vec<_>>(),
            "tasks": self.tasks.iter().map(|row| json!({
                "service": row.service, "kind": row.kind, "running": row.running, "others": row.others,
                "restarts": row.restarts, "last_exit": row.last_exit,
            })).collect::<Vec<_>>(),
            "tenants": self.tenants.iter().map(|row| json!({
                "id": row.id, "class": row.class, "quantum": row.quantum, "queued": row.queued, "share": row.share,
                "served_cost": rate(&row.served),
            })).collect::<Vec<_>>(),
            "upstreams": self.upstreams.iter().map(|row| json!({
                "name": row.name, "breaker": row.breaker, "inflight": row.inflight, "max_inflight": row.max_inflight,
                "healthy": row.healthy, "servers": row.servers,
            })).collect::<Vec<_>>(),
            "sessions": self.peers.iter().map(|row| json!({
                "node": row.node, "address": row.address, "state": row.state, "direction": row.direction,
                "rtt_us": row.rtt_us, "queued": row.queued, "error": row.error,
            })).collect::<Vec<_>>(),
            "overlay": facts(&self.overlay), "registry": facts(&self.registry), "edge": facts(&self.edge),
            "token_wanted": self.token_wanted,
        })
    }
}

impl Looks<'_> {
    fn seconds(&self) -> Option<f64> {
        let passed = self.now.at.checked_sub(self.before?.at)?.as_secs_f64();
        (passed > 0.0).then_some(passed)
    }

    /// How much one series has grown. One that fell began anew at zero, and so did one that was not there.
    fn growth(&self, name: &str, written: &str, value: f64) -> Option<f64> {
        let before = self.before?.metrics.one(name, written).unwrap_or(0.0);
        Some(if value < before { value } else { value - before })
    }

    fn rate(&self, name: &str, wanted: impl Fn(&Series) -> bool) -> Rate {
        let series = self.now.metrics.all(name).filter(|(_, series)| wanted(series));
        let (mut total, mut grown) = (0.0, 0.0);
        for (written, series) in series {
            total += series.value;
            grown += self.growth(name, written, series.value).unwrap_or(0.0);
        }
        Rate { total, per_second: self.seconds().map(|seconds| grown / seconds) }
    }

    /// A counter that came with an answer as JSON: the metric is the same count.
    fn row_rate(&self, name: &str, labels: &[(&str, &str)]) -> Rate {
        self.rate(name, |series| labels.iter().all(|(label, value)| series.label(label) == *value))
    }

    fn services(&self) -> Vec<Service> {
        let states = self.now.ready["services"].as_object();
        let row = |(name, state): (&String, &Value)| {
            let of = |series: &Series| series.label("service") == name;
            let [p50, p99] =
                [0.5, 0.99].map(|quantile| self.quantile("request_latency_seconds", quantile, of));
            Service {
                name: name.clone(),
                state: text(state),
                requests: self.rate("http_requests_total", of),
                refused: self.rate("rejected_total", of),
                inflight: self.now.metrics.sum("inflight_requests", of),
                waiting: self.now.metrics.sum("queue_depth", of).unwrap_or(0.0),
                connections: self.now.metrics.sum("connections_open", of),
                p50,
                p99,
            }
        };
        states.into_iter().flatten().map(row).collect()
    }

    /// A quantile of what was observed between the looks, or since the start at the first; none if nothing was.
    fn quantile(&self, name: &str, quantile: f64, wanted: impl Fn(&Series) -> bool) -> Option<f64> {
        let family = format!("{name}_bucket");
        let mut counts: BTreeMap<u64, f64> = BTreeMap::new();
        for (written, series) in self.now.metrics.all(&family).filter(|(_, series)| wanted(series)) {
            let bound: f64 = series.label("le").parse().ok()?;
            let grown = self.growth(&family, written, series.value).unwrap_or(series.value);
            // Bounds are not negative, so their bits have their order.
            *counts.entry(bound.to_bits()).or_default() += grown;
        }
        let buckets: Vec<(f64, f64)> =
            counts.into_iter().map(|(bound, count)| (f64::from_bits(bound), count)).collect();
        within(&buckets, quantile)
    }

    fn queues(&self) -> Vec<Queue> {
        let row = |channel: &Value| {
            let [service, name, kind, policy] =
                ["service", "name", "kind", "policy"].map(|key| text(&channel[key]));
            let dropped = self.row_rate("queue_dropped_total", &[("service", &service), ("queue", &name)]);
            let [instances, depth, capacity] =
                ["instances", "depth", "capacity"].map(|key| number(&channel[key]));
            Queue { service, name, kind, policy, instances, depth, capacity, dropped }
        };
        let mut rows: Vec<Queue> = list(&self.now.channels["channels"]).iter().map(row).collect();
        // A watch holds one value and is never full.
        let order =
            |row: &Queue| (row.kind == "watch", -fraction(row), -row.dropped.per_second.unwrap_or(0.0));
        rows.sort_by(|a, b| order(a).partial_cmp(&order(b)).unwrap_or(std::cmp::Ordering::Equal));
        rows
    }

    fn refusals(&self) -> Vec<Refusal> {
        let all = self.now.metrics.all("rejected_total").filter(|(_, series)| series.value > 0.0);
        let row = |(_, series): (&str, &Series)| {
            let (service, reason) = (series.label("service").to_owned(), series.label("reason").to_owned());
            let count = self.row_rate("rejected_total", &[("service", &service), ("reason", &reason)]);
            Refusal { service, reason, count }
        };
        let mut rows: Vec<Refusal> = all.map(row).collect();
        rows.sort_by(|a, b| busier(&a.count, &b.count));
        rows
    }

    fn routes(&self) -> Vec<Route> {
        let row = |(written, series): (&str, &Series)| {
            let [service, route, method, status] =
                ["service", "route", "method", "status"].map(|label| series.label(label).to_owned());
            let grown = self.growth("http_requests_total", written, series.value);
            let per_second = grown.zip(self.seconds()).map(|(grown, seconds)| grown / seconds);
            Route { service, route, method, status, count: Rate { total: series.value, per_second } }
        };
        let mut rows: Vec<Route> = self.now.metrics.all("http_requests_total").map(row).collect();
        rows.sort_by(|a, b| busier(&a.count, &b.count));
        rows
    }

    fn tenants(&self) -> Vec<Tenant> {
        let Some(status) = self.now.gateway.said() else { return Vec::new() };
        let row = |tenant: &Value| {
            let [id, class, quantum] = ["id", "class", "quantum"].map(|key| text(&tenant[key]));
            let served = self.row_rate("fq_served_cost_total", &[("tenant", &id)]);
            let [queued, share] = ["queued", "share"].map(|key| number(&tenant[key]));
            Tenant { id, class, quantum, queued, share, served }
        };
        list(&status["tenants"]).iter().map(row).collect()
    }

    fn fact(&self, name: &'static str, metric: &str, labels: &[(&str, &str)]) -> Fact {
        let Rate { total, per_second } = self.row_rate(metric, labels);
        Fact { name, value: format!("{total:.0}"), per_second }
    }

    fn gauge(&self, name: &'static str, metric: &str) -> Fact {
        let value = self.now.metrics.sum(metric, |_| true);
        let value = value.map_or("-".to_owned(), |value| format!("{value:.0}"));
        Fact { name, value, per_second: None }
    }

    fn runs(&self, service: &str) -> bool {
        !self.now.ready["services"][service].is_null()
    }

    fn overlay(&self) -> Vec<Fact> {
        if !self.runs("overlay") {
            return Vec::new();
        }
        vec![
            self.gauge("sessions", "sessions_active"),
            self.fact("opened", "session_open_total", &[]),
            self.fact("closed", "session_close_total", &[]),
            self.fact("frames in", "gossip_frames_total", &[("dir", "rx")]),
            self.fact("frames out", "gossip_frames_total", &[("dir", "tx")]),
            self.fact("delivered", "gossip_messages_total", &[("result", "delivered")]),
            self.fact("duplicates", "gossip_messages_total", &[("result", "duplicate")]),
            self.fact("shed", "gossip_messages_total", &[("result", "shed")]),
            self.fact("frames refused", "frame_reject_total", &[]),
        ]
    }

    fn registry(&self) -> Vec<Fact> {
        if !self.runs("registry") {
            return Vec::new();
        }
        let plain = |name, value| Fact { name, value, per_second: None };
        let mut facts = vec![self.gauge("head", "registry_head_version")];
        if let Some(head) = &self.now.head {
            facts.push(plain("hash", text(&head["hash"])));
            facts.push(plain("checkpoint size", text(&head["checkpoint"]["size"])));
        }
        facts.push(self.gauge("checkpoint age (s)", "registry_checkpoint_age_seconds"));
        facts.push(self.gauge("verified up to", "registry_verified_version"));
        facts.push(self.gauge("pending proposals", "registry_pending_proposals"));
        facts.push(self.fact("commits", "commit_latency_seconds_count", &[]));
        for (name, quantile) in [("commit p50", 0.5), ("commit p99", 0.99)] {
            facts.push(plain(name, span(self.quantile("commit_latency_seconds", quantile, |_| true))));
        }
        facts.push(self.gauge("stream readers", "stream_clients"));
        facts.push(self.fact("stream lags", "stream_lagged_total", &[]));
        facts
    }

    fn edge(&self) -> Vec<Fact> {
        if !self.runs("edge") {
            return Vec::new();
        }
        let cached = |name, result| self.fact(name, "edge_cache_total", &[("result", result)]);
        let scrubbed = self.now.metrics.one("edge_scrub_ratio", "").unwrap_or(0.0);
        vec![
            cached("hits", "hit"),
            cached("misses", "miss"),
            cached("fills", "fill"),
            cached("stale", "stale"),
            cached("collapsed", "collapsed"),
            self.gauge("stored bytes", "edge_cas_bytes"),
            Fact { name: "scrubbed", value: format!("{:.0} %", scrubbed * 100.0), per_second: None },
            self.fact("fill timeouts", "io_timeouts_total", &[("service", "edge"), ("op", "fill")]),
            self.fact("fill retries", "backoff_retries_total", &[("op", "live_fill")]),
        ]
    }
}

/// How full a queue is.
pub(crate) fn fraction(queue: &Queue) -> f64 {
    // A watch holds its one value for ever, and is never full.
    let room = queue.capacity * queue.instances.max(1.0);
    if queue.kind == "watch" || room <= 0.0 { 0.0 } else { queue.depth / room }
}

/// The faster first, then the larger.
fn busier(a: &Rate, b: &Rate) -> std::cmp::Ordering {
    let key = |rate: &Rate| (-rate.per_second.unwrap_or(0.0), -rate.total);
    key(a).partial_cmp(&key(b)).unwrap_or(std::cmp::Ordering::Equal)
}

/// Where a quantile lies among cumulative buckets, between the bounds of the one it falls into.
fn within(buckets: &[(f64, f64)], quantile: f64) -> Option<f64> {
    let total = buckets.last().map(|(_, count)| *count).filter(|total| *total > 0.0)?;
    let rank = quantile * total;
    let at = buckets.iter().position(|(_, count)| *count >= rank)?;
    let (bound, count) = buckets[at];
    let (lower, below) = if at == 0 { (0.0, 0.0) } else { buckets[at - 1] };
    // What lies beyond the last bound is at least that.
    if bound.is_infinite() || count <= below {
        return Some(lower);
    }
    Some(lower + (bound - lower) * ((rank - below) / (count - below)).clamp(0.0, 1.0))
}

/// Seconds as people read them.
pub(crate) fn span(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".to_owned(),
        Some(seconds) if seconds < 0.0095 => format!("{:.1} ms", seconds * 1e3),
        Some(seconds) if seconds < 0.9995 => format!("{:.0} ms", seconds * 1e3),
        Some(seconds) => format!("{seconds:.1} s"),
    }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

fn tasks(said: &Value) -> Vec<Tasks> {
    let mut rows: BTreeMap<(String, String), Tasks> = BTreeMap::new();
    for task in list(&said["tasks"]) {
        let (service, kind) = (text(&task["service"]), text(&task["kind"]));
        let row = rows.entry((service.clone(), kind.clone())).or_insert_with(|| Tasks {
            service,
            kind,
            ..Tasks::default()
        });
        if task["state"] == "running" {
            row.running += 1;
        } else {
            row.others += 1;
        }
        row.restarts += task["restarts"].as_u64().unwrap_or(0);
        if let Some(exit) = task["last_exit"].as_str() {
            row.last_exit = crate::table::visible(exit);
        }
    }
    let mut rows: Vec<Tasks> = rows.into_values().collect();
    // Those in trouble first; sorting is stable, so the others stay by name.
    rows.sort_by_key(|row| std::cmp::Reverse((row.others, row.restarts)));
    rows
}

fn upstreams(status: &Value) -> Vec<Upstream> {
    let row = |upstream: &Value| {
        let servers = list(&upstream["servers"]);
        let healthy = servers.iter().filter(|server| server["healthy"] == true).count();
        let [inflight, max_inflight] = ["inflight", "max_inflight"].map(|key| number(&upstream[key]));
        let (name, breaker) = (text(&upstream["name"]), text(&upstream["breaker"]));
        Upstream { name, breaker, inflight, max_inflight, healthy, servers: servers.len() }
    };
    list(&status["upstreams"]).iter().map(row).collect()
}

fn peers(said: &Value) -> Vec<Peer> {
    let or_empty = |value: &Value| if value.is_null() { String::new() } else { text(value) };
    let row = |peer: &Value| Peer {
        node: text(&peer["node"]),
        address: text(&peer["address"]),
        state: text(&peer["state"]),
        direction: or_empty(&peer["direction"]),
        rtt_us: peer["rtt_us"].as_f64(),
        queued: peer["queued_frames"].as_f64(),
        error: or_empty(&peer["error"]),
    };
    list(&said["peers"]).iter().map(row).collect()
}
