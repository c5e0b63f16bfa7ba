//! What only ron does: refusing by tenant, and keeping many tenants apart.

use super::compare::{report, rounds};
use super::load::{Client, with_key};
use super::peers::{self, KEY, Server};
use super::{Bench, table};
use crate::run::example;
use serde_json::{Map, Value, json};

/// What refusing costs beside proxying.
pub(super) fn reject(bench: &Bench) -> Option<Value> {
    let origin = peers::origin(&bench.dir)?;
    let tenants = peers::tenant(KEY, None) + &peers::tenant("limited", Some(1));
    let start = || peers::ron(&bench.binary, &bench.dir, &origin.http, &tenants);
    let (refusing, proxying) = (start(), start());
    let (limited, free) = (with_key("limited"), with_key(KEY));
    let client = |server: &Server| {
        let script = if server.pid == refusing.pid { &limited } else { &free };
        Client::Wrk { connections: 64, path: "/small", script }
    };
    let figures = rounds(bench, &[&refusing, &proxying], client)?;
    if figures[0].refused < 0.99 || figures[1].refused > 0.0 {
        println!("refused {:.4} and {:.4} of the requests", figures[0].refused, figures[1].refused);
        return None;
    }
    let title =
        "reject: 429 by the tenant's rate beside proxying, HTTP/1.1, 64 connections (goal: CPU <= 0.35)";
    Some(report(title, &["refused", "proxied"], &figures))
}

/// What a request costs with so many tenants, each sending in turn.
pub(super) fn tenants(bench: &Bench) -> Option<Value> {
    const COUNTS: [usize; 5] = [1, 10, 100, 1000, 10_000];
    let origin = peers::origin(&bench.dir)?;
    let start = |count: usize| {
        let all: String = (0..count).map(|n| peers::tenant(&format!("t{n}"), None)).collect();
        peers::ron(&bench.binary, &bench.dir, &origin.http, &all)
    };
    let servers = COUNTS.map(start);
    let scripts = COUNTS.map(round_robin);
    let client = |server: &Server| {
        let index = servers.iter().position(|known| known.pid == server.pid).unwrap_or(0);
        Client::Wrk { connections: 64, path: "/small", script: &scripts[index] }
    };
    let figures = rounds(bench, &servers.each_ref(), client)?;
    let mut rows = vec![table::row(&["tenants", "req/s", "p99 us", "CPU us/req", "to 1 tenant", "RSS MiB"])];
    let mut result = Map::new();
    for (count, of) in COUNTS.iter().zip(&figures) {
        if of.refused > 0.0 {
            println!("with {count} tenants {:.4} of the requests were refused", of.refused);
            return None;
        }
        let ratio = of.cpu() / figures[0].cpu();
        rows.push(vec![
            count.to_string(),
            format!("{:.0}", of.rate),
            format!("{:.0}", of.p99),
            format!("{:.2}", of.cpu()),
            format!("{ratio:.2}"),
            format!("{:.1}", of.rss_mib),
        ]);
        let one = json!({"cpu_us": of.cpu(), "ratio": ratio, "p99_us": of.p99, "rss_mib": of.rss_mib});
        result.insert(count.to_string(), one);
    }
    table::print("tenants: configured API keys, sent in turn, HTTP/1.1, 64 connections (goal: flat)", &rows);
    Some(result.into())
}

/// What finding out who is calling costs, by kind of credentials.
pub(super) fn tokens(_: &Bench) -> Option<Value> {
    let figures = example("svc-gateway", "tokens", &[])?;
    let of = |kind: &str| figures[kind].as_f64().unwrap_or(f64::NAN);
    let mut rows = vec![table::row(&["credentials", "us/request", "more than none"])];
    for (kind, micros) in figures.as_object()? {
        let micros = micros.as_f64()?;
        rows.push(vec![kind.clone(), format!("{micros:.2}"), format!("{:.2}", micros - of("none"))]);
    }
    table::print(
        "tokens: one look at who is calling, on one core; each request's token is checked anew, none is remembered",
        &rows,
    );
    Some(figures)
}

/// A wrk script whose requests are made beforehand, so that the client's work does not grow either.
fn round_robin(count: usize) -> String {
    format!(
        "local requests, n = {{}}, 0\n\
         function init(args)\n\
         for i = 0, {count} - 1 do requests[i] = wrk.format(nil, nil, {{[\"X-Api-Key\"] = \"t\" .. i}}) end\nend\n\
         function request()\nn = (n + 1) % {count}\nreturn requests[n]\nend\n"
    )
}
