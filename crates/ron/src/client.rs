//! Finding a running node, and asking its admin plane.

use crate::Usage;
use crate::http1::{self, Asked};
use anyhow::Context as _;
use clap::Args;
use http::Uri;
use ron::config::{Config, sources};
use ron_kernel::config::{Problems, attempt};
use ron_kernel::key::PrivateKey;
use ron_kernel::node::DataDir;
use ron_kernel::token::Grant;
use serde_json::Value;
use std::io::{ErrorKind, Read as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A reload reads files and may wait for a slow disk.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// A stream shows a sign of life more often than this.
const STREAM_SILENCE: Duration = Duration::from_secs(60);
/// The longest answer that is read.
const ANSWER_MAX: u64 = 64 << 20;

/// Which node.
#[derive(Clone, Debug, Args)]
pub(crate) struct Target {
    /// Base URL: of the edge, such as http://127.0.0.1:8081, for what is stored there; else of the node's admin listener,
    /// such as http://127.0.0.1:9600.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The node's configuration file, which leads to its addresses and token. Without this and --url: ./ron-data.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A capability for the edge, otherwise RON_TOKEN or one made with the node's key; for the admin listener its token,
    /// otherwise RON_ADMIN__TOKEN, the node's token file, or RON_TOKEN.
    #[arg(long, value_name = "T")]
    token: Option<String>,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// How long a capability lives that is made for one command; an upload may take a while.
const OWN_TTL: Duration = Duration::from_secs(3600);

impl Target {
    /// The files that lead to the node, if they do: its configuration, or none for ./ron-data.
    pub(crate) fn files(&self) -> Option<Option<&Path>> {
        self.url.is_none().then_some(self.config.as_deref())
    }

    /// The node of a configuration file, or of `./ron-data`.
    pub(crate) fn of_file(config: Option<PathBuf>, json: bool) -> Target {
        Target { url: None, config, token: None, json }
    }

    /// The address of the edge's plain listener, and a capability for it if there is one.
    pub(crate) fn edge(&self, scopes: &[&str]) -> anyhow::Result<(String, Option<String>)> {
        let sent =
            self.token.clone().or_else(|| std::env::var("RON_TOKEN").ok().filter(|token| !token.is_empty()));
        let named =
            self.url.as_ref().map(|url| address_of(url, "the edge's URL, such as http://127.0.0.1:8081"));
        let named = named.transpose()?;
        if let (Some(address), None) = (&named, &self.config) {
            return Ok((address.clone(), sent));
        }
        let Found { config, data, problems } = Found::read(self.config.as_deref())?;
        let written = |addresses: &Value| addresses["edge"]["http"].as_str().map(str::to_owned);
        let address = match named {
            Some(address) => address,
            None => match address(&data, "edge", written, ("edge.listen", config.edge.listen)) {
                Err(_unknown) if !problems.is_empty() => return Err(problems.into()),
                known => known?.0,
            },
        };
        Ok((address, sent.or_else(|| own_capability(&data, &config, "edge", scopes))))
    }
}

/// A capability for this command only, made with the node's key: whoever can read that may do anything with it.
pub(crate) fn own_capability(
    data: &DataDir,
    config: &Config,
    service: &str,
    scopes: &[&str],
) -> Option<String> {
    let key = PrivateKey::read(&data.join(&config.node.key_file)).ok()?;
    let scopes = scopes.iter().map(|scope| (*scope).to_owned()).collect();
    let grant = Grant { scopes, audience: Some(service.to_owned()), ttl: Some(OWN_TTL), ..Grant::default() };
    grant.mint(&key, SystemTime::now()).ok()
}

/// The admin plane of a node.
#[derive(Debug)]
pub(crate) struct Admin {
    /// `host:port`
    address: String,
    /// What said so.
    known_from: String,
    token: Option<String>,
}

/// An answer of it.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Value,
}

/// What is said when nobody answers.
pub(crate) fn no_answer(address: &str, known_from: &str) -> String {
    format!(
        "no node answers at {address} (known from {known_from}): start it with `ron up`, or name another with --url or --config"
    )
}

/// What a node's files say.
struct Files {
    admin: Option<(String, String)>,
    token: anyhow::Result<Option<String>>,
}

impl Admin {
    /// The node that the arguments mean.
    pub(crate) fn find(target: &Target) -> anyhow::Result<Admin> {
        // A token found beside one node is not sent to another that only its address names.
        let files = match (&target.config, &target.url) {
            (None, Some(_)) => Files { admin: None, token: Ok(None) },
            (config, url) => Files::read(config.as_deref(), url.is_none())?,
        };
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let token = match target.token.clone().or_else(|| variable("RON_ADMIN__TOKEN")) {
            Some(token) => Some(token),
            None => files.token?.or_else(|| variable("RON_TOKEN")),
        };
        let (address, known_from) = match (&target.url, files.admin) {
            (Some(url), _) => (
                address_of(url, "the admin listener's URL, such as http://127.0.0.1:9600")?,
                "--url".to_owned(),
            ),
            (None, Some(known)) => known,
            (None, None) => unreachable!("without --url the files were asked for an address"),
        };
        Ok(Admin { address, known_from, token })
    }

    /// One request, on a connection of its own.
    pub(crate) fn ask(&self, method: &str, path: &str, body: &str) -> anyhow::Result<Answer> {
        self.send(method, path, &[], body.as_bytes())
    }

    /// The same with header fields and any bytes.
    pub(crate) fn send(
        &self,
        method: &str,
        path: &str,
        fields: &[(&str, &str)],
        body: &[u8],
    ) -> anyhow::Result<Answer> {
        let response = self.request(method, path, fields, body, ANSWER_TIMEOUT)?;
        self.read(response)
    }

    /// The whole answer whatever it is, if the node is never silent for longer.
    pub(crate) fn fetch(&self, path: &str, silence_max: Duration) -> anyhow::Result<(u16, Vec<u8>)> {
        let response = self.request("GET", path, &[], b"", silence_max)?;
        let (status, mut raw) = (response.status, Vec::new());
        let read = response.body.take(ANSWER_MAX).read_to_end(&mut raw);
        read.with_context(|| format!("the node at {} did not answer", self.address))?;
        Ok((status, raw))
    }

    /// `host:port`
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// What the node sends for as long as it lives, if it sends anything at all.
    pub(crate) fn stream(&self, path: &str) -> anyhow::Result<http1::BodyReader> {
        let response = self.request("GET", path, &[], b"", STREAM_SILENCE)?;
        if response.status == 200 {
            return Ok(response.body);
        }
        anyhow::bail!("{}", crate::table::text(&self.read(response)?.body["detail"]))
    }

    fn request(
        &self,
        method: &str,
        path: &str,
        fields: &[(&str, &str)],
        body: &[u8],
        silence_max: Duration,
    ) -> anyhow::Result<http1::Response> {
        let bearer = self.token.as_ref().map(|token| format!("Bearer {token}"));
        let mut headers: Vec<_> = bearer.iter().map(|bearer| ("Authorization", bearer.as_str())).collect();
        headers.extend_from_slice(fields);
        let asked = Asked { method, path, headers: &headers, body, silence_max };
        http1::ask(&self.address, &asked).map_err(|error| self.silent(error))
    }

    fn read(&self, response: http1::Response) -> anyhow::Result<Answer> {
        let (status, mut raw) = (response.status, Vec::new());
        let read = response.body.take(ANSWER_MAX).read_to_end(&mut raw);
        read.with_context(|| format!("the node at {} did not answer", self.address))?;
        self.check(Answer { status, body: serde_json::from_slice(&raw).unwrap_or_default() })
    }

    fn silent(&self, error: std::io::Error) -> anyhow::Error {
        if matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::UnexpectedEof) {
            return anyhow::anyhow!(self.stranger());
        }
        anyhow::Error::from(error).context(no_answer(&self.address, &self.known_from))
    }

    pub(crate) fn stranger(&self) -> String {
        format!(
            "what answers at {} is no admin plane of a ron node; see the node's addresses.json",
            self.address
        )
    }

    /// Refusals that have the same cause for every command.
    fn check(&self, answer: Answer) -> anyhow::Result<Answer> {
        let advice =
            "name the node's file with --config FILE, or give the token with --token T or RON_ADMIN__TOKEN";
        anyhow::ensure!(answer.body.is_object(), self.stranger());
        match (answer.status, &self.token) {
            (401, None) => anyhow::bail!("the node at {} wants its admin token: {advice}", self.address),
            (401, Some(_)) => {
                anyhow::bail!("the node at {} does not take this admin token: {advice}", self.address)
            }
            (404, _) => {
                anyhow::bail!(
                    "the node at {} does not run that service, or is of another version",
                    self.address
                )
            }
            _ => Ok(answer),
        }
    }
}

