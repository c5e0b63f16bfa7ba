//! The same load on ron, nginx and HAProxy.

use super::load::{Client, Figures, measure, warm_up, with_key};
use super::peers::{self, KEY, Server};
use super::{Bench, table};
use serde_json::{Map, Value, json};

pub(super) fn h1(bench: &Bench) -> Option<Value> {
    let script = with_key(KEY);
    let client = Client::Wrk { connections: 64, path: "/small", script: &script };
    compare(bench, "h1: HTTP/1.1, 64 connections, 1 KiB", client)
}

pub(super) fn h2(bench: &Bench) -> Option<Value> {
    let client = Client::H2 { connections: 8, streams: 8 };
    compare(bench, "h2: HTTP/2 over TLS, 8 connections of 8 streams, 1 KiB", client)
}

pub(super) fn tls(bench: &Bench) -> Option<Value> {
    compare(bench, "tls: HTTP/1.1 over TLS 1.3, 64 connections, 1 KiB", Client::Tls { connections: 64 })
}

/// How much later an answer comes through a proxy than from the origin.
pub(super) fn latency(bench: &Bench) -> Option<Value> {
    let (origin, proxies) = all(bench)?;
    let servers: Vec<&Server> = std::iter::once(&origin).chain(&proxies).collect();
    let script = with_key(KEY);
    let client = Client::Wrk { connections: 1, path: "/small", script: &script };
    let figures = alternate(bench, &servers, |_| client)?;
    let mut rows = vec![table::row(&["", "p50 us", "p99 us", "added p50 us"])];
    let mut result = Map::new();
    for (server, of) in servers.iter().zip(&figures) {
        let added = of.p50 - figures[0].p50;
        rows.push(vec![
            server.name.to_owned(),
            format!("{:.0}", of.p50),
            format!("{:.0}", of.p99),
            format!("{added:.0}"),
        ]);
        let one = json!({"p50_us": of.p50, "p99_us": of.p99, "added_p50_us": added});
        result.insert(server.name.to_owned(), one);
    }
    table::print("latency: one connection, 1 KiB, beside the origin alone", &rows);
    Some(result.into())
}

pub(super) fn stream(bench: &Bench) -> Option<Value> {
    let (_origin, proxies) = all(bench)?;
    let servers: Vec<&Server> = proxies.iter().collect();
    let script = with_key(KEY);
    let client = Client::Wrk { connections: 8, path: "/big", script: &script };
    let figures = alternate(bench, &servers, |_| client)?;
    let per_mib = |of: &Figures| of.busy * 1e6 / of.mib_rate;
    let mut rows = vec![table::row(&["", "MiB/s", "CPU us/MiB", "core %", "RSS MiB"])];
    let mut result = Map::new();
    for (server, of) in servers.iter().zip(&figures) {
        rows.push(vec![
            server.name.to_owned(),
            format!("{:.0}", of.mib_rate),
            format!("{:.0}", per_mib(of)),
            format!("{:.0}", of.busy * 100.0),
            format!("{:.1}", of.rss_mib),
        ]);
        let one =
            json!({"mib_per_second": of.mib_rate, "cpu_us_per_mib": per_mib(of), "rss_mib": of.rss_mib});
        result.insert(server.name.to_owned(), one);
    }
    for (peer, of) in servers.iter().zip(&figures).skip(1) {
        let (rate, cpu) = (figures[0].mib_rate / of.mib_rate, per_mib(&figures[0]) / per_mib(of));
        rows.push(vec![format!("ron/{}", peer.name), format!("{rate:.2}"), format!("{cpu:.2}")]);
        result.insert(format!("ron/{}", peer.name), json!({"mib_per_second": rate, "cpu": cpu}));
    }
    table::print("stream: 8 connections, 10 MiB", &rows);
    Some(result.into())
}

