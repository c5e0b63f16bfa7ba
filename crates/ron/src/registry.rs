//! `ron registry …`: what signers, auditors and operators do, with files alone or with a node.

mod archive;
mod change;
mod look;
mod node;
mod proof;
mod verify;

pub(crate) use change::Proposing;
pub(crate) use node::Target;
pub(crate) use node::head_of;
pub(crate) use verify::Options as VerifyOptions;

use crate::Usage;
use crate::cli::RegistryCommand;
use crate::commands::print;
use crate::secret::signing_keys;
use anyhow::Context as _;
use change::Change;
use node::Registry;
use ron_log::key::PublicKey;
use ron_log::signers::is_signer_id;
use ron_log::{Approval, B3, Proposal, Role, Signer, SignerSet, TrustRoots};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub(crate) fn run(command: RegistryCommand) -> anyhow::Result<ExitCode> {
    use RegistryCommand as C;
    match command {
        C::Genesis { log, threshold, signer, out, json } => genesis(log, threshold, &signer, &out, json),
        C::Sign { proposal, key, signer, out, yes } => sign(&proposal, (&key, &signer), out.as_deref(), yes),
        C::Witness(options) => crate::witness::run(options),
        C::Verify(options) => verify::run(&options),
        C::Import { file, dir, trust_roots, log_key, unsigned, json } => {
            archive::import(&file, &dir, &trust_roots, log_key.as_deref(), (unsigned, json))
        }
        C::Head { target } => look::head(&Registry::find(&target)?),
        C::Items { kind, id, at, target } => {
            look::items(&Registry::find(&target)?, kind.as_deref(), id.as_deref(), at)
        }
        C::Get { version, target } => look::get(&Registry::find(&target)?, version),
        C::Log { from, limit, target } => look::log(&Registry::find(&target)?, from, limit),
        C::Watch { from, target } => look::watch(&Registry::find(&target)?, from),
        C::Proposals { id, target } => look::proposals(&Registry::find(&target)?, id.as_deref()),
        C::Propose { file, proposing, target } => {
            change::propose(&Registry::find(&target)?, &Change::File(&file), &proposing)
        }
        C::Put { kind, id, file, proposing, target } => {
            change::propose(&Registry::find(&target)?, &Change::Put(&kind, &id, &file), &proposing)
        }
        C::Delete { kind, id, proposing, target } => {
            change::propose(&Registry::find(&target)?, &Change::Delete(&kind, &id), &proposing)
        }
        C::Approve { id, key, signer, approval, yes, target } => {
            let key = signer.as_deref().map(|signer| (key.as_slice(), signer));
            change::approve(&Registry::find(&target)?, &id, key, approval.as_deref(), yes)
        }
        C::Withdraw { id, target } => change::withdraw(&Registry::find(&target)?, &id),
        C::Supersede { target } => change::supersede(&Registry::find(&target)?),
        C::Commit { id, wait, target } => change::commit(&Registry::find(&target)?, &id, wait.as_deref()),
        C::Proof { version, out, trust_roots, target } => {
            proof::proof(&Registry::find(&target)?, version, &out, trust_roots.as_deref())
        }
        C::Evidence { kept, out, target } if kept.is_empty() => proof::found(&target, out.as_deref()),
        C::Evidence { kept, out, target } => {
            proof::evidence(&Registry::find(&target)?, &kept, out.as_deref())
        }
        C::Export { file, force, target } => archive::export(&Registry::find(&target)?, &file, force),
    }
}

/// Makes the trust roots and prints what pins them.
fn genesis(
    log: String,
    threshold: u64,
    signers: &[String],
    out: &Path,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let signers = signers.iter().map(|text| signer(text)).collect::<Result<Vec<_>, _>>()?;
    let majority = signers.len() as u64 / 2 + 1;
    if threshold < majority {
        let wants = format!("a majority must approve, of {} signers at least {majority}", signers.len());
        return Err(Usage(format!("--threshold {threshold}: {wants}")).into());
    }
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
    let pin = roots.b3().to_string();
    if json {
        let file = out.display().to_string();
        return print(&serde_json::json!({"trust_roots_b3": pin, "file": file}).to_string());
    }
    print(&pin)
}

/// `NAME=ed25519:…`, or two keys with a comma for a hybrid signer. It may approve: there is nothing else that the set
/// decides.
fn signer(text: &str) -> Result<Signer, Usage> {
    let wrong = |why: String| Usage(format!("--signer {text}: {why}"));
    let (id, keys) = text.split_once('=').ok_or_else(|| wrong("expected NAME=ed25519:…".to_owned()))?;
    let keys = keys.split(',').map(PublicKey::parse).collect::<Result<Vec<_>, _>>();
    let keys = keys.map_err(|error| wrong(error.to_string()))?;
    Ok(Signer { id: id.to_owned(), keys, roles: vec![Role::Approve], not_after: None })
}

/// Signs a proposal, given as its file or its id, and prints the approval.
fn sign(
    proposal: &str,
    (keys, signer): (&[PathBuf], &str),
    out: Option<&Path>,
    yes: bool,
) -> anyhow::Result<ExitCode> {
    let payload_b3 = match B3::parse(proposal) {
        Some(id) => {
            eprintln!("{id} is all that is known of it: its file would show what it changes");
            id
        }
        None => {
            let bytes = std::fs::read(proposal)
                .with_context(|| format!("{proposal} is neither an id (b3:…) nor a file that can be read"))?;
            let parsed = Proposal::parse(&bytes).with_context(|| format!("{proposal} is no proposal"))?;
            eprint!("{}", change::described(parsed.payload()) + &change::operations(parsed.payload())?);
            parsed.b3()
        }
    };
    change::may_sign(yes)?;
    let approval = signed(payload_b3, keys, signer)?;
    match out {
        None => print(&approval),
        Some(out) => {
            std::fs::write(out, approval + "\n")
                .with_context(|| format!("{} cannot be written", out.display()))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// An approval with the keys of these files, as it is sent.
fn signed(payload_b3: B3, keys: &[PathBuf], signer: &str) -> anyhow::Result<String> {
    if !is_signer_id(signer) {
        let wants = "a signer's name is 1 to 128 visible ASCII characters, not \" or \\";
        return Err(Usage(format!("--signer {signer}: {wants}")).into());
    }
    let approval = Approval::sign_with(signer, &signing_keys(keys)?, payload_b3, change::now()?).canonical();
    Approval::parse(approval.as_bytes()).map_err(|error| Usage(format!("--signer {signer}: {error}")))?;
    Ok(approval)
}