impl Files {
    /// What the configuration and the files of its data folder say; an address only if it is needed.
    fn read(config: Option<&Path>, needs_address: bool) -> anyhow::Result<Files> {
        let Found { config, data, problems } = Found::read(config)?;
        let token_file = data.join(&config.admin.token_file);
        let token = match std::fs::read_to_string(&token_file) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(anyhow::anyhow!(
                "cannot read the admin token in {}: {error}; become the user that the node runs as, or give --token T",
                token_file.display()
            )),
        };
        let admin = needs_address.then(|| {
            let written = |addresses: &Value| addresses["admin"].as_str().map(str::to_owned);
            address(&data, "admin", written, ("admin.listen", config.admin.listen))
        });
        let admin = match admin.transpose() {
            Err(_unknown) if !problems.is_empty() => return Err(problems.into()),
            admin => admin?,
        };
        Ok(Files { admin, token })
    }
}

/// A node's configuration and its data folder.
pub(crate) struct Found {
    pub(crate) config: Config,
    pub(crate) data: DataDir,
    /// What is wrong with the file, which still says where the node is.
    pub(crate) problems: Problems,
}

impl Found {
    /// The node of a file, or that of `./ron-data`.
    pub(crate) fn read(config: Option<&Path>) -> anyhow::Result<Found> {
        let mut all = sources(&[])?;
        let beside = Path::new("ron-data");
        match config {
            Some(file) => all.read_file(file)?,
            None if beside.join("ron.toml").exists() => all.read_file(&beside.join("ron.toml"))?,
            None if beside.exists() => {
                all.flags.push(("node.data".to_owned(), "ron-data".to_owned(), "the default".to_owned()));
            }
            None => {
                let advice = "name a node with --config FILE or --url URL, or change to the folder that holds ron-data";
                return Err(Usage(format!("there is no ./ron-data here: {advice}")).into());
            }
        }
        // A file with mistakes still says where the node is; that must be known most of all when something is wrong.
        let (loaded, problems) = attempt::<Config>(&all);
        let data = DataDir::of(&loaded.value.node, loaded.file.as_deref());
        Ok(Found { config: loaded.value, data, problems })
    }
}

