//! Changing what a registry holds: propose, approve, commit.

use super::look::{describe_head, item_path, pretty, time};
use super::node::{Refused, Registry, id};
use crate::Usage;
use crate::table::{pairs, text, visible};
use anyhow::Context as _;
use ron_log::json::{Json, write_text};
use ron_log::{Approval, B3, Op, Payload, Proposal};
use serde_json::Value;
use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How long a proposal may wait that says nothing itself.
const EXPIRES: Duration = Duration::from_secs(72 * 3600);
/// Longest difference that is shown; a longer one is told as old and new.
const DIFF_LINES_MAX: usize = 2000;

/// How a change is proposed.
#[derive(Debug, clap::Args)]
pub(crate) struct Proposing {
    /// Why; it is part of what is signed.
    #[arg(long, value_name = "TEXT")]
    note: Option<String>,
    /// How long it may wait for approval; 72h by default.
    #[arg(long, value_name = "TIME")]
    expires: Option<ron_kernel::units::Span>,
    /// Do not ask.
    #[arg(long)]
    yes: bool,
    /// Write the payload to a file too, for who signs on another machine.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// What is to be changed, as the command says it.
#[derive(Debug)]
pub(crate) enum Change<'a> {
    /// A payload, or the part of one that a person writes: `ops`.
    File(&'a Path),
    Put(&'a str, &'a str, &'a Path),
    Delete(&'a str, &'a str),
}

pub(crate) fn propose(registry: &Registry, change: &Change<'_>, how: &Proposing) -> anyhow::Result<ExitCode> {
    let head = registry.get("/registry/head")?;
    let proposal = payload(change, how, &head)?;
    let mut shown = format!("on top of version {}:\n", head["version"]);
    for op in &proposal.payload().ops {
        shown += &difference(registry, op)?;
    }
    eprint!("{shown}");
    if !how.yes {
        if !std::io::stdin().is_terminal() {
            return Err(Usage("nobody is there to be asked: say --yes".to_owned()).into());
        }
        anyhow::ensure!(agreed("Propose this?")?, "nothing was proposed");
    }
    if let Some(out) = &how.out {
        std::fs::write(out, proposal.bytes())
            .with_context(|| format!("{} cannot be written", out.display()))?;
    }
    let body = std::str::from_utf8(proposal.bytes()).context("a payload is text")?;
    let answer = registry.post("/registry/proposals", body)?;
    anyhow::ensure!(
        answer["payload_b3"] == proposal.b3().to_string(),
        "the node took it for another proposal, {}: do not approve that",
        text(&answer["payload_b3"])
    );
    registry.show(&answer, |answer| text(&answer["proposal_id"]))
}

/// The payload a command means, with what it leaves out filled in.
fn payload(change: &Change<'_>, how: &Proposing, head: &Value) -> anyhow::Result<Proposal> {
    let read =
        |file: &Path| std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()));
    let op = |op: &str, kind: &str, id: &str, body: &str| {
        let mut out = format!(r#"[{{"op":"{op}",{body}"kind":"#);
        write_text(kind, &mut out);
        out.push_str(r#","id":"#);
        write_text(id, &mut out);
        out + "}]"
    };
    let mut members: Vec<(String, String)> = Vec::new();
    match change {
        Change::Delete(kind, id) => members.push(("ops".into(), op("delete", kind, id, ""))),
        Change::Put(kind, id, file) => {
            let bytes = read(file)?;
            let body = Json::parse(&bytes).with_context(|| format!("{} is no JSON", file.display()))?;
            members.push(("ops".into(), op("put", kind, id, &format!(r#""body":{},"#, body.canonical()))));
        }
        Change::File(file) => {
            let bytes = read(file)?;
            let document = Json::parse(&bytes).with_context(|| format!("{} is no JSON", file.display()))?;
            let given = document.members().with_context(|| format!("{} is no object", file.display()))?;
            members.extend(given.iter().map(|(name, value)| (name.to_string(), value.canonical())));
        }
    }
    let mut set =
        |name: &str, value: String, over: bool| match members.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) if over => *known = value,
            Some(_) => {}
            None => members.push((name.to_owned(), value)),
        };
    let mut nonce = [0; 16];
    getrandom::fill(&mut nonce).map_err(|error| anyhow::anyhow!("no random numbers: {error}"))?;
    let nonce: String = nonce.iter().map(|byte| format!("{byte:02x}")).collect();
    set("schema", r#""ron.registry/1""#.into(), false);
    set("base_version", head["version"].to_string(), false);
    set("signers_version", head["signers_version"].to_string(), false);
    set("nonce", format!("{nonce:?}"), false);
    let mut note = String::new();
    write_text(how.note.as_deref().unwrap_or_default(), &mut note);
    set("note", note, how.note.is_some());
    let expires = how.expires.map_or(EXPIRES, |span| span.0);
    set("expires_at", (now()? + u64::try_from(expires.as_millis())?).to_string(), how.expires.is_some());
    let member = |(name, value): &(String, String)| {
        let mut out = String::new();
        write_text(name, &mut out);
        out + ":" + value
    };
    let document = format!("{{{}}}", members.iter().map(member).collect::<Vec<_>>().join(","));
    Ok(Proposal::parse(document.as_bytes()).map_err(|error| Usage(format!("no good change: {error}")))?)
}

pub(crate) fn now() -> anyhow::Result<u64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(u64::try_from(now.as_millis())?)
}

/// What an operation changes, line by line.
fn difference(registry: &Registry, op: &Op) -> anyhow::Result<String> {
    let path = item_path(&op.key.kind, &op.key.id);
    let (kind, id) = (visible(&op.key.kind), visible(&op.key.id));
    let (before, title) = match registry.get(&path) {
        Ok(item) => (
            pretty(&item["body"]),
            format!("{kind}/{id}, last changed by version {}", text(&item["version"])),
        ),
        Err(error) if error.downcast_ref::<Refused>().is_some_and(|refused| refused.status == 404) => {
            anyhow::ensure!(op.body.is_some(), "there is no item {kind}/{id} to delete");
            (String::new(), format!("{kind}/{id}, which is new"))
        }
        Err(error) => return Err(error),
    };
    let after = match &op.body {
        Some(body) => pretty(&serde_json::from_str(body).context("a body is JSON")?),
        None => String::new(),
    };
    let what = if op.body.is_some() { "put" } else { "delete" };
    let mut out = format!("{what} {title}\n");
    if before == after {
        out += "  nothing changes\n";
    }
    for (sign, line) in diff(&before, &after) {
        out += &format!("{sign} {line}\n");
    }
    Ok(out)
}

/// The shortest way from one text to another, in lines that stay, go or come.
fn diff<'a>(before: &'a str, after: &'a str) -> Vec<(char, &'a str)> {
    let (a, b): (Vec<&str>, Vec<&str>) = (before.lines().collect(), after.lines().collect());
    if a.len().max(b.len()) > DIFF_LINES_MAX {
        return a.iter().map(|line| ('-', *line)).chain(b.iter().map(|line| ('+', *line))).collect();
    }
    // How many lines the rest of both have in common, from the end.
    let width = b.len() + 1;
    let mut common = vec![0u16; (a.len() + 1) * width];
    for i in (0..a.len()).rev() {
        for j in (0..b.len()).rev() {
            common[i * width + j] = if a[i] == b[j] {
                common[(i + 1) * width + j + 1] + 1
            } else {
                common[(i + 1) * width + j].max(common[i * width + j + 1])
            };
        }
    }
    let (mut i, mut j, mut out) = (0, 0, Vec::new());
    while i < a.len() || j < b.len() {
        if i < a.len() && j < b.len() && a[i] == b[j] {
            out.push((' ', a[i]));
            (i, j) = (i + 1, j + 1);
        } else if i < a.len() && (j == b.len() || common[(i + 1) * width + j] >= common[i * width + j + 1]) {
            out.push(('-', a[i]));
            i += 1;
        } else {
            out.push(('+', b[j]));
            j += 1;
        }
    }
    out
}

/// Asks whoever is there; a script has decided already.
pub(crate) fn may_sign(yes: bool) -> anyhow::Result<()> {
    let asked = !yes && std::io::stdin().is_terminal();
    anyhow::ensure!(!asked || agreed("Sign this?")?, "nothing was signed");
    Ok(())
}

fn agreed(question: &str) -> anyhow::Result<bool> {
    eprint!("{question} [y/N] ");
    std::io::stderr().flush()?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    Ok(matches!(line.trim(), "y" | "Y" | "yes"))
}

/// Signs here, or brings an approval that was signed elsewhere.
pub(crate) fn approve(
    registry: &Registry,
    proposal: &str,
    keys: Option<(&[PathBuf], &str)>,
    approval: Option<&Path>,
    yes: bool,
) -> anyhow::Result<ExitCode> {
    let proposal = id(proposal)?;
    let approval = match (keys, approval) {
        (Some((keys, signer)), None) => {
            let payload_b3 = seen(registry, proposal)?;
            may_sign(yes)?;
            super::signed(payload_b3, keys, signer)?
        }
        (None, Some(file)) => {
            let bytes = std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
            Approval::parse(&bytes).with_context(|| format!("{} is no approval", file.display()))?.canonical()
        }
        _ => return Err(Usage("give --key FILE with --signer NAME, or --approval FILE".to_owned()).into()),
    };
    let answer = registry.post(&format!("/registry/approvals/{proposal}"), &approval)?;
    registry.show(&answer, |answer| {
        let have =
            answer["approvals"].as_array().map_or(answer["approvals"].clone(), |list| list.len().into());
        let (m, n) = (&answer["quorum"]["m"], &answer["quorum"]["n"]);
        let next = if answer["met"] == true { "enough to commit" } else { "more are needed" };
        format!("{have} approvals; {m} of {n} signers must approve: {next}")
    })
}

/// Shows what a signer is about to sign; the id says that it is this and nothing else.
fn seen(registry: &Registry, proposal: &str) -> anyhow::Result<B3> {
    let answer = registry.bytes("GET", &format!("/registry/proposals/{proposal}"), b"")?;
    let document = Json::parse_around(&answer).context("the node's answer is no JSON")?;
    let state = document.member("state").and_then(Json::text).unwrap_or("unknown");
    let payload = document.member("payload").with_context(|| match document.member("version") {
        Some(version) => {
            format!("it is {state} as version {} and needs no approval any more", version.canonical())
        }
        None => format!("it is {state} and cannot be approved; propose it again"),
    })?;
    let payload = Proposal::from_json(payload).context("what is proposed is no payload")?;
    anyhow::ensure!(
        payload.b3().to_string() == proposal,
        "the node shows another payload than the one of this id: nothing was signed"
    );
    let mut shown = described(payload.payload());
    for op in &payload.payload().ops {
        shown += &difference(registry, op)?;
    }
    eprint!("{shown}");
    Ok(payload.b3())
}

/// What is signed besides the operations.
pub(crate) fn described(payload: &Payload) -> String {
    pairs(&[
        ("note", visible(&payload.note)),
        ("on top of", format!("version {}", payload.base_version)),
        ("signers of", format!("version {}", payload.signers_version)),
        ("ends", time(&payload.expires_at.into())),
    ])
}

/// The operations by themselves, where there is no node to ask what was before.
pub(crate) fn operations(payload: &Payload) -> anyhow::Result<String> {
    let mut out = String::new();
    for op in &payload.ops {
        let what = if op.body.is_some() { "put" } else { "delete" };
        out += &format!("{what} {}/{}\n", visible(&op.key.kind), visible(&op.key.id));
        if let Some(body) = &op.body {
            out += &(pretty(&serde_json::from_str(body).context("a body is JSON")?) + "\n");
        }
    }
    Ok(out)
}

pub(crate) fn withdraw(registry: &Registry, proposal: &str) -> anyhow::Result<ExitCode> {
    let answer = registry.delete(&format!("/registry/proposals/{}", id(proposal)?))?;
    registry.show(&answer, |answer| text(&answer["state"]))
}

/// The node writes the proposal; what it changes is shown, and signed by nobody yet.
pub(crate) fn supersede(registry: &Registry) -> anyhow::Result<ExitCode> {
    let answer = registry.post("/registry/supersede", "{}")?;
    seen(registry, id(answer["proposal_id"].as_str().unwrap_or_default())?)?;
    registry.show(&answer, |answer| text(&answer["proposal_id"]))
}

pub(crate) fn commit(registry: &Registry, proposal: &str, wait: Option<&str>) -> anyhow::Result<ExitCode> {
    let proposal = id(proposal)?;
    if let Some(wait) = wait {
        let witnessed = wait.strip_prefix("witnessed:").is_some_and(|count| count.parse::<u32>().is_ok());
        if !(witnessed || matches!(wait, "durable" | "checkpointed")) {
            let expected = "expected durable, checkpointed or witnessed:K";
            return Err(Usage(format!("--wait {wait}: {expected}")).into());
        }
    }
    let query = wait.map(|wait| format!("?wait={wait}")).unwrap_or_default();
    let answer = registry.post(&format!("/registry/commit/{proposal}{query}"), "{}")?;
    registry.show(&answer, describe_head)
}

#[cfg(test)]
mod tests {
    use super::diff;

    #[test]
    fn a_difference_keeps_what_both_have() {
        let shown = |a, b| {
            diff(a, b).into_iter().map(|(sign, line)| format!("{sign}{line}")).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(shown("a\nb\nc", "a\nx\nc"), " a -b +x  c");
        assert_eq!(shown("", "a\nb"), "+a +b");
        assert_eq!(shown("a\nb", ""), "-a -b");
        assert_eq!(shown("a\nb\nc\nd", "b\nd\ne"), "-a  b -c  d +e");
        assert_eq!(shown("a", "a"), " a");
    }
}
