//! What ten thousand idle connections cost.

use super::peers::{self, KEY, Server};
use super::process::rss_mib;
use super::{Bench, table};
use ron_testkit::Client;
use serde_json::{Map, Value, json};

const CONNECTIONS: u32 = 10_000;

pub(super) fn run(bench: &Bench) -> Option<Value> {
    let origin = peers::origin(&bench.dir)?;
    let ron = peers::ron(&bench.binary, &bench.dir, &origin.http, &peers::tenant(KEY, None));
    let nginx = peers::nginx_proxy(&bench.dir, &origin)?;
    let mut rows = vec![table::row(&["", "RSS before MiB", "RSS MiB", "KiB/connection"])];
    let mut result = Map::new();
    for server in [&ron, &nginx] {
        let before = rss_mib(server.pid);
        let held = match hold(server) {
            Ok(held) => held,
            Err(error) => {
                println!("{}: {CONNECTIONS} connections cannot be held: {error}", server.name);
                return None;
            }
        };
        let after = rss_mib(server.pid);
        let each = (after - before) * 1024.0 / f64::from(CONNECTIONS);
        rows.push(vec![
            server.name.to_owned(),
            format!("{before:.1}"),
            format!("{after:.1}"),
            format!("{each:.1}"),
        ]);
        let one = json!({"rss_before_mib": before, "rss_mib": after, "kib_per_connection": each});
        result.insert(server.name.to_owned(), one);
        drop(held);
    }
    table::print("idle: 10,000 connections, each after one request (goal: 200 MiB)", &rows);
    Some(result.into())
}

/// Connections that have had one answer each and are asked nothing more.
fn hold(server: &Server) -> std::io::Result<Vec<Client>> {
    (0..CONNECTIONS)
        .map(|_| {
            let mut client = Client::connect(&server.http)?;
            let answer = client.request("GET", "/small", &[("X-Api-Key", KEY)], b"")?;
            if answer.status == 200 { Ok(client) } else { Err(std::io::Error::other(answer.text())) }
        })
        .collect()
}
