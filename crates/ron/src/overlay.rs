//! `ron overlay …`: publish, follow, look at peers.

use crate::Usage;
use crate::cli::OverlayCommand;
use crate::client::{Admin, Target};
use crate::commands::print;
use crate::table::{aligned, list, pairs, row, text};
use anyhow::Context as _;
use ron_kernel::units::Span;
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::SocketAddr;
use std::process::ExitCode;
use svc_overlay::Topic;

pub(crate) fn run(command: OverlayCommand) -> anyhow::Result<ExitCode> {
    match command {
        OverlayCommand::Pub { topic, text, lines, wait, target } => {
            let payload = if text == "-" { read_input()? } else { text.into_bytes() };
            let publish = if lines { publish_lines } else { publish };
            publish(&topic, &payload, wait, &target)
        }
        OverlayCommand::Sub { topic, target } => follow(&topic, &target),
        OverlayCommand::Peers { target } => {
            let answer = Admin::find(&target)?.ask("GET", "/overlay/peers", "")?;
            anyhow::ensure!(answer.status == 200, "{}", text(&answer.body["detail"]));
            print(if target.json { answer.body.to_string() } else { peers(&answer.body) }.trim_end())
        }
    }
}

fn read_input() -> anyhow::Result<Vec<u8>> {
    let mut payload = Vec::new();
    std::io::stdin().read_to_end(&mut payload).context("cannot read standard input")?;
    Ok(payload)
}

/// Messages in one request at most, as the node has it.
const MESSAGES_MAX: usize = 128;

/// Publishes each line, many to a request; an error says how far it came.
fn publish_lines(topic: &str, input: &[u8], wait: Option<Span>, target: &Target) -> anyhow::Result<ExitCode> {
    let input = std::str::from_utf8(input).context("lines must be text; without --lines anything goes")?;
    let lines: Vec<String> = input.lines().map(|line| json!({"payload": line}).to_string()).collect();
    let wait = wait.map(|wait| format!("{}ms", wait.0.as_millis()));
    let mut fields = vec![("Content-Type", "application/x-ndjson")];
    fields.extend(wait.iter().map(|wait| ("Request-Timeout", wait.as_str())));
    let (admin, mut published) = (Admin::find(target)?, 0);
    for batch in lines.chunks(MESSAGES_MAX) {
        let answer = admin.send("POST", &path(topic)?, &fields, batch.join("\n").as_bytes())?;
        if target.json {
            print(&answer.body.to_string())?;
        }
        let why = text(&answer.body["detail"]);
        let why = if answer.status == 202 { "no peer has room for the next" } else { &why };
        published += answer.body["accepted"].as_u64().unwrap_or(0);
        let whole = answer.body["accepted"].as_u64() == Some(batch.len() as u64);
        anyhow::ensure!(whole, "{published} of {} messages are published: {why}", lines.len());
    }
    if target.json { Ok(ExitCode::SUCCESS) } else { print(&format!("{published} messages are published")) }
}

fn publish(topic: &str, payload: &[u8], wait: Option<Span>, target: &Target) -> anyhow::Result<ExitCode> {
    let wait = wait.map(|wait| format!("{}ms", wait.0.as_millis()));
    let fields: Vec<_> = wait.iter().map(|wait| ("Request-Timeout", wait.as_str())).collect();
    let answer = Admin::find(target)?.send("POST", &path(topic)?, &fields, payload)?;
    if target.json {
        print(&answer.body.to_string())?;
    }
    anyhow::ensure!(answer.status == 202, "{}", text(&answer.body["detail"]));
    if target.json {
        return Ok(ExitCode::SUCCESS);
    }
    let [id, queued, lazy, refused] = ["id", "queued", "lazy", "refused"].map(|key| text(&answer.body[key]));
    print(&format!("{id}  pushed to {queued}, announced to {lazy}, no room at {refused}"))
}

fn path(topic: &str) -> anyhow::Result<String> {
    let topic = Topic::parse(topic).ok_or_else(|| {
        Usage(format!("{topic:?} is no topic: it has 1 to 128 of a-z, 0-9, '.', '_', '/' and '-'"))
    })?;
    Ok(format!("/overlay/topics/{topic}"))
}

/// Prints until the node ends the stream, which it does when it shuts down.
fn follow(topic: &str, target: &Target) -> anyhow::Result<ExitCode> {
    let stream = BufReader::new(Admin::find(target)?.stream(&path(topic)?)?);
    let mut event = String::new();
    for line in stream.lines() {
        let line = line.context("the node's stream broke off")?;
        if let Some(name) = line.strip_prefix("event: ") {
            name.clone_into(&mut event);
        }
        let Some(data) = line.strip_prefix("data: ") else { continue };
        let said: Value = serde_json::from_str(data).context("the node sent what is no JSON")?;
        if event == "lagged" {
            eprintln!("ron: too slow for {} messages", text(&said["missed"]));
        } else if target.json {
            print(data)?;
        } else {
            let payload = if said["payload"].is_null() { &said["payload_base64"] } else { &said["payload"] };
            let [id, origin, topic, hops] = ["id", "origin", "topic", "hops"].map(|key| text(&said[key]));
            print(&format!("{id}  {origin}  {topic}  {hops}  {}", text(payload)))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn peers(body: &Value) -> String {
    let own = format!("{}@{}", text(&body["self"]["node"]), text(&body["self"]["address"]));
    let address = body["self"]["address"].as_str().and_then(|address| address.parse::<SocketAddr>().ok());
    let mut out = pairs(&[("this node", own)]);
    if address.is_some_and(|address| address.ip().is_unspecified()) {
        out += "others cannot reach that address: set overlay.advertise to one that they can\n";
    }
    let mut rows = vec![row([
        "NODE",
        "ADDRESS",
        "STATE",
        "DIRECTION",
        "RTT",
        "SCORE",
        "QUEUED",
        "POST-QUANTUM",
        "ERROR",
    ])];
    for peer in list(&body["peers"]) {
        let or_dash = |value: &Value| if value.is_null() { "-".to_owned() } else { text(value) };
        let rtt =
            peer["rtt_us"].as_u64().map_or("-".to_owned(), |us| format!("{}.{:03} ms", us / 1000, us % 1000));
        rows.push(vec![
            text(&peer["node"]),
            text(&peer["address"]),
            text(&peer["state"]),
            or_dash(&peer["direction"]),
            rtt,
            or_dash(&peer["score"]),
            or_dash(&peer["queued_frames"]),
            or_dash(&peer["post_quantum"]),
            or_dash(&peer["error"]),
        ]);
    }
    out += &format!("\n{}", aligned(&rows));
    if !list(&body["greylisted"]).is_empty() {
        let mut rows = vec![row(["GREYLISTED", "OFFENCE", "SECONDS LEFT"])];
        rows.extend(
            list(&body["greylisted"])
                .iter()
                .map(|node| ["node", "offence", "seconds"].map(|key| text(&node[key])).into()),
        );
        out += &format!("\n{}", aligned(&rows));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_address_that_nobody_can_reach_is_said_to_be_one() {
        let page = |address: &str| {
            let own = json!({"node": "ed25519:x", "address": address});
            peers(&json!({"self": own, "peers": [], "greylisted": []}))
        };
        assert!(
            page("0.0.0.0:9500").contains("overlay.advertise") && page("[::]:1").contains("others cannot")
        );
        assert!(!page("192.0.2.1:9500").contains("others") && !page("a.example:9500").contains("others"));
    }
}
