//! `ron registry verify`: a live node, a folder, an export or a proof; what is wrong, and with which version.

use super::node::{Refused, Registry, Target};
use crate::Usage;
use crate::client::Found;
use crate::commands::print;
use crate::http1::Asked;
use crate::progress::Progress;
use crate::table::visible;
use anyhow::Context as _;
use ron_kernel::key::PrivateKey;
use ron_log::entry::Served;
use ron_log::export::ExportVerifier;
use ron_log::json::Json;
use ron_log::key::PublicKey;
use ron_log::note::NoteKeyKind;
use ron_log::proof::ProofFile;
use ron_log::tile::{TILE_WIDTH, Tile, TilePath};
use ron_log::verify::Signatures;
use ron_log::{B3, Fault, FaultKind, NoteKey, Proposal, State, TrustRoots, Verifier};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use svc_registry::store::{FILE, Reader, Store, StoreError, has_good_pages, reading};

/// What to check, and by which roots and key.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    target: Target,
    /// The folder of a registry whose node does not run.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["url", "config", "export", "proof"])]
    dir: Option<PathBuf>,
    /// An export.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["url", "config", "proof"])]
    export: Option<PathBuf>,
    /// A .tlog-proof file.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["url", "config"])]
    proof: Option<PathBuf>,
    /// The trust roots. Otherwise those of the node that is asked, trust-roots.json, or those of the node whose folder
    /// is here.
    #[arg(long, value_name = "FILE")]
    trust_roots: Option<PathBuf>,
    /// The log's key. Without it the one that comes with the log is taken: then the log is known to be whole, not
    /// whose it is.
    #[arg(long, value_name = "ed25519:…")]
    log_key: Option<String>,
    /// A witness's key, as the witness states it; may be given several times. Cosignatures by these keys are checked.
    #[arg(long, value_name = "NAME+HASH+KEY")]
    witness_key: Vec<String>,
    /// How many of these witnesses must have cosigned a checkpoint. All of them, if it is not said.
    #[arg(long, value_name = "K", requires = "witness_key")]
    witness_quorum: Option<u64>,
}

/// Whose cosignatures are asked for, and how many.
#[derive(Default)]
pub(crate) struct Witnesses {
    keys: Vec<NoteKey>,
    quorum: u64,
}

impl Witnesses {
    fn of(options: &Options) -> Result<Witnesses, Usage> {
        let mut keys = Vec::new();
        for line in &options.witness_key {
            let key = NoteKey::parse(line).filter(|key| key.kind == NoteKeyKind::Cosignature);
            let bad =
                || Usage(format!("--witness-key {line}: expected name+hash+base64 as the witness states it"));
            let key = key.ok_or_else(bad)?;
            if keys.contains(&key) {
                return Err(Usage(format!("--witness-key {line}: is given twice, and counts once")));
            }
            keys.push(key);
        }
        let all = keys.len() as u64;
        let quorum = options.witness_quorum.unwrap_or(all);
        if quorum > all {
            return Err(Usage(format!("--witness-quorum {quorum}: only {all} witnesses are given")));
        }
        Ok(Witnesses { keys, quorum })
    }

