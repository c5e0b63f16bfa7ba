//! The gateway under overload, upstream faults, killed tasks and reloads for as long as one likes, and what must
//! hold when it is over.

use crate::client::{Client, get};
use crate::load::{Flow, Load, Outcome, Sample, percentile};
use crate::node::{Node, api_key};
use crate::random::Random;
use crate::slots::{Fault, SlotOrigin};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A request's budget; its answer, or the end of its connection, is due by then.
const DEADLINE: Duration = Duration::from_secs(2);
const DRAIN: Duration = Duration::from_secs(3);
/// What may wait in the gateway, in seconds of the upstream's work.
const QUEUE: f64 = 0.25;
/// Each with its share of the load. The first asks for most, the last one writes.
const TENANTS: [(&str, f64); 4] = [("a", 0.7), ("b", 0.13), ("c", 0.13), ("d", 0.04)];
/// Clients that do not wait for the answer.
const LEAVES: f64 = 0.02;
/// Kinds of permanent task that are killed. Further apart than the restarts that the kernel forgives.
const KINDS: [&str; 4] = ["worker", "scheduler", "sweeper", "listener"];
const KILL_EVERY: f64 = 15.0;
const RELOAD_EVERY: f64 = 5.0;
/// A run's first part does not count when memory is compared.
const WARM_UP: f64 = 0.2;

/// How to soak.
#[derive(Clone, Debug)]
pub struct Plan {
    pub binary: PathBuf,
    pub length: Duration,
    /// Requests the upstream works on at a time, and how long each takes.
    pub slots: usize,
    pub service: Duration,
    /// Offered load over the upstream's capacity.
    pub multiple: f64,
    /// How long after its deadline an answer may reach the client.
    pub slack: Duration,
    /// Bar for the 95th percentile of good answers.
    pub p95_max: Duration,
    pub seed: u64,
}

impl Plan {
    /// Requests per second that the upstream can answer, faults aside.
    fn capacity(&self) -> f64 {
        self.slots as f64 / self.service.as_secs_f64()
    }
}

/// Something that had to hold.
#[derive(Clone, Debug)]
pub struct Check {
    pub what: &'static str,
    pub good: bool,
    pub seen: String,
}

/// Runs the plan, saying a line a minute, and returns what held and what did not.
pub fn soak(plan: &Plan, mut say: impl FnMut(&str)) -> Vec<Check> {
    let seed = plan.seed;
    let origin = SlotOrigin::start(plan.slots, plan.service, move |n| fault(seed, n));
    let node = Node::start_binary(&plan.binary, &["gateway"], &config(plan, &origin, 0));
    let fds_before = node.fds();
    let load = Load::new(&node.gateway(), DEADLINE + plan.slack, seed);
    let sending = {
        let (load, flows, length) = (load.clone(), flows(plan), plan.length);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a thread can have a runtime").block_on(load.run(&flows, length));
        })
    };
    let mut run = Run::new(plan, &node, &origin, &load);
    while !sending.is_finished() {
        run.second();
        if run.seconds.is_multiple_of(60) {
            say(&run.line());
        }
    }
    sending.join().expect("the load does not panic");
    run.collect();
    let mut checks = run.checks();
    load.close();
    let mut fds = 0;
    let closed = within(Duration::from_secs(10), || {
        fds = node.fds();
        fds <= fds_before + origin.open()
    });
    checks.push(Check {
        what: "no file descriptor is left over",
        good: closed,
        seen: format!("{fds_before} at first, {fds} at last, of which upstream {}", origin.open()),
    });
    checks.push(shutdown(plan, node));
    checks
}