/// Where a node listens: as it wrote itself, or as configured if it keeps no files.
pub(crate) fn address(
    data: &DataDir,
    listener: &str,
    known: impl Fn(&Value) -> Option<String>,
    (key, configured): (&str, SocketAddr),
) -> anyhow::Result<(String, String)> {
    let written = data.join("addresses.json");
    if let Ok(text) = std::fs::read_to_string(&written) {
        let addresses: Value = serde_json::from_str(&text).with_context(|| written.display().to_string())?;
        let known = known(&addresses);
        let known = known.with_context(|| {
            format!("the node of {} runs no {listener}: start it with that service", written.display())
        })?;
        return Ok((known, written.display().to_string()));
    }
    if configured.port() != 0 {
        return Ok((configured.to_string(), key.to_owned()));
    }
    anyhow::bail!(
        "no node runs in {}: there is no {}; start it with `ron up`, or name another with --url or --config",
        data.path().display(),
        written.display()
    )
}

/// `host:port` of a plain URL; `such_as` is an example of one.
pub(crate) fn address_of(url: &str, such_as: &str) -> Result<String, Usage> {
    let wrong = || Usage(format!("--url {url}: expected {such_as}"));
    let uri: Uri = url.parse().map_err(|_bad| wrong())?;
    let plain = uri.scheme_str() == Some("http") && uri.path() == "/" && uri.query().is_none();
    let authority =
        uri.authority().filter(|authority| plain && !authority.as_str().contains('@')).ok_or_else(wrong)?;
    Ok(if authority.port().is_some() { authority.to_string() } else { format!("{authority}:80") })
}