fn compare(bench: &Bench, title: &str, client: Client<'_>) -> Option<Value> {
    let (_origin, proxies) = all(bench)?;
    let servers: Vec<&Server> = proxies.iter().collect();
    let figures = alternate(bench, &servers, |_| client)?;
    let names: Vec<&str> = servers.iter().map(|server| server.name).collect();
    Some(report(title, &names, &figures))
}

/// The origin and the three proxies, ron first.
fn all(bench: &Bench) -> Option<(Server, Vec<Server>)> {
    let origin = peers::origin(&bench.dir)?;
    let ron = peers::ron(&bench.binary, &bench.dir, &origin.http, &peers::tenant(KEY, None));
    let proxies = vec![ron, peers::nginx_proxy(&bench.dir, &origin)?, peers::haproxy(&bench.dir, &origin)?];
    Some((origin, proxies))
}

/// Rounds of one run each; the medians by server. Answers that are no success make a comparison worthless.
pub(super) fn alternate<'a>(
    bench: &Bench,
    servers: &[&Server],
    client: impl Fn(&Server) -> Client<'a>,
) -> Option<Vec<Figures>> {
    let figures = rounds(bench, servers, client)?;
    for (server, of) in servers.iter().zip(&figures) {
        if of.refused > 0.0 {
            println!("{} refused {:.2} % of its requests", server.name, of.refused * 100.0);
            return None;
        }
    }
    Some(figures)
}

/// Rounds of one run each; the medians by server.
pub(super) fn rounds<'a>(
    bench: &Bench,
    servers: &[&Server],
    client: impl Fn(&Server) -> Client<'a>,
) -> Option<Vec<Figures>> {
    for server in servers {
        warm_up(&bench.dir, server, client(server))?;
    }
    let mut runs = vec![Vec::new(); servers.len()];
    for _ in 0..bench.rounds {
        for (server, runs) in servers.iter().zip(&mut runs) {
            runs.push(measure(&bench.dir, server, client(server), bench.seconds)?);
        }
    }
    Some(runs.iter().map(|runs| Figures::median(runs)).collect())
}

/// A table with a row for each, and what the first is to each other.
pub(super) fn report(title: &str, names: &[&str], figures: &[Figures]) -> Value {
    let columns = ["", "req/s", "p50 us", "p99 us", "CPU us/req", "user", "system", "core %", "RSS MiB"];
    let mut rows = vec![table::row(&columns)];
    let mut result = Map::new();
    for (name, of) in names.iter().zip(figures) {
        let [rate, p50, p99] = [of.rate, of.p50, of.p99].map(|value| format!("{value:.0}"));
        let [cpu, user, system] = [of.cpu(), of.user, of.system].map(|value| format!("{value:.2}"));
        let (busy, rss) = (format!("{:.0}", of.busy * 100.0), format!("{:.1}", of.rss_mib));
        rows.push(vec![(*name).to_owned(), rate, p50, p99, cpu, user, system, busy, rss]);
        let one = json!({
            "requests_per_second": of.rate, "p50_us": of.p50, "p99_us": of.p99, "cpu_us": of.cpu(),
            "cpu_user_us": of.user, "cpu_system_us": of.system, "core": of.busy, "rss_mib": of.rss_mib,
            "refused": of.refused,
        });
        result.insert((*name).to_owned(), one);
    }
    for (name, of) in names.iter().zip(figures).skip(1) {
        let first = &figures[0];
        let pair = format!("{}/{name}", names[0]);
        let ratios = [
            ("requests_per_second", first.rate / of.rate),
            ("p50", first.p50 / of.p50),
            ("p99", first.p99 / of.p99),
            ("cpu", first.cpu() / of.cpu()),
            ("cpu_user", first.user / of.user),
            ("cpu_system", first.system / of.system),
        ];
        let shown = ratios.iter().map(|(_, ratio)| format!("{ratio:.2}"));
        rows.push(std::iter::once(pair.clone()).chain(shown).collect());
        result.insert(pair, ratios.iter().map(|(key, ratio)| ((*key).to_owned(), json!(ratio))).collect());
    }
    table::print(title, &rows);
    result.into()
}