/// A run under way.
struct Run<'a> {
    plan: &'a Plan,
    node: &'a Node,
    origin: &'a SlotOrigin,
    load: &'a Arc<Load>,
    random: Random,
    begun: Instant,
    seconds: u64,
    next_kill: f64,
    next_reload: f64,
    killed: u64,
    reloads: u64,
    reloads_refused: u64,
    rss: Vec<f64>,
    good: Vec<Duration>,
    /// Index of the first good answer of this minute, for its line.
    minute: usize,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    answered: u64,
    refused: u64,
    failed: u64,
    cut: u64,
    ended: u64,
    left: u64,
    hung: u64,
    unsent: u64,
    latest: Duration,
}

impl Counts {
    fn add(&mut self, sample: &Sample) {
        self.latest = self.latest.max(sample.latency);
        let count = match sample.outcome {
            Outcome::Answered(200) => &mut self.answered,
            Outcome::Answered(429 | 503) => &mut self.refused,
            Outcome::Answered(_) => &mut self.failed,
            Outcome::Cut(_) => &mut self.cut,
            Outcome::Ended => &mut self.ended,
            Outcome::Left => &mut self.left,
            Outcome::Hung => &mut self.hung,
            Outcome::Unsent => &mut self.unsent,
        };
        *count += 1;
    }

    /// Requests that the gateway got.
    fn sent(&self) -> u64 {
        self.answered + self.refused + self.failed + self.cut + self.ended + self.left + self.hung
    }
}