    /// What the newest checkpoint that enough of them cosigned covers.
    fn covered(&self, verifier: &Verifier) -> Option<u64> {
        if self.quorum == 0 { None } else { verifier.witnessed().checked_sub(1) }
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    let json = options.target.json;
    let live = options.dir.is_none() && options.export.is_none() && options.proof.is_none();
    let roots = roots(options, live)?;
    let log = options.log_key.as_deref().map(|text| note_key(&roots, text)).transpose()?;
    let witnesses = Witnesses::of(options)?;
    let whose = if log.is_some() { Whose::Given } else { Whose::Own };
    if let Some(file) = &options.export {
        let input = File::open(file).with_context(|| format!("{} cannot be read", file.display()))?;
        let total = input.metadata()?.len();
        return said(&export(input, total, &roots, (log, whose), witnesses)?, json);
    }
    if let Some(file) = &options.proof {
        let log = log.ok_or_else(|| {
            Usage("--proof needs --log-key: the log's own key is what makes it one".to_owned())
        })?;
        return proof(file, &roots, &log, &witnesses, json);
    }
    if let Some(dir) = &options.dir {
        return said(&folder(dir, roots, (log, whose), witnesses)?, json);
    }
    said(&node(&Registry::find(&options.target)?, roots, (log, whose), witnesses)?, json)
}

/// The roots that were named, those of the node, or those that lie here.
fn roots(options: &Options, live: bool) -> anyhow::Result<TrustRoots> {
    let configured = || {
        let found = Found::read(options.target.config.as_deref()).ok()?;
        Some(found.data.join(&found.config.registry.trust_roots))
    };
    let here = PathBuf::from("trust-roots.json");
    let file = match &options.trust_roots {
        Some(file) => file.clone(),
        None if live && options.target.url.is_none() => configured().unwrap_or(here),
        None if here.exists() => here,
        None => configured().filter(|file| file.exists()).unwrap_or(here),
    };
    read_roots(&file)
}

pub(crate) fn read_roots(file: &Path) -> anyhow::Result<TrustRoots> {
    let bytes = std::fs::read(file).with_context(|| {
        format!("{} cannot be read: name the trust roots with --trust-roots FILE", file.display())
    })?;
    TrustRoots::parse(&bytes).with_context(|| format!("{} holds no trust roots", file.display()))
}

pub(crate) fn note_key(roots: &TrustRoots, text: &str) -> Result<NoteKey, Usage> {
    match PublicKey::parse(text) {
        Ok(PublicKey::Ed25519(key)) => Ok(NoteKey::ed25519(&roots.log, *key.verifying_key())),
        _ => Err(Usage(format!("--log-key {text}: expected ed25519:… as the node prints it"))),
    }
}

/// What a check came to.
pub(crate) struct Outcome {
    versions: u64,
    /// The first whose entry is kept.
    first: u64,
    /// The last version that enough witnesses have seen, if any were named.
    witnessed: Option<u64>,
    /// How many of them the log's key has signed for.
    pub(crate) signed: u64,
    whose: Whose,
    pub(crate) faults: Vec<Fault>,
}

/// Whose word it is that a key is the log's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whose {
    /// The caller's.
    Given,
    /// That of what is checked: then its notes show that it is whole, not whose it is.
    Own,
    /// There is no key.
    Unknown,
}

impl Outcome {
    pub(crate) fn is_good(&self) -> bool {
        self.faults.is_empty()
    }

    /// How far the log has signed for the entries, as people read it.
    pub(crate) fn how_signed(&self) -> String {
        let far = format!("signed up to {} of {}", self.signed, self.versions);
        match self.whose {
            Whose::Given => format!("{far} by the log key given"),
            Whose::Own => {
                format!("{far} by the key it brings itself; with --log-key ed25519:… it is known whose")
            }
            Whose::Unknown => "no checkpoint was checked: give --log-key ed25519:…".to_owned(),
        }
    }
}

