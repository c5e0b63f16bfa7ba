//! What a registry holds and what happens in it: head, items, entries, proposals, the stream.

use super::node::{Refused, Registry, id};
use crate::commands::print;
use crate::http1::Asked;
use crate::table::{aligned, list, pairs, row, text, visible};
use anyhow::Context as _;
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::ExitCode;
use std::time::Duration;

/// Entries of `ron registry log` that names no number.
const LIMIT: u64 = 20;
/// Entries asked for at a time.
const PAGE: u64 = 256;
/// Silence after which a stream is opened anew; heartbeats come more often.
const STREAM_SILENCE: Duration = Duration::from_secs(60);
const RECONNECT: Duration = Duration::from_secs(1);

pub(crate) fn head(registry: &Registry) -> anyhow::Result<ExitCode> {
    registry.show(&registry.get("/registry/head")?, describe_head)
}

/// The lines that say which entry is the last.
pub(crate) fn describe_head(head: &Value) -> String {
    let checkpoint = &head["checkpoint"];
    let covered =
        if checkpoint.is_null() { "none yet".to_owned() } else { format!("size {}", checkpoint["size"]) };
    let damaged = Some(("damaged", text(&head["damaged"]))).filter(|_| head["damaged"].is_string());
    let lines = [
        ("version", text(&head["version"])),
        ("hash", text(&head["hash"])),
        ("payload", text(&head["payload_b3"])),
        ("signers of", format!("version {}", head["signers_version"])),
        ("committed", time(&head["committed_at"])),
        ("checkpoint", covered),
    ];
    pairs(&lines.into_iter().chain(damaged).collect::<Vec<_>>())
}

/// The items in force, of one kind, or one of them.
pub(crate) fn items(
    registry: &Registry,
    kind: Option<&str>,
    id: Option<&str>,
    at: Option<u64>,
) -> anyhow::Result<ExitCode> {
    let at = at.map(|version| format!("?at={version}")).unwrap_or_default();
    if let (Some(kind), Some(id)) = (kind, id) {
        let item = registry.get(&format!("{}{at}", item_path(kind, id)))?;
        return registry.show(&item, |item| pretty(&item["body"]));
    }
    let mut found = registry.get(&format!("/registry/items{at}"))?;
    if let (Some(kind), Some(items)) = (kind, found["items"].as_array_mut()) {
        items.retain(|item| item["kind"] == *kind);
    }
    registry.show(&found, |found| {
        let mut rows = vec![row(["KIND", "ID", "VERSION", "BODY"])];
        for item in list(&found["items"]) {
            rows.push(["kind", "id", "version", "body"].map(|member| text(&item[member])).into());
        }
        aligned(&rows)
    })
}

/// Where an item is; ids may hold anything.
pub(crate) fn item_path(kind: &str, id: &str) -> String {
    let mut path = String::from("/registry/items/");
    for (index, part) in [kind, id].into_iter().enumerate() {
        if index > 0 {
            path.push('/');
        }
        for byte in part.bytes() {
            if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
                path.push(char::from(byte));
            } else {
                path += &format!("%{byte:02X}");
            }
        }
    }
    path
}

pub(crate) fn pretty(value: &Value) -> String {
    let text = serde_json::to_string_pretty(value).expect("a value is JSON");
    text.lines().map(visible).collect::<Vec<_>>().join("\n")
}

pub(crate) fn get(registry: &Registry, version: u64) -> anyhow::Result<ExitCode> {
    let entry = registry.get(&format!("/registry/{version}"))?;
    registry.show(&entry, |entry| {
        let mut out = vec![
            ("version", text(&entry["version"])),
            ("hash", text(&entry["hash"])),
            ("prev", text(&entry["prev"])),
            ("payload", text(&entry["payload_b3"])),
            ("committed", time(&entry["committed_at"])),
            ("note", text(&entry["payload"]["note"])),
        ];
        for approval in list(&entry["approvals"]) {
            let (signer, alg) = (text(&approval["signer"]), text(&approval["alg"]));
            out.push(("approved", format!("{signer} ({alg}), {}", time(&approval["signed_at"]))));
        }
        let mut out = pairs(&out);
        for op in list(&entry["payload"]["ops"]) {
            out += &format!("{} {}/{}", text(&op["op"]), text(&op["kind"]), text(&op["id"]));
            if !op["body"].is_null() {
                out += &format!(" {}", pretty(&op["body"]));
            }
            out.push('\n');
        }
        out
    })
}

