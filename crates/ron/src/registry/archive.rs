//! A whole registry in one file: `export` takes it from a node, `import` makes a folder that a node can start from.

use super::node::Registry;
use super::verify::{self, Whose, read_roots};
use crate::Usage;
use crate::commands::print;
use crate::http1::Asked;
use anyhow::Context as _;
use ron_log::export::{ExportReader, FrameKind};
use ron_log::tree::leaf_hash;
use ron_log::{Entry, FaultKind, Head, Note, NoteKey, Proposal, PruneManifest, State, Tree, TrustRoots};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use svc_registry::store::{Changes, Keeping, LogWriter, Store, Whole};

/// Entries written with one flush.
const BATCH: usize = 1024;
const PIECE: usize = 256 << 10;

/// Fetches an export; the file is there when it is whole, and not before.
pub(crate) fn export(registry: &Registry, file: &Path, force: bool) -> anyhow::Result<ExitCode> {
    if file.exists() && !force {
        return Err(Usage(format!("{} is there already: say --force to overwrite it", file.display())).into());
    }
    // Asked before, so that the export must have it.
    let (head, damage) = verify::head(registry)?;
    let asked = Asked {
        method: "GET",
        path: "/registry/export",
        headers: &[],
        body: b"",
        silence_max: Duration::from_secs(60),
    };
    let mut response = registry.ask(&asked)?;
    if response.status != 200 {
        let status = response.status;
        return Err(super::node::refused(status, &registry.whole(response)?).into());
    }
    let partial = file.with_added_extension("part");
    let failed = || format!("{} cannot be written", partial.display());
    let mut out = File::create(&partial).with_context(failed)?;
    let (mut reader, mut piece, mut bytes, mut entries) =
        (ExportReader::default(), vec![0; PIECE], 0u64, 0u64);
    let mut last = None;
    loop {
        let read = response.body.read(&mut piece).context("the node broke off the export")?;
        if read == 0 {
            break;
        }
        out.write_all(&piece[..read]).with_context(failed)?;
        bytes += read as u64;
        reader.push(&piece[..read]);
        while let Some((kind, content)) =
            reader.next_frame().map_err(|error| anyhow::anyhow!("the export: {error}"))?
        {
            if kind == FrameKind::Record {
                entries += 1;
                last = Entry::parse(content.to_vec()).ok().map(|entry| entry.record().version);
            }
        }
    }
    anyhow::ensure!(reader.ended(), "the export ends too early; {} is what came", partial.display());
    out.sync_all().with_context(failed)?;
    let last = last.unwrap_or(0);
    if last < head || damage.is_some() {
        let why = damage.unwrap_or_else(|| {
            format!(
                "the export ends with version {last}, and the log with {head}: what comes then was not signed in time, \
                 or not cosigned by as many witnesses as there must be (/readyz and the node's log say why); try again"
            )
        });
        let (partial, file) = (partial.display(), file.display());
        anyhow::bail!("{why}. {partial} is what came, signed up to version {last}; {file} was not touched");
    }
    std::fs::rename(&partial, file).with_context(|| format!("{} cannot be written", file.display()))?;
    if registry.json {
        let file = file.display().to_string();
        return print(&serde_json::json!({"file": file, "entries": entries, "bytes": bytes}).to_string());
    }
    print(&format!("{}: {entries} entries, {bytes} bytes", file.display()))
}

/// Checks an export and makes a registry's folder of it; nothing that is not good is ever in that folder.
pub(crate) fn import(
    file: &Path,
    dir: &Path,
    trust_roots: &Path,
    log: Option<&str>,
    (unsigned, json): (bool, bool),
) -> anyhow::Result<ExitCode> {
    if dir.join("registry.redb").exists() {
        return Err(Usage(format!("{} holds a registry already: name a new folder", dir.display())).into());
    }
    let roots = read_roots(trust_roots)?;
    let given = log.map(|text| verify::note_key(&roots, text)).transpose()?;
    let above = dir.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The node that is to use the folder can go on with a log of its own key alone.
    let log = given.or_else(|| verify::key_beside(above, &roots));
    let whose = if log.is_some() { Whose::Given } else { Whose::Own };
    let open = || File::open(file).with_context(|| format!("{} cannot be read", file.display()));
    let input = open()?;
    let total = input.metadata()?.len();
    let mut outcome = verify::export(input, total, &roots, (log, whose), verify::Witnesses::default())?;
    if unsigned {
        outcome.faults.retain(|fault| fault.kind != FaultKind::Unsigned);
    }
    if !outcome.is_good() {
        verify::said(&outcome, json)?;
        anyhow::bail!("{} is not good, nothing was imported", file.display());
    }
    let unfinished = dir.with_added_extension("importing");
    if unfinished.exists() {
        let again = "an import was broken off there: remove it and try again";
        return Err(Usage(format!("{}: {again}", unfinished.display())).into());
    }
    let head = fill(open()?, &unfinished, roots)?;
    std::fs::create_dir_all(above).with_context(|| format!("{} cannot be made", above.display()))?;
    // An empty folder may have been made beforehand.
    let _ = std::fs::remove_dir(dir);
    std::fs::rename(&unfinished, dir).with_context(|| format!("{} cannot be made", dir.display()))?;
    let (signed, Head { version, hash }) = (outcome.how_signed(), head);
    if json {
        let (dir, hash) = (dir.display().to_string(), hash.to_string());
        let said =
            serde_json::json!({"dir": dir, "version": version, "hash": hash, "signed": outcome.signed});
        return print(&said.to_string());
    }
    print(&format!("{}: version {}, {}; {signed}", dir.display(), version, hash))
}

