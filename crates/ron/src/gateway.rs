//! `ron gateway …`: asks a running node and prints what it says.

use crate::Usage;
use crate::cli::GatewayCommand;
use crate::client::{Admin, Answer, Target};
use crate::commands::print;
use crate::table::{aligned, list, pairs, row, text};
use serde_json::{Map, Value, json};
use std::process::ExitCode;

pub(crate) fn run(command: GatewayCommand) -> anyhow::Result<ExitCode> {
    match command {
        GatewayCommand::Status { target } => show(&target, "GET", "/gateway/status", "", status),
        GatewayCommand::Routes { target } => show(&target, "GET", "/gateway/routes", "", routes),
        GatewayCommand::Reload { target } => {
            let done = show(&target, "POST", "/admin/reload", "", reloaded)?;
            let Answer { status, body } = Admin::find(&target)?.ask("GET", "/gateway/status", "")?;
            // A node without a gateway has no shares to show.
            if target.json || status != 200 {
                Ok(done)
            } else {
                print(&format!("\n{}", shares(&body).trim_end()))
            }
        }
        GatewayCommand::Explain { method, asked, headers, client, target } => {
            let question =
                json!({"method": method, "url": asked, "headers": fields(&headers)?, "client": client});
            show(&target, "POST", "/gateway/explain", &question.to_string(), explained)
        }
    }
}

/// Asks, and prints the answer as it came or for people.
fn show(
    target: &Target,
    method: &str,
    path: &str,
    body: &str,
    human: fn(&Value) -> String,
) -> anyhow::Result<ExitCode> {
    let Answer { status, body } = Admin::find(target)?.ask(method, path, body)?;
    if target.json {
        print(&body.to_string())?;
    }
    if status != 200 {
        let problems =
            body["problems"].as_array().into_iter().flatten().map(|line| format!("\n  {}", text(line)));
        anyhow::bail!("{}{}", text(&body["detail"]), problems.collect::<String>());
    }
    if target.json { Ok(ExitCode::SUCCESS) } else { print(human(&body).trim_end()) }
}

/// `Name: value` arguments as an object; a name that comes twice has a list.
fn fields(headers: &[String]) -> Result<Value, Usage> {
    let mut fields = Map::new();
    for header in headers {
        let (name, value) = header
            .split_once(':')
            .filter(|(name, _)| !name.is_empty())
            .ok_or_else(|| Usage(format!("-H {header}: expected 'Name: value'")))?;
        let values = fields.entry(name.to_lowercase()).or_insert_with(|| json!([]));
        values.as_array_mut().expect("only lists are put in").push(value.trim().into());
    }
    Ok(fields.into())
}

fn status(body: &Value) -> String {
    let of = |used: &Value, all: &Value| format!("{} of {}", text(used), text(all));
    let mut out = pairs(&[
        ("waiting", of(&body["queue"]["depth"], &body["queue"]["capacity"])),
        ("in flight", of(&body["inflight"], &body["max_inflight"])),
        ("degraded", if body["degraded"] == true { "yes: writes are shed" } else { "no" }.to_owned()),
    ]);
    let mut upstreams = vec![row(["UPSTREAM", "BREAKER", "IN FLIGHT", "RETRIES LEFT"])];
    let mut servers = vec![row(["UPSTREAM", "SERVER", "STATE"])];
    for upstream in list(&body["upstreams"]) {
        let (name, inflight) =
            (text(&upstream["name"]), of(&upstream["inflight"], &upstream["max_inflight"]));
        upstreams.push(vec![
            name.clone(),
            text(&upstream["breaker"]),
            inflight,
            text(&upstream["retries_left"]),
        ]);
        for server in list(&upstream["servers"]) {
            let state = if server["healthy"] == true { "healthy" } else { "unhealthy" };
            servers.push(vec![name.clone(), text(&server["address"]), state.to_owned()]);
        }
    }
    for table in [aligned(&upstreams), aligned(&servers), shares(body)] {
        out += &format!("\n{table}");
    }
    out
}

/// Each tenant's part of the queue, as it is from now on.
fn shares(body: &Value) -> String {
    let mut tenants = vec![row(["TENANT", "CLASS", "QUANTUM", "WAITING", "SHARE"])];
    for tenant in list(&body["tenants"]) {
        tenants.push(["id", "class", "quantum", "queued", "share"].map(|key| text(&tenant[key])).into());
    }
    aligned(&tenants)
}

fn routes(body: &Value) -> String {
    let mut rows =
        vec![row(["PATH", "HOSTS", "METHODS", "UPSTREAM", "TIMEOUT", "AUTH", "CLASS", "BODY MAX", "COST"])];
    for route in list(&body["routes"]) {
        let any = |key: &str, none: &str| {
            let words: Vec<String> = list(&route[key]).iter().map(text).collect();
            if words.is_empty() { none.to_owned() } else { words.join(",") }
        };
        let class = Some(text(&route["class"])).filter(|class| !class.is_empty());
        rows.push(vec![
            text(&route["path"]),
            any("hosts", "*"),
            any("methods", "*"),
            text(&route["upstream"]),
            text(&route["timeout"]),
            text(&route["auth"]),
            class.unwrap_or_else(|| "-".to_owned()),
            text(&route["max_body_bytes"]),
            text(&route["cost"]),
        ]);
    }
    aligned(&rows)
}

fn reloaded(body: &Value) -> String {
    let changed: Vec<String> = list(&body["changed"]).iter().map(text).collect();
    if changed.is_empty() {
        "nothing changed".to_owned()
    } else {
        format!("changed:\n  {}", changed.join("\n  "))
    }
}

fn explained(body: &Value) -> String {
    let mut out = Vec::new();
    if body["admitted"] == true {
        out.push(("admitted", "yes".to_owned()));
    } else {
        let [status, reason, detail] = ["status", "reason", "detail"].map(|key| text(&body[key]));
        out.push(("admitted", format!("no: {status} {reason}, {detail}")));
    }
    if !body["route"].is_null() {
        let (path, index) = (text(&body["route"]["path"]), text(&body["route"]["index"]));
        // What `ron up` adds stands in no file.
        let own = body["upstream"].as_str().is_some_and(|name| name.starts_with("node."));
        let place = if own { "of the node itself".to_owned() } else { format!("gateway.routes[{index}]") };
        out.push(("route", format!("{path} ({place})")));
    }
    let known = [
        ("upstream", "upstream", ""),
        ("breaker", "breaker", ""),
        ("client", "client", ""),
        ("class", "class", ""),
        ("tenant", "tenant", ""),
        ("deadline", "deadline_ms", " ms"),
        ("body max", "max_body_bytes", " bytes"),
        ("cost", "cost", ""),
    ];
    let known = known.into_iter().filter(|(_, key, _)| !body[key].is_null());
    out.extend(known.map(|(name, key, unit)| (name, text(&body[key]) + unit)));
    for quota in list(&body["quotas"]) {
        let [name, rate, burst] = ["name", "per_second", "burst"].map(|key| text(&quota[key]));
        out.push(("quota", format!("{name}: {rate} per second, {burst} at once")));
    }
    pairs(&out)
}