/// One line if all is well, else one for each fault.
pub(crate) fn said(outcome: &Outcome, json: bool) -> anyhow::Result<ExitCode> {
    if json {
        let fault = |fault: &Fault| json!({"version": fault.version, "what": fault.kind.to_string()});
        let faults: Vec<_> = outcome.faults.iter().map(fault).collect();
        let good = outcome.is_good();
        let log_key = match outcome.whose {
            Whose::Given => "given",
            Whose::Own => "own",
            Whose::Unknown => "unknown",
        };
        let said = json!({
            "good": good, "entries": outcome.versions, "first": outcome.first, "signed": outcome.signed,
            "log_key": log_key, "faults": faults,
        });
        print(&said.to_string())?;
        return Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    if outcome.is_good() {
        let seen = outcome.witnessed.map(|version| format!(", cosigned to version {version}"));
        let (said, seen) = (outcome.how_signed(), seen.unwrap_or_default());
        let gone = match outcome.first {
            0 => String::new(),
            first => format!("; of those before version {first} the hashes alone, for they were let go of"),
        };
        return print(&format!("good: {} entries, whole and approved{gone}; {said}{seen}", outcome.versions));
    }
    for fault in &outcome.faults {
        print(&visible(&fault.to_string()))?;
    }
    Ok(ExitCode::FAILURE)
}

/// Checks a whole export as it is read.
pub(crate) fn export(
    mut input: impl Read,
    total: u64,
    roots: &TrustRoots,
    (log, whose): (Option<NoteKey>, Whose),
    witnesses: Witnesses,
) -> anyhow::Result<Outcome> {
    let verifier = ExportVerifier::new(roots.b3(), log, Signatures::Check);
    let mut verifier = verifier.witnessed_by(witnesses.keys.clone(), witnesses.quorum);
    let (mut piece, mut read, mut progress) = (vec![0; 256 << 10], 0, Progress::new(total, "bytes"));
    loop {
        match input.read(&mut piece).context("the export cannot be read")? {
            0 => break,
            some => {
                verifier.push(&piece[..some]);
                read += some as u64;
                progress.at(read);
            }
        }
    }
    let of = |verifier: &Verifier| (verifier.next_version(), verifier.first_version(), verifier.signed());
    let (versions, first, signed) = verifier.verifier().map_or((0, 0, 0), of);
    let witnessed = verifier.verifier().and_then(|verifier| witnesses.covered(verifier));
    Ok(Outcome { versions, first, witnessed, signed, whose, faults: verifier.finish() })
}

fn proof(
    file: &Path,
    roots: &TrustRoots,
    log: &NoteKey,
    witnesses: &Witnesses,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let bytes = std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
    let checked = ProofFile::parse(&bytes).and_then(|proof| {
        let version = proof.subject.entry.record().version;
        proof.verify(roots, log, &witnesses.keys, witnesses.quorum).map(|checkpoint| (version, checkpoint))
    });
    match checked {
        Ok((version, checkpoint)) if json => {
            print(&json!({"good": true, "version": version, "size": checkpoint.size}).to_string())
        }
        Err(error) if json => {
            print(&json!({"good": false, "what": error.to_string()}).to_string())?;
            Ok(ExitCode::FAILURE)
        }
        Ok((version, checkpoint)) => {
            let seen = match witnesses.quorum {
                0 => String::new(),
                quorum => format!(", cosigned by {quorum} or more of {} witnesses", witnesses.keys.len()),
            };
            let (origin, size) = (checkpoint.origin, checkpoint.size);
            print(&format!("good: version {version} is in {origin} at size {size}{seen}"))
        }
        Err(error) => {
            print(&error.to_string())?;
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Checks what a registry that does not run has kept, and changes nothing there.
fn folder(
    dir: &Path,
    roots: TrustRoots,
    (log, whose): (Option<NoteKey>, Whose),
    witnesses: Witnesses,
) -> anyhow::Result<Outcome> {
    anyhow::ensure!(dir.join(FILE).exists(), "{} holds no registry", dir.display());
    let log = log.or_else(|| key_beside(&dir.join(".."), &roots));
    let whose = if log.is_some() { whose } else { Whose::Unknown };
    // What the database says of a page that makes no sense is of no use to whoever reads the outcome.
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let pages =
        has_good_pages(dir).with_context(|| format!("the registry in {} cannot be read", dir.display()));
    if matches!(pages, Ok(false)) {
        // Said first: reading such a page may end all.
        eprintln!("ron: {FILE} has a page that is not what was written: it is damaged");
    }
    let found = pages.and_then(|pages| {
        let mut found = look(dir, roots, log, (whose, &witnesses))?;
        if !pages && found.faults.is_empty() {
            let version = found.versions.saturating_sub(1);
            found.faults.push(Fault { version, kind: FaultKind::Page });
        }
        Ok(found)
    });
    std::panic::set_hook(usual);
    found
}

/// The same once it is known whether the database itself is whole.
fn look(
    dir: &Path,
    roots: TrustRoots,
    log: Option<NoteKey>,
    (whose, witnesses): (Whose, &Witnesses),
) -> anyhow::Result<Outcome> {
    reading(dir, || {
        let store = Store::look(dir, &roots)
            .with_context(|| format!("the registry in {} cannot be read", dir.display()))?;
        let verifier = Verifier::new(roots, log.clone(), Signatures::Check);
        let verifier = verifier.witnessed_by(witnesses.keys.clone(), witnesses.quorum);
        Ok(outcome(kept(&store.reader()?, verifier, log.is_some())?, whose, witnesses))
    })
}

/// Everything that a store holds; its signed notes only if the log's key is known.
fn kept(reader: &Reader, mut verifier: Verifier, signed: bool) -> anyhow::Result<Verifier> {
    let (head, min) = (reader.head()?, reader.min_version()?);
    anyhow::ensure!(
        signed || min == 0,
        "a pruned log can be checked with its key alone: give --log-key ed25519:…"
    );
    let mut states = Vec::new();
    if signed {
        begin(&mut verifier, reader, min)?;
        let mut up_to = Some(u64::MAX);
        while let Some(at) = up_to
            && let Some(found) = reader.snapshot(at)?
            && found.0 >= min
        {
            up_to = found.0.checked_sub(1);
            states.push(found);
        }
    }
    // A HEAD that names more than there is has been changed.
    let end = head.version.min(reader.last_version()?.map_or(0, |last| last.saturating_add(1)));
    let mut progress = Progress::new(end + 1, "entries");
    let mut step = |version| {
        progress.at(version);
        ControlFlow::Continue(())
    };
    let mut run = |verifier: &mut Verifier, to: u64| {
        verifier.run(to, |version| reader.pair(version), |tile| reader.tile(tile), &mut step)
    };
    for (version, note, state) in states.iter().rev() {
        run(&mut verifier, end.min(*version))?;
        verifier.snapshot(note, state);
    }
    run(&mut verifier, end)?;
    if verifier.state().map(State::head) != Some(head) {
        verifier.fault(end, FaultKind::Head);
    }
    for id in reader.proposals()? {
        let found = match reader.proposal(id) {
            Err(StoreError::Damaged(_)) => None,
            found => found?.map(|found| Proposal::parse_canonical(found.payload)),
        };
        if !matches!(found, Some(Ok(proposal)) if proposal.b3() == id) {
            verifier.fault(head.version, FaultKind::Pending(id));
        }
    }
    Ok(verifier)
}

/// Begins with the signed notes and, of a pruned log, with what stands for the entries that are gone.
fn begin(verifier: &mut Verifier, reader: &Reader, min: u64) -> anyhow::Result<()> {
    let manifests = reader.manifests()?;
    let begins = manifests.iter().filter_map(|note| verifier.prune_manifest(note)).max();
    if begins.unwrap_or(0) != min {
        verifier.fault(min, FaultKind::Manifest);
    }
    for (_, note) in reader.checkpoints(0..=u64::MAX)? {
        verifier.checkpoint(&note);
    }
    if min == 0 {
        return Ok(());
    }
    for (record, payload) in reader.former_signers()? {
        verifier.early_entry(&record, &payload);
    }
    for index in 0..min.div_ceil(TILE_WIDTH) {
        let width = (min - index * TILE_WIDTH).min(TILE_WIDTH) as u16;
        let hashes = reader.sure_tile(Tile { level: 0, index, width })?;
        hashes.as_chunks::<32>().0.iter().for_each(|leaf| verifier.pruned_leaf(*leaf));
    }
    let snapshot = reader.snapshot(min - 1)?.filter(|(version, _, _)| *version == min - 1);
    let (_, note, state) = snapshot.context("the snapshot that the log was pruned under is missing")?;
    verifier.begin(&note, &state);
    Ok(())
}

fn outcome(verifier: Verifier, whose: Whose, witnesses: &Witnesses) -> Outcome {
    let (versions, signed) = (verifier.next_version(), verifier.signed());
    let witnessed = witnesses.covered(&verifier);
    Outcome { versions, first: verifier.first_version(), witnessed, signed, whose, faults: verifier.finish() }
}

/// The log's key is the node's, which by default lies beside the registry's folder.
pub(crate) fn key_beside(above: &Path, roots: &TrustRoots) -> Option<NoteKey> {
    let key = PrivateKey::read(&above.join("node.key")).ok()?;
    Some(NoteKey::ed25519(&roots.log, ed25519_dalek::SigningKey::from_bytes(&key.seed()).verifying_key()))
}

/// Checks a registry over HTTP: every entry, every tile, the checkpoint.
fn node(
    registry: &Registry,
    roots: TrustRoots,
    (log, whose): (Option<NoteKey>, Whose),
    witnesses: Witnesses,
) -> anyhow::Result<Outcome> {
    let log = match log {
        Some(log) => log,
        None => log_key(registry)?,
    };
    sound_head(registry)?;
    match registry.get("/registry/0") {
        Err(error) if error.downcast_ref::<Refused>().is_some_and(|refused| refused.status == 410) => {
            return export_of(registry, &roots, (Some(log), whose), witnesses);
        }
        other => other?,
    };
    // The checkpoint first: what it covers must then be there.
    let note = registry.bytes("GET", "/checkpoint", b"")?;
    let shown = registry.get("/registry/head")?;
    let head = shown["version"].as_u64().context("HEAD has no version")?;
    let verifier = Verifier::new(roots, Some(log), Signatures::Check);
    let mut verifier = verifier.witnessed_by(witnesses.keys.clone(), witnesses.quorum);
    verifier.checkpoint(&note);
    let in_head = &shown["checkpoint"];
    let note = in_head["note"].as_str().unwrap_or_default();
    verifier.checkpoint(note.as_bytes());
    let mut lines = note.lines().skip(1);
    let says =
        |member: &str| in_head[member].as_str().map_or_else(|| in_head[member].to_string(), str::to_owned);
    let is_same = [lines.next(), lines.next()] == [Some(&*says("size")), Some(&*says("root"))];
    let mut ahead: VecDeque<Served> = VecDeque::new();
    let mut last = None;
    let read = |version: u64| -> anyhow::Result<Option<(Vec<u8>, Vec<u8>)>> {
        if ahead.is_empty() {
            ahead = page(registry, version, head)?;
        }
        let next = ahead.pop_front().filter(|found| found.version == version);
        last = next.as_ref().map(|found| B3::of(&found.payload));
        Ok(next.map(|found| (found.record, found.payload)))
    };
    let tile = |tile: Tile| -> anyhow::Result<Option<Vec<u8>>> { tile_of(registry, tile) };
    let mut progress = Progress::new(head + 1, "entries");
    verifier.run(head, read, tile, |version| {
        progress.at(version);
        ControlFlow::Continue(())
    })?;
    let state = verifier.state();
    let expected = [
        ("hash", state.map(|state| state.head().hash.to_string().into())),
        ("payload_b3", last.map(|payload| payload.to_string().into())),
        ("signers_version", state.map(|state| state.signers_version().into())),
    ];
    let differs = |(member, value): (&str, Option<Value>)| shown[member] != value.unwrap_or(Value::Null);
    if !is_same || expected.into_iter().any(differs) {
        verifier.fault(head, FaultKind::Head);
    }
    Ok(outcome(verifier, whose, &witnesses))
}

/// The version of the last entry, and what the node says if its store is damaged.
pub(crate) fn head(registry: &Registry) -> anyhow::Result<(u64, Option<String>)> {
    let head = registry.get("/registry/head")?;
    let version = head["version"].as_u64().context("HEAD has no version")?;
    let damage = head["damaged"].as_str().map(|damage| {
        format!(
            "{damage}, says the node, and what comes after version {version} cannot be relied on; \
             `ron registry verify --dir` on its folder says more"
        )
    });
    Ok((version, damage))
}

/// The version of the last entry, if the node says that it is.
pub(crate) fn sound_head(registry: &Registry) -> anyhow::Result<u64> {
    let (version, damage) = head(registry)?;
    damage.map_or(Ok(version), |damage| Err(anyhow::Error::msg(damage)))
}

/// The key that a node says is its log's.
pub(crate) fn log_key(registry: &Registry) -> anyhow::Result<NoteKey> {
    let line = registry.bytes("GET", "/registry/log-key", b"")?;
    let key = std::str::from_utf8(&line).ok().and_then(|line| NoteKey::parse(line.trim()));
    key.with_context(|| format!("the node at {} gives no log key", registry.address))
}

/// Hashes of a tile; one that has become full since stands for its partial self.
pub(crate) fn tile_of(registry: &Registry, tile: Tile) -> anyhow::Result<Option<Vec<u8>>> {
    for tile in [tile, Tile { width: TILE_WIDTH as u16, ..tile }] {
        match registry.bytes("GET", &format!("/tile/{}", TilePath::Hashes(tile)), b"") {
            Ok(hashes) => return Ok(Some(hashes)),
            Err(error) if error.downcast_ref::<Refused>().is_some_and(|refused| refused.status == 404) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Records and payloads as they were hashed, made again from what the node shows.
fn page(registry: &Registry, from: u64, head: u64) -> anyhow::Result<VecDeque<Served>> {
    let limit = (head - from + 1).min(256);
    let bytes = registry.bytes("GET", &format!("/registry/log?from={from}&limit={limit}"), b"")?;
    // Read by the registry's own reader: another may round a number, and the hash would differ.
    let json = Json::parse_around(&bytes).context("the log is no JSON")?;
    let entries = json.member("entries").and_then(Json::list).context("the log has no entries")?;
    Ok(entries.iter().map(Served::of).collect::<Result<_, _>>()?)
}

/// Of a pruned log, the export says all that is left.
fn export_of(
    registry: &Registry,
    roots: &TrustRoots,
    log: (Option<NoteKey>, Whose),
    witnesses: Witnesses,
) -> anyhow::Result<Outcome> {
    let asked = Asked {
        method: "GET",
        path: "/registry/export",
        headers: &[],
        body: b"",
        silence_max: Duration::from_secs(60),
    };
    let response = registry.ask(&asked)?;
    if response.status != 200 {
        let status = response.status;
        return Err(super::node::refused(status, &registry.whole(response)?).into());
    }
    let total = response.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    export(response.body, total, roots, log, witnesses)
}