/// Makes a store of an export that was found good.
fn fill(mut input: File, dir: &Path, roots: TrustRoots) -> anyhow::Result<Head> {
    let store = Store::open(dir, &roots, true)?;
    let writer = store.log_writer().context("nobody else writes a new store")?;
    let mut importer = Importer {
        head: State::genesis(&roots).head(),
        store,
        writer,
        log: None,
        tree: Tree::default(),
        changes: Changes::default(),
        manifests: Vec::new(),
        held: Vec::new(),
        snapshot: None,
        began_with: None,
    };
    let (mut reader, mut piece) = (ExportReader::default(), vec![0; PIECE]);
    loop {
        let read = input.read(&mut piece)?;
        if read == 0 {
            break;
        }
        reader.push(&piece[..read]);
        while let Some((kind, content)) = reader.next_frame().map_err(|error| anyhow::anyhow!("{error}"))? {
            importer.frame(kind, content)?;
        }
    }
    importer.finish()
}

/// An export on its way into a store.
struct Importer {
    store: Store,
    writer: LogWriter,
    log: Option<NoteKey>,
    /// The last entry that is written.
    head: Head,
    tree: Tree,
    changes: Changes,
    /// By the first version each kept.
    manifests: Vec<(u64, String)>,
    /// The first of two frames.
    held: Vec<u8>,
    /// The last snapshot: version, note, state.
    snapshot: Option<(u64, String, String)>,
    /// The one that a pruned log begins with.
    began_with: Option<(u64, String, String)>,
}

impl Importer {
    fn frame(&mut self, kind: FrameKind, content: &[u8]) -> anyhow::Result<()> {
        let text = || String::from_utf8(content.to_vec()).context("a note is text");
        match kind {
            FrameKind::Roots | FrameKind::End => {}
            FrameKind::LogKey => self.log = NoteKey::parse(&text()?),
            FrameKind::PruneManifest => {
                let log = self.log.as_ref().context("the log's key comes first")?;
                let manifest = PruneManifest::verify(&Note::parse(content)?, log)?;
                self.manifests.push((manifest.min_version, text()?));
            }
            FrameKind::PrunedLeaves => {
                for leaf in content.as_chunks::<32>().0 {
                    self.changes.grow(&mut self.tree, *leaf);
                }
            }
            FrameKind::SnapshotNote | FrameKind::Record => self.held = content.to_vec(),
            FrameKind::SnapshotState => {
                let state = State::parse(content)?;
                let note = String::from_utf8(std::mem::take(&mut self.held))?;
                let snapshot = (state.head().version, note, text()?);
                if self.head.version == 0 && self.changes.entries.is_empty() && !self.manifests.is_empty() {
                    self.began_with = Some(snapshot);
                } else {
                    self.snapshot = Some(snapshot);
                }
            }
            // Before the pruned leaves stand changes of the signer set.
            FrameKind::Payload if !self.manifests.is_empty() && self.tree.size() == 0 => {
                let entry = Entry::parse(std::mem::take(&mut self.held))?;
                self.store.note_writer().former_signers(&entry, content)?;
            }
            FrameKind::Payload => self.entry(content)?,
            FrameKind::Checkpoint => {
                self.flush()?;
                let size = self.tree.size();
                let state = self.snapshot.as_ref().filter(|(version, _, _)| version + 1 == size);
                let note = state.map_or("", |(_, note, _)| note.as_str());
                let sign = |_| note.to_owned();
                let keeping = state.map(|(_, _, state)| Keeping { state: Whole::Text(state), sign: &sign });
                self.store.note_writer().checkpoint(size, &text()?, keeping, |_| true)?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, payload: &[u8]) -> anyhow::Result<()> {
        let entry = Entry::parse(std::mem::take(&mut self.held))?;
        self.changes.grow(&mut self.tree, leaf_hash(entry.bytes()));
        // A new store has the genesis already.
        if entry.record().version > 0 {
            self.changes.entries.push((entry, Arc::new(Proposal::parse_canonical(payload.to_vec())?)));
        }
        if self.changes.entries.len() == BATCH { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> anyhow::Result<()> {
        let Some((last, _)) = self.changes.entries.last() else { return Ok(()) };
        let next = Head { version: last.record().version, hash: last.hash() };
        self.writer.write(self.head, std::mem::take(&mut self.changes))?;
        self.head = next;
        Ok(())
    }

    fn finish(mut self) -> anyhow::Result<Head> {
        self.flush()?;
        let notes = self.store.note_writer();
        self.manifests.sort_by_key(|(min_version, _)| *min_version);
        if let Some((newest, older)) = self.manifests.split_last() {
            for (min_version, note) in older {
                notes.former_manifest(*min_version, note)?;
            }
            let (_, note, state) = self.began_with.as_ref().context("a pruned log begins with a snapshot")?;
            let sign = |_| note.clone();
            notes.manifest(newest.0, &newest.1, Keeping { state: Whole::Text(state), sign: &sign })?;
            // The genesis of the new store is older than what is kept.
            while notes.prune(BATCH)? > 0 {}
        }
        Ok(self.head)
    }
}
