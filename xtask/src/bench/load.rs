//! wrk and h2load, and what they say.

use super::peers::Server;
use super::process::{CLIENT_CORE, Cpu, rss_mib};
use std::path::Path;
use std::process::Command;

/// How to load a server.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Client<'a> {
    /// HTTP/1.1 in the clear. The script sets what is sent.
    Wrk { connections: u32, path: &'a str, script: &'a str },
    /// HTTP/1.1 over TLS.
    Tls { connections: u32 },
    /// HTTP/2 over TLS.
    H2 { connections: u32, streams: u32 },
    /// One statement, again and again, to a PostgreSQL server.
    Statements { connections: u32, sql: &'a str },
}

/// What one run showed. Times in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figures {
    /// Requests per second.
    pub(crate) rate: f64,
    /// MiB per second, if the client counts bytes.
    pub(crate) mib_rate: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    /// Processor time per request.
    pub(crate) user: f64,
    pub(crate) system: f64,
    /// Share of its core that the server used.
    pub(crate) busy: f64,
    pub(crate) rss_mib: f64,
    /// Answers other than 2xx and 3xx, over all.
    pub(crate) refused: f64,
}

impl Figures {
    pub(crate) fn cpu(&self) -> f64 {
        self.user + self.system
    }

    /// The median of each figure by itself.
    pub(crate) fn median(runs: &[Figures]) -> Figures {
        let of = |field: fn(&Figures) -> f64| {
            let mut values: Vec<f64> = runs.iter().map(field).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        Figures {
            rate: of(|run| run.rate),
            mib_rate: of(|run| run.mib_rate),
            p50: of(|run| run.p50),
            p99: of(|run| run.p99),
            user: of(|run| run.user),
            system: of(|run| run.system),
            busy: of(|run| run.busy),
            rss_mib: of(|run| run.rss_mib),
            refused: of(|run| run.refused),
        }
    }
}

/// A wrk script that sends this key.
pub(crate) fn with_key(key: &str) -> String {
    format!("wrk.headers[\"X-Api-Key\"] = \"{key}\"\n")
}

struct Counted {
    requests: f64,
    bytes: f64,
    refused: f64,
    seconds: f64,
    p50: f64,
    p99: f64,
}

/// Loads a server for a moment, so that its connections and caches are there.
pub(crate) fn warm_up(dir: &Path, server: &Server, client: Client<'_>) -> Option<()> {
    run(dir, server, client, 1).map(|_| ())
}

/// Loads a server for so long.
pub(crate) fn measure(dir: &Path, server: &Server, client: Client<'_>, seconds: u32) -> Option<Figures> {
    let before = Cpu::of(server.pid);
    let counted = run(dir, server, client, seconds)?;
    let used = Cpu::of(server.pid).since(before);
    let per_request = 1e6 / counted.requests.max(1.0);
    Some(Figures {
        rate: counted.requests / counted.seconds,
        mib_rate: counted.bytes / counted.seconds / f64::from(1 << 20),
        p50: counted.p50,
        p99: counted.p99,
        user: used.user * per_request,
        system: used.system * per_request,
        busy: used.total() / counted.seconds,
        rss_mib: rss_mib(server.pid),
        refused: counted.refused / counted.requests.max(1.0),
    })
}

fn run(dir: &Path, server: &Server, client: Client<'_>, seconds: u32) -> Option<Counted> {
    let counted = match client {
        Client::Wrk { connections, path, script } => {
            wrk(dir, &format!("http://{}{path}", server.http), connections, script, seconds)
        }
        Client::Tls { connections } => h2load(dir, server, &["--h1"], connections, seconds),
        Client::H2 { connections, streams } => {
            h2load(dir, server, &["-m", &streams.to_string()], connections, seconds)
        }
        Client::Statements { connections, sql } => pgbench(dir, server, connections, sql, seconds),
    };
    if counted.is_none() {
        println!("{}: the load could not be run", server.name);
    }
    counted
}

fn wrk(dir: &Path, url: &str, connections: u32, script: &str, seconds: u32) -> Option<Counted> {
    let done = "function done(summary, latency)\n\
        io.write(string.format(\"figures %d %d %d %d %d %d\\n\", summary.requests, summary.bytes, summary.errors.status, \
        summary.duration, latency:percentile(50), latency:percentile(99)))\nend\n";
    let path = dir.join("load.lua");
    std::fs::write(&path, format!("{script}{done}")).ok()?;
    let mut command = Command::new("taskset");
    command.args([
        "-c",
        CLIENT_CORE,
        "wrk",
        "-t1",
        &format!("-c{connections}"),
        &format!("-d{seconds}s"),
        "-s",
    ]);
    let output = command.arg(&path).arg(url).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| line.strip_prefix("figures "))?;
    let numbers: Vec<f64> = line.split(' ').filter_map(|number| number.parse().ok()).collect();
    let [requests, bytes, refused, micros, p50, p99] = numbers[..] else { return None };
    Some(Counted { requests, bytes, refused, seconds: micros / 1e6, p50, p99 })
}

