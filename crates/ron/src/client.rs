//! Finding a running node, and asking its admin plane.

use crate::Usage;
use anyhow::Context as _;
use clap::Args;
use http::Uri;
use ron::config::{Config, sources};
use ron_kernel::config::attempt;
use ron_kernel::node::DataDir;
use serde_json::Value;
use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A reload reads files and may wait for a slow disk.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest answer that is read.
const ANSWER_MAX: u64 = 64 << 20;

/// Which node.
#[derive(Clone, Debug, Args)]
pub(crate) struct Target {
    /// Base URL of the node's admin listener, such as http://127.0.0.1:9600.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The node's configuration file, which leads to its addresses and token. Without this and --url: ./ron-data.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The admin token. Otherwise RON_ADMIN__TOKEN, the node's token file, or RON_TOKEN.
    #[arg(long, value_name = "T")]
    token: Option<String>,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
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
            (Some(url), _) => (address_of(url)?, "--url".to_owned()),
            (None, Some(known)) => known,
            (None, None) => unreachable!("without --url the files were asked for an address"),
        };
        Ok(Admin { address, known_from, token })
    }

    /// One request, on a connection of its own.
    pub(crate) fn ask(&self, method: &str, path: &str, body: &str) -> anyhow::Result<Answer> {
        let address = &self.address;
        let silent = || {
            format!(
                "no node answers at {address} (known from {}): start it with `ron up`, or name another with --url or --config",
                self.known_from
            )
        };
        let resolved = address.to_socket_addrs().with_context(silent)?.next().with_context(silent)?;
        let mut stream = TcpStream::connect_timeout(&resolved, CONNECT_TIMEOUT).with_context(silent)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        let token = self
            .token
            .as_ref()
            .map_or_else(String::new, |token| format!("Authorization: Bearer {token}\r\n"));
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\n{token}Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        let broken = || format!("the node at {address} did not answer");
        stream.write_all(request.as_bytes()).with_context(broken)?;
        let mut raw = Vec::new();
        let mut stream = stream.take(ANSWER_MAX);
        let answer = loop {
            let mut piece = [0; 16 << 10];
            let read = stream.read(&mut piece).with_context(broken)?;
            raw.extend_from_slice(&piece[..read]);
            if let Some(answer) = parse(&raw) {
                break answer;
            }
            anyhow::ensure!(read > 0, self.stranger());
        };
        self.check(answer)
    }

    fn stranger(&self) -> String {
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
                anyhow::bail!("the node at {} runs no gateway, or is of another version", self.address)
            }
            _ => Ok(answer),
        }
    }
}

impl Files {
    /// What the configuration and the files of its data folder say; an address only if it is needed.
    fn read(config: Option<&Path>, needs_address: bool) -> anyhow::Result<Files> {
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
        let token_file = data.join(&loaded.value.admin.token_file);
        let token = match std::fs::read_to_string(&token_file) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(anyhow::anyhow!(
                "cannot read the admin token in {}: {error}; become the user that the node runs as, or give --token T",
                token_file.display()
            )),
        };
        let admin = match needs_address.then(|| admin_address(&data, &loaded.value)).transpose() {
            Err(_unknown) if !problems.is_empty() => return Err(problems.into()),
            admin => admin?,
        };
        Ok(Files { admin, token })
    }
}

/// Where the node listens: as it wrote itself, or as configured if it keeps no files.
fn admin_address(data: &DataDir, config: &Config) -> anyhow::Result<(String, String)> {
    let written = data.join("addresses.json");
    if let Ok(text) = std::fs::read_to_string(&written) {
        let addresses: Value = serde_json::from_str(&text).with_context(|| written.display().to_string())?;
        let admin = addresses["admin"].as_str();
        let admin = admin.with_context(|| format!("{} names no admin listener", written.display()))?;
        return Ok((admin.to_owned(), written.display().to_string()));
    }
    if config.admin.listen.port() != 0 {
        return Ok((config.admin.listen.to_string(), "admin.listen".to_owned()));
    }
    anyhow::bail!(
        "no node runs in {}: there is no {}; start it with `ron up`, or name another with --url or --config",
        data.path().display(),
        written.display()
    )
}

fn address_of(url: &str) -> Result<String, Usage> {
    let wrong =
        || Usage(format!("--url {url}: expected the admin listener's URL, such as http://127.0.0.1:9600"));
    let uri: Uri = url.parse().map_err(|_bad| wrong())?;
    let plain = uri.scheme_str() == Some("http") && uri.path() == "/" && uri.query().is_none();
    let authority =
        uri.authority().filter(|authority| plain && !authority.as_str().contains('@')).ok_or_else(wrong)?;
    Ok(if authority.port().is_some() { authority.to_string() } else { format!("{authority}:80") })
}

/// A whole HTTP/1.1 answer, if it is one; a body that is no JSON is an empty one.
fn parse(raw: &[u8]) -> Option<Answer> {
    let end = raw.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    let head = std::str::from_utf8(&raw[..end]).ok()?.to_ascii_lowercase();
    let status = head.strip_prefix("http/1.1 ")?.get(..3)?.parse().ok()?;
    let length: usize =
        head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok())?;
    let body = raw.get(end..)?.get(..length)?;
    Some(Answer { status, body: serde_json::from_slice(body).unwrap_or_default() })
}