impl<'a> Run<'a> {
    fn new(plan: &'a Plan, node: &'a Node, origin: &'a SlotOrigin, load: &'a Arc<Load>) -> Run<'a> {
        Run {
            plan,
            node,
            origin,
            load,
            random: Random::new(plan.seed),
            begun: Instant::now(),
            seconds: 0,
            next_kill: 3.0,
            next_reload: 2.0,
            killed: 0,
            reloads: 0,
            reloads_refused: 0,
            rss: Vec::new(),
            good: Vec::new(),
            minute: 0,
            counts: Counts::default(),
        }
    }

    /// Waits for the next second and does what is due in it.
    fn second(&mut self) {
        self.seconds += 1;
        let next = self.begun + Duration::from_secs(self.seconds);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        self.rss.push(self.node.rss_mib());
        self.collect();
        let now = self.begun.elapsed().as_secs_f64();
        // The last seconds are quiet, so that what was killed is back when readiness is asked.
        if now + 3.0 > self.plan.length.as_secs_f64() {
            return;
        }
        if now > self.next_kill {
            self.next_kill = now + KILL_EVERY * (1.0 + self.random.unit());
            self.kill();
        }
        if now > self.next_reload {
            self.next_reload = now + RELOAD_EVERY * (1.0 + self.random.unit());
            self.reload();
        }
    }

    fn collect(&mut self) {
        for sample in self.load.take() {
            self.counts.add(&sample);
            if sample.outcome == Outcome::Answered(200) {
                self.good.push(sample.latency);
            }
        }
    }

    fn kill(&mut self) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an index of a short list"
        )]
        let kind = KINDS[(self.random.unit() * KINDS.len() as f64) as usize];
        let fraction = self.random.unit();
        let body = format!("{{\"service\":\"gateway\",\"kind\":\"{kind}\",\"fraction\":{fraction}}}");
        let answer = self.node.admin_post("/debug/tasks/kill", &body);
        self.killed += answer.json()["killed"].as_u64().unwrap_or(0);
    }

    fn reload(&mut self) {
        self.reloads += 1;
        self.node.write_config(&config(self.plan, self.origin, self.reloads));
        if self.node.admin_post("/admin/reload", "").status != 200 {
            self.reloads_refused += 1;
        }
    }

    fn line(&mut self) -> String {
        let mut recent = self.good.split_off(self.minute);
        let (p50, p95) = (percentile(&mut recent, 0.5), percentile(&mut recent, 0.95));
        self.good.append(&mut recent);
        self.minute = self.good.len();
        let Counts { answered, refused, failed, cut, ended, left, hung, .. } = self.counts;
        format!(
            "{:>3} min: good {answered}, refused {refused}, failed {failed}, cut {cut}, ended {ended}, left {left}, \
             hung {hung}; this minute p50 {} ms, p95 {} ms; {:.0} MiB, {} fds; {} killed, {} reloads",
            self.seconds / 60,
            p50.as_millis(),
            p95.as_millis(),
            self.rss.last().copied().unwrap_or(0.0),
            self.node.fds(),
            self.killed,
            self.reloads,
        )
    }

    /// What can be said while the node still runs.
    fn checks(&mut self) -> Vec<Check> {
        let (node, counts) = (self.node, &self.counts);
        let limit = DEADLINE + self.plan.slack;
        let mut counted = 0.0;
        // A request whose client left may take a moment longer.
        let adds_up = within(DEADLINE, || {
            counted = sum(node, "http_requests_total{service=\"gateway\"");
            counted == counts.sent() as f64
        });
        let mut panicked = 0.0;
        let panics = within(DEADLINE, || {
            panicked = sum(node, "tasks_panicked_total{");
            panicked == self.killed as f64
        });
        let unprovoked = node
            .log()
            .lines()
            .filter(|line| line.contains("panic") && !line.contains("killed by request"))
            .count();
        let idle = within(DEADLINE, || {
            let queued = node.metric("queue_depth{service=\"gateway\",queue=\"work\"}");
            node.metric("inflight_requests{service=\"gateway\"}") + queued == 0.0
        });
        let p95 = percentile(&mut self.good, 0.95);
        let (first, last) = thirds(&self.rss);
        // Overload is over only when it has been for a while.
        let mut readyz = get(&node.admin(), "/readyz");
        let ready = within(Duration::from_secs(10), || {
            readyz = get(&node.admin(), "/readyz");
            readyz.status == 200
        });
        let check = |what, good, seen| Check { what, good, seen };
        vec![
            check(
                "every request is answered, or its connection ends, in time",
                counts.hung == 0 && counts.unsent == 0 && counts.latest <= limit,
                format!("{counts:?}, bar {limit:?}"),
            ),
            check(
                "requests are counted once each",
                adds_up,
                format!("{} sent, {counted} counted", counts.sent()),
            ),
            check("nothing is left running or waiting", idle, "inflight_requests and queue_depth".to_owned()),
            check(
                "nothing panics but what was killed",
                panics && unprovoked == 0,
                format!("{} killed, {panicked} counted, {unprovoked} other lines in the log", self.killed),
            ),
            check(
                "reloads succeed",
                self.reloads > 0 && self.reloads_refused == 0,
                format!("{} reloads, {} refused", self.reloads, self.reloads_refused),
            ),
            check(
                "memory is flat",
                last <= first * 1.1 + 4.0,
                format!("{first:.1} MiB in the first third after the warm-up, {last:.1} MiB in the last"),
            ),
            check(
                "good answers come soon",
                !self.good.is_empty() && p95 <= self.plan.p95_max,
                format!("p95 {p95:?} of {}, bar {:?}", self.good.len(), self.plan.p95_max),
            ),
            check("it is ready in the end", ready, readyz.text()),
        ]
    }
}

/// A request in flight is answered, and the process ends well and in time.
fn shutdown(plan: &Plan, mut node: Node) -> Check {
    let mut client = Client::connect(&node.gateway()).expect("it still listens");
    let sent = client.send(b"GET / HTTP/1.1\r\nHost: soak\r\nX-Api-Key: b\r\n\r\n");
    let begun = Instant::now();
    let running = within(plan.slack, || node.metric("inflight_requests{service=\"gateway\"}") > 0.0);
    node.signal("TERM");
    let told = Instant::now();
    let answer = client.read_answer("GET").map(|answer| answer.status);
    let exit = node.wait();
    let took = told.elapsed();
    Check {
        what: "shutdown is clean and in time",
        // The last answer may be one of the upstream's faults; if it came before the signal, it proves nothing more.
        good: sent.is_ok() && exit == 0 && took <= DRAIN + plan.slack,
        seen: format!(
            "exit {exit} after {took:?}; a request {} at the signal got {answer:?} after {:?}",
            if running { "in flight" } else { "already answered" },
            begun.elapsed()
        ),
    }
}