/// Entries in order; without a beginning, the newest.
pub(crate) fn log(registry: &Registry, from: Option<u64>, limit: Option<u64>) -> anyhow::Result<ExitCode> {
    let limit = limit.unwrap_or(LIMIT);
    let mut next = match from {
        Some(from) => from,
        None => {
            let number = |path: &str, member: &str| -> anyhow::Result<u64> {
                Ok(registry.get(path)?[member].as_u64().unwrap_or(0))
            };
            let newest = (number("/registry/head", "version")? + 1).saturating_sub(limit);
            newest.max(number("/registry/retention", "min_version")?)
        }
    };
    let mut left = limit;
    let mut rows = vec![row(["VERSION", "COMMITTED", "APPROVED BY", "CHANGES", "NOTE"])];
    while left > 0 {
        let page = entries(registry, next, left.min(PAGE))?;
        if page.is_empty() {
            break;
        }
        left = left.saturating_sub(page.len() as u64);
        next += page.len() as u64;
        for entry in page {
            if registry.json {
                print(&entry.to_string())?;
            } else {
                rows.push(entry_row(&entry));
            }
        }
    }
    if registry.json { Ok(ExitCode::SUCCESS) } else { print(aligned(&rows).trim_end()) }
}

/// One page of entries, each with its payload and hash.
pub(crate) fn entries(registry: &Registry, from: u64, limit: u64) -> anyhow::Result<Vec<Value>> {
    let mut page = registry.get(&format!("/registry/log?from={from}&limit={limit}"))?;
    let entries = page["entries"].take();
    match entries {
        Value::Array(entries) => Ok(entries),
        _ => anyhow::bail!("the node at {} gives a log of another version", registry.address),
    }
}

fn entry_row(entry: &Value) -> Vec<String> {
    let approvals = list(&entry["approvals"]).iter().map(|approval| text(&approval["signer"]));
    let change = |op: &Value| format!("{} {}/{}", text(&op["op"]), text(&op["kind"]), text(&op["id"]));
    let payload = &entry["payload"];
    let changes: Vec<String> = list(&payload["ops"]).iter().map(change).collect();
    let changes = match changes.as_slice() {
        [first, _, ..] => format!("{first} and {} more", changes.len() - 1),
        few => few.concat(),
    };
    let approvals: Vec<String> = approvals.collect();
    let approvals = if approvals.is_empty() { "-".to_owned() } else { approvals.join(",") };
    vec![text(&entry["version"]), time(&entry["committed_at"]), approvals, changes, text(&payload["note"])]
}

/// Pending proposals, or what became of one.
pub(crate) fn proposals(registry: &Registry, one: Option<&str>) -> anyhow::Result<ExitCode> {
    if let Some(one) = one {
        let proposal = registry.get(&format!("/registry/proposals/{}", id(one)?))?;
        return registry.show(&proposal, |proposal| {
            let mut out = vec![("id", text(&proposal["proposal_id"])), ("state", text(&proposal["state"]))];
            if !proposal["version"].is_null() {
                out.push(("version", text(&proposal["version"])));
            }
            if !proposal["expires_at"].is_null() {
                out.push(("ends", time(&proposal["expires_at"])));
            }
            for approval in list(&proposal["approvals"]) {
                out.push(("approved", text(&approval["signer"])));
            }
            pairs(&out) + &pretty(&proposal["payload"])
        });
    }
    let all = registry.get("/registry/proposals")?;
    registry.show(&all, |all| {
        let mut rows = vec![row(["ID", "ENDS", "APPROVED BY", "NOTE"])];
        for proposal in list(&all["proposals"]) {
            let signers: Vec<String> = list(&proposal["approved_by"]).iter().map(text).collect();
            let signers = if signers.is_empty() { "-".to_owned() } else { signers.join(",") };
            rows.push(vec![
                text(&proposal["proposal_id"]),
                time(&proposal["expires_at"]),
                signers,
                text(&proposal["note"]),
            ]);
        }
        aligned(&rows)
    })
}

/// Unix milliseconds, as people read them.
pub(crate) fn time(millis: &Value) -> String {
    // The genesis is of no time.
    let millis = millis.as_u64().filter(|millis| *millis > 0);
    millis.map_or_else(|| "-".to_owned(), |millis| ron_kernel::date::timestamp(Duration::from_millis(millis)))
}