/// Percentiles come from h2load's log, which has a line for each request: start, status, microseconds.
fn h2load(dir: &Path, server: &Server, args: &[&str], connections: u32, seconds: u32) -> Option<Counted> {
    let log = dir.join("h2load.log");
    let _ = std::fs::remove_file(&log);
    let mut command = Command::new("taskset");
    command.args(["-c", CLIENT_CORE, "h2load", "-t1", &format!("-c{connections}"), &format!("-D{seconds}")]);
    command.args(args).arg(format!("--log-file={}", log.display()));
    command.args(["-H", &format!("x-api-key: {}", super::peers::KEY)]);
    let output = command.arg(format!("https://{}/small", server.https)).output().ok()?;
    if !output.status.success() {
        return None;
    }
    let lines = std::fs::read_to_string(&log).ok()?;
    let rows: Vec<(u32, f64)> = lines
        .lines()
        .filter_map(|line| {
            let mut fields = line.split('\t').skip(1);
            Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
        })
        .collect();
    let mut micros: Vec<f64> = rows.iter().map(|row| row.1).collect();
    micros.sort_by(f64::total_cmp);
    let at = |percent: usize| micros.get(micros.len() * percent / 100).copied();
    let refused = rows.iter().filter(|row| !(200..400).contains(&row.0)).count();
    Some(Counted {
        requests: rows.len() as f64,
        bytes: 0.0,
        refused: refused as f64,
        seconds: f64::from(seconds),
        p50: at(50)?,
        p99: at(99)?,
    })
}

fn pgbench(dir: &Path, server: &Server, connections: u32, sql: &str, seconds: u32) -> Option<Counted> {
    let logs = tempfile::tempdir_in(dir).ok()?;
    std::fs::write(logs.path().join("statement.sql"), sql).ok()?;
    let (host, port) = server.http.rsplit_once(':')?;
    let (connections, length) = (connections.to_string(), seconds.to_string());
    let mut command = Command::new("taskset");
    command.args(["-c", CLIENT_CORE, "pgbench", "--no-vacuum", "--log", "--log-prefix", "took"]);
    command.args(["-h", host, "-p", port, "-U", "postgres", "-c", &connections, "-T", &length]);
    let output = command.args(["-f", "statement.sql", "postgres"]).current_dir(logs.path()).output().ok()?;
    if !output.status.success() {
        println!("{}", String::from_utf8_lossy(&output.stderr));
        return None;
    }
    let mut times: Vec<f64> = Vec::new();
    for log in std::fs::read_dir(logs.path()).ok()?.flatten() {
        if log.file_name().to_string_lossy().starts_with("took.") {
            let text = std::fs::read_to_string(log.path()).ok()?;
            times.extend(text.lines().filter_map(|line| line.split(' ').nth(2)?.parse::<f64>().ok()));
        }
    }
    times.sort_by(f64::total_cmp);
    let at = |percent: usize| times.get(times.len() * percent / 100).copied();
    let (p50, p99) = (at(50)?, at(99)?);
    let requests = times.len() as f64;
    Some(Counted { requests, bytes: 0.0, refused: 0.0, seconds: f64::from(seconds), p50, p99 })
}
