//! What outlives the node: the proof of one change, and the evidence against a log with two histories.

use super::node::{Registry, Target};
use super::verify::{log_key, read_roots, sound_head, tile_of};
use crate::Usage;
use crate::client::Admin;
use crate::commands::print;
use anyhow::Context as _;
use ron::follow::{Found, STATUS};
use ron_log::entry::Served;
use ron_log::json::Json;
use ron_log::proof::{Inclusion, ProofFile};
use ron_log::tile::Tile;
use ron_log::tree::{consistency, inclusion, verify_consistency};
use ron_log::{Checkpoint, Entry, Note, NoteKey, Proposal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Writes the file that proves one change, and checks it as whoever gets it will.
pub(crate) fn proof(
    registry: &Registry,
    version: u64,
    out: &Path,
    trust_roots: Option<&Path>,
) -> anyhow::Result<ExitCode> {
    let (note, checkpoint, log) = checkpoint(registry)?;
    let head = sound_head(registry)?;
    anyhow::ensure!(version <= head, "there is no version {version} yet: the last is {head}");
    anyhow::ensure!(
        version < checkpoint.size,
        "no checkpoint covers version {version} yet, the last has size {}: wait for the next, or commit with --wait checkpointed",
        checkpoint.size
    );
    let subject = change(registry, version, checkpoint.size)?;
    // Back from signer set to signer set, to the roots.
    let mut rotations = Vec::new();
    let mut before = subject.entry.record().signers_version;
    while before > 0 {
        let rotation = change(registry, before, checkpoint.size)?;
        before = rotation.entry.record().signers_version;
        rotations.push(rotation);
    }
    rotations.reverse();
    let file = ProofFile { subject, rotations, checkpoint: note };
    if let Some(roots) = trust_roots {
        let proved = file.verify(&read_roots(roots)?, &log, &[], 0);
        proved.context("what the node gave does not prove the change")?;
    }
    std::fs::write(out, file.text()).with_context(|| format!("{} cannot be written", out.display()))?;
    let (size, file) = (checkpoint.size, out.display());
    if registry.json {
        return print(
            &serde_json::json!({"version": version, "size": size, "file": file.to_string()}).to_string(),
        );
    }
    print(&format!("{file} proves version {version} under the checkpoint of size {size}"))
}

/// The node's newest checkpoint, signed by the key it says is its log's.
fn checkpoint(registry: &Registry) -> anyhow::Result<(Note, Checkpoint, NoteKey)> {
    let log = log_key(registry)?;
    let note = Note::parse(&registry.bytes("GET", "/checkpoint", b"")?).context("the node's checkpoint")?;
    let checkpoint = Checkpoint::verify(&note, &log).context("the node's checkpoint")?;
    Ok((note, checkpoint, log))
}

/// A change with its path to the root of the tree of a size.
fn change(registry: &Registry, version: u64, size: u64) -> anyhow::Result<Inclusion> {
    let bytes = registry.bytes("GET", &format!("/registry/{version}"), b"")?;
    let json = Json::parse_around(&bytes).context("an entry is no JSON")?;
    let found = Served::of(&json)?;
    let entry = Entry::parse(found.record).with_context(|| format!("version {version}"))?;
    let proposal = Proposal::parse_canonical(found.payload).with_context(|| format!("version {version}"))?;
    let path = inclusion(version, size, |tile| sure_tile(registry, tile))?;
    Ok(Inclusion { entry, proposal, path })
}

fn sure_tile(registry: &Registry, tile: Tile) -> Result<Vec<u8>, anyhow::Error> {
    tile_of(registry, tile)?.with_context(|| format!("the node has no tile {tile:?}"))
}

/// What a node found against the registry that it follows.
pub(crate) fn found(target: &Target, out: Option<&Path>) -> anyhow::Result<ExitCode> {
    if target.url.is_some() {
        let advice =
            "a node that follows keeps evidence: name it with --config FILE; or give checkpoints to compare";
        return Err(
            Usage(format!("--url is of a registry, which has no evidence against itself; {advice}")).into()
        );
    }
    let node = Admin::find(&crate::client::Target::of_file(target.config.clone(), target.json))?;
    let answer = node.ask("GET", STATUS, "")?;
    anyhow::ensure!(
        answer.body["follows"] == true,
        "the node follows no registry: node.follow is not set in its file"
    );
    let evidence = &answer.body["evidence"];
    let Some(found) = Found::parse(evidence) else {
        return print(if target.json { "null" } else { "none: the registry has shown one history" });
    };
    let notes: Vec<String> = found.evidence.notes().map(ToString::to_string).collect();
    if let Some(out) = out {
        let written = std::fs::write(out, notes.join("\n"));
        written.with_context(|| format!("{} cannot be written", out.display()))?;
    }
    if target.json {
        print(&evidence.to_string())?;
        return Ok(ExitCode::FAILURE);
    }
    print(&format!("{}; the log's key is {}", found.evidence, found.log_key))?;
    if out.is_none() {
        print(notes.join("\n").trim_end())?;
    }
    Ok(ExitCode::FAILURE)
}

/// Holds the node's history against checkpoints that were kept from before. Two that cannot both be of one log, each
/// signed by it, are evidence that nobody can deny.
pub(crate) fn evidence(
    registry: &Registry,
    kept: &[PathBuf],
    out: Option<&Path>,
) -> anyhow::Result<ExitCode> {
    let (now, newest, log) = checkpoint(registry)?;
    let mut against = Vec::new();
    for file in kept {
        let bytes = std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
        let note = Note::parse(&bytes).with_context(|| file.display().to_string())?;
        let seen = Checkpoint::verify(&note, &log)
            .with_context(|| format!("{} is no checkpoint of this log", file.display()))?;
        let (old, new) = if seen.size <= newest.size { (&seen, &newest) } else { (&newest, &seen) };
        // A node that is behind what it once signed cannot show how the two go together, and should be able to. One that
        // cannot be asked has shown nothing yet.
        let path = if new.size == newest.size {
            let compared = consistency(old.size, new.size, |tile| sure_tile(registry, tile));
            Some(compared.with_context(|| format!("{} cannot be compared now", file.display()))?)
        } else {
            None
        };
        let same = old.size == new.size && old.root == new.root;
        let follows = path.is_some_and(|path| {
            old.size == 0 || verify_consistency(old.size, new.size, &path, &old.root, &new.root)
        });
        if !(same || follows) {
            against.push((file, seen, note));
        }
    }
    if against.is_empty() {
        let root = newest.size;
        return if registry.json {
            print(&serde_json::json!({"consistent": true, "size": root, "checked": kept.len()}).to_string())
        } else {
            print(&format!("none: the log of size {root} continues all {} checkpoints given", kept.len()))
        };
    }
    let mut text = String::new();
    for (file, seen, note) in &against {
        let name = file.display();
        let (seen, now) = (seen.size, newest.size);
        print(&if seen > now {
            format!(
                "{name}: the log signed a checkpoint of size {seen}, and shows one of size {now} only: it lost entries"
            )
        } else {
            format!("{name}: the checkpoint of size {seen} does not go with that of size {now}")
        })?;
        text += &format!("{note}\n");
    }
    text += &now.to_string();
    match out {
        Some(out) => {
            std::fs::write(out, text).with_context(|| format!("{} cannot be written", out.display()))?;
        }
        None => {
            print(text.trim_end())?;
        }
    }
    Ok(ExitCode::FAILURE)
}