fn fault(seed: u64, n: u64) -> Fault {
    let mut random = Random::new(seed ^ n.wrapping_mul(0x2545_f491_4f6c_dd1d));
    match random.unit() {
        x if x < 0.02 => Fault::Slow,
        x if x < 0.04 => Fault::Reset,
        x if x < 0.05 => Fault::Status(500),
        x if x < 0.06 => Fault::Status(503),
        x if x < 0.08 => Fault::Cut,
        _ => Fault::None,
    }
}

fn flows(plan: &Plan) -> Vec<Flow> {
    let flow = |(index, (key, share)): (usize, &(&str, f64))| {
        let (method, body) =
            if index + 1 == TENANTS.len() { ("POST", "x".repeat(3000)) } else { ("GET", String::new()) };
        let request = format!(
            "{method} /{key} HTTP/1.1\r\nHost: soak\r\nX-Api-Key: {key}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        Flow {
            request: request.into_bytes().into(),
            rate: plan.capacity() * plan.multiple * share,
            leaves: LEAVES,
        }
    };
    TENANTS.iter().enumerate().map(flow).collect()
}

/// The configuration after so many reloads: each time another quantum and timeout, and a tenant that comes and goes.
fn config(plan: &Plan, origin: &SlotOrigin, reloads: u64) -> String {
    let tenant = |id: &str, quantum: u64| {
        format!("[[gateway.tenants]]\nid = \"{id}\"\nquantum = {quantum}\nkeys = [\"{}\"]\n", api_key(id))
    };
    let guest = if reloads % 2 == 1 { tenant("guest", 1) } else { String::new() };
    let tenants: String = TENANTS.iter().map(|(id, _)| tenant(id, 1 + reloads % 3)).collect();
    let (deadline, drain) = (DEADLINE.as_millis() - u128::from(reloads % 2), DRAIN.as_secs());
    format!(
        "[node]\ndanger_ok = true\ndrain_deadline = \"{drain}s\"\n[admin]\nlisten = \"127.0.0.1:0\"\n\
         [gateway]\nlisten = \"127.0.0.1:0\"\nmax_conns_per_ip = 4096\nrequest_timeout = \"{deadline}ms\"\n\
         [gateway.auth]\nmode = \"api_key\"\n[gateway.quotas]\nglobal_rps = 1000000\nper_ip_rps = 1000000\n\
         [gateway.fair_queue]\nwork_capacity = {:.0}\nworkers = 4\n{guest}{tenants}\
         [[gateway.upstreams]]\nname = \"o\"\nservers = [\"{}\"]\nmax_inflight = {}\nbreaker = {{ open = \"1s\" }}\n\
         [[gateway.routes]]\npath = \"/*\"\nupstream = \"o\"\n",
        plan.capacity() * QUEUE,
        origin.url(),
        plan.slots,
    )
}

/// The sum over all series that begin so.
fn sum(node: &Node, series: &str) -> f64 {
    let page = get(&node.admin(), "/metrics").text();
    let value = |line: &str| line.strip_prefix(series)?.rsplit(' ').next()?.parse::<f64>().ok();
    page.lines().filter_map(value).sum()
}

/// The means of the first and the last third of what follows the warm-up.
fn thirds(rss: &[f64]) -> (f64, f64) {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index of a list")]
    let warm = &rss[(rss.len() as f64 * WARM_UP) as usize..];
    let third = (warm.len() / 3).max(1).min(warm.len());
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len().max(1) as f64;
    (mean(&warm[..third]), mean(&warm[warm.len() - third..]))
}

/// Whether a condition comes to hold within this time.
fn within(limit: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    loop {
        if holds() {
            return true;
        }
        if begun.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
