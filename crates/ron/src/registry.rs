//! `ron registry …`: what signers and auditors do with files alone.

use crate::Usage;
use crate::cli::RegistryCommand;
use crate::commands::print;
use anyhow::Context as _;
use ron_kernel::key::PrivateKey;
use ron_log::export::ExportVerifier;
use ron_log::key::PublicKey;
use ron_log::note::NoteKey;
use ron_log::proof::ProofFile;
use ron_log::verify::Signatures;
use ron_log::{Approval, B3, Proposal, Role, Signer, SignerSet, TrustRoots};
use std::io::Read as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

pub(crate) fn run(command: RegistryCommand) -> anyhow::Result<ExitCode> {
    match command {
        RegistryCommand::Genesis { log, threshold, signer, out } => genesis(log, threshold, &signer, &out),
        RegistryCommand::Sign { proposal, key, signer, out } => {
            sign(&proposal, &key, &signer, out.as_deref())
        }
        RegistryCommand::Witness(options) => crate::witness::run(options),
        RegistryCommand::Verify { export, proof, trust_roots, log_key } => {
            let bytes = std::fs::read(&trust_roots)
                .with_context(|| format!("{} cannot be read", trust_roots.display()))?;
            let roots = TrustRoots::parse(&bytes)
                .with_context(|| format!("{} holds no trust roots", trust_roots.display()))?;
            let log = log_key.map(|text| note_key(&roots, &text)).transpose()?;
            match (export, proof) {
                (Some(file), None) => verify_export(&file, &roots, log),
                (None, Some(file)) => {
                    let log = log.ok_or_else(|| {
                        Usage("--proof needs --log-key: the log's own key is what makes it one".to_owned())
                    })?;
                    verify_proof(&file, &roots, &log)
                }
                _ => Err(Usage("say what to verify: --export FILE or --proof FILE".to_owned()).into()),
            }
        }
    }
}

/// Makes the trust roots and prints what pins them.
fn genesis(log: String, threshold: u64, signers: &[String], out: &Path) -> anyhow::Result<ExitCode> {
    let signers = signers.iter().map(|text| signer(text)).collect::<Result<Vec<_>, _>>()?;
    let signers = SignerSet::new(threshold, false, signers).map_err(|misfit| Usage(misfit.to_string()))?;
    let text = TrustRoots { log, signers }.canonical();
    // Read back as anybody will read it.
    let roots = TrustRoots::parse(text.as_bytes()).map_err(|error| Usage(error.to_string()))?;
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(out)
        .with_context(|| format!("{} cannot be made", out.display()))?;
    std::io::Write::write_all(&mut file, (text + "\n").as_bytes())
        .with_context(|| format!("{} cannot be written", out.display()))?;
    print(&roots.b3().to_string())
}

/// `NAME=ed25519:…`, or two keys with a comma for a hybrid signer; it may do everything.
fn signer(text: &str) -> Result<Signer, Usage> {
    let wrong = |why: String| Usage(format!("--signer {text}: {why}"));
    let (id, keys) = text.split_once('=').ok_or_else(|| wrong("expected NAME=ed25519:…".to_owned()))?;
    let keys = keys.split(',').map(PublicKey::parse).collect::<Result<Vec<_>, _>>();
    let keys = keys.map_err(|error| wrong(error.to_string()))?;
    Ok(Signer {
        id: id.to_owned(),
        keys,
        roles: vec![Role::Propose, Role::Approve, Role::Commit],
        not_after: None,
    })
}

/// Signs a proposal, given as its file or its id, and prints the approval.
fn sign(proposal: &str, key: &Path, signer: &str, out: Option<&Path>) -> anyhow::Result<ExitCode> {
    let payload_b3 = match B3::parse(proposal) {
        Some(id) => id,
        None => {
            let bytes = std::fs::read(proposal)
                .with_context(|| format!("{proposal} is neither an id (b3:…) nor a file that can be read"))?;
            Proposal::parse(&bytes).with_context(|| format!("{proposal} is no proposal"))?.b3()
        }
    };
    let key = ed25519_dalek::SigningKey::from_bytes(&PrivateKey::read(key)?.seed());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let approval = Approval::sign(signer, &key, payload_b3, u64::try_from(now.as_millis())?).canonical();
    Approval::parse(approval.as_bytes()).map_err(|error| Usage(format!("--signer {signer}: {error}")))?;
    match out {
        None => print(&approval),
        Some(out) => {
            std::fs::write(out, approval + "\n")
                .with_context(|| format!("{} cannot be written", out.display()))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn note_key(roots: &TrustRoots, text: &str) -> Result<NoteKey, Usage> {
    match PublicKey::parse(text) {
        Ok(PublicKey::Ed25519(key)) => Ok(NoteKey::ed25519(&roots.log, key)),
        _ => Err(Usage(format!("--log-key {text}: expected ed25519:… as the node prints it"))),
    }
}

/// Checks a whole export as it is read; one line for each fault.
fn verify_export(file: &Path, roots: &TrustRoots, log: Option<NoteKey>) -> anyhow::Result<ExitCode> {
    let mut input =
        std::fs::File::open(file).with_context(|| format!("{} cannot be read", file.display()))?;
    let mut verifier = ExportVerifier::new(roots.b3(), log, Signatures::Check);
    let mut piece = vec![0; 1 << 20];
    loop {
        match input.read(&mut piece).with_context(|| format!("{} cannot be read", file.display()))? {
            0 => break,
            read => verifier.push(&piece[..read]),
        }
    }
    let versions = verifier.verifier().map_or(0, ron_log::verify::Verifier::next_version);
    let faults = verifier.finish();
    if faults.is_empty() {
        return print(&format!("good: {versions} entries, whole and approved"));
    }
    for fault in &faults {
        print(&fault.to_string())?;
    }
    Ok(ExitCode::FAILURE)
}

fn verify_proof(file: &Path, roots: &TrustRoots, log: &NoteKey) -> anyhow::Result<ExitCode> {
    let bytes = std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
    let checked = ProofFile::parse(&bytes).and_then(|proof| {
        let version = proof.subject.entry.record().version;
        proof.verify(roots, log, &[], 0).map(|checkpoint| (version, checkpoint))
    });
    match checked {
        Ok((version, checkpoint)) => {
            print(&format!("good: version {version} is in {} at size {}", checkpoint.origin, checkpoint.size))
        }
        Err(error) => {
            print(&error.to_string())?;
            Ok(ExitCode::FAILURE)
        }
    }
}
