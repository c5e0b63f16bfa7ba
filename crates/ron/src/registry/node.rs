//! The registry of a running node: where it is, and what it answers.

use crate::Usage;
use crate::client::{Found, address, address_of, no_answer, own_capability};
use crate::commands::print;
use crate::http1::{self, Asked, Response};
use crate::table::visible;
use anyhow::Context as _;
use clap::Args;
use serde_json::Value;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// A commit may wait for a checkpoint and its witnesses.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(90);
/// The longest answer that is taken as a whole.
const ANSWER_MAX: u64 = 64 << 20;

/// What changes something.
const SCOPES: [&str; 3] = ["registry:propose", "registry:approve", "registry:commit"];

/// Which registry.
#[derive(Clone, Debug, Args)]
pub(crate) struct Target {
    /// Base URL of the registry, such as http://127.0.0.1:8082.
    #[arg(long, value_name = "URL")]
    pub(crate) url: Option<String>,
    /// The node's configuration file, which leads to its address. Without this and --url: ./ron-data.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// A capability, for what changes something. Otherwise RON_TOKEN, or one made with the node's key.
    #[arg(long, value_name = "T")]
    pub(crate) token: Option<String>,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// A registry that can be asked.
#[derive(Debug)]
pub(crate) struct Registry {
    /// `host:port`
    pub(crate) address: String,
    known_from: String,
    token: Option<String>,
    pub(crate) json: bool,
}

impl Registry {
    pub(crate) fn find(target: &Target) -> anyhow::Result<Registry> {
        let mut own = None;
        let (address, known_from) = match &target.url {
            Some(url) => {
                let such_as = "the registry's base URL, such as http://127.0.0.1:8082";
                (address_of(url, such_as)?, "--url".to_owned())
            }
            None => {
                let Found { config, data, problems } = Found::read(target.config.as_deref())?;
                let written = |addresses: &Value| addresses["registry"]["http"].as_str().map(str::to_owned);
                own = own_capability(&data, &config, "registry", &SCOPES);
                match address(&data, "registry", written, ("registry.listen", config.registry.listen)) {
                    Err(_unknown) if !problems.is_empty() => return Err(problems.into()),
                    found => found?,
                }
            }
        };
        let variable = || std::env::var("RON_TOKEN").ok().filter(|value| !value.is_empty());
        let token = target.token.clone().or_else(variable).or(own);
        Ok(Registry { address, known_from, token, json: target.json })
    }

    /// Asks, and gives the answer whatever it is, its body unread.
    pub(crate) fn ask(&self, asked: &Asked<'_>) -> anyhow::Result<Response> {
        let bearer = self.token.as_ref().map(|token| format!("Bearer {token}"));
        let mut headers = asked.headers.to_vec();
        headers.extend(bearer.iter().map(|bearer| ("Authorization", bearer.as_str())));
        http1::ask(&self.address, &Asked { headers: &headers, ..*asked }).map_err(|error| {
            if matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::UnexpectedEof) {
                return anyhow::anyhow!("what answers at {} is no registry", self.address);
            }
            anyhow::Error::from(error).context(no_answer(&self.address, &self.known_from))
        })
    }

    /// The whole answer, if it is a good one.
    pub(crate) fn bytes(&self, method: &str, path: &str, body: &[u8]) -> anyhow::Result<Vec<u8>> {
        let json = [("Content-Type", "application/json")];
        let headers: &[_] = if body.is_empty() { &[] } else { &json };
        let response = self.ask(&Asked { method, path, headers, body, silence_max: ANSWER_TIMEOUT })?;
        let status = response.status;
        let bytes = self.whole(response)?;
        if (200..300).contains(&status) { Ok(bytes) } else { Err(refused(status, &bytes).into()) }
    }

    /// The rest of an answer.
    pub(crate) fn whole(&self, response: Response) -> anyhow::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = response.body.take(ANSWER_MAX).read_to_end(&mut bytes);
        read.with_context(|| format!("the node at {} broke off its answer", self.address))?;
        Ok(bytes)
    }

    pub(crate) fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.value(&self.bytes("GET", path, b"")?)
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> anyhow::Result<Value> {
        self.value(&self.bytes("POST", path, body.as_bytes())?)
    }

    pub(crate) fn delete(&self, path: &str) -> anyhow::Result<Value> {
        self.value(&self.bytes("DELETE", path, b"")?)
    }

    fn value(&self, bytes: &[u8]) -> anyhow::Result<Value> {
        let value = serde_json::from_slice(bytes).ok();
        value.with_context(|| {
            format!("what answers at {} is no registry, or of another version", self.address)
        })
    }

    /// Prints an answer as it came, or for people.
    pub(crate) fn show(
        &self,
        value: &Value,
        human: impl FnOnce(&Value) -> String,
    ) -> anyhow::Result<ExitCode> {
        if self.json { print(&value.to_string()) } else { print(human(value).trim_end()) }
    }
}

/// The last entry of the registry that a file, or ./ron-data, leads to; none if it does not say.
pub(crate) fn head_of(config: Option<&Path>, silence_max: Duration) -> Option<Value> {
    let target = Target { url: None, config: config.map(Path::to_owned), token: None, json: true };
    let registry = Registry::find(&target).ok()?;
    let asked = Asked { method: "GET", path: "/registry/head", headers: &[], body: b"", silence_max };
    let response = registry.ask(&asked).ok().filter(|response| response.status == 200)?;
    serde_json::from_slice(&registry.whole(response).ok()?).ok()
}

/// A refusal, with what to do about it.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) status: u16,
    /// The problem's code; empty if what refused is no node of ours.
    pub(crate) code: String,
    detail: String,
}

pub(crate) fn refused(status: u16, body: &[u8]) -> Refused {
    let problem: Value = serde_json::from_slice(body).unwrap_or_default();
    let text = |member: &str| problem[member].as_str().unwrap_or_default().to_owned();
    Refused { status, code: text("code"), detail: text("detail") }
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Refused { status, code, detail } = self;
        let advice = match code.as_str() {
            "chain_mismatch" => "look at the present state and propose the change anew",
            "policy_changed" => "propose it anew and have it approved under the present signer set",
            "quorum_failed" => {
                "`ron registry proposals` says who has approved; `ron registry approve` adds one"
            }
            "invalid_sig" => {
                "`ron registry items signers main` says which key belongs to which signer; one with two signs with both (--key twice)"
            }
            "revoked_key" => "`ron registry items signers main` says who may approve",
            "duplicate_approval" => "this signer has approved already, with another signature",
            "unauth" | "token_invalid" | "token_expired" | "token_audience" | "forbidden" => {
                "give a capability with --token T or RON_TOKEN; `ron token mint --scope registry:propose,registry:approve,registry:commit --key NODE.KEY` makes one"
            }
            "commit_unknown" => {
                "do not propose it again: `ron registry proposals ID` will say what became of it"
            }
            "busy" | "not_ready" | "draining" | "storage" | "timeout" => "try again later",
            _ => "",
        };
        let code = if code.is_empty() { "refused" } else { code };
        write!(f, "{status} {}: {}", visible(code), visible(detail))?;
        if advice.is_empty() { Ok(()) } else { write!(f, "; {advice}") }
    }
}

impl std::error::Error for Refused {}

/// A proposal's id as the path wants it.
pub(crate) fn id(text: &str) -> Result<&str, Usage> {
    match ron_log::B3::parse(text) {
        Some(_) => Ok(text),
        None => Err(Usage(format!("{text:?} is no proposal's id: expected b3: and 64 digits"))),
    }
}