/// Prints each update as it comes, and goes on where it was when the connection breaks.
pub(crate) fn watch(registry: &Registry, from: Option<u64>) -> anyhow::Result<ExitCode> {
    let cursor = |version: u64, hash: &Value| {
        let hash = hash.as_str().and_then(|hash| hash.get(3..11)).context("an entry has no hash")?;
        anyhow::Ok(format!("{version}-{hash}"))
    };
    let mut last = match from {
        // Not merely what comes: a connection that breaks before the first event must miss nothing either.
        None => {
            let head = registry.get("/registry/head")?;
            cursor(head["version"].as_u64().context("HEAD has no version")?, &head["hash"])?
        }
        Some(0) => {
            let first = registry.get("/registry/0")?;
            let members = ["version", "hash", "payload_b3", "committed_at"];
            let event: Value =
                members.map(|member| (member.to_owned(), first[member].clone())).into_iter().collect();
            print(&update(registry, &event))?;
            cursor(0, &first["hash"])?
        }
        Some(from) => match registry.get(&format!("/registry/{}", from - 1)) {
            Ok(before) => cursor(from - 1, &before["hash"])?,
            // The first one kept names the one that was before it.
            Err(error) if error.downcast_ref::<Refused>().is_some_and(|refused| refused.status == 410) => {
                cursor(from - 1, &registry.get(&format!("/registry/{from}"))?["prev"])?
            }
            Err(error) => return Err(error),
        },
    };
    loop {
        match stream(registry, &mut last) {
            Ok(()) => {}
            Err(error) if error.is::<Final>() => return Err(error),
            Err(error) => eprintln!("ron: {}; trying again", crate::said(&error)),
        }
        std::thread::sleep(RECONNECT);
    }
}

/// What no second try mends.
#[derive(Debug)]
struct Final(String);

impl std::fmt::Display for Final {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Final {}

fn update(registry: &Registry, event: &Value) -> String {
    if registry.json {
        return event.to_string();
    }
    let [version, hash, payload] = ["version", "hash", "payload_b3"].map(|member| text(&event[member]));
    format!("{version}  {}  {hash}  {payload}", time(&event["committed_at"]))
}

/// One connection's worth of events; `last` follows them.
fn stream(registry: &Registry, last: &mut String) -> anyhow::Result<()> {
    let cursor = last.clone();
    let headers: &[_] = &[("Last-Event-ID", cursor.as_str())];
    let asked =
        Asked { method: "GET", path: "/registry/stream", headers, body: b"", silence_max: STREAM_SILENCE };
    let response = registry.ask(&asked)?;
    if response.status != 200 {
        let status = response.status;
        let refused = super::node::refused(status, &registry.whole(response)?);
        return Err(if status < 500 && status != 429 {
            Final(refused.to_string()).into()
        } else {
            refused.into()
        });
    }
    let (mut event, mut data, mut id) = (String::new(), String::new(), None);
    for line in BufReader::new(response.body).lines() {
        let line = line.context("the stream broke off")?;
        if line.is_empty() {
            if !data.is_empty() {
                took(registry, &event, &data)?;
                if let Some(id) = id.take() {
                    *last = id;
                }
            }
            (event, data) = (String::new(), String::new());
        } else if let Some((field, value)) = line.split_once(':') {
            let value = value.strip_prefix(' ').unwrap_or(value).to_owned();
            match field {
                "event" => event = value,
                "data" => data = value,
                "id" => id = Some(value),
                _ => {}
            }
        }
    }
    anyhow::bail!("the stream ended")
}

fn took(registry: &Registry, event: &str, data: &str) -> anyhow::Result<()> {
    let value: Value = serde_json::from_str(data).context("an event is no JSON")?;
    match event {
        // Nobody reads on, so there is nothing to watch for.
        "registry.update" => writeln!(std::io::stdout(), "{}", update(registry, &value))
            .map_err(|error| Final(format!("cannot print: {error}")).into()),
        "registry.lagged" => {
            let (from, to) = (text(&value["from"]), text(&value["to"]));
            eprintln!("ron: too slow for versions {from} to {to}; `ron registry log --from {from}` has them");
            Ok(())
        }
        "registry.pruned" => {
            let min = text(&value["min_version"]);
            let advice =
                format!("start from a snapshot or an export, then `ron registry watch --from {min}`");
            Err(Final(format!("what came before version {min} is no longer kept: {advice}")).into())
        }
        "registry.forked" => {
            let (version, hash) = (text(&value["version"]), text(&value["hash"]));
            let advice = "keep what you have and run `ron registry verify` and `ron registry evidence`";
            Err(Final(format!(
                "version {version} is another entry here, {hash}: this log has two histories; {advice}"
            ))
            .into())
        }
        _ => Ok(()),
    }
}
